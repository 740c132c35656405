"""Import of the functions that a run file names as 'module:function'."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from streamrl.errors import ErrorCode, UserError


def import_function(spec: str, whose: str, expected: str = "'module:function'") -> Any:
    """Import 'module:function', also from the current folder.

    Args:
        spec: what the run file names.
        whose: beginning of an error, up to and with the name.
        expected: what the run file may name.

    Raises:
        UserError: it is not of this form, or cannot be imported.
    """
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{whose}: expected {expected}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        reason = f"{whose}: cannot be imported: {type(error).__name__}: {error}"
        raise UserError(ErrorCode.REWARD.refer(reason)) from error
    return function


def import_ordinary(
    spec: str, whose: str, form: str, *args: Any, expected: str = "'module:function'", **named: Any
) -> Any:
    """Import a function whose call runs it; arguments as for `import_function` and `require_callable`."""
    function = import_function(spec, whose, expected)
    if not callable(function) or _is_deferred(function):
        raise UserError(f"{whose} must be an ordinary function")
    require_callable(function, whose, form, *args, **named)
    return function


def is_async(function: Any) -> bool:
    """Whether a call returns a coroutine, also that of an object or of a `functools.partial`."""
    return _any_of(function, inspect.iscoroutinefunction)


def _is_deferred(function: Any) -> bool:
    """Whether a call returns a coroutine or a generator, whose code has yet to run.

    What a decorator has wrapped is not looked at: it may well run a coroutine to its end.
    """
    return _any_of(function, inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _any_of(function: Any, *tests: Callable[[Any], bool]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return any(test(one) for test in tests for one in (function, type(function).__call__))


def require_callable(function: Any, whose: str, form: str, *args: Any, **named: Any) -> None:
    """Check that a function can be called with arguments like these.

    Args:
        function: what was imported.
        whose: beginning of an error.
        form: the call in words, such as 'f(index, seed)'.
        args: positional arguments; named ones follow.

    Raises:
        UserError: it cannot.
    """
    try:
        inspect.signature(function).bind(*args, **named)
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose} must be callable as {form}: {error}") from error
