"""Running acceptance of drafted tokens: how far the votes for a token can be trusted.

The probability that a drafted token is accepted is its share of the votes, times a rate that is learned for each source
and length of match: tokens accepted by shares of tokens judged. Longer matches predict better, and each drafted token
that is accepted makes the match longer, so the position in the draft counts, too. New weights halve what was learned,
so that drafts that did not pay are tried again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from streamrl.generation.drafts.text_drafts import Draft

PRIOR = 0.7
"""Rate that is assumed before anything is judged: optimistic, so that drafts are tried."""
PRIOR_TOKENS = 8.0
"""Judged tokens that the prior counts as."""
LONGEST = 16
"""Matches from this length on are counted together."""
SUREST = 0.98
"""Largest probability that is assumed of a token."""


@dataclass
class Counts:
    """Drafted tokens, and those accepted."""

    drafted: int = 0
    """Tokens that were sent to be verified."""
    accepted: int = 0


@dataclass
class RunningAcceptance:
    """What became of the drafts so far."""

    by_age: dict[str, Counts] = field(default_factory=dict)
    """Counts since the start, by source and age in weight versions: 'own', 'sibling', 'earlier 2', 'earlier 5-8'."""
    _judged: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    _accepted: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def rate(self, source: str, matched: int) -> float:
        """Return what a share of the votes is multiplied with, for a match of so many tokens."""
        key = source, min(matched, LONGEST).bit_length()
        return (self._accepted[key] + PRIOR * PRIOR_TOKENS) / (self._judged[key] + PRIOR_TOKENS)

    def best_rate(self) -> float:
        """Return the largest rate of all sources and matches, that of an untried one included."""
        return max([PRIOR, *(self.rate(source, 1 << (bits - 1)) for source, bits in list(self._judged))])

    def chances(self, draft: Draft) -> list[float]:
        """Return the probability that each token of a draft is accepted, given that those before it were."""
        return [
            min(SUREST, share * self.rate(draft.source, draft.matched + position))
            for position, share in enumerate(draft.shares)
        ]

    def saw(self, draft: Draft, verified: int, accepted: int) -> None:
        """Count what became of a draft's first tokens.

        Args:
            draft: the draft.
            verified: tokens of it that were sent to be verified.
            accepted: tokens of those that were accepted; the next one, if there is one, was rejected.
        """
        for position in range(min(verified, accepted + 1)):
            key = draft.source, min(draft.matched + position, LONGEST).bit_length()
            self._judged[key] += draft.shares[position]
            self._accepted[key] += position < accepted
        named = f"{draft.source} {_ages(draft.age)}" if draft.source == "earlier" else draft.source
        counts = self.by_age.setdefault(named, Counts())
        counts.drafted += verified
        counts.accepted += accepted

    def new_weights(self) -> None:
        """Halve what was learned: the policy has changed."""
        for table in (self._judged, self._accepted):
            for key in table:
                table[key] /= 2


def _ages(age: int) -> str:
    """Return the ages that are counted together with one, at least 1: '1', '2', '3-4', '5-8', '9-16'.

    A run in which prompts come back sees ever new ages; the counts are reported with every heartbeat, as one text.
    """
    oldest = 1 << (age - 1).bit_length()
    youngest = oldest // 2 + 1
    return f"{youngest}-{oldest}" if youngest < oldest else str(oldest)
