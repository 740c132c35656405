"""Compare ways to choose the site of a group: round-robin, in proportion to capacity, and ours, on two modelled levels.

    .venv/bin/python experiments/site_dispatch.py      # some minutes; writes results/site_dispatch.{json,md,svg}

A 7B model, step times from rooflines. Sites differ in GPU type and number; a link costs its round trip, its bandwidth
(a message after the other) and money. The site is chosen by `scheduler/sites/site_dispatch.py` or a baseline, then each
site places its samples on its instances as in `scheduler/simulation/generation_simulator.py`. Workloads: lengths like
DeepSeek-R1's, log-normal, uniform; a length is its group's times a normal error in log length, half of whose variance
siblings share.

Sync: a batch is issued at once, and what counts is when its last sample is home. Async: so many groups are under way, a
new one is issued for each that is home; what counts is tokens per second.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from dispatch_policies import LIMIT, RANKER_NOISE, SHAPES
from matplotlib.figure import Figure
from rich.progress import track
from running import RESULTS, Sheet, machine, terminal, write_tables

from scheduler.cost.decode import QWEN_7B, roofline
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import NORMAL_SCORES, Forecast
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, Simulation
from scheduler.sites.site_candidates import SiteLoad
from scheduler.sites.site_dispatch import SiteDispatch, SiteGroup

OUT = RESULTS
SIBLINGS, PROMPT_TOKENS = 8, 400
BYTES_PER_TOKEN = 12.0
"""A token id and two log-probabilities."""
SLOTS = 256
SHARED = 0.5
"""Of the forecast error's variance: what siblings have in common."""
USD_PER_HOUR = {"H800": 2.85, "H20": 1.0, "L40S": 0.9}
"""Of one GPU; the first two in the paper's proportion, the third assumed."""


def site(name: str, gpu: str, count: int, gbit_s: float | None = None, rtt_s: float = 0.0) -> SiteLoad:
    """Like instances of one GPU each; egress at 0.02 USD per GB."""
    curve = roofline(QWEN_7B, device(gpu))
    rate = gbit_s * 1e9 / 8 if gbit_s else None
    return SiteLoad(name, ((SLOTS, curve),) * count, rate, rtt_s, USD_PER_HOUR[gpu] * count, 0.02 if gbit_s else 0.0)


FLEETS: dict[str, tuple[SiteLoad, ...]] = {
    "16 H800 + 32 H20 far": (site("home", "H800", 16), site("far", "H20", 32, 80, 0.03)),
    "4 H800 + 16 H20 far": (site("home", "H800", 4), site("far", "H20", 16, 80, 0.03)),
    "4 H800 + 8 L40S far": (site("home", "H800", 4), site("far", "L40S", 8, 1, 0.1)),
    "4 H800 + 8 H20 far + 16 L40S farther": (
        site("home", "H800", 4),
        site("far", "H20", 8, 80, 0.03),
        site("farther", "L40S", 16, 1, 0.15),
    ),
    "8 H800 + 8 H800 far": (site("home", "H800", 8), site("far", "H800", 8, 80, 0.03)),
    "8 H800 + 8 H800 at 5 Mbit/s": (site("home", "H800", 8), site("far", "H800", 8, 0.005, 0.3)),
}
WORKLOADS = ("R1-like", "log-normal 1.0", "uniform")


class SitePolicy(Protocol):
    """What the simulation needs of a choice of sites."""

    def join(self, site: SiteLoad) -> None: ...
    def submit(self, groups: Iterable[SiteGroup]) -> None: ...
    def finished(self, group_id: str, length: float) -> None: ...
    def decide(self) -> list[tuple[str, str]]: ...


class InProportion:
    """Each group to the site with the fewest samples under way or waiting per capacity; or sites in turn."""

    def __init__(self, in_turn: bool = False) -> None:
        self._in_turn, self._turn = in_turn, 0
        self._sites: list[SiteLoad] = []
        self._loads: Counter[str] = Counter()
        self._where: dict[str, str] = {}
        self._waiting: list[SiteGroup] = []

    def join(self, site: SiteLoad) -> None:
        """See `SiteDispatch`, as the others."""
        self._sites.append(site)

    def submit(self, groups: Iterable[SiteGroup]) -> None:
        self._waiting += groups

    def finished(self, group_id: str, length: float) -> None:
        self._loads[self._where[group_id]] -= 1

    def decide(self) -> list[tuple[str, str]]:
        for group in self._waiting:
            name = min(self._sites, key=lambda one: (self._loads[one.name] + group.size) / one.capacity).name
            if self._in_turn:
                name = self._sites[self._turn % len(self._sites)].name
            self._turn += 1
            self._loads[name] += group.size
            self._where[group.group_id] = name
        placed = [(group.group_id, self._where[group.group_id]) for group in self._waiting]
        self._waiting = []
        return placed


@dataclass(frozen=True)
class SimulatedGroup:
    """A group as the policies know it, and what its samples will be."""

    group: SiteGroup
    samples: tuple[SimulatedRequest, ...]


@dataclass(frozen=True)
class Simulated:
    """What came out."""

    seconds: float
    """Until the last sample is home."""
    mean_s: float
    """Until a sample is home."""
    tokens_per_s: float
    """Between the tenth and the ninetieth percentile of the samples' arrivals."""
    usd: float
    """Sites until each is done, and their links."""
    shares: dict[str, float]
    """Shares of the tokens, by site."""


class TwoLevels:
    """One fleet of sites under one policy."""

    def __init__(self, policy: SitePolicy, sites: Sequence[SiteLoad], inner: str) -> None:
        self.policy, self.sites = policy, {one.name: one for one in sites}
        self.engines: dict[str, Simulation] = {}
        for one in sites:
            policy.join(one)
            fleet = [
                SimulatedInstance(f"{one.name}{n}", curve, slots) for n, (slots, curve) in enumerate(one.instances)
            ]
            self.engines[one.name] = Simulation(make_policy(inner, LIMIT), fleet)
        self._free: dict[tuple[str, str], float] = {}  # (site, direction) -> when its link is free
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()

    def _send(self, name: str, direction: str, tokens: float, now: float, then: Callable[[float], None]) -> None:
        one = self.sites[name]
        seconds = tokens * BYTES_PER_TOKEN / one.bytes_per_s if one.bytes_per_s else 0.0
        self._free[name, direction] = sent = max(now, self._free.get((name, direction), 0.0)) + seconds
        heapq.heappush(self._events, (sent + one.rtt_s / 2, next(self._number), then))

    def run(self, groups: Sequence[SimulatedGroup], under_way: int) -> Simulated:
        """Simulate until the last sample is home.

        Args:
            groups: in the order in which they are issued.
            under_way: most groups that are issued and not wholly home.
        """
        by_id = {one.group.group_id: one for one in groups}
        owner = {sample.request_id: one for one in groups for sample in one.samples}
        left = {one.group.group_id: len(one.samples) for one in groups}
        at: dict[str, str] = {}
        homes: list[tuple[float, float]] = []
        done: dict[str, float] = defaultdict(float)  # site -> when its last sample ended
        issued = closed = 0

        def issue(now: float) -> None:
            nonlocal issued
            new = groups[issued : closed + under_way]
            issued += len(new)
            self.policy.submit([one.group for one in new])
            parts: dict[str, list[SimulatedGroup]] = {}
            for group_id, name in self.policy.decide():
                at[group_id] = name
                parts.setdefault(name, []).append(by_id[group_id])
            for name, part in parts.items():
                samples = [sample for one in part for sample in one.samples]
                tokens = sum(one.group.prompt_tokens for one in part)
                self._send(name, "there", tokens, now, lambda now, n=name, s=samples: self.engines[n].submit(s, now))  # type: ignore[misc]

        def home(sample: SimulatedRequest) -> Callable[[float], None]:
            def come(now: float) -> None:
                nonlocal closed
                homes.append((now, sample.length))
                group_id = owner[sample.request_id].group.group_id
                self.policy.finished(group_id, sample.length)
                left[group_id] -= 1
                if not left[group_id]:
                    closed += 1
                    if issued < len(groups):
                        issue(now)

            return come

        issue(0.0)
        while len(homes) < len(owner):
            name = min(self.engines, key=lambda name: self.engines[name].next_end())
            if self._events and self._events[0][0] <= self.engines[name].next_end():
                now, _, then = heapq.heappop(self._events)
                then(now)
                continue
            now, sample_id = self.engines[name].finish_next()
            done[name] = now
            sample = self.engines[name].requests[sample_id]
            self._send(name, "back", sample.length, now, home(sample))
        return self._outcome(groups, at, homes, done)

    def _outcome(
        self,
        groups: Sequence[SimulatedGroup],
        at: dict[str, str],
        homes: list[tuple[float, float]],
        done: dict[str, float],
    ) -> Simulated:
        tokens: dict[str, float] = defaultdict(float)
        moved: dict[str, float] = defaultdict(float)
        for one in groups:
            name, length = at[one.group.group_id], sum(sample.length for sample in one.samples)
            tokens[name] += length
            moved[name] += length + one.group.prompt_tokens
        usd = sum(
            done[name] / 3600 * one.price_per_hour + moved[name] * BYTES_PER_TOKEN / 1e9 * one.price_per_gb
            for name, one in self.sites.items()
        )
        first, last = homes[len(homes) // 10][0], homes[9 * len(homes) // 10][0]
        middle = sum(length for now, length in homes if first < now <= last)
        total = sum(tokens.values())
        shares = {name: tokens[name] / total for name in self.sites}
        return Simulated(
            homes[-1][0], float(np.mean([now for now, _ in homes])), middle / max(last - first, 1e-9), usd, shares
        )


def workload(shape: str, count: int, seed: int, know: str) -> list[SimulatedGroup]:
    """Groups of `SIBLINGS`.

    Args:
        shape: of the groups' lengths.
        count: of groups.
        seed: of everything; the lengths are the same whatever is known.
        know: "true lengths", "forecasts", or "nothing".
    """
    rng = np.random.default_rng(seed)
    middle = np.clip(SHAPES[shape](rng, count), 20, LIMIT)
    error = math.sqrt(SHARED) * rng.standard_normal((count, 1))
    error = error + math.sqrt(1 - SHARED) * rng.standard_normal((count, SIBLINGS))
    lengths = np.clip(middle[:, None] * np.exp(RANKER_NOISE * error), 1, LIMIT).round()
    told = np.clip(middle[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES), 1, LIMIT)
    groups = []
    for number in range(count):
        forecast = {
            "true lengths": Forecast(tuple(np.sort(lengths[number]).tolist()), (float(lengths[number].max()),) * 5),
            "forecasts": Forecast(tuple(told[number].tolist())),
            "nothing": None,
        }[know]
        samples = tuple(
            SimulatedRequest(
                f"{number}/{n}",
                float(length),
                str(number),
                PROMPT_TOKENS,
                forecast=Forecast.exactly(length) if know == "true lengths" else forecast,
            )
            for n, length in enumerate(lengths[number])
        )
        groups.append(SimulatedGroup(SiteGroup(str(number), SIBLINGS, forecast, PROMPT_TOKENS), samples))
    return groups


POLICIES: dict[str, Callable[[], SitePolicy]] = {
    "round-robin": lambda: InProportion(in_turn=True),
    "by capacity": lambda: InProportion(),
    "ours": lambda: SiteDispatch(LIMIT, BYTES_PER_TOKEN),
    "ours, 10 % for money": lambda: SiteDispatch(LIMIT, BYTES_PER_TOKEN, 0.1),
}
KNOW = ("true lengths", "forecasts", "nothing")
BATCH, SEEDS = 128, 2
"""Groups of a sync batch (1,024 samples), and how often each is drawn."""
UNDER_WAY, ISSUED = 128, 512
"""Groups of an async run, and in all."""
TIMED_GROUPS, TIMED_SITES, TIMES = 1024, 8, 15


def one_case(fleet: str, shape: str, know: str, schedule: str) -> dict[str, Any]:
    """Every policy on the same groups: means over the seeds."""
    outcomes: dict[str, dict[str, Any]] = {}
    for name, make in POLICIES.items():
        runs: list[Simulated] = []
        predicted: list[float] = []
        for seed in range(SEEDS if schedule == "sync" else 1):
            count, under_way = (BATCH, BATCH) if schedule == "sync" else (ISSUED, UNDER_WAY)
            policy = make()
            runs.append(
                TwoLevels(policy, FLEETS[fleet], "skew-aware").run(workload(shape, count, seed, know), under_way)
            )
            if schedule == "sync" and isinstance(policy, SiteDispatch) and policy.predicted:
                predicted.append(policy.predicted.end / runs[-1].seconds)
        figures: dict[str, Any] = {
            key: float(np.mean([getattr(run, key) for run in runs]))
            for key in ("seconds", "mean_s", "tokens_per_s", "usd")
        }
        figures["shares"] = {one.name: float(np.mean([run.shares[one.name] for run in runs])) for one in FLEETS[fleet]}
        if predicted:
            figures["predicted_over_simulated"] = float(np.mean(predicted))
        outcomes[name] = figures
    return {"schedule": schedule, "fleet": fleet, "lengths": shape, "known": know, "policies": outcomes}


def ratio(case: dict[str, Any], name: str, key: str) -> float:
    """Against round-robin."""
    return float(case["policies"][name][key] / case["policies"]["round-robin"][key])


def decision_ms() -> dict[str, float]:
    """CPU time of one decision, by what is known; median."""
    rng = np.random.default_rng(0)
    lengths = np.clip(SHAPES["R1-like"](rng, TIMED_GROUPS), 20, LIMIT)
    forecasts: dict[str, Sequence[Forecast | None]] = {
        "true lengths": [Forecast.exactly(length) for length in lengths],
        "forecasts": [Forecast(tuple(row)) for row in lengths[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES)],
        "nothing": [None] * TIMED_GROUPS,
    }
    figures = {}
    for tolerance in (0.0, 0.1):
        for know, some in forecasts.items():
            times = []
            for _ in range(TIMES):
                policy = SiteDispatch(LIMIT, BYTES_PER_TOKEN, tolerance)
                for n in range(TIMED_SITES):
                    gpu, count = ("H800", 8) if n % 2 else ("H20", 16)
                    policy.join(site(f"s{n}", gpu, count, 10.0 * n, 0.02 * n))
                policy.submit(SiteGroup(str(n), SIBLINGS, forecast, PROMPT_TOKENS) for n, forecast in enumerate(some))
                begin = time.process_time()
                policy.decide()
                times.append(1e3 * (time.process_time() - begin))
            figures[f"{know}, tolerance {tolerance:g}"] = float(np.median(times))
    return figures


def sheets(cases: Sequence[dict[str, Any]], speed: dict[str, float]) -> list[Sheet]:
    """Tables, and what they say."""
    made = []
    for schedule, key, what in (
        ("sync", "seconds", "time until the last sample of a batch is home"),
        ("async", "tokens_per_s", "tokens per second"),
    ):
        some = [case for case in cases if case["schedule"] == schedule]
        rows = []
        for case in some:
            base, ours = case["policies"]["round-robin"], case["policies"]["ours"]
            rows.append(
                (
                    f"{case['fleet']}, {case['lengths']}, {case['known']}",
                    f"{base[key]:.0f}",
                    *(f"{ratio(case, name, key):.3f}" for name in POLICIES if name != "round-robin"),
                    f"{ratio(case, 'ours', 'mean_s' if schedule == 'sync' else 'seconds'):.2f}",
                    f"{ratio(case, 'ours', 'usd'):.2f}",
                    f"{ratio(case, 'ours, 10 % for money', 'usd'):.2f}",
                    " / ".join(f"{share:.0%}" for share in ours["shares"].values()),
                )
            )
        unit = "s" if schedule == "sync" else "tokens/s"
        columns = (
            *("case", f"round-robin, {unit}", "by capacity", "ours", "ours, 10 % for money"),
            *(
                "mean arrival" if schedule == "sync" else "time of the whole run",
                "USD",
                "USD, 10 % for money",
                "tokens by site",
            ),
        )
        sign = 1 if schedule == "sync" else -1  # less, or more, is better
        worse = [case for case in some if sign * (ratio(case, "ours", key) - 1) > 0.002]
        notes = [
            f"{what}, against round-robin; columns after the policies': ours, unless they say more; USD: each site is "
            "paid until its last sample has ended, and for what goes over its link"
        ]
        for name in list(POLICIES)[1:]:
            ratios = [ratio(case, name, key) for case in some]
            mean = math.exp(float(np.mean(np.log(ratios))))
            notes.append(f"{name}: geometric mean {mean:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
        for group_by in ("fleet", "known"):
            parts = []
            for value in dict.fromkeys(case[group_by] for case in some):
                logs = [math.log(ratio(case, "ours", key)) for case in some if case[group_by] == value]
                parts.append(f"{value} {math.exp(float(np.mean(logs))):.3f}")
            notes.append(f"ours by {group_by}, geometric means: {'; '.join(parts)}")
        against = [ratio(case, "ours", key) / ratio(case, "by capacity", key) for case in some]
        mean = math.exp(float(np.mean(np.log(against))))
        notes.append(
            f"ours against by capacity: geometric mean {mean:.3f}, from {min(against):.3f} to {max(against):.3f}"
        )
        slower = "; ".join(
            f"{case['fleet']}, {case['lengths']}, {case['known']} ({ratio(case, 'ours', key):.3f})" for case in worse
        )
        notes.append(f"ours is worse than round-robin in {len(worse)} of {len(some)} cases: {slower or 'none'}")
        if schedule == "sync":
            late = [case for case in some if ratio(case, "ours", "mean_s") > 1.05]
            notes.append(
                f"only the last sample counts here: the mean arrival is more than 5 % later than round-robin's in "
                f"{len(late)} of {len(some)} cases"
            )
            for know in KNOW:
                told = [c["policies"]["ours"]["predicted_over_simulated"] for c in some if c["known"] == know]
                notes.append(f"{know}: predicted end / simulated, ours: {min(told):.2f} to {max(told):.2f}")
        made.append(Sheet(f"{schedule.capitalize()}: {what}", columns, rows, notes))
    timed = [(name, f"{value:.1f}") for name, value in speed.items()]
    title = f"A decision for {TIMED_GROUPS:,} groups on {TIMED_SITES} sites"
    made.append(Sheet(title, ("known", "CPU ms, median"), timed))
    return made


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """By fleet, every sync case's time against round-robin; async rates beside."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, (schedule, key, label) in zip(
        figure.subplots(1, 2, sharey=True),
        (
            ("sync", "seconds", "batch time / round-robin (less is better)"),
            ("async", "tokens_per_s", "tokens/s / round-robin (more is better)"),
        ),
        strict=True,
    ):
        for row, name in enumerate(list(POLICIES)[1:]):
            some = [case for case in cases if case["schedule"] == schedule]
            places = [list(FLEETS).index(case["fleet"]) + 0.25 * (1 - row) for case in some]
            axes.plot([ratio(case, name, key) for case in some], places, "o", ms=4, alpha=0.7, label=name)
        axes.axvline(1.0, color="grey", lw=1)
        axes.set(xlabel=label, yticks=range(len(FLEETS)), yticklabels=list(FLEETS))
        axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--summary-only", is_flag=True, help="Simulate nothing: tables and plot from the JSON.")
def main(summary_only: bool) -> None:
    console = terminal()
    kept = OUT / "site_dispatch.json"
    if summary_only:
        cases, speed, on = (json.loads(kept.read_text())[key] for key in ("cases", "decision_ms", "machine"))
    else:
        todo = [(*axis, "sync") for axis in itertools.product(FLEETS, WORKLOADS, KNOW)]
        todo += [(fleet, "R1-like", know, "async") for fleet in FLEETS for know in KNOW[1:]]
        cases = [one_case(*axis) for axis in track(todo, "cases", console=console)]
        speed, on = decision_ms(), machine()
        kept.write_text(json.dumps({"machine": on, "decision_ms": speed, "cases": cases}, indent=1) + "\n")
    made = sheets(cases, speed)
    for sheet in made:
        sheet.show(console)
    circumstances = (
        f"Simulated, 7B, {BATCH} groups of {SIBLINGS} in a batch, {SEEDS} draws; async: {UNDER_WAY} of {ISSUED} groups "
        f"under way, one draw. Decision times: {on}."
    )
    write_tables(OUT / "site_dispatch.md", "Which site generates a group", circumstances, made)
    draw(cases, OUT / "site_dispatch.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
