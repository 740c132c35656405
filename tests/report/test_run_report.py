"""report.html: whole, self-contained and right for finished, unfinished, short and empty runs."""

from __future__ import annotations

import json
import re
import shutil
import time
import tracemalloc
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from streamrl.cli.report import command
from streamrl.errors import UserError
from streamrl.report import check_plots, plots, run_data
from streamrl.report.panels import header
from streamrl.report.run_data import error_counts, load_run, pick_samples, read_texts
from streamrl.report.run_report import write_report
from streamrl.run_dir.evaluations import EvaluationRow
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.status import read_status
from streamrl.run_dir.trace import TraceWriter
from tests.dashboard.samples import a_sample, write_samples
from tests.report.synthetic import (
    START,
    RunMaker,
    audit_of,
    make_evaluation,
    make_row,
    make_status,
    write_rollouts,
    write_run,
    write_status,
)

VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in order; collects plots, text, ids, and what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.plots: list[str] = []
        self.captions = 0
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"] or "")
        if tag == "figure":
            self.plots.append((values["id"] or "").removeprefix("plot-"))
        self.captions += tag == "figcaption"
        if tag in ("script", "link", "iframe"):
            self.fetched.append(tag)
        for name in ("src", "href", "xlink:href"):
            if not (values.get(name) or "#").startswith(("#", "data:")):
                self.fetched.append(values[name] or "")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.text += data


def page_of(run_dir: Path) -> tuple[Page, str]:
    text = write_report(run_dir).read_text()
    return Page(text), text


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    """The report of a run that has everything, of which several tests look at a part: plots take 2 s of a core."""
    run_dir = tmp_path_factory.mktemp("whole") / "demo"
    write_run(run_dir, 12, state="done")
    return page_of(run_dir)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plots are made but not drawn, for tests whose data might be too odd for them."""
    monkeypatch.setattr(plots, "to_svg", lambda figure, name: "<svg></svg>")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves all plots empty but those with these names, for tests that look at them; makes the others if asked to."""
    to_svg = plots.to_svg

    def only(*names: str, others_made: bool = False) -> None:
        functions = {re.sub(r"-\d+$", "", name).replace("-", "_") + "_figure" for name in names}
        for module in (plots, check_plots):
            for name in () if others_made else vars(module).keys() - functions:
                if name.endswith("_figure"):
                    monkeypatch.setattr(module, name, lambda *data: None)
        monkeypatch.setattr(plots, "to_svg", lambda figure, of: to_svg(figure, of) if of in names else "<svg></svg>")

    return only


@pytest.fixture
def unmade(drawn: Callable[..., None]) -> None:
    """No plot is even made, for tests that look at the rest of the page: making them takes a second of a core."""
    drawn()


def test_the_factor_of_small_values_is_beside_the_title() -> None:
    figure, (axis,) = plots.new()
    axis.plot([1, 2], [1e-6, 3e-6])
    plots.label_axis(axis, "optimizer step", "nats per token", "log-probability gap")
    plots.to_svg(figure, "gap")
    title, factor = axis._left_title.get_window_extent(), axis.yaxis.get_offset_text()
    assert factor.get_text() == "1e\N{MINUS SIGN}6" and title.x1 > title.x0
    assert not title.overlaps(factor.get_window_extent())


def test_the_report_of_a_whole_run_holds_every_plot_and_the_right_figures(of_a_run: tuple[Page, str]) -> None:
    page, text = of_a_run
    assert page.plots == [
        *["reward", "evaluation", "lengths", "length-histogram", "length-audit", "predictions", "step-time"],
        *["schedule", "timeline-0", "timeline-1", "training"],
    ]
    assert page.captions == len(page.plots)
    assert page.fetched == []
    assert "url(http" not in text and "@import" not in text
    for part in (
        "done at step 12 of 20, 4m16s after its start",
        "0.225 → 0.525 (+0.300, means of 6 steps)",
        "24 of 96 (25%)",
        "36 of 804 rewards void (4%: timeout 3%, crash 1%)",
        "12 of 12 steps were dispatched by predicted length; mean saving in them 8.0 % of generation time",
        "Timeout: no answer in 20 s",
        "letter_counting",
        "smollm2-135m # <resolved>",
        "What is <0> + 1?",
    ):
        assert part in page.text
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)


def test_plots_are_sound_svg_that_follows_the_page_colours_with_ids_of_their_own(
    of_a_run: tuple[Page, str],
) -> None:
    page, text = of_a_run
    plots = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(plots) == len(page.plots)
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "currentColor" in plot and "#010203" not in plot and "#040506" not in plot
        for target in re.findall(r'(?:url\(#|href="#)([^)"]+)', plot):
            assert f'id="{target}"' in plot
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.usefixtures("undrawn")
def test_without_predictions_nothing_is_said_of_them(make_run: RunMaker) -> None:
    run_dir = make_run(2)
    for path in (run_dir / "rollouts").glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["predicted_length"]), path)
    page, _ = page_of(run_dir)
    assert "predictions" not in page.plots and "length-histogram" in page.plots


def test_the_timeline_has_a_row_per_instance_and_the_trainer(of_a_run: tuple[Page, str]) -> None:
    _, text = of_a_run
    (figure,) = re.findall(r'<figure id="plot-timeline-0">.*?</figure>', text, flags=re.DOTALL)
    for name in ("here-regular-0", "here-regular-1", "trainer", "sample", "micro-batch", "optimizer step"):
        assert f">{name}<" in figure


def test_dollar_signs_in_names_are_no_formulas(tmp_path: Path, drawn: Callable[..., None]) -> None:
    name = "cash$%s$"
    rollouts = [a_sample("a.0", task=name, finish_reason=name), a_sample("b.0", task="sum")]
    write_samples(tmp_path / "rollouts", 1, rollouts)
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(1, reward_by_task={name: 0.5}))
    evaluation = make_evaluation(1, 0.4)
    with RowWriter(tmp_path / "evaluations.jsonl", EvaluationRow) as evaluations:
        evaluations.append(
            evaluation.model_copy(update={"by_task": {name: evaluation.overall, "sum": evaluation.overall}})
        )
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.span(name, name, START + 30, START + 31)
    write_status(tmp_path, make_status(1, 20, START))
    counts = {"reward": 1, "evaluation": 1, "length-histogram": 3, "timeline-0": 2}
    drawn(*counts)
    _, text = page_of(tmp_path)
    for plot, count in counts.items():
        (figure,) = re.findall(rf'<figure id="plot-{plot}">.*?</figure>', text, flags=re.DOTALL)
        assert figure.count(f">{name}<") == count, plot


def test_many_kinds_of_work_do_not_flood_the_timeline(make_run: RunMaker, drawn: Callable[..., None]) -> None:
    drawn("timeline-0")
    run_dir = make_run(2, trace=False)
    with TraceWriter(run_dir / "trace.json") as trace:
        for index in range(40):
            trace.span("trainer", f"kind {index:02d}", START + 30 + index, START + 30.9 + index - index / 100)
    _, text = page_of(run_dir)
    (figure,) = re.findall(r'<figure id="plot-timeline-0">.*?</figure>', text, flags=re.DOTALL)
    assert len(set(re.findall(r">kind \d\d<", figure))) <= 7
    assert ">other<" in figure


def test_one_step_is_enough_for_every_plot(make_run: RunMaker, drawn: Callable[..., None]) -> None:
    # the others are of samples and spans, of which there are as many as elsewhere
    drawn("reward", "evaluation", "lengths", "step-time", "schedule", "training", others_made=True)
    page, _ = page_of(make_run(1))
    assert page.plots == [
        *["reward", "evaluation", "lengths", "length-histogram", "length-audit", "predictions", "step-time"],
        *["schedule", "timeline-0", "training"],
    ]
    assert "0.100 (one step)" in page.text


def test_without_a_step_the_report_says_so(make_run: RunMaker) -> None:
    page, _ = page_of(make_run(0, rollouts=False, trace=False, state="interrupted"))
    assert "No optimizer step has finished" in page.text
    assert "No finished samples have been recorded" in page.text
    assert page.plots == []


@pytest.mark.usefixtures("undrawn")
def test_without_a_step_the_trace_and_samples_so_far_are_shown(make_run: RunMaker) -> None:
    page, _ = page_of(make_run(0, state="failed", error="trainer died: <no memory>"))
    assert page.plots == ["length-histogram", "timeline-0"]
    assert "trainer died: <no memory>" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_rollouts_or_trace_or_status_still_has_its_curves(make_run: RunMaker) -> None:
    run_dir = make_run(4, rollouts=False, trace=False, evaluations=False)
    (run_dir / "status.json").unlink()
    page, _ = page_of(run_dir)
    assert page.plots == ["reward", "lengths", "length-audit", "step-time", "schedule", "training"]
    assert "The run's state is unknown" in page.text


@pytest.mark.usefixtures("unmade")
def test_a_running_run_is_told_from_a_silent_one(make_run: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    assert "no update for" in page_of(run_dir)[0].text
    now = time.time()
    monkeypatch.setattr("streamrl.report.run_report.time", SimpleNamespace(**vars(time) | {"time": lambda: now}))
    write_status(run_dir, make_status(2, 20, now) | {"started_at": now - 90})
    text = page_of(run_dir)[0].text
    assert "no update for" not in text
    assert "running at step 2 of 20, 1m30s after its start (the run has not ended" in text


@pytest.mark.usefixtures("unmade")
def test_a_run_that_was_continued_is_as_old_as_its_first_start_and_counts_say_since_when(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    now, verified = time.time(), {"versions": 2, "comparisons": 5}
    monkeypatch.setattr("streamrl.report.run_report.time", SimpleNamespace(**vars(time) | {"time": lambda: now}))
    more = {"started_at": now - 90, "first_started_at": now - 7200, "refused": {"malformed": {"west": 3}}}
    write_status(run_dir, make_status(2, 20, now) | more | {"verified": verified})
    text = page_of(run_dir)[0].text
    assert "running at step 2 of 20, 2h00m after its start" in text
    assert "since the controller last started: malformed: west 3" in text
    assert "bound 0) since the controller last started" in text
    assert "elapsed 2h00m" in header(read_status(run_dir), now).plain


@pytest.mark.usefixtures("unmade")
def test_a_rollout_file_without_its_footer_is_left_out_and_told(make_run: RunMaker) -> None:
    run_dir = make_run(3)
    path = run_dir / "rollouts" / "step_000003.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    page, _ = page_of(run_dir)
    assert "All 128 recorded samples" in page.text
    assert "step_000003.parquet could not be read and is left out" in page.text


@pytest.mark.usefixtures("unmade")
def test_a_sample_recorded_again_after_a_resume_counts_once(make_run: RunMaker) -> None:
    run_dir = make_run(2)
    shutil.copy(run_dir / "rollouts" / "step_000002.parquet", run_dir / "rollouts" / "step_000002b.parquet")
    rollouts = load_run(run_dir).rollouts
    assert rollouts is not None and len(rollouts) == 128


def test_many_samples_are_held_in_little_memory_and_failures_beyond_a_number_share_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "MOST_TEXTS", 3)
    count = 12_000
    for step in (1, 2):
        ids = [f"{step}.{number}" for number in range(count)]
        failed = [f"failure {min(number, 9)}\nmore" if number < 20 else None for number in range(count)]
        columns: dict[str, list[Any]] = {
            "sample_id": ids,
            "trajectory_id": ids,
            "group_id": ids,
            "task": ["sum"] * count,
        }
        columns |= {"step": [step] * count, "output_length": [4] * count, "reward": [0.5] * count}
        table = pa.table(columns | {"reward_error": failed})
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "rollouts" / f"step_{step:06d}.parquet")
    run_data._read_rollouts(tmp_path / "none", [])  # imports
    tracemalloc.start()
    try:
        rollouts = run_data._read_rollouts(tmp_path / "rollouts", [])
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rollouts is not None and len(rollouts) == 2 * count
    assert held < 75 * len(rollouts) and peak < 200 * len(rollouts)
    assert error_counts(rollouts) == [("(other)", 36), ("failure 0", 2), ("failure 1", 2)]


@pytest.mark.usefixtures("unmade")
def test_predicted_lengths_are_beside_those_of_the_same_samples(make_run: RunMaker) -> None:
    run_dir = make_run(1)
    rows = [a_sample(f"a.{n}", step=2, route="solo", predicted_length=10.0, output_length=12) for n in (0, 1)]
    rows.append(a_sample("a.2", step=2, route="solo", predicted_length=None, output_length=90))
    write_samples(run_dir / "rollouts", 2, rows)
    text = " ".join(re.sub("<[^>]*>", " ", page_of(run_dir)[1]).split())
    assert "their mean predicted length their mean length" in text
    (row,) = re.findall(r"solo (?:\w+ )?3 (\d+) (\d+) (\d+) (\d+)", text)
    assert row == ("2", "10", "12", "90")


@pytest.mark.usefixtures("unmade")
def test_the_share_of_cut_completions_is_weighed_by_all_that_were_generated(make_run: RunMaker) -> None:
    run_dir = make_run(0, rollouts=False, trace=False)
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(1, groups_total=8, samples_total=64, truncated_fraction=0.0))
        metrics.append(make_row(2, groups_total=8, samples_total=16, truncated_fraction=0.8))  # most are void
    page, _ = page_of(run_dir)
    assert "40%" in page.text and "void ones included" in page.text


def test_an_episode_of_several_rows_counts_once_and_its_text_is_that_of_its_first_row(tmp_path: Path) -> None:
    episode = [a_sample("a.0", completion="first"), a_sample("a.0#1", completion="second")]
    other = a_sample("b.0", completion="other", task="count", reward=0.0, route="tail")
    write_samples(tmp_path / "rollouts", 1, [*episode, a_sample("a.0#2"), other])
    write_status(tmp_path, make_status(1, 20, START))
    data = load_run(tmp_path)
    assert data.rollouts is not None
    assert [data.rollouts.place(index)[1] for index in range(len(data.rollouts))] == [0, 3]
    assert [completion for _, completion in read_texts(data, [0, 1]).values()] == ["first", "other"]


@pytest.mark.usefixtures("unmade")
def test_best_worst_and_longest_samples_are_those_and_each_is_shown_once(make_run: RunMaker) -> None:
    data = load_run(make_run(12))
    assert data.rollouts is not None
    picked = pick_samples(data.rollouts)
    chosen = [index for indices in picked.values() for index in indices]
    assert len(chosen) == len(set(chosen)) == 9
    assert [data.rollouts.reward[i] for i in picked["Highest reward"]] == [1, 1, 1]
    assert [data.rollouts.reward[i] for i in picked["Lowest reward"]] == [0, 0, 0]
    assert [data.rollouts.output_length[i] for i in picked["Longest"]] == [96, 96, 96]
    assert {int(data.rollouts.step[i]) for i in picked["Highest reward"]} == {12}


@pytest.mark.usefixtures("unmade")
def test_completions_are_decoded_with_the_checkpoints_tokenizer(make_run: RunMaker) -> None:
    import tokenizers

    run_dir = make_run(2)
    folder = run_dir / "checkpoints" / "step_2"
    folder.mkdir(parents=True)
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "forty-two": 4}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    data = load_run(run_dir)
    assert data.rollouts is not None
    texts = read_texts(data, [0, 5, 100])
    for index, (prompt, completion) in texts.items():
        path, row = data.rollouts.place(index)
        record = pq.read_table(path).to_pylist()[row]
        assert prompt == record["prompt"]
        assert (completion or "").split() == ["forty-two"] * record["output_length"]
    assert not data.notes


@pytest.mark.usefixtures("unmade")
def test_recorded_text_is_shown_as_it_is_without_a_tokenizer(make_run: RunMaker) -> None:
    run_dir = make_run(1)
    path = run_dir / "rollouts" / "step_000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("completion", [[f"text {i}" for i in range(len(table))]]), path)
    data = load_run(run_dir)
    assert {index: completion for index, (_, completion) in read_texts(data, [3, 40]).items()} == {
        3: "text 3",
        40: "text 40",
    }
    assert not data.notes


@pytest.mark.parametrize("told", ['{"messages": 3}', "[" * 9999], ids=["wrong", "deep"])
def test_texts_that_cannot_be_read_are_noted_and_the_others_are_shown(tmp_path: Path, told: str) -> None:
    folder = tmp_path / "rollouts"
    deleted = write_samples(folder, 1, [a_sample("a.0")])
    write_samples(folder, 2, [a_sample("b.0"), a_sample("b.1")])
    write_samples(folder, 3, [a_sample("c.0"), a_sample("c.1", conversation=told)])
    write_status(tmp_path, make_status(1, 20, START))
    data = load_run(tmp_path)
    assert data.rollouts is not None and len(data.rollouts) == 5 and not data.notes
    deleted.unlink()
    write_samples(folder, 2, [a_sample("b.0")])
    texts = read_texts(data, [0, 1, 2, 3, 4])
    question = "What is 1 + 1?"
    assert texts == {**dict.fromkeys((0, 1, 2), (None, None)), 3: (question, "It is 2"), 4: (question, None)}
    for note, start in zip(
        data.notes,
        ("The texts of step_000001.parquet", "The texts of step_000002.parquet", "The conversation of sample c.1"),
        strict=True,
    ):
        assert note.startswith(start) and "could not be read" in note


def test_without_a_tokenizer_the_report_says_why_there_is_no_text(of_a_run: tuple[Page, str]) -> None:
    page, _ = of_a_run
    assert "(text not available)" in page.text
    assert "Completions are not decoded: no tokenizer.json" in page.text


@pytest.mark.usefixtures("unmade")
def test_counts_that_run_on_are_not_added_up(make_run: RunMaker) -> None:
    run_dir = make_run(0, rollouts=False, trace=False)
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        for step in (1, 2, 3):
            metrics.append(make_row(step, prompts_too_long=step, drafted_tokens=500 * step, accepted_tokens=300))
    page, _ = page_of(run_dir)
    assert "drafted tokens accepted30" in page.text and "of 3,000 (speculative decoding)" in page.text
    assert "prompts too long3left out" in page.text
    assert "groups without gradient6 of 24" in page.text


@pytest.mark.usefixtures("unmade")
def test_text_cannot_become_markup(make_run: RunMaker) -> None:
    run_dir = make_run(1, error="<script>alert(1)</script>", state="failed", model="<b>m</b>")
    page, text = page_of(run_dir)
    assert "<script" not in text and "<b>m" not in text
    assert "<script>alert(1)</script>" in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unmade")
def test_the_command_writes_the_report_and_prints_its_path_and_figures(make_run: RunMaker) -> None:
    run_dir = make_run(2)
    result = CliRunner().invoke(command, [str(run_dir)])
    assert result.exit_code == 0, result.output
    assert str(run_dir / "report.html") in result.output and "128" in result.output
    assert "eval@0: greedy 0.10 pass@4 0.30" in result.output
    assert (run_dir / "report.html").is_file()
    assert not list(run_dir.glob(".*"))
    assert "streamrl report runs/demo" in CliRunner().invoke(command, ["--help"]).output


@pytest.mark.usefixtures("unmade")
def test_a_report_of_many_samples_reads_only_the_shown_texts(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(1, rollouts=False, trace=False)
    write_rollouts(run_dir, 2)
    data = load_run(run_dir)
    asked: list[Path] = []
    original = pq.ParquetFile

    def spy(path: Path) -> pq.ParquetFile:
        asked.append(path)
        return original(path)

    monkeypatch.setattr(pq, "ParquetFile", spy)
    read_texts(data, [0, 1])
    assert len(asked) == 1


@pytest.mark.usefixtures("unmade")
def test_every_evaluation_is_in_the_table_and_the_best_is_marked(make_run: RunMaker) -> None:
    page, _ = page_of(make_run(12, rollouts=False, trace=False))
    for part in ("pass@4", "8 (best)", "best: version 8", "newest: version 12"):
        assert part in page.text
    assert "0.400" in page.text and "0.280" in page.text  # greedy reward of the best and of the newest


@pytest.mark.usefixtures("unmade")
def test_evaluations_are_in_the_order_of_their_versions_whichever_ended_last(make_run: RunMaker) -> None:
    run_dir = make_run(12, rollouts=False, trace=False)
    path = run_dir / "evaluations.jsonl"
    *first, before, last = path.read_text().splitlines(keepends=True)
    in_order, _ = page_of(run_dir)
    path.write_text("".join([*first, last, before]))
    page, _ = page_of(run_dir)
    assert "newest: version 12" in page.text
    assert page.text.partition("Evaluation")[2] == in_order.text.partition("Evaluation")[2]


@pytest.mark.usefixtures("unmade")
def test_a_length_bias_is_in_a_box_and_a_run_without_one_has_none(make_run: RunMaker) -> None:
    run_dir = make_run(3, rollouts=False, trace=False)
    page, text = page_of(run_dir)
    assert 'class="bad box"' not in text and "0 left out" in page.text
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(4, length_bias_warning="length bias: <12 %> shorter"))
    page, text = page_of(run_dir)
    assert 'class="bad box"' in text
    assert "In 1 of 4 steps, last in step 4: length bias: <12 %> shorter" in page.text


@pytest.mark.usefixtures("unmade")
def test_the_audit_table_counts_every_fate_by_length(make_run: RunMaker) -> None:
    page, _ = page_of(make_run(3, audit=audit_of(dropped=2), rollouts=False, trace=False))
    assert "too stale" in page.text
    row = re.search(r"all([\d,]+)", page.text)
    assert row is not None and row.group(1) == "192192186" + "6"


@pytest.mark.parametrize(
    ("limited", "shown"), [(True, ("96", "reached the token limit")), (False, ("66 and more", "all longer episodes"))]
)
def test_only_lengths_that_were_cut_are_said_to_be_at_the_limit(
    make_run: RunMaker, drawn: Callable[..., None], limited: bool, shown: tuple[str, str]
) -> None:
    drawn("length-audit")
    page, text = page_of(make_run(2, audit=audit_of(limited=limited), rollouts=False, trace=False))
    name, caption = shown
    assert f">{name}</td>" in text and caption in page.text
    assert ("96 (limit)" in text) is limited and ("66 (and more)" in text) is not limited


@pytest.mark.usefixtures("undrawn")
def test_lengths_audited_under_another_token_limit_are_left_out_of_the_sums(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(3, length_audit=audit_of(limit=200)))
    assert "all6464640" in page_of(run_dir)[0].text


@pytest.mark.usefixtures("unmade")
def test_a_step_of_which_some_updates_were_made_does_not_count_as_one_without(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        for step, updates in ((3, 2), (4, 0)):
            metrics.append(make_row(step, step_skipped=True, optimizer_updates=updates))
    assert "steps without an update1too far off-policy, or refused" in page_of(run_dir)[0].text


def test_what_the_schedule_did_and_chose_is_told(make_run: RunMaker, drawn: Callable[..., None]) -> None:
    drawn("schedule")
    note = "async: generation takes 3 times as long as training"
    page, text = page_of(make_run(4, schedule_note=note, rollouts=False, trace=False))
    for part in ("The schedule's choice: async: generation takes 3", "groups dropped", "lowest effective sample size"):
        assert part in page.text
    (figure,) = re.findall(r'<figure id="plot-schedule">.*?</figure>', text, flags=re.DOTALL)
    for name in ("staleness", "of sequences", "truncated weight", "waiting for weights"):
        assert f">{name}<" in figure


def test_figures_that_no_schedule_measured_are_said_to_be_missing(
    make_run: RunMaker, drawn: Callable[..., None]
) -> None:
    drawn("schedule", others_made=True)
    run_dir = make_run(0)
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(MetricsRow(step=1, time=START + 40, staleness_mean=0.0))
    page, text = page_of(run_dir)
    assert "schedule" in page.plots and "not measured" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("undrawn")
def test_rewards_too_large_for_means_count_as_none(tmp_path: Path) -> None:
    """Earlier versions took them; figures of agents still have any size."""
    rows = [make_row(step).model_dump() for step in (1, 2, 3)]
    for row, reward in zip(rows, (1e308, 1e308, -1e308), strict=True):
        row |= {"reward_mean": reward, "reward_by_task": {"sum": reward}, "reward_std": 1e308, "usd": reward}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = {"a.0": 1e308, "a.1": -1e308, "a.2": 0.25, "a.3": float("inf"), "a.4": 1e12}
    write_samples(tmp_path / "rollouts", 1, [a_sample(name, reward=reward) for name, reward in rewards.items()])
    write_status(tmp_path, make_status(3, 20, START))
    page, _ = page_of(tmp_path)
    assert "reward-" in page.text and not re.search(r"\b(inf|nan)\b|0{20}", page.text)
    assert load_run(tmp_path).rollouts.reward.tolist()[2::2] == [0.25, 1e12]  # type: ignore[union-attr]
