"""Inject one fault after another into a live run, until the time is over.

    wait for a first step -> pause -> inject -> follow until the run has recovered and done a step -> audit -> pause ...

If the run does not recover from a fault within a limit, that is a hang: the study records the sentence of
`streamrl why-stuck` and undoes the fault. If the run then continues, so does the study. A run that has ended is
resumed, if this process has started it; only a full disk and a killed launcher may end one.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamrl.chaos.audit import Audit, audit
from streamrl.chaos.faults import ENDS_RUN, OF_INSTANCES, Fault, FaultKind
from streamrl.chaos.follow import Following, Observation
from streamrl.chaos.inject import Injected, Injector, NotPossible
from streamrl.chaos.observation import Logs, interrupted, look, read_account
from streamrl.chaos.own_launcher import Launcher
from streamrl.diagnose.snapshot import collect
from streamrl.diagnose.stuck import judge
from streamrl.errors import RunFailed
from streamrl.generation.instance.instance_process import JOURNAL_EVERY_S
from streamrl.run_dir.status import FINAL_STATES as ENDED

log = logging.getLogger(__name__)

POLL_S = 0.2
BUSY_S = 15.0
"""Seconds to wait until an instance to be lost has requests: losing an idle one shows little."""
RATES = 10
"""Newest observations whose highest rate counts as an instance's rate.

A single heartbeat's rate averages a second in which requests may have begun.
"""


@dataclass(frozen=True)
class Result:
    """The outcome of one fault; times are seconds since its injection, None: not seen."""

    number: int
    kind: FaultKind
    target: str
    at: float
    """Time of injection, in unix seconds."""
    step: int
    """Steps done when it was injected."""
    noticed_s: float | None = None
    serving_s: float | None = None
    recovered_s: float | None = None
    stepped_s: float | None = None
    requests: int | None = None
    """Requests at the lost instance; None: none was lost, or its service has not reported them."""
    tokens: int | None = None
    """Tokens of these requests, as last reported."""
    kept: int | None = None
    """Number of these tokens in the journal."""
    unseen: int | None = None
    """Estimated tokens since the instance's last report: its rate times half the interval between reports."""
    lost: int = 0
    """Samples lost, by the audit after the fault less the audit before."""
    twice: int = 0
    hang: str = ""
    """The sentence of `why-stuck` when the limit was over."""
    ended: str = ""
    """Why the run has ended because of the fault, if it has."""
    unnoticed: bool = False
    """Whether damaged weights were loaded without being noticed."""
    note: str = ""

    @property
    def regenerated(self) -> int | None:
        """Tokens that had to be generated again, including those not yet reported."""
        if self.tokens is None or self.kept is None:
            return None
        return self.tokens - self.kept + (self.unseen or 0)

    @property
    def harmless(self) -> bool:
        """Whether the run continued and kept every sample."""
        unexpected = bool(self.ended) and self.kind not in ENDS_RUN
        return not (self.lost or self.twice or self.hang or unexpected or self.unnoticed)


class Study:
    """A series of faults in a live run, each followed until the run has recovered."""

    def __init__(
        self,
        run_dir: Path,
        injector: Injector,
        faults: Iterator[Fault],
        launcher: Launcher | None,
        minutes: float,
        most_faults: int | None,
        recovery_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Prepare a study; `run` carries it out.

        Args:
            launcher: the run's launcher; None: it was started elsewhere, and the run is only observed.
            most_faults: None: as many as the time allows.
            recovery_s: seconds for a run to recover and do one more step.
            say: gets one line about each fault.
        """
        self.run_dir, self.injector, self.faults = run_dir, injector, faults
        self.launcher, self.recovery_s, self.say = launcher, recovery_s, say
        self.minutes, self.most_faults = minutes, most_faults
        self.results: list[Result] = []
        self.ended = ""
        """Why the study ended before its time."""
        self._logs = Logs(run_dir)
        self._rates: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RATES))
        """Tokens per second of each process, in the newest observations."""
        self._audit: Audit | None = None

    def run(self) -> None:
        """Inject faults until the time is over, or the run cannot continue."""
        began = time.monotonic()
        self._audit = self._audited()
        while time.monotonic() - began < 60 * self.minutes and not self.ended:
            if self.most_faults is not None and len(self.results) >= self.most_faults:
                return
            fault = next(self.faults)
            self._idle(fault.pause_s)
            if self.ended or not self._may_begin(fault):
                continue
            try:
                result = self._one(fault)
            except NotPossible as error:
                self.say(f"{fault.number:3d} {fault.kind} of {fault.target} is left out: {error}")
                continue
            self.results.append(result)
            self.say(line(result, time.monotonic() - began))

    def _look(self) -> Observation:
        seen = look(self.run_dir, self._logs.read(), self.launcher is None or self.launcher.runs)
        for name, one in seen.instances.items():
            self._rates[name].append(one.tokens_per_s or 0.0)
        return seen

    def _idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended:
            if self._is_over(self._look()):
                return
            time.sleep(POLL_S)

    def _is_over(self, seen: Observation) -> bool:
        """Return whether the run has ended although no fault was injected."""
        if seen.state == "done":
            self.ended = "the run has done all its steps"
        elif not seen.launched or seen.state in ENDED:
            self.ended = f"the run has ended by itself: {self._cause(seen)}"
        return bool(self.ended)

    def _cause(self, seen: Observation) -> str:
        words = seen.error or (self.launcher.last_words() if self.launcher is not None else "") or seen.state
        return (words.splitlines() or ["no cause was reported"])[0].partition("; the end of ")[0]

    def _may_begin(self, fault: Fault) -> bool:
        """Wait until the run is healthy and, before the loss of an instance, until that has requests."""
        end, busy = time.monotonic() + self.recovery_s, time.monotonic() + BUSY_S
        while time.monotonic() < end:
            seen = self._look()
            if self._is_over(seen):
                return False
            one = seen.roles.get(fault.target)
            works = fault.kind not in OF_INSTANCES or one is None or one.running or time.monotonic() > busy
            if seen.healthy() and works:
                return True
            time.sleep(POLL_S)
        self.ended = f"the run was not healthy before fault {fault.number}: {self._sentence()}"
        return False

    def _one(self, fault: Fault) -> Result:
        """Inject one fault and follow it.

        Raises:
            NotPossible: the fault cannot be injected at present.
        """
        before = self._look()
        self._logs.lines.clear()
        at, began = time.time(), time.monotonic()
        injected = self.injector.inject(fault, before)
        rate = sum(max(self._rates[name]) for name in injected.replaced & self._rates.keys())
        following = Following(fault, before, injected.replaced, at)
        hang = ended = ""
        try:
            ended = self._follow(following, injected, began)
            if not following.done:
                hang = self._sentence()
        finally:
            injected.undo()
        if hang:
            following.over = True
            self._follow(following, injected, time.monotonic())
            if not following.done:
                self.ended = f"the run hangs: {hang}"
        return self._result(following, injected, rate, hang, ended)

    def _follow(self, following: Following, injected: Injected, since: float) -> str:
        """Observe until the run has recovered and done a step, or the limit is over; resume it if it ends.

        Args:
            since: start of the limit, and of a fault that is not over, in monotonic seconds.

        Returns:
            Why the run has ended meanwhile; '': it has not.
        """
        ended = ""
        while not following.done and time.monotonic() - since < self.recovery_s:
            if not following.over and time.monotonic() - since >= injected.lasts_s:
                if injected.lasts_s:
                    injected.undo()
                following.over = True
            seen = self._look()
            following.see(seen)
            if following.noticed is None and following.recovered is None:
                following.weights_loaded(seen, injected.damaged)
                injected.keep_on()
            if not seen.launched:
                if following.fault.kind is not FaultKind.LAUNCHER_KILL:
                    ended = ended or self._cause(seen)
                self._resume(following)
            elif self.launcher is None and seen.state in ENDED:
                return self._cause(seen)
            time.sleep(POLL_S)
        return ended

    def _resume(self, following: Following) -> None:
        """Resume the run, once all its remaining processes have ended."""
        assert self.launcher is not None
        if left := self.launcher.wait_for_end():
            log.warning("killed processes that had not ended by themselves: %s", ", ".join(left))
        if following.fault.kind is FaultKind.LAUNCHER_KILL and following.noticed is None:
            following.noticed = time.time() - following.at
        self.launcher.start()

    def _sentence(self) -> str:
        try:
            return judge(collect(self.run_dir)).sentence
        except (OSError, ValueError) as error:
            return f"the run's folder cannot be read: {error}"

    def _audited(self) -> Audit | None:
        """Audit the run; None: its files are being changed or cannot be read, which the final audit will show."""
        with contextlib.suppress(OSError, sqlite3.Error, ValueError):
            return audit(read_account(self.run_dir))
        return None

    def _result(self, following: Following, injected: Injected, rate: float, hang: str, ended: str) -> Result:
        """Return the outcome of a fault; `rate` is in tokens per second, of the lost instances."""
        fault, before, after = following.fault, self._audit, self._audited()
        lost = max(0, after.lost - before.lost) if after is not None and before is not None else 0
        twice = max(0, after.twice - before.twice) if after is not None and before is not None else 0
        self._audit = after or before
        requests, tokens, kept = interrupted(self._logs.read(), injected.replaced) or (None, None, None)
        versions = f"versions {', '.join(map(str, injected.damaged))}" if injected.damaged else ""
        return Result(
            number=fault.number,
            kind=fault.kind,
            target=fault.target,
            at=following.at,
            step=following.before.step,
            noticed_s=following.noticed,
            serving_s=following.serving,
            recovered_s=following.recovered,
            stepped_s=following.stepped,
            requests=requests,
            tokens=tokens,
            kept=kept,
            unseen=round(rate * JOURNAL_EVERY_S / 2) if requests else None,
            lost=lost,
            twice=twice,
            hang=hang,
            ended=ended,
            unnoticed=following.unnoticed_weights,
            note=injected.note or versions,
        )


def line(result: Result, since_s: float) -> str:
    """Describe the outcome of a fault in one line; `since_s`: seconds since the study's beginning."""
    note = f" ({result.note})" if result.note else ""
    minutes, seconds = divmod(int(since_s), 60)
    begin = f"[{minutes:2d}:{seconds:02d}] {result.number:3d} {result.kind} {result.target}{note}:"
    named = {"noticed": result.noticed_s, "others serve": result.serving_s, "recovered": result.recovered_s}
    times = [f"{name} {after:.1f} s" for name, after in named.items() if after is not None]
    if result.tokens:
        times.append(f"{result.kept} of {result.tokens + (result.unseen or 0)} tokens kept")
    if result.ended:
        times.append(f"the run ended: {result.ended}")
    if result.hang:
        times.append(f"HANG: {result.hang}")
    if result.unnoticed:
        times.append("DAMAGED WEIGHTS WERE LOADED")
    if result.lost or result.twice:
        times.append(f"{result.lost} SAMPLES LOST, {result.twice} TRAINED TWICE")
    return f"{begin} {', '.join(times) or 'nothing seen'}"


def wait_for_first_step(run_dir: Path, launcher: Launcher | None, limit_s: float) -> None:
    """Wait until a run is healthy and has done a step.

    Raises:
        RunFailed: the run has ended, or took longer than `limit_s`.
    """
    end = time.monotonic() + limit_s
    while not ((seen := look(run_dir, (), launcher is None or launcher.runs)).healthy() and seen.step_at):
        if not seen.launched or seen.state in ENDED:
            words = launcher.last_words() if launcher is not None else ""
            raise RunFailed(f"the run has ended before its first step: {seen.error or words or seen.state}")
        if time.monotonic() > end:
            raise RunFailed(f"no step was done within {limit_s:.0f} s: {judge(collect(run_dir)).sentence}")
        time.sleep(POLL_S)
