"""Values that cross between a program in a sandbox and its tests, as JSON.

Its text is a part of the driver's (`sandbox_driver.py`), so it needs the standard library alone, and little of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes as long to import as all that a driver needs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Other = Callable[[Any, type | None], list[Any] | None]
    """Describes a value whose type is not plain, but may extend the one that is given; None: as one of that."""

PLAIN: dict[str, Any] = {"n": type(None), "b": bool, "i": int, "f": float, "c": complex, "s": str, "y": bytes}
MANY: dict[str, Any] = {"l": list, "t": tuple, "e": set, "z": frozenset}
TAGS: dict[type, str] = {kind: tag for tag, kind in (PLAIN | MANY | {"d": dict}).items()}
CHANGEABLE = (list, set, dict)
"""Plain types whose values can be changed."""


def encode(value: Any, other: Other) -> list[Any]:
    """Return a value as JSON; `other` describes what is not exactly of a plain type."""
    kind = plain_type(value)
    if kind is not type(value) and (told := other(value, kind)) is not None:
        return told
    return encode_plain(value, kind, other)


def plain_type(value: Any) -> type | None:
    """Return the plain type that a value is of; None: of none."""
    kind = type(value)
    return kind if kind in TAGS else next((one for one in TAGS if issubclass(kind, one)), None)


def encode_plain(value: Any, kind: Any, other: Other) -> list[Any]:
    """Return what a value is as one of a plain type, as JSON."""
    tag = TAGS[kind]
    if tag == "i":
        return [tag, hex(value)]  # JSON's parser refuses long decimals
    if tag in "fc":
        return [tag, repr(kind(value))]  # infinity and NaN too
    if tag in PLAIN:
        return [tag, value.hex() if tag == "y" else value]
    if tag in MANY:
        return [tag, [encode(one, other) for one in kind.__iter__(value)]]
    return [tag, [[encode(key, other), encode(one, other)] for key, one in dict.items(value)]]


def decode(told: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value that `encode` described; `other` returns that of a description."""
    tag, value = told
    if tag == "i":
        return int(value, 16)
    if tag == "y":
        return bytes.fromhex(value)
    if tag in PLAIN:
        return value if tag in "nbs" else PLAIN[tag](value)
    if tag in MANY:
        return MANY[tag](decode(one, other) for one in value)
    if tag == "d":
        return {decode(key, other): decode(one, other) for key, one in value}
    return other(tag, value)


def put_back(before: Any, now: Any) -> None:
    """Let an argument have the contents that the program has given it."""
    if before is now or type(before) is not type(now):
        return
    if isinstance(before, list):
        before[:] = now
    elif isinstance(before, dict | set):
        before.clear()
        before.update(now)
