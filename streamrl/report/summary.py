"""Figures of a whole run from its metrics rows, and readable formats for numbers. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamrl.run_dir.metrics import MetricsRow

NONE = "-"
"""Shown where a figure does not exist."""
REWARD_WINDOW = 10
"""Steps averaged at either end of a run for 'reward first -> last'; fewer in a run of under 20 steps."""


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


def fixed(value: float | None, decimals: int = 2, sign: bool = False) -> str:
    """Format a number with a fixed count of decimals; '-' for None."""
    if value is None:
        return NONE
    return f"{value:+.{decimals}f}" if sign else f"{value:.{decimals}f}"


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


def byte_size(count: float | None) -> str:
    """Format a number of bytes as '312 B', '1.2 MB', ... (powers of ten); '-' for None."""
    if count is None:
        return NONE
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


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


def histogram(lengths: Sequence[int], bins: int, longest: int = 0) -> tuple[list[int], int]:
    """Return counts in equally wide bins from 0 to the maximum (or `longest`), and a bin's width in tokens."""
    top = max([longest, *lengths])
    if not top:
        return [0] * bins, 0
    width = top // bins + 1
    counts = [0] * bins
    for length in lengths:
        counts[length // width] += 1
    return counts, width


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


@dataclass(frozen=True)
class RunSummary:
    """Figures over all steps of a run; None where nothing was measured. Times in seconds."""

    steps: int
    samples: int | None
    reward_window: int
    """Steps averaged for `reward_first` and for `reward_last`."""
    reward_first: float | None
    reward_last: float | None
    samples_per_s: float | None
    """All samples over the sum of the step times."""
    step_time_s: float | None
    generate_time_s: float | None
    train_time_s: float | None
    weight_sync_exposed_s: float | None
    bubble_generation: float | None
    bubble_training: float | None
    peak_memory_gb: float | None
    """Highest of the values recorded once per step."""
    groups_total: int | None
    groups_no_gradient: int | None
    reward_errors: int | None
    prompts_too_long: int | None
    """The rows count from the run's start, so this is the highest of them."""
    truncated_fraction: float | None
    """Share of all samples."""
    logprob_gap: float | None
    tokens_trained: int | None
    train_tokens_per_s: float | None
    train_tflops: float | None
    mfu: float | None
    weight_bytes_sent: int | None
    usd: float | None
    """Cost of all steps, at the cluster file's prices."""
    usd_per_1k_samples: float | None


def summarise(rows: Sequence[MetricsRow]) -> RunSummary:
    """Return the run's figures; every mean is over the steps that have the value."""
    window = max(1, min(REWARD_WINDOW, len(rows) // 2))
    rewards = [row.reward_mean for row in rows]
    timed = [row for row in rows if row.samples_total is not None and row.step_time_s]
    seconds = sum(row.step_time_s or 0.0 for row in timed)
    finished = [row for row in rows if row.samples_total and row.truncated_fraction is not None]
    priced = [row for row in rows if row.usd is not None]
    samples = sum(row.samples_total or 0 for row in priced)
    truncated = sum((row.truncated_fraction or 0.0) * (row.samples_total or 0) for row in finished)
    return RunSummary(
        steps=len(rows),
        samples=total(row.samples_total for row in rows),
        reward_window=window,
        reward_first=mean(rewards[:window]),
        reward_last=mean(rewards[-window:]),
        samples_per_s=sum(row.samples_total or 0 for row in timed) / seconds if seconds else None,
        step_time_s=mean(row.step_time_s for row in rows),
        generate_time_s=mean(row.generate_time_s for row in rows),
        train_time_s=mean(row.train_time_s for row in rows),
        weight_sync_exposed_s=mean(row.weight_sync_exposed_s for row in rows),
        bubble_generation=mean(row.bubble_fraction_generation for row in rows),
        bubble_training=mean(row.bubble_fraction_training for row in rows),
        peak_memory_gb=highest(row.process_memory_gb for row in rows),
        groups_total=total(row.groups_total for row in rows),
        groups_no_gradient=total(row.groups_no_gradient for row in rows),
        reward_errors=total(row.reward_errors for row in rows),
        prompts_too_long=max((n for row in rows if (n := row.prompts_too_long) is not None), default=None),
        truncated_fraction=truncated / sum(row.samples_total or 0 for row in finished) if finished else None,
        logprob_gap=mean(row.logprob_gap_mean for row in rows),
        tokens_trained=total(row.tokens_trained for row in rows),
        train_tokens_per_s=mean(row.train_tokens_per_s for row in rows),
        train_tflops=mean(row.train_tflops for row in rows),
        mfu=mean(row.mfu for row in rows),
        weight_bytes_sent=total(row.weight_bytes_sent for row in rows),
        usd=sum(row.usd or 0.0 for row in priced) if priced else None,
        usd_per_1k_samples=1000 * sum(row.usd or 0.0 for row in priced) / samples if samples else None,
    )


def reward_change(summary: RunSummary) -> str:
    """Describe the reward's change: '0.12 → 0.48 (+0.36, means of 10 steps)'."""
    if summary.reward_first is None or summary.reward_last is None:
        return NONE
    if summary.steps == 1:
        return f"{summary.reward_last:.3f} (one step)"
    steps = "first and last step" if summary.reward_window == 1 else f"means of {summary.reward_window} steps"
    change = summary.reward_last - summary.reward_first
    return f"{summary.reward_first:.3f} → {summary.reward_last:.3f} ({change:+.3f}, {steps})"


def share_of(part: int | None, whole: int | None) -> str:
    """Format a share as '12 of 80 (15%)'; '-' for None."""
    if part is None:
        return NONE
    return f"{part} of {whole} ({100 * part / whole:.0f}%)" if whole else str(part)


def headline_figures(summary: RunSummary) -> list[tuple[str, str]]:
    """Return (label, value) pairs for the closing summary, the report's table and its head."""
    split = (
        f"{fixed(summary.step_time_s, 1)} s (generating {fixed(summary.generate_time_s, 1)}, "
        f"training {fixed(summary.train_time_s, 1)}, "
        f"exposed weight sync {fixed(summary.weight_sync_exposed_s)})"
    )
    memory = summary.peak_memory_gb
    return [
        ("optimizer steps", str(summary.steps)),
        ("samples trained", NONE if summary.samples is None else f"{summary.samples:,}"),
        ("reward", reward_change(summary)),
        ("samples/s", fixed(summary.samples_per_s)),
        ("mean step time", split),
        (
            "idle",
            f"instances {percent(summary.bubble_generation)}, trainer {percent(summary.bubble_training)}",
        ),
        ("trainer", trainer_speed(summary)),
        ("peak memory, all processes", NONE if memory is None else f"{memory:.1f} GiB"),
        ("groups without gradient", share_of(summary.groups_no_gradient, summary.groups_total)),
        ("log-probability gap", number(summary.logprob_gap)),
        *cost(summary),
    ]


def trainer_speed(summary: RunSummary) -> str:
    """Describe the trainer's speed: '812 tokens/s, 0.65 TFLOP/s, MFU 41%'; MFU only where the ranks' peak is known."""
    if summary.train_tokens_per_s is None:
        return NONE
    words = [f"{summary.train_tokens_per_s:,.0f} tokens/s"]
    words += [f"{summary.train_tflops:.3g} TFLOP/s"] if summary.train_tflops is not None else []
    return ", ".join([*words, *([f"MFU {percent(summary.mfu)}"] if summary.mfu is not None else [])])


def cost(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the run's cost as a (label, value) pair; [] if the cluster file has no prices."""
    if summary.usd is None:
        return []
    each = "" if summary.usd_per_1k_samples is None else f", {summary.usd_per_1k_samples:.4g} per 1,000 samples"
    return [("cost, by the cluster file's prices", f"{summary.usd:.4g} USD{each}")]
