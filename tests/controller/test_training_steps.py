"""What the trainer does around a publication, and in which order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.training_steps import TrainingSteps
from streamrl.protocol.controller_trainer import CanaryDone, CheckpointDone, PublishDone


@pytest.mark.parametrize(
    ("exclusive", "order"),
    [(True, ["MeasureCanary", "SaveCheckpoint", "Publish"]), (False, ["Publish", "MeasureCanary", "SaveCheckpoint"])],
)
def test_instances_that_take_the_trainers_gpu_over_get_weights_last(exclusive: bool, order: list[str]) -> None:
    asked: list[str] = []

    async def ask(order: Any) -> None:
        asked.append(type(order).__name__)

    async def nothing(*_: object) -> None:
        return None

    about = {"rank": 0, "started": 0.0, "finished": 1.0}
    answers = {
        "MeasureCanary": CanaryDone(number=0, dtype="float32", **about),
        "SaveCheckpoint": CheckpointDone(step=0, **about),
        "Publish": PublishDone(number=0, content_hash="x", bytes=1, **about),
    }
    schedule = SimpleNamespace(exclusive=exclusive)
    stubs: dict[str, Any] = {
        "trainers": SimpleNamespace(busy=False, ask=ask),
        "services": SimpleNamespace(can_take_version=True, spread=nothing),
        "issuer": SimpleNamespace(schedule=schedule),
        "pool": SimpleNamespace(groups={}),
        "groups": SimpleNamespace(state=lambda _: {}),
        "evaluator": SimpleNamespace(pending=[]),
        "times": SimpleNamespace(trainer=[]),
        "canary": SimpleNamespace(trainer_measured=lambda *_: []),
        "guard": SimpleNamespace(judge_canaries=nothing),
    }
    rest = dict.fromkeys(("lengths", "scaling", "recorder", "telemetry", "waits", "refusals"))
    steps = TrainingSteps(run=RunConfig(), **stubs, **rest)  # type: ignore[arg-type]
    steps._checkpoint_due = True

    async def body() -> None:
        for _ in range(3):
            await steps.drive()
            arrays = {"logprobs": np.zeros(1, np.float32)}
            done: Any = SimpleNamespace(body=answers[asked[-1]], kind="done", arrays=arrays)
            await steps.answered([done])

    asyncio.run(body())
    assert asked == order
    assert not (steps._publish_due or steps._canary_due or steps._checkpoint_due or steps._canary_ahead)
