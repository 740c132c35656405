"""Whether drafting goes on: what it has saved and cost so far, as steps have shown.

What a draft should save is an estimate, and where little recurs it was too high by more than drafting saves. So an
account is kept, in plain steps of a batch: time saved comes in, time lost goes out, and nothing is drafted on an empty
account. A small share of all plain steps comes in as well, so that drafting is tried again from time to time: this is
also the most that drafting can cost in the long run.

Batches from one power of two to the next share an account: what pays for a few requests may not pay for many.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

SHARE = 0.01
"""Share of a plain step that each plain step adds: what trying again may cost."""
CREDIT = 4.0
"""Plain steps that an account begins with."""
MOST = 16.0
"""Largest balance: drafting that has stopped paying ends after losing so many plain steps."""
LOOK = 48
"""Steps with drafting after which a plain one is taken, so that both are measured under the same load."""
FEWEST = 3
"""Measured steps below which a median is not used; as many plain ones come before drafting begins."""
MEASURED = 15
"""Newest steps whose median tells what steps take beside their rows: single stalls do not count."""
PAUSE = 3.0
"""A step that takes so many times as long as expected has waited for something: its time is not counted. Nor does one
step with drafts cost more than so many plain ones."""
FURTHEST = 4.0
"""Factor by which the step curve is taken to be off at most."""
LEAST_S = 1e-6
"""Least seconds that a plain step is taken to take."""


@dataclass
class _Account:
    balance: float = CREDIT
    """Plain steps."""
    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED))
    """Seconds of the newest plain steps beside those of their rows."""
    since: int = 0
    """Steps with drafting since the last plain one."""
    waited: bool = False
    """Whether the last step with drafting took too long to be counted."""


class DraftAccounts:
    """The accounts of one instance."""

    def __init__(self) -> None:
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)

    def may_draft(self, batch: int) -> bool:
        """Return whether a step of so many requests may have drafts looked for and verified."""
        account = self._of(batch)
        return len(account.plain_s) >= FEWEST and account.balance > 0 and account.since < LOOK

    def plain(self, batch: int, took_s: float, rows_s: float) -> None:
        """Take in a step in which nothing was looked for.

        Args:
            batch: its requests.
            took_s: seconds that it took.
            rows_s: seconds that a step of so many rows takes by the step curve.
        """
        account = self._of(batch)
        account.plain_s.append(took_s - rows_s)
        account.since = 0
        account.balance = min(MOST, account.balance + SHARE)

    def drafted(self, batch: int, took_s: float, rows_s: float, more_s: float, saved_s: float) -> None:
        """Take in a step in which drafts were looked for, whether or not any were found.

        One that took more than `PAUSE` times as long as expected costs what its rows do; but not if the one before did,
        too: then that is what such steps take.

        Args:
            batch: its requests.
            took_s: seconds that it took, with looking for drafts and with their rows.
            rows_s: seconds that a step of so many requests without drafts takes by the step curve.
            more_s: seconds that the rows of its drafts take beside those, by the step curve.
            saved_s: seconds that its accepted tokens save, by the step curve.
        """
        account = self._of(batch)
        plain_s = max(LEAST_S, rows_s + (median(account.plain_s) if account.plain_s else 0.0))
        off = min(FURTHEST, max(1 / FURTHEST, plain_s / rows_s))  # as plain steps say
        more_s, saved_s = more_s * off, saved_s * off
        waits = took_s >= PAUSE * (plain_s + more_s)
        cost_s = more_s if waits and not account.waited else min(took_s - plain_s, PAUSE * (plain_s + more_s))
        account.since, account.waited = account.since + 1, waits
        account.balance = min(MOST, account.balance + (saved_s - cost_s) / plain_s)

    def _of(self, batch: int) -> _Account:
        return self._accounts[batch.bit_length()]
