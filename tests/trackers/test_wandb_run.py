"""W&B's run, with a service in place of wandb's that takes steps as wandb's does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.trackers import WandbTracker
from streamrl.trackers.backends.opener import open_tracker
from streamrl.trackers.follower import RunFollower
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import TrackedRun
from tests.trackers.tracked_run import evaluate, make_run, train


class FakeRun:
    """A run whose history only grows: the newest step is open until it is committed or another one begins."""

    def __init__(self, history: dict[int, dict[str, Any]]) -> None:
        self._history, self._open = history, {}
        self.step = max(history) + 1 if history else 0
        self.offline = False

    def log(self, values: Mapping[str, Any], step: int, commit: bool = False) -> None:
        if step < self.step:
            return
        if step > self.step:
            self.finish()
            self.step = step
        self._open |= values
        if commit:
            self.finish()
            self.step += 1

    def finish(self) -> None:
        if self._open:
            self._history[self.step], self._open = self._open, {}

    def define_metric(self, name: str, **keys: object) -> None: ...


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """The steps that the service has: one that a killed process had open is lost."""
    kept: dict[int, dict[str, Any]] = {}
    module: Any = SimpleNamespace(
        init=lambda **keys: FakeRun(kept), Table=lambda **cells: "a table", Settings=lambda **keys: None
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return kept


def follower(folder: Path, sent: SentRows, settings: Mapping[str, Any]) -> RunFollower:
    keys, run = WandbTracker(samples=4, samples_every=2), TrackedRun(folder, "run", settings)
    return RunFollower(run, keys, sent, open_tracker, pytest.fail)


def steps_with(history: dict[int, dict[str, Any]], has: Callable[[str], bool]) -> list[int]:
    return [step for step, values in history.items() if any(map(has, values))]


def test_a_step_is_there_as_soon_as_it_is_sent_with_its_samples(
    tmp_path: Path, history: dict[int, dict[str, Any]]
) -> None:
    make_run(tmp_path)
    with SentRows(tmp_path, "wandb") as sent:
        following = follower(tmp_path, sent, {"evaluation": None})
        for step in range(1, 5):
            train(tmp_path, [step])
            following.send()
            assert list(history) == list(range(1, step + 1))
    assert steps_with(history, "train/reward_mean".__eq__) == [1, 2, 3, 4]
    assert steps_with(history, "samples".__eq__) == [1, 2, 4]


def test_evaluations_join_the_newest_step_and_no_process_that_ends_loses_a_step(
    tmp_path: Path, history: dict[int, dict[str, Any]]
) -> None:
    make_run(tmp_path)
    settings = {"evaluation": {"every": 2}}
    train(tmp_path, range(1, 4))
    with SentRows(tmp_path, "wandb") as sent:
        follower(tmp_path, sent, settings).send()  # and is killed: step 3 was open
    train(tmp_path, [4])
    evaluate(tmp_path, 2)
    with SentRows(tmp_path, "wandb") as sent:
        following = follower(tmp_path, sent, settings)
        following.send()
        following.close()
    train(tmp_path, [5])
    with SentRows(tmp_path, "wandb") as sent:
        following = follower(tmp_path, sent, settings)
        following.send()
        following.close()
    assert steps_with(history, "train/reward_mean".__eq__) == list(history) == [1, 2, 3, 4, 5]
    assert steps_with(history, "evaluation/step".__eq__) == [4]


def test_the_first_step_is_sent_again_if_a_kill_has_lost_it(tmp_path: Path, history: dict[int, dict[str, Any]]) -> None:
    make_run(tmp_path)
    train(tmp_path, [1])
    for _ in range(2):
        with SentRows(tmp_path, "wandb") as sent:
            following = follower(tmp_path, sent, {"evaluation": {"every": 2}})
            following.send()  # and is killed at first: step 1 was open
    following.close()
    assert steps_with(history, "train/reward_mean".__eq__) == [1]


@pytest.mark.parametrize(
    ("keys", "mode"), [({}, None), ({"mode": "offline"}, "offline"), ({"mode": "online"}, "online")]
)
def test_the_environment_chooses_the_mode_that_the_run_file_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], mode: str | None
) -> None:
    given: list[Any] = []

    def init(**named: Any) -> FakeRun:
        given.append(named["mode"])
        return FakeRun({})

    module: Any = SimpleNamespace(init=init, Table=None, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    make_run(tmp_path)
    with SentRows(tmp_path, "wandb") as sent:
        config, run = WandbTracker(**keys), TrackedRun(tmp_path, "run", {})
        open_tracker(config, run, sent)
        monkeypatch.setenv("WANDB_MODE", "disabled")  # nothing would be kept, and all be marked as sent
        if mode is None:
            with pytest.raises(RuntimeError, match="WANDB_MODE is disabled"):
                open_tracker(config, run, sent)
        else:
            open_tracker(config, run, sent)
    assert set(given) == {mode}


def test_a_run_that_is_offline_by_the_environment_knows_nothing_of_earlier_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun({})
    run.offline = True
    module: Any = SimpleNamespace(init=lambda **_: run, Table=None, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    make_run(tmp_path)
    with SentRows(tmp_path, "wandb") as sent:
        assert open_tracker(WandbTracker(), TrackedRun(tmp_path, "run", {}), sent).last_step is None
