"""The launcher's view of a run: a live picture on a terminal, plain lines elsewhere. It only reads the run folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from io import UnsupportedOperation
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from streamrl.errors import UserError
from streamrl.plain_files import NotPlainFile
from streamrl.report.job_control import JobControl
from streamrl.report.panels import SPARKLINE_STEPS, render, render_start, stale_message, step_line
from streamrl.report.process_rows import BAD_STATES
from streamrl.report.start_lines import StartLines, begun_at, present
from streamrl.report.summary import HeadlineRow, duration, headline_figures
from streamrl.report.terminal import TextConsole, redraws
from streamrl.run_dir import layout
from streamrl.run_dir.appended_lines import AppendedLines, AppendedRows
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.evaluations import EvaluationRow, best, evaluation_line
from streamrl.run_dir.jsonl import AnyRow, parse_briefly
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.newest_steps import NewestSteps
from streamrl.run_dir.start_stages import Stage, StageReader, launched_at
from streamrl.run_dir.status import RoleStatus, RunStatus, read_status

KEPT_STEPS = SPARKLINE_STEPS
"""Newest steps of which the rows are kept: those of a run of weeks would take gigabytes."""
PLAIN_WIDTH = 200
"""Columns assumed when the output is no terminal, so that a step's line stays one line in a log."""


def _starts_again(role: RoleStatus) -> bool:
    """Return whether an instance starts after a death, whose state may have been too short to be seen."""
    return role.role == "instance" and role.state == "starting" and bool(role.detail)


class PlainLines:
    """The choice of lines for a log: start-up progress, every step once, and trouble at once.

    State goes in, lines come out; it has no clock and no I/O.
    """

    def __init__(self, known: Sequence[MetricsRow], evaluated: Sequence[EvaluationRow] = ()) -> None:
        """Take the rows of a resumed run, `known` and `evaluated`, which are not shown again."""
        self._shown: set[tuple[int, float]] = set()
        self._warned = False
        self.know(known)
        self._shown_evaluations = {(row.step, row.time) for row in evaluated}
        self._roles: dict[str, str] = {}
        self._lost: set[str] = set()
        """Instances that are starting again."""
        self._start: StartLines | None = StartLines()
        """None once the first sample has come."""
        self._state = ""
        self._stale_shown = 0.0
        self._begun = math.inf
        """When the first process was started, in unix seconds; infinite: none is known."""
        self._away: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._disk_warned = False
        self._wanted: dict[str, int] = {}
        self._shown_instances: set[tuple[str, float, str]] = set()

    def know(self, known: Sequence[MetricsRow]) -> None:
        """Take further rows that are not shown again."""
        self._shown.update((row.step, row.time) for row in known)
        self._warned = bool(known[-1].length_bias_warning) if known else self._warned

    def lines(
        self,
        status: RunStatus | None,
        rows: Sequence[MetricsRow],
        now: float,
        evaluations: Sequence[EvaluationRow] = (),
        stages: Mapping[str, Stage] | None = None,
    ) -> list[str]:
        """Return the lines that are new since the last call.

        Args:
            status: the run's status; None: the controller has not written one yet.
            rows: metrics of the newest steps, with all that came since the last call but those of a run that starts.
            now: unix seconds.
            evaluations: all so far.
            stages: the start-up stage that each process last reported.
        """
        doing = present(status, stages or {})
        self._begun = min(self._begun, begun_at(stages or {}, math.inf))
        found: list[str] = []
        if status is not None:
            found += self._state_lines(status, self._lasted(status, status.as_of(now)))
        found += self._start_lines(status, rows, now, doing)
        # a row that was written since this status is shown with the next one, after what the start has to say
        is_starting = status is not None and status.state == "starting"
        for index, row in enumerate(rows):
            if is_starting or (row.step, row.time) in self._shown:
                continue
            self._shown.add((row.step, row.time))
            steps = row.step if status is None else max(status.steps, row.step)
            left = None if status is None or index < len(rows) - 1 else status.eta_s
            found.append(step_line(row, rows[index - 1] if index else None, steps, left))
            found += self._bias_lines(row)
            found += [f"warning: {row.mismatch_warning}"] if row.mismatch_warning else []
        found += self._evaluation_lines(evaluations)
        if status is not None:
            mismatch = "warning: ", status.verified.mismatch
            if status.disk_warning and not self._disk_warned:
                found.append(f"warning: {status.disk_warning}")  # its figures change with every step
            self._disk_warned = bool(status.disk_warning)
            for about, note in (("schedule: ", status.schedule_note), ("", status.ranker.note), mismatch):
                before, self._notes[about] = self._notes.get(about, ""), note
                if note and note != before:  # a controller that starts anew has none at first
                    found.append(about + note)
            found += self._scaling_lines(status)
            found += self._site_lines(status)
            found += self._stale_lines(status, now)
        return found

    def _scaling_lines(self, status: RunStatus) -> list[str]:
        """Report changed targets of pools, and new instances when they are ready and have their first sample."""
        found = []
        wanted, self._wanted = self._wanted, dict(status.scaling.wanted)
        for pool, count in status.scaling.wanted.items():
            if pool in wanted and wanted[pool] != count:
                found.append(f"pool {pool}: {wanted[pool]} -> {count} instances; {status.scaling.note}".rstrip("; "))
        for one in status.scaling.coming:
            for what, then in (("ready", one.ready_at), ("first sample", one.first_sample_at)):
                if then is not None and (one.instance, one.requested_at, what) not in self._shown_instances:
                    self._shown_instances.add((one.instance, one.requested_at, what))
                    found.append(f"{one.instance}: {what} {duration(then - one.requested_at)} after it was asked for")
        return found

    def _site_lines(self, status: RunStatus) -> list[str]:
        """Report a site once when it goes silent or says goodbye, and once when it is back."""
        found = []
        for name, site in status.sites.items():
            if site.away and name not in self._away:
                waits = "" if site.excluded else "; what it has is waited for"
                found.append(f"{name}: {site.absence}{waits}")
            elif not site.away and name in self._away:
                found.append(f"{name} is back after {duration(self._away.pop(name))} or more")
            if site.away:
                self._away[name] = site.silent_s
        return found

    def _bias_lines(self, row: MetricsRow) -> list[str]:
        """Report a length bias when it begins and when it ends; in between its figures are in every row."""
        warned, self._warned = self._warned, bool(row.length_bias_warning)
        if row.length_bias_warning and not warned:
            return [f"warning: {row.length_bias_warning}"]
        return ["the length bias has ended"] if warned and not self._warned else []

    def _evaluation_lines(self, evaluations: Sequence[EvaluationRow]) -> list[str]:
        found = []
        for index, row in enumerate(evaluations):
            if (row.step, row.time) not in self._shown_evaluations:
                self._shown_evaluations.add((row.step, row.time))
                found.append(evaluation_line(row, evaluations[: index + 1]))
        return found

    def _start_lines(
        self, status: RunStatus | None, rows: Sequence[MetricsRow], now: float, doing: Mapping[str, Stage]
    ) -> list[str]:
        """Report what the processes do until the first sample since this start."""
        if status is not None and status.state == "starting":
            self._start = self._start or StartLines()  # the run is starting again
        if self._start is None:
            return []
        if status is None or status.state == "starting":
            return self._start.lines(doing, now)
        news = any((row.step, row.time) not in self._shown for row in rows)
        if not (status.final or news or status.progress.samples_finished):
            return self._start.lines(doing, now)
        begun, self._start = self._start.begun, None
        if not begun or status.final:
            return []
        return [f"[{self._lasted(status, now)}] the first sample is finished"]

    def _lasted(self, status: RunStatus, now: float) -> str:
        """Return how long the launch has lasted, in words; the start stays when the first process is replaced."""
        begun = self._begun if math.isfinite(self._begun) else status.started_at
        return duration(status.elapsed(now, begun))

    def _state_lines(self, status: RunStatus, lasted: str) -> list[str]:
        found, roles = [], self._roles
        self._roles = roles | {name: role.state for name, role in status.roles.items()}
        lost = {name for name, role in status.roles.items() if _starts_again(role)}
        changed = [
            f"{name}: {role.state}" + (f" ({role.detail})" if role.detail else "")
            for name, role in status.roles.items()
            if (role.state in BAD_STATES and role.state != roles.get(name))
            or (name in lost and roles.get(name) not in BAD_STATES and name not in self._lost)
        ]
        self._lost = lost
        if changed:
            found.append(f"[{lasted}] " + "  ".join(changed))
        if status.state != self._state:
            self._state = status.state
            found.append(f"[{lasted}] {status.run}: {status.state}")
            if status.error:
                found.append(f"error: {status.short_error}")
        return found

    def _stale_lines(self, status: RunStatus, now: float) -> list[str]:
        age = status.stale_for(now)
        if age is None:
            shown, self._stale_shown = self._stale_shown, 0.0
            return [f"updates are back after {duration(shown)} or more"] if shown and not status.final else []
        if age < 2 * self._stale_shown or age < 0:  # a live run writes again at once, by the clock that was set
            return []
        self._stale_shown = age
        return [stale_message(status, now) or ""]


class LiveView:
    """A view of a live run. Use it as a context manager and call `refresh` about twice a second."""

    def __init__(
        self,
        run_dir: Path,
        plain: bool | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
        largest: int | None = layout.LARGEST_ROWS,
    ) -> None:
        """Prepare the view; `refresh` draws it.

        Args:
            run_dir: the run folder; it may not hold a run yet.
            plain: lines instead of a picture; default: lines unless on a terminal on which a picture can be redrawn.
            console: where to write; default: standard output.
            clock: returns unix seconds.
            largest: most bytes of a file of rows; None: any number, in the run's own launcher.
        """
        self.run_dir = run_dir
        self._console = console or TextConsole(highlight=False)
        self._plain = not redraws(self._console) if plain is None else plain
        self._clock = clock
        self._largest = largest
        self._steps = NewestSteps(run_dir, largest)
        self._evaluations = AppendedRows(run_dir / layout.EVALUATIONS, EvaluationRow, largest)
        self._unread: set[Path] = set()
        """Files of rows that are not read, as was said once."""
        self._stages = StageReader(run_dir)
        self._newest: RunStatus | None = None
        """The status that `refresh` read last."""
        self._live: Live | None = None
        self._job: JobControl | None = None
        self._lines = PlainLines([], self._rows(self._evaluations))
        known = None
        while known != (known := self._newest_key()):  # a part of a long file at a time
            self._lines.know(self._rows(self._steps, 1))
            self._steps.keep_newest(KEPT_STEPS)

    def __enter__(self) -> Self:
        if not self._plain:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")
            with contextlib.suppress(UnsupportedOperation):  # it has no file descriptor
                self._job = JobControl(self._console.file.fileno()).__enter__()  # before the cursor is hidden
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._job is not None:
            self._job.__exit__()
            if self._job.is_away():
                self._job.take_page()
        if self._live is not None:
            self._show(None)  # the last picture is left standing, and may scroll
            self._live.stop()
            self._live = None

    def refresh(self) -> RunStatus | None:
        """Show what has changed; return the status read, None before the controller has written one."""
        self._newest = self._show(self._console.size.height)
        return self._newest

    @property
    def farewell(self) -> str:
        """What holds up the end of a run that is done, as `refresh` read it last; '': nothing."""
        return "" if self._newest is None else self._newest.farewell

    def _show(self, height: int | None) -> RunStatus | None:
        """Show what has changed, in a picture of at most `height` lines; None: of any, which `Live.stop` draws."""
        now, status = self._clock(), self._status()
        if self._is_away() or not self.run_dir.exists():  # nothing is left to show of a folder that is gone
            return status
        rows, evaluations = self._rows(self._steps), self._rows(self._evaluations)
        stages = self._stages.read()
        if self._live is None:
            for line in self._lines.lines(status, rows, now, evaluations, stages):
                self.say(line)
            if status is not None and status.state != "starting":  # which has shown all
                self._steps.keep_newest(KEPT_STEPS)
            return status
        self._steps.keep_newest(KEPT_STEPS)
        if status is None:
            picture = render_start(self.run_dir.name, stages, now, height)
        else:
            picture = render(status, rows, now, evaluations, stages, height, self._steps.sums)
        self._live.update(picture, refresh=height is not None)
        return status

    def summary(self) -> None:
        """Print the closing summary: steps done, figures, and where the results are."""
        rows, status = self._rows(self._steps), self._status()
        self.say("")
        if status is not None:
            elapsed = duration(status.elapsed(status.updated_at))
            first, launched = status.first_started_at, launched_at(self.run_dir)
            if first is not None and launched is not None and launched > first:  # the lines above count from there
                elapsed += f" ({duration(status.elapsed(status.updated_at, launched))} since it was resumed)"
            self.say(f"{status.run}: {status.state} after {elapsed}, step {status.step}/{status.steps}")
        if not rows:
            has_steps = status is not None and status.step > 0
            missing = f"no figures: {self.run_dir / layout.METRICS} has no rows"
            self.say(f"  {missing if has_steps else 'no optimizer step has finished'}")
        else:
            for what, value in headline_figures(self._all_steps() or rows):
                self.say(f"  {what:<28}{value}")
            if rows[-1].length_bias_warning:
                self.say(f"  warning: {rows[-1].length_bias_warning}")
        if status is not None and status.verified.words:
            self.say(f"  {'weights':<28}{status.verified.words}")
        if status is not None and status.verified.mismatch:
            self.say(f"  warning: {status.verified.mismatch}")
        if status is not None and status.untold:
            after = "" if status.absence_s is None else f" ({status.absence_s:g} s)"
            self.say(
                f"  warning: {', '.join(status.untold)} could not be told that the run is done: a launcher that still "
                f"waits there ends with an error after absence_s{after}; it may be stopped"
            )
        top, checkpoints = best(self._rows(self._evaluations)), self.run_dir / layout.CHECKPOINTS
        if top is not None:
            self.say(f"  {'best evaluation':<28}{evaluation_line(top)}")
        for what, path in (
            ("report", self.run_dir / layout.REPORT),
            ("checkpoint", latest_checkpoint(self.run_dir)),
            ("best checkpoint", None if top is None else CheckpointFolder(checkpoints).path(top.step)),
        ):
            if path is not None and path.exists():
                self.say(f"  {what:<28}{path}")
        if status is not None and status.error:
            self.say(f"  error: {status.short_error}")

    def _newest_key(self) -> tuple[int, int, float]:
        rows = self._steps.rows
        return (self._steps.generation, rows[-1].step, rows[-1].time) if rows else (self._steps.generation, 0, 0.0)

    def _all_steps(self) -> list[HeadlineRow]:
        """Return what headlines need of all steps; none if they cannot be read any more."""
        lines = AppendedLines(self._steps.path, largest=self._largest)
        rows: list[HeadlineRow] = []
        try:
            for _, some in lines.read_all():
                found = (parse_briefly(HeadlineRow, MetricsRow, line) for line in some)
                rows += (row for row in found if row is not None)
        except OSError:
            return []
        return rows

    def _rows(self, file: AppendedRows[AnyRow], enough: float = math.inf) -> list[AnyRow]:
        """Return the rows of a file, or those read before if it cannot be read now: a view never ends a run.

        Args:
            file: the file.
            enough: see `AppendedRows.look`.
        """
        try:
            return file.look(enough)
        except NotPlainFile as error:
            if file.path not in self._unread:
                self._unread.add(file.path)
                self.say(f"new rows are not shown: {error}")
        except OSError:
            pass
        return file.rows

    def _status(self) -> RunStatus | None:
        try:
            return read_status(self.run_dir)
        except UserError:
            return None

    def _is_away(self) -> bool:
        return self._job is not None and self._job.is_away()

    def say(self, line: str) -> None:
        """Print a line of the launcher."""
        width = None if self._console.file.isatty() else PLAIN_WIDTH
        # while the terminal is the shell's, the picture isn't drawn again below the line
        console = TextConsole(file=self._console.file, highlight=False) if self._is_away() else self._console
        console.print(Text(line), soft_wrap=True, width=width)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint of the highest step; None: none is seen."""
    folder = CheckpointFolder(run_dir / layout.CHECKPOINTS)
    try:
        step = folder.latest()
    except OSError:
        return None
    return None if step is None else folder.path(step)
