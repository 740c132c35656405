"""Judge from the observed facts whether a run makes progress, and if not, why. No I/O.

Every wait has an owner, something it waits for, and a limit. The waits form a chain that starts at the controller: it
waits for a process, which may wait for another, until one waits for none. The condition of that last process explains
the chain. From worst to most harmless:

    dead, stopped     it cannot continue by itself: the run is stuck, however short the wait
    away              its site is silent: stuck, unless the current step is still within its usual time
    hangs, disk       its event loop is blocked and it computes nothing: stuck after `HANG_S`
    in one call       its event loop is blocked, but it computes: stuck after `patience`
    in a circle       two processes wait for each other: stuck after `patience`
    idle              its event loop runs and it computes nothing: stuck after `patience`, on CPUs only (a GPU may be
                      computing)
    works             not stuck: the run is slow if the step takes long, else healthy

If several processes are waited for and one of them works, idle ones are taken to wait for it. A wait past its limit is
always stuck: its owner should have ended the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from streamrl.diagnose.conditions import Condition, Rank, beyond, condition, fatal, named, seconds
from streamrl.diagnose.facts import (
    FINAL,
    GRACE_S,
    HANG_S,
    IDLE_CPU,
    LITTLE_DISK_GB,
    NEAR_LIMIT,
    SILENT_AFTER_S,
    STARTING_SILENT_S,
    Facts,
    ProcessFacts,
    RunFacts,
    SiteFacts,
    WaitFacts,
    age_of,
    is_silent,
)
from streamrl.run_dir.remote_site import obstacle

HealthState = Literal["healthy", "slow", "stuck", "ended", "starting"]
PUBLISHER_WAIT = "the publisher "
"""How the text of a wait for the trainer's publisher of weights begins."""
STUCK = 3
"""Exit code of a command that finds a run stuck."""


@dataclass(frozen=True)
class Edge:
    """One wait: its owner, what it waits for, and the process that has to provide it."""

    waiter: str
    waits_for: str
    since_s: float
    limit_s: float
    target: str
    """Name of the process waited for; '': the wait's text does not say."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run makes progress, and if not, the cause."""

    state: HealthState
    sentence: str
    edges: list[Edge] = field(default_factory=list)
    """The chain of waits, from the controller to the process at its end."""
    details: list[str] = field(default_factory=list)
    failed: bool = False
    """Whether the run has ended before it was done."""

    @property
    def exit_code(self) -> int:
        """Exit code of `why-stuck`: 3 stuck, 1 ended before it was done, 0 anything else."""
        return STUCK if self.state == "stuck" else int(self.failed)

    @property
    def involved(self) -> list[str]:
        """Names of the processes in the chain, in order."""
        names = [name for edge in self.edges for name in (edge.waiter, edge.target) if name]
        return list(dict.fromkeys(names))


def judge(facts: Facts) -> Verdict:
    """Judge whether the run makes progress, and if not, who waits for whom. Pure: equal facts give equal verdicts."""
    verdict = _judge(facts)
    if facts.disk_full and verdict.state in ("slow", "stuck"):  # then it may be the cause of everything else
        begin, full = f"{verdict.state}: ", _little_disk(facts)
        sentence = f"{begin}{full}; {verdict.sentence.removeprefix(begin)}"
        verdict = replace(verdict, sentence=sentence, details=[text for text in verdict.details if text != full])
    known = [name for one in facts.processes if (name := named(one)) in verdict.sentence]
    details = [text for text in verdict.details if not text.startswith(tuple(f"{name} " for name in known))]
    return replace(verdict, details=details)


def _judge(facts: Facts) -> Verdict:
    if facts.run is None and facts.site is not None:
        return _judge_site(facts, facts.site)
    if (over := _ended(facts)) is not None:
        return over
    details = _details(facts)
    if facts.run is not None and (unseen := _unseen(facts, facts.age, "the run")) is not None:
        return Verdict("slow", unseen, [], details)
    if (silent := _controller_silent(facts)) is not None:
        return Verdict("stuck", silent, [], details)
    chains = [_follow(wait, facts, ()) for wait in _first_waits(facts)]
    stuck = [chain for chain in chains if _is_stuck(chain, facts)]
    if stuck:
        worst = max(stuck, key=lambda chain: (chain.condition.rank, chain.edges[0].since_s))
        return Verdict("stuck", f"stuck: {_describe_chain(worst, facts)}", worst.edges, details)
    if (unable := _unable(facts)) is not None:
        return Verdict("stuck", f"stuck: {unable}; nobody has waited for it so far", [], details)
    longest = max(chains, key=lambda chain: chain.edges[0].since_s, default=None)
    edges = longest.edges if longest is not None else []
    if facts.starting:
        return Verdict("starting", _starting(facts, longest), edges, details)
    near = [chain for chain in chains if chain.edges[0].since_s > NEAR_LIMIT * chain.edges[0].limit_s]
    if facts.late or near:
        chosen = near[0] if near else longest
        wait = "" if chosen is None else f"; {_describe_chain(chosen, facts)}"
        return Verdict("slow", f"slow: {_place(facts)}{wait}", edges, details)
    return Verdict("healthy", f"healthy: {_place(facts)}{_longest(longest)}", edges, details)


# -- chains of waits


@dataclass(frozen=True)
class WaitChain:
    """Edges from the first waiter to the process at the end, and that process's condition."""

    edges: list[Edge]
    condition: Condition


def _first_waits(facts: Facts) -> list[WaitFacts]:
    """Return the controller's waits, or, if it has none, all others."""
    return facts.waits_by_owner.get("controller") or list(facts.waits)


def _follow(wait: WaitFacts, facts: Facts, seen: tuple[str, ...]) -> WaitChain:
    """Return the chain that begins with this wait and explains the most."""
    since_s = max(0.0, facts.now - wait.since)
    seen = (*seen, wait.owner)
    found: list[WaitChain] = []
    for name in targets(wait, facts):
        edge = Edge(wait.owner, wait.waiting_for, since_s, wait.limit_s, name)
        chain = WaitChain([edge], _publisher_link(wait, facts) or condition(facts.by_name.get(name), facts))
        if name in seen[:-1]:
            circle = Condition(Rank.CIRCLE, f"waits for {wait.owner} in turn: neither can go on")
            chain = WaitChain([edge], circle)
        elif name != wait.owner and chain.condition.rank in (Rank.WORKS, Rank.UNKNOWN, Rank.IDLE):
            further = [_follow(other, facts, seen) for other in _waits_of(name, facts)]
            if further:
                best = max(further, key=lambda one: (one.condition.rank, one.edges[0].since_s))
                chain = WaitChain([edge, *best.edges], best.condition)
        found.append(chain)
    if any(chain.condition.rank == Rank.WORKS for chain in found):
        found = [chain for chain in found if chain.condition.rank != Rank.IDLE]
    if not found:
        edge = Edge(wait.owner, wait.waiting_for, since_s, wait.limit_s, "")
        return WaitChain([edge], Condition(Rank.UNKNOWN, _busy(facts)))

    def explains(chain: WaitChain) -> tuple[int, bool, int]:
        one = facts.by_name.get(chain.edges[0].target)
        return chain.condition.rank, one is not None and bool(one.stage), one.running if one is not None else 0

    return max(found, key=explains)


def _publisher_link(wait: WaitFacts, facts: Facts) -> Condition | None:
    """Return the condition of the trainer as a site sees it whose link for weights alone is dead; None: it is not.

    If the trainer itself hangs or has ended, that is the cause of its silence.
    """
    owner = facts.by_name.get(wait.owner)
    if owner is None or facts.run is None or not wait.waiting_for.startswith(PUBLISHER_WAIT):
        return None
    silent = facts.run.publisher_silent_s.get(owner.site, 0.0)
    trainer = condition(facts.by_name.get("trainer-0"), facts)
    if silent <= SILENT_AFTER_S or trainer.rank > Rank.IDLE:
        return None
    text = f"is out of reach of {wait.owner}: the link for weights (port + 1) has been silent for {seconds(silent)}"
    return Condition(Rank.AWAY, text + beyond(facts.run.obstacle_to(owner.site)))


def _waits_of(name: str, facts: Facts) -> list[WaitFacts]:
    """Return the waits of a process that are for other processes."""
    return [wait for wait in facts.waits_by_owner.get(name, ()) if any(t != name for t in targets(wait, facts))]


def targets(wait: WaitFacts, facts: Facts) -> list[str]:
    """Return the names of the processes that a wait is for, by its text; empty if the text does not say."""
    text = wait.waiting_for
    if found := facts.names_in(text):
        if text.endswith(" to start"):  # a service says hello once its instances have
            sites = {facts.by_name[name].site for name in found if facts.by_name[name].role == "service"}
            return found + [p.name for p in facts.processes if p.role == "instance" and p.site in sites]
        return found
    if re.search(r"(?<![\w-])trainer-\d+(?![\w-])", text):
        return [name for name in ("trainer",) if name in facts.by_name]  # its ranks are gone, or not seen from here
    for address, name in facts.addresses.items():
        if f"{address} " in f"{text} ":
            return [name]
    if from_site := re.fullmatch(r"weights \d+ from (\S+)", text):
        return [p.name for p in facts.processes if p.role == "service" and p.site == from_site[1]]
    if re.fullmatch(r"\d+ samples of \d+ groups", text):
        return _with_samples(facts)
    if re.fullmatch(r"\d+ rewards of \d+ groups", text):
        return [p.name for p in facts.processes if p.role == "rewards"]
    if text.startswith("all instances ") or re.fullmatch(r"\d+ canary measurements", text):
        return [p.name for p in facts.processes if p.role == "instance"]
    if text.startswith(PUBLISHER_WAIT):
        return ["trainer-0"]
    if text.startswith("the hub to acknowledge"):
        return ["controller"]
    own = ("the ranker ", "weights to be coded", "reward workers ", "agent workers ", "the transfer before ")
    if text.startswith(own):
        return [wait.owner]  # it waits for one of its own threads, tasks or children
    return []


def _with_samples(facts: Facts) -> list[str]:
    """Return instances with requests and services that wait or are blocked; all services if no instance has any."""
    services = [p for p in facts.processes if p.role == "service"]
    instances = [p.name for p in facts.processes if p.role == "instance" and p.running]
    sick = [s.name for s in services if condition(s, facts).rank >= Rank.CALL or _waits_of(s.name, facts)]
    return [*instances, *sick] if instances else [s.name for s in services]


def _is_stuck(chain: WaitChain, facts: Facts) -> bool:
    """Return whether a chain means that the run is stuck, by the rules at the top of this module.

    While a run starts, libraries load and models warm up, so only certain causes count.
    """
    if any(edge.since_s > edge.limit_s + GRACE_S for edge in chain.edges):
        return True
    rank, since_s = chain.condition.rank, chain.edges[-1].since_s
    if rank >= Rank.STOPPED:
        return True
    if facts.run is None or facts.run.state == "starting":
        return False
    if rank == Rank.AWAY:
        return facts.late or (facts.usual_s is None and since_s > facts.patience)
    if rank in (Rank.HANGS, Rank.DISK):
        return since_s > HANG_S
    if rank == Rank.IDLE and facts.run.cuda:
        return False
    return rank in (Rank.CALL, Rank.CIRCLE, Rank.IDLE) and since_s > facts.patience


# -- standstills that no wait shows


def _started(facts: Facts) -> list[ProcessFacts]:
    """Return the run's own processes that are known here; those of another container are not."""
    return [p for p in facts.processes if p.pid is not None and p.role not in ("launcher", "proxy")]


def _silently_gone(facts: Facts, age: float) -> bool:
    """Return whether all own processes are gone, and what should be written all the time is `age` seconds old.

    A run or a site of another container shows no process here: only what it writes says that it lives. If the age of
    that is unknown, the run may live on a machine whose clock is ahead. A launcher that lives may have started others,
    which it could not write down.
    """
    if facts.launcher_lives:
        return False
    started = _started(facts)
    silent = (is_silent(age) if started else age > STARTING_SILENT_S) or facts.launcher_gone
    return silent and all(p.exit_code is not None or p.alive in ("gone", "zombie") for p in started)


def _unseen(facts: Facts, age: float, what: str) -> str | None:
    """Return the sentence for a run or a site that is silent, and none of whose processes is known here; else None."""
    if _started(facts) or not is_silent(age):
        return None
    where = "its processes cannot be seen from here (another container, or another machine)"
    if age < 0:
        return f"slow: whether {what} is alive is unknown: the last sign of it is {_dated(age)}; {where}"
    return f"slow: no sign of {what} for {seconds(age)}; {where}"


def _dated(age: float) -> str:
    """Describe when something was written, by an age of `age_of`."""
    if age < 0:
        return f"dated {seconds(-age)} from now (a clock was set back, or differs from that of its machine)"
    return f"{seconds(age)} ago"


def _ended(facts: Facts) -> Verdict | None:
    """Return the verdict on a run that is over, whether or not it has recorded its end; None if it is not over."""
    run = facts.run
    started = _started(facts)
    if run is not None and run.state in FINAL:
        how = f"ended: {run.state} at step {run.step} of {run.steps} after {seconds(run.lasted_s)}"
        left = [p.name for p in started if p.exit_code is None and p.alive not in ("gone", "unknown", "zombie")]
        cause, *more = (run.error or "").splitlines() or [""]
        details = [*more, f"still there: {', '.join(left)}"] if left else more
        return Verdict("ended", f"{how}: {cause}" if cause else how, [], details, run.state != "done")
    if not _silently_gone(facts, facts.age) or (run is None and not started):
        return None
    at = "before the controller had written" if run is None else f"at step {run.step} of {run.steps}"
    when = "" if run is None else f", {_dated(facts.age)}"
    words = [p.last_words.splitlines()[0] for p in started if p.last_words]
    who = f"none of its {len(started)} processes is there" if started else "none of its processes is known here"
    sentence = f"ended: {at}{when}, without saying so: {who}" + (f"; {words[0]}" if words else "")
    return Verdict("ended", sentence, [], words[1:], failed=True)


def _controller_silent(facts: Facts) -> str | None:
    """Return the sentence for a controller that has stopped writing its status; None if it has not."""
    one, run = facts.by_name.get("controller"), facts.run
    known = condition(one, facts)
    certain = known.rank >= Rank.STOPPED
    if run is None:
        return None
    starting = run.state == "starting" and known.rank in (Rank.WORKS, Rank.CALL, Rank.DISK)
    if not certain and (facts.age <= STARTING_SILENT_S if starting else not is_silent(facts.age)):
        return None
    who = "the controller" + (f" (pid {one.pid})" if one is not None and one.pid is not None else "")
    why = f"it {known.text}"
    if one is not None and one.loop == "answers" and not certain:
        why = "it answers, so it cannot write status.json: see its log and the disk"
    if not is_silent(facts.age):
        return f"stuck: {who} {known.text}"
    if facts.age < 0:
        return f"stuck: the last update of {who} is {_dated(facts.age)}; {why}"
    return f"stuck: {who} has not written for {seconds(facts.age)}; {why}"


def _unable(facts: Facts) -> str | None:
    """Describe a process that cannot continue although none waits for it, preferably one whose exit code is known.

    Stopped watchers (launchers, the proxy) are left to the details.
    """
    for one in sorted(facts.processes, key=lambda one: one.exit_code is None):
        why = fatal(one, facts)
        if why is not None and (one.role not in ("launcher", "rank launcher", "proxy") or why.rank == Rank.DEAD):
            return f"{named(one)} {why.text}" + (f", in its start ({one.stage})" if one.stage else "")
    return None


def _judge_site(facts: Facts, site: SiteFacts) -> Verdict:
    """Judge a site by its own folder: its processes, and whether it hears from the trainer's site."""
    age, here = age_of(facts.now, site.updated_at), f"site {site.site}"
    later = [f"{here} was started again, in {site.later}"] if site.later else []
    details = [*_details(facts), *later]
    if site.state in FINAL:
        return Verdict("ended", f"ended: {here} is {site.state}", [], details, site.state != "done")
    if _silently_gone(facts, age):
        return Verdict(
            "ended", f"ended: {_dated(age)}, without saying so: no process of {here} is there", [], later, True
        )
    if (unseen := _unseen(facts, age, here)) is not None:
        return Verdict("slow", unseen, [], details)
    if (unable := _unable(facts)) is not None:
        return Verdict("stuck", f"stuck: {here}: {unable}", [], details)
    if is_silent(age):
        name = f"service-{site.site}"
        how = condition(facts.by_name.get(name), facts).text
        silence = f"the last update of {name} is {_dated(age)}"
        if age >= 0:
            silence = f"{name} has not written for {seconds(age)}"
        return Verdict("stuck", f"stuck: {silence}; it {how}", [], details)
    why = beyond(site.unresolved) + beyond(obstacle(site.empty_connections))
    if site.trainer_silent_s > SILENT_AFTER_S:
        return Verdict(
            "stuck",
            f"stuck: {here} has heard nothing of the trainer's site for {seconds(site.trainer_silent_s + age)}; "
            f"{site.samples_waiting} finished samples wait to be sent{why}",
            [],
            details,
        )
    if (silent := site.publisher_silent_s or 0.0) > SILENT_AFTER_S:
        state: HealthState = "stuck" if silent > facts.patience else "slow"
        heard = f"{here} has heard nothing of the trainer's publisher of weights (port + 1) for {seconds(silent + age)}"
        return Verdict(state, f"{state}: {heard}, and hears the controller{why}", [], details)
    if text := obstacle(site.empty_connections):
        return Verdict("stuck", f"stuck: {here}: {text}", [], details)
    return Verdict("healthy", f"healthy: {here} is {site.state}, and hears of the trainer's site", [], details)


def _details(facts: Facts) -> list[str]:
    """Return further findings worth reporting, one sentence each."""
    found = []
    for one in facts.processes:
        known = condition(one, facts)
        if known.rank >= Rank.STOPPED or known.rank in (Rank.HANGS, Rank.DISK):
            found.append(f"{named(one)} {known.text}")
        elif one.stage and facts.starting:
            found.append(f"{one.name}: {one.stage} ({seconds(one.stage_s)})")
    for wait in facts.waits:
        since_s = facts.now - wait.since
        if since_s > NEAR_LIMIT * wait.limit_s:
            past = "is past its limit" if since_s > wait.limit_s else "nears its limit"
            found.append(
                f"a wait {past}: {wait.owner}, {seconds(since_s)} of {seconds(wait.limit_s)} for {wait.waiting_for}"
            )
    for site, silent in facts.run.silent_s.items() if facts.run is not None else ():
        if facts.run is not None and site in facts.run.left:
            found.append(f"site {site} said goodbye {seconds(silent)} ago")
        elif silent > SILENT_AFTER_S:
            found.append(f"site {site} has been silent for {seconds(silent)}")
        elif facts.run is not None:
            found += _half_heard(site, facts.run)
    if facts.disk_free_gb is not None and facts.disk_free_gb < LITTLE_DISK_GB:
        found.append(_little_disk(facts))
    return found


def _half_heard(site: str, run: RunFacts) -> list[str]:
    """Return what is wrong with the link to a site that is heard."""
    found = []
    if (deaf := run.controller_silent_s.get(site, 0.0)) > SILENT_AFTER_S:
        found.append(f"site {site} is heard, but has heard nothing of the controller for {seconds(deaf)}")
    if text := run.obstacle_to(site):
        found.append(f"site {site}: {text}")
    return found


def _little_disk(facts: Facts) -> str:
    return f"the run's disk is full: {facts.disk_free_gb or 0:.2f} GB free"


# -- sentences


def _describe_chain(chain: WaitChain, facts: Facts) -> str:
    """Describe a chain in one sentence."""
    parts = []
    for number, edge in enumerate(chain.edges):
        past = ", which has passed" if edge.since_s > edge.limit_s + GRACE_S else ""
        near = number == 0 or edge.since_s > NEAR_LIMIT * edge.limit_s
        limit = f" (limit {seconds(edge.limit_s)}{past})" if near else ""
        verb = "has waited" if number == 0 else "waits"
        parts.append(f"{edge.waiter} {verb} {seconds(edge.since_s)}{limit} for {edge.waits_for}")
    last = chain.edges[-1]
    one = facts.by_name.get(last.target)
    name = named(one) if one is not None else last.target
    holds = one is not None and one.role == "instance" and one.running and " samples of " in last.waits_for
    which = f", which has {one.running} of them," if holds and one is not None else ""
    parts.append(f"{name}{which} {chain.condition.text}".strip())
    return "; ".join(parts)


def _place(facts: Facts) -> str:
    """Describe the current step and its elapsed time."""
    run, usual, elapsed = facts.run, facts.usual_s, facts.elapsed_s
    assert run is not None
    if run.step >= run.steps:
        return f"all {run.steps} steps are done, what follows the last one is not"
    if elapsed is None:
        return f"step {run.step + 1} of {run.steps}"
    if usual is None:
        return f"step {run.step + 1} of {run.steps}, {elapsed:.1f} s into it, and no step before to compare with"
    return f"step {run.step + 1} of {run.steps}, {elapsed:.1f} s into a step that takes {usual:.1f} s (median)"


def _longest(chain: WaitChain | None) -> str:
    if chain is None:
        return "; nobody waits"
    edge = chain.edges[0]
    since = f"{seconds(edge.since_s)} of {seconds(edge.limit_s)}"
    return f"; the longest wait is {edge.waiter}'s, {since}, for {edge.waits_for}"


def _starting(facts: Facts, longest: WaitChain | None) -> str:
    if facts.run is None:
        one = facts.by_name.get("controller")
        return f"starting: the controller has not reported yet; it {condition(one, facts).text}"
    since = f"starting for {seconds(facts.now - facts.run.started_at)}"
    return since if longest is None else f"{since}: {_describe_chain(longest, facts)}"


def _busy(facts: Facts) -> str:
    """Name the processes that compute now, for a wait that names none."""
    busy = [p for p in facts.processes if p.cpu is not None and p.cpu >= IDLE_CPU]
    busy.sort(key=lambda p: -(p.cpu or 0.0))
    named = ", ".join(f"{p.name} ({100 * (p.cpu or 0.0):.0f} % CPU)" for p in busy[:3])
    return f"computing now: {named}" if named else "no process computes"
