"""A launcher goes on when nobody reads its output, and when that cannot be written."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.launcher import preflight, supervisor
from streamrl.launcher import unblocked_output as module
from streamrl.launcher.unblocked_output import unblocked_output
from streamrl.report.live_view import LiveView
from streamrl.run_dir.status import read_status
from tests.signals import own_handlers
from tests.troubled_place import Place
from tests.waiting import scaled, wait_for

LINES = [f"line {number} of an output that nobody reads yet" for number in range(3000)]


class Pipe:
    """A pipe in the place of standard output that nobody reads; after a minute its reader is gone."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.filled = 0
        """Bytes with which it has been filled."""
        self.stream = os.fdopen(self.writes, "w", closefd=False)
        self.gone = threading.Event()
        self._timer = threading.Timer(scaled(60), self._leave)
        self._timer.start()

    def fill(self) -> None:
        os.set_blocking(self.writes, False)
        for size in (1 << 20, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.filled += os.write(self.writes, b"." * size)
        os.set_blocking(self.writes, True)

    def _leave(self) -> None:
        self.gone.set()
        os.close(self.reads)

    def close(self) -> None:
        self._timer.cancel()
        self._timer.join()
        for file in (self.writes, *([] if self.gone.is_set() else [self.reads])):
            os.close(file)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with contextlib.closing(Pipe()) as made:
        yield made


@pytest.mark.parametrize("blocks", [True, False])
def test_no_print_waits_for_a_reader_and_all_of_it_arrives_in_its_order(pipe: Pipe, blocks: bool) -> None:
    pipe.fill()
    os.set_blocking(pipe.writes, blocks)
    shown = bytearray()
    with contextlib.redirect_stdout(pipe.stream), unblocked_output([]) as output:
        for line in LINES:
            print(line, flush=True)
        assert output.behind

        def read() -> None:
            while not shown.endswith(LINES[-1].encode() + b"\n"):
                shown.extend(os.read(pipe.reads, 1 << 16))

        reader = threading.Thread(target=read)
        reader.start()
    assert not output.behind
    reader.join()
    assert shown.decode() == "." * pipe.filled + "".join(f"{line}\n" for line in LINES)


def test_the_oldest_texts_are_dropped_when_too_many_wait(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe.fill()
    monkeypatch.setattr(module, "MOST_WAITING", 4)
    with contextlib.redirect_stdout(pipe.stream), unblocked_output([]) as output:
        sys.stdout.write("first")
        wait_for(lambda: output._writing is not None, 20)
        for line in LINES:
            sys.stdout.write(line)
        assert len(os.read(pipe.reads, pipe.filled)) == pipe.filled
    assert os.read(pipe.reads, 1 << 16).decode() == "".join(["first", *LINES[-4:]])


@pytest.mark.parametrize("why", ["No space left on device", "Broken pipe"])
def test_what_cannot_be_written_is_dropped_and_said_once(why: str, caplog: pytest.LogCaptureFixture) -> None:
    if why == "Broken pipe":
        reads, writes = os.pipe()
        os.close(reads)
    else:
        writes = os.open("/dev/full", os.O_WRONLY)
    with contextlib.redirect_stdout(os.fdopen(writes, "w", closefd=False)), unblocked_output([]):
        for line in LINES:
            print(line, flush=True)
    os.close(writes)
    (record,) = caplog.records
    assert "the run goes on" in record.getMessage() and why in record.getMessage()


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_launch_whose_output_cannot_be_written_runs_from_its_first_line_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], full: str
) -> None:
    place = Place(tmp_path, monkeypatch, capfd)
    ran = tmp_path / "ran"
    redirected = contextlib.redirect_stdout if full == "stdout" else contextlib.redirect_stderr
    if full == "stderr":  # nor can it be said why it ends
        monkeypatch.setattr(preflight, "check", lambda *arguments: ["a warning"])
    with contextlib.suppress(OSError), open("/dev/full", "w") as nowhere, redirected(nowhere):
        printed = place.supervise({"controller": f"open({str(ran)!r}, 'w').close(); raise SystemExit(3)"})
        assert "error: controller ended with exit code 3" in printed
    assert ran.exists()


def test_a_block_inside_another_writes_in_the_same_order_and_a_closed_terminal_holds_up_none(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.fill()
    with contextlib.redirect_stdout(pipe.stream), unblocked_output([]) as outer:
        print("outside", flush=True)
        with unblocked_output([signal.SIGTERM]) as inner:
            assert inner is outer
            print("inside", flush=True)
            os.read(pipe.reads, pipe.filled)
        print("after it", flush=True)
    assert os.read(pipe.reads, 1 << 16) == b"outside\ninside\nafter it\n"
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    pipe.fill()
    with contextlib.redirect_stdout(pipe.stream), pytest.raises(KeyboardInterrupt), unblocked_output([]):
        print("this is not read", flush=True)
        raise KeyboardInterrupt


def test_after_a_request_to_stop_an_output_that_is_not_read_is_given_up(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    same = os.dup(pipe.writes)
    monkeypatch.setattr(module, "STANDARD_OUTPUTS", (same,))
    pipe.fill()
    stop: list[int] = []
    with contextlib.redirect_stdout(pipe.stream):
        with unblocked_output(stop) as output:
            print("this is not read", flush=True)
            wait_for(lambda: output._writing is not None, 20)
            stop.append(signal.SIGTERM)
        print("this goes nowhere", flush=True)
    os.write(same, b"and so does this")
    os.close(same)
    assert not pipe.gone.is_set()


def test_after_a_request_to_stop_an_output_that_is_read_in_time_gets_all_of_it(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.fill()
    looks = itertools.count()

    def clock() -> float:
        if (look := next(looks)) == 2:
            assert len(os.read(pipe.reads, pipe.filled)) == pipe.filled
        return min(look, module.GIVE_UP_S)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    with contextlib.redirect_stdout(pipe.stream), unblocked_output([signal.SIGTERM]):
        print("this is read late", flush=True)
    assert os.read(pipe.reads, 1 << 16) == b"this is read late\n"


def test_what_is_written_to_a_replaced_stream_after_the_end_arrives(pipe: Pipe) -> None:
    with contextlib.redirect_stdout(pipe.stream), unblocked_output([]) as output:
        kept = sys.stdout  # as a handler of logging keeps it
        print("before", flush=True)
    wait_for(lambda: output._done, 20)
    print("after", file=kept, flush=True)
    assert os.read(pipe.reads, 1 << 16).decode() == "before\nafter\n"
    pipe.stream.flush()
    broken, gone = os.pipe()
    os.close(broken)
    output.put(gone, b"this goes nowhere")
    os.close(gone)


def test_a_stream_without_a_file_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with unblocked_output([]) as output:
        print("here")
        assert not output.behind and capsys.readouterr().out == "here\n"


def test_a_launch_whose_output_is_not_read_watches_its_processes_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pipe: Pipe
) -> None:
    place = Place(tmp_path, monkeypatch, capfd)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(supervisor, "VIEW_S", 0.0)
    done: list[str] = []

    def refresh(view: LiveView) -> None:
        pipe.fill()
        view.say("this is not read")
        done.append("showed")

    def poll(seconds: float) -> None:
        done.append("looked")
        if done.count("looked") == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=poll))
    monkeypatch.setattr(LiveView, "refresh", refresh)
    with own_handlers(signal.SIGTERM), contextlib.redirect_stdout(pipe.stream):
        assert "error: stopped by SIGTERM\n" in place.supervise({}, code=130)
    assert done == ["showed", "looked", "looked"]  # no more is written until the first picture is read
    assert read_status(place.folder / "runs" / "tiny").state == "interrupted" and not pipe.gone.is_set()
