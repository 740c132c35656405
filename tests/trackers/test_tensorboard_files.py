"""The folder of TensorBoard's event files, with a package that keeps what it is given in place of tensorboardX."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.trackers import TensorBoardTracker
from streamrl.trackers.backends.opener import open_tracker
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import TrackedRun
from streamrl.trackers.tracker_process import follow
from tests.trackers.tracked_run import make_run, train


class FakeWriter:
    """An `EventsWriter` whose file has a line for each step; it may fail as it is begun, or flushed."""

    fails = False
    full = False

    def __init__(self, prefix: str, suffix: str) -> None:
        if self.fails:
            raise OSError("no space")
        self.file = Path(f"{prefix}{suffix}")
        self.file.touch()
        self.lines = ["begun"]

    def write_event(self, event: SimpleNamespace) -> None:
        begins = hasattr(event, "session_log")
        self.lines.append(f"from {event.step}" if begins else event.summary or f"step {event.step}")

    def flush(self) -> None:
        if self.full:
            with self.file.open("a") as file:
                file.write("a part\n")  # of what is to be written
            raise OSError("no space")
        self.file.write_text("".join(f"{line}\n" for line in dict.fromkeys(self.lines)))

    close = flush


@pytest.fixture(autouse=True)
def writer(monkeypatch: pytest.MonkeyPatch) -> type[FakeWriter]:
    session = SimpleNamespace(START=1)
    events = SimpleNamespace(Event=SimpleNamespace, SessionLog=type("SessionLog", (SimpleNamespace,), vars(session)))
    package: dict[str, Any] = {
        "": SimpleNamespace(summary=SimpleNamespace(scalar=lambda name, value: "", text=lambda name, text: name)),
        ".event_file_writer": SimpleNamespace(EventsWriter=FakeWriter),
        ".proto": SimpleNamespace(event_pb2=events),
    }
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, f"tensorboardX{name}", module)
    return FakeWriter


def lines_of(folder: Path) -> list[str]:
    """What all files of a folder say, the oldest first."""
    return [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def send(folder: Path) -> None:
    ended: Any = SimpleNamespace(is_set=lambda: True)
    assert follow(folder, "tensorboard", ended, pytest.fail)


def a_run(folder: Path, shared: Path) -> Path:
    return make_run(folder, f"[{{name: tensorboard, folder: {shared}, samples: 0}}]")


def test_a_run_that_is_named_by_a_dot_has_a_folder_of_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "runs/mine", tmp_path / "board")
    train(run, [1])
    monkeypatch.chdir(run)
    send(Path())
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["mine"]
    assert lines_of(tmp_path / "board/mine") == ["begun", "settings", "step 1"]


def test_runs_of_one_name_have_a_folder_each_and_find_it_again(tmp_path: Path) -> None:
    board = tmp_path / "board"
    runs = [a_run(tmp_path / place / "mine", board) for place in ("a", "b", "c")]
    for step in (1, 2):
        for run in runs:
            train(run, [step])
            send(run)
    assert sorted(path.name for path in board.iterdir()) == ["mine", "mine-2", "mine-3"]
    for folder in board.iterdir():
        assert lines_of(folder) == ["begun", "settings", "step 1", "begun", "from 2", "step 2"]


def test_a_run_of_an_earlier_version_goes_on_in_its_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", tmp_path / "board")
    train(run, [1, 2])
    (tmp_path / "board/mine").mkdir(parents=True)
    with SentRows(run, "tensorboard") as sent:
        sent.name("tensorboard")
        sent.mark("step", 1, 1001.0)
    send(run)
    assert lines_of(tmp_path / "board/mine") == ["begun", "from 2", "step 2"]


def test_a_try_that_fails_takes_no_second_folder(tmp_path: Path, writer: type[FakeWriter]) -> None:
    keys, run = TensorBoardTracker(folder=str(tmp_path / "board")), TrackedRun(tmp_path, "mine", {})
    with SentRows(tmp_path, "tensorboard") as sent:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "fails", True)
            for _ in range(2):
                with pytest.raises(OSError, match="no space"):
                    open_tracker(keys, run, sent)
        open_tracker(keys, run, sent).close()
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["mine"]
    assert "settings" in lines_of(tmp_path / "board/mine")


def test_files_in_the_run_s_own_folder_need_no_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", "[{name: tensorboard, samples: 0}]")
    train(run, [1])
    send(run)
    assert lines_of(run / "trackers/tensorboard") == ["begun", "settings", "step 1"]


def test_a_step_that_a_full_disk_does_not_take_is_sent_again_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: type[FakeWriter]
) -> None:
    keys, run = TensorBoardTracker(), TrackedRun(tmp_path, "mine", {})
    with SentRows(tmp_path, "tensorboard") as sent:
        files = open_tracker(keys, run, sent)
        files.log_step(1, 1001.0, {"loss": 0.5})
        files.log_step(2, 1002.0, {"loss": 0.5})
        monkeypatch.setattr(writer, "full", True)
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                files.log_step(3, 1003.0, {"loss": 0.5})
        monkeypatch.setattr(writer, "full", False)
        files.log_step(3, 1003.0, {"loss": 0.5})
        monkeypatch.setattr(writer, "full", True)
        with pytest.raises(OSError, match="no space"):
            files.log_evaluation(1, 1001.5, {"reward": 0.5})
        monkeypatch.setattr(writer, "full", False)
        files.log_evaluation(1, 1001.5, {"reward": 0.5})
        files.close()
    lines = ["begun", "settings", "step 1", "step 2", "begun", "from 3", "step 3", "begun", "from 4", "step 1"]
    assert lines_of(tmp_path / "trackers/tensorboard") == lines  # what the evaluation hides is no step that was sent


def test_no_part_of_the_first_step_stays_beside_the_whole_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: type[FakeWriter]
) -> None:
    keys, run = TensorBoardTracker(), TrackedRun(tmp_path, "mine", {})
    with SentRows(tmp_path, "tensorboard") as sent:
        files = open_tracker(keys, run, sent)
        monkeypatch.setattr(writer, "full", True)
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                files.log_step(1, 1001.0, {"loss": 0.5})
        monkeypatch.setattr(writer, "full", False)
        files.log_step(1, 1001.0, {"loss": 0.5})
        files.close()
    assert lines_of(tmp_path / "trackers/tensorboard") == ["begun", "settings", "begun", "from 1", "step 1"]
