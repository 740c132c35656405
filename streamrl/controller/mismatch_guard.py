"""What follows where trainer and instances do not compute the same: a loud line, a site excluded, or the run's end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from streamrl.config.run import RunConfig
from streamrl.controller.site_claims import SiteClaims
from streamrl.controller.site_trust import SiteTrust
from streamrl.controller.weight_canary import Mismatch
from streamrl.errors import ErrorCode, RunFailed
from streamrl.rollouts.ledger import Ledger

log = logging.getLogger(__name__)


class MismatchGuard:
    """The judge of mismatches, as the run file says (`mismatch.on_mismatch`)."""

    def __init__(self, run: RunConfig, claims: SiteClaims, trust: SiteTrust, ledger: Ledger) -> None:
        self._wanted, self._model = run.mismatch.on_mismatch, run.model.path
        self._claims, self._trust, self._ledger = claims, trust, ledger

    def judge(self, text: str, far: bool = False) -> None:
        """Say loudly that trainer and instances differ.

        Args:
            text: what differs, and by how much.
            far: whether no rounding explains it.

        Raises:
            RunFailed: the run is to end then.
        """
        log.error("mismatch: %s", text)
        if not self._stops(far):
            return
        self._ledger.forget_contents()  # a resume generates anew what those instances have made
        if self._wanted == "stop":
            raise RunFailed(f"{text} (mismatch.on_mismatch is stop)")
        raise RunFailed(
            ErrorCode.MISMATCH.refer(
                f"{text}. No rounding explains this: vLLM probably computes this family of models otherwise than "
                f"transformers, with which it is trained; `streamrl verify {self._model}` compares them. "
                "mismatch.on_mismatch: warn trains nevertheless"
            )
        )

    def _stops(self, far: bool) -> bool:
        """Return whether a mismatch is to end the run."""
        return self._wanted == "stop" or (self._wanted == "auto" and far)

    async def judge_canaries(self, mismatches: Sequence[Mismatch]) -> None:
        """Say loudly which instances differ from the trainer.

        Raises:
            RunFailed: the run is to end then, and it cannot do without the instance's site.
        """
        for found in mismatches:
            service = self._claims.service_of(found.instance)
            if self._stops(found.far) and await self._trust.exclude(service, found.text):
                continue
            self.judge(found.text, found.far)
