"""The generation service of a site: requests in, dispatch to the site's instances, finished samples out, weights in.

controller   - generate, park, resume, use ->   service   - generate, release ->   instances
             <- sample, parked -                           <- sample, released -
             - weights ->                    (relay)       - apply_weights ->
             - sleep ->                                    - sleep ->
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from scheduler.cost import StepCurve
from scheduler.policies import make_policy
from scheduler.simulator import SimulatedInstance
from streamrl.errors import RunFailed
from streamrl.generation.dispatcher import Dispatcher
from streamrl.generation.messages import fleet_to_wire, groups_from_wire, partial_from_wire
from streamrl.launch.context import RoleContext
from streamrl.launch.plan import plan_processes
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.weights.relay import WeightRelay
from streamrl.weights.store import WeightStore, store_directory

log = logging.getLogger(__name__)


class GenerationService:
    """One site's service."""

    def __init__(self, context: RoleContext, site: str) -> None:
        self.context = context
        self.site = site
        self.limits = context.run.deadlines
        self.waits = WaitRegistry(context.name)
        self.hub = Hub(context.name, self.waits, lost_after_s=self.limits.heartbeat_s)
        run = context.run
        policy = make_policy(run.dispatch.policy, run.sampling.max_tokens, affinity=run.batch.samples_per_prompt)
        self.instances: tuple[str, ...] = ()
        self.round = 0
        """The controller's newest round, as far as it has been told here."""
        self.dispatcher = Dispatcher(policy, self.hub.send, self._produced)
        self.controller = self._link("service")
        self.relay = WeightRelay(
            self._link("relay"), WeightStore(store_directory(context.run_dir)), self.limits.weights_s
        )
        self._answers: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        """Expected of an instance: (kind, instance)."""
        self._calls: dict[tuple[str, str], asyncio.Future[None]] = {}

    def _link(self, role: str) -> Link:
        return Link(self.context.name, role, self.waits, lost_after_s=self.limits.heartbeat_s)

    async def run(self) -> None:
        """Serves until the process is ended.

        Raises:
            PeerLost: an instance, the controller or the publisher fell silent.
        """
        self.hub.bind(self.context.addresses.services[self.site])
        expected = {
            spec.name
            for spec in plan_processes(self.context.cluster, self.context.run, self.context.run_dir)
            if spec.role == "instance" and spec.site == self.site
        }
        await self.hub.wait_for(expected, self.limits.startup_s)
        self.instances = tuple(sorted(expected))
        fleet = self._fleet(self.instances)
        for instance in fleet:
            await self.dispatcher.join(instance.name, instance.slots, instance.curve, instance.pool)
        self.controller.meta = {"fleet": fleet_to_wire(fleet)}
        self.controller.state = self._state
        await self.relay.link.connect(self.context.addresses.publisher, self.limits.startup_s)
        await self.controller.connect(self.context.addresses.controller, self.limits.startup_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._from_instances())
                await self._from_controller(tasks)
        finally:
            await self.controller.close()
            await self.relay.link.close()
            await self.hub.close()

    async def _from_controller(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            delivery = await self.controller.receive()
            match delivery.kind:
                case "generate":
                    await self.dispatcher.submit(groups_from_wire(delivery.body, delivery.arrays))
                case "park":
                    await self.dispatcher.park(delivery.body["sample_ids"])
                case "resume":
                    self.round = int(delivery.body["round"])
                    await self.dispatcher.resume(delivery.body["sample_ids"], delivery.body["budget"])
                case "use":
                    await self.dispatcher.use(delivery.body["instances"])
                case "sleep":
                    tasks.create_task(self._sleep())
                case "weights":
                    tasks.create_task(self._update_weights(delivery.body))
                case "weight_call":
                    tasks.create_task(self._weight_call(delivery.body))
                case other:
                    log.warning("service ignores %r of the controller", other)
            delivery.ack()

    def _fleet(self, names: Sequence[str]) -> list[SimulatedInstance]:
        """The instances with what each measured when it started; like ones get the same step times, their mean, so
        that plans do not take noise for a difference."""
        metas = {name: self.hub.peers[name].meta for name in names}
        pools = {pool.name: pool for pool in self.context.cluster.sites[self.site].generation}

        def kind(name: str) -> tuple[str, int, int]:
            pool = pools[metas[name]["pool"]]
            return pool.gpu, pool.gpus_per_replica, pool.threads

        measured = {name: StepCurve.from_json(meta["curve"]) for name, meta in metas.items()}
        return [
            SimulatedInstance(
                name,
                StepCurve.mean([measured[other] for other in names if kind(other) == kind(name)]),
                int(metas[name]["slots"]),
                metas[name]["pool"],
            )
            for name in names
        ]

    def _produced(self, instance: str, sample_id: str) -> float:
        """As the instance's last heartbeat has told, so up to a second old."""
        told = self.hub.peers[instance].state.get("produced", {}).get(sample_id, 0) if instance in self.hub.peers else 0
        return float(told)

    async def _from_instances(self) -> None:
        while True:
            delivery = await self.hub.receive()
            match delivery.kind:
                case "sample":
                    # the instance forgets the sample only when the controller has committed it
                    await self.controller.send("sample", delivery.body, delivery.arrays, on_ack=delivery.ack)
                    length = len(delivery.arrays["completion_tokens"])
                    await self.dispatcher.finished(delivery.body["sample_id"], length)
                case "released":
                    partial = partial_from_wire(delivery.body, delivery.arrays)
                    if await self.dispatcher.released(partial):
                        tokens = len(partial.completion_tokens)
                        body = {"sample_id": partial.sample_id, "tokens": tokens, "round": self.round}
                        await self.controller.send("parked", body)
                    delivery.ack()
                case "asleep":
                    self._answered(delivery)
                case "applied":
                    self._answered(delivery)
                case "weight_answer":
                    delivery.ack()
                    if (call := self._calls.get((delivery.body["call"], delivery.peer))) is not None:
                        call.set_result(None)
                case "bye":
                    raise RunFailed(f"instance {delivery.peer} left")
                case other:
                    log.warning("service ignores %r of %s", other, delivery.peer)
                    delivery.ack()

    async def _update_weights(self, body: dict[str, Any]) -> None:
        """Fetches a version once and has every instance of the site load it."""
        number, content_hash = int(body["number"]), str(body["content_hash"])
        started = time.time()
        manifest = await self.relay.fetch(number, content_hash)
        fetched = time.time()
        message = {"number": number, "content_hash": content_hash}
        if self.context.run.schedule.rolling:
            answers = [await self._update_instance(name, message) for name in self.instances]
        else:
            answers = await asyncio.gather(*(self._update_instance(name, message) for name in self.instances))
        spans = {name: [a["started"], a["finished"]] for name, a in zip(self.instances, answers, strict=True)}
        self.relay.store.keep_only({number})
        report = {
            "number": number,
            "bytes": manifest.nbytes,
            "started": started,
            "fetched": fetched,
            "applied": spans,
        }
        await self.controller.send("weights_ready", report)

    async def _update_instance(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        """Has one instance load a version, and does with its requests what the run says (`schedule.on_update`)."""
        on_update = self.context.run.schedule.on_update
        held = on_update in ("wait", "abort_and_requeue")
        if held:
            await self.dispatcher.hold(name, requeue=on_update == "abort_and_requeue")
        limit_s = self.limits.weights_s + (self.limits.generation_s if on_update == "wait" else 0)
        answer = await self._ask(name, "apply_weights", message, "applied", limit_s)
        if held:
            await self.dispatcher.unhold(name)
        return answer

    async def _sleep(self) -> None:
        """All instances free their devices for training; new weights wake them up."""
        limit_s = self.limits.weights_s
        await asyncio.gather(*(self._ask(name, "sleep", {}, "asleep", limit_s) for name in self.instances))
        await self.controller.send("asleep", {})

    async def _ask(self, name: str, kind: str, body: dict[str, Any], answer: str, limit_s: float) -> dict[str, Any]:
        """Sends an instance a command and waits for its answer."""
        future = self._answers[answer, name] = asyncio.get_running_loop().create_future()
        await self.hub.send(name, kind, body)
        async with self.waits.deadline(f"{name} to answer {kind} with {answer}", limit_s):
            return await future

    def _answered(self, delivery: Delivery) -> None:
        delivery.ack()
        if (future := self._answers.pop((delivery.kind, delivery.peer), None)) is not None:
            future.set_result(delivery.body)

    async def _weight_call(self, body: dict[str, Any]) -> None:
        """One call of the trainer-driven (NCCL) update, passed to every instance; answered when all have."""
        loop = asyncio.get_running_loop()
        instances = list(self.instances)
        call = str(body["call"])
        rank = int(body["payload"].get("rank_offset", 0))
        for name in instances:
            self._calls[call, name] = loop.create_future()
            payload = dict(body["payload"])
            if body["method"] == "init_weight_transfer_engine":
                # NCCL ranks: the trainer is 0, then every instance's workers one after the other
                payload["rank_offset"] = rank
                rank += int(self.hub.peers[name].meta["world_size"])
            await self.hub.send(name, "weight_call", {"call": call, "method": body["method"], "payload": payload})
        for name in instances:
            async with self.waits.deadline(f"{name} to answer {body['method']}", self.limits.weights_s):
                await self._calls.pop((call, name))
        await self.controller.send("weight_answer", {"call": call})

    def _state(self) -> dict[str, Any]:
        requests = len(self.dispatcher.requests) - len(self.dispatcher.parked)
        waiting = self.dispatcher.policy.waiting
        return {
            "state": "dispatching" if requests else "idle",
            "waiting": waiting,
            "running": requests - waiting,
            "parked": len(self.dispatcher.parked),
            "moves": self.dispatcher.moves,
            # per-request progress stays here
            "instances": {
                name: {key: value for key, value in peer.state.items() if key != "produced"}
                for name, peer in self.hub.peers.items()
            },
            "refused": self.hub.malformed + self.hub.unknown,
        }
