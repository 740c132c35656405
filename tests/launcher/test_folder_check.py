"""Room for checkpoints beyond the newest ones, which a run with evaluations keeps, is asked for before the start."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections import namedtuple
from pathlib import Path

import pytest

from streamrl.config.run import RunConfig
from streamrl.launcher.folder_check import check_database_paths, check_disk, disk_warnings
from streamrl.run_dir import layout
from tests.launcher.test_preflight import GIB, make_model


@pytest.mark.parametrize(
    ("every", "schedule", "most"),
    [
        (10, {"name": "stream"}, 5),  # two are kept, one is written, one is the best, one may be evaluated still
        (10, {"name": "async", "max_staleness": 4}, 5),
        (1, {"name": "async", "max_staleness": 4}, 9),
        (2, {"name": "sync", "rounds": {"kind": "tail_batching", "max_age": 2}}, 6),
    ],
)
def test_the_best_checkpoint_and_those_in_evaluation_are_warned_of_and_refuse_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, schedule: dict[str, object], most: int
) -> None:
    usage = namedtuple("usage", "free")
    plain = make_model(tmp_path / "m", megabytes=1024)  # 7 GiB a checkpoint, of which two are kept
    values = plain.model_dump() | {"schedule": schedule}
    run = RunConfig.model_validate(values | {"evaluation": {"every": every}})
    for free, resumed, there in ((7 * most, None, 0), (7 * (most - 3), tmp_path / "run", 3)):
        for step in range(there):
            (tmp_path / "run" / layout.CHECKPOINTS / f"step_{step}").mkdir(parents=True)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(free * GIB))
        assert list(disk_warnings(run, tmp_path, resumed)) == []
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(free * GIB - 1))
        (warning,) = disk_warnings(run, tmp_path, resumed)
        assert f"checkpoints may take {free}.0 GiB more" in warning and "the best one stays" in warning
        assert list(check_disk(run, tmp_path, resumed)) == []
        assert list(disk_warnings(RunConfig.model_validate(values), tmp_path, resumed)) == []


@pytest.mark.parametrize(
    ("steps", "every", "evaluated", "begun", "written"),
    [(20, 10, None, 0, 2), (25, 10, None, 0, 3), (20, 100, None, 0, 1), (3, 1, 1, 0, 3), (20, 10, None, 12, 1)],
)
def test_a_run_needs_no_room_for_more_checkpoints_than_it_will_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    every: int,
    evaluated: int | None,
    begun: int,
    written: int,
) -> None:
    usage = namedtuple("usage", "free")
    values = make_model(tmp_path / "m", megabytes=1024).model_dump()  # 7 GiB a checkpoint
    values |= {"steps": steps, "checkpoint": {"every": every, "keep": 1000}}
    run = RunConfig.model_validate(values | ({"evaluation": {"every": evaluated}} if evaluated else {}))
    resumed = tmp_path / "run" if begun else None
    if resumed is not None:
        (resumed / layout.CHECKPOINTS / f"step_{begun}").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(7 * written * GIB))
    assert list(check_disk(run, tmp_path, resumed)) == list(disk_warnings(run, tmp_path, resumed)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(7 * written * GIB - 1))
    (problem,) = check_disk(run, tmp_path, resumed)
    assert f"{7 * written}.0 GiB needed for {written} checkpoints, all that the run will write" in problem


@pytest.mark.parametrize(("own", "size"), [(None, 13), (512, 10)])
def test_a_checkpoint_of_ppo_has_the_state_of_its_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int | None, size: int
) -> None:
    usage = namedtuple("usage", "free")
    policy = make_model(tmp_path / "m", megabytes=1024).model_dump()
    path = {} if own is None else {"path": make_model(tmp_path / "critic", megabytes=own).model.path}
    values = policy | {"steps": 3, "checkpoint": {"every": 100}, "algorithm": {"name": "ppo", "critic": path}}
    run = RunConfig.model_validate(values | {"evaluation": {"every": 100}})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size * GIB))
    assert list(check_disk(run, tmp_path)) == list(disk_warnings(run, tmp_path)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size * GIB - 1))
    (problem,), (warning,) = check_disk(run, tmp_path), disk_warnings(run, tmp_path)
    assert f"{size}.0 GiB needed" in problem and f"may take {size}.0 GiB" in warning


@pytest.mark.parametrize("emulated", [(), ("a-site-of-the-cluster",)])
def test_a_path_is_refused_exactly_where_sqlite_refuses_it(tmp_path: Path, emulated: tuple[str, ...]) -> None:
    run = RunConfig(name="run")
    refused = []
    for length in range(380, 520, 4):
        runs = tmp_path / "a" / ("x" * 200)
        runs /= "y" * (length - len(str(runs)) - 1)
        folder = runs.joinpath("run", *(part for site in emulated for part in ("sites", site)))
        folder.mkdir(parents=True)
        opened = False
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(folder / layout.TOKEN_JOURNAL)) as database,
        ):
            database.execute("PRAGMA journal_mode=WAL")
            opened = True
        problems = list(check_database_paths(run, runs, None, emulated))
        assert bool(problems) != opened
        refused += problems
        shutil.rmtree(tmp_path / "a")
    assert "more than SQLite takes; expected a shorter path" in refused[0]
    assert not list(check_database_paths(run, Path("/"))), "one shorter than that of the temporary folder"
    assert "--resume " in next(iter(check_database_paths(run, tmp_path, tmp_path.joinpath(*["z" * 250] * 9))))
