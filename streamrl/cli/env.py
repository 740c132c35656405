"""`streamrl env`: environments of agents, each in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamrl.errors import RunFailed, UserError, as_typed
from streamrl.finite_float import FiniteFloat

if TYPE_CHECKING:
    from streamrl.environments.environment_trial import EnvironmentTrial
    from streamrl.environments.installed import InstalledEnvironment

FOLDER = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of environments (default: $STREAMRL_ENVIRONMENTS, or in the user's data folder).",
)


@click.group(name="env")
def command() -> None:
    """Install, list, test and remove environments that agent tasks play in.

    \b
    Example:
      streamrl env add frozen_lake "gymnasium[toy-text]" --make gymnasium:FrozenLake-v1
    """


@command.command()
@click.argument("name")
@click.argument("packages", nargs=-1)
@click.option(
    "--make", default="", help="What it makes: gymnasium:ID, verifiers:ID, mcp:PROGRAM, mcp:URL, or module:function."
)
@click.option("--config", default="{}", metavar="JSON", help="Given to what makes it; a run file can replace keys.")
@click.option(
    "--path", "paths", multiple=True, type=click.Path(path_type=Path), help="Folder of modules that are no packages."
)
@click.option("--python", default=sys.executable, help="Interpreter for the venv.", show_default="this one")
@click.option("--lock", type=click.Path(path_type=Path), help="Install what a requirements.lock names.")
@FOLDER
def add(
    name: str,
    packages: tuple[str, ...],
    make: str,
    config: str,
    paths: tuple[Path, ...],
    python: str,
    lock: Path | None,
    directory: Path | None,
) -> None:
    """Install an environment into a virtual environment of its own, and record its packages in a lock.

    If that fails, nothing of it is left. Without --make it holds programs only.

    \b
    Examples:
      streamrl env add frozen_lake "gymnasium[toy-text]" --make gymnasium:FrozenLake-v1
      streamrl env add corridor --make corridor:make --path examples/environments
      streamrl env add clock mcp-server-time --make mcp:mcp-server-time
    """
    from streamrl.environments.installed import LOCK, add_environment, folder_of

    try:
        given = json.loads(config)
    except ValueError as error:
        raise UserError(f"--config is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UserError(f"--config must be a JSON object, got {type(given).__name__}")
    folder = folder_of(name, directory)
    click.echo(f"{name}: making a venv" + (f" with {', '.join(packages)}" if packages else ""))
    found = add_environment(folder, make, packages, given, paths, python, lock)
    count = len((found.folder / LOCK).read_text(encoding="utf-8").splitlines())
    click.echo(f"{name}: installed in {found.folder}, {count} packages")
    if make:
        click.echo(f"try it: streamrl env test {_as_given(found, directory)}")


@command.command(name="list")
@FOLDER
def show(directory: Path | None) -> None:
    """List the installed environments.

    \b
    Example:
      streamrl env list
    """
    from rich.table import Table

    from streamrl.environments.installed import LOCK, environments_folder, list_environments
    from streamrl.report.terminal import TextConsole

    folder = directory or environments_folder()
    if not (found := list_environments(folder)):
        click.echo(f"no environments in {folder}")
        return
    table = Table("name", "makes", "config", "packages", "state", title=str(folder), title_justify="left")
    for one in found:
        count = len((one.folder / LOCK).read_text(encoding="utf-8").splitlines()) if (one.folder / LOCK).exists() else 0
        state = "ok" if one.python.exists() else "its Python is gone"
        table.add_row(one.name, one.make or "programs", json.dumps(one.config), str(count), state)
    TextConsole(highlight=False).print(table)


@command.command()
@click.argument("name")
@FOLDER
def remove(name: str, directory: Path | None) -> None:
    """Delete an environment with its venv.

    \b
    Example:
      streamrl env remove frozen_lake
    """
    from streamrl.environments.installed import folder_of, remove_environment

    remove_environment(folder_of(name, directory))
    click.echo(f"{name}: removed")


@command.command()
@click.argument("name")
@click.option("--episodes", default=64, show_default=True, type=click.IntRange(1), help="Episodes to play.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(1), help="Most steps of an episode.")
@click.option(
    "--seconds", default=60.0, show_default=True, type=FiniteFloat(0, min_open=True), help="Time for all of them."
)
@click.option("--processes", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--memory-gb",
    default=2.0,
    show_default=True,
    type=FiniteFloat(0, min_open=True),
    help="GiB that a process may use.",
)
@click.option(
    "--step-s",
    default=30.0,
    show_default=True,
    type=FiniteFloat(0, min_open=True),
    help="Seconds that a reset or step may take.",
)
@click.option("--config", default="{}", metavar="JSON", help="Keys that replace those given when it was added.")
@click.option("--answer", "answers", multiple=True, help="An answer of the player, in turn (default: random ones).")
@FOLDER
def test(
    name: str,
    episodes: int,
    steps: int,
    seconds: float,
    processes: int,
    memory_gb: float,
    step_s: float,
    config: str,
    answers: tuple[str, ...],
    directory: Path | None,
) -> None:
    """Play an environment without a model, and report what it costs and what it does wrong.

    \b
    Examples:
      streamrl env test frozen_lake
      streamrl env test frozen_lake --answer right --answer down --episodes 4
    """
    from streamrl.environments.environment_trial import summary
    from streamrl.environments.installed import find_environment, folder_of

    found = find_environment(str(folder_of(name, directory)))
    if not found.make:
        programs = ", ".join(sorted(one.name for one in found.python.parent.iterdir()))
        click.echo(f"{found.name} holds programs only: {programs}")
        return
    use = _use(found, config, processes, memory_gb)
    trial = asyncio.run(_try(found, use, step_s, episodes=episodes, most_steps=steps, answers=answers, seconds=seconds))
    if trial is None:
        click.echo(f"{found.name} starts; it calls the model itself, so only a run can play it")
        return
    for what, how_much in summary(trial):
        click.echo(f"{what:20} {how_much}")
    if problems := trial.problems():
        raise RunFailed("\n".join(problems))
    click.echo("no problem found")


def _use(found: InstalledEnvironment, config: str, processes: int, memory_gb: float) -> Any:
    from pydantic import ValidationError

    from streamrl.config.tasks import EnvironmentUse

    try:
        return EnvironmentUse(name=found.name, config=json.loads(config), processes=processes, memory_gb=memory_gb)
    except (ValueError, ValidationError) as error:
        raise UserError(f"environment {found.name!r}: {error}") from error


async def _try(found: InstalledEnvironment, use: Any, step_s: float, **trial: Any) -> EnvironmentTrial | None:
    from streamrl.environments.environment_pool import EnvironmentPool
    from streamrl.environments.environment_trial import try_environment
    from streamrl.runtime.output_pipe import OutputLog

    pool = EnvironmentPool(use, found, OutputLog(None), step_s, start_s=max(60.0, step_s))
    await pool.start()
    try:
        if pool.plays:
            return None
        return await try_environment(pool, **trial)
    finally:
        await pool.close()


def _as_given(found: InstalledEnvironment, directory: Path | None) -> str:
    return as_typed(found.name, *(("--dir", directory) if directory else ()))
