"""A micro-batch is dealt so that the largest share is small, in operations, whatever the lengths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.cost.model_shapes import MODELS, square_cost
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.rank_shares import balance, cost, deal
from tests.rollouts.test_micro_batch import group, lengths


def test_the_longest_group_goes_first_and_each_to_the_emptiest_rank() -> None:
    groups = [group("a", 1, 1), group("b", 1, 6), group("c", 1, 4), group("d", 1, 3), group("e", 1, 1)]
    # 7 | 5; 4 to the second (9); 2 to the first (9); 2 to the first of two equal ranks
    assert [[one.group_id for one in share] for share in balance(groups, 2)] == [["b", "a", "e"], ["c", "d"]]
    assert balance([], 2) == [[], []]


def test_ranks_get_runs_of_the_list_or_balanced_shares_of_what_is_left() -> None:
    groups = [group("a", 1, 3), group("b", 1, 3), group("c", 1, 3)]
    shares, rest = deal(groups, 4, 2)
    assert (lengths(shares), lengths([rest])) == ([[("a", 1, [3])], [("b", 1, [3])]], [[("c", 1, [3])]])
    shares, rest = deal(groups, 4, 3)
    assert (lengths(shares), rest) == ([[("a", 1, [3])], [("b", 1, [3])], [("c", 1, [3])]], [])
    shares, rest = deal(groups[:2], 8, 2)  # one run, two ranks
    assert (lengths(shares), rest) == ([[("a", 1, [3])], [("b", 1, [3])]], [])
    assert deal([], 4, 2) == ([[], []], [])


def test_shares_of_fewer_runs_than_ranks_are_about_equal() -> None:
    groups = [group(name, 1, size) for name, size in (("a", 4), ("b", 4), ("c", 2), ("d", 2), ("e", 2))]
    # runs of at most 9 of 5, 5, 3, 3, 3: [a] [b c] [d e]
    shares, rest = deal(groups, 9, 4)
    assert ([[one.group_id for one in share] for share in shares], rest) == ([["a"], ["b"], ["c", "e"], ["d"]], [])
    # a share may be full: runs of 5 + 3 and 5, shares of 5, 5 and 3
    shares, rest = deal([group("a", 1, 4), group("b", 1, 2), group("c", 1, 4)], 8, 3)
    assert ([[one.group_id for one in share] for share in shares], rest) == ([["a"], ["c"], ["b"]], [])
    # exactly the limit is not too much
    shares, rest = deal([group("a", 1, 2), group("b", 1, 4)], 5, 3)
    assert ([[one.group_id for one in share] for share in shares], rest) == ([["a"], ["b"], []], [])


def test_shares_are_runs_where_a_share_would_exceed_the_limit() -> None:
    """A sequence of 13 tokens exceeds every limit; the runs are as good as equal shares, and are in order."""
    shares, rest = deal([group("a", 1, 1), group("b", 1, 12)], 5, 4)
    assert (lengths(shares), rest) == ([[("a", 1, [1])], [("b", 1, [12])], [], []], [])


def test_one_long_answer_weighs_as_much_as_many_short_ones() -> None:
    long, short = group("long", 1, 99), group("short", 1, 9)
    assert (long.squares, short.squares) == (1 + 99 * 101, 1 + 9 * 11)
    groups = [long, *[group(f"s{number}", 1, 39) for number in range(4)]]
    # 100 tokens and 4 x 40: by tokens the long one gets a neighbour, by operations it has a rank for itself
    assert [len(share) for share in balance(groups, 2)] == [2, 3]
    assert [len(share) for share in balance(groups, 2, square_cost=1.0)] == [1, 4]


def test_full_runs_are_dealt_again_where_that_makes_the_largest_smaller() -> None:
    groups = [group("a", 1, 9), group("b", 1, 9), *[group(name, 1, 4) for name in "cdef"]]
    shares, rest = deal(groups, 20, 2, square_cost=1.0)  # runs: a b | c d e f
    assert ([[one.group_id for one in share] for share in shares], rest) == ([["a", "c", "e"], ["b", "d", "f"]], [])
    assert deal(groups, 20, 2)[0] == [groups[:2], groups[2:]]  # equal in tokens: the order is kept


def test_a_group_is_halved_for_a_rank_that_would_have_nothing_to_do_if_that_is_quicker() -> None:
    shares, rest = deal([group("a", 2, 6, 5, 2)], 100, 2)
    assert (lengths(shares), rest) == ([[("a", 2, [5, 2])], [("a", 2, [6])]], [])
    assert lengths(deal([group("a", 90, 1, 1)], 100, 3)[0]) == [[("a", 90, [1])], [("a", 90, [1])], []]
    assert lengths(deal([group("a", 90, 1)], 100, 2)[0]) == [[("a", 90, [1])], []]
    episode = [replace(group("a", 1, 5, 5), trajectory="episode")]
    assert deal(episode, 100, 2)[0] == [episode, []]


@pytest.mark.parametrize("seed", range(8))
def test_dealing_loses_no_sequence_and_is_never_worse_than_runs(seed: int) -> None:
    rng = random.Random(seed)
    groups = [group(f"g{n}", rng.randint(1, 9), *(rng.randint(1, 40) for _ in range(4))) for n in range(5)]
    ranks, most = rng.randint(1, 6), rng.randint(60, 300)
    shares, rest = deal(groups, most, ranks, square_cost=0.1)
    sent = [len(one.completion_tokens) for share in [*shares, rest] for part in share for one in part.sequences]
    assert sorted(sent) == sorted(len(one.completion_tokens) for part in groups for one in part.sequences)
    assert len(shares) == ranks and all(sum(part.tokens for part in share) <= most for share in shares)
    runs = split_into_micro_batches(groups, most)[:ranks]
    assert max(cost(share, 0.1) for share in shares) <= max(cost(run, 0.1) for run in runs)


def test_what_a_square_costs_follows_from_the_shape() -> None:
    small = MODELS["0.5b"]
    layer = 2 * 896 * 64 * (14 + 2) + 3 * 896 * 4864
    assert small.square_cost() == pytest.approx(24 * 14 * 64 / (24 * layer + 896 * 151936))
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    dense = dict(zip(names, (2, 8, 2, 6, 32), strict=True))
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 3, "intermediate_size": 99}
    assert square_cost(dense | experts) == square_cost(dense) > 0
    assert square_cost({"hidden_size": 8}) == 0.0  # unknown: tokens are balanced
