"""Work that a site is given, and its division into messages that the wire takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from streamrl.byte_parts import parts_of
from streamrl.controller.group_source import SampleDraw
from streamrl.protocol.controller_site import Park, Resume
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


def parking(sample_ids: Iterable[str], most: int = MOST_GIVEN_BYTES) -> list[Park]:
    """Return the messages of the order to park samples, each with at most so many bytes of ids."""
    return [Park(sample_ids=part, more=more) for part, more in _named_in_parts(sample_ids, most)]


def resuming(sample_ids: Iterable[str], budget: int | None, number: int, most: int = MOST_GIVEN_BYTES) -> list[Resume]:
    """Return the messages of the order that begins a round, and continues parked samples in it.

    Args:
        sample_ids: parked samples; without any, there is one message all the same.
        budget: tokens after which a sample is parked again; None: it runs to its end.
        number: number of the round.
        most: bytes of ids in a message.
    """
    parts = _named_in_parts(sample_ids, most)
    return [Resume(sample_ids=part, budget=budget, round=number, more=more) for part, more in parts]


def _named_in_parts(sample_ids: Iterable[str], most: int) -> list[tuple[list[str], bool]]:
    """Divide sample ids; return each part, and whether another one follows."""
    *others, last = list(parts_of(sample_ids, lambda one: len(msgspec.msgpack.encode(one)), most)) or [[]]
    return [*((part, True) for part in others), (last, False)]
