"""Configurations of known families with what makes each special, for the matrix of families and checks.

They come from transformers' own classes, whose defaults are the sizes of a real model; `small_config` makes them small.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    ApertusConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "Llama": lambda: LlamaConfig(num_key_value_heads=8),
    "Qwen2": lambda: Qwen2Config(num_key_value_heads=8),
    "Qwen3": lambda: Qwen3Config(num_key_value_heads=8),
    "Qwen3-MoE": lambda: Qwen3MoeConfig(norm_topk_prob=True),
    "Mistral (windowed)": lambda: MistralConfig(sliding_window=4096),
    "Gemma 2": Gemma2Config,
    "Gemma 3": Gemma3TextConfig,
    "Phi-3": lambda: Phi3Config(sliding_window=2047),
    "gpt-oss": GptOssConfig,
    "Granite": lambda: GraniteConfig(
        num_key_value_heads=8,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        logits_scaling=8.0,
    ),
    "OLMo-2": lambda: Olmo2Config(num_key_value_heads=8),
    "Cohere 2": lambda: Cohere2Config(num_key_value_heads=8, logit_scale=0.25),
    "Cohere 2 MoE": lambda: Cohere2MoeConfig(num_key_value_heads=8, logit_scale=0.25),
    "DeepSeek-V3": lambda: DeepseekV3Config.from_dict({"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "GLM-4": Glm4Config,
    "Qwen3-Next": Qwen3NextConfig,
    "ERNIE 4.5 MoE": Ernie4_5_MoeConfig,
    "Apertus": lambda: ApertusConfig(num_key_value_heads=8),
}
"""Function that makes a family's configuration, by the family's name."""
