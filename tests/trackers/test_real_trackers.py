"""The trackers with their real packages, which are no part of the environment: `make test-trackers`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trackers.tracked_run import ROOT, back_to, evaluate, make_run, train
from tests.waiting import scaled

pytestmark = pytest.mark.timeout(180)
BLOCK, HEADER = 32768, 7
"""Sizes of a LevelDB log, the format of W&B's files; the file's own header is as long as that of a record."""
NOWHERE = "http://127.0.0.1:9"


PROCESS = """
import os, sys
from streamrl.trackers import tracker_process
from streamrl.trackers.backends import wandb_run
wandb_run.INIT_S = 3.0
code = tracker_process.main()
sys.stderr.flush()
os._exit(code)
"""


def send(folder: Path, name: str, code: int = 0) -> list[str]:
    """Follow a run to the end of what it has, in a process of its own as a run does; return what it said."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(folder), name],
        input="",
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines()


def tensorboard_steps(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "trackers" / "tensorboard"))
    found.Reload()
    events = found.Scalars("train/reward_mean")
    assert [event.wall_time for event in events][:1] == [1001.0]
    texts = "".join(event.tensor_proto.string_val[0].decode() for event in found.Tensors("samples/text_summary"))
    assert "It is 2" in texts
    counts = Counter(event.step for event in events)
    assert set(counts.values()) == {1}
    assert [event.step for event in found.Scalars("evaluation/overall/pass_at_2")] == [0, 4]
    return {event.step: round(event.value, 3) for event in events}


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of one of W&B's files: pieces of a LevelDB log, each with checksum, length and type."""
    from wandb.proto import wandb_internal_pb2

    content, place, pieces = path.read_bytes(), HEADER, b""
    while place < len(content):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        pieces += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def wandb_steps(folder: Path) -> dict[int, float]:
    found: dict[int, float] = {}
    evaluated, ids, tables = [], set(), 0
    for path in sorted(folder.glob("trackers/wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if "train/reward_mean" in items:
                assert items["_step"] not in found
                found[items["_step"]] = items["train/reward_mean"]
            if "evaluation/step" in items:
                evaluated.append(items["evaluation/step"])
            tables += any(name.startswith("samples") for name in items)
    assert (len(ids), evaluated, tables) == (1, [0, 4], 1)
    return found


def mlflow_steps(folder: Path) -> dict[int, float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("streamrl")
    (run,) = client.search_runs([experiment.experiment_id])
    metrics = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert run.info.status == "FINISHED"
    assert run.data.params["batch.prompts_per_step"] == "8"
    assert {point.timestamp for point in metrics if point.step == 1} == {1_001_000}
    assert len(metrics) == len({point.step for point in metrics})
    evaluations = client.get_metric_history(run.info.run_id, "evaluation/overall/pass_at_2")
    assert sorted(point.step for point in evaluations) == [0, 4]
    assert [one.path for one in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step_000001.json"]
    return {point.step: point.value for point in metrics}


def trackio_steps(folder: Path) -> dict[int, float]:
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as s\n"
        "print('LOGS', json.dumps({run: s.get_logs('streamrl', run) for run in s.get_runs('streamrl')}, default=str))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ((_, rows),) = json.loads(out.partition("LOGS ")[2]).items()
    steps = [row["step"] for row in rows if "train/reward_mean" in row]
    assert len(steps) == len(set(steps))
    assert [row["step"] for row in rows if "evaluation/overall/pass_at_2" in row] == [0, 4]
    assert [row["samples"]["_value"][0]["completion"] for row in rows if "samples" in row] == ["It is 2"]
    return {row["step"]: row["train/reward_mean"] for row in rows if "train/reward_mean" in row}


READERS: dict[str, tuple[str, str, Callable[[Path], dict[int, float]]]] = {
    "tensorboard": ("tensorboardX", "{name: tensorboard}", tensorboard_steps),
    "wandb": ("wandb", "{name: wandb, mode: offline}", wandb_steps),
    "mlflow": ("mlflow", "{name: mlflow}", mlflow_steps),
    "trackio": ("trackio", "{name: trackio}", trackio_steps),
}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_continues_its_history_and_has_each_step_once(tmp_path: Path, name: str) -> None:
    package, keys, read = READERS[name]
    pytest.importorskip(package)
    folder = make_run(tmp_path / "run", f"[{keys}]", "evaluation={}")
    train(folder, range(1, 6), reward=0.1)
    evaluate(folder, 0)
    send(folder, name)
    back_to(folder, 4)
    train(folder, [5, 6, 7], reward=0.9, began=2000.0)
    evaluate(folder, 4)
    said = send(folder, name)
    assert send(folder, name) == []
    forgets = name == "tensorboard"
    assert read(folder) == {step: 0.1 if step < (5 if forgets else 6) else 0.9 for step in range(1, 8)}
    assert bool(said) != forgets


@pytest.mark.parametrize(
    ("name", "keys", "environment"),
    [
        ("wandb", "{name: wandb}", {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": NOWHERE}),
        ("wandb", "{name: wandb}", {"WANDB_API_KEY": "", "HOME": "/nonexistent", "NETRC": "/nonexistent/netrc"}),
        ("mlflow", f"{{name: mlflow, tracking_uri: '{NOWHERE}'}}", {}),
    ],
    ids=["wandb", "wandb without a key", "mlflow"],
)
def test_a_service_out_of_reach_is_said_once_and_nothing_is_marked_as_sent(
    tmp_path: Path, name: str, keys: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    folder = make_run(tmp_path / "run", f"[{keys}]")
    train(folder, range(1, 4))
    said = send(folder, name, code=1)
    assert len(said) == 2
    assert said[0].startswith("takes nothing now (") and "stays in the run's folder" in said[0]
    assert said[1] == f"has not taken 3 rows; send them with: streamrl track {folder} {name}"
    lines = (folder / "trackers" / f"{name}.jsonl").read_text().splitlines()
    assert not any('"kind"' in line for line in lines)
