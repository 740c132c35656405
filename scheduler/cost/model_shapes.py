"""Shapes of decoder models, and the bytes and operations that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from scheduler.cost.decode import Floats, ModelShape

Tokens = TypeVar("Tokens", float, Floats)

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a `config.json` that make a model a mixture of experts."""
OTHER_LAYERS = ("mamba", "ssm", "conv", "linear_", "lru_", "block_types", "layers_block_type", "hybrid_")
"""Beginnings of the keys of a `config.json` that describe recurrent layers or convolutions."""

UNGATED = frozenset(
    {
        "apertus",
        "arcee",
        "biogpt",
        "gpt_neox",
        "jais2",
        "nanochat",
        "nemotron",
        "persimmon",
        "phi",
        "starcoder2",
    }
)
"""Values of `model_type` whose MLP has two matrices, not the three of a gated one (transformers 5.19; models whose
`config.json` has the keys that are read)."""

TIED_BY_DEFAULT = frozenset(
    {
        "bert-generation",
        "blip_text_model",
        "cohere",
        "cohere2",
        "cohere_compass_text",
        "diffusion_gemma",
        "diffusion_gemma_text",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
        "granite_swa",
        "hunyuan_vl_text",
        "lfm2",
        "minicpm3",
        "modernbert-decoder",
        "paddleocr_vl_text",
        "qwen2_5_omni_text",
        "recurrent_gemma",
        "shieldgemma2",
        "smollm3",
        "vaultgemma",
        "youtu",
        "zamba",
        "zamba2",
    }
)
"""Values of `model_type` whose head is the embedding where `config.json` does not say (defaults of the configuration
classes of transformers 5.19, of decoders that the cost model reads)."""


WINDOWS: dict[str, tuple[int, str]] = {
    "cohere2": (4096, "WWWA"),
    "cohere_compass_text": (4096, "A"),
    "cwm": (8192, "AWWW"),
    "diffusion_gemma_text": (512, "WWWWWA"),
    "exaone4": (4096, "WWWA"),
    "gemma2": (4096, "WA"),
    "gemma3_text": (4096, "WWWWWA"),
    "gemma4_text": (512, "WWWWWA"),
    "gemma4_unified_text": (1024, "WWWWWA"),
    "granite_swa": (128, "AWWW"),
    "ministral": (4096, "W"),
    "mistral": (4096, "W"),
    "modernbert-decoder": (64, "AWW"),
    "muse_glimmer_text": (2048, "WWWA"),
    "olmo3": (4096, "WWWA"),
    "smollm3": (0, "AAAW"),
    "vaultgemma": (4096, "WA"),
}
"""By `model_type`, the window where `config.json` has no `sliding_window`, and the layers where it does not list them:
those with the window (W) and those that see all tokens (A), again and again. Defaults of the configuration classes of
transformers 5.19; of other kinds, all layers have the window that `config.json` names."""
ON_REQUEST = "qwen", "smollm3"
"""Beginnings of values of `model_type` whose `sliding_window` counts only with `use_sliding_window: true`."""


@dataclass(frozen=True)
class Transformer:
    """A dense decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3, Mistral)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the output head is the embedding."""
    source: str
    attends_alone: bool = True
    """Whether tokens meet in attention and nowhere else, as far as the configuration says."""
    window: int = 0
    """Tokens that a token sees in the windowed layers, itself included."""
    windowed: int = 0
    """Layers with that window; in all others a token sees all tokens before it."""
    shared: tuple[int, int] = (0, 0)
    """Layers that see the keys and values of an earlier layer and cache none: those without a window, and those
    with."""

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocabulary"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"model {self.name}: {key} must be a whole number of 1 or more, got {value!r}")

    @property
    def parameters(self) -> float:
        """Number of weights: embedding, attention, MLP, head. Norms and biases, under 0.1 %, are left out."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return float(self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2))

    @property
    def computed(self) -> float:
        """Number of weights that every token is multiplied with: all but the embedding's lookup."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a version as it is sent and served, in bf16."""
        return 2.0 * self.parameters

    @cached_property
    def shape(self) -> ModelShape:
        """The shape that `cost.decode.roofline` takes."""
        kv_width, head = 2 * self.kv_heads * self.head_size, float(self.vocabulary * self.hidden)
        return ModelShape(self.computed, self.layers, kv_width, self.hidden, self.kv_heads, head=head)

    @cached_property
    def layers_of_a_block(self) -> int:
        """Layers that share each block of vLLM's KV cache.

        All, if none or each that caches has a window. Of two kinds, vLLM 0.32 takes as many of either: as many as the
        rarer kind has, or as the other one, if that has less than 1.5 times as many
        (`_get_kv_cache_groups_uniform_page_size` in vllm/v1/core/kv_cache_utils.py).
        """
        few, many = sorted(self._caching)
        return many if many < 1.5 * few or not few else few

    @cached_property
    def _caching(self) -> tuple[int, int]:
        """Layers that cache keys and values of their own: those without a window, and those with."""
        return self.layers - self.windowed - self.shared[0], self.windowed - self.shared[1]

    def cached(self, context: float, in_window: float | None = None) -> float:
        """Return the tokens of a request that vLLM caches, mean over layers.

        A layer that caches all tokens counts as one. Where windows differ between layers, the last group of layers of
        a kind may be smaller than `layers_of_a_block`, and takes as much.

        Args:
            context: tokens of the request.
            in_window: tokens of it that a windowed layer holds; None: those that the next token sees.
        """
        if self._caching == (self.layers, 0):
            return context
        each = self.layers_of_a_block
        every, narrow = (-(-count // each) * each for count in self._caching)
        held = min(context, self.window) if in_window is None else in_window
        return (every * context + narrow * held) / self.layers

    def most_cached(self, context: float, in_flight: float = math.inf, block: int = 0) -> float:
        """Return `cached` of a request as vLLM asks for it before it starts, for the longest request.

        Tokens outside of the window are freed when the steps that were begun are over (`SlidingWindowSpec` in
        vllm/v1/kv_cache_interface.py). So a window saves nothing where prompts are not prefilled in chunks.

        Args:
            context: tokens of the request.
            in_flight: most tokens of steps that are not over.
            block: tokens of a block of the cache, of which a window may touch one more; 0: what blocks add is left
                out.
        """
        held = min(self.window - 1 + in_flight, context)
        if block:
            context, held = -(-context // block) * block, (-(-held // block) + 1) * block
        return self.cached(context, held)

    def seen(self, context: float, in_window: float | None = None) -> float:
        """Return the tokens whose keys and values a decoded token reads, mean over layers.

        Args:
            context: tokens up to this one.
            in_window: tokens of them that a windowed layer sees; None: as many as there are, up to the window.
        """
        if not self.windowed:
            return context
        near = min(context, self.window) if in_window is None else in_window
        return ((self.layers - self.windowed) * context + self.windowed * near) / self.layers

    def pairs(self, tokens: Tokens) -> Tokens:
        """Return twice the token pairs that causal attention multiplies in a sequence, mean over layers: its squared
        length, if no layer has a window.

        Args:
            tokens: tokens of the sequence, or [n] of several.
        """
        squares: Tokens = tokens**2
        if not self.windowed:
            return squares
        near = np.minimum(tokens, self.window) if isinstance(tokens, np.ndarray) else min(tokens, self.window)
        narrow: Tokens = near * (2 * tokens - near)
        return ((self.layers - self.windowed) * squares + self.windowed * narrow) / self.layers

    def forward_flops(self, tokens: float, squares: float, predicting: float | None = None) -> float:
        """Return the operations of one forward pass over whole sequences.

        Args:
            tokens: tokens of all sequences together.
            squares: sum of their `pairs`; causal attention multiplies each token with half of its sequence, twice
                (queries with keys, weights with values).
            predicting: tokens that the output head is computed for; None: all.
        """
        spared = 0.0 if predicting is None else self.vocabulary * self.hidden * (tokens - predicting)
        attention = 2.0 * self.layers * self.heads * self.head_size * squares
        return 2.0 * (self.computed * tokens - spared) + attention

    def square_cost(self, longest: float = 1.0) -> float:
        """Return the operations of a square of tokens in attention, over those of a token in all products.

        With windows, they are those of the longest sample: a shorter one takes more of its square than is counted.
        """
        return self.forward_flops(0.0, self.pairs(longest) / longest**2) / self.forward_flops(1.0, 0.0)

    @classmethod
    def from_config(cls, name: str, values: Any) -> Transformer:
        """Read a `config.json` of the Hugging Face format.

        Raises:
            ValueError: a key is missing or has a wrong value, or the model is a mixture of experts, or its MLP has no
                gate.

        Windows are those of `sliding_window`, in the layers of `layer_types` or what stands for it. Layers of another
        kind that see less (`chunked_attention`) count as layers that see all.
        """
        if not isinstance(values, Mapping):
            raise ValueError("expected an object with the keys of a model's config.json")
        if values.get("text_config") and not isinstance(values["text_config"], Mapping):
            raise ValueError(f"text_config must be an object with keys, got {values['text_config']!r}")
        outer, values = values, text_part(values)
        if any(values.get(key) for key in EXPERT_COUNTS):
            raise ValueError("this model is a mixture of experts; the cost model only supports dense decoders")
        wanted = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        for key in wanted:
            if isinstance(values.get(key), bool) or not isinstance(values.get(key), int) or values[key] < 1:
                raise ValueError(f"{key} must be a whole number of 1 or more, got {values.get(key)!r}")
        layers, hidden, heads, intermediate, vocabulary = (values[key] for key in wanted)
        kv_heads = values.get("num_key_value_heads") or heads
        if isinstance(kv_heads, bool) or not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
            wanted_heads = f"a divisor of num_attention_heads, {heads}"
            raise ValueError(f"num_key_value_heads must be {wanted_heads}, got {kv_heads!r}")
        size = values.get("head_dim") or hidden // heads
        kind = values.get("model_type") or outer.get("model_type")
        if kind in UNGATED:
            raise ValueError(f"the MLP of a {kind} model has no gate; the cost model only knows gated ones")
        said = [one["tie_word_embeddings"] for one in (values, outer) if one.get("tie_word_embeddings") is not None]
        tied = bool(said[0]) if said else kind in TIED_BY_DEFAULT
        window, narrow = _windows(values, str(kind or ""), layers)
        sharing = values.get("num_kv_shared_layers") or 0
        if isinstance(sharing, bool) or not isinstance(sharing, int) or not 0 <= sharing < layers:
            raise ValueError(f"num_kv_shared_layers must be a whole number below {layers}, the layers, got {sharing!r}")
        last = narrow[layers - sharing :]
        return cls(
            *(name, layers, hidden, heads, kv_heads, size, intermediate, vocabulary, tied),
            source="its config.json",
            attends_alone=_attends_alone(values),
            window=window,
            windowed=sum(narrow),
            shared=(last.count(False), last.count(True)),
        )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the language model."""
    part = config.get("text_config")
    return part if part and isinstance(part, Mapping) else config


def _windows(values: Mapping[str, Any], kind: str, layers: int) -> tuple[int, list[bool]]:
    """Return how many tokens the windowed layers of a `config.json` see, and which layers these are; 0: none.

    Args:
        values: the part that describes the language model.
        kind: its `model_type`.
        layers: number of its layers.

    Raises:
        ValueError: a key about windows has a wrong value.
    """
    types = values.get("layer_types")
    if types and (isinstance(types, str) or not isinstance(types, Sequence)):
        raise ValueError(f"layer_types must be a list with a type for each layer, got {types!r}")
    if types and len(types) != layers:
        raise ValueError(f"layer_types must have a type for each of the {layers} layers, got {len(types)}")
    usual, pattern = WINDOWS.get(kind) or WINDOWS.get(f"{kind}_text") or (0, "W")
    window = _count(values, "sliding_window", usual)
    if not window or not values.get("use_sliding_window", not kind.startswith(ON_REQUEST)):
        return 0, [False] * layers
    if types:
        narrow = [one == "sliding_attention" for one in types]
    elif values.get("max_window_layers") is not None:
        full = _count(values, "max_window_layers", 0)
        narrow = [number >= full for number in range(layers)]
    else:
        every = _count(values, "sliding_window_pattern", 0)
        pattern = "W" * (every - 1) + "A" if every else pattern
        narrow = [pattern[number % len(pattern)] == "W" for number in range(layers)]
        if kind.startswith("gemma4"):
            narrow[-1] = False
    return (window if any(narrow) else 0), narrow


def _count(values: Mapping[str, Any], key: str, usual: int) -> int:
    """Return a number of a `config.json` that may be missing (then it is the usual one) or null (0)."""
    value = values.get(key, usual)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{key} must be a whole number or null, got {value!r}")
    return value or 0


def keeps_heads(values: Mapping[str, Any]) -> bool:
    """Return whether every layer caches keys and values by heads, as far as a `config.json` says."""
    values = text_part(values)
    return not values.get("kv_lora_rank") and _attends_alone(values)


def uncounted(values: Mapping[str, Any]) -> str:
    """Return what a model has by its `config.json` that the weights and the cache of a `Transformer` are not; '': all
    is counted."""
    values = text_part(values)
    if not _attends_alone(values):
        return "recurrent layers or convolutions"
    if values.get("kv_lora_rank"):
        return "latent attention"
    return "embeddings of every layer" if values.get("hidden_size_per_layer_input") else ""


def _attends_alone(values: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` speaks of no layers but those in which tokens meet in attention."""
    types = values.get("layer_types")
    if isinstance(types, Sequence) and any("attention" not in str(kind) or "linear" in str(kind) for kind in types):
        return False
    return not any(value and key.startswith(OTHER_LAYERS) for key, value in values.items())


def undivided_heads(heads: int, kv_heads: int | None, ranks: int) -> str:
    """Return why ranks cannot share attention's heads; '': they can.

    The ranks are those of `trainer.sequence_parallel`, or the GPUs of a vLLM instance (`gpus_per_replica`).

    Each rank takes as many query heads, and the key-value heads that these use. Where there are fewer of the latter
    than ranks, several ranks get the same one.

    Args:
        heads: query heads.
        kv_heads: key-value heads; None or 0, as a configuration may leave them out: as many.
        ranks: ranks that share the heads.
    """
    kv_heads = kv_heads or heads
    if heads % ranks:
        return f"expected a divisor of the {heads} attention heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"expected a divisor or a multiple of the {kv_heads} key-value heads"
    return ""


def square_cost(values: Mapping[str, Any], longest: float = 1.0) -> float:
    """Return `Transformer.square_cost` of a `config.json`; 0 if the model's kind is unknown.

    Of a mixture of experts a token passes through some only, which count as one MLP of their widths together.
    """
    values = text_part(values)
    active, width = values.get("num_experts_per_tok"), values.get("moe_intermediate_size")
    if isinstance(active, int) and active:
        one = width if isinstance(width, int) else values.get("intermediate_size")
        dense = {key: 0 for key in EXPERT_COUNTS}
        values = {**values, **dense, "intermediate_size": active * one if isinstance(one, int) else None}
    try:
        return Transformer.from_config("policy", values).square_cost(longest)
    except ValueError:
        return 0.0


def _qwen(name: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, tied: bool = False) -> Transformer:
    source = f"config.json of Qwen/Qwen2.5-{name} on the Hugging Face hub"
    vocabulary = 151936 if tied else 152064
    return Transformer(
        f"qwen2.5-{name.lower()}", layers, hidden, heads, kv_heads, hidden // heads, mlp, vocabulary, tied, source
    )


MODELS: dict[str, Transformer] = {
    "0.5b": _qwen("0.5B", 24, 896, 14, 2, 4864, True),
    "1.5b": _qwen("1.5B", 28, 1536, 12, 2, 8960, True),
    "3b": _qwen("3B", 36, 2048, 16, 2, 11008, True),
    "7b": _qwen("7B", 28, 3584, 28, 4, 18944),
    "14b": _qwen("14B", 48, 5120, 40, 8, 13824),
    "32b": _qwen("32B", 64, 5120, 40, 8, 27648),
    "72b": _qwen("72B", 80, 8192, 64, 8, 29568),
    "smollm2-135m": Transformer(
        *("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, True),
        "config.json of HuggingFaceTB/SmolLM2-135M-Instruct on the Hugging Face hub",
    ),
}
"""Known models, by the name that `streamrl plan --model` takes."""
