"""The shop of `test_mcp_environment.py` in the standard library: it starts in a twentieth of the time of package mcp.

It speaks MCP over standard input and output, one call after the other. Variables of its environment: `HANGS_BESIDE`, a
file beside which it does not start; `MIB`, the memory that it keeps; `GREETING`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
PARAMETERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "price": ({"item": TEXT, "count": NUMBER}, ["item"]),
    "greet": ({}, []),
    "nap": ({"seconds": NUMBER, "mib": NUMBER}, ["seconds"]),
}
"""Parameters of each tool, and which of them must be given."""
TOOLS = [
    {"name": name, "inputSchema": {"type": "object", "properties": properties, "required": required}}
    for name, (properties, required) in PARAMETERS.items()
]
never = threading.Event()
sold: list[str] = []


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        told = {"capabilities": {"tools": {}}, "serverInfo": {"name": "shop", "version": "1"}}
        return {"protocolVersion": params["protocolVersion"], **told}
    text = called(params["name"], **params.get("arguments") or {}) if method == "tools/call" else ""
    return {"content": [{"type": "text", "text": text}]} if text else {"tools": TOOLS}


def called(name: str, item: str = "", count: int = 1, seconds: float = 0.0, mib: int = 0) -> str:
    """Return what a tool says."""
    if item == "gun":
        os._exit(1)
    if name == "greet":
        return os.environ.get("GREETING", "none")
    if name == "nap":
        sold.append("x" * (mib << 20))
        never.wait(seconds)
        return "slept"
    sold.append(item)
    return f"{count} {item}: {3 * count} euros, {os.getpid()}, sold {len(sold)}"


def answer() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        if "id" in (asked := json.loads(line)):
            answered = {"id": asked["id"], "result": result(asked["method"], asked.get("params") or {})}
            print(json.dumps({"jsonrpc": "2.0", **answered}), flush=True)


while os.path.exists(os.environ.get("HANGS_BESIDE", "")):
    never.wait(0.1)
kept = "x" * (int(os.environ.get("MIB", "0")) << 20)
answer()
