"""Memory of a trainer's GPU, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import GRPO, PPO, TrainingWork
from scheduler.cost.training_memory import (
    TrainerLayout,
    layout_on,
    memory_per_gpu,
    micro_batch_tokens,
    smallest_trainer,
    usable,
)


def test_memory_by_layout() -> None:
    model = MODELS["7b"]
    fixed = memory_per_gpu(model, GRPO, TrainerLayout(4, 2), 0.0)
    states, layer = 16 * model.parameters / 8, 2 * 2 * model.parameters / model.layers
    assert fixed == pytest.approx(states + layer / 2)

    def per_token(layout: TrainerLayout) -> float:
        some, more = (memory_per_gpu(model, GRPO, layout, tokens) for tokens in (30_000, 40_000))
        return (more - some) / 10_000

    kept, norms, others = 2 * model.layers * model.hidden, 16 * 3584, 4 * 3584 + 4 * 512 + 8 * 18944
    assert per_token(TrainerLayout(4)) == pytest.approx(kept + norms + others + 4 * (3584 + 18944))
    split = kept + norms + others / 2 + 4 * (3584 + 18944 / 2)
    assert per_token(TrainerLayout(4, 2)) == pytest.approx(split), "checkpoints are not split"


def test_the_head_is_counted_where_it_needs_more_than_a_layer_that_is_computed_again() -> None:
    model = MODELS["1.5b"]
    none, few, some = (memory_per_gpu(model, GRPO, TrainerLayout(1), tokens) for tokens in (0, 100, 2000))
    checkpoints = 2 * model.layers * model.hidden
    weight, layer = model.vocabulary * model.hidden, 16 * 1536 + 4 * 1536 + 4 * 256 + 8 * 8960
    backward = layer + 4 * (1536 + 8960)
    assert few - none == pytest.approx(100 * (checkpoints + backward) + 2 * weight), "the head has little to compute"
    many = memory_per_gpu(model, GRPO, TrainerLayout(1), 20_000) - none
    assert many == pytest.approx(20_000 * (checkpoints + backward) + 2 * weight)
    assert some - none == pytest.approx(2000 * checkpoints + 4 * weight + 6 * 2**26)
    keeps = replace(GRPO, recompute=False)
    every = memory_per_gpu(model, keeps, TrainerLayout(1), 2000) - some
    assert every == pytest.approx(2000 * (28 * layer - checkpoints))
    part = replace(GRPO, recompute="selective")
    assert memory_per_gpu(model, part, TrainerLayout(1), 2000) - some == pytest.approx(
        2000 * (28 * (6 * 1536 + 6 * 1536 + 4 * 256 + 4 * 8960) - checkpoints)
    )
    assert (keeps.forwards, part.forwards, GRPO.forwards) == (3, 3, 4)


def test_compiled_norms_and_mlps_keep_less_where_they_are_compiled() -> None:
    model, compiled = MODELS["1.5b"], replace(GRPO, recompute=False, compiled=True)

    def saved(work: TrainingWork, layout: TrainerLayout) -> float:
        plain = memory_per_gpu(model, replace(work, compiled=False), layout, 100_000)
        return (plain - memory_per_gpu(model, work, layout, 100_000)) / 100_000

    of_a_layer, backward = 8 * 1536 + 4 * 8960, 4 * 8960
    assert saved(compiled, TrainerLayout(1)) == pytest.approx(28 * of_a_layer - backward)
    assert saved(replace(compiled, recompute=True), TrainerLayout(1)) == pytest.approx(of_a_layer - backward)
    assert saved(replace(compiled, recompute="selective"), TrainerLayout(1)) == 0
    assert saved(compiled, TrainerLayout(1, 2)) == 0, "ranks share layers"
    cores, gpus = (layout_on(device(name), model, 1) for name in ("cpu", "H100"))
    assert saved(compiled, cores) == 0 and saved(compiled, gpus) > 0


def test_no_number_of_small_gpus_holds_a_very_long_sample() -> None:
    assert smallest_trainer(MODELS["72b"], GRPO, device("RTX4090"), 600_000) is None


def test_the_largest_micro_batch_fills_the_memory_unless_more_tokens_make_nothing_faster() -> None:
    model, gpu = MODELS["7b"], device("H100")
    layout = TrainerLayout(8)
    few, many = (micro_batch_tokens(model, PPO, replace(gpu, memory_gb=memory), layout, 1000.0) for memory in (55, 500))
    assert few is not None and 1000 < few < many == 32_768
    assert memory_per_gpu(model, PPO, layout, few) == pytest.approx(usable(replace(gpu, memory_gb=55)))
    assert micro_batch_tokens(model, PPO, replace(gpu, memory_gb=500), layout, 50_000.0) == 50_000
    assert micro_batch_tokens(model, PPO, replace(gpu, memory_gb=55), layout, few + 1) is None
