"""The state of a run from its files, whatever of them is missing, old or broken; and which folders are runs."""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.dashboard.state_view import state_view
from streamrl.dashboard.stuck_view import stuck_view
from streamrl.dashboard.watched_run import WatchedRuns
from streamrl.errors import UserError
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.run_dir.site_status import write_site
from streamrl.run_dir.start_stages import READY, say
from streamrl.run_dir.status import write_status
from tests.report.synthetic import START, make_row, make_status, write_run

NOW = 1_700_001_000.0


def write_state(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    write_status(folder, make_status(3, 20, NOW - 1, **changes))
    return folder


def lock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have `pathlib` refuse to list a folder, and to look at what is in it, as the system does for
    another user's; tests may run as root, whom it lets in."""
    stat, iterdir = Path.stat, Path.iterdir

    def refused(path: Path) -> PermissionError:
        return PermissionError(errno.EACCES, "Permission denied", str(path))

    def stat_unless_locked(path: Path, **options: Any) -> Any:
        if folder in path.parents:
            raise refused(path)
        return stat(path, **options)

    def iterdir_unless_locked(path: Path) -> Iterator[Path]:
        if path == folder:
            raise refused(path)
        return iterdir(path)

    monkeypatch.setattr(Path, "stat", stat_unless_locked)
    monkeypatch.setattr(Path, "iterdir", iterdir_unless_locked)


def test_processes_waits_sites_and_refusals_are_shown(tmp_path: Path) -> None:
    wait = {"owner": "controller", "waiting_for": "trainer: step 4", "since": NOW - 30, "limit_s": 120.0}
    site = {"silent_s": 20.0, "rtt_ms": 80.0, "samples_waiting": 4}
    refused = {"not its own": {"service-west": 3}}
    write_state(tmp_path, waits=[wait], sites={"west": site}, refused=refused)
    write_started(tmp_path, [StartedProcess("trainer", "trainer", 7, exit_code=-9, last_words="out of memory")])
    view = state_view(tmp_path, NOW)
    by_name = {one["name"]: one for one in view["processes"]}
    assert by_name["here-regular-0"]["tokens_per_s"] == 411.0
    assert (by_name["trainer"]["state"], by_name["trainer"]["bad"]) == ("ended", True)
    assert by_name["trainer"]["last_words"] == "out of memory"
    assert not by_name["controller"]["bad"]
    assert view["waits"][0] | {"waited_s": 30.0, "share": 0.25} == view["waits"][0]
    assert view["sites"][0]["away"] and view["sites"][0]["name"] == "west"
    assert view["sites"][0]["absence"] == "no sign of it for 20 s"
    assert view["refused"] == refused
    assert (view["state"], view["live"], view["step"], view["steps"]) == ("running", True, 3, 20)
    assert json.dumps(view, allow_nan=False)


def test_a_run_that_is_silent_says_so_and_its_times_stand_still(tmp_path: Path) -> None:
    wait = {"owner": "controller", "waiting_for": "trainer", "since": NOW - 30, "limit_s": 120.0}
    write_state(tmp_path, waits=[wait])
    view = state_view(tmp_path, NOW + 5000)
    assert not view["live"] and "no update for" in view["trouble"][0]
    assert view["waits"][0]["waited_s"] == 29.0


def test_a_run_that_was_continued_is_as_old_as_its_first_start(tmp_path: Path) -> None:
    write_state(tmp_path, first_started_at=100.0)
    assert state_view(tmp_path, NOW)["elapsed_s"] == NOW - 100.0
    write_state(tmp_path, first_started_at=100.0, elapsed_s=60.0)  # the clock was set since
    assert state_view(tmp_path, NOW)["elapsed_s"] == 61.0


def test_the_cause_of_a_failed_run_is_trouble(tmp_path: Path) -> None:
    write_state(tmp_path, state="failed", error="the trainer died: out of memory")
    view = state_view(tmp_path, NOW + 5000)
    assert view["trouble"] == ["the trainer died: out of memory"] and not view["live"]


def test_a_run_that_starts_has_its_stages(tmp_path: Path) -> None:
    say(tmp_path, "trainer", "loading the model")
    view = state_view(tmp_path, NOW)
    assert view["state"] == "starting" and view["notes"] == []
    assert view["processes"][0] | {"state": "starting", "detail": "loading the model"} == view["processes"][0]


def test_a_resumed_run_starts_until_its_controller_reports_though_it_has_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", 2)
    (tmp_path / "demo" / "status.json").unlink()
    for process, stage in (("trainer", READY), ("controller", "loading the tokenizer and the tasks")):
        say(tmp_path / "demo", process, stage)
    view = state_view(tmp_path / "demo", NOW)
    assert (view["state"], view["notes"]) == ("starting", [])
    say(tmp_path / "demo", "controller", READY)  # all have started, so the status was lost since
    view = state_view(tmp_path / "demo", NOW)
    assert view["state"] == "unknown" and "no status.json" in view["notes"][0]


def test_a_run_that_has_only_its_configuration_so_far_starts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    view = state_view(tmp_path, NOW)
    assert (view["state"], view["notes"], view["processes"]) == ("starting", [], [])


def test_a_site_without_a_trainer_is_shown_by_its_own_file(tmp_path: Path) -> None:
    write_site(tmp_path, {"site": "west", "updated_at": NOW, "state": "generating", "trainer_silent_s": 1.0})
    view = state_view(tmp_path, NOW)
    assert view["state"] == "generating" and view["sites"][0]["name"] == "west" and view["notes"] == []


def test_a_copied_folder_without_its_status_shows_the_rest(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", 2)
    (tmp_path / "demo" / "status.json").unlink()
    view = state_view(tmp_path / "demo", NOW)
    assert view["state"] == "unknown" and "no status.json" in view["notes"][0]
    assert view["waits"] is None, "it is not known"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "x"}'])
def test_a_broken_status_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    (tmp_path / "processes.json").write_text(content)
    view = state_view(tmp_path, NOW)
    assert view["state"] == "unknown" and "state is unknown" in view["notes"][0]


def test_an_older_runs_status_is_read_without_figures_that_are_no_more(tmp_path: Path) -> None:
    values = make_status(3, 20, NOW - 1, latest=make_row(3).model_dump() | {"reward_errors": 2}, of_old=1)
    (tmp_path / "status.json").write_text(json.dumps(values))
    view = state_view(tmp_path, NOW)
    assert (view["state"], view["notes"]) == ("running", [])


def test_a_folder_that_is_gone_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        state_view(tmp_path / "gone", NOW)


def test_runs_are_found_in_folders_and_have_ids_of_their_own(tmp_path: Path) -> None:
    for folder in ("a/demo", "b/demo", "b/other"):
        (tmp_path / folder).parent.mkdir(exist_ok=True)
        write_state(tmp_path / folder)
    (tmp_path / "b" / "notes").mkdir()
    runs = WatchedRuns([tmp_path / "a" / "demo", tmp_path / "b"])
    assert [(run.id, run.folder.parent.name) for run in runs.look()] == [("demo", "a"), ("demo~2", "b"), ("other", "b")]
    write_state(tmp_path / "b" / "new")
    assert {run.id for run in runs.look()} == {"demo", "demo~2", "other", "new"}
    shutil.rmtree(tmp_path / "b" / "other")
    assert {run.id for run in runs.look()} == {"demo", "demo~2", "new"}
    assert runs.get("other") is not None, "a page that shows it is told that it is gone"
    assert runs.get("../b") is None


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, message in {"none": "no such folder", "file": "is a file", ".": "holds no run"}.items():
        with pytest.raises(UserError, match=message):
            WatchedRuns([tmp_path / name])
    assert WatchedRuns([tmp_path / "none"], coming=True).look() == []


def test_a_folder_of_another_user_hides_no_run_and_is_told_if_it_is_the_one_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "lost+found"
    locked.mkdir()
    write_state(tmp_path / "demo")
    lock(monkeypatch, locked)
    assert [run.id for run in WatchedRuns([tmp_path]).look()] == ["demo"]
    with pytest.raises(UserError, match=r"lost\+found cannot be read: Permission denied"):
        WatchedRuns([locked])
    assert WatchedRuns([locked], coming=True).look() == []


def test_the_chain_of_waits_is_that_of_why_stuck(tmp_path: Path) -> None:
    now = time.time()
    wait = {"owner": "controller", "waiting_for": "trainer: step 4", "since": now - 130, "limit_s": 120.0}
    write_status(tmp_path, make_status(3, 20, now, waits=[wait]))
    view = stuck_view(tmp_path)
    (edge,) = view["chain"]
    assert view["state"] == "stuck" and re.match(r"stuck: controller has waited 1[3-9]\d s", view["sentence"])
    assert (edge["waiter"], edge["waits_for"], edge["target"]) == ("controller", "trainer: step 4", "trainer")
    assert (edge["limit_s"], edge["cpu"]) == (120.0, None)
    assert json.dumps(view, allow_nan=False)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"roles": 3}', '{"state": "running", "waits": [7]}'])
def test_a_status_that_cannot_be_judged_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    view = stuck_view(tmp_path)
    assert (view["state"], view["chain"]) == ("unknown", []) and "cannot be judged: " in view["sentence"]


def test_a_folder_without_a_status_has_no_verdict_and_a_deleted_one_is_gone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert stuck_view(tmp_path)["sentence"] == ""
    with pytest.raises(FileNotFoundError):
        stuck_view(tmp_path / "none")


def test_instances_of_a_large_pool_that_are_alike_share_a_row(tmp_path: Path) -> None:
    roles: dict[str, Any] = {"controller": {"role": "controller", "state": "running", "since": START}}
    usual = {"role": "instance", "state": "generating", "since": START, "running": 2, "dtype": "bfloat16"}
    roles |= {f"here-regular-{n}": usual | {"weight_version": 3 + (n > 500)} for n in range(1000)}
    roles["here-regular-7"] = usual | {"state": "loading"}
    roles["here-regular-9"] = usual | {"state": "dead", "detail": "SIGKILL"}
    write_status(tmp_path, make_status(8, 20, START + 184, roles=roles))
    rows = state_view(tmp_path, START + 185)["processes"]
    assert [(row["name"], row["bad"]) for row in rows] == [
        ("controller", False),
        ("here-regular: 998", False),
        ("here-regular-7", False),
        ("here-regular-9", True),
    ]
    assert {name: rows[1][name] for name in ("running", "weight_versions", "dtype", "for_s")} == {
        "running": 1996,
        "weight_versions": "3-4",
        "dtype": "bfloat16",
        "for_s": 185.0,
    }


def test_a_row_of_many_that_have_crashed_names_some_and_counts_the_others(tmp_path: Path) -> None:
    usual = {"role": "instance", "state": "generating", "since": START}
    names = [f"here-regular-{number}" for number in range(30)]
    roles = {name: usual | {"detail": "slow" if name == names[2] else ""} for name in names}
    write_status(tmp_path, make_status(8, 20, START + 184, roles=roles))
    ended = [StartedProcess(name, "instance", 9, exit_code=1, last_words=f"error of {name}") for name in names[6:]]
    write_started(tmp_path, ended)
    rows = {row["name"]: row["detail"] for row in state_view(tmp_path, START + 185)["processes"]}
    errors = "; ".join(f"{name}: error of {name}" for name in names[6:9])
    assert rows == {"here-regular: 6": "here-regular-2: slow", "here-regular: 24": f"{errors}; and 21 more"}
