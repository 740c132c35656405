"""The base of all messages: their kinds, and the conversion between structs and bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from streamrl.transport.endpoint import Speaker
from streamrl.transport.wire import MalformedMessage, NotAllowed


class TypedMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base of all messages; the struct's tag is the message's kind."""


M = TypeVar("M", bound=TypedMessage)


def kind_of(message: TypedMessage | type[TypedMessage]) -> str:
    """Return the kind of a message."""
    return str(message.__struct_config__.tag)


def wire(message: TypedMessage) -> tuple[str, dict[str, Any]]:
    """Return a message as the transport sends it: (kind, body)."""
    body = msgspec.to_builtins(message)
    return body.pop("kind"), body


def body_of(message: TypedMessage) -> dict[str, Any]:
    """Return the fields of a message as plain values."""
    return wire(message)[1]


def parse(message_type: type[M], body: Mapping[str, Any]) -> M:
    """Convert a body to a message.

    Raises:
        MalformedMessage: a field is missing, unknown, or of another type; the error names it.
    """
    try:
        return msgspec.convert(dict(body), message_type)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"{kind_of(message_type)!r}: {error}") from error


@dataclass(frozen=True)
class Right:
    """The messages that a role may send (`protocol/speakers.py`)."""

    inside: tuple[type[TypedMessage], ...]
    """The sender is a process of the receiver's own site."""
    outside: tuple[type[TypedMessage], ...] = ()
    """The sender is a process of another site."""


class MessageReader:
    """The message types that a process accepts, by the sender's role; used as `reads` of a `Hub` or a `Link`."""

    def __init__(self, rights: Mapping[str, Right] | Iterable[type[TypedMessage]]) -> None:
        """
        Args:
            rights: what a peer of each role may send; for a `Link`, the messages of its hub.
        """
        if not isinstance(rights, Mapping):
            kinds = {kind_of(one): one for one in rights}
            self._types = {("hub", False): kinds, ("hub", True): kinds}
            return
        self._types = {
            (role, outside): {kind_of(one): one for one in (right.outside if outside else right.inside)}
            for role, right in rights.items()
            for outside in (False, True)
        }

    def __call__(self, speaker: Speaker, kind: str, body: Mapping[str, Any]) -> TypedMessage:
        """Convert a peer's body to a message.

        Raises:
            NotAllowed: the peer may not send this kind.
            MalformedMessage: the body does not fit it.
        """
        known = self._types.get((speaker.role, speaker.site is not None), {})
        if kind not in known:
            where = "" if speaker.site is None else f" of site {speaker.site}"
            expected = ", ".join(sorted(known)) or "none"
            raise NotAllowed(f"{speaker.role}{where} may not send {kind!r:.99}; expected one of {expected}")
        return parse(known[kind], body)
