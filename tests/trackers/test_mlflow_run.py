"""MLflow's run, with a client that keeps what it is given in place of mlflow's."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.trackers import MLflowTracker
from streamrl.trackers.backends.opener import open_tracker
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import TrackedRun

SETTINGS = {f"key{number}": number for number in range(150)}


def is_taken(name: str) -> bool:
    """Whether MLflow takes a name (mlflow/utils/validation.py)."""
    shortest = posixpath.normpath(name)
    plain = shortest == name and name != "." and not name.startswith(("..", "/"))
    return plain and len(name) <= 250 and re.fullmatch(r"[/\w.\- :]*", name) is not None


class FakeClient:
    """A client of a server with one run at most, which fails after some requests for parameters."""

    params: dict[str, str]
    left: int
    figures: list[str]
    """Names of the figures of the last request."""

    def __init__(self, uri: str) -> None: ...

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="made"))

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(tags={}, params=dict(self.params)))

    def update_run(self, run: str, status: str) -> None: ...

    def log_batch(
        self, run: str, params: Sequence[tuple[str, str]] = (), metrics: Sequence[str] = (), tags: Sequence[Any] = ()
    ) -> None:
        if not self.left:
            raise ConnectionError("no route to host")
        type(self).left -= 1
        names = [*(key for key, _ in params), *metrics]
        assert all(map(is_taken, names)) and len(set(names)) == len(names), names
        type(self).figures = list(metrics)
        assert all(self.params.get(key, value) == value for key, value in params), "parameters cannot be changed"
        self.params.update(params)


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.params, FakeClient.left = {}, 0
    entities: Any = SimpleNamespace(
        Param=lambda key, value: (key, value), Metric=lambda name, *_: name, RunTag=lambda *_: None
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeClient))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return FakeClient


@pytest.mark.parametrize("requests", [0, 1], ids=["none arrived", "some arrived"])
def test_settings_that_did_not_arrive_are_sent_when_the_run_is_opened_again(
    tmp_path: Path, client: type[FakeClient], requests: int
) -> None:
    keys, client.left = MLflowTracker(), requests
    with SentRows(tmp_path, "mlflow") as sent:
        with pytest.raises(ConnectionError):
            open_tracker(keys, TrackedRun(tmp_path, "mine", SETTINGS), sent)
        client.left = 5
        changed = {**SETTINGS, "key0": "of the resumed run"}
        opened = open_tracker(keys, TrackedRun(tmp_path, "mine", changed), sent)
    assert opened.id == "made"
    assert client.params.keys() == SETTINGS.keys() and client.params["key149"] == "149"


def test_every_name_of_a_figure_and_of_a_setting_is_taken_and_none_is_lost(
    tmp_path: Path, client: type[FakeClient]
) -> None:
    client.left = 5
    odd = ["a+b", "a*b", "a_b", "math/", "", ".", "..", "https://api", "x" * 300, "x" * 299 + "y", "\udce9", "é"]
    names = ["train/loss", "train/reward_by_task/a b", *(f"train/reward_by_task/{name}" for name in odd)]
    with SentRows(tmp_path, "mlflow") as sent:
        run = open_tracker(MLflowTracker(), TrackedRun(tmp_path, "mine", dict.fromkeys([*odd, "..x", "/y"], 1)), sent)
        run.log_step(1, 5.0, dict.fromkeys(names, 1.0))
        first = client.figures
        run.log_step(2, 6.0, dict.fromkeys(reversed(names), 1.0))
    assert first[:2] == names[:2] and "train/reward_by_task/a_b" in first
    assert first == client.figures[::-1]  # in whatever company a name comes
    assert len(client.params) == len(odd) + 2
