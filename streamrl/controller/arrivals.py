"""Reading of arrived samples, many in one message, with the content that the ledger keeps of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from streamrl.generation.site.sample_batches import unpack_samples
from streamrl.protocol.message import body_of, parse
from streamrl.protocol.samples import UNREADABLE, sample_from_wire
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.ledger import pack_content
from streamrl.rollouts.types import Sample
from streamrl.transport.endpoint import Delivery
from streamrl.transport.wire import Arrays


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


def read_sample(body: dict[str, Any], arrays: Arrays) -> Sample:
    """Return a sample from its wire form.

    Raises:
        UNREADABLE: it is malformed.
    """
    parse(FinishedSample, body)  # of the right types
    return sample_from_wire(Sample, body, arrays)


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
                one = Arrival(delivery.peer, read_sample(body, arrays), pack_content(body, arrays))
            except UNREADABLE as error:
                sample_id = body.get("sample_id")
                known = sample_id if isinstance(sample_id, str) else None
                unreadable.append(Unreadable(delivery.peer, repr(error), known))
            else:
                found.setdefault((delivery.peer, one.sample.sample_id), one)
    return list(found.values()), unreadable
