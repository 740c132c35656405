"""Corrections by hand; the whole objective against its formula written out, for every algorithm and correction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from streamrl.config.algorithm import Algorithm, AlgorithmConfig, PPOConfig
from streamrl.controller.step_metrics import _explained_variance
from streamrl.training.corrections import correct, importance_weights
from streamrl.training.objective import MicroStats, policy_objective, value_objective
from tests.training.test_losses import IDS, KL, clipped, spans, vector

NAMES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "ppo"]

NEW = [-1.0, -0.5, -0.5, -2.0, -2.0, -1.3]
GENERATOR = [-1.1, -1.6, -1.0, -1.0, -1.7, -1.2]
PROXIMAL = [-1.2, -0.6, -0.9, -1.5, -1.9, -1.4]
REFERENCE = [-1.2, -0.4, -0.9, -2.2, -1.0, -1.3]
ADV = [0.7, -1.5, -1.5, 0.8, 0.8, 0.8]


def algorithm(name: str, **keys: Any) -> Algorithm:
    if name == "ppo":
        keys = {"critic": {}} | keys
    made: Algorithm = TypeAdapter(AlgorithmConfig).validate_python({"name": name, **keys})
    return made


def test_weights_and_corrections_by_hand() -> None:
    logs = vector([math.log(x) for x in (0.25, 2.0, 8.0, 4.0, 1.0)])
    ids = torch.tensor([0, 1, 1, 2, 2])
    assert importance_weights(logs, ids, "token").tolist() == pytest.approx([0.25, 2.0, 8.0, 4.0, 1.0])
    assert importance_weights(logs, ids, "sequence").tolist() == pytest.approx([0.25, 16.0, 16.0, 4.0, 4.0])
    geometric = importance_weights(logs, ids, "geometric")
    assert geometric.tolist() == pytest.approx([0.25, 4.0, 4.0, 2.0, 2.0])

    cut = correct(geometric, "truncate", 0.5, 3.0)
    assert cut.weights.tolist() == pytest.approx([0.25, 3.0, 3.0, 2.0, 2.0])
    assert cut.truncated.tolist() == [False, True, True, False, False] and not cut.masked.any()
    masked = correct(geometric, "mask", 0.5, 3.0)
    assert masked.weights.tolist() == pytest.approx([0.0, 0.0, 0.0, 2.0, 2.0])
    assert masked.masked.tolist() == [True, True, True, False, False] and not masked.truncated.any()
    assert correct(geometric, "none", 0.5, 3.0).weights.tolist() == [1.0] * 5


def written_out(config: Algorithm, new: list[float], current: list[float]) -> float:
    """The objective in plain Python; `new` is differentiated, `current` its constant copy."""
    options, total = config.off_policy, 0.0
    proximal = options.ratio_to == "proximal"
    for tokens in spans(IDS):
        log_w = [(PROXIMAL[t] if proximal else current[t]) - GENERATOR[t] for t in tokens]
        for i, t in enumerate(tokens):
            w = {
                "token": math.exp(log_w[i]),
                "sequence": math.prod(math.exp(x) for x in log_w),
                "geometric": math.prod(math.exp(x) for x in log_w) ** (1 / len(tokens)),
            }[options.level]
            inside = options.low <= w <= options.high
            corrected = {"none": 1.0, "truncate": min(w, options.high), "mask": w * inside}[options.correction]
            if not proximal and config.surrogate != "reinforce":
                corrected = 0.0 if options.correction == "mask" and not inside else 1.0
            anchor = PROXIMAL if proximal else GENERATOR
            ratio = math.exp(new[t] - anchor[t])
            if config.surrogate == "sequence_clip":
                ratio = math.exp(sum(new[k] - anchor[k] for k in tokens) / len(tokens))
            if config.surrogate == "reinforce":
                loss = -ADV[t] * new[t]
            elif config.surrogate == "soft_gate":
                tau = config.gate[0] if ADV[t] > 0 else config.gate[1]
                loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * ADV[t]
            elif config.surrogate == "detached_clip":
                loss = -clipped(math.exp(current[t] - anchor[t]), *config.clip) * ADV[t] * new[t]
            else:
                loss = -min(ratio * ADV[t], clipped(ratio, *config.clip) * ADV[t])
            kl = config.kl.coef * KL[config.kl.estimator](new[t] - REFERENCE[t]) if config.kl.placement == "loss" else 0
            total += (corrected * loss + kl) / (len(tokens) if config.aggregation == "sequence" else 1)
    return total


def corrections(name: str) -> list[dict[str, Any]]:
    levels = ("token", "sequence", "geometric")
    bounds = {"low": 0.7, "high": 1.4}
    found: list[dict[str, Any]] = [{}]
    found += [{"correction": "mask", "level": level, **bounds} for level in levels]
    if name == "rloo":
        return found + [{"correction": "truncate", "level": level, **bounds} for level in levels]
    proximal = {"ratio_to": "proximal", **bounds}
    return found + [
        proximal | {"correction": kind, "level": level} for kind in ("none", "truncate", "mask") for level in levels
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kl", [{}, {"coef": 0.3, "estimator": "k2"}, {"coef": 0.3}])
def test_the_objective_is_the_formula_and_so_is_its_gradient(name: str, kl: dict[str, Any]) -> None:
    for off_policy in corrections(name):
        config = algorithm(name, off_policy=off_policy, kl=kl)

        logp = vector(NEW, grad=True)
        arguments = (vector(GENERATOR), vector(ADV), torch.tensor(IDS), vector(PROXIMAL), vector(REFERENCE))
        result = policy_objective(config, logp, *arguments)
        assert float(result.loss_sum.detach()) == pytest.approx(written_out(config, NEW, NEW), rel=1e-12), off_policy
        result.loss_sum.backward()
        for t in range(len(NEW)):  # central differences; weights stay those of the current policy
            up, down = ([x + step * (k == t) for k, x in enumerate(NEW)] for step in (1e-6, -1e-6))
            numeric = (written_out(config, up, NEW) - written_out(config, down, NEW)) / 2e-6
            assert float(logp.grad[t]) == pytest.approx(numeric, rel=1e-6, abs=1e-8), (off_policy, t)


def test_gradcheck_of_a_whole_objective() -> None:
    config = algorithm(
        "dapo",
        kl={"coef": 0.1},
        off_policy={"ratio_to": "proximal", "correction": "truncate", "level": "geometric", "high": 1.2},
    )

    def loss(logp: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor(IDS)
        return policy_objective(
            config, logp, vector(GENERATOR), vector(ADV), ids, vector(PROXIMAL), vector(REFERENCE)
        ).loss_sum

    assert torch.autograd.gradcheck(loss, (vector(NEW, grad=True),), eps=1e-7, atol=1e-6)


def test_without_a_copy_the_policy_itself_is_proximal() -> None:
    config = algorithm("grpo", off_policy={"ratio_to": "proximal", "correction": "truncate", "high": 1.5})
    logp = vector(NEW, grad=True)
    policy_objective(config, logp, vector(GENERATOR), vector(ADV), torch.tensor(IDS)).loss_sum.backward()
    lengths = [1, 2, 2, 3, 3, 3]
    weights = [min(math.exp(new - old), 1.5) for new, old in zip(NEW, GENERATOR, strict=True)]
    expected = [-w * a / n for w, a, n in zip(weights, ADV, lengths, strict=True)]  # truncated importance sampling
    assert logp.grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_kl_term_needs_its_reference() -> None:
    with pytest.raises(ValueError, match="reference_logprobs"):
        policy_objective(
            algorithm("grpo", kl={"coef": 0.1}), vector(NEW), vector(GENERATOR), vector(ADV), torch.tensor(IDS)
        )


def test_the_sums_by_hand() -> None:
    new, old = [math.log(0.5), math.log(0.25), math.log(0.2)], [math.log(0.25), math.log(0.5), math.log(0.2)]
    config = algorithm("grpo", off_policy={"correction": "mask", "low": 0.6, "high": 1.5})
    sums = policy_objective(config, vector(new), vector(old), vector([1.0, 1.0, 1.0]), torch.tensor([0, 0, 1])).sums
    values = {name: float(value) for name, value in sums.items()}
    assert values == pytest.approx(
        {
            "loss_sum": -1.0,  # the first sequence's tokens are masked
            "clipped": 1.0,
            "kl_sum": 0.0,
            "mismatch_sum": 2 * math.log(2),
            "ratio_sum": 2.0 + 0.5 + 1.0,
            "ratio_max": 2.0,
            "weight_sum": 3.5,
            "weight_sq_sum": 4.0 + 0.25 + 1.0,
            "seq_weight_sum": 1.0 + 1.0,
            "seq_weight_sq_sum": 2.0,
            "masked": 2.0,
            "truncated": 0.0,
        }
    )
    ppo = algorithm("ppo", critic={}, aggregation=config.aggregation)
    assert isinstance(ppo, PPOConfig)
    value = value_objective(ppo, vector([0.5, 0.0, 1.0]), vector([1.0, 1.0, -1.0]), torch.tensor([2, 2, 1])).sums
    assert {name: float(x) for name, x in value.items()} == {
        "value_loss_sum": 0.5 * (0.25 + 1.0) / 2 + 0.5 * 4.0,
        "value_sq_error_sum": 0.25 + 1.0 + 4.0,
        "value_clipped": 0.0,
        "return_sum": 1.0,
        "return_sq_sum": 3.0,
    }
    assert set(values) | set(value) <= set(MicroStats.__dataclass_fields__)


@pytest.mark.parametrize("mean", [0.0, 1.0, -1000.0])
def test_the_explained_variance_of_returns_far_from_zero_is_known(mean: float) -> None:
    ppo = algorithm("ppo", critic={})
    assert isinstance(ppo, PPOConfig)
    spread = torch.linspace(-1.0, 1.0, 8192)
    returns, values = mean + spread, mean + 0.5 * spread
    ids = torch.full((8192,), 8192)

    def explained(values: torch.Tensor, returns: torch.Tensor) -> float | None:
        sums = value_objective(ppo, values, returns, ids).sums
        return _explained_variance({"tokens": 8192, **{name: float(one.double()) for name, one in sums.items()}})

    assert explained(values, returns) == pytest.approx(0.75, abs=1e-3)
    same = torch.full((8192,), mean + 0.1)
    same[::2] += mean * 1e-6  # rounding
    assert explained(values, same) is None


def test_a_sequence_without_a_token_with_a_loss_counts_in_no_sum() -> None:
    new, old = [math.log(0.5), math.log(0.2)], [math.log(0.25), math.log(0.4)]
    rows = [vector(new), vector(old), vector([1.0, 1.0])]
    with_hole, without = (
        policy_objective(algorithm("grpo"), *rows, torch.tensor(ids)).sums for ids in ([1, 3], [0, 1])
    )
    assert {name: float(value) for name, value in with_hole.items()} == {
        name: float(value) for name, value in without.items()
    }
    assert float(with_hole["seq_weight_sum"]) == pytest.approx(2.0 + 0.5)
    assert float(with_hole["seq_weight_sq_sum"]) == pytest.approx(4.0 + 0.25)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_everything_is_finite_whatever_the_log_probabilities(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    numbers = st.lists(st.floats(-500.0, 0.0, width=32), min_size=len(ids), max_size=len(ids))
    new, old, proximal, reference = (torch.tensor(data.draw(numbers)) for _ in range(4))
    new.requires_grad_()
    off_policy = data.draw(st.sampled_from(corrections(name)))
    config = algorithm(name, off_policy=off_policy, kl={"coef": 0.1})
    result = policy_objective(config, new, old, torch.ones(len(ids)), ids, proximal, reference)
    result.loss_sum.backward()
    assert torch.isfinite(result.loss_sum) and torch.isfinite(new.grad).all()
    assert all(math.isfinite(float(value)) for value in result.sums.values())


def test_the_ratios_of_a_loss_by_sequence_are_those_of_the_sequences() -> None:
    new, old = [-1.0, -5.0, -2.0], [-3.0, -3.0, -2.5]  # means of the log-ratios: 0 and 0.5
    rows = [vector(new), vector(old), vector([1.0, 1.0, 1.0]), torch.tensor([0, 0, 1])]
    sums = policy_objective(algorithm("gspo"), *rows).sums
    assert float(sums["ratio_sum"]) == pytest.approx(2 * 1.0 + math.exp(0.5))
    assert float(sums["ratio_max"]) == pytest.approx(math.exp(2.0)), "that of a token, for the mismatch"
