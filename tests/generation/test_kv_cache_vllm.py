"""The KV cache that is counted for models with windows and shared layers is the one that vLLM takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from scheduler.cost.generation_cost import BATCHED_TOKENS, tokens_in_flight
from scheduler.cost.model_shapes import Transformer
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine_config import CPU_BLOCK_SIZE, engine_config
from tests.tiny_model import save_tiny_model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "sliding_window": 64,
    "dtype": "bfloat16",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", {"num_hidden_layers": 14}),
    "gemma2": ("Gemma2ForCausalLM", {"num_hidden_layers": 5}),
    "mistral": ("MistralForCausalLM", {"num_hidden_layers": 3}),
    "cohere2": ("Cohere2ForCausalLM", {"num_hidden_layers": 6}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 128, "num_hidden_layers": 4, "max_window_layers": 0}),
    "qwen3": ("Qwen3ForCausalLM", {"num_hidden_layers": 4, "max_window_layers": 4, "use_sliding_window": True}),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {"num_hidden_layers": 18, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 0, "global_head_dim": 32},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Has the groups of ranks that layers of vLLM ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as state

    meeting = f"file://{tmp_path_factory.mktemp('ranks') / 'meeting'}"
    with set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(1, 0, meeting, 0, "gloo")
        state.initialize_model_parallel()
        yield
        state.cleanup_dist_env_and_memory()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("context", "batched"), [(1000, None), (1000, 128), (60, 128)])
def test_a_request_takes_what_vllm_asks_for(kind: str, context: int, batched: int | None, tmp_path: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    name, values = MODELS[kind]
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").unlink()
    config = AutoConfig.for_model(kind, **SMALL | {"use_sliding_window": True} | values)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    model = Transformer.from_config(kind, json.loads((tmp_path / "config.json").read_text()))
    run = RunConfig.model_validate(
        {"model": {"path": str(tmp_path), "max_context": context, "dtype": "bfloat16"}, "sampling": {"max_tokens": 8}}
    )
    settings = engine_config(GenerationPool(max_batch=4, kv_cache_gb=0.05), run, cuda=False)
    in_flight = float("inf")
    if batched is not None:  # as on GPUs, where prompts are prefilled in chunks
        settings.scheduler_config.max_num_batched_tokens = batched
        in_flight = settings.max_in_flight_tokens
    settings.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name
    with set_current_vllm_config(settings), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        initialize_model(settings)
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.vllm_config, runner.shared_kv_cache_layers = settings, {}
    groups = kv_cache_utils.get_kv_cache_groups(settings, runner.get_kv_cache_spec())
    counted = model.layers * model.most_cached(context, in_flight, CPU_BLOCK_SIZE) * model.shape.kv_width * 2
    assert round(counted) == kv_cache_utils._max_memory_usage_bytes_from_groups(settings, groups)
    block = model.layers_of_a_block * CPU_BLOCK_SIZE * model.shape.kv_width * 2
    assert block == kv_cache_utils._pool_bytes_per_block(settings, groups)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("NVIDIA H100 80GB HBM3", 79.6), ("NVIDIA A100-SXM4-80GB", 79.3), ("NVIDIA L40S", 44.5), ("B200", 179)],
)
def test_steps_have_the_tokens_that_vllm_gives_a_gpu(name: str, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import AsyncEngineArgs
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    class Platform:
        def get_device_total_memory(self) -> int:
            return int(gib * 2**30)

        def get_device_name(self) -> str:
            return name

        def __getattr__(self, asked: str) -> Any:
            return lambda *_: False

    monkeypatch.setattr(arg_utils, "current_platform", Platform())
    default = AsyncEngineArgs.get_batch_defaults(1)[0][UsageContext.OPENAI_API_SERVER]
    assert tokens_in_flight(name, gib * 2**30) == 2 * default
    assert tokens_in_flight(name, gib * 2**30, 20_000) == 40_000
    assert default in {tokens for _, tokens in BATCHED_TOKENS}
