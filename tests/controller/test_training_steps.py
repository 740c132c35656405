"""What the trainer does around a publication, and in which order."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_plan import Evaluations
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.live_rounds import NoRounds
from streamrl.controller.training_steps import TrainingSteps
from streamrl.controller.weight_canary import Measured, WeightCanary
from streamrl.errors import RestartNeeded
from streamrl.protocol.controller_trainer import (
    CanaryDone,
    CheckpointDone,
    Publish,
    PublishDone,
    SaveCheckpoint,
    StepDone,
)
from streamrl.rollouts.types import Group
from streamrl.rollouts.void import Void, VoidCause
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from tests.controller.test_batch_updates import STATS
from tests.controller.test_pool_and_batch import empty_group
from tests.rollouts.test_rollouts import make_sample
from tests.waiting import scaled


@pytest.mark.parametrize(
    ("exclusive", "order"),
    [(True, ["MeasureCanary", "SaveCheckpoint", "Publish"]), (False, ["Publish", "MeasureCanary", "SaveCheckpoint"])],
)
def test_instances_that_take_the_trainers_gpu_over_get_weights_last(exclusive: bool, order: list[str]) -> None:
    asked: list[str] = []
    checkpoints: list[int] = []

    async def ask(order: Any) -> None:
        asked.append(type(order).__name__)

    async def nothing(*_: object) -> None:
        return None

    about = {"rank": 0, "started": 0.0, "finished": 1.0}
    answers = {
        "MeasureCanary": CanaryDone(number=0, dtype="float32", **about),
        "SaveCheckpoint": CheckpointDone(step=3, **about),
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
        "times": SimpleNamespace(trainer=[], loading=[]),
        "canary": SimpleNamespace(trainer_measured=lambda *_: [], loaded=lambda *_: None),
        "telemetry": SimpleNamespace(weights_applied=lambda *_: None),
        "guard": SimpleNamespace(judge_canaries=nothing),
        "recorder": SimpleNamespace(ledger=SimpleNamespace(checkpointed=checkpoints.append)),
    }
    rest = dict.fromkeys(("lengths", "scaling", "waits", "refusals"))
    steps = TrainingSteps(run=RunConfig(), **stubs, **rest)  # type: ignore[arg-type]
    steps._checkpoint_due = True

    async def body() -> None:
        for _ in range(3):
            await steps.drive()
            arrays = {"logprobs": np.zeros(1, np.float32)}
            done: Any = SimpleNamespace(body=answers[asked[-1]], kind="done", arrays=arrays)
            await steps.answered([done])

    asyncio.run(body())
    assert asked == order and checkpoints == [3]
    assert not (steps._publish_due or steps._canary_due or steps._checkpoint_due or steps._canary_ahead)


class Pushing:
    """The training side of a run that pushes weights, with a trainer and a site that do nothing of their own."""

    def __init__(self, step: int = 0) -> None:
        self.asked: list[Any] = []
        self.lives: dict[str, str] = {}
        self.loaded: list[tuple[int, set[str]]] = []
        self.trainers = SimpleNamespace(busy=False, ask=self._ask, takes_micro_batch=True, workers=["trainer-0"])
        self.services = SimpleNamespace(
            can_take_version=True, spread=self._nothing, in_state=self._in_state, reports=0, updating=False
        )
        stubs: dict[str, Any] = {
            "trainers": self.trainers,
            "services": self.services,
            "issuer": SimpleNamespace(schedule=SimpleNamespace(exclusive=False), group_to_take=lambda *_: None),
            "pool": SimpleNamespace(groups={}),
            "times": SimpleNamespace(trainer=[], loading=[]),
            "canary": SimpleNamespace(loaded=lambda number, who: self.loaded.append((number, set(who)))),
            "telemetry": SimpleNamespace(weights_applied=lambda *_: None),
        }
        names = ("groups", "evaluator", "lengths", "scaling", "recorder", "waits", "refusals", "guard")
        rest: dict[str, Any] = dict.fromkeys(names)
        rest["refusals"] = SimpleNamespace(examining=False)
        run = RunConfig.model_validate({"weights": {"backend": "gloo"}})
        self.steps = TrainingSteps(run=run, **stubs, **rest)
        self.steps.resume_at(step)
        self.steps._feed_trainer = self._nothing  # type: ignore[method-assign]

    async def _ask(self, order: Any) -> None:
        self.asked.append(order)

    async def _nothing(self, *_: object) -> None:
        return None

    def _in_state(self, life: str) -> list[str]:
        return [name for name, one in self.lives.items() if one == life]

    def report(self, **lives: str) -> None:
        """The site tells the states of its instances."""
        self.lives = lives
        self.services.reports += 1

    def drive(self) -> list[Publish]:
        """What the trainer is asked to publish now."""
        self.asked.clear()
        asyncio.run(self.steps.drive())
        return [one for one in self.asked if isinstance(one, Publish)]

    def published(self, number: int, *applied: str, behind: bool = False) -> None:
        spans = dict.fromkeys(applied, (0.0, 1.0))
        body = PublishDone(
            rank=0, started=0.0, finished=1.0, number=number, content_hash="", bytes=1, applied=spans, behind=behind
        )
        answer: Any = SimpleNamespace(body=body, kind="publish_done", arrays={})
        asyncio.run(self.steps.answered([answer]))
        self.steps._canary_due = False


def test_a_checkpoint_has_the_choice_of_the_schedule_and_a_resumed_run_gets_it_back() -> None:
    run, chosen = Pushing(), {"label": "colocated"}
    restored: list[Any] = []
    choice: Any = SimpleNamespace(first_setup=None, note="", state=lambda: chosen, restore=restored.append)
    run.steps.groups = SimpleNamespace(state=lambda _: {"next_index": 3})  # type: ignore[assignment]
    run.steps.evaluator = SimpleNamespace(pending=[])  # type: ignore[assignment]
    run.steps.telemetry = MagicMock()
    asyncio.run(run.steps.begin(choice))
    run.steps._publish_due, run.steps._checkpoint_due = False, True
    run.drive()
    (order,) = run.asked
    assert order.state == {"prompts": {"next_index": 3}, "schedule": chosen}
    run.steps.resume_at(4, order.state["schedule"])
    asyncio.run(run.steps.begin(choice))
    run.steps.resume_at(0)
    asyncio.run(run.steps.begin(choice))
    assert restored == [{}, chosen, {}]


def test_an_instance_that_came_after_a_publication_gets_that_version_pushed_once() -> None:
    run = Pushing()
    run.report(a="stale", b="starting")
    assert run.drive() == [Publish()]  # the first weights go to all that are there
    run.report(a="ready", b="starting")
    run.published(0, "a")
    assert run.drive() == []
    run.report(a="ready", b="stale")
    assert run.drive() == [Publish(behind=True)]
    run.report(a="ready", b="ready")
    run.published(0, "b", behind=True)
    assert run.drive() == [] and run.loaded == [(0, {"a"}), (0, {"b"})]


def test_a_push_that_reached_nobody_is_repeated_only_when_there_is_news() -> None:
    run = Pushing()
    run.published(0)
    run.report(a="stale")
    assert run.drive() == [Publish(behind=True)]
    run.published(0, behind=True)
    assert run.drive() == []
    run.report(a="stale")
    assert run.drive() == [Publish(behind=True)]
    run.report(a="stale", b="stale")  # b comes while nobody is reached
    run.published(0, behind=True)
    assert run.drive() == [Publish(behind=True)]
    run.published(0, "a", behind=True)  # and b came too late for this one
    assert run.drive() == [Publish(behind=True)]


def test_between_publications_newcomers_wait_for_the_next_one_unless_nobody_else_generates() -> None:
    run = Pushing(step=4)
    run.published(4, "a")
    run.steps.step = 5  # trained, not published
    run.report(a="ready", b="stale")
    assert run.drive() == []
    run.report(a="dead", b="stale")
    assert run.drive() == [Publish()]


def test_within_a_step_whose_batch_is_used_several_times_no_version_is_pushed() -> None:
    run = Pushing()
    run.published(0, "a")
    run.steps.batch.update = 1
    run.report(a="dead", b="stale")
    assert run.drive() == []
    run.steps.batch.update = 0
    assert run.drive() == [Publish(behind=True)]


def test_a_version_whose_publication_had_to_wait_is_not_published_between_two_updates_of_the_next_step() -> None:
    run = Pushing(step=1)
    run.services.can_take_version = False  # an earlier version is in flight
    assert run.drive() == []
    run.steps.batch.update = 1
    run.services.can_take_version = True
    assert run.drive() == []
    run.steps.resume_at(2)  # the step's last update is done
    assert run.drive() == [Publish()]


def test_a_trainer_that_computes_gets_no_other_micro_batch_before_it_has_served_a_newcomer() -> None:
    run = Pushing()
    run.published(0, "a")
    ahead: list[int] = []
    run.trainers.busy = True
    run.steps.batch.next_micro_batch = lambda *_: ahead.append(1)  # type: ignore[assignment,func-returns-value]
    run.report(a="ready", b="stale")
    assert run.drive() == [] and not ahead
    run.report(a="ready", b="ready")
    assert run.drive() == [] and ahead


def test_the_checkpoint_of_a_version_stays_until_it_is_evaluated(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"steps": 50, "evaluation": {"every": 5}, "checkpoint": {"keep": 1, "every": 100}})
    assert run.evaluation is not None
    folder, evaluations = CheckpointFolder(tmp_path), Evaluations(run.evaluation, 0, [], 50)
    evaluations._begun.add(0)

    async def save(order: Any) -> None:
        assert isinstance(order, SaveCheckpoint)
        folder.begin(order.step)
        folder.commit(order.step, run.checkpoint.keep, pending=order.pending)

    async def nothing(*_: object) -> None:
        return None

    row = SimpleNamespace(mismatch_warning=None)
    stubs: dict[str, Any] = {
        "trainers": SimpleNamespace(busy=False, ask=save),
        "services": MagicMock(updating=True),  # version 4 is in flight to a slow site all the time
        "issuer": MagicMock(schedule=SimpleNamespace(exclusive=False, publishes=lambda *_: True)),
        "groups": SimpleNamespace(state=lambda _: {}, too_long=0),
        "pool": SimpleNamespace(groups={}),
        "evaluator": evaluations,
        "scaling": SimpleNamespace(step_done=nothing),
        "telemetry": SimpleNamespace(latest=row, watch=lambda *_: None),
        "waits": WaitRegistry("controller"),
    }
    mocks = {name: MagicMock() for name in ("lengths", "recorder", "times", "refusals", "canary", "guard")}
    mocks["recorder"].step_done = AsyncMock()
    steps = TrainingSteps(run=run, **stubs, **mocks)
    steps.resume_at(4)
    steps._publish_due = False

    async def body() -> None:
        for _ in range(3):
            steps._learning = asyncio.ensure_future(nothing())  # type: ignore[arg-type]
            done = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
            await steps._step_done(done)
            await steps.drive()
            steps._checkpoint_due = False

    asyncio.run(body())
    assert {path.name for path in tmp_path.iterdir()} == {"step_5", "step_6", "step_7"}


@pytest.mark.parametrize("begun_at", [0, 4])
@pytest.mark.parametrize(("mismatch", "temperature", "far"), [(0.3, 1.0, True), (0.05, 1.0, False), (0.3, 0.1, False)])
def test_samples_that_no_rounding_explains_are_told_apart_in_the_first_step_only(
    mismatch: float, temperature: float, far: bool, begun_at: int
) -> None:
    """The fixed text shows nothing of an engine that prefills right and decodes wrong."""
    judged: list[bool] = []

    async def nothing(*_: object) -> None:
        return None

    run = RunConfig.model_validate({"sampling": {"temperature": temperature}})
    canary, same = WeightCanary(run), Measured("float32", np.zeros(3, np.float32))
    canary.trainer_measured(0, same)
    assert canary.instance_measured(0, "a", same) == []
    names = ("trainers", "services", "issuer", "pool", "groups", "evaluator", "lengths", "recorder", "telemetry")
    mocks = {name: MagicMock() for name in (*names, "times", "refusals", "guard")}
    mocks["telemetry"].latest = SimpleNamespace(mismatch_warning="they differ")
    mocks["recorder"].step_done = AsyncMock()
    mocks["guard"].judge = lambda text, far: judged.append(far)
    scaling: Any = SimpleNamespace(step_done=nothing)
    steps = TrainingSteps(run=run, scaling=scaling, waits=WaitRegistry("controller"), canary=canary, **mocks)
    steps.resume_at(begun_at)
    steps.choice = SimpleNamespace(step_done=nothing, note="")  # type: ignore[assignment]

    async def body() -> None:
        for _ in range(2):
            steps.batch.stats.append(STATS | {"tokens": 10.0, "mismatch_sum": 10 * mismatch})
            steps._learning = asyncio.ensure_future(nothing())  # type: ignore[arg-type]
            done = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
            await steps._step_done(done)

    asyncio.run(body())
    assert judged == [far, False]


@pytest.mark.parametrize("kept", [False, True])
def test_a_step_with_samples_from_before_a_resume_is_no_measurement_of_generation(kept: bool) -> None:
    """Neither the choice of the schedule nor that of the number of instances learns from it."""
    measured: list[str] = []

    async def scaled(*_: object) -> None:
        measured.append("instances")

    async def chosen(*_: object) -> None:
        measured.append("schedule")

    async def learned() -> None:
        return None

    names = ("trainers", "services", "issuer", "pool", "groups", "evaluator", "lengths", "recorder", "telemetry")
    mocks = {name: MagicMock() for name in (*names, "times", "refusals", "canary", "guard")}
    mocks["telemetry"].latest = None
    mocks["recorder"].step_done = AsyncMock()
    scaling: Any = SimpleNamespace(step_done=scaled)
    steps = TrainingSteps(run=RunConfig(), scaling=scaling, waits=WaitRegistry("controller"), **mocks)
    steps.choice = SimpleNamespace(step_done=chosen, note="")  # type: ignore[assignment]
    for name, number in (("old", int(kept)), ("new", 0)):
        group = empty_group(name)
        group.kept = number
        steps.batch.groups[name] = group

    async def body() -> None:
        steps._learning = asyncio.ensure_future(learned())  # type: ignore[arg-type]
        await steps._step_done(
            StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
        )

    asyncio.run(body())
    assert measured == ([] if kept else ["instances", "schedule"])


@pytest.mark.parametrize(
    ("stuck", "what"),
    [("ranker", "the ranker to learn from step 1"), ("disk", "the disk to take the rollouts of step 1")],
)
def test_a_step_does_not_wait_for_ever_for_its_ranker_or_its_disk(stuck: str, what: str) -> None:
    async def work(name: str, *_: object) -> None:
        if name == stuck:
            await asyncio.Event().wait()

    names = ("trainers", "services", "issuer", "pool", "groups", "evaluator", "lengths", "recorder", "telemetry")
    mocks = {name: MagicMock() for name in (*names, "times", "refusals", "canary", "guard", "scaling")}
    mocks["recorder"].step_done = partial(work, "disk")
    run = RunConfig.model_validate({"deadlines": {"training_s": 0.01}})
    steps = TrainingSteps(run=run, waits=WaitRegistry("controller"), **mocks)

    async def body() -> None:
        steps._learning = asyncio.ensure_future(work("ranker"))  # type: ignore[arg-type]
        if stuck != "ranker":
            await steps._learning  # so that its deadline cannot come first
        done = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
        async with asyncio.timeout(scaled(10)):
            await steps._step_done(done)

    with pytest.raises(DeadlineExpired, match=what):
        asyncio.run(body())


def test_lengths_of_groups_that_are_dropped_while_a_full_step_is_trained_are_learned_with_the_next() -> None:
    run = RunConfig.model_validate({"batch": {"prompts_per_step": 1, "samples_per_prompt": 2}})
    pool, learned = GroupPool(1, 9), []

    async def learn(groups: list[Group], fleet: object) -> None:
        learned.append([group.group_id for group in groups])

    stubs: dict[str, Any] = {
        "issuer": SimpleNamespace(
            schedule=SimpleNamespace(exclusive=False),
            group_to_take=lambda step, count: (
                None if count else next((g for g in pool.groups.values() if g.complete), None)
            ),
            taken=lambda _: None,
            rounds=NoRounds(),
        ),
        "pool": pool,
        "lengths": SimpleNamespace(learn=learn),
        "services": SimpleNamespace(fleet=list),
    }
    names = ("trainers", "groups", "evaluator", "scaling", "recorder", "telemetry", "times", "waits")
    rest: dict[str, Any] = dict.fromkeys((*names, "refusals", "canary", "guard"))
    steps = TrainingSteps(run=run, **stubs, **rest)

    def end(name: str, void: bool = False) -> None:
        pool.issue([empty_group(name)], 0)
        for number in range(2):
            pool.finish(make_sample(f"{name}.{number}"), 0.0)
            pool.score(f"{name}.{number}", None if void else number, Void(VoidCause.PROVIDER, "x") if void else None)
        steps.complete(pool.groups[name])

    async def take() -> None:
        await steps._take_groups()
        assert steps._learning is not None
        await steps._learning

    for early, taken, late in (("a", "b", "c"), ("d", "e", "f")):
        end(early, void=True)
        end(taken)
        asyncio.run(take())
        end(late, void=True)
        steps.resume_at(steps.step + 1)
    assert learned == [["b", "a"], ["e", "d", "c"]]


def test_groups_of_all_steps_of_a_publication_may_be_replaced_before_the_first_of_them_ends() -> None:
    batch = {"prompts_per_step": 2, "samples_per_prompt": 2}
    algorithm = {"name": "dapo", "max_replaced": 1.0}
    schedule = {"name": "sync", "sync_every": 3}
    run = RunConfig.model_validate({"batch": batch, "algorithm": algorithm, "schedule": schedule})
    names = ("trainers", "services", "groups", "evaluator", "lengths", "scaling", "recorder", "telemetry", "times")
    rest: dict[str, Any] = dict.fromkeys((*names, "waits", "refusals", "canary", "guard"))
    pool, issuer = GroupPool(2, 9), SimpleNamespace(rounds=NoRounds())
    steps = TrainingSteps(run=run, pool=pool, issuer=issuer, **rest)  # type: ignore[arg-type]
    pool.issue([empty_group(f"g{number}") for number in range(6)], 0)
    for number in range(12):
        group = pool.groups[f"g{number}"]
        for sample in range(2):
            pool.finish(make_sample(f"{group.group_id}.{sample}"), 0.0)
            pool.score(f"{group.group_id}.{sample}", 1.0, None)
        steps.complete(group)
        pool.issue([empty_group(f"g{6 + number}")] if pool.issued < 6 else [], 0)
    assert len(steps.batch.dropped) == pool.complete == 6


def test_a_trainer_that_begins_at_another_checkpoint_than_the_controller_is_started_again_with_it() -> None:
    pushing = Pushing(step=10)

    async def body(number: int) -> None:
        await pushing.steps.drive()
        done = PublishDone(rank=0, started=0.0, finished=1.0, number=number, content_hash="x", bytes=1)
        await pushing.steps.answered([SimpleNamespace(body=done, kind="done", arrays={})])  # type: ignore[list-item]

    with pytest.raises(RestartNeeded, match="the trainer begins at step 20 and the controller at step 10"):
        asyncio.run(body(20))
    asyncio.run(body(10))
