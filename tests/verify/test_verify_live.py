"""`streamrl verify` of a windowed model with only a config.json, with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MistralConfig

from tests.cli.calling import streamrl


def test_the_table_of_a_windowed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MistralConfig(architectures=["MistralForCausalLM"]).save_pretrained(tmp_path / "mistral")
    monkeypatch.setenv("COLUMNS", "200")
    assert streamrl(monkeypatch, "verify", tmp_path / "mistral") == 0
    printed = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.startswith("│")}
    assert "works" in rows["packing"] and "shared (proven for mistral" in rows["packing"]
    assert "sampled tokens within" in rows["trainer against vLLM"]
    assert "bit for bit" in printed and "refused" not in printed
    assert "not checked" in rows["stop tokens"]
