"""The base of all messages: their kinds, and the conversion between structs and bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from streamrl.transport.wire import MalformedMessage


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


class MessageReader:
    """The message types that a process accepts, by the sender's role; used as `reads` of a `Hub` or a `Link`."""

    def __init__(self, senders: Mapping[str, Iterable[type[TypedMessage]]]) -> None:
        """
        Args:
            senders: message types that a peer of each role may send; for a `Link` its hub has the role "hub".
        """
        self._types = {role: {kind_of(one): one for one in types} for role, types in senders.items()}

    def __call__(self, role: str, kind: str, body: Mapping[str, Any]) -> TypedMessage:
        """Convert a peer's body to a message.

        Raises:
            MalformedMessage: the peer may not send this kind, or the body does not fit it.
        """
        known = self._types.get(role, {})
        if kind not in known:
            raise MalformedMessage(
                f"{role} may not send {kind!r}; expected one of {', '.join(sorted(known)) or 'none'}"
            )
        return parse(known[kind], body)
