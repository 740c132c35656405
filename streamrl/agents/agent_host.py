"""The host of a site's episodes: a web server for their agents, and the records of what they did."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamrl.agents.chat_endpoint import REFUSED_STEP, ChatEndpoint
from streamrl.agents.episode import Episode, EpisodeOrder, EpisodeOutcome, EpisodeRunner, GenerateTurn
from streamrl.agents.open_session import TRANSPORT, EpisodeWait, OpenSession
from streamrl.agents.rendering import ChatRenderer, TemplateError
from streamrl.agents.session import SessionLimits
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.machine.peer_user import is_of_another_user
from streamrl.rollouts.void import Void, VoidCause

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 3600
"""Seconds that an idle connection stays open: one that the server closes while a tool runs fails the next call."""
MOST_STRANGERS = 64
"""Connections of the machine's other users at once: theirs are not to take the agents' places."""
NO_CALLS = "the agent ended without a call of the model, so that there is nothing to train"
ALL_REFUSED = "no call of the model was answered, so that there is nothing to train; the last one was refused: "
NO_ANSWERS = (
    "the agent ended without an answer of the model, before which its clients went away: nothing can be trained"
)
BACKLOG = 1024
"""Connections that the system holds until the endpoint takes them."""
TELL_FULL_S = 60.0
"""Fewest seconds between two warnings that no further connection can be taken."""
ATTEMPTS = 3
"""Most times that an episode is run, if what it shared a worker with ends it."""


class _Door(H11Protocol):
    """A connection; h11 has an end for headers, which httptools collects without one.

    Whoever has no key gets no answer but 401, and of another user's connections only a few are held. So it does not
    matter how long they take.
    """

    stranger = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.stranger = is_of_another_user(transport)
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}
        if self.stranger and sum(getattr(one, "stranger", False) for one in self.connections) > MOST_STRANGERS:
            transport.abort()


class _Server(uvicorn.Server):
    """A server that leaves the signals of its process alone, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


class AgentHost:
    """Runs episodes, any number at once; sessions and their tokens are here, agents elsewhere."""

    def __init__(
        self, run: RunConfig, tokenizer: Any, generate: GenerateTurn, workers: EpisodeRunner, rows: int | None = None
    ) -> None:
        """
        Args:
            run: the run.
            tokenizer: tokenizer of its model.
            generate: generates a turn.
            workers: run agents.
            rows: number of tokens that the model knows (`token_rows`); None: not known.

        Raises:
            UserError: the model has no chat template that conversations can be rendered with.
        """
        try:
            renderer = ChatRenderer(tokenizer, run.model.system_prompt, run.model.chat_template_kwargs)
        except TemplateError as error:
            raise UserError(f"model.path: {run.model.path}: {error}") from error
        self.notes = renderer.notes
        """What a user should know about the model's chat template, one sentence each."""
        self._workers, self._max_context, self._rows = workers, run.model.max_context, rows
        self._max_turns = {task.key: task.max_turns for task in run.agent_tasks}
        self._endpoint = ChatEndpoint(generate, renderer, len(tokenizer), run.model.path)
        config = uvicorn.Config(
            self._endpoint.app,
            log_config=None,
            access_log=False,
            http=_Door,
            log_level="error",  # whoever connects could fill the log with warnings
            ws="none",
            lifespan="off",
            backlog=1,  # asyncio would try as often in vain, with a traceback each, when no more files can be opened
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self._told_full = -math.inf
        self.address = ""
        """`http://127.0.0.1:<port>`; empty before `start`."""

    async def start(self) -> None:
        """Listen on a free port of this machine's loopback."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an answer is two writes; else +40 ms
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asyncio.get_running_loop().set_exception_handler(self._failed)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="agent endpoint")
        listens = asyncio.create_task(self._server.listens.wait())
        await asyncio.wait([self._serving, listens], return_when=asyncio.FIRST_COMPLETED)
        if not listens.done():
            listens.cancel()
            raise RuntimeError(f"the endpoint of agents does not start at {self.address}")
        listener.listen(BACKLOG)  # asyncio has set its own, as many as it takes at once

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say now and then that no connection can be taken, which asyncio tries again each second; log all else."""
        error = context.get("exception")
        if not ("socket" in context and isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif (now := loop.time()) - self._told_full >= TELL_FULL_S:
            self._told_full = now
            log.warning(
                "the endpoint of agents has %d connections and cannot open more files (%s): further calls wait until a "
                "connection is closed; raise the hard limit of open files (`ulimit -Hn`)",
                *(len(self._server.server_state.connections), error.strerror),
            )

    async def run(self, order: EpisodeOrder) -> Episode:
        """Run an episode to its end. A failure makes it void; nothing is raised but its own cancellation.

        One that another episode may have ended is run again, in a session of its own, at most `ATTEMPTS` times.
        """
        for attempt in range(1, ATTEMPTS + 1):
            episode, again = await self._attempt(order)
            if not again or attempt == ATTEMPTS:
                break
        return episode

    async def _attempt(self, order: EpisodeOrder) -> tuple[Episode, bool]:
        """Run an episode once; return it, and whether it is to be run again."""
        limits = SessionLimits(self._max_context, self._max_turns[order.task], rows=self._rows)
        session, ended = self._endpoint.open(order, limits), math.inf
        try:
            base_url = f"{self.address}/sessions/{session.id}/v1"
            outcome = await self._workers.run(order, base_url, session.id)
            ended = outcome.ended
        except Exception as error:
            outcome = EpisodeOutcome(None, Void(VoidCause.CRASH, f"{type(error).__name__}: {error}"))
        finally:
            await self._endpoint.close(session, ended)
        void = outcome.void
        if outcome.refused and void is not None:
            if session.session.over:  # what the policy did used up context or turns
                outcome = replace(outcome, reward=0.0, void=None, traceback="")
            elif refusal := _last_refusal(session):
                text = f"{void.text}; its last call had been refused: {refusal}"
                outcome = replace(outcome, void=Void(void.cause, text))
        return _episode(session, outcome, time.time()), outcome.again

    def waiting(self) -> list[EpisodeWait]:
        """Return what each open episode waits for, the longest wait first."""
        return sorted((session.wait() for session in self._endpoint.sessions.values()), key=lambda wait: wait.since)

    async def close(self) -> None:
        """Stop listening; episodes that still run are for their callers to cancel, and get no more answers."""
        for session in list(self._endpoint.sessions.values()):
            for task in session.tasks.values():
                task.cancel()
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
            asyncio.get_running_loop().set_exception_handler(None)


def _last_refusal(session: OpenSession) -> str:
    """Return why the last call was refused; '': it was not, or there was none."""
    calls = [step for step in session.steps if step.kind == "generate" or step.name == REFUSED_STEP]
    return calls[-1].detail if calls and calls[-1].name == REFUSED_STEP else ""


def _episode(session: OpenSession, outcome: EpisodeOutcome, now: float) -> Episode:
    """Put the record of an episode together."""
    turns = session.session.turns
    reward, void = outcome.reward, outcome.void
    if void is None and not any(turn.counts for turn in turns):
        refusal = _last_refusal(session)
        text = NO_ANSWERS if turns else ALL_REFUSED + refusal if refusal else NO_CALLS
        reward, void = None, Void(VoidCause.ENVIRONMENT, text)
    return Episode(
        sample_id=session.session.order.sample_id,
        rows=session.session.rows(),
        reward=reward,
        void=void,
        finish_reason="length" if session.session.cut else "stop",
        messages=session.session.conversation(),
        steps=sorted([*session.steps, *outcome.steps], key=lambda step: step.started),
        t_started=session.opened,
        t_first_token=min((turn.finished for turn in turns if turn.finished is not None), default=None),
        t_finished=now,
        metrics=outcome.metrics,
        traceback=outcome.traceback,
    )
