"""Parts of a model whose operations torch compiles into fewer kernels, on GPUs.

A layer is a row of operations on tensors as large as its input: norms, rotations, activations, sums. Each reads and
writes such a tensor, and a host takes ten microseconds to launch it, and twenty to record it for the backward pass.
Compiled, a layer launches a few kernels that read and write each tensor once. Matrix products and attention are kernels
of their own already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.exc
import torch._functorch.config
from torch import nn

from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed
from streamrl.training.attention import OWN_ROWS, SHARED_PREFIX, SHARED_PREFIX_LONG
from streamrl.training.critic import Critic
from streamrl.training.decoder_layers import decoder_layers
from streamrl.training.policy_model import Policy

MOST_OF_REASON = 400
"""Characters of torch's own words that an error repeats; the log has all."""
RECOMPILATIONS = 64
"""Versions that torch may compile of the modules of all models together."""


def compiles(run: RunConfig, device: torch.device) -> bool:
    """Return whether a run compiles parts of its models on a device."""
    return run.optimizer.compile and device.type == "cuda"


@contextlib.contextmanager
def failures_told() -> Iterator[None]:
    """Say what helps where torch cannot compile a part of a model: it tries at the first pass of each kind.

    Raises:
        RunFailed: torch has tried, and failed.
    """
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).split())[:MOST_OF_REASON]
        raise RunFailed(
            f"torch cannot compile a part of the model: {type(error).__name__}: {reason}; expected a model that it can "
            "compile, or optimizer.compile: false"
        ) from error


def compile_parts(model: Policy | Critic, run: RunConfig, layers: int = 1) -> None:
    """Let torch compile parts of a model, for any number of tokens, at its first pass.

    Layers with selective recomputation stay as they are, which looks at single operations, and so do layers that ranks
    share, whose weights are parts with operations of their own.

    Args:
        model: the model.
        run: the run's configuration.
        layers: ranks that share each layer.
    """
    # all compiled modules share one code object, and so its limit: classes, shapes, with and without gradient
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    # an MLP's backward pass multiplies gate and up again, in a kernel that reads both anyway, instead of keeping the
    # product, which takes as much memory as one of them
    torch._functorch.config.ban_recompute_materialized_backward = False
    # else the numbers of modules that FSDP2 manages, such as the width of heads, are taken for ones that vary
    torch._dynamo.config.skip_fsdp_guards = False
    if isinstance(model, Policy):
        model.fused = True
    if run.optimizer.gradient_checkpointing != "selective" and layers == 1:
        whole = _whole_layers(model)
        for layer in whole:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        inside = {module for layer in whole for module in layer.modules()}
        for module in _plain_parts(model.model):
            if module not in inside:
                module.compile(dynamic=True)


def _whole_layers(model: Policy | Critic) -> list[nn.Module]:
    """Return the layers that torch compiles as a whole: of linear layers, norms, and attention by `row_attention.py`.

    Experts have shapes of their own, and so have the rows of each rank where several share them.
    """
    with contextlib.suppress(RunFailed):  # a model without a list of layers
        trunk: Any = model.model
        if model.ranks is None and trunk.config._attn_implementation in (SHARED_PREFIX, SHARED_PREFIX_LONG, OWN_ROWS):
            return [layer for layer in decoder_layers(trunk) if all(map(_is_dense, layer.modules()))]
    return []


def _is_dense(module: nn.Module) -> bool:
    """Return whether a module has no parameters of its own and no list of modules, or is a linear layer or a norm."""
    if isinstance(module, nn.ModuleList):
        return False
    return _is_plain(module) or type(module).__name__.endswith("Norm")


def _plain_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield norms, and the layers' MLPs that consist of linear layers: routers and experts have shapes of their own."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield module
    with contextlib.suppress(RunFailed):
        for layer in decoder_layers(model):
            for module in layer.children():
                if type(module).__name__.endswith("MLP") and all(map(_is_plain, module.modules())):
                    yield module


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module has no parameters of its own, or is a linear layer."""
    return isinstance(module, nn.Linear) or not list(module.parameters(recurse=False))
