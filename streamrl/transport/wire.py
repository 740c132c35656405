"""The wire format: one msgpack envelope frame, then one raw frame per array. No pickle, ever.

frame 0   msgpack map {v: protocol version, k: kind, s: sender's session, n: sequence number, b: body,
                       a: [[name, dtype, shape], ...]}
frame i   bytes of the i-th array, C order, little endian
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import msgpack
import numpy as np

from streamrl.transport.refusals import RefusalCause
from streamrl.transport.unpacking import unpack

PROTOCOL_VERSION = 2
KEYS = "vksnba"
"""Keys of the envelope, in its order."""
MAX_ENVELOPE_BYTES = 16 * 1024 * 1024
MAX_ARRAYS = 4096
MAX_FRAME_BYTES = 1 << 30
"""Largest frame; over a network libzmq ends the connection of a larger one. Nothing limits the frames of a message."""
MAX_DIMENSIONS = 8
MAX_STATE_BYTES = 4 * 1024 * 1024
"""Largest heartbeat or hello, whose values are checked one by one, and largest envelope on a connection of another site
that has not said hello, in bytes."""
MAX_NESTING = 16
"""Deepest nesting of the values in a heartbeat or a hello."""
MOST_PLAIN = 500_000
"""Most values in a heartbeat, a hello or the conversation of an episode, at any depth."""
MAX_NAME = 200
"""Most characters of a peer's name or role."""
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int32", "int64", "float32", "float64", "uint8", "bool")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the types; numpy computes `dtype.name` anew each time, which took most of the time of `encode`."""

Arrays = Mapping[str, np.ndarray]


class MalformedMessage(Exception):
    """Raised for frames that are not a message of this protocol; count and drop them, never end a process."""

    cause: RefusalCause = "malformed"


class OtherVersion(MalformedMessage):
    """Raised for a message of another version of this protocol.

    Args:
        version: the message's version.
    """

    cause: RefusalCause = "protocol version"

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version} there, {PROTOCOL_VERSION} here")


class NotAllowed(MalformedMessage):
    """Raised for a message of a kind that its sender may not send."""

    cause: RefusalCause = "not allowed"


@dataclass(frozen=True)
class Message:
    """One decoded message."""

    kind: str
    session: str
    """Random id of the sending process; sequence numbers start at 1 with each session."""
    number: int
    """Sequence number of a message that must be acknowledged; 0 for any other."""
    body: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def encode(message: Message) -> list[bytes | memoryview]:
    """Return the frames of a message; arrays are sent as views of their memory.

    Raises:
        ValueError: a message that `decode` would refuse: an array of a type that the protocol does not carry, or more
            bytes or arrays than it takes. What is large goes into arrays, not into the body.
    """
    described = []
    frames: list[bytes | memoryview] = []
    for name, array in message.arrays.items():
        if (dtype_name := NAMES.get(array.dtype)) is None:
            raise ValueError(f"array {name!r} has type {array.dtype}, the wire carries {sorted(DTYPES)}")
        if array.nbytes > MAX_FRAME_BYTES:
            raise ValueError(f"array {name!r} of {message.kind!r} has {array.nbytes} bytes, at most {MAX_FRAME_BYTES}")
        described.append([name, dtype_name, list(array.shape)])
        frames.append(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    values = PROTOCOL_VERSION, message.kind, message.session, message.number, message.body, described
    envelope: bytes = msgpack.packb(dict(zip(KEYS, values, strict=True)))
    try:
        _read_envelope(envelope, len(frames))
    except MalformedMessage as error:
        raise ValueError(f"{message.kind!r:.99} cannot be sent: {error}") from error
    return [envelope, *frames]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """Check and decode frames; arrays are read-only views of their frames.

    Raises:
        OtherVersion: they are of another version of this protocol.
        MalformedMessage: they are nothing that `encode` would make.
    """
    if not frames:
        raise MalformedMessage("no frames")
    kind, session, number, body, described = _read_envelope(frames[0], len(frames) - 1)
    arrays: dict[str, np.ndarray] = {}
    for entry, frame in zip(described, frames[1:], strict=True):
        name, array = _decode_array(entry, frame)
        arrays[name] = array
    return Message(kind, session, number, body, arrays)


def _read_envelope(frame: bytes | memoryview, arrays: int) -> tuple[str, str, int, dict[str, Any], list[Any]]:
    """Check the first frame of a message with so many arrays; return kind, session, number, body and arrays' entries.

    Raises:
        OtherVersion: it is of another version of this protocol.
        MalformedMessage: it is no envelope of this protocol.
    """
    if len(frame) > MAX_ENVELOPE_BYTES:
        raise MalformedMessage(f"envelope of {len(frame)} bytes, at most {MAX_ENVELOPE_BYTES}")
    try:
        envelope = unpack(frame)
    except ValueError as error:
        raise MalformedMessage(f"envelope is {error}") from error
    if isinstance(envelope, dict) and is_natural(version := envelope.get("v")) and version != PROTOCOL_VERSION:
        raise OtherVersion(version)  # whose other keys may be others
    if not isinstance(envelope, dict) or envelope.keys() != set(KEYS):
        raise MalformedMessage("envelope is not a map of v, k, s, n, b, a")
    version, kind, session, number, body, described = (envelope[key] for key in KEYS)
    if version != PROTOCOL_VERSION:
        raise MalformedMessage(f"protocol version {reprlib.repr(version)}, this is {PROTOCOL_VERSION}")
    if not isinstance(kind, str) or not isinstance(session, str) or not isinstance(body, dict):
        raise MalformedMessage("kind, session or body of a wrong type")
    if not is_natural(number):
        raise MalformedMessage("sequence number is not a natural number")
    if not isinstance(described, list) or len(described) > MAX_ARRAYS or len(described) != arrays:
        raise MalformedMessage("number of array frames differs from the envelope's")
    names = [_check_description(entry) for entry in described]
    if len(set(names)) != len(names):
        raise MalformedMessage("an array comes twice")
    return kind, session, number, body, described


def _check_description(entry: object) -> str:
    """Check the description of an array, and return its name."""
    if not isinstance(entry, list) or len(entry) != 3:
        raise MalformedMessage("array description is not [name, dtype, shape]")
    name, dtype_name, shape = entry
    if not isinstance(name, str) or not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise MalformedMessage("array of an unknown name or type")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_natural, shape)):
        raise MalformedMessage(f"array {name!r}: shape is not a short list of natural numbers")
    return name


def _decode_array(entry: list[Any], frame: bytes | memoryview) -> tuple[str, np.ndarray]:
    name, dtype_name, shape = entry
    dtype = DTYPES[dtype_name]
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise MalformedMessage(f"array {name!r}: {len(frame)} bytes do not fill {dtype_name}{shape}")
    try:
        return name, np.frombuffer(frame, dtype=dtype).reshape(shape)
    except ValueError as error:  # e.g. [0, 2**62]: no bytes, but larger than an index can count
        raise MalformedMessage(f"array {name!r}: no array has the shape {shape}") from error


def is_name(value: object) -> TypeGuard[str]:
    """Return whether a value can be a peer's name or role."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def is_natural(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer, not below zero."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_plain(value: object) -> bool:
    """Return whether JSON can represent a value, as status files need; msgpack can represent more.

    One that is nested deeper than `MAX_NESTING`, or has more than `MOST_PLAIN` values in all, is not plain either.
    """
    level, left = [value], MOST_PLAIN
    for depth in range(MAX_NESTING + 1):
        inner: list[object] = []
        for one in level:
            if one is None or isinstance(one, str | int | float):
                continue
            if depth == MAX_NESTING or not isinstance(one, dict | list):
                return False
            left -= len(one)
            if left < 0 or (isinstance(one, dict) and not all(isinstance(key, str) for key in one)):
                return False
            inner.extend(one.values() if isinstance(one, dict) else one)
        level = inner
    return True
