"""Drafts of a request's next tokens from text that is known: other completions of its prompt, and its own.

Tokens are code points of a string, which makes searching as fast as the C library's. The longest end of the request's
text that occurs in the known completions is looked up; the places where it occurs vote on what follows, newest first.
Where it occurs nowhere, the request's own text, prompt included, is searched. This is what a suffix tree answers
(SuffixDecoding, arXiv 2411.04975), without a tree that must be built and kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Source = Literal["sibling", "earlier", "own"]
"""Origin of a draft: completions of the same prompt by the current weights or by older ones, or the request's text."""

END = chr(0x10FFFF)
"""Ends a completion in a searched text; no token has this number."""
MOST_TOKENS = 0x10FFFF
"""Tokens of the largest vocabulary that fits into code points."""
MATCHES = (2, 3, 5, 8, 16)
"""Lengths of the ends that are looked up."""
SHORTEST_OWN = 3
"""Shortest end that is looked up in the request's own text: shorter ones recur by chance."""
VOTES = 8
"""Places that vote."""
LEAD = 16
"""Tokens of the prompt that stand before each known completion, so that its beginning is found, too."""


def text_of(tokens: npt.NDArray[np.int32]) -> str:
    """Return tokens, shape [n], as a string of code points."""
    return np.ascontiguousarray(tokens, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of a request."""

    tokens: str
    """Tokens as code points; never empty."""
    shares: tuple[float, ...]
    """Share of the votes that each token had, given those before it."""
    source: Source
    matched: int
    """Length of the end that was found; the true match may be longer."""
    age: int = 0
    """Weight versions since the newest of the completions that it is from."""


@dataclass(frozen=True)
class Known:
    """The known completions of a prompt, newest first."""

    text: str
    """All of them, each with the end of its prompt before it and `END` after it."""
    starts: tuple[int, ...]
    """Where each begins in `text`."""
    versions: tuple[int, ...]
    """Weight version of each one's last token."""


@dataclass
class _Prompt:
    """What is kept of a prompt."""

    completions: deque[tuple[str, int]] = field(default_factory=deque)
    """Completions with the version of their last token, newest first."""
    expected: float | None = None
    """Forecast tokens of a completion."""
    joined: Known | None = None
    """The completions, ready for searching; None: they have changed."""


class KnownCompletions:
    """The newest completions of each prompt that was used lately, and forecasts of their lengths."""

    def __init__(self, per_prompt: int, most_tokens: int) -> None:
        """
        Args:
            per_prompt: completions kept of a prompt.
            most_tokens: tokens kept in all, prompts included; beyond, prompts that were not used for longest are
                forgotten.
        """
        self._per_prompt, self._most = per_prompt, most_tokens
        self._kept: OrderedDict[str, _Prompt] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self.tokens = 0
        """Tokens kept, prompts included."""

    def add(self, prompt: str, completion: str, version: int) -> None:
        """Add a completion; the oldest of its prompt is forgotten if there are too many."""
        kept = self._use(prompt)
        kept.completions.appendleft((completion, version))
        kept.joined = None
        self.tokens += len(completion)
        if len(kept.completions) > self._per_prompt:
            self.tokens -= len(kept.completions.pop()[0])
        self._bound()

    def expect(self, prompt: str, tokens: float | None) -> None:
        """Set the forecast length of a prompt's completions; None: there is none."""
        self._use(prompt).expected = tokens
        self._bound()

    def _use(self, prompt: str) -> _Prompt:
        if prompt not in self._kept:
            self._kept[prompt] = _Prompt()
            self._lengths[len(prompt)] += 1
            self.tokens += len(prompt)
        self._kept.move_to_end(prompt)
        return self._kept[prompt]

    def _bound(self) -> None:
        while self.tokens > self._most and len(self._kept) > 1:
            prompt, kept = self._kept.popitem(last=False)
            self.tokens -= len(prompt) + sum(len(completion) for completion, _ in kept.completions)
            self._lengths[len(prompt)] -= 1
            if not self._lengths[len(prompt)]:
                del self._lengths[len(prompt)]

    def prompt_of(self, text: str) -> str | None:
        """Return the longest known prompt that a request's text, prompt and completion, begins with."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(text) and text[:length] in self._kept:
                return text[:length]
        return None

    def expected(self, prompt: str) -> float | None:
        """Return the forecast length of a prompt's completions in tokens; None: there is none."""
        kept = self._kept.get(prompt)
        return None if kept is None else kept.expected

    def of(self, prompt: str) -> Known | None:
        """Return the known completions of a prompt; None: there are none."""
        kept = self._kept.get(prompt)
        if kept is None or not kept.completions:
            return None
        if kept.joined is None:
            parts = [prompt[-LEAD:] + completion + END for completion, _ in kept.completions]
            starts = np.cumsum([0, *map(len, parts)])[:-1].tolist()
            kept.joined = Known("".join(parts), tuple(starts), tuple(version for _, version in kept.completions))
        return kept.joined


def draft(text: str, known: Known | None, most: int, version: int) -> Draft | None:
    """Draft the next tokens of a request, or return None where nothing is known.

    Args:
        text: prompt and completion so far.
        known: completions of the same prompt.
        most: most tokens to draft.
        version: version of the weights that will verify.
    """
    own = _longest(text, text, SHORTEST_OWN, len(text) - 1)
    matched = 0 if known is None else _longest(text, known.text, 1, len(known.text))
    if known is not None and matched >= max(own, 1):
        places = list(_places(known.text, text[-matched:]))
        tokens, shares = _vote([known.text[place : place + most] for place in places])
        if tokens:
            index = int(np.searchsorted(known.starts, places[0] - matched, side="right")) - 1
            age = max(0, version - known.versions[index])
            return Draft(tokens, shares, "earlier" if age else "sibling", matched, age)
    if own:
        place = text.rfind(text[-own:], 0, len(text) - 1) + own
        tokens = text[place : place + most]
        return Draft(tokens, (1.0,) * len(tokens), "own", own)
    return None


def _longest(text: str, searched: str, shortest: int, end: int) -> int:
    """Return the longest of `MATCHES` so that an end of `text` of this length is in `searched[:end]`; 0: none."""
    found = 0
    for length in MATCHES:
        if length >= len(text) or (length >= shortest and searched.find(text[-length:], 0, end) < 0):
            break  # nor can a longer end be there
        if length >= shortest:
            found = length
    return found


def _places(text: str, end: str) -> Iterator[int]:
    """Yield where the text goes on after the first occurrences of `end`, at most `VOTES`."""
    place = text.find(end)
    for _ in range(VOTES):
        if place < 0:
            return
        yield place + len(end)
        place = text.find(end, place + 1)


def _vote(candidates: list[str]) -> tuple[str, tuple[float, ...]]:
    """Return the likeliest continuation, token by token among those that agree so far, with each token's share."""
    if len(candidates) == 1:
        only = candidates[0].partition(END)[0]
        return only, (1.0,) * len(only)
    tokens = ""
    shares: list[float] = []
    while True:
        position = len(tokens)
        votes = Counter(one[position] for one in candidates if len(one) > position)
        if not votes:
            return tokens, tuple(shares)
        best, count = votes.most_common(1)[0]  # of equal counts the first, which is the newest
        if best == END:
            return tokens, tuple(shares)
        shares.append(count / votes.total())
        tokens += best
        candidates = [one for one in candidates if len(one) > position and one[position] == best]
