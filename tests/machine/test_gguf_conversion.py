"""Conversion of a 4-bit GGUF file: the weights that transformers reads from it, rounded to bf16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.waiting import scaled

WIDTH, INNER, HEADS, KV_HEADS, LAYERS, WORDS = 64, 96, 4, 2, 2, 300


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with random weights in 4 bits, whose output head is its embedding, as SmolLM2's."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    rng, kv = np.random.default_rng(0), WIDTH * KV_HEADS // HEADS
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    characters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    words = ["<|im_start|>", "<|im_end|>", *characters]
    words += [a + b for a in characters for b in characters][: WORDS - len(words)]
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (WORDS - 2))
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words[2 + len(characters) :]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (kv, WIDTH),
            f"blk.{layer}.attn_v": (kv, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (INNER, WIDTH),
            f"blk.{layer}.ffn_up": (INNER, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, INNER),
        }
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", rng.normal(1, 0.1, WIDTH).astype(np.float32))
    for name, shape in shapes.items():
        codes = gguf.quantize(rng.normal(0, 0.1, shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", codes, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", rng.normal(1, 0.1, WIDTH).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_model_has_the_files_weights_in_bf16_and_its_tokenizer(small_llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamrl.machine.gguf_conversion", str(small_llama), str(tmp_path / "model")]
    subprocess.run(command, check=True, timeout=scaled(100))
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(small_llama.parent, gguf_file=small_llama.name, dtype=torch.float32)
    theirs = expected.state_dict()
    ours = converted.state_dict()
    assert ours.keys() == theirs.keys() and len(ours) == 3 + 9 * LAYERS
    for name, weight in ours.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, theirs[name].to(torch.bfloat16)), name
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    text = "Hi there"
    tokenizers = [
        AutoTokenizer.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(small_llama.parent, gguf_file=small_llama.name),
    ]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
