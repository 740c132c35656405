"""Agents that are programs of their own: they know the endpoint from two environment variables, and print the reward.

    OPENAI_BASE_URL, OPENAI_API_KEY   where the model is, and the key that names the episode
    TASK                              the item as JSON
    last line of standard output      {"reward": 1.0, ...}: the reward and further numbers

What else a program prints, and its standard error, goes to the log. The end of its standard error also comes with the
failure of one that ends with an error, as the traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.agents.agent_result import outcome_of
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome
from streamrl.config.tasks import EpisodeDeadlines
from streamrl.rollouts.void import LONGEST_TRACEBACK, Void, VoidCause
from streamrl.runtime.output_pipe import OutputPipe
from streamrl.runtime.processes import end_with_parent, exit_text, kill_with_children, kill_with_setting
from streamrl.runtime.proxies import beside_proxies
from streamrl.tasks.void_reward import VoidReward, text_of

MOST_TASK_BYTES = 128 * 1024 - 16
"""Most bytes of TASK: Linux gives one variable 128 KiB with its name (MAX_ARG_STRLEN)."""
MOST_PRINTED = 64 * 2**20
"""Bytes of output after which a program is ended."""
MOST_LINE = 2**16
"""Most bytes of the last line."""
PART = 2**16
MARK = "STREAMRL_PROGRAM"
"""Variable with a random value, by which all that a program has started is found."""
LAST_WORDS_S = 1.0
"""Seconds for the output of a program that has ended."""


class TooLargeItem(Exception):
    """An item does not fit into TASK."""


def task_variable(item: Mapping[str, Any]) -> str:
    """Return the value of TASK for an item.

    Raises:
        TooLargeItem: it has too many bytes.
    """
    task = json.dumps(item, ensure_ascii=False)
    if (size := len(task.encode())) > MOST_TASK_BYTES:
        raise TooLargeItem(f"the item has {size:,} bytes; the variable TASK takes {MOST_TASK_BYTES:,}")
    return task


async def play_program(
    command: Sequence[str],
    order: EpisodeOrder,
    base_url: str,
    api_key: str,
    limits: EpisodeDeadlines,
    log: Callable[[bytes], object],
) -> EpisodeOutcome:
    """Run a program that plays one episode; whatever fails makes the episode void.

    It ends with everything that it has started, also when this coroutine is cancelled. What it has started in a session
    of its own is found by the variable `MARK`, which a process that gets another environment lacks; the log names it.
    A tmux server belongs to the program that has started it, as each program has a folder of sockets (`TMUX_TMPDIR`).

    Args:
        command: program and arguments.
        order: the episode.
        base_url: value of OPENAI_BASE_URL; without `/v1`, of ANTHROPIC_BASE_URL.
        api_key: value of OPENAI_API_KEY and ANTHROPIC_API_KEY.
        limits: deadlines, of which `episode_s` counts here; the endpoint sees calls and turns.
        log: takes what the program prints.
    """
    try:
        task = task_variable(order.item)
    except TooLargeItem as error:
        return _void(VoidCause.ENVIRONMENT, str(error))
    own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "TASK": task}
    own |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
    own[MARK] = mark = secrets.token_hex(16)
    sockets = None
    if not os.environ.get("TMUX_TMPDIR"):  # else the first program's server, which ends with it, would be everybody's
        sockets = tempfile.TemporaryDirectory(prefix="streamrl-tmux-", ignore_cleanup_errors=True)
        own["TMUX_TMPDIR"] = sockets.name
    printed = _Printed(log)
    output, errors = await OutputPipe.open(), await OutputPipe.open()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.write_end,
            stderr=errors.write_end,
            env=beside_proxies(os.environ) | own,
            process_group=0,  # not a session: should this process be killed, its warden ends what is in its session
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
    except (OSError, ValueError) as error:
        output.close()
        errors.close()
        if sockets is not None:
            sockets.cleanup()
        return _void(VoidCause.ENVIRONMENT, f"{command[0]} did not start: {error}")
    output.started()
    errors.started()
    reading: asyncio.Future[Any] = asyncio.gather(printed.keep(output), printed.pass_on(errors))
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # told, or cancelled below
    ended = asyncio.ensure_future(_exit_of(process))
    try:
        async with asyncio.timeout(limits.episode_s):
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():  # what it has started may hold the pipes
                await asyncio.wait({reading}, timeout=LAST_WORDS_S)
            if reading.done():
                reading.result()
            code, at = await ended
    except TimeoutError:
        text = f"the episode took more than {limits.episode_s:g} s, when {command[0]} still ran"
        return _void(VoidCause.TIMEOUT, text)
    except _TooMuch:
        return _void(VoidCause.VERIFIER, f"{command[0]} printed more than {MOST_PRINTED >> 20} MiB")
    finally:
        if process.returncode is None:
            kill_with_children(process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
        looking = asyncio.ensure_future(asyncio.to_thread(kill_with_setting, f"{MARK}={mark}"))
        reading.cancel()
        output.close()
        errors.close()
        _, names = await asyncio.gather(ended, looking)
        if names:
            log(f"{command[0]}: ended in a session of its own: {', '.join(names)}\n".encode())
        if sockets is not None:
            sockets.cleanup()
    if code:
        void = Void(VoidCause.CRASH, f"{command[0]} ended with {exit_text(code)}")
        return EpisodeOutcome(None, void, traceback=printed.errors, refused=True, ended=at)
    try:
        reward, metrics = outcome_of(printed.result(command[0]))
    except VoidReward as void:
        return _void(void.cause, text_of(void))
    return EpisodeOutcome(reward, None, metrics=metrics, ended=at)


async def _exit_of(process: asyncio.subprocess.Process) -> tuple[int, float]:
    """Wait until a process has ended; return its exit code, and when that was: what it has started may live on."""
    return await process.wait(), time.monotonic()


class _TooMuch(Exception):
    """A program prints without end."""


class _Printed:
    """What a program prints."""

    def __init__(self, log: Callable[[bytes], object]) -> None:
        self._log = log
        self._bytes = 0
        self._end = self._errors = b""

    async def keep(self, stream: OutputPipe) -> None:
        """Read standard output, and keep its end."""
        while part := await stream.read(PART):
            self._count(part)
            self._end = (self._end + part)[-2 * MOST_LINE :]

    async def pass_on(self, stream: OutputPipe) -> None:
        """Read standard error, and keep its end."""
        while part := await stream.read(PART):
            self._count(part)
            self._errors = (self._errors + part)[-4 * LONGEST_TRACEBACK :]  # a character has four bytes at most

    def _count(self, part: bytes) -> None:
        self._bytes += len(part)
        if self._bytes > MOST_PRINTED:
            raise _TooMuch
        self._log(part)

    @property
    def errors(self) -> str:
        """The end of standard error."""
        return self._errors.decode(errors="replace").strip()[-LONGEST_TRACEBACK:]

    def result(self, program: str) -> object:
        """Return the last line's JSON object; any other JSON may be the model's answer, with the reward forgotten.

        Raises:
            VoidReward: there is no such line.
        """
        lines = self._end.strip().splitlines()
        last = lines[-1] if lines else b""
        try:
            found: object = json.loads(last)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            shown = last[:100].decode(errors="replace")
            raise VoidReward(text=f'{program}: expected {{"reward": ...}} as its last line, got {shown!r}')
        return found


def _void(cause: VoidCause, text: str) -> EpisodeOutcome:
    return EpisodeOutcome(None, Void(cause, text))
