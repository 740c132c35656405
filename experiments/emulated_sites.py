"""Compare the simulator's step times with those of two emulated sites, over bandwidths, delays, encodings, schedules.

    .venv/bin/python experiments/emulated_sites.py --runs-dir runs/emulated_sites   # 27 minutes on 2 cores, quiet ones
    .venv/bin/python experiments/emulated_sites.py --arm "sync, delta, 20 Mbit/s, 10 ms"
    .venv/bin/python experiments/emulated_sites.py --summary-only                  # tables and plot from the JSON again

SmolLM2-135M (examples/demo.yaml) on one task, 4 groups of 6 samples a step, at most 32 tokens each; one site
trains on one core, the other generates on the other one (clusters/two_sites.yaml); `streamrl launch --emulate`. Lengths
are part of the reward, so that hardly any group has equal rewards: such a group is not trained, which the simulator
does not know of.

*Calibration.* One run of its own, `sync` with deltas over 100 Gbit/s without delay, with other prompts (seed 1, the
others have 0). Of its steps after the warm-up: lengths, the trainer's tokens/s, seconds of the optimizer, of making,
coding and loading a version, of the ways between, bytes of a version, and the instance's step time by batch size,
fitted to when its samples ended: what it measures at its start is of a machine with nothing else to do.

*Prediction.* `scheduler/simulation/pipeline.py` plays a run of as many steps, on whole groups drawn from the
calibration's. The link comes in as declared: bytes / (bandwidth x weight_share), and its round trips. No time or length
of the run that is predicted goes in. It is the mean over draws; "by chance" is their standard deviation: how far
lengths alone may move a run's mean step. "Given its lengths" plays the run's own groups instead, which separates that
chance from other errors; it is no prediction. "No link" is the prediction for the calibration's link: what is beyond
it, the real one costs.

In the simulator, generation, training and the traffic do not slow each other down. Here they share two cores and their
caches, the processes that emulate the link included, and where they overlap (`async`) they do.

*Measured* is the mean step time after the warm-up, of the same steps as in the simulation. A configuration runs once.
Target: a median error of at most 10 % over at least 8 configurations.
Writes experiments/results/emulated_sites.json, .md and .svg.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
import yaml
from matplotlib.figure import Figure
from running import (
    OUT_HELP,
    ROOT,
    Job,
    Outcome,
    Sheet,
    machine,
    read_record,
    results_folder,
    run_all,
    runs_folder,
    shown,
    terminal,
    write_results,
)
from site_calibration import (
    PROMPTS,
    SAMPLES,
    Arm,
    Calibration,
    Groups,
    StepFacts,
    calibrate,
    grouped,
    predict,
    read_facts,
    read_samples,
    simulated,
    transfer_s,
)

RUN_FILE = ROOT / "examples" / "demo.yaml"
WITHIN, CONFIGURATIONS = 0.10, 8
"""What is asked for: the median error, and over how many."""
STEP_S = 15.0
"""Of a step, roughly."""

CALIBRATION = Arm("sync", "delta", 1e5, 0, seed=1)
ARMS = {
    arm.name: arm
    for arm in (
        Arm("sync", "delta", 20, 10),
        Arm("stream", "delta", 20, 100),
        Arm("async", "delta", 200, 100),
        Arm("sync", "delta", 4, 100),
        Arm("async", "delta", 4, 10),
        Arm("sync", "raw", 200, 10, steps=6),
        Arm("stream", "raw", 500, 100, steps=6),
        Arm("async", "raw", 500, 10),
        Arm("async", "raw", 200, 100),
        Arm("async", "raw", 100, 10, steps=6),
    )
}
"""A delta takes some 0.2 s to 7 s on these links, raw weights 5 s to 27 s, the rest of a step some 10 s."""


@dataclass(frozen=True)
class Run(Outcome):
    """What is kept of one run."""

    arm: str
    groups: Groups

    def step_s(self, warmup: int) -> float:
        """Mean step time."""
        return statistics.mean(row.step_time_s or 0.0 for row in self.rows[warmup:])

    def transfer_s(self, warmup: int) -> float | None:
        """Mean over the steps in which a version came."""
        known = [row.weight_transfer_s for row in self.rows[warmup:] if row.weight_transfer_s is not None]
        return statistics.mean(known) if known else None


COLUMNS = {
    *("step", "time", "step_time_s", "generate_time_s", "train_time_s", "weight_bytes_sent", "weight_transfer_s"),
    *("weight_sync_exposed_s", "samples_total", "output_length_mean", "staleness_mean", "groups_no_gradient"),
}
"""Of metrics.jsonl, that are kept."""


def calibration_sheet(found: Calibration, run: Run, warmup: int) -> Sheet:
    """What predictions are made of."""
    lengths = [length for _, some in found.groups for length in some]
    own, _ = predict(found, CALIBRATION, warmup)
    few, many = 1e3 * found.curve.base([1, PROMPTS * SAMPLES])
    rows = [
        ("output tokens, mean", f"{statistics.mean(lengths):.1f} of {len(lengths)} samples"),
        ("trainer, tokens/s", f"{found.train_tokens_s:.1f}"),
        ("optimizer, making a version, s", f"{found.optimizer_s:.2f}"),
        (f"decode step of 1, {PROMPTS * SAMPLES} requests, ms", f"{few:.1f}, {many:.1f}"),
        ("reading a prompt, ms a token", f"{1e3 * found.curve.per_prefill_token:.2f}"),
        ("from the last sample to training, s", f"{found.home_s:.2f}"),
        ("delta: coding, applying, verifying, s", f"{found.fetch_s:.2f}"),
        ("from there to the first request, s", f"{found.load_s:.2f}"),
        ("delta, raw, MB", f"{found.nbytes['delta'] / 1e6:.2f}, {found.nbytes['raw'] / 1e6:.1f}"),
        ("its own step, s, simulated, measured", f"{own:.2f}, {run.step_s(warmup):.2f}"),
    ]
    return Sheet(f"Calibration: {CALIBRATION.name}", ("what", "value"), rows)


@dataclass(frozen=True)
class Compared:
    """A configuration, predicted and measured; seconds per step."""

    run: Run
    measured: float
    predicted: float
    chance: float
    given: float
    unlimited: float

    def error(self, value: float) -> float:
        """Of a prediction, as a share of the measured."""
        return value / self.measured - 1


def compare(found: Calibration, run: Run, warmup: int) -> Compared:
    """One that did not fail."""
    arm = ARMS[run.arm]
    unlimited, _ = predict(found, replace(arm, mbit_s=CALIBRATION.mbit_s, rtt_ms=CALIBRATION.rtt_ms), warmup)
    given = simulated(found, arm, run.groups, warmup)
    return Compared(run, run.step_s(warmup), *predict(found, arm, warmup), given, unlimited)


def steps_sheet(found: Calibration, compared: Sequence[Compared], warmup: int) -> Sheet:
    """Prediction against measurement."""
    rows = [
        (
            c.run.arm,
            f"{c.measured:.2f}",
            *(f"{c.predicted:.2f}", f"{c.error(c.predicted):+.1%}", f"{c.chance:.2f}"),
            *(f"{c.given:.2f}", f"{c.error(c.given):+.1%}"),
            f"{c.unlimited:.2f}",
            f"{shown(c.run.transfer_s(warmup))} / {transfer_s(found, ARMS[c.run.arm]):.2f}",
        )
        for c in compared
    ]
    errors, given = [c.error(c.predicted) for c in compared], [abs(c.error(c.given)) for c in compared]
    notes = []
    if errors:
        middle, enough = statistics.median(map(abs, errors)), len(errors) >= CONFIGURATIONS
        met = "met" if middle <= WITHIN and enough else "MISSED" if enough else "too few configurations"
        notes = [
            f"median error over {len(errors)} configurations, at most {WITHIN:.0%}: {middle:.1%}: {met}",
            f"largest error: {max(map(abs, errors)):.1%}; mean, with its sign: {statistics.mean(errors):+.1%}",
            f"median error given its lengths: {statistics.median(given):.1%}",
        ]
    columns = (
        *("schedule, weights, link", "measured s", "predicted s", "error", "by chance s", "given its lengths s"),
        *("error", "no link s", "transfer s, measured / predicted"),
    )
    return Sheet("Seconds per step", columns, rows, notes)


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Measured beside predicted, with the errors."""
    figure = Figure(figsize=(9, 0.55 * len(compared) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(compared))
    axes.barh(places - 0.2, [c.measured for c in compared], 0.38, color="#444444", label="measured")
    axes.barh(places + 0.2, [c.predicted for c in compared], 0.38, color="#2f7ed8", label="predicted")
    axes.plot(
        [c.unlimited for c in compared], places + 0.2, "|", color="#e0801f", ms=12, mew=2, label="predicted, no link"
    )
    for place, c in enumerate(compared):
        axes.text(max(c.measured, c.predicted), place, f"  {c.error(c.predicted):+.1%}", va="center", fontsize=8)
    axes.set_yticks(places, [c.run.arm for c in compared], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="seconds per step", title="prediction against measurement")
    axes.margins(x=0.1, y=0.02)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--arm", "arms", multiple=True, type=click.Choice(tuple(ARMS)), default=tuple(ARMS), help="Several.")
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(1, 4), help="First steps left out.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Where runs are kept, and not run again.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Run nothing: tables and plot from the JSON.")
def main(arms: tuple[str, ...], warmup: int, runs_dir: Path | None, out: Path | None, summary_only: bool) -> None:
    out = results_folder(out, "arms", "warmup")
    console = terminal()
    target = out / "emulated_sites.json"
    runs: list[Run] = []
    facts: list[StepFacts] = []
    on, raw_bytes = machine(), 0
    if summary_only:
        values = read_record(target, "machine", "raw_bytes", "runs", "facts")
        on, raw_bytes, runs = values["machine"], values["raw_bytes"], [Run.from_json(run) for run in values["runs"]]
        facts = [StepFacts(**step) for step in values["facts"]]
    else:
        with runs_folder(runs_dir) as folder:
            jobs, of = [], {}
            for arm in (CALIBRATION, *(ARMS[name] for name in arms)):
                name = arm.name.replace(", ", "-").replace("/", "").replace(" ", "_")
                cluster = folder.resolve() / "clusters" / f"{name}.yaml"
                cluster.parent.mkdir(parents=True, exist_ok=True)
                cluster.write_text(yaml.safe_dump(arm.cluster()))
                jobs.append(Job(name, cluster, RUN_FILE, arm.steps, arm.overrides(), ("--emulate",)))
                of[name] = arm

            def done(job: Job, outcome: Outcome) -> None:
                nonlocal facts, raw_bytes
                run_dir = folder / job.name
                groups = [] if outcome.error else grouped(read_samples(run_dir))
                runs.append(Run(**vars(outcome), arm=of[job.name].name, groups=groups))
                if of[job.name] == CALIBRATION and not outcome.error:
                    facts = read_facts(run_dir, outcome)
                    saved = run_dir / "checkpoints" / f"step_{job.steps}"
                    raw_bytes = sum(file.stat().st_size for file in saved.glob("*.safetensors"))

            run_all(jobs, folder, console, done, step_s=STEP_S)
    for run in runs:
        if run.error:
            console.print(f"{run.arm}: FAILED: {run.error}", markup=False, highlight=False)
    if not facts:
        raise click.ClickException("nothing can be predicted without the calibration run")
    found = calibrate(facts[warmup - 1 :], raw_bytes)  # facts begin at step 2
    compared = [compare(found, run, warmup) for run in runs[1:] if not run.error]
    sheets = [calibration_sheet(found, runs[0], warmup), steps_sheet(found, compared, warmup)]
    for sheet in sheets:
        sheet.show(console)
    record = {"machine": on, "warmup": warmup, "raw_bytes": raw_bytes, "facts": [asdict(step) for step in facts]}
    record["runs"] = [run.to_json(COLUMNS) for run in runs]
    write_results(target, record, "Emulated sites: prediction against measurement", sheets)
    draw(compared, target.with_suffix(".svg"))
    console.print(f"written to {target}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
