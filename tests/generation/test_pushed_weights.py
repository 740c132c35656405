"""What a site's service makes of the trainer's calls: to whom they go, and when they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.run import RunConfig
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.generation.site.instance_weights import InstanceWeights
from streamrl.generation.site.pending_answers import Answers
from streamrl.generation.site.pushed_weights import PushedWeights
from streamrl.protocol.controller_site import Meeting, Member, WeightAnswer, WeightCall
from streamrl.protocol.message import kind_of, parse
from streamrl.protocol.site_instance import TakeWeights, WeightsTaken
from streamrl.transport.deadlines import WaitRegistry
from tests.waiting import scaled, until

A, B = Member("a", 1, 1), Member("b", 3, 2)


class Fleet:
    """The site's instances a (ready) and b (stale, its third process), and what is done with them."""

    def __init__(self, weights_s: float = 100.0, on_update: str = "recompute_kv") -> None:
        values = {"schedule": {"name": "async", "on_update": on_update}, "weights": {"backend": "gloo"}}
        run = RunConfig.model_validate(values | {"deadlines": {"weights_s": weights_s}})
        self.context, self.limits = SimpleNamespace(run=run), run.deadlines
        self.lives = {
            "a": InstanceLife("a", "pool", 0, 1, Life.READY),
            "b": InstanceLife("b", "pool", 1, 3, Life.STALE),
        }
        self.sent: dict[str, list[TakeWeights]] = {"a": [], "b": []}
        self.hub = SimpleNamespace(
            peers={"a": SimpleNamespace(meta={"world_size": 1}), "b": SimpleNamespace(meta={"world_size": 2})},
            send=self._send,
        )
        self.answers = Answers(self.hub, WaitRegistry("service"))  # type: ignore[arg-type]
        self.held: list[str] = []
        self.dispatcher = SimpleNamespace(knows=lambda name: name == "a", hold=self._hold, unhold=self._unhold)
        self.happened: list[object] = []
        ready: Any = self
        self.weights = InstanceWeights(ready, _nothing)
        self.weights._refine = lambda: False  # type: ignore[method-assign]
        home: Callable[[float], float] = lambda seconds: seconds + 1000  # noqa: E731
        self.pushed = PushedWeights(ready, self.weights, self._answer, self._loaded, home)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def present(self) -> list[str]:
        return sorted(name for name, life in self.lives.items() if life.state in (Life.STALE, Life.READY, Life.SUSPECT))

    async def _send(self, name: str, kind: str, body: dict[str, Any]) -> None:
        assert kind == kind_of(TakeWeights)
        self.sent[name].append(parse(TakeWeights, body))

    def _answer(self, answer: WeightAnswer) -> None:
        self.happened.append(answer)

    def _loaded(self, number: int) -> None:
        self.happened.append(f"version {number}")

    async def _hold(self, name: str, requeue: bool, why: str) -> None:
        self.held.append(name)

    async def _unhold(self, name: str, why: str) -> None:
        self.held = [one for one in self.held if one != name]

    async def admit(self, name: str) -> None:
        self.lives[name].on("current")
        self.happened.append(f"{name} joins")

    async def changed(self) -> None:
        self.happened.append("changed")

    async def died(self, life: InstanceLife, why: str) -> None:
        if life.can("died"):
            life.on("died")
            self.happened.append(f"{life.name} died")
        self.answers.give_up(life.name)

    def begin(self, step: Any, *members: Member, call: str = "x") -> None:
        meeting = Meeting(host="127.0.0.1", port=1, world=4) if step == "join" else None
        order = WeightCall(call=call, step=step, number=7, members=list(members), meeting=meeting)
        self._tasks.add(asyncio.ensure_future(self.pushed.carry_out(order)))

    def take(self, name: str, problem: str = "", call: str = "x") -> bool:
        """An instance answers; returns whether anybody waited for it."""
        taken = WeightsTaken(call=call, started=1.0, finished=2.0, problem=problem)
        delivery: Any = SimpleNamespace(kind=kind_of(taken), peer=name, body=taken)
        return self.answers.take(delivery)

    async def answer(self) -> WeightAnswer:
        """The newest answer, once there is one that is not just a sign of life."""
        said = await until(
            lambda: [one for one in self.happened if isinstance(one, WeightAnswer) and not one.pending], scaled(20)
        )
        return said[-1]


async def _nothing(*_: object) -> None:
    return None


def play(body: Callable[[Fleet], Awaitable[None]], **values: Any) -> None:
    async def started() -> None:
        await body(Fleet(**values))

    asyncio.run(started())


def test_only_instances_that_are_heard_can_load_and_only_stale_ones_are_behind() -> None:
    async def body(fleet: Fleet) -> None:
        for behind, expected in ((False, [A, B]), (True, [B])):
            await fleet.pushed.carry_out(WeightCall(call="m", step="members", number=7, members=[], behind=behind))
            assert fleet.happened[-1] == WeightAnswer(call="m", members=expected)
        fleet.lives["a"].on("silent")
        await fleet.pushed.carry_out(WeightCall(call="m", step="members", number=7, members=[], behind=True))
        assert not fleet.lives["a"].missed  # a push to others is nothing that it misses
        fleet.lives["b"].on("died")
        await fleet.pushed.carry_out(WeightCall(call="m", step="members", number=7, members=[]))
        assert fleet.happened[-1] == WeightAnswer(call="m")
        fleet.lives["a"].on("heard")
        assert fleet.lives["a"].state is Life.STALE  # it has missed a version, and is behind now

    play(body)


def test_every_member_meets_at_its_own_ranks() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.begin("join", A, B)
        await until(lambda: fleet.sent["a"] and fleet.sent["b"])
        assert [fleet.sent[name][0].first_rank for name in "ab"] == [1, 2]
        assert fleet.sent["b"][0].meeting == Meeting(host="127.0.0.1", port=1, world=4)
        fleet.take("b", "the weight group is broken: late")
        fleet.take("a")
        answer = await fleet.answer()
        assert answer.failed == {"b": "the weight group is broken: late"} and answer.done == {"a": (1001.0, 1002.0)}
        assert fleet.lives["b"].state is Life.STALE  # it did not load anything

    play(body)


@pytest.mark.parametrize(("on_update", "held"), [("wait", ["a"]), ("abort_and_requeue", ["a"]), ("keep_kv", [])])
def test_who_has_loaded_a_version_gets_requests_before_the_trainer_knows(on_update: str, held: list[str]) -> None:
    async def body(fleet: Fleet) -> None:
        fleet.begin("pause", A, B)
        await until(lambda: fleet.sent["a"] and fleet.sent["b"])
        assert fleet.held == held
        fleet.take("a")
        fleet.take("b")
        assert set((await fleet.answer()).done) == {"a", "b"}
        assert fleet.lives["b"].state is Life.STALE and fleet.held == held and fleet.weights.served is None
        fleet.happened.clear()
        fleet.begin("load", A, B, call="y")
        await until(lambda: len(fleet.sent["b"]) == 2)
        assert not fleet.take("a", call="x") and fleet.take("a", call="y") and fleet.take("b", call="y")
        answer = await fleet.answer()
        assert fleet.happened == ["version 7", "b joins", "changed", answer] and not fleet.held
        assert fleet.weights.served is not None and fleet.weights.served.number == 7

    play(body, on_update=on_update)


@pytest.mark.parametrize("step", ["pause", "load"])
def test_a_member_that_falls_silent_is_told_at_once_and_ends_if_it_may_hold_up_a_broadcast(step: str) -> None:
    async def body(fleet: Fleet) -> None:
        fleet.begin(step, A, B)
        await until(lambda: fleet.sent["a"] and fleet.sent["b"])
        fleet.lives["b"].on("silent")
        fleet.answers.give_up("b")
        answer = await fleet.answer()
        assert set(answer.lost) == {"b"} and not answer.done and not answer.failed
        assert fleet.lives["b"].state is (Life.DEAD if step == "load" else Life.SUSPECT)
        assert not fleet.take("a")  # the trainer begins anew
        assert not fleet.weights.lock.locked()

    play(body)


def test_another_process_of_a_member_is_no_member() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.begin("load", Member("b", 2, 2))
        assert set((await fleet.answer()).lost) == {"b"}
        assert not fleet.sent["b"] and fleet.lives["b"].state is Life.STALE

    play(body)


def test_a_member_that_never_answers_counts_as_dead_after_its_deadline() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.begin("join", A)
        answer = await fleet.answer()
        assert "a to answer take_weights" in answer.lost["a"] and fleet.lives["a"].state is Life.DEAD

    play(body, weights_s=0.1)


def test_while_members_are_at_work_the_trainer_hears_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.generation.site.pushed_weights.SIGN_OF_LIFE_S", 0.01)

    async def body(fleet: Fleet) -> None:
        fleet.begin("load", A)
        await until(lambda: fleet.happened)
        assert fleet.happened[0] == WeightAnswer(call="x", pending=True)
        fleet.take("a")
        assert set((await fleet.answer()).done) == {"a"}

    play(body)


def test_an_instance_that_comes_later_is_shown_as_stale_and_waits_for_the_trainer() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.weights.catch_up(fleet.lives["b"])
        assert fleet.happened == ["changed"] and fleet.lives["b"].state is Life.STALE
        await fleet.weights.catch_up(fleet.lives["a"])
        assert fleet.happened == ["changed"]  # it is current

    play(body)
