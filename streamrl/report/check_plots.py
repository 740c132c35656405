"""Figures for the report's sections on evaluation, length audit and schedule, in the style of `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from streamrl.report.plots import (
    BLUE,
    BUBBLES,
    COLOURS,
    GREEN,
    ORANGE,
    PINK,
    curves,
    ink_text,
    label_axis,
    legend,
    literal,
    new,
    whole_steps,
)
from streamrl.rollouts.length_audit import StepAudit, has_limit
from streamrl.run_dir.evaluations import EvaluationRow
from streamrl.run_dir.metrics import MetricsRow

KINDS = ("issued", "finished", "trained", "dropped")
"""Kinds of samples that a length audit counts."""
MOST_COLUMNS = 80
"""Columns in a picture of distributions; if there are more steps, neighbours share a column."""


def evaluation_figure(rows: Sequence[EvaluationRow], top: EvaluationRow) -> Figure:
    """Draw rewards and pass@k by version, and each task's main reward; `top` gets a ring."""
    tasks = sorted({task for row in rows for task in row.by_task})
    figure, axes = new(1, 2 if len(tasks) > 1 else 1)
    steps = [row.step for row in rows]
    k = max(len(row.overall.pass_at) for row in rows)
    shown = {
        "greedy reward": [row.overall.reward_greedy for row in rows],
        "sampled reward": [row.overall.reward_sampled for row in rows],
    }
    for j in sorted({1, k}) if k else ():
        shown[f"pass@{j}"] = [row.overall.pass_at[j - 1] if len(row.overall.pass_at) >= j else None for row in rows]
    for (name, values), colour in zip(shown.items(), COLOURS, strict=False):
        _plot(axes[0], steps, values, marker="o", lw=1.6, color=colour, label=name)
    axes[0].plot([top.step], [top.score], "o", ms=10, mfc="none", mec=BLUE, mew=1.5)
    label_axis(axes[0], "weight version (optimizer steps)", "", "all tasks")
    if len(tasks) > 1:
        for task in tasks:
            scores = [row.by_task.get(task) for row in rows]
            rewards = np.array([one and one.reward for one in scores], dtype=float)
            axes[1].plot(steps, rewards, marker="o", ms=3, lw=1.4, label=literal(task))
        label_axis(axes[1], "weight version (optimizer steps)", "reward", "by task")
    for axis in axes:
        whole_steps(axis, steps)
        legend(axis)
    return figure


def _plot(axis: Axes, steps: Sequence[int], values: Sequence[float | None], **style: Any) -> None:
    """Draw a curve; nothing if it has no value."""
    drawn = np.array(values, dtype=float)
    if not np.isnan(drawn).all():
        axis.plot(steps, drawn, ms=3, **style)


def over_steps(audits: Sequence[StepAudit], kind: str) -> npt.NDArray[np.int64]:
    """Return the samples of a kind (one of `KINDS`) by bucket, shape [buckets]; all audits have the same edges."""
    return np.sum([getattr(audit, kind) for audit in audits], axis=0, dtype=np.int64)


def length_audit_figure(steps: Sequence[int], audits: Sequence[StepAudit]) -> Figure:
    """Draw all samples by bucket, mean lengths issued and trained, and the distribution of both by step."""
    figure, axes = new(2, 2, height=5.2)
    bars, means, issued, trained = axes
    edges = audits[0].edges
    place = np.arange(len(edges) - 1)
    for index, (kind, colour) in enumerate(zip(KINDS, (COLOURS[4], BLUE, GREEN, COLOURS[6]), strict=True)):
        bars.bar(place + 0.2 * (index - 1.5), over_steps(audits, kind), width=0.2, color=colour, label=kind, lw=0)
    bars.set_xticks(place, _bucket_names(edges), rotation=45, ha="right", fontsize=7)
    label_axis(bars, "tokens from", "samples", "all samples by length")
    legend(bars)
    found = [audit.comparison for audit in audits]
    style = {"marker": "o" if len(steps) <= 40 else "", "lw": 1.6}
    _plot(means, steps, [one.mean_issued for one in found], color=COLOURS[4], label="issued", **style)
    _plot(means, steps, [one.mean_trained for one in found], color=GREEN, label="trained", **style)
    means.set_ylim(0, 1.25 * max(1.0, means.get_ylim()[1]))  # room for the legend above the curves
    label_axis(means, "optimizer step", "tokens", "mean length, settled batches")
    legend(means, columns=2)
    for axis, kind, colour in ((issued, "issued", COLOURS[4]), (trained, "trained", GREEN)):
        _distribution(axis, steps, [getattr(audit, kind) for audit in audits], edges, colour)
        label_axis(axis, "optimizer step", "tokens from", f"lengths {kind}, by step")
    for axis in (means, issued, trained):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _bucket_names(edges: Sequence[int]) -> list[str]:
    return [*(str(edge) for edge in edges[:-2]), f"{edges[-2]} ({'limit' if has_limit(edges) else 'and more'})"]


def _distribution(
    axis: Axes, steps: Sequence[int], counts: Sequence[tuple[int, ...]], edges: Sequence[int], colour: str
) -> None:
    """Draw a column per step (or per few steps) and a row per bucket; opacity grows with the share."""
    columns = np.array_split(np.asarray(counts, dtype=float), min(len(counts), MOST_COLUMNS))
    shares = np.stack([column.sum(axis=0) / max(1.0, column.sum()) for column in columns], axis=1)
    picture = np.empty((*shares.shape, 4))
    picture[..., :3] = to_rgb(colour)
    # The square root keeps a rare bucket visible beside a common one.
    picture[..., 3] = np.sqrt(shares / max(shares.max(), 1e-9))
    extent = (steps[0] - 0.5, steps[-1] + 0.5, -0.5, len(shares) - 0.5)
    axis.imshow(picture, aspect="auto", origin="lower", interpolation="nearest", extent=extent)
    axis.grid(False)
    names = _bucket_names(edges)
    axis.set_yticks(range(0, len(names), 2), names[::2], fontsize=7)


def schedule_figure(rows: Sequence[MetricsRow]) -> Figure:
    """Draw staleness, bubbles, exposed weight sync, importance ratio, effective sample size, and masked, truncated
    and clipped tokens."""
    figure, axes = new(3, 2, height=6.6)
    panels = (
        ("staleness", "weight versions", (("staleness_max", "largest", PINK), ("staleness_mean", "mean", BLUE))),
        ("bubbles", "share of the step", BUBBLES),
        ("exposed weight sync", "seconds", (("weight_sync_exposed_s", "waiting for weights", PINK),)),
        (
            "importance ratio",
            "",
            (("importance_ratio_max", "largest", PINK), ("importance_ratio_mean", "mean", BLUE)),
        ),
        (
            "effective sample size",
            "share",
            (("ess_token", "of tokens", BLUE), ("ess_sequence", "of sequences", ORANGE)),
        ),
        (
            "cut away",
            "share of tokens",
            (
                ("masked_fraction", "masked", COLOURS[6]),
                ("truncated_weight_fraction", "truncated weight", ORANGE),
                ("clip_fraction", "clipped", BLUE),
            ),
        ),
    )
    for axis, (title, unit, columns) in zip(axes, panels, strict=True):
        if curves(axis, rows, columns, unit, title, legend_columns=3):
            low, high = axis.get_ylim()
            axis.set_ylim(min(0.0, low), high + 0.35 * (high - min(0.0, low)))  # room for the legend above the curves
        else:
            ink_text(axis, "not measured")
    return figure
