"""An agent worker: one process with one event loop, in which many agents play at once.

    python -m streamrl.agents.worker PARENT

It speaks with its owner (`workers.py`) in frames over its standard input and output. Before any code of a user is
imported both are put aside, so that whatever agents and tools print goes to the log. It ends with its owner.

Three threads keep it honest: the main thread runs the event loop; one reads frames, and ends the process when the owner
has gone; one tells the owner that the process lives, and which agent blocks the loop if one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from streamrl.agents.agent_function import AgentFunction, load_agent
from streamrl.agents.agent_result import outcome_of
from streamrl.agents.client import AgentClient, is_bad_request, is_over
from streamrl.agents.episode import EpisodeOutcome
from streamrl.agents.live_episode import CURRENT, OWN_LOOP, EpisodeThreads, LiveEpisode
from streamrl.agents.worker_frames import (
    ALIVE_S,
    Begin,
    Blocked,
    CleanedUp,
    Doing,
    FramePipe,
    GiveUp,
    Play,
    Played,
    Ready,
    Spoiled,
    WorkerAlive,
)
from streamrl.config.tasks import AgentTask
from streamrl.errors import UserError
from streamrl.machine.open_files import raise_open_files
from streamrl.rollouts.void import Void, VoidCause
from streamrl.runtime.processes import end_copy, end_with_parent, forget_main
from streamrl.tasks.void_reward import VoidReward, cause_of, failures_of, one_line, traceback_of, void_text

UNWIND_S = 5.0
"""Seconds that a cancelled agent has to end what it has begun: mcp takes up to 4.5 s until it kills a server."""
AGAIN_S = 1.0
"""Seconds after which a task that its agent has left behind is cancelled again: it may have swallowed the first one."""
GRACE_S = 2.0
"""Seconds after that in which what is left is cancelled again and again."""
PULSE_S = 0.25
"""Seconds between two signs of life of the event loop."""
MOST_CHAINED = 16
"""Most exceptions that led to each other among which the first is looked for."""
NO_LOOP = ("no running event loop", OWN_LOOP)
"""Ends of what is said of code that awaits in a copy of the worker, where the event loop does not run."""
OWN_FOLDER = Path(__file__).parent


async def _result_of(agent: AgentFunction, item: dict[str, Any], client: AgentClient, base_url: str) -> EpisodeOutcome:
    """Run an agent to its end; whatever it raises is its outcome. A process that it has forked ends there."""
    worker = os.getpid()
    try:
        found = await _of_worker(worker, agent(item, client))
        reward, metrics = outcome_of(found)
        return EpisodeOutcome(reward, None, metrics=metrics)
    except asyncio.CancelledError as error:
        return _void(VoidCause.VERIFIER, "the agent cancelled itself", error)
    except BaseException as error:
        found = [one for one in failures_of(error) if isinstance(one, VoidReward) or not is_over(one, base_url)]
        if not found:
            return EpisodeOutcome(0.0, None)
        failed = found[0]
        void = _void(cause_of(failed), void_text(failed), error)
        if isinstance(failed, VoidReward):  # it says what has failed
            return void
        traceback.print_exc()
        return replace(void, refused=is_bad_request(failed, base_url))


async def _of_worker(worker: int, running: Awaitable[Any]) -> Any:
    """Wait for a user's code; in a copy of the worker, which that code has forked, end the process there."""
    try:
        found = await running
    except BaseException as error:
        if os.getpid() != worker and not isinstance(error, SystemExit):
            if any(isinstance(one, RuntimeError) and str(one).endswith(NO_LOOP) for one in _led_to(error)):
                _say_copy_awaits()
            else:
                traceback.print_exc()
        end_copy(worker, error)
        raise
    end_copy(worker)
    return found


def _led_to(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, at most `MOST_CHAINED`: they may be a ring."""
    seen: BaseException | None = error
    for _ in range(MOST_CHAINED):
        if seen is not None:
            yield seen
            seen = seen.__cause__ or seen.__context__


def _say_copy_awaits() -> None:
    text = (
        f"process {os.getpid()}, which an agent has forked, ends because it awaits something: the event loop stays "
        "with the agent's worker. Let it call the model by an ordinary client of its own, and end it by os._exit"
    )
    print(text, file=sys.stderr, flush=True)


class _OwnSelector(selectors.DefaultSelector):
    """The selector of the worker's event loop, of which no copy of the process makes another round.

    It would take answers and frames from the sockets and pipes that it shares with the worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> Any:
        if os.getpid() != self._pid:
            _say_copy_awaits()
        end_copy(self._pid)
        return super().select(timeout)


def _ended(playing: asyncio.Task[EpisodeOutcome]) -> EpisodeOutcome:
    """Return the outcome of an agent that has ended; its exception may be such that even looking at it fails."""
    try:
        return playing.result()
    except BaseException as error:
        return _void(VoidCause.VERIFIER, one_line(error), error)


def _void(cause: VoidCause, text: str, error: BaseException) -> EpisodeOutcome:
    return EpisodeOutcome(None, Void(cause, text), traceback=traceback_of(error, OWN_FOLDER))


class AgentWorker:
    """Plays episodes in the event loop of this process."""

    def __init__(self, pipe: FramePipe, tasks: dict[str, AgentTask], agents: dict[str, AgentFunction | None]) -> None:
        self.pipe, self.tasks, self.agents = pipe, tasks, agents
        self.pulse = 0
        """Grows as long as the event loop runs."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._new_task)  # type: ignore[arg-type]
        self._loop.set_default_executor(EpisodeThreads())
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._pool = httpx2.AsyncHTTPTransport(verify=False, trust_env=False, limits=limits)
        self._playing: dict[str, tuple[LiveEpisode, asyncio.Task[None]]] = {}
        self._episodes: weakref.WeakKeyDictionary[asyncio.Task[Any], LiveEpisode] = weakref.WeakKeyDictionary()

    async def serve(self) -> None:
        """Play whatever the owner orders, until it has gone."""
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()
        while True:
            self.pulse += 1
            await asyncio.sleep(PULSE_S)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **named: Any) -> Any:
        """Make a task, and note the episode whose agent asks for it."""
        task = asyncio.Task(coro, loop=loop, **named)
        if (episode := CURRENT.get()) is not None:
            episode.tasks.add(task)
            self._episodes[task] = episode
        return task

    def _read(self) -> None:
        while (frame := self.pipe.next()) is not None:
            self._loop.call_soon_threadsafe(self._take, frame)
        os._exit(0)

    def _take(self, frame: Begin | Play | GiveUp) -> None:
        match frame:
            case Play():
                limits, tell = self.tasks[frame.order.task].deadlines, partial(self._tell, frame.api_key)
                episode = LiveEpisode(frame.order, limits, tell, frame.api_key)
                playing = self._loop.create_task(self._play(frame, episode))
                self._playing[frame.api_key] = episode, playing
                playing.add_done_callback(partial(self._has_played, frame.api_key))
            case GiveUp() if frame.api_key in self._playing:
                episode, _ = self._playing[frame.api_key]
                episode.expire("given up", VoidCause.CRASH)  # its owner has forgotten it

    def _watch(self) -> None:
        """Tell the owner that this process lives, and once, that an agent blocks the event loop."""
        seen: tuple[int, LiveEpisode | None] = self.pulse, None
        unchanged, told, alive = 0.0, False, ALIVE_S
        before = time.monotonic()
        while True:
            time.sleep(PULSE_S)
            now = time.monotonic()
            passed, before = min(now - before, 2 * PULSE_S), now  # a machine that slept has blocked nothing
            last, seen = seen, (self.pulse, self._running())  # several may block one round of the loop, one by one
            unchanged = unchanged + passed if seen == last else 0.0
            alive += passed
            if not told and unchanged >= self._may_block_s(seen[1]):
                told = True
                self.pipe.send(self._blocked(seen[1], unchanged))
            if alive >= ALIVE_S:
                alive = 0.0
                self.pipe.send(WorkerAlive())

    def _running(self) -> LiveEpisode | None:
        """Return the episode whose code runs in the event loop at this moment; None: it is not known."""
        task = asyncio.current_task(self._loop)
        return self._episodes.get(task) if task is not None else None

    def _may_block_s(self, episode: LiveEpisode | None) -> float:
        """Return how many seconds an episode may block the event loop."""
        if episode is not None:
            return episode.limits.tool_s
        return max(task.deadlines.tool_s for task in self.tasks.values())

    def _blocked(self, episode: LiveEpisode | None, seconds: float) -> Blocked:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "unknown code"
        if frame is not None:
            traceback.print_stack(frame)
            code = frame.f_code
            where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        return Blocked(api_key=episode.api_key if episode else "", where=where, seconds=seconds)

    async def _play(self, play: Play, episode: LiveEpisode) -> None:
        order = play.order
        client = AgentClient(episode, play.base_url, play.api_key, self._pool)
        agent = self.agents[order.task]
        assert agent is not None
        context = contextvars.copy_context()
        context.run(CURRENT.set, episode)
        playing = context.run(self._loop.create_task, _result_of(agent, order.item, client, play.base_url))
        episode.begin()
        await _first(playing, episode.over)
        episode.end()
        void = episode.void
        if void is None:  # what the agent leaves behind has no part in the episode, and does not hold it up
            episode.note_left()
            self._send_outcome(play, replace(_ended(playing), steps=episode.steps))
        if spoiled := await self._clean_up(episode, playing):
            self.pipe.send(Spoiled(why=spoiled))
        episode.pool.shutdown(wait=False, cancel_futures=True)
        if void is not None:  # now the agent has ended as well, and its steps are known
            self._send_outcome(play, EpisodeOutcome(None, void, steps=episode.steps))
        self.pipe.send(CleanedUp(api_key=play.api_key))
        with contextlib.suppress(Exception):
            await client.close()

    def _send_outcome(self, play: Play, outcome: EpisodeOutcome) -> None:
        self.pipe.send(Played(api_key=play.api_key, outcome=outcome))

    def _has_played(self, api_key: str, playing: asyncio.Task[None]) -> None:
        del self._playing[api_key]
        if playing.cancelled() or playing.exception() is not None:
            _end_process(playing)

    async def _clean_up(self, episode: LiveEpisode, playing: asyncio.Task[EpisodeOutcome]) -> str:
        """End what an agent has left behind; return what does not end, '': all has ended.

        The agent itself is cancelled first, once: libraries end their own tasks, which it waits for, and the clean-up
        of neither is to be cut. What is left once it has ended is cancelled every `AGAIN_S`; what is left after
        `UNWIND_S`, the agent too, again and again.
        """
        began, held = time.monotonic(), ""
        unwound = began + UNWIND_S
        cancelled: dict[asyncio.Task[Any], float] = {}
        while (left := [task for task in episode.tasks if not task.done()]) or episode.threads:
            now = time.monotonic()
            held = f"{len(left)} coroutines and {len(episode.threads)} calls in threads"
            if now >= unwound + GRACE_S:
                return f"{held} of episode {episode.order.sample_id} do not end"
            for task in left if playing.done() or now >= unwound else [playing]:
                last = cancelled.get(task)
                if last is None or now >= unwound or (task is not playing and now >= last + AGAIN_S):
                    cancelled[task] = now
                    task.cancel()
            if left:
                await asyncio.wait(left, timeout=PULSE_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(PULSE_S)
        if (took := time.monotonic() - began) >= AGAIN_S:
            print(f"episode {episode.order.sample_id} waited {took:.1f} s for the end of {held}", file=sys.stderr)
        return ""

    def _tell(self, api_key: str, tools: str, since: float) -> None:
        self.pipe.send(Doing(api_key=api_key, tools=tools, since=since))


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait until a task is done or an event is set."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _end_process(own: asyncio.Task[None]) -> None:
    """End this process, as a task of its own has ended, which only the code of some agent can have cancelled.

    No episode gets an outcome: whose fault it was, the owner finds out.
    """
    with contextlib.suppress(OSError):  # the owner has gone
        try:
            own.result()
        except BaseException:
            traceback.print_exc()
    os._exit(1)


def _private_pipe() -> FramePipe:
    """Put standard input and output aside for frames; what is printed goes where standard error goes."""
    pipe = FramePipe(os.dup(0), os.dup(1))  # not inherited by what agents start
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    return pipe


def main() -> None:
    """Serve the owner whose process id is the only argument."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before the signal was set up
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides
    pipe = _private_pipe()
    faulthandler.enable()
    forget_main()
    raise_open_files()  # a connection for each episode
    begin = pipe.next()
    if not isinstance(begin, Begin):
        os._exit(1)
    tasks = {task.key: task for task in map(AgentTask.model_validate, begin.tasks)}
    try:
        agents = {key: load_agent(task) for key, task in tasks.items()}
    except UserError as error:
        pipe.send(Ready(problem=str(error)))
        os._exit(0)

    async def serve() -> None:
        worker = AgentWorker(pipe, tasks, agents)
        pipe.send(Ready(problem=""))
        await worker.serve()

    loop = asyncio.SelectorEventLoop(_OwnSelector())
    asyncio.set_event_loop(loop)
    serving = loop.create_task(serve())
    serving.add_done_callback(_end_process)
    while True:  # a task or callback of an agent that exits, or stops the loop, ends nothing but itself
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


if __name__ == "__main__":
    main()
