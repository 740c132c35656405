"""Errors of later checks get the file and line of the key with which they begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load_cluster, load_run, save_resolved
from streamrl.config.named_files import naming_files
from streamrl.errors import UserError

CLUSTER = """\
hardware: cpu
sites:
  here:
    trainer: {ranks: 1}
    generation:
      - replicas: 1
      - name: tail
        max_batch: 4
"""
RUN = """\
model:
  path: nowhere
  max_context: 512
tasks:
  - {kind: reasoning_gym, name: gcd}
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    Path("run.yaml").write_text(RUN)


def named(message: str, run: Path | None = Path("run.yaml"), overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as found, naming_files(Path("cluster.yaml"), run, overrides):
        raise UserError(message)
    return str(found.value)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("model.path: nowhere is neither a folder", "run.yaml:2"),
        ("model.max_context is 512, expected less", "run.yaml:3"),
        ("tasks.0: task 'reverse': no prompts", "run.yaml:5"),
        ("tasks.0, tasks.1: none of the first prompts fits", "run.yaml:5"),
        ("weights.backend: nccl sends between GPUs", "run.yaml"),
        ("sites.here: cannot listen", "cluster.yaml:3"),
        ("sites.here.trainer.tensor_parallel is 2: expected 1", "cluster.yaml:4"),
        ("sites.here.generation (regular).kv_cache_gb is 1, expected 2", "cluster.yaml:6"),
        ("sites.here.generation (tail).max_batch is 4, expected 2", "cluster.yaml:8"),
    ],
)
def test_a_line_that_begins_with_a_key_gets_the_keys_file_and_line(line: str, where: str) -> None:
    assert named(f"{line}\n--runs-dir runs: cannot write\n{line}") == (
        f"{where}: {line}\n--runs-dir runs: cannot write\n{where}: {line}"
    )


@pytest.mark.parametrize(
    "line",
    [
        *("torch is not installed", "GPU 0 is used by others", "/x/keys: no such key", "model files are missing"),
        *("unknown.key: what is it", "", "  model.path: inside of something longer", "run.yaml:2: model.path: told"),
    ],
)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert named(line) == line


def test_an_override_is_named_in_place_of_the_file() -> None:
    overrides = ("model.path=there", "steps=4")
    assert (
        named("model.path: there is empty", overrides=overrides) == "--set model.path=there: model.path: there is empty"
    )
    assert named("model.path: nowhere", run=None) == "(no run file): model.path: nowhere"


def test_a_run_that_is_continued_has_the_keys_in_its_folder(tmp_path: Path) -> None:
    save_resolved(tmp_path / "mine", load_cluster("cluster.yaml"), load_run("run.yaml"))
    resolved = tmp_path / "mine" / "config.yaml"
    lines = resolved.read_text().splitlines()
    for key, value in (("model.path", "    path: nowhere"), ("sites.here.generation (tail).max_batch", "max_batch: 4")):
        number = next(number for number, line in enumerate(lines, 1) if line.endswith(value.strip()))
        with (
            pytest.raises(UserError, match=rf"^{resolved}:{number}: "),
            naming_files(None, None, (), tmp_path / "mine"),
        ):
            raise UserError(f"{key}: wrong")


def test_a_file_that_has_gone_meanwhile_leaves_the_message_as_it_is() -> None:
    assert named("model.path: nowhere", run=Path("gone.yaml")) == "model.path: nowhere"
