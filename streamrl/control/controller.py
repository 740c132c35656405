"""The controller: the whole loop of a run.

    prompts -> groups -> services -> samples -> ledger -> rewards -> advantages -> trainer -> weights -> services

`run` is the loop; everything that arrives is handled in `_handle`, one method per kind of message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from scheduler.simulator import SimulatedInstance
from streamrl.control.batch import Batch
from streamrl.control.lengths import COLUMNS, Lengths, StepLengths
from streamrl.control.prompts import GroupSource, samples_of
from streamrl.control.schedules import Progress, make_schedule
from streamrl.control.step_metrics import StepTimes, step_metrics
from streamrl.control.telemetry import Telemetry
from streamrl.errors import RunFailed
from streamrl.generation.messages import fleet_from_wire, groups_to_wire, sample_from_wire
from streamrl.launch.context import RoleContext
from streamrl.launch.models import resolve_model
from streamrl.launch.plan import plan_processes
from streamrl.rollouts.ledger import Ledger, pack_content
from streamrl.rollouts.micro_batch import to_wire
from streamrl.rollouts.store import RolloutStore
from streamrl.tasks.source import PromptSource
from streamrl.training.checkpoints import CheckpointFolder
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub

log = logging.getLogger(__name__)

MOST_EVENTS_AT_ONCE = 512
"""Messages committed to the ledger in one transaction."""


class Controller:
    """One run."""

    def __init__(self, context: RoleContext) -> None:
        self.context, self.config = context, context.run
        self.limits = context.run.deadlines
        self.waits = WaitRegistry("controller")
        self.hub = Hub("controller", self.waits, lost_after_s=self.limits.heartbeat_s)
        self.schedule = make_schedule(context.run)
        self.lengths = Lengths(context.run)
        self.telemetry = Telemetry(context, self.hub, self.lengths)
        self.ledger = Ledger(context.run_dir / "ledger.sqlite")
        self.rollouts = RolloutStore(context.run_dir / "rollouts")
        self.checkpoints = CheckpointFolder(context.run_dir / "checkpoints")
        plan = plan_processes(context.cluster, context.run, context.run_dir)
        trainer = context.cluster.sites[context.cluster.trainer_site].trainer
        assert trainer is not None
        self.trainers = [f"trainer-{rank}" for rank in range(trainer.ranks)]
        self.services = [spec.name for spec in plan if spec.role == "service"]
        self.rewarders = [spec.name for spec in plan if spec.role == "rewards"]
        self.instances = [spec.name for spec in plan if spec.role == "instance"]
        self.step = 0
        """Optimizer steps done."""
        self.serving_version = -1
        self.batches: dict[int, Batch] = {}
        """Issued and not yet trained, by step (1-based)."""
        self.issued = 0
        self._answers: dict[str, dict[str, dict[str, Any]]] = {}
        """Answers of trainers and services by kind and peer."""
        self._step_ended = time.time()
        self._spans: list[tuple[str, float, float]] = []
        self._learning: dict[int, asyncio.Task[StepLengths]] = {}
        """What is learned from the output lengths of a step, by step."""

    async def run(self) -> None:
        """Runs all steps.

        Raises:
            RunFailed: something that the run needs is gone or did not answer in time.
        """
        writing = asyncio.ensure_future(self.telemetry.keep_writing())
        try:
            await self._start()
            while self.step < self.config.steps:
                progress = self._progress()
                batch = self.batches.get(self.step + 1)
                if self.issued < self.config.steps and self.schedule.may_issue(progress):
                    await self._issue()
                elif batch and batch.trained:
                    await self._optimizer_step(batch)
                    await self._publish_weights()
                    self._record(batch, await self._learned(batch))
                    await self._checkpoint_if_due()
                elif batch and batch.in_flight == 0 and self.schedule.may_train(progress):
                    await self._feed_trainer(batch)
                    await self._next_events(batch)
                else:
                    await self._next_events(batch)
            await self._until(lambda: not self._saving(), "the trainer to save", self.limits.training_s)
            self.telemetry.close("done")
        except asyncio.CancelledError:
            self.telemetry.close("interrupted")
            raise
        except BaseException as error:
            self.telemetry.close("failed", str(error))
            raise
        finally:
            writing.cancel()
            self.ledger.close()
            await self.hub.close()

    # -- the parts of the loop, in its order

    async def _start(self) -> None:
        """Waits for all processes, restores the run's position, brings the first weights to every instance."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self.config.model.path))
        self.groups = GroupSource(self.config, PromptSource(self.config.tasks, self.config.seed), tokenizer)
        if self.context.resume:
            self._restore()
        self.hub.bind(self.context.addresses.controller)
        await self.hub.wait_for({*self.trainers, *self.services, *self.rewarders}, self.limits.startup_s)
        self.telemetry.state = "running"
        await self._publish_weights()
        self._step_ended = time.time()

    def _restore(self) -> None:
        """Goes back to the newest checkpoint: what came after it is generated again."""
        self.step = self.issued = self.checkpoints.latest() or 0
        if self.step:
            state = json.loads((self.checkpoints.path(self.step) / "state.json").read_text())
            self.groups.restore(state["prompts"])
        undone = self.ledger.rewind(self.step + 1)
        self.rollouts.rewind(self.step + 1)
        self.lengths.restore(self.rollouts.newest(COLUMNS, self.config.ranker.window))
        self.telemetry.metrics.rewind(self.step)
        self.telemetry.step = self.step
        log.info("resumed after step %d; %d trained samples of later steps will be made again", self.step, undone)

    def _progress(self) -> Progress:
        batch = self.batches.get(self.step + 1)
        return Progress(
            issued_batches=self.issued,
            trained_batches=self.step,
            serving_version=self.serving_version,
            complete_groups=batch.complete if batch else 0,
            total_groups=len(batch.groups) if batch else -1,
        )

    async def _issue(self) -> None:
        """Sends the next step's prompts to the services."""
        self.issued += 1
        now = time.time()
        groups = self.groups.batch(self.issued)
        batch = Batch(
            self.issued,
            {g.group_id: g for g in groups},
            now,
            skip_zero_advantage=self.config.algorithm.kl_coef == 0,
        )
        self.batches[self.issued] = self.telemetry.batch = batch
        self.telemetry.detail = f"step {self.issued}"
        self.lengths.predict(groups)
        samples = [samples_of(group, self.config.seed) for group in groups]
        for group, some in zip(groups, samples, strict=True):
            self.ledger.issue(group.step, group.group_id, [sample_id for sample_id, _ in some])
        for number, service in enumerate(self.services):
            mine = slice(number, None, len(self.services))
            await self.hub.send(service, "generate", *groups_to_wire(groups[mine], samples[mine], now))

    async def _feed_trainer(self, batch: Batch) -> None:
        """Sends the trainer its next micro-batch, if one is ready."""
        micro = batch.next_micro_batch(self.config.batch.micro_batch_tokens, len(self.trainers))
        if micro is None:
            return
        shares, is_last = micro
        for trainer, groups in zip(self.trainers, shares, strict=True):
            body, arrays = to_wire(groups)
            await self.hub.send(trainer, "train", body | {"round": batch.micro_batches, "is_last": is_last}, arrays)

    async def _next_events(self, batch: Batch | None) -> None:
        """Waits for whatever the batch needs next and handles it."""
        if batch is None:
            waiting_for, limit_s = "anything to do", self.limits.heartbeat_s
        elif batch.in_flight:
            waiting_for, limit_s = "the trainer to finish a micro-batch", self.limits.training_s
        elif batch.finished < batch.total_samples:
            waiting_for = f"samples of step {batch.step} ({batch.finished} of {batch.total_samples} finished)"
            limit_s = self.limits.generation_s
        else:
            waiting_for, limit_s = (
                f"{len(batch.received)} rewards of step {batch.step}",
                self.limits.reward_s * 10,
            )
        await self._receive(waiting_for, limit_s)

    async def _optimizer_step(self, batch: Batch) -> None:
        """One optimizer step from the gradients accumulated over the batch."""
        await self._ask_trainers("step", {"step": self.step, "loss_tokens": batch.loss_tokens})
        self.step += 1

    async def _publish_weights(self) -> None:
        """Brings the trainer's weights to every instance of every site."""
        made = await self._ask_trainers("publish", {})
        announcement = {key: made[key] for key in ("number", "content_hash")}
        self._answers["weights_ready"] = {}
        if made["content_hash"]:
            for service in self.services:
                await self.hub.send(service, "weights", announcement)
            await self._answered("weights_ready", self.services, self.limits.weights_s)
            for answer in self._answers["weights_ready"].values():
                self.telemetry.weights_applied(answer["number"], answer["applied"])
        self._weight_bytes = made["bytes"] * len(self.services)
        self.serving_version = made["number"]

    async def _learned(self, batch: Batch) -> StepLengths:
        """What the step's output lengths have told; the work began when its last sample had come."""
        async with self.waits.deadline(f"the ranker to learn from step {batch.step}", self.limits.training_s):
            return await self._learning.pop(batch.step)

    def _record(self, batch: Batch, lengths: StepLengths) -> None:
        """The step is done everywhere: rollouts to Parquet, ledger, metrics, trace."""
        now = time.time()
        groups = list(batch.groups.values())
        trained_at = max((end for _, _, end in self._spans), default=now)
        for group in groups:
            group.t_trained = trained_at
        self.rollouts.write(batch.step, groups)
        self.ledger.train(batch.step, self.serving_version, groups, now)
        step = self._answers["step_done"][self.trainers[0]]
        row = step_metrics(
            batch,
            StepTimes(self._step_ended, now, step["finished"], [(start, end) for _, start, end in self._spans]),
            self.instances,
            step,
            self._weight_bytes,
            self.groups.too_long,
            self.config.algorithm.kl_coef > 0,
            self.telemetry.memory_gb,
            lengths,
        )
        self.telemetry.step_done(row, batch, self._spans)
        self._step_ended, self._spans = now, []
        del self.batches[batch.step]

    async def _checkpoint_if_due(self) -> None:
        """Asks the trainer to save; it does so while the next batch is generated."""
        if self.step % self.config.checkpoint.every and self.step != self.config.steps:
            return
        await self._until(lambda: not self._saving(), "the trainer to save", self.limits.training_s)
        self._answers["checkpoint_done"] = {}
        for trainer in self.trainers:
            await self.hub.send(trainer, "checkpoint", {"step": self.step, "state": {"prompts": self.groups.state()}})

    def _fleet(self) -> list[SimulatedInstance]:
        """All instances, as their services have told."""
        return [i for service in self.services for i in fleet_from_wire(self.hub.peers[service].meta["fleet"])]

    # -- messages

    def _saving(self) -> bool:
        answers = self._answers.get("checkpoint_done")
        return answers is not None and len(answers) < len(self.trainers)

    async def _ask_trainers(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends every rank a command, waits for all, returns rank 0's answer."""
        self._answers[f"{kind}_done"] = {}
        for trainer in self.trainers:
            await self.hub.send(trainer, kind, body)
        await self._answered(f"{kind}_done", self.trainers, self.limits.training_s)
        return self._answers[f"{kind}_done"][self.trainers[0]]

    async def _answered(self, kind: str, peers: list[str], limit_s: float) -> None:
        answers = self._answers[kind]
        await self._until(lambda: set(peers) <= answers.keys(), f"{kind} of {', '.join(peers)}", limit_s)

    async def _until(self, condition: Callable[[], bool], waiting_for: str, limit_s: float) -> None:
        """Handles messages until a condition holds."""
        while not condition():
            await self._receive(waiting_for, limit_s)

    async def _receive(self, waiting_for: str, limit_s: float) -> None:
        """Takes what has arrived (at least one message), commits it at once, handles it."""
        async with self.waits.deadline(waiting_for, limit_s):
            deliveries = [await self.hub.receive()]
        while len(deliveries) < MOST_EVENTS_AT_ONCE and (more := self.hub.receive_now()) is not None:
            deliveries.append(more)
        await self._samples([d for d in deliveries if d.kind == "sample"])
        self._rewards([d for d in deliveries if d.kind == "scored"])
        for delivery in deliveries:
            if delivery.kind not in ("sample", "scored"):
                await self._handle(delivery)

    async def _samples(self, deliveries: list[Delivery]) -> None:
        """Finished samples: commit, acknowledge, ask for their rewards."""
        samples = [(sample_from_wire(d.body, d.arrays), pack_content(d.body, d.arrays)) for d in deliveries]
        new = self.ledger.finish(samples) if samples else set()
        now = time.time()
        for delivery, (sample, _) in zip(deliveries, samples, strict=True):
            delivery.ack()
            if sample.sample_id not in new:
                log.warning("ignoring sample %s: not waited for", sample.sample_id)
                continue
            batch = self.batches[sample.step]
            batch.finish(sample, now)
            group = batch.groups[sample.group_id]
            rewarder = self.rewarders[hash(sample.group_id) % len(self.rewarders)]
            body = {
                "sample_id": sample.sample_id,
                "step": sample.step,
                "task": group.task,
                "completion": sample.text,
            }
            await self.hub.send(rewarder, "score", body | {"reward_input": group.reward_input})

    def _rewards(self, deliveries: list[Delivery]) -> None:
        """Rewards: complete groups get their advantages and join the trainer's queue."""
        scored = []
        for delivery in deliveries:
            body = delivery.body
            batch = next((b for b in self.batches.values() if body["sample_id"] in b.received), None)
            if batch is None:
                log.warning("ignoring reward of %s: not waited for", body["sample_id"])
                continue
            normalize = self.config.algorithm.normalize_by_std
            scored.append(batch.score(body["sample_id"], float(body["reward"]), body["error"], normalize))
        if scored:
            self.ledger.score(scored)
        for batch in self.batches.values():
            if batch.complete == len(batch.groups) and batch.step not in self._learning:
                work = self.lengths.learn(list(batch.groups.values()), self._fleet())
                self._learning[batch.step] = asyncio.ensure_future(work)
        for delivery in deliveries:
            delivery.ack()

    async def _handle(self, delivery: Delivery) -> None:
        """Everything but samples and rewards."""
        body = delivery.body
        match delivery.kind:
            case "train_done":
                self._spans.append(("train", body["started"], body["finished"]))
                self.batches[self.step + 1].micro_batch_done(body["stats"])
            case "step_done" | "publish_done" | "checkpoint_done" | "weights_ready":
                if delivery.kind != "weights_ready":
                    self._spans.append((delivery.kind.removesuffix("_done"), body["started"], body["finished"]))
                self._answers.setdefault(delivery.kind, {})[delivery.peer] = body
            case "weight_call":  # NCCL path: the trainer's calls to the instances pass through here, and back
                for service in self.services:
                    await self.hub.send(service, "weight_call", body)
            case "weight_answer":
                await self.hub.send(self.trainers[0], "weight_answer", body)
            case "bye":
                raise RunFailed(f"{delivery.peer} left the run")
            case other:
                log.warning("controller ignores %r of %s", other, delivery.peer)
        delivery.ack()
