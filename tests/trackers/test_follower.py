from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest

from streamrl.config.trackers import TensorBoardTracker, TrackerConfig
from streamrl.errors import UserError
from streamrl.run_dir import appended_lines, layout
from streamrl.trackers import follower as follower_module
from streamrl.trackers import sent_rows, tracker_process
from streamrl.trackers.follower import RunFollower
from streamrl.trackers.rollout_table import rollout_table
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import TrackedRun
from streamrl.trackers.tracker_process import PatientDelivery, follow
from tests.dashboard.samples import a_sample, write_samples
from tests.run_dir.conftest import file_size_limit
from tests.trackers.tracked_run import ROOT, KeptTracker, back_to, evaluate, make_run, train


def follower(folder: Path, tracker: KeptTracker, sent: SentRows, said: list[str] | None = None) -> RunFollower:
    keys = TensorBoardTracker(samples=4, samples_every=5)
    run = TrackedRun(folder, "run", {})
    return RunFollower(run, keys, sent, lambda *_: tracker, ([] if said is None else said).append)


def test_each_row_is_sent_once_under_documented_names_while_the_run_goes_on(tmp_path: Path) -> None:
    make_run(tmp_path)
    tracker = KeptTracker()
    with SentRows(tmp_path, "tensorboard") as sent:
        following = follower(tmp_path, tracker, sent)
        following.send()
        assert tracker.numbers == []
        train(tmp_path, range(1, 4))
        evaluate(tmp_path, 0)
        following.send()
        following.send()
        train(tmp_path, range(4, 6))
        assert following.waiting == 2
        following.send()
        assert following.waiting == 0 and following._steps.rows == [], "they are not held"
    assert tracker.numbers == [1, 2, 3, 4, 5]
    assert tracker.steps[1] == (
        2,
        1002.0,
        {"train/reward_mean": 0.5, "train/loss": 0.5, "train/reward_by_task/sum": 0.5, "train/step_skipped": 0.0},
    )
    ((evaluated, figures),) = tracker.evaluations
    assert evaluated == 0
    assert figures["evaluation/overall/pass_at_2"] == 0.5
    assert figures["evaluation/by_task/sum/reward"] == figures["evaluation/by_task/sum/reward_sampled"] == 0.25
    assert "evaluation/overall/reward_greedy" not in figures  # there is none


def test_a_table_has_samples_spread_over_the_rewards_at_the_first_step_and_at_every_nth(tmp_path: Path) -> None:
    make_run(tmp_path)
    tracker = KeptTracker()
    train(tmp_path, range(1, 8))
    (tmp_path / "rollouts" / "step_000005.parquet").rename(tmp_path / "rollouts" / "step_000005.gone")
    with SentRows(tmp_path, "tensorboard") as sent:
        follower(tmp_path, tracker, sent).send()
    assert [step for step, _ in tracker.tables] == [1]  # a step without its rollouts holds nothing up
    table = tracker.tables[0][1]
    rewards = [row[table.columns.index("reward")] for row in table.rows]
    assert rewards == [0.0, 2 / 8, 6 / 8, None]
    assert table.rows[0][table.columns.index("completion")] == "It is 2"
    assert table.rows[0][0] == 1


def test_another_process_goes_on_where_the_last_one_was_killed(tmp_path: Path) -> None:
    make_run(tmp_path)
    train(tmp_path, range(1, 4))
    first, second = KeptTracker(), KeptTracker(id="another")
    with SentRows(tmp_path, "tensorboard") as sent:
        follower(tmp_path, first, sent).send()
    with (tmp_path / "trackers" / "tensorboard.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "st')  # killed while it wrote
    train(tmp_path, [4])
    with SentRows(tmp_path, "tensorboard") as sent:
        assert sent.id == "kept"
        follower(tmp_path, second, sent).send()
    assert (first.numbers, second.numbers) == ([1, 2, 3], [4])
    with SentRows(tmp_path, "tensorboard") as sent:
        assert (sent.id, sent.last_step) == ("another", 4)
    assert [step for step, _ in second.tables] == []


@pytest.mark.parametrize("can_rewind", [True, False])
def test_a_step_that_is_trained_again_replaces_the_first_try_where_the_tracker_can_forget(
    tmp_path: Path, can_rewind: bool
) -> None:
    make_run(tmp_path)
    said: list[str] = []
    tracker = KeptTracker(can_rewind=can_rewind)
    train(tmp_path, range(1, 6), reward=0.1)
    evaluate(tmp_path, 4)
    with SentRows(tmp_path, "tensorboard") as sent:
        following = follower(tmp_path, tracker, sent, said)
        following.send()
        back_to(tmp_path, 3)
        train(tmp_path, range(4, 7), reward=0.9, began=2000.0)
        evaluate(tmp_path, 4, began=2000.0)
        following.send()
        assert tracker.numbers == [1, 2, 3, 4, 5, 6]  # no step is there twice
        rewards = [figures["train/reward_mean"] for _, _, figures in tracker.steps]
        follower(tmp_path, tracker, sent, said).send()  # another process, later
    assert tracker.numbers == [1, 2, 3, 4, 5, 6]
    expected = [0.1] * 3 + [0.9 if can_rewind else 0.1] * 2 + [0.9]
    assert rewards == expected
    assert len(tracker.evaluations) == (2 if can_rewind else 1)
    assert [step for step, _ in tracker.tables] == ([1, 5, 5] if can_rewind else [1, 5])
    assert len(said) == (0 if can_rewind else 1)


def test_steps_that_the_service_has_but_the_record_lacks_are_not_sent_again_and_those_it_lost_are(
    tmp_path: Path,
) -> None:
    make_run(tmp_path)
    train(tmp_path, range(1, 6))
    ahead = KeptTracker(last_step=2)
    with SentRows(tmp_path, "tensorboard") as sent:
        follower(tmp_path, ahead, sent).send()
        assert ahead.numbers == [3, 4, 5]
        lost = KeptTracker(last_step=4)
        follower(tmp_path, lost, sent).send()
    assert lost.numbers == [5]


def test_what_a_tracker_refuses_is_said_once_and_sent_again_later_with_growing_pauses(tmp_path: Path) -> None:
    make_run(tmp_path)
    train(tmp_path, range(1, 5))
    said: list[str] = []
    now = [100.0]
    tracker = KeptTracker(fails_at=3)
    with SentRows(tmp_path, "tensorboard") as sent:
        following = follower(tmp_path, tracker, sent)
        delivery = PatientDelivery(following, said.append, lambda: now[0])
        assert not delivery.look()
        tries = []
        for _ in range(60):
            now[0] += 1
            before = delivery._next
            delivery.look()
            if delivery._next != before:
                tries.append(now[0])
        assert tries == [105.0, 115.0, 135.0]
        assert (tracker.numbers, following.waiting) == ([1, 2], 2)
        tracker.fails_at = None
        assert delivery.look(now_or_never=True)
    assert tracker.numbers == [1, 2, 3, 4]
    assert len(said) == 2
    assert "ConnectionError: no route to host" in said[0] and "stays in the run's folder" in said[0]


def test_every_call_that_does_not_return_is_said_once_and_so_is_that_the_tracker_answers_again() -> None:
    said: list[str] = []
    now = [100.0]
    calls: list[tuple[float, Exception | None]] = []

    def send() -> None:
        seconds, error = calls.pop(0)
        for _ in range(4):
            now[0] += seconds / 4
            delivery.notice_hang()
        if error is not None:
            raise error

    delivery = PatientDelivery(Mock(send=send), said.append, lambda: now[0])

    def told(seconds: float, error: Exception | None = None) -> list[str]:
        calls.append((seconds, error))
        delivery.look(now_or_never=True)
        now[0] += 1000
        delivery.notice_hang()  # no call is in progress
        found = [line.split(" (")[0].split(":")[0].split(";")[0] for line in said]
        said.clear()
        return found

    slow, back, fails = f"has not answered for {tracker_process.SLOW_S:.0f} s", "is back", "takes nothing now"
    assert told(1) == []
    assert told(200) == [slow, back]
    assert told(1) == []
    assert told(200) == [slow, back]
    assert told(200, ConnectionError()) == [slow, fails]
    assert told(200, ConnectionError()) == []
    assert told(200) == [back]
    assert told(1, ConnectionError()) == [fails]
    assert told(200) == [slow, back]


def test_rows_whose_record_has_no_room_are_sent_once_and_recorded_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path)
    train(tmp_path, range(1, 4))
    tracker = KeptTracker()
    with SentRows(tmp_path, "tensorboard") as sent:
        following = follower(tmp_path, tracker, sent)
        with file_size_limit(50):  # some of the second line
            following.send()
            following.send()
            follower(tmp_path, tracker, sent).send()
        assert tracker.numbers == [1, 2, 3]
        assert sent.path.read_text() == '{"id": "kept"}\n'
        assert caplog.messages == [f"cannot write {sent.path}: [Errno 27] File too large"]
        train(tmp_path, [4])
        following.send()
        assert sent.path.read_text().count("\n") == 7  # with the id, the folder and the table of the first step
    with SentRows(tmp_path, "tensorboard") as later:
        assert (later.id, later.last_step) == ("kept", 4)


def test_what_the_record_lacks_is_written_as_it_is_closed(tmp_path: Path) -> None:
    make_run(tmp_path)
    sent = SentRows(tmp_path, "tensorboard")
    with file_size_limit(8):
        sent.mark("step", 1, 1001.0)
    sent.close()
    with SentRows(tmp_path, "tensorboard") as later:
        assert later.last_step == 1


def test_two_processes_do_not_send_to_one_tracker(tmp_path: Path) -> None:
    make_run(tmp_path)
    with (
        SentRows(tmp_path, "wandb"),
        SentRows(tmp_path, "mlflow"),
        pytest.raises(UserError, match="is being sent to wandb by another process"),
    ):
        SentRows(tmp_path, "wandb")
    SentRows(tmp_path, "wandb").close()


def sends(folder: Path, tracker: str, id: str) -> tuple[list[int], list[str]]:
    """Send what is new, as a run of this id if it is a new one; return the steps sent, and what is said."""
    kept, said = KeptTracker(), list[str]()

    def open_tracker(keys: TrackerConfig, run: TrackedRun, sent: SentRows) -> KeptTracker:
        kept.id = sent.id or id
        return kept

    assert follow(folder, tracker, Ended(lambda: None), said.append, open_tracker)
    return kept.numbers, said


def test_a_copied_folder_becomes_a_run_of_its_own_and_the_original_goes_on(tmp_path: Path) -> None:
    original, copy = make_run(tmp_path / "run"), tmp_path / "copy"
    train(original, range(1, 4))
    assert sends(original, "wandb", "first") == ([1, 2, 3], [])
    shutil.copytree(original, copy)
    train(original, [4])
    train(copy, [4, 5])
    numbers, [said] = sends(copy, "wandb", "second")
    assert numbers == [1, 2, 3, 4, 5] and said.startswith(f"begins a new run: this folder is a copy of {original}, ")
    assert sends(original, "wandb", "none") == ([4], [])
    train(copy, [6])
    assert sends(copy, "wandb", "none") == ([6], [])
    with SentRows(copy, "wandb") as sent, SentRows(original, "wandb") as others:
        assert (sent.id, others.id) == ("second", "first")


HOW = ("moved", "moved behind a link", "moved to another disk", "event files in it", "of an earlier version")


@pytest.mark.parametrize("how", HOW)
def test_a_folder_without_its_original_or_with_its_own_event_files_goes_on(tmp_path: Path, how: str) -> None:
    before, now = make_run(tmp_path / "run"), tmp_path / "other"
    tracker, id = ("tensorboard", "tensorboard") if how == "event files in it" else ("wandb", "first")
    train(before, range(1, 4))
    assert sends(before, tracker, id) == ([1, 2, 3], [])
    if how == "of an earlier version":
        record = before / layout.TRACKERS / f"{tracker}.jsonl"
        lines = [line for line in record.read_text().splitlines(keepends=True) if '"folder"' not in line]
        record.write_text("".join(lines))
    if how in ("moved", "moved behind a link"):
        before.rename(now)
        if how == "moved behind a link":
            before.symlink_to(now)
    else:
        shutil.copytree(before, now)
    if how == "moved to another disk":
        another = make_run(tmp_path / "new")
        shutil.rmtree(before)
        another.rename(before)
    train(now, [4])
    assert sends(now, tracker, "none") == ([4], [])
    with SentRows(now, tracker) as sent:
        assert sent.id == id and sent.folder == ("" if tracker == "tensorboard" else str(now))


class Ended(threading.Event):
    """An event that is waited for only to do what happens meanwhile, at most once; then it is set."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile: list[Callable[[], None]] = [meanwhile]

    def wait(self, timeout: float | None = None) -> bool:
        if not self._meanwhile:
            self.set()
        while self._meanwhile:
            self._meanwhile.pop()()
        return self.is_set()


def test_the_process_of_a_resumed_run_waits_for_that_of_the_earlier_launch(tmp_path: Path) -> None:
    make_run(tmp_path)
    train(tmp_path, range(1, 4))
    tracker = KeptTracker()
    said: list[str] = []
    earlier = SentRows(tmp_path, "tensorboard")
    earlier.mark("step", 1, 1001.0)
    assert follow(tmp_path, "tensorboard", Ended(earlier.close), said.append, lambda *_: tracker)
    assert tracker.numbers == [2, 3]
    assert said == ["waits for the process of an earlier launch, which still sends its rest"]


def test_a_process_that_does_not_end_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    monkeypatch.setattr(tracker_process, "HANDOVER_S", 0.0)
    with SentRows(tmp_path, "tensorboard"), pytest.raises(UserError, match="by another process"):
        follow(tmp_path, "tensorboard", threading.Event(), lambda _: None, lambda *_: KeptTracker())


@pytest.mark.parametrize("told", ["no json", "[]", '{"messages": [3]}', "[" * 9999])
def test_a_conversation_that_cannot_be_read_is_left_out_of_the_table(tmp_path: Path, told: str) -> None:
    table = rollout_table(write_samples(tmp_path / "rollouts", 1, [a_sample("a.0", conversation=told)]), 1, 1)
    assert [row[-1] for row in table.rows] == ["It is 2"]


def test_track_says_what_a_tracker_refuses_in_a_line_and_promises_no_later_try(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "[{name: wandb}]")
    train(folder, range(1, 3))
    refuses = "def init(**keys):\n    raise ValueError('no key is configured')\nTable = None\nSettings = dict\n"
    (tmp_path / "wandb.py").write_text(refuses)
    command = [sys.executable, "-m", "streamrl.cli.main", "track", str(folder), "wandb"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "tracker wandb takes nothing now (ValueError: no key is configured); what it misses stays in the run's folder",
        f"tracker wandb has not taken 2 rows; send them with: streamrl track {folder} wandb",
    ]
    assert (done.returncode, done.stderr) == (1, "error: wandb did not take everything\n")


def test_of_many_rows_few_are_held_and_all_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MOST_OPEN", 3)
    monkeypatch.setattr(appended_lines, "READ_AT_ONCE", 1 << 12)
    make_run(tmp_path)
    train(tmp_path, range(1, 21))
    for step in range(1, 21):
        evaluate(tmp_path, step)
    held = list[int]()
    tracker = KeptTracker()
    log_step = tracker.log_step

    def log_and_count(step: int, time: float, figures: Mapping[str, float]) -> None:
        held.append(len(following._steps.rows))
        log_step(step, time, figures)

    monkeypatch.setattr(tracker, "log_step", log_and_count)
    with SentRows(tmp_path, "tensorboard") as sent:
        following = follower(tmp_path, tracker, sent)
        following.send()
    assert tracker.numbers == [step for step, _ in tracker.evaluations] == list(range(1, 21))
    assert max(held) < 10


def test_a_line_of_a_record_that_is_too_long_for_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_rows, "LONGEST_LINE", 64)
    path = tmp_path / "trackers" / "tensorboard.jsonl"
    path.parent.mkdir()
    own = '{"kind": "step", "step": 1, "time": 1.5}\n'
    path.write_text(own + "0" * 1000 + "\n" + own.replace('p": 1', 'p": 2') + "0" * 1000)
    size = path.stat().st_size
    with SentRows(tmp_path, "tensorboard") as sent:
        assert (sent.last_step, sent.time_of("step", 1)) == (2, 1.5)
        assert path.stat().st_size == size - 1000, "a last line without an end was cut by a kill"
