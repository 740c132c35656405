"""Messages between a publisher of weights (the trainer, or a site that relays) and a site's relay.

    relay -> publisher   fetch, again, have
    publisher -> relay   manifest, chunk, no_version

Both acknowledge at once. A `fetch` that cannot be served is answered by `no_version`; the relay fetches again when what
comes does not fit.
"""

from __future__ import annotations

from typing import Any

from streamrl.protocol.message import TypedMessage


class Fetch(TypedMessage, frozen=True, tag="fetch"):
    """Send a version. Answered by `manifest`, then chunks; or by `no_version`."""

    request: int
    """Number of the request: what arrives of earlier ones is told apart by it."""
    number: int
    newest: bool = False
    """Whether a newer one may come instead."""
    encoding: str = "raw"
    host: str | None = None
    """The relay's host: there the publisher's file can be copied."""
    holds: int | None = None
    """Version that a delta may start from."""
    holds_hash: str | None = None


class FetchAgain(TypedMessage, frozen=True, tag="again"):
    """Send payloads again that came corrupt. Answered by chunks."""

    request: int
    of: int
    """The request whose payloads they are."""
    tensors: list[tuple[int, list[int]]]
    """(part, its payloads)."""


class Have(TypedMessage, frozen=True, tag="have"):
    """A version is verified and stored."""

    number: int


class ManifestOf(TypedMessage, frozen=True, tag="manifest"):
    """What is about to come."""

    request: int
    manifest: dict[str, Any]
    """`weights.version.Manifest.to_dict`."""
    parts: list[dict[str, Any]]
    """`weights.version.Part.to_dict` of each stream, in order."""
    file: str | None = None
    """Path on the relay's host from which everything can be copied; then no chunks come."""


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
