"""Figures of a whole run from its metrics rows, and readable formats for numbers. Pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from streamrl.run_dir.jsonl import BriefRow
from streamrl.run_dir.metrics import MetricsRow

NONE = "-"
"""Shown where a figure does not exist."""
REWARD_WINDOW = 10
"""Steps averaged at either end of a run for 'reward first -> last'; fewer in a run of under 20 steps."""


class HeadlineRow(BriefRow):
    """What `headline_figures` needs of a step, for readers of the many rows of a long run."""

    samples_total: int | None = None
    step_time_s: float | None = None
    generate_time_s: float | None = None
    train_time_s: float | None = None
    weight_sync_exposed_s: float | None = None
    reward_mean: float | None = None
    bubble_fraction_generation: float | None = None
    bubble_fraction_training: float | None = None
    environment_s: float | None = None
    environment_hidden_fraction: float | None = None
    train_tokens_per_s: float | None = None
    train_tflops: float | None = None
    mfu: float | None = None
    process_memory_gb: float | None = None
    groups_no_gradient: int | None = None
    groups_total: int | None = None
    logprob_gap_mean: float | None = None
    usd: float | None = None


StepFigures = MetricsRow | HeadlineRow


def number(value: float | None, digits: int = 3) -> str:
    """Format a number in about `digits` significant digits, without an exponent where readable; '-' for None."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-4 or size >= 1e7:
        return f"{value:.{max(0, digits - 2)}e}"
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def fixed(value: float | None, decimals: int = 2) -> str:
    """Format a number with a fixed count of decimals; '-' for None."""
    return NONE if value is None else f"{value:.{decimals}f}"


def count(value: int | None) -> str:
    """Format a count with thousands separated; '-' for None."""
    return NONE if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    """Format a fraction as a percentage; '-' for None."""
    return NONE if value is None else f"{100 * value:.0f}%"


def duration(seconds: float | None) -> str:
    """Format seconds as '12s', '5m10s' or '3h02m'; '-' for None."""
    if seconds is None:
        return NONE
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def bars(values: Sequence[float | None]) -> str:
    """Return one block character per value, from lowest to highest; None is a space, equal values are mid-high."""
    present = [value for value in values if value is not None]
    if not present:
        return ""
    low, high = min(present), max(present)
    blocks = "▁▂▃▄▅▆▇█"

    def block(value: float | None) -> str:
        if value is None:
            return " "
        return blocks[3] if high == low else blocks[round((value - low) / (high - low) * (len(blocks) - 1))]

    return "".join(map(block, values))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def total(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def highest(values: Iterable[float | None]) -> float | None:
    """Return the largest of the values that are not None; None if there are none."""
    return max((value for value in values if value is not None), default=None)


def reward_change(rewards: Sequence[float | None]) -> str:
    """Describe the change of the steps' mean rewards: '0.12 → 0.48 (+0.36, means of 10 steps)'."""
    window = max(1, min(REWARD_WINDOW, len(rewards) // 2))
    first, last = mean(rewards[:window]), mean(rewards[-window:])
    if first is None or last is None:
        return NONE
    if len(rewards) == 1:
        return f"{last:.3f} (one step)"
    steps = "first and last step" if window == 1 else f"means of {window} steps"
    return f"{first:.3f} → {last:.3f} ({last - first:+.3f}, {steps})"


def share_of(part: int | None, whole: int | None) -> str:
    """Format a share as '12 of 80 (15%)'; '-' for None."""
    if part is None:
        return NONE
    return f"{part} of {whole} ({100 * part / whole:.0f}%)" if whole else str(part)


def headline_figures(rows: Sequence[StepFigures]) -> list[tuple[str, str]]:
    """Return (label, value) pairs for the closing summary and the report's head.

    Every mean is over the steps that have the value; samples/s are all samples over the sum of the step times.
    """
    timed = [(row.samples_total, row.step_time_s) for row in rows if row.samples_total is not None and row.step_time_s]
    memory = highest(row.process_memory_gb for row in rows)
    return [
        ("optimizer steps", str(len(rows))),
        ("samples trained", count(total(row.samples_total for row in rows))),
        ("reward", reward_change([row.reward_mean for row in rows])),
        ("samples/s", fixed(sum(n for n, _ in timed) / sum(seconds for _, seconds in timed) if timed else None)),
        (
            "mean step time",
            f"{fixed(mean(row.step_time_s for row in rows), 1)} s "
            f"(generating {fixed(mean(row.generate_time_s for row in rows), 1)}, "
            f"training {fixed(mean(row.train_time_s for row in rows), 1)}, "
            f"exposed weight sync {fixed(mean(row.weight_sync_exposed_s for row in rows))})",
        ),
        (
            "idle",
            f"instances {percent(mean(row.bubble_fraction_generation for row in rows))}, "
            f"trainer {percent(mean(row.bubble_fraction_training for row in rows))}",
        ),
        *environments(rows),
        ("trainer", trainer_speed(rows)),
        ("peak memory, all processes", NONE if memory is None else f"{memory:.1f} GiB"),
        ("groups without gradient", groups_without_gradient(rows)),
        ("trainer-generator mismatch", number(mean(row.logprob_gap_mean for row in rows))),
        *cost(rows),
    ]


def groups_without_gradient(rows: Sequence[StepFigures]) -> str:
    """Describe how many of all groups had no gradient, as their rewards were equal or none had a loss."""
    return share_of(total(row.groups_no_gradient for row in rows), total(row.groups_total for row in rows))


def environments(rows: Sequence[StepFigures]) -> list[tuple[str, str]]:
    """Return how long environments stepped, and how much of it was hidden; nothing if there were none."""
    stepped = [row.environment_s for row in rows if row.environment_s is not None]
    hidden = mean(row.environment_hidden_fraction for row in rows)
    if not stepped:
        return []
    told = f"{sum(stepped):.1f} s of steps; {percent(hidden)} of the time in which some stepped, turns were generated"
    return [("environments", told)]


def void_share(rows: Sequence[MetricsRow]) -> str:
    """Describe the void rewards of some steps: '7 of 140 rewards void (5%: timeout 4%, crash 1%)'; '-' if unknown."""
    void, judged = total(row.samples_void for row in rows), total(row.samples_judged for row in rows)
    if void is None or not judged:
        return NONE
    counts: Counter[str] = Counter()
    for row in rows:
        for cause, share in row.void_rate_by_cause.items():
            counts[cause] += round(share * (row.samples_judged or 0))
    causes = ", ".join(f"{cause} {percent(count / judged)}" for cause, count in counts.most_common())
    return f"{void} of {judged} rewards void ({percent(void / judged)}{': ' if causes else ''}{causes})"


def trainer_speed(rows: Sequence[StepFigures]) -> str:
    """Describe the trainer's speed: '812 tokens/s, 0.65 TFLOP/s, MFU 41%'; MFU only where the ranks' peak is known."""
    tokens, tflops = mean(row.train_tokens_per_s for row in rows), mean(row.train_tflops for row in rows)
    if tokens is None:
        return NONE
    mfu = mean(row.mfu for row in rows)
    words = [f"{tokens:,.0f} tokens/s"]
    words += [f"{tflops:.3g} TFLOP/s"] if tflops is not None else []
    return ", ".join([*words, *([f"MFU {percent(mfu)}"] if mfu is not None else [])])


def cost(rows: Sequence[StepFigures]) -> list[tuple[str, str]]:
    """Return the cost of the finished steps as a (label, value) pair; [] if the cluster file has no prices."""
    priced = [(row.usd, row.samples_total or 0) for row in rows if row.usd is not None]
    if not priced:
        return []
    usd, samples = sum(usd for usd, _ in priced), sum(samples for _, samples in priced)
    each = f", {1000 * usd / samples:.4g} per 1,000 samples" if samples else ""
    return [("cost of the finished steps", f"{usd:.4g} USD at the listed prices{each}")]
