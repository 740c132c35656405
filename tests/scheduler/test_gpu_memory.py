"""What a GPU has to hold while it trains and generates, and the smallest change of a run that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.capacity.gpu_memory import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    GIB,
    MemoryShape,
    fits,
    phases,
    smallest_change,
)
from scheduler.cost.generation_cost import ENGINE_BYTES
from scheduler.cost.model_shapes import Transformer
from scheduler.cost.trainer_work import TrainingWork
from scheduler.cost.training_memory import TrainerLayout, memory_per_gpu

MODEL = Transformer("1.5B", 28, 1536, 12, 2, 128, 8960, 151_936, True, "test")
SHAPE = MemoryShape(MODEL, TrainingWork(recompute=False), 2048, 2048, 1, 1, 1, 0.85, True, 80 * GIB, 80 * GIB)


def test_the_phases_are_those_of_the_formulas() -> None:
    trains, generates, together = phases(SHAPE)
    needed = memory_per_gpu(MODEL, SHAPE.work, TrainerLayout(1), 2048) + ASLEEP_BYTES
    assert trains.over == pytest.approx(needed - 0.9 * 80 * GIB)
    cache = 2 * 2 * 28 * 2 * 128 * 2048  # keys and values, bf16, layers, KV heads, head size, tokens
    engine = MODEL.weight_bytes + ENGINE_BYTES + cache
    assert generates.over == pytest.approx(engine - 0.85 * 80 * GIB)
    assert together.over == pytest.approx(CONTEXT_BYTES - 0.15 * 80 * GIB)
    assert fits(SHAPE) and len(phases(replace(SHAPE, shared=False))) == 2
    assert len(phases(replace(SHAPE, shared=False, trainer_gpu_bytes=float("inf")))) == 1
    assert str(generates).endswith(f"more KV cache {-generates.over / GIB:.1f} of 68.0 GiB, fits")


def test_tensor_parallel_engines_share_weights_but_hold_copies_of_kv_heads_beyond_their_number() -> None:
    def parts(gpus: int) -> list[float]:
        return [size for _, size in phases(replace(SHAPE, gpus_per_replica=gpus))[1].parts]

    one, two, four = parts(1), parts(2), parts(4)
    assert two[0] == one[0] / 2 and two[2] == one[2] / 2
    assert four[0] == one[0] / 4 and four[2] == one[2] / 2


@pytest.mark.parametrize(
    ("changed", "phase", "change"),
    [
        ({"micro_tokens": 49_152}, "while training", "batch.micro_batch_tokens: 15872"),
        ({"longest": 24_576}, "while training", "optimizer.gradient_checkpointing: selective"),
        ({"longest": 49_152}, "while training", "optimizer.gradient_checkpointing: true"),
        ({"fraction": 0.99}, "as vLLM starts", "gpu_memory_fraction: 0.95"),
        ({"fraction": 0.05}, "while generating", "gpu_memory_fraction: 0.10"),
        ({"trainer_gpu_bytes": 24 * GIB}, "while training", "trainer.ranks: 2"),
        ({"engine_gpu_bytes": 2 * GIB}, "while generating", ""),
    ],
)
def test_the_smallest_change_that_fits_is_named(changed: dict[str, float], phase: str, change: str) -> None:
    shape = replace(SHAPE, **changed)  # type: ignore[arg-type]
    assert phase in [one.name for one in phases(shape) if one.over > 0]
    assert smallest_change(shape) == change


def test_instances_are_not_proposed_more_gpus_than_share_the_key_value_heads() -> None:
    small = replace(SHAPE, shared=False, fraction=0.95, engine_gpu_bytes=4 * GIB)
    assert smallest_change(small) == "gpus_per_replica: 2"
    odd = replace(MODEL, heads=12, kv_heads=3)
    assert "gpus_per_replica" not in smallest_change(replace(small, model=odd))


def test_no_larger_micro_batch_would_fit() -> None:
    assert [fits(replace(SHAPE, micro_tokens=tokens)) for tokens in (15_872, 16_128)] == [True, False]


def test_two_changes_are_named_where_one_is_not_enough() -> None:
    shape = replace(SHAPE, longest=65_536, fraction=0.99)
    assert smallest_change(shape) == "gpu_memory_fraction: 0.95 and optimizer.gradient_checkpointing: true"


LONG = replace(SHAPE, work=TrainingWork(recompute=True), longest=393_216)
"""Completions whose activations exceed one GPU, whatever is computed again."""


def test_rows_that_gpus_share_take_their_part_of_the_memory_on_each() -> None:
    def tokens(sharing: int) -> tuple[str, float]:
        return phases(replace(LONG, ranks=4, sequence_parallel=sharing))[0].parts[1]

    (whole, one), (half, two) = tokens(1), tokens(2)
    assert (whole, half) == ("393216 tokens", "393216 tokens shared by 2 GPUs")
    head = 2 * MODEL.vocabulary * MODEL.hidden  # its gradient is that of the whole weight on each
    assert two - head == pytest.approx((one - head) / 2)
    assert tokens(4)[1] > two / 2, "two copies of each of two key-value heads"


def test_ranks_that_share_rows_are_proposed_where_they_can() -> None:
    asked = "trainer.sequence_parallel: 2"
    assert smallest_change(replace(LONG, ranks=4)) == asked
    assert smallest_change(LONG) == f"trainer.ranks: 2 with {asked}"
    assert smallest_change(replace(LONG, ranks=2, tensor_parallel=2)) == "trainer.ranks: 8", "not both"
    assert smallest_change(replace(LONG, ranks=2, nodes=2)) == f"trainer.ranks: 4 with {asked}"
    hybrid = replace(MODEL, attends_alone=False)
    assert smallest_change(replace(LONG, model=hybrid, ranks=4)).startswith("model.max_context")
    odd = replace(MODEL, heads=9, kv_heads=3)
    assert smallest_change(replace(LONG, model=odd, ranks=4)).startswith("model.max_context")
    assert smallest_change(replace(LONG, model=odd, ranks=3)) == "trainer.sequence_parallel: 3"


def test_ranks_that_reduce_once_hold_whole_gradients_as_the_learner_decides() -> None:
    def states(**changed: Any) -> float:
        return phases(replace(SHAPE, ranks=4, **changed))[0].parts[0][1]

    sharded = memory_per_gpu(MODEL, SHAPE.work, TrainerLayout(4), 0.0)
    others = 3 / 4 * 4 * MODEL.parameters  # fp32, of the three shards that other ranks hold
    assert states(reduction="micro_batch") == pytest.approx(sharded)
    assert states(reduction="step") == pytest.approx(sharded + others)
    large = 8 * 4 * MODEL.parameters  # of which the whole gradient is an eighth
    assert states(trainer_gpu_bytes=1.01 * large) == pytest.approx(sharded + others)
    assert states(trainer_gpu_bytes=0.99 * large) == pytest.approx(sharded)
    assert states(trainer_gpu_bytes=0.51 * large, tensor_parallel=2) == pytest.approx(
        memory_per_gpu(MODEL, SHAPE.work, TrainerLayout(2, 2, whole_gradients=True), 0.0)
    )


def test_gradients_that_are_too_large_as_a_whole_may_be_reduced_by_every_micro_batch() -> None:
    shape = replace(SHAPE, ranks=4, trainer_gpu_bytes=20 * GIB, reduction="step")
    assert not fits(shape) and smallest_change(shape) == "trainer.reduce_gradients: micro_batch"
    assert fits(replace(shape, reduction="auto"))


def test_a_critic_of_another_size_is_divided_and_reduced_by_its_own() -> None:
    def with_critic(**changes: int) -> MemoryShape:
        work = replace(SHAPE.work, trained=2, critic=replace(MODEL, **changes))
        return replace(SHAPE, work=work, ranks=2, trainer_gpu_bytes=60 * GIB)

    assert replace(with_critic(), sequence_parallel=2).consistent
    assert not replace(with_critic(heads=3, kv_heads=3), sequence_parallel=2).consistent
    assert (with_critic().whole_gradients, with_critic().whole_gradients_of_critic) == (True, True)
    large = with_critic(layers=56)
    assert (large.whole_gradients, large.whole_gradients_of_critic) == (True, False)
    of_step = replace(large, reduction="step")
    kept = dict(phases(of_step)[0].parts)["states and weights"] - dict(phases(large)[0].parts)["states and weights"]
    assert large.work.critic is not None and kept == pytest.approx(4 * large.work.critic.parameters / 2)
