"""The division of work into messages that the wire takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.cost.length_forecast import Forecast
from streamrl.controller.given_work import GivenWork, parking, resuming, sendable, wire_bytes
from streamrl.controller.group_source import samples_of
from streamrl.protocol.controller_site import Resume
from streamrl.protocol.message import wire
from streamrl.protocol.samples import groups_to_wire
from streamrl.rollouts.types import Group
from streamrl.transport.wire import MAX_STATE_BYTES, Message, decode, encode

PROMPT = np.arange(50, dtype=np.int32)


def work_of(number: int, samples: int = 4) -> GivenWork:
    group = Group(f"{number:08d}", 1, number, f"math/{number}", "math", 0, "p", PROMPT, samples)
    return GivenWork(group.group_id, group, samples_of(group, 0))


def sent_bytes(part: Sequence[GivenWork]) -> int:
    """The bytes of a part's message as it is sent."""
    message, arrays = groups_to_wire([one.group for one in part], [one.draws for one in part], 1.0)
    kind, body = wire(message)
    return sum(map(len, encode(Message(kind, "s" * 16, 1, body, dict(arrays)))))


def test_parts_have_at_most_so_many_bytes_in_the_given_order_unless_a_single_group_has_more() -> None:
    work = [work_of(number) for number in range(5)]
    for one, size in zip(work, (10, 50, 60, 200, 10), strict=True):
        one.group.agent, one.group.reward_input = True, {"x": "x" * size}
    rest = wire_bytes(work[0]) - 10
    parts = [[one.group.prompt_index for one in part] for part in sendable(work, most=2 * rest + 110)]
    assert parts == [[0, 1], [2], [3], [4]]
    assert [len(part) for part in sendable(work, most=10_000)] == [5]
    for one in work:
        one.group.agent = False  # then the item stays with the controller
    assert [len(part) for part in sendable(work, most=5 * rest)] == [5]
    assert list(sendable([])) == []


def test_prompts_samples_and_forecasts_count() -> None:
    """All groups of a batch may be given at once: 16,384 of 16 samples have more than an envelope may have."""
    plain = [work_of(number) for number in range(100)]
    forecast = [work_of(number) for number in range(100)]
    for one in forecast:
        one.group.forecast = Forecast(tuple(np.linspace(1, 99, 16).tolist()), tuple(np.linspace(1, 999, 5).tolist()))
    for work in (plain, forecast, [work_of(number, samples=64) for number in range(100)]):
        parts = list(sendable(work, most=20_000))
        assert [one for part in parts for one in part] == work and len(parts) > 1
        assert all(15_000 < sent_bytes(part) < 20_500 for part in parts[:-1])
    assert len(list(sendable(forecast, most=20_000))) > len(list(sendable(plain, most=20_000)))


def test_orders_that_name_a_million_samples_take_messages_that_are_read() -> None:
    """A round of large batches ends and begins with all its samples: one message had more than an envelope may have."""
    names = [f"{number:08d}/{number % 16}" for number in range(1_500_000)]
    for orders in (parking(names), resuming(names, 512, 7)):
        assert [name for order in orders for name in order.sample_ids] == names
        assert [order.more for order in orders] == [*[True] * (len(orders) - 1), False] and len(orders) > 1
        for order in (orders[0], orders[-1]):
            kind, body = wire(order)
            frames = encode(Message(kind, "s" * 16, 1, body, {}))
            assert sum(map(len, frames)) < MAX_STATE_BYTES + 1000 and decode(frames).body == body
    assert {(order.budget, order.round) for order in resuming(names, 512, 7)} == {(512, 7)}


def test_a_round_begins_without_any_sample_to_continue() -> None:
    assert resuming([], None, 3) == [Resume(sample_ids=[], budget=None, round=3)]
