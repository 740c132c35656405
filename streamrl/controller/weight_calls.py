"""The trainer's calls to instances that it pushes weights to: passed on to their service, and the answers back.

There is one call at a time. A service that restarts has forgotten it: it is then asked again who could load weights,
and of any other call the trainer learns that its members are lost. They hold no weights that the new service knows of,
so the trainer pushes to them again.
"""

from __future__ import annotations

import contextlib
import math
import time

from streamrl.controller.site_services import Services
from streamrl.protocol.controller_site import WeightAnswer, WeightCall
from streamrl.protocol.message import wire
from streamrl.transport.endpoint import Hub


class WeightCalls:
    """The call of the trainer that is not answered, if there is one."""

    def __init__(self, hub: Hub, services: Services, trainer: str) -> None:
        """
        Args:
            hub: hub of the trainer's ranks.
            services: the services; only the trainer's site has one in a run that pushes weights.
            trainer: name of the rank that calls.
        """
        self._hub, self._services, self._trainer = hub, services, trainer
        self._open: WeightCall | None = None
        self._heard = -math.inf
        """When the latest call or answer came, monotonic seconds."""

    @property
    def since_sign_s(self) -> float:
        """Seconds since the latest sign that weights are being pushed; inf: there was none."""
        return time.monotonic() - self._heard

    async def ask(self, call: WeightCall) -> None:
        """Pass a call on."""
        self._heard, self._open = time.monotonic(), call
        await self._services.tell(call)

    async def answered(self, answer: WeightAnswer) -> None:
        """Pass an answer back; one to an earlier call tells the trainer nothing."""
        if self._open is None or answer.call != self._open.call:
            return
        self._heard = time.monotonic()
        if not answer.pending:
            self._open = None
        await self._tell(answer)

    async def service_returned(self) -> None:
        """Deal with the open call after a restart of the service."""
        if (call := self._open) is None:
            return
        if call.step == "members":
            await self._services.tell(call)
            return
        lost = {member.name: "the site's service was restarted" for member in call.members}
        await self.answered(WeightAnswer(call=call.call, lost=lost))

    async def _tell(self, answer: WeightAnswer) -> None:
        with contextlib.suppress(KeyError):  # the trainer has died, and the run begins again at its checkpoint
            await self._hub.send(self._trainer, *wire(answer))
