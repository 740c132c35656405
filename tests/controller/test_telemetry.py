"""What the status says of processes that do not speak to the controller themselves."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import queue
import time
from dataclasses import replace
from pathlib import Path
from statistics import median_high
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from streamrl.config.run import RunConfig
from streamrl.controller import telemetry as module
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.length_counts import length_counts
from streamrl.controller.process_memory import FamilyMemory
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.telemetry import Telemetry, memory_period
from streamrl.rollouts.types import Group
from streamrl.run_dir import layout
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.start_stages import forget, launched_at, say
from streamrl.run_dir.status import LENGTH_BINS, LengthCounts, read_status
from streamrl.transport.deadlines import WaitRegistry
from tests.rollouts.test_rollouts import make_group
from tests.run_dir.trace_events import events_of
from tests.waiting import until


@pytest.mark.parametrize(("told", "silence"), [({"silent_s": 7.5}, 7.5), ({"silent_s": None}, None), ({}, None)])
def test_a_service_says_how_long_its_agents_process_has_been_silent(
    told: dict[str, Any], silence: float | None
) -> None:
    hub = SimpleNamespace(peers={"service-here": SimpleNamespace(session="s1")}, silent_for=lambda name: 2.0)
    telemetry = cast(Telemetry, SimpleNamespace(hub=hub))
    assert Telemetry._silence(telemetry, "agents-here", told) == silence
    assert Telemetry._silence(telemetry, "service-here", told) == 2.0  # whatever it says itself


@pytest.mark.parametrize(("told", "session"), [({"session": "a1"}, "a1"), ({}, "")])
def test_a_service_says_which_agents_process_it_hears(told: dict[str, Any], session: str) -> None:
    telemetry = cast(Telemetry, SimpleNamespace(hub=SimpleNamespace(peers={"here": SimpleNamespace(session="s1")})))
    assert Telemetry._session(telemetry, "agents-here", told) == session
    assert Telemetry._session(telemetry, "here", told) == "s1"


def test_the_trainer_is_as_silent_as_the_most_silent_of_its_ranks(tmp_path: Path) -> None:
    silent = {"trainer-0": 0.5, "trainer-1": 70.0, "trainer-3": 2.0}
    peers = {name: SimpleNamespace(name=name, session=f"s-{name}", state={"detail": "step 3"}) for name in silent}
    hub: Any = SimpleNamespace(peers=peers, silent_for=silent.__getitem__)
    context: Any = SimpleNamespace(run_dir=tmp_path, run=RunConfig())
    telemetry = Telemetry(context, hub, cast(Any, None))
    telemetry.processes = lambda: dict.fromkeys(("trainer", "trainer-node-1", "trainer-node-2"), "trainer")
    telemetry.ranks = {"trainer": ["trainer-0", "trainer-1"], "trainer-node-1": ["trainer-2", "trainer-3"]}
    roles = telemetry._roles()
    assert {name: (role["silent_s"], role["session"]) for name, role in roles.items()} == {
        "trainer": (70.0, "s-trainer-1"),
        "trainer-node-1": (2.0, "s-trainer-3"),
        "trainer-node-2": (0.5, "s-trainer-0"),
    }
    assert roles["trainer"]["detail"] == "no sign of trainer-1 for 70 s"
    assert roles["trainer-node-1"]["detail"] == "step 3"


def test_measuring_the_memory_takes_a_fiftieth_of_the_time_at_most() -> None:
    assert memory_period(0.0) == memory_period(0.1) == 5.0
    assert memory_period(2.0) == 100.0


def test_a_run_that_is_done_shows_its_last_step() -> None:
    telemetry: Any = SimpleNamespace(context=SimpleNamespace(run=SimpleNamespace(steps=3)))
    shown = []
    for step in (2, 3, 4):  # the batch after the last step is begun, and never trained
        Telemetry.watch(telemetry, cast(Any, SimpleNamespace(step=step)), cast(Any, None))
        shown.append(telemetry.detail)
    assert shown == ["step 2", "step 3", "step 3"]


def test_a_step_without_any_group_yet_has_as_many_samples_to_come_as_a_whole_batch() -> None:
    run = RunConfig.model_validate({"batch": {"prompts_per_step": 3, "samples_per_prompt": 4}})
    telemetry: Any = SimpleNamespace(batch=StepBatch(run, 1), pool=GroupPool(3, 9))
    progress = Telemetry._progress(telemetry)
    assert (progress["groups_total"], progress["samples_total"]) == (3, 12)


def test_lengths_of_a_step_are_counted_in_bins_of_one_width() -> None:
    for longest in (0, 1, 31, 32, 33, 96, 1000):
        found = length_counts(range(longest + 1), np.asarray([longest // 2]))
        counts = LengthCounts(**found["length_counts"])
        assert sum(counts.counts) == longest + 1 and len(counts.counts) == LENGTH_BINS
        assert longest < LENGTH_BINS * counts.width and counts.longest == longest
        assert counts.median == median_high(range(longest + 1))
        assert found["predicted_length_counts"]["width"] == counts.width
    assert length_counts([], np.zeros(0, np.int64)) == {"length_counts": None, "predicted_length_counts": None}


def test_the_status_does_not_grow_with_the_samples_of_a_step() -> None:
    """It is written twice a second, and a step may have a quarter of a million."""
    run = RunConfig.model_validate({"batch": {"prompts_per_step": 2, "samples_per_prompt": 8192}})
    pool = GroupPool(2, 9)
    prompt = np.arange(3, dtype=np.int32)
    pool.issue([Group(name, 1, 0, "s/0", "s", 0, "p", prompt, 8192, predicted_length=40.6) for name in "ab"], 0)
    telemetry: Any = SimpleNamespace(batch=StepBatch(run, 1), pool=pool)
    progress = Telemetry._progress(telemetry)
    assert progress["length_counts"] is None and progress["samples_total"] == 2 * 8192
    told = LengthCounts(**progress["predicted_length_counts"])
    assert (sum(told.counts), told.median, told.longest) == (2 * 8192, 41, 41)
    assert len(json.dumps(progress)) < 1000


def test_a_controller_whose_disk_is_full_gives_signs_of_life_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STATUS_EVERY_S", 0.001)
    file = tmp_path / layout.STATUS
    file.write_text("{}")
    os.utime(file, (1.0, 1.0))
    tries: list[str] = []

    def full() -> None:
        tries.append(f"{file}.{len(tries)}")
        raise OSError(errno.ENOSPC, "No space left on device", tries[-1])

    telemetry: Any = SimpleNamespace(context=SimpleNamespace(run_dir=tmp_path), write=full)

    async def play() -> None:
        keeping = asyncio.create_task(Telemetry.keep_writing(telemetry))
        await until(lambda: file.stat().st_mtime > 1.0 and len(tries) > 3)
        keeping.cancel()

    asyncio.run(play())
    assert file.read_text() == "{}"
    assert caplog.messages == ["cannot write the run's status: No space left on device"]


def make_telemetry(run_dir: Path, steps: int = 10) -> Telemetry:
    context: Any = SimpleNamespace(
        run_dir=run_dir, run=RunConfig(steps=steps), cluster=SimpleNamespace(hardware="cpu", remote_sites=())
    )
    hub: Any = SimpleNamespace(peers={}, waits=WaitRegistry("controller"), refused=dict)
    lengths: Any = SimpleNamespace(state=dict)
    return Telemetry(context, hub, lengths)


def test_the_time_left_falls_during_a_step_and_is_known_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry = make_telemetry(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)

    def left(in_step: float | None) -> float | None:
        telemetry.step_began = lambda: None if in_step is None else 5000.0 - in_step
        telemetry.write()
        return read_status(tmp_path).eta_s

    assert left(None) is None and left(7.0) is None  # no step is done
    telemetry.resume_at(8, [900.0, *[90.0, None, 110.0] * 3])  # the last five known ones count
    assert left(None) == pytest.approx(204.0)
    monkeypatch.setattr(time, "time", lambda: 1e6)  # the clock was set forward
    assert [left(30.0), left(102.0), left(500.0)] == pytest.approx([174.0, 102.0, 102.0])
    telemetry.step = 10  # the last evaluation may still run
    assert left(1.0) is None


def test_a_run_counts_from_the_first_process_of_its_first_launch(tmp_path: Path) -> None:
    say(tmp_path, "controller", "starting Python")
    first = launched_at(tmp_path)
    assert first is not None
    telemetry = make_telemetry(tmp_path)
    telemetry.write()
    assert read_status(tmp_path).first_start == first
    telemetry.weights_applied(0, {"here-tail-0": (first + 40, first + 41)})
    telemetry.close("interrupted")
    forget(tmp_path)
    say(tmp_path, "controller", "starting Python")
    assert launched_at(tmp_path) != first
    make_telemetry(tmp_path).write()  # no step is done
    assert read_status(tmp_path).first_start == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("jump", [-1800.0, 3600.0])
def test_the_time_of_a_run_does_not_change_with_the_clock_and_goes_on_with_a_restarted_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    say(tmp_path, "controller", "starting Python")
    ticks = {"time": (launched_at(tmp_path) or 0.0) + 5.0, "monotonic": 50.0}
    for name in ticks:
        monkeypatch.setattr(time, name, lambda name=name: ticks[name])

    def elapsed(telemetry: Telemetry, *lasted: float) -> list[float]:
        found = []
        for seconds in lasted:
            for name in ticks:
                ticks[name] += seconds
            telemetry.write()
            found.append(read_status(tmp_path).elapsed(time.time()))
        return found

    telemetry = make_telemetry(tmp_path)
    assert elapsed(telemetry, 0.0, 10.0) == pytest.approx([5.0, 15.0])
    ticks["time"] += jump
    assert elapsed(telemetry, 0.0, 10.0) == pytest.approx([15.0, 25.0])
    for name in ticks:
        ticks[name] += 20.0
    assert elapsed(make_telemetry(tmp_path), 0.0, 1.0) == pytest.approx([45.0, 46.0])


def test_a_run_that_is_done_warns_of_no_full_disk(tmp_path: Path) -> None:
    telemetry = make_telemetry(tmp_path)
    telemetry.disk.warning = "the disk will be full"
    for state, warning in (("interrupted", telemetry.disk.warning), ("done", "")):
        telemetry.state = state
        telemetry.write()
        assert read_status(tmp_path).disk_warning == warning


def test_the_status_waits_for_no_measurement_of_the_memory_and_survives_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results: queue.SimpleQueue[FamilyMemory | OSError] = queue.SimpleQueue()

    def measure(run_dir: Path) -> FamilyMemory:
        if isinstance(found := results.get(), OSError):
            raise found
        return found

    monkeypatch.setattr(module, "run_memory", measure)
    monkeypatch.setattr(module, "MEMORY_EVERY_S", 0.0)
    monkeypatch.setattr(module, "MEMORY_SHARE", 1.0)
    writes = 0

    def write() -> None:
        nonlocal writes
        writes += 1

    context = SimpleNamespace(run_dir=tmp_path)
    telemetry: Any = SimpleNamespace(context=context, write=write, memory=FamilyMemory())

    async def play() -> None:
        tasks = [asyncio.create_task(Telemetry.keep_writing(telemetry))]
        tasks.append(asyncio.create_task(Telemetry.keep_measuring(telemetry)))
        await until(lambda: writes > 1)  # while the memory is measured
        results.put(OSError(errno.EMFILE, "Too many open files"))
        results.put(FamilyMemory(2.0))
        await until(lambda: telemetry.memory.total_gb == 2.0)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        results.put(FamilyMemory())  # for the thread that measures now

    asyncio.run(play())
    assert "cannot measure the memory of the run's processes: OSError: [Errno 24] Too many open files" in caplog.text


def test_a_run_that_is_continued_keeps_its_start_beside_that_of_its_controller(tmp_path: Path) -> None:
    cluster = SimpleNamespace(hardware="cpu", remote_sites=())
    context: Any = SimpleNamespace(run_dir=tmp_path, run=RunConfig(), cluster=cluster)
    hub: Any = SimpleNamespace(peers={}, waits=WaitRegistry("controller"), refused=dict)
    lengths: Any = SimpleNamespace(state=dict)
    Telemetry(context, hub, lengths).write()
    status = read_status(tmp_path)
    assert status.first_started_at is None and status.first_start == status.started_at
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
        for step in (1, 2):
            metrics.append(MetricsRow(step=step, time=1000.0 * step, step_time_s=10.0))
    Telemetry(context, hub, lengths).write()
    status = read_status(tmp_path)
    assert status.first_start == 990.0 and status.started_at > 2000.0


def test_each_instance_of_a_sample_that_moved_has_a_span_in_the_trace_for_the_time_it_had_it(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(
        run_dir=tmp_path, run=RunConfig(), cluster=SimpleNamespace(hardware="cpu", remote_sites=())
    )
    hub: Any = SimpleNamespace(peers={}, waits=WaitRegistry("controller"), refused=dict)
    telemetry = Telemetry(context, hub, SimpleNamespace(state=dict))  # type: ignore[arg-type]
    group = make_group("g", (1.0,))
    [(sample_id, one)] = group.scored.items()
    moved = replace(one.sample, instance="tail", t_dispatched=1e9, t_last_part=1e9 + 10, t_finished=1e9 + 12)
    group.scored[sample_id] = replace(one, sample=moved)
    group.given_back[sample_id] = [("regular", 1e9, 1e9 + 10)]
    asyncio.run(telemetry.trace_samples(1, [group]))
    events = [event for event in events_of(tmp_path / "trace.json") if event.get("ph") in ("b", "e")]
    spans = [(event["name"].split()[0], event["ph"], event["ts"] / 1e6) for event in events]
    assert spans == [("regular", "b", 0), ("regular", "e", 10), ("tail", "b", 10), ("tail", "e", 12)]


def test_a_sample_that_an_earlier_controller_may_have_told_is_not_in_the_trace_twice(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(
        run_dir=tmp_path, run=RunConfig(), cluster=SimpleNamespace(hardware="cpu", remote_sites=())
    )
    hub: Any = SimpleNamespace(peers={}, waits=WaitRegistry("controller"), refused=dict)
    telemetry = Telemetry(context, hub, SimpleNamespace(state=dict))  # type: ignore[arg-type]
    new, old = make_group("new"), make_group("old")
    old.kept = 1
    asyncio.run(telemetry.trace_samples(1, [new, old]))
    spans = [event for event in events_of(tmp_path / "trace.json") if event.get("ph") == "b"]
    assert {str(event["id"]).partition(".")[0] for event in spans} == {"new"}


def test_other_work_goes_on_while_the_samples_of_a_large_step_are_traced_in_a_few_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRACED_AT_ONCE", 8)
    telemetry = make_telemetry(tmp_path)
    groups = [make_group(f"g{number}", (1.0, 0.0, 1.0, 0.0)) for number in range(6)]
    seen: list[int] = []

    async def look() -> None:
        while True:
            seen.append(sum(event.get("ph") == "e" for event in events_of(tmp_path / "trace.json")))
            await asyncio.sleep(0)

    async def trace() -> None:
        looking = asyncio.create_task(look())
        await asyncio.sleep(0)
        await telemetry.trace_samples(1, groups)
        looking.cancel()

    asyncio.run(trace())
    assert seen[:3] == [0, 8, 16]
    telemetry.trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "e" for event in events) == 24
