"""A run's state as rich renderables or plain lines, for the live view and `streamrl status`. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.report.fitted_parts import SPACE, FittedParts, PicturePart
from streamrl.report.process_rows import WARNING, colour_of, process_rows, roles_rows, stage_rows, start_rows
from streamrl.report.start_lines import begun_at, present, with_stages
from streamrl.report.summary import bars, duration, fixed, number, percent, void_share
from streamrl.report.terminal import plain_table
from streamrl.run_dir.evaluations import EvaluationRow, evaluation_line
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.newest_steps import StepSums
from streamrl.run_dir.remote_site import obstacle
from streamrl.run_dir.start_stages import Stage
from streamrl.run_dir.status import SINCE, RunStatus

SHOWN_STEPS = 6
"""Newest steps in the table."""
BAR_WIDTH = 32
"""Columns of a progress bar."""
SPARKLINE_STEPS = 60
"""Newest steps in the reward's sparkline."""
WAIT_SHOWN_AFTER_S = 5.0
"""Seconds after which a wait is shown; shorter ones are normal."""
ESS_SHOWN_BELOW = 0.999
"""Effective sample size below which it is shown; above it, all samples weigh the same."""


def stale_message(status: RunStatus, now: float) -> str | None:
    """Return a warning if there is no sign of the controller's writing its status, else None."""
    age = status.stale_for(now)
    if age is None:
        return None
    if age < 0:
        return (
            f"the last update is dated {duration(-age)} from now, so its age is unknown: a clock was set back, or "
            "differs from that of the run's machine"
        )
    return f"no update for {duration(age)}: the controller hangs, was killed, or cannot be seen from here"


def header(status: RunStatus, now: float) -> Text:
    """Return the head of the view: run, model, schedule, state, step and times."""
    about = (status.model, status.types, status.schedule, status.hardware)
    text = Text.assemble((status.run, "bold"), *(f"  {part}" for part in about if part), "\n")
    text.append(status.state, style=colour_of(status.state))
    text.append(f"  step {status.step}/{status.steps}  elapsed {duration(status.elapsed(status.as_of(now)))}")
    if status.is_live(now) and status.eta_s is not None:
        text.append(f"  left {duration(status.eta_s)}")
    for trouble in (status.short_error, stale_message(status, now)):
        if trouble:
            text.append(f"\n{trouble}", style=WARNING)
    return text


def step_progress(status: RunStatus) -> tuple[Table, Table]:
    """Return progress bars of the samples generated and trained in this step, and the progress of its groups."""
    progress = status.progress
    table, groups = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
    for one in (table, groups):
        one.add_column(min_width=len("generated"))
    for label, done in (("generated", progress.samples_finished), ("trained", progress.samples_trained)):
        bar = ProgressBar(total=max(1, progress.samples_total), completed=done, width=BAR_WIDTH)
        table.add_row(label, bar, f"{done}/{progress.samples_total} samples")
    tokens = f"{progress.tokens_generated:,} tokens"
    groups.add_column(min_width=BAR_WIDTH)
    groups.add_row("groups", f"{progress.groups_complete}/{progress.groups_total} complete", tokens)
    return table, groups


def length_histogram(status: RunStatus) -> Text:
    """Return the output lengths finished in this step as a row of blocks with its scale.

    Above it, on the same scale, are the lengths predicted for all samples of the step.
    """
    lengths, predicted = status.progress.length_counts, status.progress.predicted_length_counts
    text = Text()
    for label, found, colour in (("predicted", predicted, "magenta"), ("lengths", lengths, "cyan")):
        if found is not None:
            scale = f"0..{found.width * len(found.counts)}, p50 {found.median}, max {found.longest}"
            text = Text.assemble(text, f"{label:<11}", (_blocks(found.counts), colour), f"  {scale}\n")
    if lengths is None and not status.progress.samples_finished:
        text.append("lengths    none finished in this step yet", style="dim")
    text.rstrip()
    return text


def _blocks(counts: Sequence[int]) -> str:
    # A bin without samples stays blank, so that it is not mistaken for a small one.
    return bars([0, *[count or None for count in counts]])[1:]


def steps_table(rows: Sequence[MetricsRow], most: int = SHOWN_STEPS) -> Table:
    """Return a table of the last `most` steps' metrics, newest last; times in seconds; it fits 76 columns."""
    columns = ("step", "reward", "loss", "grad", "len 50/90/max", "time", "gen", "train", "smp/s", "idle g/t")
    table = plain_table(*columns, text_columns=0)
    table.padding = (0, 1, 0, 0)
    for row in rows[-most:]:
        lengths = (row.output_length_p50, row.output_length_p90, row.output_length_max)
        table.add_row(
            str(row.step),
            fixed(row.reward_mean, 3),
            number(row.loss),
            number(row.grad_norm),
            "/".join(fixed(length, 0) for length in lengths),
            fixed(row.step_time_s, 1),
            fixed(row.generate_time_s, 1),
            fixed(row.train_time_s, 1),
            fixed(row.samples_per_s, 1),
            f"{percent(row.bubble_fraction_generation)}/{percent(row.bubble_fraction_training)}",
        )
    return table


def reward_sparkline(rows: Sequence[MetricsRow]) -> Text:
    """Return a sparkline of the reward over the last steps, with its range."""
    rewards = [row.reward_mean for row in rows[-SPARKLINE_STEPS:]]
    present = [reward for reward in rewards if reward is not None]
    if not present:
        return Text("")
    return Text.assemble(
        "reward     ",
        (bars(rewards), "green"),
        f"  {min(present):.3f} to {max(present):.3f} over {len(rewards)} steps",
    )


def waits_text(status: RunStatus, now: float) -> Text:
    """Return the three longest waits, oldest first: they show what a stuck run is stuck on."""
    waits = sorted(status.waits, key=lambda wait: wait.since)[:3]
    lines = [
        f"{wait.owner} waits for {wait.waiting_for}: {duration(now - wait.since)} of {duration(wait.limit_s)}"
        for wait in waits
        if now - wait.since > WAIT_SHOWN_AFTER_S
    ]
    return Text("\n".join(lines), style="yellow")


def ranker_text(status: RunStatus) -> Text:
    """Describe how well lengths are predicted, whether dispatch uses the predictions, and what that saves."""
    ranker, latest = status.ranker, status.latest
    if ranker.recall_at_20 is None and not ranker.trusted:
        return Text("ranker     nothing predicted and finished yet: dispatch by load", style="dim")
    trust = ("trusted", "green") if ranker.trusted else ("not trusted", "yellow")
    by = "predicted length" if ranker.used else "load"
    by += f" ({ranker.doubts})" if ranker.doubts else ""
    text = f"  recall@20 {fixed(ranker.recall_at_20)}, tau {fixed(ranker.kendall_tau)}; dispatch by {by}"
    if latest is not None and latest.dispatch_by_prediction and latest.dispatch_saved is not None:
        text += f", saved {100 * latest.dispatch_saved:.1f} % of generation (simulated)"
    return Text.assemble("ranker     ", trust, text)


def off_policy(row: MetricsRow) -> list[str]:
    """Return a step's staleness ('stale mean/max', weight versions) and effective sample size; [] if on-policy."""
    parts = []
    if row.staleness_max:
        parts.append(f"stale {fixed(row.staleness_mean, 1)}/{fixed(row.staleness_max, 0)}")
    if row.ess is not None and row.ess < ESS_SHOWN_BELOW:
        parts.append(f"ESS {row.ess:.2f}")
    return parts


def no_gradient(row: MetricsRow) -> str:
    """Say that no token of a step has a loss, and why if that is plain; '': some have one, or it changed nothing.

    The optimizer still moves the weights, by its momentum and by weight decay.
    """
    if row.tokens_trained != 0 or row.changed_nothing:
        return ""
    cause = ""
    if row.samples_left_out and row.samples_left_out == row.samples_total:
        cause = ": all answers reach the token limit"
    elif row.samples_left_out == 0 and row.groups_no_gradient == row.groups_total:
        cause = ": all rewards of each group are equal"
    return f"no gradient{cause}"


def run_notes(
    status: RunStatus,
    rows: Sequence[MetricsRow],
    evaluations: Sequence[EvaluationRow],
    sums: StepSums | None = None,
) -> list[tuple[str, str, str]]:
    """Return (label, text, colour) of each remark on the run that its figures do not show.

    The sums, by default those over the rows, say of which steps they are if these begin behind the first one.
    """
    notes = []
    sums = sums or StepSums.of(rows)
    whole = sums.first <= 1
    rows_given = f"steps {sums.first} to {rows[-1].step}" if rows else ""
    if status.schedule_note:
        notes.append(("schedule", status.schedule_note, ""))
    if scaling := scaling_note(status):
        notes.append(("instances", scaling, ""))
    if rows and rows[-1].samples_void:
        notes.append(("rewards", f"{void_share(rows[-1:])} in the last step", "yellow"))
    if rows and (stale := off_policy(rows[-1])):
        notes.append(("off-policy", ", ".join(stale), ""))
    if rows and (nothing := no_gradient(rows[-1])):
        notes.append(("training", f"{nothing} in the last step", "yellow"))
    if evaluations:
        notes.append(("evaluation", evaluation_line(evaluations[-1], evaluations), "green"))
    if rows and rows[-1].usd is not None:
        each = rows[-1].usd_per_1k_samples
        of_last = f"{number(each)} per 1,000 samples in the last step"
        steps = "the finished steps" if whole else rows_given
        notes.append(("cost", f"{sums.usd:.4g} USD for {steps}, {of_last}", ""))
    if status.verified.words:
        notes.append(("weights", status.verified.words, ""))
    if status.refused_words:
        notes.append(("turned away", f"{status.refused_words} ({SINCE})", "yellow"))
    if status.disk_warning:
        notes.append(("disk", status.disk_warning, WARNING))
    if status.verified.mismatch:
        notes.append(("mismatch", status.verified.mismatch, WARNING))
    if rows and rows[-1].mismatch_warning:
        notes.append(("mismatch", rows[-1].mismatch_warning, WARNING))
    if refused := sums.last_refused:
        where = "this run" if whole else rows_given
        words = f"step {refused.step}: {refused.step_refused} ({sums.refused} in {where})"
        notes.append(("refused", words, WARNING))
    if rows and rows[-1].length_bias_warning:
        notes.append(("warning", rows[-1].length_bias_warning, WARNING))
    return notes


def scaling_note(status: RunStatus) -> str:
    """Describe the pools that are not at their target size, and the last scaling decision; '' if there is nothing."""
    scaling = status.scaling
    notes = [
        f"{pool}: {scaling.ready.get(pool, 0)} of {wanted} ready"
        for pool, wanted in scaling.wanted.items()
        if status.state == "running" and not wanted == scaling.ready.get(pool) == scaling.there.get(pool)
    ]
    return "; ".join([*notes, scaling.note] if scaling.note else notes)


def sites_table(status: RunStatus) -> Table:
    """Return a table of the sites behind links."""
    table = plain_table("site", "round trip", "samples in flight", "compression", "clock offset", "")
    for name, site in status.sites.items():
        notes = [site.absence] if site.away else []
        notes += [f"it does not hear the controller for {site.controller_silent_s:.0f} s"] if site.is_deaf else []
        notes += [f"its link for weights is silent for {site.publisher_silent_s:.0f} s"] if site.lacks_weights else []
        notes += [text] if (text := obstacle(site.empty_connections)) else []
        notes += ["congested: it starts nothing new"] if site.congested else []
        notes += [f"not used any more: {site.excluded}"] if site.excluded else []
        notes += [f"{site.weights_refetched} damaged parts of weights fetched again"] if site.weights_refetched else []
        table.add_row(
            name,
            "" if site.rtt_ms is None else f"{site.rtt_ms:.0f} ms",
            str(site.samples_waiting),
            "" if site.compression is None else f"{site.compression:.1f} x",
            "" if site.clock_offset_s is None else f"{site.clock_offset_s:+.2f} s",
            Text("; ".join(notes), style="yellow"),
        )
    return table


CUTS = (
    (SPACE, 0),
    ("ranker", 0),
    ("processes", 8),
    ("steps", 4),
    ("lengths", 0),
    ("weights", 0),
    ("schedule", 0),
    ("off-policy", 0),
    ("processes", 5),
    ("instances", 0),
    ("reward", 0),
    ("steps", 2),
    ("processes", 3),
    ("cost", 0),
    ("turned away", 0),
    ("groups", 0),
    ("evaluation", 0),
    ("processes", 1),
    ("sites", 0),
    ("steps", 1),
    ("rewards", 0),
    ("training", 0),
    ("samples", 0),
    ("waits", 0),
    ("processes", 0),
)
"""What a window that is too low does without, in this order: (part, lines of it that are left for now).

Head, warnings and the newest step always stay.
"""


def _picture(parts: Sequence[PicturePart], height: int | None) -> Panel:
    """Return the parts in a frame that takes at most `height` lines; None: whatever they take."""
    fitted = FittedParts(parts, CUTS, None if height is None else height - 2)
    return Panel(fitted, title="streamrl", border_style="dim", expand=True)


def render_start(run: str, stages: Mapping[str, Stage], now: float, height: int | None = None) -> RenderableType:
    """Return the view before the controller has written its first status.

    Args:
        run: the run's name.
        stages: the start-up stage that each process last reported.
        now: unix seconds.
        height: lines that it may take; None: any number.
    """
    elapsed = duration(now - begun_at(stages, now))
    head = Text.assemble((run, "bold"), f"  elapsed {elapsed}; the controller has not reported yet")
    table = PicturePart("processes", len(stage_rows(stages)), partial(start_rows, stages, now), says=True)
    return _picture([PicturePart.of("head", head), PicturePart.of(SPACE, ""), table], height)


def _notes_part(label: str, notes: Sequence[tuple[str, str, str]], width: int) -> PicturePart:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=width)
    for what, text, colour in notes:
        table.add_row(what, Text(text, style=colour))
    return PicturePart.of(label, table)


def render(
    status: RunStatus,
    rows: Sequence[MetricsRow],
    now: float,
    evaluations: Sequence[EvaluationRow] = (),
    stages: Mapping[str, Stage] | None = None,
    height: int | None = None,
    sums: StepSums | None = None,
) -> RenderableType:
    """Return the whole view, or as much of it as fits.

    Times of a run that has ended, or whose controller has stopped writing, stand still.

    Args:
        status: the run's status.
        rows, now, evaluations, stages: see `PlainLines.lines`; of rows the last `SPARKLINE_STEPS` are shown.
        height: lines that it may take; None: any number.
        sums: the sums over all steps of which there are rows; None: those over `rows`.
    """
    seen = status.as_of(now)
    starts = present(status, stages or {}) if status.state == "starting" else {}
    status = with_stages(status, stages or {})
    notes = run_notes(status, rows, evaluations, sums)
    label_width = max([10, *(len(what) for what, _, _ in notes)])
    space = PicturePart.of(SPACE, "")
    parts = [PicturePart.of("head", header(status, now))]
    if warnings := [note for note in notes if note[2] == WARNING]:
        parts.append(_notes_part("warnings", warnings, label_width))
    parts.append(space)
    if status.state in ("running", "stopping"):
        samples, groups = step_progress(status)
        parts += [PicturePart.of("samples", samples), PicturePart.of("groups", groups)]
        parts += [
            PicturePart.of("lengths", length_histogram(status)),
            PicturePart.of("ranker", ranker_text(status)),
            space,
        ]
    if starts:
        parts += [
            PicturePart("processes", len(stage_rows(starts)), partial(start_rows, starts, seen), says=True),
            space,
        ]
    elif status.roles:
        parts += [
            PicturePart("processes", len(process_rows(status)), partial(roles_rows, status, now), says=True),
            space,
        ]
    if status.sites:
        parts += [PicturePart.of("sites", sites_table(status)), space]
    if rows:
        parts.append(PicturePart("steps", min(SHOWN_STEPS, len(rows)), partial(steps_table, rows)))
        parts.append(PicturePart.of("reward", reward_sparkline(rows)))
    parts += [_notes_part(note[0], [note], label_width) for note in notes if note[2] != WARNING]
    if not status.final and (waits := waits_text(status, seen)):
        parts.append(PicturePart.of("waits", waits))
    return _picture(parts, height)


def step_line(row: MetricsRow, before: MetricsRow | None, steps: int, left_s: float | None) -> str:
    """Describe one optimizer step in one line, for logs."""
    change = ""
    if before is not None and row.reward_mean is not None and before.reward_mean is not None:
        change = f" ({row.reward_mean - before.reward_mean:+.2f})"
    samples = "" if row.samples_total is None else f"{row.samples_total} samples "
    parts = [
        f"step {row.step}/{steps}",
        f"reward {fixed(row.reward_mean)}{change}",
        f"len p50 {fixed(row.output_length_p50, 0)} p90 {fixed(row.output_length_p90, 0)} "
        f"max {fixed(row.output_length_max, 0)}",
        f"loss {number(row.loss)}",
        f"grad {number(row.grad_norm)}",
        f"mismatch {number(row.logprob_gap_mean, 2)}",
        f"step {fixed(row.step_time_s, 1)} s (gen {fixed(row.generate_time_s, 1)}, train {fixed(row.train_time_s, 1)})",
        f"{samples}{fixed(row.samples_per_s, 1)}/s",
        *off_policy(row),
    ]
    if row.step_skipped:
        skipped = "no optimizer step" if row.changed_nothing else f"update {(row.optimizer_updates or 0) + 1} skipped"
        parts.append(f"{skipped}: " + ("not finite" if row.step_refused else "too far off-policy"))
    if row.step_refused:
        parts.append(f"refused: {row.step_refused}")
    if row.ranker_recall_at_20 is not None:
        parts.append(f"recall@20 {fixed(row.ranker_recall_at_20)}")
    if row.dispatch_by_prediction and row.dispatch_saved is not None:
        parts.append(f"dispatch saved {100 * row.dispatch_saved:.1f}% (simulated)")
    if row.drafted_tokens:
        parts.append(f"drafts accepted {row.accepted_tokens or 0}/{row.drafted_tokens}")
    if row.usd_per_1k_samples is not None:
        parts.append(f"{row.usd_per_1k_samples:.3g} USD/1k")
    if row.groups_no_gradient:
        parts.append(f"{row.groups_no_gradient} groups without gradient")
    if nothing := no_gradient(row):
        parts.append(nothing)
    if row.samples_void:
        parts.append(void_share([row]))
    if left_s is not None and row.step < steps:
        parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)
