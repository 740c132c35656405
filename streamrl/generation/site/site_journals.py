"""Both journals of a site, and what its service makes of those of an earlier one: requests go on from good tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from streamrl.generation.site.token_journal import TokenJournal, drawn_from
from streamrl.generation.site.turn_journal import TurnJournal
from streamrl.rollouts.types import SampleRequest

JOURNAL_S = 0.5
"""Seconds between two writes of the journals."""


class SiteJournals:
    """The journals of tokens and of turns of a site."""

    def __init__(self, tokens: TokenJournal, turns: TurnJournal, drawn_with: str) -> None:
        """
        Args:
            tokens: tokens of running requests.
            turns: finished turns of open episodes.
            drawn_with: what the run draws with (`RunConfig.drawn_with`).
        """
        self._tokens, self._turns, self._drawn_with = tokens, turns, drawn_with
        self.newest: int | None = None
        """The newest version of the run's weights that this service has heard of, which it may still be fetching."""

    def heard_of(self, number: int) -> None:
        """Note a version of the run's weights.

        When the first one is heard of, the journals may have newer ones, from before the run went back to a checkpoint.
        They are forgotten now: later the run has other weights of these numbers.
        """
        if self.newest is None:
            self._tokens.forget_newer(number)
            self._turns.forget_newer(number)
        self.newest = max(self.newest or 0, number)

    def continued(self, requests: Iterable[SampleRequest], oldest: int = 0) -> list[SampleRequest]:
        """Return requests with the tokens that the journal has of them, which an earlier service may have noted.

        Those with a token of an older version than `oldest` begin anew: they would be too stale for their schedule. So
        do those whose prompt or settings have changed.

        A budget counts new tokens: the journal may have those of earlier rounds. The time of issue is the first one, as
        the other times of what was kept.
        """
        found = []
        for request in requests:
            source = drawn_from(request, self._drawn_with)
            if (had := self._tokens.begin(request.sample_id, source, request.t_queued, oldest)) is not None:
                kept, t_queued = had
                pause_at = request.pause_at and request.pause_at + len(kept.completion_tokens)
                request = replace(request, kept=kept, pause_at=pause_at, t_queued=t_queued)
            found.append(request)
        return found

    async def keep_written(self) -> NoReturn:
        """Write the journals to their files every `JOURNAL_S` seconds."""
        while True:
            await asyncio.sleep(JOURNAL_S)
            self._tokens.flush()
            self._turns.flush()

    def close(self) -> None:
        """Write what is new, and close the files."""
        self._tokens.close()
        self._turns.close()
