"""`streamrl why-stuck DIR`: says whether a run makes progress and, if not, which process waits for which."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from streamrl.diagnose.facts import Facts, ProcessFacts
    from streamrl.diagnose.stuck import Verdict

LOOK_S = 1.5
"""Seconds for the whole inspection, which takes half a second to a second."""
LONGEST_LOOK_S = 6.0
"""Seconds allowed on an overloaded machine; a hanging file system is reported after `LOOK_S`."""
PRIORITY = -10
"""Niceness of the inspection, so that a run that uses all cores does not slow it down (where permitted)."""
STACK_LINES = 12
"""Lines shown per process, unless --stacks all."""
FRAMES = 4
"""Stack frames shown per thread."""
WAIT_FOR_WORK = ("/threading.py", "/selectors.py", "/concurrent/futures/thread.py", "/queue.py")
"""Files of the innermost frame of an idle thread."""
SHOWN_OF_LOOPS = {"answers": "turns", "blocked": "BLOCKED", "none": "none yet", "unknown": "-"}


@click.command(name="why-stuck")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--stacks",
    type=click.Choice(["blocked", "all"]),
    is_flag=False,
    flag_value="blocked",
    metavar="[blocked|all]",
    help="Show the stacks of the blocked processes (12 lines each), or all stacks of all processes.",
)
def command(directory: Path, stacks: str | None) -> None:
    """Say whether the run in DIR makes progress and, if not, which process waits for which, and since when.

    The first line is a sentence that begins with healthy, slow, stuck, starting or ended. The command works at any
    time, on the machine of the run, and answers within two seconds.

    Exit code: 3 the run is stuck, 1 it has ended without being done, 2 DIR holds no run, 0 otherwise.

    \b
    Examples:
      streamrl why-stuck runs/demo
      streamrl why-stuck runs/demo --stacks
      streamrl why-stuck runs/demo --stacks all
    """
    from streamrl.diagnose.stuck import STUCK, judge
    from streamrl.report.terminal import terminal

    with _raised_priority():
        facts = _look(directory, stacks is not None)
    if facts is None:
        _write(f"stuck: {directory} cannot be read: its file system hangs, or this machine is overloaded\n")
        sys.exit(STUCK)
    verdict, console = judge(facts), terminal()
    with console.capture() as text:
        code = ErrorCode.DISK if facts.disk_full else ErrorCode.HANG
        sentence = code.refer(verdict.sentence) if verdict.exit_code == STUCK else verdict.sentence
        console.print(sentence, soft_wrap=True)
        _show(facts, verdict, console)
        if stacks is not None:
            _show_stacks(facts, verdict, stacks == "all", console)
    _write(text.get())
    sys.exit(verdict.exit_code)


def _write(text: str) -> None:
    """Write everything at once; a reader that has seen enough (`| head -1`) changes no exit code."""
    try:
        click.echo(text, nl=False, color=True)  # the console has left out colours where there are to be none
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in its buffer would fail again as Python ends
        os.close(nowhere)


def _look(directory: Path, threads: bool) -> Facts | None:
    """Inspect the run; None: that takes too long.

    Raises:
        UserError: the folder holds no run.
    """
    from streamrl.diagnose.snapshot import collect
    from streamrl.run_dir import layout

    found: list[Facts | Exception] = []

    def look() -> None:
        try:
            if not any((directory / name).exists() for name in (layout.STATUS, layout.SITE_STATUS, layout.PROCESSES)):
                raise FileNotFoundError(directory)
            found.append(collect(directory, threads))
        except Exception as error:
            found.append(error)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(LOOK_S)
    if not _waits_for_disk(looking):
        looking.join(LONGEST_LOOK_S - LOOK_S)
    if not found:
        return None
    if isinstance(found[0], Exception):
        if not isinstance(found[0], OSError | ValueError):
            raise found[0]
        from streamrl.run_dir.status import read_status

        read_status(directory)  # raises an error that says what is wrong with the folder
        raise UserError(f"{directory} cannot be read: {found[0]}") from found[0]
    return found[0]


@contextlib.contextmanager
def _raised_priority() -> Iterator[None]:
    """Raise the priority of this process and its new threads, if the user may."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, PRIORITY))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def _waits_for_disk(thread: threading.Thread) -> bool:
    """Whether a thread of this process is in an uninterruptible wait (Linux; False elsewhere)."""
    try:
        text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "D"


def _show(facts: Facts, verdict: Verdict, console: Console) -> None:
    """Print the details, the chain of waits, and the processes."""
    from streamrl.report.terminal import plain_table

    for detail in verdict.details:
        console.print(f"  {detail}", soft_wrap=True)
    if verdict.edges:
        table = plain_table("who waits", "for", "since", "limit", "that is")
        for edge in verdict.edges:
            limits = (f"{edge.since_s:.0f} s", f"{edge.limit_s:.0f} s")
            table.add_row(edge.waiter, edge.waits_for, *limits, edge.target or "-")
        console.print("", table)
    if any(one.pid is not None for one in facts.processes) or verdict.state != "ended":
        table = plain_table("process", "pid", "state", "CPU", "event loop", "last said")
        for one in facts.processes:
            cpu = "-" if one.cpu is None else f"{100 * one.cpu:.0f} %"
            loop = SHOWN_OF_LOOPS[one.loop]
            table.add_row(one.name, str(one.pid or "-"), _state(one), cpu, loop, _said(one, facts))
        console.print("", table)


def _state(one: ProcessFacts) -> str:
    if one.exit_code is not None:
        return f"ended with {one.exit_code}"
    return "not here" if one.alive == "unknown" else one.alive


def _said(one: ProcessFacts, facts: Facts) -> str:
    """Describe a process's last sign of life."""
    if facts.run is None:
        return one.doing or "-"
    silent = facts.run.silent_s.get(one.site, 0.0)
    working = f"{one.doing}, {one.running} requests" if one.running else one.doing
    ago = facts.age if one.name == "controller" else silent
    return f"{working}, {ago:.1f} s ago" if ago > 0 and working else working or "-"


def busy_threads(lines: Sequence[str]) -> list[str]:
    """Return the busy threads of a faulthandler dump, four frames each, innermost first."""
    threads: list[list[str]] = []
    for line in lines:
        if line.endswith("(most recent call first):"):
            threads.append([line])
        elif threads and line.strip():
            threads[-1].append(line)
    busy = [one for one in threads if len(one) > 1 and not any(place in one[1] for place in WAIT_FOR_WORK)]
    return [line for one in busy for line in one[: FRAMES + 1]]


def _show_stacks(facts: Facts, verdict: Verdict, everything: bool, console: Console) -> None:
    """Print the busy threads and the asyncio tasks of blocked or involved processes, or of all."""
    for one in facts.processes:
        if not everything and not (one.name in verdict.involved or one.loop == "blocked"):
            continue
        lines = [*busy_threads(one.threads), *one.tasks]
        if everything:
            lines = [*one.threads, *one.tasks]
        if not lines:
            continue
        console.print(f"\n{one.name} (pid {one.pid})", soft_wrap=True)
        printed = lines if everything else lines[:STACK_LINES]
        for line in printed:
            console.print(f"  {line}", soft_wrap=True)
        if len(lines) > len(printed):
            console.print(f"  ... {len(lines) - len(printed)} lines more: --stacks all", soft_wrap=True)
