"""The user's agent: the coroutine, or the program, that plays one episode."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol

from streamrl.agents.agent_program import TooLargeItem, task_variable
from streamrl.config.tasks import AgentTask
from streamrl.environments.installed import find_environment
from streamrl.errors import UserError
from streamrl.tasks.user_functions import import_function, is_async, require_callable


class AgentFunction(Protocol):
    """The signature of a user's agent, `run: my_module:my_function` in the run file."""

    def __call__(self, task: dict[str, Any], client: Any) -> Awaitable[float | Mapping[str, float]]:
        """Play one episode.

        Args:
            task: the item: a mapping with a text `prompt`.
            client: an `AgentClient`, with which the model and tools are called.

        Returns:
            The reward, a number of at most 1e12 above or below 0; or a mapping with `reward` and further numbers, which
            are recorded.
        """
        ...


def load_agent(task: AgentTask) -> AgentFunction | None:
    """Import an agent; None: it is a program, or an environment plays.

    Raises:
        UserError: it cannot be imported or called as an `AgentFunction`, or there is no such program or environment.
    """
    if task.environment is not None:
        if not find_environment(task.environment.name).make:
            raise UserError(
                f"task {task.key!r}: environment {task.environment.name!r} holds programs only: it was added without "
                "--make"
            )
        return None
    if task.command is not None:
        if shutil.which(task.command[0]) is None:
            raise UserError(f"task {task.key!r}: command: there is no program {task.command[0]!r}")
        return None
    assert task.run is not None
    whose = f"task {task.key!r}: run {task.run!r}"
    function = import_function(task.run, whose)
    if not is_async(function):
        raise UserError(f"{whose} must be a coroutine: async def f(task, client)")
    require_callable(function, whose, "f(task, client)", {}, None)
    found: AgentFunction = function
    return found


NEEDED = {
    "gymnasium": ("seed", "from which environment {!r} begins"),
    "verifiers": ("index", "the place of its task in environment {!r}"),
}
"""Whole number that an item of these environments needs, and what it is."""


def check_items(task: AgentTask, items: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Check that a program's items fit into TASK, and that an environment's have the number by which it knows them.

    Args:
        task: the task, whose environment is installed.
        items: each item with the id of its prompt.

    Raises:
        UserError: one is too large, or has no such number, or one that is no whole number.
    """
    if task.command is not None:
        for name, item in items:
            try:
                task_variable(item)
            except TooLargeItem as error:
                told = f"task {task.key!r}: item {name}: {error}; let it name a file that the program reads"
                raise UserError(told) from error
    if task.environment is None:
        return
    environment = task.environment.name
    kind = find_environment(environment).make.partition(":")[0]
    key, meaning = NEEDED.get(kind, ("", ""))
    for name, item in items if key else ():
        if not isinstance(item.get(key), int):
            got = f"{item[key]!r:.40}" if key in item else "none"
            raise UserError(
                f"task {task.key!r}: item {name} needs a whole number `{key}`, {meaning.format(environment)}, got {got}"
            )
