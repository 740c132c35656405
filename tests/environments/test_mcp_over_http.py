"""What an MCP server over HTTP may answer that is not its SDK's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from streamrl.agents.client import ToolFailed
from streamrl.agents.mcp_tools import mcp_tools
from tests.waiting import scaled, until

TOOL = {"name": "get", "inputSchema": {"type": "object", "properties": {"status": {"type": "integer"}}}}
LARGE = 2 * 2**20


async def server(scope: Any, receive: Any, send: Any) -> None:
    """Answer a call as its arguments say: with a status, without an id, or `LARGE` bytes as an event.

    A path that is a number is the status of all answers; with /again there is always another page of tools.
    """
    body, more = b"", True
    while more:
        part = await receive()
        body, more = body + part.get("body", b""), part.get("more_body", False)

    async def answer(status: int, found: Any = None, kind: str = "application/json") -> None:
        text = b"" if found is None else json.dumps({"jsonrpc": "2.0", **found}).encode()
        if kind == "text/event-stream":
            text = b"event: message\ndata: " + text + b"\n\n"
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    if scope["path"][1:].isdecimal():
        return await answer(int(scope["path"][1:]))
    if scope["method"] != "POST":
        return await answer(405)
    asked = json.loads(body)
    if "id" not in asked:
        return await answer(202)
    one, given = {"id": asked["id"]}, (asked.get("params") or {}).get("arguments") or {}
    match asked["method"]:
        case "initialize":
            told = {"capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
            version = asked["params"]["protocolVersion"]
            await answer(200, {**one, "result": {"protocolVersion": version, **told}})
        case "tools/list":
            more = {"nextCursor": "again"} if scope["path"] == "/again" else {}
            await answer(200, {**one, "result": {"tools": [TOOL, TOOL], **more}})
        case "tools/call" if "status" in given:
            await answer(given["status"])
        case "tools/call" if "no_id" in given:
            await answer(200, {"id": None, "error": {"code": -32603, "message": "boom"}})
        case "tools/call":
            text = {"content": [{"type": "text", "text": "x" * LARGE}]}
            await answer(200, {**one, "result": text}, "text/event-stream")
        case _:
            await answer(200, {**one, "error": {"code": -32601, "message": "Method not found"}})


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    web = uvicorn.Server(uvicorn.Config(server, port=0, log_level="error", lifespan="off"))
    running = asyncio.ensure_future(web.serve())
    try:
        await until(lambda: web.started)
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
    finally:
        web.should_exit = True
        await running


def asked(**arguments: Any) -> str:
    async def scenario() -> str:
        async with serving() as url, mcp_tools(f"{url}/mcp") as tools:
            return str(await tools[0].call(**arguments))

    return asyncio.run(asyncio.wait_for(scenario(), scaled(30)))


@pytest.mark.parametrize(
    ("status", "told"),
    [(401, "401 Unauthorized"), (429, "429 Too Many Requests"), (500, "500 Internal Server Error"), (599, "599")],
)
def test_the_status_of_a_request_that_fails_is_told(status: int, told: str) -> None:
    with pytest.raises(Exception, match=rf"^Server returned an error response: HTTP {told}$"):
        asked(status=status)

    async def refused() -> None:
        async with serving() as url, mcp_tools(f"{url}/{status}"):
            raise AssertionError

    with pytest.raises(ToolFailed, match=rf"MCP server .*/{status}.*: HTTP {told}$"):
        asyncio.run(refused())


@pytest.mark.parametrize("path", ["mcp", "again"])
def test_a_tool_that_is_listed_twice_is_offered_once(path: str) -> None:
    async def scenario() -> None:
        async with serving() as url, mcp_tools(f"{url}/{path}") as tools:
            assert [tool.name for tool in tools] == ["get"]

    asyncio.run(scenario())


def test_an_error_that_names_no_call_fails_it() -> None:
    with pytest.raises(ConnectionError, match="reports an error, and not of which call: boom"):
        asked(no_id=True)


def test_an_answer_may_be_a_large_event() -> None:
    assert len(asked()) == LARGE
