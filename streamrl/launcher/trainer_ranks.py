"""Start the trainer's ranks of one node, and end them together.

    python -m streamrl.launcher.trainer_ranks --ranks 2 [--nodes 2 --node 1 --meeting HOST:PORT] -- COMMAND ...

torch's elastic launcher is not used: its rendezvous is a TCP store that listens on all interfaces, has no
authentication, and holds pickles that the launcher loads. Here ranks get their numbers by the environment, and one
node's ranks meet through a file in a private folder of that node (`training/rank_store.py`), so that nothing listens
for the rendezvous. Collectives listen on the loopback interface, or over several nodes on the one that leads to the
meeting (NCCL where it sends weights to other nodes: `nccl_environment` in `weights/backends/broadcast.py`).

A rank that fails ends the others, and this process ends as it did (the same exit code or signal). SIGTERM is passed on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from streamrl.errors import UserError
from streamrl.launcher.entry_point import LAST_WORDS, end_with_starter
from streamrl.runtime.interfaces import LOOPBACK_INTERFACE, collectives_on, interface_towards
from streamrl.runtime.process_plan import RANK_MEETING
from streamrl.runtime.processes import end_with_parent
from streamrl.runtime.warden import wait_for_an_end
from streamrl.scratch_folders import ScratchFolder

END_S = 3.0
"""Seconds from SIGTERM to SIGKILL for the ranks that outlive a failed one."""


def rank_environment(rank: int, local_rank: int, ranks: int, nodes: int, meeting: str) -> dict[str, str]:
    """Return the environment by which a rank knows its place.

    Args:
        rank: number among all ranks.
        local_rank: number among those of its node.
        ranks: ranks of each node.
        nodes: nodes.
        meeting: path of the file, or host:port, at which the ranks meet.
    """
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks * nodes, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()} | {RANK_MEETING: meeting}


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Start one process per environment; return 0, or the exit code of the first that failed (negative: its signal)."""
    started: list[subprocess.Popen[bytes]] = []
    stopped = False

    def stop(number: int = signal.SIGTERM, _frame: FrameType | None = None) -> None:
        nonlocal stopped
        stopped = True
        for one in started:
            if one.poll() is None:
                one.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for own in environments:
        started.append(subprocess.Popen(command, env=os.environ | own, preexec_fn=end_with_parent))
    if stopped:
        stop()
    living = list(started)
    while living:
        wait_for_an_end([one.pid for one in living])
        failed = [code for one in living if (code := one.poll())]
        living = [one for one in living if one.returncode is None]
        if failed and not stopped:
            stop()
            end = time.monotonic() + END_S
            for one in living:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(max(0.0, end - time.monotonic()))
            for one in living:
                one.kill()
                one.wait()
            return failed[0]
    return 0 if stopped else max((one.returncode for one in started), default=0)


def _end_as(code: int) -> int:
    """End this process by the signal -`code`, so that whoever looks sees how the rank ended; else return the code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own
        if -code not in (signal.SIGKILL, signal.SIGSTOP):  # these have no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def main() -> int:
    """Parse the arguments and run the ranks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0, help="number of this node")
    parser.add_argument("--meeting", default="", help="host:port at which the ranks of several nodes meet")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    end_with_starter()  # its warden ends the whole process group, to which the ranks belong
    try:
        interface = interface_towards(args.meeting.rpartition(":")[0]) if args.nodes > 1 else LOOPBACK_INTERFACE
    except UserError as error:
        print(f"{LAST_WORDS}{error}", file=sys.stderr, flush=True)
        return 1
    os.environ.update(collectives_on(interface))
    with ScratchFolder() as folder:
        meeting = args.meeting if args.nodes > 1 else str(folder / "store")
        first = args.node * args.ranks
        places = [rank_environment(first + n, n, args.ranks, args.nodes, meeting) for n in range(args.ranks)]
        code = run_ranks(args.command, places)
    return _end_as(code)


if __name__ == "__main__":
    sys.exit(main())
