"""A version laid out by ranks that each write their own shards is the one that whole tensors would give."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from streamrl.config.run import RunConfig, WeightSyncConfig
from streamrl.errors import RunFailed
from streamrl.training.packing_proof import small_model
from streamrl.training.trainer import Trainer
from streamrl.verify.families import FAMILIES
from streamrl.weights.local_model import expected_tensors, initial_version
from streamrl.weights.quantize import CODE_TYPES, CodeKind, full_precision, is_quantized, quantize
from streamrl.weights.sharded import ShardedLayout, conversions, deal
from streamrl.weights.version import Manifest, lay_out
from tests.training.conftest import PRELOADED, free_port, one_rank, random_groups, run_config, run_ranks, tiny_model  # noqa: F401
from tests.waiting import scaled

CPU = torch.device("cpu")
ODD: dict[
    str, Any
] = {  # sizes that two or three ranks cannot share evenly, and two rows that three cannot share at all
    "vocab_size": 101,
    "hidden_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def odd_model(tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(LlamaConfig(**ODD, intermediate_size=45, tie_word_embeddings=tied))


def mixture() -> PreTrainedModel:
    """Its experts are fused in memory and split in checkpoints."""
    torch.manual_seed(4)
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**ODD, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, intermediate_size=9)
    )


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.base_model.layers, model):
        fully_shard(unit, mesh=mesh)
    return model


def whole(
    model: PreTrainedModel, dtype: torch.dtype, kind: CodeKind | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a version has to hold, made the plain way."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(dtype)
        if kind is not None and is_quantized(name, tuple(tensor.shape)):
            codes, scales = quantize(tensor, kind)
            yield from ((name, codes), (f"{name}.scale", scales))
        else:
            yield name, tensor


def assert_equal(ours: tuple[Manifest, np.ndarray], theirs: tuple[Manifest, np.ndarray]) -> None:
    assert ours[0] == theirs[0]
    np.testing.assert_array_equal(ours[1], theirs[1])


def no_gather(self: DTensor, **options: object) -> torch.Tensor:
    raise AssertionError("a parameter was gathered")


def _check_equality(rank: int, ranks: int, folder: Path) -> None:
    model, plain = sharded(odd_model()), odd_model()
    number = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", no_gather)
        for dtype in (torch.bfloat16, torch.float32):
            for kind in (None, *CODE_TYPES):
                number += 1
                ours = ShardedLayout(model, dtype, kind or "same").lay_out(number)
                assert_equal(ours, lay_out(number, whole(plain, dtype, kind)))
    names = [entry.name for entry in ours[0].tensors]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names  # tied: once


def _check_a_step(rank: int, ranks: int, folder: Path) -> None:
    """After a step of the trainer; the version before stays what it was."""
    config = run_config(folder, model={"path": str(folder), "max_context": 256, "dtype": "bfloat16"})
    trainer = Trainer(config, str(folder), CPU)
    before = trainer.lay_out(0)
    kept = before[1].copy()
    trainer.accumulate(random_groups(2, seed=rank), is_last=True)
    trainer.step(0, 10.0)
    after = trainer.lay_out(1)
    assert_equal(after, lay_out(1, trainer.weights()))
    assert after[0].version.content_hash != before[0].version.content_hash
    np.testing.assert_array_equal(before[1], kept)
    before[0].verify(before[1])
    opened = 0
    for number in range(2, 8):  # files of buffers that nobody holds serve again
        before, after = after, trainer.lay_out(number)
        assert_equal(after, lay_out(number, trainer.weights()))
        before[0].verify(before[1])
        dist.barrier()
        opened = _descriptors() if number == 4 else opened
    assert _descriptors() <= opened


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _check_mixture(rank: int, ranks: int, folder: Path) -> None:
    model = sharded(mixture())
    full = {name: tensor.clone() for name, tensor in whole(model, torch.float32)}
    manifest, buffer = ShardedLayout(model, torch.float32).lay_out(1)
    saved = folder / f"saved-{ranks}"
    mixture().save_pretrained(saved, state_dict=full)  # rank 0 writes
    dist.barrier()
    expected = load_file(saved / "model.safetensors")
    found = dict(manifest.tensors_of(buffer))
    assert "model.layers.1.mlp.experts.4.down_proj.weight" in found
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert manifest.version.content_hash == lay_out(1, expected.items())[0].version.content_hash
    plain = ShardedLayout(model, torch.bfloat16)
    sent = list(plain.tensors())  # as NCCL broadcasts them
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent] == plain.described()
    assert dict(sent).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in sent)
    manifest, buffer = ShardedLayout(model, torch.float32, "int8").lay_out(2)
    types = {t.name: t.dtype for t in manifest.tensors}
    assert types["model.layers.0.mlp.experts.0.up_proj.weight"] == "int8"
    assert types["model.layers.0.mlp.gate.weight"] == "float32"
    back = dict(full_precision(manifest, buffer, torch.float32))
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=float(tensor.abs().max()) / 127 / 2 * 1.001)


def _check_other_placements(rank: int, ranks: int, folder: Path) -> None:
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


def _check_failures(rank: int, ranks: int, folder: Path) -> None:
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


def _check_hosts(rank: int, ranks: int, folder: Path) -> None:
    """Every rank on a host of its own: rank 0 has the buffer, and what the others own comes to it."""
    plain = odd_model(), mixture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host-{rank}")
        for model, kind in ((sharded(odd_model()), "int8"), (sharded(mixture()), "same")):
            manifest, buffer = ShardedLayout(model, torch.bfloat16, kind).lay_out(2)  # type: ignore[arg-type]
            assert buffer.nbytes == (manifest.nbytes if rank == 0 else 0)
            if rank == 0:
                manifest.verify(buffer)
            if kind == "int8":
                theirs = lay_out(2, whole(plain[0], torch.bfloat16, "int8"))
                assert manifest == theirs[0] and (rank or np.array_equal(buffer, theirs[1]))


def _check_copies(rank: int, ranks: int, folder: Path) -> None:
    """Two nodes with a copy of the model each (HSDP): those of the first write all of it, and nothing is gathered."""
    model = odd_model()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    for unit in (*model.base_model.layers, model):
        fully_shard(unit, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host-{2 * rank // ranks}")
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


def test_one_ranks_version_is_that_of_whole_tensors(tiny_model: Path, tmp_path: Path, one_rank: None) -> None:  # noqa: F811
    _check_equality(0, 1, tmp_path)
    _check_a_step(0, 1, tiny_model)
    _check_mixture(0, 1, tmp_path)


def test_two_ranks_version_is_that_of_whole_tensors_and_they_fail_together(tiny_model: Path) -> None:  # noqa: F811
    checks = [_check_equality, _check_a_step, _check_mixture, _check_failures, _check_hosts]
    run_ranks(2, _rank, 2, free_port(), str(tiny_model), checks)


def test_nodes_with_copies_of_the_model_need_not_gather(tmp_path: Path) -> None:
    run_ranks(4, _rank, 4, free_port(), str(tmp_path), [_check_copies])


def test_ranks_may_have_no_rows_of_a_parameter(tmp_path: Path) -> None:
    run_ranks(3, _rank, 3, free_port(), str(tmp_path), [_check_equality, _check_other_placements])


def _lay_out_and_wait(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    manifest, buffer = ShardedLayout(sharded(odd_model()), torch.float32).lay_out(1)
    maps = Path("/proc/self/maps").read_text().splitlines()
    pipe.send((manifest.nbytes, [line.split() for line in maps if "streamrl-weights" in line]))
    time.sleep(240)  # sleeps: until it is killed
    assert buffer.size


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
    sizes = {path.stat().st_size for path in Path("/dev/shm").rglob("*") if path.is_file()}
    assert nbytes not in sizes


def test_only_what_is_converted_needs_whole_tensors() -> None:
    model = mixture()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parts = conversions(shapes, lambda tensors: revert_weight_conversion(model, tensors))
    assert [name for part in parts for name in part.sources] == list(shapes)
    converted = [part.sources for part in parts if not part.is_same]
    fused = [
        (f"model.layers.{layer}.mlp.experts.{name}",) for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
    ]
    assert sorted(converted) == sorted(fused)


def test_a_model_without_weights_tells_what_its_versions_hold(one_rank: None) -> None:  # noqa: F811
    with torch.device("meta"):
        empty = mixture()
    manifest, _ = ShardedLayout(mixture(), torch.bfloat16, "fp8").lay_out(0)
    slots = ShardedLayout(empty, torch.bfloat16, "fp8").slots.values()
    assert [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in manifest.tensors] == [
        (slot.name, slot.dtype, slot.shape, slot.offset, slot.nbytes) for slot in slots
    ]


def test_a_version_has_the_buffers_of_a_checkpoint_in_fp32_and_a_site_lays_out_the_same(
    tmp_path: Path,
    one_rank: None,  # noqa: F811
) -> None:
    model = small_model(FAMILIES["DeepSeek-V3"]())
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    bias = dict(model.named_buffers())[name]
    bias.copy_(torch.linspace(0.1, 0.7, len(bias)))
    manifest, buffer = ShardedLayout(model, torch.bfloat16).lay_out(0)
    assert torch.equal(dict(manifest.tensors_of(buffer))[name], bias)
    model.save_pretrained(tmp_path)
    expected = expected_tensors(str(tmp_path), "bfloat16", "same")
    own = initial_version(str(tmp_path), expected, "bfloat16", "same")
    assert own is not None and own[0].version == manifest.version


def test_parameters_that_are_joined_are_converted_together_and_renamed_ones_by_rows() -> None:
    shapes = {"h.0.q": (4, 3), "h.0.k": (2, 3), "h.0.old": (5,), "h.1.q": (4, 3), "h.1.k": (2, 3), "h.1.old": (5,)}

    def join(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {name.replace("old", "new"): t for name, t in tensors.items() if name.endswith("old")}
        for name, query in tensors.items():
            if name.endswith("q"):  # without its keys this fails
                result[name + "k"] = torch.cat([query, tensors[name[:-1] + "k"]])
        return result

    parts = conversions(shapes, join)
    assert [(part.sources, part.targets, part.is_same) for part in parts[:2]] == [
        (("h.0.q", "h.0.k"), {"h.0.qk": (6, 3)}, False),
        (("h.0.old",), {"h.0.new": (5,)}, True),
    ]
    assert len(parts) == 4

    def mix_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"all": torch.cat([t.flatten() for t in tensors.values()])}

    with pytest.raises(RunFailed, match="several layers"):
        conversions(shapes, mix_layers)


def test_tensors_are_dealt_by_their_bytes() -> None:
    sizes = [5, 100, 1, 40, 30, 30, 0]
    dealt = deal(sizes, 2)
    assert sorted(index for one in dealt for index in one) == list(range(len(sizes)))
    assert sorted(sum(sizes[i] for i in one) for one in dealt) == [101, 105]
    assert deal(sizes, 1) == [sorted(range(7), key=lambda i: -sizes[i])]
    assert deal([], 3) == [[], [], []]


def test_nccl_does_not_send_8_bit_weights() -> None:
    assert RunConfig().weights.generation_dtype == "same"
    with pytest.raises(ValueError, match="generation_dtype"):
        WeightSyncConfig(backend="nccl", generation_dtype="fp8")
