"""Agents that end or hold up more than themselves, and workers that do not start: others and their episodes go on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.agents import workers
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog, OutputPipe
from streamrl.runtime.piped_process import PipedProcess
from tests.agents.agents_module import enter_folder_with
from tests.agents.model_server import ModelServer
from tests.agents.test_workers import agent, order, play, started
from tests.waiting import scaled, until

AGENTS = """
import asyncio, openai, os, sys, time

if os.path.exists("dies once"):
    os.remove("dies once")
    os._exit(5)
while os.path.exists("held"):
    time.sleep(0.01)

async def leave():
    await asyncio.sleep(0)
    sys.exit(2)

async def run(task, client):
    match task["prompt"]:
        case "waits":
            open(f"begun {task['name']}", "w").close()
            while not os.path.exists("go"): await asyncio.sleep(0.01)
        case "exits in gather": await asyncio.gather(leave(), asyncio.sleep(1000))
        case "exits in a group":
            async with asyncio.TaskGroup() as group: group.create_task(leave())
        case "exits in a task of its own":
            asyncio.create_task(leave())
            for _ in range(9): await asyncio.sleep(0)
        case "exits in a callback":
            asyncio.get_running_loop().call_soon(sys.exit, 2)
            for _ in range(9): await asyncio.sleep(0)
        case "stops the loop":
            asyncio.get_running_loop().stop()
            for _ in range(9): await asyncio.sleep(0)
        case "cancels all":
            for one in asyncio.all_tasks(): one.cancel()
            await asyncio.sleep(1000)
        case "hangs in threads":
            hung = [asyncio.to_thread(time.sleep, 1000) for _ in range(50)]
            open("hung", "w").close()
            await asyncio.gather(*hung)
        case "uses a thread": return await asyncio.to_thread(os.getpid)
        case "leaves a call in a thread": asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
        case "sets a timer": asyncio.get_running_loop().call_later(task["seconds"], look_up, task["mark"])
        case "pid": return os.getpid()
        case "calls": return float((await client.chat(ASKED))["content"])
        case "calls from another loop": await asyncio.to_thread(asyncio.run, client.chat(ASKED))
        case "calls openai from another loop":
            await asyncio.to_thread(asyncio.run, of_openai(client.openai()))
        case "calls at the URL from another loop":
            return await asyncio.to_thread(asyncio.run, of_openai(openai.AsyncOpenAI(
                base_url=client.base_url, api_key=client.api_key)))
        case "hands its call to the loop":
            return await asyncio.to_thread(asyncio.run, handed(client, asyncio.get_running_loop()))
    return 1.0

ASKED = [{"role": "user", "content": "echo 4"}]

async def of_openai(made):
    answer = await made.chat.completions.create(model="policy", messages=ASKED)
    return float(answer.choices[0].message.content)

async def handed(client, loop):
    calling = asyncio.run_coroutine_threadsafe(client.chat(ASKED), loop)
    return float((await asyncio.wrap_future(calling))["content"])

def look_up(mark):
    asyncio.get_running_loop().run_in_executor(None, lambda: open(mark, "w").close())
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with(AGENTS, tmp_path, monkeypatch)


def waiting(*names: str) -> list[Any]:
    return [order("waits", name, name=name) for name in names]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("exits in gather", "SystemExit: 2"),
        ("exits in a group", "SystemExit: 2"),
        ("exits in a task of its own", None),
        ("exits in a callback", None),
        ("stops the loop", None),
    ],
)
def test_what_exits_beside_an_agent_ends_nothing_else(prompt: str, text: str | None) -> None:
    async def scenario() -> None:
        async with started() as owner:
            others = [play(owner, None, one) for one in waiting("a", "b")]
            await until(lambda: Path("begun a").exists() and Path("begun b").exists())
            found = await play(owner, None, order(prompt))
            assert not found.again
            if text is None:
                assert (found.reward, found.void) == (1.0, None)
            else:
                assert found.void is not None and (found.void.cause, found.void.text) == (VoidCause.VERIFIER, text)
            assert not any(one.done() for one in others)
            Path("go").touch()
            assert [one.reward for one in await asyncio.gather(*others)] == [1.0, 1.0]

    asyncio.run(scenario())


def test_an_agent_that_cancels_what_is_not_its_own_is_found_by_running_each_alone() -> None:
    async def scenario() -> None:
        async with started() as owner:
            others = [play(owner, None, one) for one in waiting("a", "b")]
            await until(lambda: Path("begun a").exists() and Path("begun b").exists())
            first = await asyncio.gather(play(owner, None, order("cancels all")), *others)
            assert all(one.again and one.void for one in first), first
            Path("go").touch()
            guilty, *innocent = [play(owner, None, one) for one in (order("cancels all"), *waiting("a", "b"))]
            assert [(await one).reward for one in innocent] == [1.0, 1.0]
            void = (await guilty).void
            assert void is not None and not guilty.result().again
            assert (void.cause, void.text) == (VoidCause.CRASH, "the agent's process ended: exit code 1")

    asyncio.run(scenario())


def test_calls_that_hang_in_threads_take_none_from_other_episodes_and_spoil_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with started() as owner:
            before = (await play(owner, None, order("pid"))).reward
            hanging = play(owner, None, order("hangs in threads"))
            await until(lambda: Path("hung").exists())
            assert (await asyncio.wait_for(play(owner, None, order("uses a thread")), scaled(20))).reward == before
            hanging.cancel()
            await until(lambda: "calls in threads of episode hangs in threads do not end" in caplog.text)
            caplog.clear()
            assert (await play(owner, None, order("leaves a call in a thread"))).reward == 1.0
            told = "0 coroutines and 1 calls in threads of episode leaves a call in a thread do not end"
            await until(lambda: told in caplog.text)
            assert (await play(owner, None, order("uses a thread"))).reward not in (None, before)

    asyncio.run(scenario())


@pytest.mark.parametrize("whose", ["", " openai"])
def test_calls_from_another_event_loop_are_refused_and_break_no_connection_of_others(whose: str) -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started() as owner:
            for _ in range(2):  # connections are left over from the first time
                orders = [order("calls", f"a{n}") for n in range(8)]
                orders += [order(f"calls{whose} from another loop", f"b{n}") for n in range(8)]
                found = await asyncio.gather(*(play(owner, server, one) for one in orders))
                assert [one.reward for one in found[:8]] == [4.0] * 8
                for one in found[8:]:
                    assert one.void is not None and one.void.cause == VoidCause.VERIFIER
                    assert "outside of the agent's event loop: hand the coroutine" in one.void.text
                    assert one.void.text.endswith("with a client of your own")
            assert len(server.calls) == 16

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["hands its call to the loop", "calls at the URL from another loop"])
def test_an_agent_with_an_event_loop_of_its_own_calls_the_model_as_its_error_says(how: str) -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started() as owner:
            assert (await play(owner, server, order(how))).reward == 4.0

    asyncio.run(scenario())


def test_a_timer_that_outlives_its_episode_may_still_call_in_a_thread() -> None:
    async def scenario() -> None:
        async with started() as owner:
            assert (await play(owner, None, order("sets a timer", seconds=0.5, mark="called"))).reward == 1.0
            await until(lambda: Path("called").exists())

    asyncio.run(scenario())


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have no memory for the next process."""
    real = asyncio.create_subprocess_exec

    async def refused(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", real)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)


def test_a_worker_for_which_the_machine_has_no_room_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with started() as owner:
            first = await play(owner, None, order("pid", "first"))
            refuse_once(monkeypatch)
            os.kill(int(first.reward or 0), signal.SIGKILL)
            await until(lambda: "did not start: OSError: [Errno 12] Cannot allocate memory" in caplog.text)
            assert (await play(owner, None, order("pid", "second"))).reward not in (None, first.reward)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["it dies", "no memory"])
def test_a_suspect_is_not_blamed_for_its_own_worker_that_does_not_start(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with started() as owner:
            owner._suspects.add("pid")
            if how == "it dies":
                Path("dies once").touch()
            else:
                refuse_once(monkeypatch)
            found = await play(owner, None, order("pid"))
            assert found.void is None and found.reward

    asyncio.run(scenario())


def test_a_suspect_whose_worker_never_starts_is_void_as_its_environment_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESTART_S", 0.0)

    async def scenario() -> None:
        async with started() as owner:
            owner._suspects.add("pid")
            owner._start_s = 1.0
            Path("held").touch()
            found = await play(owner, None, order("pid"))
            assert found.void is not None and not found.again
            assert found.void.cause == VoidCause.ENVIRONMENT
            assert found.void.text == "the agent worker did not start: it was not ready within 1 s"

    asyncio.run(scenario())


def test_an_episode_that_is_given_up_while_its_own_worker_starts_leaves_no_process() -> None:
    async def scenario() -> None:
        async with started(agent()) as owner:
            (shared,) = owner._workers
            owner._suspects.add("pid")
            Path("held").touch()
            playing = play(owner, None, order("pid"))
            await until(lambda: len(owner._workers) == 2)
            (own,) = owner._workers - {shared}
            playing.cancel()
            await until(lambda: owner._workers == {shared} and not psutil.pid_exists(own.process.pid))
            assert own.reading.done() and not own.reading.cancelled()

    asyncio.run(scenario())


def test_a_process_that_cannot_be_started_leaves_no_pipe_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_more(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        before = sorted(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(OutputPipe, "open", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            await PipedProcess.start(["true"], {}, OutputLog(None))
        closed = asyncio.Event()
        loop.call_soon(loop.call_soon, closed.set)  # transports close their files in the next round
        await closed.wait()
        assert sorted(os.listdir("/proc/self/fd")) == before

    asyncio.run(scenario())
