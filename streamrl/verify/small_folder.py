"""A model's architecture as a folder in HF format, small and random, for engines that load folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from streamrl.training.packing_proof import small_model

SPECIAL = ("<|bos|>", "<|end|>")


def save_small_model(config: PretrainedConfig, folder: Path, seed: int) -> Path:
    """Write the small model (`small_model`) with a tokenizer of bytes; returns the folder.

    Args:
        config: configuration of the full model.
        folder: folder to write.
        seed: seed of the weights.
    """
    small_model(config, seed).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_small_models(config: PretrainedConfig, folder: Path) -> tuple[Path, Path]:
    """Write two small models as `folder`/first and second; the weights differ in every tenth element, as after steps.

    Args:
        config: configuration of the full model.
        folder: an existing folder.
    """
    first = save_small_model(config, folder / "first", seed=0)
    second = folder / "second"
    model = small_model(config, seed=1)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), small_model(config, seed=0).parameters(), strict=True):
            changed = torch.arange(ours.numel()).view(ours.shape) % 10 == 0
            ours.copy_(torch.where(changed, ours, theirs))
    model.save_pretrained(second)
    save_byte_tokenizer(second)
    return first, second


def save_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 bytes and two special tokens, in place of one for the full vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1]).save_pretrained(
        folder
    )
