"""Batches of finished samples: when one is sent, how it is packed, whether compression pays, when to throttle.

Everything here is pure: times are arguments, nothing is sent. `uplink.py` adds the clock and the link.

A batch is one message `samples`, packed in one of two ways (`packing`):

    raw    lengths, completion_tokens, logprobs, token_versions   samples one after the other
           bodies                                                 msgpack list of the samples' bodies, as bytes
    zstd   payload: the same columns one after the other, bodies last, in one zstd frame. Before that, token ids and
           versions that fit into 16 bits are narrowed to them, and log-probabilities are laid out as byte planes

With router replay there are two columns more before the bodies: expert_rows, and experts [rows, row bytes].

Both are exact to the bit. Narrowing and byte planes make the payload 6 % smaller than zstd alone. Real samples of
SmolLM2-135M shrink to 0.38 of their raw bytes; nearly half of what remains are mantissas of log-probabilities, which
do not compress. Deltas of token ids made it larger; run-length coded versions and bodies by columns no smaller.
"""

from __future__ import annotations

import math
import reprlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import msgpack
import numpy as np
import pyarrow as pa

from streamrl.protocol.samples import EXPERTS, TOKEN_ARRAYS, token_count
from streamrl.transport.unpacking import unpack
from streamrl.transport.wire import MAX_ENVELOPE_BYTES, Arrays

T = TypeVar("T")
Item = tuple[dict[str, Any], Arrays]
"""A sample as `sample_to_wire` returns it: (body, arrays)."""

KIND = "samples"
"""The kind of a batch's message."""
_NARROW = np.dtype("<u2")
_LENGTH = np.dtype("<i4")
_COLUMNS: dict[str, np.dtype[Any]] = {"lengths": _LENGTH, **TOKEN_ARRAYS, "bodies": np.dtype(np.uint8)}
_EXPERT_ROWS = "expert_rows"
"""Number of each sample's rows, int32; `_NO_EXPERTS` of one without."""
_NO_EXPERTS = -1
LEVEL = 1
"""Level of zstd: 3 makes the payload 4 % smaller and takes 1.5 times as long, which evens out at 100 Mbit/s."""
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""Limit on the unpacked bytes of a compressed batch; larger batches are sent raw.

A receiver allocates these bytes on the sender's word."""
BATCH_SAMPLES = 256
"""Most samples of a batch. An empty one is a single byte when compressed, and takes a receiver 60 microseconds."""
MAX_BODIES_BYTES = MAX_ENVELOPE_BYTES
"""Most bytes of a batch's encoded bodies: each has come in an envelope, and several are far smaller."""
FIRST_MEASURED, MEASURED_EVERY = 4, 64
"""Batches that are packed both ways for comparison: the first `FIRST_MEASURED`, then one in `MEASURED_EVERY`."""
_NEWEST_WEIGHT = 0.25
"""Weight of the newest batch in the exponential averages."""


class SampleBatcher(Generic[T]):
    """Samples collected until the oldest has waited `max_wait_s`, or a size limit is reached.

    With `max_wait_s` 0 a sample is due at once; samples that arrive while a batch is being sent share the next.
    """

    def __init__(self, max_wait_s: float, max_bytes: int, max_samples: int) -> None:
        """
        Args:
            max_wait_s: seconds that a sample may wait for others.
            max_bytes: most bytes of a batch; a larger sample goes on its own.
            max_samples: most samples of a batch.

        Raises:
            ValueError: a limit lets nothing through.
        """
        if max_wait_s < 0 or max_bytes < 1 or max_samples < 1:
            raise ValueError(f"no batch can be made with {max_wait_s=}, {max_bytes=}, {max_samples=}")
        self.max_wait_s, self.max_bytes, self.max_samples = max_wait_s, max_bytes, max_samples
        self._waiting: deque[tuple[T, int, float]] = deque()  # sample, bytes, when it came
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sample: T, nbytes: int, now: float) -> None:
        """Add a sample of `nbytes`; `now` is in seconds of any monotonic clock."""
        self._waiting.append((sample, nbytes, now))
        self._nbytes += nbytes

    def due(self, now: float) -> float | None:
        """Return when the next batch should be sent, `now` at the earliest; None: nothing waits."""
        if not self._waiting:
            return None
        if self._nbytes >= self.max_bytes or len(self._waiting) >= self.max_samples:
            return now
        return max(now, self._waiting[0][2] + self.max_wait_s)

    def take(self) -> list[T]:
        """Remove and return the next batch, oldest sample first, due or not; empty if nothing waits."""
        taken: list[T] = []
        room = self.max_bytes
        while self._waiting and len(taken) < self.max_samples and (not taken or self._waiting[0][1] <= room):
            sample, nbytes, _ = self._waiting.popleft()
            taken.append(sample)
            room -= nbytes
            self._nbytes -= nbytes
        return taken


class HighMark:
    """High-water mark with hysteresis: passed from above `high` until below half of it."""

    def __init__(self, high: int) -> None:
        """Raise `ValueError` if the mark is below 1."""
        if high < 1:
            raise ValueError(f"a mark of {high} is always passed")
        self.high = high
        self.passed = False

    def update(self, level: int) -> bool:
        """Record a new level; return whether `passed` has changed."""
        before = self.passed
        self.passed = level > self.high if not before else level >= self.high / 2
        return self.passed != before


class CompressionChoice:
    """The choice between compressed and raw batches, from the measured seconds and bytes of both.

    Compression pays when (seconds to pack + bytes sent / bytes per second of the link), per raw byte, is smaller
    compressed than raw. Averages are exponential, over sums, so that batches count by their bytes.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        """
        Args:
            bytes_per_s: bandwidth of the link; None or infinite: never compress.

        Raises:
            ValueError: the bandwidth is not positive.
        """
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"a link of {bytes_per_s} bytes per second carries nothing")
        self.bytes_per_s = math.inf if bytes_per_s is None else bytes_per_s
        self.compressing = False
        self._batches = 0
        self._raw = (0.0, 0.0)  # bytes, seconds
        self._small = (0.0, 0.0, 0.0)  # bytes before, seconds, bytes after

    @property
    def ratio(self) -> float | None:
        """Compressed bytes per raw byte; None: not measured."""
        return self._small[2] / self._small[0] if self._small[0] else None

    @property
    def mb_per_s(self) -> float | None:
        """Speed of compression in 10^6 raw bytes per second, packing included; None: not measured."""
        return self._small[0] / self._small[1] / 1e6 if self._small[1] else None

    def next(self) -> Literal["raw", "zstd", "both"]:
        """Return how to pack the next batch; 'both': pack it each way, then send the one that `compressing` selects."""
        if math.isinf(self.bytes_per_s):
            return "raw"
        number, self._batches = self._batches, self._batches + 1
        if number < FIRST_MEASURED or number % MEASURED_EVERY == 0:
            return "both"
        return "zstd" if self.compressing else "raw"

    def packed_raw(self, nbytes: int, seconds: float) -> None:
        """Record a batch of `nbytes` that was packed without compression."""
        self._raw = (_average(self._raw[0], nbytes), _average(self._raw[1], seconds))
        self._decide()

    def packed_small(self, nbytes: int, seconds: float, after: int) -> None:
        """Record a batch of `nbytes` that was compressed to `after` bytes."""
        before, took, small = self._small
        self._small = (_average(before, nbytes), _average(took, seconds), _average(small, after))
        self._decide()

    def _decide(self) -> None:
        raw, small = self._raw, self._small
        if raw[0] and small[0]:
            small_s = small[1] / small[0] + small[2] / small[0] / self.bytes_per_s
            self.compressing = small_s < raw[1] / raw[0] + 1 / self.bytes_per_s


def _average(before: float, newest: float) -> float:
    return (1 - _NEWEST_WEIGHT) * before + _NEWEST_WEIGHT * newest


def sample_bytes(body: dict[str, Any], arrays: Arrays) -> int:
    """Return the bytes that a sample takes in a raw batch.

    Raises:
        ValueError: the sample cannot be packed.
    """
    length = token_count(arrays)
    experts = arrays[EXPERTS].nbytes + _LENGTH.itemsize if EXPERTS in arrays else 0
    tokens = length * sum(dtype.itemsize for dtype in TOKEN_ARRAYS.values())
    return len(_encoded(body)) + _LENGTH.itemsize + tokens + experts


def _encoded(bodies: Any) -> bytes:
    try:
        return bytes(msgpack.packb(bodies, use_bin_type=True))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a sample's body cannot be packed: {error}") from error


def pack_samples(items: Sequence[Item], compress: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Pack samples into the (body, arrays) of one message; the module's docstring has the format.

    Args:
        items: at most `BATCH_SAMPLES` samples; token arrays int32, log-probabilities float32, of one length within a
            sample.
        compress: whether to compress; a batch of more than `MAX_UNPACKED_BYTES` is packed raw all the same.

    Raises:
        ValueError: an item is not a sample, msgpack cannot encode its body, or there is more than is ever unpacked.
    """
    columns = {"lengths": np.asarray([token_count(arrays) for _, arrays in items], dtype=_LENGTH)}
    for name, dtype in TOKEN_ARRAYS.items():
        columns[name] = np.concatenate([np.empty(0, dtype), *(arrays[name] for _, arrays in items)])
    experts = [arrays.get(EXPERTS) for _, arrays in items]
    if known := [rows for rows in experts if rows is not None]:
        if len({rows.shape[1] for rows in known}) > 1:
            raise ValueError("samples of a batch have rows of experts of different bytes")
        counts = [_NO_EXPERTS if rows is None else len(rows) for rows in experts]
        columns |= {_EXPERT_ROWS: np.asarray(counts, dtype=_LENGTH), EXPERTS: np.concatenate(known)}
    columns["bodies"] = np.frombuffer(_encoded([body for body, _ in items]), np.uint8)
    _check_counts(len(items), len(columns["bodies"]))
    if not compress or sum(column.nbytes for column in columns.values()) > MAX_UNPACKED_BYTES:
        return {"packing": "raw"}, columns
    narrow = [name for name in TOKEN_ARRAYS if _fits(columns[name])]
    parts = [_transformed(column, name in narrow).tobytes() for name, column in columns.items()]
    body = {
        "packing": "zstd",
        "samples": len(items),
        "tokens": len(columns["completion_tokens"]),
        "bodies": len(columns["bodies"]),
        "narrow": narrow,
    }
    if EXPERTS in columns:
        body[EXPERTS] = list(columns[EXPERTS].shape)
    payload = pa.Codec("zstd", compression_level=LEVEL).compress(b"".join(parts))
    return body, {"payload": np.frombuffer(payload, np.uint8)}


def _fits(column: np.ndarray) -> bool:
    """Return whether a column holds integers that fit into 16 unsigned bits."""
    return column.dtype.kind == "i" and (not column.size or (column.min() >= 0 and column.max() < 1 << 16))


def _transformed(column: np.ndarray, narrow: bool) -> np.ndarray:
    if column.dtype.kind == "f":  # byte planes: exponents repeat, mantissas do not
        return np.ascontiguousarray(column.view(np.uint8).reshape(-1, column.itemsize).T)
    return column.astype(_NARROW) if narrow else column


def unpack_samples(body: dict[str, Any], arrays: Arrays) -> list[Item]:
    """Return the samples of a message `samples`, in order; their arrays are views of the batch's.

    Raises:
        ValueError: `pack_samples` cannot have made this message.
    """
    match body.get("packing"):
        case "raw":
            columns = dict(arrays)
        case "zstd":
            columns = _decompressed(body, arrays)
        case other:
            raise ValueError(f"a batch is packed raw or zstd, not {reprlib.repr(other)}")
    of_experts = {name: columns.pop(name) for name in (_EXPERT_ROWS, EXPERTS) if name in columns}
    if columns.keys() != _COLUMNS.keys():
        raise ValueError(f"a batch has the columns {list(_COLUMNS)}, not {list(columns)}")
    for name, dtype in _COLUMNS.items():
        if columns[name].dtype != dtype or columns[name].ndim != 1:
            raise ValueError(f"column {name!r} is {dtype} [n], not {columns[name].dtype} {columns[name].shape}")
    lengths = columns["lengths"]
    _check_counts(len(lengths), len(columns["bodies"]))
    tokens = {len(columns[name]) for name in TOKEN_ARRAYS}
    if (lengths < 0).any() or tokens != {int(lengths.sum(dtype=np.int64))}:
        raise ValueError(f"lengths of samples do not add up to the columns' {tokens}")
    _check_number(columns["bodies"], len(lengths))
    try:
        bodies = unpack(columns["bodies"].data)
    except ValueError as error:
        raise ValueError(f"bodies are {error}") from error
    if not all(isinstance(one, dict) for one in bodies):
        raise ValueError(f"bodies are not a list of {len(lengths)} maps")
    ends = np.cumsum(lengths, dtype=np.int64)
    experts = _experts_of(of_experts, len(lengths))
    return [
        (sample, {name: columns[name][end - length : end] for name in TOKEN_ARRAYS} | rows)
        for sample, end, length, rows in zip(bodies, ends.tolist(), lengths.tolist(), experts, strict=True)
    ]


def _check_counts(samples: int, bodies: int) -> None:
    """Check the number of a batch's samples, and the bytes of their bodies.

    Raises:
        ValueError: a batch never has as many.
    """
    if samples > BATCH_SAMPLES or bodies > MAX_BODIES_BYTES:
        most = f"{BATCH_SAMPLES} in {MAX_BODIES_BYTES}"
        raise ValueError(f"a batch of {samples} samples with bodies of {bodies} bytes, at most {most}")


def _check_number(bodies: np.ndarray, samples: int) -> None:
    """Check that encoded bodies are a list of so many, before it is unpacked.

    Raises:
        ValueError: they are not.
    """
    header = msgpack.Unpacker()
    header.feed(bodies[:5].tobytes())
    try:
        found = header.read_array_header()
    except Exception:  # msgpack raises many types on bad input
        found = None
    if found != samples:
        raise ValueError(f"bodies are not a list of {samples} maps")


def _experts_of(columns: dict[str, np.ndarray], samples: int) -> list[dict[str, np.ndarray]]:
    """Return each sample's array of experts, by its name; {}: it has none.

    Raises:
        ValueError: the columns are not those of so many samples.
    """
    if not columns:
        return [{}] * samples
    counts, rows = columns.get(_EXPERT_ROWS), columns.get(EXPERTS)
    if counts is None or rows is None or rows.dtype != np.uint8 or rows.ndim != 2:
        raise ValueError("a batch has no rows of experts, or no numbers of them")
    if counts.dtype != _LENGTH or counts.shape != (samples,) or (counts < _NO_EXPERTS).any():
        raise ValueError(f"expert_rows are no {_LENGTH} numbers of {samples} samples")
    known = np.maximum(counts, 0)
    if known.sum(dtype=np.int64) != len(rows):
        raise ValueError(f"expert_rows do not add up to the {len(rows)} rows")
    ends = np.cumsum(known, dtype=np.int64).tolist()
    return [
        {} if count == _NO_EXPERTS else {EXPERTS: rows[end - count : end]}
        for count, end in zip(counts.tolist(), ends, strict=True)
    ]


def _decompressed(body: dict[str, Any], arrays: Arrays) -> dict[str, np.ndarray]:
    """Decompress the columns of a batch, whose sizes its body declares.

    Raises:
        ValueError: the sizes are impossible, or the payload does not match them.
    """
    samples, tokens, bodies = (_count(body.get(key)) for key in ("samples", "tokens", "bodies"))
    _check_counts(samples, bodies)
    narrow = body.get("narrow")
    if not isinstance(narrow, list) or any(name not in ("completion_tokens", "token_versions") for name in narrow):
        raise ValueError(f"columns {reprlib.repr(narrow)} cannot be narrow")
    if arrays.keys() != {"payload"} or arrays["payload"].dtype != np.uint8 or arrays["payload"].ndim != 1:
        raise ValueError("a compressed batch has one array, its payload of bytes")
    counts = {"lengths": samples, "bodies": bodies}
    types = dict(_COLUMNS)
    if (shape := body.get(EXPERTS)) is not None:
        if not isinstance(shape, list) or len(shape) != 2:
            raise ValueError(f"experts of shape {reprlib.repr(shape)}, expected [rows, row bytes]")
        of_bodies = types.pop("bodies")
        types |= {_EXPERT_ROWS: _LENGTH, EXPERTS: np.dtype(np.uint8), "bodies": of_bodies}  # in the sender's order
        counts |= {_EXPERT_ROWS: samples, EXPERTS: math.prod(map(_count, shape))}
    packed_as = {name: _NARROW if name in narrow else dtype for name, dtype in types.items()}
    sizes = {name: counts.get(name, tokens) * dtype.itemsize for name, dtype in packed_as.items()}
    size = sum(sizes.values())
    if size > MAX_UNPACKED_BYTES:
        raise ValueError(f"a batch of {size} bytes, at most {MAX_UNPACKED_BYTES} may be compressed")
    try:
        data = pa.Codec("zstd").decompress(np.ascontiguousarray(arrays["payload"]), decompressed_size=size)
    except OSError as error:  # what Arrow raises for a corrupt frame, or one of another size
        raise ValueError(f"the payload is no zstd frame of {size} bytes") from error
    columns, start = {}, 0
    for name, dtype in types.items():
        part = np.frombuffer(memoryview(data)[start : start + sizes[name]], np.uint8)
        if dtype.kind == "f":
            part = np.ascontiguousarray(part.reshape(dtype.itemsize, tokens).T).reshape(-1)
        columns[name] = part.view(packed_as[name]).astype(dtype, copy=False)
        start += sizes[name]
    if EXPERTS in columns:
        columns[EXPERTS] = columns[EXPERTS].reshape(shape)
    return columns


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_UNPACKED_BYTES:
        raise ValueError(f"a batch has no {reprlib.repr(value)} samples, tokens or bytes of bodies")
    return value
