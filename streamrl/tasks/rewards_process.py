"""The rewards process of a site: scores completions in worker processes, each with a time limit."""

from __future__ import annotations

import asyncio
from collections import Counter

from streamrl.protocol import controller_rewards
from streamrl.protocol.controller_rewards import ScoreAnswer, ScoreRequest
from streamrl.protocol.message import MessageReader, wire
from streamrl.rollouts.void import VoidCause
from streamrl.run_dir import layout
from streamrl.run_dir.site_status import touch_rewards
from streamrl.run_dir.start_stages import READY, waiting_for
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import CONTROLLER, connect_home, to_home
from streamrl.tasks.reward_pool import RewardPool
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Link

SIGN_EVERY_S = 1.0


class RewardsProcess:
    """Connects a `RewardPool` to the controller."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        pool = context.cluster.sites[context.site].rewards
        run = context.run
        held_out = run.evaluation.held_out(run.tasks) if run.evaluation else []
        self.pool = RewardPool(
            [*run.tasks, *held_out],
            run.seed,
            workers=pool.workers if pool else 1,
            timeout_s=run.deadlines.reward_s,
            log_file=context.run_dir / layout.LOGS / f"{context.name}-workers.log",
            attempts=run.rewards.attempts,
            pause_s=run.rewards.retry_pause_s,
            longest_pause_s=run.rewards.longest_pause_s,
        )
        self.scoring = 0
        self.scored = 0
        self.void: Counter[VoidCause] = Counter()
        """Void rewards by cause."""
        self._life = 0
        """Number of controller restarts seen so far."""

    async def run(self) -> None:
        """Score completions until the process is stopped."""
        limits = self.context.run.deadlines
        waits = WaitRegistry(self.context.name)
        signs = asyncio.create_task(self._give_signs()) if self.context.remote else None
        try:
            self.context.say("starting the reward workers")
            async with waits.deadline("reward workers to start", limits.startup_s):
                await self.pool.start(limits.startup_s)
            link = to_home(self.context, "rewards", waits)
            link.state = lambda: {
                "state": "scoring" if self.scoring else "idle",
                "running": self.scoring,
                "detail": self._detail(),
            }
            link.reads = MessageReader(controller_rewards.FROM_CONTROLLER)
            link.on_new_hub = lambda: self._new_controller(link)
            self.context.say(waiting_for(["the controller"]))
            await connect_home(self.context, link, CONTROLLER, self.context.addresses.controller)
            self.context.say(READY)
            try:
                async with asyncio.TaskGroup() as tasks:
                    while True:
                        delivery = await link.receive()
                        delivery.ack()  # now: a reward may take long, and open ones must not use up the credits
                        tasks.create_task(self._score(link, delivery.body))
            finally:
                await link.close()
        finally:
            if signs is not None:
                signs.cancel()
            self.pool.close()

    async def _give_signs(self) -> None:
        """Show the launcher of this site, to which the controller does not speak, that this process lives."""
        while True:
            touch_rewards(self.context.run_dir)
            await asyncio.sleep(SIGN_EVERY_S)

    def _detail(self) -> str:
        """Describe what has been done so far: '41 scored, 3 void (timeout 2, crash 1)'."""
        causes = ", ".join(f"{cause} {count}" for cause, count in self.void.most_common())
        return f"{self.scored} scored" + (f", {self.void.total()} void ({causes})" if causes else "")

    def _new_controller(self, link: Link) -> None:
        """Drop rewards requested by an earlier controller: the new one may regenerate those samples differently."""
        self._life += 1
        link.forget_sent()

    async def _score(self, link: Link, order: ScoreRequest) -> None:
        life = self._life
        self.scoring += 1
        try:
            result = await self.pool.score(order.task, order.completion, order.reward_input)
        finally:
            self.scoring -= 1
        self.scored += 1
        if (void := result.void) is not None:
            self.void[void.cause] += 1
        if life != self._life:
            return
        answer = ScoreAnswer(
            sample_id=order.sample_id,
            reward=result.reward,
            void_cause=void.cause if void else None,
            error=void.text if void else None,
            traceback=result.traceback,
            seconds=result.seconds,
        )
        await link.send(*wire(answer))
