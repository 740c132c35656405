"""Compute when a second site pays: USD per 1,000 samples in one and in two sites, by link, price, lengths, schedule.

    .venv/bin/python experiments/cross_datacenter_cost.py              # a minute of one core
    .venv/bin/python experiments/cross_datacenter_cost.py --quick      # coarse, half a minute, into the current folder
    .venv/bin/python experiments/cross_datacenter_cost.py --model 32b --gpus 64 --hardware my_prices.yaml

Nothing is measured: everything is from the cost model of `streamrl plan` (docs/explanation/cost_model.md). PPO,
1,024 samples a step, lengths in the shape that the StreamRL paper describes.

*Placements.* One site with one GPU type, split between training and generation, or in turns on the same GPUs; one site
with H800 and H20, split; two sites, where H800 train here and all generation is there, on H20, L40S or RTX4090
("H800 + far H20"). The split of each is found anew at every point.

*Equal pace.* Costs are compared between plans whose step takes no longer than that of `--gpus` H800 in one site, split
by the planner, under the same schedule. A placement that no split makes as fast "cannot keep up". The planner's plain
`cost` objective would allow any pace, and a link is hardly felt by a plan that may be slow. The pace is the shortest
step of those H800, where their last GPUs help least; the more they are, the more that favours what may use others.

*Equal money.* Step times are compared at the rent of those H800, traffic included: the planner's `throughput`
objective.

*Break-even bandwidth.* Above it the two sites cost less than the best single site of one type (or have the shorter
step), below it they do not: bisection between 0.01 and 1,000 Gbit/s, to 1 %. Splits are of whole GPUs, so costs go in
small steps, and near a break-even a difference of a few percent means nothing.
Writes experiments/results/cross_datacenter_cost.json, .md and .svg, and cross_datacenter_cost_map.svg.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np
from break_even import BANDWIDTHS, PRICES, Comparison, Cost, Point, Threshold
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from plan_constants import batch
from rich.progress import track
from running import OUT_HELP, ROOT, Sheet, explanation, results_folder, save_plot, terminal

from scheduler.capacity.problem import DELTA_RATIO
from scheduler.cost.hardware import device
from scheduler.cost.trainer_work import PPO
from streamrl.errors import UserError
from streamrl.finite_float import FiniteFloat
from streamrl.planning.planning_inputs import find_model, load_devices

TRAINS, PARTNERS = "H800", ("H20", "L40S", "RTX4090")
ALL = (TRAINS, *PARTNERS)
SWEPT = ("H20", "RTX4090")
"""Partners whose links are looked at closely."""
SUPPLY = 256
"""GPUs of each partner's type that could be rented; of the H800, as many as set the pace."""
SCHEDULES: tuple[str, ...] = ("sync", "stream", "async")
LENGTHS = ("5k", "10k", "20k")
EGRESS, EGRESS_DATE = 0.02, "2025-07"
"""USD per 10^9 bytes, either way."""
EGRESS_SOURCE = "assumption: order of magnitude of large clouds' list prices between regions; put your own"
GBIT_S, RTT_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0), (1.0, 10.0, 30.0, 100.0, 200.0)
EGRESS_USD = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MAP_LENGTHS = ("2k", "3k", "5k", "7k", "10k", "14k", "20k")
PACES = (1, 2, 4)
"""H800 that set the pace, by the base point's."""
IN_TURNS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""GPUs of a partner's type that generate and train in turns."""
MOST_SHOWN = 4.0
"""By the best single site's: a curve is cut off above."""

Progress = Callable[[Sequence[Any], str], Any]
Value = Callable[[Point, str], str]
"""Of a point and the second site's type."""
Columns = dict[str, tuple[str, dict[str, Any]]]
"""What differs from a row's point: (partner, fields)."""
LINKS: Columns = {
    f"{partner}, {kind}": (partner, {"delta": kind == "delta"}) for partner in SWEPT for kind in ("delta", "full")
}
FREE: Columns = {f"{partner}, full, free": (partner, {"delta": False, "egress": 0.0}) for partner in SWEPT}
CURVES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "H20, deltas": ("H20", {"delta": True}, "C0", "-"),
    "H20, full weights": ("H20", {"delta": False}, "C0", "--"),
    "H20, full weights, free traffic": ("H20", {"delta": False, "egress": 0.0}, "C2", "-."),
    "RTX4090, deltas": ("RTX4090", {"delta": True}, "C1", "-"),
}
"""(partner, fields, colour, line)."""
BY_SCHEDULE: Columns = {
    f"{schedule}, {kind}": ("H20", {"schedule": schedule, "delta": kind == "delta"})
    for schedule in SCHEDULES
    for kind in ("delta", "full")
}


def cell(value: float, form: str = ".3f") -> str:
    """A figure; what cannot keep up has none."""
    return format(value, form) if math.isfinite(value) else "-"


def threshold_text(found: Threshold, why: str = "") -> str:
    """A threshold in words."""
    said = found.kind if found.value is None else f"{found.value:.3g}"
    return said + (f", {why}" if why and found.kind != "always" else "")


def single_name(found: Cost) -> str:
    """A single site of one type, without its numbers."""
    words = found.split.split()
    return f"{words[1]}{' in turns' if words[-1] == 'turns' else ''}, one site"


def against(ratio: float) -> str:
    """A ratio of costs in words."""
    if not math.isfinite(ratio):
        return "cannot keep up"
    return f"{abs(1 - ratio):.1%} {'cheaper' if ratio < 1 else 'dearer'}"


@dataclass(frozen=True)
class Sweeps:
    """All tables and curves of a study."""

    study: Comparison
    base: Point
    quick: bool
    progress: Progress

    def some(self, values: Sequence[Any]) -> Sequence[Any]:
        """All values; the first, last and some between where it has to be quick."""
        return values[:: max(1, (len(values) - 1) // 2)] if self.quick else values

    def sheet(
        self, title: str, first: str, rows: dict[str, Point], columns: Columns, value: Value, *notes: str
    ) -> Sheet:
        """A row by point, a column by what differs from it."""
        body = [
            (name, *(value(replace(at, **fields), partner) for partner, fields in columns.values()))
            for name, at in self.progress(list(rows.items()), title)
        ]
        return Sheet(title, (first, *columns), body, notes)

    def sheets(self) -> list[Sheet]:
        study, base, lengths = self.study, self.base, self.some(LENGTHS)
        cases = {f"{n} {s}": replace(base, lengths=n, schedule=s) for n in lengths for s in SCHEDULES}
        gbits, paces = self.some(GBIT_S), [factor * base.gpus for factor in PACES]

        def ratio(at: Point, partner: str) -> str:
            return cell(study.ratio(at, partner))

        by_ratio = "USD per 1,000 samples by those of the best single site, at equal pace; -: cannot keep up"
        h20 = f"H800 + far H20; {by_ratio}"
        defaults = ", ".join(f"{gpu} {study.prices[gpu]:g}" for gpu in PARTNERS)
        where = f"{base.gbit_s:g} Gbit/s, {base.rtt_ms:g} ms"
        within = f"in {BANDWIDTHS[0]:g} .. {BANDWIDTHS[1]:g}; always, never: in all of that range, nowhere in it"
        return [
            self.placements(),
            self.costs(cases),
            self.sheet(
                *("Bandwidth", "lengths, Gbit/s"),
                {f"{n}, {x:g}": replace(base, lengths=n, gbit_s=x) for n in lengths for x in gbits},
                BY_SCHEDULE,
                ratio,
                h20,
            ),
            self.sheet(
                *("Delay", "Gbit/s, ms of round trip"),
                {f"{x:g}, {t:g}": replace(base, gbit_s=x, rtt_ms=t) for x in (base.gbit_s, gbits[-1]) for t in RTT_MS},
                BY_SCHEDULE,
                ratio,
                f"{base.lengths}, {h20}",
            ),
            self.sheet(
                *("Egress price", "lengths, USD/GB"),
                {f"{n}, {x:g}": replace(base, lengths=n, egress=x) for n in lengths for x in self.some(EGRESS_USD)},
                LINKS,
                ratio,
                f"{base.schedule}, {where}; {by_ratio}",
            ),
            self.sheet(
                *("Pace", "H800 that set it, lengths"),
                {f"{g}, {n}": replace(base, gpus=g, lengths=n) for g in paces for n in lengths},
                LINKS,
                ratio,
                f"{base.schedule}, {where}; {by_ratio}",
            ),
            self.sheet(
                *("Break-even bandwidth, cost at equal pace", "lengths, schedule", cases, LINKS | FREE),
                lambda at, partner: threshold_text(*study.bandwidth(at, partner)),
                f"Gbit/s from which two sites cost less per 1,000 samples than the best single site; {within}",
                "slow: below it they cannot keep up; dear: they can, and cost more; free: traffic costs nothing",
            ),
            self.sheet(
                *("Break-even bandwidth, step time for equal money", "lengths, schedule", cases, LINKS | FREE),
                lambda at, partner: threshold_text(study.bandwidth_for_time(at, partner)),
                f"Gbit/s from which two sites have the shorter step for the same rent and traffic; {within}",
            ),
            self.sheet(
                *("Break-even egress price", "lengths, schedule", cases, LINKS),
                lambda at, partner: threshold_text(study.dearest_egress(at, partner)),
                f"USD/GB up to which two sites cost less, {where}; within {PRICES[0]:g} .. {PRICES[1]:g}",
            ),
            self.sheet(
                *("Break-even price of the second site's GPUs", "lengths, schedule", cases),
                {gpu: (gpu, {}) for gpu in PARTNERS},
                lambda at, partner: threshold_text(study.dearest_gpu(at, partner)),
                f"USD/h of a GPU up to which two sites cost less, {where}, deltas; assumed: {defaults}",
            ),
            self.prices(),
        ]

    def placements(self) -> Sheet:
        """Every placement at the base point."""
        study, base, rows = self.study, self.base, []
        best = study.single(base.local()).usd
        found = [(f"{gpu}, one site", study.one_type(base.local(), gpu)) for gpu in ALL]
        found += [("in turns, one site", study.in_turns(base.local(), ALL))]
        found += [("H800 + H20, one site", study.mixed(base.local(), "H20"))]
        for kind, gpu in itertools.product(("delta", "full"), PARTNERS):
            found.append((f"H800 + far {gpu}, {kind}", study.two_sites(replace(base, delta=kind == "delta"), gpu)))
        for name, one in found:
            if one is None:
                rows.append((name, "cannot keep up", *"-------"))
                continue
            times = (f"{one.seconds:.0f}", f"{one.generation_s:.0f}", f"{one.training_s:.0f}", f"{one.weights_s:.1f}")
            rows.append((name, one.split, *times, f"{one.traffic_usd:.3f}", f"{one.usd:.3f}", f"{one.usd / best:.3f}"))
        return Sheet(
            "Every placement at the base point",
            ("placement", "train > generate", "step s", "gen s", "train s", "weights s", "traffic", "USD", "ratio"),
            rows,
            [
                "generate: replicas x tensor parallelism; weights s: link, spread, load (in turns: both changes)",
                "traffic, USD: per 1,000 samples, USD with traffic; ratio: to the best single site of one type",
                "H800 + H20 in one site: two sites over a free link without limits; a bound, no contender",
            ],
        )

    def costs(self, cases: dict[str, Point]) -> Sheet:
        """By length and schedule."""
        study, rows = self.study, []
        columns = {**LINKS, "L40S, delta": ("L40S", {"delta": True})}
        for name, at in cases.items():
            single = study.single(at.local())
            costs = [cell(study.usd(replace(at, **fields), partner)) for partner, fields in columns.values()]
            limit, mixed = f"{study.limit(at):.0f}", f"{study.mixed(at.local(), 'H20').usd:.3f}"
            rows.append(
                (name, limit, single_name(single).removesuffix(", one site"), f"{single.usd:.3f}", mixed, *costs)
            )
        head = ("lengths, schedule", "limit s", "best single site", "its USD", "H800 + H20, one site")
        note = "USD per 1,000 samples; limit: the longest step allowed; last columns: two sites, H800 and these"
        return Sheet("Lengths and schedules", (*head, *columns), rows, [f"{note}; -: cannot keep up"])

    def prices(self) -> Sheet:
        """What is assumed to cost what."""
        found = [(gpu, one.price) for gpu, one in self.study.devices.items() if one.price is not None]
        rows = [(name, f"{price.usd_per_hour:g} USD/h", price.date, price.source) for name, price in found]
        rows.append(("egress", f"{EGRESS:g} USD/GB", EGRESS_DATE, EGRESS_SOURCE))
        note = "inputs, not facts: --hardware FILE, --egress; H20 and H800 are in proportion, an H20 taken as 1 USD/h"
        return Sheet("Prices", ("what", "price", "as of", "source"), rows, [note])

    def map(self) -> list[dict[str, Any]]:
        """The cheapest placement by answer length and egress price: single sites of one type, and two sites."""
        study, found = self.study, []
        schedules: tuple[str, ...] = ("stream", "async")
        axes = itertools.product(schedules, (True, False), self.some(MAP_LENGTHS), self.some(EGRESS_USD))
        for schedule, delta, n, usd in self.progress(list(axes), "map"):
            at = replace(self.base, lengths=n, egress=usd, schedule=schedule, delta=delta)
            two = min(PARTNERS, key=lambda partner, at=at: study.usd(at, partner))  # type: ignore[misc]
            ratio = study.ratio(at, two)
            best = f"{TRAINS} + far {two}" if ratio < 1 else single_name(study.single(at.local()))
            what = {"schedule": schedule, "delta": delta, "lengths": n, "egress": usd}
            found.append({**what, "best": best, "ratio": finite(ratio)})
        return found

    def curves(self) -> list[dict[str, Any]]:
        """Cost at equal pace and step for equal money over bandwidth, at the base point's lengths."""
        study, found = self.study, []
        gbits = np.geomspace(0.01, 100, 13 if self.quick else 41).tolist()
        for schedule, name in self.progress(list(itertools.product(SCHEDULES, CURVES)), "curves"):
            partner, fields = CURVES[name][:2]
            at = replace(self.base, schedule=schedule, **fields)
            points, local = [replace(at, gbit_s=gbit) for gbit in gbits], at.local()
            found.append(
                {
                    **{"schedule": schedule, "placement": name, "gbit_s": gbits},
                    "usd": [finite(study.usd(point, partner)) for point in points],
                    "step_s": [finite(study.two_sites_step(point, partner)) for point in points],
                    **{"single_usd": study.single(local).usd, "mixed_usd": study.mixed(local, "H20").usd},
                    "single_step_s": study.single_step(local),
                    "break_even_usd": asdict(study.bandwidth(at, partner)[0]),
                    "break_even_step": asdict(study.bandwidth_for_time(at, partner)),
                }
            )
        return found

    def reading(self, found: Sequence[dict[str, Any]]) -> list[str]:
        """What the figures say, in sentences made of them."""
        study, base = self.study, self.base
        single, mixed, full = study.single(base.local()), study.mixed(base.local(), "H20"), replace(base, delta=False)
        two, turns = study.usd(base, "H20"), study.single(replace(base, schedule="sync").local())

        def each(values: Sequence[Any], key: str) -> str:
            return ", ".join(f"{x} {against(study.ratio(replace(base, **{key: x}), 'H20'))}" for x in values)

        evens, spread = [], []
        for schedule in SCHEDULES:
            points = [replace(base, schedule=schedule), replace(full, schedule=schedule)]
            points.append(replace(points[1], egress=0.0))
            evens.append(f"{schedule} {' / '.join(threshold_text(study.bandwidth(at, 'H20')[0]) for at in points)}")
            for at in points[:2]:
                costs = [study.usd(replace(at, rtt_ms=rtt), "H20") for rtt in RTT_MS]
                spread += [max(costs) / min(costs) - 1] if all(map(math.isfinite, costs)) else []
        egress = [threshold_text(study.dearest_egress(at, "H20")) for at in (base, full)]
        cheap = ", ".join(f"H800 + far {gpu} {against(study.ratio(base, gpu))}" for gpu in PARTNERS[1:])
        gpus = ", ".join(f"{gpu} {threshold_text(study.dearest_gpu(base, gpu))}" for gpu in PARTNERS)
        wins = [sum((one["ratio"] or 9) < 1 for one in found if one["delta"] == delta) for delta in (True, False)]
        return [
            f"At the base point the best single site is {single_name(single)} ({single.split}), at {single.usd:.3f} "
            f"USD per 1,000 samples; H800 + far H20 is {against(two / single.usd)} with deltas and "
            f"{against(study.ratio(full, 'H20'))} with full weights.",
            f"Could H800 and H20 be rented in one site at the same prices, it would be {mixed.usd:.3f} USD: distance "
            f"itself costs at most {cell(two / mixed.usd - 1, '.1%')} with deltas. What a second site gives is the "
            "other GPU type; a site that has both is the better choice unless it asks more than that.",
            f"By the longest answer, {base.schedule}, deltas, H800 + far H20: {each(self.some(LENGTHS), 'lengths')}.",
            f"By schedule, {base.lengths}, deltas: {each(SCHEDULES, 'schedule')}; under sync the best single site is "
            f"{turns.split}.",
            f"By the number of H800 that set the pace: {each([factor * base.gpus for factor in PACES], 'gpus')}.",
            f"Break-even bandwidth, {base.lengths}, Gbit/s with deltas / full weights / full weights and free traffic: "
            f"{'; '.join(evens)}.",
            f"From {RTT_MS[0]:g} to {RTT_MS[-1]:g} ms of round trip costs at {base.gbit_s:g} Gbit/s change by at most "
            f"{cell(max(spread, default=math.inf), '.1%')}: a version is one message a step (and GPUs are whole). "
            "Delay matters through what is left out below.",
            f"Egress price up to which H800 + far H20 is cheaper, USD/GB: {egress[0]} with deltas, {egress[1]} with "
            f"full weights ({base.lengths}, {base.schedule}); deltas are taken as {DELTA_RATIO:g} times smaller.",
            f"Other cards: {cheap}; to pay, a GPU of the second site may cost at most, USD/h: {gpus}.",
            f"On the map two sites win {wins[0]} of {len(found) // 2} points with deltas, {wins[1]} with full weights.",
        ]


def finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def draw_curves(found: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Two rows: cost at equal pace, step for equal money; a column by schedule."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    grid = figure.subplots(2, len(SCHEDULES), sharex=True)
    rows = (
        ("usd", "single_usd", "break_even_usd", "USD per 1,000 samples, equal pace"),
        ("step_s", "single_step_s", "break_even_step", "seconds of a step, equal money"),
    )
    for row, (key, single, even, label) in enumerate(rows):
        for column, schedule in enumerate(SCHEDULES):
            axes: Axes = grid[row][column]
            for one in (one for one in found if one["schedule"] == schedule):
                colour, style = CURVES[one["placement"]][2:]
                values = [math.nan if value is None else value for value in one[key]]
                axes.plot(one["gbit_s"], values, style, color=colour, label=f"H800 + far {one['placement']}")
                at = one[even]["value"]
                if at is not None and one["gbit_s"][0] <= at <= one["gbit_s"][-1]:
                    axes.plot(at, one[single], "o", color=colour, zorder=5)
                    place = (3, 6) if style == "-" and colour == "C0" else (3, -14)
                    axes.annotate(f"{at:.2g}", (at, one[single]), place, textcoords="offset points", color=colour)
            axes.axhline(one[single], color="black", lw=1, label="best single site of one type")
            if row == 0:
                axes.axhline(one["mixed_usd"], color="grey", ls=":", label="H800 + H20 in one site (bound)")
                axes.set_title(schedule)
            axes.set(xscale="log", yscale="log", ylim=(None, min(axes.get_ylim()[1], MOST_SHOWN * one[single])))
            for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                axis("{x:g}")
            axes.tick_params(axis="y", which="both", labelsize=8)
            axes.grid(alpha=0.3)
        grid[row][0].set_ylabel(label)
    for axes in grid[1]:
        axes.set_xlabel("Gbit/s between the sites")
    figure.suptitle(f"{title}. Circles: break-even, Gbit/s; a line begins where the placement keeps up", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    save_plot(figure, path)


def draw_map(found: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """The winner in colour, the two sites' cost by the best single site's in figures."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    names = sorted({one["best"] for one in found})
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for (schedule, delta), axes in zip(itertools.product(("stream", "async"), (True, False)), grid.flat, strict=True):
        some = [one for one in found if one["schedule"] == schedule and one["delta"] == delta]
        lengths = list(dict.fromkeys(one["lengths"] for one in some))
        prices = list(dict.fromkeys(one["egress"] for one in some))
        values = np.array([names.index(one["best"]) for one in some]).reshape(len(lengths), len(prices)).T
        axes.imshow(values, origin="lower", aspect="auto", cmap="Pastel1", vmin=0, vmax=8)
        for one in some:
            place = (lengths.index(one["lengths"]), prices.index(one["egress"]))
            text = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
            axes.text(*place, text, ha="center", va="center", fontsize=8)
        axes.set(xticks=range(len(lengths)), xticklabels=lengths, yticks=range(len(prices)))
        axes.set_yticklabels([f"{usd:g}" for usd in prices])
        axes.set_title(f"{schedule}, {'deltas' if delta else 'full weights'}", fontsize=10)
    for axes in grid[1]:
        axes.set_xlabel("longest answer, tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel("egress, USD/GB")
    colours = matplotlib.colormaps["Pastel1"]
    patches = [Patch(color=colours(number), label=name) for number, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(names))
    figure.suptitle(
        f"{title}. Colour: the cheapest; figure: best two sites / best single site (-: cannot keep up)", fontsize=10
    )
    save_plot(figure, path)


LEFT_OUT = """
- All-reduces over PCIe at the data sheet's rate; cards without transfers from one to another (RTX4090) reach less.
- Losses, congestion, and what they and its window make of a TCP stream over a long way: here a version fills its
  share of the link at any delay. That is what delay costs in earnest.
- Interruptions of cheap capacity: on-demand prices are assumed; a spot price goes into `--hardware`, its interruptions
  into nothing here.
- Time to encode and decode deltas, stored copies, fixed fees of links, volume discounts, whole machines as the unit of
  renting, idle time while a run starts.
- Quality: async and stream samples are counted as good as sync ones.
- Generation on both sides: a split could keep some of it beside the trainer. The planner would; here all of it is
  away, so that the link is felt.
- Under sync the planner asks that new weights get over the link within the time of the generation, not of the step.
- The cost model's own errors: absolute rates are well above the published ones, most under async (plan_paper.md has
  both); ratios are nearer. A difference of a few percent between placements is within them.
"""


@click.command(help=__doc__)
@click.option("--model", default="7b", show_default=True, help="A name of the planner's table, or a folder.")
@click.option(
    "--gpus",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="H800 in one site that set the pace and the money.",
)
@click.option("--egress", default=EGRESS, show_default=True, type=FiniteFloat(0), help="USD per GB at the base point.")
@click.option("--hardware", type=click.Path(path_type=Path, exists=True), help="Prices and GPU types of your own.")
@click.option("--quick", is_flag=True, help="A coarse grid.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
def main(model: str, gpus: int, egress: float, hardware: Path | None, quick: bool, out: Path | None) -> None:
    out = results_folder(out, "model", "gpus", "egress", "hardware", "quick")
    console = terminal()

    def progress(items: Sequence[Any], what: str) -> Any:
        return track(items, what, console=console, transient=True, disable=not console.is_terminal)

    try:
        devices = {gpu: device(gpu, load_devices(hardware)) for gpu in ALL}
        study = Comparison(find_model(model), PPO, batch, devices, TRAINS, SUPPLY, IN_TURNS)
        base = Point(gpus, "20k", "async", 10.0, 30.0, egress)
        sweeps = Sweeps(study, base, quick, progress)
        made = sweeps.sheets()
    except (UserError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    lines, points = sweeps.curves(), sweeps.map()
    says = sweeps.reading(points)
    for sheet in made:
        sheet.show(console)
    console.print("\n".join(f"- {line}" for line in says), LEFT_OUT, highlight=False, markup=False, soft_wrap=True)
    kept = out / "cross_datacenter_cost.json"
    tables = [{"title": one.title, "columns": one.columns, "rows": one.rows, "notes": one.notes} for one in made]
    values = {"model": study.model.name, "delta_ratio": DELTA_RATIO, "base": asdict(base), "reading": says}
    kept.write_text(json.dumps({**values, "tables": tables, "curves": lines, "map": points}, indent=1) + "\n")
    where = (
        f"{study.model.name}; {base.gpus} H800 set the pace; base point: lengths {base.lengths}, {base.schedule}, "
        f"{base.gbit_s:g} Gbit/s, {base.rtt_ms:g} ms, {base.egress:g} USD/GB"
    )
    about = explanation(__doc__)
    text = f"# When a second site pays\n\nWritten by `{Path(__file__).relative_to(ROOT)}`. {where}.\n\n{about}\n\n"
    text += "## Reading\n\n" + "\n".join(f"- {line}" for line in says) + "\n\n"
    text += "![cost and step time over bandwidth](cross_datacenter_cost.svg)\n"
    text += "![the cheapest placement](cross_datacenter_cost_map.svg)\n\n"
    text += "\n".join(sheet.markdown() for sheet in made) + f"\n## Left out\n{LEFT_OUT}"
    (out / "cross_datacenter_cost.md").write_text(text)
    draw_curves(lines, f"{study.model.name}, {base.lengths}", out / "cross_datacenter_cost.svg")
    draw_map(points, f"{study.model.name}, {base.gbit_s:g} Gbit/s", out / "cross_datacenter_cost_map.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
