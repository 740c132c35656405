"""What an agents process tells of the waits of programs, which `deadlines.episode_s` alone limits."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.agents import agents_process, workers
from streamrl.agents.agent_host import AgentHost
from streamrl.agents.agents_process import AgentsProcess
from streamrl.agents.episode import EpisodeOrder
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.run import RunConfig
from tests.agents.test_agent_host import CALL_TEXT, TOKENIZER, TOOL, Model
from tests.waiting import until

RUNS_A_TOOL = f"""
import openai, time
messages = [{{"role": "user", "content": "compute"}}]
openai.OpenAI().chat.completions.create(model="policy", messages=messages, tools=[{TOOL!r}])
time.sleep(1000)
"""
DEADLINES = {"tool_s": 0.001, "turn_s": 0.001, "call_s": 0.001, "episode_s": 3000.0}


def test_a_wait_of_a_program_ends_with_its_episode_and_queued_ones_have_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "PROGRAMS", 1)
    monkeypatch.setattr(agents_process, "LONG_WAIT_S", -1.0)
    task = {"kind": "agent", "name": "sums", "items": "unused:items", "command": [sys.executable, "-c", RUNS_A_TOOL]}
    run = RunConfig.model_validate({"model": {"path": "some/model"}, "tasks": [{**task, "deadlines": DEADLINES}]})
    model = Model(CALL_TEXT)

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        process = AgentsProcess(SimpleNamespace(name="agents-here"))  # type: ignore[arg-type]
        process.workers = EpisodeWorkers(run.agent_tasks, 1)
        process.host = AgentHost(run, TOKENIZER, model.generate, process.workers)
        orders = [EpisodeOrder(f"s.{number}", "s", "sums", {}, 0, None) for number in range(3)]
        try:
            await process.workers.start()
            await process.host.start()
            model.gate.clear()
            playing = [asyncio.ensure_future(process.host.run(order)) for order in orders]
            await until(lambda: len(model.orders) == 1, 60)
            asks = process._state()
            model.gate.set()
            await until(lambda: any(wait.kind == "tool" for wait in process.host.waiting()), 60)
            computes = process._state()
            for one in playing:
                one.cancel()
            await asyncio.wait(playing)
            return asks, computes
        finally:
            await process.workers.close()
            await process.host.close()

    began = time.time()
    for state, what in zip(asyncio.run(scenario()), ("the model to answer turn s.0/", "tool calculate"), strict=True):
        (wait,) = state["waits"]
        assert wait["waiting_for"].startswith(f"episode s.0: {what}")
        assert began + 3000 <= wait["since"] + wait["limit_s"] <= time.time() + 3000
        assert state["detail"].endswith("; 2 wait for one of 32 programs to end")
