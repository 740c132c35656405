"""Starts a run's processes, watches them, shows the run, and ends all of them together."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import save_resolved
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launch.context import Addresses
from streamrl.launch.local import LocalProcess, start
from streamrl.launch.plan import plan_processes
from streamrl.observe.live import LiveView
from streamrl.observe.report import write_report
from streamrl.observe.status import read_status, write_status
from streamrl.weights.store import WeightStore, store_directory

log = logging.getLogger(__name__)

POLL_S = 0.25
STOP_S = 6.0
"""From SIGTERM to SIGKILL; with the rest of the work a Ctrl-C takes less than 10 s."""
SETTLE_S = 1.0
"""After a death: others that die of the same cause may say more of it."""


class Interrupted(RunFailed):
    """The user stopped the run; it can be resumed."""

    exit_code = 130


def run(cluster: ClusterConfig, run_config: RunConfig, run_dir: Path, resume: bool, plain: bool) -> None:
    """Runs a cluster until it is done.

    Args:
        cluster: the resolved cluster file.
        run_config: the resolved run file.
        run_dir: the run's folder; made if it is not there.
        resume: continue from its newest checkpoint.
        plain: plain lines instead of a live view.

    Raises:
        UserError: the folder is in use by another launcher, or cannot be written.
        RunFailed: a process died or the run failed; the message ends with the cause.
        Interrupted: Ctrl-C or SIGTERM.
    """
    with _own(run_dir), _stop_requests() as stop:
        save_resolved(run_dir, cluster, run_config)
        (run_dir / "status.json").unlink(missing_ok=True)
        _choose_addresses(cluster).save(run_dir)
        (run_dir / "logs").mkdir(exist_ok=True)
        store = WeightStore(store_directory(run_dir))
        store.clear()
        processes: list[LocalProcess] = []
        started = time.time()
        view = LiveView(run_dir, plain=plain or None)
        try:
            with view:
                for spec in plan_processes(cluster, run_config, run_dir):
                    processes.append(start(spec, run_dir / "logs", resume))
                _watch(processes, view, stop)
        except BaseException as error:
            _stop(processes)
            _final_state(run_dir, "interrupted" if isinstance(error, Interrupted) else "failed", error, started)
            raise
        finally:
            _stop(processes)
            store.clear()
            _report(run_dir)
        view.summary()


def _watch(processes: list[LocalProcess], view: LiveView, stop: list[int]) -> None:
    """Returns when the controller is done.

    Raises:
        RunFailed: any process died before.
        Interrupted: a stop was asked for.
    """
    controller = processes[0]
    while True:
        if stop:
            raise Interrupted(f"stopped by {signal.Signals(stop[0]).name}; {_how_to_resume(view.run_dir)}")
        if controller.exit_code == 0:
            view.refresh()
            return
        dead = [p for p in processes if p.exit_code is not None]
        if dead:
            time.sleep(SETTLE_S)
            dead += [p for p in processes if p.exit_code is not None and p not in dead]
            if controller.exit_code == 0:
                return
            culprit = next((p for p in dead if p.is_root_cause), dead[0])
            raise RunFailed(f"{culprit.last_words()}\n{_how_to_resume(view.run_dir)}")
        view.refresh()
        time.sleep(POLL_S)


def _how_to_resume(run_dir: Path) -> str:
    return f"continue with: streamrl launch --resume {run_dir}"


def _stop(processes: list[LocalProcess]) -> None:
    """Tells all to stop, the controller first (it writes what it knows), and kills who does not."""
    deadline = time.monotonic() + STOP_S
    for process in processes[:1]:
        process.signal(signal.SIGTERM)
        while process.exit_code is None and time.monotonic() < deadline - STOP_S / 2:
            time.sleep(0.05)
    for process in processes[1:]:
        process.signal(signal.SIGTERM)
    while any(p.exit_code is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.kill()  # also what a finished process may have left behind


@contextlib.contextmanager
def _own(run_dir: Path) -> Iterator[None]:
    """Makes the run's folder and holds its lock."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_dir} is in use by another launcher") from None
        yield


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of raising anywhere; a second one does not disturb the stopping."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _choose_addresses(cluster: ClusterConfig) -> Addresses:
    """Free ports on this machine, all different; the controller's may be fixed by the cluster file."""
    home = cluster.sites[cluster.trainer_site]
    with contextlib.ExitStack() as held:

        def free_port() -> int:
            probe = held.enter_context(socket.socket())
            probe.bind((home.address, 0))
            return int(probe.getsockname()[1])

        def address(port: int = 0) -> str:
            return f"tcp://{home.address}:{port or free_port()}"

        return Addresses(
            controller=address(home.port),
            publisher=address(),
            services={site: address() for site in cluster.sites},
            nccl_port=free_port(),
        )


def _final_state(run_dir: Path, state: str, error: BaseException, started: float) -> None:
    """Puts the cause into status.json: the controller may have died without."""
    try:
        status = read_status(run_dir).model_dump()
    except UserError:
        status = {"run": run_dir.name, "step": 0, "steps": 0, "started_at": started}
    status |= {
        "state": state,
        "error": None if state == "interrupted" else str(error),
        "updated_at": time.time(),
    }
    with contextlib.suppress(OSError):
        write_status(run_dir, status)


def _report(run_dir: Path) -> None:
    """Writes report.html; a run is not lost because its report failed."""
    try:
        write_report(run_dir)
    except Exception:
        log.exception("cannot write the report of %s", run_dir)
