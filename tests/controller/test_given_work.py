"""The division of work into messages that the wire takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import numpy as np
import pytest

from scheduler.cost.length_forecast import Forecast
from streamrl.controller.given_work import GivenWork, parking, resuming, sendable, wire_bytes
from streamrl.controller.group_source import samples_of
from streamrl.controller.issuer import Issuer
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import SiteTrust
from streamrl.protocol.controller_site import Park, Resume
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
    names = [f"{number:08d}/{number % 16}" for number in range(1_000_000)]
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


WORK = work_of(1, samples=7)
NAMES = [draw[0] for draw in WORK.draws]
ROOM = 3 * len(msgspec.msgpack.encode(NAMES[0]))


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders have room for three names in a message."""
    for module in ("issuer", "site_services", "site_trust"):
        monkeypatch.setattr(f"streamrl.controller.{module}.parking", partial(parking, most=ROOM))
    for module in ("issuer", "site_services"):
        monkeypatch.setattr(f"streamrl.controller.{module}.resuming", partial(resuming, most=ROOM))


def named(sent: AsyncMock, kind: type[Park] | type[Resume]) -> list[tuple[int, bool]]:
    """The number of names in each message of a kind that was sent, and whether another one follows."""
    orders = [order for call in sent.await_args_list for order in call.args if isinstance(order, kind)]
    return [(len(order.sample_ids), order.more) for order in orders]


def test_a_restarted_service_hears_of_all_samples_that_are_parked(in_parts: None) -> None:
    services: Any = SimpleNamespace(_send=AsyncMock())
    asyncio.run(Services.park_resting(services, "service-far", 3, NAMES))
    assert named(services._send, Park) == [(3, True), (3, True), (1, False)]
    assert named(services._send, Resume) == [(0, False)]


def test_all_parked_samples_that_are_given_again_stay_parked(in_parts: None) -> None:
    services: Any = SimpleNamespace(give=AsyncMock(), tell=AsyncMock())
    rounds: Any = SimpleNamespace(budget=9, resting_samples=lambda: NAMES)
    unused: Any = None
    trust = SiteTrust(services, unused, unused, unused, rounds, unused, 0)
    asyncio.run(trust._give([WORK]))
    assert named(services.tell, Park) == [(3, True), (3, True), (1, False)]


def test_a_round_ends_and_begins_with_all_of_its_samples(in_parts: None) -> None:
    run: Any = SimpleNamespace(steps=1, schedule=SimpleNamespace(name="sync", max_staleness=None, sync_every=1))
    run.schedule.rounds, run.batch = None, SimpleNamespace(prompts_per_step=1)
    services: Any = SimpleNamespace(version=0, tell=AsyncMock())
    pool: Any = SimpleNamespace(unfinished=lambda groups: NAMES if groups else [])
    issuer = Issuer(run, pool, services, Mock(), AsyncMock())
    ends, begins = [["a group"], [], []], [True, False]
    begun = SimpleNamespace(new=0, resumed=["a group"], budget=9)
    rounds: Any = SimpleNamespace(
        active=True, number=2, begin=lambda version: begun, started=list, end_if_over=lambda: ends.pop(0)
    )
    rounds.may_begin = lambda version, step: begins.pop(0)
    issuer.rounds = rounds
    asyncio.run(issuer.issue(0, 0))
    assert named(services.tell, Park) == named(services.tell, Resume) == [(3, True), (3, True), (1, False)]
