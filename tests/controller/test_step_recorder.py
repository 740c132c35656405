"""What is recorded of a step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from streamrl.controller.length_predictor import StepLengths
from streamrl.controller.spending import Spending
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_recorder import Recorder
from streamrl.controller.step_times import Interval, StepTimes, Traffic
from streamrl.errors import RunFailed
from streamrl.protocol.controller_trainer import StepDone
from streamrl.report.summary import headline_figures
from streamrl.rollouts.length_audit import LengthAudit
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.types import Group
from streamrl.run_dir.metrics import MetricsRow
from tests.controller.test_pool_and_batch import config, finish, pool_of, taken
from tests.rollouts.test_row_parts import trajectory
from tests.waiting import scaled


def record(folder: Path, *batches: StepBatch) -> list[MetricsRow]:
    """Record steps that trained no token; return their rows."""
    times = Interval(0.0, 10.0, (), (), {"one": ()}, {"one": ()}, (), {"one": (0.0, 10.0)})
    result = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.0, learning_rate=1e-3, skipped=False)
    rows: list[MetricsRow] = []
    unused: Any = SimpleNamespace(
        **{"train": lambda *_: 0, "end_step": lambda *_: times, "of_step": lambda *_: {}, "usd_per_hour": {}},
        **{"clock": 0.0},
        **{"memory": SimpleNamespace(total_gb=1.0), "ended_trainer": [], "step_done": lambda row, *_: rows.append(row)},
        **{"trace_samples": AsyncMock()},
    )
    recorder = Recorder(RolloutStore(folder / "rollouts"), unused, LengthAudit(128), unused, unused, unused, None)
    for batch in batches:
        asyncio.run(
            recorder.step_done(batch, result, StepLengths(None, None), True, Traffic(), 0, 0, mismatch_bound=0.001)
        )
    return rows


def test_a_step_without_a_token_is_recorded_without_staleness_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = taken(config(2), {"a": (1.0, 0.0), "b": (0.0, 1.0)})
    none = np.zeros(0, np.int32)
    for group in batch.groups.values():
        for sample_id, one in group.scored.items():
            told = trajectory([])  # such as of an agent that never calls the model
            empty = {"completion_tokens": none, "logprobs": none.astype(np.float32), "token_versions": none}
            group.scored[sample_id] = replace(one, sample=replace(one.sample, trajectory=told, **empty))
    (row,) = record(tmp_path, batch)
    assert (row.staleness_mean, row.staleness_max, row.mismatch_warning) == (None, None, None)
    assert (row.reward_mean, row.tokens_trained, row.output_length_max, row.samples_total) == (0.5, 0, 0.0, 4)
    assert caplog.messages == ["step 1 trained nothing: no sample of it with a reward has a sampled token"]


def timed_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, steps: Sequence[tuple[float, float]], writing_s: float
) -> list[MetricsRow]:
    """Rows of steps that cost one USD per second: (seconds, those by which the clock is set in it) of each."""
    ticks = {"time": 1e9, "monotonic": 1000.0}
    for name in ticks:
        monkeypatch.setattr(time, name, lambda name=name: ticks[name])

    def go_on(seconds: float) -> None:
        for name in ticks:
            ticks[name] += seconds

    times = StepTimes(started=ticks["time"], clock=ticks["monotonic"])
    rows: list[MetricsRow] = []
    parts: Any = SimpleNamespace(
        **{"train": lambda *_: go_on(writing_s), "memory": SimpleNamespace(total_gb=1.0)},
        **{"step_done": lambda row, *_: rows.append(row), "trace_samples": AsyncMock()},
    )
    result = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.0, learning_rate=1e-3, skipped=False)
    spending = Spending({("home", "trainer"): 3600.0})
    recorder = Recorder(RolloutStore(folder), parts, LengthAudit(128), times, parts, spending, None)
    for seconds, jump in steps:
        go_on(seconds)
        ticks["time"] += jump
        batch = taken(config(2), {"a": (1.0, 0.0), "b": (0.0, 1.0)})
        asyncio.run(recorder.step_done(batch, result, StepLengths(None, None), True, Traffic(), 0, 0))
    return rows


def test_a_step_costs_what_was_spent_up_to_its_end_however_long_it_takes_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = timed_rows(tmp_path, monkeypatch, [(3.0, 0.0), (5.0, 0.0)], writing_s=2.0)
    assert [row.step_time_s for row in rows] == [pytest.approx(3.0), pytest.approx(2.0 + 5.0)]
    assert [row.usd for row in rows] == [pytest.approx(3.0), pytest.approx(2.0 + 5.0)]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
@pytest.mark.parametrize("number", [0, 1])
def test_a_step_in_which_the_clock_was_set_has_its_cost_and_no_figures_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, jump: float
) -> None:
    steps = [(4.0, jump if step == number else 0.0) for step in range(3)]
    rows = timed_rows(tmp_path, monkeypatch, steps, writing_s=0.0)
    assert [row.usd for row in rows] == [pytest.approx(4.0)] * 3
    assert [row.samples_total for row in rows] == [4] * 3
    for row in rows:
        times = row.step_time_s, row.generate_time_s, row.train_time_s, row.weight_sync_exposed_s
        shares = row.instances, row.bubble_fraction_generation, row.bubble_fraction_training
        unknown = {value is None for value in (*times, *shares, row.samples_per_s, row.tokens_per_s)}
        assert unknown == {row is rows[number]}
    figures = dict(headline_figures(rows))
    assert figures["samples/s"] == "1.00" and figures["mean step time"].startswith("4.0 s")


def test_that_all_samples_are_cut_and_masked_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def batch(step: int, *reasons: str, masks: bool = True) -> StepBatch:
        pool, made = pool_of("ab"), StepBatch(config(2, mask_truncated=masks), step)
        for name, reason in zip("ab", reasons, strict=True):
            finish(pool, name, [1.0, 0.0], reason)
            made.take(pool.take())
        return made

    rows = record(tmp_path, batch(1, "length", "stop"), batch(2, "length", "length", masks=False))
    assert [row.samples_left_out for row in rows] == [2, 0]
    assert caplog.messages == []
    first, second = record(tmp_path, batch(3, "length", "length"), batch(4, "length", "length"))
    assert (first.tokens_trained, first.groups_no_gradient, first.truncated_fraction) == (0, 2, 1.0)
    assert (second.groups_no_gradient, second.samples_left_out, second.samples_total) == (2, 4, 4)
    assert caplog.messages == [
        "step 3 trained nothing: every sample with a reward was cut by the token limit, and algorithm.mask_truncated "
        "leaves them out of the loss: raise sampling.max_tokens (said once)"
    ]


def test_other_work_goes_on_while_rollouts_are_written_and_the_ledger_comes_after(tmp_path: Path) -> None:
    went_on, events = threading.Event(), list[str]()

    class SlowStore(RolloutStore):
        def write(self, step: int, groups: list[Group]) -> Path:
            events.append("other work" if went_on.wait(scaled(10)) else "nothing else")
            return super().write(step, groups)

    def forgets(*_: object) -> None:
        events.append("on disk" if SlowStore(tmp_path).path(1).is_file() else "lost")
        raise RunFailed("enough")

    async def step() -> None:
        asyncio.get_running_loop().call_soon(went_on.set)
        unused: Any = SimpleNamespace(train=forgets)
        recorder = Recorder(SlowStore(tmp_path), unused, LengthAudit(128), *[unused] * 3, None)
        with pytest.raises(RunFailed, match="enough"):
            nothing: Any = None
            await recorder.step_done(taken(config(2), {"a": (1.0, 0.0)}), *[nothing] * 6)

    asyncio.run(step())
    assert events == ["other work", "on disk"]
