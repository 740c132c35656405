"""The entry point of every process of a run: `python -m streamrl.launcher.entry_point ROLE --run-dir DIR ...`.

A role does not know which backend started it. It logs to stderr (kept as logs/<name>.log) and exits with 0 when told to
stop, with 75 when it wants to be restarted, and with 1 after an error, whose text is its last words; with 74 if a
restarted one would meet the error again and the log (on a full disk) does not take these words.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

from streamrl.diagnose.stacks import answer_requests
from streamrl.errors import RestartNeeded, UserError, cause, is_final, with_limit
from streamrl.imports import importing
from streamrl.machine.open_files import raise_open_files
from streamrl.machine.own_share import core_numbers
from streamrl.machine.user_folders import settle_caches
from streamrl.rollouts.plain_text import shown
from streamrl.run_dir.start_stages import say
from streamrl.runtime.log_lines import log_to_stderr
from streamrl.runtime.process_plan import CORES, SOCKETS_OF_VLLM, STARTER, rank_name
from streamrl.runtime.processes import end_with_parent, is_alive, start_warden

LAST_WORDS = "LAST WORDS: "
UNEXPECTED = "LAST WORDS, unexpected: "
"""Prefix of the last words after an unforeseen error, which a restarted process may not meet again."""
FURTHER_WORDS = "    | "
"""Beginning of the further lines of last words, right below the first one."""
MOST_SAID = 800
"""Characters of an unforeseen error's text in its last words; the log has the whole above them."""
AGAIN = 75
"""Exit code of a process that wants to be restarted (EX_TEMPFAIL)."""
UNSAID = 74
"""Exit code after an error that a restarted process would meet again, if the log did not take its text (EX_IOERR)."""


def end_with_starter() -> None:
    """End this process with its parent, and with the launcher or Ray actor behind that, however those end.

    The two differ for a trainer rank, whose parent is the launcher of its node's ranks.
    """
    end_with_parent()
    parent = os.getppid()
    starters = {parent, int(os.environ.get(STARTER, parent))}
    if not all(map(is_alive, starters)):
        sys.exit(1)  # it died before the signal was set up
    start_warden(sorted(starters))


def _pin() -> None:
    """Pin this process, and all that it starts, to the CPU cores that the cluster file gives it.

    Raises:
        UserError: this machine has none of them.
    """
    if not (cores := os.environ.get(CORES)) or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (OSError, ValueError, OverflowError) as error:
        usable = ", ".join(map(str, sorted(core_numbers())))
        raise UserError(
            f"the cluster file pins this process to the CPU cores {cores}, and that failed: {error}; change `cores` to "
            f"some of those that it may use here ({usable}), or leave it out"
        ) from error


def _settle_sockets() -> None:
    """Let multiprocessing have its sockets in the launcher's folder for sockets, which goes with the launcher.

    Otherwise it makes a folder of its own, which stays: no exit handler runs in a process that `end` or a signal ends.
    """
    if folder := os.environ.get(SOCKETS_OF_VLLM):
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = folder


def _name(args: argparse.Namespace) -> str:
    """Return the name of this process, as its waits use it."""
    match args.role:
        case "trainer":
            return rank_name(int(os.environ.get("RANK", "0")))
        case "service" | "rewards" | "agents":
            return f"{args.role}-{args.site}"
    return str(args.name or args.role)


def _say(args: argparse.Namespace, stage: str) -> None:
    """Record what this process does; the first of a trainer's ranks, or of an instance's nodes, speaks for all.

    To other roles, RANK is what a job of torchrun may have left in the environment.
    """
    trains = args.role == "trainer"
    if args.node == 0 and not (trains and os.environ.get("RANK", "0") != "0"):
        say(args.run_dir, "trainer" if trains else _name(args), stage)


def _role(args: argparse.Namespace) -> Coroutine[Any, Any, None]:
    from streamrl.runtime.process_context import RoleContext

    def context(name: str) -> RoleContext:
        return RoleContext.load(name, args.site, args.run_dir, args.resume)

    def computing(name: str, device: int = 0) -> RoleContext:
        _say(args, "choosing the type to compute in")
        return context(name).computing(device)

    match args.role:
        case "controller":
            from streamrl.controller.controller import Controller

            return Controller(context("controller")).run()
        case "trainer":
            from streamrl.training.trainer_process import TrainerProcess

            return TrainerProcess(computing(_name(args), int(os.environ["LOCAL_RANK"]))).run()
        case "service":
            from streamrl.generation.site.service import GenerationService

            return GenerationService(context(f"service-{args.site}")).run()
        case "instance":
            from streamrl.generation.instance.engine_config import Place

            place = Place(args.node, args.meeting)
            if place.node > 0:
                from streamrl.generation.instance.node_shard import NodeShard

                return NodeShard(computing(args.name), args.pool, place).run()
            from streamrl.generation.instance.instance_process import InstanceProcess

            return InstanceProcess(computing(args.name), args.pool, place).run()
        case "rewards":
            from streamrl.tasks.rewards_process import RewardsProcess

            return RewardsProcess(context(f"rewards-{args.site}")).run()
        case "agents":
            from streamrl.agents.agents_process import AgentsProcess

            return AgentsProcess(context(f"agents-{args.site}")).run()
    raise UserError(f"no role {args.role!r}")


async def _until_told_to_stop(role: Coroutine[Any, Any, None]) -> None:
    """Run a role; SIGTERM and SIGINT cancel it, so that it closes what it has open."""
    task = asyncio.ensure_future(role)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    # the role has closed everything; asyncio would still wait for threads that compute, for minutes in a trainer's
    # backward pass, or for ever
    end(0)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose end waits for no thread, also after an error: `end` leaves none."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing."""


def _run(role: Coroutine[Any, Any, None]) -> None:
    """Run a role to its end; threads that compute, as a ranker's refit, may still do so then."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(_until_told_to_stop(role))


def end(code: int) -> NoReturn:
    """End this process now: libraries' exit handlers and stray threads must not keep a finished role alive."""
    with contextlib.suppress(OSError):  # a log on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _last_words(text: str) -> str:
    """Return a foreseen error's text with its line breaks; no further line begins at the margin."""
    lines = [line.rstrip() for line in shown(text).splitlines() if line.strip()]
    return LAST_WORDS + f"\n{FURTHER_WORDS}".join(lines)


def _unexpected(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {with_limit(error)}".split())
    return UNEXPECTED + (text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]} ...")


def main() -> int:
    """Parse the arguments and run the role; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--site", default="")
    parser.add_argument("--pool", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--meeting", default="")
    parser.add_argument("--resume", action="store_true", default=os.environ.get("STREAMRL_RESUME") == "1")
    args = parser.parse_args()
    end_with_starter()
    log_to_stderr(os.environ.get("STREAMRL_LOG_LEVEL", "INFO"))
    settle_caches()  # on a Ray node, this user's home may be another one than the launcher's
    raise_open_files()
    _settle_sockets()
    try:
        _pin()  # before there are other threads, which would stay as they are
        _say(args, "importing torch" if args.role == "trainer" else "importing libraries")
        answer_requests(args.run_dir, _name(args))
        with importing():
            role = _role(args)
        _run(role)
    except BaseException as error:
        found = cause(error)
        expected = isinstance(found, RestartNeeded) or is_final(found)
        logging.getLogger("streamrl").error("%s failed", args.role, exc_info=None if expected else found)
        code = AGAIN if isinstance(found, RestartNeeded) else 1
        try:
            print(_last_words(str(found)) if expected else _unexpected(found), file=sys.stderr, flush=True)
        except OSError:
            return UNSAID if is_final(found) else code
        return code
    return 0


if __name__ == "__main__":
    end(main())
