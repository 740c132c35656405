"""Options of the running command that stand on its command line, apart from those that have their defaults."""

from __future__ import annotations

import click
from click.core import ParameterSource


def given_options(*names: str) -> list[str]:
    """Return those of these parameters that stand on the command line, as options."""
    context = click.get_current_context()
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    return [options[name] for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
