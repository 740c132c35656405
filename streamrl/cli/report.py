"""`streamrl report DIR`: writes a run's report and prints its main figures."""

from __future__ import annotations

from pathlib import Path

import click

from streamrl.errors import UserError


@click.command(name="report")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
def command(directory: Path) -> None:
    """Write DIR/report.html for the run in DIR, finished or not.

    The page is self-contained. A report of a running job can be written at any time.

    \b
    Example:
      streamrl report runs/demo
    """
    from streamrl.report.run_report import write_report
    from streamrl.report.summary import headline_figures
    from streamrl.rollouts.plain_text import shown
    from streamrl.run_dir import evaluations, layout
    from streamrl.run_dir.metrics import read_metrics

    try:
        path = write_report(directory)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{directory}: its report cannot be written: {error}") from error
    rows = read_metrics(directory / layout.METRICS)
    if rows:
        for what, value in headline_figures(rows):
            click.echo(f"{what:<28}{shown(value)}")
    else:
        click.echo("No optimizer step has finished yet.")
    top = evaluations.best(evaluations.read_evaluations(directory / layout.EVALUATIONS))
    if top is not None:
        click.echo(f"{'best evaluation':<28}{shown(evaluations.evaluation_line(top))}")
    if rows and rows[-1].length_bias_warning:
        click.echo(f"{'warning':<28}{shown(rows[-1].length_bias_warning)}")
    click.echo(f"{'report':<28}{shown(path)}")
