"""The condition of each process of a run: whether it works, and if not, why. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from streamrl.diagnose.facts import IDLE_CPU, SILENT_AFTER_S, Facts, ProcessFacts, RunFacts, innermost
from streamrl.transport.refusals import STRANGER

ENGINE = "VLLM::"
"""How the names of vLLM's own processes begin. Another child that has ended, as a tool that was called once, leaves a
zombie until its parent looks, which alone holds nothing up."""

TURNED_AWAY = {
    "protocol version": "messages of it in another version of the protocol (the same streamrl is needed at both sites)",
    "hello": "hellos of it (its own last words say why)",
    "wrong key": "messages of it with another key",
    "unknown key": "handshakes with a key that is not known here, maybe of this site",
}
"""Refusals that leave a site silent although it is there, by cause."""


class Rank(IntEnum):
    """Conditions of a process; a higher one explains a standstill better."""

    WORKS = 0
    UNKNOWN = 1
    IDLE = 2
    CIRCLE = 3
    CALL = 4
    DISK = 5
    HANGS = 6
    AWAY = 7
    STOPPED = 8
    DEAD = 9


@dataclass(frozen=True)
class Condition:
    """The condition of a process; `text` continues a sentence that begins with its name."""

    rank: Rank
    text: str


def condition(one: ProcessFacts | None, facts: Facts) -> Condition:
    """Return a process's condition, with its start-up stage if it is still starting."""
    if one is None:
        return Condition(Rank.UNKNOWN, "is not known here")
    found = _condition(one, facts)
    if not one.stage:
        return found
    return replace(found, text=f"{found.text}, in its start ({one.stage}, {seconds(one.stage_s)})")


def _condition(one: ProcessFacts, facts: Facts) -> Condition:
    if (why := fatal(one, facts)) is not None:
        return why
    silent = facts.run.silent_s.get(one.site) if facts.run is not None else None
    if facts.run is not None and silent is not None and one.site in facts.run.left:
        return Condition(Rank.AWAY, f"is away: its site said goodbye {seconds(silent)} ago and is to be started again")
    if silent is not None and silent > SILENT_AFTER_S:
        for proxy in facts.processes:
            if proxy.role == "proxy" and (why := fatal(proxy, facts)) is not None:
                return Condition(why.rank, f"is out of reach: the proxy that stands for the links {why.text}")
        assert facts.run is not None
        limit = "" if facts.run.absence_s is None else f" (the run ends at absence_s, {seconds(facts.run.absence_s)})"
        return Condition(
            Rank.AWAY,
            f"is out of reach: its site has been silent for {seconds(silent)}{limit}{_why_silent(one, facts.run)}",
        )
    if facts.run is not None and (deaf := facts.run.controller_silent_s.get(one.site, 0.0)) > SILENT_AFTER_S:
        text = f"is out of reach: its site is heard, but has heard nothing of the controller for {seconds(deaf)}"
        return Condition(Rank.AWAY, text + beyond(facts.run.obstacle_to(one.site)))
    cpu = one.cpu
    if cpu is None:
        state = f"last said {one.doing!r}" if one.doing else "has said nothing yet"
        return Condition(Rank.UNKNOWN, f"{state}, and cannot be looked at from here")
    where = f", in {frame}" if (frame := innermost(one.threads)) else ""
    used = f"{100 * cpu:.0f} % CPU"
    if one.alive == "disk-sleep":
        return Condition(Rank.DISK, f"waits for a disk or a network file system (state D, {used}){where}")
    idle = cpu < IDLE_CPU and one.alive != "running"
    blocked = one.loop == "blocked" and not facts.disk_full  # its answer would have to be written
    if blocked and idle:
        return Condition(Rank.HANGS, f"hangs: its event loop is blocked and it computes nothing ({used}){where}")
    if blocked:
        return Condition(Rank.CALL, f"is busy in one call: its event loop is blocked ({used}){where}")
    if idle:
        return Condition(Rank.IDLE, f"computes nothing ({used})" + (", but answers" if one.loop == "answers" else ""))
    return Condition(Rank.WORKS, f"computes ({used})")


def beyond(text: str) -> str:
    """Return a text as a further part of a sentence; '' stays ''."""
    return f"; {text}" if text else ""


def _why_silent(one: ProcessFacts, run: RunFacts | None) -> str:
    """Continue a sentence on a silent site: with what was refused from it; if nothing was, with what is then down."""
    refused = run.refused if run is not None else {}
    found = []
    for cause, what in TURNED_AWAY.items():
        peers = {STRANGER} if cause == "unknown key" else {f"site {one.site}", f"service-{one.site}"}
        if count := sum(refused.get(cause, {}).get(peer, 0) for peer in peers):
            found.append(f"{count} {what}")
    if not found and run is not None and (text := run.obstacle_to(one.site)):
        return beyond(text)
    if not found:
        return ", the link or the site is down"
    return f"; turned away since the controller started: {', '.join(found)}"


def fatal(one: ProcessFacts, facts: Facts) -> Condition | None:
    """Return why a process cannot continue by itself, or None; an instance that exited with 0 was asked to leave."""
    if (one.role == "instance" and one.exit_code == 0) or (one.alive == "gone" and facts.elsewhere):
        return None
    if one.exit_code is not None:
        words = one.last_words.splitlines()[0].removeprefix(one.name).strip() if one.last_words else ""
        return Condition(Rank.DEAD, words or f"ended with exit code {one.exit_code}")
    if facts.disk_full and facts.launcher_lives and one.alive == "gone":
        return Condition(Rank.DEAD, "is gone, and the launcher cannot write what it has done about it")
    unnoticed = "and the launcher has not noticed" + (
        ": it is stopped itself" if any(p.role == "launcher" and p.alive == "stopped" for p in facts.processes) else ""
    )
    match one.alive:
        case "zombie":
            return Condition(Rank.DEAD, f"has died, {unnoticed}")
        case "gone":
            return Condition(Rank.DEAD, f"is gone, {unnoticed}")
        case "stopped":
            return Condition(Rank.STOPPED, f"is stopped (SIGSTOP): continue it with kill -CONT {one.pid}")
        case "traced":
            return Condition(Rank.STOPPED, "is held by a debugger")
    for child in one.children:
        if child.alive == "zombie":
            if not child.name.startswith(ENGINE) and not (facts.late and (one.cpu or 0.0) < IDLE_CPU):
                continue
            return Condition(Rank.DEAD, f"has lost its process {child.name} (pid {child.pid}), which has died")
        how = "is held by a debugger" if child.alive == "traced" else "is stopped (SIGSTOP)"
        remedy = "" if child.alive == "traced" else f": continue it with kill -CONT {child.pid}"
        return Condition(Rank.STOPPED, f"needs its process {child.name} (pid {child.pid}), which {how}{remedy}")
    return None


def named(one: ProcessFacts) -> str:
    return one.name if one.pid is None else f"{one.name} (pid {one.pid})"


def seconds(seconds: float) -> str:
    if seconds == float("inf"):
        return "ever"
    return f"{seconds:.0f} s" if seconds < 10_000 else f"{seconds / 3600:.1f} h"
