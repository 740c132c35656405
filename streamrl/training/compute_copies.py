"""Copies of a model's fp32 weights in the type that it computes in, where one rank trains alone.

FSDP2 keeps such copies, too (`MixedPrecisionPolicy`). With a single shard it copies every weight and gradient twice
more than needed, and takes a host longer to do so than to launch the layers: at 2,048 tokens of a model of 1.5 billion
parameters a third of a step. Here one operation copies all weights, and another adds up the gradients of many (on CPUs
`gradient_sums.py`). The bits are those of FSDP2.

    forward pass       the model's parameters become the copies
    backward pass      the copies' gradients are added to those of the weights, in fp32
    `add_gradients`    so are those that are left
    `give_back`        the parameters are the fp32 weights again; the copies' memory is freed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from streamrl.training.gradient_sums import add_all

PENDING_BYTES = 2**28
"""Bytes of the copies' gradients that wait, until one operation adds them to those of the weights."""


@dataclass
class _Pair:
    """A weight and its copy."""

    weight: nn.Parameter
    copy: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules that have it as a parameter of this name: several if it is tied."""

    def place(self, parameter: nn.Parameter) -> None:
        """Make either of both the modules' parameter."""
        for module, name in self.places:
            module._parameters[name] = parameter


class _Gradients:
    """Gradients of copies on their way to the weights. It does not know the copies, whose hooks it is behind."""

    def __init__(self) -> None:
        self._pending: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._bytes = 0

    def forget(self) -> None:
        """Discard all that wait."""
        self._pending, self._bytes = [], 0

    def take(self, weight: nn.Parameter, copy: torch.Tensor) -> None:
        """Take the gradient of a weight's copy."""
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        self._pending.append((weight, gradient))
        self._bytes += gradient.numel() * gradient.element_size()
        if self._bytes >= PENDING_BYTES:
            self.add()

    @torch.no_grad()
    def add(self) -> None:
        """Add all that wait to the gradients of their weights."""
        first: list[tuple[torch.Tensor, torch.Tensor]] = []
        further: list[tuple[torch.Tensor, torch.Tensor]] = []
        for weight, gradient in self._pending:
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                first.append((weight.grad, gradient))
            else:
                further.append((weight.grad, gradient))
        for operation, pairs in ((torch._foreach_copy_, first), (add_all, further)):
            if pairs:
                totals, gradients = zip(*pairs, strict=True)
                operation(totals, gradients)
        self.forget()


def cast_inputs(layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Give floating tensors that enter a layer the type that it computes in, as FSDP2 does."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x

    def hook(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, cast, (args, kwargs))

    for layer in layers:
        layer.register_forward_pre_hook(hook, with_kwargs=True)


class ComputeCopies:
    """The copies of one model's weights, which its forward pass takes."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Prepare the model, in fp32 and on its device, to compute in another type."""
        self._gradients = _Gradients()
        pairs: dict[nn.Parameter, _Pair] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None or not weight.is_floating_point():
                    continue
                if weight not in pairs:
                    copy = nn.Parameter(torch.empty_like(weight, dtype=dtype))
                    pairs[weight] = _Pair(weight, copy)
                    copy.register_post_accumulate_grad_hook(partial(self._gradients.take, weight))
                    copy.untyped_storage().resize_(0)
                pairs[weight].places.append((module, name))
        self._pairs = list(pairs.values())
        self._taken = False
        model.register_forward_pre_hook(lambda *_: self.take())

    def forget_gradients(self) -> None:
        """Discard gradients of a backward pass that did not end."""
        self._gradients.forget()

    def add_gradients(self) -> None:
        """Complete the gradients of the weights after a backward pass."""
        self._gradients.add()

    @torch.no_grad()
    def take(self) -> None:
        """Make copies of the current weights the model's parameters; a no-op if they are."""
        if self._taken:
            return
        self._taken = True
        for pair in self._pairs:
            pair.copy.requires_grad_(pair.weight.requires_grad)
            pair.copy.untyped_storage().resize_(pair.copy.numel() * pair.copy.element_size())
            pair.place(pair.copy)
        torch._foreach_copy_([pair.copy for pair in self._pairs], [pair.weight for pair in self._pairs])

    def give_back(self) -> None:
        """Make the weights the model's parameters again, and free the copies; a no-op if they are."""
        if not self._taken:
            return
        self._taken = False
        for pair in self._pairs:
            pair.place(pair.weight)
            pair.copy.untyped_storage().resize_(0)
