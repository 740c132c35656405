"""`report.html`: a finished or unfinished run on one self-contained page, without scripts or external files."""

from __future__ import annotations

import time
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from streamrl.atomic_files import replace_text
from streamrl.report import plots
from streamrl.report.check_sections import evaluation, length_audit, schedule
from streamrl.report.page import CSS, figure, section, table
from streamrl.report.panels import stale_message
from streamrl.report.run_data import (
    RunData,
    RunRollouts,
    SampleText,
    error_counts,
    load_run,
    pick_samples,
    read_texts,
)
from streamrl.report.summary import (
    NONE,
    byte_size,
    duration,
    fixed,
    headline_figures,
    mean,
    number,
    percent,
    share_of,
    summarise,
)
from streamrl.report.timeline import choose_windows, tracks
from streamrl.run_dir import layout

TEXT_LIMIT = 4000
"""Characters shown of one prompt or completion."""
TIMELINE_KINDS = len(plots.COLOURS)
"""Kinds of work that get a colour in the timeline."""
OTHER = "other"
"""Name that the remaining kinds of work share."""


def write_report(run_dir: Path) -> Path:
    """Write `<run_dir>/report.html` atomically and return its path.

    Raises:
        UserError: the folder holds no run.
        OSError: the file cannot be written.
    """
    page = build_report(load_run(run_dir), time.time())
    path = run_dir / layout.REPORT
    replace_text(path, page)
    return path


def build_report(data: RunData, now: float) -> str:
    """Return the page's HTML; `now` is the unix time, for a run that has not ended."""
    sections = [_head(data, now)]
    if data.rows:
        sections += [_reward(data), evaluation(data), _lengths(data), length_audit(data), _predictions(data)]
        sections += [_step_time(data), schedule(data)]
    elif data.rollouts is not None:
        sections.append(_lengths(data))
    sections.append(_timeline(data))
    if data.rows:
        sections.append(_training(data))
    if data.rollouts is not None:
        sections.append(_tasks(data.rollouts))
    sections += [_trouble(data), _samples(data), _configuration(data), _notes(data)]
    name = escape(data.status.run if data.status else data.run_dir.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>StreamRL: {name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(data: RunData, now: float) -> str:
    status = data.status
    parts = [f"<h1>{escape(status.run if status else data.run_dir.name)}</h1>"]
    if status is not None:
        ended = status.updated_at if status.final or status.stale_for(now) else now
        facts = (status.model, status.types, f"schedule {status.schedule}", status.hardware)
        parts.append(f'<p class="facts">{" · ".join(escape(fact) for fact in facts if fact)}</p>')
        sentence = f"{status.state} at step {status.step} of {status.steps}, "
        sentence += f"{duration(ended - status.started_at)} after its start"
        if not status.final:
            sentence += " (the run has not ended: this page shows it so far)"
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.started_at))
        parts.append(f"<p><strong>{escape(sentence)}</strong>, started {started}.</p>")
        if stale := stale_message(status, now):
            parts.append(f'<p class="bad">{escape(stale)}</p>')
        if status.error:
            parts.append(f'<pre class="bad">{escape(status.error)}</pre>')
    if not data.rows:
        parts.append("<p>No optimizer step has finished, so there are no curves.</p>")
        return "".join(parts)
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
        for what, value in headline_figures(summarise(data.rows))
    )
    return "".join(parts) + f'<dl class="cards">{cards}</dl>'


def _reward(data: RunData) -> str:
    if not plots.has(data.rows, "reward_mean"):
        return ""
    return section(
        "Reward",
        figure(
            plots.reward_figure(data.rows),
            "reward",
            "Mean reward of the samples trained in each optimizer step; the band is their standard "
            "deviation. By task: the mean over the task's samples of that step.",
        ),
    )


def _lengths(data: RunData) -> str:
    parts = []
    if plots.has(data.rows, "output_length_p50", "output_length_max"):
        caption = "Tokens per completion (end token included) among the samples trained in each step."
        parts.append(figure(plots.length_figure(data.rows), "lengths", caption))
    if data.rollouts is not None:
        parts.append(
            figure(
                plots.length_histogram_figure(data.rollouts),
                "length-histogram",
                f"All {len(data.rollouts):,} recorded samples of the run. 'stop': the model ended the "
                "completion (end token or stop string); 'length': it was cut at the token limit.",
            )
        )
    return section("Output lengths", *parts)


def _predictions(data: RunData) -> str:
    rollouts = data.rollouts
    if rollouts is None or np.isnan(rollouts.predicted_length).all():
        return ""
    caption = (
        "Left: how far the lengths predicted before a step agree with those that came (chance: recall 0.2, tau 0), and "
        "the share of generation time that dispatch by them saved against least-loaded dispatch, simulated from the "
        "step's lengths and the instances' measured step times. Right: samples by the route they took."
    )
    parts = [figure(plots.prediction_figure(data.rows, rollouts), "predictions", caption)]
    by_route = []
    for route, pool in sorted(set(zip(rollouts.route, rollouts.pool, strict=True))):
        mask = (rollouts.route == route) & (rollouts.pool == pool)
        predicted = rollouts.predicted_length[mask & ~np.isnan(rollouts.predicted_length)]
        predicted_mean = fixed(float(predicted.mean()), 0) if len(predicted) else NONE
        actual = rollouts.output_length[mask]
        actual_mean, longest = fixed(float(actual.mean()), 0), str(actual.max())
        by_route.append((route, pool, f"{mask.sum():,}", predicted_mean, actual_mean, longest))
    columns = ("route", "pool", "samples", "mean predicted length", "mean actual length", "longest")
    by_prediction = [row for row in data.rows if row.dispatch_by_prediction]
    saved = mean(row.dispatch_saved for row in by_prediction)
    note = f"{len(by_prediction)} of {len(data.rows)} steps were dispatched by predicted length"
    note += f"; mean saving in them {100 * saved:.1f} % of generation time (simulated)." if saved is not None else "."
    return section("Predicted lengths and dispatch", *parts, table(columns, by_route), f'<p class="note">{note}</p>')


def _step_time(data: RunData) -> str:
    scaled = []
    if plots.varies(data.rows, "instances"):
        note = "Instances were added or removed during the run: the times of both stages, and the number of instances."
        scaled.append(figure(plots.instances_figure(data.rows), "instances", note))
    return section(
        "Step time",
        figure(
            plots.step_time_figure(data.rows),
            "step-time",
            "Seconds of each step in which samples were being generated, in which the trainer computed, "
            "and in which generation waited for new weights; generation and training may overlap, so these "
            "need not add up to the step. Bubbles: the share of the step in which instances, or the "
            "trainer, were idle.",
        ),
        *scaled,
    )


def _timeline(data: RunData) -> str:
    found = tracks(data.events, data.origin)
    windows = choose_windows(data.rows, found, data.origin is not None)
    spent: dict[str, float] = {}
    for track in found:
        for bar in track.bars:
            spent[bar.name] = spent.get(bar.name, 0.0) + bar.end - bar.start
    # The kinds of work that take most time get their own colours; the others share one, as 'other'.
    ordered = sorted(spent, key=lambda name: -spent[name])
    if len(ordered) > TIMELINE_KINDS:
        ordered = [*ordered[: TIMELINE_KINDS - 1], OTHER]
        for track in found:
            track.bars = [b if b.name in ordered else replace(b, name=OTHER) for b in track.bars]
    colours = dict(zip(ordered, plots.COLOURS, strict=False))
    parts = []
    for index, window in enumerate(windows):
        shown = [track for track in found if any(b.end > window.start and b.start < window.end for b in track.bars)]
        names = {b.name for track in shown for b in track.bars if b.end > window.start and b.start < window.end}
        used = {name: colour for name, colour in colours.items() if name in names}
        if not shown:
            continue
        caption = (
            "What every instance and the trainer did, from trace.json (open it in ui.perfetto.dev for all "
            "of the run). Thin bars inside one row are samples generated at the same time; blank is idle."
        )
        parts.append(figure(plots.timeline_figure(shown, window, used), f"timeline-{index}", caption))
    return section("Timeline", *parts)


def _training(data: RunData) -> str:
    why = data.status.why_types if data.status else ""
    return section(
        "Training",
        f"<p>Compute types: {escape(why)}.</p>" if why else "",
        figure(
            plots.training_figure(data.rows),
            "training",
            "Per optimizer step. Loss: the algorithm's objective over the step's tokens. Entropy: of the "
            "policy, per completion token. Log-probability gap: mean absolute difference between the "
            "trainer's and the generator's log-probability of the sampled tokens (0 when both compute "
            "identically, in the same type and with the same weights).",
        ),
    )


def _tasks(rollouts: RunRollouts) -> str:
    rows = []
    half = (int(rollouts.step.min()) + int(rollouts.step.max()) + 1) / 2
    for task in rollouts.tasks:
        mask = rollouts.task == task
        lengths = rollouts.output_length[mask]
        p50, p90 = np.percentile(lengths, [50, 90])
        rows.append(
            (
                task,
                f"{mask.sum():,}",
                _mean(rollouts.reward[mask]),
                _mean(rollouts.reward[mask & (rollouts.step < half)]),
                _mean(rollouts.reward[mask & (rollouts.step >= half)]),
                f"{p50:.0f} / {p90:.0f} / {lengths.max()}",
                percent(float(np.mean(rollouts.finish_reason[mask] == "length"))),
                str(sum(1 for error in rollouts.reward_error[mask] if error)),
            )
        )
    columns = ("task", "samples", "mean reward", "first half of the steps", "second half")
    shown = table((*columns, "length p50 / p90 / max", "cut at limit", "reward errors"), rows)
    return section("Tasks", shown, '<p class="note">Over all recorded samples of the run.</p>')


def _mean(values: np.ndarray) -> str:
    present = values[~np.isnan(values)]
    return fixed(float(present.mean()), 3) if len(present) else NONE


def _trouble(data: RunData) -> str:
    if not data.rows:
        return ""
    summary = summarise(data.rows)
    rows = [
        (
            "reward errors",
            share_of(summary.reward_errors, summary.samples),
            "scored 0, with the error recorded",
        ),
        ("completions cut at the token limit", percent(summary.truncated_fraction), "share of all samples"),
        (
            "groups without gradient",
            share_of(summary.groups_no_gradient, summary.groups_total),
            "all samples of the prompt had the same reward, so they teach nothing",
        ),
        (
            "prompts too long",
            NONE if summary.prompts_too_long is None else str(summary.prompts_too_long),
            "left out: no room for a completion",
        ),
        ("weights sent", byte_size(summary.weight_bytes_sent), "to all sites, over the run"),
    ]
    parts = [table(("what", "how many", "meaning"), rows)]
    if data.rollouts is not None and (errors := error_counts(data.rollouts)):
        parts.append(table(("most frequent reward errors", "samples"), [(m, str(n)) for m, n in errors]))
    return section("Counts to look at", *parts)


def _samples(data: RunData) -> str:
    if data.rollouts is None:
        return section("Samples", "<p>No finished samples have been recorded.</p>")
    picked = pick_samples(data.rollouts)
    texts = read_texts(data, [index for indices in picked.values() for index in indices])
    parts = []
    for title, indices in picked.items():
        if indices:
            parts.append(f"<h3>{escape(title)}</h3>")
            parts += [_sample(texts[index]) for index in indices]
    return section("Samples", *parts)


def _sample(text: SampleText) -> str:
    facts = (
        f"{text.task}, step {text.step}, reward {number(text.reward)}, {text.output_length} tokens, "
        f"ended by {text.finish_reason}"
    )
    error = f'<p class="bad">reward error: {escape(text.reward_error)}</p>' if text.reward_error else ""
    prompt, completion = _shortened(text.prompt), _shortened(text.completion)
    return (
        f"<details open><summary>{escape(facts)}</summary>{error}"
        f'<pre class="prompt">{prompt}</pre><pre>{completion}</pre></details>'
    )


def _shortened(text: str | None) -> str:
    if text is None:
        return "(text not available)"
    if len(text) <= TEXT_LIMIT:
        return escape(text) or "(empty)"
    return escape(text[:TEXT_LIMIT]) + f"\n[... {len(text) - TEXT_LIMIT:,} more characters]"


def _configuration(data: RunData) -> str:
    if data.config_text is None:
        return ""
    return section(
        "Configuration",
        f"<details><summary>config.yaml, all values resolved</summary><pre>{escape(data.config_text)}</pre></details>",
    )


def _notes(data: RunData) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in data.notes)
    return section("What this page could not show", f"<ul>{items}</ul>" if items else "")
