"""Step curves and the exact time of an instance."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.decode import (
    ALLREDUCE_LATENCY_S,
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    PAPER_7B_H800,
    QWEN_7B,
    STEP_OVERHEAD_S,
    StepCurve,
    replica_ends,
    replica_time,
    roofline,
)
from scheduler.cost.hardware import CATALOGUE, device

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=30)


def by_hand(lengths: list[int], curve: StepCurve, slots: int, prompt: int = 0) -> float:
    """One decode step after the other."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
        context = sum(prompt + done for _, done in running)
        seconds += float(curve.base(len(running))) + curve.per_context_token * context
        for item in running:
            item[1] += 1
        running = [item for item in running if item[1] < item[0]]
    return seconds


@given(LENGTHS)
@settings(max_examples=60)
def test_replica_time_is_that_of_stepping_by_hand(lengths: list[int]) -> None:
    assert replica_time(lengths, PAPER_7B_H800) == pytest.approx(by_hand(lengths, PAPER_7B_H800, len(lengths)))


@given(LENGTHS, st.integers(1, 8))
@settings(max_examples=60)
def test_refills_are_those_of_stepping_by_hand(lengths: list[int], slots: int) -> None:
    expected = by_hand(lengths, PAPER_7B_H800, slots)
    assert replica_time(lengths, PAPER_7B_H800, slots=slots) == pytest.approx(expected)


def test_context_adds_the_same_whatever_the_order() -> None:
    curve = StepCurve((1, 4), (1.0, 2.0), per_context_token=1e-3)
    lengths = [30, 7, 12]
    # the formula integrates, steps count: half a token per request and step apart
    assert replica_time(lengths, curve, 10) == pytest.approx(by_hand(lengths, curve, 3, 10), rel=2e-3)
    assert replica_time(lengths, curve, 10) == pytest.approx(replica_time(lengths[::-1], curve, 10))


def test_ends_by_hand_where_one_waits_for_a_slot() -> None:
    curve = StepCurve((1, 2), (1.0, 2.0), per_context_token=0.1, per_prefill_token=0.5)
    # prefill 2 x 4 x 0.5; 2 steps of 2: 4 + 0.1 (8 x 2 + 2 x 2^2 / 2); prefill 2; 1 step of 2 more: 2 + 0.1 (10 + 1);
    # the last one alone for 2 steps: 2 + 0.1 (2 x 5 + 2^2 / 2)
    ends = replica_ends([2, 3, 3], curve, 4, slots=2, prefilled=True)
    assert ends.tolist() == pytest.approx([10.0, 15.1, 18.3])
    assert replica_time([], curve) == 0.0
    with pytest.raises(ValueError, match="at least one slot"):
        replica_time([1], curve, slots=0)


def test_curve_between_below_and_beyond_its_points() -> None:
    curve = StepCurve((2, 4, 8), (1.0, 2.0, 6.0))
    assert curve.base([0, 1, 2, 3, 4, 6, 8, 10]).tolist() == [0.0, 1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]


def test_measurements_that_are_not_monotone_are_pooled() -> None:
    curve = StepCurve.measured({1: 3.0, 2: 2.0, 4: 5.0, 8: 4.0, 16: 9.0})
    assert curve.seconds == (2.5, 2.5, 4.5, 4.5, 9.0)


@pytest.mark.parametrize(
    ("batches", "seconds", "complaint"),
    [
        ((), (), "as many times"),
        ((1, 2), (1.0,), "as many times"),
        ((2, 1), (1.0, 2.0), "ascend"),
        ((1,), (0.0,), "positive"),
        ((1, 2), (2.0, 1.0), "must not fall"),
    ],
)
def test_a_wrong_curve_is_refused(batches: tuple[int, ...], seconds: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        StepCurve(batches, seconds)


def test_a_calibration_file_gives_its_curve_back() -> None:
    curve = StepCurve((1, 8), (0.02, 0.05), 1e-7, 2e-4)
    assert StepCurve.from_json(json.loads(json.dumps(curve.to_json() | {"model": "m"}))) == curve


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([], "step_seconds"),
        ({"step_seconds": {}}, "step_seconds"),
        ({"step_seconds": {"one": 0.1}}, "holds numbers"),
        ({"step_seconds": {"1": None}}, "holds numbers"),
        ({"step_seconds": {float("inf"): 0.1}}, "holds numbers"),
        ({"step_seconds": {"1": 10**400}}, "holds numbers"),
        ({"step_seconds": {"1": 0.1}, "per_context_token": 10**400}, "holds numbers"),
        ({"step_seconds": {"1": -0.1}}, "positive"),
        ({"step_seconds": {"1": 0.1}, "per_context_token": -1}, "negative"),
    ],
)
def test_a_broken_calibration_is_refused(values: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        StepCurve.from_json(values)


def test_roofline_has_the_shape_of_the_papers_measurement() -> None:
    curve = roofline(QWEN_7B, device("H800"))
    # memory-bound at small batches: the published step time at batch 1 to within a third, and hardly rising to 32
    assert float(curve.base(1)) == pytest.approx(8.4e-3, rel=0.33)
    assert float(curve.base(32)) < 1.3 * float(curve.base(1))
    assert float(curve.base(512)) > 1.5 * float(curve.base(1))
    assert np.all(np.diff(curve.table(1024)) >= -1e-12)


@pytest.mark.parametrize(("name", "tensor_parallel"), [("L40S", 1), ("H20", 1), ("H100", 4)])
def test_a_roofline_is_exact_at_every_batch_and_goes_on_where_products_take_longer(
    name: str, tensor_parallel: int
) -> None:
    gpu = device(name)
    curve = roofline(QWEN_7B, gpu, tensor_parallel)
    batch = np.arange(1, 3000)
    read = QWEN_7B.parameters * 2 / (gpu.memory_bandwidth_gb_s * 1e9 * MEMORY_EFFICIENCY)
    multiplied = 2 * QWEN_7B.parameters * batch / (gpu.bf16_tflops * 1e12 * COMPUTE_EFFICIENCY)
    each = 2 * (tensor_parallel - 1) / tensor_parallel * QWEN_7B.hidden * 2 / (gpu.link_gb_s * 1e9 / 2)
    exchanged = 2 * QWEN_7B.layers * (ALLREDUCE_LATENCY_S + each * batch) if tensor_parallel > 1 else 0.0
    expected = np.maximum(read, multiplied) / tensor_parallel + exchanged + STEP_OVERHEAD_S
    assert curve.base(batch) == pytest.approx(expected, rel=2e-3), "the kink is between two whole batches"


def test_faster_memory_makes_small_batches_faster_and_compute_large_ones() -> None:
    h20, h800 = roofline(QWEN_7B, device("H20")), roofline(QWEN_7B, device("H800"))
    assert float(h20.base(1)) < float(h800.base(1))
    assert float(h20.base(512)) > float(h800.base(512))


def test_ranks_beyond_the_kv_heads_read_copies() -> None:
    two, four, eight = (roofline(QWEN_7B, device("H100"), tp).per_context_token for tp in (2, 4, 8))
    assert four == pytest.approx(two / 2) and eight == pytest.approx(four)


def test_every_device_names_its_source() -> None:
    assert all(entry.source and entry.bf16_tflops > 0 for entry in CATALOGUE.values())
    with pytest.raises(ValueError, match="unknown device 'H21'; known: H20"):
        device("H21")
