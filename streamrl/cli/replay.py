"""`streamrl replay DIR STEP`: a refused optimizer step computed again, to see what was not finite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from streamrl.training.step_replay import ReplayedGroup


@click.command(name="replay")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("step", type=click.IntRange(min=1))
def command(directory: Path, step: int) -> None:
    """Compute STEP of the run in DIR again, which the trainer has refused because something was not finite.

    It loads the newest checkpoint before the step, or the initial model if there is none, and the micro-batches that
    were kept. Every group is computed alone. The table has its loss and gradient, and the first module whose output, or
    its gradient, is not finite. Nothing in DIR is changed.

    \b
    Example:
      streamrl replay runs/demo 12
    """
    from streamrl.config.load import load_resolved
    from streamrl.plain_files import check_plain
    from streamrl.rollouts.kept_micro_batches import KeptMicroBatches
    from streamrl.rollouts.plain_text import shown
    from streamrl.run_dir import layout

    cluster, run = load_resolved(directory)
    check_plain(directory, apart=layout.FOREIGN)  # the model's library opens files by itself
    kept = KeptMicroBatches(directory / layout.REFUSED).read(step)
    click.echo(f"step {step} was refused: {shown(kept.cause)}")
    from streamrl.machine.compute_type import decided
    from streamrl.machine.model_files import resolve_model
    from streamrl.report.terminal import TextConsole
    from streamrl.run_dir.checkpoints import CheckpointFolder
    from streamrl.training.step_replay import StepReplay

    computing = decided(run, cluster.hardware == "cuda")
    replay = StepReplay(
        computing, resolve_model(run.model.path), CheckpointFolder(directory / layout.CHECKPOINTS), step
    )
    if replay.checkpoint is None:
        weights, gap = "the initial model", step - 1
    else:
        weights, gap = f"the checkpoint of step {replay.checkpoint}", step - 1 - replay.checkpoint
    older = (
        f", {gap} {'step' if gap == 1 else 'steps'} older than those of the run: what depends on them may not show"
        if gap
        else ""
    )
    click.echo(f"computing in {computing.model.dtype} with the weights of {weights}{older}")
    if (bad := replay.bad_weight()) is not None:
        click.echo(f"{shown(bad)}, so that nothing else can be")
    groups = list(replay.groups(kept))
    TextConsole().print(_table(groups))
    wrong = [one for one in groups if not one.finite]
    click.echo(f"{len(wrong)} of {len(groups)} groups are not finite" if wrong else "every group is finite now")


def _table(groups: list[ReplayedGroup]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("micro-batch", "group", "samples", "tokens", "loss", "gradient norm", "not finite"):
        table.add_column(title, overflow="fold")
    for one in groups:
        ids = [sample for sample in one.samples if sample]
        shown = ids[0] if len(ids) == 1 else f"{ids[0]} .. {ids[-1]}" if ids else str(len(one.samples))
        table.add_row(
            str(one.micro_batch),
            one.group_id,
            shown,
            str(one.tokens),
            f"{one.loss:.4g}",
            f"{one.grad_norm:.4g}" + ("" if one.critic_grad_norm is None else f", critic {one.critic_grad_norm:.4g}"),
            "; ".join(text for text in (one.inputs, one.where) if text),
            style=None if one.finite else "bold red",
        )
    return table
