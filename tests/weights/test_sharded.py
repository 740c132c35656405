"""A version laid out by ranks that each write their own shards is the one that whole tensors would give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import WeightSyncConfig
from streamrl.errors import RunFailed
from streamrl.training.packing_proof import small_model
from streamrl.training.trainer import Trainer
from streamrl.verify.families import FAMILIES
from streamrl.weights import sharded as sharded_module
from streamrl.weights.local_model import expected_tensors, initial_version
from streamrl.weights.quantize import CODE_TYPES, CodeKind, full_precision, is_quantized, quantize
from streamrl.weights.sharded import ShardedLayout, conversions, deal
from streamrl.weights.version import Manifest, lay_out
from tests.training.conftest import one_rank, random_groups, run_config, tiny_model  # noqa: F401

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


def check_equality(rank: int, ranks: int, folder: Path) -> None:
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


def check_a_step(rank: int, ranks: int, folder: Path) -> None:
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
        opened = descriptors() if number == 4 else opened
    assert descriptors() <= opened


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_mixture(rank: int, ranks: int, folder: Path) -> None:
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


def test_one_ranks_version_is_that_of_whole_tensors(tiny_model: Path, tmp_path: Path, one_rank: None) -> None:  # noqa: F811
    check_equality(0, 1, tmp_path)
    check_a_step(0, 1, tiny_model)
    check_mixture(0, 1, tmp_path)


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


def test_memory_for_a_version_that_a_container_has_not_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharded_module, "free_memory", lambda: 3.0 * 2**20)
    os.close(sharded_module._anonymous_file(3 * 2**20))
    with pytest.raises(MemoryError, match="3 MiB free"):
        sharded_module._anonymous_file(3 * 2**20 + 1)
