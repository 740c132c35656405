"""`streamrl train-ranker`: trains the output-length ranker on past rollouts."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import UserError
from streamrl.output_files import check_output

if TYPE_CHECKING:
    from rich.console import Console

    from ranker.training_report import Dispatch, Figures, Report


@click.command(name="train-ranker")
@click.option(
    "--rollouts", multiple=True, metavar="PATH...", help="Files or folders (.parquet, .jsonl); may be repeated."
)
@click.argument("more", nargs=-1, metavar="[PATH]...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write the ranker to.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Language model that wrote the rollouts (`model.path` of its runs); read from the runs where they say it.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1000))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of LightGBM.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--report", "report_path", type=click.Path(path_type=Path), help="Also write the report to FILE.html or .json."
)
def command(
    rollouts: tuple[str, ...],
    more: tuple[str, ...],
    out: Path,
    models: tuple[str, ...],
    seed: int,
    threads: int,
    as_json: bool,
    report_path: Path | None,
) -> None:
    """Train the ranker, which predicts output lengths, on past rollouts.

    Folders are searched for .parquet and .jsonl files: rollouts of a run, or any with the columns 'prompt' and
    'output_length' (optional: task, group_id, epoch, step, finish_reason).

    \b
    Example:
      streamrl train-ranker --rollouts runs/*/rollouts --out ranker.lgb
    """
    # Spinning threads slow LightGBM down many times on shared cores; the variable is read when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ranker.data import read_rollouts
    from ranker.errors import RankerError
    from ranker.train import train_and_hold_out
    from streamrl.planning.ranker_saving import dispatch_saving
    from streamrl.planning.workload import open_found
    from streamrl.report.terminal import TextConsole

    paths = [*rollouts, *more]
    if not paths:
        raise UserError("train-ranker: no rollouts; give files or folders with --rollouts PATH...")
    if report_path is not None and report_path.suffix not in (".html", ".json"):
        raise UserError(f"--report {report_path}: expected a file that ends in .html or .json")
    for option, path in (("--out", out), ("--report", report_path)):
        if path is not None:
            check_output(option, path)
    try:
        refuse_overwriting(out, report_path, paths)
        written_by = models or writers(paths)
        trained = train_and_hold_out(read_rollouts(paths, open_found), seed, threads, written_by)
        report = trained.report
        if note := _on_writers(written_by):
            report.messages.append(note)
        if trained.held_out is not None:
            report.dispatch = dispatch_saving(trained.held_out, seed)
        trained.model.save(out)
    except RankerError as error:
        raise UserError(str(error)) from error
    text = json.dumps(report.to_json(), indent=1)
    if report_path is not None:  # before anything is printed: a reader that ends early (`| head`) ends the command
        written = text
        if report_path.suffix == ".html":
            page = TextConsole(record=True, file=io.StringIO(), width=110)
            _show(report, page)
            written = page.export_html()
        try:
            report_path.write_text(written, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--report {report_path}: cannot be written: {error}") from error
    if as_json:
        click.echo(text)
    else:
        _show(report, TextConsole())
        click.echo(f"ranker written to {out}")


def refuse_overwriting(out: Path, report: Path | None, rollouts: Sequence[str | Path]) -> None:
    """Refuse to write over the rollouts that are read, which a glob behind --out makes easy to ask for.

    Args:
        out: file of the ranker.
        report: file of the report, if one is written.
        rollouts: files and folders of rollouts.

    Raises:
        UserError: a file to write is one of the rollouts, looks like one, or is to hold both ranker and report.
        RankerError: as for `rollout_files`.
    """
    from ranker.data import ROLLOUT_ENDINGS, rollout_files

    if out.suffix.lower() in ROLLOUT_ENDINGS:
        raise UserError(f"--out {out}: {out.suffix} is an ending of rollouts; expected a name like ranker.lgb")
    if report is not None and report.resolve() == out.resolve():
        raise UserError(f"--report {report}: is the file of --out, too; expected another name")
    read = {file.resolve() for path in map(Path, rollouts) for file in rollout_files(path)}
    for option, path in (("--out", out), ("--report", report)):
        if path is not None and path.resolve() in read:
            raise UserError(f"{option} {path}: is one of the rollouts that are read; expected another file's name")


def writers(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the models of the runs whose rollouts are at or below these paths; empty if some rollouts name none."""
    import yaml

    from ranker.data import rollout_files
    from streamrl.config.load import ConfigError, read_resolved

    found: set[str] = set()
    for path in (Path(os.path.abspath(path)) for path in paths):  # `.` has no parent; links stay
        for folder in {file.parent for file in rollout_files(path)}:
            try:
                values = yaml.safe_load(read_resolved(folder.parent))
                found.add(str(values["run"]["model"]["path"]))
            except (ConfigError, ValueError, KeyError, TypeError, yaml.YAMLError, RecursionError):
                return ()
    return tuple(sorted(found))


def _on_writers(names: tuple[str, ...]) -> str:
    if not names:
        return (
            "it is not known which language model wrote these rollouts (--model NAME): a run trusts this ranker only "
            "after it has been right there"
        )
    if len(names) > 1:
        return f"rollouts of several models ({', '.join(names)}): a run trusts this ranker only after it has been right"
    return ""


def _show(report: Report, console: Console) -> None:
    """Print the report as tables."""
    from ranker.evaluate import IN_WORDS
    from streamrl.report.terminal import ruled_table

    cap = f", length limit {report.cap}" if report.cap else ""
    console.print(f"{report.samples} samples of {report.prompts} prompts, {report.tasks} tasks{cap}", highlight=False)
    if report.held_out is not None:
        titles = ("ranked by", "recall@20 %", "recall@10 %", "recall@5 %", "Kendall tau")
        table = ruled_table("Ranking of prompts not seen in training", titles, titles[:1])
        table.add_row("this ranker, on samples that chose nothing", *_cells(report.held_out), style="bold")
        if report.with_history is not None:
            table.add_row("the same, with earlier lengths", *_cells(report.with_history))
        if report.new_tasks is not None:
            table.add_row("on tasks left out of training", *_cells(report.new_tasks))
        table.add_section()
        for name, figures in report.candidates.items():
            table.add_row(f"choice: {name}{' (kept)' if name == report.kind else ''}", *_cells(figures))
        table.add_section()
        for name, figures in report.baselines.items():
            table.add_row(IN_WORDS[name], *_cells(figures))
        table.add_section()
        ties = "ties of equal lengths" + (", as at the length limit" if report.cap else "")
        table.add_row(f"limit for any ranking: {ties}", *_recalls(report.limit), "")
        if report.many is not None:
            table.add_section()
            for what, recall in (("noise ceiling", report.many.ceiling), ("this ranker", report.many.recall)):
                what = f"{what}, on {report.many.prompts} groups with many samples"
                table.add_row(what, *_recalls(recall), "")
        console.print(table)
        for what, coverage in (("", report.coverage), (", with earlier lengths", report.coverage_with_history)):
            if coverage:
                pairs = "  ".join(f"{level}: {share:.2f}" for level, share in coverage.items())
                console.print(f"share of lengths at most the predicted quantile{what}  {pairs}", highlight=False)
        console.print(f"kept by: {report.criterion}", highlight=False)
    for dispatch in report.dispatch:
        _show_dispatch(dispatch, console)
    for name, value in report.extra.items():
        console.print(f"{name}: {value:.3f}", highlight=False)
    for message in report.messages:
        console.print(f"note: {message}", highlight=False, markup=False)


def _show_dispatch(dispatch: Dispatch, console: Console) -> None:
    """Print what dispatching by forecasts saves, as a table and a line."""
    from streamrl.report.terminal import ruled_table

    names = {
        "model": "this ranker's distributions",
        "prompt_characters": "lengths of prompts about as long",
        "task": "lengths of the task",
        "other_samples": "hindsight: the prompt's other samples",
    }
    titles = ("dispatched by", "time", "of the oracle's saving")
    table = ruled_table("Simulated generation of prompts not seen in training", titles, titles[:1])
    table.add_row("least load", "1.000", "")
    shares = {}
    for name, figures in dispatch.forecasts.items():
        shares[name] = "" if figures.captured is None else f"{100 * figures.captured:.0f} %"
        table.add_row(names.get(name, name), f"{figures.makespan:.3f}", shares[name])
    table.add_row("oracle: the true lengths", f"{dispatch.oracle:.3f}", "100 %" if any(shares.values()) else "")
    console.print(table)
    console.print(f"on average of {dispatch.setting}:", highlight=False)
    model = dispatch.forecasts["model"]
    line = f"least-loaded 1.00, ours with these forecasts {model.makespan:.2f}, oracle {dispatch.oracle:.2f}"
    end = f": captured {shares['model']}" if shares["model"] else ": next to nothing can be saved here"
    console.print(line + end, highlight=False)


def _recalls(recall: Mapping[str, float]) -> list[str]:
    return [f"{recall[share]:.3f}" for share in ("0.2", "0.1", "0.05")]


def _cells(figures: Figures) -> list[str]:
    tau = "" if figures.kendall_tau is None else f"{figures.kendall_tau:.3f}"
    return [*_recalls(figures.recall), tau]
