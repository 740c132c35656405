"""Off-policy corrections by hand: each level's weights, and what happens exactly at the bounds."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.training.corrections import correct, importance_weights

WEIGHTS = torch.tensor([0.25, 0.5, 1.0, 3.0, 3.5])


def test_a_weight_is_its_tokens_or_its_sequences_product_or_geometric_mean() -> None:
    logs = torch.tensor([0.25, 2.0, 8.0, 4.0, 1.0], dtype=torch.float64).log()
    ids = torch.tensor([0, 1, 1, 2, 2])
    for level, expected in (
        ("token", [0.25, 2.0, 8.0, 4.0, 1.0]),
        ("sequence", [0.25, 16.0, 16.0, 4.0, 4.0]),
        ("geometric", [0.25, 4.0, 4.0, 2.0, 2.0]),
    ):
        assert importance_weights(logs, ids, level).tolist() == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


def test_logs_are_bounded_after_their_sum_and_not_before() -> None:
    logs, ids = torch.tensor([30.0, -25.0, 15.0, 15.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert importance_weights(logs, ids, "sequence").log().tolist() == pytest.approx([5.0, 5.0, 20.0, 20.0])
    assert importance_weights(logs, ids, "token").log().tolist() == pytest.approx([20.0, -20.0, 15.0, 15.0])


def test_truncation_cuts_what_is_above_the_cap_and_reports_only_that() -> None:
    cut = correct(WEIGHTS, "truncate", 0.5, 3.0)
    assert cut.weights.tolist() == [0.25, 0.5, 1.0, 3.0, 3.0]
    assert cut.truncated.tolist() == [False, False, False, False, True] and not cut.masked.any()


def test_the_mask_keeps_both_bounds() -> None:
    masked = correct(WEIGHTS, "mask", 0.5, 3.0)
    assert masked.weights.tolist() == [0.0, 0.5, 1.0, 3.0, 0.0]
    assert masked.masked.tolist() == [True, False, False, False, True] and not masked.truncated.any()


def test_without_a_correction_every_weight_is_1() -> None:
    same = correct(WEIGHTS, "none", 0.5, 3.0)
    assert same.weights.tolist() == [1.0] * 5 and not same.masked.any() and not same.truncated.any()


def test_no_gradient_flows_through_a_weight() -> None:
    logs = torch.tensor([0.0, math.log(5.0)], requires_grad=True)
    weights = importance_weights(logs, torch.tensor([0, 1]), "token")
    assert not weights.requires_grad
    for correction in ("none", "truncate", "mask"):
        corrected = correct(2.0 * logs, correction, 0.5, 3.0)  # type: ignore[arg-type]
        assert not corrected.weights.requires_grad
