"""The models of a run, and how often their weights change, as the cost model counts them."""

from __future__ import annotations

from scheduler.cost.trainer_work import TrainingWork
from streamrl.config.run import RunConfig
from streamrl.runtime.training_work import work_of


def test_passes_and_updates_are_those_of_the_batch() -> None:
    batch = {"prompts_per_step": 8, "epochs": 3, "mini_batches": 2}
    schedule = {"name": "sync"}
    work = work_of(
        RunConfig.model_validate({"batch": batch, "schedule": schedule, "algorithm": {"name": "ppo", "critic": {}}})
    )
    assert (work.trained, work.epochs, work.updates) == (2, 3, 6)
    assert work_of(RunConfig()) == TrainingWork(recompute=RunConfig().optimizer.gradient_checkpointing, compiled=True)
    reused = RunConfig.model_validate({"batch": {"epochs": 4}})
    assert [work_of(reused, name).after_batch for name in (None, "grpo", "ppo")] == [0.75, 0.75, 1.0]
    decoupled = {"name": "grpo", "off_policy": {"ratio_to": "proximal"}}
    for reused, copies in (({}, 0), ({"epochs": 2}, 1), ({"mini_batches": 2}, 1)):
        copied = RunConfig.model_validate(
            {"batch": {"prompts_per_step": 8, **reused}, "schedule": schedule, "algorithm": decoupled}
        )
        assert (work_of(copied).frozen, work_of(copied).forward_only) == (copies, copies)
    assert not work_of(RunConfig.model_validate({"optimizer": {"compile": False}})).compiled
