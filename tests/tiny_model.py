"""A tiny random Llama with a byte-level tokenizer, for tests that need weights but no sense."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(directory: Path, seed: int = 0, kv_heads: int = 1, endless: bool = False) -> Path:
    """Writes model and tokenizer in HF format (2 layers, width 64, 320 tokens, tied head).

    An endless one knows no token that ends a sequence, and has positions for thousands of tokens.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=32_768 if endless else 512,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=None if endless else 257,
        initializer_range=0.2,  # far from uniform: what is sampled depends on every weight
        pad_token_id=257,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    end = None if endless else "<|end|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token=end, pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return directory
