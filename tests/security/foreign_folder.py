"""A run's folder as somebody else may have made it: what is put in the place of a file, and all that reads it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from streamrl.dashboard.watched_run import WatchedRuns
from streamrl.dashboard.web_app import make_app
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.run_dir.site_status import write_site
from tests.cli.calling import streamrl
from tests.report.synthetic import write_run
from tests.waiting import scaled

SECRET = "the-key-of-the-reader"
"""What the reader has elsewhere and nobody else may see; it is in a file of every form that is read."""
IN_OPEN = 0x20
"""Event of inotify."""
HUGE = 1 << 40
"""Size of a file without content, bytes."""


def make_folder(folder: Path) -> None:
    """A run of one step with every file that is read of a foreign run, and a site of its own."""
    write_run(folder, 1)
    (folder / layout.START_STAGES).mkdir()
    (folder / layout.START_STAGES / "trainer.jsonl").write_text('{"at": 1.0, "stage": "ready"}\n')
    (folder / layout.TRACKERS).mkdir()
    (folder / layout.TRACKERS / "mlflow.jsonl").write_text('{"id": "mine"}\n')
    (folder / layout.CHECKPOINTS / "step_1").mkdir(parents=True)
    (folder / layout.CHECKPOINTS / "step_1" / "tokenizer.json").write_text("{}")
    (folder / layout.CHECKPOINTS / "best.json").write_text('{"step": 1, "score": 1.0}')
    (folder / layout.ADDRESSES).write_text('{"controller": "ipc:///nowhere"}')
    write_started(folder, [StartedProcess("trainer", "trainer", 1, exit_code=3, last_words="gone")])
    site = folder / layout.SITES / "west"
    site.mkdir(parents=True)
    write_site(site, {"site": "west", "updated_at": 1.0, "state": "running", "trainer_silent_s": 1.0})
    write_started(site, [StartedProcess("service-west", "service", 1, exit_code=3, last_words="gone")])


def make_secrets(folder: Path, of: Path) -> Path:
    """A folder of the reader's own, of the same form, in which every text is the secret."""
    make_folder(folder)
    row = json.loads((of / layout.METRICS).read_text())
    (folder / layout.METRICS).write_text(json.dumps(row | {"length_bias_warning": SECRET}) + "\n")
    status = json.loads((of / layout.STATUS).read_text())
    (folder / layout.STATUS).write_text(json.dumps(status | {"error": SECRET, "model": SECRET, "run": SECRET}))
    (folder / layout.TRACE).write_text(
        '[{"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "SECRET"}},\n'
        '{"name": "SECRET", "ph": "X", "ts": 0, "dur": 9, "pid": 1, "tid": 1}'.replace("SECRET", SECRET)
    )
    (folder / "config.yaml").write_text(f"run: {SECRET}\n")
    (folder / layout.START_STAGES / "trainer.jsonl").write_text(json.dumps({"at": 1.0, "stage": SECRET}))
    (folder / layout.TRACKERS / "mlflow.jsonl").write_text(json.dumps({"id": SECRET}))
    for place in (folder, folder / layout.SITES / "west"):
        write_started(place, [StartedProcess(SECRET, "trainer", 1, exit_code=3, last_words=SECRET)])
    west = {"site": SECRET, "updated_at": 1.0, "state": SECRET, "trainer_silent_s": 1.0}
    write_site(folder / layout.SITES / "west", west)
    samples = folder / layout.ROLLOUTS / "step_000001.parquet"
    _with_secrets(samples)
    return folder


def _with_secrets(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    texts = ("group_id", "task", "prompt", "completion", "pool", "route", "reward_error")
    pq.write_table(pa.Table.from_pylist([row | dict.fromkeys(texts, SECRET) for row in rows]), path)


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, secret: Path) -> None:
    there = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(there)


def huge(path: Path, secret: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def nested(path: Path, secret: Path) -> None:
    path.write_bytes(b'{"ph":' + b"[" * 200_000 + b"\n")


def nonsense(path: Path, secret: Path) -> None:
    path.write_bytes(os.urandom(3000) + b"\n[1]\n{}\nnull\n" + b'{"ph": "X", "args": 3, "name": [], "ts": "a"}\n')


@contextlib.contextmanager
def opens_of(path: Path) -> Iterator[Callable[[], bool]]:
    """What says whether somebody has opened a file of any kind, or that which a link leads to (by inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(events, os.fsencode(path), IN_OPEN) > 0

        def opened() -> bool:
            with contextlib.suppress(BlockingIOError):
                return bool(os.read(events, 4096))
            return False

        yield opened
    finally:
        os.close(events)


REFUSED = {one.__name__: one for one in (link, pipe, unix_socket, huge)}
ODD = {one.__name__: one for one in (nested, nonsense)}
ATTACKS: dict[str, Callable[[Path, Path], None]] = REFUSED | ODD


def in_time(work: Callable[[], Any]) -> Any:
    """Return what the work returns; fail if it hangs, as a thread at a named pipe does."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(scaled(60.0))
    assert found, "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def listed_by_dashboard(folder: Path) -> str:
    """What a page lists of a dashboard that is given this very folder."""
    return TestClient(make_app(WatchedRuns([folder]), folder), raise_server_exceptions=True).get("/api/runs").text


VIEWS = ("state", "why_stuck", "steps", "timeline", "samples", "lengths", "sample?id=s1-0-0", "group?id=s1-0")
"""What a page asks of a run."""


def asked_of_dashboard(folder: Path) -> str:
    """Everything that a page can ask of the run, which is found in its parent, as one text."""
    app = make_app(WatchedRuns([folder.parent]), folder)
    with TestClient(app, raise_server_exceptions=True) as client:  # else each request starts a thread and a loop
        listing = client.get("/api/runs")
        texts = [listing.text]
        for run in listing.json()["runs"]:
            for view in (*VIEWS, f"group?id={SECRET}", f"samples?text={SECRET}", "samples?text=e"):
                answer = client.get(f"/api/runs/{run['id']}/{view}")
                assert answer.status_code in (200, 400, 404, 410, 500)
                texts.append(answer.text)
    return "".join(texts)


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> str:
    """What a command prints; it ends with an exit code of its own, and without a traceback."""
    code = in_time(lambda: streamrl(monkeypatch, *arguments))
    out, err = capsys.readouterr()
    assert code in (0, 1, 2, 3) and "Traceback" not in out + err, out + err
    return out + err
