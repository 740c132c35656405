"""A disk that will be full before the run's last step is named in time, and one with room never."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.controller import disk_room
from streamrl.controller.disk_room import COUNT, GIB, DiskRoom, FolderSize, room_warning


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
    grows, steady = DiskRoom(tmp_path, 1000), DiskRoom(tmp_path / "steady", 1000)
    for folder in ("rollouts", "steady/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    for step in range(COUNT + 1):
        (tmp_path / "rollouts" / f"{step}").write_bytes(bytes(2**16))
        (tmp_path / "steady" / "checkpoints" / f"{step}").write_bytes(bytes(2**16))
        for one in (grows, steady):
            one.look(step)
            one.look(step)
        assert bool(grows.warning) is (step >= COUNT - 1) and not steady.warning
    assert [(record.levelname, "the disk will be full" in record.message) for record in caplog.records] == [
        ("WARNING", True)
    ]
    free[0] = 2**40
    grows.look(COUNT + 1)
    assert not grows.warning
