"""Every loss against its formula written out in plain Python, its gradient against finite differences; edge cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.surrogates import (
    LOG_RATIO_LIMIT,
    SURROGATES,
    LossInputs,
    SurrogateKeys,
    bounded,
    clip_loss,
    detached_clip_loss,
    kept_gradient_loss,
    reinforce_loss,
    sequence_clip_loss,
    sequence_lengths,
    soft_gate_loss,
)
from streamrl.training.losses import clipped_value_loss, kl_estimate, token_weights, value_loss

LOW, HIGH = 0.2, 0.28

# inside the clip; above it with A > 0 (clipped) and A < 0 (not); below it with A < 0 (clipped) and A > 0 (not); A = 0
LOGP = [-1.0, -0.5, -0.5, -2.0, -2.0, -1.3]
OLD = [-1.1, -1.0, -1.0, -1.0, -1.0, -1.3]
ADV = [0.7, 1.5, -1.5, -0.8, 0.8, 0.0]
REF = [-1.2, -0.4, -0.9, -2.2, -1.0, -1.3]
IDS = [0, 1, 1, 2, 2, 2]


def vector(values: list[float], grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def clipped(ratio: float, low: float = LOW, high: float = HIGH) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def spans(ids: list[int]) -> list[range]:
    """The tokens of each sequence."""
    cuts = [i for i, number in enumerate(ids) if i == 0 or number != ids[i - 1]] + [len(ids)]
    return [range(a, b) for a, b in pairwise(cuts)]


def test_clip_loss_is_ppos() -> None:
    def loss(logp: torch.Tensor) -> torch.Tensor:
        return clip_loss(logp - vector(OLD), vector(ADV), LOW, HIGH).loss

    expected = []
    for new, old, advantage in zip(LOGP, OLD, ADV, strict=True):
        ratio = math.exp(new - old)
        expected.append(-min(ratio * advantage, clipped(ratio) * advantage))
    assert loss(vector(LOGP)).tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(loss, (vector(LOGP, grad=True),), eps=1e-7, atol=1e-6)


def test_only_tokens_beyond_the_clip_in_the_advantages_direction_are_clipped() -> None:
    logp = vector(LOGP, grad=True)
    result = clip_loss(logp - vector(OLD), vector(ADV), LOW, HIGH)
    result.loss.sum().backward()
    assert result.clipped.tolist() == [False, True, False, True, False, False]
    assert [float(g) == 0.0 for g in logp.grad] == [False, True, False, True, False, True]


@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (1e-3, 2e-3), (0.9, 9.0)])
def test_sequence_clip_loss_is_gspos(low: float, high: float) -> None:
    adv = [0.7, -1.5, -1.5, 0.8, 0.8, 0.8]

    def loss(logp: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor(IDS)
        losses = sequence_clip_loss(logp - vector(OLD), vector(adv), ids, low, high).loss
        return (losses * token_weights(sequence_lengths(ids)[ids], "sequence", torch.float64)).sum()

    expected = 0.0
    for tokens in spans(IDS):
        ratio = math.exp(sum(LOGP[t] - OLD[t] for t in tokens) / len(tokens))  # s_i, eq. 7
        expected -= min(ratio * adv[tokens[0]], clipped(ratio, low, high) * adv[tokens[0]])
    assert float(loss(vector(LOGP))) == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(loss, (vector(LOGP, grad=True),), eps=1e-7, atol=1e-6)


def test_detached_clip_loss_is_cispos() -> None:
    weights = [clipped(math.exp(new - old)) for new, old in zip(LOGP, OLD, strict=True)]
    expected = [-w * a * new for w, a, new in zip(weights, ADV, LOGP, strict=True)]
    frozen = vector(LOGP) - vector(OLD)  # finite differences must not move the weight
    result = detached_clip_loss(vector(LOGP), frozen, vector(ADV), LOW, HIGH)
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert result.clipped.tolist() == [False, True, True, True, True, False]
    assert torch.autograd.gradcheck(
        lambda logp: detached_clip_loss(logp, frozen, vector(ADV), LOW, HIGH).loss, (vector(LOGP, grad=True),)
    )
    logp = vector(LOGP, grad=True)
    detached_clip_loss(logp, logp - vector(OLD), vector(ADV), LOW, HIGH).loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-w * a for w, a in zip(weights, ADV, strict=True)], rel=1e-12)


def test_kept_gradient_loss_is_gppos() -> None:
    logp = vector(LOGP, grad=True)
    result = kept_gradient_loss(logp - vector(OLD), vector(ADV), LOW, HIGH)
    result.loss.sum().backward()
    plain = clip_loss(vector(LOGP) - vector(OLD), vector(ADV), LOW, HIGH)
    assert torch.equal(result.loss.detach(), plain.loss) and torch.equal(result.clipped, plain.clipped)
    expected = []  # the gradient of a token is its own value: the weight that it has times its advantage
    for new, old, advantage in zip(LOGP, OLD, ADV, strict=True):
        ratio = math.exp(new - old)
        expected.append(-min(ratio * advantage, clipped(ratio) * advantage))
    assert logp.grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_soft_gate_loss_is_sapos() -> None:
    ratios = [math.exp(new - old) for new, old in zip(LOGP, OLD, strict=True)]
    taus = [1.0 if a > 0 else 1.05 for a in ADV]
    expected = [-4 / tau / (1 + math.exp(-tau * (r - 1))) * a for r, a, tau in zip(ratios, ADV, taus, strict=True)]
    result = soft_gate_loss(vector(LOGP) - vector(OLD), vector(ADV), 1.0, 1.05)
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-12) and not result.clipped.any()
    assert torch.autograd.gradcheck(
        lambda logp: soft_gate_loss(logp - vector(OLD), vector(ADV), 1.0, 1.05).loss, (vector(LOGP, grad=True),)
    )
    on_policy = vector(LOGP, grad=True)  # where r = 1 the gradient is that of r A
    soft_gate_loss(on_policy - vector(LOGP), vector(ADV), 1.0, 1.05).loss.sum().backward()
    assert on_policy.grad.tolist() == pytest.approx([-a for a in ADV], rel=1e-12)


def test_without_a_lower_bound_a_small_weight_stays_small() -> None:
    result = detached_clip_loss(vector([-9.0]), vector([-8.0]), vector([1.0]), 1.0, 4.0)
    assert result.loss.tolist() == pytest.approx([math.exp(-8.0) * 9.0])


def test_reinforce_loss() -> None:
    assert reinforce_loss(vector(LOGP), vector(ADV)).loss.tolist() == pytest.approx(
        [-a * new for a, new in zip(ADV, LOGP, strict=True)], rel=1e-12
    )
    assert torch.autograd.gradcheck(lambda x: reinforce_loss(x, vector(ADV)).loss, (vector(LOGP, grad=True),))


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates(estimator: str) -> None:
    def loss(logp: torch.Tensor) -> torch.Tensor:
        return kl_estimate(logp, vector(REF), estimator)  # type: ignore[arg-type]

    expected = [KL[estimator](new - ref) for new, ref in zip(LOGP, REF, strict=True)]
    assert loss(vector(LOGP)).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert torch.autograd.gradcheck(loss, (vector(LOGP, grad=True),), eps=1e-7, atol=1e-6)


def test_the_estimators_expectations_are_the_kl_and_only_k2_has_its_gradient() -> None:
    logits, ref = vector([0.3, -0.7, 1.1], grad=True), torch.log_softmax(vector([0.1, 0.2, -0.4]), -1)
    logp = torch.log_softmax(logits, -1)
    exact = (logp.exp() * (logp - ref)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in ("k1", "k2", "k3"):
        estimates = kl_estimate(logp, ref, estimator)  # type: ignore[arg-type]
        mean = (logp.exp().detach() * estimates).sum()  # samples are constants, as in training
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        if estimator != "k2":
            assert float(mean.detach()) == pytest.approx(float(exact.detach()))
        assert bool(torch.allclose(found, gradient)) == (estimator == "k2")
        assert bool(torch.allclose(found, torch.zeros(3, dtype=torch.float64), atol=1e-12)) == (estimator == "k1")


def test_value_loss() -> None:
    returns = vector([1.0, 0.0, -2.0])
    values = [0.5, 0.0, 1.0]
    assert value_loss(vector(values), returns).loss.tolist() == [0.125, 0.0, 4.5]
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns).loss, (vector(values, grad=True),))


def test_clipped_value_loss_by_hand() -> None:
    returns, old = vector([1.0, 1.0, 1.0, 0.0, 3.0]), vector([0.0, 0.0, 0.0, 0.0, 4.0])
    # within; beyond and nearer to the return: no gradient; beyond and away; past the return; beyond on the lower side
    values = vector([0.25, 0.75, -1.0, 2.0, 3.25], grad=True)
    loss, clipped = clipped_value_loss(values, returns, old, 0.5)
    assert loss.tolist() == [0.28125, 0.125, 2.0, 2.0, 0.125]
    assert clipped.tolist() == [False, True, False, False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == [-0.75, 0.0, -2.0, 2.0, 0.0]


def test_token_weights() -> None:
    lengths = torch.tensor([1, 2, 2, 3, 3, 3])
    assert token_weights(lengths, "sequence", torch.float64).tolist() == pytest.approx([1, 1 / 2, 1 / 2] + [1 / 3] * 3)
    assert token_weights(lengths, "token", torch.float64).tolist() == [1.0] * 6
    assert token_weights(lengths, "constant", torch.float64).tolist() == [1.0] * 6


KEYS = SurrogateKeys(clip_low=LOW, clip_high=HIGH, gate_positive=1.0, gate_negative=1.05)


def surrogate_loss(
    name: str, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    return SURROGATES[name].loss(LossInputs(new, new - old, advantages, ids), KEYS).loss


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    logp = vector([-1.0, -3.0], grad=True)
    surrogate_loss(name, logp, logp.detach().clone(), vector([2.0, -1.0]), torch.tensor([0, 1])).sum().backward()
    assert logp.grad.tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("name", SURROGATES)
def test_no_tokens_give_no_loss(name: str) -> None:
    none = torch.zeros(0, requires_grad=True)
    total = surrogate_loss(name, none, none.detach(), none.detach(), torch.zeros(0, dtype=torch.int64)).sum()
    total.backward()
    assert float(total.detach()) == 0.0 and none.grad.shape == (0,)


@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=25)
@given(data=st.data())
def test_loss_and_gradient_are_finite_whatever_the_ratio(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    numbers = st.lists(st.floats(-800.0, 0.0, width=32), min_size=len(ids), max_size=len(ids))
    new = torch.tensor(data.draw(numbers), requires_grad=True)
    old = torch.tensor(data.draw(numbers))
    advantages = torch.tensor(data.draw(st.lists(st.floats(-5, 5, width=32), min_size=len(ids), max_size=len(ids))))
    total = surrogate_loss(name, new, old, advantages, ids).sum()
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(new.grad).all()
    # without advantage no gradient, exactly
    new.grad = None
    surrogate_loss(name, new, old, torch.zeros_like(advantages), ids).sum().backward()
    assert not new.grad.any()


def test_log_ratios_end_at_20_either_way_and_have_no_gradient_beyond() -> None:
    logs = vector([-25.0, -20.0, -19.5, 0.0, 19.5, 20.5], grad=True)
    bounded(logs).sum().backward()
    assert bounded(logs).tolist() == [-20.0, -20.0, -19.5, 0.0, 19.5, 20.0]
    assert logs.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def test_a_ratio_overflow_is_clipped_for_good_tokens_and_bounded_without_gradient_for_bad_ones() -> None:
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    losses = clip_loss(new - torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0]), LOW, HIGH).loss
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-(1 + HIGH), math.exp(LOG_RATIO_LIMIT)])
    assert new.grad.tolist() == [0.0, 0.0]


def test_an_endless_ratio_keeps_no_gradient_of_the_clipped_token() -> None:
    ratios = torch.tensor([math.inf, -math.inf], requires_grad=True)
    result = kept_gradient_loss(ratios, torch.tensor([1.0, -1.0]), LOW, HIGH)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-(1 + HIGH), 1 - LOW]) and ratios.grad.tolist() == [0.0, 0.0]
