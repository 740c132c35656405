"""Samples over a link: batches, packing that is exact, compression that pays, and back-pressure that loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import RunFailed
from streamrl.generation import batches
from streamrl.generation.batches import (
    TOKEN_ARRAYS,
    CompressionChoice,
    HighMark,
    Item,
    SampleBatcher,
    pack_samples,
    sample_bytes,
    unpack_samples,
)
from streamrl.generation.uplink import Uplink
from streamrl.rollouts.ledger import pack_content, unpack_content
from streamrl.transport import base
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.transport.wire import Arrays, Message, decode, encode
from tests.training.conftest import free_port


def item(name: str, tokens: int = 20, version: int = 3, largest: int = 49_000) -> Item:
    rng = np.random.default_rng(tokens)
    arrays = {
        "completion_tokens": rng.integers(0, largest, tokens, dtype=np.int32),
        "logprobs": -rng.exponential(1.0, tokens).astype(np.float32),
        "token_versions": np.full(tokens, version, dtype=np.int32),
    }
    return {"sample_id": name, "text": f"the answer of {name} is " * 3, "t_finished": 1.5, "error": None}, arrays


def items(count: int, tokens: int = 20) -> list[Item]:
    return [item(f"g.{number}", tokens) for number in range(count)]


def over_the_wire(body: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    frames = encode(Message(batches.KIND, "session", 1, body, dict(arrays)))
    message = decode([bytes(frame) for frame in frames])
    return message.body, message.arrays


def assert_same(found: list[Item], expected: list[Item]) -> None:
    assert [body for body, _ in found] == [body for body, _ in expected]
    for (_, got), (_, wanted) in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys() == TOKEN_ARRAYS.keys()
        for name, array in got.items():
            assert array.dtype == TOKEN_ARRAYS[name] and array.tobytes() == wanted[name].tobytes()


# -- when a batch goes


def test_a_batch_goes_when_its_oldest_sample_has_waited_long_enough() -> None:
    batcher: SampleBatcher[str] = SampleBatcher(2.0, 1000, 10)
    assert batcher.due(5.0) is None and batcher.take() == []
    batcher.add("a", 10, 5.0)
    batcher.add("b", 10, 6.5)
    assert batcher.due(6.5) == 7.0
    assert batcher.due(9.0) == 9.0  # late: at once
    assert batcher.take() == ["a", "b"] and batcher.due(9.0) is None


def test_a_batch_goes_at_once_when_it_is_large_enough_and_never_exceeds_its_limits() -> None:
    batcher: SampleBatcher[str] = SampleBatcher(60.0, 100, 3)
    for name, nbytes in (("a", 40), ("b", 50)):
        batcher.add(name, nbytes, 0.0)
    assert batcher.due(0.0) == 60.0
    batcher.add("c", 30, 1.0)
    assert batcher.due(1.0) == 1.0
    assert batcher.take() == ["a", "b"]  # all three are 120 bytes
    assert batcher.due(1.0) == 61.0
    batcher.add("huge", 5000, 2.0)
    assert batcher.take() == ["c"] and batcher.due(2.0) == 2.0
    assert batcher.take() == ["huge"] and len(batcher) == 0
    for name in "defg":
        batcher.add(name, 1, 3.0)
    assert batcher.due(3.0) == 3.0
    assert batcher.take() == ["d", "e", "f"] and batcher.due(3.0) == 63.0


def test_without_waiting_each_sample_goes_at_once() -> None:
    batcher: SampleBatcher[str] = SampleBatcher(0.0, 1000, 10)
    batcher.add("a", 1, 5.0)
    assert batcher.due(5.0) == 5.0 and batcher.take() == ["a"]


@pytest.mark.parametrize("limits", [(-1.0, 10, 10), (1.0, 0, 10), (1.0, 10, 0)])
def test_a_batcher_that_lets_nothing_through_is_refused(limits: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="no batch can be made"):
        SampleBatcher(*limits)


def test_a_high_mark_is_passed_above_it_and_left_below_half_of_it() -> None:
    mark = HighMark(100)
    assert [mark.update(level) or mark.passed for level in (100, 60)] == [False, False]
    assert mark.update(101) and mark.passed
    assert not mark.update(50) and mark.passed
    assert mark.update(49) and not mark.passed
    assert not mark.update(100)


def test_the_mark_of_a_link_is_what_it_carries_in_ten_seconds_within_bounds() -> None:
    assert Uplink.marks(2e6, 0.5) == 21_000_000
    assert Uplink.marks(1e3, 0.1) == 4_000_000
    assert Uplink.marks(1e9, 0.1) == Uplink.marks(None, 0.0) == 256_000_000


# -- packing

VALUES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=40)
)
BODIES = st.dictionaries(st.text(max_size=8), VALUES | st.lists(VALUES, max_size=3), max_size=6)


@st.composite
def samples(draw: st.DrawFn) -> Item:
    length = draw(st.integers(0, 30))
    bits = st.integers(0, 2**32 - 1) | st.integers(0, 2**16)  # any float32, NaNs and infinities too
    raw = {name: draw(st.lists(bits, min_size=length, max_size=length)) for name in TOKEN_ARRAYS}
    return draw(BODIES), {name: np.array(raw[name], "<u4").view(dtype) for name, dtype in TOKEN_ARRAYS.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(samples(), max_size=6), st.booleans())
def test_packing_is_exact(some: list[Item], compress: bool) -> None:
    assert_same(unpack_samples(*over_the_wire(*pack_samples(some, compress))), some)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("largest", [1 << 16, 150_000], ids=["narrow", "wide"])
def test_empty_completions_and_tokens_of_any_size_are_kept(compress: bool, largest: int) -> None:
    some = [item("a", 0), item("b", 300, largest=largest), item("c", 0), item("d", 1)]
    some[1][1]["completion_tokens"][:2] = (0, largest - 1)
    some[1][1]["token_versions"][0] = -1
    some[0][0]["text"] = "Ünïcödé 漢字 🙂 \x00"
    assert_same(unpack_samples(*over_the_wire(*pack_samples(some, compress))), some)


def test_the_ledger_keeps_a_sample_that_came_in_a_batch() -> None:
    body, arrays = unpack_samples(*pack_samples(items(3), True))[1]
    assert_same([unpack_content(pack_content(body, arrays))], [item("g.1")])


def test_the_size_of_samples_is_that_of_their_raw_batch() -> None:
    some = items(40)
    _, arrays = pack_samples(some)
    packed = sum(array.nbytes for array in arrays.values())
    assert 0 <= packed - sum(sample_bytes(*one) for one in some) <= 5  # the header of the list of bodies


def test_compression_makes_texts_and_versions_smaller() -> None:
    some = items(40, tokens=200)
    raw, small = (sum(array.nbytes for array in pack_samples(some, compress)[1].values()) for compress in (False, True))
    assert small < 0.6 * raw


def test_a_batch_that_is_too_large_to_be_unpacked_at_a_senders_word_goes_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    some = items(4)
    monkeypatch.setattr(batches, "MAX_UNPACKED_BYTES", sum(sample_bytes(*one) for one in some) - 1)
    body, arrays = pack_samples(some, True)
    assert body == {"packing": "raw"}
    assert_same(unpack_samples(body, arrays), some)


def test_what_is_not_a_sample_is_refused_by_name() -> None:
    body, arrays = item("a")
    with pytest.raises(ValueError, match="has the arrays"):
        sample_bytes(body, {"logprobs": arrays["logprobs"]})
    with pytest.raises(ValueError, match="one length"):
        sample_bytes(body, arrays | {"logprobs": arrays["logprobs"][1:]})
    with pytest.raises(ValueError, match="one length"):
        sample_bytes(body, {name: array.reshape(2, 10) for name, array in arrays.items()})
    with pytest.raises(ValueError, match="'logprobs' is of type float32"):
        pack_samples([(body, arrays | {"logprobs": arrays["logprobs"].astype(np.float64)})])
    for wrong in (object(), 2**70, "\ud800"):
        with pytest.raises(ValueError):
            sample_bytes({"x": wrong}, arrays)


def test_a_batch_that_claims_too_much_is_refused_before_memory_is_taken() -> None:
    body, arrays = pack_samples(items(2), True)
    for key in ("samples", "tokens", "bodies"):
        with pytest.raises(ValueError, match="a batch has no"):
            unpack_samples(body | {key: 2**40}, arrays)
    with pytest.raises(ValueError, match="may be compressed"):
        unpack_samples(body | {"tokens": batches.MAX_UNPACKED_BYTES // 2}, arrays)


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**33,
    2**70,
    1.5,
    float("nan"),
    "",
    "raw",
    "zstd",
    [],
    ["logprobs"],
    [[]],
    {},
    b"\xff",
]


def mutated(rng: random.Random, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    body, arrays = dict(body), {name: array.copy() for name, array in arrays.items()}
    name = rng.choice(list(arrays))
    array = arrays[name]
    match rng.randrange(8):
        case 0 | 1 | 2:  # bytes of an array
            data = array.view(np.uint8)
            for _ in range(rng.choice((1, 1, 5))):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 3:
            arrays[name] = array[: rng.randrange(len(array))] if rng.random() < 0.5 else np.concatenate([array, array])
        case 4:
            arrays[name] = rng.choice(
                [array.reshape(-1, 1), array.astype(np.float64), array.astype(np.int32), array.view(np.uint8)]
            )
        case 5:
            arrays.pop(name)
        case 6:
            arrays[rng.choice(["x", "payload", "bodies"])] = np.frombuffer(rng.randbytes(30), np.uint8)
        case 7:
            key = rng.choice(["packing", "samples", "tokens", "bodies", "narrow"])
            body[key] = rng.choice(JUNK)
            if isinstance(before := body.get(rng.choice(list(body))), int):
                body[key] = before + rng.choice((-1, 1, 7))
    return body, arrays


@pytest.mark.parametrize("compress", [False, True])
def test_malformed_batches_are_refused_with_one_kind_of_error(compress: bool) -> None:
    rng = random.Random(7)
    body, arrays = pack_samples([item("a", 0), item("ü", 7), item("c", 30)], compress)
    refused = 0
    for _ in range(2500):
        try:
            found = unpack_samples(*mutated(rng, body, arrays))
        except ValueError:
            refused += 1
        else:  # a flipped bit may be another sample, but it is one
            assert all(len({len(array) for array in got.values()}) == 1 for _, got in found)
    assert refused > 1000


@pytest.mark.parametrize(
    "bodies", [[{}], [{}, 1], {}, [{}, {1: 2}], [{}, {}, {}]], ids=["few", "no map", "no list", "key", "many"]
)
def test_bodies_that_are_not_one_map_per_sample_are_refused(bodies: Any) -> None:
    body, arrays = pack_samples(items(2))
    with pytest.raises(ValueError, match="bodies are not"):
        unpack_samples(body, arrays | {"bodies": np.frombuffer(msgpack.packb(bodies), np.uint8)})


def test_lengths_that_add_up_only_with_a_negative_one_are_refused() -> None:
    body, arrays = pack_samples(items(2))
    with pytest.raises(ValueError, match="do not add up"):
        unpack_samples(body, arrays | {"lengths": np.array([-1, 41], np.int32)})


# -- whether compression pays


def measured(
    bytes_per_s: float | None, batches_sent: int, mb_per_s: float = 200, ratio: float = 0.4
) -> tuple[Any, ...]:
    """How each batch of 10^6 bytes was packed, and the choice afterwards."""
    choice = CompressionChoice(bytes_per_s)
    ways = []
    for _ in range(batches_sent):
        way = choice.next()
        if way != "zstd":
            choice.packed_raw(10**6, 0.001)
        if way != "raw":
            choice.packed_small(10**6, 1 / mb_per_s, int(ratio * 10**6))
        ways.append(way)
    return ways, choice


def test_a_slow_link_gets_compressed_batches_a_fast_one_raw_ones_and_both_are_measured_again() -> None:
    for bytes_per_s, way in ((12.5e6, "zstd"), (1.25e9, "raw")):
        ways, choice = measured(bytes_per_s, 130)
        assert ways[:5] == ["both"] * 4 + [way]
        assert [number for number, one in enumerate(ways) if one == "both"] == [0, 1, 2, 3, 64, 128]
        assert set(ways) == {"both", way} and choice.compressing == (way == "zstd")
        assert choice.ratio == pytest.approx(0.4) and choice.mb_per_s == pytest.approx(200)


def test_the_choice_is_where_the_time_saved_on_the_wire_is_the_time_to_compress() -> None:
    # a raw byte takes 1 ns to pack, so it pays below (1 - 0.4) / (5 ns - 1 ns) = 150 MB/s
    assert measured(149e6, 5)[1].compressing and not measured(151e6, 5)[1].compressing


def test_the_choice_changes_when_samples_no_longer_shrink() -> None:
    ways, choice = measured(12.5e6, 5)
    assert ways[-1] == "zstd"
    for _ in range(12):
        choice.packed_small(10**6, 0.1, 990_000)
    assert not choice.compressing and choice.next() == "raw"


@pytest.mark.parametrize("bytes_per_s", [None, float("inf")])
def test_without_a_known_limit_nothing_is_compressed_or_measured(bytes_per_s: float | None) -> None:
    ways, choice = measured(bytes_per_s, 70)
    assert set(ways) == {"raw"} and choice.ratio is None and choice.mb_per_s is None and not choice.compressing


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, float("nan")])
def test_a_link_that_carries_nothing_is_refused(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        CompressionChoice(bytes_per_s)


# -- over a real link


class Controller:
    """A hub that can go away and come back, with what it has committed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.committed: list[Item] = []
        self.batches: list[int] = []

    async def start(self) -> None:
        while True:  # ZeroMQ gives a closed socket's address back a moment later
            try:
                self.hub = Hub("hub", WaitRegistry("hub")).bind(self.address)
                return
            except RunFailed:
                await asyncio.sleep(0.05)

    async def receive(self) -> Delivery:
        delivery = await self.hub.receive()
        assert delivery.kind == "samples"
        return delivery

    def commit(self, delivery: Delivery) -> None:
        some = unpack_samples(delivery.body, delivery.arrays)
        self.committed += some
        self.batches.append(len(some))
        delivery.ack()

    async def commit_all(self) -> None:
        while True:
            self.commit(await self.receive())


Body = Callable[[Controller, Link, list[str]], Awaitable[None]]


def run(body: Body) -> None:
    """Runs a test with a controller, a link to it, and a list of the samples whose `on_ack` was called."""

    async def limited() -> None:
        async with asyncio.timeout(20):
            controller = Controller(f"tcp://127.0.0.1:{free_port()}")
            await controller.start()
            link = await Link("service", "service", WaitRegistry("service")).connect(controller.address, 10)
            await body(controller, link, [])
            await link.close()
            await controller.hub.close()

    asyncio.run(limited())


def uplink_of(
    link: Link, wait_s: float = 0.0, nbytes: int = 10**6, mark: int = 10**6, bytes_per_s: float | None = None
) -> tuple[Uplink, asyncio.Task[None]]:
    uplink = Uplink(link, SampleBatcher(wait_s, nbytes, 1000), CompressionChoice(bytes_per_s), mark, limit_s=10)
    return uplink, asyncio.create_task(uplink.run())


async def put_all(uplink: Uplink, some: list[Item], acknowledged: list[str]) -> None:
    for body, arrays in some:
        await uplink.put(body, arrays, lambda name=body["sample_id"]: acknowledged.append(name))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("bytes_per_s", [None, 1e5], ids=["raw", "compressed"])
def test_samples_arrive_in_order_and_each_is_acknowledged_once_after_the_commit(bytes_per_s: float | None) -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, wait_s=0.02, nbytes=3000, bytes_per_s=bytes_per_s)
        some = items(50)
        await put_all(uplink, some, acknowledged)
        deliveries = [await controller.receive()]
        await asyncio.sleep(0.1)
        assert acknowledged == [] and uplink.backlog_samples == 50  # received is not committed
        assert uplink.backlog_bytes == sum(sample_bytes(*one) for one in some)
        controller.commit(deliveries[0])
        committing = asyncio.create_task(controller.commit_all())
        await uplink.flush(5)
        assert_same(controller.committed, some)
        assert acknowledged == [one["sample_id"] for one, _ in some]
        state = uplink.state()
        assert state["backlog_samples"] == state["backlog_bytes"] == 0 and state["samples"] == 50
        assert state["batches"] == len(controller.batches) < 30
        assert state["raw_bytes"] == sum(sample_bytes(*one) for one in some)
        assert state["compressing"] == (bytes_per_s is not None)
        if bytes_per_s is None:
            assert 0 <= state["sent_bytes"] - state["raw_bytes"] <= 5 * state["batches"] and state["compress_s"] == 0
        else:
            assert state["sent_bytes"] < 0.8 * state["raw_bytes"] and state["compress_s"] > 0
        for one in (task, committing):
            one.cancel()

    run(body)


def test_a_fast_link_is_measured_and_still_gets_raw_batches() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, bytes_per_s=1e15)
        await put_all(uplink, items(1), acknowledged)
        delivery = await controller.receive()
        assert delivery.body == {"packing": "raw"}
        controller.commit(delivery)
        await uplink.flush(5)
        state = uplink.state()
        assert state["ratio"] > 0 and state["mb_per_s"] > 0 and not state["compressing"] and state["compress_s"] > 0
        task.cancel()

    run(body)


def test_inside_a_site_each_sample_goes_on_its_own_and_at_once() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link)
        for one in items(3):
            await put_all(uplink, [one], acknowledged)
            controller.commit(await controller.receive())
        assert controller.batches == [1, 1, 1]
        await uplink.flush(5)
        task.cancel()

    run(body)


def test_a_batch_waits_for_more_samples_unless_it_is_flushed() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, wait_s=60.0)
        await put_all(uplink, items(4), acknowledged)
        await asyncio.sleep(0.2)
        assert uplink.batches == 0 and controller.hub.receive_now() is None
        committing = asyncio.create_task(controller.commit_all())
        await uplink.flush(5)
        assert controller.batches == [4] and len(acknowledged) == 4
        await uplink.flush(5)  # nothing waits
        for one in (task, committing):
            one.cancel()

    run(body)


def test_large_batches_are_packed_without_holding_up_the_loop_and_arrive_whole() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, wait_s=0.05, nbytes=4 * 10**6, bytes_per_s=1e6)
        some = items(60, tokens=3000)
        committing = asyncio.create_task(controller.commit_all())
        await put_all(uplink, some, acknowledged)
        await uplink.flush(10)
        assert_same(controller.committed, some)
        assert controller.batches == [60]
        for one in (task, committing):
            one.cancel()

    run(body)


def test_a_sample_that_cannot_be_packed_is_refused_when_it_is_put_and_spoils_no_batch() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link)
        with pytest.raises(ValueError, match="has the arrays"):
            await uplink.put({}, {}, lambda: acknowledged.append("never"))
        assert uplink.backlog_samples == 0
        await put_all(uplink, items(1), acknowledged)
        controller.commit(await controller.receive())
        await uplink.flush(5)
        assert acknowledged == ["g.0"]
        task.cancel()

    run(body)


def test_withheld_acknowledgements_congest_and_the_flush_says_for_what_it_waited() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        some = items(20)
        mark = sum(sample_bytes(*one) for one in some) // 2
        uplink, task = uplink_of(link, wait_s=0.01, nbytes=1000, mark=mark)
        await put_all(uplink, some[:8], acknowledged)
        with pytest.raises(DeadlineExpired, match="for the hub to acknowledge 8 samples"):
            await uplink.flush(0.2)
        assert not uplink.congested
        change = asyncio.create_task(uplink.changed())
        await put_all(uplink, some[8:], acknowledged)
        assert await change is True and uplink.congested
        change = asyncio.create_task(uplink.changed())
        while uplink.backlog_bytes >= mark / 2:
            assert uplink.congested and not change.done()
            before = len(acknowledged)
            controller.commit(await controller.receive())
            await until(lambda before=before: len(acknowledged) > before)
        assert await change is False and not uplink.congested
        task.cancel()

    run(body)


def test_a_controller_that_is_away_for_a_while_congests_the_uplink_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "HEARTBEAT_S", 0.1)

    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        some = items(200)
        nbytes = sum(sample_bytes(*one) for one in some)
        uplink, task = uplink_of(link, wait_s=0.01, nbytes=2000, mark=nbytes // 4)
        changes: list[bool] = []

        async def watch() -> None:
            while True:
                changes.append(await uplink.changed())

        watching = asyncio.create_task(watch())
        await put_all(uplink, some[:20], acknowledged)
        controller.commit(await controller.receive())
        await until(lambda: len(acknowledged) > 0)
        await controller.receive()  # received, not committed: it comes again
        await controller.hub.close()
        await put_all(uplink, some[20:], acknowledged)
        await until(lambda: changes == [True])
        await asyncio.sleep(0.3)
        assert len(acknowledged) == controller.batches[0] and uplink.backlog_samples == 200 - len(acknowledged)
        await controller.start()
        committing = asyncio.create_task(controller.commit_all())
        await uplink.flush(10)
        assert sorted(acknowledged) == sorted(one["sample_id"] for one, _ in some)
        assert_same(sorted(controller.committed, key=sample_id), sorted(some, key=sample_id))
        await until(lambda: changes == [True, False])
        assert uplink.backlog_bytes == 0
        for one in (task, watching, committing):
            one.cancel()

    run(body)


def sample_id(one: Item) -> str:
    return str(one[0]["sample_id"])


def test_a_link_that_takes_nothing_for_too_long_ends_the_uplink() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        narrow = await Link("narrow", "service", WaitRegistry("narrow"), credits=1).connect(controller.address, 10)
        uplink = Uplink(narrow, SampleBatcher(0.0, 100, 1), CompressionChoice(None), 10**6, limit_s=0.3)
        await put_all(uplink, items(3), acknowledged)
        with pytest.raises(DeadlineExpired, match="to acknowledge"):
            await uplink.run()
        assert uplink.backlog_samples == 3 and not acknowledged
        await narrow.close()

    run(body)
