"""Read a run's folder into metrics, each time that Prometheus asks. No process of the run is asked or held up."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from streamrl.errors import UserError
from streamrl.exporter.metric_families import Families, step_name
from streamrl.run_dir import layout
from streamrl.run_dir.appended_lines import AppendedLines, AppendedRows
from streamrl.run_dir.evaluations import EvaluationRow
from streamrl.run_dir.figures import NOT_FIGURES, numbers
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.jsonl import parse_row
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.sent_record import SentRecord
from streamrl.run_dir.site_status import read_site
from streamrl.run_dir.status import FINAL_STATES, RunStatus, read_status, step_began
from streamrl.transport.refusals import RefusalCause

STATES = ("starting", "running", "stopping", *sorted(FINAL_STATES))
SUMS = ("samples_trained", "samples_judged", "samples_void", "tokens_trained", "steps_refused", "usd")
"""Counters that are sums over the steps of this launch."""
CAUSES: tuple[str, ...] = get_args(RefusalCause)
RECENT_STEPS = 20
GIB = 2**30


class StepTotals:
    """The sums over the steps of this launch and the newest step, of which each look reads only the new rows.

    Steps that are there at first are not counted, and one that was counted stays so when the run goes back behind it:
    Prometheus takes a counter that falls for one that has begun at 0 again.
    """

    def __init__(self, folder: Path, largest: int | None = layout.LARGEST_ROWS) -> None:
        """Take the run's folder, before the launch can write a step; `largest`: as for `RunCollector`."""
        self._lines = AppendedLines(folder / layout.METRICS, largest=largest)
        self._known = array("d")
        """Times of the rows that were there at first, or have been counted, at their places in the file."""
        self.priced = False
        self._clear()
        with contextlib.suppress(OSError):
            deque(self._new_rows(), maxlen=0)
        self.sums = dict.fromkeys(SUMS, 0.0)

    def _clear(self) -> None:
        self._place = 0
        self.newest: MetricsRow | None = None
        self.times: deque[float] = deque(maxlen=RECENT_STEPS)

    def _new_rows(self) -> Iterator[MetricsRow]:
        """Read what is new, and yield the rows that are not known yet."""
        for anew, lines in self._lines.read_all():
            if anew:
                self._clear()
            for line in lines:
                if (row := parse_row(MetricsRow, line)) is None:
                    continue
                self.newest = row
                self.priced |= row.usd is not None
                if row.step_time_s is not None:
                    self.times.append(row.step_time_s)
                place, self._place = self._place, self._place + 1
                if self._known[place : self._place] != array("d", [row.time]):
                    self._known[place:] = array("d", [row.time])  # a run that goes back keeps the rows before
                    yield row

    def look(self) -> None:
        """Add what is new to the sums."""
        for row in self._new_rows():
            self.sums["samples_trained"] += row.samples_total or 0
            self.sums["samples_judged"] += row.samples_judged or 0
            self.sums["samples_void"] += row.samples_void or 0
            self.sums["tokens_trained"] += row.tokens_trained or 0
            self.sums["steps_refused"] += row.step_refused is not None
            self.sums["usd"] += row.usd or 0


class TrackerSteps:
    """The newest step that a tracker was sent."""

    def __init__(self, path: Path, largest: int | None) -> None:
        self._lines, self._sent = AppendedLines(path, below=path.parents[1], largest=largest), SentRecord()

    def look(self) -> int:
        """Read what is new and return the step."""
        for anew, lines in self._lines.read_all():
            if anew:
                self._sent = SentRecord()
            for line in lines:
                self._sent.take(line)
        return self._sent.last_step


class RunCollector(Collector):
    """The metrics of one run, or of a site's share of it."""

    def __init__(
        self,
        folder: Path,
        staleness_limit: int | None,
        clock: Callable[[], float] = time.time,
        site: str = "",
        largest: int | None = layout.LARGEST_ROWS,
    ) -> None:
        """Take the run's folder.

        Args:
            folder: the run's folder.
            staleness_limit: the staleness that its schedule allows, in weight versions; None: any.
            clock: returns the unix time.
            site: the launcher's site, to which the processes belong whose list lies in `folder` itself.
            largest: most bytes of a file of rows; None: any number, in the run's own launcher.
        """
        self._folder, self._staleness_limit, self._clock, self._site = folder, staleness_limit, clock, site
        self._looking = threading.Lock()
        """Held during a look: scrapes may overlap, and each continues where the last one stopped reading."""
        self._largest, self._steps = largest, StepTotals(folder, largest)
        self._evaluations = AppendedRows(folder / layout.EVALUATIONS, EvaluationRow, largest)
        self._trackers: dict[str, TrackerSteps] = {}

    def collect(self) -> Iterator[Metric]:
        """Return all metrics; a file that is missing or cannot be read leaves out what it has."""
        with self._looking:
            return iter(self._look())

    def _look(self) -> list[Metric]:
        found = Families(self._folder.resolve().name)
        now = self._clock()
        status: RunStatus | None = None
        with contextlib.suppress(UserError, OSError):
            status = read_status(self._folder)
        with contextlib.suppress(OSError):
            self._steps.look()
        if status is not None:
            self._add_status(found, status, now)
            self._add_processes(found, status)
            self._add_steps(found, status, now)
        self._add_started(found)
        self._add_sites(found)
        self._add_evaluation(found)
        self._add_trackers(found)
        with contextlib.suppress(OSError):
            found.add("disk_free_bytes", shutil.disk_usage(self._folder).free)
        return list(found.metrics)

    def _add_status(self, found: Families, status: RunStatus, now: float) -> None:
        found.add("run_info", 1, status.model, status.schedule, status.hardware)
        for state in STATES:
            found.add("run_state", state == status.state, state)
        found.add("run_steps", status.step)
        found.add("run_steps_target", status.steps)
        found.add("status_age_seconds", now - status.updated_at)
        used: dict[str, float] = {}
        for wait in status.waits:
            share = max(0.0, now - wait.since) / wait.limit_s if wait.limit_s else 0.0
            used[wait.owner] = max(used.get(wait.owner, 0.0), share)
        for owner, share in used.items():
            found.add("wait_used_ratio", share, owner)
        for cause in dict.fromkeys((*CAUSES, *status.refused)):  # from 0 on, else the first would be no increase
            found.add("messages_refused", sum(status.refused.get(cause, {}).values()), cause)
        for pool, count in status.scaling.wanted.items():
            found.add("instances_wanted", count, pool)
        for pool, count in status.scaling.ready.items():
            found.add("instances_ready", count, pool)
        for kind in ("total", "finished", "trained"):
            found.add("progress_samples", getattr(status.progress, f"samples_{kind}"), kind)
        for name, site in status.sites.items():
            found.add("site_silent_seconds", site.silent_s, name)
            found.add("site_samples_waiting", site.samples_waiting, name)
            found.add("site_excluded", bool(site.excluded), name)
        found.add("staleness_limit", self._staleness_limit)
        newest = self._steps.newest
        warned = newest is not None and newest.mismatch_warning is not None
        found.add("mismatch", bool(status.verified.mismatch) or warned)
        found.add("verified_difference_nats", status.verified.worst)
        found.add("verified_bound_nats", status.verified.bound)

    def _add_processes(self, found: Families, status: RunStatus) -> None:
        for name, one in status.roles.items():
            found.add("process_silent_seconds", one.silent_s, name, one.role)
            memory = None if one.memory_gb is None else one.memory_gb * GIB
            found.add("process_memory_bytes", memory, name, one.role)
            found.add("process_requests_running", one.running, name, one.role)
            found.add("process_requests_waiting", one.waiting, name, one.role)
            found.add("process_tokens_per_second", one.tokens_per_s, name, one.role)
            found.add("process_weight_version", one.weight_version, name, one.role)

    def _add_steps(self, found: Families, status: RunStatus, now: float) -> None:
        steps = self._steps
        for name, total in steps.sums.items():
            if name != "usd" or steps.priced:
                found.add(name, total)
        if not status.final and status.step < status.steps:  # after the last one comes a final evaluation
            since = {name: one.since for name, one in status.roles.items()}.get("controller")
            began = step_began(status.state, since, None if steps.newest is None else steps.newest.time)
            found.add("step_age_seconds", None if began is None else max(0.0, now - began))
        found.add("step_usual_seconds", statistics.median(steps.times) if steps.times else None)
        if steps.newest is None:
            return
        found.add("length_bias", steps.newest.length_bias_warning is not None)
        for key in MetricsRow.model_fields:
            if key not in NOT_FIGURES:
                for names, number in numbers(getattr(steps.newest, key)):
                    found.add(step_name(key), number, *names)

    def _add_started(self, found: Families) -> None:
        with contextlib.suppress(OSError):
            for site, folder in layout.site_folders(self._folder).items():
                with contextlib.suppress(OSError, ValueError, TypeError):
                    for one in read_started(folder):
                        if one.role != "instance" or one.exit_code != 0:  # one that was asked to leave is no failure
                            found.add("process_up", one.exit_code is None, one.name, one.role, site or self._site)

    def _add_sites(self, found: Families) -> None:
        """Add what a site that only generates says of itself; the trainer's launcher has it from the controller."""
        with contextlib.suppress(OSError):
            if (site := read_site(self._folder)) is not None:
                found.add("site_silent_seconds", site.trainer_silent_s, site.site)
                found.add("site_samples_waiting", site.samples_waiting, site.site)
                found.add("status_age_seconds", self._clock() - site.updated_at)
                for name, one in site.instances.items():
                    found.add("process_requests_running", one.running, name, "instance")
                    found.add("process_tokens_per_second", one.tokens_per_s, name, "instance")
                    found.add("process_weight_version", one.weight_version, name, "instance")

    def _add_evaluation(self, found: Families) -> None:
        with contextlib.suppress(OSError):
            self._evaluations.look()
        if not self._evaluations.rows:
            return
        newest = max(self._evaluations.rows, key=lambda row: row.step)  # rows are in the order in which they ended
        found.add("evaluation_step", newest.step)
        for task, scores in {"": newest.overall, **newest.by_task}.items():
            found.add("evaluation_reward", scores.reward, task)
            for k, chance in enumerate(scores.pass_at, 1):
                found.add("evaluation_pass_at", chance, task, str(k))

    def _add_trackers(self, found: Families) -> None:
        done = self._steps.newest.step if self._steps.newest is not None else 0
        for path in self._folder.glob(f"{layout.TRACKERS}/*.jsonl"):
            tracker = self._trackers.setdefault(path.stem, TrackerSteps(path, self._largest))
            with contextlib.suppress(OSError):
                found.add("tracker_steps_waiting", max(0, done - tracker.look()), path.stem)
