"""Environments of verifiers (version 0.4): they play the episode, and call the model at the run's endpoint.

`make` is 'verifiers:TASKSET', the id of a taskset that is installed in this venv, or a module on `--path`. By default a
harness of ours plays: it sends the task's prompt once and keeps the answer, in this process, without the `uv` and the
network that verifiers' own harnesses need for each rollout. A config with `agent` chooses another one.

Where the endpoint takes no further call, because turns or the context are used up, the episode ends as by verifiers'
own limits: what was played is scored, and the metric `cut` is 1.

Keys of the config are those of verifiers' environment: `taskset`, `agent`, `id`, ...
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import threading
import types
from typing import Any

HARNESS = "streamrl_single_turn"
OVER = {"max_turns_exceeded": "max_turns", "context_length_exceeded": "max_total_tokens"}
"""Codes of the endpoint's refusals that end an episode by rule, and what verifiers calls these limits."""
AGENT = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}


def make(name: str, config: dict[str, Any]) -> VerifiersEnvironment:
    """Load a taskset with its environment."""
    return VerifiersEnvironment(name, config)


class VerifiersEnvironment:
    """Plays any number of episodes at once, in an event loop of its own."""

    plays = True
    answers_later = frozenset({"play", "close"})

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        _register_harness()
        _end_by_rule(importlib.import_module("verifiers.v1.rollout").Rollout)
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        single = importlib.import_module("verifiers.v1.envs.single_agent.env")
        values = {**config, "taskset": {"id": name, **(config.get("taskset") or {})}}
        kind = loaders.environment_class(name, config.get("id", ""))
        if kind is single.SingleAgentEnv:
            values.setdefault("agent", AGENT)
        generic = importlib.import_module("verifiers.v1.utils.generic")
        base = importlib.import_module("verifiers.v1.configs.env").EnvConfig
        kind_of_config = generic.concrete_type(kind, base, origin=importlib.import_module("verifiers.v1.env").Env)
        self._env = kind((kind_of_config or single.SingleAgentEnvConfig).model_validate(values))
        if not self._env.taskset.bounded:
            raise ValueError(f"taskset {name!r} is endless; bound it in its config")
        self._tasks = list(self._env.taskset)
        if not self._tasks:
            raise ValueError(f"taskset {name!r} has no tasks")
        self._playing: dict[str, asyncio.Task[Any]] = {}
        self._numbers = iter(range(sys.maxsize))
        self._loop = asyncio.new_event_loop()
        self._serves = threading.Event()
        self._problem: BaseException | None = None
        threading.Thread(target=self._run, name="verifiers", daemon=True).start()
        self._serves.wait()
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._problem = error
        self._serves.set()

    async def _serve(self) -> None:
        async with self._env.serving():
            self._serves.set()
            await asyncio.Event().wait()

    def play(self, request: dict[str, Any], settle: Any) -> None:
        """Begin an episode, and settle it at its end."""

        async def playing() -> None:
            try:
                result, error = await self._play(request), None
            except BaseException as raised:
                result, error = None, raised
            self._playing.pop(request["episode"], None)
            settle(result, error)

        def begin() -> None:
            self._playing[request["episode"]] = self._loop.create_task(playing())

        self._loop.call_soon_threadsafe(begin)

    def close(self, request: dict[str, Any], settle: Any) -> None:
        """End an episode that nobody waits for any more."""

        def cancel() -> None:
            if (task := self._playing.get(request["episode"])) is not None:
                task.cancel()
            settle({}, None)

        self._loop.call_soon_threadsafe(cancel)

    async def _play(self, request: dict[str, Any]) -> dict[str, Any]:
        clients = importlib.import_module("verifiers.v1.configs.client")
        context = importlib.import_module("verifiers.v1.clients").ModelContext
        sampling = importlib.import_module("verifiers.v1.types").SamplingConfig
        key = f"STREAMRL_SESSION_KEY_{next(self._numbers)}"  # verifiers takes keys from variables only
        os.environ[key] = request["api_key"]
        try:
            client = clients.EvalClientConfig(base_url=request["base_url"], api_key_var=key)
            (slot,) = self._env.slots(self._tasks[_place(request["item"]) % len(self._tasks)])
            episode = await self._env.run_slot(slot, context(client=client, model="policy", sampling=sampling()))
        finally:
            del os.environ[key]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.traces:
            told = f"{errors[0].type}: {errors[0].message}" if errors else "no agent has played"
            raise RuntimeError(f"verifiers: {told}")
        traces = [trace for trace in episode.traces if getattr(trace.agent, "trainable", True)] or episode.traces
        metrics = {str(name): float(value) for name, value in traces[0].metrics.items()}
        last = [trace.calls[-1].error for trace in episode.traces if trace.calls]
        cut = any(_limit_of(error.type, error.message) for error in last if error is not None)
        if "cut" in metrics:  # the taskset's own; as the player names it
            metrics["own_cut"] = metrics.pop("cut")
        return {"reward": float(traces[0].reward), "metrics": {**metrics, "cut": float(cut)}}


def _place(item: dict[str, Any]) -> int:
    """Return the place of an item's task in the taskset.

    Raises:
        ValueError: the item names none.
    """
    index = item.get("index")
    try:
        return int(index)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"the item has no whole number `index`, the place of its task in the taskset, got {index!r:.80}: give it "
            "one, or leave out `path` and `items`"
        ) from None


def _limit_of(kind: str, text: str) -> str | None:
    """Return verifiers' name of the limit that an error of theirs is about; None: it is about none."""
    found = re.search(r'"code"\s*:\s*"(\w+)"', text) if kind == "ProviderError" else None
    return OVER.get(found[1]) if found else None


def _end_by_rule(rollout: Any) -> None:
    """Let a rollout that the endpoint ends by rule stop, instead of failing, which would leave it without a score."""
    fail = rollout.fail

    def fail_or_stop(self: Any, error: Exception) -> None:
        if (limit := _limit_of(type(error).__name__, str(error))) is not None:
            self.trace.stop(limit)
        else:
            fail(self, error)

    rollout.fail = fail_or_stop


def _register_harness() -> None:
    """Make a harness known to verifiers, by a module of its id."""
    vf = importlib.import_module("verifiers.v1.harness")
    configs = importlib.import_module("verifiers.v1.configs.harness")
    results = importlib.import_module("verifiers.v1.runtimes")
    httpx = importlib.import_module("httpx")

    class SingleTurnConfig(configs.HarnessConfig):  # type: ignore[name-defined]
        pass

    class SingleTurn(vf.Harness[SingleTurnConfig]):  # type: ignore[name-defined]
        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            if mcp_urls:
                raise ValueError("this taskset has tools, which the single-turn harness cannot call: choose `agent`")
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in prompt]
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                answer = await client.post(
                    endpoint.rstrip("/") + "/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            failed = answer.status_code != 200
            return results.ProgramResult(int(failed), "", answer.text if failed else "")

    SingleTurn.__name__, SingleTurnConfig.__name__ = "SingleTurnHarness", "SingleTurnHarnessConfig"
    module = types.ModuleType(HARNESS)
    module.SingleTurnHarness, module.__all__ = SingleTurn, ["SingleTurnHarness"]  # type: ignore[attr-defined]
    sys.modules[HARNESS] = module
