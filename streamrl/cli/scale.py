"""`streamrl scale DIR`: more or fewer instances for a running job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from streamrl.protocol.operator import PoolScaled, ScalePool, ScalingRefused
    from streamrl.run_dir.status import RunStatus

ANSWER_S = 15.0
"""For the controller to answer."""
LOOK_EVERY_S = 0.5


@click.command(name="scale")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--pool", required=True, help="Generation pool of the cluster file.")
@click.option("--site", default="", help="Its site, if several have a pool of that name.")
@click.option("--replicas", type=int, required=True, metavar="N", help="Instances that it is to have.")
@click.option("--wait/--no-wait", default=True, help="Stay until all of them work, or have left (Ctrl-C only leaves).")
def command(directory: Path, pool: str, site: str, replicas: int, wait: bool) -> None:
    """Give a pool of the run in DIR another number of vLLM instances, while it goes on.

    A new instance gets requests once it holds the weights that are served. One that leaves gives back what it
    works on, with its tokens, and others go on with it.

    \b
    Examples:
      streamrl scale runs/demo --pool regular --replicas 3
      streamrl scale runs/demo --pool regular --site west --replicas 1 --no-wait
    """
    from streamrl.errors import UserError
    from streamrl.run_dir.status import read_status

    status = read_status(directory)
    if status.final:
        raise UserError(f"{directory} is {status.state}: only a running job can be scaled")
    from streamrl.protocol.operator import ScalePool, ScalingRefused

    answer = asyncio.run(_ask(directory, ScalePool(pool=pool, site=site, replicas=replicas)))
    if isinstance(answer, ScalingRefused):
        raise UserError(f"{directory}: {answer.error}")
    click.echo(f"pool {answer.pool}: {answer.before} -> {answer.after} instances")
    if wait:
        _follow(directory, answer)


async def _ask(directory: Path, order: ScalePool) -> PoolScaled | ScalingRefused:
    """Asks the controller.

    Raises:
        UserError: it does not answer.
    """
    import contextlib
    import os

    from streamrl.errors import RunFailed, UserError
    from streamrl.protocol.message import MessageReader, wire
    from streamrl.protocol.operator import FROM_CONTROLLER
    from streamrl.runtime.process_context import Addresses
    from streamrl.runtime.site_connections import OPERATOR
    from streamrl.transport.deadlines import WaitRegistry
    from streamrl.transport.endpoint import Link

    link = Link(f"{OPERATOR}-{os.getpid()}", "operator", WaitRegistry("streamrl scale"))
    link.reads = MessageReader({"hub": FROM_CONTROLLER})
    try:
        await link.connect(Addresses.load(directory).controller, ANSWER_S)
        await link.send(*wire(order))
        async with link.waits.deadline("the controller's answer", ANSWER_S):
            delivery = await link.receive()
        delivery.ack()
        answer: PoolScaled | ScalingRefused = delivery.body
        return answer
    except (OSError, RunFailed) as error:
        raise UserError(f"{directory}: its controller does not answer: {error}") from error
    finally:
        with contextlib.suppress(RunFailed):
            await link.close()


def _follow(directory: Path, answer: PoolScaled) -> None:
    """Tells what becomes of it, until the pool is as it was asked to be and all that are new have done something."""
    import time

    from streamrl.run_dir.status import read_status

    told: set[str] = set()
    started = time.time()
    pool = answer.pool
    try:
        while True:
            status = read_status(directory)
            for line in _news(status, started):
                if line not in told:
                    click.echo(f"  {line}")
                    told.add(line)
            wanted = status.scaling.wanted.get(pool)
            if wanted != answer.after and time.time() - started > ANSWER_S:
                click.echo(f"  somebody has changed it since: {wanted} are wanted now")
                return
            working = all(one.first_sample_at for one in status.scaling.coming if one.asked_at >= started - 1)
            settled = status.scaling.ready.get(pool) == status.scaling.there.get(pool) == answer.after
            if settled and working:
                click.echo(f"pool {pool} has {wanted} instances")
                return
            if status.final:
                click.echo(f"  the run is {status.state}")
                return
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        click.echo("Stopped watching; it goes on.")


def _news(status: RunStatus, since: float) -> list[str]:
    """Lines about instances that have been added since."""
    lines = []
    for one in status.scaling.coming:
        if one.asked_at < since - 1:
            continue
        lines.append(f"{one.instance}: starting")
        if one.ready_at is not None:
            lines.append(f"{one.instance}: ready after {one.ready_at - one.asked_at:.1f} s")
        if one.first_sample_at is not None:
            lines.append(f"{one.instance}: first sample after {one.first_sample_at - one.asked_at:.1f} s")
    return lines
