"""A model's architecture as a folder in HF format, small and random, for engines that load folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from streamrl.training.packing_choice import Packing
from streamrl.training.packing_proof import small_model
from streamrl.verify.generator_order import Order

SPECIAL = ("<|bos|>", "<|end|>")


def save_small_models(config: PretrainedConfig, folder: Path) -> tuple[Path, Path]:
    """Write two small models (`small_model`) with a tokenizer of bytes as `folder`/first and second.

    The weights differ in every tenth element, as after a few steps.

    Args:
        config: configuration of the full model.
        folder: an existing folder.
    """
    first, second = small_model(config, seed=0), small_model(config, seed=1)
    with torch.no_grad():
        for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
            changed = torch.arange(ours.numel()).view(ours.shape) % 10 == 0
            ours.copy_(torch.where(changed, ours, theirs))
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(folder / name)
        save_byte_tokenizer(folder / name)
    return folder / "first", folder / "second"


def small_order(config: PretrainedConfig, packing: Packing, folder: Path) -> Order:
    """Write two small models and order their check in vLLM.

    Args:
        config: configuration of the full model.
        packing: how the trainer packs the model.
        folder: an existing empty folder.
    """
    first, second = save_small_models(config, folder)
    return Order((str(first), str(second)), packing.attention, str(folder))


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
