"""Features from earlier lengths that are known when a request starts: of its prompt, its task, the policy.

`simulate` rebuilds this knowledge for past samples, so that a model is trained on exactly what it would have seen:
a sample sees finished samples of *earlier steps* of its run only, and nothing of its siblings, as a run predicts a
group once, before any member starts. It never sees its own length nor a later one. `LiveHistory` gives the same
columns during a run, and `Remembered` those of the prompts that a model was trained on. Lengths enter as natural
logarithms; means of a prompt are the logarithm of the mean length, since dispatch goes by expected lengths. Unknown
values are NaN.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ranker.data import Rollouts
from ranker.segments import Array

PROMPT = ("prompt_before_mean", "prompt_before_last", "prompt_before_max", "prompt_before_count")
"""Columns on the same prompt in earlier steps; `last` is the mean of the newest of these steps."""
RECENT = ("task_recent_mean", "task_recent_p50", "task_recent_p90", "all_recent_mean", "all_recent_p90")
HISTORY = (*PROMPT, *RECENT)

RECENT_SAMPLES = 256
"""Number of newest finished samples that the recent columns use: enough for a 90th percentile, few enough to follow a
drifting policy.
"""


def simulate(rollouts: Rollouts) -> Array:
    """Return the columns `HISTORY` [N, 9], float32, as each sample would have seen them when it started."""
    out = np.full((len(rollouts), len(HISTORY)), np.nan, dtype=np.float32)
    if len(rollouts):
        log = np.log(rollouts.output_length)
        out[:, :4] = _prompt_before(rollouts, log)
        out[:, 4:7] = _recent(rollouts, log, rollouts.task, (50, 90))
        out[:, 7:] = _recent(rollouts, log, np.zeros(len(rollouts), dtype=np.int64), (90,))
    return out


def earlier_lengths(history: Array) -> tuple[Array, Array]:
    """Return mean length in tokens [N] and number [N] of the earlier samples of each prompt; 0 where there are none.

    Args:
        history: columns `HISTORY` [N, 9].
    """
    number = np.nan_to_num(history[:, HISTORY.index("prompt_before_count")].astype(float))
    mean = np.exp(np.nan_to_num(history[:, HISTORY.index("prompt_before_mean")].astype(float)))
    return np.where(number > 0, mean, 0.0), number


def _prompt_before(rollouts: Rollouts, log: Array) -> Array:
    """Return the columns `PROMPT` [N, 4]."""
    keys = np.stack((rollouts.run, rollouts.prompt, rollouts.step), axis=1)
    cells, cell = np.unique(keys, axis=0, return_inverse=True)
    cell = cell.reshape(-1)
    count = np.bincount(cell).astype(float)
    total = np.bincount(cell, weights=np.exp(log))
    most = np.full(len(cells), -np.inf)
    np.maximum.at(most, cell, log)
    out = np.full((len(cells), 4), np.nan)
    same = np.zeros(len(cells), dtype=bool)  # whether a cell has the prompt of the cell before it
    same[1:] = (cells[1:, :2] == cells[:-1, :2]).all(axis=1)
    n = s = m = 0.0
    for i in np.flatnonzero(same):
        if not same[i - 1]:
            n, s, m = count[i - 1], total[i - 1], most[i - 1]
        else:
            n, s, m = n + count[i - 1], s + total[i - 1], max(m, most[i - 1])
        out[i] = np.log(s / n), np.log(total[i - 1] / count[i - 1]), m, n
    return out[cell]


def _recent(rollouts: Rollouts, log: Array, kind: Array, percentiles: tuple[int, ...]) -> Array:
    """Return mean and percentiles of the newest finished samples of the same run and `kind` [N], from earlier steps."""
    out = np.full((len(log), 1 + len(percentiles)), np.nan)
    ended = np.nan_to_num(rollouts.finished)
    order = np.lexsort((np.arange(len(log)), ended, rollouts.step, kind, rollouts.run))
    keys = np.stack((rollouts.run, kind, rollouts.step), axis=1)[order]
    begins = np.concatenate(([0], np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1, [len(order)]))
    stream = 0
    for begin, end in pairwise(begins):
        if begin and (keys[begin, :2] != keys[begin - 1, :2]).any():
            stream = begin
        if begin > stream and keys[begin, 1] >= 0:
            out[order[begin:end]] = _summary(log[order[max(stream, begin - RECENT_SAMPLES) : begin]], percentiles)
    return out


def _log_mean(logs: list[float]) -> float:
    """Return the log of the mean length of log lengths."""
    return math.log(sum(map(math.exp, logs)) / len(logs))


def _summary(log: Array, percentiles: tuple[int, ...]) -> list[float]:
    return [float(log.mean()), *map(float, np.percentile(log, percentiles))]


@dataclass(frozen=True)
class Remembered:
    """Lengths of the prompts that a model was trained on, for runs in which they come again."""

    keys: Array
    """Keys of the prompts [P], uint64, ascending."""
    columns: Array
    """Their columns `PROMPT` after all samples [P, 4], float32."""

    def fill(self, history: Array, prompts: Sequence[str]) -> Array:
        """Return columns `HISTORY` [N, 9] with those of `PROMPT` where a prompt has none, and is remembered."""
        if not len(self.keys) or not len(prompts):
            return history
        key = np.array([_key(prompt) for prompt in prompts], dtype=np.uint64)
        place = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        rows = (self.keys[place] == key) & np.isnan(history[:, HISTORY.index("prompt_before_count")])
        filled = history.copy()
        filled[rows, : len(PROMPT)] = self.columns[place[rows]]
        return filled


NOTHING = Remembered(np.zeros(0, dtype=np.uint64), np.zeros((0, len(PROMPT)), dtype=np.float32))


def remember(rollouts: Rollouts) -> Remembered:
    """Return what is to be remembered of all samples; the newest step is that of the last run of each prompt."""
    last = rollouts.take(np.lexsort((rollouts.step, rollouts.run, rollouts.prompt)))
    log = np.log(last.output_length)
    ends = np.flatnonzero(np.append(np.diff(last.prompt) != 0, True))
    newest = last.unit == last.unit[ends][last.prompt]
    count = np.bincount(last.prompt).astype(float)
    most = np.full(len(count), -np.inf)
    np.maximum.at(most, last.prompt, log)
    total = np.bincount(last.prompt, weights=np.exp(log))
    of_last = np.bincount(last.prompt, weights=np.exp(log) * newest) / np.bincount(last.prompt, weights=newest)
    columns = np.stack((np.log(total / count), np.log(of_last), most, count), axis=1).astype(np.float32)
    keys, first = np.unique(np.array([_key(text) for text in last.texts], dtype=np.uint64), return_index=True)
    return Remembered(keys, columns[first])


def _key(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Seen:
    """A finished sample, as the live history stores it."""

    prompt: str
    task: str | None
    step: int
    log_length: float


class LiveHistory:
    """The same columns during a run, from the newest `window` samples."""

    def __init__(self, window: int) -> None:
        self._rows: deque[Seen] = deque()
        self._window = window
        self._prompts: dict[str, list[Seen]] = {}
        self._streams: dict[str | None, deque[Seen]] = {}

    def add(self, row: Seen) -> None:
        """Add a finished sample."""
        self._rows.append(row)
        self._prompts.setdefault(row.prompt, []).append(row)
        for key in {None, row.task}:
            # More than are used, since samples of the current step are skipped.
            self._streams.setdefault(key, deque(maxlen=2 * RECENT_SAMPLES + 1024)).append(row)
        while len(self._rows) > self._window:
            old = self._rows.popleft()
            _forget(self._prompts, old.prompt, old)

    def columns(self, prompts: list[str], tasks: list[str | None], step: int) -> Array:
        """Return the columns `HISTORY` [N, 9], float32, for requests that are about to start in `step`."""
        out = np.full((len(prompts), len(HISTORY)), np.nan, dtype=np.float32)
        recent: dict[str | None, list[float]] = {}
        for i, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            before = [row for row in self._prompts.get(prompt, ()) if row.step < step]
            if before:
                logs, newest = [row.log_length for row in before], max(row.step for row in before)
                last = [row.log_length for row in before if row.step == newest]
                out[i, :4] = _log_mean(logs), _log_mean(last), max(logs), len(logs)
            if task not in recent:
                recent[task] = self._recent(task, step, (50, 90)) if task is not None else [np.nan] * 3
            out[i, 4:7] = recent[task]
        out[:, 7:] = self._recent(None, step, (90,))
        return out

    def _recent(self, key: str | None, step: int, percentiles: tuple[int, ...]) -> list[float]:
        logs = [row.log_length for row in self._streams.get(key, ()) if row.step < step][-RECENT_SAMPLES:]
        return _summary(np.array(logs), percentiles) if logs else [np.nan] * (1 + len(percentiles))


def _forget(table: dict[str, list[Seen]], key: str, row: Seen) -> None:
    """Remove a row, and the key with its last row."""
    rows = table[key]
    rows.remove(row)
    if not rows:
        del table[key]
