"""Run a process that `data_plane.py` measures, instance, service, controller or trainer; and define its settings."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.controller.arrivals import read_arrivals
from streamrl.controller.trainer_client import Trainers
from streamrl.generation.site.sample_batches import CompressionChoice, SampleBatcher, unpack_samples
from streamrl.generation.site.uplink import Uplink
from streamrl.protocol.controller_site import SampleBatch
from streamrl.protocol.message import body_of, parse
from streamrl.protocol.samples import sample_to_wire
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.micro_batch_wire import from_wire
from streamrl.rollouts.train_groups import TrainGroup, train_groups
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.transport.flow import Flow

GROUP, STEP_GROUPS, MICRO_TOKENS = 8, 64, 16384
AHEAD, SLOTS, POOL = 2048, 128, 64
BATCH_BYTES, BATCH_SAMPLES, BATCH_S = 256 * 1024, 256, 0.05
"""Batch limits of `generation/site/uplink.py` and `runtime/site_connections.py`, which would load torch."""
LINK_BYTES_PER_S, LINK_RTT_S = 125e6, 0.02
NEAR = Flow(lost_after_s=float("inf"))
FAR = Flow.over(LINK_BYTES_PER_S, LINK_RTT_S, 600, BATCH_BYTES)
MOST_EVENTS_AT_ONCE = 512
"""Events in one transaction, as in `controller/controller.py`, which would load torch."""
TICK_S, ISSUE_S = 0.25, 0.02
LIMIT_S = 120.0
"""Seconds, for a start, and for what the peer does beside the measurement."""

COUNTS = ("issued", "committed", "trained", "nbytes", "commits", "commit_s")


@dataclass(frozen=True)
class Work:
    """What the processes of one measurement are told."""

    instances: int
    rate: float
    """Samples per second that are offered; infinite: as many as go."""
    far: bool
    ledger: bool
    mark: int
    service: str
    controller: str
    folder: Path
    limit_s: float
    rows: Any
    """Queue of what they report."""
    stop: Any
    """Event: all end."""
    train_pace: Any
    """Shared number: samples per second that the trainer takes; 0: as many as it can."""
    commit_pace: Any
    """The same for the commits."""


def made_samples(count: int, seed: int) -> list[tuple[Any, Any, Any, str]]:
    """(tokens int32 [C], logprobs float32 [C], versions int32 [C], text) each; lognormal C, a mean of some 1000."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made = []
    for length in np.clip(rng.lognormal(6.5, 0.9, count), 16, 8192).astype(int):
        tokens = rng.integers(0, 50_000, length).astype(np.int32)
        logprobs = -rng.exponential(0.5, length).astype(np.float32)
        text = "".join(map(chr, rng.integers(97, 123, 4 * length)))
        made.append((tokens, logprobs, np.full(length, 3, np.int32), text))
    return made


async def serve(work: Work, name: str, tasks: Sequence[Coroutine[Any, Any, None]], told: Callable[[], Any]) -> None:
    """Run tasks until the parent says stop or is gone, and report what `told` gives; raise what a task raises."""
    running = [asyncio.create_task(task) for task in tasks]
    parent = os.getppid()
    async with asyncio.timeout(work.limit_s):
        while not work.stop.is_set() and os.getppid() == parent:
            work.rows.put((name, time.time(), told()))
            await asyncio.sleep(TICK_S)
            for task in running:
                if task.done() and not work.stop.is_set():  # at the end, others may be gone before this one
                    task.result()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def held(waits: WaitRegistry) -> bool:
    """Whether a send waits for a credit."""
    return any("to acknowledge messages" in wait["waiting_for"] for wait in waits.snapshot())


async def instance(work: Work, number: int) -> None:
    """Send a made sample for each id that it is asked for."""
    name = f"instance-{number}"
    waits = WaitRegistry(name)
    link = Link(name, "instance", waits, flow=NEAR)
    made = made_samples(POOL, number)
    sent = acknowledged = 0

    def acked() -> None:
        nonlocal acknowledged
        acknowledged += 1

    async def generate() -> None:
        nonlocal sent
        while True:
            request = await link.receive()
            request.ack()
            for sample_id in request.body["samples"]:
                tokens, logprobs, versions, text = made[sent % POOL]
                now = time.time()
                about = (request.body["group"], tokens, logprobs, versions, "stop", "home", name, "pool", "regular")
                sample = Sample(sample_id, *about, now, now, now, now, text)
                await link.send("sample", *sample_to_wire(sample), limit_s=work.limit_s, on_ack=acked)
                sent += 1

    await link.connect(work.service, LIMIT_S)
    await serve(work, name, [generate()], lambda: {"under_way": sent - acknowledged, "held": held(waits)})
    await link.close()


async def service(work: Work) -> None:
    """Give groups to instances, and pass on what they send."""
    waits = WaitRegistry("service")
    hub, link = Hub("service", waits, flow=NEAR), Link("service", "service", waits, flow=FAR if work.far else NEAR)
    bandwidth = LINK_BYTES_PER_S if work.far else None
    batcher: SampleBatcher[Any] = SampleBatcher(BATCH_S if work.far else 0.0, BATCH_BYTES, BATCH_SAMPLES)
    uplink = Uplink(link, batcher, CompressionChoice(bandwidth), work.mark, work.limit_s)
    waiting: deque[dict[str, Any]] = deque()
    running = {f"instance-{number}": 0 for number in range(work.instances)}
    wake = asyncio.Event()

    async def deal() -> None:
        while True:
            await wake.wait()
            wake.clear()
            while waiting and not uplink.congested and min(running.values()) + GROUP <= SLOTS:
                name = min(running, key=running.__getitem__)
                group = waiting.popleft()
                running[name] += len(group["samples"])
                await hub.send(name, "generate", group, limit_s=work.limit_s)

    async def from_controller() -> None:
        while True:
            delivery = await link.receive()
            waiting.extend(delivery.body["groups"])
            delivery.ack()
            wake.set()

    async def from_instances() -> None:
        while True:
            delivery = await hub.receive()
            await uplink.put(delivery.body, delivery.arrays, delivery.ack)
            running[delivery.peer] -= 1
            wake.set()

    async def throttle() -> None:
        while True:
            await uplink.changed()
            wake.set()

    def told() -> dict[str, Any]:
        return uplink.state() | {"held": held(waits), "running": sum(running.values()), "waiting": len(waiting) * GROUP}

    hub.bind(work.service)
    await hub.wait_for(set(running), LIMIT_S)
    await link.connect(work.controller, LIMIT_S)
    await serve(work, "service", [uplink.run(), deal(), from_controller(), from_instances(), throttle()], told)
    await link.close()
    await hub.close()


class Control:
    """The controller's part of the way: issues, commits, acknowledges, hands over."""

    def __init__(self, work: Work) -> None:
        self.work = work
        waits = WaitRegistry("controller")
        self.hub = Hub("controller", waits, flow=NEAR)
        self.hub.reads = lambda _, kind, body: parse(SampleBatch, body) if kind == "samples" else body
        self.trainers = Trainers(self.hub, waits, 1, work.limit_s)
        self.ledger = Ledger(work.folder / "ledger.sqlite") if work.ledger else None
        self.open: dict[str, Group] = {}
        self.ready: deque[Group] = deque()
        self.training: list[Group] = []
        self.trained_groups: list[Group] = []
        self.issued = self.committed = self.trained = self.nbytes = self.steps = self.commits = 0
        self.commit_s = 0.0
        self.latencies: list[float] = []
        self.late: deque[Delivery] = deque()
        """Samples that wait for their commit, while commits are to be slow."""
        self.allowed, self.allowed_at = 0.0, time.monotonic()

    def told(self) -> dict[str, Any]:
        """Counts since the start; latencies since the last time, in seconds."""
        latencies, self.latencies = self.latencies, []
        counts = {key: getattr(self, key) for key in COUNTS}
        return counts | {"latencies": latencies}

    async def issue(self) -> None:
        """Send out groups at the offered rate, as far as the bound on samples ahead of the trainer allows."""
        owed, last = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(ISSUE_S)
            now = time.monotonic()
            # what was held back is not owed for ever: after a second it is lost, as it is where nothing is admitted
            owed, last = min(owed + self.work.rate * (now - last), max(self.work.rate, GROUP)), now
            count = int(min(owed, AHEAD - (self.issued - self.trained)) // GROUP)
            if count < 1:
                continue
            owed -= count * GROUP
            groups: list[dict[str, Any]] = []
            for number in range(self.issued // GROUP, self.issued // GROUP + count):
                group = Group(f"g{number}", 1, number, f"p{number}", "made", 0, "", np.zeros(64, np.int32), GROUP)
                self.open[group.group_id] = group
                samples = [f"{group.group_id}/{n}" for n in range(GROUP)]
                groups.append({"group": group.group_id, "samples": samples})
            if self.ledger is not None:
                self.ledger.issue((sample, group["group"], b"") for group in groups for sample in group["samples"])
            self.issued += count * GROUP
            await self.hub.send("service", "generate", {"groups": groups}, limit_s=self.work.limit_s)

    async def receive(self) -> None:
        """Take what has come, as `Controller._receive` does."""
        while True:
            deliveries = [await self.hub.receive()] if not self.late else [*await self._within(TICK_S)]
            while len(deliveries) < MOST_EVENTS_AT_ONCE and (more := self.hub.receive_now()) is not None:
                deliveries.append(more)
            self.late += [delivery for delivery in deliveries if delivery.kind == "samples"]
            self._commit(self._due())
            for delivery in deliveries:
                if delivery.kind == "train_done":
                    delivery.ack()
                    self.trainers.answered(delivery)
                    self._trained()
            await self._feed()

    async def _within(self, seconds: float) -> list[Delivery]:
        """The next message, if it comes in time."""
        try:
            return [await asyncio.wait_for(self.hub.receive(), seconds)]
        except TimeoutError:
            return []

    def _due(self) -> list[Delivery]:
        """What is to be committed now: all that has come, unless commits are to be slow."""
        pace, now = self.work.commit_pace.value, time.monotonic()
        self.allowed = min(self.allowed + pace * (now - self.allowed_at), pace) if pace else 0.0
        self.allowed_at = now
        due = []
        while self.late and (not pace or self.allowed >= 1):
            due.append(self.late.popleft())
            if pace:
                self.allowed -= len(list(unpack_samples(body_of(due[-1].body), due[-1].arrays)))
        return due

    def _commit(self, deliveries: Sequence[Delivery]) -> None:
        found, refused = read_arrivals(deliveries, lambda peer, sample_id, is_agent: None)
        if refused:
            raise AssertionError(f"samples were refused: {refused[0].why}")
        arrivals = [(one.sample, one.content) for one in found]
        began = time.perf_counter()
        if self.ledger is not None and arrivals and len(self.ledger.finish(arrivals)) != len(arrivals):
            raise AssertionError("a sample came twice, or was not asked for")
        self.commit_s += time.perf_counter() - began
        self.commits += bool(arrivals)
        for delivery in deliveries:
            delivery.ack()
        now = time.time()
        scored = [Scored(sample, 0.0, None, now) for sample, _ in arrivals]
        if self.ledger is not None and scored:
            self.ledger.score(scored)
        for item in scored:
            group = self.open[item.sample.group_id]
            group.scored[item.sample.sample_id] = item
            if group.complete:
                group.advantages = dict.fromkeys(group.scored, 0.0)
                self.ready.append(self.open.pop(group.group_id))
        self.latencies += [now - sample.t_finished for sample, _ in arrivals]
        self.committed += len(arrivals)
        self.nbytes += sum(len(content) for _, content in arrivals)

    def _trained(self) -> None:
        self.trained += GROUP * len(self.training)
        self.trained_groups += self.training
        if len(self.trained_groups) >= STEP_GROUPS:
            self.steps += 1
            if self.ledger is not None:
                self.ledger.train(self.steps, self.steps, self.trained_groups, time.time())
            self.trained_groups = []

    async def _feed(self) -> None:
        """The next micro-batch: whole groups up to `MICRO_TOKENS`, at least one."""
        if self.trainers.busy or not self.ready:
            return
        share: list[TrainGroup] = []
        self.training, room = [], MICRO_TOKENS
        while self.ready and (not share or self.ready[0].completion_tokens <= room):
            self.training.append(self.ready.popleft())
            share += train_groups(self.training[-1])
            room -= share[-1].tokens
        await self.trainers.train([share], False)


async def controller(work: Work) -> None:
    """See `Control`."""
    control = Control(work)
    control.hub.bind(work.controller)
    await control.hub.wait_for({"service", "trainer-0"}, LIMIT_S)
    await serve(work, "controller", [control.issue(), control.receive()], control.told)
    await control.hub.close()
    if control.ledger is not None:
        control.ledger.close()


async def trainer(work: Work) -> None:
    """Take micro-batches as arrays."""
    waits = WaitRegistry("trainer-0")
    link = Link("trainer-0", "trainer", waits, flow=NEAR)
    seen = 0.0

    async def train() -> None:
        nonlocal seen
        while True:
            delivery = await link.receive()
            groups = from_wire(delivery.body, delivery.arrays)
            sequences = [sequence for group in groups for sequence in group.sequences]
            tokens = np.concatenate([sequence.completion_tokens for sequence in sequences]).astype(np.int64)
            seen += float(tokens.sum()) + float(sum(sequence.logprobs.sum() for sequence in sequences))
            delivery.ack()
            if pace := work.train_pace.value:
                await asyncio.sleep(len(sequences) / pace)
            await link.send("train_done", {}, limit_s=work.limit_s)

    await link.connect(work.controller, LIMIT_S)
    await serve(work, "trainer", [train()], dict)
    await link.close()


def run_role(role: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """A process."""
    asyncio.run(role(*args))
