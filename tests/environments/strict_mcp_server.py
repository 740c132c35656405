"""An MCP server that refuses calls as those of the TypeScript SDK do: with a JSON-RPC error in place of a result.

It returns a `result` that it is given, and prints a `line` that it is given before it answers; if that line has an
"id", it is the answer. It writes Latin-1, so that what JSON need not escape may be a byte that is not UTF-8.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ADD = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return what is answered beside the id."""
    match method:
        case "initialize":
            told = {"capabilities": {"tools": {}}, "serverInfo": {"name": "strict", "version": "1"}}
            return {"result": {"protocolVersion": params["protocolVersion"], **told}}
        case "tools/list":
            return {"result": {"tools": [{"name": "add", "description": "Add one.", "inputSchema": ADD}]}}
        case "tools/call" if "result" in params["arguments"]:
            return {"result": params["arguments"]["result"]}
        case "tools/call" if isinstance(params["arguments"].get("a"), int):
            return {"result": {"content": [{"type": "text", "text": str(params["arguments"]["a"] + 1)}]}}
        case "tools/call":
            return {"error": {"code": params["arguments"].get("code", -32602), "message": "a: Required"}}
    return {"error": {"code": -32601, "message": "Method not found"}}


sys.stdout.reconfigure(encoding="latin-1", errors="backslashreplace")  # type: ignore[union-attr]
for line in sys.stdin:
    if "id" in (asked := json.loads(line)):
        given = (asked.get("params") or {}).get("arguments") or {}
        if "line" in given:
            print(given["line"], flush=True)
            if '"id"' in given["line"]:
                continue
        answered = {"jsonrpc": "2.0", "id": asked["id"], **answer(asked["method"], asked.get("params") or {})}
        print(json.dumps(answered, ensure_ascii=False), flush=True)
