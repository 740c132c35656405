"""Modules of gpt-oss, into which vLLM's loader copies tensors itself, get new weights layer by layer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import logger as vllm_log

from streamrl.config.cluster import GenerationPool
from streamrl.generation.instance.engine import Engine
from streamrl.rollouts.types import Sample
from streamrl.verify.families import FAMILIES
from streamrl.verify.small_folder import save_small_models
from streamrl.weights.backends.vllm_reload import ReloadingEngine
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.version import CorruptWeights, lay_out
from streamrl.weights.version_store import WeightStore
from tests.generation.test_engine import assert_same, config, sample_all, update
from tests.weights.world import fill

LAYERS = 4


class GptOssRoutedExperts(torch.nn.Module):
    """Stands for vLLM's module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.w2_bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)


class Model(torch.nn.Module):
    """A model whose loader copies into its parameters, whatever their own loaders are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"experts": GptOssRoutedExperts()}) for _ in range(LAYERS)
        )
        self.kept = list(self.parameters())
        self.most = 0
        """Most parameters that had memory beside the kept ones at once."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        found, loaded = dict(self.named_parameters()), set()
        for name, tensor in tensors:
            found[name].copy_(tensor)
            loaded.add(name)
            new = [one for one in found.values() if not one.is_meta and all(one is not kept for kept in self.kept)]
            self.most = max(self.most, len(new))
        return loaded


class Reloading(ReloadingEngine[Any, Any]):
    """An engine of nothing but a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        values: dict[str, Any] = {
            "model": model,
            "vllm_config": SimpleNamespace(load_config=SimpleNamespace(load_format="auto")),
            "model_config": SimpleNamespace(dtype=torch.float32),
        }
        self.__dict__.update(values)

    def init_transfer_engine(self, init_info: Any) -> None:
        raise NotImplementedError

    def receive_weights(self, update_info: Any) -> None:
        raise NotImplementedError


NAMES = [f"model.layers.{layer}.experts.{own}" for layer in range(LAYERS) for own in ("weight", "w2_bias")]


def loaded(names: Sequence[str]) -> Model:
    """A model that has loaded tensors in this order, each full of its place among `NAMES`."""
    record_metadata_for_reloading(model := Model())
    sizes = {name: one.shape for name, one in model.named_parameters()}
    assert list(sizes) == NAMES
    engine = Reloading(model)
    engine.start_weight_update()
    engine.load(((name, torch.full(sizes[name], 1.0 + NAMES.index(name))) for name in names), "version 1")
    engine.finish_weight_update()
    return model


@pytest.mark.parametrize(("names", "most"), [(NAMES, 2), (NAMES[::-1], 2), (NAMES[::2] + NAMES[1::2], 2 * LAYERS)])
def test_no_more_has_memory_than_the_layers_that_wait_for_weights(names: list[str], most: int) -> None:
    model = loaded(names)
    assert [one.unique().tolist() for one in model.parameters()] == [[1.0 + at] for at in range(len(NAMES))]
    assert all(one is kept for one, kept in zip(model.parameters(), model.kept, strict=True)), "what kernels read"
    assert model.most == most


def test_a_version_without_a_tensor_of_a_layer_is_refused() -> None:
    with pytest.raises(
        CorruptWeights, match=r"no weights for 1 of vLLM's parameters: model\.layers\.1\.experts\.w2_bias"
    ):
        loaded([name for name in NAMES if name != "model.layers.1.experts.w2_bias"])


class Part(torch.nn.Module):
    """A module with a weight of its own, tied to another one's, or none, and with a buffer."""

    def __init__(self, weight: torch.nn.Parameter | None, in_checkpoint: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("cache", torch.zeros(3), persistent=in_checkpoint)


def test_vllm_warns_only_of_modules_that_should_have_got_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    own, lost, packed = (torch.nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(3))
    kinds = [type(name, (Part,), {}) for name in ("Embedding", "Head", "Rotary", "Lost", "Statistics", "Packed")]
    parts = [kinds[0](own), kinds[1](own), kinds[2](None), kinds[3](lost), kinds[4](None, True), kinds[5](packed)]
    record_metadata_for_reloading(model := torch.nn.ModuleList(parts))
    del parts[5].weight  # as packing does
    engine = Reloading(model)
    engine.start_weight_update()
    tied: Any = parts[0].weight
    tied.weight_loader(tied, torch.ones(2))
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(vllm_log, "callHandlers", said.append)
    engine.finish_weight_update()
    assert own.tolist() == [1.0, 1.0] and parts[1].weight is own
    assert [record.args for record in said] == [("Lost",), ("Statistics",), ("Packed",)] and not vllm_log.filters


def test_an_updated_gpt_oss_equals_a_fresh_engine_loaded_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = save_small_models(FAMILIES["gpt-oss"](), tmp_path)
    weights = ShardedLayout(AutoModelForCausalLM.from_pretrained(second, dtype=torch.bfloat16), torch.bfloat16)
    manifest, buffer = lay_out(1, weights.tensors())
    store = WeightStore(tmp_path / "store")
    fill(store, manifest, buffer)

    async def sampled(model: Path, updates: bool) -> list[Sample]:
        engine = Engine(GenerationPool(max_batch=4, kv_cache_gb=0.05), config(model), False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            if updates:
                await update(engine, "recompute_kv", 1, manifest.version.content_hash)
            return await sample_all(engine)
        finally:
            engine.close()

    before, after = (asyncio.run(sampled(first, updates)) for updates in (False, True))
    assert_same(after, asyncio.run(sampled(second, False)))
    assert any(a.logprobs.tolist() != b.logprobs.tolist() for a, b in zip(after, before, strict=True))
