"""Reading of arrived samples, many in one message, with the content that the ledger keeps of each."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.errors import RunFailed
from streamrl.generation.site.sample_batches import unpack_samples
from streamrl.protocol.message import body_of
from streamrl.protocol.samples import sample_from_wire
from streamrl.rollouts.ledger import pack_content
from streamrl.rollouts.types import Sample
from streamrl.transport.endpoint import Delivery


def arrived(deliveries: Iterable[Delivery]) -> list[tuple[Sample, bytes]]:
    """Return all samples of some messages, each with its content for the ledger.

    Raises:
        RunFailed: a message, not acknowledged yet, cannot be read; the error names its sender.
    """
    found = []
    for delivery in deliveries:
        try:
            for body, arrays in unpack_samples(body_of(delivery.body), delivery.arrays):
                found.append((sample_from_wire(Sample, body, arrays), pack_content(body, arrays)))
        except (ValueError, KeyError, TypeError) as error:
            raise RunFailed(f"{delivery.peer} sent samples that cannot be read: {error!r}") from error
    return found
