"""The text of a completion is what was sampled, and short enough to be sent."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.generation.instance.completion_text import completion_text
from streamrl.rollouts.plain_text import MOST_TEXT_BYTES


def test_spaces_before_punctuation_stay() -> None:
    words = [("<unk>", 0.0), *((one, -2.0) for one in "\u2581abc,.!=?")]
    unigram = Tokenizer(models.Unigram(words, unk_id=0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, clean_up_tokenization_spaces=True)
    text = "a != b ? c , a"
    assert completion_text(tokenizer, np.asarray(tokenizer.encode(text), np.int32)) == text


@pytest.mark.parametrize("one", ["-", "\u00e9", "\u7b54", "\U0001f600"])
def test_a_text_that_is_too_long_is_cut_between_characters(one: str) -> None:
    most, size = MOST_TEXT_BYTES, len(one.encode())
    for count in (most // size, most // size + 1):
        decoder = SimpleNamespace(decode=lambda tokens, count=count, **options: one * count)
        assert completion_text(decoder, np.zeros(1, np.int32)) == one * (most // size)
