"""Measure the cost of a link between two emulated sites: of weights on it, and of it to a step.

    .venv/bin/python experiments/two_sites.py --runs-dir runs/two_sites   # 25 minutes on 2 cores; wants a quiet machine
    .venv/bin/python experiments/two_sites.py --arm raw --arm delta
    .venv/bin/python experiments/two_sites.py --summary-only              # tables and plot from the JSON again

SmolLM2-135M (examples/demo.yaml), one site trains on one core, the other generates on the other one
(clusters/two_sites.yaml), 40 ms there and back; `streamrl launch --emulate`. Two questions:

* What does a version of the weights cost? `raw` sends all bytes, `delta` lossless differences, each with one and with
  two instances at the site; `sync` schedule. "Link" is all that the emulated link has carried, by its own counters.
* What does a step cost? `async` (staleness 1) with deltas at 50 Mbit/s, and the same at 100 Gbit/s, which no process
  here can fill: in turns, several times. Steps differ in their tokens, so the ratio is of seconds per token.

Writes experiments/results/two_sites.json, .md and .svg.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from matplotlib.figure import Figure
from running import (
    HERE,
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

from streamrl.emulation.network import read_stats

CLUSTER = HERE / "clusters" / "two_sites.yaml"
RUN_FILE = ROOT / "examples" / "demo.yaml"
SLOW, FAST = 0.05, 100.0
"""Gbit/s."""
SYNC = ("schedule={name: sync}", "batch.prompts_per_step=4", "sampling.max_tokens=32")
ASYNC = ("schedule={name: async, max_staleness: 1}",)
FULL_S, DELTA_S, WITHIN = 40.0, 3.0, 0.05
"""What is asked for: raw weights take longer than this, a delta less; a step at 50 Mbit/s within this of unlimited."""


@dataclass(frozen=True)
class Arm:
    """A link, and what is done over it."""

    overrides: tuple[str, ...]
    gbit_s: float = SLOW
    instances: int = 1
    steps: int = 3
    repeats: bool = False


ARMS = {
    "raw": Arm((*SYNC, "weights.encoding=raw")),
    "raw, 2 instances": Arm((*SYNC, "weights.encoding=raw"), instances=2),
    "delta": Arm((*SYNC, "weights.encoding=delta"), steps=6),
    "delta, 2 instances": Arm((*SYNC, "weights.encoding=delta"), instances=2, steps=6),
    "async, 50 Mbit/s": Arm(ASYNC, steps=10, repeats=True),
    "async, unlimited": Arm(ASYNC, gbit_s=FAST, steps=10, repeats=True),
}
COLUMNS = {
    *("step", "time", "step_time_s", "generate_time_s", "train_time_s", "weight_bytes_sent", "weight_transfer_s"),
    *("weight_sync_exposed_s", "samples_total", "output_length_mean", "staleness_mean", "staleness_max", "reward_mean"),
    *("bubble_fraction_generation", "bubble_fraction_training"),
}
"""Of metrics.jsonl, that are kept."""


@dataclass(frozen=True)
class Run(Outcome):
    """What is kept of one run."""

    arm: str
    repeat: int
    link: dict[str, Any]
    """The emulated link's counters: `from_home` and `to_home`, bytes."""

    def steady(self, warmup: int) -> list[Any]:
        """Rows without the first ones, in which generation fills up, and the last, behind which there is none."""
        return self.rows[warmup:-1]

    def seconds_per_token(self, warmup: int) -> float:
        """Seconds of the steady steps by their tokens."""
        rows = self.steady(warmup)
        return sum(row.step_time_s or 0.0 for row in rows) / sum(
            (row.samples_total or 0) * (row.output_length_mean or 0.0) for row in rows
        )

    @property
    def versions(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of each version that came in a step of its own; the run's first one is not among them."""
        return [
            (row.weight_bytes_sent, row.weight_transfer_s)
            for row in self.rows
            if row.weight_transfer_s is not None and row.step > 1 and row.weight_bytes_sent is not None
        ]


def write_cluster(arm: Arm, folder: Path) -> Path:
    """The cluster file of an arm."""
    values = yaml.safe_load(CLUSTER.read_text())
    values["links"][0]["bandwidth_gbit_s"] = arm.gbit_s
    pool = values["sites"]["generate"]["generation"][0]
    pool["replicas"] = arm.instances
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arm.gbit_s:g}_gbit_{arm.instances}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path.resolve()


def weights_sheet(runs: Sequence[Run]) -> Sheet:
    """What a version costs."""
    rows, by_arm = [], {}
    for run in runs:
        if run.error or run.arm.startswith("async") or not run.versions:
            continue
        sizes, seconds = zip(*run.versions, strict=True)
        by_arm[run.arm] = (statistics.median(sizes), statistics.median(seconds), run)
        rows.append(
            (
                run.arm,
                str(len(sizes)),
                f"{statistics.median(sizes) / 1e6:.2f}",
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
                f"{run.link['from_home'] / 1e6:.1f}",
                f"{run.link['to_home'] / 1e6:.2f}",
            )
        )
    notes = []
    if "raw" in by_arm:
        notes.append(_met(f"raw weights take longer than {FULL_S:.0f} s", by_arm["raw"][1], by_arm["raw"][1] > FULL_S))
    if "delta" in by_arm:
        slowest = max(seconds for _, seconds in by_arm["delta"][2].versions)
        notes.append(_met(f"every delta takes less than {DELTA_S:.0f} s", slowest, slowest < DELTA_S))
    for kind in ("raw", "delta"):
        if kind in by_arm and f"{kind}, 2 instances" in by_arm:
            ratio = by_arm[f"{kind}, 2 instances"][0] / by_arm[kind][0]
            notes.append(f"{kind}: bytes per version with two instances / with one: {ratio:.3f}")
    if "raw" in by_arm and "delta" in by_arm:
        notes.append(f"raw / delta, bytes: {by_arm['raw'][0] / by_arm['delta'][0]:.0f}")
    columns = ("arm", "versions", "MB each", "s each", "s, longest", "link: MB there", "MB back")
    return Sheet("A version of the weights at 50 Mbit/s, 40 ms", columns, rows, notes)


def steps_sheet(runs: Sequence[Run], warmup: int) -> Sheet:
    """What a step costs."""
    rows, per_token = [], {}
    for arm in (name for name in ARMS if name.startswith("async")):
        some = [run for run in runs if run.arm == arm and not run.error]
        if not some:
            continue
        per_token[arm] = [run.seconds_per_token(warmup) for run in some]
        steady = [row for run in some for row in run.steady(warmup)]
        rows.append(
            (
                arm,
                str(len(some)),
                f"{statistics.mean(row.step_time_s or 0 for row in steady):.2f}",
                " ".join(f"{1e3 * value:.2f}" for value in per_token[arm]),
                f"{statistics.mean(row.weight_sync_exposed_s or 0 for row in steady):.2f}",
                shown(_mean(row.weight_transfer_s for row in steady)),
                shown(statistics.mean((row.weight_bytes_sent or 0) / 1e6 for row in steady)),
                f"{statistics.mean(row.staleness_mean or 0 for row in steady):.2f}",
            )
        )
    notes = []
    if len(per_token) == 2:
        slow, fast = (statistics.mean(values) for values in per_token.values())
        notes.append(
            _met(
                f"step at 50 Mbit/s / unlimited, per token, at most {1 + WITHIN}",
                slow / fast,
                slow / fast <= 1 + WITHIN,
            )
        )
        pairs = [a / b for a, b in zip(*per_token.values(), strict=False)]
        notes.append(f"by pairs in the order of running: {', '.join(f'{ratio:.3f}' for ratio in pairs)}")
    columns = (*("arm", "runs", "step s", "ms per token", "sync exposed s", "transfer s", "MB a step", "stale"),)
    return Sheet("Async steps with deltas, 40 ms", columns, rows, notes)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _met(what: str, value: float, met: bool) -> str:
    return f"{what}: {value:.2f}: {'met' if met else 'MISSED'}"


def draw(runs: Sequence[Run], path: Path, warmup: int) -> None:
    """Seconds and bytes of a version; step times by step."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    arms = [run for run in runs if not run.error and not run.arm.startswith("async") and run.versions]
    names = [run.arm for run in arms]
    left.bar(names, [statistics.median(s for _, s in run.versions) for run in arms], color="#2f7ed8")
    for place, run in enumerate(arms):
        size, seconds = (statistics.median(values) for values in zip(*run.versions, strict=True))
        left.text(place, seconds, f"{size / 1e6:.1f} MB\n{seconds:.1f} s", ha="center", va="bottom", fontsize=8)
    left.set(yscale="log", ylabel="seconds", title="a version of the weights at 50 Mbit/s, 40 ms")
    left.set_ylim(top=left.get_ylim()[1] * 3)
    left.tick_params(axis="x", labelsize=8)
    for arm, colour in (("async, 50 Mbit/s", "#e0801f"), ("async, unlimited", "#444444")):
        for number, run in enumerate(r for r in runs if r.arm == arm and not r.error):
            rows = run.steady(warmup)
            tokens = [(row.samples_total or 0) * (row.output_length_mean or 1.0) for row in rows]
            right.plot(
                [row.step for row in rows],
                [1e3 * (row.step_time_s or 0) / count for row, count in zip(rows, tokens, strict=True)],
                color=colour,
                marker="o",
                ms=3,
                lw=1,
                label=None if number else arm,
            )
    right.set(xlabel="step", ylabel="ms per token", ylim=(0, None), title="async steps with deltas")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--arm", "arms", multiple=True, type=click.Choice(tuple(ARMS)), default=tuple(ARMS), help="Several.")
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(1), help="Of the async arms, in turns.")
@click.option("--warmup", default=3, show_default=True, type=click.IntRange(1), help="First steps left out.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Where runs are kept, and not run again.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Run nothing: tables and plot from the JSON.")
def main(
    arms: tuple[str, ...], repeats: int, warmup: int, runs_dir: Path | None, out: Path | None, summary_only: bool
) -> None:
    out = results_folder(out, "arms", "repeats", "warmup")
    console = terminal()
    runs: list[Run] = []
    target = out / "two_sites.json"
    on = machine()
    if summary_only:
        values = read_record(target, "machine", "runs")
        on, runs = values["machine"], [Run.from_json(run) for run in values["runs"]]
    else:
        with runs_folder(runs_dir) as folder:
            jobs, of = [], {}
            for repeat in range(repeats):
                for name in arms:
                    arm = ARMS[name]
                    if repeat and not arm.repeats:
                        continue
                    overrides = (*arm.overrides, "optimizer.lr=1e-5", "checkpoint.every=1000", f"seed={repeat}")
                    job_name = f"{name.replace(',', '').replace(' ', '_').replace('/', '')}-{repeat}"
                    cluster = write_cluster(arm, folder / "clusters")
                    jobs.append(Job(job_name, cluster, RUN_FILE, arm.steps, overrides, ("--emulate",)))
                    of[job_name] = name, repeat

            def done(job: Job, outcome: Outcome) -> None:
                arm, repeat = of[job.name]
                link = {} if outcome.error else read_stats(folder / job.name / "network")["generate"]
                runs.append(Run(**vars(outcome), arm=arm, repeat=repeat, link=link))

            run_all(jobs, folder, console, done, step_s=25)
    runs.sort(key=lambda run: (list(ARMS).index(run.arm), run.repeat))
    sheets = [weights_sheet(runs), steps_sheet(runs, warmup)]
    for sheet in sheets:
        sheet.show(console)
    for run in runs:
        if run.error:
            console.print(f"{run.arm}, {run.repeat}: FAILED: {run.error}", markup=False, highlight=False)
    record = {"machine": on, "warmup": warmup, "runs": [run.to_json(COLUMNS) for run in runs]}
    write_results(target, record, "Two sites, emulated", sheets)
    draw(runs, target.with_suffix(".svg"), warmup)
    console.print(f"written to {target}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
