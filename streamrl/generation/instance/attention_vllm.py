"""vLLM's attention on a CPU as a recording runs it: its two C functions, without the Python around them.

That Python takes 0.1 ms per layer, where the weights of a step have pushed it out of the CPU's caches. What a step
brings along (requests, their lengths and places) is looked up in each; all else belongs to the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import attention
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

Run = Callable[[], object]


def cache_update(key: torch.Tensor, value: torch.Tensor, layer_name: Any) -> Run | None:
    """Return what does the work of `unified_kv_cache_update`; None: this layer needs vLLM's own."""
    name, layer = _layer(layer_name)
    if layer is None:
        return None
    cache, (keys, values) = layer.kv_cache, _halves(layer.kv_cache)
    write = torch.ops._C.cpu_attn_reshape_and_cache.default._op
    rest = layer.isa, layer._k_scale_float, layer._v_scale_float, layer.impl.kv_cache_dtype

    def run() -> None:
        step: Any = get_forward_context()
        slots = step.slot_mapping[name]
        if layer.kv_cache is not cache:
            attention.unified_kv_cache_update(key, value, layer_name)
        else:
            write(key, value, keys, values, slots, *rest)

    return run


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    output_scale: None = None,
    output_block_scale: None = None,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> Run | None:
    """Return what does the work of `unified_attention_with_output`; None: this layer needs vLLM's own."""
    name, layer = _layer(layer_name)
    if layer is None or output_scale is not None or output_block_scale is not None:
        return None
    impl, cache, (keys, values), tokens = layer.impl, layer.kv_cache, _halves(layer.kv_cache), len(query)
    compute = torch.ops._C.cpu_attention_with_kv_cache.default._op
    scales = layer._k_scale_float, layer._v_scale_float, impl.kv_cache_dtype

    def run() -> None:
        context: Any = get_forward_context()
        step = context.attn_metadata[name]
        if layer.kv_cache is not cache or step.num_actual_tokens != tokens:
            attention.unified_attention_with_output(query, key, value, output, layer_name)
            return
        compute(
            query,
            keys,
            values,
            output,
            step.query_start_loc,
            step.seq_lens,
            impl.scale,
            step.causal,
            impl.alibi_slopes,
            impl.sliding_window,
            step.block_table,
            impl.logits_soft_cap,
            step.scheduler_metadata,
            impl.sinks,
            step.dynamic_causal,
            *scales,
        )

    return run


INSTEAD: dict[Any, Callable[..., Run | None]] = {
    torch.ops.vllm.unified_kv_cache_update.default: cache_update,
    torch.ops.vllm.unified_attention_with_output.default: attend,
}
"""Functions that return what does the work of an operation of vLLM, for its arguments; by the operation."""


def _layer(layer_name: Any) -> tuple[str, Any]:
    """Return a layer and its name; None in its place: it is not of the kind whose C functions are known here."""
    name = _resolve_layer_name(layer_name)
    context: Any = get_forward_context()
    layer = context.no_compile_layers[name]
    impl = layer.impl
    known = type(impl) is CPUAttentionBackendImpl and impl.attn_type == AttentionType.DECODER
    shares = isinstance(context.attn_metadata, dict) and isinstance(context.slot_mapping, dict)
    usable = known and shares and name in context.slot_mapping and name in context.attn_metadata
    typed = impl.sinks is None or impl.sinks.dtype in (torch.bfloat16, torch.float32) if known else False
    return name, layer if usable and typed else None


def _halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a cache, [blocks, heads, tokens, 2 size] -> [blocks, heads, tokens, size] each."""
    blocks, heads, tokens, _ = cache.shape
    keys, values = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    return keys, values
