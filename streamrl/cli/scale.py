"""`streamrl scale DIR`: adds instances to a running job, or removes some."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import RunFailed, UserError, as_typed

if TYPE_CHECKING:
    from streamrl.protocol.operator import PoolScaled
    from streamrl.run_dir.status import RunStatus

LOOK_EVERY_S = 0.5


@click.command(name="scale")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--pool", required=True, help="Generation pool of the cluster file.")
@click.option("--site", default="", help="Site of the pool, if several sites have one of that name.")
@click.option("--replicas", type=int, required=True, metavar="N", help="New number of instances.")
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until new instances work and removed ones have left (Ctrl-C stops waiting only).",
)
def command(directory: Path, pool: str, site: str, replicas: int, wait: bool) -> None:
    """Change the number of vLLM instances in a pool of the running job in DIR.

    A new instance gets requests once it has loaded the current weights. A leaving instance returns its requests with
    their tokens, and other instances continue them.

    A pool can grow to the max_replicas of the cluster file, by default the number that it begins with.

    \b
    Examples:
      streamrl scale runs/mine --pool regular --replicas 3
      streamrl scale runs/mine-train --pool regular --site generate --replicas 1 --no-wait
    """
    from streamrl.run_dir.status import read_status

    status = read_status(directory)
    if status.final:
        raise UserError(f"{directory} is {status.state}: only a running job can be scaled")
    from streamrl.protocol.operator import PoolScaled, ScalePool, ScalingRefused
    from streamrl.runtime.operator_link import ask_controller

    answer = asyncio.run(ask_controller(directory, ScalePool(pool=pool, site=site, replicas=replicas)))
    if isinstance(answer, ScalingRefused):
        raise UserError(f"{directory}: {answer.error}")
    assert isinstance(answer, PoolScaled)
    click.echo(f"pool {answer.pool}: {answer.before} -> {answer.after} instances")
    if wait:
        _follow(directory, answer)


def _follow(directory: Path, answer: PoolScaled) -> None:
    """Report progress until the pool has its new size and every new instance has produced a sample.

    Raises:
        RunFailed: the launcher is gone, or what the pool lacks has died for good: nothing will change any more.
    """
    from streamrl.report.gone_launcher import launcher_gone
    from streamrl.run_dir.status import read_status
    from streamrl.runtime.operator_link import ANSWER_S

    told: set[str] = set()
    started, asked = time.time(), time.monotonic()  # instances are dated by the clock, which may be set meanwhile
    pool, status = answer.pool, read_status(directory)
    first, replaced = status.updated_at, set(status.scaling.dead.get(pool, []))  # the dead that this command replaces
    try:
        while True:
            status = read_status(directory)
            for line in _news(status, started):
                if line not in told:
                    click.echo(f"  {line}")
                    told.add(line)
            wanted = status.scaling.wanted.get(pool)
            # the first status may be from before the answer, of a controller that has died since
            if wanted != answer.after and status.updated_at != first and time.monotonic() - asked > ANSWER_S:
                click.echo(f"  another command or the run itself has changed the target since: it is {wanted} now")
                return
            dead = status.scaling.dead.get(pool, [])
            replaced &= set(dead)
            new = [one for one in status.scaling.coming if one.requested_at >= started - 1 and one.instance not in dead]
            ready, living = status.scaling.ready.get(pool), status.scaling.there.get(pool, 0) - len(dead)
            if ready == living == answer.after and all(one.first_sample_at for one in new):
                click.echo(f"pool {pool} has {wanted} instances")
                return
            if dead and not replaced and ready == living < answer.after == wanted:
                raise RunFailed(
                    f"pool {pool} has {ready} of {wanted} instances: {', '.join(dead)} died and got no further restart "
                    f"(recovery.restarts); streamrl status {as_typed(directory)} says why, and the same command again "
                    "replaces what has died"
                )
            if status.final:
                click.echo(f"  the run is {status.state}")
                return
            if over := launcher_gone(directory, status):
                raise RunFailed(over)
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        click.echo("Stopped watching; the change continues.")


def _news(status: RunStatus, since: float) -> list[str]:
    """Return lines about the instances added since a time."""
    lines = []
    for one in status.scaling.coming:
        if one.requested_at < since - 1:
            continue
        lines.append(f"{one.instance}: starting")
        if one.ready_at is not None:
            lines.append(f"{one.instance}: ready after {one.ready_at - one.requested_at:.1f} s")
        if one.first_sample_at is not None:
            lines.append(f"{one.instance}: first sample after {one.first_sample_at - one.requested_at:.1f} s")
    return lines
