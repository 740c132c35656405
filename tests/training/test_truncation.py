"""The trainer keeps the tokens that vLLM's rules keep, and always the sampled one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import MinPLogitsWarper

from streamrl.training.truncation import ALL_TOKENS, Truncation, truncate_

GRID = [Truncation(*each) for each in itertools.product((0, 1, 20, 10_000), (1.0, 0.9, 0.5), (0.0, 0.05, 1.0))]


def kept_tokens(logits: list[float], truncation: Truncation) -> list[int]:
    """Token ids that are kept, by the rules one after the other, the likeliest first."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    top = logits[order[0]]
    if truncation.min_p:
        order = [token for token in order if math.exp(logits[token] - top) >= truncation.min_p]
    if truncation.top_k and len(order) > truncation.top_k:
        order = [token for token in order if logits[token] >= logits[order[truncation.top_k - 1]]]
    total = math.fsum(math.exp(logits[token] - top) for token in order)
    kept, reached = [], 0.0
    for token in order:
        if reached < truncation.top_p:
            kept.append(token)
        reached += math.exp(logits[token] - top) / total
    return kept


@pytest.mark.parametrize("truncation", GRID)
@pytest.mark.parametrize("size", [0.1, 3.0])  # nearly uniform, so that top-p keeps hundreds; and peaked
def test_the_kept_tokens_are_those_of_the_rules_and_the_sampled_one(truncation: Truncation, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 600, generator=generator) * size
    likeliest = logits.topk(8).indices
    targets = torch.cat([likeliest[:8, 3], torch.randint(0, 600, (8,), generator=generator)])
    given = logits.clone()
    outside = truncate_(logits, targets, truncation)
    for row, target in enumerate(targets.tolist()):
        rules = set(kept_tokens(given[row].tolist(), truncation))
        kept = set(torch.isfinite(logits[row]).nonzero()[:, 0].tolist())
        assert kept == rules | {target}
        assert bool(outside[row]) == (target not in rules)
        assert torch.equal(logits[row, sorted(kept)], given[row, sorted(kept)])


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_more_tokens_are_sorted_of_those_rows_alone_whose_edge_is_far(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 5000, generator=generator)
    flat = torch.tensor([2, 3, 11])
    logits[[n for n in range(12) if n not in flat], :7] += 20
    targets = logits.topk(3).indices[:, 2]
    sorted_rows: list[tuple[int, int]] = []
    topk = torch.Tensor.topk

    def noted(self: torch.Tensor, count: int) -> object:
        sorted_rows.append((len(self), count))
        return topk(self, count)

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    truncation = Truncation(top_p=top_p)
    alone = torch.cat([row.clone() for row in logits.split(1)])
    outside_alone = torch.cat(
        [truncate_(row, target, truncation) for row, target in zip(alone.split(1), targets.split(1), strict=True)]
    )
    sorted_rows.clear()
    together = logits.clone()
    outside = truncate_(together, targets, truncation)
    assert torch.equal(together, alone) and torch.equal(outside, outside_alone)
    assert torch.isfinite(together).sum(-1)[flat].min() > 256 > torch.isfinite(together[0]).sum() > 0
    assert sorted_rows[:2] == [(12, 256), (3, 2048)] and all(count == 3 for count, _ in sorted_rows[1:])


def test_a_row_whose_tokens_are_all_kept_and_one_without_numbers_end_the_search() -> None:
    logits = torch.zeros(2, 600)
    logits[1] = math.nan
    truncate_(logits, torch.tensor([5, 5]), Truncation(top_p=0.9999))
    assert torch.equal(logits[0], torch.zeros(600)) and logits[1].isnan().all()


@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = 3.0 * torch.randn(16, 600, generator=torch.Generator().manual_seed(0))
    theirs = MinPLogitsWarper(min_p)(torch.zeros(16, 1, dtype=torch.long), logits.clone())
    ours = logits.clone()
    assert not truncate_(ours, logits.argmax(-1), Truncation(min_p=min_p)).any()
    assert torch.equal(ours, theirs)


def test_only_a_truncation_that_drops_something_is_one() -> None:
    assert not ALL_TOKENS and not Truncation()
    assert Truncation(top_k=1) and Truncation(top_p=0.99) and Truncation(min_p=0.1)


def test_of_equal_tokens_at_the_edge_of_top_p_the_sampled_one_is_kept() -> None:
    """Whichever vLLM has kept: the mass of the kept tokens is the same."""
    for target in range(1, 9):
        logits = torch.tensor([[2.0, *[1.0] * 8, 0.0]])
        outside = truncate_(logits, torch.tensor([target]), Truncation(top_p=0.5))
        assert not outside and torch.isfinite(logits).sum() == 4


def test_equals_of_the_kth_likeliest_token_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    truncate_(logits, torch.tensor([0]), Truncation(top_k=2))
    assert torch.isfinite(logits).tolist() == [[True, True, True, True, False]]


def test_a_sampled_token_that_all_rules_drop_is_still_the_only_addition() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -50.0]])
    assert truncate_(logits, torch.tensor([3]), Truncation(top_k=2, top_p=0.7, min_p=0.1))
    assert logits.tolist() == [[3.0, -math.inf, -math.inf, -50.0]]
