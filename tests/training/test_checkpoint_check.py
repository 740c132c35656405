"""Ranks share the work of the checksums, and all end if one of them finds damage."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from streamrl.errors import RunFailed
from streamrl.run_dir import checkpoint_sums
from streamrl.run_dir.checkpoint_sums import DamagedFile, FileSums, write_sums
from streamrl.training.checkpoint_check import check_trainer_state, gathered_sums

OWN = ("trainer_state/__1_0.distcp",)
OTHERS = ("trainer_state/__0_0.distcp", "trainer_state/.metadata", "state.json", "model.safetensors")


def written(folder: Path) -> Path:
    (folder / "trainer_state").mkdir(parents=True)
    for name in (*OWN, *OTHERS):
        (folder / name).write_text(name)
    return folder


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, other: object = None) -> Callable[[], list[object]]:
    """Be one of two ranks, to which the other one gives `other`; return what this one has given so far."""
    given: list[object] = []

    def gather(into: list[Any], mine: object) -> None:
        given.append(mine)
        into[rank], into[1 - rank] = mine, other

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return lambda: given


def test_each_rank_reads_what_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "step_5")
    others: FileSums = {"of the other": (1, "")}
    for rank, names in ((0, OTHERS), (1, OWN)):
        as_rank(monkeypatch, rank, others)
        assert set(gathered_sums(folder)) == {*names, *others}


def test_damage_that_one_rank_finds_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "step_5")
    as_rank(monkeypatch, 0, {})
    sums = gathered_sums(folder)
    as_rank(monkeypatch, 1, {})
    write_sums(folder, 5, sums | gathered_sums(folder))
    read: list[str] = []
    real = checkpoint_sums._sum
    monkeypatch.setattr(checkpoint_sums, "_sum", lambda path: (read.append(path.name), real(path))[1])
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        check_trainer_state(folder)
    assert sorted(read) == [".metadata", "__0_0.distcp", "__1_0.distcp"], "each file once, of those that are loaded"
    as_rank(monkeypatch, 0, DamagedFile("b is missing"))
    with pytest.raises(RunFailed, match="b is missing"):
        check_trainer_state(folder)
    for name in (*OWN, *OTHERS):
        (folder / name).write_text("x")
    given = as_rank(monkeypatch, 0, OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(OSError, match="Stale"):  # which may pass: a restarted trainer looks again
        check_trainer_state(folder)
    assert [type(one) for one in given()] == [DamagedFile]
