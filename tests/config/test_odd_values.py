"""Values that would lead a run astray are refused by the loader."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest

from streamrl.config.load import ConfigError, load_cluster, load_run
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
