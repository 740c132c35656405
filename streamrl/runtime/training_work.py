"""The models that a run trains and evaluates, as the cost model counts them."""

from __future__ import annotations

from scheduler.cost.trainer_work import TrainingWork
from streamrl.config.algorithm import CriticConfig, GRPOConfig, PPOConfig
from streamrl.config.run import RunConfig


def work_of(run: RunConfig, algorithm: str | None = None) -> TrainingWork:
    """Return the models that a run trains and evaluates.

    Args:
        run: the run.
        algorithm: name of an algorithm that takes the place of the run's; None: the run's own.
    """
    critic = int((algorithm or run.algorithm.name) == "ppo")
    frozen = run.algorithm.needs_reference + run.algorithm.needs_proximal(run.updates_per_version)
    optimizer, batch = run.optimizer, run.batch
    return TrainingWork(
        1 + critic,
        critic + frozen,
        frozen,
        optimizer.gradient_checkpointing,
        batch.epochs,
        batch.mini_batches,
        optimizer.compile,
        _after_batch(run, algorithm or run.algorithm.name),
    )


def _after_batch(run: RunConfig, algorithm: str) -> float:
    if algorithm != run.algorithm.name:
        other = PPOConfig(critic=CriticConfig()) if algorithm == "ppo" else GRPOConfig()
        run = run.model_copy(update={"algorithm": other})
    return run.after_batch
