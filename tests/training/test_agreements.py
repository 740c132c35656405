"""Ranks agree on the checkpoint that they load, and wait long enough for each other."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from streamrl.errors import RunFailed
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.runtime.process_plan import RANK_MEETING
from streamrl.training import agreements, trainer_process
from streamrl.training.agreements import agreed_checkpoint
from streamrl.training.rank_store import join_ranks
from streamrl.training.trainer_process import TrainerProcess
from tests.security.keyed_place import make_place


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
    monkeypatch.setattr(agreements, "time", SimpleNamespace(sleep=appears, monotonic=time.monotonic))
    seen = folder(tmp_path, 10)
    assert agreed_checkpoint(seen) == 20 and len(waited) == 3
    (tmp_path / "step_20").rmdir()
    monkeypatch.setattr(agreements, "SEEN_S", -1.0)
    with pytest.raises(RunFailed, match="rank 1 does not see the checkpoint of step 20"):
        agreed_checkpoint(seen)


@pytest.mark.parametrize(("resume", "newest", "follows"), [(False, 20, False), (True, None, False), (True, 20, True)])
def test_files_may_lack_weights_only_where_a_checkpoint_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool, newest: int | None, follows: bool
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = Mock()
    for name, value in {
        "join_ranks": Mock(),
        "nccl_environment": lambda context: {},
        "resolve_model": lambda *_: "model",
        "agreed_packing": lambda *_: SimpleNamespace(kind="shared", why=""),
        "agreed_checkpoint": lambda checkpoints: newest,
        "Trainer": trainer,
        "gc": Mock(),
    }.items():
        monkeypatch.setattr(trainer_process, name, value)
    monkeypatch.setattr(torch, "set_num_threads", Mock())
    monkeypatch.setattr(TrainerProcess, "_agree_on_type", Mock())
    worker = TrainerProcess(replace(make_place(tmp_path).context("trainer-0"), resume=resume))
    worker._load()
    assert trainer.call_args.kwargs == {"resumed": follows}
    assert trainer.return_value.load.called == follows


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
