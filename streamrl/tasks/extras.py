"""Imports of the packages that only some tasks need, with a readable message when one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from streamrl.errors import UserError


def import_extra(module: str, what_for: str) -> ModuleType:
    """Import a package of the `tasks` extra.

    Raises:
        UserError: the package cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what_for} needs the package {module.replace('_', '-')}, which cannot be imported ({error}); "
            "install it with: pip install 'streamrl[tasks]'"
        ) from error
