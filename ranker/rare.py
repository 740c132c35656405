"""The problem in a prompt, told from the wording around it: words and numbers that few training prompts have.

Instructions and worked examples are the same in all prompts of a task; the word to spell or the number to factor is
not. So the length of the longest *rare* word, or the size of the greatest rare number, says how big the problem is,
even when the instructions hold longer words and greater numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.segments import Array, last_of, segment_reduce
from ranker.text import LETTER, Packed, hash_runs, number_logs, pack

SLOTS = 1 << 16
"""Slots of the table; a mix's wording has some thousand words, so few rare ones share a slot with a common one."""
COMMON = 0.02
"""Share of the training prompts from which on a word is common: the wording of one task in fifty."""

RARE = (
    *("rare_words", "rare_word_max", "rare_word_sum", "rare_word_last"),
    *("rare_numbers", "rare_number_max", "rare_number_log_sum"),
)


@dataclass(frozen=True)
class RareWords:
    """Which words (runs of letters) and numbers (runs of digits) are common."""

    common: Array
    """Whether the words of a slot are common [SLOTS], bool."""

    def apply(self, packed: Packed) -> Array:
        """The columns `RARE` [N, 7], float32; numbers as log(1 + x), NaN for what a prompt has not."""
        count = len(packed.size)
        start, length, slot = _words(packed)
        rare = ~self.common[slot]
        owner, length = packed.prompt[start[rare]], length[rare]
        columns = [
            np.bincount(owner, minlength=count),
            segment_reduce(np.maximum, length, owner, count, np.nan),
            segment_reduce(np.add, length, owner, count, 0.0),
            last_of(length, owner, count, np.nan),
        ]
        start, logs, slot = _numbers(packed)
        rare = ~self.common[slot]
        owner, logs = packed.prompt[start[rare]], logs[rare]
        columns += [
            np.bincount(owner, minlength=count),
            segment_reduce(np.maximum, logs, owner, count, np.nan),
            segment_reduce(np.add, logs, owner, count, 0.0),
        ]
        return np.stack([np.asarray(column, dtype=np.float32) for column in columns], axis=1)


def fit_rare_words(texts: list[str]) -> RareWords:
    """Counts in how many distinct prompts each word is; one that is in a single prompt is rare in any case."""
    packed = pack(texts)
    (words, _, word_slot), (numbers, _, number_slot) = _words(packed), _numbers(packed)
    prompt = packed.prompt[np.concatenate((words, numbers))]
    slot = np.concatenate((word_slot, number_slot))
    seen = np.unique(prompt * SLOTS + slot) % SLOTS
    return RareWords(np.bincount(seen, minlength=SLOTS) >= max(2.0, COMMON * len(texts)))


def _words(packed: Packed) -> tuple[Array, Array, Array]:
    """Starts, lengths and slots of the runs of letters."""
    start, length, hashed = hash_runs(packed.data, LETTER[packed.data])
    return start, length, _slot(hashed)


def _numbers(packed: Packed) -> tuple[Array, Array, Array]:
    """Starts, logs and slots of the runs of digits."""
    start, _, log = number_logs(packed.data)
    return start, log, _slot(hash_runs(packed.data, (packed.data >= 48) & (packed.data <= 57))[2])


def _slot(hashed: Array) -> Array:
    with np.errstate(over="ignore"):
        mixed = (hashed ^ (hashed >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93)
    return (mixed >> np.uint64(48)).astype(np.int64)
