"""The training side of the loop: what the trainer does next, and what follows from its answers.

    complete groups -> batch -> micro-batches -> optimizer step -> metrics -> publish -> canary
                                                    \\-> refused: examined, tried again (`refused_steps.py`)

The trainer gets one command at a time, but for a micro-batch that it prepares while it computes another.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import GroupSource
from streamrl.controller.issuer import Issuer
from streamrl.controller.length_predictor import LengthPredictor, StepLengths
from streamrl.controller.mismatch_guard import MismatchGuard
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.reference_precompute import ReferencePrecompute
from streamrl.controller.refused_steps import RefusedSteps
from streamrl.controller.replacements import Replacements
from streamrl.controller.schedule_tuner import FixedSchedule, Setup
from streamrl.controller.site_services import Services
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_metrics import first_mismatch
from streamrl.controller.step_recorder import Recorder
from streamrl.controller.step_times import StepTimes
from streamrl.controller.telemetry import Telemetry
from streamrl.controller.trainer_client import Trainers
from streamrl.controller.weight_canary import Measured, WeightCanary
from streamrl.errors import RestartNeeded
from streamrl.protocol.controller_trainer import (
    Answer,
    CanaryDone,
    CheckpointDone,
    EstimateDone,
    ExamineDone,
    MeasureCanary,
    MoveToCores,
    OptimizerStep,
    PrecomputeDone,
    Publish,
    PublishDone,
    SaveCheckpoint,
    StepDone,
    TrainDone,
)
from streamrl.rollouts.types import Group
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery


@dataclass
class TrainingSteps:
    """The optimizer steps of a run: those done, the current one, and what is due after it."""

    run: RunConfig
    trainers: Trainers
    services: Services
    issuer: Issuer
    pool: GroupPool
    groups: GroupSource
    evaluator: Evaluator
    lengths: LengthPredictor
    scaling: Scaling
    recorder: Recorder
    telemetry: Telemetry
    times: StepTimes
    waits: WaitRegistry
    refusals: RefusedSteps
    canary: WeightCanary
    guard: MismatchGuard

    square_cost: float = 0.0
    """Operations of a square of tokens over those of a token, of the run's model (`rollouts/rank_shares.py`)."""
    step: int = 0
    """Number of optimizer steps done."""
    batch: StepBatch = field(init=False)
    """Batch of the current step."""
    choice: FixedSchedule = field(init=False, default_factory=FixedSchedule)
    """Choice of the schedule (`schedule: auto`)."""
    checkpoint_wanted: bool = False
    """Whether a person has requested a checkpoint after the current step."""
    _begun_at: int = 0
    """Steps that were done before this process's first one."""
    _publish_due: bool = True
    _published: int = -1
    """Number of the version that was published last; -1: none yet."""
    _fruitless: int = -1
    """`services.reports` at the last push to instances that are behind, which is not repeated before the next report;
    -1: there was none, or an instance has loaded it."""
    _checkpoint_due: bool = False
    _canary_due: bool = False
    _canary_ahead: bool = False
    """Whether the canary was measured with the weights that are published next."""
    _cores_due: tuple[int, ...] = ()
    """CPU cores that the trainer has yet to move to; (): none."""
    _replacements: Replacements = field(init=False)
    _precompute: ReferencePrecompute = field(init=False, default_factory=ReferencePrecompute)
    _learning: asyncio.Task[StepLengths] | None = None
    """Task that learns from the output lengths of the current step; started once the step has all its groups."""

    _chosen: dict[str, Any] = field(default_factory=dict)
    """The choice of the schedule in the checkpoint that the run goes on from; {}: none."""
    _late: list[Group] = field(default_factory=list)
    """Groups dropped after their step had all its groups: the lengths of the next step are learned with theirs."""

    def __post_init__(self) -> None:
        self.batch = self._new_batch()
        self._replacements = Replacements(self.run)

    def resume_at(self, step: int, chosen: dict[str, Any] | None = None) -> None:
        """Continue after `step` optimizer steps, with the checkpoint's choice of the schedule (see `begin`)."""
        self.step = self._begun_at = step
        self._chosen = chosen or {}
        self.batch = self._new_batch()

    def _new_batch(self) -> StepBatch:
        return StepBatch(self.run, self.step + 1, square_cost=self.square_cost)

    async def begin(self, choice: FixedSchedule) -> None:
        """Begin the first step, with the choice of the schedule; a resumed run's goes on from its checkpoint."""
        self.choice = choice
        choice.restore(self._chosen)
        await self._change_to(choice.first_setup)
        self.telemetry.watch(self.batch, self.pool)

    @property
    def done(self) -> bool:
        """Whether all steps are trained, and what follows the last one is done."""
        due = self._publish_due or self._checkpoint_due or self._canary_due or self.awaited_canaries()
        return self.step == self.run.steps and not due and not self.trainers.busy

    @property
    def saved(self) -> bool:
        """Whether all steps are trained, and the last checkpoint is written."""
        return self.step == self.run.steps and not self._checkpoint_due and not self.trainers.busy

    def awaited_canaries(self) -> list[str]:
        """Return the instances that have yet to measure the run's last version; [] before the last step is done."""
        if self.step < self.run.steps:
            return []
        return self.canary.missing(self.services.version, self.services.instances())

    def complete(self, group: Group) -> None:
        """Let a complete group wait to be taken into a step, or drop it if another one takes its place."""
        if self._replacements.replaces(group, self.batch, self.pool.issued):
            self.batch.dropped.append(dropped := self.pool.drop(group.group_id))
            if self.batch.full:
                self._late.append(dropped)
            self.issuer.rounds.dropped(group.group_id)
        else:
            self.issuer.rounds.completed(group.group_id)

    # -- commands

    async def drive(self) -> None:
        """Give the trainer its next command, if it is idle and there is one."""
        if self.trainers.busy:
            await self._send_ahead()
            return
        if self._behind and self._between_versions and not self.services.in_state("ready"):
            self._publish_due = self._publish_due or self.step != self._published  # nobody generates until then
        # instances that share the trainer's devices take them over with new weights: what needs the devices comes first
        shared = self.issuer.schedule.exclusive and self._publish_due
        if self._canary_due or (shared and not self._canary_ahead):
            await self.trainers.ask(MeasureCanary())
        elif self._cores_due:
            cores, self._cores_due = self._cores_due, ()
            await self.trainers.ask(MoveToCores(cores=list(cores)))
        elif self._publish_due and self._may_publish() and not (shared and self._checkpoint_due):
            await self.trainers.ask(Publish())
        elif self._behind and self._between_versions and self.step == self._published:
            await self._catch_up()
        elif self._checkpoint_due:
            taken = [*self.batch.groups.values(), *self.batch.dropped, *self.batch.not_finite]
            untrained = [*taken, *self.pool.groups.values()]
            state = {"prompts": self.groups.state(untrained), "schedule": self.choice.state()}
            await self.trainers.ask(SaveCheckpoint(step=self.step, state=state, pending=self.evaluator.pending))
        elif self.refusals.examining:
            await self.trainers.examine(self.refusals.next())
        elif self.batch.trained:
            batch = self.batch
            skip = batch.off_policy or batch.given_up
            place = {"step": self.step, "update": batch.update}
            await self.trainers.ask(OptimizerStep(**place, normalizer=batch.normalizer, skip=skip))
        else:
            await self._take_groups()
            await self._feed_trainer()

    def _may_publish(self) -> bool:
        """Return whether the trainer has a version to publish, and sites can take it.

        A version that they could not take before the next step's first update is skipped: that step's comes instead. In
        a run with evaluations every version must first be served everywhere, since it may have to be evaluated.
        """
        if not self._between_versions:
            return False
        return self.services.can_take_version if self.run.evaluation is None else not self.services.updating

    @property
    def _behind(self) -> bool:
        """Whether there are instances that the trainer has to push weights to, because they have come since."""
        if self.run.weights.path.fetched or self._fruitless == self.services.reports:
            return False
        return bool(self.services.in_state("stale"))

    @property
    def _between_versions(self) -> bool:
        """Whether the trainer's weights are those of a whole step; within one, updates on its batch change them."""
        return self.batch.update == 0

    async def _catch_up(self) -> None:
        """Have the trainer push the published version to the instances that are behind."""
        self._fruitless = self.services.reports  # until somebody has loaded it
        await self.trainers.ask(Publish(behind=True))

    async def _take_groups(self) -> None:
        """Move complete groups from the pool into the step's batch, as far as the schedule allows."""
        while (group := self.issuer.group_to_take(self.step, self.batch.count)) is not None:
            if self.issuer.schedule.exclusive and not await self._devices_are_free():
                return
            self.batch.take(self.pool.take())
            self.issuer.taken(group.group_id)
            if self.batch.full:
                groups, self._late = [*self.batch.groups.values(), *self.batch.dropped, *self._late], []
                self._learning = asyncio.ensure_future(self.lengths.learn(groups, self.services.fleet()))

    async def _devices_are_free(self) -> bool:
        """Return whether generation has left the devices to the trainer (colocated); request it once nothing runs."""
        generating = self.pool.running + self.evaluator.unfinished
        return generating == 0 and not self.services.updating and await self.services.leave_devices()

    async def _send_ahead(self) -> None:
        """Send the micro-batch after the current one, if it is complete, so that ranks pack it meanwhile."""
        limits = self.run.batch.micro_batch_tokens, len(self.trainers.workers)
        if self._behind:
            return  # so that the trainer gets to the push sooner
        if self.trainers.takes_micro_batch and (micro := self.batch.next_micro_batch(*limits)) is not None:
            await self.trainers.train(*micro)

    async def _feed_trainer(self) -> None:
        """Send the trainer its next micro-batch, if one is ready; else let it work ahead for waiting groups."""
        limits = self.run.batch.micro_batch_tokens, len(self.trainers.workers)
        if (unknown := self.batch.estimation.next(*limits, self.batch.square_cost)) is not None:
            await self.trainers.estimate(unknown)
        elif (micro := self.batch.next_micro_batch(*limits)) is not None:
            await self.trainers.train(*micro)
        elif not self.issuer.schedule.exclusive and (ahead := self._precompute.next(self.batch, self.pool, *limits)):
            await self.trainers.precompute_reference(ahead)

    # -- answers

    async def answered(self, answers: list[Delivery]) -> None:
        """Handle the answers of all ranks to a command; rank 0's comes first.

        Raises:
            RunFailed: the step was refused once too often, or trainer and instances differ and the run is to stop then.
        """
        first: Answer = answers[0].body
        self.times.trainer.append((answers[0].kind.removesuffix("_done"), first.started, first.finished))
        match first:
            case PrecomputeDone():
                self._precompute.done([answer.arrays["reference_logprobs"] for answer in answers])
            case EstimateDone():
                self.batch.estimated([answer.arrays["estimates"] for answer in answers])
            case TrainDone():
                self.batch.micro_batch_done([answer.body.stats for answer in answers])
            case StepDone(refused=None):
                if not self.batch.next_update():
                    await self._step_done(first)
            case StepDone(refused=cause):
                assert cause is not None
                self.refusals.refused(self.batch, cause)
            case ExamineDone():
                self.batch = self.refusals.examined(self.batch, [answer.body.not_finite for answer in answers])
                self.telemetry.watch(self.batch, self.pool)
            case PublishDone() as published:
                self._pushed(published)
                if published.behind:
                    await self.services.spread(published)
                    return
                if self._published < 0 and published.number != self.step:
                    raise RestartNeeded(
                        f"the trainer begins at step {published.number} and the controller at step {self.step}: they "
                        "do not see the same checkpoints in the run's folder"
                    )
                self._published = published.number
                self._publish_due, self._canary_due, self._canary_ahead = False, not self._canary_ahead, False
                if await self.services.spread(published):
                    self.times.weights_served(time.time(), time.monotonic())
            case CanaryDone():
                self._canary_due, self._canary_ahead = False, self._publish_due
                measured = Measured(first.dtype, answers[0].arrays["logprobs"])
                await self.guard.judge_canaries(self.canary.trainer_measured(first.number, measured))
            case CheckpointDone(step=step):
                self._checkpoint_due = False
                self.recorder.ledger.checkpointed(step)

    def _pushed(self, published: PublishDone) -> None:
        """Record to which instances the trainer itself has brought a version."""
        if published.applied:
            self._fruitless = -1
        self.telemetry.weights_applied(published.number, published.applied)
        self.canary.loaded(published.number, published.applied)
        self.times.loading += [(instance, *span) for instance, span in published.applied.items()]

    async def _step_done(self, result: StepDone) -> None:
        """Record a finished optimizer step (rollouts, ledger, metrics, trace) and begin the next batch."""
        limit_s = self.run.deadlines.training_s
        async with self.waits.deadline(f"the ranker to learn from step {self.step + 1}", limit_s):
            assert self._learning is not None
            lengths = await self._learning
        first = self.step == self._begun_at
        self.step += 1
        batch = self.batch
        self.times.running = self.services.heartbeats.busy_since()
        publishes = self.issuer.schedule.publishes(self.step, self.run.steps)
        async with self.waits.deadline(f"the disk to take the rollouts of step {self.step}", limit_s):
            times = await self.recorder.step_done(
                batch,
                result,
                lengths,
                publishes,
                self.services.traffic(),
                self.groups.too_long,
                self.issuer.rounds.count_deferred(),
                self.canary.bound,
            )
        if self.telemetry.latest is not None and (warning := self.telemetry.latest.mismatch_warning):
            far = first and self.canary.is_far(first_mismatch(batch) or 0.0, self.run.sampling.temperature)
            self.guard.judge(f"step {self.step}: {warning}", far)
        self.batch = self._new_batch()
        self.telemetry.watch(self.batch, self.pool)
        self._publish_due = self._publish_due or publishes
        last = self.step == self.run.steps
        evaluated = publishes and self.evaluator.plan(self.step, self._published)
        regular = self.step % self.run.checkpoint.every == 0
        self._checkpoint_due = last or evaluated or regular or self.checkpoint_wanted
        self.checkpoint_wanted = False
        self.services.train_tokens_s = self.lengths.step_trained(list(batch.groups.values()), times.learn_s)
        if any(group.kept for group in batch.groups.values()):
            return  # its times say nothing about generation
        await self.scaling.step_done(batch, times)
        await self._change_to(await self.choice.step_done(self.step, batch, times, self.times.ended_trainer))

    async def _change_to(self, setup: Setup | None) -> None:
        """Change the schedule and the split of the devices from the next step on; None leaves them unchanged."""
        if setup is not None:
            self.issuer.change_to(setup)
            self._cores_due = setup.trainer_cores
            self.telemetry.schedule = f"auto: {setup.label}"
            await self.services.use(setup.instances)
        self.telemetry.schedule_note = self.choice.note
