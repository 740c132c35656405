"""Agent workers: whatever one episode does costs one episode, and no process outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.agents import workers
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome
from streamrl.agents.worker_frames import FromWorker, Played
from streamrl.agents.worker_process import WorkerProcess
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.tasks import AgentTask
from streamrl.errors import RunFailed, UserError
from streamrl.rollouts.void import VoidCause
from streamrl.runtime import output_pipe
from tests.agents.agents_module import enter_folder_with
from tests.agents.model_server import ModelServer
from tests.waiting import scaled, until, wait_for

AGENTS = """
import asyncio, ctypes, itertools, multiprocessing, os, signal, sys, time
import httpx2
from streamrl.agents.client import BadToolInput, EpisodeOver
from streamrl.tasks.void_reward import VoidReward

class Coded(Exception):
    def __init__(self, code): self.code = code

class GameFails(VoidReward):
    def __init__(self, game): self.game = game

class Uncoded(Exception):
    @property
    def code(self): raise LookupError("no code")

def user(text): return [{"role": "user", "content": text}]

async def run(task, client):
    match task["prompt"]:
        case "plain":
            message = await client.chat(user("echo 0.5"), temperature=3)
            assert message == {"role": "assistant", "content": "0.5"}, message
            assert client.finish_reason == "stop"
            return float(message["content"])
        case "mapping": return {"reward": 2, "turns": 3, "solved": True}
        case "half a character":
            client.note("\\ud83d")
            await client.tool("\\ud83d", lambda: "\\ud83d")
            return {"reward": 1, "\\ud83d": 1}
        case "raises half a character": raise ValueError("\\ud83d")
        case "many metrics": return {"reward": 1} | {str(n): n for n in range(task["n"])}
        case "huge metric": return {"reward": 1, "n": 10**400}
        case "tools":
            client.note("a remark")
            assert await client.tool("add", lambda a, b: a + b, 2, b=3) == 5
            async def later(): return "x" * 20_000
            return float(len(await client.tool("later", later)))
        case "bad input":
            def picky(): raise BadToolInput("a number, please")
            try: await client.tool("picky", picky)
            except BadToolInput as error: return float(str(error) == "a number, please")
        case "together": return float(len((await client.chat(user(f"together {task['n']}")))["content"]))
        case "full": await client.chat(user("refuse 400 context_length_exceeded"))
        case "no turns": await client.chat(user("refuse 429 max_turns_exceeded"))
        case "full in openai":
            await client.openai().chat.completions.create(
                model="policy", messages=user("refuse 400 context_length_exceeded")
            )
        case "full in a tool": await client.tool("ask", client.chat, user("refuse 400 context_length_exceeded"))
        case "bad request":
            full = {"messages": user("refuse 400 context_length_exceeded"), "model": "policy"}
            (await client.http.post("chat/completions", json=full)).raise_for_status()
        case "judge is full" | "judge is full in a tool":
            import openai
            url = "http://127.0.0.1:8/v1"
            async def judge():
                answer = {"error": {"message": "no room", "code": "context_length_exceeded"}}
                pool = httpx2.MockTransport(lambda _: httpx2.Response(400, json=answer))
                own = openai.AsyncOpenAI(base_url=url, api_key="k", http_client=httpx2.AsyncClient(transport=pool))
                await own.chat.completions.create(model="judge", messages=user("judge"))
            if task["prompt"] == "judge is full": await judge()
            await client.tool("judge", judge)
        case "bad request in a tool": await client.tool("judge", raise_bad, client.base_url)
        case "bad request of a judge": raise_bad("http://127.0.0.1:8/v1")
        case "void for a bad request":
            try: raise_bad(client.base_url)
            except httpx2.HTTPError as error: raise VoidReward("provider", "the judge is down") from error
        case "openai":
            answer = await client.openai().chat.completions.create(model="policy", messages=user("echo 7"))
            return float(answer.choices[0].message.content)
        case "caught":
            try: await client.chat(user("refuse 400 context_length_exceeded"))
            except EpisodeOver as over: return float("context_length" in str(over))
        case "fails after the end":
            try: await client.chat(user("refuse 400 context_length_exceeded"))
            except EpisodeOver: raise KeyError("grade")
        case "says why it ends":
            try: await client.chat(user("refuse 400 context_length_exceeded"))
            except EpisodeOver as over: raise RuntimeError("no room") from over
        case "full beside another call":
            async with asyncio.TaskGroup() as group:
                group.create_task(client.chat(user("wait")))
                group.create_task(client.chat(user("refuse 400 context_length_exceeded")))
        case "tool raises in a group":
            async with asyncio.TaskGroup() as group: group.create_task(client.tool("divide", lambda: 1 / 0))
        case "fails beside the end":
            raise ExceptionGroup("of tasks", [EpisodeOver("full"), ExceptionGroup("", [TimeoutError("judge")])])
        case "raise": raise RuntimeError("first line\\nsecond")
        case "none": return None
        case "text": return "1"
        case "nan": return float("nan")
        case "no reward": return {"score": 1}
        case "bad metric": return {"reward": 1, "words": "three"}
        case "void": raise VoidReward("environment", "the game server is down")
        case "own void": raise GameFails("chess")
        case "tool raises": await client.tool("divide", lambda: 1 / 0)
        case "tool exits": await client.tool("leave", lambda: sys.exit(3))
        case "broken": await client.chat(user("refuse 500 oops"))
        case "refused": await client.chat(user("refuse 400 bad_request"))
        case "gone": raise ConnectionError("nobody there")
        case "sys.exit": sys.exit(4)
        case "sys.exit with a list": sys.exit(["no", "model"])
        case "code is a dict": raise Coded({"reason": "quota"})
        case "code fails": raise Uncoded("looked at")
        case "interrupt": raise KeyboardInterrupt
        case "cancels itself": raise asyncio.CancelledError
        case "tool hangs": await client.tool("search", time.sleep, 1000)
        case "tool hangs and agent goes on":
            try: await client.tool("search", asyncio.sleep, 1000)
            except BaseException: pass
            return 1.0
        case "call hangs": await client.chat(user("wait"))
        case "turn hangs":
            await client.chat(user("echo 1"))
            await asyncio.sleep(1000)
        case "library of its own hangs":
            assert client.base_url.endswith("/v1")
            await client.chat(user("echo 1"))
            await asyncio.sleep(1000)
        case "episode hangs": await client.tool("book", asyncio.sleep, 1000)
        case "deaf":
            while True:
                try: await asyncio.sleep(1000)
                except BaseException: pass
        case "leaves a task behind":
            task["left"] = asyncio.create_task(mark_when_cancelled("left"))
            await asyncio.sleep(0)
            return 1.0
        case "waits for ever": await mark_when_cancelled("waits")
        case "waits the first time":
            if os.path.exists("begun"): return 2.0
            open("begun", "w").close()
            await mark_when_cancelled("given up")
        case "block": time.sleep(1000)
        case "blocks a while": return blocked(task["seconds"])
        case "blocks in a callback":
            asyncio.get_running_loop().call_soon(blocked, task["seconds"])
            await asyncio.sleep(0)
            return 1.0
        case "holds the lock a while":
            ctypes.PyDLL(None).usleep(int(1e6 * task["seconds"]))
            return 1.0
        case "blocks with others":
            await together(task["n"])
            return blocked(task["seconds"])
        case "hang in C": sum(itertools.repeat(0))
        case "exit": os._exit(3)
        case "dies beside a child":
            if (child := os.fork()) == 0:
                time.sleep(1000)
                os._exit(0)
            with open("child", "w") as file: file.write(str(child))
            os._exit(3)
        case "spawns": return await asyncio.to_thread(in_spawned, is_worker)
        case "forks": return in_child(task["does"])
        case "forks and awaits":
            chats = task["does"] == "chats"
            if (child := os.fork()) == 0: await (client.chat(user("hi")) if chats else asyncio.sleep(0))
            return exit_code(child)
        case "forks in a tool": return await client.tool("fork", in_child, task["does"])
        case "forks in a thread": return await asyncio.to_thread(in_child, task["does"])
        case "segfault": ctypes.string_at(0)
        case "pid": return os.getpid()
        case "noise":
            print("noise in Python")
            os.system("echo noise from a child; echo to its stderr >&2")
            print("x" * 100_000)
            return 1.0

def raise_bad(url): httpx2.Response(400, request=httpx2.Request("POST", url)).raise_for_status()

def in_spawned(function):
    with multiprocessing.get_context("spawn").Pool(1) as pool: return pool.apply(function)

def is_worker(): return hasattr(sys.modules["__main__"], "AgentWorker")

def in_child(does):
    if child := os.fork(): return exit_code(child)
    if does == "returns": return 0.5
    if does == "raises": raise RuntimeError("in the child")
    sys.exit(3)

def exit_code(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def blocked(seconds):
    time.sleep(seconds)
    return 1.0

waiting = []

async def together(n):
    # all of n episodes go on in one round of the event loop, in the order in which they came
    loop = asyncio.get_running_loop()
    waiting.append(loop.create_future())
    if len(waiting) == n: loop.call_soon(lambda: [one.set_result(None) for one in waiting])
    await waiting[-1]

async def mark_when_cancelled(name):
    try: await asyncio.sleep(1000)
    finally: open(name, "w").close()
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with(AGENTS, tmp_path, monkeypatch)


def agent(name: str = "mine", **changes: Any) -> AgentTask:
    limits = {"tool_s": scaled(60), **changes.pop("deadlines", {})}
    given = {"kind": "agent", "name": name, "run": "mischievous_agents:run", "items": "unused:items", **changes}
    return AgentTask.model_validate({**given, "deadlines": limits})


@contextlib.asynccontextmanager
async def started(*tasks: AgentTask, count: int = 1, log: Path | None = None) -> AsyncIterator[EpisodeWorkers]:
    owner = EpisodeWorkers(tasks or [agent()], count, log)
    try:
        await owner.start()
        yield owner
    finally:
        await owner.close()


NUMBERS = itertools.count()
"""Numbers of the episodes: each has a key of its own, as each session has."""


def order(prompt: str, sample_id: str = "", task: str = "mine", **item: Any) -> EpisodeOrder:
    return EpisodeOrder(sample_id or prompt, "g", task, {"prompt": prompt, **item}, 0, None)


def play(owner: EpisodeWorkers, server: ModelServer | None, one: EpisodeOrder) -> asyncio.Task[EpisodeOutcome]:
    url = server.url if server else "http://127.0.0.1:9/v1"
    return asyncio.ensure_future(owner.run(one, url, f"key-{one.sample_id}-{next(NUMBERS)}"))


async def outcomes(*prompts: str, tasks: tuple[AgentTask, ...] = ()) -> list[EpisodeOutcome]:
    async with ModelServer().running() as server, started(*tasks) as owner:
        return await asyncio.gather(*(play(owner, server, order(prompt)) for prompt in prompts))


def test_an_episode_calls_the_model_with_its_own_key_and_returns_its_reward() -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started() as owner:
            outcome = await play(owner, server, order("plain"))
            assert (outcome.reward, outcome.void, outcome.metrics) == (0.5, None, {})
            (call,) = server.calls
            assert call["key"].startswith("Bearer key-plain-") and call["idempotency"]
            assert (call["model"], call["temperature"]) == ("policy", 3)
            mapping = await play(owner, server, order("mapping"))
            assert (mapping.reward, mapping.metrics) == (2.0, {"turns": 3.0, "solved": 1.0})
            openai = await play(owner, server, order("openai"))
            assert openai.reward == 7.0 and server.calls[-1]["key"].startswith("Bearer key-openai-")

    asyncio.run(scenario())


def test_tools_and_remarks_are_recorded_as_steps_and_long_texts_are_cut() -> None:
    tools, picky = asyncio.run(outcomes("tools", "bad input"))
    assert [(step.kind, step.name) for step in tools.steps] == [("agent", "note"), ("tool", "add"), ("tool", "later")]
    assert tools.steps[0].detail == "a remark"
    assert all(0 < step.started <= step.finished for step in tools.steps)
    assert tools.reward is not None and 16_384 < tools.reward < 16_500
    assert picky.reward == 1.0 and "a number, please" in picky.steps[0].detail


def test_texts_that_cannot_be_encoded_do_not_hold_up_an_episode() -> None:
    returned, raised = asyncio.run(outcomes("half a character", "raises half a character"))
    assert (returned.reward, returned.metrics) == (1.0, {"\ufffd": 1.0})
    assert [(step.name, step.detail) for step in returned.steps] == [("note", "\ufffd"), ("\ufffd", "\ufffd")]
    assert raised.void is not None and raised.void.text == "ValueError: \ufffd"
    assert raised.traceback.startswith("Traceback") and raised.traceback.endswith("ValueError: \ufffd")


def test_an_agent_may_return_a_hundred_numbers_beside_its_reward_and_finite_ones_only() -> None:
    async def scenario() -> list[EpisodeOutcome]:
        async with started() as owner:
            orders = [order("many metrics", str(n), n=n) for n in (100, 101)] + [order("huge metric")]
            return await asyncio.gather(*(play(owner, None, one) for one in orders))

    most, more, huge = asyncio.run(scenario())
    assert len(most.metrics) == 100 and most.metrics["7"] == 7.0
    assert more.void is not None and "101 numbers beside the reward, at most 100" in more.void.text
    assert huge.void is not None and "'n' must be finite, got inf" in huge.void.text


def test_an_episode_that_used_up_context_or_turns_gets_zero_unless_the_agent_says_otherwise() -> None:
    over = ["full", "no turns", "full in openai", "full in a tool", "says why it ends", "full beside another call"]
    found = asyncio.run(outcomes(*over, "caught"))
    assert [(one.reward, one.void) for one in found] == [*[(0.0, None)] * 6, (1.0, None)]


def test_an_error_that_has_only_the_status_of_a_refusal_is_marked_as_such() -> None:
    others = "bad request of a judge", "bad request in a tool", "void for a bad request"
    found = asyncio.run(outcomes("bad request", *others, "gone", "refused"))
    assert [one.refused for one in found] == [True, *[False] * 5]
    causes = [one.void and one.void.cause for one in found[1:4]]
    assert causes == [VoidCause.PROVIDER, VoidCause.TOOL, VoidCause.PROVIDER]


def test_a_failure_is_void_with_its_cause_and_never_a_zero() -> None:
    cases = {
        "fails after the end": (VoidCause.VERIFIER, "KeyError: 'grade'"),
        "raise": (VoidCause.VERIFIER, "RuntimeError: first line second"),
        "none": (VoidCause.VERIFIER, "the reward must be a number, got NoneType None"),
        "text": (VoidCause.VERIFIER, "the reward must be a number, got str '1'"),
        "nan": (VoidCause.VERIFIER, "the reward must be finite, got nan"),
        "no reward": (VoidCause.VERIFIER, "a mapping without `reward`: {'score': 1}"),
        "bad metric": (VoidCause.VERIFIER, "'words' must be a number, got str 'three'"),
        "void": (VoidCause.ENVIRONMENT, "the game server is down"),
        "own void": (VoidCause.VERIFIER, "chess"),
        "tool raises": (VoidCause.TOOL, "tool 'divide': ZeroDivisionError: division by zero"),
        "tool raises in a group": (VoidCause.TOOL, "tool 'divide': ZeroDivisionError: division by zero"),
        "fails beside the end": (VoidCause.TIMEOUT, "TimeoutError: judge"),
        "tool exits": (VoidCause.TOOL, "tool 'leave': RuntimeError: SystemExit: 3"),
        "broken": (VoidCause.PROVIDER, "the model's endpoint: 500 no: oops"),
        "refused": (VoidCause.VERIFIER, "CallRefused: 400 no: bad_request"),
        "gone": (VoidCause.PROVIDER, "ConnectionError: nobody there"),
        "sys.exit": (VoidCause.VERIFIER, "SystemExit: 4"),
        "sys.exit with a list": (VoidCause.VERIFIER, "SystemExit: ['no', 'model']"),
        "code is a dict": (VoidCause.VERIFIER, "Coded: {'reason': 'quota'}"),
        "code fails": (VoidCause.VERIFIER, "LookupError: no code"),
        "interrupt": (VoidCause.VERIFIER, "KeyboardInterrupt"),
        "cancels itself": (VoidCause.VERIFIER, "the agent cancelled itself"),
        "judge is full": (VoidCause.PROVIDER, "BadRequestError: Error code: 400"),
        "judge is full in a tool": (VoidCause.TOOL, "tool 'judge': BadRequestError: Error code: 400"),
    }
    found = dict(zip(cases, asyncio.run(outcomes(*cases)), strict=True))
    assert {name: one.reward for name, one in found.items()} == dict.fromkeys(cases)
    for name, (cause, text) in cases.items():
        void = found[name].void
        assert void is not None and (void.cause, text in void.text) == (cause, True), (name, void)
        assert not found[name].again
    assert "mischievous_agents.py" in found["raise"].traceback
    assert "streamrl/agents/worker.py" not in found["raise"].traceback


def test_every_deadline_ends_its_episode_and_names_what_was_waited_for() -> None:
    short = scaled(1.0)
    limits = {"call": "call_s", "tool": "tool_s", "turn": "turn_s", "episode": "episode_s"}
    tasks = [agent(name, deadlines={key: short}) for name, key in limits.items()]
    tasks.append(agent("both", deadlines={"turn_s": short, "episode_s": 2 * short}))
    cases = {
        "tool hangs": ("tool", f"tool 'search' took more than {short:g} s"),
        "tool hangs and agent goes on": ("tool", f"tool 'search' took more than {short:g} s"),
        "call hangs": ("call", f"a call of the model took more than {short:g} s"),
        "turn hangs": ("turn", "after its call 1 of the model, the agent waited for something of its own"),
        "deaf": ("turn", "before its first call of the model, the agent waited for something of its own"),
        "library of its own hangs": ("both", f"the episode took more than {2 * short:g} s"),
        "episode hangs": ("episode", "when the agent waited for tool 'book'"),
    }

    async def scenario() -> list[EpisodeOutcome]:
        async with ModelServer().running() as server, started(*tasks) as owner:
            playing = [play(owner, server, order(prompt, task=task)) for prompt, (task, _) in cases.items()]
            return await asyncio.gather(*playing)

    for (name, (_, text)), outcome in zip(cases.items(), asyncio.run(scenario()), strict=True):
        assert outcome.void is not None, name
        assert (outcome.void.cause, text in outcome.void.text) == (VoidCause.TIMEOUT, True), (name, outcome.void)


def test_hundreds_of_episodes_are_in_flight_at_once_in_two_workers() -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started(count=2) as owner:
            playing = [play(owner, server, order("together", f"e{number}", n=300)) for number in range(300)]
            found = await asyncio.gather(*playing)  # the endpoint answers none before it has all 300 calls
            assert [outcome.reward for outcome in found] == [3.0] * 300

    asyncio.run(scenario())


def test_an_episode_that_blocks_its_worker_is_named_and_the_others_are_run_again() -> None:
    tasks = (agent(deadlines={"tool_s": scaled(1.0)}),)

    async def scenario() -> None:
        async with ModelServer().running() as server, started(*tasks) as owner:
            innocent = play(owner, server, order("call hangs"))
            await until(lambda: len(server.calls) == 1, 10)
            guilty, other = await asyncio.gather(play(owner, server, order("block")), innocent)
            assert guilty.void is not None and not guilty.again
            assert guilty.void.cause == VoidCause.TIMEOUT
            assert "the agent awaited nothing for" in guilty.void.text
            assert "mischievous_agents.py:" in guilty.void.text and "in run" in guilty.void.text
            assert other.again and other.void is not None and other.void.cause == VoidCause.CRASH
            assert (await play(owner, server, order("plain", "call hangs"))).reward == 0.5

    asyncio.run(scenario())


def test_an_agent_may_block_its_worker_as_long_as_its_own_task_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENT_S", scaled(1.0))
    strict_s = scaled(1.0)
    tasks = agent("strict", deadlines={"tool_s": strict_s}), agent("patient")
    long_s = 1.5 * strict_s
    alone = {"blocks a while": long_s, "blocks in a callback": long_s, "holds the lock a while": 2 * strict_s + 2.0}

    async def scenario() -> None:
        async with started(*tasks) as owner:
            other = play(owner, None, order("waits for ever", task="strict"))
            for prompt, seconds in alone.items():
                outcome = await play(owner, None, order(prompt, task="patient", seconds=seconds))
                assert (outcome.reward, outcome.void) == (1.0, None), prompt
            other.cancel()
            names = {"patient": long_s, "strict": 0.4 * strict_s}  # the second begins when the loop is late already
            orders = [order("blocks with others", name, name, n=2, seconds=s) for name, s in names.items()]
            both = await asyncio.gather(*(play(owner, None, one) for one in orders))
            assert [(one.reward, one.void) for one in both] == [(1.0, None)] * 2
            guilty = await asyncio.wait_for(play(owner, None, order("block", task="strict")), scaled(30))
            assert guilty.void is not None and "the agent awaited nothing for" in guilty.void.text

    asyncio.run(scenario())


def test_a_worker_whose_code_holds_pythons_lock_is_found_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENT_S", scaled(1.0))

    async def scenario() -> None:
        async with started(agent(deadlines={"tool_s": scaled(1.0)})) as owner:
            outcome = await play(owner, None, order("hang in C"))
            assert outcome.void is not None and outcome.void.cause == VoidCause.TIMEOUT
            assert "it was silent for" in outcome.void.text and not outcome.again

    asyncio.run(scenario())


def test_a_crash_costs_one_episode_which_is_found_by_running_each_alone() -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started(count=1) as owner:
            (only,) = await asyncio.gather(play(owner, server, order("exit")))
            assert only.void is not None and not only.again
            assert (only.void.cause, only.void.text) == (VoidCause.CRASH, "the agent's process ended: exit code 3")
            playing = [play(owner, server, order("call hangs", name)) for name in ("a", "b")]
            await until(lambda: len(server.calls) == 2, 10)
            first = await asyncio.gather(play(owner, server, order("segfault", "guilty")), *playing)
            assert all(outcome.again and outcome.reward is None for outcome in first)
            again = [order("segfault", "guilty"), *(order("plain", name) for name in ("a", "b"))]
            guilty, *others = await asyncio.gather(*(play(owner, server, one) for one in again))
            assert guilty.void is not None and not guilty.again
            assert (guilty.void.cause, guilty.void.text) == (VoidCause.CRASH, "the agent's process ended: SIGSEGV")
            assert [outcome.reward for outcome in others] == [0.5, 0.5]

    asyncio.run(scenario())


def test_a_worker_that_dies_beside_a_child_ends_its_episodes_and_is_replaced() -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started() as owner:
            other = play(owner, server, order("call hangs", "other"))
            await until(lambda: len(server.calls) == 1, 10)
            guilty = play(owner, server, order("dies beside a child", "guilty"))
            try:
                found = await asyncio.wait_for(asyncio.gather(guilty, other), scaled(20))
                assert [one.void.text for one in found if one.void and one.again] == [
                    "the agent worker, with 2 episodes, ended: exit code 3"
                ] * 2
                assert (await play(owner, server, order("plain", "third"))).reward == 0.5
            finally:
                with contextlib.suppress(ProcessLookupError):  # it ends with the worker
                    os.kill(int(Path("child").read_text()), signal.SIGKILL)

    asyncio.run(scenario())


def test_a_process_that_an_agent_spawns_does_not_import_the_worker() -> None:
    (spawned,) = asyncio.run(outcomes("spawns"))
    assert (spawned.reward, spawned.void) == (0.0, None)


@pytest.mark.parametrize(
    ("prompt", "does", "code"),
    [
        ("forks", "returns", 70),
        ("forks", "raises", 1),
        ("forks", "leaves", 3),
        ("forks and awaits", "sleeps", 70),
        ("forks and awaits", "chats", 1),
        ("forks in a tool", "returns", 70),
        ("forks in a tool", "leaves", 3),
        ("forks in a thread", "returns", 70),
        ("forks in a thread", "raises", 1),
    ],
)
def test_a_process_that_an_agent_forks_ends_where_its_code_ends_and_the_log_says_so_if_it_awaits(
    prompt: str, does: str, code: int, tmp_path: Path
) -> None:
    log = tmp_path / "agents.log"

    async def scenario() -> None:
        async with ModelServer().running() as server, started(log=log) as owner:
            other = play(owner, server, order("together", "other", n=9))  # it waits for the model
            await until(lambda: bool(server.calls))
            outcome = await play(owner, server, order(prompt, does=does))
            assert (outcome.reward, outcome.void) == (code, None)
            assert not other.done() and (await play(owner, server, order("plain"))).reward == 0.5
            other.cancel()

    asyncio.run(scenario())
    told = log.read_text()
    assert told.count("which an agent has forked, ends because it awaits something") == (prompt == "forks and awaits")
    assert ("Traceback" in told) == (does == "raises" and prompt == "forks")


def test_several_suspects_run_at_once_in_a_worker_each() -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started() as owner:
            owner._suspects.update(("a", "b"))
            playing = [play(owner, server, order("together", name, n=2)) for name in ("a", "b")]
            found = await asyncio.wait_for(asyncio.gather(*playing), scaled(30))
            assert [one.reward for one in found] == [1.0, 1.0]  # the endpoint answers none before it has both calls

    asyncio.run(scenario())


def test_an_episode_waits_as_long_as_a_worker_may_take_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESTART_S", 0.0)

    async def scenario() -> None:
        async with started() as owner:
            first = await play(owner, None, order("pid", "first"))
            os.kill(int(first.reward or 0), signal.SIGKILL)
            await until(lambda: not any(worker.open for worker in owner._workers), 10)
            assert (await play(owner, None, order("pid", "second"))).reward not in (None, first.reward)

    asyncio.run(scenario())


def test_a_worker_that_keeps_what_does_not_end_gets_no_more_episodes_and_finishes_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = agent(), agent("short", deadlines={"turn_s": scaled(1.0)})
    take, spoiled, late = WorkerProcess._take, set[WorkerProcess](), list[Callable[[], None]]()

    def take_later(worker: WorkerProcess, frame: FromWorker) -> None:
        """Take what comes after a void outcome only once it is asked for: the outcome comes with all that it needs."""
        if worker in spoiled:
            late.append(lambda: take(worker, frame))
            return
        take(worker, frame)
        if isinstance(frame, Played) and frame.outcome.void:
            spoiled.add(worker)

    async def scenario() -> None:
        async with ModelServer().running() as server, started(*tasks) as owner:
            monkeypatch.setattr(WorkerProcess, "_take", take_later)
            one = await play(owner, server, order("pid", "first"))
            held = play(owner, server, order("together", n=2))
            deaf = await play(owner, server, order("deaf", task="short"))
            assert deaf.void is not None and deaf.void.cause == VoidCause.TIMEOUT
            async with asyncio.timeout(scaled(30)):  # the old one's would be taken only later
                other = await play(owner, server, order("pid", "second"))
            assert one.reward != other.reward
            monkeypatch.setattr(WorkerProcess, "_take", take)
            for take_now in late:
                take_now()
            assert not held.done()
            last = play(owner, server, order("together", "last", n=2))
            assert [(await outcome).reward for outcome in (held, last)] == [1.0, 1.0]
            await until(lambda: not psutil.pid_exists(int(one.reward or 0)), 10)

    asyncio.run(scenario())


def test_what_an_agent_leaves_behind_is_cancelled_and_so_is_an_episode_that_nobody_waits_for() -> None:
    async def scenario() -> None:
        async with started() as owner:
            assert (await play(owner, None, order("leaves a task behind"))).reward == 1.0
            await until(lambda: Path("left").exists(), 10)
            forgotten = play(owner, None, order("waits for ever"))
            await asyncio.sleep(0)
            assert (await play(owner, None, order("mapping"))).reward == 2.0  # so the other has begun
            forgotten.cancel()
            await until(lambda: Path("waits").exists(), 10)

    asyncio.run(scenario())


def test_an_episode_that_is_given_up_and_begun_again_at_once_gets_the_outcome_of_the_second() -> None:
    async def scenario() -> None:
        async with started() as owner:
            first = play(owner, None, order("waits the first time"))
            await until(lambda: Path("begun").exists(), 10)
            first.cancel()
            await asyncio.sleep(0)
            again = await owner.run(order("waits the first time"), "http://127.0.0.1:9/v1", "another key")
            assert (again.reward, again.void) == (2.0, None)
            await until(lambda: Path("given up").exists(), 10)

    asyncio.run(scenario())


def test_the_tool_that_an_episode_waits_for_is_known_by_name() -> None:
    async def scenario() -> None:
        async with ModelServer().running() as server, started() as owner:
            playing = [play(owner, server, order(name)) for name in ("episode hangs", "call hangs", "turn hangs")]
            await until(lambda: owner.waiting() and len(server.calls) == 2, 10)
            assert {name: wait.name for name, wait in owner.waiting().items()} == {"episode hangs": "book"}
            assert owner.waiting()["episode hangs"].since > 0
            await owner.close()
            ended = await asyncio.gather(*playing)
            assert all(one.void and one.void.cause == VoidCause.CRASH for one in ended)

    asyncio.run(scenario())


def test_what_agents_print_goes_to_the_log_which_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pipe, "MOST_LOGGED", 300_000)

    async def scenario() -> None:
        async with started(log=tmp_path / "agents.log") as owner:
            for _ in range(3):  # 100,000 bytes each
                assert (await play(owner, None, order("noise"))).reward == 1.0
            assert (await play(owner, None, order("mapping"))).reward == 2.0

    asyncio.run(scenario())
    text = (tmp_path / "agents.log").read_text()
    for line in ("noise in Python", "noise from a child", "to its stderr"):
        assert text.count(line) == 1
    assert text.startswith("[older output is removed]\n") and len(text) < 200_000


def test_an_agent_that_cannot_be_imported_is_reported_at_the_start() -> None:
    async def scenario(task: AgentTask) -> None:
        async with started(task):
            pass

    with pytest.raises(UserError, match="task 'mine': run 'mischievous_agents:rum': cannot be imported"):
        asyncio.run(scenario(agent(run="mischievous_agents:rum")))
    Path("fatal_agents.py").write_text("import os; os._exit(5)")
    with pytest.raises(RunFailed, match="the agent workers did not start: exit code 5"):
        asyncio.run(scenario(agent(run="fatal_agents:run")))


OWNER = """
import asyncio, os
from streamrl.agents.episode import EpisodeOrder
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.tasks import AgentTask

async def main():
    task = AgentTask(kind="agent", name="mine", run="mischievous_agents:run", items="unused:items")
    owner = EpisodeWorkers([task], 1)
    await owner.start()
    found = await owner.run(EpisodeOrder("e", "g", "mine", {"prompt": "pid"}, 0, None), "http://x/v1", "k")
    print(int(found.reward), flush=True)
    await owner.run(EpisodeOrder("f", "g", "mine", {"prompt": "block"}, 0, None), "http://x/v1", "l")

asyncio.run(main())
"""


def test_a_worker_ends_with_its_owner_even_if_an_agent_blocks_it() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        owner.send_signal(signal.SIGKILL)
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10)


def test_a_worker_that_cannot_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started() as owner:
            first = await play(owner, None, order("pid", "first"))
            Path("mischievous_agents.py").rename("elsewhere.py")
            os.kill(int(first.reward or 0), signal.SIGKILL)
            await until(lambda: "an agent worker did not start: task 'mine'" in caplog.text, 30)
            second = play(owner, None, order("pid", "second"))
            Path("elsewhere.py").rename("mischievous_agents.py")
            assert (await second).reward not in (None, first.reward)

    asyncio.run(scenario())


@pytest.mark.parametrize("episode", ["another", "suspect"])
def test_a_worker_whose_imports_never_end_holds_nobody_up_for_good(
    episode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if episode == "suspect":
        monkeypatch.setattr(workers, "RESTART_S", 0.0)
    module = Path("mischievous_agents.py")
    works = module.read_text()

    async def scenario() -> None:
        async with started() as owner:
            first = await play(owner, None, order("pid", "first"))
            if episode == "suspect":
                owner._suspects.add("second")
            module.write_text("import time; time.sleep(1000)")
            owner._start_s = 3.0
            if episode == "suspect":
                void = (await play(owner, None, order("pid", "second"))).void
                assert void is not None and "did not start: it was not ready within 3 s" in void.text
                caplog.clear()
            os.kill(int(first.reward or 0), signal.SIGKILL)
            await until(lambda: "an agent worker did not start: it was not ready within 3 s" in caplog.text, 30)
            module.write_text(works)
            owner._start_s = scaled(60)
            assert (await play(owner, None, order("pid", "third"))).reward not in (None, first.reward)

    asyncio.run(scenario())
