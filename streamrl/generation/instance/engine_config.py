"""vLLM's configuration for an instance of a pool, the same on every node that the instance spans."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from scheduler.cost.model_shapes import Transformer, keeps_heads, text_part
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.config.speculation import SpeculationConfig
from streamrl.errors import UserError
from streamrl.generation.drafts.drafter import RolloutDrafter
from streamrl.generation.instance.eight_bits import quantization_config
from streamrl.generation.instance.engine_variables import EAGER, FEW_ROWS, NORMS, QUANTIZATION
from streamrl.generation.instance.vllm_plugin import register
from streamrl.machine.engine_settings import DEFAULT, EngineSettings
from streamrl.machine.model_files import read_config, resolve_model, transformers_config
from streamrl.runtime.device_turns import takes_turns
from streamrl.weights.backends.base import LOAD_FORMATS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.usage.usage_lib import UsageContext

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# lets a CPU engine hold its worker (`_cpu_arguments`); an AsyncLLM's engine still is a process of its own
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# the operating system places threads: instances, trainer and rewards share the machine
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

CPU_BLOCK_SIZE = 32
"""Tokens of a KV block: the smallest for which vLLM's CPU attention is fast. Smaller blocks share more of a prompt."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head for which vLLM has kernels on CPUs."""

CAPTURE_ON_CPU = {
    "worker_cls": "streamrl.generation.instance.expert_capture.CapturingWorker",
    "scheduler_cls": "streamrl.generation.instance.expert_capture.CapturingScheduler",
}
"""vLLM's arguments by which a CPU engine returns the experts of each token."""

REPLAYING_WORKER = "streamrl.generation.instance.replay_vllm.ReplayingWorker"
"""Worker of a CPU engine that replays small batches."""

TRIED_MODELS = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures on which replay and `few_rows` were tried; all others use vLLM's own forward pass and products."""

ONE_TOKEN_MORE = frozenset({"Cohere2ForCausalLM", "Cohere2MoeForCausalLM"})
"""Architectures whose windows have one token more in vLLM than in transformers."""

EXTENSIONS = "streamrl.generation.instance.worker_extensions"
"""Module of the classes that extend vLLM's worker."""


@dataclass(frozen=True)
class Place:
    """The place of one node in an instance that may span several."""

    node: int = 0
    """Index of the node; node 0 schedules and talks to the service."""
    meeting: str = ""
    """host:port at which the nodes meet; '': there is only one node."""


def lacks_heads_on_cpus(path: str, values: Mapping[str, Any]) -> str:
    """Return why vLLM has no attention for a model's heads on CPUs; '': it has, or the cost model does not know them.

    Args:
        path: the model, for errors.
        values: its configuration.
    """
    try:
        size = Transformer.from_config(path, values).head_size
    except (UserError, ValueError):
        return ""
    if not keeps_heads(values) or size in CPU_HEAD_SIZES:
        return ""
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    return f"its heads have a size of {size}, and vLLM generates on CPUs with sizes of {sizes} only"


def engine_config(
    pool: GenerationPool,
    run: RunConfig,
    cuda: bool,
    place: Place | None = None,
    settings: EngineSettings | None = None,
) -> VllmConfig:
    """Return vLLM's configuration for an instance.

    Args:
        pool: pool of the instance.
        run: configuration of the run.
        cuda: whether the cluster has GPUs.
        place: place of this node; None: the only one.
        settings: settings of a CPU engine; None: the default.

    Raises:
        ValueError: `model.dtype: auto` or `generation.compute: auto` has not been resolved for this process, or an
            instance of several workers is to compute in 8 bits.
    """
    if run.model.dtype == "auto" or run.generation.compute == "auto":
        raise ValueError("auto (model.dtype, generation.compute) must be resolved before an engine starts")
    model = resolve_model(run.model.path)
    folder, place, settings = Path(model), place or Place(), settings or DEFAULT
    eight_bits = eight_bit_arguments(run, pool)
    few_rows = not (cuda or eight_bits or settings.compiled) and _is_tried(folder)  # a compiler must see the products
    # read by the plugin, here and in vLLM's other processes; an earlier engine of this process may have set them
    os.environ[QUANTIZATION] = FEW_ROWS if few_rows else eight_bits.get("load_format", "")
    if not cuda:
        os.environ[EAGER] = "0" if settings.compiled else "1"
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.usage.usage_lib import UsageContext

    register()  # vLLM registers once per process, in which an earlier engine may have had another type

    # without a context vLLM takes 2048 tokens a step for every GPU
    context = UsageContext.OPENAI_API_SERVER
    arguments = _gpu_arguments(pool, context) if cuda else _cpu_arguments(pool, run, settings, folder)
    arguments |= _spread_arguments(pool, place)
    if few_rows:
        arguments["quantization"] = FEW_ROWS
    if not cuda and not eight_bits and _replays(folder, settings, pool):
        arguments["worker_cls"] = REPLAYING_WORKER
    if run.algorithm.router_replay:
        arguments |= {"enable_return_routed_experts": True} if cuda else CAPTURE_ON_CPU
    if (drafts := speculative_config(run.speculation)) is not None:
        arguments |= {"speculative_config": drafts, "per_request_spec_decode_metrics": "summary"}
    if (extension := worker_extension(drafts is not None, not run.weights.path.fetched)) is not None:
        arguments["worker_extension_cls"] = extension
    return AsyncEngineArgs(
        model=model,
        dtype=run.model.dtype,
        max_model_len=run.model.max_context,
        max_num_seqs=pool.max_batch,
        tensor_parallel_size=pool.gpus_per_replica,
        enable_prefix_caching=cuda or not is_recurrent(folder),
        enable_sleep_mode=takes_turns(cuda, run),
        # log-probabilities of the distribution that is sampled from, after temperature, min-p, top-k and top-p; the
        # trainer's are of the same one (streamrl/training/truncation.py)
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=run.weights.path.engine),
        generation_config="vllm",
        hf_overrides=overrides(folder) | eight_bits.pop("hf_overrides", {}),
        seed=run.seed,
        **(arguments | eight_bits),
    ).create_engine_config(context, headless=place.node > 0)


def _gpu_arguments(pool: GenerationPool, context: UsageContext) -> dict[str, Any]:
    """Return vLLM's arguments for an engine on GPUs; `context` chooses its default of tokens a step."""
    from vllm import AsyncEngineArgs

    arguments: dict[str, Any] = {"gpu_memory_utilization": pool.gpu_memory_fraction}
    most_tokens = AsyncEngineArgs.get_batch_defaults(pool.gpus_per_replica)[0].get(context, 0)
    if pool.max_batch > most_tokens:  # vLLM refuses fewer tokens than sequences
        arguments["max_num_batched_tokens"] = pool.max_batch
    return arguments


def _cpu_arguments(pool: GenerationPool, run: RunConfig, settings: EngineSettings, model: Path) -> dict[str, Any]:
    """Return vLLM's arguments for an engine on CPUs; `model` is the model's folder."""
    return {
        "enforce_eager": not settings.compiled,
        "kv_cache_dtype": settings.kv_cache,
        # a single worker inside the engine process: between two processes vLLM waits by spinning, which costs a core
        # that the worker, other instances and the trainer need
        "distributed_executor_backend": "uni",
        "block_size": CPU_BLOCK_SIZE,
        "kv_cache_memory_bytes": int(pool.kv_cache_gb * 2**30 / pool.gpus_per_replica),  # of each worker
        # vLLM rewinds a seeded generator after a partial prefill, which torch's CPU generators cannot do
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, run.model.max_context, pool.max_batch),
        "compilation_config": {"custom_ops": wrong_kernels(model)},
        "ir_op_priority": {} if settings.compiled else {"rms_norm": [NORMS], "fused_add_rms_norm": [NORMS]},
    }


def _spread_arguments(pool: GenerationPool, place: Place) -> dict[str, Any]:
    """Return vLLM's arguments for an instance of several workers, maybe on several nodes; {}: it has one worker."""
    arguments: dict[str, Any] = {"distributed_executor_backend": "mp"} if pool.gpus_per_replica > 1 else {}
    if place.meeting:
        host, _, port = place.meeting.rpartition(":")
        arguments |= {"nnodes": pool.nodes, "node_rank": place.node, "master_addr": host, "master_port": int(port)}
    return arguments


def eight_bit_arguments(run: RunConfig, pool: GenerationPool) -> dict[str, Any]:
    """Return vLLM's arguments for layers that multiply in 8 bits; {}: the model's own.

    Raises:
        ValueError: an instance has several workers, of which each would have to know its part of the codes.
    """
    kind = run.generation.compute
    if kind == "same" or kind == "auto":
        return {}
    if pool.gpus_per_replica > 1:
        raise ValueError(f"generation.compute: {kind} needs instances of one worker")
    name = next(name for name, one in LOAD_FORMATS.items() if one == kind)
    return {"load_format": name, "hf_overrides": {"quantization_config": quantization_config(kind)}}


def worker_extension(drafts: bool, pushed: bool) -> str | None:
    """Return the class by which vLLM's worker gets what an instance calls; None: it calls nothing of our own.

    Args:
        drafts: whether a drafter is taught.
        pushed: whether the trainer pushes weights.
    """
    if pushed:
        return f"{EXTENSIONS}.{'DraftingGroupWorker' if drafts else 'GroupWorker'}"
    return f"{EXTENSIONS}.DrafterWorker" if drafts else None


def speculative_config(speculation: SpeculationConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config`; None: no speculation."""
    if speculation.method == "none":
        return None
    return {
        "method": "custom_class",
        "model": f"{RolloutDrafter.__module__}.{RolloutDrafter.__qualname__}",
        "num_speculative_tokens": speculation.most_tokens,
    }


def overrides(model: Path) -> dict[str, Any]:
    """Return values of a model's configuration that vLLM needs changed in order to compute what transformers does.

    vLLM's windowed layers of Cohere 2 and of its mixtures see one token more than `sliding_window` says (`commandr.py`
    and `cohere2_moe.py` add it, as the convention of the original training); those of transformers, with which the
    policy is trained, do not.

    Args:
        model: folder of the model; one without a readable `config.json` needs nothing.
    """
    config = read_config(model)
    if ONE_TOKEN_MORE.intersection(config.get("architectures") or ()) and config.get("sliding_window"):
        return {"sliding_window": config["sliding_window"] - 1}
    return {}


def wrong_kernels(model: Path) -> list[str]:
    """Return vLLM's `custom_ops` that turn off the CPU kernels that are wrong for a model; torch computes them instead.

    The CPU kernel of the rotation takes a query of [tokens, heads, size] for one of a single head, and so rotates the
    first few heads only, each by another token's position. That is the form of latent attention (DeepSeek) alone; with
    YaRN, as in the released DeepSeek-V3, vLLM rotates with torch by itself.

    Args:
        model: folder of the model.
    """
    config = read_config(model)
    latent = text_part(config).get("kv_lora_rank")
    return ["-rotary_embedding"] if latent else []


def is_recurrent(model: Path) -> bool:
    """Return whether a model has layers with a state in place of a KV cache.

    vLLM caches prefixes of such a model only where it prefills in chunks, which it must not on a CPU.

    Args:
        model: folder of the model.
    """
    return any("attention" not in kind or kind == "linear_attention" for kind in _layer_kinds(model))


def _layer_kinds(model: Path) -> Sequence[str]:
    """Return the kinds of a model's layers; empty: they are all of one kind, or unknown.

    Many models state them by other keys, from which transformers derives them; without it, only a list counts.
    """
    written = read_config(model)
    config: Any = SimpleNamespace(**text_part(written))
    if "model_type" in written:
        with contextlib.suppress(Exception):  # not installed, or not a model that it knows
            config = transformers_config(model).get_text_config()
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()


def _replays(model: Path, settings: EngineSettings, pool: GenerationPool) -> bool:
    """Return whether small batches are replayed.

    Args:
        model: folder of the model.
        settings: settings of the engine.
        pool: pool of the instance; the workers of one that has several exchange results between layers.
    """
    return settings.replayed and not settings.compiled and pool.gpus_per_replica == 1 and _is_tried(model)


def _is_tried(model: Path) -> bool:
    """Return whether a model is of `TRIED_MODELS`, and not quantized."""
    config = read_config(model)
    return "quantization_config" not in config and TRIED_MODELS.issuperset(config.get("architectures") or [""])
