"""Report sections that check how a run learns: evaluation, length audit, schedule and off-policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from streamrl.report import check_plots, plots
from streamrl.report.page import figure, note, section, table, warning_box
from streamrl.report.run_data import RunData
from streamrl.report.summary import NONE, count, fixed, highest, mean, number, percent, total
from streamrl.rollouts.length_audit import StepAudit, has_limit
from streamrl.run_dir.evaluations import EvaluationRow, Scores, best
from streamrl.run_dir.status import SINCE


def evaluation(data: RunData) -> str:
    """Show curves over versions, a table of all evaluations, and the best and newest one by task."""
    rows = sorted(data.evaluations, key=lambda row: row.step)  # they are in the order in which they ended
    top = best(rows)
    if top is None:
        return ""
    k = max(len(row.overall.pass_at) for row in rows)
    caption = (
        "Held-out prompts, the same for every version; training continues meanwhile. Reward: the mean over prompts, "
        "of one greedy completion each and of the sampled ones. pass@k: the chance that at least one of k sampled "
        "completions reaches the threshold (unbiased estimate). The ring marks the best version: the highest greedy "
        "reward (without greedy completions, the highest sampled one) that is mostly of its own tokens and over most "
        "prompts."
    )
    columns = ["version", "greedy reward", "greedy passes", "sampled reward", "pass@1"]
    columns += [f"pass@{k}"] if k > 1 else []
    columns += ["tokens per completion", "void rewards", "seconds", "tokens by other weights"]
    cells = []
    for row in rows:
        figures = _figures(row.overall, k)
        rest = (f"{row.seconds:.0f}", percent(row.other_version_share))
        cells.append((f"{row.step} (best)" if row is top else str(row.step), *figures, *rest))
    shown = [("best", top), ("newest", rows[-1])] if rows[-1] is not top else [("best and newest", top)]
    return section(
        "Evaluation",
        figure(check_plots.evaluation_figure(rows, top), "evaluation", caption),
        table(columns, cells),
        *(_by_task(title, row, k, columns) for title, row in shown),
    )


def _by_task(title: str, row: EvaluationRow, k: int, columns: Sequence[str]) -> str:
    if len(row.by_task) < 2:
        return ""
    rows = [(task, str(scores.prompts), *_figures(scores, k)) for task, scores in row.by_task.items()]
    heads = (f"{title}: version {row.step}", "prompts", *columns[1 : len(rows[0]) - 1])
    return table(heads, rows)


def _figures(scores: Scores, k: int) -> list[str]:
    found = [fixed(scores.reward_greedy, 3), percent(scores.pass_greedy), fixed(scores.reward_sampled, 3)]
    found.append(fixed(scores.pass_at[0], 3) if scores.pass_at else NONE)
    if k > 1:
        found.append(fixed(scores.pass_at[-1], 3) if len(scores.pass_at) == k else NONE)
    return [*found, f"{scores.length_mean:.0f}", str(scores.rewards_void)]


def length_audit(data: RunData) -> str:
    """Show lengths issued, finished, trained and dropped, with a warning box when trained and issued differ."""
    # A resumed run may have another token limit, and buckets with different edges cannot be added up.
    newest = next((row.length_audit for row in reversed(data.rows) if row.length_audit), None)
    if newest is None:
        return ""
    audited = {row.step: row.length_audit for row in data.rows if row.length_audit is not None}
    same = {step: audit for step, audit in audited.items() if audit.edges == newest.edges}
    audits = list(same.values())
    warned = [(row.step, row.length_bias_warning) for row in data.rows if row.length_bias_warning]
    parts = []
    if warned:
        step, warning = warned[-1]
        parts.append(warning_box(f"In {len(warned)} of {len(data.rows)} steps, last in step {step}: {warning}"))
    last = "completions that reached the token limit" if has_limit(newest.edges) else "all longer episodes, too"
    caption = (
        "Top left: all samples of the run by length. Issued: those of each step's own batch, as far as they had a "
        "length when the step ended; finished, trained and dropped count in the step in which it happened. The last "
        f"bucket holds {last}. Top right: mean lengths over the newest settled batches (those "
        "in which every sample has been trained or dropped). Below: how the lengths of each step are "
        "distributed; darker means a larger share."
    )
    parts.append(figure(check_plots.length_audit_figure(list(same), audits), "length-audit", caption))
    parts.append(table(("length, tokens", "issued", "finished", "trained", "dropped"), _buckets(audits)))
    reasons = sum((Counter(audit.drop_reasons) for audit in audits), Counter[str]())
    if reasons:
        parts.append(table(("dropped because", "samples"), [(why, f"{n:,}") for why, n in reasons.most_common()]))
    parts.append(note(_compared(newest)))
    return section("Length audit", *parts)


def _buckets(audits: Sequence[StepAudit]) -> list[tuple[str, ...]]:
    edges = audits[0].edges
    names = [f"{low} to {high - 1}" if high - 1 > low else str(low) for low, high in pairwise(edges)]
    if not has_limit(edges):
        names[-1] = f"{edges[-2]} and more"
    columns = [check_plots.over_steps(audits, kind) for kind in check_plots.KINDS]
    rows = []
    for index, name in enumerate(names):
        if any(column[index] for column in columns):
            rows.append((name, *(f"{column[index]:,}" for column in columns)))
    open_samples = sum(audit.open for audit in audits)
    if open_samples:
        rows.append(("no length when their batch's step ended", f"{open_samples:,}", "", "", ""))
    issued, *others = (int(column.sum()) for column in columns)
    return [*rows, ("all", *(f"{count:,}" for count in (issued + open_samples, *others)))]


def _compared(audit: StepAudit) -> str:
    found = audit.comparison
    text = (
        f"The newest {found.cohorts} settled batches: {found.groups_trained} groups trained, {found.groups_left_out} "
        f"left out; mean length issued {fixed(found.mean_issued, 1)}, trained {fixed(found.mean_trained, 1)} tokens. "
    )
    if found.p_value is not None:
        text += f"Kolmogorov-Smirnov test of the two kinds of groups: p = {number(found.p_value, 2)}. "
    elif found.groups_left_out:
        text += "Too few groups on one side for a test. "
    return text + (
        f"{percent(audit.unfinished_share)} of the samples issued for the newest batches had not finished at the last "
        "step: they have no length yet and are in no figure but this one."
    )


def schedule(data: RunData) -> str:
    """Show how far off-policy the steps were, and what the schedule cost."""
    rows = data.rows
    if not plots.has(rows, "staleness_mean", "ess_token", "importance_ratio_max"):
        return ""
    caption = (
        "Per optimizer step. Staleness: weight versions between the sampling of a token and the step that trains on "
        "it. Exposed weight sync: seconds in which generation waited for new weights. Importance ratio: the trainer's "
        "probability of a token over the generator's. Effective sample size: (sum of weights)² / (count x sum of "
        "squared weights); 1 means that all count the same. Masked: tokens left out of the loss; truncated: tokens "
        "whose weight was cut to its cap; clipped: tokens whose policy ratio was clipped."
    )
    refused, words = (
        (data.status.refused, data.status.refused_words and f": {data.status.refused_words}")
        if data.status
        else ({}, "")
    )
    facts = [
        ("mean staleness", fixed(mean(row.staleness_mean for row in rows)), "weight versions, over all steps"),
        ("largest staleness", fixed(highest(row.staleness_max for row in rows), 0), ""),
        ("lowest effective sample size", fixed(_lowest(data)), "of the sequences' weights, else of the tokens'"),
        ("steps without an update", str(sum(row.changed_nothing for row in rows)), "too far off-policy, or refused"),
        ("weights verified", *_verified(data)),
        ("steps refused", str(sum(row.step_refused is not None for row in rows)), _last_refusal(data)),
        ("groups dropped", count(total(row.groups_dropped for row in rows)), "begun or generated, never trained"),
        ("samples parked", count(total(row.samples_parked for row in rows)), "preempted, to continue later"),
        ("messages turned away", str(sum(sum(peers.values()) for peers in refused.values())), f"{SINCE}{words}"),
        ("weights published", count(total(row.weight_publications for row in rows)), "versions"),
    ]
    chosen = data.status.schedule_note if data.status else ""
    return section(
        "Schedule and off-policy",
        note(f"The schedule's choice: {chosen}") if chosen else "",
        figure(check_plots.schedule_figure(rows), "schedule", caption),
        table(("what", "value", "meaning"), facts),
    )


def _lowest(data: RunData) -> float | None:
    return min((row.ess for row in data.rows if row.ess is not None), default=None)


def _last_refusal(data: RunData) -> str:
    """Describe the newest refused step; if there is none, what would refuse one."""
    refused = [row for row in data.rows if row.step_refused is not None]
    if not refused:
        return "every loss, gradient and update was finite"
    return f"last in step {refused[-1].step}: {refused[-1].step_refused}"


def _verified(data: RunData) -> tuple[str, str]:
    """Return (number of versions, description): how far the instances computed what the trainer computes."""
    if data.status is None or not data.status.verified.words:
        return NONE, "instances and trainer have not been compared"
    found = data.status.verified
    return f"{found.versions} versions", f"weights {found.words}{found.mismatch and '; mismatch: ' + found.mismatch}"
