"""The controller's reports: status.json twice a second, a metrics row per step, and the trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from streamrl.controller.disk_room import DiskRoom
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.length_counts import length_counts
from streamrl.controller.length_predictor import LengthPredictor
from streamrl.controller.process_memory import FamilyMemory, run_memory
from streamrl.controller.step_batch import StepBatch
from streamrl.errors import UserError
from streamrl.rollouts.plain_text import shown
from streamrl.rollouts.types import Group
from streamrl.run_dir import layout
from streamrl.run_dir.jsonl import RowWriter, iter_rows
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.remote_site import ABSENT_AFTER_S
from streamrl.run_dir.start_stages import launched_at
from streamrl.run_dir.status import read_status, touch_status, write_status
from streamrl.run_dir.trace import TraceWriter
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import rank_name
from streamrl.transport.endpoint import Hub
from streamrl.transport.refusals import RefusedCounts, merged

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
"""Seconds between two writes of the status."""
TRAINER = rank_name(0)
"""The rank that reports for the trainer."""
TRACED_AT_ONCE = 500
"""Samples whose spans are written before other work has its turn: some 10 ms."""
MEMORY_EVERY_S = 5.0
"""Seconds between two measurements of the memory, if they are quick."""
MEMORY_SHARE = 0.02
"""Most of the time that measuring the memory may take: the kernel looks through all pages, 40 ms for each GB."""


class Telemetry:
    """The writer of a run's status, metrics and trace; the controller is their only writer while it lives."""

    def __init__(self, context: RoleContext, hub: Hub, lengths: LengthPredictor) -> None:
        self.context, self.hub, self.lengths = context, hub, lengths
        self.state = "starting"
        self.error: str | None = None
        self.step = 0
        self.schedule: str = context.run.schedule.name
        self.schedule_note = ""
        """Choice of `schedule: auto`, with its reason."""
        self.sites: Callable[[], dict[str, Any]] = dict
        """Function that returns the state of the sites behind links."""
        self.scaling: Callable[[], dict[str, Any]] = dict
        """Function that returns the present and the target numbers of instances."""
        self.processes: Callable[[], dict[str, str]] = dict
        """Function that returns the roles of all processes, by name."""
        self.ranks: dict[str, list[str]] = {}
        """Names of the ranks of each of the trainer's nodes, by the name of its process."""
        self.verified: Callable[[], dict[str, Any]] = dict
        """Function that returns how many weight versions are verified end to end."""
        self.step_began: Callable[[], float | None] = lambda: None
        """Function that returns when the current step began, in monotonic seconds; None: no weights are served yet."""
        self.untold: list[str] = []
        """Sites that could not be told that the run is done."""
        self.batch: StepBatch | None = None
        self.pool: GroupPool | None = None
        self.memory = FamilyMemory()
        """Memory of the run's processes on this machine, as last measured."""
        self.disk = DiskRoom(context.run_dir, context.run)
        self.detail = "waiting for processes"
        self.metrics = RowWriter(context.run_dir / layout.METRICS, MetricsRow)
        self._latest: MetricsRow | None = None
        self._started = time.time()
        launched = launched_at(context.run_dir)
        self.trace = TraceWriter(context.run_dir / layout.TRACE, launched)
        first = next(iter_rows(context.run_dir / layout.METRICS, MetricsRow), None)
        step_began = None if first is None else first.time - (first.step_time_s or 0.0)
        known = [moment for moment in (launched, self.trace.origin, step_began) if moment is not None]
        self._first_started = min(known, default=None)
        self._clock = time.monotonic()
        """`_started` in monotonic seconds."""
        self._elapsed_s = self._elapsed_before()
        """Seconds from the run's first start to this controller's."""
        self._step_times: deque[float] = deque(maxlen=5)
        self._states: dict[str, tuple[str, float]] = {}
        self._reported: dict[str, RefusedCounts] = {}
        """What other processes have refused, by process; kept after it has gone."""
        self._types: dict[str, dict[str, str]] = {}
        """Number type in which each process computes, with the reason; kept after the process has gone."""

    @property
    def latest(self) -> MetricsRow | None:
        """Metrics of the newest finished step; None: there is none."""
        return self._latest

    async def keep_writing(self) -> None:
        """Write the status periodically until cancelled."""
        problem = ""
        while True:
            try:
                self.write()
                problem = ""
            except OSError as error:  # if the disk is full, writing the ledger will fail the run
                if problem != (problem := error.strerror or str(error)):  # not the name of a temporary file
                    log.warning("cannot write the run's status: %s", problem)
                touch_status(self.context.run_dir)  # else the watchdog would take this process for one that hangs
            await asyncio.sleep(STATUS_EVERY_S)

    async def keep_measuring(self) -> None:
        """Measure the memory periodically until cancelled; it may take minutes, and a failure is only logged."""
        while True:
            began = time.monotonic()
            try:
                self.memory = await asyncio.to_thread(run_memory, self.context.run_dir)
            except Exception as error:
                log.warning("cannot measure the memory of the run's processes: %s: %s", type(error).__name__, error)
            took_s = time.monotonic() - began
            await asyncio.sleep(memory_period(took_s) - took_s)

    def write(self) -> None:
        """Write the status now."""
        run = self.context.run
        write_status(
            self.context.run_dir,
            {
                "run": self.context.run_dir.name,
                "state": self.state,
                "step": self.step,
                "steps": run.steps,
                "started_at": self._started,
                "first_started_at": self._first_started,
                "updated_at": time.time(),
                "elapsed_s": self._elapsed_s + time.monotonic() - self._clock,
                "eta_s": self._left_s(),
                "schedule": self.schedule,
                "schedule_note": self.schedule_note,
                "disk_warning": "" if self.state == "done" else self.disk.warning,
                "model": run.model.path,
                "hardware": self.context.cluster.hardware,
                "absence_s": self.context.cluster.absence_s if self.context.cluster.remote_sites else None,
                "roles": self._roles(),
                "sites": self.sites(),
                "scaling": self.scaling(),
                "progress": self._progress(),
                "ranker": self.lengths.state(),
                "verified": self.verified(),
                "latest": self._latest.model_dump() if self._latest else None,
                "refused": self._refused(),
                "waits": self._waits(),
                "untold": self.untold,
                "error": self.error,
            },
        )

    def _elapsed_before(self) -> float:
        """Return the seconds from the run's first start to this controller's; one before it in this launch has counted.

        The launcher has removed the status of an earlier launch.
        """
        with contextlib.suppress(UserError):
            return read_status(self.context.run_dir).elapsed(self._started)
        return 0.0 if self._first_started is None else max(0.0, self._started - self._first_started)

    def _left_s(self) -> float | None:
        """Return the seconds left at the mean time of the last steps; None: unknown, or no step is left to do.

        The current step takes as long as they did, or has taken longer already.
        """
        left = self.context.run.steps - self.step
        if not self._step_times or left <= 0:
            return None
        pace, began = sum(self._step_times) / len(self._step_times), self.step_began()
        done = 0.0 if began is None else time.monotonic() - began
        return left * pace - min(pace, done)

    def watch_processes(
        self,
        processes: Callable[[], dict[str, str]],
        sites: Callable[[], dict[str, Any]],
        scaling: Callable[[], dict[str, Any]],
    ) -> None:
        """Set the functions that report roles of processes, sites behind links and numbers of instances."""
        self.processes, self.sites, self.scaling = processes, sites, scaling

    def resume_at(self, step: int, step_times: Iterable[float | None]) -> None:
        """Continue after `step` optimizer steps, which took these seconds; None: not known."""
        self.step = step
        self._step_times.extend(seconds for seconds in step_times if seconds is not None)

    def watch(self, batch: StepBatch, pool: GroupPool) -> None:
        """Report the progress of this step from now on."""
        self.batch, self.pool = batch, pool
        self.detail = f"step {min(batch.step, self.context.run.steps)}"  # the one after the last is never trained

    def _progress(self) -> dict[str, Any]:
        """Return the progress of the step: of the groups it has taken and of those that will fill it up."""
        batch, pool = self.batch, self.pool
        if batch is None or pool is None:
            return {}
        taken = list(batch.groups.values())
        wanted = max(0, pool.batch - len(taken))
        coming = sorted(pool.groups.values(), key=lambda group: not group.complete)[:wanted]
        groups = [*taken, *coming]
        finished = [m.sample for group in groups for m in group.scored.values()]
        ids = {group.group_id for group in coming}
        finished += [sample for sample, _ in pool.received.values() if sample.group_id in ids]
        lengths = [sample.output_length for sample in finished]
        foreseen = [group for group in groups if group.predicted_length is not None]
        predicted = (
            np.asarray([group.predicted_length for group in foreseen], dtype=np.float64).round().astype(np.int64)
        )
        return {
            "groups_total": pool.batch,
            "groups_complete": len(taken) + sum(group.complete for group in coming),
            "samples_total": sum(group.size for group in groups) or pool.batch * batch.run.batch.samples_per_prompt,
            "samples_finished": len(finished),
            "samples_trained": batch.samples_trained,
            "tokens_generated": sum(lengths),
            **length_counts(lengths, np.repeat(predicted, [group.size for group in foreseen])),
        }

    def step_done(self, row: MetricsRow, trainer_spans: list[tuple[str, float, float]]) -> None:
        """Record a finished step in the metrics, and what the trainer did in the trace."""
        self.metrics.append(row)
        self._latest, self.step = row, row.step
        if row.step_time_s is not None:
            self._step_times.append(row.step_time_s)
        for name, start, end in trainer_spans:
            self.trace.span("trainer", name, start, end, step=row.step)

    async def trace_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Record the samples of a finished step in the trace.

        Those of a large step take seconds, in which the controller goes on with its other work.
        """
        waiting: list[Group] = []
        samples = 0
        for group in groups:
            waiting.append(group)
            samples += group.size
            if samples >= TRACED_AT_ONCE:
                self._trace(step, waiting)
                waiting, samples = [], 0
                await asyncio.sleep(0)
        self._trace(step, waiting)

    def _trace(self, number: int, groups: Sequence[Group]) -> None:
        with self.trace.together():
            for group in groups:
                for m in group.members():
                    s = m.sample
                    if group.kept and s.t_finished < self._started:
                        continue  # the controller before this one may have told it
                    for instance, start, end in group.given_back.get(s.sample_id, ()):
                        self.trace.async_span(instance, group.task, start, end, id=s.sample_id, step=number)
                    self.trace.async_span(
                        s.instance if s.trajectory is None else f"agents-{s.site}",
                        group.task,
                        s.last_began,
                        s.t_finished,
                        id=s.sample_id,
                        step=number,
                        tokens=s.output_length,
                        reward=m.reward,
                    )
                    # inside the episode's span, which has the same id
                    for step in s.trajectory.steps if s.trajectory is not None else ():
                        self.trace.async_span(
                            *(f"agents-{s.site}", f"{step.kind} {step.name}".strip(), step.started, step.finished),
                            id=s.sample_id,
                            tokens=step.tokens,
                        )

    def weights_applied(self, number: int, spans: dict[str, tuple[float, float]]) -> None:
        """Record in the trace when each instance loaded a version."""
        for instance, (start, end) in spans.items():
            self.trace.span(instance, "load weights", start, end, version=number)

    def close(self, state: str, error: str | None = None) -> None:
        """Write the last status and close the files."""
        self.state, self.error = state, error
        for work in (self.write, self.trace.close, self.metrics.close):
            try:
                work()
            except OSError as problem:  # must not hide the error that ended the run
                log.warning("cannot write the run's last status, metrics or trace: %s", problem)

    def _silence(self, speaker: str, known: dict[str, Any]) -> float | None:
        """Return for how long a process has been silent; None: it does not speak to the controller, nor says another.

        A service says it of its agents process.
        """
        if speaker in self.hub.peers:
            return self.hub.silent_for(speaker)
        told: float | None = known.get("silent_s")
        return told

    def _most_silent(self, node: str) -> str:
        """Return the rank of a trainer's node that has been silent for longest; the trainer's first one: none speaks.

        Each rank waits for all others in its collectives, so the trainer hangs with any of them.
        """
        there = (rank for rank in self.ranks.get(node, ()) if rank in self.hub.peers)
        return max(there, key=self.hub.silent_for, default=TRAINER)

    def _session(self, speaker: str, known: dict[str, Any]) -> str:
        """Return the session of a process; '': as `_silence`."""
        if speaker in self.hub.peers:
            return self.hub.peers[speaker].session
        return str(known.get("session", ""))

    def _roles(self) -> dict[str, Any]:
        """Return the state of every process, from its last heartbeat."""
        states: dict[str, dict[str, Any]] = {}
        for peer in self.hub.peers.values():
            states[peer.name] = peer.state
            states |= peer.state.get("instances", {}) | peer.state.get("agents", {})
        states["controller"] = {"state": self.state, "detail": self.detail}
        roles = {}
        for name, role in self.processes().items():
            speaker = TRAINER if role == "trainer" else name
            heard = self._most_silent(name) if role == "trainer" else name
            known = states.get(speaker, {})
            state = known.get("state", "starting")
            if self._states.get(name, ("", 0.0))[0] != state:
                self._states[name] = (state, time.time())
            numbers = {key: known.get(key) for key in ("running", "waiting", "tokens_per_s", "weight_version")}
            if known.get("dtype"):
                decided = ("dtype", "dtype_why", "packing", "packing_why")
                self._types[name] = {key: known.get(key, "") for key in decided}
            silent_s, detail = self._silence(heard, known), known.get("detail", "")
            if heard != speaker and silent_s is not None and silent_s > ABSENT_AFTER_S:
                detail = f"no sign of {heard} for {silent_s:.0f} s"
            roles[name] = (
                {
                    "role": role,
                    "state": state,
                    "detail": detail,
                    "since": self._states[name][1],
                    "silent_s": silent_s,
                    "session": self._session(heard, known),
                    "drafts": known.get("drafts", ""),
                    "memory_gb": self.memory.of_process.get(name),
                }
                | numbers
                | self._types.get(name, {})
            )
        return roles

    def _refused(self) -> dict[str, dict[str, int]]:
        """Return what all processes have refused; peers of other hubs than the controller's as 'peer at process'."""
        of_process = {peer.name: peer.state for peer in self.hub.peers.values()}
        for peer in self.hub.peers.values():
            of_process |= peer.state.get("instances", {})
        ranks = {peer.name for peer in self.hub.peers.values() if peer.role == "trainer"}
        for name in self.processes().keys() | ranks:
            if refused := of_process.get(name, {}).get("refused"):
                self._reported[name] = {
                    cause: {f"{peer} at {name}": count for peer, count in counts.items()}
                    for cause, counts in refused.items()
                }
        return merged([self.hub.refused(), *self._reported.values()])

    def _waits(self) -> list[dict[str, Any]]:
        waits = [wait | {"waiting_for": shown(wait["waiting_for"])} for wait in self.hub.waits.snapshot()]
        for peer in self.hub.peers.values():
            waits += peer.state.get("waits", [])
            for process in (peer.state.get("instances", {}) | peer.state.get("agents", {})).values():
                waits += process.get("waits", [])
        return sorted(waits, key=lambda wait: wait["since"])


def memory_period(took_s: float) -> float:
    """Return the seconds from one measurement of the memory to the next, from those that the last one took."""
    return max(MEMORY_EVERY_S, took_s / MEMORY_SHARE)
