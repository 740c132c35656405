"""Tools of MCP servers, which speak the Model Context Protocol over standard input and output, or HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from streamrl.agents.client import BadToolInput
from streamrl.agents.tools import Tool
from streamrl.tasks.extras import import_extra

MOST_PAGES = 100


@contextlib.asynccontextmanager
async def mcp_tools(server: Sequence[str] | str) -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server for as long as the block runs, and yield its tools.

    What a server reports as an error of a call is told to the model; a server that dies or does not answer fails the
    tool.

    Args:
        server: command of a server that is started for this episode, with its arguments; or a server's URL.

    Raises:
        UserError: the package mcp is not installed.
    """
    mcp = import_extra("mcp", "an MCP server")
    where: Any = server
    if not isinstance(server, str):
        command, *arguments = server
        where = mcp.StdioServerParameters(command=command, args=arguments)
    async with mcp.Client(where) as client:
        tools, cursor = [], None
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += [_tool(client, one) for one in page.tools]
            if not (cursor := page.next_cursor):
                break
        yield tools


def _tool(client: Any, one: Any) -> Tool:
    async def call(**arguments: Any) -> str:
        found = await client.call_tool(one.name, arguments)
        parts = [getattr(part, "text", f"[{part.type}]") for part in found.content]
        text = "\n".join(parts)
        if found.is_error:
            raise BadToolInput(text or "the server reports an error")
        return text

    return Tool(one.name, one.description or "", one.input_schema, call)
