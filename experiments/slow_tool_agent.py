"""An agent whose tool takes a while; agent_endpoint.py has worker processes play it."""

from __future__ import annotations

import asyncio
from typing import Any


async def run(task: dict[str, Any], client: Any) -> float:
    """Call the model, then a tool that takes a while, and so on."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(task["turns"]):
        if turn and task["tool_s"]:
            await client.tool("slow", asyncio.sleep, task["tool_s"])
        messages += [await client.chat(messages), {"role": "user", "content": f"Higher than {turn}."}]
    return 1.0
