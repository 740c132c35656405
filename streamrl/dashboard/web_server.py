"""Serve the dashboard: bind the port, say where it is, and answer until it is stopped.

`python -m streamrl.dashboard.web_server FOLDER FD` serves on a socket that was handed over, and ends with the process
that started it: so `launch --dashboard` runs it beside a run.
"""

from __future__ import annotations

import errno
import importlib.util
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from streamrl.errors import UserError

PORT = 7865
LOOPBACK = "127.0.0.1"
NEEDED = ("starlette", "uvicorn", "plotly")
END_S = 5.0
"""Seconds that a dashboard beside a run has to end by itself."""


def check_installed() -> None:
    """Check that the dashboard's packages are there.

    Raises:
        UserError: some are not.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the dashboard needs {', '.join(missing)}: pip install 'streamrl[dashboard]'")


def chart_library() -> Path:
    """Return the script of the chart library, which the package plotly brings along; plotly itself is not imported.

    Raises:
        UserError: it is not installed.
    """
    found = importlib.util.find_spec("plotly")
    path = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if path is None or not path.is_file():
        raise UserError(
            "the dashboard needs the package plotly with its plotly.min.js: pip install 'streamrl[dashboard]'"
        )
    return path


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} of {host} is in use, perhaps by another dashboard: stop it, or choose another port with "
                "--port (0 takes any free one)"
            ) from error
        if error.errno == errno.EACCES:
            raise UserError(f"port {port} may not be used by you: choose one above 1023 with --port") from error
        raise UserError(
            f"cannot listen at {host}: {error.strerror or error}; --host takes an address of this machine"
        ) from error


def link(listener: socket.socket, host: str, token: str | None, run: str | None = None) -> str:
    """Return the address to open in a browser."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{name}]" if ":" in name else name
    fragment = f"#/run/{quote(run, safe='')}" if run else ""
    return f"http://{name}:{port}/{f'?token={token}' if token else ''}{fragment}"


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def serve(folders: Sequence[Path], listener: socket.socket, token: str | None, coming: bool = False) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        folders: see `WatchedRuns`.
        listener: the socket to answer on.
        token: what a browser has to give; None: nothing, and only loopback names are accepted.
        coming: whether a run may appear later where there is none now.

    Raises:
        UserError: a folder holds no run, or a package is missing.
    """
    import uvicorn

    from streamrl.dashboard.access import AccessGuard
    from streamrl.dashboard.watched_run import WatchedRuns
    from streamrl.dashboard.web_app import make_app

    app = AccessGuard(make_app(WatchedRuns(folders, coming), chart_library()), token, listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        http="h11",  # which has an end for headers
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def beside_run(run_dir: Path) -> Iterator[str]:
    """Serve a run that is about to start, in a process of its own that ends with the block; give its address.

    Should the usual port be taken, it takes a free one: a run is not refused because another one is watched.

    Raises:
        UserError: a package is missing.
    """
    check_installed()
    try:
        listener = bind(LOOPBACK, PORT)
    except UserError:
        listener = bind(LOOPBACK, 0)
    with listener:
        command = [sys.executable, "-m", "streamrl.dashboard.web_server", str(run_dir), str(listener.fileno())]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end ends the child, however this process dies
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # Ctrl-C is for the run
        )
        address = link(listener, LOOPBACK, None, run_dir.name)
    try:
        yield address
    finally:
        if (code := child.poll()) is not None:
            print(
                f"warning: the dashboard had ended by itself (exit code {code}); the run did not need it",
                file=sys.stderr,
            )
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_with_starter() -> None:
    """Stop this process as soon as the one that started it is gone."""
    import os
    import signal

    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_starter, daemon=True).start()
    serve([Path(sys.argv[1])], socket.socket(fileno=int(sys.argv[2])), None, coming=True)
