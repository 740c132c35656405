"""An agent that steps a simulator in its own process; simulator_overlap.py compares it with an environment."""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from typing import Any

from streamrl.agents.client import EpisodeOver
from streamrl.environments.installed import find_environment


def item(index: int, seed: int) -> dict[str, Any]:
    """Return the items that an environment gets."""
    return {"prompt": f"walker {index}", "index": index, "seed": seed}


@cache
def walkers() -> Any:
    """Return what makes walkers, imported from the venv of the environment."""
    folder = find_environment("walker").folder
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    sys.path += [str(packages), *find_environment("walker").paths]
    import walker  # type: ignore[import-not-found]

    return walker.make


HOLD = 60
"""Steps of the simulator per turn."""
FREE: list[Any] = []
"""Simulators whose episode has ended."""
TOGETHER = asyncio.Barrier(32)
"""All episodes of an optimizer step."""


async def run(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Play one episode as `EnvironmentPlayer` does, with the steps in this process."""
    return await play(task, client, lambda: asyncio.sleep(0))


async def run_in_lockstep(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Play one episode, and wait before each step until all episodes want one."""
    return await play(task, client, TOGETHER.wait)


async def play(task: dict[str, Any], client: Any, before: Any) -> dict[str, float]:
    """Play one episode; `before` is awaited before each step."""
    simulator = FREE.pop() if FREE else walkers()({"hold": HOLD})

    async def begin() -> str:
        return str(simulator.reset(task))

    async def step(text: str) -> tuple[Any, ...]:
        return tuple(simulator.step(text))

    reward = 0.0
    messages = [{"role": "user", "content": await client.tool("reset", begin)}]
    try:
        while True:
            messages.append(await client.chat(messages))
            await before()
            said, gained, _, _ = await client.tool("step", step, messages[-1]["content"])
            reward += gained
            messages.append({"role": "user", "content": said})
    except EpisodeOver:
        return {"reward": reward}
    finally:
        FREE.append(simulator)
