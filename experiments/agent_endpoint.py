"""Measure what the endpoint of agents adds to a model call: time with many sessions at once, and CPU time.

    .venv/bin/python experiments/agent_endpoint.py                       # 128 sessions, half a minute
    .venv/bin/python experiments/agent_endpoint.py --sessions 16 --turns 20

The model answers at once, and each session is an agent that calls, adds a tool's result to the conversation and calls
again. So a call costs HTTP, rendering of the suffix, its tokens and the answer. Three loads:

- *paced*: each agent waits between its calls as long as makes `--rate` calls per second over all sessions, as agents do
  whose model takes seconds to answer. Overhead is what the client sees of a call, its own share included.
- *bare*: the same paced calls at a web server (uvicorn and starlette too) that answers with a fixed text, which is what
  HTTP and the client cost. The endpoint adds the difference.
- *flat out*: every agent calls again at once, which shows how many calls per second one process takes.

Agents run in a process of their own. Then agents are played in worker processes, as in a run, with and without a tool
that takes `--tool-s` seconds between two calls. There the model is an emulated instance: `--slots` turns at a time, of
`--turn-s` seconds each. It should stay as busy: while some episodes wait for their tool, it generates for others.

Writes experiments/results/agent_endpoint.json and .md.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import click
import httpx2
import numpy as np
import uvicorn
from running import RESULTS, ROOT, Sheet, machine, results_folder, terminal, write_results
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from streamrl.agents.agent_host import AgentHost
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome, GeneratedTurn, TurnOrder
from streamrl.agents.workers import EpisodeWorkers
from streamrl.cli.main import error_lines
from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask
from streamrl.machine.model_files import resolve_model

OUT = RESULTS / "agent_endpoint.json"
ANSWER = "The next guess is 42, since the number is higher than 31."


async def _agents(urls: list[str], turns: int, pause_s: float) -> list[float]:
    """Run one agent per session; return the seconds that each call took."""
    seconds: list[float] = []

    async def agent(client: httpx2.AsyncClient, url: str) -> None:
        messages = [{"role": "user", "content": "Guess my number between 1 and 100. Answer with your guess."}]
        for turn in range(turns):
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            began = time.perf_counter()
            answer = await client.post(f"{url}/chat/completions", json={"model": "policy", "messages": messages})
            seconds.append(time.perf_counter() - began)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"Higher than {turn}."}]

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(limits=limits, timeout=120, trust_env=False) as client:
        await asyncio.gather(*(agent(client, url) for url in urls))
    return seconds


def _client(pipe: Connection) -> None:
    while (order := pipe.recv()) is not None:
        pipe.send(asyncio.run(_agents(*order)))


class _Held:
    """Holds every episode open until its agents, which run elsewhere, have ended."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.over = asyncio.Event()

    async def run(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
        self.urls.append(base_url)
        await self.over.wait()
        return EpisodeOutcome(1.0, None)


async def _bare(pipe: Connection, sessions: int, turns: int, pause_s: float) -> dict[str, float]:
    message = {"role": "assistant", "content": ANSWER}

    async def answer(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse({"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message}]})

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    pipe.send(([f"http://127.0.0.1:{listener.getsockname()[1]}/v1"] * sessions, turns, pause_s))
    began, cpu = time.perf_counter(), time.process_time()
    seconds: list[float] = await asyncio.to_thread(pipe.recv)
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    server.should_exit = True
    await serving
    return _figures(seconds, wall, used)


def _figures(seconds: list[float], wall: float, cpu: float) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "calls": len(seconds),
        "calls_per_s": round(len(seconds) / wall, 1),
        "median_ms": round(1000 * cuts[49], 2),
        "p90_ms": round(1000 * cuts[89], 2),
        "p99_ms": round(1000 * cuts[98], 2),
        "server_cpu_ms_per_call": round(1000 * cpu / len(seconds), 2),
    }


async def _measure(pipe: Connection, model: str, sessions: int, turns: int, pause_s: float) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    tokens = np.asarray([*tokenizer.encode(ANSWER), tokenizer.eos_token_id], np.int32)

    async def generate(order: TurnOrder) -> GeneratedTurn:
        return GeneratedTurn(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop", ANSWER)

    task = {"kind": "agent", "name": "guess", "run": "m:f", "items": "m:g", "max_turns": turns}
    run = RunConfig.model_validate({"model": {"path": model, "max_context": 8192}, "tasks": [task]})
    held = _Held()
    host = AgentHost(run, tokenizer, generate, held)
    await host.start()
    orders = [EpisodeOrder(f"s.{n:03d}", "s", "guess", {}, n, None) for n in range(sessions)]
    episodes = [asyncio.create_task(host.run(order)) for order in orders]
    while len(held.urls) < sessions:
        await asyncio.sleep(0.01)
    pipe.send((held.urls, turns, pause_s))
    began, cpu = time.perf_counter(), time.process_time()
    seconds: list[float] = await asyncio.to_thread(pipe.recv)
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    held.over.set()
    rows = [len((await episode).rows) for episode in episodes]
    await host.close()
    assert rows == [1] * sessions and len(seconds) == sessions * turns
    return _figures(seconds, wall, used)


async def _play(model: str, episodes: int, turns: int, slots: int, turn_s: float, tool_s: float) -> dict[str, float]:
    """Play episodes with an emulated instance; return how long it took, and how busy the instance was."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    tokens = np.asarray([*tokenizer.encode(ANSWER), tokenizer.eos_token_id], np.int32)
    free, busy = asyncio.Semaphore(slots), 0.0

    async def generate(order: TurnOrder) -> GeneratedTurn:
        nonlocal busy
        async with free:
            began = time.perf_counter()
            await asyncio.sleep(turn_s)
            busy += time.perf_counter() - began
        return GeneratedTurn(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop", ANSWER)

    values = {"kind": "agent", "name": "waits", "run": "experiments.slow_tool_agent:run", "items": "m:g"}
    run = RunConfig.model_validate({"model": {"path": model}, "tasks": [values | {"max_turns": turns}]})
    workers = EpisodeWorkers([task for task in run.tasks if isinstance(task, AgentTask)], 1)
    await workers.start()
    host = AgentHost(run, tokenizer, generate, workers)
    await host.start()
    item = {"prompt": "Guess my number.", "turns": turns, "tool_s": tool_s}
    try:
        await host.run(
            EpisodeOrder("first", "s", "waits", item | {"turns": 1}, 0, None)
        )  # the worker imports the agent
        busy, began = 0.0, time.perf_counter()
        orders = [EpisodeOrder(f"s.{n:03d}", "s", "waits", item, n, None) for n in range(episodes)]
        played = await asyncio.gather(*(host.run(order) for order in orders))
        wall = time.perf_counter() - began
    finally:
        await workers.close()
        await host.close()
    assert all(episode.reward == 1.0 and len(episode.rows) == 1 for episode in played)
    return {
        "seconds": round(wall, 2),
        "busy": round(busy / (slots * wall), 3),
        "tool_s_in_all": round(episodes * (turns - 1) * tool_s, 1),
    }


def sheets(found: dict[str, Any]) -> list[Sheet]:
    """Return the tables."""
    keys = ("median_ms", "p90_ms", "p99_ms", "calls_per_s", "server_cpu_ms_per_call")
    loads = [[name, *(f"{found[name][key]:g}" for key in keys)] for name in ("paced", "bare", "flat_out")]
    tools = found["tools"]
    waits = [
        [name, *(f"{tools[name][key]:g}" for key in ("seconds", "busy", "tool_s_in_all"))]
        for name in ("no tool", "slow tool")
    ]
    return [
        Sheet(
            f"A call with {found['sessions']} sessions of {found['turns']} turns, at a model that answers at once",
            ("load", "median ms", "p90 ms", "p99 ms", "calls/s", "CPU ms of the endpoint per call"),
            loads,
            [
                f"paced, bare: {found['rate']:g} calls/s in all; times as clients see them, their own share included",
                f"the endpoint adds {found['paced']['median_ms'] - found['bare']['median_ms']:.1f} ms at the median",
                f"load of the machine before (1 is one busy core): {found['load_average']:.1f}{found['beside']}",
            ],
        ),
        Sheet(
            f"{tools['episodes']} episodes of {tools['turns']} turns, {tools['slots']} at a time",
            ("agent", "seconds", "busy", "seconds of tools in all"),
            waits,
            [
                f"turns of {tools['turn_s']:g} s; slow tool: {tools['tool_s']:g} s between two calls",
                "busy: share of the emulated instance's slots in use",
                "the last episodes end with nobody left to fill the slots, so that busy is below 1 without a tool too",
            ],
        ),
    ]


@click.command()
@click.option("--sessions", default=128, show_default=True)
@click.option("--turns", default=12, show_default=True)
@click.option("--rate", default=100.0, show_default=True, help="calls per second over all sessions")
@click.option("--slots", default=8, show_default=True, help="turns that the emulated instance generates at a time")
@click.option("--turn-s", default=0.25, show_default=True, help="seconds of its turn")
@click.option("--tool-s", default=2.0, show_default=True, help="seconds of the slow tool")
@click.option("--beside", default="", help="a remark about the machine, for the table")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(
    sessions: int, turns: int, rate: float, slots: int, turn_s: float, tool_s: float, beside: str, model: str
) -> None:
    """Measure the endpoint."""
    target = results_folder(None, "sessions", "turns", "rate", "slots", "turn_s", "tool_s", "model") / OUT.name
    resolve_model(model)  # whether it has been fetched, before anything is started
    os.chdir(ROOT)  # agents are imported from there
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_client, args=(theirs,), daemon=True)
    process.start()
    found: dict[str, Any] = {"machine": machine(), "model": model, "sessions": sessions, "turns": turns, "rate": rate}
    found |= {"load_average": os.getloadavg()[0], "beside": f"; {beside}" if beside else ""}
    found["bare"] = asyncio.run(_bare(ours, sessions, turns, sessions / rate))
    found["paced"] = asyncio.run(_measure(ours, model, sessions, turns, sessions / rate))
    found["flat_out"] = asyncio.run(_measure(ours, model, sessions, turns, 0.0))
    ours.send(None)
    process.join()
    tools: dict[str, Any] = {"episodes": sessions, "turns": 4, "slots": slots, "turn_s": turn_s, "tool_s": tool_s}
    for name, seconds in (("no tool", 0.0), ("slow tool", tool_s)):
        tools[name] = asyncio.run(_play(model, sessions, tools["turns"], slots, turn_s, seconds))
    found["tools"] = tools
    tables = sheets(found)
    for table in tables:
        table.show(terminal())
    write_results(target, found, "The endpoint of agents", tables)


if __name__ == "__main__":
    with error_lines():
        main()
