"""Messages between a publisher of weights (the trainer, or a site that relays) and a site's relay.

    relay -> publisher   fetch, again, have
    publisher -> relay   manifest, chunk, no_version

Both acknowledge at once. A `fetch` that cannot be served is answered by `no_version`. The relay fetches again what
arrives damaged.
"""

from __future__ import annotations

from streamrl.protocol.message import TypedMessage


class Fetch(TypedMessage, frozen=True, tag="fetch"):
    """Send a version. Answered by `manifest`, then chunks; or by `no_version`."""

    request: int
    """Number of the request, by which answers to earlier ones are recognized."""
    number: int
    newest: bool = False
    """Whether a newer version may come instead."""
    encoding: str = "raw"
    host: str | None = None
    """Host of the relay; if it is the publisher's, the relay can copy its file."""
    holds: int | None = None
    """Version in the relay's store that a delta may start from."""
    holds_hash: str | None = None


class FetchAgain(TypedMessage, frozen=True, tag="again"):
    """Send payloads again that arrived corrupt. Answered by chunks."""

    request: int
    of: int
    """Number of the request whose payloads they are."""
    tensors: list[tuple[int, list[int]]]
    """(part, indexes of its payloads) of each affected part."""


class Have(TypedMessage, frozen=True, tag="have"):
    """A version is verified and stored."""

    number: int


class ManifestOf(TypedMessage, frozen=True, tag="manifest"):
    """The description of a version whose chunks follow. Arrays: description uint8 [bytes].

    The array has manifest and parts (`weights/description.py`).
    """

    request: int
    file: str | None = None
    """Path on the relay's host from which all bytes can be copied; then no chunks follow."""


class Chunk(TypedMessage, frozen=True, tag="chunk"):
    """A piece of a stream. Arrays: data uint8 [bytes]."""

    request: int
    part: int
    offset: int


class NoVersion(TypedMessage, frozen=True, tag="no_version"):
    """A request cannot be served."""

    request: int | None
    available: list[int]
    reason: str


FROM_RELAY = (Fetch, FetchAgain, Have)
FROM_PUBLISHER = (ManifestOf, Chunk, NoVersion)
