"""Rare words and numbers, which few training prompts have: they separate the problem in a prompt from its wording.

Instructions and worked examples are the same in all prompts of a task; the word to spell or the number to factor is
not. So the length of the longest *rare* word, or the size of the greatest rare number, shows how big the problem is,
even when the instructions hold longer words and greater numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.segments import Array, last_of, segment_reduce
from ranker.text import PackedTexts, hash_runs, pack_batches

SLOTS = 1 << 16
"""Slots of the table; the wording of a task mix has some thousand words, so few rare ones share a slot with a common
one."""
COMMON = 0.02
"""Share of the training prompts from which on a word is common: the wording of one task in fifty."""

RARE = (
    *("rare_words", "rare_word_max", "rare_word_sum", "rare_word_last"),
    *("rare_numbers", "rare_number_max", "rare_number_log_sum", "common_share"),
)


@dataclass(frozen=True)
class RareWords:
    """Table of the words (runs of letters) and numbers (runs of digits) that are common."""

    common: Array
    """Whether the words of a slot are common [SLOTS], bool."""

    def apply(self, packed: PackedTexts) -> Array:
        """Return the columns `RARE` [N, 8], float32; numbers as log(1 + x), NaN where undefined.

        `common_share` is the share of the words that are common: low for prompts unlike those of the training.
        """
        count = len(packed.size)
        word, number = _slots(packed)
        _, length, owner = packed.letters
        words = np.bincount(owner, minlength=count)
        rare = ~self.common[word]
        owner, length = owner[rare], length[rare]
        columns = [
            np.bincount(owner, minlength=count),
            segment_reduce(np.maximum, length, owner, count, np.nan),
            segment_reduce(np.add, length, owner, count, 0.0),
            last_of(length, owner, count, np.nan),
        ]
        rare = ~self.common[number]
        owner, logs = packed.digits[2][rare], packed.number_logs[rare]
        columns += [
            np.bincount(owner, minlength=count),
            segment_reduce(np.maximum, logs, owner, count, np.nan),
            segment_reduce(np.add, logs, owner, count, 0.0),
            np.where(words > 0, 1 - columns[0] / np.maximum(words, 1), np.nan),
        ]
        return np.stack([np.asarray(column, dtype=np.float32) for column in columns], axis=1)


def fit_rare_words(texts: list[str]) -> RareWords:
    """Count in how many distinct prompts each word occurs; one that is in a single prompt is rare in any case."""
    count = np.zeros(SLOTS, dtype=np.int64)
    for packed in pack_batches(texts):
        prompt = np.concatenate((packed.letters[2], packed.digits[2]))
        seen = np.unique(prompt * SLOTS + np.concatenate(_slots(packed))) % SLOTS
        count += np.bincount(seen, minlength=SLOTS)
    return RareWords(count >= max(2.0, COMMON * len(texts)))


def _slots(packed: PackedTexts) -> tuple[Array, Array]:
    """Return the slots of the runs of letters, and of those of digits."""
    starts, lengths, _ = (np.concatenate(parts) for parts in zip(packed.letters, packed.digits, strict=True))
    hashed = hash_runs(packed.data, starts, lengths)
    with np.errstate(over="ignore"):
        mixed = (hashed ^ (hashed >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93)
    slot = (mixed >> np.uint64(48)).astype(np.int64)
    words = len(packed.letters[0])
    return slot[:words], slot[words:]
