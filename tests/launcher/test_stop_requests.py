"""Ctrl-C, SIGTERM and a closed terminal stop a launcher, which cleans up; `nohup` keeps it running."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from streamrl.cli import chaos
from streamrl.launcher import preflight, site_setup, supervisor
from streamrl.report.live_view import LiveView
from streamrl.run_dir.site_status import starting, write_site
from streamrl.run_dir.status import read_status, write_status
from streamrl.runtime.stop_signals import on_stop
from tests.cli.calling import streamrl
from tests.report.synthetic import make_status
from tests.signals import own_handlers
from tests.troubled_place import Place
from tests.waiting import scaled

ROOT = Path(__file__).parents[2]
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TELLS_LAUNCHER = "import os, time; os.kill(os.getppid(), {number}); time.sleep(3600)"


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Keeps pytest's handlers, and makes SIGHUP and SIGQUIT ones that nobody ignores yet."""
    with own_handlers(*NUMBERS):
        for number in (signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capfd)


def test_requests_are_collected_and_the_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    with supervisor._stop_requests() as stop:
        for number in NUMBERS:
            signal.raise_signal(number)
        assert stop == list(NUMBERS)
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


def test_what_ignores_a_closed_terminal_keeps_doing_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with supervisor._stop_requests() as stop:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert stop == [signal.SIGTERM] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_report_that_is_being_written_is_stopped_and_says_how_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes(run_dir: Path) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it would write on")

    monkeypatch.setattr(supervisor, "write_report", writes)
    with supervisor._stop_requests() as stop:
        signal.raise_signal(signal.SIGTERM)  # it has stopped the run, whose report is written all the same
        (line,) = supervisor._report(tmp_path, stop)
        signal.raise_signal(signal.SIGTERM)
        assert stop == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert line == f"the report was stopped by SIGINT and is not written: `streamrl report {tmp_path}` writes it"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_report_that_takes_long_does_not_hold_up_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    written: list[Path] = []

    def writes(run_dir: Path) -> None:
        threading.Event().wait(scaled(10))
        written.append(run_dir)

    monkeypatch.setattr(supervisor, "write_report", writes)
    monkeypatch.setattr(supervisor, "REPORT_S", 0.01, raising=False)
    with supervisor._stop_requests() as stop:
        signal.raise_signal(number)
        said = supervisor._report(tmp_path, stop)
    assert not written
    assert said == [
        f"the report would take more than 0.01 s and is not written: `streamrl report {tmp_path}` writes it"
    ]


@pytest.mark.parametrize("requests", [[], [signal.SIGTERM]])
def test_an_error_that_an_interrupted_report_raises_instead_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, requests: list[int]
) -> None:
    def writes(run_dir: Path) -> None:
        try:
            if not requests:
                signal.raise_signal(signal.SIGINT)
            threading.Event().wait(scaled(10))
        except KeyboardInterrupt:
            raise ValueError("Invalid affine transformation matrix") from None  # as code in C does

    monkeypatch.setattr(supervisor, "write_report", writes)
    monkeypatch.setattr(supervisor, "REPORT_S", 0.01)
    with supervisor._stop_requests() as stop:
        stop += requests
        (line,) = supervisor._report(tmp_path, stop)
    why = "would take more than 0.01 s" if requests else "was stopped by SIGINT"
    assert line == f"the report {why} and is not written: `streamrl report {tmp_path}` writes it"
    assert not caplog.records


@pytest.mark.parametrize("requests", [[], [signal.SIGTERM]])
def test_a_report_that_swallows_an_interrupt_is_interrupted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], requests: list[int]
) -> None:
    written: list[Path] = []

    def deleted(number: int) -> None:
        """Python drops, and prints, what is raised where an object is deleted."""
        thing = threading.Event()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(number))
        del thing
        assert reference() is None

    def writes(run_dir: Path) -> None:
        deleted(signal.SIGALRM if requests else signal.SIGINT)
        try:
            threading.Event().wait(scaled(10))
        except KeyboardInterrupt:
            threading.Event().wait(scaled(10))
        written.append(run_dir)

    hook, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(supervisor, "write_report", writes)
    monkeypatch.setattr(supervisor, "REPORT_S", 0.1)
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.1)
    with supervisor._stop_requests() as stop:
        stop += requests
        (line,) = supervisor._report(tmp_path, stop)
    assert "is not written" in line and not written
    assert not capfd.readouterr().err
    assert sys.unraisablehook is hook and signal.getsignal(signal.SIGALRM) is alarm


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launch_that_is_told_to_stop_says_how_it_goes_on(place: Place, number: signal.Signals) -> None:
    printed = place.supervise({"controller": TELLS_LAUNCHER.format(number=int(number))}, code=130)
    assert f"error: stopped by {number.name}\n" in printed
    assert "continue with: streamrl launch --resume runs/tiny\n" in printed
    assert read_status(place.folder / "runs" / "tiny").state == "interrupted"


@pytest.mark.parametrize(("step", "evaluates", "left"), [(4, False, False), (3, False, True), (4, True, True)])
def test_a_launch_that_is_told_to_stop_after_its_last_checkpoint_has_nothing_to_go_on_with(
    place: Place, step: int, evaluates: bool, left: bool
) -> None:
    run: dict[str, Any] = {}
    if evaluates:
        (place.folder / "held_out.jsonl").write_text(json.dumps({"prompt": "2+2", "answer": "4"}))
        task = {"kind": "file", "name": "held_out", "path": "held_out.jsonl", "reward": "exact_match"}
        run = {"evaluation": {"every": 2, "prompts": 1, "samples": 1, "tasks": [task]}}
    checkpoint = place.folder / "runs" / "tiny" / "checkpoints" / f"step_{step}"
    saves = f"import os; os.makedirs({str(checkpoint)!r}); {TELLS_LAUNCHER.format(number=int(signal.SIGTERM))}"
    printed = place.supervise({"controller": saves}, code=130, **run)
    done = (
        "nothing is left to do: all 4 steps are done, the newest checkpoint is runs/tiny/checkpoints/step_4; "
        "to train it further: streamrl launch --resume runs/tiny --steps 8\n"
    )
    assert (done in printed, "continue with: streamrl launch --resume runs/tiny\n" in printed) == (not left, left)


def full(*arguments: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_cause_in_the_status(place: Place) -> None:
    write_status(place.folder, make_status(2, 4, time.time()))
    place.monkeypatch.setattr(supervisor, "write_status", full)
    begins = "import shutil, sys; shutil.copy('status.json', 'runs/tiny'); sys.exit(3)"
    place.supervise({"controller": begins})
    status = read_status(place.folder / "runs" / "tiny")
    assert (status.state, status.step) == ("failed", 2)
    assert status.error and "controller ended with exit code 3" in status.error


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_controller_that_hangs_after_it_has_recorded_the_end_ends_the_run_as_recorded(
    place: Place, state: str
) -> None:
    error = "there is nothing to train" if state == "failed" else None
    write_status(place.folder, make_status(2, 4, time.time(), state=state, error=error))
    hangs = "import shutil, time; shutil.copy('status.json', 'runs/tiny'); time.sleep(600)"
    run = {"deadlines": {"heartbeat_s": 0.5}}
    printed = place.supervise({"controller": hangs}, code=0 if state == "done" else 1, **run)
    assert "controller has given no sign of life for" in printed and "is started again" not in printed
    resume = "continue with: streamrl launch --resume runs/tiny"
    assert (f"error: {error}\n       {resume}\n" in printed) == (state == "failed")
    assert read_status(place.folder / "runs" / "tiny").state == state


@pytest.mark.parametrize("state", ["done", "failed", "interrupted"])
def test_a_controller_that_dies_after_it_has_recorded_the_end_ends_the_run_as_recorded(
    place: Place, state: str
) -> None:
    error = "there is nothing to train" if state == "failed" else None
    write_status(place.folder, make_status(2, 4, time.time(), state=state, error=error))
    dies = "import os, shutil, signal; shutil.copy('status.json', 'runs/tiny'); os.kill(os.getpid(), signal.SIGKILL)"
    printed = place.supervise({"controller": dies}, code=0 if state == "done" else 1, recovery={"restarts": 3})
    assert "is started again" not in printed
    told = {"failed": f"error: {error}\n", "interrupted": "the controller was told to stop; the run is interrupted\n"}
    assert told.get(state, "") in printed
    assert ("continue with: streamrl launch --resume runs/tiny\n" in printed) == (state != "done")


def test_a_request_to_stop_that_comes_when_the_run_is_done_changes_nothing(place: Place) -> None:
    write_status(place.folder, make_status(4, 4, time.time(), state="done"))
    tells = f"import shutil; shutil.copy('status.json', 'runs/tiny'); {TELLS_LAUNCHER.format(number=2)}"
    printed = place.supervise({"controller": tells}, code=0)
    assert "demo: done" in printed and "stopped by" not in printed
    assert read_status(place.folder / "runs" / "tiny").state == "done"


@pytest.mark.parametrize("since_s", [0.1, 5.0])
def test_a_run_that_is_done_says_once_which_sites_it_waits_for(place: Place, since_s: float) -> None:
    now = time.time()
    wait = {"owner": "controller", "waiting_for": "service-far to hear that the run is over", "limit_s": 60.0}
    status = make_status(4, 4, now, state="done") | {"waits": [wait | {"since": now - since_s}]}
    write_status(place.folder, status)
    shutil.copy(place.folder / "status.json", place.folder / "waits.json")
    waits = "import shutil, time; shutil.copy('waits.json', 'runs/tiny/status.json'); time.sleep(3)"
    printed = place.supervise({"controller": waits}, code=0)
    told = "the run is done; waiting up to 60 s for service-far to come back and hear of it (Ctrl-C ends this)"
    assert printed.count(told) == (since_s > 1)


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_service_that_dies_after_it_has_recorded_the_end_ends_its_site_as_recorded(place: Place, state: str) -> None:
    place.write_two_sites(keys=("here", "west"), security={"keys": "keys"})
    write_site(place.folder, starting("west") | {"state": state})
    dies = "import os, shutil, signal; shutil.copy('site.json', 'runs/tiny-west'); os.kill(os.getpid(), signal.SIGKILL)"
    code = 0 if state == "done" else 1
    printed = place.supervise({"service-west": dies}, "--site", "west", code=code, recovery={"restarts": 3})
    assert "is started again" not in printed
    assert ("error: the run has ended: failed at its trainer's site" in printed) == (state == "failed")


def test_a_report_that_does_not_fit_on_the_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "write_report", full)
    supervisor._report(tmp_path, supervisor.StopRequests())
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == f"cannot write the report of {tmp_path}: [Errno 28] No space left on device"


def test_a_launch_stops_while_ray_looks_for_nodes(place: Place) -> None:
    def looks_for_nodes(share: site_setup.Share, check_stop: Callable[[], None]) -> None:
        check_stop()
        signal.raise_signal(signal.SIGTERM)
        check_stop()
        pytest.fail("it would wait on")

    place.monkeypatch.setattr(site_setup.Share, "place", looks_for_nodes)
    assert "error: stopped by SIGTERM\n" in place.supervise({}, code=130)
    assert read_status(place.folder / "runs" / "tiny").state == "interrupted"


@pytest.mark.parametrize(("number", "state"), [(signal.SIGHUP, "interrupted"), (signal.SIGTERM, "failed")])
def test_a_terminal_that_closes_while_it_is_written_to_is_no_failure(
    place: Place, number: signal.Signals, state: str
) -> None:
    def closes(view: LiveView) -> NoReturn:
        signal.raise_signal(number)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    place.monkeypatch.setattr(LiveView, "refresh", closes)
    if state == "failed":
        with pytest.raises(OSError, match="Input/output error"):
            place.supervise({}, code=130)
    else:
        assert "error: stopped by SIGHUP" in place.supervise({}, code=130)
    assert read_status(place.folder / "runs" / "tiny").state == state


def test_chaos_ends_its_run_when_the_terminal_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def study(*_: object) -> NoReturn:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        for number in NUMBERS:
            signal.raise_signal(number)  # does not disturb the end
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos, "_study", study)
    assert streamrl(monkeypatch, "chaos", "--cluster", "cluster.yaml", "--run", "run.yaml", "--minutes", "1") == 130


WRITES = """
import select, signal, sys
from streamrl.runtime.stop_signals import on_stop

def stop(number, frame):
    print("in the handler", flush=True)
    raise KeyboardInterrupt

on_stop(stop, signal.SIGTERM)
try:
    print("here", flush=True)
    while True:
        select.select([], [], [], 0.1)  # pause() might begin just after the signal
except KeyboardInterrupt:
    print("cleaned up", flush=True)
    print("all of it", file=sys.stderr, flush=True)
    open("done", "w").close()
"""


@contextlib.contextmanager
def with_terminal(folder: Path, terminal: int, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a terminal, and an output; both are its own alone."""

    def take() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        [sys.executable, "-c", WRITES],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdin=terminal,
        stdout=output,
        stderr=output,
        preexec_fn=take,
    ) as process:
        for file in {terminal, output}:
            os.close(file)
        try:
            yield process
        finally:
            process.kill()


def test_what_is_printed_after_the_terminal_was_closed_disturbs_no_clean_up(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    with with_terminal(tmp_path, theirs, theirs) as process:
        with open(ours, "rb") as shown:
            assert shown.readline() == b"here\r\n"
        assert process.wait(scaled(20)) == 0
    assert (tmp_path / "done").exists()


def test_an_output_that_is_no_terminal_is_kept_when_the_terminal_is_closed(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    reads, writes = os.pipe()
    with with_terminal(tmp_path, theirs, writes) as process, open(reads, "rb") as output:
        assert output.readline() == b"here\n"
        os.close(ours)
        assert process.wait(scaled(20)) == 0
        assert output.read() == b"in the handler\ncleaned up\nall of it\n"


def test_other_signals_leave_the_terminal_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setattr("streamrl.runtime.stop_signals.STANDARD_OUTPUTS", (theirs,))
    on_stop(lambda number, frame: None, signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert os.isatty(theirs)
    signal.raise_signal(signal.SIGHUP)
    assert not os.isatty(theirs)
    os.close(ours)
    os.close(theirs)


def test_a_launch_that_fails_before_anything_is_written_leaves_no_folder(place: Place) -> None:
    """It would take the run's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_setup, "ScratchFolder", full)
        patch.setattr(preflight, "check_sockets", lambda: [])
        with pytest.raises(OSError, match="No space left"):
            place.supervise({}, code=1)
    assert not list((place.folder / "runs").iterdir())


def test_a_temporary_folder_that_cannot_be_used_is_found_before_a_launch(place: Place) -> None:
    place.monkeypatch.setattr(site_setup, "ScratchFolder", full)
    assert "cannot make a temporary folder in" in place.launch()


def test_a_temporary_folder_whose_path_is_too_long_is_refused_before_slow_checks(place: Place) -> None:
    deep = place.folder / ("d" * 100)
    deep.mkdir()
    place.monkeypatch.setattr(tempfile, "tempdir", str(deep))
    asked: list[str] = []
    for name in ("check_packing", "check_tasks", "check_packages", "check_kv_cache"):
        place.monkeypatch.setattr(preflight, name, lambda *_, name=name, **__: asked.append(name) or [])
    assert "is too long for a socket (107 bytes): set TMPDIR to a shorter path" in place.launch()
    assert not asked
