"""A small endpoint for tests of agents: it answers chat completions as the last message says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ModelServer:
    """Answers 'echo X' with X, 'wait' never, 'together N' once N calls wait, and 'refuse STATUS CODE' with an error."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        """Bodies, with the header fields `key` and `idempotency`."""
        self.url = ""
        self._together = 0
        self._all = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ModelServer]:
        """Serve on a free port of this machine."""
        app = Starlette(routes=[Route("/{path:path}/chat/completions", self._answer, methods=["POST"])])
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/sessions/abc/v1"
            server = _Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                yield self
            finally:
                server.should_exit = True
                server.force_exit = True
                await serving

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        headers = request.headers
        self.calls.append({**body, "key": headers.get("authorization"), "idempotency": headers.get("idempotency-key")})
        words = body["messages"][-1]["content"].split(" ", 1)
        match words:
            case ["wait", *_]:
                await asyncio.Event().wait()
            case ["together", count]:
                self._together += 1
                if self._together == int(count):
                    self._all.set()
                await self._all.wait()
            case ["refuse", what]:
                status, code = what.split()
                return JSONResponse({"error": {"message": f"no: {code}", "code": code}}, int(status))
        message = {"role": "assistant", "content": words[-1], "tool_calls": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(
            {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )
