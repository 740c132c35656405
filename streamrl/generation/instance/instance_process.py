"""The vLLM instance process: takes requests from its site's service and returns each finished sample at once."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from streamrl.generation.instance.calibration import batch_sizes, measure_quickly
from streamrl.generation.instance.eight_bits import choose_here, with_computation
from streamrl.generation.instance.engine import Engine
from streamrl.generation.instance.engine_config import Place
from streamrl.generation.instance.running_requests import Worked
from streamrl.generation.instance.sample_parts import UNNAMED_VERSION
from streamrl.generation.site.pace import Stretches, WorkedCurve
from streamrl.imports import importing
from streamrl.machine.gpus import visible_devices
from streamrl.protocol.controller_site import CanaryMeasured
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.samples import progress_to_wire, request_from_wire, sample_to_wire
from streamrl.protocol.site_instance import (
    FROM_SERVICE,
    ApplyWeights,
    FinishedSample,
    GenerateSample,
    InstanceAsleep,
    Release,
    ReleasedSample,
    Retire,
    SleepInstance,
    TakeWeights,
    WeightsApplied,
    WeightsMissed,
    WeightsTaken,
)
from streamrl.rollouts.types import PartialSample
from streamrl.run_dir.start_stages import READY, waiting_for
from streamrl.runtime.device_turns import DeviceTurns, takes_turns
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import PROCESS
from streamrl.runtime.site_connections import connect_inside
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Link
from streamrl.weights.version_store import WeightStore

log = logging.getLogger(__name__)

JOURNAL_EVERY_S = 0.25
"""Seconds between two reports to the token journal: when an instance dies, on average half of this work is lost."""
MOST_STALLED_S = 2.0
"""Most seconds between two heartbeats that count; after more, this process or the machine stood still."""


class InstanceProcess:
    """The process of one instance: connects its engine to the site's service."""

    def __init__(self, context: RoleContext, pool: str, place: Place | None = None) -> None:
        """
        Args:
            context: context of this process.
            pool: name of the instance's pool.
            place: place of this node (see `Engine`).
        """
        self.context, self.place = context, place
        self.site = context.site
        self.pool = context.pool(pool)
        self.waits = WaitRegistry(context.name)
        self._compute_type = dict(context.compute_type_status)
        self.version = UNNAMED_VERSION
        self.updating = self.asleep = False
        shared = takes_turns(context.cluster.hardware == "cuda", context.run)
        self.turns = DeviceTurns(context.run_dir, visible_devices(), self.waits) if shared else None
        """Turns on the GPUs that are the trainer's, too; None: they belong to this instance."""
        self._updated = False
        """Whether weights were loaded since the last heartbeat, so that requests were paused."""
        self._loading = asyncio.Lock()
        self._measuring = asyncio.Lock()
        """Held while the canary is measured, or the instance falls asleep."""
        self._service_restarts = 0
        """Number of the service's restarts seen so far: samples that an earlier service requested are dropped."""
        self._rate = (time.monotonic(), Worked())
        self._stalled_s = 0.0
        """Seconds since the engine last had a new token, or nothing to generate, as far as heartbeats were sent."""
        self._clock: Callable[[], float] = time.time
        """Returns unix seconds by the clock of the site's service, once it is connected: this node's may be wrong."""
        self._drafts: dict[str, dict[str, int]] = {}
        """Tokens that the drafter has 'drafted' and that were 'accepted', by source and age of the text."""

    async def run(self) -> None:
        """Serve until the service retires this instance, or the process is ended.

        Raises:
            PeerLost: the service fell silent.
            RuntimeError: vLLM failed.
        """
        cuda = self.context.cluster.hardware == "cuda"
        self.context.say("importing vLLM")
        with importing():
            import vllm.v1.engine.async_llm  # noqa: F401  the engine needs it, and this import takes longest

        self.context.say("loading the model into vLLM")
        if not cuda:
            self._compute_type["dtype_why"] += f"; {self.context.engine_note(self.pool)}"
        computation = choose_here(self.context.run, cuda, self.pool.gpus_per_replica)
        if computation.kind != "same":
            self._compute_type["dtype"] = computation.kind
        if computation.why:
            self._compute_type["dtype_why"] += f"; {computation}"
            log.info("computes %s", computation)
        run = with_computation(self.context.run, computation)
        about = self.context.name, self.site, self.place
        if self.turns:
            self.context.say(waiting_for(["the trainer to leave the GPU"]))
            await self.turns.take(self.context.startup_s)
            self.context.say("loading the model into vLLM")
        self.engine = Engine(self.pool, run, cuda, *about, clock=lambda: self._clock())
        try:
            store = {"directory": str(self.context.weights_folder)}
            fetched = self.context.run.weights.path.fetched  # otherwise it meets the trainer when that pushes weights
            await self.engine.set_up_weights(store if fetched else None, UNNAMED_VERSION)
            self.context.say("warming up")
            await self.engine.warm_up()
            largest, context = self.pool.max_batch, self.context.run.model.max_context
            measured, load = await measure_quickly(self.engine, largest, context, self.context.say)
            log.info(measured.left_out or f"step times measured in {measured.spent_s:.1f} s")
            if doubts := measured.doubts:
                doubts = f"step times measured at the start are doubtful ({doubts}; {load}); its work replaces them"
                log.warning("%s", doubts)
            elif load.disturbed:
                log.info("while step times were measured, %s", load)
            self._drafts = await self.engine.teach_drafter(measured.curve) or {}
            self.worked = WorkedCurve(measured.curve, batch_sizes(largest), doubts)
            self.stretches = Stretches(measured.curve, self.engine.worked())
            if self.turns:
                await self._sleep()  # the first weights wake it up
            note = f" ({measured.left_out})" if measured.left_out else ""
            self.context.say(waiting_for([f"service-{self.site}"]) + note)
            await self._serve()
        finally:
            self.engine.close()

    async def _serve(self) -> None:
        meta = {
            "pool": self.pool.name,
            "slots": self.pool.max_batch,
            "world_size": self.pool.gpus_per_replica,
            "curve": self.worked.start.to_json(),
            "doubts": self.worked.doubts,
            "caches_prefixes": self.engine.caches_prefixes,
            "process": int(os.environ.get(PROCESS, "1")),
        }
        limits = self.context.run.deadlines
        self.link = Link(self.context.name, "instance", self.waits, meta, flow=self.context.results_flow)
        self.link.reads = MessageReader(FROM_SERVICE)
        self.link.state = self._state
        if not self.context.one_machine:
            self._clock = self.link.hub_time
        address = self.context.addresses.services[self.site]
        await connect_inside(self.context, self.link, f"service-{self.site}", address)
        self.context.say(READY)
        try:
            async with asyncio.TaskGroup() as tasks:
                self.link.on_new_hub = lambda: self._orphaned(tasks)
                reporting = tasks.create_task(self._report_progress())
                while not isinstance((delivery := await self.link.receive()).body, Retire):
                    tasks.create_task(self._handle(delivery))
                reporting.cancel()
            self.link.on_new_hub = self.link.forget_sent
            delivery.ack()  # all work has been sent; leave once the service has acknowledged it
            await self.link.flush(limits.generation_s)
        finally:
            await self.link.close()

    async def _handle(self, delivery: Delivery) -> None:
        delivery.ack()
        match delivery.body:
            case GenerateSample() as order:
                request, restarts = request_from_wire(order, delivery.arrays), self._service_restarts
                sample = await self.engine.generate(request, order.route)
                if restarts != self._service_restarts:
                    return
                body, arrays = sample_to_wire(sample)
                released = isinstance(sample, PartialSample)
                message = ReleasedSample(**body) if released else FinishedSample(**body)
                await self.link.send(*wire(message), arrays)
            case Release() as order:
                await self.engine.release(order.sample_id)
            case SleepInstance():
                await self._sleep()
                await self.link.send(*wire(InstanceAsleep()))
            case ApplyWeights() as order:
                await self._apply(order.number, order.content_hash)
            case TakeWeights() as order:
                await self._take(order)

    async def _report_progress(self) -> None:
        """Report new tokens of running requests to the service's token journal, and teach the drafter, at intervals."""
        reported: dict[str, int] = {}
        while True:
            await asyncio.sleep(JOURNAL_EVERY_S)
            self._drafts = await self.engine.teach_drafter() or self._drafts
            parts = self.engine.progress(reported)
            running = {part.sample_id: start + len(part.completion_tokens) for start, part in parts}
            kept = {sample_id: reported[sample_id] for sample_id in reported.keys() & self.engine.begun}
            reported = kept | running
            if parts:
                message, arrays = progress_to_wire(parts)
                await self.link.send(*wire(message), arrays)

    def _orphaned(self, tasks: asyncio.TaskGroup) -> None:
        """Abort all requests after a restart of the service, which does not know them and issues them again.

        A GPU that is the trainer's, too, is given back: the trainer may have been restarted as well, and then needs it
        before there are weights to load.
        """
        log.warning("the service was restarted: aborting all running requests")
        self._service_restarts += 1
        self.link.forget_sent()
        aborts = [tasks.create_task(self.engine.release(sample_id)) for sample_id in self.engine.begun]
        if self.turns:
            tasks.create_task(self._sleep(aborts))  # before weights that the new service orders

    async def _apply(self, number: int, content_hash: str) -> None:
        """Load a version from the site's store; generation pauses for exactly this long."""
        async with self._loading:  # an earlier service may have ordered a version, too
            if not await self._begin_update(number):
                await self.link.send(*wire(WeightsMissed(number=number)))
                return
            started, began = self._clock(), time.monotonic()
            await self.engine.start_weight_update()
            await self.engine.update_weights({"number": number, "content_hash": content_hash})
            await self._finish(number)
        finished = started + time.monotonic() - began  # the clock may have been set back
        await self.link.send(*wire(WeightsApplied(number=number, started=started, finished=finished)))
        await self._measure_canary(number)

    async def _begin_update(self, number: int) -> bool:
        """Pause generation, or take the devices back, for a version from the site's store.

        Return False, with everything as before, if the store does not have the version, or has lost it meanwhile:
        running requests may take minutes to end, and a service that is restarted keeps at most the newest version.
        """
        store = WeightStore(self.context.weights_folder)
        if not store.has(number):
            return False  # ordered while this process stood still: the site has a newer version by now
        if self.asleep:
            if self.turns:
                await self.turns.take(self.context.run.deadlines.weights_s)
                if not store.has(number):
                    self.turns.give_back()
                    return False
            await self.engine.wake_for_update()
            return True
        await self._pause(number)
        if not store.has(number):
            self.engine.version = self.version
            await self.engine.resume()
            self.updating = False
            return False
        return True

    async def _take(self, order: TakeWeights) -> None:
        """Carry out a step of an update that the trainer pushes; a group that breaks is reported.

        Generation stays paused then: some layers may have new weights. The trainer begins anew, or a new trainer does.
        """
        async with self._loading:
            started, began = self._clock(), time.monotonic()
            if problem := await self._carry_out(order):
                log.warning("%s of version %d: %s", order.step, order.number, problem)
        finished = started + time.monotonic() - began
        taken = WeightsTaken(call=order.call, started=started, finished=finished, problem=problem)
        await self.link.send(*wire(taken))
        if order.step == "load" and not problem:
            await self._measure_canary(order.number)

    async def _carry_out(self, order: TakeWeights) -> str:
        """Carry out a step; return how the group broke, '' if it stands."""
        match order.step:
            case "join":
                assert order.meeting is not None
                place = {"first_rank": order.first_rank, "limit_s": self.context.run.deadlines.weights_s}
                return await self.engine.join_weight_group(msgspec.to_builtins(order.meeting) | place)
            case "pause":
                await self._pause(order.number)
            case "load":
                await self.engine.start_weight_update()
                if problem := await self.engine.receive_version(order.number):
                    return problem
                await self._finish(order.number)
        return ""

    async def _measure_canary(self, number: int) -> None:
        """Report what this engine makes of the canary with a version just loaded, beside the requests that run.

        Nothing is reported if newer weights come meanwhile, which are measured in turn.
        """
        restarts = self._service_restarts
        async with self._measuring:
            if self.asleep or self.version != number:
                return
            logprobs = await self.engine.measure_canary()
        # after a restart the run may have gone back, and make other weights of that number
        if logprobs is not None and self.version == number and restarts == self._service_restarts:
            dtype = self._compute_type["dtype"]
            measured = CanaryMeasured(number=number, instance=self.context.name, dtype=dtype)
            await self.link.send(*wire(measured), {"logprobs": logprobs})

    async def _sleep(self, aborts: Iterable[asyncio.Task[None]] = ()) -> None:
        """Free the devices until there are new weights; a no-op while they are free.

        Args:
            aborts: aborts of running requests, to wait for: no request may be running.
        """
        async with self._loading:  # an order from before may be about to wake it up
            await asyncio.gather(*aborts)
            async with self._measuring:
                if self.asleep:
                    return
                await self.engine.sleep()
                self.asleep = True
                if self.turns:
                    self.turns.give_back()

    async def _pause(self, number: int) -> None:
        self.updating = self._updated = True
        self.engine.line = self._service_restarts  # the run may have gone back, and make other weights of a number
        await self.engine.pause(self.context.run.schedule.on_update, number)

    async def _finish(self, number: int) -> None:
        await self.engine.finish_weight_update(number)
        if self.asleep:
            await self.engine.wake_up()
            self.asleep = False
        else:
            await self.engine.resume()
        self.version, self.updating = number, False

    def _state(self) -> dict[str, Any]:
        now, worked = time.monotonic(), self.engine.worked()
        (then, before), self._rate = self._rate, (now, worked)
        if worked.tokens != before.tokens or not self.engine.running or self.updating or self.asleep:
            self._stalled_s = 0.0
        else:
            self._stalled_s += min(now - then, MOST_STALLED_S)
        if (stretch := self.stretches.heartbeat(worked, self.engine.begun, self._updated)) is not None:
            self.worked.saw(stretch.batch, stretch.ratio)
        self._updated = self.updating
        return {
            "state": self._doing(),
            "detail": self.worked.doubts,
            **self._compute_type,
            "running": self.engine.running,
            "tokens_per_s": (worked.tokens - before.tokens) / max(now - then, 1e-3),
            "stalled_s": self._stalled_s,
            "pace": self.stretches.newest,
            "curve": self.worked.curve.to_json(),
            "doubtful": bool(self.worked.doubts),
            "weight_version": self.version,
            "busy_since": self.engine.busy_since,
            "produced": self.engine.produced(),
            "drafts": ", ".join(
                f"{name} {counts['accepted']}/{counts['drafted']}" for name, counts in self._drafts.items()
            ),
        }

    def _doing(self) -> str:
        if self.updating or self.asleep:
            return "updating" if self.updating else "asleep"
        return "generating" if self.engine.running else "idle"
