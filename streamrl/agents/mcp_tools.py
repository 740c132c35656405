"""Tools of MCP servers, which speak the Model Context Protocol over standard input and output, or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import AsyncIterator, Sequence
from types import ModuleType
from typing import Any

from streamrl.agents.client import BadToolInput, ToolFailed
from streamrl.agents.tools import Tool
from streamrl.agents.worker_frames import MARK
from streamrl.environments.in_venv.mcp_connection import (
    UnreadAnswers,
    listed,
    of_the_call,
    over_http,
    speaking,
    watched,
)
from streamrl.environments.in_venv.mcp_tools_text import text_of_result
from streamrl.errors import cause
from streamrl.tasks.extras import import_extra


@contextlib.asynccontextmanager
async def mcp_tools(server: Sequence[str] | str) -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server for as long as the block runs, and yield its tools.

    What a server reports as an error of a call, or refuses it with, is told to the model; a server that dies, does
    not answer, or answers what cannot be read fails the tool.

    Args:
        server: command of a server that is started for this episode, with its arguments; or a server's URL.

    Raises:
        UserError: the package mcp is not installed.
        ToolFailed: the server cannot be reached, or does not say which tools it has.
    """
    mcp = await asyncio.to_thread(_import_mcp)  # it takes seconds, in which the worker's other episodes go on
    if isinstance(server, str):
        connection = over_http(server, {})()
    else:
        command, *arguments = server
        variables = {MARK: os.environ[MARK]} if MARK in os.environ else None
        connection = speaking(command, arguments, variables)
    raised: BaseException | None = None
    tools: list[Tool] | None = None
    try:
        unread = UnreadAnswers()
        async with mcp.Client(watched(connection, unread.look, unread.note), message_handler=unread) as client:
            tools = await unread.unless(_tools(mcp, client, unread))
            try:
                yield tools
            except BaseException as error:
                raised = error
                raise
    except Exception as error:  # a connection over HTTP that ends cancels the block, and says here why
        if raised is not None and not isinstance(raised, asyncio.CancelledError):
            raise raised from None
        if raised is not None or tools is None:
            name = server if isinstance(server, str) else " ".join(server)
            raise ToolFailed(f"MCP server {name}", cause(error)) from error


def _import_mcp() -> ModuleType:
    """Import mcp with all that connections need of it.

    Raises:
        UserError: it is not installed.
    """
    mcp = import_extra("mcp", "an MCP server")
    for part in ("stdio", "streamable_http"):
        importlib.import_module(f"mcp.client.{part}")
    return mcp


async def _tools(mcp: Any, client: Any, unread: UnreadAnswers) -> list[Tool]:
    found = await listed(lambda cursor: client.list_tools(cursor=cursor))
    return [_tool(mcp, client, unread, one) for one in found]


def _tool(mcp: Any, client: Any, unread: UnreadAnswers, one: Any) -> Tool:
    async def call(**arguments: Any) -> str:
        try:
            found = await unread.unless(client.call_tool(one.name, arguments))
        except mcp.MCPError as error:
            raise BadToolInput(of_the_call(error)) from error
        text = text_of_result(found)
        if found.is_error:
            raise BadToolInput(text or "the server reports an error")
        return text

    return Tool(one.name, one.description or "", one.input_schema, call)
