"""The agent of calculator.py in LangGraph, which knows nothing of streamrl: an endpoint and a key from its environment.

It runs in a virtual environment of its own, with what langgraph_requirements.txt lists (examples/README.md).
"""

from __future__ import annotations

import json
import os
import re

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from langgraph.prebuilt import create_react_agent  # type: ignore[import-not-found]


@tool  # type: ignore[untyped-decorator]
def calculate(expression: str) -> str:
    """Compute an arithmetic expression of whole numbers with + - * and parentheses."""
    if not re.fullmatch(r"[\d\s()+*-]{1,100}", expression) or "**" in expression:
        return "error: only whole numbers, + - * and parentheses"
    try:
        return str(eval(expression, {"__builtins__": {}}))
    except (ArithmeticError, SyntaxError, TypeError) as error:
        return f"error: {error}"


def shown() -> list[BaseMessage]:
    """Make two solved problems: a model of this size hardly ever calls a tool that it was only told of."""
    messages: list[BaseMessage] = []
    for number, (a, b, c) in enumerate([(31, 12, 140), (45, 67, 508)]):
        call = {"name": "calculate", "args": {"expression": f"{a} * {b} + {c}"}, "id": f"shown_{number}"}
        messages += [
            HumanMessage(f"What is {a} * {b} + {c}? End with the number."),
            AIMessage("", tool_calls=[call]),
            ToolMessage(str(a * b + c), tool_call_id=call["id"], name="calculate"),
            AIMessage(f"The answer is {a * b + c}"),
        ]
    return messages


def main() -> None:
    """Play one episode."""
    task = json.loads(os.environ["TASK"])
    agent = create_react_agent(ChatOpenAI(model="policy"), [calculate])
    before = [*shown(), HumanMessage(task["prompt"])]
    messages = agent.invoke({"messages": before}, {"recursion_limit": 9})["messages"]
    called = any(isinstance(message, ToolMessage) for message in messages[len(before) :])
    numbers = re.findall(r"-?\d+", str(messages[-1].content).replace(",", ""))
    right = isinstance(messages[-1], AIMessage) and numbers[-1:] == [str(task["answer"])]
    print(json.dumps({"reward": 0.9 * right + 0.1 * called}))


if __name__ == "__main__":
    main()
