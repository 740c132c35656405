"""Entry point of every process of a run: `python -m streamrl.launcher.entry_point ROLE --run-dir DIR ...`.

A role does not know who started it. It logs to stderr (its supervisor keeps that as logs/<name>.log), ends with 0 when
told to stop, with 75 when it wants to be started again, and with 1 after an error, whose text is its last words.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from streamrl.diagnose.stacks import answer_requests
from streamrl.errors import RunFailed, StartAgain, UserError
from streamrl.run_dir.start_stages import say
from streamrl.runtime.process_plan import CORES, STARTER
from streamrl.runtime.processes import end_with_parent, is_alive, start_warden

LAST_WORDS = "LAST WORDS: "
UNEXPECTED = "LAST WORDS, unexpected: "
"""Of an error that nobody has foreseen: the same process, started again, may be luckier."""
AGAIN = 75
"""Exit code of a process that wants to be started again (EX_TEMPFAIL)."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
"""Of an OSError that a new process would meet, too: the disk is full, or cannot be written."""


def _end_with_starter() -> None:
    """This process ends with the one that started it, and with the launcher or the Ray actor behind that (a rank's
    parent is torch's own launcher), however those end and whatever it is doing then."""
    end_with_parent()
    parent = os.getppid()
    starters = {parent, int(os.environ.get(STARTER, parent))}
    if not all(map(is_alive, starters)):
        sys.exit(1)  # it died before we could ask
    start_warden(sorted(starters))


def _pin() -> None:
    """Keeps this process, and all that it starts, on the CPU cores that the cluster file gives it."""
    if (cores := os.environ.get(CORES)) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def _name(args: argparse.Namespace) -> str:
    """Of this process, as its waits have it."""
    match args.role:
        case "trainer":
            return f"trainer-{os.environ.get('RANK', '0')}"
        case "service" | "rewards":
            return f"{args.role}-{args.site}"
    return str(args.name or args.role)


def _say(args: argparse.Namespace, stage: str) -> None:
    """Says what this process does. Of a trainer's ranks and of an instance's nodes the first one speaks for all."""
    if os.environ.get("RANK", "0") == "0" and args.node == 0:
        say(args.run_dir, "trainer" if args.role == "trainer" else _name(args), stage)


def _role(args: argparse.Namespace) -> Coroutine[Any, Any, None]:
    from streamrl.runtime.process_context import RoleContext

    def context(name: str) -> RoleContext:
        return RoleContext.load(name, args.site, args.run_dir, args.resume)

    def computing(name: str) -> RoleContext:
        _say(args, "choosing the type to compute in")
        return context(name).computing()

    match args.role:
        case "controller":
            from streamrl.controller.controller import Controller

            return Controller(context("controller")).run()
        case "trainer":
            from streamrl.training.trainer_process import TrainerWorker

            return TrainerWorker(computing("trainer")).run()
        case "service":
            from streamrl.generation.site.service import GenerationService

            return GenerationService(context(f"service-{args.site}")).run()
        case "instance":
            from streamrl.generation.instance.engine_config import Place

            place = Place(args.node, args.meeting)
            if place.node > 0:
                from streamrl.generation.instance.node_shard import Shard

                return Shard(computing(args.name), args.pool, place).run()
            from streamrl.generation.instance.instance_process import InstanceProcess

            return InstanceProcess(computing(args.name), args.pool, place).run()
        case "rewards":
            from streamrl.tasks.rewards_process import RewardWorker

            return RewardWorker(context(f"rewards-{args.site}")).run()
    raise UserError(f"no role {args.role!r}")


async def _until_told_to_stop(role: Coroutine[Any, Any, None]) -> None:
    """Runs a role; SIGTERM and SIGINT cancel it, so that it can close what it has open."""
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
        # the role has closed what it had open; asyncio would wait for what still computes in a thread, for minutes
        # where that is a trainer's backward pass
        sys.stderr.flush()
        os._exit(0)


def cause(error: BaseException) -> BaseException:
    """The first real error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """Parses the arguments and runs the role; returns the exit code."""
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
    _end_with_starter()
    _pin()
    _say(args, "importing torch" if args.role == "trainer" else "importing libraries")
    answer_requests(args.run_dir, _name(args))
    logging.basicConfig(
        level=os.environ.get("STREAMRL_LOG_LEVEL", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(_until_told_to_stop(_role(args)))
    except BaseException as error:
        found = cause(error)
        expected = isinstance(found, RunFailed | UserError) or getattr(found, "errno", None) in DISK
        logging.getLogger("streamrl").error("%s failed", args.role, exc_info=None if expected else found)
        text = str(found) if expected else f"{type(found).__name__}: {found}"
        print((LAST_WORDS if expected else UNEXPECTED) + " ".join(text.split()), file=sys.stderr, flush=True)
        return AGAIN if isinstance(found, StartAgain) else 1
    return 0


if __name__ == "__main__":
    # os._exit: libraries' exit handlers and stray threads must not keep a finished role alive
    code = main()
    sys.stderr.flush()
    os._exit(code)
