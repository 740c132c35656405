"""The activation of Apertus (xIELU) with parameters of the model's type, as the trainer has them.

vLLM makes them in bf16 whatever the model's type is, and so rounds what is loaded into them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import XIELU

_make = XIELU.__init__


def make(self: XIELU, *args: Any, **kwargs: Any) -> None:
    """Do the work of `XIELU.__init__`; vLLM builds models with their type as torch's default."""
    _make(self, *args, **{"dtype": torch.get_default_dtype()} | kwargs)


def install() -> None:
    """Replace vLLM's way in this process."""
    setattr(XIELU, "__init__", make)  # noqa: B010  # mypy refuses to assign a method
