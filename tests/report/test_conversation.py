"""An episode as people read it in the report."""

from __future__ import annotations

import json

from streamrl.report.conversation import conversation_text


def test_messages_tool_calls_and_steps_follow_each_other() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    told = {
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ],
        "steps": [
            {"kind": "generate", "name": "turn 0", "started": 1.0, "finished": 1.5, "detail": "", "tokens": 4},
            {"kind": "tool", "name": "add", "started": 1.5, "finished": 1.75, "detail": "cut", "tokens": 0},
        ],
    }
    assert conversation_text(json.dumps(told)) == (
        '[user] 1 + 2?\n\n[assistant] -> add({"a": 1})\n\n[tool] 3\n\n'
        "[steps]\ngenerate turn 0, 0.50 s, 4 tokens\ntool add, 0.25 s: cut"
    )


def test_an_episode_that_did_nothing_is_no_text() -> None:
    assert conversation_text(json.dumps({"messages": [], "steps": []})) == ""
