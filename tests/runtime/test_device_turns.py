"""A GPU is held by one process at a time; a process that dies frees it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.runtime.device_turns import DeviceTurns
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from tests.waiting import holds, scaled


def turns(folder: Path, owner: str, *devices: str) -> DeviceTurns:
    return DeviceTurns(folder, devices, WaitRegistry(owner))


def test_an_instance_on_two_gpus_waits_for_both_ranks(tmp_path: Path) -> None:
    async def body() -> None:
        ranks = [turns(tmp_path, f"trainer-{n}", str(n)) for n in range(2)]
        for rank in ranks:
            await rank.take(5)
            await rank.take(5)  # a no-op
        instance = turns(tmp_path, "instance", "1", "0")
        waiting = asyncio.create_task(instance.take(60))
        ranks[0].give_back()
        await holds(lambda: not waiting.done(), 0.3)
        (wait,) = instance._waits.snapshot()
        assert wait["waiting_for"].endswith(f"-1, which trainer-1 (pid {os.getpid()}) has")
        ranks[1].give_back()
        await waiting
        assert instance.held and not ranks[0].held
        with pytest.raises(
            DeadlineExpired, match=r"trainer-1 waited 0 s for its turn on GPU .*-1, which instance \(pid"
        ):
            await ranks[1].take(0.01)
        assert not ranks[1].held

    asyncio.run(body())


def test_an_instance_that_waits_for_one_rank_holds_no_other_up(tmp_path: Path) -> None:
    """Rank 1 has its GPU first, and keeps it until rank 0 has its own."""

    async def body() -> None:
        ranks = [turns(tmp_path, f"trainer-{n}", str(n)) for n in range(2)]
        await ranks[1].take(5)
        instance = turns(tmp_path, "instance", "0", "1")
        waiting = asyncio.create_task(instance.take(scaled(60)))
        await holds(lambda: not waiting.done() and not instance.held, 0.3)
        await ranks[0].take(scaled(20))
        for rank in ranks:
            rank.give_back()
        await waiting
        assert instance.held

    asyncio.run(body())


def test_others_may_start_in_turns(tmp_path: Path) -> None:
    site = {"trainer": {}, "generation": [{}]}
    for hardware, limit_s in (("cuda", 350.0), ("cpu", 300.0)):
        cluster = ClusterConfig.model_validate({"hardware": hardware, "sites": {"here": site}})
        run = RunConfig.model_validate({"schedule": {"name": "colocated"}, "deadlines": {"training_s": 50}})
        context = RoleContext("controller", "here", tmp_path, cluster, run, Addresses("", "", {}), False)
        assert context.startup_s == limit_s


def test_a_dead_process_holds_nothing_and_a_forked_one_does_not_keep_what_was_given_back(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        dead = turns(tmp_path, "dead", "0")
        asyncio.run(dead.take(5))
        os._exit(0)  # without giving it back
    assert os.waitpid(child, 0)[1] == 0
    mine = turns(tmp_path, "mine", "0")
    asyncio.run(mine.take(5))
    if (child := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)  # has the lock's file open until the test ends
        os._exit(0)
    mine.give_back()
    assert not (tmp_path / "devices" / f"{socket.gethostname()}-0.lock").read_bytes(), "it has nobody's name"
    asyncio.run(turns(tmp_path, "next", "0").take(5))
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)
