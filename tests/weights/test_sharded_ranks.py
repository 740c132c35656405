"""Several ranks lay out one version, whatever the division of the tensors among them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from streamrl.errors import RunFailed
from streamrl.weights.quantize import CODE_TYPES
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.version import lay_out
from tests.ports import free_port
from tests.training.conftest import PRELOADED, run_ranks, tiny_model  # noqa: F401
from tests.waiting import scaled
from tests.weights.test_sharded import (
    assert_equal,
    check_a_step,
    check_equality,
    check_mixture,
    mixture,
    no_gather,
    odd_model,
    sharded,
    whole,
)


def check_other_placements(rank: int, ranks: int, folder: Path) -> None:
    """Sharded by columns, replicated, or not distributed at all."""
    mesh = init_device_mesh("cpu", (ranks,))
    model, plain = odd_model(tied=False), odd_model(tied=False)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    columns = distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(1)])
    model.lm_head.weight = torch.nn.Parameter(columns)
    replicated = distribute_tensor(model.base_model.norm.weight.detach(), mesh)
    model.base_model.norm.weight = torch.nn.Parameter(replicated)
    for kind in (None, "fp8"):
        ours = ShardedLayout(model, torch.bfloat16, kind or "same").lay_out(1)
        assert_equal(ours, lay_out(1, whole(plain, torch.bfloat16, kind)))


def check_failures(rank: int, ranks: int, folder: Path) -> None:
    """What one rank cannot do fails on all."""
    model = sharded(odd_model())
    with torch.no_grad():
        bad = model.base_model.layers[1].mlp.up_proj.weight.to_local()
        if rank == ranks - 1:
            bad[0, 0] = float("nan")
    with pytest.raises(
        RunFailed, match=r"not published: weight 'model\.layers\.1\.mlp\.up_proj\.weight' is not finite"
    ):
        ShardedLayout(model, torch.bfloat16).lay_out(1)
    for kind in CODE_TYPES:
        with pytest.raises(RunFailed, match=r"layers\.1\.mlp\.up_proj\.weight.*nan"):
            ShardedLayout(model, torch.bfloat16, kind).lay_out(1)


def check_hosts(rank: int, ranks: int, folder: Path) -> None:
    """Every rank on a host of its own, or on one unknown: rank 0 has the buffer, and what others own comes to it."""
    plain = odd_model(), mixture()
    with pytest.MonkeyPatch.context() as patch:
        for model, kind, host in ((odd_model(), "int8", f"host-{rank}"), (mixture(), "same", "")):
            patch.setattr("streamrl.weights.sharded.this_host", lambda host=host: host)
            sharded(model)
            manifest, buffer = ShardedLayout(model, torch.bfloat16, kind).lay_out(2)  # type: ignore[arg-type]
            assert buffer.nbytes == (manifest.nbytes if rank == 0 else 0)
            if rank == 0:
                manifest.verify(buffer)
            if kind == "int8":
                theirs = lay_out(2, whole(plain[0], torch.bfloat16, "int8"))
                assert manifest == theirs[0] and (rank or np.array_equal(buffer, theirs[1]))


def check_copies(rank: int, ranks: int, folder: Path) -> None:
    """Two nodes with a copy of the model each (HSDP): those of the first write all of it, and nothing is gathered."""
    model = odd_model()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    for unit in (*model.base_model.layers, model):
        fully_shard(unit, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamrl.weights.sharded.this_host", lambda: f"host-{2 * rank // ranks}")
        patch.setattr(DTensor, "full_tensor", no_gather)
        manifest, buffer = ShardedLayout(model, torch.bfloat16).lay_out(1)
    theirs = lay_out(1, whole(odd_model(), torch.bfloat16))
    assert manifest == theirs[0]
    if 2 * rank < ranks:
        np.testing.assert_array_equal(buffer, theirs[1])
    else:
        assert not buffer.nbytes


def _rank(rank: int, ranks: int, port: int, folder: str, checks: list[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for check in checks:
        check(rank, ranks, Path(folder))
    dist.destroy_process_group()


def test_two_ranks_version_is_that_of_whole_tensors_and_they_fail_together(tiny_model: Path) -> None:  # noqa: F811
    checks = [check_equality, check_a_step, check_mixture, check_failures, check_hosts]
    run_ranks(2, _rank, 2, free_port(), str(tiny_model), checks)


def test_nodes_with_copies_of_the_model_need_not_gather(tmp_path: Path) -> None:
    run_ranks(4, _rank, 4, free_port(), str(tmp_path), [check_copies])


def test_ranks_may_have_no_rows_of_a_parameter(tmp_path: Path) -> None:
    run_ranks(3, _rank, 3, free_port(), str(tmp_path), [check_equality, check_other_placements])


def _lay_out_and_wait(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    manifest, buffer = ShardedLayout(sharded(odd_model()), torch.float32).lay_out(1)
    maps = Path("/proc/self/maps").read_text().splitlines()
    pipe.send((manifest.nbytes, [line.split() for line in maps if "streamrl-weights" in line]))
    time.sleep(3600)  # sleeps: until it is killed
    assert buffer.size


def sizes_in(folder: Path) -> set[int]:
    """Return the sizes of the files below a folder in which others make and delete files meanwhile."""
    found = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found.add(os.lstat(Path(parent, name)).st_size)
    return found


def test_nothing_is_left_of_a_version_whose_processes_are_killed() -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
    context, port = mp.get_context("forkserver"), free_port()
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=_lay_out_and_wait, args=(r, port, pipes[r][1]), daemon=True) for r in range(2)]
    try:
        for process in ranks:
            process.start()
        told = []
        for ours, theirs in pipes:
            theirs.close()  # a rank that dies early is noticed
            assert ours.poll(scaled(120))
            told.append(ours.recv())
    finally:
        for process in ranks:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join(scaled(10))
    (nbytes, first), (_, second) = told
    assert len(first) == len(second) == 1
    assert first[0][4] == second[0][4]  # the inode: one copy for both ranks
    assert first[0][1] == "rw-s"
    assert first[0][5].startswith("/memfd:")  # it has no name that could stay
    assert nbytes not in sizes_in(Path("/dev/shm"))
