"""`report.html`: a finished or unfinished run on one self-contained page, without scripts or external files."""

from __future__ import annotations

import time
from dataclasses import replace
from html import escape
from itertools import product
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from streamrl.atomic_files import replace_text
from streamrl.report import plots
from streamrl.report.check_sections import evaluation, length_audit, schedule
from streamrl.report.page import CSS, figure, note, section, table
from streamrl.report.panels import stale_message
from streamrl.report.run_data import RunData, RunRollouts, error_counts, load_run, pick_samples, read_texts
from streamrl.report.summary import (
    NONE,
    duration,
    fixed,
    groups_without_gradient,
    headline_figures,
    highest,
    mean,
    number,
    percent,
    total,
    void_share,
)
from streamrl.report.timeline import choose_windows, timeline_tracks
from streamrl.rollouts.plain_text import plain_text
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
    replace_text(path, plain_text(page))  # the name of its folder need not be UTF-8
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
        facts = (status.model, status.types, f"schedule {status.schedule}", status.hardware)
        parts.append(f'<p class="facts">{" · ".join(escape(fact) for fact in facts if fact)}</p>')
        sentence = f"{status.state} at step {status.step} of {status.steps}, "
        sentence += f"{duration(status.elapsed(status.as_of(now)))} after its start"
        if not status.final:
            sentence += " (the run has not ended: this page shows it so far)"
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.first_start))
        parts.append(f"<p><strong>{escape(sentence)}</strong>, started {started}.</p>")
        if stale := stale_message(status, now):
            parts.append(f'<p class="bad">{escape(stale)}</p>')
        if status.error:
            parts.append(f'<pre class="bad">{escape(status.error)}</pre>')
    if not data.rows:
        return "".join([*parts, "<p>No optimizer step has finished, so there are no curves.</p>"])
    figures = (
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in headline_figures(data.rows)
    )
    return "".join([*parts, '<dl class="cards">', *figures, "</dl>"])


def _reward(data: RunData) -> str:
    if not plots.has(data.rows, "reward_mean"):
        return ""
    caption = (
        "Mean reward of the samples trained in each optimizer step; the band is their standard deviation. By task: the "
        "mean over the task's samples of that step."
    )
    return section("Reward", figure(plots.reward_figure(data.rows), "reward", caption))


def _lengths(data: RunData) -> str:
    parts = []
    if plots.has(data.rows, "output_length_p50", "output_length_max"):
        caption = (
            "Tokens per completion (end token included) among the samples generated for the groups of each step, void "
            "ones included."
        )
        parts.append(figure(plots.length_figure(data.rows), "lengths", caption))
    if data.rollouts is not None:
        caption = (
            f"All {len(data.rollouts):,} recorded samples of the run. 'stop': the model ended the completion (end "
            "token or stop string); 'length': it was cut at the token limit."
        )
        parts.append(figure(plots.length_histogram_figure(data.rollouts), "length-histogram", caption))
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
    drawn = figure(plots.prediction_figure(data.rows, rollouts), "predictions", caption)
    by_route = []
    for route, pool in product(rollouts.route.counts(), rollouts.pool.counts()):
        mask = rollouts.route.equal(route) & rollouts.pool.equal(pool)
        if not mask.any():
            continue
        known = mask & ~np.isnan(rollouts.predicted_length)
        means = (
            _mean(lengths[known].astype(float), 0) for lengths in (rollouts.predicted_length, rollouts.output_length)
        )
        longest = rollouts.output_length[mask].max()
        by_route.append((route, pool, f"{mask.sum():,}", f"{known.sum():,}", *means, str(longest)))
    columns = (
        "route",
        "pool",
        "samples",
        "predicted",
        "their mean predicted length",
        "their mean length",
        "longest of all",
    )
    by_prediction = [row for row in data.rows if row.dispatch_by_prediction]
    saved = mean(row.dispatch_saved for row in by_prediction)
    text = f"{len(by_prediction)} of {len(data.rows)} steps were dispatched by predicted length"
    text += f"; mean saving in them {100 * saved:.1f} % of generation time (simulated)." if saved is not None else "."
    return section("Predicted lengths and dispatch", drawn, table(columns, by_route), note(text))


def _step_time(data: RunData) -> str:
    caption = (
        "Seconds of each step in which samples were being generated, in which the trainer computed, and in which "
        "generation waited for new weights; generation and training may overlap, so these need not add up to the step. "
        "Bubbles: the share of the step in which instances, or the trainer, were idle."
    )
    parts = [figure(plots.step_time_figure(data.rows), "step-time", caption)]
    if plots.varies(data.rows, "instances"):
        caption = (
            "Instances were added or removed during the run: the times of both stages, and the number of instances."
        )
        parts.append(figure(plots.instances_figure(data.rows), "instances", caption))
    return section("Step time", *parts)


def _timeline(data: RunData) -> str:
    spans = data.spans
    spent = spans.seconds_by_name()
    # The kinds of work that take most time get their own colours; the others share one, as 'other'.
    ordered = sorted(spent, key=lambda name: -spent[name])
    if len(ordered) > TIMELINE_KINDS:
        ordered = ordered[: TIMELINE_KINDS - 1]
    colours = dict(zip(ordered, plots.COLOURS, strict=False))
    colours.setdefault(OTHER, plots.COLOURS[-1])
    parts = []
    for index, window in enumerate(choose_windows(data.rows, spans)):
        shown = timeline_tracks(spans, window)
        for track in shown:
            track.bars = [bar if bar.name in colours else replace(bar, name=OTHER) for bar in track.bars]
        names = {bar.name for track in shown for bar in track.bars}
        used = {name: colour for name, colour in colours.items() if name in names}
        caption = (
            "What every instance and the trainer did, from trace.json (open it in ui.perfetto.dev for all "
            "of the run). Thin bars inside one row are samples generated at the same time; blank is idle."
        )
        parts.append(figure(plots.timeline_figure(shown, window, used), f"timeline-{index}", caption))
    return section("Timeline", *parts)


def _training(data: RunData) -> str:
    why = data.status.why_types if data.status else ""
    caption = (
        "Per optimizer step. Loss: the algorithm's objective over the step's tokens. Entropy: of the policy, per "
        "completion token. Trainer-generator mismatch: mean absolute difference between the trainer's and the "
        "generator's log-probability of the sampled tokens (0 when both compute identically, in the same type and "
        "with the same weights)."
    )
    packing = data.status.why_packing if data.status else ""
    types = f"<p>Compute types: {escape(why)}.</p>" if why else ""
    types += f"<p>Packing: {escape(packing)}.</p>" if packing else ""
    return section("Training", types, figure(plots.training_figure(data.rows), "training", caption))


def _tasks(rollouts: RunRollouts) -> str:
    rows = []
    half = (int(rollouts.step.min()) + int(rollouts.step.max()) + 1) / 2
    for task in rollouts.task.counts():
        mask = rollouts.task.equal(task)
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
                percent(float(np.mean(rollouts.finish_reason.equal("length")[mask]))),
                str(np.count_nonzero(np.isnan(rollouts.reward[mask]))),
            )
        )
    columns = ("task", "samples", "mean reward", "first half of the steps", "second half")
    shown = table((*columns, "length p50 / p90 / max", "cut at limit", "void rewards"), rows)
    return section("Tasks", shown, note("Over all recorded samples of the run."))


def _mean(values: np.ndarray, decimals: int = 3) -> str:
    present = values[~np.isnan(values)]
    return f"{present.mean():.{decimals}f}" if len(present) else NONE


def _trouble(data: RunData) -> str:
    if not data.rows:
        return ""
    rows = data.rows
    replaced = total(row.groups_void for row in rows)
    cut = [  # groups are of one size, and their void samples are in the share as well
        (row.truncated_fraction, n) for row in rows if (n := row.groups_total) and row.truncated_fraction is not None
    ]
    share_cut = sum(share * n for share, n in cut) / sum(n for _, n in cut) if cut else None
    no_gradient = "all samples that are compared had the same reward, or none has a loss: they teach nothing"
    too_long = highest(row.prompts_too_long for row in rows)  # each row counts from the run's start
    sent = total(row.weight_bytes_sent for row in rows)
    figures = [
        ("void rewards", void_share(rows), "the reward failed: in no mean, and not trained"),
        ("groups with too few rewards", fixed(replaced, 0), "replaced by other groups"),
        (
            "completions cut at the token limit",
            percent(share_cut),
            "share of the samples of all steps' groups, void ones included",
        ),
        ("groups without gradient", groups_without_gradient(rows), no_gradient),
        ("prompts too long", fixed(too_long, 0), "left out: no room for a completion"),
        (
            "weights sent",
            NONE if sent is None else decimal(sent),
            "to all sites, over the run, copies on the trainer's own node included",
        ),
    ]
    if drafted := total(row.drafted_tokens for row in rows):
        accepted = (total(row.accepted_tokens for row in rows) or 0.0) / drafted
        figures.append(("drafted tokens accepted", percent(accepted), f"of {drafted:,.0f} (speculative decoding)"))
    parts = [table(("what", "how many", "meaning"), figures)]
    if data.rollouts is not None and (frequent := error_counts(data.rollouts)):
        parts.append(table(("most frequent failures of rewards", "samples"), [(text, str(n)) for text, n in frequent]))
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
            parts += [_sample(data.rollouts, index, *map(_shortened, texts[index])) for index in indices]
    return section("Samples", *parts)


def _sample(rollouts: RunRollouts, index: int, prompt: str, completion: str) -> str:
    reward = float(rollouts.reward[index])
    facts = (
        f"{rollouts.task[index]}, step {rollouts.step[index]}, reward {number(None if np.isnan(reward) else reward)}, "
        f"{rollouts.output_length[index]} tokens, ended by {rollouts.finish_reason[index]}"
    )
    why = rollouts.reward_error[index]
    error = f'<p class="bad">void reward: {escape(why)}</p>' if why else ""
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
    items = "".join(f"<li>{escape(text)}</li>" for text in data.notes)
    return section("What this page could not show", f"<ul>{items}</ul>" if items else "")
