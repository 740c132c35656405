"""The tokenizer of a run without a checkpoint is found wherever its model is."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.machine.user_folders import cache_directory
from streamrl.report.run_decoder import find_decoder
from tests.tiny_model import save_tiny_model


@pytest.mark.parametrize("path", ["{home}/model", "~/model", "smollm2-135m"])
def test_tokens_are_text_before_the_first_checkpoint(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    config = f"run: {{model: {{path: {path.format(home=tmp_path)!r}}}}}"
    assert find_decoder(run, config)[0] is None
    save_tiny_model(tmp_path / "model")
    (cache_directory() / "models").mkdir(parents=True)
    (cache_directory() / "models" / "smollm2-135m").symlink_to(tmp_path / "model")
    decoder, why_not = find_decoder(run, config)
    assert decoder is not None and not why_not
    assert decoder([256]) == "<|bos|>"
