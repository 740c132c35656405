"""Texts of the figures about agents and about generation in 8 bits (`results.py`)."""

from __future__ import annotations

from statistics import median
from typing import Any

from results_data import Figure, mean, named, percent, read

FIGURES: dict[str, Figure] = {}
"""Name of a place -> what makes its text."""

ENDS = 5
"""Steps averaged at each end of a reward curve."""


def _rewards(steps: list[dict[str, Any]], ends: int = ENDS) -> str:
    """Return the mean rewards of the first and last steps."""
    first, last = (mean(step["reward"] for step in part) for part in (steps[:ends], steps[-ends:]))
    return f"{first:.2f} to {last:.2f}"


@named(FIGURES, "agent-trl")
def _agent_trl() -> str:
    found = read("agent_trl")
    steps = {name: [one for block in found["blocks"] for one in block[name]] for name in ("StreamRL", "TRL")}
    times = {name: median(one["seconds"] for one in some if one["timed"]) for name, some in steps.items()}
    rewards = (_rewards(some, 4) for some in steps.values())
    ratio = times["TRL"] / times["StreamRL"]
    return (
        f"{times['StreamRL']:.1f} s a step instead of {times['TRL']:.1f} s, {ratio:.1f} times TRL's samples/s; mean "
        f"rewards of the first and last 4 of {len(steps['TRL'])} steps {' and '.join(rewards)}"
    )


@named(FIGURES, "agent-programs")
def _agent_programs() -> str:
    return "; ".join(
        f"{name}: {one['episodes']} episodes of {one['turns']:.1f} turns, {one['void']} void, rewards "
        f"{', '.join(f'{reward:.2f}' for reward in one['rewards'])}"
        for name, one in read("agent_programs")["programs"].items()
    )


@named(FIGURES, "agent-logprobs")
def _agent_logprobs() -> str:
    found = read("agent_logprobs")
    turns = list(found["by_turn"].values())
    return (
        f"mean {found['mean']:.1e} nats, 99 % below {found['p99']:.1e}, largest {found['largest']:.1e}; mean of the "
        f"first turn {turns[0]:.1e}, of turn {len(turns)} {turns[-1]:.1e} ({found['tokens']:,} tokens)"
    )


@named(FIGURES, "int8-speed")
def _int8_speed() -> str:
    return "; ".join(
        f"{name}: "
        + " / ".join(f"{one['batch'] / one['int8']:.1f}" for one in each["steps"])
        + " tokens/s, in bf16 "
        + " / ".join(f"{one['batch'] / one['same']:.1f}" for one in each["steps"])
        for name, each in read("int8_generation")["speed"].items()
    )


@named(FIGURES, "int8-gap")
def _int8_gap() -> str:
    eight, plain = (read("int8_generation")["gaps"][kind] for kind in ("int8", "same"))
    return (
        f"{percent(eight['before'], 2)} before correction, {percent(eight['after'], 3)} after it; of a bf16 engine "
        f"{percent(plain['before'], 2)} and {percent(plain['after'], 3)}"
    )


@named(FIGURES, "int8-learning")
def _int8_learning() -> str:
    runs = read("int8_learning")["runs"]
    each = {kind: [one["steps"] for one in runs if one["kind"] == kind] for kind in ("int8", "same")}
    told = {kind: ", ".join(_rewards(steps) for steps in some) for kind, some in each.items()}
    gaps = {kind: mean(step["gap"] for steps in some for step in steps) for kind, some in each.items()}
    return (
        f"int8 {told['int8']}; bf16 {told['same']}; mean differences of log-probabilities {gaps['int8']:.4f} and "
        f"{gaps['same']:.4f} nats"
    )
