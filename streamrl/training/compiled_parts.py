"""Parts of a model whose operations torch compiles into fewer kernels, on GPUs.

A norm or an MLP's activation is a row of operations, each of which reads and writes a tensor as large as the layer's
input, and each of which a slow host takes ten microseconds to launch. Compiled, they read and write it once. Attention
and matrix products are kernels of their own already.
"""

from __future__ import annotations

import torch

from streamrl.config.run import RunConfig
from streamrl.training.critic import Critic
from streamrl.training.policy_model import Policy

COMPILED = ("RMSNorm", "MLP")
"""Ends of the names of transformers' classes of modules that are compiled."""


def compiles(run: RunConfig, device: torch.device) -> bool:
    """Return whether a run compiles parts of its models on a device."""
    return run.optimizer.compile and device.type == "cuda"


def compile_parts(model: Policy | Critic, run: RunConfig) -> None:
    """Let torch compile parts of a model, for any number of tokens, at its first pass.

    Layers with selective recomputation stay as they are: it looks at single operations.

    Args:
        model: the model.
        run: the run's configuration.
    """
    if isinstance(model, Policy):
        model.fused = True
    if run.optimizer.gradient_checkpointing == "selective":
        return
    for module in model.model.modules():
        if type(module).__name__.endswith(COMPILED):
            module.compile(dynamic=True)
