"""Make tables and a plot of `data_plane.py` from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_plane_measure import RATE
from data_plane_roles import AHEAD
from running import Sheet

from streamrl.generation.site.uplink import MIN_MARK


def cpu_text(cpu: Sequence[tuple[str, float]]) -> str:
    """Percent of a core, by process; those of a kind together."""
    kinds: dict[str, list[float]] = {}
    for name, share in cpu:
        kinds.setdefault(name.rsplit("-", 1)[0], []).append(share)
    return ", ".join(
        f"{len(all_) if len(all_) > 1 else ''} {kind} {100 * sum(all_):.0f} %".strip() for kind, all_ in kinds.items()
    )


def steady_sheets(found: dict[str, Any]) -> list[Sheet]:
    """The offered rate."""
    rows: list[tuple[str, ...]] = []
    processes: list[tuple[str, ...]] = []
    for name, some in found.items():
        p50, p99 = some["latency_ms"] or (float("nan"), float("nan"))
        reached = some["samples_per_s"] >= 0.98 * RATE
        rows.append(
            (
                f"{name}{'' if reached else ' (MISSED)'}",
                f"{60 * some['samples_per_s']:,.0f}",
                f"{60 * some['trained_per_s']:,.0f}",
                *(f"{some['mb_per_s']:.1f}", f"{p50:.0f}", f"{p99:.0f}", f"{some['commit_ms']:.1f}"),
                *(str(some[key]) for key in ("ahead_most", "backlog_most", "under_way_most")),
            )
        )
        processes += [
            (f"{name}, {who}", f"{100 * v['cpu']:.0f}", *(f"{v[k]:.1f}" for k in ("first_mb", "last_mb", "mb_per_min")))
            for who, v in some["processes"].items()
        ]
    columns: tuple[str, ...] = (
        "",
        "committed/min",
        "trained/min",
        "MB/s",
        "latency p50 ms",
        "p99 ms",
        "commit ms",
        "ahead of the trainer, most",
    )
    columns += ("at the service, most", "under way of an instance, most")
    title = f"{60 * RATE:,.0f} samples a minute offered"
    return [
        Sheet(title, columns, rows, (f"bounds: {AHEAD} ahead of the trainer, 256 under way of an instance",)),
        Sheet("The same, by process", ("", "% of a core", "RSS MB, first", "last", "MB/min"), processes),
    ]


def ceiling_sheet(found: dict[str, Any], peer: dict[str, Any] | None) -> Sheet:
    """As many as go."""
    rows: list[tuple[str, ...]] = [
        (
            name,
            *(f"{some['samples_per_s']:.0f}", f"{some['mb_per_s']:.1f}", f"{some['commit_ms']:.1f}"),
            *(f"{100 * some[key]:.0f} %" for key in ("uplink_held", "instances_held")),
            cpu_text([(who, told["cpu"]) for who, told in some["processes"].items()]),
        )
        for name, some in found.items()
    ]
    notes = []
    if peer is not None and "results" in peer:
        for some in peer["results"]:
            label = f"TransferQueue {peer['version']}, {some['batch']} a put; memory only"
            rows.append(
                (label, f"{some['samples_per_s']:.0f}", f"{some['mb_per_s']:.1f}", "-", "-", "-", cpu_text(some["cpu"]))
            )
            first, last = some["memory_mb"]
            said = f"{some['put_per_s']:.0f} samples/s put, all its memory {first:.0f} -> {last:.0f} MB"
            notes.append(f"TransferQueue, {some['batch']} a put: {said}")
    elif peer is not None:
        notes.append(f"TransferQueue: skipped, {peer['skipped']}")
    return Sheet(
        "As many as go",
        ("", "samples/s", "MB/s", "commit ms", "uplink out of credit", "instances out of credit", "% of a core"),
        rows,
        notes,
    )


def pressure_sheet(phases: dict[str, Any]) -> Sheet:
    """Something slow."""
    columns: tuple[str, ...] = (
        "",
        "issued/s",
        "committed/s",
        "trained/s",
        "ahead, most",
        "at the service, most",
        "MB",
        "congested",
    )
    columns += ("uplink out of credit", "instances out of credit", "RSS MB, first", "last")
    rows: list[tuple[str, ...]] = []
    for name, some in phases.items():
        memory = [sum(v[key] for v in some["processes"].values()) for key in ("first_mb", "last_mb")]
        rows.append(
            (
                name,
                *(f"{some[key]:.0f}" for key in ("issued_per_s", "samples_per_s", "trained_per_s", "ahead_most")),
                *(str(some["backlog_most"]), f"{some['backlog_mb_most']:.1f}"),
                *(f"{100 * some[key]:.0f} %" for key in ("congested", "uplink_held", "instances_held")),
                *(f"{mb:.0f}" for mb in memory),
            )
        )
    note = f"bounds: {AHEAD} ahead; at the service {MIN_MARK / 1e6:.0f} MB and what the instances then run"
    return Sheet(f"{60 * RATE:,.0f} a minute offered, something slow", columns, rows, (note,))


def draw(values: dict[str, Any], path: Path) -> None:
    """Ceilings, and the course of the back-pressure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), layout="constrained")
    bars, queues, memory = figure.subplots(1, 3)
    rates = {name: some["samples_per_s"] for name, some in values.get("ceiling", {}).items()}
    for some in values.get("peer", {}).get("results", []):
        rates[f"TransferQueue, {some['batch']} a put"] = some["samples_per_s"]
    bars.barh(list(rates), list(rates.values()), color=["C1" if "Transfer" in name else "C0" for name in rates])
    bars.axvline(RATE, color="#888888", ls="--", lw=1)
    bars.set(xlabel="samples/s; dashed: 50,000 a minute")
    bars.invert_yaxis()
    if lines := values.get("backpressure", {}).get("lines"):
        queues.plot(lines["at"], lines["ahead"], label="ahead of the trainer (samples)")
        queues.axhline(AHEAD, color="C0", ls="--", lw=1)
        beside = queues.twinx()
        beside.plot(lines["at_service"], lines["backlog_mb"], color="C1", label="at the service (MB)")
        beside.axhline(MIN_MARK / 1e6, color="C1", ls="--", lw=1)
        beside.set(ylim=0, ylabel="MB")
        queues.set(ylim=0, xlabel="s", ylabel="samples; dashed: bounds")
        queues.legend(handles=[*queues.get_lines()[:1], *beside.get_lines()[:1]], fontsize=8)
        memory.plot(lines["at_memory"], lines["memory_mb"])
        memory.set(ylim=0, xlabel="s", ylabel="resident MB of all processes")
    figure.savefig(path)
