"""Reading of arrived samples, many in one message, with the content that the ledger keeps of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

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
class RefusedArrival:
    """A batch that cannot be read, or a sample of it that cannot be read or is not to come."""

    peer: str
    why: str
    sample_id: str | None = None
    """The sample; None: the whole batch, or a sample without an id."""


WrongWith = Callable[[str, str, bool], str | None]
"""Function (service, sample, whether it is an episode) -> why the sample is not to come, or None."""


def read_sample(body: dict[str, Any], arrays: Arrays) -> Sample:
    """Return a sample from its wire form.

    Raises:
        UNREADABLE: it is malformed.
    """
    return sample_from_wire(Sample, msgspec.structs.asdict(parse(FinishedSample, body)), arrays)


def read_arrivals(deliveries: Iterable[Delivery], wrong_with: WrongWith) -> tuple[list[Arrival], list[RefusedArrival]]:
    """Return all samples of some messages, each once by sender, and what is refused.

    Args:
        deliveries: the messages.
        wrong_with: says why a sample is not to come; such a sample is not read, as a few bytes of a batch can be
            millions of values.
    """
    found: dict[tuple[str, str], Arrival] = {}
    refused = []
    for delivery in deliveries:
        try:
            batch = unpack_samples(body_of(delivery.body), delivery.arrays)
        except UNREADABLE as error:
            refused.append(RefusedArrival(delivery.peer, repr(error)))
            continue
        for body, arrays in batch:
            sample_id = body.get("sample_id")
            known = sample_id if isinstance(sample_id, str) else None
            if known is not None:
                why = wrong_with(delivery.peer, known, body.get("trajectory") is not None)
                if why is not None:
                    refused.append(RefusedArrival(delivery.peer, why, known))
                    continue
            try:
                one = Arrival(delivery.peer, read_sample(body, arrays), pack_content(body, arrays))
            except UNREADABLE as error:
                refused.append(RefusedArrival(delivery.peer, repr(error), known))
            else:
                found.setdefault((delivery.peer, one.sample.sample_id), one)
    return list(found.values()), refused
