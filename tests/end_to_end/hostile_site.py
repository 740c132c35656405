"""A site with a valid key that takes work, sends what cannot be read, and then floods the controller with nonsense.

    python -m tests.end_to_end.hostile_site FOLDER SITE COUNT BEGIN DONE

FOLDER is the run folder of the trainer's site, whose controller it connects to as the service of SITE. The flood begins
when the file BEGIN is there; the file DONE is made when the controller has read the COUNT messages.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from streamrl.protocol.controller_site import SampleBatch, SiteAsleep, WeightsReady
from streamrl.protocol.message import wire
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Link
from streamrl.transport.wire import Message, encode
from tests.security.hostile_world import fleet_of, nonsense
from tests.waiting import until

TURN = 100
"""Messages sent before anything is read again."""
STEP_S = 1e-5
"""Step time that the site claims: less than any other's, so that it is given work on every machine."""


class UnmovedLink(Link):
    """Goes on after a refusal."""

    def _met(self, message: Message) -> None:
        if message.kind != "refused":
            super()._met(message)


async def attack(folder: Path, site: str, count: int, begin: Path, done: Path) -> None:
    """Join the run, wait for work, and flood."""
    context = replace(RoleContext.load(f"service-{site}", site, folder, False), site=site)
    about = {"site": site, "agreement": context.agreement, "fleet": fleet_of(site, step_s=STEP_S)}
    link = UnmovedLink(context.name, "service", WaitRegistry(context.name), about)
    await link.connect(context.addresses.controller_outside, 300, context.client_security())
    while (delivery := await link.receive()).kind != "generate":
        delivery.ack()
        if delivery.kind == "weights":
            number = delivery.body["number"]
            ready = WeightsReady(number=number, applied={}, source=None, transfer_s=0, bytes=0, started=0, fetched=0)
            await link.send(*wire(ready))
    unreadable = SampleBatch(packing="zstd", samples=2, tokens=8, bodies=9)
    await link.send(*wire(unreadable), {"payload": np.frombuffer(b"no zstd", np.uint8)})
    await link.flush(300)
    await until(begin.exists, 250)
    first = link._outbox.next_number
    for sent, message in enumerate(nonsense(link.session, first, count, site)):
        link._put(encode(message))  # its own credits are not asked
        if sent % TURN == 0:
            await asyncio.sleep(0)
    link._outbox.next_number = first + count
    await link.send(*wire(SiteAsleep()))
    await link.flush(1000)
    done.touch()
    while (delivery := await link.receive()).kind != "finish":
        delivery.ack()
    delivery.ack()
    await link.close()


if __name__ == "__main__":
    asyncio.run(attack(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5])))
