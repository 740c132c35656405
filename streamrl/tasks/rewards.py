"""The scorers of completions: reasoning-gym's verifier, math-verify, exact match, tests, or a user's function.

They run inside a reward worker (see `reward_pool`), because they may hang or crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from streamrl.config.tasks import PYTHON_TESTS, AgentTask, FileTask, Task
from streamrl.errors import UserError
from streamrl.rollouts.void import real_number, wrong_with_reward
from streamrl.tasks.answers import full, tagged
from streamrl.tasks.extras import import_extra
from streamrl.tasks.math_reward import as_text, math_verify_score
from streamrl.tasks.sandbox import passes
from streamrl.tasks.task_items import ScoredItems, items_of
from streamrl.tasks.user_functions import import_ordinary
from streamrl.tasks.void_reward import VoidReward

Score = Callable[[str, dict[str, Any]], Any]


class RewardFunction(Protocol):
    """The signature of a user's reward, `reward: my_module:my_function` in the run file."""

    def __call__(self, completion: str, *, prompt: str, answer: Any) -> float | None:
        """Return the completion's reward, a number of at most 1e12 above or below 0; None: void, there is no reward.

        A function that knows what failed raises a `VoidReward` with the cause, and is tried again.

        Args:
            completion: text of the completion, without special tokens.
            prompt: the user's message, with the task's suffix.
            answer: the answer column's value; None if `answer_column` is null.
        """
        ...


class Scorer:
    """The verifiers of a run's tasks; slow imports and construction happen once, here.

    An agent returns its own reward, so an agent task has none.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        """Import and build every verifier.

        Raises:
            UserError: a reward function cannot be imported or called, or a task's settings are wrong.
        """
        self._scores = {task.key: _score_of(task, seed) for task in tasks if not isinstance(task, AgentTask)}

    def score(self, task: str, completion: str, reward_input: dict[str, Any]) -> float:
        """Return the reward of a completion of `task`; `reward_input` is that of its prompt.

        Raises:
            KeyError: no such task.
            VoidReward: the reward is void, or what was returned is no number, or none that a reward can be.
            Exception: whatever the verifier raises.
        """
        reward = self._scores[task](completion, reward_input)
        if reward is None:
            raise VoidReward(text="the reward function returned None", retry=False)
        try:
            value = real_number(reward)
        except TypeError as error:
            raise VoidReward(text=f"the reward must be one number for one completion, {error}", retry=False) from None
        if (wrong := wrong_with_reward(value)) is not None:
            raise VoidReward(text=f"the reward {wrong}", retry=False)
        return value


def _score_of(task: Task, seed: int) -> Score:
    """Return the scorer of a task: the named or user's reward of a file task, else that of the kind's own items."""
    if isinstance(task, FileTask):
        return _file_score(task)
    items = items_of(task, seed)
    assert isinstance(items, ScoredItems), f"the items of {task.key} have no verifier"
    return items.score


def _file_score(task: FileTask) -> Score:
    if task.reward in ("math_verify", "exact_match", PYTHON_TESTS) and task.answer_column is None:
        raise UserError(f"task {task.key!r}: reward {task.reward} compares with an answer, but answer_column is null")
    if task.reward == "math_verify":
        import_extra("math_verify", f"task {task.key!r}")
        return lambda completion, given: math_verify_score(completion, given["answer"])
    if task.reward == "exact_match":
        return lambda completion, given: exact_match_score(completion, given["answer"])
    if task.reward == PYTHON_TESTS and (sandbox := task.sandbox) is not None:
        if sandbox.command and shutil.which(sandbox.command[0]) is None:
            raise UserError(f"task {task.key!r}: sandbox.command: there is no program {sandbox.command[0]!r}")
        try:
            passes("began = True", "assert began", sandbox)
        except VoidReward as error:
            raise UserError(f"task {task.key!r}: sandbox: {error}") from error
        return lambda completion, given: float(passes(completion, given["answer"], sandbox))
    function = load_function(task.reward, f"task {task.key!r}")
    return lambda completion, given: function(completion, prompt=given["prompt"], answer=given["answer"])


def exact_match_score(completion: str, answer: Any) -> float:
    """Return 1.0 if the text of the last <answer> tag (else the whole completion) is the reference, else 0.0.

    Surrounding white space is ignored.
    """
    found = tagged(completion) if "<answer>" in completion else full(completion)
    return float(found is not None and found == as_text(answer).strip())


def load_function(spec: str, whose: str) -> RewardFunction:
    """Import `module:function`, also from the current folder.

    Raises:
        UserError: it cannot be imported, or cannot be called as a `RewardFunction`.
    """
    form, expected = (
        "f(completion, *, prompt, answer)",
        "'math_verify', 'exact_match', 'python_tests' or 'module:function'",
    )
    found: RewardFunction = import_ordinary(
        spec, f"{whose}: reward {spec!r}", form, "", expected=expected, prompt="", answer=None
    )
    return found
