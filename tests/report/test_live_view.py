"""The live view: what a terminal shows, and which lines a log gets."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from streamrl.controller.length_counts import length_counts
from streamrl.report.live_view import KEPT_STEPS, LiveView, PlainLines
from streamrl.report.panels import render, step_line
from streamrl.report.run_data import load_run
from streamrl.report.run_report import build_report
from streamrl.report.site_view import SiteView
from streamrl.report.summary import bars, duration, headline_figures, number
from streamrl.report.terminal import TextConsole
from streamrl.run_dir import appended_lines
from streamrl.run_dir.evaluations import EvaluationRow, read_evaluations
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.start_stages import READY, Stage, launched_at, say
from streamrl.run_dir.status import HEARS_END, RunStatus, read_status, write_status
from tests.report.synthetic import START, STEP_S, RunMaker, make_evaluation, make_row, make_status


class Terminal(io.StringIO):
    """Output that is a terminal."""

    def isatty(self) -> bool:
        return True


class Screen:
    """A console whose output can be read, and a clock that is set by hand."""

    def __init__(self, terminal: bool, width: int = 110, height: int = 60) -> None:
        self.buffer = Terminal() if terminal else io.StringIO()
        self.now = START
        self.console = Console(file=self.buffer, width=width, height=height, color_system=None)

    def view(self, run_dir: Path) -> LiveView:
        return LiveView(run_dir, console=self.console, clock=lambda: self.now)

    def take(self) -> list[str]:
        """Lines written since the last call."""
        lines = self.buffer.getvalue().splitlines()
        self.buffer.seek(0)
        self.buffer.truncate()
        return lines


def picture(run_dir: Path, now: float, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    evaluations = read_evaluations(run_dir / "evaluations.jsonl")
    console.print(render(read_status(run_dir), read_metrics(run_dir / "metrics.jsonl"), now, evaluations))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 110])
def test_the_picture_shows_roles_progress_lengths_and_steps_uncut(make_run: RunMaker, width: int) -> None:
    run_dir = make_run(8, rollouts=False, trace=False)
    shown = picture(run_dir, START + 190, width)
    for part in (
        "demo  smollm2-135m  stream  cpu",
        "running  step 8/20  elapsed 3m10s  left 5m10s",
        "40/64 samples",
        "24/64 samples",
        "3/8 complete",
        "1,240 tokens",
        "p50 23, max 96",
        "here-regular-1",
        "13+3",
        "[decoding]",
        "23/90/96",
        "45%/25%",
        "reward     ▁▂▃▄▅▆▇█  0.100 to 0.450 over 8 steps",
        "3 of 67 rewards void (4%: timeout 3%, crash 1%) in the last step",
    ):
        assert part in shown
    assert "0.150" not in shown and "0.200" in shown  # the last six steps only
    assert max(map(len, shown.splitlines())) == width


def test_the_picture_names_a_long_wait_and_a_silent_controller(make_run: RunMaker) -> None:
    wait = {"owner": "controller", "waiting_for": "group g7 of here", "since": START, "limit_s": 900.0}
    run_dir = make_run(2, rollouts=False, trace=False, waits=[wait])
    updated = read_status(run_dir).updated_at
    shown = picture(run_dir, updated + 1)
    assert "controller waits for group g7 of here: 1m17s of 15m00s" in shown
    assert "no update" not in shown
    assert "no update for 23s: the controller hangs, was killed, or cannot be seen" in picture(run_dir, updated + 23)


def test_the_picture_says_how_far_predictions_are_trusted(make_run: RunMaker) -> None:
    folder = make_run(2, rollouts=False, trace=False)

    def shown(**ranker: object) -> str:
        write_status(folder, make_status(2, 20, START + 79, ranker=ranker, latest=make_row(2).model_dump()))
        return picture(folder, START + 80)

    assert "nothing predicted and finished yet: dispatch by load" in shown()
    measured = {"recall_at_20": 0.61, "kendall_tau": 0.42}
    assert "trusted  recall@20 0.61, tau 0.42; dispatch by predicted length, saved 8.0 %" in shown(
        trusted=True, used=True, **measured
    )
    assert "not trusted  recall@20 0.61, tau 0.42; dispatch by load" in shown(trusted=False, **measured)
    doubts = shown(trusted=False, doubts="no step has been replayed by them", **measured)
    assert "dispatch by load (no step has been replayed by them)" in doubts
    assert "trusted  recall@20 0.61, tau 0.42; dispatch by load" in shown(trusted=True, used=False, **measured)


def test_predicted_lengths_are_shown_above_those_that_came_on_one_scale(make_run: RunMaker) -> None:
    lengths = length_counts([10, 20], np.asarray([10, 20, 30, 63]))
    progress = {"samples_total": 4, "samples_finished": 2, **lengths}
    shown = picture(make_run(1, rollouts=False, trace=False, progress=progress), START + 60).splitlines()
    above, below = (next(line for line in shown if name in line) for name in ("predicted ", "lengths "))
    assert "0..64, p50 30, max 63" in above and "0..64, p50 20, max 20" in below
    assert above.count("█") == 4 and below.count("█") == 2
    assert below.index("█") == above.index("█")


@pytest.mark.parametrize("finished", [0, 3])
def test_no_sample_is_said_to_have_finished_only_where_none_has(make_run: RunMaker, finished: int) -> None:
    progress = {"samples_total": 4, "samples_finished": finished}  # of another version: without lengths
    run_dir = make_run(1, rollouts=False, trace=False, progress=progress)
    assert ("none finished" in picture(run_dir, START + 60)) == (finished == 0)


def test_a_log_tells_each_change_of_trust_once(tmp_path: Path) -> None:
    screen = Screen(terminal=False)
    RowWriter(tmp_path / "metrics.jsonl", MetricsRow)
    with screen.view(tmp_path) as view:
        for note in ("", "trusted after step 3", "trusted after step 3", "not trusted any more"):
            write_status(tmp_path, make_status(3, 20, START, roles={}, ranker={"note": note}))
            view.refresh()
    lines = [line for line in screen.take() if "trusted" in line]
    assert lines == ["trusted after step 3", "not trusted any more"]


def test_a_controller_that_starts_anew_and_has_no_notes_yet_makes_no_empty_lines() -> None:
    log = PlainLines([])

    def lines(**notes: object) -> list[str]:
        return log.lines(RunStatus.model_validate(make_status(3, 20, START, roles={}, **notes)), [], START)

    found = {"schedule_note": "async", "ranker": {"note": "trusted"}, "verified": {"mismatch": "off"}}
    assert lines(**found)[1:] == ["schedule: async", "trusted", "warning: off"]
    assert lines() == []
    assert lines(**found) == ["schedule: async", "trusted", "warning: off"]  # what the new one has found
    found["disk_warning"] = "the disk will be full after about step 7"
    assert lines(**found) == ["warning: the disk will be full after about step 7"]
    assert lines(**found | {"disk_warning": "after about step 8"}) == [], "said once"
    assert lines(**found | {"disk_warning": ""}) == [], "room was made"
    assert lines(**found) == ["warning: the disk will be full after about step 7"]


def test_a_site_that_has_said_goodbye_is_told_once_and_shown_with_the_end_that_comes_of_it(make_run: RunMaker) -> None:
    log = PlainLines([])

    def lines(**site: object) -> list[str]:
        return log.lines(RunStatus.model_validate(make_status(3, 20, START, roles={}, sites={"west": site})), [], START)

    lines(silent_s=0.5)
    left = {"silent_s": 3.0, "left_s": 3.0, "absence_s": 120.0}
    text = "has said goodbye 3 s ago; the run ends if it is not back after 120 s"
    assert lines(**left) == [f"west: {text}; what it has is waited for"]
    assert lines(**left | {"left_s": 9.0, "silent_s": 9.0}) == []
    assert lines(silent_s=0.2) == ["west is back after 9s or more"]
    unused = left | {"absence_s": None, "excluded": "it lies"}
    assert lines(**unused) == ["west: has said goodbye 3 s ago"]
    shown = picture(make_run(1, rollouts=False, trace=False, sites={"west": left}, disk_warning="will be full"), START)
    assert "has said goodbye 3 s ago" in shown and "will be full" in shown


def test_a_dead_link_for_weights_is_shown_unless_the_whole_site_is_away(make_run: RunMaker) -> None:
    folder = make_run(1, rollouts=False, trace=False)

    def shown(silent_s: float) -> str:
        site = {"silent_s": silent_s, "publisher_silent_s": 41.0}
        write_status(folder, make_status(1, 20, START, sites={"west": site}))
        return picture(folder, START, 140)

    assert "its link for weights is silent for 41 s" in shown(0.5)
    assert "no sign of it for 50 s" in shown(50.0) and "link for weights" not in shown(50.0)


def test_a_site_that_is_heard_and_does_not_hear_the_controller_is_shown(make_run: RunMaker) -> None:
    folder = make_run(1, rollouts=False, trace=False)

    def shown(silent_s: float) -> str:
        site = {"silent_s": silent_s, "controller_silent_s": 41.0, "empty_connections": 3}
        write_status(folder, make_status(1, 20, START, sites={"west": site}))
        return picture(folder, START, 200)

    assert "it does not hear the controller for 41 s; 3 connections in a row broke after the hello" in shown(0.5)
    assert "hear the controller" not in shown(50.0)


def test_a_failed_run_shows_its_error(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False, state="failed", error="here-regular-0 died: [out of memory]")
    assert "here-regular-0 died: [out of memory]" in picture(run_dir, START + 500)


@pytest.mark.parametrize("state", ["done", "running"])  # running: its controller was killed
def test_the_times_of_a_run_that_is_over_stand_still_and_nothing_seems_at_work(make_run: RunMaker, state: str) -> None:
    wait = {"owner": "controller", "waiting_for": "group g7", "since": START + 10, "limit_s": 900.0}
    run_dir = make_run(8, rollouts=False, trace=False, state=state, waits=[wait])
    updated = read_status(run_dir).updated_at
    day = picture(run_dir, updated + 86_400)
    assert f"{state}  step 8/20  elapsed 3m04s" in day and "left " not in day and "24h" not in day.split("no update")[0]
    assert re.search(r"trainer +running +2m44s", day) and "last state" in day and "last doing" in day
    assert ("no update for 24h00m" in day) == (state == "running")
    assert ("tokens/s" in day, "GiB" in day) == (state == "running", state == "running")
    assert ("controller waits for group g7: 2m54s of 15m00s" in day) == (state == "running")
    now = picture(run_dir, updated + 1)
    assert ("left 5m10s" in now, "last state" in now) == (state == "running", state == "done")


def test_a_log_tells_the_age_at_which_a_run_ended(make_run: RunMaker) -> None:
    run_dir = make_run(8, rollouts=False, trace=False, state="done", roles={})
    screen = Screen(terminal=False)
    screen.now = START + 86_400
    with screen.view(run_dir) as view:
        view.refresh()
    assert screen.take()[0] == "[3m04s] demo: done"


def test_on_a_terminal_the_view_is_drawn_and_left_standing(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    screen = Screen(terminal=True)
    with screen.view(run_dir) as view:
        view.refresh()
    assert "here-regular-0" in screen.buffer.getvalue()


COLOURS = ({}, {"FORCE_COLOR": "1"}, {"FORCE_COLOR": ""}, {"TTY_COMPATIBLE": "1"}, {"TTY_INTERACTIVE": "1"})


@pytest.mark.parametrize("colours", COLOURS, ids=str)
@pytest.mark.parametrize(("terminal", "kind"), [(False, "xterm"), (True, "dumb"), (True, "xterm")])
def test_a_picture_is_drawn_on_a_terminal_that_can_replace_it_whatever_is_said_of_colours(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: str, colours: dict[str, str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": kind, **colours}.items():
        monkeypatch.setenv(name, value)
    run_dir, buffer = make_run(2, rollouts=False, trace=False), Terminal() if terminal else io.StringIO()
    with LiveView(run_dir, console=TextConsole(file=buffer), clock=lambda: START + 80) as view:
        view.refresh()
        drawn = terminal and kind == "xterm"
        assert ("here-regular-0" in buffer.getvalue()) == drawn
        assert (buffer.getvalue() == "[1m20s] demo: running\n") == (not drawn)


def of_many(run_dir: Path, instances: int) -> None:
    """Write the status of a run with a warning, with so many instances, of which every ninth is idle."""
    status = make_status(8, 20, START + 184, verified={"comparisons": 1, "mismatch": "here-regular-1 is off"})
    one = status["roles"].pop("here-regular-1")
    one |= {"state": "generating"}
    for index in range(1, instances):
        status["roles"][f"here-regular-{index}"] = one | ({"state": "idle"} if index % 9 == 8 else {})
    status["roles"][f"here-regular-{instances - 1}"] |= {"state": "dead"}
    write_status(run_dir, status)


@pytest.mark.parametrize("instances", [2, 20])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 50), (60, 24), (80, 12)])
def test_a_low_window_has_the_warnings_the_newest_steps_and_the_dead_and_says_what_is_left_out(
    make_run: RunMaker, instances: int, width: int, height: int
) -> None:
    run_dir = make_run(8, rollouts=False, trace=False)
    of_many(run_dir, instances)
    screen = Screen(terminal=True, width=width, height=height)
    screen.now = START + 185
    with screen.view(run_dir) as view:
        view.refresh()
        shown = screen.take()
    whole = picture(run_dir, screen.now, width).splitlines()
    assert min(height - 1, len(whole)) <= len(shown) <= height  # a part of two lines may leave one
    assert "here-regular-1 is off" in shown[3] and "24/64 samples" in "".join(shown)
    steps = [found[1] for line in shown if (found := re.match(r"│ +(\d) +0\.", line))]
    assert steps and steps == [str(step) for step in range(9 - len(steps), 9)]
    assert ("no room for: " in shown[-2]) == (len(whole) > height)
    rest = [line for line in shown if re.search(r"\d+ (more|processes): ", line)]
    assert len(rest) == 1 or instances == 2 or height == 50
    if instances == 20 and height == 24:
        assert " generating, " in rest[0] and ", 2 idle" in rest[0] and "dead" not in rest[0]
        assert any(" dead " in line for line in shown)
    assert height > 12 or "1 dead" in rest[0]
    assert [line for line in screen.take() if "no room for" in line] == []  # the last picture, left standing, is whole


def test_a_window_with_little_more_than_a_long_warning_has_the_newest_step(make_run: RunMaker) -> None:
    run_dir = make_run(8, rollouts=False, trace=False)
    warning = "a generator is off by 0.3 nats from the trainer; " * 4
    write_status(run_dir, make_status(8, 20, START + 184, verified={"comparisons": 1, "mismatch": warning}))
    screen = Screen(terminal=True, width=80, height=10)
    screen.now = START + 185
    with screen.view(run_dir) as view:
        view.refresh()
        shown = screen.take()
    assert len(shown) == 10 and re.match(r"│ +8 +0\.", shown[-2])


def test_a_picture_is_not_higher_than_its_window_and_keeps_the_warnings(make_run: RunMaker) -> None:
    run_dir = make_run(8, rollouts=False, trace=False)
    of_many(run_dir, 12)
    rows, whole = read_metrics(run_dir / "metrics.jsonl"), len(picture(run_dir, START + 185).splitlines())
    for height in (9, 11, 14, 18, 21, 25, 30, 40):
        screen = Screen(terminal=True, height=height)
        screen.console.print(render(read_status(run_dir), rows, START + 185, height=height))
        shown = screen.take()
        assert min(height - 1, whole) <= len(shown) <= height  # a part of two lines may leave one
        assert "here-regular-1 is off" in shown[3]


def test_while_many_processes_start_those_that_work_are_shown(tmp_path: Path) -> None:
    for index in range(20):
        say(tmp_path, f"here-tail-{index}", READY if index < 17 else "importing vLLM")
    screen = Screen(terminal=True, height=12)
    with screen.view(tmp_path) as view:
        view.refresh()
        shown = screen.take()
    assert len(shown) == 12 and sum("importing vLLM" in line for line in shown) == 3
    assert any("13 more: 13 ready" in line for line in shown)


def test_before_the_controller_reports_the_view_says_so(tmp_path: Path) -> None:
    screen = Screen(terminal=True)
    with screen.view(tmp_path) as view:
        assert view.refresh() is None
    assert "not reported yet" in screen.buffer.getvalue()


def test_a_log_gets_start_up_changes_then_one_line_per_step(tmp_path: Path) -> None:
    screen = Screen(terminal=False)
    metrics = RowWriter(tmp_path / "metrics.jsonl", MetricsRow)
    loading = {"role": "trainer", "state": "loading", "detail": "weights", "since": START}
    ready = loading | {"state": "ready", "detail": ""}
    with screen.view(tmp_path) as view:
        view.refresh()
        assert screen.take() == []
        write_status(tmp_path, make_status(0, 20, START, state="starting", roles={"trainer": loading}))
        screen.now = START + 3
        view.refresh()
        assert screen.take() == ["[3s] demo: starting", "[3s] trainer: loading (weights)"]
        view.refresh()
        assert screen.take() == []
        none = {"samples_total": 64}
        write_status(tmp_path, make_status(0, 20, START + 9, roles={"trainer": ready}, progress=none))
        screen.now = START + 9
        view.refresh()
        assert screen.take() == ["[9s] demo: running", "[9s] trainer: ready"]
        write_status(tmp_path, make_status(0, 20, START + 11, roles={"trainer": ready}))
        screen.now = START + 11
        view.refresh()
        assert screen.take() == ["[11s] the first sample is finished"]
        # While running, changes of detail are not told; steps are, each once.
        metrics.append(make_row(1))
        write_status(tmp_path, make_status(1, 20, START + 12, roles={"trainer": loading}))
        screen.now = START + 12
        view.refresh()
        (line,) = screen.take()
        assert line == (
            "step 1/20  reward 0.10  len p50 23 p90 90 max 96  loss 0.012  grad 1.6  mismatch 0.008  "
            "step 18.1 s (gen 9.1, train 12.4)  64 samples 3.5/s  recall@20 0.55  "
            "dispatch saved 8.0% (simulated)  2 groups without gradient  "
            "3 of 67 rewards void (4%: timeout 3%, crash 1%)  left 5m10s"
        )
        metrics.append(make_row(2))
        view.refresh()
        (line,) = screen.take()
        assert line.startswith("step 2/20  reward 0.15 (+0.05)  ")
        view.refresh()
        assert screen.take() == []
        dead = loading | {"state": "dead", "detail": "exit code 9"}
        ended = make_status(2, 20, START + 13, state="failed", error="trainer died", roles={"trainer": dead})
        write_status(tmp_path, ended)
        view.refresh()
        assert screen.take() == [
            "[13s] trainer: dead (exit code 9)",
            "[13s] demo: failed",
            "error: trainer died",
        ]


def test_a_log_is_told_when_updates_stop_at_doubling_ages_and_when_they_are_back(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    updated = read_status(run_dir).updated_at
    screen = Screen(terminal=False)
    with screen.view(run_dir) as view:
        screen.now = updated + 5
        view.refresh()
        screen.take()
        told = []
        for age in range(6, 60):
            screen.now = updated + age
            view.refresh()
            told += screen.take()
        assert [line.split(":")[0] for line in told] == [
            "no update for 11s",
            "no update for 22s",
            "no update for 44s",
        ]
        write_status(run_dir, make_status(2, 20, screen.now))
        view.refresh()
        assert screen.take() == ["updates are back after 44s or more"]
        write_status(run_dir, make_status(2, 20, screen.now + 3600))  # the clock has been set back since
        view.refresh()
        assert screen.take() == []


def test_a_resumed_run_does_not_tell_old_steps_again_but_tells_redone_ones(make_run: RunMaker) -> None:
    run_dir = make_run(6, rollouts=False, trace=False)
    screen = Screen(terminal=False)
    with screen.view(run_dir) as view:
        view.refresh()
        assert not [line for line in screen.take() if line.startswith("step")]
        with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
            metrics.rewind(5)
            metrics.append(make_row(6, time=START + 999, reward_mean=0.5))
        view.refresh()
        (line,) = [line for line in screen.take() if line.startswith("step")]
        assert line.startswith("step 6/20  reward 0.50 (+0.20)")


def test_a_view_of_a_long_run_holds_few_rows_and_shows_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended_lines, "READ_AT_ONCE", 40 * len(make_row(1).model_dump_json()))
    changes = {"usd": 0.25, "usd_per_1k_samples": 2.0}

    def append(first: int, last: int) -> None:
        with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
            for step in range(first, last + 1):
                refused = "a loss is nan" if step in (3, 300) else None
                metrics.append(make_row(step, step_refused=refused, **changes))
        write_status(tmp_path, make_status(last, 900, START + 30 + STEP_S * last))

    append(1, 200)
    log, picture = Screen(terminal=False), Screen(terminal=True, width=120, height=100)
    told: list[str] = []
    plain, drawn = log.view(tmp_path), picture.view(tmp_path)
    with plain, drawn:
        for first, last in ((201, 201), (202, 500), (501, 502)):
            append(first, last)
            told += [line for line in log.take()]
            plain.refresh()
            drawn.refresh()
            assert len(plain._steps.rows) <= KEPT_STEPS >= len(drawn._steps.rows)
        with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
            metrics.rewind(400)  # the run is resumed
            metrics.append(make_row(401, reward_mean=0.7, time=START + 99999, **changes))
        plain.refresh()
        drawn.refresh()
        assert len(plain._steps.rows) <= KEPT_STEPS
        told += log.take()
        steps = [int(line.split()[1].split("/")[0]) for line in told if line.startswith("step ")]
        assert steps == [*range(201, 503), 401]
        shown = " ".join(" ".join(picture.take()).split())
        assert "100.2 USD for the finished steps, 2 per 1,000 samples" in shown
        assert "step 300: a loss is nan (2 in this run)" in shown
    plain.summary()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    said = [line for line in log.take() if line.startswith("  ")]
    assert said[: len(headline_figures(rows))] == [f"  {what:<28}{value}" for what, value in headline_figures(rows)]


def test_a_view_knows_what_holds_up_the_end_of_its_run_once_it_has_read_it(tmp_path: Path) -> None:
    screen = Screen(terminal=False)
    wait = {"owner": "controller", "waiting_for": f"west{HEARS_END}", "since": START, "limit_s": 60.0}
    with screen.view(tmp_path) as view:
        view.refresh()
        assert view.farewell == ""
        write_status(tmp_path, make_status(2, 2, START + 30, state="done", waits=[wait]))
        view.refresh()
        assert view.farewell.startswith("the run is done; waiting up to 60 s for west")
    assert SiteView.farewell == "", "a site that only generates does not know"


def test_a_file_that_cannot_be_read_any_more_ends_no_view(make_run: RunMaker) -> None:
    run_dir, screen = make_run(2, rollouts=False, trace=False), Screen(terminal=True)
    with screen.view(run_dir) as view:
        view.refresh()
        metrics = run_dir / "metrics.jsonl"
        metrics.rename(run_dir / "elsewhere").write_text("{}\n")
        metrics.symlink_to("elsewhere")
        assert view.refresh() is not None
    view.summary()
    assert "reward" in screen.buffer.getvalue()


def test_the_closing_summary_has_the_figures_and_where_the_results_are(make_run: RunMaker) -> None:
    run_dir = make_run(12, rollouts=False, trace=False, state="done")
    (run_dir / "report.html").touch()
    for step in (5, 10, 9):
        (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True)
    screen = Screen(terminal=False)
    screen.view(run_dir).summary()
    text = "\n".join(screen.take())
    for part in (
        "demo: done after 4m16s, step 12/20",
        "768",
        "0.225 → 0.525 (+0.300, means of 6 steps)",
        f"{768 / (12 * STEP_S + 0.1 * 12):.2f}",
        "18.1 s (generating 9.1, training 12.4, exposed weight sync 0.70)",
        "instances 45%, trainer 25%",
        "24.0 s of steps; 75% of the time",
        "8.7 GiB",
        "24 of 96 (25%)",
        str(run_dir / "report.html"),
        str(run_dir / "checkpoints" / "step_10"),
    ):
        assert part in text


def test_the_closing_summary_names_sites_that_could_not_be_told_that_the_run_is_done(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    for untold in ([], ["far", "west"]):
        write_status(run_dir, make_status(2, 2, START, state="done") | {"untold": untold, "absence_s": 600.0})
        screen = Screen(terminal=False)
        screen.view(run_dir).summary()
        text = screen.buffer.getvalue()
        assert ("warning: far, west could not be told that the run is done" in text) == bool(untold)
    assert "ends with an error after absence_s (600 s)" in text


def test_the_closing_summary_of_a_run_that_was_continued_is_of_all_its_time(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    write_status(run_dir, make_status(2, 2, START + 7200) | {"started_at": START + 7000, "first_started_at": START})
    screen = Screen(terminal=False)
    screen.view(run_dir).summary()
    assert any("after 2h00m, step 2/2" in line for line in screen.take())


def test_both_ends_of_a_log_count_from_the_start_of_the_launch_and_a_resumed_run_says_its_whole_time(
    make_run: RunMaker,
) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    say(run_dir, "controller", "starting Python")
    launched = launched_at(run_dir)
    assert launched is not None
    screen = Screen(terminal=False)
    screen.now = launched + 71

    def shown(first: float) -> list[str]:
        times = {"started_at": launched + 5, "first_started_at": first}
        write_status(run_dir, make_status(2, 2, launched + 71, state="done", roles={}) | times)
        with screen.view(run_dir) as view:
            view.refresh()
        view.summary()
        return [line for line in screen.take() if "demo: " in line]

    assert shown(launched) == ["[1m11s] demo: done", "demo: done after 1m11s, step 2/2"]
    resumed = "demo: done after 2m43s (1m11s since it was resumed), step 2/2"
    assert shown(launched - 92) == ["[1m11s] demo: done", resumed]


@pytest.mark.parametrize("jump", [-1800.0, 3600.0])
def test_a_clock_that_was_set_changes_no_time_of_the_run(make_run: RunMaker, jump: float) -> None:
    run_dir = make_run(0, rollouts=False, trace=False)  # without plots in the report
    say(run_dir, "controller", "starting Python")
    launched = launched_at(run_dir)
    assert launched is not None
    updated = launched + 71 + jump
    times = {"started_at": launched + 5, "first_started_at": launched - 92, "elapsed_s": 163.0}
    write_status(run_dir, make_status(2, 2, updated, roles={}) | times)
    assert "elapsed 2m43s" in picture(run_dir, updated)
    write_status(run_dir, make_status(2, 2, updated, state="done", roles={}) | times)
    screen = Screen(terminal=False)
    screen.now = updated
    with screen.view(run_dir) as view:
        view.refresh()
    view.summary()
    ended = "demo: done after 2m43s (1m11s since it was resumed), step 2/2"
    assert [line for line in screen.take() if "demo: " in line] == ["[1m11s] demo: done", ended]
    assert "2m43s after its start" in build_report(load_run(run_dir), updated)


def test_a_run_whose_steps_are_done_and_that_is_not_over_claims_no_end(make_run: RunMaker) -> None:
    run_dir = make_run(8, rollouts=False, trace=False, eta_s=None)
    assert "left" not in picture(run_dir, START + 190)


def test_a_summary_without_a_step_says_so(make_run: RunMaker) -> None:
    screen = Screen(terminal=False)
    screen.view(make_run(0, rollouts=False, trace=False, state="interrupted")).summary()
    assert any("no optimizer step has finished" in line for line in screen.take())


def test_a_summary_of_steps_without_a_row_does_not_deny_them(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False, state="done")
    (run_dir / "metrics.jsonl").unlink()
    screen = Screen(terminal=False)
    screen.view(run_dir).summary()
    lines = screen.take()
    assert any(f"no figures: {run_dir / 'metrics.jsonl'} has no rows" in line for line in lines)
    assert not any("no optimizer step" in line for line in lines)


def test_figures_that_do_not_exist_are_dashes_and_do_not_count_in_means() -> None:
    rows = [
        make_row(1, reward_mean=None, process_memory_gb=None),
        make_row(2),
        make_row(3, train_time_s=None),
    ]
    shown = dict(headline_figures(rows))
    assert shown["reward"] == "-"
    assert "training 12.4" in shown["mean step time"]
    assert shown["peak memory, all processes"] == "7.8 GiB"
    assert dict(headline_figures([]))["reward"] == "-"
    assert number(None) == "-" and duration(None) == "-"


def test_numbers_are_written_for_people() -> None:
    assert [number(value) for value in (0.0, 0.00171, 5e-6, 1.0, 18.25, 1234.5, -0.5)] == [
        *["0", "0.00171", "5.0e-06", "1", "18.2", "1,234", "-0.5"]
    ]
    assert [duration(value) for value in (0.4, 59.6, 310, 3725)] == ["0s", "1m00s", "5m10s", "1h02m"]
    assert bars([0.0, None, 1.0]) == "▁ █" and bars([2.0, 2.0]) == "▄▄"


def test_a_stale_step_says_how_stale_and_what_its_samples_are_still_worth(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(1, staleness_mean=1.25, staleness_max=2.0, ess_token=0.99, ess_sequence=0.61))
    write_status(tmp_path, make_status(1, 20, START))
    assert "off-policy stale 1.2/2, ESS 0.61" in picture(tmp_path, START)
    screen = Screen(terminal=False)
    row = make_row(2, staleness_mean=1.0, staleness_max=1.0, ess_token=0.97, ess_sequence=None, step_skipped=True)
    with screen.view(tmp_path) as view:
        with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
            metrics.append(row)
        view.refresh()
    (line,) = [line for line in screen.take() if line.startswith("step 2")]
    assert "3.5/s  stale 1.0/1  ESS 0.97  no optimizer step: too far off-policy" in line


def test_a_step_whose_last_update_was_skipped_has_changed_the_weights_all_the_same() -> None:
    partly = make_row(2, step_skipped=True, optimizer_updates=2)
    assert "  update 3 skipped: too far off-policy" in step_line(partly, None, 20, None)
    rows = [make_row(1, step_skipped=False, optimizer_updates=3), partly]
    rows += [make_row(3, step_skipped=True, optimizer_updates=0), make_row(4, step_skipped=True)]
    assert [row.changed_nothing for row in rows] == [False, False, True, True]


def test_a_refused_step_and_a_mismatch_of_weights_are_said_until_the_run_ends(tmp_path: Path) -> None:
    cause = "group 7 (samples 7.0): gradient of model.norm is not finite; skipped"
    refused = make_row(1, step_skipped=True, step_refused=cause)
    assert f"no optimizer step: not finite  refused: {cause}" in step_line(refused, None, 20, None)
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(refused)
        metrics.append(make_row(2, mismatch_warning="log-probabilities differ"))
    verified = {"versions": 2, "comparisons": 5, "worst": 0.25, "bound": 0.1, "mismatch": "version 1 on here-tail-0"}
    write_status(tmp_path, make_status(2, 20, START) | {"verified": verified})
    shown = " ".join(picture(tmp_path, START).split())
    assert "weights verified end to end, 2 versions (5 comparisons, largest difference 0.25 nats, bound 0.1)" in shown
    screen = Screen(terminal=False)
    with screen.view(tmp_path) as view:
        view.refresh()
        view.refresh()
    assert screen.take().count("warning: version 1 on here-tail-0") == 1
    for note in ("mismatch version 1 on here-tail-0", "mismatch log-probabilities differ", "refused step 1: group 7"):
        assert note in shown


def test_a_step_that_trains_nothing_is_said(tmp_path: Path) -> None:
    whole = make_row(1).model_dump() | {"tokens_trained": 0, "truncated_fraction": 1.0, "groups_no_gradient": 8}
    whole |= {"groups_total": 8, "samples_total": 64}
    cut = MetricsRow.model_validate(whole | {"samples_left_out": 64})
    said = "no gradient: all answers reach the token limit"
    assert f"  8 groups without gradient  {said}  " in step_line(cut, None, 20, None)
    flat = step_line(MetricsRow.model_validate(whole | {"samples_left_out": 0}), None, 20, None)
    assert "  8 groups without gradient  no gradient: all rewards of each group are equal  " in flat
    for left_out in (None, 63):  # of an earlier version; some groups are cut, others of equal rewards
        partly = step_line(MetricsRow.model_validate(whole | {"samples_left_out": left_out}), None, 20, None)
        assert "  no gradient  " in partly
    for row in (make_row(1), make_row(1, tokens_trained=None), make_row(1, tokens_trained=0, step_skipped=True)):
        assert "no gradient" not in step_line(row, None, 20, None)
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(cut)
    write_status(tmp_path, make_status(1, 20, START))
    assert f"training {said} in the last step" in " ".join(picture(tmp_path, START).split())


def test_a_log_tells_each_evaluation_once_and_not_those_before_a_resume(tmp_path: Path) -> None:
    write_status(tmp_path, make_status(3, 20, START, roles={}))
    with RowWriter(tmp_path / "evaluations.jsonl", EvaluationRow) as evaluations:
        evaluations.append(make_evaluation(0, 0.2))
        screen = Screen(terminal=False)
        with screen.view(tmp_path) as view:
            for step, greedy in ((10, 0.42), (20, 0.3)):
                evaluations.append(make_evaluation(step, greedy))
                view.refresh()
                view.refresh()
    lines = [line for line in screen.take() if line.startswith("eval")]
    assert lines == ["eval@10: greedy 0.42 pass@4 0.62 (best)", "eval@20: greedy 0.30 pass@4 0.50"]
    assert "evaluation eval@20: greedy 0.30 pass@4 0.50" in picture(tmp_path, START)


def test_a_length_bias_is_told_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    write_status(tmp_path, make_status(3, 20, START, roles={}))
    screen = Screen(terminal=False)
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics, screen.view(tmp_path) as view:
        for step, bias in enumerate((None, "length bias: 9 %", "length bias: 10 %", None, "length bias: 8 %"), start=1):
            metrics.append(make_row(step, length_bias_warning=bias))
            view.refresh()
        assert "warning    length bias: 8 %" in picture(tmp_path, START)
    lines = [line for line in screen.take() if "bias" in line]
    assert lines == ["warning: length bias: 9 %", "the length bias has ended", "warning: length bias: 8 %"]


def test_what_the_schedule_chose_is_told_when_it_changes(tmp_path: Path) -> None:
    RowWriter(tmp_path / "metrics.jsonl", MetricsRow)
    screen = Screen(terminal=False)
    with screen.view(tmp_path) as view:
        for note in ("", "stream: training is the slower side", "stream: training is the slower side", "async"):
            write_status(tmp_path, make_status(3, 20, START, roles={}, schedule_note=note))
            view.refresh()
    lines = [line for line in screen.take() if line.startswith("schedule")]
    assert lines == ["schedule: stream: training is the slower side", "schedule: async"]
    assert "schedule   async" in picture(tmp_path, START)


def test_the_closing_summary_names_the_best_evaluation_its_checkpoint_and_a_length_bias(make_run: RunMaker) -> None:
    run_dir = make_run(12, rollouts=False, trace=False, state="done")
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(13, length_bias_warning="length bias: 9 %"))
    for step in (8, 12):
        (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True)
    screen = Screen(terminal=False)
    screen.view(run_dir).summary()
    text = "\n".join(screen.take())
    for part in ("best evaluation", "eval@8: greedy 0.40 pass@4 0.60", "best checkpoint", "step_8", "length bias: 9 %"):
        assert part in text


def test_every_figure_of_the_closing_summary_is_apart_from_its_label() -> None:
    row = MetricsRow(step=1, time=0.0, samples_total=8, usd=0.5, environment_s=2.0, environment_hidden_fraction=0.5)
    figures = headline_figures([row])
    assert ("cost of the finished steps", "0.5 USD at the listed prices, 62.5 per 1,000 samples") in figures
    assert all(len(label) < 28 for label, _ in figures)


def test_the_times_in_a_log_go_on_when_the_first_process_is_replaced_and_a_controller_starts_anew() -> None:
    log = PlainLines([])
    was, new = Stage(READY, START + 1, START), Stage("loading weights", START + 70, START + 65)
    role = {"role": "trainer", "state": "running", "detail": "", "since": START + 2}

    def lines(age: float, stage: Stage, started: float, **changed: str) -> list[str]:
        status = make_status(2, 20, START + age, roles={"trainer": role | changed}) | {"started_at": started}
        return log.lines(RunStatus.model_validate(status), [], START + age, stages={"trainer": stage})

    assert lines(50.0, was, START + 5)[0] == "[50s] demo: running"
    assert lines(75.0, new, START + 66, state="dead") == ["[1m15s] trainer: dead"]


def test_a_log_names_the_death_of_an_instance_that_starts_again_before_it_is_seen_dead(make_run: RunMaker) -> None:
    run_dir = make_run(2, rollouts=False, trace=False)
    screen = Screen(terminal=False)
    seen: list[str] = []

    def look(state: str, detail: str) -> None:
        role = {"role": "instance", "state": state, "detail": detail, "since": START}
        status = make_status(2, 20, START + 10, roles={"here-tail-0": role})
        write_status(run_dir, status | {"started_at": START})
        screen.now = START + 10
        view.refresh()
        seen.extend(screen.take())

    killed = "here-tail-0 was killed by SIGKILL"
    with screen.view(run_dir) as view:
        look("running", "")
        seen.clear()
        for state, detail in (("starting", killed), ("starting", killed), ("stale", killed), ("running", "")):
            look(state, detail)
        assert seen == [f"[10s] here-tail-0: starting ({killed})"]
        seen.clear()
        for state in ("dead", "starting", "starting", "stale"):  # seen dead: told once
            look(state, killed)
        assert seen == [f"[10s] here-tail-0: dead ({killed})"]
        seen.clear()
        for state, detail in (("running", ""), ("starting", ""), ("running", ""), ("starting", killed)):
            look(state, detail)
        assert seen == [f"[10s] here-tail-0: starting ({killed})"]  # once more, after it has run; a first start is none


def test_the_picture_of_a_folder_that_is_gone_stays_as_it_was(make_run: RunMaker) -> None:
    run_dir, screen = make_run(3, rollouts=False, trace=False), Screen(terminal=True)
    with screen.view(run_dir) as view:
        view.refresh()
        assert "step 3/20" in "".join(screen.take())
        run_dir.rename(run_dir.with_name("moved"))
        assert view.refresh() is None
    assert "has not reported yet" not in "".join(screen.take())
