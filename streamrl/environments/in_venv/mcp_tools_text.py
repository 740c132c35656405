"""Environments with the tools of an MCP server: the model answers an item's prompt, and may call the tools before.

`make` is 'mcp:PROGRAM', a program of the venv or of PATH that speaks MCP over standard input and output and is started
for each episode, or 'mcp:http://...', a server that speaks MCP over streamable HTTP, where each episode has a session.
The venv needs the package `mcp`, which servers written in Python bring along.

    the model calls tools                  -> they are called, and their results are its next messages
    it calls a tool wrongly, or the tool
    reports an error                       -> an answer that says so: the model wrote the call
    the server ends, or cannot be reached  -> the episode fails
    it answers without a call              -> the episode is over, and scored

Keys of the config:
    arguments       arguments of the program
    variables       environment variables of the program, beside the few that MCP's clients pass on (HOME, PATH, ...)
    headers         headers of each request to a URL
    tools           names of the tools that are offered; all by default
    instructions    a system message
    reward          'module:function', f(item, messages) -> a number, of a module on --path or in the venv; by default 1
                    if the last answer has the item's `answer`, else 0: a number (72, "72", "1,080") as a number of the
                    same value, anything else as a word of its own
"""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import importlib
import json
import math
import re
import threading
from typing import Any

from .mcp_connection import UnreadAnswers, either, innermost, listed, of_the_call, over_http, over_pipes, watched

KEYS = {"arguments", "variables", "headers", "tools", "instructions", "reward"}
MOST_TEXT = 16_384
"""Most characters of a tool's result; the rest is cut, and said to be."""
DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][-+]?\d{1,3})?"
NUMBER = re.compile(rf"(?<!\w)(?<!\d\.)[-+\u2212]?{DIGITS}(?!\w|\.\d)")
"""A whole number in a text; not 5 in x5, 5th, 3.5, -5, 1.2.5 or 1,500. In 10-5 there are 10 and 5."""
WRITTEN = re.compile(r"-?(?:[1-9]\d{0,2}(?:,\d{3})+|0|[1-9]\d*)(?:\.\d+)?")
"""An answer that is a number although it is a text; 007 is none."""


def make(name: str, config: dict[str, Any]) -> McpEnvironment:
    """Check the config, and look at the server once."""
    if unknown := set(config) - KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}; known are {', '.join(sorted(KEYS))}")
    return McpEnvironment(name, config)


class McpEnvironment:
    """Plays any number of episodes at once, in an event loop of its own."""

    plays = False
    answers_later = frozenset({"reset", "step", "sample", "close"})

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        try:
            importlib.import_module("mcp")
        except ImportError as error:
            raise ImportError(f"{error}: add the package mcp to this environment") from None
        self._connect = over_http(name, config) if "://" in name else over_pipes(name, config)
        self._instructions = str(config.get("instructions") or "")
        self._offered = config.get("tools")
        self._reward = _reward_function(config.get("reward"))
        self._open: dict[str, _Episode] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._try(), self._loop).result()

    async def _try(self) -> None:
        """Connect once: a server that does not start, or has no such tool, is told of before any episode."""
        trial = _Episode(self._connect, self._offered)
        try:
            await trial.begin()
        finally:
            await trial.end()

    def reset(self, request: dict[str, Any], settle: Any) -> None:
        """Begin an episode with a server or a session of its own."""
        self._later(self._reset(request["episode"], request["item"]), settle)

    def step(self, request: dict[str, Any], settle: Any) -> None:
        """Call the tools that a message asks for; without any, score it."""
        self._later(self._step(request["episode"], request["message"]), settle)

    def sample(self, request: dict[str, Any], settle: Any) -> None:
        """Return an answer for a trial, which calls no tool."""
        tools = self._open[request["episode"]].tools if request["episode"] in self._open else {}
        settle({"text": f"{len(tools)} tools: {', '.join(tools)}"}, None)

    def close(self, request: dict[str, Any], settle: Any) -> None:
        """End an episode's server or session."""

        async def closing() -> dict[str, Any]:
            if (one := self._open.pop(request["episode"], None)) is not None:
                await one.end()
            return {}

        self._later(closing(), settle)

    def _later(self, work: Any, settle: Any) -> None:
        def done(future: Any) -> None:
            error = future.exception()
            settle(None if error else future.result(), error)

        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(done)

    async def _reset(self, episode: str, item: dict[str, Any]) -> dict[str, Any]:
        if self._reward is None and not isinstance(item.get("answer"), (str, int, float)):
            raise ValueError("the item has no `answer`, and the config no `reward`: nothing could be scored")
        if (before := self._open.pop(episode, None)) is not None:
            await before.end()
        one = self._open[episode] = _Episode(self._connect, self._offered)
        await one.begin()
        one.item = item
        one.messages = [{"role": "system", "content": self._instructions}] if self._instructions else []
        one.messages.append({"role": "user", "content": str(item["prompt"])})
        return {"messages": list(one.messages), "tools": list(one.tools.values())}

    async def _step(self, episode: str, message: dict[str, Any]) -> dict[str, Any]:
        if (one := self._open.get(episode)) is None:
            raise ValueError(f"episode {episode} has no server here: reset it first")
        one.messages.append(message)
        calls = message.get("tool_calls") or []
        answers, wrong = [], 0
        for call in calls:
            text, failed = await one.call(call["function"]["name"], call["function"].get("arguments") or "{}")
            wrong += failed
            answers.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": text})
        one.messages += answers
        reward = 0.0
        if not calls:
            reward = self._reward(one.item, one.messages) if self._reward else _has(one.item["answer"], message)
        metrics = {"tool_calls": len(calls), "tool_errors": wrong}
        return {"messages": answers, "reward": reward, "done": not calls, "metrics": metrics}


class _Episode:
    """A connection to a server; a task of its own holds it, as what opens a connection has to close it."""

    def __init__(self, connect: Any, offered: Any) -> None:
        self._connect, self._offered = connect, offered
        self.tools: dict[str, dict[str, Any]] = {}
        """Schemas of the tools, as a call of the model takes them, by name."""
        self.item: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self._session: Any = None
        self._unread = UnreadAnswers()
        self._begun = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._holding = asyncio.ensure_future(self._hold())

    async def begin(self) -> None:
        """Wait until the server has told its tools."""
        await asyncio.shield(self._begun)

    async def end(self) -> None:
        """Close the connection, also one that has not begun; a program that was started for it ends."""
        self._over.set()
        await asyncio.wait([self._holding])
        if self._begun.done() and not self._begun.cancelled():
            self._begun.exception()  # somebody has been told, or nobody waits any more

    async def call(self, name: str, arguments: str) -> tuple[str, bool]:
        """Call a tool; return what the model is told, and whether that is an error."""
        if name not in self.tools:
            return f"error: there is no tool {name!r}, only {', '.join(sorted(self.tools)) or 'none'}", True
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(given, dict):
                raise ValueError(f"expected an object, got {type(given).__name__}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are no JSON object: {error}", True
        calling = asyncio.ensure_future(self._unread.unless(self._session.call_tool(name, given)))
        await asyncio.wait([calling, self._holding], return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            calling.cancel()
            raise ConnectionError(f"the MCP server ended during a call of {name!r}")
        mcp = importlib.import_module("mcp")
        try:
            found = calling.result()
        except either(mcp, "MCPError", "McpError") as error:
            return f"error: {of_the_call(error)[:MOST_TEXT]}", True
        text = cut_text(text_of_result(found))
        failed = bool(either(found, "is_error", "isError"))
        return (f"error: {text or 'the server reports an error'}" if failed else text), failed

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(
                    watched(self._connect(), self._unread.look, self._unread.note)
                )
                session = importlib.import_module("mcp").ClientSession(
                    streams[0], streams[1], message_handler=self._unread
                )
                self._session = await stack.enter_async_context(session)
                await self._unless_over(self._unread.unless(self._start()))
                self._begun.set_result(None)
                await self._over.wait()
        except BaseException as error:
            if not self._begun.done():
                self._begun.set_exception(ConnectionError(f"the MCP server cannot be used: {innermost(error)}"))

    async def _start(self) -> None:
        await self._session.initialize()
        self.tools = await self._list()

    async def _unless_over(self, work: Any) -> None:
        """Wait for work, or until the episode is over; only the work is cancelled, not what closes the connection.

        Raises:
            ConnectionError: the episode was over first.
        """
        working, over = asyncio.ensure_future(work), asyncio.ensure_future(self._over.wait())
        await asyncio.wait([working, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not working.done():
            working.cancel()
            raise ConnectionError("it was closed before it had told its tools")
        working.result()

    async def _list(self) -> dict[str, dict[str, Any]]:
        types = importlib.import_module("mcp.types")

        async def page(cursor: str | None) -> Any:
            params = {} if cursor is None else {"params": types.PaginatedRequestParams(cursor=cursor)}
            return await self._session.list_tools(**params)

        found: dict[str, dict[str, Any]] = {}
        for one in await listed(page):
            schema = {"name": one.name, "description": one.description or ""}
            schema["parameters"] = either(one, "input_schema", "inputSchema")
            found[one.name] = {"type": "function", "function": schema}
        if self._offered is None:
            return found
        if missing := set(self._offered) - set(found):
            raise ValueError(f"it has no tool {min(missing)!r}, only {', '.join(sorted(found)) or 'none'}")
        return {name: found[name] for name in self._offered}


def _reward_function(name: Any) -> Any:
    """Return the function that a config names; None: it names none.

    Raises:
        ValueError: it cannot be one.
    """
    if name is None:
        return None
    module, colon, function = str(name).partition(":")
    if not colon:
        raise ValueError(f"reward {name!r}: expected 'module:function'")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise ValueError(f"reward {name!r} cannot be called")
    return found


def _has(answer: Any, message: dict[str, Any]) -> float:
    """Return 1 if a message has the answer, else 0; see `reward` in the config."""
    said, text = str(message.get("content") or ""), str(answer).strip()
    if (type(answer) in (int, float) and math.isfinite(answer)) or WRITTEN.fullmatch(text):
        return float(_value(text) in map(_value, NUMBER.findall(said)))
    wanted = re.escape(text)
    return float(bool(wanted) and re.search(rf"(?<!\w){wanted}(?!\w)", said, re.IGNORECASE) is not None)


def _value(number: str) -> decimal.Decimal:
    """Return the value of a number as it is written."""
    return decimal.Decimal(number.replace(",", "").replace("\u2212", "-"))


def cut_text(text: str) -> str:
    """Return a text without what exceeds `MOST_TEXT` characters, which it says."""
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n[cut: the first {MOST_TEXT:,} of {len(text):,} characters]"


def text_of_result(found: Any) -> str:
    """Return what a tool has returned, as text: texts, also of resources, else what and where a part is.

    Args:
        found: `CallToolResult` of mcp 1 or 2.
    """
    text = "\n".join(map(_text_of_part, found.content))
    structured = either(found, "structured_content", "structuredContent")
    return text if text or structured is None else json.dumps(structured, ensure_ascii=False)


def _text_of_part(part: Any) -> str:
    resource = getattr(part, "resource", part)  # embedded in the part, or it is the part
    if (text := getattr(resource, "text", None)) is not None:
        return str(text)
    about = (either(resource, "name"), either(resource, "mime_type", "mimeType"), either(resource, "uri"))
    return f"[{' '.join([str(part.type), *(str(one) for one in about if one)])}]"
