"""Connections with MCP servers, over pipes and over HTTP, for agents and for environments."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import shutil
import sys
from typing import Any

MARK = "STREAMRL_ENVIRONMENT_PROCESS"
"""Variable with a random value, by which the owner of this process finds all that it has started."""
BROKEN = {-32000, -32001, 408, -32600, 32600, -32700}
"""Codes of errors of the connection: it is closed, it took too long, the session is over, the answer is no JSON.
A server's own errors, such as -32602 for wrong arguments, have others."""
MOST_PAGES = 100
"""Most pages of tools that a server is asked for; one that repeats a cursor is asked no more."""
MOST_WORDS = 200
"""Most bytes of what a server has printed last that an error tells."""
NO_ANSWER = "Server returned an error response"
"""What mcp says in the code of an internal error if HTTP fails; the status follows."""
CONNECT_S = 30.0


class UnreadAnswers:
    """Notices answers of a server that name no call: with half a surrogate pair, no JSON-RPC, no id or a wrong one.

    The clients of mcp leave them out, so that their calls would never end. It is not known whose answer it was, so all
    calls that wait for one fail. Other lines that cannot be read are no answers: servers print things.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._asked: set[str] = set()
        """Ids of all requests, also of those that have their answer: late and double ones are left out."""

    async def __call__(self, message: Any) -> None:
        """Take what a session of mcp passes to its `message_handler`: an exception, or a message of the server."""
        details = message.errors() if isinstance(message, ValueError) and hasattr(message, "errors") else []
        if told := next(filter(None, map(_unread, details)), ""):
            self._fail(told)

    def note(self, sent: Any) -> None:
        """Take what a session of mcp sends to a server, a `SessionMessage` of mcp 1 or 2."""
        if hasattr(message := _message(sent), "method"):
            self._asked.add(str(getattr(message, "id", None)))

    def look(self, found: Any) -> None:
        """Take what comes from a server before a session of mcp does, which leaves out answers that name no request.

        Args:
            found: a `SessionMessage` of mcp 1 or 2, or an exception.
        """
        error = _error(found)
        if error is not None and error.id is None:
            self._fail(f"the MCP server reports an error, and not of which call: {error.error.message:.200}")
            return
        answer = error or _message(found)
        if (error is not None or hasattr(answer, "result")) and str(answer.id) not in self._asked:
            self._fail(f"an answer of the MCP server is of no call, as none has the id {answer.id!r:.100}")

    def _fail(self, told: str) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_exception(ConnectionError(told))

    async def unless(self, work: Any) -> Any:
        """Wait for calls of the server, and return what they give.

        Raises:
            ConnectionError: an answer came meanwhile that cannot be read, or is an error that names no call.
        """
        broken = asyncio.get_running_loop().create_future()
        self._waiting.add(broken)
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, broken], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else broken.result()
        finally:
            self._waiting.discard(broken)
            working.cancel()
            if broken.done():
                broken.exception()  # the work was done first: nobody else asks
            broken.cancel()


def _unread(detail: dict[str, Any]) -> str:
    """Return what to say of a line that was to be an answer; '': it was none.

    Args:
        detail: one of pydantic's errors about the line: it has the line if that is no JSON, else parts of it.
    """
    found = detail.get("input")
    if isinstance(found, str):
        if not (detail.get("type") == "json_invalid" and found.lstrip().startswith("{") and '"id"' in found):
            return ""
        return f"an answer of the MCP server cannot be read: {detail.get('msg')}: {found!r:.200}"
    batch = found if isinstance(found, list) and not detail.get("loc", ())[1:] else [found]
    if any(map(_is_answer, batch)):
        return f"an answer of the MCP server cannot be read: it is no JSON-RPC 2.0: {found!r:.200}"
    return ""


def _message(found: Any) -> Any:
    """Return the JSON-RPC message in a `SessionMessage` of mcp 1 or 2; None: it is something else."""
    message = getattr(found, "message", None)
    return getattr(message, "root", message)  # mcp 1


def _error(found: Any) -> Any:
    """Return the JSON-RPC error in what comes from a server, a `SessionMessage` of mcp 1 or 2; None if it is none."""
    message = _message(found)
    return message if hasattr(message, "error") else None


def _is_answer(found: Any) -> bool:
    """Return whether a JSON value is meant to answer a request: others are logs, or messages that mcp does not know."""
    if not isinstance(found, dict) or "method" in found:
        return False
    return "jsonrpc" in found or ("id" in found and ("result" in found or "error" in found))


@contextlib.asynccontextmanager
async def watched(connection: Any, look: Any, note: Any = None) -> Any:
    """Open a connection, and yield its streams; what comes from the server, or goes there, is shown first.

    Args:
        connection: a context manager that yields what reads from a server, and what writes to it.
        look: function that is called with each `SessionMessage`, or exception, that comes.
        note: function that is called with each `SessionMessage` that is sent; None: nothing is.
    """
    async with connection as streams:
        yield _Watched(streams[0], look), streams[1] if note is None else _Watched(streams[1], note)


class _Watched:
    """A stream of mcp, of either direction, that shows what comes or is sent before it passes it on."""

    def __init__(self, stream: Any, look: Any) -> None:
        self._stream, self._look = stream, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        found = await self._stream.__anext__()
        self._look(found)
        return found

    async def send(self, sent: Any) -> None:
        """Send something."""
        self._look(sent)
        await self._stream.send(sent)

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)


async def listed(page: Any) -> list[Any]:
    """Return all tools of a server, the last of each name: models call them by name.

    Args:
        page: function that asks for a page of them, by its cursor; None: the first.
    """
    found: dict[str, Any] = {}
    cursor: str | None = None
    seen: set[str | None] = set()
    while cursor not in seen and len(seen) < MOST_PAGES:
        seen.add(cursor)
        told = await page(cursor)
        found |= {one.name: one for one in told.tools}
        cursor = either(told, "next_cursor", "nextCursor") or None
    return list(found.values())


class _LastWords(asyncio.Protocol):
    """Passes what a program prints on to this process's standard error, and keeps the end of it."""

    def __init__(self) -> None:
        self._end = b""

    def data_received(self, data: bytes) -> None:
        self._end = (self._end + data)[-MOST_WORDS:]
        with contextlib.suppress(OSError):
            os.write(2, data)

    def __str__(self) -> str:
        return " ".join(self._end.decode(errors="replace").split())


@contextlib.asynccontextmanager
async def speaking(command: str, arguments: list[str], variables: dict[str, str] | None = None) -> Any:
    """Start a server that speaks over pipes, and yield the streams to it; an error of the block has its last words.

    Bytes that are not UTF-8, also in what the server prints beside its answers, are read as U+FFFD.

    Raises:
        ConnectionError: the block failed, which ends the server, or it could not be started.
    """
    stdio = importlib.import_module("mcp.client.stdio")
    parameters = stdio.StdioServerParameters(
        command=command, args=arguments, env=variables, encoding_error_handler="replace"
    )
    words = _LastWords()
    reads, writes = os.pipe()
    with open(writes, "w", encoding="utf-8") as errors, open(reads, "rb", 0) as ours:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: words, ours)
        try:
            async with stdio.stdio_client(parameters, errlog=errors) as streams:
                yield streams
        except Exception as error:
            _rest(reads, words)
            raise ConnectionError(f"{innermost(error)}; its last words: {str(words) or 'none'}") from error
        finally:
            _rest(reads, words)
            pipe.close()


def _rest(reads: int, words: _LastWords) -> None:
    """Read what is left in a pipe, without waiting for more."""
    with contextlib.suppress(OSError):
        while data := os.read(reads, 65_536):
            words.data_received(data)


def over_pipes(name: str, config: dict[str, Any]) -> Any:
    """Return what starts a program and connects to it.

    Raises:
        ValueError: there is no such program.
    """
    own = os.path.dirname(sys.executable)
    if (program := shutil.which(name, path=own + os.pathsep + os.environ.get("PATH", ""))) is None:
        raise ValueError(f"there is no program {name!r}, neither in {own} nor in PATH")
    arguments = [str(one) for one in config.get("arguments") or []]
    variables = {name: os.environ[name] for name in (MARK,) if name in os.environ}
    variables |= {str(key): str(value) for key, value in (config.get("variables") or {}).items()}
    return lambda: speaking(program, arguments, variables or None)


def over_http(url: str, config: dict[str, Any]) -> Any:
    """Return what connects to a URL.

    How long an answer may take is for the caller to say; only a connection has its own limit.
    """
    module, headers = importlib.import_module("mcp.client.streamable_http"), config.get("headers")
    if not hasattr(module, "streamable_http_client"):  # mcp before 1.24
        return lambda: module.streamablehttp_client(url, headers=headers)
    httpx = importlib.import_module("httpx2" if hasattr(module, "httpx2") else "httpx")

    # mcp 2 limits events to 1 MiB, and answers in JSON not at all: neither is limited here
    limited = "max_sse_event_size" in inspect.signature(module.streamable_http_client).parameters
    unlimited = {"max_sse_event_size": None} if limited else {}

    @contextlib.asynccontextmanager
    async def connected() -> Any:
        refused = _Refused()
        hooks = {"response": [refused.note]}
        limits = httpx.Timeout(None, connect=CONNECT_S)
        client = httpx.AsyncClient(headers=headers, timeout=limits, event_hooks=hooks)
        speaking_http = module.streamable_http_client(url, http_client=client, **unlimited)
        async with client, watched(speaking_http, refused.tell) as streams:
            yield streams

    return connected


class _Refused:
    """Adds to an error that mcp makes of a failed HTTP request the status of that request."""

    def __init__(self) -> None:
        self._status: dict[Any, str] = {}
        """Statuses by the id of the JSON-RPC request."""

    async def note(self, response: Any) -> None:
        """Keep the status of a request that fails, as a hook of an HTTP client."""
        if response.status_code >= 400 and response.request.method == "POST":
            request = json.loads(response.request.content)
            self._status[request.get("id")] = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()

    def tell(self, found: Any) -> None:
        """Add the status to what comes from a connection."""
        error = _error(found)
        status = self._status.pop(error.id, None) if error is not None else None
        if status and error.error.message == NO_ANSWER:
            error.error.message = f"{NO_ANSWER}: {status}"


def of_the_call(error: Any) -> str:
    """Return what a server says of a call that it refuses with an error in place of a result.

    Args:
        error: `MCPError` of mcp 2, `McpError` of mcp 1.

    Raises:
        Exception: that error, if it is one of the connection.
    """
    told = error.error
    if told.code in BROKEN or told.message.startswith(NO_ANSWER):
        raise error
    return str(told.message or "the server refuses the call")


def either(found: Any, *names: str) -> Any:
    """Return the first attribute that there is: mcp 2 names them otherwise than mcp 1."""
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def innermost(error: BaseException) -> str:
    """Return what a group of exceptions is about."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}".removesuffix(": ")
