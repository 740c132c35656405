"""Rollouts that look like those of two experiments, with known expected lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CAP = 768


@dataclass(frozen=True)
class Made:
    """Rows and the expected length of each row's prompt [N]."""

    rows: list[dict[str, Any]]
    expected: np.ndarray[Any, Any]


def jump(size: float, first: float) -> float:
    """Models think in stages: bigger problems cost twice, three and five times as much from certain sizes on."""
    return 1.0 if size < first else 2.0 if size < 2 * first else 3.0 if size < 3 * first else 5.0


def small_prompt(rng: np.random.Generator) -> tuple[str, str, float]:
    """Task, prompt and typical length of a small reasoner."""
    task = ("chain_sum", "count_bits", "number_sorting", "spell_backward")[rng.integers(4)]
    if task == "chain_sum":
        terms = int(rng.integers(2, 13))
        text = " ".join(f"{rng.choice(['+', '-'])} {rng.integers(1, 10 ** rng.integers(1, 4))}" for _ in range(terms))
        prompt = f"State the final answer to the following arithmetic problem: {text[2:]} ="
        return task, prompt, 14 * terms * jump(terms, 4)
    if task == "count_bits":
        number = int(2 ** rng.uniform(3, 24))
        bits = number.bit_length()
        prompt = f"How many 1 bits are there in the binary representation of the number {number}?"
        return task, prompt, 6 * bits * jump(bits, 8)
    if task == "number_sorting":
        items = int(rng.integers(3, 16))
        numbers = ", ".join(str(rng.integers(0, 100)) for _ in range(items))
        prompt = f"Sort these numbers in ascending order: {numbers}\nGive the answer as a list, such as ['1', '2']"
        return task, prompt, 9 * items * jump(items, 5)
    letters = int(rng.integers(3, 14))
    word = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), letters))
    return task, f"Spell this word backward (example: sun -> nus): {word}", 7 * letters * jump(letters, 4)


def small_reasoner(prompts: int, repeats: int, seed: int, noise: float = 0.08, steps: int = 1) -> Made:
    """Length given by the problem's size, with a little noise."""
    rng = np.random.default_rng(seed)
    rows, expected = [], []
    for n in range(prompts):
        task, prompt, typical = small_prompt(rng)
        for r in range(repeats):
            length = max(1, round(typical * float(np.exp(noise * rng.standard_normal()))))
            row = {"prompt": prompt, "output_length": length, "task": task, "finish_reason": "stop"}
            rows.append(row | {"group_id": f"g{n}", "sample_id": f"g{n}.{r}", "step": 1 + n * steps // prompts})
            expected.append(typical)
    return Made(rows, np.array(expected))


def noisy(prompts: int, repeats: int, seed: int) -> Made:
    """Log-normal lengths with weak means by task; about 22 % reach the limit of 768 tokens."""
    rng = np.random.default_rng(seed)
    means = {"chain_sum": 5.3, "count_bits": 5.7, "number_sorting": 6.2, "spell_backward": 5.9}
    sigma = 0.9
    rows, expected = [], []
    for n in range(prompts):
        task, prompt, typical = small_prompt(rng)
        mean = means[task] + 0.12 * np.log(typical / 100)
        for r in range(repeats):
            length = int(min(CAP, max(1, np.exp(mean + sigma * rng.standard_normal()))))
            reason = "length" if length == CAP else "stop"
            row = {"prompt": prompt, "output_length": length, "task": task, "finish_reason": reason}
            rows.append(row | {"group_id": f"g{n}", "sample_id": f"g{n}.{r}", "step": 1})
            expected.append(mean)
    return Made(rows, np.array(expected))
