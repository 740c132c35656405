"""`streamrl schema`: an editor that checks by it accepts what the loader accepts."""

from __future__ import annotations

import json
from contextlib import nullcontext

import jsonschema
import pytest
from pydantic import ValidationError

from streamrl.config.cluster import ClusterConfig
from tests.cli.calling import streamrl


@pytest.mark.parametrize(
    ("name", "valid"), [("a", True), ("site-1_b", True), ("A", False), ("a b", False), ("1", False), ("a" * 32, False)]
)
def test_the_schema_of_a_cluster_file_accepts_the_names_of_sites_that_the_loader_accepts(
    name: str, valid: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert streamrl(monkeypatch, "schema", "cluster") == 0
    checker = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    file = {"hardware": "cpu", "sites": {name: {"trainer": {}, "generation": [{}]}}}
    assert checker.is_valid(file) is valid
    with nullcontext() if valid else pytest.raises(ValidationError):
        ClusterConfig.model_validate(file)
