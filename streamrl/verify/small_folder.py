"""A model's architecture as a folder in HF format, small and random, for engines that load folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from streamrl.training.packing_choice import Packing
from streamrl.training.packing_proof import small_model, vocabulary_of
from streamrl.verify.generator_order import Order

SPECIAL = ("<|bos|>", "<|end|>")
BYTES = 256
"""Tokens of a tokenizer of bytes, besides the special ones."""


def save_small_models(config: PretrainedConfig, folder: Path) -> tuple[Path, Path]:
    """Write two small models (`small_model`) with a tokenizer of bytes as `folder`/first and second.

    The weights differ in every tenth element, as after a few steps. Those of a vocabulary smaller than that of the
    bytes know no token that ends a sequence: as one of so few, it would end samples before new weights come.

    Args:
        config: configuration of the full model.
        folder: an existing folder.
    """
    first, second = small_model(config, seed=0), small_model(config, seed=1)
    with torch.no_grad():
        for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
            changed = torch.arange(ours.numel()).view(ours.shape) % 10 == 0
            ours.copy_(torch.where(changed, ours, theirs))
    vocabulary = vocabulary_of(first)
    for name, model in (("first", first), ("second", second)):
        if vocabulary < BYTES + len(SPECIAL):
            for config in (model.config, model.config.get_text_config(), model.generation_config):
                config.eos_token_id = None
        model.save_pretrained(folder / name)
        save_byte_tokenizer(folder / name, vocabulary)
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


def save_byte_tokenizer(folder: Path, vocabulary: int = BYTES + len(SPECIAL)) -> None:
    """Write a tokenizer of 256 bytes and two special tokens, in place of one for the full vocabulary.

    Args:
        folder: where it is written.
        vocabulary: tokens of the model; if they are fewer, so are those of the tokenizer, and none is special.
    """
    special = SPECIAL if vocabulary >= BYTES + len(SPECIAL) else ()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    names = dict(zip(("bos_token", "eos_token"), special, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
