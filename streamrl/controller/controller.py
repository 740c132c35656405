"""The controller, which runs the main loop of a run.

    prompts -> groups -> services -> samples -> ledger -> rewards -> pool -> batch -> trainer -> weights -> services

`Controller.run` is the loop: it starts all work that may start now, then handles the next messages, one method per
kind. The schedule decides what may start when (`scheduler/schedule/schedules.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

from scheduler.cost.hardware import peak_tflops
from streamrl.controller.arrivals import Arrival, arrived
from streamrl.controller.evaluation_plan import PREFIX
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import GroupSource, group_of, samples_of
from streamrl.controller.held import SampleLimits, SiteOwn
from streamrl.controller.issuer import Issuer
from streamrl.controller.length_predictor import COLUMNS, LengthPredictor, StepLengths
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.reconnect import Recovery
from streamrl.controller.reference_prefetch import Preparation
from streamrl.controller.refused_steps import RefusedSteps
from streamrl.controller.reward_client import JudgedSample, Rewarders
from streamrl.controller.schedule_tuner import Setup, make_choice
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import SiteTrust
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_recorder import Recorder
from streamrl.controller.step_times import StepTimes
from streamrl.controller.telemetry import Telemetry
from streamrl.controller.trainer_client import Trainers
from streamrl.controller.void_watch import VoidWatch
from streamrl.controller.weight_canary import Measured, Mismatch, WeightCanary
from streamrl.errors import RestartNeeded, RunFailed
from streamrl.machine.model_files import read_config, resolve_model
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.controller_site import (
    FROM_SERVICE,
    CanaryMeasured,
    FleetChanged,
    Parked,
    SampleBatch,
    SiteAsleep,
    WeightAnswer,
    WeightCall,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import (
    Answer,
    CanaryDone,
    CheckpointDone,
    ExamineDone,
    MeasureCanary,
    MoveToCores,
    OptimizerStep,
    PrepareDone,
    Publish,
    PublishDone,
    SaveCheckpoint,
    StepDone,
    TrainDone,
)
from streamrl.protocol.heartbeats import check_state
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.operator import CheckpointNow, CheckpointPlanned, ScalePool
from streamrl.protocol.speakers import RIGHTS
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.length_audit import LengthAudit
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.start_stages import READY, waiting_for
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import plan_processes
from streamrl.runtime.site_connections import CONTROLLER, bind_home, home_hub
from streamrl.tasks.source import PromptSource
from streamrl.transport.deadlines import WaitRegistry, never
from streamrl.transport.endpoint import Delivery, Speaker
from streamrl.transport.refusals import RefusalCause
from streamrl.transport.wire import MalformedMessage

log = logging.getLogger(__name__)

MOST_EVENTS_AT_ONCE = 512
"""Limit on the messages that are committed to the ledger in one transaction."""


class Controller:
    """The process that drives one run."""

    def __init__(self, context: RoleContext) -> None:
        self.context, self.config = context, context.run
        self.limits = context.run.deadlines
        self.waits = WaitRegistry("controller")
        self.hub = home_hub(context, CONTROLLER, self.waits, context.local_flow)
        self.hub.forwards_hellos = True
        self.hub.reads, self.hub.check_state = MessageReader(RIGHTS["controller"]), self._check_state
        self.lengths = LengthPredictor(context.run)
        self.pool = GroupPool(context.run.batch.prompts_per_step, context.run.steps)
        self.batch = StepBatch(context.run, 1)
        """Batch of the current step."""
        self.refusals = RefusedSteps(
            KeptMicroBatches(context.run_dir / layout.REFUSED), context.run.optimizer.end_after_refused
        )
        self.preparation = Preparation()
        self._cores_due: tuple[int, ...] = ()
        """CPU cores that the trainer has yet to move to; (): none."""
        self.audit = LengthAudit(context.run.sampling.max_tokens)
        self.telemetry = Telemetry(context, self.hub, self.lengths)
        self.ledger = Ledger(context.run_dir / layout.LEDGER)
        self.rollouts = RolloutStore(context.run_dir / layout.ROLLOUTS)
        self.checkpoints = CheckpointFolder(context.run_dir / layout.CHECKPOINTS)
        plan = plan_processes(context.cluster, context.run, context.run_dir)
        trainer = context.cluster.sites[context.cluster.trainer_site].trainer
        assert trainer is not None
        self.trainers = Trainers(self.hub, self.waits, trainer.ranks, self.limits.training_s, trainer.tensor_parallel)
        services = {spec.name: spec.site for spec in plan if spec.role == "service"}
        self.services = Services(self.hub, self.waits, services, context.cluster, context.run)
        vocabulary = read_config(Path(resolve_model(context.run.model.path))).get("vocab_size")
        limits = SampleLimits(
            context.run.sampling.max_tokens,
            context.run.model.max_context,
            vocabulary if isinstance(vocabulary, int) else None,
        )
        self.own = {
            name: SiteOwn(
                site,
                {pool.name: pool.most_replicas for pool in context.cluster.sites[site].generation},
                limits,
                remote=site != context.cluster.trainer_site,
            )
            for name, site in services.items()
        }
        """What each service may speak of, by its name."""
        self.issuer = Issuer(context.run, self.pool, self.services, self._new_group, self._generate)
        self.trust = SiteTrust(
            self.services, self.pool, lambda: self.evaluator, lambda: self.issuer.rounds, context.run.seed
        )
        self.times = StepTimes()
        self.scaling = Scaling(context.cluster, context.run, context.run_dir, plan, self.services, self.times)
        self.telemetry.watch_processes(self.scaling.roles, self.services.remote, self.scaling.status)
        self.rewarders = Rewarders(self.hub, [spec.name for spec in plan if spec.role == "rewards"])
        self.void_watch = VoidWatch(context.run)
        spending, peak = self.scaling.spending, peak_tflops(trainer.gpu, trainer.ranks)
        self.recorder = Recorder(self.rollouts, self.ledger, self.audit, self.times, self.telemetry, spending, peak)
        self.step = 0
        """Number of optimizer steps done."""
        self.canary = WeightCanary(context.run)
        self.telemetry.verified = self.canary.state
        self.publish_due, self.checkpoint_due, self.canary_due = True, False, False
        self.checkpoint_wanted = False
        """Whether a person has requested a checkpoint after the current step."""
        self._learning: asyncio.Task[StepLengths] | None = None
        """Task that learns from the output lengths of the current step; started once the step has all its groups."""

    async def run(self) -> None:
        """Run all steps.

        Raises:
            RunFailed: something that the run needs is gone or did not answer in time.
            RestartNeeded: a process that the run cannot do without hangs or is gone; a restart from the newest
                checkpoint can recover.
        """
        writing = asyncio.ensure_future(self.telemetry.keep_writing())
        try:
            await self._start()
            while not self._done():
                await self.issuer.issue(self.step, self.batch.count)
                await self._evaluate()
                await self._drive_trainer()
                await self._receive()
            await self._close("done")
        except asyncio.CancelledError:
            await self._close("interrupted")
            raise
        except RestartNeeded:
            self.telemetry.close("starting")
            raise
        except BaseException as error:
            await self._close("failed", str(error))
            raise
        finally:
            writing.cancel()
            self.ledger.close()
            await self.hub.close()

    async def _close(self, state: str, error: str | None = None) -> None:
        """Write the last status, and notify the sites that have launchers of their own."""
        self.telemetry.close(state, error)
        await self.services.finish(state, error)

    # -- the parts of the loop, in order

    async def _start(self) -> None:
        """Wait for all processes and restore the run's position; publishing the first weights is then due."""
        from transformers import AutoTokenizer

        self.context.say("loading the tokenizer and the tasks")
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self.config.model.path))
        self.groups = GroupSource(self.config, PromptSource(self.config.tasks, self.config.seed), tokenizer)
        self.evaluator = Evaluator(self.config, self.context.run_dir, self.groups, self.checkpoints.mark_best)
        if self.context.resume:
            self._restore()
        addresses = self.context.addresses
        bind_home(self.context, self.hub, addresses.controller, addresses.controller_outside)
        everyone = {*self.trainers.names, *self.services.names, *self.rewarders.names}
        await self.hub.wait_for(
            everyone, self.context.startup_s, lambda missing: self.context.say(waiting_for(missing))
        )
        self.recovery = Recovery(
            hub=self.hub,
            services=self.services,
            scaling=self.scaling,
            rewarders=self.rewarders,
            pool=self.pool,
            evaluator=self.evaluator,
            rounds=self.issuer.rounds,
            seed=self.config.seed,
        )
        await self._join_services()
        await self.scaling.begin(self.context.resume)
        self.choice = make_choice(self.context, self.services.fleet())
        await self._change_to(self.choice.first_setup)
        self.telemetry.watch(self.batch, self.pool)
        self.telemetry.state = "running"
        self.context.say(READY)

    async def _join_services(self) -> None:
        """Take the instances of all services into use.

        Raises:
            RunFailed: those of the trainer's site, or of all sites, make no sense.
        """

        def wrong(name: str, fleet: object) -> str | None:
            return self.own[name].wrong_with_fleet(fleet, {}) or (None if fleet else "is empty")

        unusable = self.services.joined(wrong)
        for name, why in unusable.items():
            self._refuse(name, "not its own", f"the instances in its hello: {why}")
            if not await self.trust.exclude(name, f"its list of instances {why}"):
                raise RunFailed(f"{name} cannot be used, and no other site can generate: its list of instances {why}")

    def _check_state(self, speaker: Speaker, state: dict[str, Any]) -> None:
        """Check the state in a heartbeat.

        Raises:
            MalformedMessage: it does not fit, or speaks for another site's instances.
        """
        check_state(speaker, state)
        own = self.own.get(speaker.name)
        instances = state.get("instances", {})
        if (wrong := own.wrong_with_state(instances) if own else "has instances" if instances else None) is not None:
            raise MalformedMessage(f"state of {speaker.name} {wrong}")

    def _restore(self) -> None:
        """Rewind to the newest checkpoint; groups that no step up to it has trained are generated again."""
        self.step = self.checkpoints.latest() or 0
        if self.step:
            state = json.loads((self.checkpoints.path(self.step) / "state.json").read_text())
            self.groups.restore(state["prompts"])
        self.pool.resume_at(self.step)
        self.batch = StepBatch(self.config, self.step + 1)
        undone = self.ledger.rewind(self.step + 1)
        self.rollouts.rewind(self.step + 1)
        self.lengths.restore(self.rollouts.newest(COLUMNS, self.config.ranker.window))
        self.telemetry.metrics.rewind(self.step)
        self.refusals.count = sum(row.step_refused is not None for row in read_metrics(self.telemetry.metrics.path))
        self.evaluator.rewind(self.step)
        self.telemetry.step = self.step
        log.info("resumed after step %d; %d trained samples of later steps will be generated again", self.step, undone)

    def _done(self) -> bool:
        """Return whether all steps are trained and the work that follows the last one is done."""
        due = self.publish_due or self.checkpoint_due or self.canary_due or self._awaited_canaries()
        open_work = self.trainers.busy or due or self.services.updating
        evaluating = self.evaluator.unfinished or self.evaluator.due(self.services.version)
        return self.step == self.config.steps and not open_work and not evaluating

    def _new_group(self) -> Group:
        """Issue the next prompt's group."""
        group = self.groups.group(self.pool.issued // self.pool.batch + 1)
        self.pool.issue([group], self.services.version)
        self.audit.issued(group.step, group.group_id, group.size)
        return group

    async def _generate(self, groups: list[Group], budget: int | None = None) -> None:
        """Predict the lengths of new groups, enter them in the ledger and send them to the services."""
        if not groups:
            return
        self.lengths.predict(groups)
        samples = [samples_of(group, self.config.seed) for group in groups]
        self.ledger.issue(
            (sample_id, group.group_id) for group, some in zip(groups, samples, strict=True) for sample_id, *_ in some
        )
        await self.services.generate(groups, samples, budget)

    async def _evaluate(self) -> None:
        """Begin the evaluation of the served version on the held-out tasks, if one is due."""
        if self.services.version >= 0 and self.evaluator.due(self.services.version):
            groups = self.evaluator.begin(self.services.version, time.time())
            await self.services.generate(groups, [self.evaluator.samples(group) for group in groups])

    async def _drive_trainer(self) -> None:
        """Give the trainer its next command, if it is idle and there is one."""
        if self.trainers.busy:
            return
        if self.canary_due:
            await self.trainers.ask(MeasureCanary())
        elif self._cores_due:
            cores, self._cores_due = self._cores_due, ()
            await self.trainers.ask(MoveToCores(cores=list(cores)))
        elif self.publish_due and self._may_publish():
            await self.trainers.ask(Publish())
        elif self.checkpoint_due:
            taken = [*self.batch.groups.values(), *self.batch.dropped, *self.batch.not_finite]
            untrained = [*taken, *self.pool.groups.values()]
            state = {"prompts": self.groups.state(untrained)}
            pending = list(self.evaluator.pending)
            await self.trainers.ask(SaveCheckpoint(step=self.step, state=state, pending=pending))
        elif self.refusals.examining:
            await self.trainers.examine(self.refusals.next())
        elif self.batch.trained:
            batch = self.batch
            skip = batch.off_policy or batch.given_up
            await self.trainers.ask(OptimizerStep(step=self.step, normalizer=batch.normalizer, skip=skip))
        else:
            await self._take_groups()
            await self._feed_trainer()

    def _may_publish(self) -> bool:
        """Return whether sites can take new weights.

        In a run with evaluations every version must first be served everywhere, since it may have to be evaluated.
        """
        return self.services.can_take_version if self.config.evaluation is None else not self.services.updating

    async def _take_groups(self) -> None:
        """Move complete groups from the pool into the step's batch, as far as the schedule allows."""
        while (group := self.issuer.next_group(self.step, self.batch.count)) is not None:
            if self.issuer.schedule.exclusive and not await self._devices_are_free():
                return
            self.batch.take(self.pool.take())
            self.issuer.taken(group.group_id)
            if self.batch.full:
                groups = [*self.batch.groups.values(), *self.batch.dropped]
                self._learning = asyncio.ensure_future(self.lengths.learn(groups, self.services.fleet()))

    async def _devices_are_free(self) -> bool:
        """Return whether generation has left the devices to the trainer (colocated); request it once nothing runs."""
        generating = self.pool.running + self.evaluator.unfinished
        return generating == 0 and not self.services.updating and await self.services.leave_devices()

    async def _feed_trainer(self) -> None:
        """Send the trainer its next micro-batch, if one is ready; else let it work ahead for waiting groups."""
        limits = self.config.batch.micro_batch_tokens, len(self.trainers.workers)
        if (micro := self.batch.next_micro_batch(*limits)) is not None:
            await self.trainers.train(*micro)
        elif not self.issuer.schedule.exclusive and (ahead := self.preparation.next(self.batch, self.pool, *limits)):
            await self.trainers.prepare(ahead)

    async def _receive(self) -> None:
        """Receive at least one message, commit samples and rewards in one transaction each, and handle all messages."""
        self._register_waits()
        deliveries = [await self.waits.first_of_begun(self.hub.receive())]
        while len(deliveries) < MOST_EVENTS_AT_ONCE and (more := self.hub.receive_now()) is not None:
            deliveries.append(more)
        await self._samples([d for d in deliveries if isinstance(d.body, SampleBatch)])
        self._rewards([d for d in deliveries if isinstance(d.body, ScoreAnswer)])
        for delivery in deliveries:
            if not isinstance(delivery.body, SampleBatch | ScoreAnswer):
                await self._handle(delivery)

    # -- answers of the trainer

    async def _trainer_done(self, answers: list[Delivery]) -> None:
        """Handle the answers of all ranks to a command; rank 0's comes first."""
        first: Answer = answers[0].body
        self.times.trainer.append((answers[0].kind.removesuffix("_done"), first.started, first.finished))
        match first:
            case PrepareDone():
                self.preparation.done([answer.arrays["reference_logprobs"] for answer in answers])
            case TrainDone():
                self.batch.micro_batch_done([answer.body.stats for answer in answers])
            case StepDone(refused=None):
                await self._step_done(first)
            case StepDone(refused=cause):
                assert cause is not None
                self.refusals.refused(self.batch, cause)
            case ExamineDone():
                self.batch = self.refusals.examined(self.batch, [answer.body.not_finite for answer in answers])
                self.telemetry.watch(self.batch, self.pool)
            case PublishDone():
                self.publish_due, self.canary_due = False, True
                if await self.services.spread(first):
                    self.times.weights_served(time.time())
            case CanaryDone():
                self.canary_due = False
                measured = Measured(first.dtype, answers[0].arrays["logprobs"])
                await self._judge_canaries(self.canary.trainer_measured(first.number, measured))
            case CheckpointDone():
                self.checkpoint_due = False

    def _judge(self, mismatches: list[str]) -> None:
        """Say loudly that trainer and instances differ.

        Raises:
            RunFailed: the run file wants the run to stop then.
        """
        for text in mismatches:
            log.error("mismatch: %s", text)
        if mismatches and self.config.mismatch.on_mismatch == "stop":
            raise RunFailed(f"{mismatches[0]} (mismatch.on_mismatch is stop)")

    async def _judge_canaries(self, mismatches: list[Mismatch]) -> None:
        """Say loudly which instances differ from the trainer.

        Raises:
            RunFailed: the run file wants the run to stop then, and it cannot do without the instance's site.
        """
        for found in mismatches:
            stop = self.config.mismatch.on_mismatch == "stop"
            service = next(name for name, own in self.own.items() if own.has_instance(found.instance))
            if stop and await self._exclude(service, found.text):
                continue
            self._judge([found.text])

    async def _exclude(self, service: str, why: str) -> bool:
        """Exclude a site, unless the run cannot do without it; return whether it is excluded."""
        excluded = await self.trust.exclude(service, why)
        if excluded and not self.services.updating:
            self.times.weights_served(time.time())
        return excluded

    def _awaited_canaries(self) -> list[str]:
        """Return the instances that have yet to measure the run's last version; [] before the last step is done."""
        if self.step < self.config.steps:
            return []
        return self.canary.missing(self.services.version, self.services.instances())

    async def _step_done(self, result: StepDone) -> None:
        """Record a finished optimizer step (rollouts, ledger, metrics, trace) and begin the next batch."""
        async with self.waits.deadline(f"the ranker to learn from step {self.step + 1}", self.limits.training_s):
            assert self._learning is not None
            lengths = await self._learning
        self.step += 1
        batch = self.batch
        self.times.running = self.services.busy_since()
        publishes = self.issuer.schedule.publishes(self.step, self.config.steps)
        times = self.recorder.step_done(
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
            self._judge([f"step {self.step}: {warning}"])
        self.batch = StepBatch(self.config, self.step + 1)
        self.telemetry.watch(self.batch, self.pool)
        self.publish_due = self.publish_due or publishes
        last = self.step == self.config.steps
        evaluated = publishes and self.evaluator.due(self.step)
        regular = self.step % self.config.checkpoint.every == 0
        self.checkpoint_due = last or evaluated or regular or self.checkpoint_wanted
        self.checkpoint_wanted = False
        self.services.train_tokens_s = self.lengths.step_trained(list(batch.groups.values()), times.learn_s)
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

    # -- messages

    def _register_waits(self) -> None:
        """Register waits for missing samples and rewards; one that arrives renews its wait, and so does a new token."""
        running = self.pool.running - self.issuer.rounds.resting + self.evaluator.unfinished
        rewards_s = self.config.longest_reward_s * 10 + self.limits.startup_s
        for name, missing, limit_s, progress in (
            ("samples", running, self.config.longest_silence_s, self.services.since_token),
            ("rewards", len(self.pool.received), rewards_s, never),
            ("canaries", len(self._awaited_canaries()), self.limits.weights_s, never),
        ):
            if not missing:
                self.waits.end(name)
            elif name not in self.waits.begun:
                self.waits.begin(name, f"{missing} {name} of {len(self.pool.groups)} groups", limit_s, progress)

    async def _samples(self, deliveries: list[Delivery]) -> None:
        """Commit finished samples, acknowledge them and request their rewards; have unusable ones generated again."""
        read, unreadable = arrived(deliveries)
        wrong = [(one.peer, one.sample_id, one.error) for one in unreadable]
        usable: list[Arrival] = []
        for arrival in read:
            why = self._wrong_with(arrival.peer, arrival.sample)
            if why is None:
                usable.append(arrival)
            else:
                wrong.append((arrival.peer, arrival.sample.sample_id, why))
        arrivals = [(one.sample, one.content) for one in usable]
        contents = [arrival for arrival in arrivals if not self.evaluator.awaits(arrival[0].sample_id)]
        new = self.ledger.finish(contents) if contents else set()
        for delivery in deliveries:
            delivery.ack()
        await self._refuse_samples(wrong)
        now = time.time()
        judged: list[JudgedSample] = []
        for peer, sample in ((one.peer, one.sample) for one in usable):
            if self.evaluator.generates(sample.sample_id):
                group = self.evaluator.received(sample)
            elif sample.sample_id in new:
                group = self._received(sample, now)
            else:
                log.debug("ignoring sample %s, which has arrived before", sample.sample_id)
                continue
            self.trust.usable(peer, sample.sample_id)
            self.services.finished(sample.sample_id, group.group_id, sample.output_length)
            self.scaling.sample_came(sample, now)
            self.times.generating.append((sample.instance, sample.t_dispatched, sample.t_finished))
            if (trajectory := sample.trajectory) is None:
                await self.rewarders.ask(group, sample.sample_id, sample.text)
            else:  # the agent has said what it is worth
                judged.append(JudgedSample(sample.sample_id, trajectory.reward, trajectory.void))
        if arrivals:
            self.waits.end("samples")
        self._record_rewards(judged)

    def _refuse(self, peer: str, cause: RefusalCause, why: str) -> None:
        """Count what a peer may not say; it ends nothing."""
        self.hub.refusals.count(cause, peer, why)

    def _awaits(self, sample_id: str) -> bool:
        """Return whether generation owes a sample."""
        return self.evaluator.generates(sample_id) or sample_id in self.pool.unfinished([group_of(sample_id)])

    def _owes(self, peer: str, sample_id: str) -> bool:
        """Return whether a service's site owes a sample."""
        return self._awaits(sample_id) and self.services.holds(peer, sample_id, group_of(sample_id))

    def _wrong_with(self, peer: str, sample: Sample) -> str | None:
        """Return why a sample is not taken: it is not its sender's, or makes no sense; None: it is taken, or known."""
        if self._owes(peer, sample.sample_id):
            if self._agent_leads(sample) != (sample.trajectory is not None):
                return "is an episode, a completion was ordered" if sample.trajectory else "is no episode of an agent"
            return self.own[peer].wrong_with_sample(sample, self.step)
        known = sample.sample_id.startswith(PREFIX) or self.ledger.has(sample.sample_id)
        if known and not self._awaits(sample.sample_id):
            return None  # repeated by a process that has restarted
        return "is not to come from its site"

    async def _refuse_samples(self, wrong: list[tuple[str, str | None, str]]) -> None:
        """Refuse samples, as (service, sample, why); those that the service's site owes are generated again.

        A batch of which not even the samples are known comes from no service that works: its site is not used any more.
        """
        for peer, sample_id, why in wrong:
            owed = sample_id is not None and self._owes(peer, sample_id)
            cause: RefusalCause = "unreadable" if owed or sample_id is None else "not its own"
            self._refuse(peer, cause, f"sample {sample_id!r:.99} {why}")
            if owed and sample_id is not None:
                await self.trust.give_again(peer, sample_id, why)
            elif sample_id is None:
                await self._exclude(peer, f"a batch of samples cannot be read: {why:.200}")

    def _agent_leads(self, sample: Sample) -> bool:
        """Return whether a sample that is owed must be an agent's episode."""
        if self.evaluator.awaits(sample.sample_id):
            return self.evaluator.group_of(sample.sample_id).agent
        return sample.group_id in self.pool.groups and self.pool.groups[sample.group_id].agent

    def _received(self, sample: Sample, now: float) -> Group:
        """Record a finished sample that will be trained on; return its group."""
        group = self.pool.finish(sample, now)
        self.audit.finished(sample.sample_id, group.group_id, sample.output_length)
        self.issuer.rounds.finished(group.group_id)
        return group

    def _rewards(self, deliveries: list[Delivery]) -> None:
        """Record the answers of the rewards processes.

        Raises:
            RunFailed: as `_record_rewards`.
        """
        judged = []
        for delivery in deliveries:
            answer: ScoreAnswer = delivery.body
            if self.rewarders.answered(delivery.peer, answer.sample_id):
                judged.append(JudgedSample(answer.sample_id, answer.reward, answer.void, answer.traceback))
            else:
                self._refuse(delivery.peer, "not its own", f"the reward of sample {answer.sample_id!r:.99}")
        try:
            self._record_rewards(judged)
        finally:
            for delivery in deliveries:
                delivery.ack()

    def _record_rewards(self, judged: list[JudgedSample]) -> None:
        """Record rewards, also void ones, in one transaction; groups that have all of theirs are complete.

        Raises:
            RunFailed: too many rewards of samples to train on are void.
        """
        scored: list[Scored] = []
        problems = []
        for one in judged:
            if self.evaluator.awaits(one.sample_id):
                self.evaluator.scored(one.sample_id, one.reward, time.time())  # its row counts void ones
            elif one.sample_id in self.pool.received:
                member, group = self.pool.score(one.sample_id, one.reward, one.void)
                scored.append(member)
                problems.append(self.void_watch.record(group.task, one.void, one.traceback))
                if group.complete:
                    self._complete(group)
            else:
                log.debug("ignoring the reward of sample %s, which is not awaited", one.sample_id)
        if scored:
            self.ledger.score(scored)
            self.waits.end("rewards")
        for problem in filter(None, problems):
            raise RunFailed(problem)

    def _complete(self, group: Group) -> None:
        """Let a complete group wait to be taken into a step, or drop it if another one takes its place."""
        if self.batch.replaces(group):
            self.batch.dropped.append(self.pool.drop(group.group_id))
            self.issuer.rounds.dropped(group.group_id)
        else:
            self.issuer.rounds.completed(group.group_id)

    async def _weights_ready(self, service: str, answer: WeightsReady) -> None:
        """Record that a site's instances serve a new version."""
        self.telemetry.weights_applied(answer.number, answer.applied)
        self.canary.loaded(answer.number, answer.applied)
        self.times.loading += [(instance, *span) for instance, span in answer.applied.items()]
        if await self.services.ready(service, answer):
            self.times.weights_served(time.time())

    def _not_its_own(self, delivery: Delivery) -> str | None:
        """Return why a service's message is about nothing that its site holds, or None."""
        peer = delivery.peer
        if peer not in self.own:
            return "from no service of the plan" if isinstance(delivery.body, FROM_SERVICE) else None
        own = self.own[peer]
        if peer in self.services.excluded:
            return "its site is not used any more"
        match delivery.body:
            case Parked(sample_id=sample_id):
                return None if self._owes(peer, sample_id) else f"sample {sample_id!r:.99}"
            case WeightsReady() if not self.services.awaits_weights(peer):
                return "it was sent no weights"
            case WeightsReady() as ready:
                return own.wrong_with_ready(ready, self.step, self.context.cluster.sites)
            case CanaryMeasured() as canary:
                return own.wrong_with_canary(canary, delivery.arrays.get("logprobs"), self.step)
            case SiteAsleep():
                return None if self.services.awaits_sleep() else "nobody was told to sleep"
            case FleetChanged() as report:
                return own.wrong_with_fleet(report.fleet, report.instances)
        return None

    async def _handle(self, delivery: Delivery) -> None:
        """Handle a message other than samples and rewards."""
        match delivery.body:
            case Answer() if not self.trainers.awaits(delivery):
                self._refuse(delivery.peer, "not its own", f"the answer {delivery.kind!r} to no command")
            case Answer():
                if (answers := self.trainers.answered(delivery)) is not None:
                    await self._trainer_done(answers)
            case _ if (wrong := self._not_its_own(delivery)) is not None:
                self._refuse(delivery.peer, "not its own", f"{delivery.kind!r}: {wrong}")
            case Parked() as parked:
                self.issuer.parked(parked, group_of(parked.sample_id))
            case WeightsReady() as ready:
                await self._weights_ready(delivery.peer, ready)
            case CanaryMeasured() as canary:
                measured = Measured(canary.dtype, delivery.arrays["logprobs"])
                await self._judge_canaries(self.canary.instance_measured(canary.number, canary.instance, measured))
            case SiteAsleep():
                self.services.asleep(delivery.peer)
            case FleetChanged() as report:
                self.scaling.fleet_changed(delivery.peer, report)
            case ScalePool():
                await self.scaling.handle_request(delivery, self.hub)
            case CheckpointNow():
                self.checkpoint_wanted = True
                await self.hub.send(delivery.peer, *wire(CheckpointPlanned(step=self.step + 1)))
            case WeightCall() as call:  # NCCL path: calls of the trainer to the instances are relayed
                await self.services.tell(call)
            case WeightAnswer() as answer:
                await self.hub.send(self.trainers.names[0], *wire(answer))
            case _ if delivery.kind == "hello":
                await self.recovery.hello(delivery.peer, delivery.body["session"])
            case _ if delivery.kind == "bye" and delivery.peer in self.services.names:
                self.services.gone(delivery.peer)  # its launcher decides whether it restarts
        delivery.ack()
