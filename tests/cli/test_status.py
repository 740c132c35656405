"""`streamrl status` of folders in which nothing runs, or no trainer: it says so, and watching ends."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.cli import status
from streamrl.config.load import RESOLVED_NAME, load_cluster, load_run, save_resolved
from streamrl.diagnose.snapshot import collect
from streamrl.diagnose.stuck import judge
from streamrl.launcher import supervisor
from streamrl.run_dir import layout
from streamrl.run_dir.launcher_lock import has_launcher, owner_here, owner_line
from streamrl.run_dir.site_status import starting, write_site
from streamrl.run_dir.start_stages import say
from streamrl.run_dir.status import write_status
from tests.cli.calling import streamrl
from tests.report.synthetic import make_status, write_run
from tests.waiting import scaled

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    return tmp_path / "demo"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.01)


def site(folder: Path, **changes: object) -> None:
    values = {"site": "west", "updated_at": time.time() - 7200, "state": "serving", "trainer_silent_s": 1.0}
    write_site(folder, values | changes)


def test_the_launchers_lock_says_whether_there_is_one(folder: Path) -> None:
    inner = folder / "sites" / "west"
    inner.mkdir(parents=True)
    assert not has_launcher(folder)
    with supervisor._locked(folder):
        assert has_launcher(folder) and has_launcher(inner)
        assert has_launcher(folder), "looking does not free it"
        assert owner_here(folder) == owner_line()
    assert not has_launcher(folder) and not has_launcher(inner)
    assert owner_here(folder) is None
    (folder / ".lock").write_text("process 1 on another-machine")
    assert has_launcher(folder), "its lock need not reach this one"
    assert owner_here(folder) is None, "a run may be resumed on another machine than its launcher's that has died"
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(os.devnull)
    assert has_launcher(folder), "what cannot be told is not denied"


def test_a_file_is_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "run.yaml").touch()
    for more in ((), ("--watch",)):
        assert streamrl(monkeypatch, "status", tmp_path / "run.yaml", *more) == 2
        error = capsys.readouterr().err
        assert error == f"error: {tmp_path / 'run.yaml'} is a file; expected a run folder such as runs/NAME\n"


def test_a_damaged_status_is_no_start(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    say(folder, "trainer", "loading the model")
    (folder / "status.json").write_text("{")
    assert streamrl(monkeypatch, "status", folder) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("watch", [(), ("--watch",)])
def test_a_launcher_that_was_killed_at_the_start_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, watch: tuple[str, ...]
) -> None:
    say(folder, "trainer", "loading the model")
    assert streamrl(monkeypatch, "status", folder, *watch) == 0
    shown = capsys.readouterr().out
    assert (
        f"no launcher runs {folder} any more: it ended before its controller reported (trainer: loading the model)"
        in shown
    )
    assert "has not reported yet" not in shown


def test_a_start_is_shown_while_its_launcher_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    say(folder, "trainer", "loading the model")
    with supervisor._locked(folder):
        assert streamrl(monkeypatch, "status", folder) == 0
    shown = capsys.readouterr().out
    assert "has not reported yet" in shown and "loading the model" in shown and "no launcher" not in shown


@pytest.mark.parametrize("words", [("scale", "--pool", "tail", "--replicas", "2"), ("checkpoint",), ("report",)])
def test_what_needs_the_run_refuses_a_generating_sites_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, words: tuple[str, ...]
) -> None:
    site(folder)
    (folder / RESOLVED_NAME).touch()
    assert streamrl(monkeypatch, words[0], folder, *words[1:]) == 2
    error = capsys.readouterr().err
    assert "is the folder of a site that only generates; expected the folder of the trainer's site" in error
    assert "--resume" not in error and not (folder / layout.REPORT).exists()


def test_a_generating_sites_folder_shows_what_the_site_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    site(folder, samples_sent=12, instances={"west-tail-0": {"state": "generating", "running": 3}})
    say(folder, "service-west", "ready")
    with supervisor._locked(folder):
        assert streamrl(monkeypatch, "status", folder) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("west: serving; 1 instances, 3 running") and "12 samples sent" in shown
    assert shown.endswith("; as of 2h00m ago\n")
    streamrl(monkeypatch, "status", folder)
    assert capsys.readouterr().out.endswith(f"as of 2h00m ago\nno launcher runs {folder} any more\n")


def test_a_sites_line_tells_of_a_dead_link_for_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    site(folder, publisher_silent_s=41.0)
    assert streamrl(monkeypatch, "status", folder) == 0
    assert "no sign of the trainer's publisher of weights for 41 s" in capsys.readouterr().out


def test_a_sites_line_tells_why_nothing_gets_through(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    trouble = "the name home.test cannot be resolved: no answer within 10 s"
    site(folder, trainer_silent_s=41.0, unresolved=trouble, empty_connections=3)
    assert streamrl(monkeypatch, "status", folder) == 0
    shown = capsys.readouterr().out
    assert f"no sign of the trainer's site for 41 s; {trouble}; 3 connections in a row broke after the hello" in shown


def test_a_site_that_does_not_serve_yet_starts(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write_site(folder, starting("west"))
    say(folder, "service-west", "starting Python")
    with supervisor._locked(folder):
        assert streamrl(monkeypatch, "status", folder) == 0
    assert "starting Python" in capsys.readouterr().out


@pytest.mark.parametrize("watch", [(), ("--watch",)])
def test_a_launcher_is_gone_whose_last_status_is_dated_in_the_future(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, watch: tuple[str, ...]
) -> None:
    write_status(folder, make_status(3, 20, time.time() + 3600 + 30))
    assert streamrl(monkeypatch, "status", folder, *watch) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(f"no launcher runs {folder} any more; streamrl launch --resume continues it\n")
    if not watch:
        assert "the last update is dated 1h00m from now, so its age is unknown" in " ".join(shown.split())
        assert "last state" in shown and "left 5m10s" not in shown


def test_a_run_whose_launcher_is_gone_says_that_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    write_run(tmp_path / "demo", 3, rollouts=False, trace=False)
    gone = f"no launcher runs {tmp_path / 'demo'} any more; streamrl launch --resume continues it"
    assert streamrl(monkeypatch, "status", tmp_path / "demo") == 0
    assert capsys.readouterr().out.endswith(gone + "\n")
    assert streamrl(monkeypatch, "status", tmp_path / "demo", "--watch") == 0
    assert capsys.readouterr().out.endswith(gone + "\n")
    with supervisor._locked(tmp_path / "demo"):
        assert streamrl(monkeypatch, "status", tmp_path / "demo") == 0
    assert "no launcher" not in capsys.readouterr().out


def test_a_run_whose_launcher_is_gone_after_its_last_checkpoint_has_nothing_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    demo = tmp_path / "demo"
    write_run(demo, 3, rollouts=False, trace=False)
    save_resolved(demo, load_cluster(ROOT / "cluster_configs" / "local.yaml"), load_run(None, ["steps=3"]))
    for step, told in (
        (2, "streamrl launch --resume continues it"),
        (3, "nothing is left to do: all 3 steps are done"),
    ):
        (demo / "checkpoints" / f"step_{step}").mkdir(parents=True)
        assert streamrl(monkeypatch, "status", demo) == 0
        assert capsys.readouterr().out.endswith(f"no launcher runs {demo} any more; {told}\n")


@contextlib.contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Watch in a thread, which must have ended soon after the block."""
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(streamrl(monkeypatch, "status", folder, "--watch")), daemon=True
    )
    thread.start()
    yield
    thread.join(scaled(30))
    assert codes == [0]


def test_watching_ends_with_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write_status(folder, make_status(3, 20, time.time()))
    with supervisor._locked(folder), watching(monkeypatch, folder):
        write_status(folder, make_status(20, 20, time.time(), state="done"))
    shown = capsys.readouterr().out
    assert "demo: done after" in shown and "no launcher" not in shown


def test_the_folder_of_a_site_that_was_started_again_names_the_newest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    folders = [tmp_path / name for name in ("demo-west", "demo-west-2", "demo-west-3", "demo-west-4")]
    for folder in folders:
        folder.mkdir()
    site(folders[0])
    site(folders[1])
    write_site(folders[2], starting("west"))
    site(folders[3], site="west-4")  # of another site, by chance
    for folder in folders[:2]:
        assert streamrl(monkeypatch, "status", folder) == 0
        told = f"no launcher runs {folder} any more; the site was started again, in demo-west-3"
        assert capsys.readouterr().out.endswith(told + "\n")
        verdict = judge(collect(folder))
        assert verdict.state == "ended" and "site west was started again, in demo-west-3" in verdict.details
    site(folders[2])
    assert streamrl(monkeypatch, "status", folders[2]) == 0
    assert capsys.readouterr().out.endswith(f"no launcher runs {folders[2]} any more\n")


def test_watching_a_site_ends_with_its_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    say(folder, "service-west", "starting Python")
    with contextlib.ExitStack() as launcher:
        launcher.enter_context(supervisor._locked(folder))
        with watching(monkeypatch, folder):
            site(folder, samples_sent=12)
            launcher.close()
    shown = capsys.readouterr().out
    assert "west: serving; 0 instances" in shown and "no optimizer step" not in shown
    assert shown.endswith(f"no launcher runs {folder} any more\n")


@pytest.mark.parametrize("generates", [False, True])
def test_watching_a_folder_that_is_moved_or_deleted_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, generates: bool
) -> None:
    if generates:
        site(folder, updated_at=time.time())
        (folder / ".lock").write_text("process 1 on another-machine")
    else:
        write_status(folder, make_status(3, 20, time.time()))
    moving = SimpleNamespace(time=time.time, sleep=lambda seconds: folder.rename(folder.with_name("moved")))
    monkeypatch.setattr(status, "time", moving)
    assert streamrl(monkeypatch, "status", folder, "--watch") == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: run folder {folder} is gone (moved or deleted?): there is nothing more to watch\n"
    assert "not reported" not in shown.out
