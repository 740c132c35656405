"""The processes of trackers, with a package that hangs in place of a tracker's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from streamrl.config.trackers import TensorBoardTracker
from streamrl.trackers.tracker_group import RESTARTS, TrackerGroup
from tests.trackers.tracked_run import ROOT, make_run, train
from tests.waiting import wait_for

HANGS_AT_STEP_TWO = """
import sys, threading, types
from unittest.mock import MagicMock

class EventsWriter:
    def __init__(self, prefix, suffix):
        print("words of a package")

    def write_event(self, event):
        if event.step == 2:
            threading.Event().wait()

    def __getattr__(self, name):
        return lambda *arguments, **named: None

summary = MagicMock()
proto = MagicMock()
proto.event_pb2.Event = types.SimpleNamespace
sys.modules["tensorboardX.event_file_writer"] = types.SimpleNamespace(EventsWriter=EventsWriter)
sys.modules["tensorboardX.proto"] = proto
"""


def test_a_tracker_that_hangs_is_ended_with_the_run_and_the_rest_can_be_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboardX.py").write_text(HANGS_AT_STEP_TWO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    # its process takes its keys from the run: samples would be marked a moment after their step, or not before the end
    folder = make_run(tmp_path / "run", "[{name: tensorboard, samples: 0}]")
    train(folder, range(1, 4))
    group = TrackerGroup(folder, [TensorBoardTracker(samples=0)])
    record = folder / "trackers" / "tensorboard.jsonl"
    try:
        wait_for(lambda: record.exists() and '"step": 1' in record.read_text(), 30)
        assert group.look() == []  # what a package prints is for the log
    finally:
        last = group.finish(0.0)
    assert last == [
        "tracker tensorboard was ended before it had taken everything; send the rest with: "
        f"streamrl track {folder} tensorboard"
    ]
    sent = [json.loads(line) for line in record.read_text().splitlines()]
    assert sent == [{"id": "tensorboard"}, {"kind": "step", "step": 1, "time": 1001.0}]
    assert "words of a package" in (folder / "logs" / "tracker-tensorboard.log").read_text()


def test_a_tracker_that_cannot_be_started_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    folder = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        group = TrackerGroup(folder, [TensorBoardTracker(samples=0)])
        (line,) = group.look()[:1]
        assert line.startswith(
            "tracker tensorboard cannot be started now ([Errno 11] Resource temporarily unavailable)"
        )
    group.look()  # now it can
    try:
        assert group._processes["tensorboard"] is not None
        assert group._restarts["tensorboard"] == 2 < RESTARTS
    finally:
        group.finish(0.0)


def test_a_tracker_that_cannot_be_started_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "logs").write_text("in the way of its log")
    group = TrackerGroup(folder, [TensorBoardTracker(samples=0)])
    lines = [line for _ in range(RESTARTS + 3) for line in group.look()]
    assert sum("cannot be started now" in line for line in lines) == RESTARTS + 1
    assert lines[-1].endswith(f"is not started again; the rest is sent by: streamrl track {folder} tensorboard")
    assert group.finish(0.0) == []
