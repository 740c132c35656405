"""Attacks by whoever made the folder of a run that is only looked at: links, pipes, huge and odd files in it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamrl
from ranker.data import read_rollouts
from ranker.errors import RankerError
from streamrl import plain_files
from streamrl.errors import UserError
from streamrl.exporter.run_collector import RunCollector
from streamrl.plain_files import NotPlainFile, append_plain, check_plain, open_plain, read_plain
from streamrl.planning.workload import open_found, replay
from streamrl.report import run_report
from streamrl.report.run_data import load_run
from streamrl.report.run_decoder import find_decoder
from streamrl.rollouts import parquet_files
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.trackers.rollout_table import rollout_table
from streamrl.trackers.sent_rows import SentRows
from tests.cli import calling
from tests.security.another_user import NOBODY, as_nobody
from tests.security.foreign_folder import (
    ATTACKS,
    REFUSED,
    SECRET,
    asked_of_dashboard,
    in_time,
    link,
    listed_by_dashboard,
    make_folder,
    make_secrets,
    opens_of,
    pipe,
    printed,
    unix_socket,
)
from tests.trackers.tracked_run import make_run

PACKAGE = Path(streamrl.__file__).parent
STEP = f"{layout.ROLLOUTS}/step_000001.parquet"
READ = (
    layout.STATUS,
    layout.METRICS,
    layout.EVALUATIONS,
    layout.TRACE,
    "config.yaml",
    layout.PROCESSES,
    layout.ADDRESSES,
    layout.ROLLOUTS,
    STEP,
    layout.START_STAGES,
    f"{layout.START_STAGES}/trainer.jsonl",
    layout.SITES,
    f"{layout.SITES}/west",
    f"{layout.SITES}/west/{layout.SITE_STATUS}",
    f"{layout.SITES}/west/{layout.PROCESSES}",
    f"{layout.CHECKPOINTS}/best.json",
    f"{layout.CHECKPOINTS}/step_1/tokenizer.json",
    f"{layout.TRACKERS}/mlflow.jsonl",
)
"""Every file and folder that is read of somebody else's run."""


SHOWN = (layout.STATUS, layout.METRICS, layout.TRACE, "config.yaml", STEP, layout.ROLLOUTS, READ[-2])
"""Those that a report is made from."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run's folder, and one of the reader's with secrets."""
    base = tmp_path_factory.mktemp("foreign")
    make_folder(base / "run")
    return base / "run", make_secrets(base / "secrets", base / "run")


@pytest.fixture
def run(made: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run"


def attacked(run: Path, secrets: Path, attack: str) -> Iterator[str]:
    """Put something else in the place of each file and folder, one after the other, and its own back afterwards."""
    for name in READ:
        path, aside = run / name, run.parent / "aside"
        path.rename(aside)
        ATTACKS[attack](path, secrets / name)
        yield name
        path.unlink()
        aside.rename(path)


OPENED_OTHERWISE = re.compile(r"(?<![\w.])open\(|\.(read_text|read_bytes|open|ParquetFile|read_table|from_file)\(")
"""What opens a file by its path."""


def test_all_that_shows_runs_opens_their_files_through_one_module() -> None:
    own = {
        "diagnose/stacks.py": 2,  # the file that a process makes for itself, and /proc
        "exporter/metrics_server.py": 1,  # the token's
        "trackers/tracker_group.py": 1,  # a log, by the launcher
    }
    found: dict[str, int] = {}
    for room in ("dashboard", "report", "diagnose", "exporter", "trackers"):
        for path in (PACKAGE / room).rglob("*.py"):
            if count := len(OPENED_OTHERWISE.findall(path.read_text())):
                found[path.relative_to(PACKAGE).as_posix()] = count
    assert found == own


def test_the_secrets_would_be_seen(made: tuple[Path, Path]) -> None:
    assert SECRET in asked_of_dashboard(made[1])


@pytest.mark.parametrize("attack", [one for one in ATTACKS if one != "unix_socket"])  # as a pipe, but for what opens it
def test_nothing_in_a_foreign_folder_leads_elsewhere_or_holds_a_reader_up(
    attack: str,
    made: tuple[Path, Path],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in attacked(run, made[1], attack):
        seen = in_time(lambda: asked_of_dashboard(run)) + in_time(lambda: listed_by_dashboard(run))
        seen += printed(capsys, monkeypatch, "status", run) + printed(capsys, monkeypatch, "why-stuck", run)
        seen += repr(in_time(lambda: list(RunCollector(run, 1).collect())))
        assert SECRET not in seen, name


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_report_of_a_foreign_folder_has_what_is_plain_and_says_what_is_not(
    attack: str, made: tuple[Path, Path], run: Path
) -> None:
    for name in attacked(run, made[1], attack):
        data = in_time(partial(load_run, run))
        decoder, why_not = in_time(partial(find_decoder, run, data.config_text))
        assert SECRET not in repr((data, data.spans.tracks)) and decoder is None, name
        if attack in REFUSED and name in SHOWN:
            assert Path(name).name in " ".join([*data.notes, why_not]), name


@pytest.mark.parametrize("attack", REFUSED)
def test_rollouts_that_are_no_plain_files_are_refused_by_name(
    attack: str, made: tuple[Path, Path], run: Path, tmp_path: Path
) -> None:
    path, kept = run / STEP, run / layout.REFUSED / "step_000001.parquet"
    kept.parent.mkdir()
    path.unlink()
    for place in (path, kept):
        ATTACKS[attack](place, made[1] / STEP)
    for read in (
        lambda: read_rollouts([path.parent], open_found),
        lambda: replay(run, None, 0.0, 0),
        lambda: rollout_table(path, 1, 3),
        lambda: KeptMicroBatches(kept.parent).read(1),
    ):
        with pytest.raises((UserError, RankerError), match=r"step_000001\.parquet"):
            in_time(read)


def test_a_file_with_two_columns_of_one_name_is_refused_with_its_name(run: Path) -> None:
    table = pa.table({"sample_id": ["s1"], "completion": ["x"]})
    pq.write_table(table.append_column("completion", pa.array(["y"])), run / STEP)
    for columns in (None, ["completion"], ["sample_id"]):
        with pytest.raises(NotPlainFile, match=r"step_000001\.parquet has two columns of one name"):
            parquet_files.read_columns(run / STEP, run, columns)
    assert "two columns of one name" in " ".join(load_run(run).notes)


def test_a_small_file_that_unpacks_to_any_amount_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = parquet_files.BATCH * 40
    table = pa.table({"sample_id": [f"s{n}" for n in range(rows)], "completion": pa.array(["x" * 1_000] * rows)})
    pq.write_table(table, run / STEP, compression="zstd")
    assert (run / STEP).stat().st_size < 1 << 20
    monkeypatch.setattr(parquet_files, "MOST_DECODED", 10 << 20)  # of 40 MB
    with pytest.raises(NotPlainFile, match="unpacks to more than"):
        parquet_files.read_columns(run / STEP, run)
    assert len(parquet_files.read_columns(run / STEP, run, ["sample_id"])) == rows
    monkeypatch.setattr(parquet_files, "MOST_ROWS", rows - 1)
    with pytest.raises(NotPlainFile, match="rows"):
        parquet_files.read_columns(run / STEP, run, ["sample_id"])
    assert "rows: of such a file" in " ".join(load_run(run).notes)


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away and becomes another user")


@NEEDS_ROOT
def test_a_file_of_another_user_under_a_further_name_is_not_read(tmp_path: Path) -> None:
    """A hard link to a file of the reader, in a folder of somebody else; needs root, who may give files away."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.write_text(SECRET)
    os.link(mine, theirs / layout.STATUS)
    assert read_plain(theirs / layout.STATUS) == SECRET.encode()  # of one user: a copy made of hard links
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(NotPlainFile, match="another user"):
        open_plain(theirs / layout.STATUS)


def device(path: Path, secret: Path) -> None:
    """The device of `/dev/null`, which only root may make."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except PermissionError:
        pytest.skip("only root makes devices, and not on every file system")


@pytest.mark.parametrize("make", [pipe, unix_socket, device, link], ids=lambda make: make.__name__)
def test_what_is_no_file_is_not_even_opened(make: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """Opening is enough to release a writer at a named pipe, to wind back a tape, to arm a watchdog."""
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    target.write_text("of the reader")
    path = folder / layout.STATUS
    make(path, target)
    with opens_of(path) as opened:
        for read in (read_plain, open_plain, partial(append_plain, below=folder)):
            with pytest.raises(NotPlainFile, match=f"{layout.STATUS} is a "):
                in_time(partial(read, path))
        assert not opened()
        if make is not unix_socket:  # which cannot be opened
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            assert opened(), "else it would not have been noticed"


def test_a_file_is_opened_for_what_it_was_when_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to the folder meanwhile may put something else in its place."""
    path = tmp_path / layout.STATUS
    path.write_text("plain")
    look = plain_files._why_not

    def swap(found: os.stat_result, owner: int) -> str:
        path.unlink()
        os.mkfifo(path)
        return look(found, owner)

    monkeypatch.setattr(plain_files, "_why_not", swap)
    assert in_time(lambda: read_plain(path)) == b"plain"


@NEEDS_ROOT
def test_the_keys_in_another_users_folder_keep_nobody_from_looking_through_it() -> None:
    """Whoever cannot enter a folder opens nothing in it; one that can be entered and not listed is not passed over."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / layout.KEYS
        keys.mkdir()
        (keys / "secret").symlink_to("/etc/passwd")
        Path(folder).chmod(0o755)
        for mode, passed in ((0o700, True), (0o711, False), (0o755, False)):
            keys.chmod(mode)
            assert as_nobody(lambda: check_plain(Path(folder))) == passed, oct(mode)


def test_a_file_that_is_appended_to_is_made_once_and_is_its_users_to_write(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with append_plain(tmp_path / "rows" / "sent.jsonl", below=tmp_path) as file:
            file.write(line)
    assert (tmp_path / "rows" / "sent.jsonl").read_bytes() == b"one\ntwo\n"


def test_names_in_a_foreign_file_lead_nowhere_else(made: tuple[Path, Path], run: Path, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text(SECRET)
    with pytest.raises(NotPlainFile, match="leads out"):
        open_plain(run / layout.STACKS / "../../private.txt", below=run)


CATCHES = """
import signal, time
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: print(number, flush=True))
print("ready", flush=True)
time.sleep(600)
"""


def test_why_stuck_signals_no_process_that_only_a_file_names(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", CATCHES], stdout=subprocess.PIPE, text=True) as mine:
        try:
            assert mine.stdout is not None and mine.stdout.readline() == "ready\n"
            write_started(run, [StartedProcess("trainer", "service", mine.pid)])
            (run / layout.STACKS).mkdir()
            (run / layout.STACKS / "trainer.txt").write_text(f"pid {mine.pid} at {time.time() + 60:.3f}\n")
            assert str(mine.pid) in printed(capsys, monkeypatch, "why-stuck", run, "--stacks", "all")
        finally:
            mine.kill()
        assert mine.stdout.read() == ""


def test_init_writes_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.yaml").symlink_to(tmp_path / "elsewhere")
    asked = ("--model", "smollm2-135m", "--prompts", "example", "--gpus", "0")
    assert "run.yaml already" in printed(capsys, monkeypatch, "init", project, *asked)
    assert not (tmp_path / "elsewhere").exists() and [one.name for one in project.iterdir()] == ["run.yaml"]


def test_what_is_written_to_a_foreign_folder_goes_through_no_link(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "build_report", lambda data, now: "a page")  # whose figures take seconds
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    for name in (layout.REPORT, f"{layout.TRACKERS}/tensorboard.jsonl"):
        (run / name).symlink_to(mine)
    with pytest.raises(UserError, match="symbolic link"):
        SentRows(run, "tensorboard")
    run_report.write_report(run)
    assert mine.read_text() == "mine\n" and not (run / layout.REPORT).is_symlink()
    shutil.rmtree(run / layout.TRACKERS)
    (run / layout.TRACKERS).symlink_to(tmp_path)
    with pytest.raises(UserError, match="symbolic link"):
        SentRows(run, "tensorboard")
    assert not (tmp_path / "tensorboard.jsonl").exists()


GIVEN_ON = (("launch", "--resume"), ("replay",), ("track",), ("chaos", "--minutes", "1", "--attach"))


@pytest.mark.parametrize("command", GIVEN_ON)
def test_commands_that_write_or_hand_a_folder_on_look_through_it_first(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / layout.LOGS).mkdir()
    (run / layout.LOGS / "controller.log").symlink_to(tmp_path / "mine")
    code = calling.streamrl(monkeypatch, *command, run, *(("1",) if command == ("replay",) else ()))
    said = capsys.readouterr().err
    assert code == 2
    assert "controller.log is a symbolic link" in said and not (tmp_path / "mine").exists()
