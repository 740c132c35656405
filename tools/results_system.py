"""Texts of the figures about families, weights, sites, robustness and throughput (`results.py`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from statistics import geometric_mean, median
from typing import Any

import mutant_summary
import mutants
from results_data import RESULTS, Figure, mean, named, page_rows, percent, read

FIGURES: dict[str, Figure] = {}
"""Name of a place -> what makes its text."""

FAMILY_CHECKS = {
    "trainer against vLLM": "trainer against vLLM",
    "new weights in vLLM": "a weight version against a fresh engine",
    "between tokens": "new weights between tokens",
    "in fp8": "weights in fp8",
    "in int8": "weights in int8",
}
"""Column -> name of the check of vLLM (`streamrl/verify/generator_order.py`, which loads torch)."""
FAMILY_COLUMNS = ("family", "shared prompts", "separate rows", "verdict", *FAMILY_CHECKS)


def _way(ways: Sequence[dict[str, Any]], kind: str) -> str:
    """Return the errors of the proven ways to run a family's samples, or what differs."""
    every = [way for way in ways if way["kind"] == kind]
    right = [way for way in every if not way["differs"]]
    shared = kind == "shared"
    if not right or (shared and len(right) < len(every)):
        return "no: " + next(str(way["differs"]) for way in reversed(every) if way["differs"])
    worst = max(right, key=lambda way: way["logprob_error"]) if shared else right[0]
    name = "" if shared else f"{worst['attention']}, "
    return f"{name}{worst['logprob_error']:.0e} nats, {max(way['gradient_error'] for way in right):.0e}"


def family_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a family's row of verify_families.json, below `FAMILY_COLUMNS`."""
    found = {finding["check"]: finding for finding in row["findings"]}

    def told(check: str) -> str:
        if check not in found:
            return "not checked"
        verdict, reason = found[check]["verdict"], found[check]["reason"]
        figure = re.search(r"within (\S+ nats)", reason)
        return f"{verdict}: {reason}" if verdict != "works" else figure[1] if figure else "bit for bit"

    ways = (_way(row["ways"], kind) for kind in ("shared", "separate"))
    return [row["family"], *ways, found["packing"]["verdict"], *map(told, FAMILY_CHECKS.values())]


@named(FIGURES, "stress")
def _stress() -> str:
    rounds = read("stress")
    last, failed = rounds[-1], {test for one in rounds for test in one["failed"]}
    unbroken = next((n for n, one in enumerate(reversed(rounds)) if one["failed"]), len(rounds))
    minutes = median(one["seconds"] for one in rounds) / 60
    text = (
        f"{len(rounds)} rounds of {last['tests']} tests, {last['workers']} at once beside {last['busy']} busy "
        f"processes, {minutes:.0f} min each on {last['machine']}: {sum(not one['failed'] for one in rounds)} without a "
        "failure"
    )
    streaks = groupby(rounds, lambda one: bool(one["failed"]))
    longest = max((len(list(some)) for bad, some in streaks if not bad), default=0)
    text += f", up to {longest} in a row" if longest > unbroken else ""
    text += f", the last {unbroken} in a row" if 1 < unbroken < len(rounds) else ""
    if failed:
        recent = [n for n, one in enumerate(rounds) if one["failed"]][-1]
        since = "all of which have passed since" if recent < len(rounds) - 1 else "not all of which have passed since"
        text += f"; {len(failed)} tests ever failed, {since}"
    return text


@named(FIGURES, "families")
def _families() -> str:
    found = read("verify_families")
    lines = [
        f"Made in {found['seconds']:.0f} s.",
        "",
        f"| {' | '.join(FAMILY_COLUMNS)} |",
        "|---" * len(FAMILY_COLUMNS) + "|",
    ]
    for row in found["rows"]:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in family_cells(row)) + " |")
    return "\n".join(lines)


def _ratio(coded: dict[str, Any]) -> float:
    return float(coded["full_bytes"] / coded["delta_bytes"])


def _in_bf16() -> list[dict[str, Any]]:
    return [one for one in read("delta_codec")["made"] if one["dtype"] == "bfloat16"]


def _one_percent() -> dict[str, Any]:
    return min(_in_bf16(), key=lambda one: abs(one["density"] - 0.01))


@named(FIGURES, "delta-ratio")
def _delta_ratio() -> str:
    return f"{_ratio(_one_percent()):.0f} times smaller than the weights"


@named(FIGURES, "delta-bound")
def _delta_bound() -> str:
    one = _one_percent()
    worst = max(other["delta_bytes"] / other["bound_bytes"] for other in read("delta_codec")["made"])
    return (
        f"{one['delta_bytes'] / one['bound_bytes']:.2f} times it; at most {worst:.2f} from 0.01 to 100 % changed (zstd "
        f"of the XOR: {one['full_bytes'] / one['xor_bytes']:.0f} times smaller; index and value pairs: "
        f"{one['full_bytes'] / one['pairs_bytes']:.0f})"
    )


@named(FIGURES, "delta-speed")
def _delta_speed() -> str:
    one = _one_percent()
    return f"encodes {one['encode_gb_s']:.1f}, decodes {one['decode_gb_s']:.1f}"


@named(FIGURES, "delta-slow")
def _delta_slow() -> str:
    slow = [one["encode_gb_s"] for one in read("delta_codec")["made"] if one["encode_gb_s"] < 0.5]
    return f"{min(slow):.2f} to {max(slow):.2f}: missed"


@named(FIGURES, "delta-adamw")
def _delta_adamw() -> str:
    every = [one for one in read("delta_codec")["steps"] if one["lr"] == 5e-6]
    fresh, settled = ([_ratio(one["coded"]) for one in every if one["settled"] is kind] for kind in (False, True))
    return (
        f"{min(fresh):.0f} to {max(fresh):.0f} times smaller from a bf16 checkpoint, {min(settled):.0f} to "
        f"{max(settled):.0f} once the masters have left its grid"
    )


@named(FIGURES, "delta-demo")
def _delta_demo() -> str:
    steps = read("delta_codec")["live"]["steps"]
    shares, ratios = [one["density"] for one in steps], [_ratio(one) for one in steps]
    return (
        f"{100 * min(shares):.1f} to {percent(max(shares), 1)} of elements change in a step, {min(ratios):.0f} to "
        f"{max(ratios):.0f} times smaller"
    )


@named(FIGURES, "two-sites-short")
def _two_sites_short() -> str:
    raw, _, delta, _ = page_rows("two_sites", "A version of the weights")
    return f"raw {float(raw[3]):.1f} s, delta {delta[3]} s"


@named(FIGURES, "two-sites")
def _two_sites() -> str:
    raw, _, delta, two = page_rows("two_sites", "A version of the weights")
    same = "the same bytes" if delta[2] == two[2] else f"{two[2]} MB"
    share = float(raw[2]) * 8 / 50 / float(raw[3])
    return (
        f"raw {float(raw[2]):.0f} MB in {float(raw[3]):.1f} s ({percent(share)} of the link); delta {delta[2]} MB in "
        f"{delta[3]} s, {same} for one and for two instances"
    )


@named(FIGURES, "two-sites-async")
def _two_sites_async() -> str:
    linked, free = ([float(one) for one in row[3].split()] for row in page_rows("two_sites", "Async steps with deltas"))
    pairs = [one / other for one, other in zip(linked, free, strict=True)]
    return f"{mean(linked) / mean(free):.2f} ({len(pairs)} pairs of runs: {', '.join(f'{one:.3f}' for one in pairs)})"


@named(FIGURES, "emulated-sites")
def _emulated_sites() -> str:
    errors: dict[str, list[float]] = {}
    for row in page_rows("emulated_sites", "Seconds per step"):
        schedule, weights, _ = row[0].split(", ", 2)
        errors.setdefault(f"`{schedule}`, {weights}", []).append(float(row[3].rstrip("%")))
    every = [error for some in errors.values() for error in some]
    told = "; ".join(f"{name}: {', '.join(f'{error:+.1f}' for error in some)}" for name, some in errors.items())
    return f"median error {median(map(abs, every)):.1f} %, mean {mean(every):+.1f} %. All of them: {told}"


@named(FIGURES, "second-site")
def _second_site() -> str:
    reading = " ".join(read("cross_datacenter_cost")["reading"])

    def stated(pattern: str) -> tuple[str, ...]:
        found = re.search(pattern, reading)
        assert found is not None, pattern
        return found.groups()

    than = r"(\S+)% (cheaper|dearer)"
    both = stated(rf"H800 \+ far H20 is {than} with deltas and {than} with full weights")
    (sync,) = stated(r"sync (never) / never / never")
    stream, continuous = stated(r"stream (\S+) / \S+ / \S+; async (\S+) / ")
    (egress,) = stated(r"USD/GB: (\S+) with deltas")
    return (
        f"{both[0]} % {both[1]} per 1,000 samples with deltas, {both[2]} % {both[3]} with full weights; break-even at "
        f"{float(continuous):.3f} Gbit/s (`async`) and {float(stream):.3f} (`stream`), {sync} under `sync`; with "
        f"deltas it pays up to {float(egress):.2f} USD/GB of egress"
    )


def _site_ratios(schedule: str, key: str) -> dict[tuple[str, str, str], float]:
    """Return our time or rate over round-robin's, by (fleet, lengths, what is known)."""
    return {
        (one["fleet"], one["lengths"], one["known"]): one["policies"]["ours"][key] / one["policies"]["round-robin"][key]
        for one in read("site_dispatch")["cases"]
        if one["schedule"] == schedule
    }


@named(FIGURES, "site-sync")
def _site_sync() -> str:
    ours = list(_site_ratios("sync", "seconds").values())
    by_fleet: dict[str, list[float]] = {}
    for (fleet, _, _), ratio in _site_ratios("sync", "seconds").items():
        by_fleet.setdefault(fleet, []).append(ratio)
    fleets = ", ".join(f"{geometric_mean(some):.2f}" for some in by_fleet.values())
    capacity = [
        one["policies"]["by capacity"]["seconds"] / one["policies"]["round-robin"]["seconds"]
        for one in read("site_dispatch")["cases"]
        if one["schedule"] == "sync"
    ]
    return (
        f"{geometric_mean(ours):.3f}, geometric mean of {len(ours)} cases ({min(ours):.2f} to {max(ours):.2f}; by "
        f"fleet {fleets}); by capacity {geometric_mean(capacity):.3f}"
    )


@named(FIGURES, "site-async")
def _site_async() -> str:
    ours = _site_ratios("async", "tokens_per_s")
    known = {key: geometric_mean([ratio for case, ratio in ours.items() if case[2] == key]) for _, _, key in ours}
    lower = [case for case, ratio in ours.items() if ratio < 1]
    return (
        f"{geometric_mean(list(ours.values())):.3f}, geometric mean of {len(ours)} cases ({known['forecasts']:.2f} "
        f"with forecasts, {known['nothing']:.2f} without; lower than round-robin in {len(lower)} cases, "
        f"{sum(case[2] == 'nothing' for case in lower)} of them without forecasts)"
    )


@named(FIGURES, "chaos-short")
def _chaos_short() -> str:
    audit = read("chaos")["audit"]
    return f"{audit['lost']} samples lost, {audit['twice']} trained twice"


@named(FIGURES, "chaos-what")
def _chaos_what() -> str:
    faults = read("chaos")["faults"]
    return f"{len(faults)} faults of {len({one['kind'] for one in faults})} kinds"


@named(FIGURES, "chaos")
def _chaos() -> str:
    found = read("chaos")
    minutes = (found["ended_at"] - found["faults"][0]["at"]) / 60
    hangs = sum(bool(one["hang"]) for one in found["faults"])
    audit = found["audit"]
    return (
        f"{audit['samples']} samples in {minutes:.0f} minutes: {audit['lost']} lost, {audit['twice']} trained twice, "
        f"{hangs} hangs"
    )


@named(FIGURES, "chaos-instances-what")
def _chaos_instances_what() -> str:
    found = read("chaos_instances")
    return f"{len(found['faults'])} faults of instances, {found['audit']['samples']:,} samples"


@named(FIGURES, "chaos-instances")
def _chaos_instances() -> str:
    found = read("chaos_instances")
    hit = [one for one in found["faults"] if one["tokens"] is not None]
    kept = sum(one["kept"] for one in hit) / sum(one["tokens"] + one["unseen"] for one in hit)
    return f"{percent(kept, 1)}; {found['audit']['lost']} samples lost, {found['audit']['twice']} trained twice"


@named(FIGURES, "chaos-serving")
def _chaos_serving() -> str:
    def most(*kinds: str) -> float:
        faults = read("chaos_instances")["faults"]
        return max(float(one["serving_s"]) for one in faults if one["kind"] in kinds and one["serving_s"] is not None)

    return (
        f"at most {most('instance-kill', 'engine-kill'):.1f} s after a death, {most('instance-hang'):.1f} s after an "
        f"instance fell silent, {most('engine-hang'):.0f} s after an engine hung whose process still spoke"
    )


@named(FIGURES, "mutants")
def _mutants() -> str:
    scores = mutant_summary.load(RESULTS / "mutants.json")
    made, killed, equal = (
        sum(getattr(one, key) for one in scores.values()) for key in ("mutants", "killed", "equivalent")
    )
    lowest = min(scores.values(), key=lambda one: one.share_of_different)
    different = percent(killed / (made - equal), 1)
    return (
        f"{killed} of {made}, {len(scores)} of the {len(mutants.TESTS)} modules; {different} of those that are not "
        f"equivalent; the lowest module {percent(lowest.share_of_different)} ({lowest.mutants} mutants)"
    )


@named(FIGURES, "simulator-overlap")
def _simulator_overlap() -> str:
    found: dict[str, dict[str, float]] = {}
    for run in read("simulator_overlap")["runs"]:
        total = found.setdefault(run["way"], {"busy_s": 0.0, "hidden_s": 0.0})
        for name in total:
            total[name] += sum(step[name] for step in run["steps"])
    own, inside, lockstep = (percent(total["hidden_s"] / total["busy_s"]) for total in found.values())
    return (
        f"{own}; stepped inside the agent's process {inside}, there in lockstep {lockstep}; on a machine busy with "
        "other work"
    )


@named(FIGURES, "environment-kills")
def _environment_kills() -> str:
    found = read("environment_kills")
    killed = " and ".join(str(one["killed"]) for one in found["phases"])
    minutes = " and ".join(f"{one['seconds'] / 60:.0f}" for one in found["phases"])
    audit = found["audit"]
    void = ", ".join(f"{count} void ({cause})" for cause, count in sorted(audit["voids"].items())) or "none void"
    return (
        f"{killed} killed in {minutes} minutes, {found['replaced']} replaced: {audit['samples']} episodes trained, "
        f"{audit['lost']} lost, {audit['twice']} trained twice, {void}; on a machine busy with other work"
    )


@named(FIGURES, "kill-everywhere")
def _kill_everywhere() -> str:
    found = read("kill_everywhere")
    killed, calm = found["runs"]["killed"], found["runs"]["undisturbed"]
    same = (
        "the same" if found["same"] and killed["trained"] == calm["trained"] else f"not the same as {calm['trained']:,}"
    )
    return (
        f"{same} {killed['trained']:,} samples trained as undisturbed, {killed['twice'] or 'none'} twice; "
        f"{killed['seconds']:.0f} s against {calm['seconds']:.0f} s"
    )


@named(FIGURES, "elastic")
def _elastic() -> str:
    rule = read("elastic")["rule"]
    return (
        f"{'; '.join(rule['decisions'])}. {rule['ledger']['trained']:,} samples, {rule['groups_missing']} groups lost, "
        f"{rule['trained_twice']} samples twice"
    )


@named(FIGURES, "elastic-hand")
def _elastic_hand() -> str:
    hand = read("elastic")["hand"]
    (came,) = hand["came"]
    return (
        f"ready after {came['ready_at'] - came['requested_at']:.1f} s, first sample after "
        f"{came['first_sample_at'] - came['requested_at']:.1f} s; {hand['ledger']['trained']} samples, "
        f"{hand['groups_missing']} groups lost"
    )


@named(FIGURES, "ray-stop")
def _ray_stop() -> str:
    few, *_, many = page_rows("ray_stop", "Seconds to stop")
    return (
        f"{few[0]} and {many[0]} processes: {few[1]} and {many[1]} s if they end at SIGTERM, {few[2]} and {many[2]} s "
        f"if they ignore it, {few[3]} and {many[3]} s if their actors are frozen ({few[4]} s for {few[0]} one after "
        "the other)"
    )


@named(FIGURES, "data-plane")
def _data_plane() -> str:
    near = read("data_plane")["steady"]["near"]
    grown = max(one["mb_per_min"] for one in near["processes"].values())
    return (
        f"{60 * near['samples_per_s']:,.0f} a minute of 50,000 offered; {near['latency_ms'][0]:.0f} ms to the commit "
        f"(median); at most {near['backlog_most']} waiting at the service; memory grows by {grown:.1f} MB/min at most"
    )


@named(FIGURES, "data-plane-memory")
def _data_plane_memory() -> str:
    far = read("data_plane")["steady"]["far"]["processes"]
    controller, service = (far[name]["last_mb"] for name in ("controller", "service"))
    return f"{controller:.0f} MB for the controller and {service:.0f} MB for the service"


@named(FIGURES, "data-plane-ceiling")
def _data_plane_ceiling() -> str:
    found = read("data_plane")
    ledger, without = (found["ceiling"][f"near, {name}"] for name in ("ledger", "no ledger"))
    peer = found["peer"]
    others = " and ".join(f"{one['samples_per_s']:.0f} ({one['batch']} a put)" for one in peer["results"])
    return (
        f"{ledger['samples_per_s']:,.0f} samples/s and {ledger['mb_per_s']:.0f} MB/s with the ledger, "
        f"{without['samples_per_s']:,.0f} and {without['mb_per_s']:.0f} without; TransferQueue {peer['version']}, in "
        f"memory only: {others}"
    )


@named(FIGURES, "inside-keys")
def _inside_keys() -> str:
    cost = {row[0].split(":")[0]: row[6].split()[0] for row in page_rows("inside_keys", "Through one hub")}
    shares = {row[0].split(" on ")[0]: row for row in page_rows("inside_keys", "Of a step")}
    demo, demo_delta, delta, whole = (
        next(row for name, row in shares.items() if name.startswith(begin))
        for begin in (
            "`make demo`",
            "the same, a delta",
            "7B in bf16, 1,024 samples, 120 s, a delta",
            "7B in bf16, 1,024 samples, 120 s, sent",
        )
    )
    return (
        f"CPU time of both ends: {cost['samples']} times as much a sample, {cost['weights']} times a GB of weights "
        f"sent whole; real deltas, as `weights.encoding: auto` sends between nodes, {cost['deltas']} times, checks "
        f"included. Of a step of `make demo` {demo_delta[3]} with a delta, {demo[3]} with weights sent whole. Of a "
        f"step of 120 s with a 7B model {delta[3]} with a delta (at most {delta[4]}), {whole[3]} if sent whole "
        "(`raw`) and nothing else is done meanwhile. The 120 s are assumed"
    ).replace("%", " %")


@named(FIGURES, "dashboard")
def _dashboard() -> str:
    found = read("dashboard")
    return (
        f"first paint {found['first_paint_s']:.2f} s; first samples {found['samples_warm_s']:.2f} s "
        f"({found['samples_cold_s']:.1f} s when no file was read before); {found['frames_per_s']:.0f} frames/s while "
        f"scrolling; all texts searched in {found['text_searched_s']:.2f} s; "
        f"server {percent(found['server_cpu_share'], 1)} of a core while one page watches"
    )


@named(FIGURES, "dashboard-live")
def _dashboard_live() -> str:
    found = read("dashboard_live")
    each = {kind: [one for one in found["stretches"] if one["watched"] is kind] for kind in (True, False)}
    steps = {kind: median(one["step_s"] for one in some) for kind, some in each.items()}
    return (
        f"server {percent(found['server_share'], 1)} of a core; median step {steps[True]:.1f} s, unwatched "
        f"{steps[False]:.1f} s, with the browser on the machine of the run"
    )


@named(FIGURES, "agent-endpoint")
def _agent_endpoint() -> str:
    found = read("agent_endpoint")
    paced, bare = found["paced"], found["bare"]
    return (
        f"{paced['median_ms']:.2f} ms at the median as the client sees it, "
        f"{paced['median_ms'] - bare['median_ms']:.1f} ms more than at a bare web server"
    )


@named(FIGURES, "agent-tools")
def _agent_tools() -> str:
    slow, none = (read("agent_endpoint")["tools"][name] for name in ("slow tool", "no tool"))
    return (
        f"{slow['seconds']:.1f} s, without the tool {none['seconds']:.1f} s; the instance busy for "
        f"{percent(slow['busy'], 1)} and {percent(none['busy'], 1)} of it"
    )
