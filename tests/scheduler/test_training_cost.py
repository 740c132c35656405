"""Time and memory of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS, Transformer
from scheduler.cost.training_cost import (
    GRPO,
    PPO,
    TRAINING_UTILISATION,
    StepTokens,
    exactly,
    memory_per_gpu,
    smallest_trainer,
    switch_seconds,
    trainer_times,
    usable,
)

STEP = StepTokens(1024 * 2000.0, 1024 * 2000.0**2, 8000.0, 1024)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.5b", 0.49), ("1.5b", 1.54), ("7b", 7.61), ("32b", 32.5), ("72b", 72.7)]
)
def test_parameters_are_those_that_the_models_cards_tell(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_config_json_gives_the_same_shape_as_the_table() -> None:
    values = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    made = Transformer.from_config("mine", values)
    assert replace(made, name=MODELS["7b"].name, source=MODELS["7b"].source) == MODELS["7b"]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "num_hidden_layers"),
        ([], "config.json"),
        ({"num_experts": 64}, "mixture of experts"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "many"}, "many"),
    ],
)
def test_a_config_that_is_not_understood_says_what(values: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Transformer.from_config("mine", values)


def test_compute_is_six_operations_per_weight_and_token_and_attention() -> None:
    model, gpu = MODELS["7b"], device("H100")
    work = replace(GRPO, recompute=False)
    time = exactly(model, work, gpu, 8, StepTokens(1e6, 0.0, 100.0, 1000))
    assert time is not None
    peak = gpu.bf16_tflops * 1e12 * TRAINING_UTILISATION * 8
    assert time.compute_s == pytest.approx(6 * model.computed * 1e6 / peak)
    # one sequence of S tokens: S^2 / 2 pairs, two products of 2 operations each, per layer and channel
    attention = model.forward_flops(1000, 1000.0**2) - model.forward_flops(1000, 0.0)
    assert attention == pytest.approx(4 * 1000**2 / 2 * model.layers * model.hidden)


def test_more_gpus_are_never_slower_and_never_more_than_offered() -> None:
    times = trainer_times(MODELS["32b"], PPO, device("H800"), 128, STEP)
    seconds = [math.inf if one is None else one.seconds for one in times]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one is None or one.gpus <= place for place, one in enumerate(times))
    assert math.isinf(seconds[1]) and math.isfinite(seconds[-1])


def test_no_rank_is_done_before_the_longest_sample() -> None:
    step = StepTokens(64 * 100.0 + 30_000, 64 * 100.0**2 + 30_000.0**2, 30_000.0, 65)
    few, many = (exactly(MODELS["1.5b"], GRPO, device("H100"), gpus, step) for gpus in (16, 64))
    assert few is not None and many is not None
    assert few.compute_s == many.compute_s


def test_memory_counts_what_is_held_and_the_smallest_trainer_just_fits() -> None:
    model, gpu = MODELS["7b"], device("H800")
    assert memory_per_gpu(model, PPO, 1, 0) - memory_per_gpu(model, GRPO, 1, 0) == pytest.approx(18 * model.parameters)
    enough = smallest_trainer(model, PPO, gpu, 8000)
    assert enough is not None and enough > 1
    assert memory_per_gpu(model, PPO, enough, 8000) <= usable(gpu) < memory_per_gpu(model, PPO, enough - 1, 8000)
    assert exactly(model, PPO, gpu, enough, STEP) is not None
    assert exactly(model, PPO, gpu, enough - 1, STEP) is None


def test_recomputing_activations_takes_time_and_saves_memory() -> None:
    kept, again = replace(GRPO, recompute=False), GRPO
    model, gpu = MODELS["7b"], device("H100")
    assert memory_per_gpu(model, kept, 8, 8000) > memory_per_gpu(model, again, 8, 8000)
    times = [exactly(model, work, gpu, 64, STEP) for work in (kept, again)]
    assert times[0] is not None and times[1] is not None
    assert times[1].compute_s == pytest.approx(times[0].compute_s * 4 / 3)


def test_no_number_of_small_gpus_holds_a_very_long_sample() -> None:
    assert smallest_trainer(MODELS["72b"], GRPO, device("RTX4090"), 60_000) is None


def test_a_slower_network_makes_sharding_across_machines_slower() -> None:
    gpu = device("H100")
    slow = replace(gpu, network_gbit_s=5.0)
    fast_time, slow_time = (exactly(MODELS["32b"], PPO, one, 64, STEP) for one in (gpu, slow))
    assert fast_time is not None and slow_time is not None
    assert slow_time.seconds > fast_time.seconds


def test_turns_cost_more_for_larger_states() -> None:
    gpu = device("H800")
    assert switch_seconds(MODELS["7b"], PPO, gpu, 32, 32) > switch_seconds(MODELS["7b"], GRPO, gpu, 32, 32) > 0
