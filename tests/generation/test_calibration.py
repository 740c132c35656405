"""`streamrl calibrate` on a tiny model and real vLLM: the curve that it writes is one that the simulator reads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from scheduler.cost.decode import StepCurve
from streamrl.cli.calibrate import with_one_pool
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.generation.instance.calibration import QUICK_TOKENS, batch_sizes, measure, measure_quickly
from streamrl.generation.instance.engine import Engine
from streamrl.launcher.generation_check import check_kv_cache
from streamrl.rollouts.types import SampleRequest
from tests import warm
from tests.tiny_model import save_tiny_model
from tests.waiting import scaled

CLUSTER = """
hardware: cpu
sites:
  here:
    trainer: {ranks: 1}
    generation: [{name: regular, max_batch: 6, kv_cache_gb: 0.05}]
"""
TRIES = 4
"""Other tests may keep this machine busier while one batch size is timed than while another is, which is refused."""


def test_batch_sizes_are_powers_of_two_and_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]


class Timed:
    """An idle engine whose steps take the same time; it notes (requests, tokens) of all runs.

    Args:
        context: tokens at which it ends a request.
    """

    def __init__(self, step_s: float, cuda: bool, context: int = 4096) -> None:
        self.step_s, self.cuda, self.vocabulary, self.kv_tokens = step_s, cuda, 10, 4096
        self.context = context
        self.runs: list[tuple[int, int]] = []

    async def time(self, requests: list[SampleRequest], tokens: int) -> float:
        self.runs.append((len(requests), tokens))
        return self.step_s * min(tokens, self.context - len(requests[0].prompt_tokens))


@pytest.mark.parametrize("quickly", [False, True])
@pytest.mark.parametrize("context", [2, 3, 5, 12, 20, 32, 41, 200])
def test_a_step_takes_as_long_where_requests_end_at_a_short_context(context: int, quickly: bool) -> None:
    engine = cast(Engine, Timed(0.01, False, context))
    if quickly:
        trials, _ = asyncio.run(measure_quickly(engine, 4, context, lambda said: None))
    else:
        trials, _ = asyncio.run(measure(engine, 4, context, 100.0, lambda said: None))
    assert trials.curve.seconds == pytest.approx([0.01] * len(trials.sizes))


@pytest.mark.parametrize(
    ("step_s", "cuda", "largest", "untimed"),
    [
        (0.01, False, 16, [(16, 7), (16, 16), (1, 7), (1, 16), (4, 7), (4, 16)]),
        (0.01, False, 80, [(1, 7), (1, 16), (20, 7), (20, 16)]),  # a step of 80 tokens is not recorded
        (0.3, False, 16, [(16, 7), (1, 7), (4, 7)]),  # all requests are there before the first step has ended
        (0.01, True, 16, []),
    ],
)
def test_batches_that_are_replayed_run_before_any_is_timed(
    step_s: float, cuda: bool, largest: int, untimed: list[tuple[int, int]]
) -> None:
    engine = Timed(step_s, cuda)
    asyncio.run(measure_quickly(cast(Engine, engine), largest, 256, lambda said: None))
    assert engine.runs[: len(untimed) + 1] == [*untimed, (largest, QUICK_TOKENS[0])]


def calibrate(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    command = [sys.executable, "-m", "streamrl.cli.main", "calibrate", "--cluster", str(cluster), *arguments]
    return warm.run(command, scaled(280))


def test_a_real_instance_is_measured(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    out = tmp_path / "curve.json"
    wanted = (f"model.path={model}", "model.dtype=float32", "model.max_context=128", "sampling.max_tokens=24")
    settings = [word for one in wanted for word in ("--set", one)]
    for _ in range(TRIES):
        done = calibrate(tmp_path, *settings, "--seconds", "20", "--out", str(out))
        if "not usable" not in done.stderr:
            break
        assert done.returncode == 2 and not out.exists()
    assert done.returncode == 0, done.stderr
    assert "batch 6:" in done.stdout and "prefill" in done.stdout
    values = json.loads(out.read_text())
    curve = StepCurve.from_json(values)
    assert curve.batches == (1, 2, 4, 6) and values["model"] == str(model)
    assert all(1e-5 < seconds < 5 for seconds in curve.seconds)
    contexts = {(one["batch"], one["prompt_tokens"]) for one in values["repeats"]}
    assert {(1, 1), (6, 1), (4, 88)} <= contexts, "two context lengths"
    assert "other processes kept" in values["load"] and values["load"] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--pool", "tail"], "--pool tail: "),
        (["--out", "nowhere/curve.json"], "--out nowhere/curve.json: its folder does not exist"),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    done = calibrate(tmp_path, *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr and "Traceback" not in done.stderr


def test_what_a_launch_would_refuse_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    done = calibrate(tmp_path, "--set", f"model.path={model}", "--set", "model.max_context=100000")
    assert done.returncode == 2 and "has 512 positions, 100000 are asked for" in done.stderr


def test_mistakes_of_pools_that_are_not_measured_do_not_matter(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    run = RunConfig.model_validate({"model": {"path": str(model), "max_context": 256}})
    pools = [{"name": "small", "kv_cache_gb": 1e-5}, {"name": "large", "kv_cache_gb": 0.05}]
    values = {"hardware": "cpu", "sites": {"here": {"trainer": {"ranks": 1}, "generation": pools}}}
    cluster = ClusterConfig.model_validate(values)
    small, large = cluster.sites["here"].generation
    (problem,) = check_kv_cache(with_one_pool(cluster, "here", small), run, "here")
    assert problem.startswith("sites.here.generation (small).kv_cache_gb is 1e-05")
    assert list(check_kv_cache(with_one_pool(cluster, "here", large), run, "here")) == []
