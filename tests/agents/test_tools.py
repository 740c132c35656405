"""Tools: right calls are answered, wrong ones are explained to the model, and only a broken tool costs the episode."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from streamrl.agents.client import AgentClient, BadToolInput, ToolFailed
from streamrl.agents.episode import EpisodeOrder
from streamrl.agents.example_tools import CALCULATOR, Corpus, calculate
from streamrl.agents.live_episode import LiveEpisode
from streamrl.agents.mcp_tools import mcp_tools
from streamrl.agents.tools import Tool, answer_calls, function_tool, interpreter
from streamrl.config.tasks import EpisodeDeadlines, Sandbox
from streamrl.errors import UserError
from tests.waiting import scaled, until


def repeat(text: str, count: int = 2) -> str:
    """Repeat a text."""
    return text * count


async def double(number: float) -> float:
    """Double a number."""
    return 2 * number


def fails(text: str) -> str:
    """Fail."""
    raise RuntimeError(f"no {text}")


def timed(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return wrapper


@timed
async def lookup(city: str) -> str:
    """Look a city up, as a coroutine that a decorator hides."""
    if city == "Atlantis":
        raise BadToolInput("no such city")
    return f"{city} is a capital"


TOOLS = [function_tool(repeat), function_tool(double), function_tool(fails), CALCULATOR]


def client() -> AgentClient:
    limits = EpisodeDeadlines(tool_s=scaled(60))
    order = EpisodeOrder("e", "g", "mine", {"prompt": "p"}, 0, None)
    return AgentClient(LiveEpisode(order, limits), "http://x/v1", "k", httpx2.MockTransport(lambda _: None))  # type: ignore[arg-type,return-value]


def message(*calls: tuple[str, str]) -> dict[str, Any]:
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def answers(*calls: tuple[str, str], tools: Sequence[Tool] = TOOLS) -> list[str]:
    async def scenario() -> list[str]:
        found = await answer_calls(client(), tools, message(*calls))
        assert [one["tool_call_id"] for one in found] == [f"c{number}" for number in range(len(calls))]
        assert {one["role"] for one in found} <= {"tool"}
        return [one["content"] for one in found]

    return asyncio.run(scenario())


def test_the_schema_of_a_function_follows_from_its_signature() -> None:
    schema = TOOLS[0].schema["function"]
    assert (schema["name"], schema["description"]) == ("repeat", "Repeat a text.")
    properties = {name: one["type"] for name, one in schema["parameters"]["properties"].items()}
    assert properties == {"text": "string", "count": "integer"}
    assert schema["parameters"]["required"] == ["text"]
    assert json.loads(json.dumps(TOOLS[0].schema)) == TOOLS[0].schema


def test_calls_are_answered_in_order_by_functions_and_coroutines() -> None:
    calls = [("repeat", '{"text": "ab", "count": 3}'), ("double", '{"number": 4}'), ("repeat", '{"text": "x"}')]
    assert answers(*calls) == ["ababab", "8.0", "xx"]
    assert answers() == []


def test_a_coroutine_that_a_decorator_hides_is_awaited() -> None:
    calls = [("lookup", '{"city": "Paris"}'), ("lookup", '{"city": "Atlantis"}')]
    assert answers(*calls, tools=[function_tool(lookup)]) == ["Paris is a capital", "error: no such city"]


def returning(found: Any) -> Tool:
    return Tool("get", "", {}, lambda: found)


async def pages() -> AsyncIterator[str]:
    yield "page"


def within_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"score": np.float32(0.5), "n": np.int64(3)}, '{"score": 0.5, "n": 3}'),
        ({np.int64(3): np.arange(2)}, '{"3": [0, 1]}'),
        ({(1, 2): None}, '{"1,2": null}'),
        ([date(2026, 1, 2), Path("a"), {"\u2603"}], '["2026-01-02", "a", ["\u2603"]]'),
        ("\ud83d", "\ud83d"),
    ],
)
def test_what_a_tool_returns_is_told_as_json(found: Any, told: str) -> None:
    assert answers(("get", ""), tools=[returning(found)]) == [told]


class Price:
    def __str__(self) -> str:
        return "3 euros"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Decimal("1.50"), "1.50"),
        (datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),
        (Path("a/b"), "a/b"),
        (range(3), "range(0, 3)"),
        (Price(), "3 euros"),
        ({"price": Price(), "of": [range(2)]}, '{"price": "3 euros", "of": ["range(0, 2)"]}'),
    ],
    ids=["Decimal", "datetime", "Path", "range", "own text", "inside others"],
)
def test_what_json_has_not_is_told_by_its_text(found: Any, told: str) -> None:
    assert answers(("get", ""), tools=[returning(found)]) == [told]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (pages(), "tool 'get': TypeError: its result holds an object of type async_generator, which JSON cannot hold"),
        ([{"x": object()}], "tool 'get': TypeError: its result holds an object of type object, which JSON cannot hold"),
        (within_itself(), "tool 'get': ValueError: Circular reference"),
    ],
)
def test_a_result_that_json_cannot_hold_fails_the_tool(found: Any, says: str) -> None:
    with pytest.raises(ToolFailed, match=says):
        answers(("get", ""), tools=[returning(found)])


def test_all_that_a_model_is_told_is_cut() -> None:
    def refuses() -> None:
        raise BadToolInput("b" * 20_000)

    tools = [returning(["a" * 20_000]), Tool("refuses", "", {}, refuses)]
    listed, refused = answers(("get", ""), ("refuses", ""), tools=tools)
    assert listed == '["' + "a" * 16_382 + "\n[cut: the first 16,384 of 20,004 characters]"
    assert refused == "error: " + "b" * 16_377 + "\n[cut: the first 16,384 of 20,007 characters]"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("repaet", "{}", "error: there is no tool 'repaet', only calculate, double, fails, repeat"),
        ("repeat", "{text", "error: the arguments are no JSON"),
        ("repeat", "[" * 100_000, "error: the arguments are no JSON"),
        ("repeat", "[1]", "error: the arguments must be a JSON object, got list"),
        ("repeat", "{}", "error: text: Field required"),
        ("repeat", '{"text": "a", "count": "many"}', "error: count: Input should be a valid integer"),
        ("repeat", '{"text": "a", "times": 3}', "error: times: Extra inputs are not permitted"),
        ("repeat", '{"text": "a", "self": 1, "name": 2}', "error: self: Extra inputs are not permitted"),
        ("calculate", '{"expression": "1 / 0"}', "error: '1 / 0': division by zero"),
    ],
)
def test_a_wrong_call_is_explained_to_the_model(name: str, arguments: str, says: str) -> None:
    (answer,) = answers((name, arguments))
    assert answer.startswith(says)


def test_a_tool_that_fails_is_no_answer_to_the_model() -> None:
    with pytest.raises(ToolFailed, match="tool 'fails': RuntimeError: no luck"):
        answers(("fails", '{"text": "luck"}'))


def of_a_hidden_name(_city: str) -> str:
    return _city


def of_pydantics_name(model_config: str) -> str:
    return model_config


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x, "parameter 'x' needs a name and an annotation"),
        (of_a_hidden_name, "of_a_hidden_name: parameter '_city' needs another name"),
        (of_pydantics_name, "parameter 'model_config' needs another name"),
        (functools.partial(double, number=2), "a tool is a function, got functools.partial"),
    ],
)
def test_what_cannot_be_described_to_a_model_is_no_tool(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        function_tool(function)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 8) * 3", "60"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 4", "0.25"),
        ("6 / 3", "2"),
        ("2 ** 0.5 * 2 ** 0.5 > 1", None),
        ("2 ** 99999999", None),
        ("10.0 ** 400", None),
        ("(-8) ** 0.5", None),
        ("9 * " * 2000 + "9", None),
        ("(" * 400 + "1" + ")" * 400, None),
        ("__import__('os')", None),
        ("True + 1", None),
        ("", None),
        ("7 % 0", None),
        ("2 ** 4000 * 2 ** 4000", None),
    ],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(expression: str, value: str | None) -> None:
    if value is not None:
        assert calculate(expression) == value
        return
    with pytest.raises(BadToolInput):
        calculate(expression)


def test_search_ranks_rare_words_first_and_repeats_below_new_words() -> None:
    texts = ["a cat and a dog ran", "the dog", "the the the the", "the cat sat"]
    corpus = Corpus(texts)
    assert corpus.search("Cat, dog!", 1) == ["a cat and a dog ran"]
    assert corpus.search("cat") == ["the cat sat", "a cat and a dog ran"]  # the shorter one first
    assert corpus.search("the dog", 4)[0] == "the dog"
    assert corpus.search("horse") == [] and corpus.search("", 3) == []
    assert answers(("search", '{"query": "cat"}'), tools=[corpus.tool(1)]) == ["the cat sat"]
    assert answers(("search", '{"query": "horse"}'), tools=[corpus.tool()]) == ["nothing was found"]


def test_an_interpreter_runs_code_and_says_how_it_ended() -> None:
    tools = [interpreter(sandbox=Sandbox(seconds=scaled(10))), interpreter("bash", Sandbox(seconds=scaled(10)))]
    found = answers(
        ("python", '{"code": "print(6 * 7)"}'),
        ("bash", '{"code": "exit 2"}'),
        ("python", '{"code": ""}'),
        tools=tools,
    )
    assert found == ["42\n", "\n[exit code 2]", "[it printed nothing]"]


SERVER = """
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
server = MCPServer("shop")

@server.tool()
def price(item: str, count: int = 1) -> str:
    "Return the price of an item."
    if item == "poison": raise ToolError("not for sale")
    if item == "gun": import os; os._exit(1)
    return f"{count} {item}: {3 * count} euros"

"""
OVER_HTTP = """
import uvicorn
web = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), port=0, log_level="error"))
started = web.startup
async def startup(sockets=None):
    await started(sockets)
    print(web.servers[0].sockets[0].getsockname()[1], flush=True)
web.startup = startup
web.run()
"""


@asynccontextmanager
async def shop(folder: Path, over_http: bool) -> AsyncIterator[list[Tool]]:
    """Run the server, and yield its tools."""
    file = folder / "server.py"
    file.write_text(SERVER + (OVER_HTTP if over_http else 'server.run("stdio")'))
    command = [sys.executable, str(file)]
    if not over_http:
        async with mcp_tools(command) as tools:
            yield tools
        return
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), scaled(60)))
        async with mcp_tools(f"http://127.0.0.1:{port}/mcp") as tools:
            yield tools
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("over_http", [False, True])
def test_the_tools_of_an_mcp_server_are_offered_its_errors_are_told_to_the_model_and_its_death_ends_the_agent(
    over_http: bool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with shop(tmp_path, over_http) as tools:
            assert [(tool.name, tool.description) for tool in tools] == [("price", "Return the price of an item.")]
            assert set(tools[0].parameters["properties"]) == {"item", "count"}
            calls = message(("price", '{"item": "tea", "count": 2}'), ("price", '{"item": "poison"}'), ("price", "{}"))
            bought, refused, wrong = [one["content"] for one in await answer_calls(client(), tools, calls)]
            assert bought == "2 tea: 6 euros"
            assert refused.startswith("error: ") and "not for sale" in refused
            assert wrong.startswith("error: ") and "item" in wrong
            await answer_calls(client(), tools, message(("price", '{"item": "gun"}')))

    with pytest.raises(ToolFailed, match=r"tool '(price|MCP server .*/mcp)'"):
        asyncio.run(scenario())


def test_a_call_that_an_mcp_server_refuses_is_told_to_the_model_and_a_broken_connection_is_not() -> None:
    server = Path(__file__).parents[1] / "environments/strict_mcp_server.py"

    async def scenario(*arguments: str) -> list[str]:
        async with mcp_tools([sys.executable, str(server)]) as tools:
            calls = message(*(("add", one) for one in arguments))
            return [one["content"] for one in await answer_calls(client(), tools, calls)]

    assert asyncio.run(scenario('{"a": 1}', '{"b": 1}')) == ["2", "error: a: Required"]
    for code in (-32000, -32001):  # closed, took too long
        with pytest.raises(ToolFailed, match="tool 'add': MCPError"):
            asyncio.run(scenario(f'{{"code": {code}}}'))


@pytest.mark.parametrize("over_http", [False, True])
def test_an_agent_whose_mcp_server_is_not_there_ends_with_its_tools_failure(over_http: bool) -> None:
    async def absent() -> None:
        async with mcp_tools("http://127.0.0.1:1/mcp" if over_http else [sys.executable, "-c", "pass"]):
            raise AssertionError

    with pytest.raises(ToolFailed, match="tool 'MCP server .*1/mcp'" if over_http else "tool 'MCP server .* -c pass'"):
        asyncio.run(absent())


def test_without_the_package_an_mcp_server_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)

    async def scenario() -> None:
        async with mcp_tools(["true"]):
            pass

    with pytest.raises(UserError, match=r"an MCP server needs the package mcp.*streamrl\[tasks\]"):
        asyncio.run(scenario())


def test_the_package_of_mcp_is_imported_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    imported, goes_on = threading.Event(), threading.Event()

    def slow(module: str, what_for: str) -> Any:
        imported.set()
        assert goes_on.wait(scaled(30)), "the event loop stands still"
        raise UserError("no package")

    monkeypatch.setattr("streamrl.agents.mcp_tools.import_extra", slow)

    async def scenario() -> None:
        async def connect() -> None:
            async with mcp_tools(["true"]):
                pass

        connecting = asyncio.create_task(connect())
        await until(imported.is_set)
        goes_on.set()
        with pytest.raises(UserError, match="no package"):
            await connecting

    asyncio.run(scenario())
