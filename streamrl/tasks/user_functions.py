"""Import of the functions that a run file names as 'module:function'."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any


class NotThere(Exception):
    """A name of a run file that cannot be imported, with the reason."""


def import_function(spec: str, expected: str = "'module:function'") -> Any:
    """Import 'module:function', also from the current folder.

    Args:
        spec: what the run file names.
        expected: what it may name.

    Raises:
        NotThere: it is not of this form, or cannot be imported.
    """
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        raise NotThere(f"expected {expected}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise NotThere(f"cannot be imported: {type(error).__name__}: {error}") from error
    return function


def why_not_callable(function: Any, *args: Any, **named: Any) -> str:
    """Return why a function cannot be called with arguments like these; '': it can."""
    try:
        inspect.signature(function).bind(*args, **named)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""
