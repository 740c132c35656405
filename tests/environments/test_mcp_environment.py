"""Environments with the tools of an MCP server: servers of package mcp over pipes and over HTTP, and small ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import sysconfig
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from streamrl.agents.client import ToolFailed
from streamrl.agents.environment_player import EnvironmentPlayer
from streamrl.agents.episode import EpisodeOrder
from streamrl.agents.live_episode import LiveEpisode
from streamrl.agents.mcp_tools import mcp_tools
from streamrl.config.tasks import AgentTask, EnvironmentUse
from streamrl.environments import environment_pool, environment_process
from streamrl.environments.environment_pool import EnvironmentPool
from streamrl.environments.environment_process import EnvironmentEnded, EnvironmentFailed
from streamrl.environments.environment_trial import try_environment
from streamrl.environments.in_venv import mcp_tools_text
from streamrl.environments.installed import InstalledEnvironment, add_environment
from streamrl.errors import UserError
from streamrl.machine.own_share import usable_cores
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from tests.agents.model_server import ModelServer
from tests.waiting import scaled, until, wait_for

SHOP = """
import os
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
sold = []

@server.tool()
def price(item: str, count: int = 1) -> str:
    "Return the price of an item."
    if item == "poison":
        raise ToolError("not for sale")
    sold.append(item)
    return f"{count} {item}: {3 * count} euros, {os.getpid()}, sold {len(sold)}"

@server.tool()
def greet() -> str:
    "Greet."
    return os.environ.get("GREETING", "none")

@server.tool()
def nap(seconds: float, mib: int = 0) -> str:
    "Sleep, and keep memory meanwhile."
    return "not here"
"""
SMALL = Path(__file__).with_name("small_shop.py")
"""The same shop; package mcp takes a second or two of computing to start."""
REWARD = """
import time

def calls(item, messages):
    time.sleep(item.get("seconds", 0))
    return sum(message["role"] == "tool" for message in messages) + item["more"]
"""


Scenario = Callable[[EnvironmentPool], Coroutine[None, None, None]]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> InstalledEnvironment:
    """An environment with two programs, `shop` and `small_shop`; its package mcp is the one of these tests."""
    folder = tmp_path_factory.mktemp("shops")
    (folder / "shop_rewards.py").write_text(REWARD)
    made = add_environment(folder / "shop", "mcp:small_shop", paths=[folder, Path(sysconfig.get_path("purelib"))])
    for name, text in (
        ("shop", f"#!{sys.executable}\n{SHOP}\nserver.run('stdio')\n"),
        ("small_shop", f"#!{sys.executable} -IS\n{SMALL.read_text()}"),
    ):
        program = made.python.parent / name
        program.write_text(text)
        program.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def shop_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    names: dict[str, Any] = {}
    exec(SHOP, names)  # the same server, in this process
    server = uvicorn.Server(uvicorn.Config(names["server"].streamable_http_app(), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started, 20)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    server.should_exit = True
    thread.join()


@contextlib.asynccontextmanager
async def started(
    one: InstalledEnvironment, make: str = "", step_s: float | None = None, memory_gb: float = 2.0, **config: Any
) -> AsyncIterator[EnvironmentPool]:
    use = EnvironmentUse(name=one.name, processes=1, memory_gb=memory_gb, config=config)
    made = InstalledEnvironment(one.folder, make or one.make, {}, one.paths)
    pool = EnvironmentPool(use, made, OutputLog(None), step_s or scaled(30), scaled(30))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture(scope="module")
def strict(shop: InstalledEnvironment) -> Iterator[Callable[[Scenario], None]]:
    """Play a scenario with a pool whose server is `STRICT`, the same for several tests: its process imports mcp."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        entered = stack.enter_async_context(started(shop, f"mcp:{sys.executable}", arguments=[str(STRICT)]))
        pool = runner.run(entered)

        async def played(scenario: Scenario) -> None:
            await scenario(pool)
            (process,) = pool._processes
            await until(lambda: not process._work)  # the test's servers have ended
            assert pool.restarts == 0

        yield lambda scenario: runner.run(played(scenario))
        runner.run(stack.aclose())


def calls(*made: tuple[str, Any]) -> dict[str, Any]:
    told = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(made)
    ]
    return {"role": "assistant", "content": "", "tool_calls": told}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


STRICT = Path(__file__).with_name("strict_mcp_server.py")
PARTS = [
    {"type": "text", "text": "seen"},
    {"type": "resource", "resource": {"uri": "file:///a", "text": "body"}},
    {"type": "resource", "resource": {"uri": "file:///b", "mimeType": "image/png", "blob": "AAAA"}},
    {"type": "resource_link", "uri": "file:///c", "name": "map"},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
]
RESULTS = [
    (PARTS, "seen\nbody\n[resource image/png file:///b]\n[resource_link map file:///c]\n[image image/png]"),
    ([], '{"x": "\u2603"}'),
    ([{"type": "text", "text": ""}], '{"x": "\u2603"}'),
    ([{"type": "text", "text": "text"}], "text"),
]
"""The content of a result, each with `STRUCTURED` beside it, and what the model is told."""
STRUCTURED = {"x": "\u2603"}
NO_ANSWERS = [
    '{"id": 3, "result": {}}',
    '{"jsonrpc": "2.0", "id": 3}',
    '{"jsonrpc": "2.0", "id": 3, "error": "no code"}',
    '[{"jsonrpc": "2.0", "id": 3, "result": {}}]',
]
"""Lines that are meant to answer a call, and are JSON."""
ITEM = {"prompt": "What do two teas cost?", "answer": 6}


@pytest.mark.parametrize("over", ["pipes", "http"])
def test_tools_are_offered_called_and_the_last_answer_is_scored(
    shop: InstalledEnvironment, shop_url: str, over: str
) -> None:
    async def scenario() -> None:
        make = "mcp:shop" if over == "pipes" else f"mcp:{shop_url}"
        async with contextlib.AsyncExitStack() as stack:
            pool = await stack.enter_async_context(started(shop, make, instructions="Ask."))
            a = await stack.enter_async_context(pool.place("a"))
            began = (await a.reset(ITEM)).result
            b = await stack.enter_async_context(pool.place("b"))  # by now it is known how much memory a server needs
            await b.reset(ITEM)
            assert [one["role"] for one in began["messages"]] == ["system", "user"]
            assert [one["function"]["name"] for one in began["tools"]] == ["price", "greet", "nap"]
            schema = began["tools"][0]["function"]
            assert schema["description"] == "Return the price of an item." and schema["parameters"]["required"] == [
                "item"
            ]
            wanted = json.dumps({"item": "tea", "count": 2})
            found = (await a.step(calls(("price", wanted), ("price", '{"item": "poison"}')))).result
            bought, refused = found["messages"]
            assert (bought["tool_call_id"], bought["role"]) == ("c0", "tool")
            assert bought["content"].startswith("2 tea: 6 euros")
            assert refused["content"].startswith("error: ") and "not for sale" in refused["content"]
            assert (found["reward"], found["done"]) == (0.0, False)
            assert found["metrics"] == {"tool_calls": 2, "tool_errors": 1}
            wrong = (await a.step(calls(("price", "{"), ("price", "[]"), ("steal", "{}"), ("price", "{}")))).result
            texts = [one["content"] for one in wrong["messages"]]
            assert "no JSON object" in texts[0] and "got list" in texts[1] and "no tool 'steal'" in texts[2]
            assert "item" in texts[3] and wrong["metrics"]["tool_errors"] == 4
            for text, reward in (("It is 6 euros", 1.0), ("16 euros", 0.0), ("", 0.0)):
                last = (await a.step(says(text))).result
                assert (last["messages"], last["reward"], last["done"]) == ([], reward, True)
            other = (await b.step(calls(("price", '{"item": "tea"}')))).result["messages"][0]["content"]
            if over == "pipes":  # each episode has a server of its own
                assert bought["content"].split(", ")[1] != other.split(", ")[1] and other.endswith("sold 1")

    asyncio.run(scenario())


def test_a_call_that_the_server_refuses_is_told_to_the_model(strict: Callable[[Scenario], None]) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        async with pool.place("a") as place:
            await place.reset(ITEM)
            found = (await place.step(calls(("add", '{"a": 1}'), ("add", '{"b": 1}')))).result
            assert [one["content"] for one in found["messages"]] == ["2", "error: a: Required"]
            assert found["metrics"] == {"tool_calls": 2, "tool_errors": 1}
            with pytest.raises(EnvironmentFailed, match="Required"):
                await place.step(calls(("add", '{"code": -32000}')))  # as if the connection were closed

    strict(scenario)


def test_all_that_a_tool_returns_is_told_to_the_model(strict: Callable[[Scenario], None]) -> None:
    given = [json.dumps({"result": {"content": content, "structuredContent": STRUCTURED}}) for content, _ in RESULTS]

    async def environment(pool: EnvironmentPool) -> None:
        async with pool.place("a") as place:
            await place.reset(ITEM)
            found = (await place.step(calls(*(("add", one) for one in given)))).result
            assert [one["content"] for one in found["messages"]] == [told for _, told in RESULTS]

    async def agent() -> None:
        async with mcp_tools([sys.executable, str(STRICT)]) as tools:
            assert [await tools[0].call(**json.loads(one)) for one in given] == [told for _, told in RESULTS]

    strict(environment)
    asyncio.run(agent())


HALF = '{"jsonrpc": "2.0", "id": 4, "result": {"content": [{"type": "text", "text": "\\ud83d"}]}}'
"""An answer with half a surrogate pair."""


def test_an_answer_that_cannot_be_read_fails_its_call_and_other_lines_do_not(
    strict: Callable[[Scenario], None],
) -> None:
    banner = {"a": 1, "line": "serving"}

    async def environment(pool: EnvironmentPool) -> None:
        async with pool.place("a") as place:
            await place.reset(ITEM)
            found = (await place.step(calls(("add", json.dumps(banner))))).result
            assert [one["content"] for one in found["messages"]] == ["2"]
            with pytest.raises(EnvironmentFailed, match=r"an answer of the MCP server cannot be read: .*hex escape"):
                await place.step(calls(("add", json.dumps({"line": HALF}))))
        for line in NO_ANSWERS:
            async with pool.place("a") as place:
                await place.reset(ITEM)
                with pytest.raises(EnvironmentFailed, match=r"cannot be read: it is no JSON-RPC 2.0"):
                    await place.step(calls(("add", json.dumps({"line": line}))))

    async def agent() -> None:
        async with mcp_tools([sys.executable, str(STRICT)]) as tools:
            assert await tools[0].call(**banner) == "2"
            with pytest.raises(ConnectionError, match=r"an answer of the MCP server cannot be read: .*hex escape"):
                await tools[0].call(line=HALF)
            for line in NO_ANSWERS:
                with pytest.raises(ConnectionError, match=r"cannot be read: it is no JSON-RPC 2.0"):
                    await tools[0].call(line=line)
            assert await tools[0].call(a=1, line='{"level": "info", "msg": "a log"}') == "2"
            assert await tools[0].call(a=1) == "2"

    strict(environment)
    asyncio.run(agent())


NO_ID = '{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "Parse error"}}'
"""What a server answers to a request that it cannot read."""
OTHER_ID = '{"jsonrpc": "2.0", "id": 1004, "result": {"content": []}}'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (NO_ID, "the MCP server reports an error, and not of which call: Parse error"),
        (OTHER_ID, "an answer of the MCP server is of no call, as none has the id 1004"),
    ],
)
def test_an_answer_that_names_no_call_fails_those_that_wait(
    strict: Callable[[Scenario], None], line: str, told: str
) -> None:
    async def environment(pool: EnvironmentPool) -> None:
        async with pool.place("a") as place:
            await place.reset(ITEM)
            with pytest.raises(EnvironmentFailed, match=told):
                await place.step(calls(("add", json.dumps({"line": line}))))

    async def agent() -> None:
        async with mcp_tools([sys.executable, str(STRICT)]) as tools:
            with pytest.raises(ConnectionError, match=told):
                await tools[0].call(line=line)
            assert await tools[0].call(a=1) == "2"

    strict(environment)
    asyncio.run(asyncio.wait_for(agent(), scaled(30)))


def test_bytes_that_are_not_utf8_cost_no_call(strict: Callable[[Scenario], None]) -> None:
    """The server writes Latin-1."""
    given = [{"a": 1, "line": "d\xe9but"}, {"result": {"content": [{"type": "text", "text": "caf\xe9"}]}}]

    async def environment(pool: EnvironmentPool) -> None:
        async with pool.place("a") as place:
            await place.reset(ITEM)
            found = (await place.step(calls(*(("add", json.dumps(one)) for one in given)))).result
            assert [one["content"] for one in found["messages"]] == ["2", "caf\ufffd"]

    async def agent() -> list[str]:
        async with mcp_tools([sys.executable, str(STRICT)]) as tools:
            return [await tools[0].call(**one) for one in given]

    strict(environment)
    assert asyncio.run(asyncio.wait_for(agent(), scaled(30))) == ["2", "caf\ufffd"]


def test_a_server_that_dies_fails_its_episode_alone_and_none_is_left(shop: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(shop, tools=["price"], reward="shop_rewards:calls") as pool:
            (process,) = pool._processes
            item = {"prompt": "x", "more": 10}
            async with pool.place("good") as good:
                await good.reset(item)
                async with pool.place("bad") as bad:
                    assert len((await bad.reset(item)).result["tools"]) == 1
                    with pytest.raises(EnvironmentFailed, match=r"server ended during a call of 'price'|[Cc]losed"):
                        await bad.step(calls(("price", '{"item": "gun"}')))
                await good.step(calls(("price", '{"item": "tea"}')))
                assert (await good.step(says("done"))).result["reward"] == 11.0
            children = psutil.Process(process.process.pid).children
            await until(lambda: not children(), 60)
            assert pool.restarts == 0

    asyncio.run(scenario())


def test_a_call_that_takes_too_long_costs_its_own_episode_and_its_server(shop: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(shop, step_s=scaled(2)) as pool:
            (process,) = pool._processes
            async with pool.place("other") as other:
                await other.reset(ITEM)
                async with pool.place("late") as late:
                    await late.reset(ITEM)
                    with pytest.raises(EnvironmentEnded, match="step took more than") as found:
                        await late.step(calls(("nap", '{"seconds": 3600}')))
                    assert (found.value.cause, found.value.again) == (VoidCause.TIMEOUT, False)
                children = psutil.Process(process.process.pid).children
                await until(lambda: len(children()) == 1, 60)
                sold = (await other.step(calls(("price", '{"item": "tea"}')))).result["messages"][0]["content"]
                assert sold.endswith("sold 1") and pool.restarts == 0

    asyncio.run(scenario())


def test_a_server_that_hangs_at_its_start_costs_its_own_episode(
    shop: InstalledEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_process, "CLOSE_S", scaled(1))
    file = tmp_path / "hangs"

    async def scenario() -> None:
        async with started(shop, step_s=scaled(2), variables={"HANGS_BESIDE": str(file)}) as pool:
            (process,) = pool._processes
            async with pool.place("other") as other:
                await other.reset(ITEM)
                file.touch()
                async with pool.place("late") as late:
                    with pytest.raises(EnvironmentEnded, match="reset took more than") as found:
                        await late.reset(ITEM)
                    assert (found.value.cause, found.value.again) == (VoidCause.TIMEOUT, False)
                children = psutil.Process(process.process.pid).children
                await until(lambda: len(children()) == 1, 60)  # while the other one would hang on
                await until(lambda: not process._work)  # its end may be late, too
                assert (await other.step(says("6"))).result["reward"] == 1.0 and pool.restarts == 0

    asyncio.run(scenario())


def test_a_process_that_does_not_answer_at_all_is_killed_and_the_other_episodes_are_played_again(
    shop: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_process, "CLOSE_S", scaled(1))

    async def scenario() -> None:
        async with started(shop, step_s=scaled(2), reward="shop_rewards:calls") as pool:
            item = {"prompt": "x", "more": 1, "seconds": 3600}
            async with pool.place("late") as late:
                await late.reset(item)
                async with pool.place("other") as other:
                    await other.reset(item)
                    steps = late.step(says("x")), other.step(calls(("nap", '{"seconds": 3600}')))
                    first, second = await asyncio.gather(*steps, return_exceptions=True)
            assert isinstance(first, EnvironmentEnded) and isinstance(second, EnvironmentEnded)
            assert (first.cause, first.again, second.again) == (VoidCause.TIMEOUT, False, True)

    asyncio.run(scenario())


def test_few_servers_start_at_once_and_those_that_wait_are_not_late(strict: Callable[[Scenario], None]) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        (process,) = pool._processes
        at_once = environment_pool.RESETS_PER_CORE * usable_cores()
        for _ in range(at_once):
            await asyncio.wait_for(pool._resets.acquire(), scaled(1))
        begun: list[str] = []
        async with pool.place("given up") as given_up:
            reset = asyncio.ensure_future(given_up.reset(ITEM, lambda: begun.append("given up")))
            await until(lambda: pool._resets.locked() and process._work)
            reset.cancel()
        async with pool.place("waits") as waits:
            reset = asyncio.ensure_future(waits.reset(ITEM, lambda: begun.append("waits")))
            await until(lambda: len(process._work) == 2)
            assert not [episode for episode, _ in process._owed.values() if episode == "waits"]
            assert begun == []
            for _ in range(at_once):
                pool._resets.release()
            assert (await reset).waited_s > 0 and begun == ["waits"]
            assert len(psutil.Process(process.process.pid).children()) == 1  # none for the one that was given up

    strict(scenario)


def test_a_reset_that_is_late_keeps_no_other_one_waiting_while_its_process_is_looked_at(
    shop: InstalledEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hangs"

    async def scenario() -> None:
        async with started(shop, step_s=scaled(2), variables={"HANGS_BESIDE": str(file)}) as pool:
            (process,) = pool._processes
            for _ in range(environment_pool.RESETS_PER_CORE * usable_cores() - 1):
                await pool._resets.acquire()
            answers, free = process._answers, []

            async def looked_at() -> bool:
                free.append(not pool._resets.locked())
                return await answers()

            monkeypatch.setattr(process, "_answers", looked_at)
            file.touch()
            async with pool.place("late") as late:
                with pytest.raises(EnvironmentEnded, match="reset took more than"):
                    await late.reset(ITEM, lambda: free.append(not pool._resets.locked()))
            assert free == [False, True]

    asyncio.run(scenario())


def test_servers_start_as_there_is_memory_for_them(shop: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "WATCH_S", 0.05)

    async def scenario() -> None:
        async with started(shop, memory_gb=0.3, variables={"MIB": 60}) as pool:

            async def one(number: int) -> float:
                async with pool.place(str(number)) as place:
                    await place.reset(ITEM)
                    await place.step(calls(("nap", '{"seconds": 0.5}')))
                    return float((await place.step(says("6"))).result["reward"])

            assert await asyncio.gather(*map(one, range(6))) == [1.0] * 6
            assert pool.restarts == 0 and 0 < pool.most_memory < 0.3 * environment_pool.GIB

    asyncio.run(scenario())


def test_a_server_that_grows_beyond_the_memory_costs_its_own_episode(
    shop: InstalledEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with started(shop, memory_gb=0.4) as pool, pool.place("other") as other:
            await other.reset(ITEM)
            async with pool.place("hungry") as hungry:
                await hungry.reset(ITEM)
                with pytest.raises(EnvironmentFailed, match=r"server ended during a call of 'nap'|[Cc]losed"):
                    await hungry.step(calls(("nap", '{"seconds": 3600, "mib": 400}')))
            assert (await other.step(says("6"))).result["reward"] == 1.0 and pool.restarts == 0

    asyncio.run(scenario())
    told = re.search(
        r"a server with (0\.\d\d) GiB is killed, the largest of 2 of a process; its episode fails: ", caplog.text
    )
    assert told is not None and "its episode fails: it uses 0." in caplog.text
    assert float(told[1]) > 0.2, "the other has some 0.01, and this one is seen as it grows"


def test_a_process_that_is_full_before_its_first_episode_is_not_replaced(
    shop: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "WATCH_S", 0.02)
    monkeypatch.setattr(environment_pool, "FULL", 0.001)  # it has more as soon as it is loaded

    async def scenario() -> None:
        async with started(shop) as pool:
            await until(lambda: pool.most_memory > 0)  # it has been looked at
            (process,) = pool._processes
            assert not process.no_more.is_set()
            async with pool.place("a") as place:
                await place.reset(ITEM)
                await until(lambda: pool.restarts == 1, 60)
                assert (await place.step(says("6"))).result["reward"] == 1.0

    asyncio.run(scenario())


def test_variables_reach_the_program_and_a_trial_reports_no_problem(shop: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(shop, variables={"GREETING": "hello"}) as pool:
            async with pool.place("a") as place:
                await place.reset(ITEM)
                assert (await place.step(calls(("greet", "")))).result["messages"][0]["content"] == "hello"
            trial = await try_environment(pool, 4, 3)
            assert trial.problems() == [] and trial.ended == 4

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("make", "config", "text"),
    [
        ("mcp:true", {}, "the MCP server cannot be used"),
        ("mcp:http://127.0.0.1:9/mcp", {}, "the MCP server cannot be used"),
        ("", {"tools": ["fly"]}, "it has no tool 'fly', only greet, nap, price"),
        ("", {"tool": ["price"]}, r"unknown keys \['tool'\]"),
    ],
)
def test_what_cannot_work_is_told_at_the_start(
    shop: InstalledEnvironment, make: str, config: dict[str, Any], text: str
) -> None:
    async def scenario() -> None:
        async with started(shop, make, **config):
            pass

    with pytest.raises(UserError, match=text):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("no-such-program", {}, "there is no program 'no-such-program'"),
        ("true", {"reward": "nothing"}, "expected 'module:function'"),
        ("true", {"reward": "math:REWARDS"}, "no attribute 'REWARDS'"),
        ("true", {"reward": "math:pi"}, "'math:pi' cannot be called"),
    ],
)
def test_what_cannot_work_is_told_before_a_server_starts(name: str, config: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, AttributeError), match=text):
        mcp_tools_text.make(name, config)


def test_the_last_words_of_a_server_that_ends_at_its_start_are_told(shop: InstalledEnvironment) -> None:
    ends = "import sys; print('x' * 999, file=sys.stderr); sys.exit('no key:\\nset SHOP_KEY')"
    told = r"the MCP server cannot be used: .*onnection.*; its last words: x{50,200} no key: set SHOP_KEY"

    async def environment() -> None:
        async with started(shop, f"mcp:{sys.executable}", arguments=["-c", ends]):
            pass

    async def agent() -> None:
        async with mcp_tools([sys.executable, "-c", ends]):
            pass

    with pytest.raises(UserError, match=told):
        asyncio.run(environment())
    with pytest.raises(ToolFailed, match=told.partition("; ")[2]):
        asyncio.run(agent())


def test_an_item_that_nothing_could_score_fails(strict: Callable[[Scenario], None]) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        async with pool.place("a") as place:
            with pytest.raises(EnvironmentFailed, match="no `answer`, and the config no `reward`"):
                await place.reset({"prompt": "x"})

    strict(scenario)


def test_the_time_of_an_episode_begins_with_its_reset(
    shop: InstalledEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[LiveEpisode] = []
    begin = LiveEpisode.begin
    monkeypatch.setattr(LiveEpisode, "begin", lambda live: (begun.append(live), begin(live)))
    task = AgentTask.model_validate(
        {"kind": "agent", "name": "shop", "environment": {"name": os.fspath(shop.folder), "processes": 1}}
    )

    async def scenario() -> None:
        player = EnvironmentPlayer([task], OutputLog(None))
        await player.start(scaled(30))
        try:
            (pool,) = player._pools.values()
            (process,) = pool._processes
            at_once = environment_pool.RESETS_PER_CORE * usable_cores()
            for _ in range(at_once):
                await pool._resets.acquire()
            async with ModelServer().running() as model:
                order = EpisodeOrder("s", "g", "shop", {**ITEM, "prompt": "echo It costs 6."}, 1, 1.0)
                playing = asyncio.ensure_future(player.play(order, model.url, "key"))
                await until(lambda: process._work)
                assert begun == []
                for _ in range(at_once):
                    pool._resets.release()
                assert (await playing).reward == 1.0 and len(begun) == 1
        finally:
            await player.close()

    asyncio.run(scenario())


def test_a_player_offers_the_tools_to_the_model(shop: InstalledEnvironment) -> None:
    task = AgentTask(
        kind="agent",
        name="shop",
        environment=EnvironmentUse(name=os.fspath(shop.folder), processes=1),
        items="some:items",
        max_turns=4,
    )

    async def scenario() -> None:
        player = EnvironmentPlayer([task], OutputLog(None))
        await player.start(scaled(30))
        try:
            async with ModelServer().running() as model:
                order = EpisodeOrder("s", "g", "shop", {**ITEM, "prompt": "echo It costs 6."}, 1, 1.0)
                outcome = await player.play(order, model.url, "key")
        finally:
            await player.close()
        assert outcome.reward == 1.0 and outcome.void is None
        (body,) = model.calls
        assert [one["function"]["name"] for one in body["tools"]] == ["price", "greet", "nap"]

    asyncio.run(scenario())
