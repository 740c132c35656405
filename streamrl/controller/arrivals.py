"""Reading of arrived samples, many in one message, with the content that the ledger keeps of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from streamrl.generation.site.sample_batches import unpack_samples
from streamrl.protocol.message import body_of, parse
from streamrl.protocol.samples import sample_from_wire
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.ledger import pack_content
from streamrl.rollouts.types import Sample
from streamrl.transport.endpoint import Delivery
from streamrl.transport.wire import MalformedMessage

Arrival = tuple[str, Sample, bytes]
"""(sender, sample, its content for the ledger)."""


def arrived(deliveries: Iterable[Delivery], unreadable: Callable[[str, Exception], None]) -> list[Arrival]:
    """Return all samples of some messages, each once.

    `unreadable` gets the sender of every message that cannot be read, and why; none of its samples is returned.
    """
    found: dict[str, Arrival] = {}
    for delivery in deliveries:
        try:
            read = []
            for body, arrays in unpack_samples(body_of(delivery.body), delivery.arrays):
                parse(FinishedSample, body)  # of the right types
                read.append((delivery.peer, sample_from_wire(Sample, body, arrays), pack_content(body, arrays)))
        except (ValueError, KeyError, TypeError, OverflowError, MalformedMessage) as error:
            unreadable(delivery.peer, error)
        else:
            for one in read:
                found.setdefault(one[1].sample_id, one)
    return list(found.values())
