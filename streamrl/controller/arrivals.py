"""Reading of arrived samples, many in one message, with the content that the ledger keeps of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamrl.generation.site.sample_batches import unpack_samples
from streamrl.protocol.message import body_of, parse
from streamrl.protocol.samples import sample_from_wire
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.ledger import pack_content
from streamrl.rollouts.types import Sample
from streamrl.transport.endpoint import Delivery
from streamrl.transport.wire import MalformedMessage

UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, MalformedMessage)


@dataclass(frozen=True)
class Arrival:
    """A sample that has arrived."""

    peer: str
    sample: Sample
    content: bytes
    """Its content for the ledger."""


@dataclass(frozen=True)
class Unreadable:
    """A batch, or one sample of it, that cannot be read."""

    peer: str
    error: str
    sample_id: str | None = None
    """The sample; None: the whole batch, or a sample without an id."""


def arrived(deliveries: Iterable[Delivery]) -> tuple[list[Arrival], list[Unreadable]]:
    """Return all samples of some messages, each once by sender, and what cannot be read."""
    found: dict[tuple[str, str], Arrival] = {}
    unreadable = []
    for delivery in deliveries:
        try:
            batch = unpack_samples(body_of(delivery.body), delivery.arrays)
        except UNREADABLE as error:
            unreadable.append(Unreadable(delivery.peer, repr(error)))
            continue
        for body, arrays in batch:
            try:
                parse(FinishedSample, body)  # of the right types
                sample = sample_from_wire(Sample, body, arrays)
                one = Arrival(delivery.peer, sample, pack_content(body, arrays))
            except UNREADABLE as error:
                sample_id = body.get("sample_id")
                known = sample_id if isinstance(sample_id, str) else None
                unreadable.append(Unreadable(delivery.peer, repr(error), known))
            else:
                found.setdefault((delivery.peer, sample.sample_id), one)
    return list(found.values()), unreadable
