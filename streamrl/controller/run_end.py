"""When a run is over, and which sites it does without at its end.

steps left                           -> goes on
all trained, something unfinished    -> goes on: the last checkpoint, versions in flight, an evaluation
all trained and saved, a site away   -> without the site, once it has been away for `patience_s`
nothing left                         -> over
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import SiteTrust
from streamrl.controller.training_steps import TrainingSteps
from streamrl.run_dir.remote_site import ABSENT_AFTER_S

log = logging.getLogger(__name__)

LOOK_AT_SITES_S = 1.0
"""Seconds between two looks at whether sites that are away hold up the end."""


def patience_s(absence_s: float, evaluates: bool) -> float:
    """Return the seconds for which a site may be away once all steps are trained and saved.

    Args:
        absence_s: the cluster's.
        evaluates: whether the run has evaluations: that of the last version needs its sites, so that they have more
            time.
    """
    return absence_s / 2 if evaluates else min(absence_s / 2, ABSENT_AFTER_S)


class RunEnd:
    """What the loop asks about its end."""

    def __init__(
        self,
        training: TrainingSteps,
        services: Services,
        evaluator: Evaluator,
        trust: SiteTrust,
        *,
        absence_s: float,
        evaluates: bool,
    ) -> None:
        """
        Args:
            training: the optimizer steps.
            services: the generation services.
            evaluator: groups of evaluations.
            trust: what excludes sites.
            absence_s: the cluster's.
            evaluates: whether the run has evaluations.
        """
        self.training, self.services, self.evaluator, self.trust = training, services, evaluator, trust
        self._patience_s, self._evaluates = patience_s(absence_s, evaluates), evaluates

    @property
    def reached(self) -> bool:
        """Whether all steps are trained and the work that follows the last one is done."""
        evaluating = self.evaluator.unfinished or self.evaluator.due(self.services.version)
        return self.training.done and not self.services.updating and not evaluating

    async def keep_looking(self, wake: Callable[[], object]) -> NoReturn:
        """Wake the loop once only sites that are away may hold up the end of the run: their silence brings nothing."""
        while True:
            await asyncio.sleep(LOOK_AT_SITES_S)
            if self._absent():
                wake()

    async def leave_absent(self) -> None:
        """Do without sites that are away if all is trained and saved, and only versions or an evaluation are left.

        The last site that can generate is needed for an evaluation.
        """
        for name in self._absent():
            why = f"it has been away for {self.services.heartbeats.away_s(name):.0f} s, and all steps are done"
            if not await self.trust.exclude(name, why) and not self._evaluates:
                log.error("%s is not used any more: %s", name, why)
                self.services.exclude(name, why)

    def _absent(self) -> list[str]:
        """Return the services of sites that are away too long once all steps are trained and saved; [] before."""
        return self.services.absent(self._patience_s) if self.training.saved else []
