"""Recovery of restarted processes: the controller sends them their open work again as soon as they say hello."""

from __future__ import annotations

import logging

from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.live_rounds import NoRounds
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.reward_client import Rewarders
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import open_work
from streamrl.controller.weight_calls import WeightCalls
from streamrl.transport.endpoint import Hub

log = logging.getLogger(__name__)


class Recovery:
    """Recovery of restarted processes, which it recognises by their new sessions."""

    def __init__(
        self,
        hub: Hub,
        services: Services,
        scaling: Scaling,
        rewarders: Rewarders,
        weight_calls: WeightCalls,
        pool: GroupPool,
        evaluator: Evaluator,
        rounds: NoRounds,
        seed: int,
    ) -> None:
        self.hub, self.services, self.scaling, self.rewarders = hub, services, scaling, rewarders
        self.weight_calls = weight_calls
        self.pool, self.evaluator, self.rounds, self.seed = pool, evaluator, rounds, seed
        self._sessions = {name: peer.session for name, peer in hub.peers.items()}
        """Current session of each known process; at first, those that were connected when the run began."""

    async def hello(self, name: str, session: str) -> None:
        """Handle a process's hello; replay outstanding work to it if it has restarted.

        A hello that another one has overtaken is left out: what is sent now would reach the later process, too.
        """
        peer = self.hub.peers.get(name)
        if self._sessions.get(name) == session or peer is None or peer.session != session:
            return
        known = name in self._sessions
        self._sessions[name] = session
        if not known:
            return  # a command of the operator, not a process of the run
        log.warning("%s has restarted; sending it its outstanding work again", name)
        if name in self.services.names:
            await self._replay_to_service(name)
        elif name in self.rewarders.names:
            self.rewarders.returned(name)

    async def _replay_to_service(self, name: str) -> None:
        """Send a restarted service the weights and all that its site has not finished."""
        had = await self.services.returned(name)
        await self.scaling.returned(name)
        await self.weight_calls.service_returned()
        work = open_work(had, self.services.alone, self.pool, self.evaluator, self.seed)
        await self.services.resend(name, work, self.rounds.budget)
        if self.rounds.active:
            await self.services.park_resting(name, self.rounds.number, self.rounds.resting_samples())
