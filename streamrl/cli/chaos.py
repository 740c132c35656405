"""`streamrl chaos`: injects faults into a live run and audits its samples."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import RunFailed, UserError
from streamrl.finite_float import FiniteFloat
from streamrl.runtime.stop_signals import TERMINALS_OWN, on_stop

if TYPE_CHECKING:
    from types import FrameType

    from streamrl.chaos.faults import FaultKind
    from streamrl.chaos.own_launcher import Launcher
    from streamrl.chaos.study import Study

MANY_STEPS = 100_000
"""Enough steps that the time limit ends the run."""
OFTEN = ("recovery.restarts=1000", "recovery.longest_pause_s=2")
"""Overrides that lift the restart limit: being killed once a minute does not mean that a process cannot run."""
PIPED_WIDTH = 180
JSON_FILE, MARKDOWN_FILE = "chaos.json", "chaos.md"


@click.command(name="chaos")
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), help="Cluster file of the run to start.")
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="Run file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--attach", type=click.Path(path_type=Path), metavar="DIR", help="Use a run that is already running.")
@click.option("--minutes", type=FiniteFloat(0, min_open=True), required=True, help="Duration, from the first step on.")
@click.option("--faults", type=click.IntRange(1), metavar="N", help="Stop after N faults, if that is earlier.")
@click.option("--kinds", metavar="A,B,...", help="Only these kinds of faults.  [default: all that are possible]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the faults' order, targets and pauses.")
@click.option(
    "--limit-s",
    type=FiniteFloat(1),
    default=300,
    show_default=True,
    help="A recovery longer than this counts as a hang.",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(
    cluster_file: Path | None,
    run_file: Path | None,
    overrides: tuple[str, ...],
    attach: Path | None,
    minutes: float,
    faults: int | None,
    kinds: str | None,
    seed: int,
    limit_s: float,
    runs_dir: Path,
) -> None:
    """Inject faults into a live run, one after the other, and check that no sample is lost.

    Faults kill, stop, cut off, damage or fill up parts of the run. Each is followed until all parts work again and one
    more optimizer step is done; the next one comes some seconds later. A table is printed at the end, and written to
    chaos.md and chaos.json in the run's folder. A run started here is ended at the end (with unlimited restarts, unless
    --set recovery.restarts=N says otherwise); an attached run continues.

    Exit code: 0 no sample was lost or trained twice, and nothing hung; 1 otherwise; 2 bad input.

    \b
    Examples:
      streamrl chaos --cluster cluster_configs/local.yaml --run examples/demo.yaml --minutes 15
      streamrl chaos --cluster cluster_configs/local.yaml --minutes 5 --kinds instance-kill,service-kill --seed 3
      streamrl chaos --attach runs/demo --minutes 5
    """
    chosen = _kinds(kinds)
    if (attach is None) == (cluster_file is None):
        raise UserError("give either --cluster FILE, to start a run, or --attach DIR, for one that goes on")
    if attach is not None and (run_file is not None or overrides):
        raise UserError("--run and --set are for a run that is started: --attach takes one as it is")
    on_stop(_interrupt, signal.SIGTERM)
    launcher = None
    if cluster_file is not None:
        launcher = _launcher(cluster_file, run_file, overrides, runs_dir)
        click.echo(f"starting {launcher.run_dir}")
    run_dir = attach if launcher is None else launcher.run_dir
    assert run_dir is not None
    sys.exit(_study(run_dir, launcher, chosen, seed, minutes, faults, limit_s))


def _interrupt(number: int, frame: FrameType | None) -> None:
    _hold()
    raise KeyboardInterrupt


def _hold() -> None:
    """Ignore further signals while the run is ended and its results are written."""
    for each in (signal.SIGTERM, signal.SIGINT, *TERMINALS_OWN):
        signal.signal(each, signal.SIG_IGN)


def _kinds(names: str | None) -> list[FaultKind]:
    """Parse --kinds.

    Raises:
        UserError: there is no such kind of fault.
    """
    import difflib

    from streamrl.chaos.faults import FaultKind

    known, chosen = {str(kind): kind for kind in FaultKind}, []
    for name in (one.strip() for one in (names or "").split(",") if one.strip()):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise UserError(f"--kinds {name}: no such kind of fault; {hint}")
        chosen.append(known[name])
    return chosen


def _launcher(cluster_file: Path, run_file: Path | None, overrides: tuple[str, ...], runs_dir: Path) -> Launcher:
    """Create the launcher of a new run, which is not yet started, and the run's folder, so that it is no other run's.

    Raises:
        UserError: a file or a --set is wrong, or the folder cannot be made.
    """
    from streamrl.chaos.own_launcher import Launcher
    from streamrl.config.load import load_cluster, load_run
    from streamrl.run_dir.layout import make_folder

    sets = (f"steps={MANY_STEPS}", *OFTEN, *overrides)
    cluster, run = load_cluster(cluster_file), load_run(run_file, sets)
    folder = make_folder(runs_dir, run.name)
    arguments = ["--cluster", str(cluster_file), "--folder", str(folder)]
    arguments += ["--run", str(run_file)] if run_file is not None else []
    arguments += [word for one in sets for word in ("--set", one)]
    return Launcher(folder, arguments, bool(cluster.remote_sites), run.deadlines.startup_s)


def _study(
    run_dir: Path,
    launcher: Launcher | None,
    chosen: list[FaultKind],
    seed: int,
    minutes: float,
    faults: int | None,
    limit_s: float,
) -> int:
    """Start the run if needed, inject faults, end it, and report the results; return the exit code.

    Raises:
        UserError: there is no run, or none of the kinds is possible.
        RunFailed: the run ended before its first
        step.
    """
    from streamrl.chaos.faults import schedule, targets
    from streamrl.chaos.inject import Injector
    from streamrl.chaos.study import Study, wait_for_first_step
    from streamrl.config.load import load_resolved
    from streamrl.plain_files import check_plain
    from streamrl.run_dir.layout import FOREIGN

    ended_well = True
    try:
        if launcher is not None:
            launcher.start()
        cluster, run = load_resolved(run_dir)
        check_plain(run_dir, apart=FOREIGN)
        wait_for_first_step(run_dir, launcher, run.deadlines.startup_s + run.deadlines.generation_s)
        injector = Injector(run_dir, cluster, run, seed, launcher.kill if launcher is not None else None)
        possible, left_out = targets(injector.inventory())
        if chosen:
            left_out = {kind: why for kind, why in left_out.items() if kind in chosen}
        for kind, why in left_out.items():
            click.echo(f"left out: {kind}: {why}")
        try:
            plan = schedule(seed, possible, chosen)
        except ValueError as error:
            raise UserError(f"{run_dir}: {error}") from error
        study = Study(run_dir, injector, plan, launcher, minutes, faults, limit_s, click.echo)
        try:
            study.run()
        except KeyboardInterrupt:
            _hold()
            click.echo("Interrupted: no more faults.")
        except RunFailed as error:
            study.ended = f"the run could not be resumed: {error}"
    finally:
        if launcher is not None:
            ended_well = launcher.end()
    if not ended_well:
        study.ended = study.ended or "the launcher did not end after SIGINT"
    return _write_results(run_dir, study, left_out, seed, minutes)


def _write_results(run_dir: Path, study: Study, left_out: dict[FaultKind, str], seed: int, minutes: float) -> int:
    """Audit the run's samples, write and print the results; return the exit code."""
    import sqlite3
    from dataclasses import asdict

    from streamrl.chaos.audit import audit, reward_curve
    from streamrl.chaos.observation import read_account
    from streamrl.chaos.table import markdown, problems, rich_table, summary, to_json
    from streamrl.report.terminal import terminal
    from streamrl.run_dir import layout
    from streamrl.run_dir.metrics import read_metrics

    found, failed = None, ""
    try:
        found = audit(read_account(run_dir))
    except (OSError, sqlite3.Error, ValueError) as error:
        failed = f"the audit failed: {error}"
    metrics = read_metrics(run_dir / layout.METRICS)
    rewards = [(row.step, row.reward_mean) for row in metrics if row.reward_mean is not None]
    curve = reward_curve([reward for _, reward in rewards])
    wrong = problems(study.results, found, study.ended)
    sentences = summary(study.results, found, curve)
    # the files come before the table: a reader that ends early (`| head`) ends the command
    about = f"{len(study.results)} faults with seed {seed} in `{run_dir}`, within {minutes:g} minutes."
    (run_dir / MARKDOWN_FILE).write_text(markdown(study.results, left_out, sentences, wrong, about), encoding="utf-8")
    written = {
        "seed": seed,
        "minutes": minutes,
        "ended_at": time.time(),
        "passed": not wrong,
        "problems": wrong,
        "faults": to_json(study.results),
        "left_out": {str(kind): why for kind, why in left_out.items()},
        "audit": asdict(found) if found is not None else None,
        "reward": {"steps": rewards, "ends": asdict(curve) if curve is not None else None},
    }
    (run_dir / JSON_FILE).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if failed:
        click.echo(failed)
    console = terminal(PIPED_WIDTH)
    console.print("", rich_table(study.results), "")
    for one in (*sentences, *(f"NOT PASSED: {one}" for one in wrong)):
        console.print(one, soft_wrap=True, markup=False)
    console.print(f"written: {run_dir / MARKDOWN_FILE}, {run_dir / JSON_FILE}", soft_wrap=True)
    return 1 if wrong else 0
