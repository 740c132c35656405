"""`streamrl dashboard [RUNS...]`: a local web page that shows runs; it only reads their folders."""

from __future__ import annotations

from pathlib import Path

import click

from streamrl.dashboard.web_server import LOOPBACK, PORT


@click.command(name="dashboard")
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, metavar="[RUNS]...")
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address to listen at; any other than this machine's loopback asks for a token, which is printed.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
def command(runs: tuple[Path, ...], host: str, port: int) -> None:
    """Show runs in a browser: state, curves, timeline and every sample, live while they run.

    RUNS are run folders, or folders of run folders (default: runs). Finished, running and copied runs can be watched;
    the page only reads their files, and stopping it changes nothing.

    \b
    Examples:
      streamrl dashboard
      streamrl dashboard runs/demo runs/demo-2
      streamrl dashboard /data/runs --host 0.0.0.0 --port 8080
    """
    from streamrl.dashboard import web_server

    web_server.check_installed()
    from streamrl.dashboard.watched_run import WatchedRuns
    from streamrl.machine.loopback import is_loopback

    folders = runs or (Path("runs"),)
    WatchedRuns(folders)  # what is wrong with them is said before anything is bound
    token = None if is_loopback(host) else web_server.new_token()
    with web_server.bind(host, port) as listener:
        click.echo(f"dashboard at {web_server.link(listener, host, token)} (Ctrl-C stops it; the runs go on)")
        if token is not None:
            click.echo(
                "The link has a token: who has it sees every prompt and answer. It is sent unencrypted.", err=True
            )
        web_server.serve(folders, listener, token)
