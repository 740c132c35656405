"""Formulas that torch compiles into one kernel each on GPUs, for any number of tokens.

Each is a plain function of tensors. It runs as it is on CPUs, where a run compiles nothing (`optimizer.compile`), and
where something looks at single operations, such as `selective` checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

P = ParamSpec("P")
T = TypeVar("T")


class Switch:
    """Whether this process compiles formulas: as the trainer wants it that was made last."""

    is_on = False


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def compiled_on_gpus(*fixed: tuple[int, ...]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions that torch is to compile.

    Args:
        fixed: of each tensor, which come first among the arguments, the dimensions whose sizes are a model's. Kernels
            are made for these sizes: an index is divided by a number that the compiler knows.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            tensors: tuple[Any, ...] = args[: len(fixed)]
            plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) and one.is_cuda for one in tensors)
            if not (plain and Switch.is_on) or _get_current_dispatch_mode() is not None:
                return function(*args, **kwargs)
            for tensor, dimensions in zip(tensors, fixed, strict=True):
                for dimension in dimensions:
                    torch._dynamo.mark_static(tensor, dimension)
            result: T = _compiled(function)(*args, **kwargs)
            return result

        return call

    return decorated
