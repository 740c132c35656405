"""Downloads that break, are slow or are not there: what is tried again, and said."""

from __future__ import annotations

import http.server
import io
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


def wheel(name: str, payload: int = 400_000) -> bytes:
    """A package with stored bytes, so that its file can be cut in the middle of them."""
    out = io.BytesIO()
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/data.bin", bytes(payload))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return out.getvalue()


class Index:
    """A package index on loopback whose first `broken` answers for a file are cut, refused, or hardly come."""

    def __init__(self) -> None:
        self.file, self.broken, self.how, self.asked = wheel("beta"), 0, "", 0
        self.closing = threading.Event()
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self, code: int, body: bytes, sent: int | None = None) -> None:
                self.send_response(code)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:sent])

            def do_GET(self) -> None:
                if self.path == "/simple/beta/":
                    return self.answer(200, b'<a href="/files/beta-1.0-py3-none-any.whl">beta-1.0-py3-none-any.whl</a>')
                if not self.path.startswith("/files/"):
                    return self.answer(404, b"")
                index.asked += 1
                if index.asked > index.broken:
                    return self.answer(200, index.file)
                if index.how == "refused":
                    return self.answer(503, b"")
                self.answer(200, index.file, sent=len(index.file) // 2)
                if index.how == "slow":
                    index.closing.wait(60)
                return None

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.close()


def pip_command(index: Index, target: Path) -> list[str]:
    """A pip that gives up at the first failure, so that the tries are the installer's."""
    options = ["--isolated", "--no-cache-dir", "--no-deps", "--retries=0", "--resume-retries=0"]
    return [
        *[sys.executable, "-m", "pip", "install", *options, "--index-url", index.url],
        *["--target", str(target), "beta==1.0"],
    ]


@pytest.mark.parametrize("how", ["cut", "refused", "slow"])
def test_a_broken_or_slow_download_is_tried_again_and_that_is_said(
    run: ModuleType, checks: ModuleType, index: Index, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.how, index.broken = how, 2
    started = []

    def start() -> object:
        started.append(run.Running(pip_command(index, tmp_path)))
        return started[-1]

    def stage(lines: list[str]) -> tuple[str, bool]:
        slow = how == "slow" and index.asked == len(started)  # it waits for the file, and not for its own start
        return checks.pip_stage(lines)[0], slow

    # the last try has all the time that it needs
    run.install(start, stage, run.Patience(tries=3, pause_s=0.01, window_s=0.1, least_bytes=1e9))
    assert (tmp_path / "beta" / "data.bin").stat().st_size == 400_000
    said = capsys.readouterr().out
    assert "(try 2 of 3)" in said and "(try 3 of 3)" in said
    assert said.count("under 1000 MB came in 0 s; trying again") == (2 if how == "slow" else 0)
    assert index.asked == len(started) == 3


def test_it_gives_up_after_all_tries_and_says_why(
    run: ModuleType, checks: ModuleType, index: Index, tmp_path: Path
) -> None:
    index.how, index.broken = "refused", 99
    with pytest.raises(run.Unreachable, match=r"the download broke 2 times: .*503"):
        run.install(
            lambda: run.Running(pip_command(index, tmp_path)), checks.pip_stage, run.Patience(tries=2, pause_s=0.01)
        )
    assert index.asked == 2


def test_what_is_not_there_is_not_tried_again(
    run: ModuleType, checks: ModuleType, index: Index, tmp_path: Path
) -> None:
    command = [*pip_command(index, tmp_path)[:-1], "gamma==1.0"]
    started = []

    def start() -> object:
        started.append(run.Running(command))
        return started[-1]

    with pytest.raises(run.InstallError, match="No matching distribution found for gamma"):
        run.install(start, checks.pip_stage, run.Patience(pause_s=0.01))
    assert len(started) == 1


def uv_here() -> bool:
    return (Path(sys.executable).parent / "uv").exists()


@pytest.mark.skipif(not uv_here(), reason="uv is not in this environment (pip installed it, where uv cannot be had)")
def test_downloads_that_uv_tries_again_by_itself_are_said(
    run: ModuleType, checks: ModuleType, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.how, index.broken = "cut", 1
    command = [
        *[str(Path(sys.executable).parent / "uv"), "pip", "install", "--verbose", "--no-deps", "--no-config"],
        *["--target", str(tmp_path / "into"), "--python", sys.executable, "--default-index", index.url, "beta==1.0"],
    ]
    environment = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON_DOWNLOADS": "never"}
    run.install(lambda: run.Running(command, environment), checks.uv_stage, run.Patience(tries=1))
    assert "the download of beta-1.0-py3-none-any.whl broke; it is tried again" in capsys.readouterr().out
    assert index.asked == 2


def test_progress_is_told_while_it_lasts_and_the_program_ends_with_it(
    run: ModuleType, checks: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('Collecting a', flush=True); sys.stdin.read(); import time; time.sleep(600)"
    running = run.Running([sys.executable, "-c", code])

    class Enough(Exception):
        pass

    def stage(lines: list[str]) -> tuple[str, bool]:
        if "1 packages fetched" in capsys.readouterr().out:
            raise Enough
        return checks.pip_stage(lines)

    with pytest.raises(Enough):
        run.follow(running, stage, run.Progress(0.0), None)
    assert running.process.poll() is not None
