"""What is open for a process that was started anew, told to it as soon as it says hello."""

from __future__ import annotations

import logging

from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import samples_of
from streamrl.controller.live_rounds import NoRounds
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.reward_client import Rewarders
from streamrl.controller.site_services import Services
from streamrl.transport.endpoint import Hub

log = logging.getLogger(__name__)


class Recovery:
    """Knows which life of each process the run works with."""

    def __init__(
        self,
        hub: Hub,
        services: Services,
        scaling: Scaling,
        rewarders: Rewarders,
        pool: GroupPool,
        evaluator: Evaluator,
        rounds: NoRounds,
        seed: int,
    ) -> None:
        self.hub, self.services, self.scaling, self.rewarders = hub, services, scaling, rewarders
        self.pool, self.evaluator, self.rounds, self.seed = pool, evaluator, rounds, seed
        self._lives = {name: peer.session for name, peer in hub.peers.items()}
        """Sessions of those who were there when the run began."""

    async def hello(self, name: str, session: str) -> None:
        """A process has said hello."""
        if self._lives.get(name) == session or name not in self.hub.peers:
            return
        known = name in self._lives
        self._lives[name] = session
        if not known:
            return  # a person's command
        log.warning("%s was started anew", name)
        if name in self.services.names:
            await self._service(name)
        elif name in self.rewarders.names:
            await self.rewarders.returned(name)

    async def _service(self, name: str) -> None:
        """It gets weights, and all that its site has not finished."""
        ids = await self.services.returned(name)
        await self.scaling.returned(name)
        groups, samples = [], []
        evaluated = self.evaluator.open_groups()
        for group_id in ids:
            if (group := self.pool.groups.get(group_id)) is not None:
                left = set(self.pool.unfinished([group_id]))
                wanted = [draw for draw in samples_of(group, self.seed) if draw[0] in left]
            elif (group := evaluated.get(group_id)) is not None:
                wanted = self.evaluator.unfinished_samples(group)
            else:
                continue
            if wanted:
                groups.append(group)
                samples.append(wanted)
        await self.services.again(name, groups, samples, self.rounds.budget)
        if self.rounds.active:
            await self.services.rest(name, self.rounds.number, self.rounds.resting_samples())
