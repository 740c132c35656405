"""Versions take the cheapest way, and nothing that a receiver needs is deleted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.weights.chain import Chain, ChainStep, Unreachable
from streamrl.weights.pacing import BURST_S, LONG_S, QUICK_S, ChunkSize, Pacer

FULL = 1000


def chain_of(*delta_bytes: int, every: int = 3, bound: int | None = None) -> Chain:
    """Versions 0, 1, 2, ..., the first without a delta; anchors are ready at once."""
    chain = Chain(every, bound)
    for number, nbytes in enumerate([None, *delta_bytes]):
        if chain.published(number, nbytes, FULL):
            chain.anchored(FULL)
    return chain


def collected(chain: Chain) -> tuple[set[int], set[int]]:
    """Versions whose delta, and versions whose complete weights, are dropped."""
    deltas, complete = set(chain.deltas), chain.complete
    chain.collect()
    return deltas - set(chain.deltas), set(complete - chain.complete)


def steps(path: tuple[ChainStep, ...]) -> list[tuple[int, int | None]]:
    return [(step.number, step.base) for step in path]


def test_a_receiver_goes_by_deltas_from_what_it_holds_and_a_new_one_by_complete_weights() -> None:
    chain = chain_of(10, 10, 10, 10)
    assert steps(chain.path(2, 4)) == [(3, 2), (4, 3)]
    assert steps(chain.path(None, 4)) == [(4, None)]
    assert chain.path(4, 4) == ()


def test_an_exact_older_version_is_reached_by_anchor_and_deltas() -> None:
    chain = chain_of(10, 10, 10, 10, 10)
    chain.collect()
    assert (chain.anchor, chain.newest, chain.complete) == (3, 5, {3, 5})
    assert steps(chain.path(None, 4)) == [(3, None), (4, 3)]
    assert steps(chain.path(99, 4)) == [(3, None), (4, 3)]
    with pytest.raises(Unreachable):
        chain.path(None, 2)


def test_dear_deltas_lose_to_the_complete_version() -> None:
    assert steps(chain_of(600, 600, every=9, bound=5000).path(0, 2)) == [(2, None)]
    assert steps(chain_of(600, 399, every=9, bound=5000).path(0, 2)) == [(1, 0), (2, 1)]


def test_anchors_come_every_k_versions_and_where_deltas_no_longer_lead_on_from_the_last() -> None:
    chain = Chain(3)
    delta_bytes = [None, 1, 1, 1, 1, 1, 1, None, 1, 1, 1]
    anchors = []
    for number, nbytes in enumerate(delta_bytes):
        if chain.published(number, nbytes, FULL):
            anchors.append(number)
            chain.anchored(700)
        chain.collect()
    assert anchors == [0, 3, 6, 7, 10]
    assert chain_of(400, 400, 400, 400, every=100, bound=900).anchor == 0
    overfull = chain_of(400, 400, 400, every=100, bound=900)
    overfull.collect()
    assert overfull.deltas == (2, 3)
    assert overfull.published(4, 400, FULL)


def test_the_last_anchor_serves_until_the_next_is_ready() -> None:
    chain = chain_of(10, 10, every=3)
    assert chain.published(3, 10, FULL)
    for number in (4, 5, 6, 7):
        assert not chain.published(number, 10, FULL)  # one at a time
        chain.collect()
        assert steps(chain.path(None, number - 1))[0] == (0, None)
    chain.anchored(600)
    assert collected(chain)[1] == {0}
    assert steps(chain.path(None, 4)) == [(3, None), (4, 3)]
    assert steps(chain.path(None, 7)) == [(3, None), (4, 3), (5, 4), (6, 5), (7, 6)]  # 640 bytes, not 1000
    assert chain.published(8, 10, FULL)


def test_no_way_leads_past_a_version_without_a_delta() -> None:
    chain = chain_of(5)
    chain.acknowledged("slow", 0)
    chain.published(2, None, FULL)
    chain.published(3, 5, FULL)
    assert steps(chain.path(0, 3)) == [(3, None)]
    assert chain.deltas == (3,)
    chain.collect()
    with pytest.raises(Unreachable):
        chain.path(0, 1)


def test_deltas_are_kept_for_the_slowest_receiver_until_it_acknowledges_or_leaves() -> None:
    chain = chain_of(10, 10, 10, 10)
    chain.acknowledged("slow", 1)
    chain.acknowledged("fast", 4)
    assert collected(chain)[0] == {1}
    assert chain.deltas == (2, 3, 4)
    chain.acknowledged("slow", 3)
    assert collected(chain)[0] == {2, 3}
    chain.acknowledged("slow", None)
    chain.left("slow")
    assert collected(chain)[0] == set()
    assert chain.deltas == (4,)  # from the anchor 3 on


def test_deltas_are_kept_from_the_version_that_is_on_its_way_to_a_receiver() -> None:
    chain = chain_of(10)
    chain.acknowledged("new", None)
    chain.sends("new", 1)
    for number in range(2, 9):
        if chain.published(number, 10, FULL):
            chain.anchored(FULL)
        chain.collect()
    assert chain.anchor != 1 and steps(chain.path(1, 8)) == [(number, number - 1) for number in range(2, 9)]
    chain.acknowledged("new", 1)
    assert collected(chain)[0] == set()
    chain.sends("new", 4)
    chain.acknowledged("new", None)  # it has asked again, and still holds nothing
    assert collected(chain)[0] == {2, 3, 4, 5, 6}
    chain.sends("new", 8)
    chain.left("new")
    assert chain.in_transit == {}


def test_a_receiver_too_far_behind_gets_what_a_new_one_gets() -> None:
    chain = chain_of(*[30] * 6, every=2, bound=100)
    chain.acknowledged("slow", 0)
    chain.collect()
    assert chain.delta_bytes <= 100
    assert chain.path(0, 6) == chain.path(None, 6)


def test_deltas_may_fill_their_bound_to_the_last_byte() -> None:
    for bound, kept in ((120, (1, 2, 3)), (119, (2, 3))):
        chain = chain_of(40, 40, 40, every=9, bound=bound)
        chain.acknowledged("slow", 0)
        chain.collect()
        assert chain.deltas == kept


def test_what_cannot_be_published_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to be a delta of"):
        Chain(1).published(0, 5, FULL)
    with pytest.raises(ValueError, match="version 2 after version 2"):
        chain_of(1, 1).published(2, 1, FULL)
    with pytest.raises(ValueError, match="at least 1"):
        Chain(0)


def cheapest(deltas: list[ChainStep], complete: dict[int, int], holds: int | None, want: int) -> int | None:
    """Bytes of the cheapest way, by trying all sets of steps in all useful orders (a way never goes back)."""
    all_steps = [ChainStep(n, None, size) for n, size in complete.items()] + deltas
    costs = []
    for count in range(len(all_steps) + 1):
        for chosen in itertools.combinations(all_steps, count):
            at = holds
            for step in sorted(chosen, key=lambda s: (s.base is not None, s.number)):
                at = step.number if step.base in (None, at) else -1
            if at == want:
                costs.append(sum(step.nbytes for step in chosen))
    return min(costs, default=None)


@given(
    st.lists(st.integers(0, 1500), max_size=6),
    st.integers(1, 4),
    st.none() | st.integers(0, 7),
    st.integers(0, 7),
    st.booleans(),
)
def test_the_path_is_the_cheapest_of_all(
    sizes: list[int], every: int, holds: int | None, want: int, collected: bool
) -> None:
    chain = chain_of(*sizes, every=every, bound=10**6)
    if collected:
        chain.collect()
    deltas = [ChainStep(n, n - 1, sizes[n - 1]) for n in chain.deltas]
    expected = cheapest(deltas, dict.fromkeys(chain.complete, FULL), holds, want)
    if expected is None:
        with pytest.raises(Unreachable):
            chain.path(holds, want)
        return
    path = chain.path(holds, want)
    assert sum(step.nbytes for step in path) == expected
    at = holds
    for step in path:
        assert step.base in (None, at)
        at = step.number
    assert at == want


Operation = tuple[str, int, int]
KINDS = ("publish", "break", "anchor", "ack", "send", "have", "join", "leave")
operations = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(1, 400)), max_size=60)


@given(operations, st.integers(1, 5), st.sampled_from([300, 10**6]))
def test_nothing_that_a_receiver_needs_is_ever_collected(history: list[Operation], every: int, bound: int) -> None:
    chain = Chain(every, bound)
    sizes: dict[int, int | None] = {}
    """Of every version ever published: bytes of its delta (the model, which forgets nothing)."""
    deltas: set[int] = set()
    followed: set[str] = set()
    """Receivers that acknowledged a version from which all deltas were still there, or that was sent as the newest."""
    sent: dict[str, int] = {}
    """Version that was sent last to a receiver."""
    number = 0
    for kind, who, size in history:
        receiver = f"r{who}"
        if kind in ("publish", "break"):
            number += 1 + size % 3
            sizes[number] = size if kind == "publish" and sizes else None
            chain.published(number, sizes[number], FULL)
        elif kind == "anchor" and chain.coming_anchor is not None:
            chain.anchored(FULL - size)
        elif kind == "ack" and sizes:
            holds = sorted(sizes)[-1 - size % min(3, len(sizes))]
            chain.acknowledged(receiver, holds)
            followed.discard(receiver)
            followed |= {receiver} if {n for n in sizes if n > holds} <= set(chain.deltas) else set()
        elif kind == "send" and sizes and receiver not in chain.in_transit:
            chain.sends(receiver, number)
            sent[receiver] = number
        elif kind == "have" and receiver in sent and receiver in chain.in_transit:
            chain.acknowledged(receiver, sent.pop(receiver))
            followed.add(receiver)
        elif kind == "join":
            followed.discard(receiver)
            chain.acknowledged(receiver, None)
        elif kind == "leave":
            chain.left(receiver)
        deltas = set() if kind == "break" else deltas
        deltas |= {number} if kind == "publish" and sizes.get(number) is not None else set()
        assert set(chain.deltas) == deltas
        dropped, _ = collected(chain)
        deltas -= dropped
        assert list(chain.deltas) == sorted(deltas)
        assert chain.delta_bytes <= bound
        if chain.newest is None:
            continue
        assert chain.complete == {chain.newest, chain.anchor} - {None}
        if chain.anchor is not None:
            assert chain.path(chain.anchor, chain.newest) or chain.anchor == chain.newest
        assert sum(step.nbytes for step in chain.path(None, chain.newest)) <= FULL
        for receiver, held in chain.held.items():
            path = chain.path(held, chain.newest)
            cost = sum(step.nbytes for step in path)
            assert cost <= FULL
            assert path or held == chain.newest
            later = [sizes[n] for n in sizes if held is not None and n > held]
            by_deltas = sum(nbytes for nbytes in later if nbytes is not None)
            if receiver in followed and held is not None and None not in later and by_deltas <= bound:
                assert cost <= by_deltas


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 2)), min_size=1), st.floats(100, 1e4))
def test_paced_messages_stay_within_the_rate_in_every_window(messages: list[tuple[int, float]], rate: float) -> None:
    pacer = Pacer()
    now, sent = 100.0, []
    for nbytes, idle in messages:
        now += pacer.wait_s(nbytes, rate, now)
        sent.append((now, nbytes))
        now += idle
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            window = sent[last][0] - sent[first][0]
            in_between = sum(nbytes for _, nbytes in sent[first:last])
            assert in_between <= rate * (window + BURST_S) * (1 + 1e-9) + 1e-6


def test_pacing_uses_the_whole_rate_also_when_the_sender_wakes_late() -> None:
    pacer, now, sent = Pacer(), 0.0, 0
    while now < 10:
        wait = pacer.wait_s(1000, 10_000, now)
        now += wait + (0.02 if wait else 0.0)
        sent += 1000
    assert sent == pytest.approx(100_000, rel=0.02)
    assert pacer.wait_s(10**9, None, now) == 0
    with pytest.raises(ValueError, match="lets nothing go"):
        pacer.wait_s(1, 0, now)


def test_chunks_grow_while_they_are_acknowledged_quickly_and_shrink_over_a_link_that_is_too_slow() -> None:
    size, most, sent = ChunkSize(1000), 3000, []
    for took_s in (0.1, 0.1, 0.1, QUICK_S, LONG_S, 11.0, 11.0, 11.0, 0.1):
        sent.append(size.within(most))
        size.acknowledged(sent[-1], took_s)
    assert sent == [1000, 2000, 3000, 3000, 3000, 3000, 1500, 1000, 1000] and size.within(most) == 2000
    assert ChunkSize(1000).within(500) == 500
    size.acknowledged(1000, 0.1)
    assert size.within(most) == 2000, "it was sent before, and says nothing of larger ones"


def test_a_link_far_below_its_declared_bandwidth_gets_chunks_that_arrive_before_it_is_taken_for_dead() -> None:
    """Chunks of 1.5 MB are declared, of which none arrives within 30 s at 40 kB/s; two are in flight at most."""
    size, rate, slowest = ChunkSize(64 * 1024), 40_000.0, 0.0
    for _ in range(50):
        nbytes = size.within(1_562_500)
        slowest = max(slowest, nbytes / rate)
        size.acknowledged(nbytes, 3 * nbytes / rate)
    assert slowest < 30 / 2
