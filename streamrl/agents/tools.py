"""Tools that an agent offers its model: schemas, calls with checked arguments, and answers to calls that are wrong.

a tool takes the arguments and returns                -> its result, as text: JSON, unless it is a text
unknown tool, arguments that are no JSON or do not
fit the schema, or the tool raises `BadToolInput`     -> an answer that says so: the model wrote the call
the tool raises anything else, or JSON cannot hold
its result                                            -> `ToolFailed`: void, unless the agent catches it
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pydantic

from streamrl.agents.client import AgentClient, BadToolInput
from streamrl.config.tasks import Sandbox
from streamrl.environments.in_venv.mcp_tools_text import cut_text
from streamrl.tasks.sandbox_script import Language, run_script
from streamrl.tasks.user_functions import is_async


@dataclass(frozen=True)
class Tool:
    """A tool: what the model is told of it, and what is called."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    call: Callable[..., Any]
    """Takes the arguments by name; an ordinary function (it runs in a thread) or a coroutine."""

    @property
    def schema(self) -> dict[str, Any]:
        """What a call of the model takes in its `tools`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def function_tool(function: Callable[..., Any], name: str = "") -> Tool:
    """Make a tool of a function: its docstring is the description, its annotations are the schema.

    Arguments are converted and checked by pydantic before each call.

    Args:
        function: an ordinary function or a coroutine, every parameter of which is annotated.
        name: name of the tool; '': the function's.

    Raises:
        TypeError: this is no function, or a parameter has no annotation, is no named one, or has a name that pydantic
            keeps to itself: one that begins with '_', or is `model_config`.
    """
    if not inspect.isroutine(function):
        raise TypeError(f"a tool is a function, got {function!r}; write one that calls it")
    fields: dict[str, Any] = {}
    for one in inspect.signature(function, eval_str=True).parameters.values():
        if one.annotation is one.empty or one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise TypeError(f"tool {function.__name__}: parameter {one.name!r} needs a name and an annotation")
        if one.name.startswith("_") or one.name == "model_config":
            raise TypeError(f"tool {function.__name__}: parameter {one.name!r} needs another name")
        fields[one.name] = (one.annotation, ... if one.default is one.empty else one.default)
    model = pydantic.create_model(function.__name__, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema()
    schema.pop("title", None)

    def checked(given: dict[str, Any]) -> dict[str, Any]:
        try:
            found = model.model_validate(given)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the arguments"
            raise BadToolInput(f"{where}: {first['msg']}") from error
        return {key: getattr(found, key) for key in fields}

    if is_async(function):

        async def call_later(**given: Any) -> Any:
            return await function(**checked(given))

        call: Callable[..., Any] = call_later
    else:

        def call_now(**given: Any) -> Any:
            return function(**checked(given))

        call = call_now
    return Tool(name or function.__name__, inspect.getdoc(function) or "", schema, call)


async def answer_calls(client: AgentClient, tools: Iterable[Tool], message: dict[str, Any]) -> list[dict[str, Any]]:
    """Call the tools that a message of the model asks for, and return the messages that answer it.

    Args:
        client: the episode's client.
        tools: the tools that the model was offered.
        message: the message, as `AgentClient.chat` returns it.

    Raises:
        ToolFailed: a tool failed for a reason that is not the model's, or JSON cannot hold its result.
    """
    known = {tool.name: tool for tool in tools}
    answers = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            text = await _call(client, known, function["name"], function["arguments"])
        except BadToolInput as error:
            text = cut_text(f"error: {error}")
            client.note(f"tool {function['name']!r}: {error}")
        answers.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": text})
    return answers


async def _call(client: AgentClient, known: dict[str, Tool], name: str, arguments: str) -> str:
    if (tool := known.get(name)) is None:
        raise BadToolInput(f"there is no tool {name!r}, only {', '.join(sorted(known)) or 'none'}")
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise BadToolInput(f"the arguments are no JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadToolInput(f"the arguments must be a JSON object, got {type(given).__name__}")
    return await client.tool_text(name, tool.call, given)


def interpreter(language: Language = "python", sandbox: Sandbox | None = None) -> Tool:
    """Make a tool that runs the model's code in a sandbox and returns what it prints.

    Its time limit (`sandbox.seconds`) should be less than the task's `deadlines.tool_s`: a program that never ends is
    then told to the model, instead of ending the episode.
    """
    limits = sandbox or Sandbox()

    def run(code: str) -> str:
        output = run_script(code, language, limits)
        return output.text + (f"\n[{output.ended}]" if output.ended else "") or "[it printed nothing]"

    run.__doc__ = f"Run {language} code, without network, and return what it prints. Nothing is kept for the next call."
    return function_tool(run, language)
