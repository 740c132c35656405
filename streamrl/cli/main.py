"""The `streamrl` command: one module per command, imported when it is called."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Iterator
from errno import EPIPE
from typing import Any

import click

from streamrl.errors import RunFailed, UserError
from streamrl.machine.user_folders import settle_caches

COMMANDS = {
    "demo": "Train a real model on this machine, in a few minutes.",
    "init": "Write a cluster file, a run file and a reward function to start from.",
    "launch": "Run a cluster: start, supervise and watch all processes of a run.",
    "keys": "Make the keys with which the sites of a cluster authenticate each other.",
    "schema": "Print the JSON Schema of the cluster file or the run file.",
    "plan": "Choose which GPUs train and which generate, by time or by money.",
    "export": "Write the Slurm script or KubeRay manifest of a site from the cluster file.",
    "train-ranker": "Train the output-length ranker on past rollouts.",
    "calibrate": "Measure the step times of an instance on this machine.",
    "simulate": "Compare dispatch policies on a recorded run or on drawn lengths.",
    "verify": "Check that a model is trained right, before a run depends on it.",
    "env": "Install, list, test and remove environments that agents play in.",
    "fetch-model": "Make a known model available offline.",
    "scale": "Add instances to a running job, or remove some.",
    "checkpoint": "Have a running job write a checkpoint.",
    "replay": "Compute a refused optimizer step again, and show what was not finite.",
    "report": "Write the report of a run.",
    "dashboard": "Show runs in a browser, live: state, curves, timeline, samples.",
    "track": "Send the figures of a run to TensorBoard, W&B, MLflow or Trackio.",
    "status": "Show the state and progress of a run.",
    "why-stuck": "Say in one sentence whether a run makes progress, and if not, which process waits for which.",
    "explain": "Print what the documentation says about the error code of a message.",
    "chaos": "Inject faults into a live run, and check that no sample is lost.",
}


class LazyGroup(click.Group):
    """A command group that lists its commands without importing them, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return one command."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"streamrl.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, and suggest the nearest name for an unknown one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{near[0]}'?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list of --help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup)
@click.version_option(package_name="streamrl")
def cli() -> None:
    """RL post-training of language models, with generation and training on separate resources.

    \b
    Example:
      streamrl launch --cluster cluster_configs/local.yaml --run examples/demo.yaml
    """
    _check_working_folder()
    settle_caches()


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped by the user.

    A command that prints to a reader that has ended (`| head`) ends with 1: nothing says what it would have come to.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal does not have ends no run
            with contextlib.suppress(OSError):  # its file has become a pipe since; it replaces characters all the same
                stream.reconfigure(errors="replace")
    _name_errors_of_output()
    try:
        with error_lines():
            cli(standalone_mode=False, prog_name="streamrl")
    except click.ClickException as error:
        error = _without_hidden(error)
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)


@contextlib.contextmanager
def error_lines() -> Iterator[None]:
    """Print an error that the user can do something about in place of its traceback, and exit with its code.

    Studies use it, too.

    Raises:
        SystemExit: there was such an error, which is printed.
    """
    try:
        yield
    except (UserError, RunFailed) as error:
        from streamrl.rollouts.plain_text import shown  # what an error quotes may be anybody's

        lines = shown(error).splitlines() or [type(error).__name__]
        click.echo("error: " + "\n       ".join(lines), err=True)
        sys.exit(error.exit_code)
    except PermissionError as error:
        if error.filename is None:
            raise
        from streamrl.rollouts.plain_text import shown

        click.echo(f"error: {shown(error.filename)}: {error.strerror}", err=True)
        sys.exit(UserError.exit_code)


def _check_working_folder() -> None:
    """Check that relative paths lead somewhere, and that processes can be started.

    Raises:
        UserError: the working folder has been deleted, or this user may not see where it is.
    """
    try:
        os.getcwd()
    except OSError as error:
        why = "has been deleted" if isinstance(error, FileNotFoundError) else f"is unknown: {error.strerror or error}"
        raise UserError(f"the working folder of this shell {why}; change to another one (cd)") from error


def _open_closed() -> None:
    """Let what is written to a closed output (`>&-`) go nowhere; the next file would be opened in its place."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w", encoding="utf-8") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


class OutputError(RunFailed, OSError):
    """Standard output cannot be written: a full disk, a limit on the size of files."""


class _Output(io.FileIO):
    """Standard output, whose errors say so: those of other files that are written name no file either."""

    _failed = False

    def write(self, text: Any, /) -> int:
        """Write, or after an error nothing: Python would write the rest, and fail, again at its end."""
        if self._failed or not text:  # click writes nothing to find out whether it can
            return len(text)
        try:
            return super().write(text)
        except OSError as error:
            if error.errno == EPIPE:  # whoever reads has seen enough, which click ends a command for
                raise
            self._failed = True
            raise OutputError(f"cannot write the output: {error.strerror}") from error


def _name_errors_of_output() -> None:
    """Let errors of standard output be `OutputError`s; one that is no file of the system's stays as it is."""
    stream = sys.stdout
    if stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper):
        output = _Output(stream.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            output if stream.write_through else io.BufferedWriter(output),  # as Python itself does
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


def _without_hidden(error: click.ClickException) -> click.ClickException:
    """Return an error that suggests no hidden option; click does."""
    if not isinstance(error, click.NoSuchOption) or not error.possibilities or error.ctx is None:
        return error
    hidden = {name for one in error.ctx.command.params if getattr(one, "hidden", False) for name in one.opts}
    near = [name for name in error.possibilities if name not in hidden]
    return click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)


if __name__ == "__main__":
    main()
