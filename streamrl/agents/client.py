"""The client of an agent: calls the model at the endpoint, and tools, each with a deadline and a record."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pydantic_core

from streamrl.agents.episode import POLICY
from streamrl.agents.live_episode import LiveEpisode
from streamrl.environments.in_venv.mcp_tools_text import cut_text
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.processes import end_copy
from streamrl.tasks.user_functions import is_async
from streamrl.tasks.void_reward import NETWORK_PACKAGES, VoidReward, failures_of, one_line

MOST_WRAPPED = 8
"""Most exceptions that stand for each other among which the endpoint's is looked for."""
ATTEMPTS = 3
"""Most tries of a call whose connection fails; the endpoint answers a repeated call with the recorded turn."""
PAUSE_S = 0.2
OVER = frozenset({"context_length_exceeded", "max_turns_exceeded"})
"""Codes of the endpoint's refusals that end an episode by rule: what the policy did used up context or turns."""
WITHOUT_CAUSE = frozenset({"litellm"})
"""Packages that raise exceptions in place of a client's, without its code and without naming it as their cause."""

CALLED, READ = "the agent calls the model", "the agent reads an answer of the model"
"""What an agent may not do outside of its event loop, in words."""


class EpisodeOver(Exception):
    """The endpoint takes no further call of this episode: the context is full, or `max_turns` are used up.

    An agent that does not catch it ends with reward 0, as an unfinished answer does.
    """


class CallRefused(Exception):
    """The endpoint refused a call: the agent has sent something wrong."""


class BadToolInput(Exception):
    """Raise it in a tool that cannot use what the model has given: `tools.answer` tells the model the text."""


class ToolFailed(VoidReward):
    """A tool raised; an agent that does not catch it ends without a reward, with cause `tool`."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(VoidCause.TOOL, f"tool {name!r}: {one_line(error)}")


class AgentClient:
    """What an agent gets beside its task. Every method is for the event loop that the agent runs in."""

    def __init__(self, episode: LiveEpisode, base_url: str, api_key: str, pool: httpx2.AsyncBaseTransport) -> None:
        """
        Args:
            episode: the episode that the calls belong to.
            base_url: the endpoint, as an OpenAI client takes it.
            api_key: its key, which names the session as well.
            pool: the connections that all episodes of a worker share.
        """
        self._base_url, self.api_key, self.model = base_url, api_key, POLICY
        self.finish_reason = ""
        """Why the latest answer of `chat` ended: 'stop', 'tool_calls' or 'length'; '': there was none."""
        self._episode = episode
        self.http = httpx2.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}"},
            transport=_Watched(pool, episode),
            timeout=None,  # the episode's own deadlines
            trust_env=False,
        )
        """HTTP client for other paths of the endpoint; its calls have the same deadlines."""

    @property
    def base_url(self) -> str:
        """The endpoint, as an OpenAI client takes it.

        Whoever takes it may call the model with a library that is not seen here, so that turns have no limit
        (`deadlines.turn_s`) from then on; `episode_s` is the limit.
        """
        self._episode.limits_turns = False
        return self._base_url

    async def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Call the model, and return its message to append to `messages` as it is.

        Args:
            messages: the conversation, as OpenAI's chat completions take it.
            tools: schemas of the tools that the model may call.
            options: further keys of the request; sampling is the run's.

        Raises:
            EpisodeOver: the context is full, or all turns are used.
            CallRefused: the request is wrong.
            RuntimeError: another event loop than the agent's runs here.
            VoidReward: the endpoint cannot be reached, or failed.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), **options}
        if body.get("stream"):
            raise ValueError("chat() returns whole messages; stream with openai()")
        if tools:
            body["tools"] = list(tools)
        choice = (await self._post("chat/completions", body))["choices"][0]
        self.finish_reason = choice["finish_reason"]
        return {name: value for name, value in choice["message"].items() if value is not None or name == "content"}

    async def tool(self, name: str, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call a tool and return its result; a long text is cut (`cut_text`).

        A coroutine runs in the event loop, an ordinary function in a thread of its own; what has to be awaited of its
        result (a decorator may hide a coroutine) runs in the event loop as well.

        Raises:
            BadToolInput: the tool cannot use what it was given.
            EpisodeOver: the tool calls the model, and context or turns are used up; or the error of another client.
            ToolFailed: it raised something else.
            RuntimeError: another event loop than the agent's runs here.
        """
        return await self._tool(name, function, args, named, _cut)

    async def tool_text(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Call a tool, and return what the model is told, cut as by `tool`: a text as it is, anything else as JSON.

        In place of what JSON has not, such as a date, a path or a `range`, is its text.

        Args:
            name: name of the tool.
            function: as `tool` takes it.
            arguments: its arguments, by name.

        Raises:
            BadToolInput: the tool cannot use what it was given.
            EpisodeOver: the tool calls the model, and context or turns are used up; or the error of another client.
            ToolFailed: it raised something else, or JSON cannot hold its result.
            RuntimeError: another event loop than the agent's runs here.
        """
        return str(await self._tool(name, function, (), arguments, lambda found: cut_text(_told(found))))

    async def _tool(
        self, name: str, function: Callable[..., Any], args: Any, named: Any, finish: Callable[[Any], Any]
    ) -> Any:
        self._episode.require_own_loop(f"the agent calls tool {name!r}")
        started, detail = time.time(), "not finished"
        try:
            with self._episode.limited(f"tool {name!r}", self._episode.limits.tool_s, name):
                result = function(*args, **named) if is_async(function) else self._in_thread(function, args, named)
                found = await result
                if inspect.isawaitable(found):
                    found = await found
                found = finish(found)
            detail = found if isinstance(found, str) else repr(type(found).__name__)
            return found
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            detail = one_line(error)
            if isinstance(error, BadToolInput | VoidReward) or is_over(error, self._base_url):
                raise  # a tool may call the model as well
            raise ToolFailed(name, error) from error
        finally:
            self._episode.step("tool", name, started, detail)

    def note(self, text: str) -> None:
        """Record a remark among the episode's steps."""
        self._episode.step("agent", "note", time.time(), text)

    def openai(self, **settings: Any) -> Any:
        """Return an `openai.AsyncOpenAI` for this episode.

        Args:
            settings: further arguments of it. With an `http_client` of its own, turns have no limit (see `base_url`).

        Raises:
            RuntimeError: the package openai cannot be imported.
        """
        try:
            import openai
        except ImportError as error:
            raise RuntimeError(f"client.openai() needs the package openai: {error}") from error
        url = self.base_url if "http_client" in settings else self._base_url
        own = {"base_url": url, "api_key": self.api_key, "http_client": self.http}
        return openai.AsyncOpenAI(**{**own, **settings})

    async def close(self) -> None:
        """Close what belongs to this episode; the shared connections stay."""
        await self.http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
        content = json.dumps(body, allow_nan=False)  # ASCII: UTF-8 has no halves of surrogate pairs, tools do
        for attempt in range(ATTEMPTS):
            try:
                response = await self.http.post(path, content=content, headers=headers)
                break
            except httpx2.TransportError as error:
                if attempt == ATTEMPTS - 1:
                    raise VoidReward(VoidCause.PROVIDER, f"the model's endpoint: {one_line(error)}") from error
                await asyncio.sleep(PAUSE_S * 2**attempt)
        if response.is_success:
            return response.json()
        code, text = _refusal(response)
        if code in OVER:
            raise EpisodeOver(text)
        if response.status_code >= 500:
            raise VoidReward(VoidCause.PROVIDER, f"the model's endpoint: {response.status_code} {text}")
        raise CallRefused(f"{response.status_code} {text}")

    def _in_thread(self, function: Callable[..., Any], args: Any, named: Any) -> asyncio.Future[Any]:
        """Call a function in a thread of its own: one that never ends takes no thread from others."""
        loop = asyncio.get_running_loop()
        future, context, worker = loop.create_future(), contextvars.copy_context(), os.getpid()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if plain else RuntimeError(one_line(error)))

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(function, *args, **named)
            except BaseException as raised:
                error = raised
            end_copy(worker, error)
            self._episode.threads.discard(thread)
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle, result, error)

        thread = threading.Thread(target=work, name=f"tool of {self._episode.order.sample_id}", daemon=True)
        self._episode.threads.add(thread)
        thread.start()
        return future


def is_over(error: BaseException, base_url: str) -> bool:
    """Whether an exception, of any client, means that the endpoint takes no further call by rule.

    A group of exceptions does if each of them does.

    Args:
        error: the exception.
        base_url: the endpoint; other servers, such as those of a judge's model, may refuse calls with the same code.
    """
    for seen in _wrapped(error):
        if isinstance(seen, BaseExceptionGroup):
            return all(is_over(one, base_url) for one in failures_of(seen))
        if isinstance(seen, EpisodeOver):
            return True
        codes = getattr(seen, "code", None), _code_in(getattr(seen, "body", None))
        if any(isinstance(code, str) and code in OVER for code in codes) and _is_from(seen, base_url):
            return True
    return False


def is_bad_request(error: BaseException, base_url: str) -> bool:
    """Whether an exception is an HTTP client's own for an answer of status 400, as the endpoint's refusals have.

    Such an exception has the status, and not the code of the refusal.

    Args:
        error: the exception.
        base_url: the endpoint; an answer of another server, such as a judge, is none of its refusals.
    """
    for seen in _wrapped(error):
        if {base.__module__.partition(".")[0] for base in type(seen).__mro__} & NETWORK_PACKAGES:
            holders = seen, getattr(seen, "response", None)
            bad = any(getattr(one, name, None) == 400 for one in holders for name in ("status_code", "status"))
            if bad and _is_from(seen, base_url):
                return True
    return False


def _is_from(error: BaseException, base_url: str) -> bool:
    """Whether a client's exception says that it is about a call of the server of a URL."""
    for name in ("request", "response", "request_info", ""):  # as httpx and requests, requests, aiohttp, urllib say it
        with contextlib.suppress(Exception):  # of a property, or what it has is no URL
            holder: Any = getattr(error, name) if name else error
            return urlsplit(str(holder.url)).netloc == urlsplit(base_url).netloc
    return False


def _wrapped(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and one after the other what each stands for, at most `MOST_WRAPPED`: they may be a ring."""
    seen: BaseException | None = error
    for _ in range(MOST_WRAPPED):
        if seen is None:
            return
        yield seen
        seen = _wrapped_by(seen)


def _wrapped_by(error: BaseException) -> BaseException | None:
    """Return the exception that another one stands for; None: it stands for itself.

    What an agent raises while it handles the end of its episode is a failure of its own: that is no cause.
    """
    package = type(error).__module__.partition(".")[0]
    if error.__cause__ is not None or error.__suppress_context__ or package not in WITHOUT_CAUSE:
        return error.__cause__
    return None if isinstance(error.__context__, EpisodeOver) else error.__context__  # no package wraps that


def _code_in(body: Any) -> str:
    """Return the code of an error's body as Anthropic's package keeps it."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code")) if isinstance(error, dict) else ""


def _told(found: Any) -> str:
    """Return a tool's result as text.

    Raises:
        TypeError: it is, or has, something that JSON cannot hold.
        ValueError: it contains itself.
    """
    if isinstance(found, str):
        return found
    plain = pydantic_core.to_jsonable_python(found, fallback=_plain)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)  # such as that of a date


def _plain(value: Any) -> Any:
    """Return what a scalar or an array of numpy or torch holds; the text of anything else that has one of its own."""
    if not isinstance(value, type) and callable(plain := getattr(value, "tolist", None)):
        return plain()
    if not (text := str(value)).startswith("<"):  # as that of a generator or a function, which says nothing
        return text
    raise TypeError(f"its result holds an object of type {type(value).__name__}, which JSON cannot hold: return a text")


def _cut(found: Any) -> Any:
    return cut_text(found) if isinstance(found, str) else found


def _refusal(response: httpx2.Response) -> tuple[str | None, str]:
    """Return code and text of an error, shaped as OpenAI's or not."""
    try:
        error = response.json()["error"]
        return error.get("code"), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError):
        return None, response.text[:300]


class _Watched(httpx2.AsyncBaseTransport):
    """The shared connections, as one episode uses them: every request is a call of the model with its deadline."""

    def __init__(self, pool: httpx2.AsyncBaseTransport, episode: LiveEpisode) -> None:
        self._pool, self._episode = pool, episode

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._episode.require_own_loop(CALLED)
        self._episode.count_call()
        time_of_call = _CallTime(self._episode)
        with time_of_call.waiting():
            response = await self._pool.handle_async_request(request)
        response.stream = _Body(response.stream, self._episode, time_of_call)
        return response


class _CallTime:
    """The time that an agent waits for one call of the model."""

    def __init__(self, episode: LiveEpisode) -> None:
        self._episode, self._spent = episode, 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside, and limit it together with what was counted before."""
        began = time.monotonic()
        with self._episode.limited("a call of the model", self._episode.limits.call_s, spent=self._spent):
            try:
                yield
            finally:
                self._spent += time.monotonic() - began


class _Body(httpx2.AsyncByteStream):
    """The body of an answer, for whose parts an agent waits only while it asks for one.

    An agent may leave the rest of a stream unread, and keep the stream: no more of the answer is waited for then.
    """

    def __init__(self, stream: Any, episode: LiveEpisode, time_of_call: _CallTime) -> None:
        self._stream, self._episode, self._time = stream, episode, time_of_call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts = aiter(self._stream)
        while True:
            self._episode.require_own_loop(READ)
            with self._time.waiting():
                part = await anext(parts, None)
            if part is None:
                return
            yield part

    async def aclose(self) -> None:
        self._episode.require_own_loop(READ)
        await self._stream.aclose()
