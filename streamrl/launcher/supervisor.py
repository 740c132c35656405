"""The supervisor: starts a run's processes, watches them, shows the run, and ends them all together.

At the trainer's site the run ends with the controller; elsewhere with that site's service.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.schedule import staleness_limit
from streamrl.errors import SEE_DOCS, ErrorCode, RunFailed, UserError, as_typed
from streamrl.launcher.process_group import ProcessGroup
from streamrl.launcher.site_setup import Share, prepare
from streamrl.launcher.unblocked_output import Output, unblocked_output
from streamrl.launcher.watchdog import Watchdog
from streamrl.report.live_view import LiveView
from streamrl.report.run_report import write_report
from streamrl.report.site_view import SiteView
from streamrl.rollouts.void import VoidCause
from streamrl.run_dir import layout
from streamrl.run_dir.finished import nothing_left
from streamrl.run_dir.launcher_lock import HeldFolder, in_use, owner_line
from streamrl.run_dir.status import RESUME, overwrite_status, read_status, write_status
from streamrl.runtime.stop_signals import on_stop
from streamrl.trackers.tracker_group import PATIENCE_S, QUICK_S, TrackerGroup

log = logging.getLogger(__name__)

POLL_S = 0.25
VIEW_S = 0.5
"""Seconds between two refreshes of the view; the controller writes as often."""
SETTLE_S = 1.0
"""Seconds to wait after a death: other processes that die of the same cause may explain it better."""
REPORT_S = 2.0
"""Seconds for the report after a request to stop, so that a stop takes less than 10 s in all."""
AGAIN_S = 0.25
"""Seconds between two interrupts of the report: code in C may swallow one, or raise another error instead."""

UNCHANGED = ErrorCode.RESUME, ErrorCode.CONFIGURATION, ErrorCode.CONTEXT
"""Codes of errors that a resume meets again as long as nothing is mended."""


class StopRequests(list[int]):
    """The signals that have asked to stop, in their order."""

    interrupting = False
    """Whether the next one also raises KeyboardInterrupt, and SIGALRM then comes every `AGAIN_S`."""


class FolderGone(RunFailed):
    """The run's folder has been moved or deleted while the run went on."""


class Interrupted(RunFailed):
    """The user stopped the run; it can be resumed."""

    exit_code = 130


def run(
    cluster: ClusterConfig,
    run_config: RunConfig,
    run_dir: Path,
    resume: bool,
    plain: bool,
    site: str | None = None,
    emulate: bool = False,
) -> None:
    """Run a cluster, or one site's share of it, until the run is done.

    Args:
        run_dir: the run's folder; created if missing.
        resume: continue from the newest checkpoint.
        plain: print plain lines instead of the live view.
        site: start only this site's processes.
        emulate: start all sites' processes here, with an emulated network between them.

    Raises:
        UserError: the folder is in use by another launcher, or is not writable.
        RunFailed: a process died or the run failed; the message ends with the cause.
        FolderGone: the folder has been moved, deleted or taken meanwhile; nothing is written there any more.
        Interrupted: Ctrl-C, SIGTERM, or a closed terminal.
    """
    with (
        _locked(run_dir) as held,
        _stop_requests() as stop,
        unblocked_output(stop) as output,
        prepare(cluster, run_config, run_dir, site, emulate) as share,
        _metrics(share) as address,
    ):
        (run_dir / layout.STATUS).unlink(missing_ok=True)

        def check_stop() -> None:
            if stop:
                raise _interrupted(stop, share)

        family = ProcessGroup(share, resume, check_stop)
        trackers = TrackerGroup(run_dir, run_config.trackers if share.trains else [])
        patience = QUICK_S
        started = time.time()
        view = LiveView(run_dir, plain=plain or None, largest=None) if share.trains else SiteView(run_dir)
        if address:
            print(f"metrics for Prometheus at {address}", flush=True)
        if share.network is not None:
            why = share.network.why_not_namespaces
            how = "network namespaces, tc tbf and a proxy" if why is None else f"a proxy alone (no namespaces: {why})"
            print(f"{len(share.folders)} sites emulated on this machine; links by {how}", flush=True)
        try:
            with _without_terminal(stop, share), view:
                if share.hosts:
                    view.say("asking Ray for nodes")  # the only message while Ray looks for the trainer's nodes
                watchdog = Watchdog(share)  # before the first process can write
                family.start()
                _watch(share, held, family, trackers, view, output, stop, watchdog)
                patience = PATIENCE_S
        except BaseException as error:
            family.stop()
            if isinstance(error, Exception) and not isinstance(error, Interrupted | FolderGone) and _is_gone(held):
                raise _gone(held) from error
            is_done = not held.is_gone and family.state == "done"  # which nothing that comes later changes
            if share.trains and not held.is_gone and not is_done:
                _final_state(run_dir, "interrupted" if isinstance(error, Interrupted) else "failed", error, started)
            if not (is_done and isinstance(error, Interrupted)):
                raise
        finally:
            family.stop()
            if share.trains and not held.is_gone:
                for line in _report(run_dir, stop):
                    view.say(line)
            for line in trackers.finish(patience, stop):
                view.say(line)
        view.summary()


def _watch(
    share: Share,
    held: HeldFolder,
    family: ProcessGroup,
    trackers: TrackerGroup,
    view: LiveView | SiteView,
    output: Output,
    stop: list[int],
    watchdog: Watchdog,
) -> None:
    """Watch the processes until the first one (the controller, or a site's service) is done.

    Raises:
        RunFailed: a process died and cannot be restarted.
        FolderGone: the run's folder is gone.
    """
    shown, said = float("-inf"), ""
    while True:
        if stop:
            raise _interrupted(stop, share)
        if _is_gone(held):  # before anything is written there, or judged by what is missing
            raise _gone(held)
        if family.has_ended():
            view.refresh()
            return _check_end(share, family)
        if share.network is not None:
            share.network.check()
        family.reconcile()
        for line in [*family.revive(), *family.troubles(), *trackers.look()]:
            view.say(line)
        for name, silent in watchdog.hanging(family.started).items():
            silence = f"{name} has given no sign of life for {silent:.0f} s: it is taken for dead"
            view.say(ErrorCode.HANG.refer(silence))
            limit = watchdog.limit_of(name)
            family.kill(name, f"it gave no sign of life for {silent:.0f} s, more than {limit} of the run file")
        if family.dead:
            time.sleep(SETTLE_S)
            if family.has_ended():
                return _check_end(share, family)
            if not (dead := family.dead):  # the controller has ended the run meanwhile
                continue
            culprit = next((p for p in dead if p.is_root_cause), dead[0])
            words = culprit.last_words(in_lines=True)
            raise RunFailed(words + _how_to_resume(share, _to_mend(words)))
        if time.monotonic() - shown >= VIEW_S and not output.behind:  # an output that is not read gets no more of it
            view.refresh()
            if not said and (said := view.farewell):
                view.say(said)
            shown = time.monotonic()
        time.sleep(POLL_S)


def _interrupted(stop: list[int], share: Share) -> Interrupted:
    return Interrupted(f"stopped by {_name(stop[0])}{_how_to_resume(share)}")


def _is_gone(held: HeldFolder) -> bool:
    """Return whether the run's folder is gone; a network file system may miss it for a moment."""
    if held.look():
        time.sleep(POLL_S)
        held.look()
    return held.is_gone


def _gone(held: HeldFolder) -> FolderGone:
    if held.is_taken():
        return FolderGone(
            f"run folder {held.path} belongs to another launcher, which was started after {layout.LOCK} had been "
            "removed there: this one has ended"
        )
    return FolderGone(
        f"run folder {held.path} is gone (moved or deleted?), the run has ended; from where it has been moved to, it "
        "can be resumed"
    )


@contextlib.contextmanager
def _without_terminal(stop: list[int], share: Share) -> Iterator[None]:
    """Take an error of a write to the terminal that has just been closed for what it is: a request to stop."""
    try:
        yield
    except OSError as error:
        if signal.SIGHUP in stop:
            raise _interrupted(stop, share) from error
        raise


@contextlib.contextmanager
def _metrics(share: Share) -> Iterator[str]:
    """Serve the metrics of the launcher's site if the cluster file says so; give their address, else ''."""
    name = next(iter(share.folders))
    endpoint = share.cluster.sites[name].metrics
    if endpoint is None:
        yield ""
        return
    from streamrl.exporter.metrics_server import serving_metrics

    limit = staleness_limit(share.run.schedule)
    with serving_metrics(endpoint, f"sites.{name}.metrics", share.run_dir, limit, name) as address:
        yield address


def _check_end(share: Share, family: ProcessGroup) -> None:
    """Check that the run is done: a controller stopped from outside exits cleanly although the run is not.

    One that hung or died after it had recorded the run's end may have recorded an error; a service records none.

    Raises:
        RunFailed: the run is not done.
    """
    if not share.trains and (state := family.state) != "done":
        raise RunFailed(f"the run has ended: {state} at its trainer's site")
    if share.trains and (status := read_status(share.run_dir)).state != "done":
        if status.error:
            raise RunFailed(status.error + _how_to_resume(share, _to_mend(status.error)))
        raise RunFailed(f"the controller was told to stop; the run is {status.state}{_how_to_resume(share)}")


def _to_mend(words: str) -> str:
    """Return what has to be mended before a run goes on that ended with these words; '': nothing that they name."""
    rewards = f"{SEE_DOCS}{ErrorCode.REWARD}" in words and f"Most frequent cause: {VoidCause.GENERATION}" not in words
    if any(f"{SEE_DOCS}{code}" in words for code in UNCHANGED):
        return "mend that, then "
    return "mend the reward, then " if rewards else ""


def _how_to_resume(share: Share, before: str = "") -> str:
    """Return the end of a message that says how to resume; empty for a site that only generates.

    A run that ended after its last checkpoint has nothing to resume.

    Args:
        before: what comes first.
    """
    if not share.trains:
        return ""
    options = ("--emulate",) if share.network else ("--site", share.cluster.trainer_site)
    where = as_typed(share.run_dir, *(options if share.cluster.remote_sites else ()))
    if (done := _nothing_left(share)) is not None:
        return (
            f"\nnothing is left to do: all {done} steps are done, the newest checkpoint is "
            f"{share.run_dir / layout.CHECKPOINTS / f'step_{done}'}; to train it further: streamrl launch --resume "
            f"{where} --steps {done + share.run.steps}"
        )
    return f"\n{before}{RESUME} {where}"


def _nothing_left(share: Share) -> int | None:
    """Return the step of the newest checkpoint if the run has done everything; None: it has not, or nobody knows."""
    try:
        return nothing_left(share.run_dir, share.run)
    except (OSError, UserError):
        return None


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[HeldFolder]:
    """Create the run's folder and hold its lock, so that no second launcher replaces keys and addresses there."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / layout.LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(in_use(run_dir, lock.read() or "just started")) from None
        except OSError as error:
            raise UserError(
                f"cannot lock {run_dir / layout.LOCK}: {error.strerror}; without one, a second launcher could replace "
                "this one's keys and addresses: put the run on a file system that has locks (--runs-dir)"
            ) from error
        lock.truncate(0)
        lock.write(owner_line())
        lock.flush()
        with contextlib.closing(HeldFolder(run_dir, lock.fileno())) as held:
            yield held


@contextlib.contextmanager
def _stop_requests() -> Iterator[StopRequests]:
    """Collect requests to stop in a list instead of raising; a second one does not disturb the shutdown."""
    received = StopRequests()

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if received.interrupting:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            raise KeyboardInterrupt

    previous = on_stop(handler, signal.SIGINT, signal.SIGTERM)
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _final_state(run_dir: Path, state: str, error: BaseException, started: float) -> None:
    """Write the cause into status.json: the controller may have died without doing so."""
    now = time.time()
    try:
        last = read_status(run_dir)
        status = last.model_dump() | {"elapsed_s": last.elapsed(now)}
    except UserError:
        status = {"run": run_dir.name, "step": 0, "steps": 0, "started_at": started}
    cause = None if state == "interrupted" else str(error)
    status |= {"state": state, "error": cause, "updated_at": now}
    try:
        write_status(run_dir, status)
    except OSError:
        overwrite_status(run_dir, status)


def _report(run_dir: Path, stop: StopRequests) -> list[str]:
    """Write report.html, and return what to say of it; neither a failure nor a request to stop fails the run.

    After a request to stop it has `REPORT_S`. Whatever it raises once it was interrupted is taken for the interrupt.
    """
    asked, late = len(stop), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal late
        late = True
        if stop.interrupting:
            raise KeyboardInterrupt

    try:
        with _alarm(interrupt, REPORT_S if stop else 0), _silent_interrupts():
            try:
                stop.interrupting = True
                write_report(run_dir)
            finally:
                stop.interrupting = False
    except (Exception, KeyboardInterrupt) as error:
        if late or isinstance(error, KeyboardInterrupt) or len(stop) > asked:
            why = f"was stopped by {_name(stop[-1])}" if len(stop) > asked else f"would take more than {REPORT_S:g} s"
            how = as_typed("streamrl", "report", run_dir)
            return [f"the report {why} and is not written: `{how}` writes it"]
        if isinstance(error, OSError):
            log.warning("cannot write the report of %s: %s", run_dir, error)
        else:
            log.exception("cannot write the report of %s", run_dir)
    return []


@contextlib.contextmanager
def _alarm(handler: Callable[[int, FrameType | None], None], first_s: float) -> Iterator[None]:
    """Call a handler at SIGALRM, then put the former one and its timer back; only the main thread gets signals.

    Args:
        handler: what is called.
        first_s: seconds until the first SIGALRM, after which they come every `AGAIN_S`; 0: none comes by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    former = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, first_s, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextlib.contextmanager
def _silent_interrupts() -> Iterator[None]:
    """Print no traceback of an interrupt that Python drops, as it does where an object is deleted."""
    former = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            former(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = former


def _name(number: int) -> str:
    return signal.Signals(number).name
