"""The controller, which runs the main loop of a run.

    prompts -> groups -> services -> samples -> ledger -> rewards -> pool -> batch -> trainer -> weights -> services

`Controller.run` is the loop: it starts all work that may start now, then handles the next messages, one method per
kind. The schedule decides what may start when (`scheduler/schedule/schedules.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from pathlib import Path

from scheduler.cost.hardware import peak_tflops
from scheduler.cost.model_shapes import square_cost
from streamrl.config.tasks import AgentTask
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.farewell import Farewell
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import GroupSource, group_of, samples_of
from streamrl.controller.issuer import Issuer
from streamrl.controller.kept_samples import KeptSample, issue_groups, kept_samples
from streamrl.controller.length_predictor import LengthPredictor
from streamrl.controller.mismatch_guard import MismatchGuard
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.reconnect import Recovery
from streamrl.controller.refused_steps import RefusedSteps
from streamrl.controller.resumption import Resumption
from streamrl.controller.reward_client import Rewarders
from streamrl.controller.run_end import RunEnd
from streamrl.controller.sample_intake import SampleIntake
from streamrl.controller.schedule_tuner import make_choice
from streamrl.controller.site_claims import SiteClaims, read_heartbeat
from streamrl.controller.site_limits import SampleLimits, SiteOwn, past_part, past_spans
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import SiteTrust
from streamrl.controller.step_recorder import Recorder
from streamrl.controller.step_times import StepTimes
from streamrl.controller.telemetry import Telemetry
from streamrl.controller.trainer_client import Trainers
from streamrl.controller.training_steps import TrainingSteps
from streamrl.controller.void_watch import VoidWatch
from streamrl.controller.weight_calls import WeightCalls
from streamrl.controller.weight_canary import Measured, WeightCanary
from streamrl.errors import RunFailed, is_final
from streamrl.imports import importing, without_torch
from streamrl.machine.model_files import read_config, read_tokenizer, resolve_model, token_rows
from streamrl.machine.router_shape import shape_of
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.controller_site import (
    CanaryMeasured,
    FleetChanged,
    GivenBack,
    Parked,
    SampleBatch,
    SiteAsleep,
    WeightAnswer,
    WeightCall,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import Answer, SaveCheckpoint
from streamrl.protocol.message import MessageReader, kind_of, wire
from streamrl.protocol.operator import CheckpointNow, CheckpointPlanned, ScalePool
from streamrl.protocol.speakers import RIGHTS
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.length_audit import LengthAudit
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.types import Group
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.start_stages import READY, waiting_for
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import plan_processes, rank_names
from streamrl.runtime.site_connections import CONTROLLER, bind_home, home_hub
from streamrl.tasks.source import PromptSource
from streamrl.transport.deadlines import WaitRegistry, never
from streamrl.transport.endpoint import Delivery

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
        self.hub.reads = MessageReader(RIGHTS["controller"])
        self.lengths = LengthPredictor(context.run, len(context.cluster.sites))
        self.pool = GroupPool(context.run.batch.prompts_per_step, context.run.steps)
        episodes = any(isinstance(task, AgentTask) for task in context.run.tasks)  # `max_tokens` is for each turn
        longest = context.run.model.max_context if episodes else context.run.sampling.max_tokens
        self.audit = LengthAudit(longest, limited=not episodes)
        if context.resume:
            context.say("reading the timeline of the run so far")
        self.telemetry = Telemetry(context, self.hub, self.lengths)
        self.ledger = Ledger(context.run_dir / layout.LEDGER, context.resume)
        self.rollouts = RolloutStore(context.run_dir / layout.ROLLOUTS)
        self.checkpoints = CheckpointFolder(context.run_dir / layout.CHECKPOINTS)
        plan = plan_processes(context.cluster, context.run, context.run_dir)
        trainer = context.cluster.trainer
        longer = {kind_of(SaveCheckpoint): self.limits.checkpoint_s}
        self.trainers = Trainers(self.hub, self.waits, trainer.ranks, self.limits.training_s, trainer.sharing, longer)
        services = {spec.name: spec.site for spec in plan if spec.role == "service"}
        self.services = Services(self.hub, self.waits, services, context.cluster, context.run)
        self.farewell = Farewell(
            *(self.hub, self.waits, services, context.cluster, self.services.excluded),
            *(self.telemetry, context.run_dir),
        )
        self.hub.passing = lambda speaker: speaker.role == "operator"
        self.hub.can_lose = lambda speaker: speaker.name in {*self.services.excluded, *self.rewarders.excluded}
        self.weight_calls = WeightCalls(self.hub, self.services, self.trainers.names[0])
        self.trainers.progress["publish"] = lambda: self.weight_calls.since_sign_s
        self._model_config = read_config(Path(resolve_model(context.run.model.path)))
        vocabulary = self._model_config.get("vocab_size")
        self.sample_limits = SampleLimits(
            context.run.sampling.max_tokens,
            context.run.model.max_context,
            vocabulary if isinstance(vocabulary, int) else None,
            shape_of(self._model_config) if context.run.algorithm.router_replay else None,
        )
        self.own = {
            name: SiteOwn(
                site,
                {pool.name: pool.most_replicas for pool in context.cluster.sites[site].generation},
                self.sample_limits,
                remote=site != context.cluster.trainer_site,
            )
            for name, site in services.items()
        }
        """What each service may speak of, by its name."""
        self.hub.read_state = partial(read_heartbeat, self.own)
        self.issuer = Issuer(context.run, self.pool, self.services, self._new_group, self._generate)
        self.times = StepTimes()
        self.scaling = Scaling(
            context.cluster, context.run, context.run_dir, plan, self.services, self.times, context.resume
        )
        self.telemetry.watch_processes(self.scaling.roles, self.services.heartbeats.remote, self.scaling.status)
        self.telemetry.ranks = {spec.name: rank_names(spec) for spec in plan if spec.role == "trainer"}
        self.rewarders = Rewarders(self.hub, {spec.name: spec.site for spec in plan if spec.role == "rewards"})
        spending, peak = self.scaling.spending, peak_tflops(trainer.gpu, trainer.ranks)
        self.recorder = Recorder(self.rollouts, self.ledger, self.audit, self.times, self.telemetry, spending, peak)
        self.canary = WeightCanary(context.run, context.wire_type if context.cluster.remote_sites else "float32")
        self.telemetry.verified = self.canary.state
        self.telemetry.step_began = lambda: self.times.clock

    async def run(self) -> None:
        """Run all steps.

        Raises:
            RunFailed: something that the run needs is gone or did not answer in time.
            RestartNeeded: a process that the run cannot do without hangs or is gone; a restart from the newest
                checkpoint can recover.
        """
        telemetry = self.telemetry
        works = (
            telemetry.keep_writing(),
            telemetry.keep_measuring(),
            telemetry.disk.keep_looking(lambda: telemetry.step),
        )
        beside = [self.hub.beside(work) for work in works]
        try:
            await self._start()
            beside.append(self.hub.beside(self.end.keep_looking(self.hub.wake)))
            while not self.end.reached:
                await self.issuer.issue(self.training.step, self.training.batch.count)
                await self._evaluate()
                await self.training.drive()
                await self._receive()
                await self.end.leave_absent()
            await self.farewell.close("done")
        except asyncio.CancelledError:
            await self.farewell.close("interrupted")
            raise
        except BaseException as error:
            if is_final(error) or self.telemetry.state == "done":
                await self.farewell.close("failed", str(error))
            else:  # its launcher starts it again, and sites that have been told of an end do not come back
                self.telemetry.close("starting")
            raise
        finally:
            for task in beside:
                task.cancel()
            self.ledger.close()
            await self.hub.close()

    async def _start(self) -> None:
        """Wait for all processes and restore the run's position; publishing the first weights is then due."""
        self.context.say("loading the tokenizer and the tasks")
        # code of users may need transformers' models
        hidden = contextlib.nullcontext() if self.config.items_by_users_code else without_torch()
        with importing():
            with hidden:
                from transformers import AutoTokenizer  # noqa: F401  # of `read_tokenizer`
            source = PromptSource(self.config.tasks, self.config.seed)
        folder = resolve_model(self.config.model.path)
        groups = GroupSource(self.config, source, read_tokenizer(folder), token_rows(Path(folder)))
        self._build(groups, Evaluator(self.config, self.context.run_dir, groups, self.checkpoints.mark_best))
        if self.context.resume:
            resumption = self._resumption()
            await resumption.see_checkpoint()
            self.context.say("going back to the newest checkpoint")
            resumption.restore()
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
            weight_calls=self.weight_calls,
            pool=self.pool,
            evaluator=self.evaluator,
            rounds=self.issuer.rounds,
            seed=self.config.seed,
        )
        self.rewarders.start()
        await self._join_services()
        await self.scaling.begin()
        # in a thread: it may wait for nvidia-smi
        await self.training.begin(await asyncio.to_thread(make_choice, self.context, self.services.fleet()))
        self.telemetry.state = "running"
        self.context.say(READY)

    def _build(self, groups: GroupSource, evaluator: Evaluator) -> None:
        """Make the parts that need the tasks."""
        self.groups, self.evaluator = groups, evaluator
        self.trust = SiteTrust(
            *(self.services, self.rewarders, self.pool, evaluator, self.issuer.rounds, self.times, self.config.seed)
        )
        self.claims = SiteClaims(self.own, self.services, self.pool, evaluator, self.ledger, self.context.cluster.sites)
        self.guard = MismatchGuard(self.config, self.claims, self.trust, self.ledger)
        self.training: TrainingSteps = TrainingSteps(
            run=self.config,
            trainers=self.trainers,
            services=self.services,
            issuer=self.issuer,
            pool=self.pool,
            groups=groups,
            evaluator=evaluator,
            lengths=self.lengths,
            scaling=self.scaling,
            recorder=self.recorder,
            telemetry=self.telemetry,
            times=self.times,
            waits=self.waits,
            refusals=RefusedSteps(
                KeptMicroBatches(self.context.run_dir / layout.REFUSED), self.config.optimizer.end_after_refused
            ),
            canary=self.canary,
            guard=self.guard,
            square_cost=square_cost(self._model_config, self.config.model.max_context),
        )
        self.intake = SampleIntake(
            claims=self.claims,
            trust=self.trust,
            refusals=self.hub.refusals,
            services=self.services,
            rewarders=self.rewarders,
            evaluator=evaluator,
            pool=self.pool,
            rounds=self.issuer.rounds,
            ledger=self.ledger,
            audit=self.audit,
            times=self.times,
            scaling=self.scaling,
            waits=self.waits,
            void_watch=VoidWatch(self.config),
            complete=self.training.complete,
        )
        self.end = RunEnd(
            *(self.training, self.services, evaluator, self.trust),
            absence_s=self.context.cluster.absence_s,
            evaluates=self.config.evaluation is not None,
        )

    def _resumption(self) -> Resumption:
        """Return what takes the run back to its newest checkpoint."""
        return Resumption(
            context=self.context,
            checkpoints=self.checkpoints,
            ledger=self.ledger,
            rollouts=self.rollouts,
            telemetry=self.telemetry,
            groups=self.groups,
            pool=self.pool,
            lengths=self.lengths,
            evaluator=self.evaluator,
            training=self.training,
        )

    async def _join_services(self) -> None:
        """Take the instances of all services into use.

        Raises:
            RunFailed: those of the trainer's site, or of all sites, make no sense.
        """
        unusable = self.services.joined(self.claims.wrong_with_first_fleet)
        for name, why in unusable.items():
            self.hub.refusals.count("not its own", name, f"the instances in its hello: {why}")
            if not await self.trust.exclude(name, f"its list of instances {why}"):
                raise RunFailed(f"{name} cannot be used, and no other site can generate: its list of instances {why}")

    def _new_group(self) -> Group:
        """Issue the next prompt's group."""
        group = self.groups.next_group(self.pool.issued // self.pool.batch + 1)
        self.pool.issue([group], self.services.version)
        self.audit.issued(group.step, group.group_id, group.size)
        return group

    async def _generate(self, groups: list[Group], budget: int | None = None) -> None:
        """Predict the lengths of new groups, enter them in the ledger and send them to the services.

        Samples that the ledger has kept over a resume are not generated again.
        """
        if not groups:
            return
        self.lengths.predict(groups)
        issue_groups(self.ledger, groups)
        kept: list[KeptSample] = []
        step = self.training.step
        for group in groups:
            group.oldest = self.issuer.oldest_version(group, step)
            oldest = step if self.issuer.rounds.active else group.oldest
            kept += kept_samples(self.ledger, group, oldest, step, self.sample_limits)
        there = {sample.sample_id for sample, _ in kept}
        missing = [[draw for draw in samples_of(group, self.config.seed) if draw[0] not in there] for group in groups]
        await self.services.generate(groups, missing, budget)
        self.intake.take_kept(kept)

    async def _evaluate(self) -> None:
        """Begin the evaluation of the served version on the held-out tasks, if one is due."""
        if self.services.version >= 0 and self.evaluator.due(self.services.version):
            groups = self.evaluator.begin(self.services.version, time.time())
            await self.services.generate(groups, [self.evaluator.samples(group) for group in groups])

    async def _receive(self) -> None:
        """Receive at least one message, and handle all that are there."""
        self._register_waits()
        deliveries = [await self.waits.first_of_begun(self.hub.receive())]
        while len(deliveries) < MOST_EVENTS_AT_ONCE and (more := self.hub.receive_now()) is not None:
            deliveries.append(more)
        await self._handle_all(deliveries)

    async def _handle_all(self, deliveries: list[Delivery]) -> None:
        """Commit samples and rewards in one transaction each, then handle the other messages.

        What instances have given back comes first: of a sample that has arrived nothing is recorded any more.
        """
        for delivery in deliveries:
            if isinstance(delivery.body, GivenBack):
                await self._handle(delivery)
        samples = [delivery for delivery in deliveries if isinstance(delivery.body, SampleBatch)]
        await self.intake.commit_samples(samples, newest=self.training.step)
        self.intake.commit_rewards([delivery for delivery in deliveries if isinstance(delivery.body, ScoreAnswer)])
        for delivery in deliveries:
            if not isinstance(delivery.body, GivenBack | SampleBatch | ScoreAnswer):
                await self._handle(delivery)

    def _register_waits(self) -> None:
        """Register waits for missing samples and rewards; one that arrives renews its wait, and so does a new token.

        What other sites owe may be late by as long as they may be away.
        """
        running = self.pool.running - self.issuer.rounds.resting + self.evaluator.generating
        unscored = len(self.pool.received) + self.evaluator.unscored
        rewards_s = self.config.longest_reward_s * 10 + self.limits.startup_s
        away_s = self.context.cluster.absence_s if self.context.cluster.remote_sites else 0.0
        for name, missing, limit_s, progress in (
            ("samples", running, self.config.longest_silence_s, self.services.heartbeats.since_token),
            ("rewards", unscored, rewards_s, never),
            ("canary measurements", len(self.training.awaited_canaries()), self.limits.weights_s, never),
        ):
            if not missing:
                self.waits.end(name)
            elif name not in self.waits.begun:
                groups = "" if name == "canary measurements" else f" of {len(self.pool.groups)} groups"
                waited_for = f"{missing} {name}{groups}"
                self.waits.begin(name, waited_for, limit_s + away_s, progress)

    async def _weights_ready(self, service: str, answer: WeightsReady) -> None:
        """Record that a site's instances serve a new version."""
        now = time.time()
        spans = past_spans(answer.applied, now)
        self.telemetry.weights_applied(answer.number, spans)
        self.canary.loaded(answer.number, answer.applied)
        parts = {instance: past_part(*span, now) for instance, span in spans.items()}
        self.times.loading += [(instance, *part) for instance, part in parts.items() if part is not None]
        if await self.services.ready(service, answer):
            self.times.weights_served(time.time(), time.monotonic())

    async def _handle(self, delivery: Delivery) -> None:
        """Handle a message other than samples and rewards."""
        match delivery.body:
            case _ if delivery.kind == "wake":
                pass
            case Answer() if not self.trainers.awaits(delivery):
                self.hub.refusals.count("not its own", delivery.peer, f"the answer {delivery.kind!r} to no command")
            case Answer():
                if (answers := self.trainers.answered(delivery)) is not None:
                    await self.training.answered(answers)
            case _ if (wrong := self.claims.wrong_with(delivery, self.training.step, time.time())) is not None:
                self.hub.refusals.count("not its own", delivery.peer, f"{delivery.kind!r}: {wrong}")
            case Parked() as parked:
                self.issuer.parked(parked, group_of(parked.sample_id))
            case GivenBack() as part:
                self.intake.given_back(delivery.peer, part)
            case WeightsReady() as ready:
                await self._weights_ready(delivery.peer, ready)
            case CanaryMeasured() as canary:
                measured = Measured(canary.dtype, delivery.arrays["logprobs"])
                await self.guard.judge_canaries(self.canary.instance_measured(canary.number, canary.instance, measured))
            case SiteAsleep():
                self.services.asleep(delivery.peer)
            case FleetChanged() as report:
                self.scaling.fleet_changed(delivery.peer, report)
                self.services.lives_changed(delivery.peer, report.instances)
            case ScalePool():
                await self.scaling.handle_request(delivery, self.hub)
            case CheckpointNow():
                self.training.checkpoint_wanted = True
                planned = min(self.training.step + 1, self.config.steps)  # the last step always writes one
                with contextlib.suppress(KeyError):  # nobody waits for the answer any more
                    await self.hub.send(delivery.peer, *wire(CheckpointPlanned(step=planned)))
            case WeightCall() as call:
                await self.weight_calls.ask(call)
            case WeightAnswer() as answer:
                await self.weight_calls.answered(answer)
            case _ if delivery.kind == "hello":
                await self.recovery.hello(delivery.peer, delivery.body["session"])
            case _ if delivery.kind == "bye" and delivery.peer in self.services.names:
                self.services.gone(delivery.peer)  # its launcher decides whether it restarts
        delivery.ack()
