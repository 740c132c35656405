"""Compare all schedules on the same workloads, model, seed and two cores: what each hides, and what `auto` picks.

    .venv/bin/python experiments/schedules.py --runs-dir runs/schedules   # an hour on 2 cores; wants a quiet machine
    .venv/bin/python experiments/schedules.py --workload balanced --schedule sync --schedule stream --steps 6
    .venv/bin/python experiments/schedules.py --summary-only              # tables and plot from the JSON again

Three workloads of the small reasoner (experiments/runs/schedules_*.yaml): bound by generation, balanced, bound by
training. Schedules that give each role its own devices have generation on core 0 and training on core 1
(clusters/pinned.yaml); `colocated` and `auto` have both cores for both (clusters/shared.yaml). Each is a run of its own
through the command line. Figures are means over the steps between the first `--warmup` ones, in which generation fills
up, and the last `--drain` ones, behind which nothing is left to generate. In the overlapping schedules groups overtake
each other, so a step's groups are others: `tokens` says how much work a step was, and ratios of step times are those of
steps with as many tokens. Of several repeats the median counts. "Alone" are the generating and training times of
`sync`, where the other role stands still. Writes experiments/results/schedules.json, .md and .svg.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from running import (
    HERE,
    OUT_HELP,
    Job,
    Outcome,
    Sheet,
    machine,
    read_record,
    results_folder,
    run_all,
    runs_folder,
    save_plot,
    shown,
    terminal,
    write_tables,
)

from streamrl.given_options import given_options
from streamrl.run_dir.metrics import MetricsRow

WORKLOADS = ("generation", "balanced", "training")
"""Names of run files, by what they are bound by."""


@dataclass(frozen=True)
class Arm:
    """A schedule and the devices it has."""

    schedule: str
    """`schedule:` of the run file."""
    cluster: str
    profiling: int = 0
    """First steps in which it finds out what to do: run in addition, and left out."""


ARMS = {
    "colocated": Arm("{name: colocated}", "shared"),
    "sync": Arm("{name: sync}", "pinned"),
    "stream": Arm("{name: stream}", "pinned"),
    "one_step_off": Arm("{name: one_step_off}", "pinned"),
    "async-1": Arm("{name: async, max_staleness: 1}", "pinned"),
    "async-4": Arm("{name: async, max_staleness: 4}", "pinned"),
    "auto": Arm("{name: auto, max_staleness: 1, profile_steps: 2}", "shared", profiling=10),
}
"""A number is the bound on staleness."""
BEST_OF = ("colocated", "sync", "stream", "async-1")
"""What `auto` is held against: it has the same bound on staleness."""
ASYNC_OVER_LONGER, STREAM_HIDES, ASYNC_EXPOSED, AUTO_OVER_BEST = 1.08, 0.70, 0.03, 1.05
"""Targets; see `targets`."""
STEP_S = 8.0
"""Of a step, roughly."""
COLUMNS = {
    *("step", "time", "step_time_s", "generate_time_s", "train_time_s", "weight_sync_exposed_s"),
    *("bubble_fraction_generation", "bubble_fraction_training", "staleness_mean", "staleness_max", "reward_mean"),
    *("output_length_mean", "tokens_trained", "samples_total", "groups_no_gradient"),
}
"""Of metrics.jsonl, that are kept."""
SCHEDULE_LINES = 5
"""Of `auto`'s log, at most."""


@dataclass(frozen=True)
class Run(Outcome):
    """What is kept of one run."""

    workload: str
    schedule: str
    repeat: int
    said: list[str]
    """Lines of the controller's log about the schedule: what `auto` chose."""


@dataclass(frozen=True)
class Figures:
    """A schedule on a workload: medians over the repeats of means over the kept steps. Times in seconds per step."""

    step_s: float
    generate_s: float
    train_s: float
    generation_bubble: float
    training_bubble: float
    exposed_s: float
    exposed_share: float
    staleness_mean: float
    staleness_max: float
    tokens: float
    """Generated per step: whether the work was the same."""
    reward: float
    all_step_s: list[float]
    """By repeat."""

    def for_tokens(self, tokens: float) -> float:
        """Seconds of a step of so many generated tokens: steps of different schedules have different groups."""
        return self.step_s * tokens / self.tokens if self.tokens else self.step_s

    @property
    def exposed_stage_s(self) -> float:
        """What of the shorter stage lies outside the longer one."""
        return self.step_s - self.longer_s

    @property
    def shorter_s(self) -> float:
        """Seconds of the shorter of the two stages."""
        return min(self.generate_s, self.train_s)

    @property
    def longer_s(self) -> float:
        """Seconds of the longer of the two stages."""
        return max(self.generate_s, self.train_s)


def figures(runs: Sequence[Run], warmup: int, drain: int) -> Figures | None:
    """Of all repeats that did not fail; None: there is none."""
    windows = [
        run.rows[warmup + ARMS[run.schedule].profiling : len(run.rows) - drain] for run in runs if run.error is None
    ]
    if not windows:
        return None

    def median(figure: Callable[[list[MetricsRow]], float]) -> float:
        return statistics.median(figure(rows) for rows in windows)

    def mean(column: str) -> float:
        return median(lambda rows: statistics.mean(getattr(row, column) or 0.0 for row in rows))

    step_times = [statistics.mean(row.step_time_s or 0.0 for row in rows) for rows in windows]
    step_s, exposed_s = statistics.median(step_times), mean("weight_sync_exposed_s")
    return Figures(
        step_s,
        mean("generate_time_s"),
        mean("train_time_s"),
        mean("bubble_fraction_generation"),
        mean("bubble_fraction_training"),
        exposed_s,
        exposed_s / step_s,
        mean("staleness_mean"),
        max(row.staleness_max or 0.0 for rows in windows for row in rows),
        median(lambda rows: statistics.mean((r.output_length_mean or 0.0) * (r.samples_total or 0) for r in rows)),
        mean("reward_mean"),
        step_times,
    )


def chosen(runs: Sequence[Run]) -> str | None:
    """The schedule that `auto` ended with, by its log; None: it is not among the runs, or has not decided."""
    said = [line for run in runs if run.schedule == "auto" for line in run.said if ": predicted" in line]
    return said[-1].partition("schedule: ")[2].partition(":")[0].split()[0].strip(",") if said else None


def targets(by_arm: dict[str, Figures], picked: str | None) -> list[str]:
    """What was asked for on a workload, and what came; a line each.

    Args:
        by_arm: the workload's figures.
        picked: what `auto` has chosen.
    """
    lines = []

    def say(what: str, value: float | None, good: Callable[[float], bool], form: str = ".3f") -> None:
        result = "not measured" if value is None else f"{value:{form}}: {'met' if good(value) else 'MISSED'}"
        lines.append(f"{what}: {result}")

    sync, stream, auto = (by_arm.get(name) for name in ("sync", "stream", "auto"))
    for name in ("async-1", "async-4"):
        if found := by_arm.get(name):
            ratio = found.for_tokens(sync.tokens) / sync.longer_s if sync else None
            what = f"{name}: step / longer stage alone, at most {ASYNC_OVER_LONGER}"
            say(what, ratio, lambda v: v <= ASYNC_OVER_LONGER)
            what = f"{name}: exposed weight sync, below {ASYNC_EXPOSED:.0%} of a step"
            say(what, found.exposed_share, lambda v: v < ASYNC_EXPOSED, ".1%")
    hidden = 1 - stream.exposed_stage_s / sync.exposed_stage_s if sync and stream else None
    what = f"stream: hides of the shorter stage, which sync exposes, at least {STREAM_HIDES:.0%}"
    say(what, hidden, lambda v: v >= STREAM_HIDES, ".0%")
    if sync and stream:
        saved = (sync.step_s - stream.for_tokens(sync.tokens)) / sync.shorter_s
        lines.append(
            f"stream: saves {saved:.0%} of the shorter stage by step times, stages slowed by each other included"
        )
    tokens = sync.tokens if sync else 1.0
    candidates = {name: by_arm[name].for_tokens(tokens) for name in BEST_OF if name in by_arm}
    if candidates:
        best = min(candidates, key=lambda name: candidates[name])
        lines.append(f"best of {', '.join(candidates)}: {best}, {candidates[best]:.2f} s")
        over = auto.for_tokens(tokens) / candidates[best] if auto else None
        same = picked == best.split("-")[0]
        what = f"auto: picks the best (it took {picked}), or its step / the best's is at most {AUTO_OVER_BEST}"
        say(what, over, lambda v: same or v <= AUTO_OVER_BEST)
    return lines


class Study:
    """All runs, and what follows from them."""

    def __init__(self, steps: int, warmup: int, drain: int, runs: Sequence[Run] = (), on: str = "") -> None:
        self.steps, self.warmup, self.drain, self.runs, self.on = steps, warmup, drain, list(runs), on or machine()

    @classmethod
    def load(cls, path: Path) -> Study:
        """Read the JSON that `save` wrote, with its own window of steps."""
        values = read_record(path, "machine", "steps", "warmup", "drain", "runs")
        runs = [Run.from_json(run) for run in values["runs"]]
        return cls(values["steps"], values["warmup"], values["drain"], runs, values["machine"])

    def of(self, workload: str, schedule: str) -> list[Run]:
        """All repeats."""
        return [run for run in self.runs if (run.workload, run.schedule) == (workload, schedule)]

    def workloads(self) -> list[str]:
        """That were run."""
        return [name for name in WORKLOADS if any(run.workload == name for run in self.runs)]

    def by_arm(self, workload: str) -> dict[str, Figures]:
        """Schedules that did not fail, with their figures."""
        found = {name: figures(self.of(workload, name), self.warmup, self.drain) for name in ARMS}
        return {name: some for name, some in found.items() if some}

    def save(self, path: Path) -> None:
        """Everything, as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        summary = {
            workload: {
                "figures": {name: asdict(some) for name, some in by_arm.items()},
                "targets": self.targets(workload),
            }
            for workload in self.workloads()
            if (by_arm := self.by_arm(workload))
        }
        values = {"machine": self.on, "steps": self.steps, "warmup": self.warmup, "drain": self.drain}
        runs = [run.to_json(COLUMNS) for run in self.runs]
        path.write_text(json.dumps(values | {"summary": summary, "runs": runs}, indent=1) + "\n")

    def targets(self, workload: str) -> list[str]:
        """See `targets`."""
        return targets(self.by_arm(workload), chosen([run for run in self.runs if run.workload == workload]))

    def sheet(self, workload: str) -> Sheet:
        """A workload's table; below it targets, failures, and what `auto` said."""
        by_arm = self.by_arm(workload)
        sync = by_arm.get("sync")
        rows = [
            (
                name,
                f"{some.step_s:.2f}",
                shown(some.for_tokens(sync.tokens) / sync.longer_s if sync else None),
                shown(some.for_tokens(sync.tokens) / sync.step_s if sync else None),
                f"{some.generate_s:.2f}",
                f"{some.train_s:.2f}",
                f"{some.generation_bubble:.0%}",
                f"{some.training_bubble:.0%}",
                f"{some.exposed_share:.1%}",
                f"{some.staleness_mean:.2f} ({some.staleness_max:.0f})",
                f"{some.tokens:.0f}",
                f"{some.reward:.3f}",
            )
            for name, some in by_arm.items()
        ]
        columns = (
            *("schedule", "step s", "/ longer alone", "/ sync", "gen. s", "train s", "gen. idle", "train idle"),
            *("sync exposed", "stale (most)", "tokens", "reward"),
        )
        notes = self.targets(workload)
        for run in self.runs:
            if run.workload == workload:
                if run.error:
                    notes.append(f"{run.schedule}, repeat {run.repeat}: FAILED: {run.error}")
                elif ARMS[run.schedule].schedule.startswith("{name: auto"):
                    notes += [f"auto, repeat {run.repeat}, said: {line}" for line in run.said]
        return Sheet(f"Workload: {workload}", columns, rows, notes)


def draw(study: Study, path: Path) -> None:
    """By workload: step times, bubbles, rewards."""
    workloads = study.workloads()
    figure = Figure(figsize=(4.6 * len(workloads), 10), layout="constrained")
    grid = figure.subplots(3, len(workloads), squeeze=False)
    for column, workload in enumerate(workloads):
        by_arm = study.by_arm(workload)
        if by_arm:
            _bars(grid[0, column], grid[1, column], by_arm)
            grid[0, column].set_title(workload if workload == "balanced" else f"{workload}-bound")
        for name in by_arm:
            rows = next(run.rows for run in study.of(workload, name) if run.error is None)
            samples = list(accumulate(row.samples_total or 0 for row in rows))
            rewards = [math.nan if row.reward_mean is None else row.reward_mean for row in rows]
            grid[2, column].plot(samples, rewards, lw=1.2, label=name)
        grid[2, column].set(xlabel="samples trained", ylabel="mean reward" if column == 0 else "")
        grid[2, column].grid(alpha=0.3)
    for row in grid:
        if row[0].get_legend_handles_labels()[0]:
            row[0].legend(fontsize=8)
    save_plot(figure, path)


def _bars(upper: Axes, lower: Axes, by_arm: dict[str, Figures]) -> None:
    """Step times, with both stages alone as lines; and idle shares, one on the other."""
    names = list(by_arm)
    upper.bar(names, [by_arm[name].step_s for name in names], color="#7f9fbf")
    for number, name in enumerate(names):
        upper.plot([number] * len(by_arm[name].all_step_s), by_arm[name].all_step_s, "k.", ms=4)
    if sync := by_arm.get("sync"):
        upper.axhline(sync.generate_s, color="#2f7ed8", ls="--", lw=1.2, label="generation alone")
        upper.axhline(sync.train_s, color="#e0801f", ls="--", lw=1.2, label="training alone")
    upper.set_ylabel("step time, s")
    generation = [by_arm[name].generation_bubble for name in names]
    lower.bar(names, generation, color="#2f7ed8", label="instances idle")
    training = [by_arm[name].training_bubble for name in names]
    lower.bar(names, training, bottom=generation, color="#e0801f", label="trainer idle")
    lower.set_ylabel("share of the step, one on the other")
    for axes in (upper, lower):
        axes.tick_params("x", rotation=40)


def jobs_of(
    workloads: Sequence[str], schedules: Sequence[str], repeats: int, steps: int, overrides: Sequence[str]
) -> dict[Job, tuple[str, str, int]]:
    """All runs, repeats interleaved, each with (workload, schedule, repeat)."""
    return {
        Job(
            f"{workload}-{name}-{repeat}",
            HERE / "clusters" / f"{ARMS[name].cluster}.yaml",
            HERE / "runs" / f"schedules_{workload}.yaml",
            steps + ARMS[name].profiling,
            (*overrides, f"schedule={ARMS[name].schedule}"),
        ): (workload, name, repeat)
        for repeat, workload, name in product(range(1, repeats + 1), workloads, schedules)
    }


def about_schedule(run_dir: Path) -> list[str]:
    """The last lines in the controller's log that have to do with the schedule."""
    log = run_dir / "logs" / "controller.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line for line in lines if "schedule" in line][-SCHEDULE_LINES:]


@click.command(help=__doc__)
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Optimizer steps of each run.")
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(0), help="First steps that are left out.")
@click.option("--drain", default=2, show_default=True, type=click.IntRange(0), help="Last steps that are left out.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option("--workload", "workloads", multiple=True, type=click.Choice(WORKLOADS), default=WORKLOADS)
@click.option("--schedule", "schedules", multiple=True, type=click.Choice(tuple(ARMS)), default=tuple(ARMS))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of all run files.")
@click.option(
    "--runs-dir", type=click.Path(path_type=Path), help="Where runs are kept, and not run again (default: nowhere)."
)
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Run nothing: tables and plot from the JSON.")
def main(
    steps: int,
    warmup: int,
    drain: int,
    repeats: int,
    workloads: tuple[str, ...],
    schedules: tuple[str, ...],
    overrides: tuple[str, ...],
    runs_dir: Path | None,
    out: Path | None,
    summary_only: bool,
) -> None:
    out = results_folder(out, "steps", "warmup", "drain", "repeats", "workloads", "schedules", "overrides")
    console = terminal()
    kept = out / "schedules.json"
    if summary_only and (given := given_options("steps", "warmup", "drain")):
        raise click.UsageError(f"{given[0]} does not go with --summary-only, which takes what the JSON was made with")
    if warmup + drain >= steps:
        raise click.UsageError(f"of {steps} steps, warmup {warmup} and drain {drain} leave none")
    study = Study.load(kept) if summary_only else Study(steps, warmup, drain)
    if not summary_only:
        jobs = jobs_of(workloads, schedules, repeats, steps, overrides)
        with runs_folder(runs_dir) as folder:

            def done(job: Job, outcome: Outcome) -> None:
                said = about_schedule(folder / job.name)
                study.runs.append(Run(outcome.rows, outcome.seconds, outcome.error, *jobs[job], said))
                if not all(run.error for run in study.runs):  # else older results stay
                    study.save(kept)

            run_all(list(jobs), folder, console, done, STEP_S)
    failed = [run for run in study.runs if run.error]
    if len(failed) == len(study.runs):
        raise click.ClickException(f"none of {len(failed)} runs succeeded: {kept} is not written")
    study.save(kept)
    sheets = [study.sheet(workload) for workload in study.workloads()]
    for sheet in sheets:
        sheet.show(console)
    window = f"Steps {study.warmup + 1} to {study.steps - study.drain} of {study.steps}; {study.on}."
    write_tables(kept.with_suffix(".md"), "Schedules side by side", window, sheets)
    draw(study, out / "schedules.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)
    if failed and not summary_only:
        raise click.ClickException(f"{len(failed)} of {len(study.runs)} runs failed")


if __name__ == "__main__":
    main()
