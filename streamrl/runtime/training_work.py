"""The models that a run trains and evaluates, as the cost model counts them."""

from __future__ import annotations

from scheduler.cost.training_cost import TrainingWork
from streamrl.config.run import RunConfig


def work_of(run: RunConfig) -> TrainingWork:
    """Return the models that a run's algorithm trains and evaluates."""
    algorithm = run.algorithm
    critic, reference = int(algorithm.name == "ppo"), int(algorithm.needs_reference)
    optimizer, batch = run.optimizer, run.batch
    return TrainingWork(
        1 + critic,
        critic + reference,
        reference,
        optimizer.gradient_checkpointing,
        batch.epochs,
        batch.mini_batches,
        optimizer.compile,
    )
