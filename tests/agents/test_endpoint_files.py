"""The agents' endpoint where its process may open no further file: connections wait, and the log says so."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import sys
from asyncio import constants
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamrl.agents.agent_host import AgentHost
from tests.agents.test_agent_host import Model, hosting, never, until


@contextmanager
def no_further_files() -> Iterator[None]:
    """Let this process open no file more than it has open."""
    gc.collect()  # what earlier tests have left would close its files meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    holes = [os.dup(0)]
    while holes[-1] <= highest:
        holes.append(os.dup(0))
    os.close(holes.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in holes:
            os.close(one)


@pytest.mark.skipif(sys.platform != "linux", reason="lists open files in /proc")
@pytest.mark.parametrize("retried", [False, True])
def test_connections_for_which_there_are_no_files_wait_and_are_told_once(
    retried: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs a traceback for each try, and tries again after a while."""
    monkeypatch.setattr(constants, "ACCEPT_RETRY_DELAY", 0.001 if retried else 3600.0)
    tries: list[object] = []
    failed = AgentHost._failed

    def counted(host: AgentHost, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        tries.append(context)
        failed(host, loop, context)

    monkeypatch.setattr(AgentHost, "_failed", counted)

    async def play() -> None:
        async with hosting(Model(), never) as host:
            port = int(host.address.rpartition(":")[2])
            clients = [socket.socket() for _ in range(20)]
            connections = host._server.server_state.connections
            with no_further_files():
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", port))
                await until(lambda: len(tries) >= (5 if retried else 1))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert retried or len(tries) == 1
            if retried:
                await until(lambda: len(connections) == len(clients))
            for client in clients:
                client.close()

    asyncio.run(play())
    (told,) = caplog.messages
    assert told.startswith(
        "the endpoint of agents has 0 connections and cannot open more files (Too many open files): "
    )


def test_other_errors_of_the_endpoint_are_logged_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with hosting(Model(), never):
            asyncio.get_running_loop().call_exception_handler({"message": "broken", "exception": OSError("of a pipe")})

    asyncio.run(play())
    assert caplog.messages == ["broken"]
