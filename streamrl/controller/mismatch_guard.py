"""What follows where trainer and instances do not compute the same: a loud line, a site excluded, or the run's end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from streamrl.config.weight_sync import MismatchConfig
from streamrl.controller.site_claims import SiteClaims
from streamrl.controller.site_trust import SiteTrust
from streamrl.controller.weight_canary import Mismatch
from streamrl.errors import RunFailed
from streamrl.rollouts.ledger import Ledger

log = logging.getLogger(__name__)


class MismatchGuard:
    """The judge of mismatches, as the run file says (`mismatch.on_mismatch`)."""

    def __init__(self, config: MismatchConfig, claims: SiteClaims, trust: SiteTrust, ledger: Ledger) -> None:
        self._stops, self._claims, self._trust = config.on_mismatch == "stop", claims, trust
        self._ledger = ledger

    def judge(self, text: str) -> None:
        """Say loudly that trainer and instances differ.

        Raises:
            RunFailed: the run file wants the run to stop then.
        """
        log.error("mismatch: %s", text)
        if self._stops:
            self._ledger.forget_contents()  # a resume generates anew what those instances have made
            raise RunFailed(f"{text} (mismatch.on_mismatch is stop)")

    async def judge_canaries(self, mismatches: Sequence[Mismatch]) -> None:
        """Say loudly which instances differ from the trainer.

        Raises:
            RunFailed: the run file wants the run to stop then, and it cannot do without the instance's site.
        """
        for found in mismatches:
            if self._stops and await self._trust.exclude(self._claims.service_of(found.instance), found.text):
                continue
            self.judge(found.text)
