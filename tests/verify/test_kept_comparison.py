"""What `streamrl verify` keeps of a comparison, and for what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.machine import code_hash
from streamrl.verify import kept_comparison
from streamrl.verify.families import FAMILIES
from streamrl.verify.findings import Finding
from streamrl.verify.generator_checks import findings_of
from streamrl.verify.generator_order import AGAINST, DELIVERED, FRESH, VERSION, Order
from streamrl.verify.kept_comparison import COMPARED

ORDER = Order(("first", "second"), "sdpa", "folder", codes=(), in_int8=False)
CRASHED = {"stages": {}, "errors": "MemoryError", "in_time": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mine"}')
    return tmp_path / "model"


def found(error: float, fresh: float = -1.0) -> list[Finding]:
    samples = [[{"tokens": [1, 2], "logprobs": [-1.0, last]}] for last in (-1.0, fresh)]
    stages = {AGAINST: {"error": error, "tokens": 9}}
    stages[DELIVERED] = {"samples": samples[0], "kind": "delta", "mb": 1.0}
    stages[FRESH], stages["before"] = {"samples": samples[1]}, {"samples": [{"tokens": [0, 0], "logprobs": [0, 0]}]}
    return findings_of(ORDER, {"stages": stages, "errors": "", "in_time": True})


def test_what_was_measured_is_kept_and_an_engine_that_failed_says_nothing(folder: Path) -> None:
    keep, kept = kept_comparison.keep_comparison, kept_comparison.kept_comparison
    assert kept(folder) is None
    keep(folder, findings_of(ORDER, CRASHED))  # too little memory, perhaps
    assert kept(folder) is None
    keep(folder, found(0.1))
    assert kept(folder) == "log-probabilities of 9 sampled tokens differ by up to 0.1 nats (fp32), more than 0.005"
    keep(folder, findings_of(ORDER, CRASHED))
    assert str(kept(folder)).startswith("log-probabilities of 9")
    keep(folder, found(1e-6, fresh=-1.5))
    assert kept(folder) == "sample 0: log-probabilities differ from a fresh engine's by up to 0.5 nats"
    keep(folder, found(1e-6))
    assert kept(folder) == ""


def test_a_setting_that_is_refused_does_not_count_against_the_model(folder: Path) -> None:
    optional = Finding("weights in fp8", "refused", "differs", optional=True, measured=True)
    kept_comparison.keep_comparison(folder, [Finding(VERSION, "works", "equal", measured=True), optional])
    assert kept_comparison.kept_comparison(folder) == ""


def test_it_holds_for_the_configuration_and_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_comparison.keep_comparison(folder, found(0.1))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "hidden_size": 64}))
    assert kept_comparison.kept_comparison(folder) is None
    (folder / "config.json").write_text(config)
    assert kept_comparison.kept_comparison(folder)
    monkeypatch.setattr(kept_comparison, "code_hash", lambda package: f"another {package.name}")
    assert kept_comparison.kept_comparison(folder) is None
    monkeypatch.setattr(kept_comparison, "code_hash", code_hash.code_hash)
    monkeypatch.setattr(kept_comparison, "package_version", lambda *names: "9.9")
    assert kept_comparison.kept_comparison(folder) is None


def test_a_cache_that_cannot_be_used_or_is_damaged_is_no_comparison(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_comparison.keep_comparison(folder, found(0.1))
    (file,) = (folder.parent / "cache" / "machine").iterdir()
    for text in ("", "[]", '{"other": 1}'):
        file.write_text(text)
        assert kept_comparison.kept_comparison(folder) is None
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("STREAMRL_CACHE", str(folder.parent / "file"))
    kept_comparison.keep_comparison(folder, found(0.1))
    assert kept_comparison.kept_comparison(folder) is None


def test_families_whose_comparison_is_published_are_not_asked_about() -> None:
    types = {make().model_type for make in FAMILIES.values()}
    assert types - {"qwen3_next"} == COMPARED  # vLLM computes that one on CPUs in bf16 only
