"""What is said between a run's start and its first sample: the files, and which lines a log gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from streamrl.cli.fetch_model import Phases, fetch_with_progress
from streamrl.cli.status import command as status_command
from streamrl.errors import UserError
from streamrl.launcher import supervisor
from streamrl.report.live_view import PlainLines
from streamrl.report.panels import render
from streamrl.report.site_view import SiteView
from streamrl.report.start_lines import StartLines, present, with_stages
from streamrl.run_dir import start_stages
from streamrl.run_dir.site_status import write_site
from streamrl.run_dir.start_stages import READY, Stage, StageReader, history, read_stages, say, waiting_for
from streamrl.run_dir.status import RunStatus, write_status
from tests.report.synthetic import START, make_row, make_status
from tests.report.test_live_view import Screen

MOST_SILENT_S = 10.0
POLL_S = 0.5


def stage(text: str, since: float = START) -> Stage:
    return Stage(text, since, START)


def test_a_process_says_its_stages_and_its_last_one_is_read(tmp_path: Path) -> None:
    for text in ("importing libraries", "loading the model"):
        say(tmp_path, "trainer", text)
    (tmp_path / "sites" / "west").mkdir(parents=True)
    say(tmp_path / "sites" / "west", "west-a-0", "importing vLLM")
    assert [one.text for one in history(tmp_path, "trainer")] == ["importing libraries", "loading the model"]
    assert {name: one.text for name, one in read_stages(tmp_path).items()} == {
        "trainer": "loading the model",
        "west-a-0": "importing vLLM",
    }
    first, last = history(tmp_path, "trainer")
    assert first.began == first.since == last.began <= last.since
    start_stages.forget(tmp_path)
    assert read_stages(tmp_path).keys() == {"west-a-0"}


def test_a_reader_opens_only_files_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, "trainer", "importing libraries")
    say(tmp_path, "controller", "importing libraries")
    opened: list[str] = []
    read = start_stages.read_plain
    monkeypatch.setattr(start_stages, "read_plain", lambda path, **of: opened.append(path.stem) or read(path, **of))
    reader = StageReader(tmp_path)
    assert reader.read().keys() == reader.read().keys() == set(opened) == {"trainer", "controller"}
    say(tmp_path, "trainer", "loading the model")
    assert [reader.read()["trainer"].text for _ in range(2)] == ["loading the model"] * 2
    assert sorted(opened) == ["controller", "trainer", "trainer"]
    (tmp_path / "starting" / "controller.jsonl").unlink()
    assert reader.read().keys() == {"trainer"}
    (tmp_path / "starting" / "controller.jsonl").symlink_to(tmp_path / "starting" / "trainer.jsonl")
    assert reader.read().keys() == {"trainer"}  # no plain file


def test_half_a_line_is_left_out_and_a_process_that_starts_again_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / "starting"
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"at": 5.0, "stage": "a"}, {"at": 9.0, "stage": READY}, {"at": 50.0, "stage": "b"}]
    text = "\n".join(map(json.dumps, rows)) + '\n{"at": 51.0, "sta'
    (folder / "p.jsonl").write_text(text)
    assert history(tmp_path, "p") == [Stage("a", 5.0, 5.0), Stage(READY, 9.0, 5.0), Stage("b", 50.0, 50.0)]


def test_to_say_something_needs_the_standard_library_only() -> None:
    code = "import sys, streamrl.run_dir.start_stages; print(*{n.split('.')[0] for n in sys.modules})"
    shown = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(shown.split()) <= set(sys.stdlib_module_names) | {"streamrl", "__main__"}


def test_lines_say_what_has_changed_and_join_who_does_the_same() -> None:
    lines = StartLines()
    stages = {"a": stage("importing"), "b": stage("importing"), "trainer": stage("loading")}
    assert lines.lines(stages, START) == ["[0s] a, b: importing; trainer: loading"]
    assert lines.lines(stages, START + 3) == []
    stages |= {"b": stage("measuring, 1 of 3", START + 4)}
    assert lines.lines(stages, START + 4) == ["[4s] b: measuring, 1 of 3"]


def test_changes_that_come_together_share_a_line() -> None:
    lines = StartLines()
    lines.lines({"a": stage("x")}, START)
    assert lines.lines({"a": stage("y")}, START + 0.5) == []
    assert lines.lines({"a": stage("z"), "b": stage("x")}, START + 2) == ["[2s] a: z; b: x"]


def test_after_a_silence_everybody_who_is_not_ready_is_named_with_its_time_those_at_work_first() -> None:
    lines = StartLines()
    stages = {
        "controller": stage(waiting_for(["trainer"]), START + 2),
        "a": stage("loading", START + 3),
        "b": stage("loading", START + 4),
        "c": stage(READY, START + 1),
    }
    assert len(lines.lines(stages, START + 4)) == 1
    assert lines.lines(stages, START + 11) == []
    assert lines.lines(stages, START + 12) == ["[12s] a, b: loading (9s); controller: waiting for trainer (10s)"]
    ready = {"a": stage(READY)}
    lines.lines(ready, START + 15)
    (line,) = lines.lines(ready, START + 25)
    assert "the first sample is not finished yet" in line


def test_a_process_that_waits_for_fewer_gets_no_line_of_its_own() -> None:
    lines = StartLines()
    stages = {"controller": stage(waiting_for(["a", "b"])), "a": stage("loading")}
    lines.lines(stages, START)
    stages["controller"] = stage(waiting_for(["a"]), START + 5)
    assert lines.lines(stages, START + 5) == []
    stages["a"] = stage(READY, START + 6)
    assert lines.lines(stages, START + 6) == ["[6s] controller: waiting for a; a: ready"]


changes = st.lists(
    st.tuples(st.floats(0, 60), st.sampled_from("abc"), st.sampled_from(["loading", "waiting for x", "waiting for y"])),
    max_size=12,
)


@given(changes)
def test_a_log_is_never_silent_for_10_s_and_never_a_wall(events: list[tuple[float, str, str]]) -> None:
    lines, stages, now = StartLines(), {"a": stage("importing")}, START
    written = []
    while now < START + 60:
        for at, name, text in events:
            if now - POLL_S < START + at <= now:
                stages[name] = stage(text, now)
        written += [now for _ in lines.lines(stages, now)]
        now += POLL_S
    gaps = [later - earlier for earlier, later in zip(written, [*written[1:], START + 60], strict=True)]
    assert written[0] == START
    assert max(gaps) <= MOST_SILENT_S and min(gaps[:-1], default=2.0) >= 2.0


def test_a_site_whose_processes_only_wait_says_so_less_often() -> None:
    lines = StartLines(60.0)
    stages = {"service": stage(waiting_for(["the controller"]))}
    assert len(lines.lines(stages, START)) == 1
    assert lines.lines(stages, START + 30) == []
    assert len(lines.lines(stages, START + 60)) == 1
    stages["a"] = stage("loading", START + 61)
    assert len(lines.lines(stages, START + 62)) == len(lines.lines(stages, START + 71)) == 1


def status(**changes: Any) -> RunStatus:
    return RunStatus.model_validate(make_status(0, 20, START + 60) | changes)


def role(state: str, detail: str = "", kind: str = "instance") -> dict[str, Any]:
    return {"role": kind, "state": state, "detail": detail, "since": START + 15}


def test_a_stage_holds_until_the_heartbeat_says_something() -> None:
    roles = {
        "a": role("starting"),
        "b": role("starting"),
        "c": role("stale"),
        "trainer": role("idle"),
        "west": role("loading", "part 3"),
    }
    stages = {"a": stage("warming up"), "b": stage(READY), "c": stage(READY), "trainer": stage(READY)}
    found = present(status(roles=roles), stages)
    assert {name: one.text for name, one in found.items()} == {
        "a": "warming up",
        "b": READY,
        "c": "waiting for the first weights",
        "trainer": READY,
        "west": "loading (part 3)",
    }
    assert found["c"].began == START and found["c"].since == START + 15
    shown = with_stages(status(roles=roles), stages).roles
    assert (shown["a"].detail, shown["a"].since) == ("warming up", START)
    assert shown["b"].detail == shown["c"].detail == ""


def test_a_log_tells_stages_until_the_first_sample_and_again_when_everything_starts_again() -> None:
    none = {"samples_finished": 0, "samples_total": 64}
    lines, stages = PlainLines([]), {"a": stage("importing vLLM")}
    assert lines.lines(None, [], START, stages=stages) == ["[0s] a: importing vLLM"]
    stages = {"a": stage(READY, START + 20)}
    begun = status(roles={"a": role("stale")}, progress=none)
    first = begun.model_copy(update={"updated_at": START + 20})
    assert lines.lines(first, [], START + 20, stages=stages) == [
        "[20s] demo: running",
        "[20s] a: waiting for the first weights",
    ]
    assert lines.lines(begun, [], START + 29, stages=stages) == ["[29s] a: waiting for the first weights (14s)"]
    assert lines.lines(status(), [], START + 33, stages=stages) == ["[33s] the first sample is finished"]
    assert lines.lines(begun, [], START + 60, stages=stages) == []
    again = status(state="starting", roles={"a": role("idle")}, progress=none)
    told = lines.lines(again, [], START + 70, stages={"trainer": stage("importing torch", START + 70)})
    assert told[-1].endswith("trainer: importing torch; a: ready")


def test_a_step_ends_the_start_even_if_no_sample_was_seen() -> None:
    none = {"samples_finished": 0, "samples_total": 64}
    lines, stages = PlainLines([]), {"a": stage("importing vLLM")}
    lines.lines(None, [], START, stages=stages)
    first = lines.lines(status(progress=none, roles={}), [make_row(1)], START + 50, stages=stages)
    assert "[50s] the first sample is finished" in first
    assert lines.lines(status(progress=none, roles={}), [make_row(1)], START + 65, stages=stages) == []


def test_a_step_that_was_written_since_the_status_is_shown_after_what_ends_the_start() -> None:
    none = {"samples_finished": 0, "samples_total": 64}
    lines, stages = PlainLines([]), {"a": stage("importing vLLM")}
    lines.lines(None, [], START, stages=stages)
    late = lines.lines(status(state="starting", progress=none, roles={}), [make_row(1)], START + 50, stages=stages)
    assert not [line for line in late if line.startswith("step 1/")]
    found = lines.lines(status(roles={}), [make_row(1)], START + 51, stages=stages)
    assert found.index("[51s] the first sample is finished") < found.index(
        next(line for line in found if line.startswith("step 1/"))
    )


def test_before_the_controller_reports_a_terminal_shows_every_stage(tmp_path: Path) -> None:
    say(tmp_path, "here-tail-0", "importing vLLM")
    screen = Screen(terminal=True)
    with screen.view(tmp_path) as view:
        view.refresh()
    shown = screen.buffer.getvalue()
    assert "here-tail-0" in shown and "importing vLLM" in shown and "not reported yet" in shown


def test_a_starting_run_shows_stages_in_place_of_figures() -> None:
    screen = Screen(terminal=False, width=80)
    stages = {"a": stage("measuring step times, 2 of 3 batch sizes done", START + 12)}
    screen.console.print(render(status(state="starting", roles={"a": role("starting")}), [], START + 20, stages=stages))
    shown = "\n".join(screen.take())
    assert "measuring step times, 2 of 3 batch sizes done" in shown and "8s" in shown and "tokens/s" not in shown


def test_a_site_of_its_own_tells_stages_too(tmp_path: Path) -> None:
    screen = Screen(terminal=False)
    say(tmp_path, "west-a-0", "importing vLLM")
    with SiteView(tmp_path, screen.console, lambda: screen.now) as view:
        view.refresh()
    assert any("west-a-0: importing vLLM" in line for line in screen.take())


def test_a_site_that_cannot_write_its_state_is_shown_as_it_was_and_when(tmp_path: Path) -> None:
    screen = Screen(terminal=False)
    with SiteView(tmp_path, screen.console, lambda: screen.now) as view:
        values = {"site": "west", "state": "serving", "trainer_silent_s": 0.1, "samples_sent": 3}
        write_site(tmp_path, values | {"updated_at": screen.now})
        view.refresh()
        assert "as of" not in screen.take()[-1]
        screen.now += 35
        view.refresh()
    assert screen.take()[-1].endswith("3 samples sent, 0 in flight; as of 35s ago")


def test_status_shows_a_run_whose_controller_has_not_written_yet(tmp_path: Path) -> None:
    say(tmp_path, "trainer", "importing torch")
    with supervisor._locked(tmp_path):
        shown = CliRunner().invoke(status_command, [str(tmp_path)])
    assert shown.exit_code == 0
    assert "has not reported yet" in shown.output and "trainer" in shown.output and "importing torch" in shown.output
    roles = {"trainer": role("starting", "", "trainer")}
    write_status(tmp_path, make_status(0, 20, START, state="starting", roles=roles))
    assert "importing torch" in CliRunner().invoke(status_command, [str(tmp_path)]).output
    empty = CliRunner().invoke(status_command, [str(tmp_path / "nowhere")])
    assert isinstance(empty.exception, UserError)


def test_a_download_into_a_pipe_writes_lines_whatever_is_said_of_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str, tell: Callable[[str], None], out: Path | None) -> Path:
        tell("downloading: 1 of 9 MB")
        return tmp_path

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("streamrl.machine.known_models.fetch", fetch)
    assert fetch_with_progress("tiny", None) == tmp_path
    assert capsys.readouterr().out.splitlines()[1:] == ["tiny: downloading", f"tiny is in {tmp_path}"]


def test_a_download_says_each_phase_once_and_after_a_silence_how_it_goes_on() -> None:
    phases = Phases("tiny")
    assert phases.still(5.0) == ""
    assert phases.doing("downloading: 1 of 9 MB", 10.0) == "tiny: downloading"
    assert phases.doing("downloading: 2 of 9 MB", 15.0) == phases.still(17.9) == ""
    assert phases.still(18.0) == "tiny: downloading: 2 of 9 MB (8 s)"
    assert phases.still(19.0) == ""
    assert phases.doing("converting", 20.0) == "tiny: converting"
    assert phases.still(26.5) == ""
    assert phases.still(28.0) == "tiny: converting (8 s)"
