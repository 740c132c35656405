"""The text of a completion, as rewards, agents and the report get it."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.rollouts.plain_text import MOST_TEXT_BYTES, shortened


def completion_text(tokenizer: Any, tokens: np.ndarray) -> str:
    """Return what a model has written, without special tokens and, beyond `MOST_TEXT_BYTES`, without its end.

    Args:
        tokenizer: tokenizer of `transformers`.
        tokens: token ids, int32 [T].
    """
    # a tokenizer may be set to take out spaces before punctuation, which were sampled
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return shortened(str(text), MOST_TEXT_BYTES)
