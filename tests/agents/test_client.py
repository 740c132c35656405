"""An agent's client: which exceptions end an episode by rule, what has a limit, and in which event loop it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from email.message import Message
from types import SimpleNamespace
from urllib.error import HTTPError

import httpx2
import pytest

from streamrl.agents.client import AgentClient, EpisodeOver, is_bad_request, is_over
from streamrl.agents.episode import EpisodeOrder
from streamrl.agents.live_episode import LiveEpisode
from streamrl.config.tasks import EpisodeDeadlines
from streamrl.rollouts.void import Void, VoidCause

ENDPOINT = "http://127.0.0.1:7000/sessions/key/v1"
LIBRARIES = ["httpx2", "urllib", "requests", "aiohttp"]


class Refused(Exception):
    """What a client library raises for the endpoint's refusal."""

    def __init__(self, code: object, url: str = f"{ENDPOINT}/chat/completions") -> None:
        super().__init__("refused")
        self.code, self.request = code, httpx2.Request("POST", url)


def ends(error: BaseException) -> bool:
    return is_over(error, ENDPOINT)


def http_error(library: str, status: int, url: str) -> Exception:
    """Return what an HTTP library raises for an answer that is an error."""
    match library:
        case "httpx2":
            request = httpx2.Request("POST", url)
            return httpx2.HTTPStatusError("", request=request, response=httpx2.Response(status, request=request))
        case "urllib":
            return HTTPError(url, status, "", Message(), None)
        case "requests":
            requests = pytest.importorskip("requests")
            response = requests.Response()
            response.status_code, response.url = status, url
            return requests.HTTPError("", response=response)  # type: ignore[no-any-return]
        case _:
            about = SimpleNamespace(url=url, real_url=url)
            return pytest.importorskip("aiohttp").ClientResponseError(about, (), status=status)  # type: ignore[no-any-return]


class Wrapped(Exception):
    """What litellm raises in its place."""

    __module__ = "litellm.exceptions"


def raised(error: Exception, while_handling: Exception) -> Exception:
    """Return an exception as it is when it is raised where another one is handled."""
    try:
        try:
            raise while_handling
        except Exception:
            raise error  # noqa: B904
    except Exception as found:
        assert found.__context__ is while_handling
        return found


def test_only_what_an_exception_stands_for_ends_an_episode_by_rule() -> None:
    over, full = EpisodeOver("full"), Refused("context_length_exceeded")
    assert ends(over) and ends(full)
    for code in ("invalid_messages", None, 400, ["context_length_exceeded"], {"reason": "quota"}):
        assert not ends(Refused(code))
    for end in (over, full):
        assert not ends(raised(KeyError("grade"), end))
        assert not ends(raised(ConnectionError("no judge"), end))
        named = RuntimeError("the agent gives up")
        named.__cause__ = end
        assert ends(named)


def test_the_model_of_another_server_ends_no_episode_by_rule_whatever_its_code() -> None:
    for code in ("context_length_exceeded", "max_turns_exceeded"):
        judge = Refused(code, "https://judge.example/v1/chat/completions")
        assert not ends(judge) and not ends(raised(Wrapped(), judge))
        del judge.request
        assert not ends(judge), "it does not say whose it is"


def test_a_group_of_exceptions_ends_an_episode_by_rule_if_each_of_them_does() -> None:
    over, full, cancelled = EpisodeOver("full"), Refused("max_turns_exceeded"), asyncio.CancelledError()
    assert ends(BaseExceptionGroup("", [cancelled, ExceptionGroup("", [over]), full]))
    assert not ends(ExceptionGroup("", [over, KeyError("grade")]))
    assert not ends(BaseExceptionGroup("", [cancelled]))
    named = RuntimeError("the agent gives up")
    named.__cause__ = ExceptionGroup("", [over])
    assert ends(named)


def test_a_package_that_names_no_cause_wraps_the_error_of_its_client_but_never_ours() -> None:
    full = Refused("context_length_exceeded")
    assert ends(raised(Wrapped(), raised(Wrapped(), full)))
    assert not ends(raised(Wrapped(), raised(Refused("rate_limited"), full)))  # a judge, called after the end
    assert not ends(raised(Wrapped(), EpisodeOver("full")))
    hidden = raised(Wrapped(), full)
    hidden.__suppress_context__ = True
    assert not ends(hidden)


@pytest.mark.parametrize("status", [400, 401, 500])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_bad_request_is_known_by_its_status(library: str, status: int) -> None:
    error = http_error(library, status, f"{ENDPOINT}/chat/completions")
    named = RuntimeError("the agent gives up")
    named.__cause__ = error
    found = [is_bad_request(one, ENDPOINT) for one in (error, named, Refused("400"))]
    assert found == [status == 400, status == 400, False]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_bad_request_of_another_server_is_none_of_the_endpoint(library: str) -> None:
    for url in ("http://127.0.0.1:7001/v1/chat/completions", "https://judge.example/v1", ""):
        assert not is_bad_request(http_error(library, 400, url), ENDPOINT)
    unknown = httpx2.HTTPStatusError("", request=None, response=httpx2.Response(400))  # type: ignore[arg-type]
    assert not is_bad_request(unknown, ENDPOINT)


class Pool(httpx2.AsyncBaseTransport):
    """Connections that count what is asked of them, and answer with a stream of two parts."""

    def __init__(self) -> None:
        self.used = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.used += 1
        return httpx2.Response(200, stream=Parts(self))


class Parts(httpx2.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(2):
            self.pool.used += 1
            yield b"part"

    async def aclose(self) -> None:
        self.pool.used += 1


def live_client(pool: httpx2.AsyncBaseTransport, **limits: float) -> AgentClient:
    live = LiveEpisode(EpisodeOrder("s", "g", "t", {}, 0, None), EpisodeDeadlines(**limits))
    return AgentClient(live, "http://127.0.0.1:9/v1", "key", pool)


@pytest.mark.parametrize("what", ["chat", "tool", "http", "read", "read on", "close"])
def test_nothing_is_done_in_another_event_loop_than_the_agents(what: str) -> None:
    async def scenario() -> None:
        client = live_client(pool := Pool())
        answer = await client.http.send(client.http.build_request("POST", "x"), stream=True)
        parts = answer.aiter_raw()
        if what == "read on":
            assert await anext(parts) == b"part"
        used, steps = pool.used, len(client._episode.steps)

        async def elsewhere() -> None:
            match what:
                case "chat":
                    await client.chat([])
                case "tool":
                    await client.tool("add", lambda: 3)
                case "http":
                    await client.http.post("x")
                case "read" | "read on":
                    await anext(parts)
                case "close":
                    await answer.aclose()

        with pytest.raises(RuntimeError, match="outside of the agent's event loop: hand the coroutine to that loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        assert (pool.used, len(client._episode.steps), client._episode.void) == (used, steps, None)
        calling = asyncio.run_coroutine_threadsafe(client.tool("add", lambda: 3), asyncio.get_running_loop())
        assert await asyncio.wrap_future(calling) == 3

    asyncio.run(scenario())


def test_an_agent_waits_for_an_answer_only_while_it_asks_for_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    async def scenario() -> None:
        clock = SimpleNamespace(monotonic=lambda: now)
        monkeypatch.setattr("streamrl.agents.client.time", clock)
        now = 0.0

        class Slow(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                nonlocal now
                for _ in range(3):
                    waits.append(episode._waited_for())
                    now += 400
                    for _ in range(9):  # the event loop would call a timer that has expired
                        await asyncio.sleep(0)
                    yield b"part"
                await asyncio.Event().wait()

            async def aclose(self) -> None:
                pass

        client = live_client(httpx2.MockTransport(lambda _: httpx2.Response(200, stream=Slow())), call_s=1000)
        episode = client._episode
        answer = await client.http.send(client.http.build_request("POST", "x"), stream=True)
        parts = answer.aiter_raw()
        for _ in range(3):
            assert episode._waited_for() == "something of its own"
            now += 5000  # the agent works
            assert await anext(parts) == b"part" and episode.void is None
        assert episode._waited_for() == "something of its own"
        asking = asyncio.ensure_future(anext(parts))
        await episode.over.wait()
        asking.cancel()
        assert episode.void == Void(VoidCause.TIMEOUT, "a call of the model took more than 1000 s")

    asyncio.run(scenario())
    assert waits == ["a call of the model"] * 3


def test_turns_have_a_limit_until_the_model_may_be_called_unseen() -> None:
    async def scenario() -> None:
        seen, unseen, other = (live_client(httpx2.AsyncHTTPTransport()) for _ in range(3))
        assert str(seen.openai().base_url) == "http://127.0.0.1:9/v1/" and seen._episode.limits_turns
        assert unseen.base_url == "http://127.0.0.1:9/v1" and not unseen._episode.limits_turns
        other.openai(http_client=httpx2.AsyncClient())
        assert not other._episode.limits_turns

    asyncio.run(scenario())
