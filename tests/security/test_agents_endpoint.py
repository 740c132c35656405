"""What the endpoint of agents does to whoever reaches its port without the key of an episode."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from urllib.parse import urlparse

import httpx2
import pytest

from streamrl.agents.agent_host import MOST_STRANGERS, AgentHost
from streamrl.agents.episode import EpisodeOrder
from tests.agents.test_agent_host import ORDER, Model, call, hosting, over_http
from tests.security.another_user import as_nobody
from tests.security.endless_requests import ENDLESS, ENOUGH, taken

UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIz"


def attacked(attack: Callable[[AgentHost, str], None], recorded: int = 0) -> None:
    """Attack the endpoint while an episode runs, whose agent is answered all the same, and is the only one.

    Args:
        attack: what is done; it gets the endpoint and the episode's key.
        recorded: calls of it that have the key, and are refused as the episode's.
    """
    model = Model()

    async def main() -> None:
        async def agent(client: httpx2.AsyncClient) -> None:
            await asyncio.to_thread(attack, host, str(client.headers["authorization"]).removeprefix("Bearer "))
            assert (await call(client)).status_code == 200

        async with hosting(model, over_http(agent)) as host:
            episode = await host.run(ORDER)
        assert episode.reward == 1.0, episode.void
        assert len(model.orders) == 1 and [step.name for step in episode.steps] == [
            *["call refused"] * recorded,
            "turn 0",
        ]

    asyncio.run(asyncio.wait_for(main(), 120))


def connect(host: AgentHost) -> socket.socket:
    where = urlparse(host.address)
    return socket.create_connection((str(where.hostname), where.port or 0), 30)


def answer_to(host: AgentHost, head: str, path: str = "/v1/models", method: str = "GET", body: bytes = b"") -> str:
    """The first line of the answer."""
    with closing(connect(host)) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: here\r\n{head}\r\n\r\n".encode() + body)
        return connection.recv(100).split(b"\r\n")[0].decode()


def test_no_path_and_no_key_but_that_of_a_running_episode_leads_to_a_session() -> None:
    def attack(host: AgentHost, key: str) -> None:
        limits = host._endpoint.sessions[key].session.limits
        over = host._endpoint.open(EpisodeOrder("t.000", "t", "sums", {}, 8, None), limits)
        asyncio.run(host._endpoint.close(over))
        assert answer_to(host, f"Authorization: Bearer {key}") == "HTTP/1.1 200 OK"
        for name in (over.id, key[:-1], key + "x", key.swapcase(), "", "*", "null"):
            assert answer_to(host, f"Authorization: Bearer {name}") == "HTTP/1.1 401 Unauthorized", name
        for path in ("..", "%2e%2e", f"..%2f{key}", f"{key}%00", f"%00{key}", f"x/../{key}", f"{key}/..", "", "."):
            answer = answer_to(host, f"Authorization: Bearer {over.id}", f"/sessions/{path}/v1/models")
            assert answer.split()[1] in ("401", "404"), path
        own_key_and_anothers_path = answer_to(host, f"Authorization: Bearer {key}", f"/sessions/{over.id}/v1/models")
        assert own_key_and_anothers_path == "HTTP/1.1 401 Unauthorized"
        assert answer_to(host, UPGRADE) == "HTTP/1.1 401 Unauthorized"
        assert answer_to(host, f"{UPGRADE}\r\nAuthorization: Bearer {key}") == "HTTP/1.1 200 OK"  # still HTTP

    attacked(attack, recorded=2)  # of the key's own folder beside a path that leads nowhere, and of another session


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_request_that_never_ends_is_not_collected(kind: str) -> None:
    def attack(host: AgentHost, _: str) -> None:
        where = urlparse(host.address)
        assert taken(str(where.hostname), where.port or 0, kind) < ENOUGH

    attacked(attack)


def test_a_body_without_a_key_is_refused_before_it_is_read() -> None:
    def attack(host: AgentHost, _: str) -> None:
        for head in ("Content-Length: 100000000000", "Transfer-Encoding: chunked"):
            assert answer_to(host, head, "/v1/chat/completions", "POST") == "HTTP/1.1 401 Unauthorized"

    attacked(attack)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_another_user_cannot_take_the_agents_places_with_slow_and_idle_connections(family: str) -> None:
    def attack(host: AgentHost, _: str) -> None:
        port = urlparse(host.address).port

        def open_many() -> None:
            place = ("127.0.0.1", port) if family == "IPv4" else ("::ffff:127.0.0.1", port)
            held = [socket.socket(socket.AF_INET if family == "IPv4" else socket.AF_INET6) for _ in range(300)]
            for connection in held:
                connection.settimeout(30)
                connection.connect(place)
                with suppress(ConnectionError):
                    connection.send(b"GET /v1/mod")  # and no more
            for connection in held[MOST_STRANGERS:]:
                with suppress(ConnectionError):
                    assert connection.recv(1) == b""
            held[0].sendall(b"els HTTP/1.1\r\nHost: here\r\n\r\n")
            assert held[0].recv(100).startswith(b"HTTP/1.1 401")

        assert as_nobody(open_many)

    attacked(attack)


def test_as_many_connections_of_the_runs_user_as_it_has_agents_are_held() -> None:
    def attack(host: AgentHost, key: str) -> None:
        held = [connect(host) for _ in range(2 * MOST_STRANGERS)]
        for connection in held:
            connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()

    attacked(attack)
