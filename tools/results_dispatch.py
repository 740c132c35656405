"""Texts of the figures about dispatch, the simulator, length prediction and plans (`results.py`)."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean, median
from typing import Any

from results_data import Figure, mean, named, percent, read, slashed

FIGURES: dict[str, Figure] = {}
"""Name of a place -> what makes its text."""


@named(FIGURES, "live-dispatch")
def _live_dispatch() -> str:
    by_policy: dict[str, list[float]] = {}
    for one in read("live_dispatch/results")["results"]:
        by_policy.setdefault(one["policy"], []).append(one["measured_ratio"])
    ours, known, least, algorithm = (
        f"{geometric_mean(by_policy[name]):.3f}"
        for name in ("ours, ranker", "ours, known lengths", "least-loaded", "Algorithm 2, ranker")
    )
    return (
        f"ours with forecasts {ours}, with true lengths {known}; least-loaded {least}; StreamRL's Algorithm 2 "
        f"{algorithm}; geometric mean of {len(by_policy['round-robin'])} workloads"
    )


@named(FIGURES, "live-dispatch-simulator")
def _live_dispatch_simulator() -> str:
    found = read("live_dispatch/results")
    return (
        f"median error {percent(found['median_error'], 1)}; ranks {found['same_order']} of {found['pairs']} pairs of "
        f"policies as measured that differ by over 3 %, and {found['same_order_apart']} of the {found['pairs_apart']} "
        "whose repeats do not overlap"
    )


@named(FIGURES, "live-schedules")
def _live_schedules() -> str:
    found = read("live_schedules")
    ratios: dict[tuple[str, str], list[float]] = {}
    base = {
        (one["workload"], one["schedule"]): median(one["measured"])
        for one in found["turns"]
        if one["policy"] == "least-loaded"
    }
    for one in found["turns"]:
        ratio = median(one["measured"]) / base[one["workload"], one["schedule"]]
        ratios.setdefault((one["schedule"], one["policy"]), []).append(ratio)
    told = (
        f"`{schedule}`: ours {slashed(ratios[schedule, 'skew-aware'], '.3f')}, StreamRL's Algorithm 2 "
        f"{slashed(ratios[schedule, 'algorithm2'], '.3f')}"
        for schedule in ("stream", "async")
    )
    return (
        f"{'; '.join(told)}. Of the {found['pairs']} pairs of policies that measured apart in every repeat, "
        f"{found['same_order']} are simulated in that order"
    )


@named(FIGURES, "speculation")
def _speculation() -> str:
    sizes = read("speculation")["workloads"].values()
    later, first = (slashed((one[part]["measured"] for one in sizes), ".2f") for part in ("later", "first"))
    noise = [
        part["measured_cpu"]
        for one in read("speculation_noise")["workloads"].values()
        for part in (one["first"], one["later"])
    ]
    rounds = [one for size in sizes for one in size["rounds"]]
    many = sum(one["requests"] for one in rounds)
    auto, none = (sum(one[arm]["reward"] * one["requests"] for one in rounds) / many for arm in ("auto", "none"))
    return (
        f"{later} after the first round; {first} in it; reward {auto:.3f} against {none:.3f}. Where little recurs "
        f"(noise): {min(noise):.2f} to {max(noise):.2f} of the CPU time"
    )


def _grid(name: str) -> dict[str, float]:
    found: dict[str, float] = read("dispatch_policies/grid")["policies"][name]
    return found


@named(FIGURES, "grid-oracle")
def _grid_oracle() -> str:
    ours, best = _grid("ours, oracle"), read("dispatch_policies/grid")["ours_oracle_against_best_partition"]
    return (
        f"ours {ours['mean']:.3f} ({ours['worst']:.2f} at worst; at most {percent(best['worst'] - 1, 1)} behind the "
        f"best partition), Algorithm 2 {_grid('Algorithm 2, oracle')['mean']:.3f}"
    )


@named(FIGURES, "grid-forecasts")
def _grid_forecasts() -> str:
    ours = _grid("ours, forecasts")
    kept = read("dispatch_policies/grid")["share_of_oracle_saving_with_forecasts"]["ours"]
    return (
        f"ours {ours['mean']:.3f}, {percent(kept)} of the saving with true lengths (slower in "
        f"{percent(ours['share_worse'])} of single draws, at worst {ours['worst']:.2f}); without moves "
        f"{_grid('ours, forecasts, no moves')['mean']:.3f}; Algorithm 2 {_grid('Algorithm 2, forecasts')['mean']:.3f}"
    )


QUALITIES = {
    "honest, .2": "honest, off by 20 %",
    "honest, .35": "off by 35 %",
    "overconfident, .7 told as .2": "off by 70 % and told as 20 %",
    "useless": "useless",
    "5 % unforeseen runaways": "5 % unforeseen runaways",
    "adversarial": "adversarial",
}


SCHEDULES = ("sync", "one_step_off", "stream")


def _three(family: str, quality: str, how: str, what: str = "mean") -> str:
    """Figures of the schedules, of one kind of workload."""
    cells = read("dispatch_quality")["cells"]
    return slashed(cells[f"{family}, {schedule}, {quality}"][how][what] for schedule in SCHEDULES)


@named(FIGURES, "dispatch-quality")
def _dispatch_quality() -> str:
    told = []
    for quality, name in QUALITIES.items():
        text = f"{name}: {_three('made up', quality, 'ours')}"
        if quality not in ("honest, .2", "honest, .35", "overconfident, .7 told as .2"):
            text += f" (believed blindly {_three('made up', quality, 'blindly')})"
        told.append(text)
    return f"{'; '.join(told)}. For 95 % of steps at most, useless: {_three('made up', 'useless', 'ours', 'p95')}"


@named(FIGURES, "dispatch-quality-others")
def _dispatch_quality_others() -> str:
    families = [family for family in ("grid", "recorded") if family in read("dispatch_quality")["workloads"]]
    told = []
    for quality, name in QUALITIES.items():
        each = (f"{family} {_three(family, quality, 'ours')}" for family in families)
        told.append(f"{name}: {', '.join(each)}")
    return "; ".join(told)


def _holds(cell: dict[str, float]) -> bool:
    """Whether the mean is at most 1.00, the upper end of its interval 1.01 and the 95th percentile 1.05, as shown."""
    return cell["mean"] < 1.0005 and cell["high"] < 1.0105 and cell["p95"] < 1.0505


@named(FIGURES, "dispatch-quality-bounds")
def _dispatch_quality_bounds() -> str:
    found = read("dispatch_quality")
    cells = [(ways["ours"], ways["blindly"]) for ways in found["cells"].values()]
    single = [of for by_name in found["single"].values() for of in by_name.values()]
    return (
        f"{sum(_holds(ours) for ours, _ in cells)} of {len(cells)} cells; believed blindly "
        f"{sum(_holds(blind) for _, blind in cells)}. Of single workloads, {found['steps']} steps each, "
        f"{sum(map(_holds, single))} of {len(single)}"
    )


@named(FIGURES, "dispatch-async")
def _dispatch_async() -> str:
    every = {
        one["way"]: f"{mean(one['ratios']):.3f} ({min(one['ratios']):.2f} to {max(one['ratios']):.2f})"
        for one in read("async_policies")["ways"]
        if one["trainer"] == "balanced"
    }
    names = {
        "group-probe": "group probe",
        "1/2 of the slots": "half of the slots",
        "3/4 of the slots": "three quarters",
    }
    del every["least-loaded"]
    return "; ".join(f"{names.get(way, way)} {figures}" for way, figures in every.items())


@named(FIGURES, "plan-speed")
def _plan_speed() -> str:
    found = read("dispatch_policies/speed")
    return f"{found['plan_ms_known']:.1f} ms with known lengths, {found['plan_ms_forecasts']:.1f} ms with forecasts"


@named(FIGURES, "simulate-million")
def _simulate_million() -> str:
    return f"{read('dispatch_policies/speed')['simulate_million_s']:.1f} s"


@named(FIGURES, "paper-7b")
def _paper_7b() -> str:
    found = read("paper_7b")

    def over_cells(name: str) -> str:
        ratios = [row[name] for row in found["rows"]]
        return f"{mean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"

    published = found["published"]
    return (
        f"mean of {len(found['rows'])} cells (range): with forecasts of the paper's recall ours "
        f"{over_cells('ours, forecasts')}, its Algorithm 2 {over_cells('Algorithm 2, forecasts')}; with true lengths "
        f"{over_cells('ours, true lengths')} and {over_cells('Algorithm 2, true lengths')}; the paper reports "
        f"{published['forecasts']:.2f} and {published['true lengths']} for Algorithm 2, without number of instances "
        "and slots"
    )


@named(FIGURES, "dispatch-ceiling")
def _dispatch_ceiling() -> str:
    slots = read("dispatch_ceiling")["slots"]
    ranker, others = (
        slashed((100 * one[name]["captured"] for one in slots.values()), ".0f") for name in ("ranker", "24 others")
    )
    saved = slashed((100 * (1 - one["oracle"]) for one in slots.values()), ".0f")
    return (
        f"{ranker} % of the {saved} % that the oracle saves with {' / '.join(slots)} slots each; a forecaster that "
        f"knows 24 other samples of each prompt: {others} %"
    )


def _recalls(found: dict[str, Any]) -> str:
    return slashed(found["recall"].values())


def _ranked(name: str, ranking: str = "model") -> str:
    """Return the recalls of a ranking, the first one with its interval."""
    found = read(f"ranker_{name}")["rankings"][ranking]
    low, high = found["interval"]
    first, *rest = found["recall"].values()
    return f"{first:.3f} ({low:.3f} to {high:.3f}) / {slashed(rest)}"


@named(FIGURES, "ranker-smollm2")
def _ranker_smollm2() -> str:
    every = read("ranker_smollm2")["rankings"]
    return (
        f"{_ranked('smollm2')}: a table of the tasks is kept. Share of the task at the limit: "
        f"{_recalls(every['task_at_limit'])}; mean length of the task: {_recalls(every['task_mean'])}. No ranking can "
        f"exceed {_recalls(every['limit'])}"
    )


def _many(name: str) -> str:
    many = read(f"ranker_{name}")["many"]
    return f"{many['prompts']} prompts: {many['recall']['0.2']:.3f}; ceiling {many['ceiling']['0.2']:.3f}"


for _name in ("smollm2", "small_reasoner"):
    named(FIGURES, f"ranker-{_name}-many")(partial(_many, _name))
    named(FIGURES, f"ranker-{_name}-new-tasks")(partial(_ranked, _name, "new_tasks"))


@named(FIGURES, "ranker-smollm2-moved")
def _ranker_moved() -> str:
    moved = read("ranker_smollm2")["moved"]
    ranker, clipped = moved["ranker"], moved["clipped"]
    return (
        f"recall at 20 % {ranker['recall']:.3f}, share at the limit {moved['task_at_limit']['recall']:.3f}; "
        f"{percent(ranker['covered'])} of the lengths are up to the 90 % quantile, {percent(clipped['covered'])} where "
        "it is clipped at 256"
    )


@named(FIGURES, "ranker-small-reasoner")
def _ranker_small_reasoner() -> str:
    every = read("ranker_small_reasoner")["rankings"]
    return (
        f"{_ranked('small_reasoner')}; mean length of the task {_recalls(every['task_mean'])}, length of the prompt "
        f"{_recalls(every['prompt_characters'])}"
    )


@named(FIGURES, "plan-paper")
def _plan_paper() -> str:
    found = read("plan_paper")
    schedules = ("stream", "one_step_off", "async")
    told, off = [], []
    for row in found["one_site"]:
        if row["model"] != "7b":
            continue
        ours = [row[name]["samples_per_s"] / row["colocated"]["samples_per_s"] for name in schedules]
        together, stream, overlapped = found["published_7b"][row["lengths"]]
        theirs = [rate / together for rate in (stream, overlapped)]
        told.append(f"{row['lengths']}: {slashed(ours, '.2f')} (published {slashed(theirs, '.2f')})")
        off.append([100 * (ours[0] / theirs[0] - 1), *(100 * (one / theirs[1] - 1) for one in ours[1:])])
    errors = "; ".join(
        f"`{name}` {', '.join(f'{one:+.0f}' for one in every)} %"
        for name, every in zip(schedules, zip(*off, strict=True), strict=True)
    )
    return f"{'; '.join(told)}. Off by, `one_step_off` and `async` against the published async: {errors}"


@named(FIGURES, "dispatch-ablation")
def _dispatch_ablation() -> str:
    ratios = read("dispatch_ablation")["ratios"]

    def rise(part: str, where: str) -> str:
        return f"{100 * (mean(ratios[part][where]) / mean(ratios['nothing'][where]) - 1):+.1f} %"

    cells = (
        ("corrections", "runaways", "corrections while it runs, unforeseen runaways"),
        ("scenarios", "forecasts", "scenarios"),
        ("blocks", "forecasts", "stretches by dynamic programming"),
        ("greedy", "forecasts", "the greedy candidate"),
        ("objective of stream", "stream", "the objective of `stream`"),
    )
    return "mean time without " + "; ".join(f"{what}: {rise(part, where)}" for part, where, what in cells)
