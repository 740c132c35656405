"""One process of an environment, run by the interpreter of the environment's own venv.

    VENV/bin/python -I environment_main.py PARENT

Both ends speak JSON, one object a line, over standard input and output: there is no port that two environments could
want. The first line has what is to be made: `{"make": ..., "paths": [...], "config": {...}}`. The answer is
`{"ready": {"plays": ..., "at_once": ...}}`, or `{"problem": text}`, after which the process ends. Then come requests,
and an answer to each with the same `id`: `{"id": 1, "result": {...}}` or `{"id": 1, "error": text, "traceback": text}`.

    {"do": "reset", "episode": e, "item": {...}}      -> {"messages": [...]}, perhaps with "tools": [...]
    {"do": "step", "episode": e, "message": {...}}    -> {"messages": [...], "reward": x, "done": b, "metrics": {...}}
    {"do": "sample", "episode": e, "seed": n}         -> {"text": ...}, an action at random, for tests
    {"do": "play", "episode": e, "item": ..., "base_url": ..., "api_key": ...} -> {"reward": x, "metrics": {...}}
    {"do": "close", "episode": e}                     -> {}

An environment that `plays` calls the model itself. One that serves requests `at_once` gets one while it answers others;
all others get one request at a time. The standard library is all that this file imports, and Python 3.9 is enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import json
import math
import os
import random
import signal
import sys
import threading
import traceback
from typing import Any

ADAPTERS = {"gymnasium": "gymnasium_text", "mcp": "mcp_tools_text", "verifiers": "verifiers_rollouts"}
"""Files beside this one, by what stands before the colon of `make`."""
PACKAGE = "streamrl_in_venv"
"""The name of this folder as a package of the venv, which need not have streamrl, and may have another one."""
DISPLAY_WORDS = ("DISPLAY", "display", "X11", "GLX", "xcb")
DISPLAY_HINT = (
    " (environments run without a display: choose a render mode that needs none, such as 'ansi' or 'rgb_array', or set "
    "MUJOCO_GL=osmesa)"
)
PORT_HINT = (
    " (another process has that port, perhaps another one of this environment: take port 0, or set `processes: 1`)"
)
LONGEST = 2000
COPY_CODE = 70
"""Exit code of a copy of the process that went on where only the original may (`streamrl.runtime.processes`)."""


class WrongType(Exception):
    """The environment returned something other than it must."""


class TextEnvironment:
    """An environment of the user: an object with `reset(item)` and `step(text)`, made by a function (config)."""

    plays = False

    def __init__(self, make: Any, config: dict[str, Any]) -> None:
        self._make, self._config = make, config

    def new(self) -> _TextEpisode:
        """Make an environment, which plays one episode at a time."""
        return _TextEpisode(self._make(self._config))


class _TextEpisode:
    def __init__(self, environment: Any) -> None:
        for name in ("reset", "step"):
            if not callable(getattr(environment, name, None)):
                raise WrongType(f"expected an object with reset(item) and step(text), got {_type(environment)}")
        self._environment = environment

    def reset(self, item: dict[str, Any]) -> dict[str, Any]:
        """Begin anew."""
        return {"messages": _messages(self._environment.reset(item), "reset(item)")}

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Act."""
        found = self._environment.step(str(message.get("content") or ""))
        if not isinstance(found, tuple) or len(found) not in (3, 4):
            raise WrongType(f"step(text) must return (text, reward, done) or (..., metrics), got {_type(found)}")
        said, reward, done, metrics = (*found, {})[:4]
        return {
            "messages": [] if said is None else _messages(said, "step(text)"),
            "reward": reward,
            "done": done,
            "metrics": metrics,
        }

    def sample(self, draw: random.Random) -> str:
        """Return an answer at random."""
        own = getattr(self._environment, "random_answer", None)
        return str(own(draw)) if own is not None else str(draw.randint(0, 9))

    def close(self) -> None:
        """Release what the environment holds."""
        if callable(own := getattr(self._environment, "close", None)):
            own()


def _messages(found: Any, whose: str) -> list[dict[str, Any]]:
    """Return the messages that a text, or a list of messages, stands for."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    listed = isinstance(found, list) and found
    if not listed or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in found):
        raise WrongType(f"{whose} must give a text or a list of messages, got {_type(found)}")
    return list(found)


def checked_step(found: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a step in plain types.

    Raises:
        WrongType: reward, done or a metric is of a wrong type, or not finite.
    """
    done = found["done"]
    if type(done).__name__ not in ("bool", "bool_", "bool8"):
        raise WrongType(f"done must be True or False, got {_type(done)}")
    metrics = found.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise WrongType(f"metrics must be a mapping of numbers, got {_type(metrics)}")
    return {
        "messages": found.get("messages") or [],
        "reward": _number(found["reward"], "the reward"),
        "done": bool(done),
        "metrics": {str(name): _number(value, f"metric {name!r}") for name, value in metrics.items()},
    }


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise WrongType(f"{what} must be a number, got {_type(value)}") from None
    if not math.isfinite(number):
        raise WrongType(f"{what} must be finite, got {number}")
    return number


def _type(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"


def text_of(error: BaseException) -> str:
    """Return an exception in one line, with a hint if a display is missing or a port is taken."""
    text = " ".join(str(error).split())
    text = text if isinstance(error, WrongType) else f"{type(error).__name__}: {text}".removesuffix(": ")
    hint = DISPLAY_HINT if any(word in text for word in DISPLAY_WORDS) else ""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        hint = PORT_HINT
    return text[:LONGEST] + hint


def end_copy(original: int, error: BaseException | None = None) -> None:
    """End this process if it is a copy that the environment's code has made by `os.fork`; a no-op in the original.

    It would go on as the original, with its pipes. `streamrl.runtime.processes.end_copy` does the same elsewhere.

    Args:
        original: process id of the original.
        error: what the environment's code has raised in this process; None: it has returned.
    """
    if os.getpid() == original:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, error.__traceback__)
    code = COPY_CODE if error is None else 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    os._exit(code)


def _answered_later(adapter: Any) -> frozenset[str]:
    """Return the requests that an adapter settles whenever it likes; it may get others meanwhile."""
    return getattr(adapter, "answers_later", frozenset())


def load(begin: dict[str, Any]) -> Any:
    """Load what `make` names: an adapter beside this file, or the user's function."""
    for path in reversed(begin.get("paths") or []):
        sys.path.insert(0, path)
    config = begin.get("config") or {}
    before, _, name = str(begin["make"]).partition(":")
    if before in ADAPTERS:
        return _beside(ADAPTERS[before]).make(name, config)
    found = importlib.import_module(before)
    for part in name.split("."):
        found = getattr(found, part)
    return TextEnvironment(found, config)


def _beside(name: str) -> Any:
    """Import a file of this folder as one of a package, so that it may import others of them."""
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{PACKAGE}.{name}")


class Server:
    """Answers requests; for one that steps, the environments of ended episodes are used again."""

    def __init__(self, adapter: Any, write: Any) -> None:
        self._adapter, self._write, self._pid = adapter, write, os.getpid()
        self._open: dict[str, Any] = {}
        self._free: list[Any] = []

    def answer(self, request: dict[str, Any]) -> None:
        """Do what is asked for, and write the answer."""
        if request["do"] in _answered_later(self._adapter):
            settle = lambda result, error: self._settle_later(request, result, error)  # noqa: E731
            getattr(self._adapter, request["do"])(request, settle)
            return
        try:
            result = self._do(request)
            end_copy(self._pid)
            self._settle(request["id"], result, None)
        except BaseException as error:
            end_copy(self._pid, error)
            if (one := self._open.pop(request["episode"], None)) is not None:  # what state it is in is unknown
                with contextlib.suppress(BaseException):
                    one.close()
            self._settle(request["id"], None, error)

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        episode = request["episode"]
        if request["do"] == "reset":
            if (one := self._open.get(episode)) is None:
                one = self._open[episode] = self._free.pop() if self._free else self._adapter.new()
            return dict(one.reset(request["item"]))
        if request["do"] == "close":
            if (one := self._open.pop(episode, None)) is not None:
                self._free.append(one)
            return {}
        if (one := self._open.get(episode)) is None:
            raise WrongType(f"episode {episode} has no environment here: reset it first")
        if request["do"] == "sample":
            return {"text": one.sample(random.Random(request["seed"]))}
        return checked_step(one.step(request["message"]))

    def _settle_later(self, request: dict[str, Any], result: Any, error: BaseException | None) -> None:
        end_copy(self._pid, error)
        if error is None and request["do"] == "step":
            try:
                result = checked_step(result)
            except WrongType as wrong:
                error = wrong
        self._settle(request["id"], result, error)

    def _settle(self, number: int, result: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                self._write({"id": number, "result": result})
                return
            except (TypeError, ValueError) as failed:
                error = WrongType(f"the messages cannot be sent as JSON: {failed}")
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._write({"id": number, "error": text_of(error), "traceback": trace[-LONGEST:]})


def _private_pipes() -> tuple[Any, Any]:
    """Put standard input and output aside; what the environment prints goes where standard error goes."""
    requests, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "wb", 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    getattr(sys.stdout, "reconfigure")(line_buffering=True, errors="replace")  # noqa: B009 (typed as a plain TextIO)
    return requests, answers


def main() -> None:
    """Serve the owner whose process id is the only argument; end with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides
    requests, answers = _private_pipes()
    writing, original = threading.Lock(), os.getpid()

    def write(answer: dict[str, Any]) -> None:
        data = memoryview(json.dumps(answer, allow_nan=False).encode() + b"\n")
        with writing:
            while data:
                data = data[os.write(answers.fileno(), data) :]

    try:
        adapter = load(json.loads(requests.readline()))
        at_once = bool(_answered_later(adapter))
        if not at_once:
            adapter.new().close()
        end_copy(original)
    except BaseException as error:
        end_copy(original, error)
        traceback.print_exc()
        write({"problem": text_of(error)})
        os._exit(0)
    server = Server(adapter, write)
    write({"ready": {"plays": adapter.plays, "at_once": at_once}})
    for line in requests:
        server.answer(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
