"""What the endpoint of agents adds to a model call: time per call with many sessions at once, and CPU time.

    .venv/bin/python experiments/agent_endpoint.py                       # 128 sessions, half a minute
    .venv/bin/python experiments/agent_endpoint.py --sessions 16 --turns 20

The model answers at once, and each session is an agent that calls, adds a tool's result to the conversation and calls
again. So a call costs HTTP, rendering of the suffix, its tokens and the answer. Two loads:

- *paced*: each agent waits between its calls as long as makes `--rate` calls per second over all sessions, as agents do
  whose model takes seconds to answer. Overhead is what the client sees of a call, its own share included.
- *flat out*: every agent calls again at once, which shows how many calls per second one process takes.

Agents run in a process of their own. Writes experiments/results/agent_endpoint.json.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import httpx2
import numpy as np

from streamrl.agents.agent_host import AgentHost
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome, GeneratedTurn, TurnOrder
from streamrl.config.run import RunConfig
from streamrl.machine.model_files import resolve_model

OUT = Path(__file__).parent / "results" / "agent_endpoint.json"
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
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "calls": len(seconds),
        "calls_per_s": round(len(seconds) / wall, 1),
        "median_ms": round(1000 * cuts[49], 2),
        "p90_ms": round(1000 * cuts[89], 2),
        "p99_ms": round(1000 * cuts[98], 2),
        "server_cpu_ms_per_call": round(1000 * used / len(seconds), 2),
    }


@click.command()
@click.option("--sessions", default=128, show_default=True)
@click.option("--turns", default=12, show_default=True)
@click.option("--rate", default=100.0, show_default=True, help="calls per second over all sessions")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(sessions: int, turns: int, rate: float, model: str) -> None:
    """Measure the endpoint."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_client, args=(theirs,), daemon=True)
    process.start()
    found: dict[str, Any] = {"model": model, "sessions": sessions, "turns": turns, "rate": rate}
    found["load_average"] = os.getloadavg()[0]
    found["paced"] = asyncio.run(_measure(ours, model, sessions, turns, sessions / rate))
    found["flat_out"] = asyncio.run(_measure(ours, model, sessions, turns, 0.0))
    ours.send(None)
    process.join()
    OUT.write_text(json.dumps(found, indent=2) + "\n")
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
