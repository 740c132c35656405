"""Processes of an environment: what fails in one episode costs that episode, and no process outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from streamrl.config.tasks import EnvironmentUse
from streamrl.environments import environment_pool
from streamrl.environments.environment_pool import EnvironmentPool
from streamrl.environments.environment_process import (
    EnvironmentEnded,
    EnvironmentFailed,
    EnvironmentProcess,
    MemoryUse,
    memories_of,
)
from streamrl.environments.environment_trial import summary, try_environment
from streamrl.environments.installed import InstalledEnvironment
from streamrl.errors import UserError
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.runtime.processes import is_alive, kill_with_children
from tests.environments.own_environment import install
from tests.waiting import scaled, settled, until, wait_for


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> InstalledEnvironment:
    return install(tmp_path_factory.mktemp("rooms"))


@contextlib.asynccontextmanager
async def started(room: InstalledEnvironment, log: Path | None = None, **use: Any) -> AsyncIterator[EnvironmentPool]:
    settings = EnvironmentUse(**{"name": room.name, "processes": 1, **use})
    pool = EnvironmentPool(settings, room, OutputLog(log), scaled(20), scaled(20))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pid_of(began: Any) -> int:
    return int(began.result["messages"][0]["content"].split()[-1])


def test_an_episode_is_played_in_a_process_of_the_venv_without_a_port(
    room: InstalledEnvironment, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with started(room, log=tmp_path / "printed.log") as pool, pool.place("a") as place:
            began = await place.reset({"prompt": "plain"})
            assert began.result["messages"][1] == {"role": "user", "content": "plain"}
            process = psutil.Process(pid_of(began))
            assert process.cmdline()[0] == str(room.python)
            assert process.net_connections() == []
            first = await place.step(says("one two"))
            assert first.result == {
                "messages": [{"role": "user", "content": "you said one two"}],
                **{"reward": 0.5, "done": False, "metrics": {"words": 2.0}},
            }
            assert first.took_s > 0 and first.waited_s >= 0
            assert (await place.step(says("x"))).result["done"]
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    asyncio.run(scenario())
    assert "a room is made" in (tmp_path / "printed.log").read_text()


WRONG = {
    "raises at once": "KeyError: 'no such room'",
    "resets to a number": "reset(item) must give a text or a list of messages, got int 7",
    "an int": "step(text) must return (text, reward, done) or (..., metrics), got int 5",
    "a text": "the reward must be a number, got str '1'",
    "nan": "the reward must be finite, got nan",
    "no bool": "done must be True or False, got str 'no'",
    "no metric": "metric 'a' must be a number, got str 'b'",
    "no message": "step(text) must give a text or a list of messages, got list ['t']",
    "bytes": "the messages cannot be sent as JSON",
}


def test_a_wrong_type_fails_its_episode_alone(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(room) as pool, pool.place("good") as good:
            await good.reset({"prompt": "plain", "steps": 99})
            for kind, text in WRONG.items():
                async with pool.place(kind) as bad:
                    with pytest.raises(EnvironmentFailed) as failed:
                        await bad.reset({"prompt": kind})
                        await bad.step(says("x"))
                assert text in str(failed.value) and text.split(",")[0] in failed.value.traceback
                assert (await good.step(says("x"))).result["reward"] == 0.5
            assert pool.restarts == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["raises at once", "nan"])
def test_an_environment_that_failed_is_closed(room: InstalledEnvironment, kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "closed"

    async def scenario() -> None:
        async with started(room) as pool, pool.place("bad") as bad:
            with pytest.raises(EnvironmentFailed) as failed:
                await bad.reset({"prompt": kind, "mark": str(mark)})
                await bad.step(says("x"))
            assert WRONG[kind] in str(failed.value) and mark.exists()
            assert pool.restarts == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("child", "code"), [("returns", 70), ("raises", 1), ("leaves", 3)])
def test_a_process_that_an_environment_forks_ends_where_its_code_ends(
    room: InstalledEnvironment, child: str, code: int
) -> None:
    async def scenario() -> None:
        async with started(room) as pool:
            async with pool.place("a") as place:
                await place.reset({"prompt": f"forks, and the child {child}"})
                assert (await place.step(says("x"))).result["reward"] == code
            async with pool.place("b") as place:
                own = pid_of(await place.reset({"prompt": "plain"}))
                assert (await place.step(says("x"))).result["reward"] == 0.5
                assert psutil.Process(own).children() == []

    asyncio.run(scenario())


@pytest.mark.parametrize(("child", "code"), [("returns", 70), ("raises", 1)])
def test_a_process_that_an_environment_forks_as_it_is_loaded_ends_there(
    room: InstalledEnvironment, child: str, code: int
) -> None:
    async def scenario() -> None:
        async with started(room, config={"child": child}) as pool, pool.place("a") as place:
            assert (await place.reset({"prompt": "forked"})).result["messages"][0]["content"] == f"[{code}]"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "cause", "text"),
    [
        ("dies", VoidCause.ENVIRONMENT, "exit code 9"),
        ("stuck", VoidCause.TIMEOUT, "step took more than"),
        ("never resets", VoidCause.TIMEOUT, "reset took more than"),
    ],
)
def test_the_episode_that_ends_its_process_is_void_and_others_are_played_again(
    room: InstalledEnvironment, kind: str, cause: VoidCause, text: str
) -> None:
    async def scenario() -> None:
        async with started(room) as pool:
            async with pool.place("good") as good, pool.place("bad") as bad:
                before = pid_of(await good.reset({"prompt": "plain"}))
                with pytest.raises(EnvironmentEnded) as own:
                    bad._step_s = 0.3 if kind == "never resets" else bad._step_s
                    await bad.reset({"prompt": kind})
                    bad._step_s = 0.3 if kind == "stuck" else bad._step_s
                    await bad.step(says("x"))
                with pytest.raises(EnvironmentEnded) as other:
                    await good.step(says("x"))
            assert (own.value.cause, own.value.again) == (cause, False) and text in str(own.value)
            assert other.value.again
            async with pool.place("good again") as good:
                assert pid_of(await good.reset({"prompt": "plain"})) != before
            assert pool.restarts == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["dies beside a child", "dies beside a daemon"])
def test_what_a_process_that_dies_has_started_ends_with_it(
    room: InstalledEnvironment, kind: str, tmp_path: Path
) -> None:
    started_pid = tmp_path / "pid"

    async def scenario() -> None:
        async with started(room) as pool, pool.place("bad") as bad:
            with pytest.raises(EnvironmentEnded, match="exit code 9"):
                reset = bad.reset({"prompt": kind, "path": str(started_pid)})
                await asyncio.wait_for(reset, scaled(15))  # less than a reset may take
            await until(lambda: not is_alive(int(started_pid.read_text())), 10)
            async with pool.place("good") as good:
                await good.reset({"prompt": "plain"})

    try:
        asyncio.run(scenario())
    finally:
        if is_alive(pid := int(started_pid.read_text())):
            os.kill(pid, signal.SIGKILL)


def test_an_episode_waits_as_long_as_a_process_may_take_to_start(
    room: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "RESTART_S", 0.0)

    async def scenario() -> None:
        async with started(room) as pool:
            async with pool.place("bad") as bad:
                with pytest.raises(EnvironmentEnded):
                    await bad.reset({"prompt": "plain"})
                    await bad.step(says("die"))
            assert not any(one.accepts for one in pool._processes)
            async with pool.place("next") as place:
                await place.reset({"prompt": "plain"})

    asyncio.run(scenario())


def test_an_episode_that_waits_for_room_counts_only_the_time_in_which_no_process_lives(
    room: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 0.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    async def some_looks() -> None:
        seen = looks
        await until(lambda: looks > seen + 10)

    async def scenario() -> None:
        nonlocal now
        async with started(room, episodes=1) as pool, pool.place("a"):
            (process,) = pool._processes
            patience_s = pool._start_s = 0.05
            monkeypatch.setattr(environment_pool, "RESTART_S", 0.0)
            monkeypatch.setattr(environment_pool, "time", SimpleNamespace(monotonic=clock))
            waiting = asyncio.ensure_future(pool.place("b").__aenter__())
            await some_looks()
            now = 1000.0
            await some_looks()
            process.accepts = False
            await some_looks()
            assert not waiting.done()
            now += 2 * patience_s
            with pytest.raises(EnvironmentEnded, match="no process of environment 'room' was ready within"):
                await waiting

    asyncio.run(scenario())


def test_a_process_for_which_the_machine_has_no_room_is_started_later(
    room: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = asyncio.create_subprocess_exec

    async def refused(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", real)
        raise OSError(12, "Cannot allocate memory")

    async def scenario() -> None:
        async with started(room) as pool:
            (process,) = pool._processes
            monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
            process.kill("its memory is needed")
            await until(lambda: "does not start: [Errno 12] Cannot allocate memory" in caplog.text)
            async with pool.place("next") as place:
                await place.reset({"prompt": "plain"})

    asyncio.run(scenario())


def test_the_end_of_a_process_is_read_even_if_nobody_waits_for_it_any_more(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(room) as pool:
            (process,) = pool._processes
            ending = asyncio.ensure_future(process.end("it is not needed"))
            await asyncio.sleep(0)
            ending.cancel()
            await asyncio.wait({process.reading})
            assert not process.reading.cancelled() and process.ended.is_set()

    asyncio.run(scenario())


def test_no_process_asks_a_proxy_for_this_machine(room: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)

    async def scenario() -> None:
        async with started(room) as pool, pool.place("a") as place:
            told = (await place.reset({"prompt": "variables"})).result["messages"][0]["content"]
            assert told == ",".join(["example.org,127.0.0.1,localhost"] * 2)

    asyncio.run(scenario())


def test_episodes_are_spread_and_what_exceeds_the_places_waits(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(room, processes=2, episodes=1) as pool:
            async with pool.place("a") as a, pool.place("b") as b:
                pids = {pid_of(await one.reset({"prompt": "plain"})) for one in (a, b)}
                assert len(pids) == 2
                third = asyncio.ensure_future(pool.place("c").__aenter__())
                await asyncio.sleep(0)
                assert not third.done()
            place = await asyncio.wait_for(third, scaled(20))
            assert pid_of(await place.reset({"prompt": "plain"})) in pids  # the processes are used again

    asyncio.run(scenario())


@pytest.mark.parametrize("line", [b"no json", b"[]", b"[" * 9999])
def test_a_process_that_sends_something_else_than_an_answer_is_ended(line: bytes) -> None:
    async def body() -> list[str]:
        killed: list[str] = []
        answers = asyncio.StreamReader()
        answers.feed_data(line + b"\n")
        begun = asyncio.get_running_loop().create_future()
        begun.set_result({})
        broken: Any = SimpleNamespace(process=SimpleNamespace(answers=answers), kill=killed.append, _began=begun)
        broken._take = lambda answer: EnvironmentProcess._take(broken, answer)
        await EnvironmentProcess._take_all(broken)
        return killed

    (why,) = asyncio.run(body())
    assert why.startswith("it sent something else than an answer")


def test_a_leak_costs_no_episode_until_the_limit_ends_the_process(
    room: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "WATCH_S", 0.02)

    async def scenario() -> None:
        async with started(room, memory_gb=0.15) as pool, pool.place("leaks") as place:
            before = pid_of(await place.reset({"prompt": "plain", "steps": 99}))
            for _ in range(3):  # 120 MiB and the interpreter: more than 80 %, less than all
                await place.step(says("leak"))
            await until(lambda: pool.restarts == 1, scaled(20))
            assert (await place.step(says("x"))).result["reward"] == 0.5
            async with pool.place("next") as other:
                assert pid_of(await other.reset({"prompt": "plain"})) != before
            with pytest.raises(EnvironmentEnded, match=r"it uses 0\.\d+ of 0\.15 GiB after 1 episodes"):
                for _ in range(3000):
                    await place.step(says("leak" if pool.memory() < 2**28 else "x"))

    asyncio.run(scenario())


def test_one_thread_looks_at_the_memory_of_all_processes_while_the_event_loop_goes_on(
    room: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "WATCH_S", 0.02)
    looks: list[tuple[bool, int]] = []

    def look(roots: list[int]) -> list[MemoryUse]:
        looks.append((threading.current_thread() is threading.main_thread(), len(roots)))
        if len(looks) == 1:
            raise OSError(24, "Too many open files")
        return memories_of(roots)

    async def scenario() -> None:
        async with started(room, processes=2) as pool:
            monkeypatch.setattr(environment_pool, "memories_of", look)
            await until(lambda: len(looks) >= 3)
            assert set(looks) == {(False, 2)}
            assert pool.most_memory > 2**20

    asyncio.run(scenario())


def test_the_memory_of_what_a_process_has_started_counts_for_each_child_with_those_below_it() -> None:
    root = subprocess.Popen(["sh", "-c", "sh -c 'sleep 1000; :' & sleep 1000 & wait"])
    try:
        process = psutil.Process(root.pid)
        programs = lambda: sorted(one.name() for one in process.children(recursive=True))  # noqa: E731
        wait_for(lambda: programs() == ["sh", "sleep", "sleep"], 10)  # a copy of the shell has other memory
        children = {one.pid: [one, *one.children()] for one in process.children()}
        found = settled(lambda: memories_of([root.pid])[0])
        assert found.own == process.memory_info().rss and sorted(map(len, children.values())) == [1, 2]
        assert found.started == {pid: sum(one.memory_info().rss for one in tree) for pid, tree in children.items()}
    finally:
        kill_with_children(root.pid)
        root.wait()
    assert memories_of([root.pid, root.pid]) == [MemoryUse(), MemoryUse()]


def test_two_processes_that_want_one_port_end_the_start_with_what_to_do(room: InstalledEnvironment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def scenario() -> None:
        async with started(room, config={"port": port}, processes=2):
            pass

    with pytest.raises(
        UserError, match=r"Address already in use \(another process has that port.* or set `processes: 1`"
    ):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("config", "make", "text"),
    [
        ({"wants": "a display"}, "own_room:make", "environments run without a display"),
        ({"wants": "an end"}, "own_room:make", "exit code 7"),
        ({}, "own_room:missing", "AttributeError: module 'own_room' has no attribute 'missing'"),
        ({}, "no_such_module:make", "ModuleNotFoundError"),
        ({}, "own_room:not_one", "expected an object with reset(item) and step(text), got object"),
        ({}, "gymnasium:CartPole-v1", "No module named 'gymnasium'"),
    ],
)
def test_an_environment_that_cannot_be_made_ends_the_start_with_its_own_words(
    room: InstalledEnvironment, config: dict[str, Any], make: str, text: str
) -> None:
    other = InstalledEnvironment(room.folder, make, paths=room.paths)

    async def scenario() -> None:
        async with started(other, config=config):
            raise AssertionError("it started")

    with pytest.raises(UserError, match=r"environment 'room' does not start") as refused:
        asyncio.run(scenario())
    assert text in str(refused.value)


def test_a_trial_reports_times_failures_and_what_differs_between_equal_seeds(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(room) as pool:
            good = await try_environment(pool, 8, 10)
            assert (good.ended, good.cut, good.rewards) == (8, 0, [1.0] * 8)
            assert len(good.steps) == 16 and len(good.resets) == 8 and good.problems() == []
            assert [name for name, _ in summary(good)] == ["episodes", "reset", "step", "reward", "memory"]
            cut = await try_environment(pool, 4, 1, ["die"])
            assert cut.failures.total() == 4 and "exit code 9" in cut.problems()[0]
        async with started(room, config={"draws": True}) as pool:
            assert "begins differently each time" in (await try_environment(pool, 1, 1)).problems()[0]

    asyncio.run(scenario())


def test_a_trial_ends_when_its_time_is_over(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(room) as pool:
            trial = await try_environment(pool, 8, 9, at_once=1, seconds=0.0)
            assert (trial.episodes, trial.left_out, trial.problems()) == (0, 8, [])
            assert ("no time for", "8 episodes") in summary(trial)

    asyncio.run(scenario())
