"""Problems from reasoning-gym and procedural step-by-step solutions whose length follows the problem.

A solution announces how often it will check its work, writes the working out, writes it out again that often, and ends
with the result. The number of checks depends on the problem's size (`planned_checks`), now and then off by one. So
lengths have a long tail, and most of it can be told from the prompt, as with models that reason.

The result is written inside ``<answer>`` tags, or at random outside them (no reward). A model trained on this samples
both, and errs in its working, so reinforcement learning has something to re-weight.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from reasoning_gym.factory import ProceduralDataset

PLAN = "Let me work this out step by step. Checks planned: "
CHECK = "\nWait, let me check that again. Checks left: "
ANSWER_OPEN = "\n<answer>"
ANSWER_CLOSE = "</answer>"
NO_TAGS = "\nThe result is "

#: Configuration of each reasoning-gym task the model is trained for.
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 10, "min_digits": 1, "max_digits": 1},
    "count_bits": {"min_n": 1, "max_n": 4095},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 8,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0.0,
        "max_value": 99.0,
    },
    "spell_backward": {"min_word_len": 3, "max_word_len": 10},
}

_SORT_TAIL = (
    "\nPlease follow the instruction below:\n## 1. Let all your answers be a list of numbers. Instead of "
    "reporting your answer as -69, -13, 1, 7, 11, 43, 59, 61, use "
    "['-69', '-13', '1', '7', '11', '43', '59', '61'] instead\n"
    "## 2. Convert all numbers in the square brackets as strings. "
    "For example, ['-69', '-13', '1', '7', '11', '43', '59', '61']\n"
)

#: Fixed wordings that become one token each; every other character is one byte-level token.
PHRASES: list[str] = [
    "State the final answer to the following arithmetic problem: ",
    "How many 1 bits are there in the binary representation of the number ",
    "Sort these numbers in ",
    "ascending",
    "descending",
    " order: ",
    _SORT_TAIL,
    "Spell this word backward (example: sun -> nus): ",
    PLAN,
    CHECK,
    ANSWER_OPEN,
    ANSWER_CLOSE,
    NO_TAGS,
    "<answer>",
    " + ",
    " - ",
    " =",
    ": ",
    ", ",
    "; ",
    " | ",
    ".0",
    "['",
    "', '",
    "']",
]


#: A problem at least this large (share of its task's range of sizes) has its work checked so often.
CHECKS_BY_SIZE = ((0.9, 4), (0.7, 2), (0.4, 1), (0.0, 0))


@dataclass(frozen=True)
class StyleMix:
    """Probabilities of the behaviours mixed into the supervised data (all between 0 and 1)."""

    checked: float = 1.0  # the work is checked as often as the problem's size asks for, else never
    off_by_one: float = 0.08  # one check more or fewer than that
    no_tags: float = 0.6  # the result is given outside <answer> tags


@dataclass(frozen=True)
class Problem:
    """One problem: task name, prompt text, true answer and what the solutions are made of."""

    task: str
    question: str
    answer: str
    metadata: dict[str, Any]


def difficulty(task: str, metadata: dict[str, Any]) -> int:
    """Size of a problem: number of terms, bits, numbers or letters, by task."""
    match task:
        case "chain_sum":
            return int(metadata["num_terms"])
        case "count_bits":
            return len(metadata["binary"])
        case "number_sorting":
            return int(metadata["numbers"])
        case "spell_backward":
            return int(metadata["word_len"])
    raise ValueError(f"unknown task {task!r}")


def size(task: str, metadata: dict[str, Any]) -> float:
    """Size of a problem as a share of its task's range: 0 the smallest, 1 the largest."""
    config = TASKS[task]
    match task:
        case "chain_sum":
            value, low, high = metadata["num_terms"], config["min_terms"], config["max_terms"]
        case "count_bits":
            value, low, high = metadata["number"], config["min_n"], config["max_n"]
        case "number_sorting":
            value, low, high = metadata["numbers"], config["min_numbers"], config["max_numbers"]
        case "spell_backward":
            value, low, high = metadata["word_len"], config["min_word_len"], config["max_word_len"]
        case _:
            raise ValueError(f"unknown task {task!r}")
    return float((value - low) / (high - low))


def planned_checks(problem: Problem) -> int:
    """How often the work of a problem of this size is checked."""
    share = size(problem.task, problem.metadata)
    return next(checks for least, checks in CHECKS_BY_SIZE if share >= least)


def _chain_sum_work(expression: str) -> str:
    """The expression again and again, its first two terms replaced by their sum each time."""
    parts = expression.split()
    steps = [" ".join(parts)]
    while len(parts) > 1:
        term = int(parts[2])
        total = int(parts[0]) + (term if parts[1] == "+" else -term)
        parts = [str(total), *parts[3:]]
        steps.append(" ".join(parts))
    return "; ".join(steps) + "; "


def _count_bits_work(number: int) -> str:
    """Repeated halving; every step shows the number, its parity and the count of ones so far."""
    steps: list[str] = []
    count = 0
    while number:
        count += number % 2
        steps.append(f"{number} | {number % 2} | {count}")
        number //= 2
    return "; ".join(steps) + "; "


def _number_sorting_work(numbers: list[int], ascending: bool) -> str:
    """Selection sort; every step shows the number taken and the numbers left."""
    steps: list[str] = []
    left = list(numbers)
    while left:
        taken = min(left) if ascending else max(left)
        left.remove(taken)
        steps.append(f"{taken} | {' '.join(map(str, left))}")
    return "; ".join(steps) + "; "


def _spell_backward_work(word: str) -> str:
    """Letters with their positions, forwards and then backwards."""
    marked = [f"{index % 10}{letter}" for index, letter in enumerate(word, 1)]
    return " ".join(marked) + " | " + " ".join(reversed(marked))


def working(problem: Problem) -> tuple[str, str]:
    """Full working of a problem, and the answer as it is to be written."""
    meta = problem.metadata
    match problem.task:
        case "chain_sum":
            return _chain_sum_work(meta["expression"]), problem.answer
        case "count_bits":
            return _count_bits_work(meta["number"]), problem.answer
        case "number_sorting":
            numbers = [int(float(text)) for text in meta["original_numbers"]]
            ascending = meta["direction"] == "ascending"
            ordered = sorted(numbers, reverse=not ascending)
            return _number_sorting_work(numbers, ascending), _as_list(ordered)
        case "spell_backward":
            return _spell_backward_work(meta["word"]), problem.answer
    raise ValueError(f"unknown task {problem.task!r}")


def _as_list(numbers: list[int]) -> str:
    return "['" + "', '".join(map(str, numbers)) + "']"


def solution(problem: Problem, mix: StyleMix, rng: random.Random) -> str:
    """One solution in a style drawn from ``mix``, without the end token."""
    work, result = working(problem)
    checks = planned_checks(problem) if rng.random() < mix.checked else 0
    if checks and rng.random() < mix.off_by_one:
        checks = max(0, checks + rng.choice((-1, 1)))
    text = f"{PLAN}{checks}\n{work}"
    for left in reversed(range(checks)):
        text += f"{CHECK}{left}\n{work}"
    if rng.random() < mix.no_tags:
        return text + NO_TAGS + result + "."
    return text + ANSWER_OPEN + result + ANSWER_CLOSE


def dataset(task: str, seed: int, size: int) -> ProceduralDataset:
    """The reasoning-gym dataset of a task under this experiment's configuration."""
    return reasoning_gym.create_dataset(task, seed=seed, size=size, **TASKS[task])


def problems(seed: int, size: int, weights: dict[str, float] | None = None) -> Iterator[Problem]:
    """``size`` problems of tasks drawn by ``weights`` (equal ones unless given).

    Problem i is drawn from reasoning-gym's seed ``seed + i``, whatever its task.
    """
    sets = {task: dataset(task, seed, size) for task in TASKS}
    rng = random.Random(seed)
    names = rng.choices(list(TASKS), [(weights or {}).get(task, 1.0) for task in TASKS], k=size)
    for index, task in enumerate(names):
        entry = sets[task][index]
        yield Problem(task, entry["question"], entry["answer"], entry["metadata"])
