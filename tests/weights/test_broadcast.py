"""Weights pushed from a trainer to workers in processes of their own, some of which die in the middle."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import WEIGHT_PATHS
from streamrl.errors import RunFailed
from streamrl.protocol.controller_site import Member, WeightAnswer, WeightCall
from streamrl.protocol.message import parse
from streamrl.transport.deadlines import WaitRegistry
from streamrl.weights.backends import broadcast, ipc, parcels
from streamrl.weights.backends.broadcast import DONE, SEND, WAIT, BroadcastBackend, make_backend
from streamrl.weights.backends.communicator import GroupBroken, communicator_of, join
from streamrl.weights.membership import TRIES, first_ranks
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.version import lay_out
from tests.ports import free_port
from tests.tiny_model import save_tiny_model
from tests.training.conftest import one_rank  # noqa: F401
from tests.waiting import scaled, until
from tests.weights.test_sharded import sharded

LIMIT_S = 20.0
"""Seconds on an idle machine."""
SMALL = 4096
"""Bytes of a parcel, so that a tiny model has many."""
SMALLER = 1500
"""Bytes of a slot of shared memory, so that a parcel goes through it in parts."""
DIES, STOPS = "dies", "stops"


def worker(orders: Connection) -> None:
    """A worker of an instance: joins groups and receives versions until it is told nothing more.

    Answers with the hash of what it has received, or with a list of one problem.
    """
    parcels.PARCEL = SMALL
    group = store = None
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        try:
            if order[0] == "join":
                if order[-1] == DIES:
                    os.kill(os.getpid(), signal.SIGKILL)
                if group is not None:
                    group.close()
                group, store = join(communicator_of(order[1]), *order[2:-1])
                orders.send("")
                continue
            assert group is not None
            found = []
            for number, (name, tensor) in enumerate(parcels.receive(group)):
                if number == 5 and order[1] in (DIES, STOPS):
                    os.kill(os.getpid(), signal.SIGKILL if order[1] == DIES else signal.SIGSTOP)
                found.append((name, tensor))
            orders.send(lay_out(0, found)[0].version.content_hash)
        except GroupBroken as error:
            if group is not None:
                group.close()
            group = None
            orders.send([str(error)])
    del store


class Worker:
    """An instance with one worker."""

    def __init__(self, name: str, process: int = 1) -> None:
        self.member = Member(name, process, 1)
        self.fate, self.when = "", "load"
        """What it does in the middle of which call; '': nothing that it should not."""
        self._one_order = threading.Lock()
        context = multiprocessing.get_context("forkserver")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *order: object) -> str | list[str] | None:
        """Its answer; None: it has died. One order at a time, as an instance carries them out."""
        with self._one_order:
            try:
                self.orders.send(order)
                return self.orders.recv()  # type: ignore[no-any-return]
            except (EOFError, OSError):
                self.process.join(scaled(10))  # its pipe closes before it has ended
                return None

    def end(self) -> None:
        self.orders.close()
        self.process.kill()
        self.process.join()


class Site:
    """The site's end of the calls, with the workers that are there; and the link that the trainer speaks to it by."""

    def __init__(self, path: str, *workers: Worker) -> None:
        self.path, self.workers = path, list(workers)
        self.waits = WaitRegistry("trainer-0")
        self.calls: list[str] = []
        self.hashes: dict[str, str] = {}
        """Hash of what each worker has received last."""
        self.backend: BroadcastBackend
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, kind: str, body: dict[str, Any]) -> None:
        call = parse(WeightCall, body)
        self.calls.append(call.step)
        self._tasks.add(asyncio.ensure_future(self._answer(call)))

    async def _answer(self, call: WeightCall) -> None:
        if call.step == "members":
            members = [one.member for one in self.workers if one.process.is_alive()]
            await self._tell(WeightAnswer(call=call.call, members=members))
            return
        by_member = {one.member: one for one in self.workers}
        ranks = first_ranks(call.members)
        asked = {
            asyncio.ensure_future(self._ask(call, by_member[one], ranks[one.name])): one.name for one in call.members
        }
        done: dict[str, tuple[float, float]] = {}
        lost: dict[str, str] = {}
        failed: dict[str, str] = {}
        for finished in asyncio.as_completed(asked):
            name, said = await finished
            if said is None:
                lost[name] = "it was killed"
                break  # the service answers at once
            if isinstance(said, list):
                failed[name] = said[0]
            else:
                done[name] = (0.0, 1.0)
        await self._tell(WeightAnswer(call=call.call, done=done, lost=lost, failed=failed))

    async def _tell(self, answer: WeightAnswer) -> None:
        self.backend.answered(answer)

    async def _ask(self, call: WeightCall, one: Worker, rank: int) -> tuple[str, str | list[str] | None]:
        order: tuple[object, ...] = (call.step, "")
        if call.step == "pause":
            return one.member.name, ""
        if call.meeting is not None:
            engine = WEIGHT_PATHS[self.path].engine
            place = call.meeting.host, call.meeting.port, rank, call.meeting.world
            order = ("join", engine, *place, scaled(LIMIT_S), "")
        if one.fate and call.step == one.when:
            order, one.fate = (*order[:-1], one.fate), ""
        said = await asyncio.to_thread(one.ask, *order)
        if isinstance(said, str) and call.step == "load":
            self.hashes[one.member.name] = said
        return one.member.name, said


class SlowSite(Site):
    """A site that answers only after rank 0 has had the other ranks wait on, twice."""

    def __init__(self, path: str, orders: list[str], *workers: Worker) -> None:
        super().__init__(path, *workers)
        self.orders = orders

    async def _tell(self, answer: WeightAnswer) -> None:
        said = len(self.orders)
        await until(lambda: self.orders[said:].count(WAIT) >= 2, LIMIT_S)
        await super()._tell(answer)


class Trainer:
    """A rank of a trainer, and its part of the model that they publish."""

    def __init__(self, folder: Path, site: Site, limit_s: float | None = None) -> None:
        self.site, self.rank = site, dist.get_rank()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if dist.get_world_size() > 1:
            sharded(self.model)
        self.layout = ShardedLayout(self.model, torch.bfloat16)
        deadlines = {"weights_s": limit_s or scaled(LIMIT_S)}
        run = RunConfig.model_validate({"weights": {"backend": site.path}, "deadlines": deadlines})
        context = SimpleNamespace(run=run, one_machine=True, addresses=SimpleNamespace(controller="ipc:///nowhere"))
        self._pool = ThreadPoolExecutor(1)
        hub: Any = None
        self.backend = site.backend = make_backend(context, hub, self._compute)  # type: ignore[arg-type]

    async def _compute(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01)

    async def publish(self, number: int) -> dict[str, tuple[float, float]]:
        """Publish the weights; whoever has loaded them has exactly these."""
        link: Any = self.site
        published = await self.backend.publish(self, number, link)  # type: ignore[arg-type]
        expected = self.layout.lay_out(number)[0].version.content_hash
        assert {self.site.hashes[name] for name in published.applied} <= {expected}
        assert (published.bytes > 0) == bool(published.applied) and published.content_hash == ""
        return dict(published.applied)

    def spoil(self) -> None:
        """Makes a weight of this rank's part NaN."""
        with torch.no_grad():
            self.model.lm_head.weight.to_local()[-1, 0] = float("nan")

    def close(self) -> None:
        self.backend._leave()
        self._pool.shutdown()


def other_rank(folder: Path, port: int, orders: Connection) -> None:
    """Rank 1 of a trainer: publishes when it is told to, and answers with '', or with its error."""
    torch.set_num_threads(1)
    parcels.PARCEL = SMALL
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)

    async def body() -> None:
        trainer = Trainer(folder, Site("gloo"))
        while (order := await asyncio.to_thread(orders.recv)) is not None:
            number, spoiled = order
            trainer.change()
            if spoiled:
                trainer.spoil()
            try:
                await trainer.publish(number)
                orders.send("")
            except RunFailed as error:
                orders.send(str(error))
        trainer.close()

    asyncio.run(body())
    dist.destroy_process_group()


@pytest.fixture(params=["gloo", "ipc"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A weight path that pushes, with small parcels."""
    monkeypatch.setattr(parcels, "PARCEL", SMALL)
    monkeypatch.setattr(ipc, "SLOT", SMALLER)
    return str(request.param)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def workers() -> Iterator[Any]:
    """Starts workers by name, and process number."""
    with ExitStack() as ended:
        multiprocessing.set_forkserver_preload(["tests.weights.test_broadcast"])

        def start(name: str, process: int = 1) -> Worker:
            made = Worker(name, process)
            ended.callback(made.end)
            return made

        yield start


def open_now() -> Counter[str]:
    """Open files and threads of this process by kind, without the threads of the site's end."""
    found: Counter[str] = Counter()
    for place in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which the folder is read
            found[re.sub(r"\d+", "N", os.readlink(place))] += 1
    names = {str(one.native_id): one.name for one in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        if not (name := names.get(task, "of a library")).startswith("asyncio"):
            found[re.sub(r"\d+", "N", f"thread {name}")] += 1
    return found


async def no_more_open_than(before: Counter[str]) -> None:
    """Waits until what threads close in their own time is closed."""
    try:
        await until(lambda: not open_now() - before, 2 * LIMIT_S)  # gloo may need its limit for a broken broadcast
    except AssertionError as error:
        raise AssertionError(f"left open: {open_now() - before}, beside {before}") from error


@pytest.mark.usefixtures("one_rank")
def test_a_member_that_dies_in_a_broadcast_is_left_out_and_its_successor_is_in_the_next_group(
    tiny_model: Path, workers: Any, path: str
) -> None:
    site = Site(path, workers("a"), workers("b"))

    async def body() -> None:
        trainer = Trainer(tiny_model, site)
        assert set(await trainer.publish(0)) == {"a", "b"}
        assert site.calls == ["members", "join", "pause", "load"]
        trainer.change()
        assert set(await trainer.publish(1)) == {"a", "b"}
        assert site.calls[4:] == ["members", "pause", "load"]  # the group stands
        trainer.change()
        site.calls, site.workers[1].fate = [], DIES
        started = time.monotonic()
        assert set(await trainer.publish(2)) == {"a"}
        assert time.monotonic() - started < scaled(LIMIT_S / 2)  # at once, and not at a deadline
        assert site.calls == ["members", "pause", "load", "members", "join", "pause", "load"]
        site.workers[1] = workers("b", process=2)
        trainer.change()
        site.calls = []
        assert set(await trainer.publish(3)) == {"a", "b"}
        assert site.calls[:2] == ["members", "join"]
        trainer.close()

    asyncio.run(body())


@pytest.mark.usefixtures("one_rank")
def test_groups_that_are_formed_again_and_again_leave_nothing_open(tiny_model: Path, workers: Any, path: str) -> None:
    one, other = workers("a"), workers("b")
    site = Site(path, one, other)

    async def body() -> None:
        trainer = Trainer(tiny_model, site)
        before: Counter[str] = Counter()
        for number, there in enumerate(itertools.islice(itertools.cycle([[one], [one, other], [other]]), 15)):
            site.workers = there
            await trainer.publish(number)
            before = open_now() if number == 2 else before
        assert site.calls.count("join") == 15
        await no_more_open_than(before)
        site.workers = []
        assert await trainer.publish(10) == {}
        trainer.close()

    asyncio.run(body())


@pytest.mark.usefixtures("one_rank")
def test_members_that_die_as_they_meet_or_later_hold_nobody_up_and_leave_nothing_open(
    tiny_model: Path, workers: Any, path: str
) -> None:
    stays, *others = [workers(name) for name in "abcd"]
    site = Site(path, stays)

    async def body() -> None:
        trainer = Trainer(tiny_model, site)
        await trainer.publish(0)
        before, took = open_now(), 0.0
        for number, (one, when) in enumerate(zip(others, ("join", "load", "join"), strict=True)):
            site.calls, site.workers, one.fate, one.when = [], [stays, one], DIES, when
            started = time.monotonic()
            assert set(await trainer.publish(number + 1)) == {"a"}
            took += time.monotonic() - started
            assert site.calls.count("join") == 2 and site.calls.count("members") == 2
            await no_more_open_than(before)
        assert took < scaled(LIMIT_S / 2)
        trainer.close()

    asyncio.run(body())


@pytest.mark.usefixtures("one_rank")
def test_a_member_that_stands_still_holds_the_trainer_up_until_the_deadline_and_no_longer(
    tiny_model: Path, workers: Any, path: str
) -> None:
    site = Site(path, workers("a"), workers("b"))
    site.workers[1].fate = STOPS
    limit_s = scaled(1)

    async def body() -> None:
        trainer = Trainer(tiny_model, site, limit_s)
        stopped = site.workers[1].process
        ending = threading.Timer(1.3 * limit_s, stopped.kill)  # as the service does at its own deadline
        ending.start()
        assert set(await trainer.publish(0)) == {"a"}
        ending.join()
        trainer.close()

    asyncio.run(body())


@pytest.mark.usefixtures("one_rank")
def test_a_publish_that_fails_again_and_again_or_has_a_weight_that_is_not_finite_ends_the_run(
    tiny_model: Path, workers: Any, path: str
) -> None:
    site = Site(path, workers("a"))

    async def body() -> None:
        trainer = Trainer(tiny_model, site)
        names = [f"dying-{number}" for number in range(TRIES)]
        for name in names:  # one more is lost in every try
            site.workers.append(workers(name))
            site.workers[-1].fate = DIES
        with pytest.raises(RunFailed, match=rf"version 0 is not published: dying-\d: it was killed \(try {TRIES}\)"):
            fates = iter(site.workers[1:])
            for one in site.workers[1:]:
                one.fate = ""

            original = site._answer

            async def next_dies(call: WeightCall) -> None:
                if call.step == "load":
                    next(fates).fate = DIES
                await original(call)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(site, "_answer", next_dies)
                await trainer.publish(0)
        site.workers = site.workers[:1]
        with torch.no_grad():
            next(iter(trainer.model.parameters())).fill_(float("nan"))
        with pytest.raises(RunFailed, match="is not finite"):
            await trainer.publish(1)
        assert site.hashes.keys() <= {"a"}
        trainer.close()

    asyncio.run(body())


def test_another_rank_waits_as_long_as_rank_0_does_and_ends_with_the_same_words(
    tiny_model: Path, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "PARCEL", SMALL)
    monkeypatch.setattr(broadcast, "SIGN_S", 0.01)
    said: list[str] = []
    tell = broadcast._OtherRanks.tell
    monkeypatch.setattr(broadcast._OtherRanks, "tell", lambda ranks, order: (said.append(order), tell(ranks, order)))
    site, port = SlowSite("gloo", said, workers("a"), workers("b")), free_port()
    context = multiprocessing.get_context("forkserver")
    orders, theirs = context.Pipe()
    other = context.Process(target=other_rank, args=(tiny_model, port, theirs), daemon=True)
    other.start()
    theirs.close()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)

    async def body() -> None:
        trainer = Trainer(tiny_model, site, scaled(4))

        async def both(number: int, spoiled: bool = False) -> str:
            orders.send((number, spoiled))
            trainer.change()
            said.clear()
            try:
                assert await trainer.publish(number)
                why = ""
            except RunFailed as error:
                why = str(error)
            assert await asyncio.to_thread(orders.recv) == why
            return why

        assert await both(0) == "" and site.calls == ["members", "join", "pause", "load"]
        assert said[-1] == DONE and said.count(SEND) == 1 and said.count(WAIT) >= 2 * len(site.calls)
        assert set(site.hashes) == {"a", "b"}
        stopped = site.workers[1]
        stopped.fate = STOPS
        try:
            trainer.backend._calls._limit_s = scaled(1)  # no more, as it is waited for in full
            why = await both(1)  # nobody ends it meanwhile
        finally:
            stopped.end()
        whom = r"trainer-0 waited .* s for a, b to answer \w+ of version 1"
        assert re.search(f"version 1 is not published: .*{whom}", why)
        site.workers = site.workers[:1]
        assert "is not finite" in await both(2, spoiled=True)
        orders.send(None)
        trainer.close()

    asyncio.run(body())
    other.join(scaled(20))
    dist.destroy_process_group()
    assert other.exitcode == 0


def test_parcels_are_full_but_for_the_last_and_no_tensor_is_cut() -> None:
    described = [("a", "float32", (10,)), ("b", "bfloat16", (3,)), ("c", "float32", (100, 4)), ("d", "uint8", ())]

    def cut(size: int) -> list[str]:
        return ["".join(one.name for one in entries) for entries, _ in parcels.parcels(described, size)]

    assert cut(46) == ["ab", "c", "d"] and cut(47) == ["abc", "d"]
    ((entries, nbytes),) = parcels.parcels(described)
    assert [one.name for one in entries] == ["a", "b", "c", "d"] and nbytes >= 40 + 6 + 1600 + 1
    assert all(one.offset % 64 == 0 for one in entries) and list(parcels.parcels([])) == []
