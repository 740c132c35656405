"""Which versions count as verified end to end, and what counts as a mismatch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.weight_canary import HISTORY, Measured, WeightCanary
from streamrl.rollouts.canary import (
    EIGHT_BITS,
    EXACT,
    FAR,
    MOST_TOKENS,
    ROUNDED,
    canary,
    mean_mismatch,
    mismatch_bound,
    mismatch_warning,
)
from tests.security.hostile_world import Sent, two_sites

LOGPROBS = np.linspace(-3, -1, 5).astype(np.float32)


def measured(shift: float = 0.0, dtype: str = "float32") -> Measured:
    return Measured(dtype, LOGPROBS + np.float32(shift))


def watching(**mismatch: object) -> WeightCanary:
    return WeightCanary(RunConfig.model_validate({"mismatch": mismatch}))


def test_a_version_is_verified_once_an_instance_agrees_in_whatever_order_they_come() -> None:
    one = watching()
    assert one.trainer_measured(0, measured()) == [] and one.verified == 0
    assert one.instance_measured(0, "a", measured(1e-5)) == [] and one.verified == 1
    assert one.instance_measured(1, "a", measured(1e-5)) == [] and one.verified == 1
    assert one.trainer_measured(1, measured()) == [] and one.verified == 2
    assert (one.comparisons, one.bound) == (2, 1e-3)
    assert one.worst == pytest.approx(1e-5, rel=0.1)


def test_a_version_that_one_instance_computes_otherwise_is_a_mismatch_and_not_verified() -> None:
    one = watching()
    one.instance_measured(3, "b", measured(0.01))
    ((_, text),) = [(found.instance, found.text) for found in one.trainer_measured(3, measured())]
    assert "version 3 on b does not compute what the trainer computes" in text and "0.01 nats" in text
    one.instance_measured(3, "a", measured())
    assert one.verified == 0 and one.mismatch == text
    assert one.instance_measured(4, "b", Measured("float32", LOGPROBS[:2])) == []
    assert len(one.trainer_measured(4, measured())) == 1  # other tokens
    assert len(one.instance_measured(4, "a", Measured("float32", LOGPROBS * np.nan))) == 1


def test_the_bound_follows_the_compute_types_of_both_sides_unless_the_run_file_has_one() -> None:
    assert mismatch_bound("float32", "float32") < mismatch_bound("float32", "bfloat16")
    assert mismatch_bound("bfloat16", "bfloat16") == mismatch_bound("bfloat16", "float32")
    assert mismatch_bound("bfloat16", "bfloat16", "int8") > mismatch_bound("bfloat16", "bfloat16")
    assert mismatch_bound("float32", "float32", sent="bfloat16") == mismatch_bound("bfloat16", "float32")
    for sent, wrong in (("float32", True), ("bfloat16", False)):
        one = WeightCanary(RunConfig(), sent)
        one.trainer_measured(0, measured())
        assert bool(one.instance_measured(0, "a", measured(0.01))) == wrong  # of weights that are rounded on the way
    for dtype, shift, wrong in (("float32", 0.01, True), ("bfloat16", 0.01, False), ("bfloat16", 0.3, True)):
        one = watching()
        one.trainer_measured(0, measured())
        assert bool(one.instance_measured(0, "a", measured(shift, dtype))) == wrong
    run = {"generation": {"compute": "auto"}, "algorithm": {"name": "grpo", "off_policy": {"correction": "mask"}}}
    for one, wrong in ((watching(), True), (WeightCanary(RunConfig.model_validate(run)), False)):
        one.trainer_measured(0, measured())
        assert bool(one.instance_measured(0, "a", measured(0.3, "int8"))) == wrong  # its word alone widens no bound
    one = watching(bound=0.005)
    one.trainer_measured(0, measured())
    assert one.instance_measured(0, "a", measured(0.01, "bfloat16")) and one.bound == 0.005


EIGHT_BIT_WEIGHTS = {"weights": {"generation_dtype": "int8"}}


@pytest.mark.parametrize(
    ("run", "dtype", "limit"),
    [
        ({}, "float32", FAR[EXACT]),
        ({}, "bfloat16", FAR[ROUNDED]),
        (EIGHT_BIT_WEIGHTS, "bfloat16", FAR[EIGHT_BITS]),
        ({"mismatch": {"bound": 1e-6}}, "float32", FAR[EXACT]),  # what rounding does is not the run file's choice
    ],
)
def test_a_difference_is_far_where_no_rounding_explains_it(run: dict[str, object], dtype: str, limit: float) -> None:
    for shift, far in ((0.9 * limit, False), (1.1 * limit, True)):
        one = WeightCanary(RunConfig.model_validate(run))
        one.trainer_measured(0, measured())
        ((_, found),) = [(found.text, found.far) for found in one.instance_measured(0, "a", measured(shift, dtype))]
        assert found == far
    one = WeightCanary(RunConfig.model_validate(run | {"mismatch": {"bound": 2 * limit}}))
    one.trainer_measured(0, measured())
    assert one.instance_measured(0, "a", measured(1.1 * limit, dtype)) == []


def test_only_the_first_versions_difference_can_be_far() -> None:
    """The run file says what follows in a run that has gone on."""
    one = watching()
    one.instance_measured(7, "a", measured(5))
    assert [found.far for found in one.trainer_measured(7, measured())] == [True]
    assert [found.far for found in one.instance_measured(7, "b", measured(5))] == [True]
    one.trainer_measured(8, measured())
    assert [found.far for found in one.instance_measured(8, "a", measured(5))] == [False]


def test_only_instances_that_are_present_and_have_loaded_the_version_are_awaited() -> None:
    one = watching()
    one.loaded(2, ["a", "b", "c"])
    one.instance_measured(2, "a", measured())
    assert one.missing(2, {"a", "b", "d"}) == ["b"]
    assert one.missing(1, {"a", "b"}) == []


def test_old_versions_are_forgotten() -> None:
    one = watching()
    for number in range(3 * HISTORY):
        one.instance_measured(number, "a", measured())
        one.loaded(number, ["a"])
        one.trainer_measured(number, measured())
    assert one.verified == 3 * HISTORY and len(one._of_trainer) == HISTORY
    assert len(one._measured) <= HISTORY + 1
    one.instance_measured(3 * HISTORY - 2, "b", measured(0.5))
    one.instance_measured(3 * HISTORY - 1, "b", measured())
    for number in range(3 * HISTORY, 5 * HISTORY):
        one.instance_measured(number, "a", measured(0.5))
        one.trainer_measured(number, measured())
    assert one.verified == 3 * HISTORY - 1
    assert len(one._agreed) + len(one._differed) <= HISTORY


def test_the_canary_fits_any_context_and_has_a_prompt_and_a_completion() -> None:
    for context in (3, 16, 1000):
        one = canary(lambda text: list(text.encode()), context)
        count = len(one.prompt_tokens) + len(one.completion_tokens)
        assert len(one.prompt_tokens) and len(one.completion_tokens) and count == min(MOST_TOKENS, context - 1)
    with pytest.raises(ValueError, match="makes 1 tokens"):
        canary(lambda text: [1], 100)


def test_a_difference_is_the_mean_over_the_tokens() -> None:
    assert mean_mismatch(LOGPROBS, LOGPROBS) == 0.0
    assert mean_mismatch(LOGPROBS, LOGPROBS + np.array([0.5, 0, 0, 0, -0.5], np.float32)) == pytest.approx(0.2)


def test_a_steps_gap_is_judged_only_if_its_samples_come_from_the_weights_trained() -> None:
    assert mismatch_warning(0.02, 0.0, 0.01) is not None
    for mismatch, staleness, bound in ((0.01, 0.0, 0.01), (0.02, 1.0, 0.01), (None, 0.0, 0.01), (0.02, 0.0, None)):
        assert mismatch_warning(mismatch, staleness, bound) is None


def test_weights_that_cross_links_are_expected_in_the_type_in_which_they_are_sent(tmp_path: Path) -> None:
    for dtype, bound in (("auto", ROUNDED), ("float32", EXACT)):
        with two_sites(
            tmp_path / dtype, Sent(), model={"path": str(tmp_path / dtype / "model"), "dtype": dtype}
        ) as one:
            one.canary.trainer_measured(0, measured())
            one.canary.instance_measured(0, "a", measured())
            assert one.canary.bound == bound
