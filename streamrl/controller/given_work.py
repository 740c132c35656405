"""Work that a site is given, and its division into messages that the wire takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from streamrl.byte_parts import parts_of
from streamrl.controller.group_source import SampleDraw
from streamrl.protocol.samples import issued_group
from streamrl.rollouts.types import Group
from streamrl.runtime.site_connections import MOST_GIVEN_BYTES


class GivenWork(NamedTuple):
    """Samples of a group that one site generates."""

    key: str
    """Name of the work in `SiteDispatch`: the group's id, or that of a sample that was given again."""
    group: Group
    draws: Sequence[SampleDraw]
    evaluation: bool = False
    """Whether it is part of an evaluation, whose samples run to their end whatever the round's budget."""


def wire_bytes(work: GivenWork) -> int:
    """Return the bytes that a group has in a message, prompt included."""
    described = msgspec.msgpack.encode(issued_group(work.group, work.draws))
    return len(described) + work.group.prompt_tokens.nbytes


def sendable(work: Sequence[GivenWork], most: int = MOST_GIVEN_BYTES) -> Iterator[list[GivenWork]]:
    """Divide work into parts that fit into a message each.

    Args:
        work: what is given together.
        most: bytes of a part, prompts included; a single group may have more.
    """
    return parts_of(work, wire_bytes, most)
