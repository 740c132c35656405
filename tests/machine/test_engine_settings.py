"""vLLM's settings on a CPU: what is said of trials, and that it is found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.machine import kept_results
from streamrl.machine.cpu import Cpu
from streamrl.machine.engine_settings import (
    CANDIDATES,
    DEFAULT,
    NOT_MEASURED,
    EngineTrial,
    comparison,
    keep,
    key,
    settings_note,
    table,
)

BASE, BOUND, COMPILED, FP8, PLAIN = (EngineTrial(settings, 10.0, ((1, 0.05), (64, 0.4))) for settings in CANDIDATES)
CPU = Cpu("one", frozenset({"avx2"}))
CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "bos_token_id": 1}


def quicker(trial: EngineTrial, factor: float, start_s: float = 10.0) -> EngineTrial:
    return replace(trial, start_s=start_s, step_s=tuple((size, s / factor) for size, s in trial.step_s))


def test_a_speed_is_the_mean_over_batch_sizes_that_both_have() -> None:
    mixed = replace(COMPILED, step_s=((1, 0.025), (64, 0.8), (128, 0.1)))
    assert mixed.speed_over(BASE) == pytest.approx(1.0)
    assert quicker(COMPILED, 1.5).speed_over(BASE) == pytest.approx(1.5)


def test_without_the_default_nothing_is_compared() -> None:
    for trials in ([], [COMPILED], [EngineTrial(DEFAULT, error="no memory"), COMPILED]):
        with pytest.raises(ValueError, match="nothing to compare"):
            comparison(trials, "one")


def test_what_was_measured_is_one_sentence() -> None:
    plain = quicker(PLAIN, 0.8)
    trials = [BASE, quicker(COMPILED, 1.2, start_s=22.0), EngineTrial(FP8.settings, error="needs AVX-512"), plain]
    assert comparison(trials, "one CPU, 2026-01-02") == (
        "measured on one CPU, 2026-01-02: compiled 1.20 x as fast, start +12 s; fp8 KV cache: needs AVX-512; "
        "nothing replayed 0.80 x as fast, start +0 s"
    )


def test_the_table_has_a_line_for_each_trial() -> None:
    lines = table([BASE, EngineTrial(FP8.settings, error="needs AVX-512")])
    assert lines[0].split() == ["start", "s", "batch", "1,", "ms", "batch", "64,", "ms", "settings"]
    assert lines[1].split()[:3] == ["10.0", "50.0", "400.0"]
    assert lines[2].split()[:3] == ["0.0", "-", "-"] and lines[2].endswith("KV cache of fp8: needs AVX-512")


def test_what_was_measured_is_found_again_for_the_same_machine_model_type_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_results, "cache_directory", lambda: tmp_path / "cache")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    default = "vLLM: eager, free threads, KV cache of the model's type"
    unknown = f"{default} ({NOT_MEASURED})"
    assert settings_note(model, "float32", 1) == unknown
    said = comparison([BASE, quicker(COMPILED, 3.0)], "one")
    path = keep(said, [BASE], model, "float32", 1)
    assert settings_note(model, "float32", 1) == f"{default} ({said})"  # however fast others are
    assert settings_note(model, "bfloat16", 1) == settings_note(model, "float32", 2) == unknown
    path.write_text("{")
    assert settings_note(model, "float32", 1) == unknown


def test_the_key_follows_what_step_times_depend_on() -> None:
    same = key(CPU, CONFIG, "float32", 1, ["2.0", "0.1"])
    assert key(CPU, CONFIG | {"bos_token_id": 7}, "float32", 1, ["2.0", "0.1"]) == same
    others = [
        key(replace(CPU, flags=frozenset({"avx512f"})), CONFIG, "float32", 1, ["2.0", "0.1"]),
        key(CPU, CONFIG | {"num_hidden_layers": 3}, "float32", 1, ["2.0", "0.1"]),
        key(CPU, CONFIG, "bfloat16", 1, ["2.0", "0.1"]),
        key(CPU, CONFIG, "float32", 2, ["2.0", "0.1"]),
        key(CPU, CONFIG, "float32", 1, ["2.0", "0.2"]),
    ]
    assert len({same, *others}) == 6
