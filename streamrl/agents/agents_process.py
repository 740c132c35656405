"""The agents process of a site: the endpoint that agents call, and the workers that run them.

    service -> agents   run_episode, turn_done
    agents -> service   order_turn, episode_done

The sessions, with all tokens of finished turns, are here: an instance that dies loses none of them. If this process
dies, the service gives the next one its open episodes again. Their agents are run from the start, and get the turns
that they had before from the service's journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.agents.agent_host import AgentHost
from streamrl.agents.episode import Episode, EpisodeOrder, GeneratedTurn, TurnOrder
from streamrl.agents.open_session import EpisodeWait
from streamrl.agents.workers import PROGRAMS, EpisodeWorkers
from streamrl.machine.model_files import resolve_model, token_rows
from streamrl.protocol import site_agents
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.site_agents import EpisodeDone, OrderTurn, RunEpisode, TurnDone
from streamrl.rollouts.plain_text import plain_text
from streamrl.rollouts.trajectory import MOST_ROWS, RowExtent, Trajectory, kept_of
from streamrl.rollouts.void import LONGEST_TRACEBACK, Void, VoidCause
from streamrl.run_dir import layout
from streamrl.run_dir.start_stages import READY, waiting_for
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import connect_inside
from streamrl.tasks.chat_template import load_tokenizer
from streamrl.tasks.void_reward import one_line
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Link
from streamrl.transport.wire import Arrays

log = logging.getLogger(__name__)

LONG_WAIT_S, MOST_WAITS = 5.0, 20
"""Seconds from which a wait of an episode is told, and the most that one heartbeat tells."""


class AgentsProcess:
    """Connects an `AgentHost` to the site's service."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.waits = WaitRegistry(context.name)
        self.ended = 0
        self.void: Counter[VoidCause] = Counter()
        """Void episodes by cause."""
        self._turns: dict[str, asyncio.Future[GeneratedTurn]] = {}
        """Turns that the service owes, by id."""
        self._episodes: dict[str, asyncio.Task[None]] = {}
        """Tasks of the open episodes, by sample id."""

    async def run(self) -> None:
        """Lead episodes until the process is stopped.

        Raises:
            PeerLost: the service fell silent.
            UserError: a task of the run file is wrong.
        """
        run, site = self.context.run, self.context.cluster.sites[self.context.site]
        self.context.say("loading the tokenizer")
        folder = resolve_model(run.model.path)
        tokenizer = load_tokenizer(folder)
        workers = self.workers = EpisodeWorkers(
            run.agent_tasks,
            site.agents.workers,
            self.context.run_dir / layout.LOGS / f"{self.context.name}-workers.log",
        )
        self.host = AgentHost(run, tokenizer, self._generate, workers, token_rows(Path(folder)))
        try:
            self.context.say("starting the agent workers")
            async with self.waits.deadline("agent workers to start", run.deadlines.startup_s):
                await workers.start(run.deadlines.startup_s)
                await self.host.start()
            log.info("the endpoint of agents listens at %s", self.host.address)
            for note in self.host.notes:
                log.warning("%s", note)
            self.link = Link(self.context.name, "agents", self.waits, flow=self.context.results_flow)
            self.link.reads = MessageReader(site_agents.FROM_SERVICE)
            self.link.state = self._state
            self.link.on_new_hub = self._new_service
            self.context.say(waiting_for([f"service-{self.context.site}"]))
            address, service = self.context.addresses.services[self.context.site], f"service-{self.context.site}"
            await connect_inside(self.context, self.link, service, address)
            self.context.say(READY)
            try:
                async with asyncio.TaskGroup() as tasks:
                    while True:
                        delivery = await self.link.receive()
                        delivery.ack()
                        self._handle(delivery, tasks)
            finally:
                await self.link.close()
        finally:
            await self.host.close()
            await workers.close()

    def _handle(self, delivery: Delivery, tasks: asyncio.TaskGroup) -> None:
        match delivery.body:
            case RunEpisode() as order:
                # the service orders all open episodes at this process's hello, some perhaps for the second time
                if (led := self._episodes.get(order.sample_id)) is not None and not led.cancelling():
                    return
                self._episodes[order.sample_id] = task = tasks.create_task(self._lead(order))
                task.add_done_callback(partial(self._forget, order.sample_id))
            case TurnDone() as turn:
                if (owed := self._turns.pop(turn.turn_id, None)) is not None and not owed.done():
                    owed.set_result(_turn(turn, delivery.arrays))

    def _forget(self, sample_id: str, task: asyncio.Task[None]) -> None:
        if self._episodes.get(sample_id) is task:
            del self._episodes[sample_id]

    async def _lead(self, order: RunEpisode) -> None:
        """Have an agent lead an episode, and report what became of it; one whose record cannot be made is void."""
        began = time.time()
        try:
            episode = await self.host.run(
                EpisodeOrder(order.sample_id, order.group_id, order.task, order.item, order.seed, order.temperature)
            )
            message, arrays = episode_to_wire(episode)
        except Exception as error:  # one episode must not end all others
            log.exception("episode %s has no record", order.sample_id)
            void = Void(VoidCause.CRASH, f"the record of the episode cannot be made: {one_line(error)}")
            episode = Episode(
                order.sample_id,
                rows=[],
                reward=None,
                void=void,
                finish_reason="stop",
                messages=[],
                steps=[],
                t_started=began,
                t_first_token=None,
                t_finished=time.time(),
            )
            message, arrays = episode_to_wire(episode)
        self.ended += 1
        if episode.void is not None:
            self.void[episode.void.cause] += 1
        await self.link.send(*wire(message), arrays)

    async def _generate(self, order: TurnOrder) -> GeneratedTurn:
        """Have the site's instances generate one turn."""
        owed = self._turns[order.turn_id] = asyncio.get_running_loop().create_future()
        message = OrderTurn(turn_id=order.turn_id, sample_id=order.sample_id, seed=order.seed, extends=order.extends)
        try:
            await self.link.send(*wire(message), {"prompt_tokens": order.prompt_tokens})
            return await owed
        finally:
            self._turns.pop(order.turn_id, None)

    def _new_service(self) -> None:
        """Drop all episodes: a restarted service issues what is to be generated again."""
        self.link.forget_sent()
        for task in self._episodes.values():
            task.cancel()
        self._turns.clear()

    def _state(self) -> dict[str, Any]:
        causes = ", ".join(f"{cause} {count}" for cause, count in self.void.most_common())
        detail = f"{self.ended} episodes" + (f", {self.void.total()} void ({causes})" if causes else "")
        waiting = self.host.waiting()
        if queued := sum(map(self._is_queued, waiting)):
            detail += f"; {queued} wait for one of {PROGRAMS} programs to end"
        return {
            "state": "leading episodes" if self._episodes else "idle",
            "running": len(self._episodes),
            "waiting": len(self._turns),
            "detail": detail,
            "waits": [self._wait(wait) for wait in self._long(waiting)],
        }

    def _is_queued(self, wait: EpisodeWait) -> bool:
        """Whether an episode's program has yet to start, which nothing limits: others have to end first."""
        task = self.workers.tasks[wait.order.task]
        return task.command is not None and self.workers.program_start(wait.order) is None

    def _long(self, waits: Iterable[EpisodeWait]) -> list[EpisodeWait]:
        now = time.time()
        return [wait for wait in waits if now - wait.since > LONG_WAIT_S and not self._is_queued(wait)][:MOST_WAITS]

    def _wait(self, wait: EpisodeWait) -> dict[str, Any]:
        """Return what an episode waits for, as other waits of a process are told."""
        limits, known = self.workers.tasks[wait.order.task].deadlines, self.workers.waiting().get(wait.order.sample_id)
        what, limit_s = {
            "model": (f"the model to answer turn {wait.name}", limits.call_s),
            "tool": (f"tool {wait.name}", limits.tool_s),
            "agent": ("its agent", limits.turn_s),
        }[wait.kind]
        if known is not None and wait.kind != "model":  # its worker knows more than the endpoint
            what, limit_s = f"tool {known.name}", limits.tool_s
        since = wait.since
        if (started := self.workers.program_start(wait.order)) is not None:  # a program has no limit but this one
            since = max(since, started)
            limit_s = max(0.0, started + limits.episode_s - since)
        return {
            "owner": self.context.name,
            "waiting_for": f"episode {wait.order.sample_id}: {what}",
            "since": since,
            "limit_s": limit_s,
        }


def _turn(message: TurnDone, arrays: Arrays) -> GeneratedTurn:
    tokens, logprobs, versions = (
        np.asarray(arrays[name]) for name in ("completion_tokens", "logprobs", "token_versions")
    )
    reason = "length" if message.finish_reason == "length" else "stop"
    fields = message.text, message.cached_tokens, message.from_before
    return GeneratedTurn(tokens, logprobs, versions, reason, *fields)  # type: ignore[arg-type]


def episode_to_wire(episode: Episode) -> tuple[EpisodeDone, Arrays]:
    """Convert a finished episode: its rows' tokens follow one another.

    Raises:
        ValueError: it has more rows than the controller takes.
    """
    rows, void = [row for row in episode.rows if row.sampled.any()], episode.void
    if len(rows) > MOST_ROWS:
        raise ValueError(
            f"its turns are {len(rows)} rows, at most {MOST_ROWS} are taken: an agent that begins a row with each call "
            "needs a smaller max_turns"
        )
    messages, steps = kept_of(episode.messages, episode.steps)
    trajectory = Trajectory(
        rows=[RowExtent(tokens=len(row.tokens), prompt=row.prompt_length) for row in rows],
        reward=episode.reward,
        void_cause=void.cause if void else None,
        void_text=plain_text(void.text) if void else "",
        void_traceback=plain_text(episode.traceback[-LONGEST_TRACEBACK:]),
        metrics=episode.metrics,
        messages=messages,
        steps=steps,
    )
    answers = [one for one in episode.messages if one.get("role") == "assistant"]
    message = EpisodeDone(
        sample_id=episode.sample_id,
        finish_reason=episode.finish_reason,
        t_started=episode.t_started,
        t_first_token=episode.t_first_token or episode.t_finished,
        t_finished=episode.t_finished,
        text=str(answers[-1].get("content") or "") if answers else "",
        trajectory=trajectory,
    )
    empty = np.empty(0, np.int32)
    return message, {
        "completion_tokens": np.concatenate([empty, *(row.tokens for row in rows)]).astype(np.int32),
        "logprobs": np.concatenate([empty, *(row.logprobs for row in rows)]).astype(np.float32),
        "token_versions": np.concatenate([empty, *(row.versions for row in rows)]).astype(np.int32),
    }
