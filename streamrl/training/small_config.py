"""A model's architecture made small: the same layers, masks and scalings, with few of everything else.

Every kind of layer stays, because the first layers are kept until each kind has appeared: as far as a configuration
says it (`kept_layers`), and as many as the caller asks for, who has built the model (`packing_proof.py`). Windows,
chunks and soft caps shrink with the lengths and scores of a test, so that they bite there. Ratios that choose a code
path stay: grouped heads, tied embeddings, the shared experts, the partial rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

HEAD_SIZE = 32
"""Size of a head: the smallest that vLLM's attention for CPUs has."""
WINDOW = 7
"""Tokens that a windowed layer sees."""
FEWEST_POSITIONS = 64
"""Positions of a small model at least, since learned ones end there. The proof's sequences have up to 25, those of
`streamrl verify` up to 64."""

GROUPED_UNITS = 8
"""Units of an expert, in multiples of which torch's grouped products take experts in bf16."""

LARGEST: Mapping[str, float] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,  # vLLM's attention for CPUs has 512 + 64 only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": HEAD_SIZE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "chunk_size": WINDOW + 1,
    "mamba_chunk_size": WINDOW + 1,
    "shared_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 32,
    "ffn_dim": 96,
    "n_inner": 96,
    "rotary_dim": 16,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 32,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW + 1,
    "index_topk": WINDOW,
    "floor_scale": WINDOW + 1,
    "rescale_every": 1,  # layers after which RWKV halves its weights
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 2.0,
    "clip_qkv": 0.1,
}
"""Largest value of each size; smaller ones stay, and so do those that are switched off."""

RECURRENT_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),  # Bamba, Granite 4, Falcon-H1
    ("mamba_num_heads", "mamba_head_dim", "expand"),  # Nemotron-H
    ("num_heads", "head_dim", "expand"),  # Mamba 2
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),  # Zamba 2
)
"""Names of a recurrent layer's heads, of their size, and of the ratio of all of them to the hidden size."""

DERIVED = (
    *("attention_hidden_size", "attention_head_dim", "kv_channels", "num_query_groups", "hybrid_layer_ids"),  # Zamba
    "ffn_hidden_size",  # Falcon
)
"""Sizes that a family computes from others."""

ALIASES = {"num_kv_heads": "num_key_value_heads"}
"""Usual names of sizes that a family has under names of its own and does not translate (Falcon)."""

WIDTHS = ("conv_dim", "conv_dim_out", "block_dim")
"""Further names of the hidden size (LFM2)."""

NUMBERS = ("mlp_only_layers", "moe_layers")
"""Lists of layers by their numbers, as other lists have a value for each layer (Qwen, Llama 4)."""

PERIODS = ("_period", "_interval", "_pattern", "sparse_step")
"""Ends of the names of keys that say after how many layers a kind comes again."""


def kept_layers(values: Mapping[str, Any], least: int = 2) -> int:
    """Return how many of the first layers have every kind of layer between them, as far as the keys are known here.

    Args:
        values: a model's configuration.
        least: fewest layers, if the model has as many.
    """
    count = _layers(values)
    lists = {key: value for key, value in values.items() if isinstance(value, (list, tuple))}
    dense = values.get("first_k_dense_replace") or 0
    numbers = [lists.pop(key, ()) for key in NUMBERS]
    each = [value for value in lists.values() if len(value) == count]
    kinds = [
        (str([value[layer] for value in each]), layer < dense, *(layer in listed for listed in numbers))
        for layer in range(count)
    ]
    needed = [kinds.index(kind) + 1 for kind in set(kinds)]
    periods = [value for key, value in values.items() if isinstance(value, int) and key.endswith(PERIODS)]
    return min(count, max(*needed, *periods, least, 2))


def small_values(values: Mapping[str, Any], least: int = 2) -> dict[str, Any]:
    """Return a configuration's values, and those of its parts (`text_config`), made small.

    Args:
        values: a configuration, with the usual names of its sizes.
        least: as for `kept_layers`.
    """
    small = {key: value for key, value in values.items() if key not in DERIVED}
    small.pop("quantization_config", None)  # the trainer's weights are never quantized
    layers, count = kept_layers(values, least), _layers(values)
    if (sharing := values.get("num_kv_shared_layers") or 0) and layers < count:  # Gemma 3n: keys of earlier layers
        layers = min(layers, count - sharing)
        small["num_kv_shared_layers"] = _layers_to_every_kind((values.get("layer_types") or [""] * count)[layers:])
        layers += small["num_kv_shared_layers"]
    for key, value in small.items():
        if isinstance(value, (list, tuple)) and key in NUMBERS:
            small[key] = [layer for layer in value if layer < layers]
        elif isinstance(value, (list, tuple)) and len(value) == count:
            small[key] = list(value[:layers])
        elif key == "per_layer_config" and isinstance(value, dict):  # exceptions by layer, such as larger heads
            small[key] = {layer: _cut(own, 2) for layer, own in value.items() if int(layer) < layers}
        elif isinstance(value, dict) and key.endswith("_config"):
            small[key] = small_values(value, least)
    small = _cut(small)
    if isinstance(positions := small.get("max_position_embeddings"), int):
        small["max_position_embeddings"] = max(positions, FEWEST_POSITIONS)
    if values.get("num_hidden_layers"):
        small["num_hidden_layers"] = layers
    if values.get("qk_rope_head_dim") is not None and values.get("head_dim") == values["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]  # of the rotated part alone (DeepSeek)
    if values.get("qk_head_dim") is not None:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    _shrink_heads(small)
    small |= {key: small["hidden_size"] for key in WIDTHS if key in small and small[key] == values.get("hidden_size")}
    _shrink_recurrent_heads(small)
    size = _rotated_size(small)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), dict):
            small[key] = _small_rope(values[key], size)
    vocabulary = small.get("vocab_size")
    for key, value in values.items():  # all at the end, so that the first tokens stay ordinary
        if vocabulary and key.endswith("_token_id") and isinstance(value, (int, list)):
            small[key] = min(value, vocabulary - 1) if isinstance(value, int) else [vocabulary - 1]
    return small


def _layers_to_every_kind(kinds: Sequence[str]) -> int:
    """Return after how many of the first layers every kind has appeared."""
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def small_config(config: PretrainedConfig, least: int = 2) -> PretrainedConfig:
    """Return the configuration of the same architecture made small; the model is built from it at random.

    Args:
        config: configuration of the full model.
        least: as for `kept_layers`.
    """
    read = config.to_dict()
    names = {name: own for own, name in ALIASES.items() if own in read}  # from the usual name to the family's own
    names |= getattr(config, "attribute_map", {})
    usual = {own: name for name, own in names.items() if own not in DERIVED}
    values = small_values({usual.get(key, key): value for key, value in read.items()}, least)
    values |= {"dtype": "float32", "use_cache": False}
    return type(config).from_dict({names.get(key, key): value for key, value in values.items()})


def longest_exact(config: PretrainedConfig) -> int | None:
    """Return the length from which on a token's rotation depends on the length of its whole row; None: it never does.

    Frequencies of the kinds `longrope` and `dynamic` change as a row grows beyond the original context, in transformers
    with the longest row of a batch, and in vLLM with the longest that it may ever serve.
    """
    text = config.get_text_config().to_dict()
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = []
    for one in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        if one.get("rope_type", one.get("type")) in ("longrope", "dynamic"):
            original = one.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
            found.append(int(original or text.get("max_position_embeddings") or 0))
    return min(found, default=None)


def _layers(values: Mapping[str, Any]) -> int:
    """Return the number of layers; some families have only the list of their kinds (Nemotron-H)."""
    return int(values.get("num_hidden_layers") or len(values.get("layer_types") or ()))


def _cut(values: Mapping[str, Any], times: int = 1) -> dict[str, Any]:
    """Return the values with each size at most `times` that of `LARGEST`."""

    def size(key: str, value: Any) -> Any:
        if key in LARGEST and isinstance(value, (list, tuple)):  # of each layer (Gemma 3n)
            return [size(key, one) for one in value]
        if key not in LARGEST or not isinstance(value, (int, float)) or isinstance(value, bool):
            return value
        largest = times * LARGEST[key]
        if key == "moe_intermediate_size" and value > largest:  # odd sizes are computed by other code
            largest -= -value % GROUPED_UNITS
        return min(value, type(value)(largest))

    return {key: size(key, value) for key, value in values.items()}


def _shrink_recurrent_heads(small: dict[str, Any]) -> None:
    for heads, size, ratio in RECURRENT_HEADS:
        if isinstance(small.get(heads), int) and isinstance(small.get(size), int):
            inner = small.get("mamba_d_ssm") or small["hidden_size"] * small[ratio]
            small[heads] = min(small[heads], 4)
            small[size] = inner // small[heads]


def _shrink_heads(small: dict[str, Any]) -> None:
    heads, groups = small.get("num_attention_heads"), small.get("num_key_value_heads")
    if not isinstance(heads, int):
        return
    groups = groups if isinstance(groups, int) else heads
    few = min(groups, 2 if groups < heads else 4)
    small["num_attention_heads"] = few if groups == heads else 2 * few
    if small.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = few
    if small.get("head_dim") is None and isinstance(small.get("hidden_size"), int):
        small["hidden_size"] = small["num_attention_heads"] * HEAD_SIZE


def _rotated_size(small: Mapping[str, Any]) -> int:
    """Return how many components of a head are rotated."""
    rope = small.get("rope_parameters") or {}
    share = small.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    size = small.get("qk_rope_head_dim") or small.get("head_dim") or HEAD_SIZE
    return int(size * share)


def _small_rope(values: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Cut the factors of each frequency to the rotated size; nested for families with several kinds of layers."""
    small: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            small[key] = _small_rope(value, size)
        else:
            small[key] = list(value)[: size // 2] if key in ("short_factor", "long_factor") else value
    return small
