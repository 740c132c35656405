"""A disk that will be full before the run's last step is named in time, and one with room never."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.config.run import RunConfig
from streamrl.controller import disk_room
from streamrl.controller.disk_room import COUNT, GIB, DiskRoom, FolderSize, room_warning
from streamrl.run_dir.checkpoints import CheckpointFolder


def run_of(every: int = 10, keep: int = 2, evaluated: int | None = None) -> RunConfig:
    """A run of 1,000 steps."""
    evaluation = None if evaluated is None else {"every": evaluated}
    checkpoint = {"every": every, "keep": keep}
    return RunConfig.model_validate({"steps": 1000, "checkpoint": checkpoint, "evaluation": evaluation})


RUN = run_of()


def sizes(*growth: int, first: int = 10) -> list[FolderSize]:
    """Sizes after steps from `first` on, which grow by GiB."""
    return [FolderSize(first + n, GIB * sum(growth[:n])) for n in range(len(growth) + 1)]


@pytest.mark.parametrize(
    ("found", "free", "steps", "full"),
    [
        (sizes(*[1] * 10), 63 * GIB, 100, "step 83 of 100"),  # 80 GiB to come
        (sizes(*[1] * 10), 64 * GIB, 100, ""),  # too close to say
        (sizes(*[1] * 9), 0, 100, ""),
        (sizes(*[9] * 5, *[0] * 5), 63 * GIB, 100, ""),  # bursts
        (sizes(*[0] * 5, *[9] * 5), 63 * GIB, 100, ""),
        (sizes(*[2] * 5, *[1] * 5), 63 * GIB, 100, "step 83 of 100"),
        (sizes(*[-1] * 10), 0, 100, ""),
        (sizes(*[1] * 10), 0, 20, ""),  # the last step is done
        ([FolderSize(3 * one.step, one.nbytes) for one in sizes(*[3] * 10)], 8 * GIB, 90, "step 68 of 90"),
        (sizes(*[500] * 20, *[1] * 10, first=0), 50 * GIB, 100, "step 80 of 100"),
    ],
)
def test_only_a_disk_that_is_clearly_too_small_for_steady_growth_is_named(
    found: list[FolderSize], free: int, steps: int, full: str
) -> None:
    warning = room_warning(found, free, steps)
    assert (f"full after about {full}: " in warning) if full else not warning


def test_a_disk_that_fills_is_logged_once_and_checkpoints_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [10 * 2**20]
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    grows, steady = DiskRoom(tmp_path, RUN), DiskRoom(tmp_path / "steady", RUN)
    for folder in ("agents/checkpoints", "steady/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    for step in range(COUNT + 1):
        (tmp_path / "agents" / "checkpoints" / f"{step}").write_bytes(bytes(2**16))
        (tmp_path / "steady" / "checkpoints" / f"{step}").write_bytes(bytes(2**16))
        for one in (grows, steady):
            one.look(step)
            one.look(step)
        assert bool(grows.warning) is (step >= COUNT - 1) and not steady.warning
    assert [(record.levelname, "the disk will be full" in record.message) for record in caplog.records] == [
        ("WARNING", True)
    ]
    for free[0], full in ((2**40, False), (10 * 2**20, True)):
        grows.look(COUNT)  # the same step
        assert bool(grows.warning) is full


def test_the_room_of_checkpoints_to_come_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * 2**20))
    room, checkpoints = DiskRoom(tmp_path, RUN), CheckpointFolder(tmp_path / "checkpoints")
    for step in range(COUNT):
        (tmp_path / f"{step}").write_bytes(bytes(2**16))  # 62 MiB are to come
        room.look(step)
    assert not room.warning

    def warned(folder: Path, mib: int) -> bool:
        with (folder / "weights").open("wb") as file:
            file.truncate(mib * 2**20)
        room.look(COUNT - 1)
        return bool(room.warning)

    assert not warned(checkpoints.begin(2), 30)
    checkpoints.commit(2, 2)
    assert warned(checkpoints.begin(4), 1), "59 MiB more for two, and 1.25 x 41 are too few"
    assert not warned(checkpoints.partial(4), 30)
    checkpoints.commit(4, 2)
    assert not warned(checkpoints.path(4), 30), "70 MiB beside the one more"
    room.run = run_of(keep=1)  # two are there, as one of them is the best
    assert warned(checkpoints.path(4), 99)
    assert "0.000977 GiB are free for that" in room.warning


@pytest.mark.parametrize(
    ("run", "warned"),
    [
        (run_of(every=400, keep=9), False),  # two more, and perhaps the one of this step: 45 MiB
        (run_of(every=400, keep=9, evaluated=100), True),
        (run_of(every=100, keep=9), True),
        (run_of(every=100, keep=2), False),
    ],
)
def test_checkpoints_that_the_run_is_too_short_for_take_no_room(
    run: RunConfig, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda folder: SimpleNamespace(free=120 * 2**20))
    room, checkpoints = DiskRoom(tmp_path, run), CheckpointFolder(tmp_path / "checkpoints")
    with (checkpoints.begin(400) / "weights").open("wb") as file:
        file.truncate(15 * 2**20)
    checkpoints.commit(400, 9)
    for step in range(400, 400 + COUNT):
        (tmp_path / f"{step}").write_bytes(bytes(2**16))  # 37 MiB are to come
        room.look(step)
    assert bool(room.warning) is warned


def test_a_look_at_files_that_have_just_gone_or_at_a_disk_that_is_away_ends_no_later_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_room, "EVERY_S", 0.0)
    monkeypatch.setattr(disk_room.os, "walk", lambda folder: [(folder, [], ["gone"])])
    room = DiskRoom(tmp_path, RUN)
    room.look(1)
    answers = iter([FileNotFoundError, KeyError])
    monkeypatch.setattr(room, "look", lambda step: _fail(next(answers)))
    with pytest.raises(KeyError):
        asyncio.run(room.keep_looking(lambda: 7))


def _fail(error: type[Exception]) -> None:
    raise error
