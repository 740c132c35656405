"""Exact times on a wire; no socket, no clock."""

from __future__ import annotations

import math
from random import Random

import pytest

from streamrl.emulation.shaping import (
    MAX_WINDOW,
    MIN_WINDOW,
    QUEUE_S,
    SEGMENT,
    UNSHAPED_WINDOW,
    LinkShape,
    ShapedFlow,
    Wire,
)

MEGABYTE = 1e6


class Draws(Random):
    """Says in advance what is lost: 0 loses, 1 does not."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


def wire(bandwidth: float | None, delay_s: float = 0.0, loss: float = 0.0, rng: Random | None = None) -> Wire:
    return Wire(LinkShape(bandwidth, delay_s, loss), rng or Random(0))


def test_bytes_leave_at_the_bandwidth_and_arrive_a_delay_later() -> None:
    line, flow = wire(MEGABYTE, 0.02), ShapedFlow()
    assert line.send(10.0, 10_000, flow) == pytest.approx(10.03)
    assert line.send(10.0, 5_000, flow) == pytest.approx(10.035)
    assert line.send(11.0, 1_000, flow) == pytest.approx(11.021)  # it was idle


def test_connections_share_one_bandwidth() -> None:
    line, one, other = wire(MEGABYTE), ShapedFlow(), ShapedFlow()
    for _ in range(10):
        line.send(0.0, 1000, one)
        line.send(0.0, 1000, other)
    assert one.arrives == pytest.approx(0.019)
    assert other.arrives == pytest.approx(0.020)


def test_without_a_bandwidth_only_the_delay_counts() -> None:
    line, flow = wire(None, 0.5), ShapedFlow()
    assert line.send(3.0, 10**9, flow) == 3.5
    assert line.ready_at(3.0) == 3.0


def test_a_wire_that_somebody_else_paces_keeps_only_the_window_of_its_bandwidth() -> None:
    line = Wire(LinkShape(10 * MEGABYTE, 0.02), Random(0), paced=False)
    flow = ShapedFlow()
    assert line.send(3.0, 10**6, flow) == 3.02
    assert not line.may_read(flow)


def test_bytes_may_enter_again_when_the_queue_holds_less_than_its_limit() -> None:
    line, flow = wire(MEGABYTE), ShapedFlow()
    line.send(0.0, int(QUEUE_S * MEGABYTE), flow)
    assert line.ready_at(0.0) == 0.0
    line.send(0.0, 7_000, flow)
    assert line.ready_at(0.0) == pytest.approx(0.007)
    assert line.ready_at(1.0) == 1.0


def test_a_reader_stops_at_its_window_and_goes_on_when_bytes_were_delivered() -> None:
    line, flow, other = wire(10 * MEGABYTE, 0.02), ShapedFlow(), ShapedFlow()
    window = line.shape.window
    line.send(0.0, window - 1, flow)
    assert line.may_read(flow)
    line.send(0.0, 1, flow)
    assert not line.may_read(flow)
    assert line.may_read(other)
    flow.in_flight -= 1
    assert line.may_read(flow)


@pytest.mark.parametrize(
    ("bandwidth", "delay_s", "window"),
    [
        (10 * MEGABYTE, 0.02, 900_000),  # 10 MB/s x (40 ms + 50 ms)
        (1000.0, 0.02, MIN_WINDOW),
        (1e10, 0.5, MAX_WINDOW),
        (None, 0.02, UNSHAPED_WINDOW),
    ],
)
def test_a_window_holds_the_round_trip_and_the_queue(bandwidth: float | None, delay_s: float, window: int) -> None:
    assert LinkShape(bandwidth, delay_s).window == window


def test_a_loss_holds_back_what_is_behind_it_in_its_connection_and_nothing_else() -> None:
    rng = Draws(1, 0, 1, 1)
    line, hit, other = wire(SEGMENT * 1000.0, 0.03, 0.1, rng), ShapedFlow(), ShapedFlow()
    assert line.send(0.0, SEGMENT, hit) == pytest.approx(0.031)
    assert line.send(0.0, SEGMENT, hit) == pytest.approx(0.032 + 0.2)
    assert line.send(0.0, SEGMENT, hit) == pytest.approx(0.032 + 0.2)  # behind it
    assert line.send(0.0, SEGMENT, other) == pytest.approx(0.034)


def test_a_retransmission_takes_a_round_trip_where_that_is_longer() -> None:
    line = wire(None, 0.3, 0.1, Draws(0))
    assert line.send(0.0, 1, ShapedFlow()) == pytest.approx(0.3 + 0.6)


def test_losses_are_repaired_side_by_side() -> None:
    line, flow = wire(None, 0.0, 0.1, Draws(0, 0)), ShapedFlow()
    line.send(0.0, 1, flow)
    assert line.send(0.01, 1, flow) == pytest.approx(0.21)


def test_a_long_chunk_is_hit_by_the_loss_of_any_of_its_segments() -> None:
    chance = 1 - 0.99**10
    assert wire(None, 0.0, 0.01, Draws(chance - 1e-9)).send(0.0, 10 * SEGMENT, ShapedFlow()) > 0
    assert wire(None, 0.0, 0.01, Draws(chance + 1e-9)).send(0.0, 10 * SEGMENT, ShapedFlow()) == 0


def test_the_share_of_lost_segments_is_the_declared_one_and_repeats_with_the_seed() -> None:
    def arrivals(seed: int) -> list[float]:
        line = wire(None, 0.0, 0.05, Random(seed))
        return [line.send(0.0, SEGMENT, ShapedFlow()) for _ in range(4000)]

    assert arrivals(1) == arrivals(1)
    assert arrivals(1) != arrivals(2)
    assert sum(arrival > 0 for arrival in arrivals(1)) / 4000 == pytest.approx(0.05, abs=0.015)


def test_a_new_bandwidth_holds_for_what_is_still_in_the_queue() -> None:
    line, flow = wire(MEGABYTE), ShapedFlow()
    line.send(0.0, 20_000, flow)
    line.reshape(0.01, LinkShape(MEGABYTE / 2))
    assert line.backlog_s(0.01) == pytest.approx(0.02)
    line.reshape(0.01, LinkShape(None))
    assert line.backlog_s(0.01) == 0


def test_a_shorter_delay_lets_no_byte_overtake_another() -> None:
    line, flow = wire(None, 0.5), ShapedFlow()
    assert line.send(0.0, 10, flow) == 0.5
    line.reshape(0.1, LinkShape(None, 0.01))
    assert line.send(0.1, 10, flow) == 0.5
    assert line.send(0.6, 10, flow) == pytest.approx(0.61)


@pytest.mark.parametrize(
    "values", [(0.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (math.inf, 0.0, 0.0), (1.0, -0.1, 0.0), (1.0, 0.0, 1.0)]
)
def test_an_impossible_link_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="link's"):
        LinkShape(*values)
