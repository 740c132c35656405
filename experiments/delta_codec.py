"""Measure size and speed of weight deltas: against the entropy bound and simple peers, and over real optimizer steps.

    .venv/bin/python experiments/delta_codec.py                  # 4 minutes of one core; wants 4 GB of memory
    .venv/bin/python experiments/delta_codec.py --steps 0        # only made changes
    .venv/bin/python experiments/delta_codec.py --summary-only   # tables and plot from the JSON again
    .venv/bin/python experiments/delta_codec.py --live DIR       # adds a run that kept a checkpoint of every step:
        streamrl launch --cluster cluster_configs/local.yaml --run examples/demo.yaml \\
            --set checkpoint.every=1 --set checkpoint.keep=10

*Made changes*: SmolLM2-135M's tensors, of which a share, chosen at random, moves by some ulp (90 % of them by one). All
tensors are coded and decoded one after the other. Speeds are bytes of the whole model per second of one thread's CPU
time, the fastest of three; where other work shares the cores and their caches, they are lower than on a quiet machine.
"Checked" ones include BLAKE3 of every resulting tensor. The bound is log2 C(n, k) + k H0(differences), summed over
tensors. Peers: zstd (level 3) of both versions' XOR; and pairs of an int32 position and the new value, as simple sparse
transfers send them.

*Real steps*: the same model, fp32 masters, AdamW as a run file has it by default, on the next-token loss of questions
and answers made by reasoning-gym, four texts a step. That is not a loss of RL: gradients differ, but AdamW divides by
their size, so that an update is about the learning rate in either. Versions are bf16 casts of the masters after each
step. Masters begin on the bf16 grid, as they do when a bf16 checkpoint is loaded; an element changes once it has moved
half an ulp, so in the first steps only small weights can. "Settled" masters begin at random within half an ulp of the
checkpoint, as they are after many steps.

*A live run*: versions of a run of GRPO, from the model's file over one checkpoint after the other.

Writes experiments/results/delta_codec.json, .md and .svg.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from delta_codec_weights import (
    DENSITIES,
    MODEL,
    RATES,
    SETTLED_STEPS,
    Coded,
    Live,
    Step,
    changed,
    code,
    live_steps,
    model_tensors,
    optimizer_steps,
)
from matplotlib.figure import Figure
from rich.console import Console
from running import (
    OUT_HELP,
    Sheet,
    explanation,
    machine_with_load,
    read_record,
    results_folder,
    shown,
    terminal,
    write_tables,
)

from streamrl.cli.main import error_lines

BOUND_TARGET, RATIO_TARGET, SPEED_TARGET = 1.25, 100.0, 0.5
"""Times the bound; times smaller than the full model, with 1 % changed; GB/s."""


def compared(coded: Coded) -> tuple[str, ...]:
    """Cells: full MB, delta MB, times the bound, times smaller than full."""
    return (
        f"{coded.full_bytes / 1e6:.1f}",
        f"{coded.delta_bytes / 1e6:.3f}",
        f"{coded.delta_bytes / coded.bound_bytes:.3f}",
        f"{coded.full_bytes / coded.delta_bytes:.1f}",
    )


def live_sheet(live: Live) -> Sheet:
    """A run's steps."""
    body = [(str(step), f"{coded.density:.3%}", *compared(coded)) for step, coded in enumerate(live.steps, start=1)]
    columns = ("step", "changed", "full MB", "delta MB", "/ bound", "full / delta")
    return Sheet(f"A live run: {live.name}, learning rate {live.lr:g}, bf16 versions", columns, body)


def made_sheet(rows: Sequence[Coded]) -> Sheet:
    """Made changes."""
    columns = (
        *("type", "changed", "full MB", "delta MB", "/ bound", "full / delta", "encode GB/s", "decode GB/s"),
        *("encode checked", "decode checked", "zstd XOR MB", "zstd XOR GB/s", "pairs MB"),
    )
    body = [
        (
            row.dtype,
            f"{row.density:.4%}",
            *compared(row),
            shown(row.encode_gb_s),
            shown(row.decode_gb_s),
            shown(row.encode_checked_gb_s),
            shown(row.decode_checked_gb_s),
            shown(row.xor_bytes / 1e6 if row.xor_bytes else None, ".3f"),
            shown(row.xor_gb_s),
            shown(row.pairs_bytes / 1e6 if row.pairs_bytes else None, ".3f"),
        )
        for row in rows
    ]
    return Sheet(f"Made changes on {MODEL}'s tensors", columns, body, targets(rows))


def targets(rows: Sequence[Coded]) -> list[str]:
    """What was asked of the codec, and what came of it."""
    if not rows:
        return []
    over = {f"{row.dtype} at {row.density:.2%}": row.delta_bytes / row.bound_bytes for row in rows}
    above = ", ".join(f"{name} ({value:.3f})" for name, value in over.items() if value > BOUND_TARGET)
    said = f"MISSED by {above}" if above else f"held, at most {max(over.values()):.3f}"
    lines = [f"at most {BOUND_TARGET} times the entropy bound: {said}"]
    for row in rows:
        if row.dtype == "bfloat16" and abs(row.density - 0.01) < 0.001:
            ratio = row.full_bytes / row.delta_bytes
            held = "held" if ratio >= RATIO_TARGET else "MISSED"
            lines.append(f"{RATIO_TARGET:.0f} times smaller than full bf16 at 1 % changed: {held}, {ratio:.1f}")
    for name in ("encode", "decode"):
        slow = [row for row in rows if (getattr(row, f"{name}_gb_s") or 0) < SPEED_TARGET]
        said = ", ".join(f"{row.dtype} at {row.density:.0%} ({getattr(row, f'{name}_gb_s'):.2f})" for row in slow)
        lines.append(f"{name} at {SPEED_TARGET} GB/s of model per core: {f'MISSED by {said}' if slow else 'held'}")
    return lines


def steps_sheet(steps: Sequence[Step]) -> Sheet:
    """Real steps."""
    columns = (
        *("learning rate, masters", "step", "loss", "changed", "delta MB", "/ bound", "full / delta", "pairs MB"),
        "bound given exponents / bound",
    )
    body = [
        (
            f"{some.lr:g}, {'settled' if some.settled else 'from the file'}",
            str(some.step),
            f"{some.loss:.3f}",
            f"{some.coded.density:.3%}",
            f"{some.coded.delta_bytes / 1e6:.3f}",
            f"{some.coded.delta_bytes / some.coded.bound_bytes:.3f}",
            f"{some.coded.full_bytes / some.coded.delta_bytes:.1f}",
            shown((some.coded.pairs_bytes or 0) / 1e6, ".3f"),
            shown((some.coded.given_exponents_bytes or 0) / some.coded.bound_bytes, ".3f"),
        )
        for some in steps
    ]
    notes = ("next-token loss, not a loss of RL; AdamW's update is about the learning rate in either",)
    return Sheet("Real AdamW steps, bf16 versions", columns, body, notes)


def draw(rows: Sequence[Coded], steps: Sequence[Step], path: Path) -> None:
    """Sizes, speeds, and densities of real steps."""
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    size, speed, real = figure.subplots(1, 3)
    bf16 = [row for row in rows if row.dtype == "bfloat16"]
    shares = [row.density for row in bf16]
    for name, values in (
        ("full", [row.full_bytes for row in bf16]),
        ("positions and values", [row.pairs_bytes or 0 for row in bf16]),
        ("zstd of XOR", [row.xor_bytes or 0 for row in bf16]),
        ("this codec", [row.delta_bytes for row in bf16]),
    ):
        size.plot(shares, [value / 1e6 for value in values], "o-", ms=3, label=name)
    size.plot(shares, [row.bound_bytes / 1e6 for row in bf16], "k--", lw=1, label="entropy bound")
    size.set(xscale="log", yscale="log", xlabel="share of elements changed", ylabel="MB, bf16")
    for name, label in (("encode", "encode"), ("decode", "decode"), ("xor", "zstd of XOR")):
        speed.plot(shares, [getattr(row, f"{name}_gb_s") for row in bf16], "o-", ms=3, label=label)
    speed.axhline(SPEED_TARGET, color="#888888", ls="--", lw=1)
    speed.set(xscale="log", yscale="log", xlabel="share of elements changed", ylabel="GB/s of model, one core")
    for settled in (False, True):
        for number, lr in enumerate(RATES):
            some = [step for step in steps if step.lr == lr and step.settled == settled]
            label = f"{lr:g}{', settled' if settled else ''}"
            densities = [step.coded.density for step in some]
            real.plot([s.step for s in some], densities, "s--" if settled else "o-", color=f"C{number}", label=label)
    real.set(yscale="log", xlabel="optimizer step", ylabel="share of elements changed")
    for axes in (size, speed, real):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def save(path: Path, on: str, rows: Sequence[Coded], steps: Sequence[Step], live: Live | None = None) -> None:
    """Everything, as JSON."""
    made, real = ([asdict(some) for some in both] for both in (rows, steps))
    values: dict[str, Any] = {"machine": on, "targets": targets(rows), "made": made, "steps": real}
    values["live"] = asdict(live) if live else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")


def measure(steps: int, console: Console, kept: Path) -> None:
    """All of it; the file is written as results come."""
    rows: list[Coded] = []
    done: list[Step] = []
    on = machine_with_load()
    rng = np.random.default_rng(0)

    def on_step(step: Step) -> None:
        done.append(step)
        where = f"lr {step.lr:g}{', settled' if step.settled else ''}, step {step.step}"
        console.print(f"  {where}: {step.coded.density:.3%} changed", highlight=False)
        save(kept, on, rows, done)

    for dtype, densities in DENSITIES.items():
        old = model_tensors(dtype)
        for density in densities:
            rows.append(code(changed(old, dtype, density, rng), old, dtype))
            console.print(f"  {dtype}, {density:.3%} changed: {rows[-1].delta_bytes / 1e6:.2f} MB", highlight=False)
            save(kept, on, rows, done)
        del old
    for settled in (False, True):
        for lr in RATES:
            optimizer_steps(lr, settled, min(steps, SETTLED_STEPS) if settled else steps, on_step)


@click.command(help=__doc__)
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(0), help="Real optimizer steps at each learning rate."
)
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Measure nothing: tables and plot from the JSON.")
@click.option(
    "--live",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Measure only what the versions of this run cost; the rest is taken from the JSON.",
)
def main(steps: int, out: Path | None, summary_only: bool, live: Path | None) -> None:
    out = results_folder(out, "steps")
    console = terminal()
    torch.set_num_threads(1)
    kept = out / "delta_codec.json"
    if not summary_only and not live:
        measure(steps, console, kept)
    values = read_record(kept, "machine", "made", "steps")
    rows = [Coded(**row) for row in values["made"]]
    done = [Step(**step | {"coded": Coded(**step["coded"])}) for step in values["steps"]]
    left = values.get("live")
    ran = Live(**left | {"steps": [Coded(**step) for step in left["steps"]]}) if left else None
    if live:
        ran = live_steps(live)
        save(kept, values["machine"], rows, done, ran)
    sheets = [made_sheet(rows), *([steps_sheet(done)] if done else []), *([live_sheet(ran)] if ran else [])]
    for sheet in sheets:
        sheet.show(console)
    circumstances = f"One thread; {values['machine']}."
    write_tables(kept.with_suffix(".md"), "Weight deltas", circumstances, sheets, explanation(__doc__))
    draw(rows, done, out / "delta_codec.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    with error_lines():
        main()
