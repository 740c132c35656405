"""The trainer process, one per rank: carries out the controller's commands and publishes weights.

The commands (`protocol/controller_trainer.py`) are answered when done. Every rank gets the same commands in the same
order, so collectives always meet. A single thread does all computing, so the event loop stays free for heartbeats and
for sending weights, and a second thread packs the next micro-batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
import torch.distributed as dist

from streamrl.config.run import CRITIC_KEY
from streamrl.errors import RunFailed
from streamrl.machine.compute_type import TypeChoice
from streamrl.machine.gpus import visible_devices
from streamrl.machine.model_files import read_tokenizer, resolve_model, weights_digest
from streamrl.protocol.controller_site import WeightAnswer
from streamrl.protocol.controller_trainer import (
    FROM_CONTROLLER,
    Answer,
    CanaryDone,
    CheckpointDone,
    Estimate,
    EstimateDone,
    Examine,
    ExamineDone,
    MeasureCanary,
    MoveToCores,
    OptimizerStep,
    Precompute,
    PrecomputeDone,
    Publish,
    PublishDone,
    ResourcesDone,
    SaveCheckpoint,
    StepDone,
    Train,
    TrainDone,
)
from streamrl.protocol.message import MessageReader, body_of, wire
from streamrl.rollouts.canary import Canary, canary
from streamrl.rollouts.micro_batch_wire import from_wire
from streamrl.rollouts.types import FloatArray
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoint_sums import STATE_FILE, write_sums
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.start_stages import READY, say, waiting_for
from streamrl.runtime.device_turns import DeviceTurns, takes_turns
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import CONTROLLER, PUBLISHER, bind_home, connect_inside, home_hub
from streamrl.training.agreements import agreed_checkpoint, agreed_packing, agreed_type
from streamrl.training.checkpoint_check import gathered_sums
from streamrl.training.checkpoint_writing import told_in_words
from streamrl.training.learner import Division
from streamrl.training.packing import PackedShare
from streamrl.training.rank_store import join_ranks
from streamrl.training.received_ahead import ReceivedAhead
from streamrl.training.trainer import Trainer
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Link
from streamrl.transport.wire import Arrays
from streamrl.weights.assembly import make_backend
from streamrl.weights.backends.broadcast import nccl_environment

log = logging.getLogger(__name__)

PUBLISHER_CREDITS = 16
"""Chunks of weights that may be in flight to the relay of the same site."""
PUBLISHER_WINDOW = 256 * 2**20
"""Bytes of such chunks: they wait in the relay's memory while its store makes room, and may be 256 MiB each."""

P = ParamSpec("P")
R = TypeVar("R")


class TrainerProcess:
    """The process of one rank: connects the trainer and the weight publisher to the controller."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.run_config = context.run
        self.cuda = context.cluster.hardware == "cuda"
        self.rank = int(os.environ["RANK"])
        self.name = context.name
        self.limits = context.run.deadlines
        self.waits = WaitRegistry(self.name)
        self.state = "loading"
        self.version = 0
        self.canary: Canary | None = None
        """The run's canary, from its first measurement on."""
        self.reference_digest = ""
        """Digest of the weights of the KL reference; '': there is none."""
        self.packing: dict[str, str] = {}
        """How the trainer packs, and why; for heartbeats. Empty: not decided yet."""
        self.threads = 1
        """Number of CPU threads for computing."""
        self.computing = ThreadPoolExecutor(1, "compute")
        """The single thread for all of torch's work.

        Each thread has its own current CUDA device and its own team of OpenMP threads, and several teams slow each
        other down."""
        self.packer = ThreadPoolExecutor(1, "pack")
        """The thread that packs the next micro-batch meanwhile; it calls nothing that has OpenMP threads."""
        self.checkpoints = CheckpointFolder(context.run_dir / layout.CHECKPOINTS)
        visible = visible_devices()[int(os.environ["LOCAL_RANK"]) :][:1] if self.cuda else []
        turns = DeviceTurns(context.run_dir, visible, self.waits)
        self.turns = turns if takes_turns(self.cuda, context.run) else None
        """Turns on the GPU that this rank shares with an instance; None: it has one to itself."""
        near = replace(context.local_flow, credits=PUBLISHER_CREDITS, window_bytes=PUBLISHER_WINDOW)
        self.hub = home_hub(context, PUBLISHER, self.waits, near)
        self.weights = make_backend(context, self.hub, self._compute)

    async def run(self) -> None:
        """Serve until the process is ended."""
        async with asyncio.TaskGroup() as tasks:
            if self.rank == 0:
                addresses = self.context.addresses
                bind_home(self.context, self.hub, addresses.publisher, addresses.publisher_outside)
                tasks.create_task(self.weights.serve())
            if self.turns:
                await self.turns.take(self.limits.startup_s)
            await self._compute(self._load)
            await self._leave_device()  # instances start
            link = Link(self.name, "trainer", self.waits, flow=self.context.local_flow)
            link.reads = MessageReader(FROM_CONTROLLER)
            link.reports.append(self.hub)
            link.state = lambda: {
                "state": self.state,
                "weight_version": self.version,
                **self.context.compute_type_status,
                **self.packing,
            }
            self._say(waiting_for(["the controller"]))
            await connect_inside(self.context, link, CONTROLLER, self.context.addresses.controller)
            self._say(READY)
            commands = ReceivedAhead(lambda: self._command(link), self._pack_ahead)
            try:
                while True:
                    await self._handle(link, *await commands.next())
            finally:
                commands.close()
                await link.close()
                await self.hub.close()

    def _say(self, stage: str) -> None:
        """Report a stage of the start; only rank 0 does, for all ranks."""
        if self.rank == 0:
            say(self.context.run_dir, "trainer", stage)

    def _load(self) -> None:
        """Join the process group, load the model and, on resume, the newest checkpoint."""
        device = self._choose_device()
        if (ranks := int(os.environ["WORLD_SIZE"])) > 1:
            self._say(f"joining {ranks} ranks")
        os.environ.update(nccl_environment(self.context))
        longest_s = max(self.limits.training_s, self.limits.checkpoint_s)  # of the controller's commands
        join_ranks("nccl" if self.cuda else "gloo", self.limits.startup_s, longest_s)
        self._agree_on_type()
        torch.manual_seed(self.run_config.seed)
        own_critic = self.run_config.critic_path
        critic_path = resolve_model(own_critic, CRITIC_KEY) if own_critic else None
        pool = self.context.cluster.trainer
        copies = pool.nodes if pool.sharding == "hybrid" else 1
        division = Division(copies, pool.tensor_parallel, pool.reduce_gradients, pool.sequence_parallel)
        model = resolve_model(self.run_config.model.path)
        published = getattr(torch, self.context.wire_type)
        self._say("deciding how to pack groups")
        packing = agreed_packing(self.run_config, model, division.rows)
        self.packing = {"packing": packing.kind, "packing_why": packing.why}
        log.info("packs groups: %s", packing)
        self._say("loading the model")
        step = agreed_checkpoint(self.checkpoints) if self.context.resume else None
        if self.rank == 0 and self.run_config.algorithm.needs_reference:
            self.reference_digest = weights_digest(Path(model))
        others = critic_path, division, published, packing
        self.trainer = Trainer(self.run_config, model, device, *others, resumed=step is not None)
        if step is not None:
            self._say(f"loading the checkpoint of step {step}")
            self.trainer.load(self.checkpoints.path(step))
            self.version = step
        gc.freeze()  # modules and model stay for good; collecting garbage among them took 2 % of a step
        self.state = "idle"

    def _choose_device(self) -> torch.device:
        """Make this rank's device the current one, or on a CPU set the number of threads, and return it."""
        if self.cuda:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            return device
        self.threads = self.context.cluster.trainer.threads
        torch.set_num_threads(self.threads)
        return torch.device("cpu")

    def _agree_on_type(self) -> None:
        """Agree with the other ranks, whose devices may differ, on a compute type."""
        choice = self.context.type_choice
        assert choice is not None
        if (agreed := agreed_type(choice.dtype)) != choice.dtype:
            self.context = self.context.computing_in(
                TypeChoice("float32", f"other ranks cannot do better; here {choice}")
            )
            self.run_config = self.context.run
            log.info("computing in %s, like the other ranks", agreed)

    async def _command(self, link: Link) -> Delivery:
        """Return the next command; answers to the weight backend's own calls go there."""
        while isinstance((delivery := await link.receive()).body, WeightAnswer):
            self.weights.answered(delivery.body)
            delivery.ack()
        return delivery

    async def _pack_ahead(self, delivery: Delivery) -> PackedShare | None:
        """Pack a micro-batch, and begin to move it to the device, beside the computing thread; None: it is none."""
        if not isinstance(order := delivery.body, Train):
            return None
        groups = from_wire(body_of(order), delivery.arrays)
        return await asyncio.get_running_loop().run_in_executor(self.packer, self.trainer.pack, groups)

    async def _handle(self, link: Link, delivery: Delivery, share: PackedShare | None) -> None:
        now = time.time if self.context.one_machine else link.hub_time  # this node's clock may be wrong
        started = now()
        arrays: Arrays = {}
        answer: Callable[..., Answer]
        if self.turns and not self.turns.held:
            await self._return_to_device(self.turns)
        match delivery.body:
            case Precompute() as order:
                self.state = "precomputing reference"
                groups = from_wire(body_of(order), delivery.arrays)
                arrays = {"reference_logprobs": await self._compute(self.trainer.precompute_reference, groups)}
                answer = PrecomputeDone
            case Estimate() as order:
                self.state = "estimating values"
                groups = from_wire(body_of(order), delivery.arrays)
                estimates = await self._compute(self.trainer.estimate, groups, order.reference_given)
                arrays, answer = {"estimates": estimates}, EstimateDone
            case Train() as order:
                self.state = "training"
                assert share is not None
                stats = await self._compute(self.trainer.accumulate, share, order.is_last, order.reference_given)
                answer = functools.partial(TrainDone, stats=asdict(stats))
            case OptimizerStep() as order:
                self.state = "optimizer step"
                place = order.step, order.normalizer, order.skip, order.update
                result = await self._compute(self.trainer.step, *place)
                if result.refused is None:
                    self.version = order.step + 1
                answer = functools.partial(StepDone, **asdict(result))
            case Examine() as order:
                self.state = "examining a refused step"
                groups = from_wire(body_of(order), delivery.arrays)
                not_finite = await self._compute(self.trainer.examine, groups, order.reference_given)
                answer = functools.partial(ExamineDone, not_finite=not_finite)
            case MoveToCores() as order:
                self._move_to(set(order.cores))
                answer = ResourcesDone
            case Publish() as order:
                self.state = "publishing weights"
                published = await self.weights.publish(self.trainer, self.version, link, order.behind)
                await self._leave_device()  # instances wake up
                answer = functools.partial(PublishDone, **asdict(published))
            case MeasureCanary():
                self.state = "measuring the canary"
                arrays = {"logprobs": await self._compute(self._measure_canary)}
                answer = functools.partial(CanaryDone, number=self.version, dtype=self.run_config.model.dtype)
            case SaveCheckpoint() as order:
                self.state = "saving"
                await self._compute(self._checkpoint, order.step, order.state, order.pending)
                answer = functools.partial(CheckpointDone, step=order.step)
            case other:
                raise RunFailed(f"{self.name} received {other!r} while it was waiting for a command")
        self.state = "idle"
        delivery.ack()
        await link.send(*wire(answer(rank=self.rank, started=started, finished=now())), arrays)

    async def _compute(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work in the computing thread, with the current number of OpenMP threads."""

        def run() -> R:
            if not self.cuda:
                torch.set_num_threads(self.threads)
            return work(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self.computing, run)

    async def _leave_device(self) -> None:
        """Leave a shared GPU: the state goes to host memory."""
        if self.turns:
            self.state = "leaving the GPU"
            freed = await self._compute(self.trainer.leave_device)
            log.info("%.2f GiB went to host memory", freed / 2**30)
            self.turns.give_back()

    async def _return_to_device(self, turns: DeviceTurns) -> None:
        """Bring the state back to a shared GPU, once no instance starts on it; those that run are asleep."""
        self.state = "returning to the GPU"
        await turns.take(self.limits.startup_s)
        await self._compute(self.trainer.return_to_device)

    def _move_to(self, cores: set[int]) -> None:
        """Compute on these CPU cores from now on, with one thread for each."""
        self.threads = len(cores)
        for thread in psutil.Process().threads():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread.id, cores)

    def _measure_canary(self) -> FloatArray:
        if self.canary is None:
            tokenizer = read_tokenizer(resolve_model(self.run_config.model.path))
            encode = functools.partial(tokenizer.encode, add_special_tokens=False)
            self.canary = canary(encode, self.run_config.model.max_context)
        return self.trainer.measure_canary(self.canary)

    def _checkpoint(self, step: int, state: dict[str, Any], pending: list[int]) -> None:
        """Write `checkpoints/step_<n>`: every rank writes its part, rank 0 completes it.

        Checkpoints of `pending` steps are evaluated, or may still be, and are not deleted.

        Raises:
            RunFailed: it cannot be written.
        """
        partial = self.checkpoints.partial(step)
        with told_in_words(partial):
            if self.rank == 0:
                self.checkpoints.begin(step)
            dist.barrier()
            self.trainer.save(partial)
            if self.rank == 0:
                read_tokenizer(resolve_model(self.run_config.model.path)).save_pretrained(partial)
                (partial / STATE_FILE).write_text(
                    json.dumps(state | {"step": step, "reference": self.reference_digest}), encoding="utf-8"
                )
            sums = gathered_sums(partial)
            if self.rank == 0:
                write_sums(partial, step, sums)
                self.checkpoints.commit(step, self.run_config.checkpoint.keep, pending=pending)
