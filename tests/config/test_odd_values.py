"""Values that would lead a run astray are refused by the loader."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest

from streamrl.config.load import ConfigError, load_cluster, load_plain, load_run
from streamrl.config.tasks import ReasoningGymTask
from tests.cli.calling import streamrl

CLUSTER = "hardware: cpu\nsites: {here: {trainer: {}, generation: [{}]}}\n"


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        *((".", False), ("..", False), (".hidden", False), ("-x", False), ("", False), ("a" * 61, False)),
        *(("a", True), ("_a", True), ("7b.v1-x", True), ("a" * 60, True)),
    ],
)
def test_the_name_of_a_run_is_no_other_folder_hidden_file_or_option(
    name: str, valid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.yaml"
    for begin, load in (("", load_run), (CLUSTER, load_cluster)):
        path.write_text(f"{begin}name: '{name}'\n")
        with nullcontext() if valid else pytest.raises(ConfigError, match="expected text that matches"):
            load(path)
    assert streamrl(monkeypatch, "schema", "run") == 0
    checker = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    assert checker.is_valid({"name": name}) is valid


def test_the_number_of_steps_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("steps: 99999999999999999999\n")
    with pytest.raises(ConfigError, match=r":1: 'steps' is 99999999999999999999, expected less than 2147483648"):
        load_run(path)
    assert load_run(None, ["steps=2147483647"]).steps == 2**31 - 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name: !!binary aGVsbG8=\n", "'name' is"),
        ("steps: !!binary Mw==\n", "'steps' is"),
        ("model:\n  path: !!binary aGVsbG8=\n", "'model.path' is"),
        ("!!binary aGVsbG8=: 3\n", "the key"),
    ],
)
def test_bytes_are_no_text_and_no_number(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    for load in (load_run, load_plain):
        with pytest.raises(ConfigError, match=f":[12]: {what} !!binary, which YAML reads as bytes: write it as text"):
            load(path)


def test_bytes_in_an_override_are_refused() -> None:
    with pytest.raises(ConfigError, match="--set name=!!binary aGVsbG8=: 'name' is !!binary"):
        load_run(None, ["name=!!binary aGVsbG8="])


def test_both_halves_of_a_surrogate_pair_are_one_character_as_in_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    task = {"kind": "reasoning_gym", "name": "chain_sum", "label": "sums \U0001f600", "config": {"\U0001f600": 1}}
    path.write_text(json.dumps({"model": {"system_prompt": "Be kind \U0001f600\U0001f601"}, "tasks": [task]}))
    assert "\\ud83d\\ude00" in path.read_text()
    run = load_run(path, ['tasks.0.suffix="\\ud83d\\ude00!"', "tasks.0.weight=2"])
    assert run.model.system_prompt == "Be kind \U0001f600\U0001f601"
    (found,) = run.tasks
    assert isinstance(found, ReasoningGymTask)
    assert (found.label, found.suffix, found.config) == ("sums \U0001f600", "\U0001f600!", {"\U0001f600": 1})
    assert load_plain(path)["tasks"] == [task]


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ude00\\ud83d", "\\ud83d \\ude00"])
def test_one_half_of_a_surrogate_pair_is_refused_with_its_key(tmp_path: Path, half: str) -> None:
    path = tmp_path / "run.yaml"
    first = re.escape(half[:6])
    why = f"text with {first}, one half of a surrogate pair: write the whole character, or both halves"
    path.write_text(f'steps: 3\nmodel:\n  system_prompt: "{half}"\n')
    for load in (load_run, load_plain):
        with pytest.raises(ConfigError, match=f"run.yaml:3: 'model.system_prompt' is {why}"):
            load(path)
    with pytest.raises(ConfigError, match=f"--set model.system_prompt=.*: 'model.system_prompt' is {why}"):
        load_run(None, [f'model.system_prompt="{half}"'])
    path.write_text(f'"{half}":\n  "{half}": 1\n  "{half}": 1\n')
    with pytest.raises(ConfigError, match=f":1: the key {why}") as told:
        load_run(path)
    assert str(told.value).isascii()
