"""Parts of a model whose operations torch compiles into fewer kernels, on GPUs.

A norm or an MLP's activation is a row of operations, each of which reads and writes a tensor as large as the layer's
input, and each of which a slow host takes ten microseconds to launch. Compiled, they read and write it once. Attention
and matrix products are kernels of their own already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._functorch.config
from torch import nn

from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed
from streamrl.training.critic import Critic
from streamrl.training.decoder_layers import decoder_layers
from streamrl.training.policy_model import Policy

RECOMPILATIONS = 64
"""Versions that torch may compile of the modules of all models together."""


def compiles(run: RunConfig, device: torch.device) -> bool:
    """Return whether a run compiles parts of its models on a device."""
    return run.optimizer.compile and device.type == "cuda"


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
    if isinstance(model, Policy):
        model.fused = True
    if run.optimizer.gradient_checkpointing != "selective" and layers == 1:
        for module in _plain_parts(model.model):
            module.compile(dynamic=True)


def _plain_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield norms, and the layers' MLPs that consist of linear layers: routers and experts have shapes of their own."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield module
    with contextlib.suppress(RunFailed):  # a model without a list of layers
        for layer in decoder_layers(model):
            for module in layer.children():
                if type(module).__name__.endswith("MLP") and all(map(_is_plain, module.modules())):
                    yield module


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module has no parameters of its own, or is a linear layer."""
    return isinstance(module, nn.Linear) or not list(module.parameters(recurse=False))
