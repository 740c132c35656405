"""The report's figures, as inline SVG that is legible on light and dark pages.

Text and axes take the page's colours (CSS `currentColor` and `--grid`), text stays text, and the ids inside each SVG
are prefixed with the figure's name, so that many figures fit on one page. No pyplot, so no global state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from streamrl.report.run_data import RunRollouts
from streamrl.report.timeline import Track, Window
from streamrl.run_dir.metrics import MetricsRow

MOST_POINTS = 2000
"""Newest samples of each kind that a scatter plot shows."""

# Placeholder colours that no series uses; the SVG text gets CSS in their place.
_INK = "#010203"
_GRID = "#040506"
# Medium lightness is legible on white and on near-black; the first colours follow Okabe and Ito, for colour-blind
# readers.
COLOURS = ("#2f7ed8", "#e0801f", "#1f9d78", "#c2569b", "#8f7fe0", "#9a8a2e", "#d0483c", "#4fa8c9")
BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
STAGES = (("generate_time_s", "generating", BLUE), ("train_time_s", "training", ORANGE))
BUBBLES = (
    ("bubble_fraction_generation", "instances idle", BLUE),
    ("bubble_fraction_training", "trainer idle", ORANGE),
)
"""Columns of the metrics that several figures show, with their labels and colours."""


def new(rows: int = 1, columns: int = 1, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, row by row; `height` in inches (the page scales figures to its own width)."""
    figure = Figure(figsize=(9.0, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
    for axis in axes:
        axis.set_facecolor("none")
        axis.set_prop_cycle(color=COLOURS)
        axis.tick_params(colors=_INK, labelsize=9)
        axis.grid(color=_GRID, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.yaxis.set_offset_position("right")  # a factor such as 1e-6, out of the title's way
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_GRID)
    return figure, axes


def literal(name: str) -> str:
    """Return a name that a file gives as a label that shows it as it is: dollar signs would enclose a formula."""
    return name.replace("$", r"\$")


def label_axis(axis: Axes, x: str, y: str, title: str = "") -> None:
    """Set the names of both axes, and a title."""
    axis.set_xlabel(x, color=_INK, fontsize=9)
    axis.set_ylabel(y, color=_INK, fontsize=9)
    if title:
        # a place of its own: matplotlib would lay out all labels of the axes again to look for a free one
        axis.set_title(title, color=_INK, fontsize=10, loc="left", y=1.0)


def legend(axis: Axes, columns: int = 1, above: bool = False) -> None:
    """Add a legend, inside or above the axes, if anything has a name."""
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.08)} if above else {}
        axis.legend(frameon=False, fontsize=8.5, labelcolor=_INK, ncols=columns, **place)


def ink_text(axis: Axes, text: str) -> None:
    """Write a remark in the middle of an empty plot."""
    axis.text(0.5, 0.5, text, color=_INK, ha="center", transform=axis.transAxes, fontsize=9)


def to_svg(figure: Figure, name: str) -> str:
    """Return an `<svg>` element for the page; `name` (letters, digits, hyphens) must be unique on it."""
    figure.patch.set_alpha(0)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = svg.replace('href="#', f'href="#{name}-')
    # matplotlib names its own font first; the page's font matches the surrounding text.
    return re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", svg)


def _values(rows: Sequence[MetricsRow], name: str) -> np.ndarray:
    """Return one column, shape [steps], NaN where there is no value."""
    return np.array([getattr(row, name) for row in rows], dtype=float)


def whole_steps(axis: Axes, steps: Sequence[int]) -> Sequence[int]:
    """Set up the axis for these whole numbers, even a single one, and return them."""
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(set(steps)) == 1:
        axis.set_xlim(steps[0] - 1, steps[0] + 1)
    return steps


def _steps(axis: Axes, rows: Sequence[MetricsRow]) -> Sequence[int]:
    return whole_steps(axis, [row.step for row in rows])


def curves(
    axis: Axes,
    rows: Sequence[MetricsRow],
    columns: Iterable[tuple[str, str, str]],
    unit: str,
    title: str = "",
    legend_columns: int = 1,
) -> bool:
    """Draw columns (name, label, colour) of the metrics over the steps; return whether any has a value."""
    for name, label, colour in columns:
        if has(rows, name):
            marker = "o" if len(rows) <= 40 else ""
            steps, values = _steps(axis, rows), _values(rows, name)
            axis.plot(steps, values, marker=marker, ms=3, lw=1.6, color=colour, label=label)
    label_axis(axis, "optimizer step", unit, title)
    legend(axis, legend_columns)
    return axis.has_data()


def has(rows: Sequence[MetricsRow], *names: str) -> bool:
    """Return whether any of these columns has a value in any row."""
    return any(getattr(row, name) is not None for row in rows for name in names)


def reward_figure(rows: Sequence[MetricsRow]) -> Figure:
    """Draw the mean reward with its standard deviation, and the mean of every task."""
    tasks = sorted({task for row in rows for task in row.reward_by_task})
    figure, axes = new(1, 2 if tasks else 1)
    mean, std = _values(rows, "reward_mean"), _values(rows, "reward_std")
    steps = _steps(axes[0], rows)
    if len(rows) > 1:
        axes[0].fill_between(steps, mean - std, mean + std, color=BLUE, alpha=0.18, lw=0, label="± deviation")
    else:
        axes[0].errorbar(steps, mean, yerr=np.nan_to_num(std), color=BLUE, alpha=0.5, capsize=4)
    curves(axes[0], rows, [("reward_mean", "mean", BLUE)], "reward", "all tasks")
    for task in tasks:
        values = np.array([row.reward_by_task.get(task) for row in rows], dtype=float)
        axes[1].plot(_steps(axes[1], rows), values, marker="o", ms=3, lw=1.4, label=literal(task))
    if tasks:
        label_axis(axes[1], "optimizer step", "mean reward", "by task")
        legend(axes[1])
    return figure


def length_figure(rows: Sequence[MetricsRow]) -> Figure:
    """Draw the median, 90th percentile and maximum of the output lengths by step."""
    figure, (axis,) = new(height=2.5)
    columns = (
        ("output_length_max", "longest", PINK),
        ("output_length_p90", "90th percentile", ORANGE),
        ("output_length_p50", "median", BLUE),
    )
    curves(axis, rows, columns, "tokens", legend_columns=3)
    axis.set_ylim(0, 1.3 * axis.get_ylim()[1])  # room for the legend above the curves
    return figure


def length_histogram_figure(rollouts: RunRollouts) -> Figure:
    """Draw the whole run's output lengths by task, and why completions ended."""
    figure, (left, right) = new(1, 2)
    tasks = list(rollouts.task.counts())
    names = list(map(literal, tasks))
    longest = int(rollouts.output_length.max())
    width = longest // 40 + 1
    edges = np.arange(0, longest + width + 1, width)
    lengths = [rollouts.output_length[rollouts.task.equal(task)] for task in tasks]
    left.hist(lengths, bins=list(edges), stacked=True, label=names, lw=0)
    label_axis(left, f"output length, tokens ({width} per bar)", "samples", "lengths, tasks stacked")
    legend(left)
    reasons = list(rollouts.finish_reason.counts())
    start = np.zeros(len(tasks))
    for index, reason in enumerate(reasons):
        ended = rollouts.finish_reason.equal(reason)
        share = np.array([np.mean(ended[rollouts.task.equal(task)]) for task in tasks])
        colour = {"stop": GREEN, "length": ORANGE}.get(reason, COLOURS[(index + 3) % len(COLOURS)])
        right.barh(names, 100 * share, left=start, color=colour, label=literal(reason), height=0.6)
        start += 100 * share
    right.set_xlim(0, 100)
    right.set_ylim(len(tasks) - 0.4, -1.1)
    label_axis(right, "% of samples", "", "ended by")
    legend(right, columns=max(1, len(reasons)))
    return figure


def prediction_figure(rows: Sequence[MetricsRow], rollouts: RunRollouts) -> Figure:
    """Draw the ranker's quality by step, and every predicted length against the actual one."""
    figure, (left, right) = new(1, 2)
    columns = (
        ("ranker_recall_at_20", "recall of the longest 20 %", BLUE),
        ("ranker_kendall_tau", "Kendall's tau", ORANGE),
        ("dispatch_saved", "generation time saved (simulated)", GREEN),
    )
    curves(left, rows, columns, "", "ranking, and what dispatch made of it")
    left.set_ylim(min(0.0, left.get_ylim()[0]), 1.35)  # room for the legend above the curves
    predicted, actual = rollouts.predicted_length, rollouts.output_length
    for route, colour in (("regular", BLUE), ("tail", PINK)):
        mask = rollouts.route.equal(route) & ~np.isnan(predicted)
        shown = np.flatnonzero(mask)[-MOST_POINTS:]
        if len(shown):
            right.scatter(predicted[shown], actual[shown], s=6, alpha=0.4, lw=0, color=colour, label=f"route {route}")
    longest = float(actual.max())
    right.plot([1, longest], [1, longest], color=_INK, lw=0.8, ls=":", label="as predicted")
    right.set_xscale("log")
    right.set_yscale("log")
    label_axis(right, "predicted length, tokens", "actual length, tokens", "each sample")
    legend(right)
    return figure


def step_time_figure(rows: Sequence[MetricsRow]) -> Figure:
    """Draw where each step's time goes, and how long either side is idle."""
    figure, (left, right) = new(1, 2)
    columns = (
        ("step_time_s", "whole step", COLOURS[4]),
        *STAGES,
        ("weight_sync_exposed_s", "waiting for weights", PINK),
    )
    curves(left, rows, columns, "seconds", "time per step", legend_columns=2)
    left.set_ylim(0, 1.35 * left.get_ylim()[1])  # room for the legend above the curves
    curves(right, rows, BUBBLES, "share of the step", "bubbles")
    right.set_ylim(0, 1)
    return figure


def varies(rows: Sequence[MetricsRow], name: str) -> bool:
    """Return whether a column has different values."""
    values = _values(rows, name)
    return len(np.unique(values[~np.isnan(values)])) > 1


def instances_figure(rows: Sequence[MetricsRow]) -> Figure:
    """Draw the times of both stages and the number of instances, for a run in which that number has changed."""
    figure, (left, right) = new(1, 2)
    curves(left, rows, STAGES, "seconds", "time per step", legend_columns=2)
    left.set_ylim(0, 1.2 * left.get_ylim()[1])
    right.step(_steps(right, rows), _values(rows, "instances"), where="mid", lw=1.6, color=GREEN)
    right.set_ylim(0, 1.2 * right.get_ylim()[1])
    label_axis(right, "optimizer step", "instances, mean over the step", "instances")
    return figure


def training_figure(rows: Sequence[MetricsRow]) -> Figure:
    """Draw loss, gradient norm, entropy and trainer-generator mismatch."""
    figure, axes = new(2, 2, height=4.4)
    columns = (
        ("loss", "loss", ""),
        ("grad_norm", "gradient norm before clipping", ""),
        ("entropy", "entropy", "nats per token"),
        ("logprob_gap_mean", "trainer-generator mismatch", "nats per token"),
    )
    for axis, (name, title, unit), colour in zip(axes, columns, COLOURS, strict=False):
        if not curves(axis, rows, [(name, "", colour)], unit, title):
            ink_text(axis, "not measured")
        elif name != "loss":
            axis.set_ylim(bottom=0)
    return figure


def timeline_figure(tracks: Sequence[Track], window: Window, colours: Mapping[str, str]) -> Figure:
    """Draw a row per track from `window.start` to `window.end`; overlapping bars are stacked inside their row."""
    names = [track.name for track in tracks]
    figure, (axis,) = new(height=1.1 + 0.42 * len(names))
    for row, track in enumerate(tracks):
        # Lanes are assigned among the window's bars only, so that a row is as full as it was at that time.
        placed = track.lanes()
        lanes = max((lane for _, lane in placed), default=0) + 1
        starts = np.array([max(bar.start, window.start) for bar, _ in placed])
        axis.barh(
            [row - 0.4 + 0.8 * lane / lanes for _, lane in placed],
            np.array([min(bar.end, window.end) for bar, _ in placed]) - starts,
            left=starts - window.start,
            height=0.8 / lanes * (0.85 if lanes > 1 else 1),
            align="edge",
            color=[colours[bar.name] for bar, _ in placed],
            lw=0,
        )
    for name, colour in colours.items():
        axis.barh([0], [0], color=colour, label=literal(name))
    axis.set_yticks(range(len(names)), list(map(literal, names)))
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.set_xlim(0, max(window.end - window.start, 1e-6))
    label_axis(axis, "seconds", "", window.title)
    legend(axis, columns=4, above=True)
    return figure
