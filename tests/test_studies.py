"""Command lines of the studies: what they take, and which files they write."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import click
import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
import cross_datacenter_cost
import delta_codec
import dispatch_ceiling
import elastic
import emulated_sites
import ranker_quality
import schedules
import staleness
import two_sites
import void_rewards
from matplotlib.figure import Figure
from running import RESULTS, Outcome, results_folder, save_plot


def test_a_summary_of_schedules_keeps_the_window_of_steps_of_its_file(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "schedules.json", tmp_path)
    assert CliRunner().invoke(schedules.main, ["--summary-only", "--out", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "schedules.svg").exists()
    for name in ("schedules.json", "schedules.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


def test_a_plot_of_the_same_figures_is_the_same_file(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        figure = Figure()
        axis = figure.subplots()
        axis.plot([1, 2], label="a line with a marker", marker="o")  # it has an identifier
        axis.legend()
        save_plot(figure, tmp_path / name)
    assert (tmp_path / "first.svg").read_text() == (tmp_path / "second.svg").read_text()


def test_a_summary_of_schedules_takes_no_other_window(tmp_path: Path) -> None:
    refused = CliRunner().invoke(schedules.main, ["--summary-only", "--warmup", "1", "--out", str(tmp_path)])
    assert refused.exit_code == 2 and "--warmup does not go with --summary-only" in refused.output


@click.command()
@click.option("--steps", default=12, type=click.IntRange(1))
@click.option("--minutes", default=(8.0, 3.0), nargs=2, type=float)
@click.option("--arm", "arms", multiple=True, type=click.Choice(("one", "two")), default=("one", "two"))
@click.option("--only", multiple=True)
@click.option("--quick", is_flag=True)
@click.option("--beside", default="")
@click.option("--out", type=click.Path(path_type=Path))
def study(out: Path | None, **options: object) -> None:
    click.echo(f"writes to {results_folder(out, 'steps', 'minutes', 'arms', 'only', 'quick').resolve()}")


@pytest.mark.parametrize(
    ("arguments", "published"),
    [
        ([], True),
        (["--beside", "a remark"], True),
        (["--steps", "1"], False),
        (["--minutes", "8", "1"], False),
        (["--arm", "two"], False),
        (["--only", "a part"], False),
        (["--quick"], False),
    ],
)
def test_only_the_whole_study_goes_to_the_published_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], published: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0 and f"writes to {RESULTS if published else tmp_path}\n" in done.output
    assert published == (f"its files go to {tmp_path}" not in done.output)
    done = CliRunner().invoke(study, [*arguments, "--out", "new/mine"])
    assert done.output == f"writes to {tmp_path / 'new' / 'mine'}\n" and (tmp_path / "new" / "mine").is_dir()


def test_every_study_with_options_of_its_own_keeps_to_it() -> None:
    kept = {"dispatch_ablation.py"}  # `--part` measures one part again, and leaves the others
    for path in sorted(RESULTS.parent.glob("*.py")):
        text = path.read_text()
        if "write_results(" in text and "@click.option(" in text and path.name not in {"running.py", *kept}:
            assert "results_folder(" in text, f"{path.name} writes to the published results whatever its options"


def test_a_folder_of_results_that_cannot_be_written_is_refused() -> None:
    refused = CliRunner().invoke(study, ["--out", "/proc/results"])
    assert refused.exit_code == 2 and "--out /proc/results: cannot be written: " in refused.output


@pytest.mark.parametrize("egress", ["nan", "inf", "-1"])
def test_prices_of_traffic_are_finite(egress: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(cross_datacenter_cost.main, ["--egress", egress, "--out", str(tmp_path)])
    assert refused.exit_code == 2 and "'--egress'" in refused.output and not list(tmp_path.iterdir())


def test_fewer_batches_do_not_replace_the_published_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dispatch_ceiling, "SLOTS", ())
    monkeypatch.setattr(dispatch_ceiling, "train_and_hold_out", MagicMock())
    monkeypatch.setattr(dispatch_ceiling, "batches", MagicMock())
    monkeypatch.setattr(dispatch_ceiling, "write_results", lambda target, *record: written.append(target.resolve()))
    for arguments in (["--batches", "1"], []):
        assert CliRunner().invoke(dispatch_ceiling.main, arguments).exit_code == 0
    assert written == [tmp_path / "dispatch_ceiling.json", RESULTS / "dispatch_ceiling.json"]


def run_schedules(folder: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str | None]) -> Any:
    """Runs `sync` of a workload so many times, each with its error."""
    old = schedules.Study.load(RESULTS / "schedules.json").of("balanced", "sync")[0]

    def run_all(jobs: list[Any], folder: Path, console: object, done: Any, step_s: float) -> None:
        for job, error in zip(jobs, errors, strict=True):
            done(job, Outcome([] if error else old.rows, 1.0, error))

    monkeypatch.setattr(schedules, "run_all", run_all)
    some = ["--workload", "balanced", "--schedule", "sync", "--repeats", str(len(errors)), "--out", str(folder)]
    return CliRunner().invoke(schedules.main, some)


def test_a_study_of_schedules_whose_runs_all_fail_leaves_older_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "schedules.json").write_text("older")
    ended = run_schedules(tmp_path, monkeypatch, ["no vLLM", "no vLLM"])
    assert ended.exit_code == 1 and "none of 2 runs succeeded" in ended.output
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_a_failed_run_of_schedules_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run_schedules(tmp_path, monkeypatch, ["no vLLM", None])
    assert ended.exit_code == 1 and "1 of 2 runs failed" in ended.output
    assert "FAILED: no vLLM" in (tmp_path / "schedules.md").read_text()
    assert run_schedules(tmp_path, monkeypatch, [None]).exit_code == 0


@pytest.mark.parametrize(
    "main", [schedules.main, delta_codec.main, staleness.main], ids=("schedules", "delta", "stale")
)
def test_a_summary_without_results_is_refused_in_words(
    main: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("schedules", "delta_codec", "staleness"):
        (tmp_path / "empty" / f"{name}.json").touch()
    for folder, why in (("new.json", "No such file or directory"), ("empty", "not valid JSON")):
        refused = CliRunner().invoke(main, ["--summary-only", "--out", folder])
        assert refused.exit_code == 2 and why in refused.output and "without --summary-only" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


STUDIES = {
    "schedules": schedules.main,
    "delta_codec": delta_codec.main,
    "staleness": staleness.main,
    "two_sites": two_sites.main,
    "emulated_sites": emulated_sites.main,
    "elastic": elastic.main,
    "void_rewards": void_rewards.main,
}


@pytest.mark.parametrize("name", list(STUDIES))
@pytest.mark.parametrize(("text", "why"), [('{"a": 1}', "lacks machine, "), ("[" * 100_000, "not valid JSON")])
def test_a_summary_of_what_another_program_wrote_is_refused_in_words(
    tmp_path: Path, name: str, text: str, why: str
) -> None:
    (tmp_path / f"{name}.json").write_text(text)
    refused = CliRunner().invoke(STUDIES[name], ["--summary-only", "--out", str(tmp_path)])
    assert refused.exit_code == 2 and f"{name}.json: {why}" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


def test_options_of_studies_have_types() -> None:
    refused = CliRunner().invoke(delta_codec.main, ["--steps", "-1"])
    assert refused.exit_code == 2 and "-1 is not in the range x>=0" in refused.output
    refused = CliRunner().invoke(ranker_quality.main, ["nope"])
    assert refused.exit_code == 2 and "'nope' is not one of 'smollm2', 'small_reasoner'" in refused.output
    assert CliRunner().invoke(ranker_quality.main, ["--help"]).exit_code == 0
