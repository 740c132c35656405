"""Unpacking what a peer has sent: bounded in lists and maps, and without the collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgpack
import pytest

from streamrl.transport import unpacking
from streamrl.transport.unpacking import MOST_CONTAINERS, collector_off, unpack
from streamrl.transport.wire import KEYS, MalformedMessage, decode


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("data", [msgpack.packb([[], {}]), b"\xc1"], ids=["usable", "broken"])
def test_the_collector_rests_while_something_is_unpacked_and_no_longer(
    enabled: bool, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    unpackb = msgpack.unpackb

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        return unpackb(*args, **options)

    monkeypatch.setattr(msgpack, "unpackb", recorded)
    if not enabled:
        gc.disable()
    try:
        assert unpack(data) == [[], {}]
    except ValueError:
        assert data == b"\xc1"
    assert seen == [False] and gc.isenabled() is enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_until_the_last_of_several_threads_has_unpacked(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    seen: list[bool] = []
    with ExitStack() as second:
        with collector_off():
            thread = threading.Thread(target=second.enter_context, args=(collector_off(),))
            thread.start()
            thread.join()
        seen.append(gc.isenabled())
    assert seen == [False] and gc.isenabled() is enabled


@pytest.mark.parametrize("empty", [b"\x80", b"\x90"], ids=["map", "list"])
def test_more_lists_and_maps_than_any_message_has_are_refused(empty: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MOST_CONTAINERS", 1000)
    assert len(unpack(b"\xdc" + (999).to_bytes(2) + 999 * empty)) == 999
    with pytest.raises(ValueError, match="of more than 1000 lists and maps"):
        unpack(b"\xdc" + (1000).to_bytes(2) + 1000 * empty)
    assert unpack(msgpack.packb(["x" * 2000])) == ["x" * 2000]


@pytest.mark.parametrize("lists", [[3000], [1000] * 3, [[1000] * 3, 0]], ids=["one", "several", "nested"])
def test_more_values_than_any_message_has_are_refused(lists: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(of: Any) -> Any:
        return [None] * of if isinstance(of, int) else [filled(one) for one in of]

    monkeypatch.setattr(unpacking, "MOST_CONTAINERS", 1000)
    monkeypatch.setattr(unpacking, "MOST_VALUES", 3006)
    assert unpack(msgpack.packb(filled(lists))) == filled(lists)
    monkeypatch.setattr(unpacking, "MOST_VALUES", 2999)
    with pytest.raises(ValueError):
        unpack(msgpack.packb(filled(lists)))


@pytest.mark.parametrize("value", [[None] * 3000, dict.fromkeys(map(str, range(3000)))], ids=["list", "map"])
def test_one_list_or_map_of_more_values_is_refused_before_it_is_made(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "MOST_CONTAINERS", 1000)
    monkeypatch.setattr(unpacking, "MOST_VALUES", 2999)
    with pytest.raises(ValueError, match="not msgpack"):  # by msgpack, from its announced length
        unpack(msgpack.packb(value))


def test_an_envelope_of_millions_of_empty_lists_is_malformed() -> None:
    values: tuple[Any, ...] = 2, "item", "life", 1, {"x": None}, []
    head, _, tail = msgpack.packb(dict(zip(KEYS, values, strict=True))).partition(b"\xa1x\xc0")
    lists = b"\xdd" + (MOST_CONTAINERS + 1).to_bytes(4) + (MOST_CONTAINERS + 1) * b"\x90"
    with pytest.raises(MalformedMessage, match="lists and maps"):
        decode([head + b"\xa1x" + lists + tail])
