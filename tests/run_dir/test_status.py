"""status.json: replaced in one piece, checked on both sides, and a folder without a run is answered well."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from streamrl.cli.status import command
from streamrl.cli.why_stuck import command as why_stuck
from streamrl.errors import UserError
from streamrl.run_dir import layout, site_status
from streamrl.run_dir.site_status import read_site, starting, write_site, write_site_end
from streamrl.run_dir.status import overwrite_status, read_status, write_status
from tests.mere_user import without_right_to
from tests.report.synthetic import START, RunMaker, make_row, make_status


def test_a_status_comes_back_as_it_was_written(tmp_path: Path) -> None:
    row = make_row(3)
    write_status(tmp_path, make_status(3, 20, START + 5, latest=row.model_dump()))
    status = read_status(tmp_path)
    assert (status.run, status.state, status.step, status.steps) == ("demo", "running", 3, 20)
    assert status.roles["here-regular-1"].running == 13
    assert status.roles["trainer"].memory_gb is None
    assert status.progress.length_counts is not None and status.progress.length_counts.longest == 96
    assert status.latest == row
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_nan_becomes_null(tmp_path: Path) -> None:
    write_status(tmp_path, make_status(3, 20, START, eta_s=float("nan")))
    assert json.loads((tmp_path / "status.json").read_text())["eta_s"] is None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_status_written_at_no_time_cannot_be_read(tmp_path: Path, value: str) -> None:
    write_status(tmp_path, make_status(3, 20, START))
    status = json.loads((tmp_path / layout.STATUS).read_text())
    (tmp_path / layout.STATUS).write_text(json.dumps(status | {"updated_at": float(value)}))
    with pytest.raises(UserError, match=r"status\.json cannot be read: updated_at: Input should be a finite number"):
        read_status(tmp_path)


def test_a_status_that_readers_could_not_show_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    write_status(tmp_path, make_status(3, 20, START))
    with pytest.raises(ValidationError):
        write_status(tmp_path, make_status(4, 20, START, state="dancing"))
    assert read_status(tmp_path).step == 3


@pytest.mark.parametrize("characters", [3, 20_000])
def test_the_last_status_fits_in_place_of_the_old_one(tmp_path: Path, characters: int) -> None:
    overwrite_status(tmp_path, make_status(3, 20, START))
    assert not list(tmp_path.iterdir())
    write_status(tmp_path, make_status(3, 20, START))
    before = (tmp_path / "status.json").stat()
    last = make_status(4, 20, START + 9) | {"state": "failed", "error": "é" * characters}
    overwrite_status(tmp_path, last)
    after, status = (tmp_path / "status.json").stat(), read_status(tmp_path)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert (status.state, status.step, status.updated_at) == ("failed", 4, START + 9)
    assert status.error and "é" * characters == status.error.ljust(characters, "é")


@pytest.mark.parametrize("state", ["done", "interrupted"])
@pytest.mark.parametrize("before", ["starting", "serving"])
def test_a_site_records_its_end_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, state: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    values = starting("far") | {"samples_sent": 3, "instances": {f"far-{n}": {} for n in range(9)}}
    write_site(tmp_path, starting("far") if before == "starting" else values | {"state": before})
    monkeypatch.setattr(site_status, "replace_json", full)
    write_site_end(tmp_path, values | {"state": state})
    status = read_site(tmp_path)
    assert status is not None and (status.site, status.state) == ("far", state)
    assert status.samples_sent == (0 if before == "starting" else 3)


def test_a_reader_never_meets_half_a_status(tmp_path: Path) -> None:
    write_status(tmp_path, make_status(0, 20, START))
    ended = threading.Event()
    failures: list[Exception] = []

    def read() -> None:
        while not ended.is_set():
            try:
                read_status(tmp_path)
            except Exception as error:
                failures.append(error)
            time.sleep(0.0005)  # sleeps: the writer has its turns

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(200):
        write_status(tmp_path, make_status(step, 300, START, error="x" * (step * 37 % 5000)))
    ended.set()
    reader.join()
    assert not failures


@pytest.mark.parametrize("what", ["missing", "file", "empty", "broken"])
def test_a_folder_that_is_no_run_gives_one_readable_message(tmp_path: Path, what: str) -> None:
    path = tmp_path / "nothing"
    if what == "file":
        path.touch()
    elif what != "missing":
        path.mkdir()
    if what == "broken":
        (path / "status.json").write_text('{"run": 3')
    with pytest.raises(UserError, match="nothing") as caught:
        read_status(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [layout.STATUS, layout.METRICS, "."])
def test_what_another_user_keeps_to_himself_is_named(make_run: RunMaker, name: str) -> None:
    locked = (run_dir := make_run(3, rollouts=False, trace=False)) / name
    with without_right_to(locked):
        for told in (command, why_stuck):
            result = CliRunner().invoke(told, [str(run_dir)])
            if name == "." and f"{run_dir.name}' is not readable" in result.output:
                continue  # click has asked whether the folder can be read; root is always told that it can
            assert isinstance(result.exception, UserError), result.output
            named = locked if locked.is_file() else run_dir / layout.STATUS
            assert str(result.exception).endswith(f"{named}: cannot be read: Permission denied")


def test_a_mistyped_run_names_the_runs_that_there_are(make_run: RunMaker) -> None:
    run_dir = make_run(1, rollouts=False, trace=False)
    with pytest.raises(UserError, match=r"demo$"):
        read_status(run_dir.parent / "dmeo")
    with pytest.raises(UserError, match=r"demo$"):
        read_status(run_dir.parent)


def test_only_a_run_that_has_not_ended_can_be_stale(tmp_path: Path) -> None:
    write_status(tmp_path, make_status(3, 20, START))
    assert read_status(tmp_path).stale_for(START + 9) is None
    assert read_status(tmp_path).stale_for(START + 42) == 42
    assert read_status(tmp_path).stale_for(START - 9) is None
    assert read_status(tmp_path).stale_for(START - 42) == -42 and not read_status(tmp_path).is_live(START - 42)
    write_status(tmp_path, make_status(3, 20, START, state="done"))
    assert read_status(tmp_path).stale_for(START + 42) is None


def test_the_status_command_shows_roles_and_steps(make_run: RunMaker) -> None:
    result = CliRunner().invoke(command, [str(make_run(3, rollouts=False, trace=False))])
    assert result.exit_code == 0, result.output
    for part in ("step 3/20", "here-regular-0", "12+3", "micro-batch 3 of 8", "0.200", "eval@0: greedy 0.10"):
        assert part in result.output
    assert "no update for" in result.output  # the synthetic run's last update was in 2023


def test_watching_ends_with_the_run(make_run: RunMaker) -> None:
    run_dir = make_run(3, rollouts=False, trace=False, state="done")
    result = CliRunner().invoke(command, [str(run_dir), "--watch"])
    assert result.exit_code == 0, result.output
    assert "demo: done" in result.output and "optimizer steps" in result.output


def test_help_has_an_example() -> None:
    assert "streamrl status runs/demo" in CliRunner().invoke(command, ["--help"]).output


def test_runs_that_are_deleted_while_they_are_listed_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tmp_path / name / "status.json" for name in ("gone", "older", "newer")]
    for number, path in enumerate(found[1:]):
        path.parent.mkdir()
        path.touch()
        os.utime(path, (number + 1, number + 1))
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(found))
    with pytest.raises(UserError) as refused:
        read_status(tmp_path / "other")
    shown = str(refused.value).partition("; there are: ")[2].split(", ")
    assert shown == [str(tmp_path / name) for name in ("newer", "older", "gone")]


def test_a_run_whose_launch_died_before_it_wrote_its_state_says_how_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for told in (command, why_stuck):
        result = CliRunner().invoke(told, [str(tmp_path)])
        assert "holds no run" not in str(result.exception)
        assert f"continue with: streamrl launch --resume {tmp_path} " in str(result.exception)
