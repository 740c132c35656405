"""What the way of a finished sample carries, instance to trainer: samples/s, MB/s, memory, back-pressure; and a peer.

    .venv/bin/python experiments/data_plane.py --peer-python PATH     # 12 minutes; PATH: see below
    .venv/bin/python experiments/data_plane.py --seconds 12 --arm ceiling
    .venv/bin/python experiments/data_plane.py --summary-only         # tables and plot from the JSON again

Processes of their own, over ZeroMQ on loopback, made of the system's own parts: synthetic instances (`Link`), a
service (`Hub`, `Uplink`), a controller (`Hub`, `arrived`, `Ledger`, groups, `Trainers`) and a trainer that turns
micro-batches into numpy arrays and answers. Samples have lognormal lengths (mean about 1000 tokens, at most 8192):
token ids and versions int32, log-probabilities float32, 4 bytes of text a token. An instance has 64 of them ready and
sends them again under new ids: making them is not in the figures. Requests go down as ids only: prompts are not
measured. The controller issues groups of 8 as long as at most 2048 samples are ahead of the trainer (that stands for
admission); the service gives an instance at most 128 samples at a time, and none while its uplink is congested. "Near"
is the form inside a site: a sample a message, unless several wait. "Far" is the form over a link: batches of up to 256
KB or 50 ms; the link is declared as 1 Gbit/s and 20 ms and is loopback in truth. A commit is one SQLite transaction
with synchronous=FULL for all that has come; groups are scored (0) at once in a second one, and every 64 trained groups
are a step. The ledger is on the disk of the results' folder: a commit takes as long as that disk's fsync does, and
"commit ms" says how long the first one was.

*steady*: 50,000 samples a minute are offered. Latency is from the instance's send to the commit. Slopes of memory are
least-squares lines over the whole time. *ceiling*: as many as go, also without the ledger. CPU is percent of one core:
what is near 100 % bounds it, or all cores together do, or the disk. *backpressure*: the same offer in five equal
parts: free, trainer at a tenth, free, commits at a tenth, free. The uplink's high mark is here the smallest there is
(4 MB, of a slow link): inside a site it is 256 MB, and 128 samples for each of a few instances never reach it.

*peer*: TransferQueue (`pip install transferqueue` into a virtual environment of its own, whose Python is PATH), with
its default store (SimpleStorage, two units, ZeroMQ, memory) on a local Ray: as many producer actors put the same
arrays, one or 32 samples a put; a consumer asks for 32 at a time, turns them into numpy and clears them. It keeps
samples in memory only: no ledger, no acknowledgement by the receiver, and what a dead consumer had fetched does not
come again. A put beyond a set capacity raises; by default there is none, and a producer that is faster than the
consumer is not held. It gives in exchange what this path does not: reads by column and key, several consumers of one
sample. So "no ledger" is the row to compare it with. Writes experiments/results/data_plane.json, .md and .svg.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import multiprocessing
import os
import queue
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from running import HERE, ROOT, Sheet, machine, terminal

from streamrl.control.arrivals import arrived
from streamrl.control.trainers import Trainers
from streamrl.generation.batches import CompressionChoice, SampleBatcher
from streamrl.generation.messages import sample_to_wire
from streamrl.generation.uplink import MIN_MARK, Uplink
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.micro_batch import TrainGroup, from_wire, train_group
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.transport.flow import Flow

OUT = HERE / "results"
RATE = 50_000 / 60
"""Samples per second that are asked of it."""
GROUP, STEP_GROUPS, MICRO_TOKENS = 8, 64, 16384
AHEAD, SLOTS, POOL = 2048, 128, 64
BATCH_BYTES, BATCH_SAMPLES, BATCH_S = 256 * 1024, 256, 0.05
"""Of the uplink's batcher, as `launch/connections.py` has them (which would load torch)."""
LINK_BYTES_PER_S, LINK_RTT_S = 125e6, 0.02
NEAR = Flow(lost_after_s=float("inf"))
FAR = Flow.over(LINK_BYTES_PER_S, LINK_RTT_S, 600, BATCH_BYTES)
MOST_EVENTS_AT_ONCE = 512
"""In one transaction, as `control/controller.py` has it (which would load torch)."""
TICK_S, ISSUE_S, WARM_S = 0.25, 0.02, 3.0
LIMIT_S = 120.0
"""Seconds, for a start, and for what the peer does beside the measurement."""
SLOW = 0.1
PHASES = ("free", "trainer at a tenth", "free again", "commits at a tenth", "free at last")
PEER_BATCHES = (1, 32)

COUNTS = ("issued", "committed", "trained", "nbytes", "commits", "commit_s")

Row = tuple[str, float, dict[str, Any]]


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
    """Runs tasks until the parent says stop or is gone, and reports what `told` gives; raises what a task raises."""
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
    """Sends a made sample for each id that it is asked for."""
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
    """Gives groups to instances, and passes on what they send."""
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
        """Sends out groups at the offered rate, as far as the bound on samples ahead of the trainer allows."""
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
                self.ledger.issue((sample, group["group"]) for group in groups for sample in group["samples"])
            self.issued += count * GROUP
            await self.hub.send("service", "generate", {"groups": groups}, limit_s=self.work.limit_s)

    async def receive(self) -> None:
        """Takes what has come, as `Controller._receive` does."""
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
            self.allowed -= len(due[-1].arrays["lengths"])
        return due

    def _commit(self, deliveries: Sequence[Delivery]) -> None:
        arrivals = arrived(deliveries)
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
            share.append(train_group(self.training[-1]))
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
    """Takes micro-batches as arrays."""
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


def free_address() -> str:
    """A port of loopback that is free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@dataclass
class Series:
    """What one measurement has seen, after the warm-up; times in seconds of it."""

    told: dict[str, list[tuple[float, dict[str, Any]]]]
    """By process."""
    used: dict[str, list[tuple[float, float, float]]]
    """By process: time, CPU seconds so far, resident MB."""

    def between(self, name: str, start: float, end: float) -> list[dict[str, Any]]:
        """What a process told in a part of the time."""
        return [told for at, told in self.told[name] if start <= at <= end]

    def rate(self, count: str, start: float, end: float) -> float:
        """Increase of one of the controller's counts, per second."""
        some = [(at, told[count]) for at, told in self.told["controller"] if start <= at <= end]
        return (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0]) if len(some) > 1 else 0.0

    def figures(self, start: float, end: float) -> dict[str, Any]:
        """Of a part of the time, as plain values."""
        up = self.between("service", start, end)
        latencies = [1e3 * s for told in self.between("controller", start, end) for s in told["latencies"]]
        instances = [
            told for name in self.told if name.startswith("instance") for told in self.between(name, start, end)
        ]
        ahead = [told["issued"] - told["trained"] for told in self.between("controller", start, end)]
        return {
            "issued_per_s": self.rate("issued", start, end),
            "samples_per_s": self.rate("committed", start, end),
            "trained_per_s": self.rate("trained", start, end),
            "mb_per_s": self.rate("nbytes", start, end) / 1e6,
            "latency_ms": [float(np.percentile(latencies, q)) for q in (50, 99)] if latencies else None,
            "commit_ms": 1e3 * self.rate("commit_s", start, end) / max(1e-9, self.rate("commits", start, end)),
            "ahead_most": max(ahead),
            "backlog_most": max(told["backlog_samples"] for told in up),
            "backlog_mb_most": max(told["backlog_bytes"] for told in up) / 1e6,
            "running_most": max(told["running"] for told in up),
            "under_way_most": max(told["under_way"] for told in instances),
            "congested": float(np.mean([told["congested"] for told in up])),
            "uplink_held": float(np.mean([told["held"] for told in up])),
            "instances_held": float(np.mean([told["held"] for told in instances])),
            "processes": {name: _process(rows, start, end) for name, rows in self.used.items()},
        }

    def lines(self) -> dict[str, list[float]]:
        """For the plot."""
        up, control = self.told["service"], self.told["controller"]
        memory = np.sum([[mb for _, _, mb in rows] for rows in self.used.values()], axis=0)
        return {
            "at_service": [at for at, _ in up],
            "backlog_mb": [told["backlog_bytes"] / 1e6 for _, told in up],
            "congested": [float(told["congested"]) for _, told in up],
            "at": [at for at, _ in control],
            "ahead": [told["issued"] - told["trained"] for _, told in control],
            "committed": [told["committed"] for _, told in control],
            "trained": [told["trained"] for _, told in control],
            "at_memory": [at for at, _, _ in next(iter(self.used.values()))],
            "memory_mb": memory.tolist(),
        }


def _process(rows: Sequence[tuple[float, float, float]], start: float, end: float) -> dict[str, float]:
    """Share of a core, resident MB at the start and end, and the slope in MB/min."""
    at, cpu, mb = np.array([row for row in rows if start <= row[0] <= end]).T
    slope = 60 * float(np.polyfit(at, mb, 1)[0])
    return {"cpu": (cpu[-1] - cpu[0]) / (at[-1] - at[0]), "first_mb": mb[0], "last_mb": mb[-1], "mb_per_min": slope}


def measure(
    seconds: float,
    instances: int,
    rate: float,
    far: bool,
    ledger: bool,
    phased: bool = False,
    near_mark: int | None = None,
) -> Series:
    """Starts the processes, watches them for so long after the warm-up, and ends them.

    Raises:
        RuntimeError: one of them has failed, or did not end.
    """
    context = multiprocessing.get_context("spawn")
    bandwidth = (LINK_BYTES_PER_S, LINK_RTT_S) if far else (None, 0.0)
    mark = Uplink.marks(*bandwidth) if near_mark is None else near_mark
    stop, rows = context.Event(), context.Queue()
    paces = [context.Value("d", 0.0), context.Value("d", 0.0)]
    with tempfile.TemporaryDirectory(prefix="streamrl-data-plane-", dir=OUT if OUT.is_dir() else None) as folder:
        addresses = free_address(), free_address()
        limit_s = seconds + WARM_S + 2 * LIMIT_S
        work = Work(instances, rate, far, ledger, mark, *addresses, Path(folder), limit_s, rows, stop, *paces)
        roles: dict[str, tuple[Any, ...]] = {"controller": (controller, work), "service": (service, work)}
        roles |= {"trainer": (trainer, work)} | {f"instance-{n}": (instance, work, n) for n in range(instances)}
        started = {name: context.Process(target=run_role, args=args, daemon=True) for name, args in roles.items()}
        for process in started.values():
            process.start()
        try:
            return _watch(started, rows, seconds, paces if phased else [])
        finally:
            stop.set()
            until = time.monotonic() + 20
            while any(process.is_alive() for process in started.values()) and time.monotonic() < until:
                _drained(rows, TICK_S)  # a process ends only once what it has reported is taken
            for process in started.values():
                process.kill()
                process.join(5)


def _drained(rows: Any, seconds: float) -> list[Row]:
    """What comes within so long."""
    found: list[Row] = []
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            found.append(rows.get(timeout=left))
        except queue.Empty:
            break
    return found


def _watch(started: dict[str, Any], rows: Any, seconds: float, paces: Sequence[Any]) -> Series:
    series = Series({name: [] for name in started}, {name: [] for name in started})
    watched = {name: psutil.Process(process.pid) for name, process in started.items()}
    began, until = None, time.time() + LIMIT_S
    while began is None or time.time() < began + seconds:
        found = _drained(rows, TICK_S)
        if dead := [name for name, process in started.items() if not process.is_alive()]:
            raise RuntimeError(f"{', '.join(dead)} ended early; see above")
        if began is None:
            if time.time() > until:
                raise RuntimeError(f"no sample was committed within {LIMIT_S:.0f} s")
            if any(name == "controller" and told["committed"] for name, _, told in found):
                began = time.time() + WARM_S
            continue
        now = time.time() - began
        for name, at, told in found:
            if at >= began:
                series.told[name].append((at - began, told))
        if now < 0:
            continue
        for name, process in watched.items():
            times = process.cpu_times()
            series.used[name].append((now, times.user + times.system, process.memory_info().rss / 1e6))
        for number, pace in enumerate(paces):  # the trainer's in the second part, the commits' in the fourth
            pace.value = RATE * SLOW if int(now / seconds * len(PHASES)) == 1 + 2 * number else 0.0
    return series


def peer_main(told: dict[str, Any]) -> None:
    """Runs under the peer's Python, with `made_samples` beside it; prints a line of JSON."""
    import importlib.metadata
    import json
    import time

    import numpy as np
    import psutil
    import ray
    import torch
    import transfer_queue
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    fields = ["tokens", "logprobs", "versions", "text"]
    seconds, instances = told["seconds"], told["instances"]
    # Ray's CPUs are only numbers here: the controller and each unit of the store claim one
    memory = 100 * 1024 * 1024
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=memory, _temp_dir=told["folder"])
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    client = transfer_queue.get_client()

    class Producer:
        def __init__(self, number: int) -> None:
            transfer_queue.init()
            self.client = transfer_queue.get_client()
            self.made = [(*map(torch.from_numpy, arrays), text) for *arrays, text in made_samples(told["pool"], number)]

        def ready(self) -> bool:
            return True

        def produce(self, partition: str, batch: int) -> int:
            count, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                some = [self.made[(count + n) % len(self.made)] for n in range(batch)]
                *columns, texts = zip(*some, strict=True)
                nested = [torch.nested.as_nested_tensor(list(column), layout=torch.jagged) for column in columns]
                values = [*nested, NonTensorStack(*texts)]
                data = TensorDict(dict(zip(fields, values, strict=True)), batch_size=[batch])
                self.client.put(data, partition_id=partition)
                count += batch
            return count

    remote = ray.remote(num_cpus=0)(Producer)
    producers = [remote.remote(number) for number in range(instances)]
    ray.get([producer.ready.remote() for producer in producers], timeout=told["limit_s"])
    watched = {
        process: process.name().removeprefix("ray::")
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
    }
    results = []
    for batch in told["batches"]:
        partition, got, nbytes = f"samples-{batch}", 0, 0
        before = {process: sum(process.cpu_times()[:2]) for process in watched}
        memory_before = sum(process.memory_info().rss for process in watched)
        began = time.monotonic()
        running = [producer.produce.remote(partition, batch) for producer in producers]
        while time.monotonic() < began + seconds:
            meta = client.get_meta(fields, told["get"], partition, mode="fetch", task_name="train")
            if meta.size == 0:
                time.sleep(0.002)
                continue
            data = client.get_data(meta)
            parts = [[part.numpy() for part in data[name].unbind()] for name in fields[:3]]
            nbytes += sum(part.nbytes for column in parts for part in column) + sum(map(len, data["text"]))
            got += len(np.concatenate(parts[0]).astype(np.int64)) and meta.size
            client.clear_samples(meta)
        took = time.monotonic() - began
        cpu = [(name, (sum(process.cpu_times()[:2]) - before[process]) / took) for process, name in watched.items()]
        memory_after = sum(process.memory_info().rss for process in watched)
        put = sum(ray.get(running, timeout=told["limit_s"]))
        results.append(
            {
                "batch": batch,
                "samples_per_s": got / took,
                "mb_per_s": nbytes / took / 1e6,
                "put_per_s": put / seconds,
                "cpu": [["consumer", cpu[0][1]], *([name, share] for name, share in cpu[1:] if share > 0.03)],
                "memory_mb": [memory_before / 1e6, memory_after / 1e6],
            }
        )
        client.clear_partition(partition)
    print(json.dumps({"version": importlib.metadata.version("transferqueue"), "results": results}), flush=True)
    transfer_queue.close()
    ray.shutdown()


def measure_peer(python: Path | None, seconds: float, instances: int) -> dict[str, Any]:
    """What `peer_main` says; or {"skipped": why}."""
    if python is None:
        return {"skipped": "no --peer-python was given"}
    source = "from __future__ import annotations\nimport json, sys\nfrom typing import Any\n"
    source += (
        "\n".join(inspect.getsource(some) for some in (made_samples, peer_main))
        + "\npeer_main(json.loads(sys.argv[1]))\n"
    )
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        told = {"seconds": seconds, "instances": instances, "folder": folder, "limit_s": LIMIT_S + seconds}
        told |= {"pool": POOL, "batches": PEER_BATCHES, "get": 32}
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}
        command = [str(python), "-c", source, json.dumps(told)]
        process = subprocess.Popen(
            command, env=os.environ | quiet, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = process.communicate(timeout=3 * LIMIT_S + 3 * seconds)
        except subprocess.TimeoutExpired:
            own = psutil.Process(process.pid)
            for child in (*own.children(recursive=True), own):
                child.kill()
            out, err = process.communicate(timeout=LIMIT_S)
            return {"skipped": "it did not end in time: " + err.strip()[-300:]}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"skipped": f"it failed: {err.strip()[-300:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def cpu_text(cpu: Sequence[tuple[str, float]]) -> str:
    """Percent of a core, by process; those of a kind together."""
    kinds: dict[str, list[float]] = {}
    for name, share in cpu:
        kinds.setdefault(name.rsplit("-", 1)[0], []).append(share)
    return ", ".join(
        f"{len(all_) if len(all_) > 1 else ''} {kind} {100 * sum(all_):.0f} %".strip() for kind, all_ in kinds.items()
    )


def steady_sheets(found: dict[str, Any]) -> list[Sheet]:
    """The offered rate."""
    rows: list[tuple[str, ...]] = []
    processes: list[tuple[str, ...]] = []
    for name, some in found.items():
        p50, p99 = some["latency_ms"] or (float("nan"), float("nan"))
        reached = some["samples_per_s"] >= 0.98 * RATE
        rows.append(
            (
                f"{name}{'' if reached else ' (MISSED)'}",
                f"{60 * some['samples_per_s']:,.0f}",
                f"{60 * some['trained_per_s']:,.0f}",
                *(f"{some['mb_per_s']:.1f}", f"{p50:.0f}", f"{p99:.0f}", f"{some['commit_ms']:.1f}"),
                *(str(some[key]) for key in ("ahead_most", "backlog_most", "under_way_most")),
            )
        )
        processes += [
            (f"{name}, {who}", f"{100 * v['cpu']:.0f}", *(f"{v[k]:.1f}" for k in ("first_mb", "last_mb", "mb_per_min")))
            for who, v in some["processes"].items()
        ]
    columns: tuple[str, ...] = (
        "",
        "committed/min",
        "trained/min",
        "MB/s",
        "latency p50 ms",
        "p99 ms",
        "commit ms",
        "ahead of the trainer, most",
    )
    columns += ("at the service, most", "under way of an instance, most")
    title = f"{60 * RATE:,.0f} samples a minute offered"
    return [
        Sheet(title, columns, rows, (f"bounds: {AHEAD} ahead of the trainer, 256 under way of an instance",)),
        Sheet("The same, by process", ("", "% of a core", "RSS MB, first", "last", "MB/min"), processes),
    ]


def ceiling_sheet(found: dict[str, Any], peer: dict[str, Any] | None) -> Sheet:
    """As many as go."""
    rows: list[tuple[str, ...]] = [
        (
            name,
            *(f"{some['samples_per_s']:.0f}", f"{some['mb_per_s']:.1f}", f"{some['commit_ms']:.1f}"),
            *(f"{100 * some[key]:.0f} %" for key in ("uplink_held", "instances_held")),
            cpu_text([(who, told["cpu"]) for who, told in some["processes"].items()]),
        )
        for name, some in found.items()
    ]
    notes = []
    if peer is not None and "results" in peer:
        for some in peer["results"]:
            label = f"TransferQueue {peer['version']}, {some['batch']} a put; memory only"
            rows.append(
                (label, f"{some['samples_per_s']:.0f}", f"{some['mb_per_s']:.1f}", "-", "-", "-", cpu_text(some["cpu"]))
            )
            first, last = some["memory_mb"]
            said = f"{some['put_per_s']:.0f} samples/s put, all its memory {first:.0f} -> {last:.0f} MB"
            notes.append(f"TransferQueue, {some['batch']} a put: {said}")
    elif peer is not None:
        notes.append(f"TransferQueue: skipped, {peer['skipped']}")
    return Sheet(
        "As many as go",
        ("", "samples/s", "MB/s", "commit ms", "uplink out of credit", "instances out of credit", "% of a core"),
        rows,
        notes,
    )


def pressure_sheet(phases: dict[str, Any]) -> Sheet:
    """Something slow."""
    columns: tuple[str, ...] = (
        "",
        "issued/s",
        "committed/s",
        "trained/s",
        "ahead, most",
        "at the service, most",
        "MB",
        "congested",
    )
    columns += ("uplink out of credit", "instances out of credit", "RSS MB, first", "last")
    rows: list[tuple[str, ...]] = []
    for name, some in phases.items():
        memory = [sum(v[key] for v in some["processes"].values()) for key in ("first_mb", "last_mb")]
        rows.append(
            (
                name,
                *(f"{some[key]:.0f}" for key in ("issued_per_s", "samples_per_s", "trained_per_s", "ahead_most")),
                *(str(some["backlog_most"]), f"{some['backlog_mb_most']:.1f}"),
                *(f"{100 * some[key]:.0f} %" for key in ("congested", "uplink_held", "instances_held")),
                *(f"{mb:.0f}" for mb in memory),
            )
        )
    note = f"bounds: {AHEAD} ahead; at the service {MIN_MARK / 1e6:.0f} MB and what the instances then run"
    return Sheet(f"{60 * RATE:,.0f} a minute offered, something slow", columns, rows, (note,))


def draw(values: dict[str, Any], path: Path) -> None:
    """Ceilings, and the course of the back-pressure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), layout="constrained")
    bars, queues, memory = figure.subplots(1, 3)
    rates = {name: some["samples_per_s"] for name, some in values.get("ceiling", {}).items()}
    for some in values.get("peer", {}).get("results", []):
        rates[f"TransferQueue, {some['batch']} a put"] = some["samples_per_s"]
    bars.barh(list(rates), list(rates.values()), color=["C1" if "Transfer" in name else "C0" for name in rates])
    bars.axvline(RATE, color="#888888", ls="--", lw=1)
    bars.set(xlabel="samples/s; dashed: 50,000 a minute")
    bars.invert_yaxis()
    if lines := values.get("backpressure", {}).get("lines"):
        queues.plot(lines["at"], lines["ahead"], label="ahead of the trainer (samples)")
        queues.axhline(AHEAD, color="C0", ls="--", lw=1)
        beside = queues.twinx()
        beside.plot(lines["at_service"], lines["backlog_mb"], color="C1", label="at the service (MB)")
        beside.axhline(MIN_MARK / 1e6, color="C1", ls="--", lw=1)
        beside.set(ylim=0, ylabel="MB")
        queues.set(ylim=0, xlabel="s", ylabel="samples; dashed: bounds")
        queues.legend(handles=[*queues.get_lines()[:1], *beside.get_lines()[:1]], fontsize=8)
        memory.plot(lines["at_memory"], lines["memory_mb"])
        memory.set(ylim=0, xlabel="s", ylabel="resident MB of all processes")
    figure.savefig(path)


def surroundings(seconds: float, instances: int) -> str:
    """The machine, and how many processes want its cores just now."""
    load = os.getloadavg()[0]
    return f"{instances} instances, {seconds:g} s each; {machine()}, load average {load:.1f} before"


ARMS = ("steady", "ceiling", "backpressure", "peer")
FORMS = {"near": False, "far": True}


def measured(arm: str, seconds: float, instances: int, peer_python: Path | None) -> dict[str, Any]:
    """One arm, as plain values."""
    run = functools.partial(measure, seconds, instances)
    match arm:
        case "steady":
            return {name: run(RATE, far, True).figures(0, seconds) for name, far in FORMS.items()}
        case "ceiling":
            return {
                f"{name}, {'ledger' if ledger else 'no ledger'}": run(float("inf"), far, ledger).figures(0, seconds)
                for name, far in FORMS.items()
                for ledger in (True, False)
            }
        case "backpressure":
            series, part = run(RATE, False, True, phased=True, near_mark=MIN_MARK), seconds / len(PHASES)
            phases = {name: series.figures(n * part, (n + 1) * part) for n, name in enumerate(PHASES)}
            return {"phases": phases, "lines": series.lines()}
        case _:
            return measure_peer(peer_python, seconds, instances)


@click.command(help=__doc__)
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(min=5), help="Of each measurement.")
@click.option("--instances", default=4, show_default=True, type=click.IntRange(min=1), help="Synthetic ones.")
@click.option("--arm", "arms", multiple=True, type=click.Choice(ARMS), default=ARMS, help="Several.")
@click.option("--peer-python", type=click.Path(path_type=Path), help="Python that has TransferQueue.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Where results go.")
@click.option("--summary-only", is_flag=True, help="Measure nothing: tables and plot from the JSON.")
def main(
    seconds: float, instances: int, arms: tuple[str, ...], peer_python: Path | None, out: Path, summary_only: bool
) -> None:
    console = terminal()
    kept = out / "data_plane.json"
    values: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {"on": {}}
    for arm in () if summary_only else arms:
        values["on"][arm] = surroundings(seconds, instances)
        console.print(f"{arm}: {values['on'][arm]}", highlight=False)
        values[arm] = measured(arm, seconds, instances, peer_python)
        out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(values, indent=1) + "\n")
    sheets = steady_sheets(values["steady"]) if "steady" in values else []
    if "ceiling" in values or "peer" in values:
        sheets.append(ceiling_sheet(values.get("ceiling", {}), values.get("peer")))
    if "backpressure" in values:
        sheets.append(pressure_sheet(values["backpressure"]["phases"]))
    for sheet in sheets:
        sheet.show(console)
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    on = "".join(f"- {arm}: {where}\n" for arm, where in values["on"].items())
    head = f"# The data plane\n\nWritten by `{Path(__file__).relative_to(ROOT)}`.\n\n{on}\n"
    (out / "data_plane.md").write_text(head + about + "\n\n" + "\n".join(sheet.markdown() for sheet in sheets))
    draw(values, out / "data_plane.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
