"""MLflow's run, with a client that keeps what it is given in place of mlflow's."""

from __future__ import annotations

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


class FakeClient:
    """A client of a server with one run at most, which fails after some requests for parameters."""

    params: dict[str, str]
    left: int

    def __init__(self, uri: str) -> None: ...

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="made"))

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(tags={}, params=dict(self.params)))

    def update_run(self, run: str, status: str) -> None: ...

    def log_batch(self, run: str, params: Sequence[tuple[str, str]]) -> None:
        if not self.left:
            raise ConnectionError("no route to host")
        type(self).left -= 1
        assert all(self.params.get(key, value) == value for key, value in params), "parameters cannot be changed"
        self.params.update(params)


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.params, FakeClient.left = {}, 0
    entities: Any = SimpleNamespace(Param=lambda key, value: (key, value))
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
