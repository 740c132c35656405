"""What the studies share: run jobs through the command line, wait for their steps, write tables and results.

A finished run leaves `<folder>/<name>.json`; the same job in the same folder is then not run again. A run that was cut
short or failed is removed and starts anew, so that its times are those of one piece.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click
import matplotlib
import psutil
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from streamrl.config.load import RESOLVED_NAME
from streamrl.given_options import given_options
from streamrl.machine.own_share import core_numbers
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import MetricsRow, read_metrics

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parent
RESULTS = HERE / "results"
LOCAL = ROOT / "cluster_configs" / "local.yaml"
"""The cluster file of a run on this machine."""
OUT_HELP = "Where results go (default: experiments/results; with options that change the study, the current folder)."
POLL_S = 2.0
WAIT_S = 0.2
"""Seconds between two looks at the steps of a run that a study waits for."""
STOP_S = 20.0
"""Most seconds for a run to end its processes when it is told to."""
LIMIT_S = 3600
"""Seconds of each run of `run_all`."""
START_S = 40.0
"""A run needs before its first step and after its last (vLLM, torch), on two cores; for estimates."""
LAST_LINES, LAST_CHARACTERS = 6, 600
"""Of a failed run's output: its last words."""


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    """Its folder's name."""
    cluster: Path
    run_file: Path
    steps: int
    overrides: tuple[str, ...] = ()
    """`--set` values."""
    options: tuple[str, ...] = ()
    """Further ones of `streamrl launch`."""

    def mark(self) -> str:
        """Return a hash of what the job does; the code's version is not in it."""
        files = [path.read_text() for path in (self.cluster, self.run_file)]
        return hashlib.sha256(json.dumps([files, self.steps, self.overrides, self.options]).encode()).hexdigest()

    def command(self, folder: Path) -> list[str]:
        """Return what is started, in the repository's root."""
        sets = [word for value in (*self.overrides, f"name={self.name}") for word in ("--set", value)]
        return [
            *[sys.executable, "-m", "streamrl.cli.main", "launch", "--plain"],
            *["--cluster", str(self.cluster), "--run", str(self.run_file), "--runs-dir", str(folder)],
            *[*sets, "--steps", str(self.steps), *self.options],
        ]


@dataclass(frozen=True)
class Outcome:
    """What came of a job; a study's own record of a run adds to it which one it was."""

    rows: list[MetricsRow]
    """Of all its steps; of those that were done, if it failed."""
    seconds: float
    """With start and end."""
    error: str | None
    """Its last words, if it failed."""

    def to_json(self, columns: Set[str]) -> dict[str, Any]:
        """Return plain values, with these columns of metrics.jsonl; `from_json` takes them."""
        return vars(self) | {"rows": [row.model_dump(mode="json", include=set(columns)) for row in self.rows]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Make an outcome of what `to_json` returned."""
        return cls(**values | {"rows": [MetricsRow(**row) for row in values["rows"]]})


def run_job(job: Job, folder: Path, on_step: Callable[[int], None], limit_s: float) -> Outcome:
    """Run a job to its end, or take what an earlier call left.

    Args:
        job: what to run.
        folder: where the runs' folders are.
        on_step: is told how many steps are done, every few seconds.
        limit_s: the run is stopped, as failed, when it takes longer.
    """
    folder = folder.resolve()
    run_dir, note, log = folder / job.name, folder / f"{job.name}.json", folder / f"{job.name}.log"
    mark = job.mark()
    if note.is_file() and (left := json.loads(note.read_text()))["mark"] == mark:
        on_step(job.steps)
        return Outcome(read_metrics(run_dir / layout.METRICS), left["seconds"], None)
    note.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    late = False
    with log.open("w") as output:
        process = subprocess.Popen(
            job.command(folder), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and not late:
                time.sleep(POLL_S)
                on_step(done_steps(run_dir))
                late = time.monotonic() - began > limit_s
        finally:
            _end(process)
    rows, seconds = read_metrics(run_dir / layout.METRICS), time.monotonic() - began
    if late:
        return Outcome(rows, seconds, f"stopped after {limit_s:.0f} s")
    if process.returncode or len(rows) < job.steps:
        return Outcome(rows, seconds, _last_words(log))
    note.write_text(json.dumps({"mark": mark, "seconds": seconds}) + "\n")
    return Outcome(rows, seconds, None)


def done_steps(run_dir: Path) -> int:
    """Return the optimizer steps that a run has recorded."""
    path = run_dir / layout.METRICS
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for_steps(
    run_dir: Path,
    steps: int,
    process: subprocess.Popen[bytes],
    limit_s: float,
    on_step: Callable[[int], object] = lambda done: None,
) -> None:
    """Wait until a run has recorded so many steps.

    Args:
        run_dir: its folder.
        steps: how many.
        process: its launcher.
        limit_s: longest wait.
        on_step: is told how many steps are done, again and again.

    Raises:
        ClickException: it has ended before, or takes too long.
    """
    deadline = time.monotonic() + limit_s
    while (done := done_steps(run_dir)) < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            why = "took too long" if process.poll() is None else "ended"
            raise click.ClickException(f"the run {why} at step {done}, before step {steps}: see {run_dir.parent}")
        on_step(done)
        time.sleep(WAIT_S)


def launch_or_resume(run_dir: Path, steps: int, run_file: Path, *overrides: str) -> None:
    """Launch a run on this machine, or resume it where it was cut short; wait for its end.

    Args:
        run_dir: the run's folder.
        steps: all of the run's, with those that are done.
        run_file: of a new run.
        overrides: `--set` values of a new run.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "streamrl.cli.main", "launch", "--plain", "--cluster", str(LOCAL)]
    if (run_dir / RESOLVED_NAME).is_file():
        command += ["--resume", str(run_dir)]
    else:
        command += ["--run", str(run_file), "--runs-dir", str(run_dir.parent)]
        command += [word for value in (f"name={run_dir.name}", *overrides) for word in ("--set", value)]
    subprocess.run([*command, "--steps", str(steps)], cwd=ROOT, check=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell a run to stop, if it has not ended, and wait for it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(log: Path) -> str:
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES:])[-LAST_CHARACTERS:]


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    console: Console,
    done: Callable[[Job, Outcome], None],
    step_s: float,
) -> None:
    """Run jobs one after the other, showing how far they are; one that fails does not stop the others.

    Args:
        jobs: in their order.
        folder: where the runs' folders are.
        console: the terminal.
        done: is told of each job as it ends.
        step_s: a step's time, roughly: for the first estimate.
    """
    guess = sum(START_S + job.steps * step_s for job in jobs)
    console.print(f"{len(jobs)} runs in {folder}, some {guess / 60:.0f} min if none is there already", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    clocks = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, *clocks, console=console, speed_estimate_period=3600) as progress:
        total = progress.add_task("", total=sum(job.steps for job in jobs))
        before = 0
        for number, job in enumerate(jobs, start=1):
            progress.update(total, description=f"{number}/{len(jobs)} {job.name}")

            def on_step(steps: int, before: int = before) -> None:
                progress.update(total, completed=before + steps)

            outcome = run_job(job, folder, on_step, LIMIT_S)
            before += job.steps
            progress.update(total, completed=before)
            said = f"FAILED: {outcome.error}" if outcome.error else f"{outcome.seconds:.0f} s"
            console.print(f"  {number}/{len(jobs)} {job.name}: {said}", highlight=False, markup=False)
            done(job, outcome)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


@contextlib.contextmanager
def runs_folder(given: Path | None) -> Iterator[Path]:
    """Yield the folder that was asked for, or one that is removed at the end."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="streamrl-study-") as folder:
        yield Path(folder)


def machine() -> str:
    """Return this machine in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{len(core_numbers())} cores of {model}, {platform.system()} {platform.machine()}"


@dataclass(frozen=True)
class Sheet:
    """A table, for the terminal and for a file. The first column is text, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """Lines below it."""

    def show(self, console: Console) -> None:
        """Print the table."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)

    def markdown(self) -> str:
        """Return the table as Markdown, with a heading."""
        head = [f"| {' | '.join(self.columns)} |", f"|---|{'---:|' * (len(self.columns) - 1)}"]
        body = [f"| {' | '.join(row)} |" for row in self.rows]
        notes = [f"- {' '.join(note.split())}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", *head, *body, *(["", *notes] if notes else []), ""])


def machine_with_load() -> str:
    """Return this machine, and how many processes want its cores just now, in words."""
    return f"{machine()}, load average {os.getloadavg()[0]:.1f}"


def terminal() -> Console:
    """Return the terminal; wide enough for the tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def shown(value: float | None, form: str = ".2f") -> str:
    """Return a figure in this format; a dash where there is none."""
    return "-" if value is None else format(value, form)


def results_folder(out: Path | None, *fixed: str) -> Path:
    """Make and return the folder of a study's files: `--out`, or experiments/results; see `OUT_HELP`.

    Published figures are those of studies without these options: others do not replace them.

    Args:
        out: the value of `--out`; None: it was not given, or the study has no such option.
        fixed: parameters of the running command that change what its figures mean.

    Raises:
        UsageError: nothing can be written there.
    """
    context = click.get_current_context()
    if out is None and (given := given_options(*fixed)):
        out = Path()
        others = ", ".join(given)
        click.echo(f"with {others} this is not the published study: its files go to {Path.cwd()}", err=True)
    out = out or RESULTS
    try:
        if not context.params.get("summary_only"):  # it reads what is there
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise click.UsageError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    return out


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """Read the JSON that an earlier run of a study left.

    Args:
        path: the file.
        keys: what the study takes from it.

    Raises:
        UsageError: there is none, or it lacks a key.
    """
    expected = "expected what this study wrote, without --summary-only"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or f"not valid JSON: {error}"
        raise click.UsageError(f"{path}: {why}; {expected}") from error
    if not isinstance(values, dict) or not values:
        raise click.UsageError(f"{path}: has no results; {expected}")
    if missing := [key for key in keys if key not in values]:
        raise click.UsageError(f"{path}: lacks {', '.join(missing)}; {expected}")
    return values


def save_plot(figure: Figure, path: Path) -> None:
    """Write a plot as SVG: the same file from the same figures."""
    with matplotlib.rc_context({"svg.hashsalt": "streamrl"}):
        figure.savefig(path, metadata={"Date": None})


def write_results(target: Path, record: dict[str, Any], title: str, sheets: Sequence[Sheet]) -> None:
    """Write what was measured as JSON, and the tables as Markdown beside it.

    Args:
        target: the JSON file; its name is the script's, and may go on behind it.
        record: with the `machine` that it was measured on.
        title: of the Markdown.
        sheets: the tables.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    write_tables(target.with_suffix(".md"), title, f"{record['machine']}.", sheets)


def write_tables(path: Path, title: str, circumstances: str, sheets: Sequence[Sheet], about: str = "") -> None:
    """Write tables as Markdown, below the name of the script whose command runs.

    Args:
        path: the file.
        title: its heading.
        circumstances: what was measured on which machine, in a line.
        sheets: the tables.
        about: what was measured how (`explanation`); '': the tables say it.
    """
    study = click.get_current_context().command.callback
    assert study is not None
    script = Path(inspect.getfile(study)).resolve().relative_to(ROOT)
    head = [f"# {title}", f"Written by `{script}`. {circumstances}".rstrip(), about]
    tables = "\n".join(sheet.markdown() for sheet in sheets)
    path.write_text("\n\n".join([*filter(None, head), tables]))


def explanation(docstring: str | None) -> str:
    """Return what a study's docstring says below its first sentence and its commands."""
    return (docstring or "").split("\n\n", 2)[2].strip()
