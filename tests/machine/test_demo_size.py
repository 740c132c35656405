"""The demo is as large as the machine's speed and memory allow, and never smaller than what it is to show."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from scheduler.cost.model_shapes import MODELS
from streamrl.cli.demo import command
from streamrl.config.load import load_run
from streamrl.errors import UserError
from streamrl.machine.cgroups import GroupLimits
from streamrl.machine.demo_size import (
    GENERATION_SHARE,
    MICRO_BATCHES,
    TRAINING_SHARE,
    DemoSize,
    choose_micro_batch,
    choose_size,
    peak_bytes,
    sizes,
)
from streamrl.machine.own_share import free_memory
from streamrl.machine.probe import Probe, ProbeFailed

MODEL = MODELS["smollm2-135m"]
ROOT = Path(__file__).parents[2]


def test_sizes_go_down_in_time_and_never_below_what_a_demo_shows() -> None:
    every = list(sizes())
    times = [size.seconds(MODEL, 100.0) for size in every]
    assert all(longer > shorter for longer, shorter in pairwise(times))
    assert all(size.steps >= 5 and size.prompts >= 3 and size.samples >= 2 for size in every)


def test_a_step_takes_the_sum_of_its_operations_at_the_shares_that_stages_reach() -> None:
    """By hand: 1 prompt x 1 sample of 60 tokens; P = 134.5 M computed weights; attention is under 2 %."""
    seconds = DemoSize(5, 1, 1, 100).step_seconds(MODEL, 100.0)
    forward = 2 * MODEL.computed * 110 - 2 * 49152 * 576 * 50
    expected = (2 * MODEL.computed * 60 / GENERATION_SHARE + 3 * forward / TRAINING_SHARE) / 100e9
    assert expected < seconds < 1.03 * expected


def test_the_largest_size_that_fits_is_taken_and_the_smallest_where_none_does() -> None:
    quick, slow = choose_size(MODEL, 1000.0, 360.0), choose_size(MODEL, 1.0, 360.0)
    every = list(sizes())
    assert (quick, slow) == (every[0], every[-1])
    for gflops in (60.0, 90.0, 130.0):
        chosen = choose_size(MODEL, gflops, 360.0)
        assert chosen.seconds(MODEL, gflops) <= 0.9 * 360.0
        larger = every[every.index(chosen) - 1]
        assert larger.seconds(MODEL, gflops) > 0.9 * 360.0


def test_more_time_never_makes_it_smaller() -> None:
    every = list(sizes())
    chosen = [every.index(choose_size(MODEL, 80.0, 60.0 * minutes)) for minutes in (2, 4, 6, 10, 30)]
    assert chosen == sorted(chosen, reverse=True) and chosen[-1] == 0


def test_micro_batches_shrink_until_the_run_fits_into_memory() -> None:
    assert choose_micro_batch(MODEL, "float32", 100e9) == MICRO_BATCHES[0]
    tight = peak_bytes(MODEL, "float32", 512)
    assert choose_micro_batch(MODEL, "float32", tight) == 512
    assert choose_micro_batch(MODEL, "float32", tight - 1) == 256
    assert choose_micro_batch(MODEL, "float32", 1e9) is None
    assert choose_micro_batch(MODEL, "bfloat16", 12e9) == 1024 and choose_micro_batch(MODEL, "float32", 12e9) == 256


def test_what_is_chosen_is_a_valid_run_file() -> None:
    for size in sizes():
        run = load_run(ROOT / "examples/demo.yaml", size.overrides)
        assert (run.steps, run.sampling.max_tokens) == (size.steps, size.max_tokens)
        assert (run.batch.prompts_per_step, run.batch.samples_per_prompt) == (size.prompts, size.samples)
        assert len(run.tasks) == 3


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, and a machine that was measured before."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape |= {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr("streamrl.cli.fetch_model.fetch_with_progress", lambda name, out: folder)
    monkeypatch.setattr("streamrl.machine.own_share.free_memory", lambda: 16e9)  # others may have this machine's
    monkeypatch.setattr("streamrl.machine.compute_type.resolve_model", lambda path: str(folder))
    for name in ("probe.rates", "compute_type.probe"):
        monkeypatch.setattr(f"streamrl.machine.{name}", lambda folder: Probe(2.0, 60.0))
    monkeypatch.chdir(ROOT)
    return folder


def test_the_command_says_what_it_chose_and_why_and_starts_exactly_that(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr("streamrl.cli.launch.start", lambda cluster, run, runs_dir, plain: started.append(run))
    options = ["--runs-dir", str(tmp_path / "runs"), "--memory", "64", "--set", "optimizer.lr=2e-6"]
    done = CliRunner().invoke(command, options, catch_exceptions=False)
    assert done.exit_code == 0
    (run,) = started
    assert run.optimizer.lr == 2e-6
    said = f"{run.steps} steps of {run.batch.prompts_per_step} prompts x {run.batch.samples_per_prompt} samples"
    assert said in done.output and "GFLOP/s" in done.output
    assert f"micro-batches of {run.batch.micro_batch_tokens} tokens" in done.output
    assert CliRunner().invoke(command, ["--dry-run"], catch_exceptions=False).exit_code == 0
    assert len(started) == 1


def test_what_is_set_by_hand_wins(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("streamrl.cli.launch.start", lambda cluster, run, runs_dir, plain: started.append(run))
    CliRunner().invoke(command, ["--set", "steps=3", "--set", "sampling.max_tokens=16"], catch_exceptions=False)
    assert (started[0].steps, started[0].sampling.max_tokens) == (3, 16)


def test_the_limits_of_a_container_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.machine.own_share.free_memory", free_memory)
    monkeypatch.setattr("streamrl.machine.own_share.read_limits", lambda: GroupLimits(8e9, 3.4e9, 1.0))
    done = CliRunner().invoke(command, [])
    assert "1 cores, 3 GB of memory free" in done.output
    assert done.exit_code == 1 and ", 3.4 GB are there: " in str(done.exception)


def test_a_cpu_that_cannot_be_measured_is_told_with_the_reason_and_what_to_do(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> Probe:
        raise ProbeFailed("OSError: libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr("streamrl.machine.probe.rates", fails)
    done = CliRunner().invoke(command, [])
    assert isinstance(done.exception, UserError)
    said = str(done.exception)
    assert "the demo could not measure this CPU with torch: OSError: libgomp.so.1: cannot open" in said
    assert f"{sys.executable} -c 'import torch' shows the whole error; start the demo again" in said


def test_too_little_memory_is_told_with_what_is_missing_before_anything_starts(machine: Path) -> None:
    done = CliRunner().invoke(command, ["--memory", "2"])
    assert done.exit_code == 1 and "GB are missing" in str(done.exception)
