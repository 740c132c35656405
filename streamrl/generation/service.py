"""The generation service of a site: requests in, dispatch to the site's instances, finished samples out, weights in.

controller   - generate, park, resume, use ->   service   - generate, release ->   instances
             <- samples, parked -                          <- sample, released -
             - weights ->                    (relay)       - apply_weights ->
             - sleep ->                                    - sleep ->
             - finish ->

Between the controller and a service of another site lies a link: samples go over it in batches (`uplink.py`), and all
times are told in the controller's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from streamrl.generation.site_weights import SiteWeights
from streamrl.launch.connections import connect_home, make_uplink, to_home
from streamrl.launch.context import RoleContext
from streamrl.launch.plan import plan_processes
from streamrl.observe.site import write_site
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
OWN_TIMES = ("t_dispatched", "t_first_token", "t_finished")
"""Of a sample: what the instance has put down by this site's clock."""
SHOWN_OF_INSTANCES = ("state", "running", "tokens_per_s", "weight_version")


class GenerationService:
    """One site's service."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.site = context.site
        self.limits = context.run.deadlines
        self.waits = WaitRegistry(context.name)
        self.hub = Hub(context.name, self.waits, lost_after_s=self.limits.heartbeat_s)
        run = context.run
        policy = make_policy(run.dispatch.policy, run.sampling.max_tokens, affinity=run.batch.samples_per_prompt)
        self.instances: tuple[str, ...] = ()
        self.round = 0
        """The controller's newest round, as far as it has been told here."""
        self.dispatcher = Dispatcher(policy, self.hub.send, self._produced)
        self.controller = to_home(context, "service", self.waits)
        self.uplink = make_uplink(context, self.controller)
        self.weights = SiteWeights(context, self.waits)
        self._answers: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        """Expected of an instance: (kind, instance)."""
        self._calls: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def run(self) -> None:
        """Serves until the run is over (at the trainer's site until the process is ended).

        Raises:
            PeerLost: an instance, the controller or the publisher fell silent.
            Refused: the trainer's site does not let this one in.
            RunFailed: the run has ended there, and not well.
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
        self.controller.meta |= {"fleet": fleet_to_wire(fleet), "passes_weights_on": self.weights.passes_on}
        self.controller.state = self._state
        try:
            await connect_home(self.context, self.controller, self.context.addresses.controller)
            await self.weights.connect()
            async with asyncio.TaskGroup() as tasks:
                beside = [self._from_instances(), self.uplink.run(), self._throttle(), self.weights.serve()]
                if self.context.remote:
                    beside.append(self._keep_telling())
                running = [tasks.create_task(work) for work in beside]
                await self._from_controller(tasks)
                for task in running:
                    task.cancel()
        finally:
            await self.controller.close()
            await self.weights.close()
            await self.hub.close()

    async def _throttle(self) -> None:
        """Nothing new is started while finished samples do not leave fast enough."""
        while True:
            await self.dispatcher.throttle(await self.uplink.changed())

    async def _keep_telling(self) -> None:
        """Writes `site.json` for this site's launcher."""
        while True:
            write_site(self.context.run_dir, self._told("serving"))
            await asyncio.sleep(TELL_EVERY_S)

    async def _from_controller(self, tasks: asyncio.TaskGroup) -> None:
        """Serves until the run is over.

        Raises:
            RunFailed: it did not end well.
        """
        while True:
            delivery = await self.controller.receive()
            match delivery.kind:
                case "finish":
                    delivery.ack()
                    if self.context.remote:
                        with contextlib.suppress(OSError):
                            write_site(self.context.run_dir, self._told(str(delivery.body["state"])))
                    if delivery.body["state"] != "done":
                        why = delivery.body["error"] or f"{delivery.body['state']} at its trainer's site"
                        raise RunFailed(f"the run has ended: {why}")
                    return
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
                    await self.uplink.put(self._in_home_time(delivery.body), delivery.arrays, delivery.ack)
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
        started, before = time.time(), self.weights.bytes_received
        version, source = await self.weights.fetch(int(body["number"]), str(body["content_hash"]), body["source"])
        number, content_hash = version.number, version.content_hash
        fetched = time.time()
        message = {"number": number, "content_hash": content_hash}
        if self.context.run.schedule.rolling:
            answers = [await self._update_instance(name, message) for name in self.instances]
        else:
            answers = await asyncio.gather(*(self._update_instance(name, message) for name in self.instances))
        home = self.controller.clock.to_hub_time
        spans = {
            name: [home(a["started"]), home(a["finished"])] for name, a in zip(self.instances, answers, strict=True)
        }
        self.weights.store.keep_only({number})
        report = {
            "number": number,
            "source": source,
            "transfer_s": self.weights.last_s,
            "bytes": self.weights.bytes_received - before,
            "started": home(started),
            "fetched": home(fetched),
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

    def _instance_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What an instance's heartbeat said, without its requests' progress, which stays here."""
        told = {key: value for key, value in state.items() if key != "produced"}
        if told.get("busy_since"):
            told["busy_since"] = self.controller.clock.to_hub_time(told["busy_since"])
        return told

    def _in_home_time(self, body: dict[str, Any]) -> dict[str, Any]:
        """A sample's times by the controller's clock; when it was queued, the controller said itself."""
        return body | {key: self.controller.clock.to_hub_time(body[key]) for key in OWN_TIMES}

    def _told(self, state: str) -> dict[str, Any]:
        """For this site's launcher (`observe/site.py`)."""
        uplink, clock = self.uplink, self.controller.clock
        saved = uplink.raw_bytes / uplink.sent_bytes if uplink.sent_bytes else None
        return {
            "site": self.site,
            "updated_at": time.time(),
            "state": state,
            "trainer_silent_s": self.controller.silent_for,
            "rtt_ms": None if clock.rtt_s is None else clock.rtt_s * 1e3,
            "clock_offset_s": clock.offset_s,
            "weight_version": self.weights.version,
            "weight_bytes": self.weights.bytes_received,
            "samples_sent": uplink.samples,
            "samples_waiting": uplink.backlog_samples,
            "sample_bytes": uplink.sent_bytes,
            "compression": saved if uplink.choice.compressing else None,
            "congested": uplink.congested,
            "instances": {
                name: {key: peer.state[key] for key in SHOWN_OF_INSTANCES if key in peer.state}
                for name, peer in self.hub.peers.items()
            },
        }

    def _state(self) -> dict[str, Any]:
        requests = len(self.dispatcher.requests) - len(self.dispatcher.parked)
        waiting = self.dispatcher.policy.waiting
        return {
            "state": "dispatching" if requests else "idle",
            "waiting": waiting,
            "running": requests - waiting,
            "parked": len(self.dispatcher.parked),
            "moves": self.dispatcher.moves,
            "congested": self.uplink.congested,
            "uplink": self.uplink.state(),
            "weights_refetched": self.weights.corrupt,
            "instances": {name: self._instance_state(peer.state) for name, peer in self.hub.peers.items()},
        }
