"""Ranks agree on the checkpoint that they load, and wait long enough for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamrl.errors import RunFailed
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.runtime.process_plan import RANK_MEETING
from streamrl.training import agreements
from streamrl.training.agreements import agreed_checkpoint
from streamrl.training.rank_store import join_ranks


def folder(tmp_path: Path, *steps: int) -> CheckpointFolder:
    for step in steps:
        (tmp_path / f"step_{step}").mkdir()
    return CheckpointFolder(tmp_path)


def test_rank_0_chooses_the_newest_checkpoint(tmp_path: Path, one_rank: None) -> None:
    assert agreed_checkpoint(folder(tmp_path)) is None
    assert agreed_checkpoint(folder(tmp_path, 10, 20)) == 20


def test_another_rank_waits_until_it_sees_that_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node shows a shared folder's content later."""

    def given(found: list[Any]) -> None:
        assert found == [None]  # only rank 0 looks
        found[0] = 20

    waited: list[float] = []

    def appears(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            folder(tmp_path, 20)

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", given)
    monkeypatch.setattr(agreements.time, "sleep", appears)
    seen = folder(tmp_path, 10)
    assert agreed_checkpoint(seen) == 20 and len(waited) == 3
    (tmp_path / "step_20").rmdir()
    monkeypatch.setattr(agreements, "SEEN_S", -1.0)
    with pytest.raises(RunFailed, match="rank 1 does not see the checkpoint of step 20"):
        agreed_checkpoint(seen)


def test_ranks_wait_for_each_other_as_long_as_a_command_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", RANK_MEETING: str(tmp_path / "meeting")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    join_ranks("gloo", 60.0, 7777.0)
    try:
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 7777.0
    finally:
        dist.destroy_process_group()
