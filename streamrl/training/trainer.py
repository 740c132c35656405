"""One trainer rank: FSDP2-sharded policy, gradient accumulation, AdamW with fp32 master weights. No sockets.

Every method is a collective: all ranks must call the same ones in the same order. A step is

    accumulate(groups) ... accumulate(groups, is_last=True)  ->  step(loss_tokens)

Losses are *sums* over tokens; `step` divides the accumulated gradient by the batch's token count. So the gradient
does not depend on how the batch was cut, on the order in which groups arrived, or on the number of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from streamrl.config.run import OptimizerConfig, RunConfig
from streamrl.rollouts.micro_batch import TrainGroup, TrainSequence
from streamrl.training.losses import grpo_loss
from streamrl.training.packing import pack
from streamrl.training.policy import Policy, load_policy

NOTHING = TrainGroup(
    "nothing",
    np.zeros(1, dtype=np.int32),
    [TrainSequence(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32), 0.0)],
)
"""Stands in where a rank has nothing to do but must join a collective; its loss is 0, and so is its gradient."""


@dataclass
class MicroStats:
    """Sums over the tokens of one micro-batch."""

    tokens: int = 0
    loss_sum: float = 0.0
    clipped: float = 0.0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    entropy_tokens: int = 0
    gap_sum: float = 0.0
    """Sum of |trainer log-prob - generator log-prob|."""
    ratio_max: float = 0.0

    def add(self, other: MicroStats) -> None:
        """Adds another micro-batch's sums."""
        for name in self.__dataclass_fields__:
            if name != "ratio_max":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ratio_max = max(self.ratio_max, other.ratio_max)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step."""

    grad_norm: float
    """L2 norm of the batch's mean gradient, before clipping."""
    learning_rate: float


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of a step (0-based): linear warm-up, then constant or half a cosine down to
    `lr * min_lr_fraction` at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    floor = config.min_lr_fraction
    return config.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))


def _shard(policy: Policy, run: RunConfig, device: torch.device, trainable: bool) -> Policy:
    """FSDP2: each decoder layer is a unit, the rest is the root's."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    compute = torch.bfloat16 if run.model.dtype == "bfloat16" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    policy.to(device)
    layers: Any = policy.model.base_model.layers
    for unit in (*layers, policy):
        # with one rank there is nothing to free: keep the compute copy over forward, backward and micro-batches
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=world > 1)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(world > 1)
    if not trainable:
        policy.requires_grad_(False).eval()
    return policy


class Trainer:
    """One rank; torch.distributed must be initialised."""

    def __init__(self, run: RunConfig, model_path: str, device: torch.device) -> None:
        """Loads and shards the model.

        Args:
            run: the run's configuration.
            model_path: HF folder or id of the initial weights (also the KL reference).
            device: this rank's device.
        """
        self.run, self.device = run, device
        self.rank = dist.get_rank()
        self.policy = _shard(load_policy(model_path, run.optimizer.gradient_checkpointing), run, device, True)
        self.reference = _shard(load_policy(model_path), run, device, False) if run.algorithm.kl_coef > 0 else None
        options = run.optimizer
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def accumulate(self, groups: list[TrainGroup], is_last: bool) -> MicroStats:
        """Forward and backward of one micro-batch; adds the gradient of the *summed* loss.

        Args:
            groups: this rank's share; may be empty.
            is_last: gradients are reduced over ranks now, the step follows.
        """
        batch = pack(groups or [NOTHING]).to(self.device)
        if dist.get_world_size() == 1:
            assert isinstance(self.policy, FSDPModule)
            self.policy.set_requires_gradient_sync(is_last)
        temperature = self.run.sampling.temperature
        reference_logprobs = None
        if self.reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self.reference(batch, temperature)
        logprobs, entropy = self.policy(batch, temperature)
        algorithm = self.run.algorithm
        result = grpo_loss(
            logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            algorithm.clip_low,
            algorithm.clip_high,
            reference_logprobs,
            algorithm.kl_coef if groups else 0.0,
        )
        result.loss_sum.backward()
        if is_last:
            self._reshard()
        if not groups:
            return MicroStats()
        with torch.no_grad():
            gap = logprobs.detach() - batch.behaviour_logprobs
            return MicroStats(
                tokens=batch.loss_tokens,
                loss_sum=float(result.loss_sum.detach()),
                clipped=float(result.clipped),
                kl_sum=float(result.kl_sum),
                entropy_sum=float(entropy.sum()),
                entropy_tokens=len(entropy),
                gap_sum=float(gap.abs().sum()),
                ratio_max=float(gap.max().exp()),
            )

    def step(self, step: int, loss_tokens: int) -> StepResult:
        """Divides the accumulated gradient by the batch's tokens, clips, updates, and clears it.

        Args:
            step: optimizer step (0-based), for the learning rate.
            loss_tokens: completion tokens of the whole batch, over all ranks, including those of groups without a
                gradient.
        """
        config = self.run.optimizer
        rate = learning_rate(step, self.run.steps, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # FSDP has averaged the ranks' sums: times ranks, divided by the batch's tokens, it is the mean over tokens
        scale = dist.get_world_size() / max(1, loss_tokens)
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        full_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return StepResult(float(full_norm), rate)

    def _reshard(self) -> None:
        """Frees the layers' compute copies: parameters are the sharded fp32 ones again, with the reduced gradients, and
        the next forward makes its copies from updated weights."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, full tensor in the compute type), one after the other; tied weights come once."""
        compute = torch.bfloat16 if self.run.model.dtype == "bfloat16" else torch.float32
        for name, parameter in self.policy.model.named_parameters():
            tensor = parameter.detach()
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, full.to(compute)

    def save(self, directory: Path) -> None:
        """Writes a checkpoint: HF format (compute type) and, below `trainer_state/`, fp32 weights and AdamW's state
        in torch's distributed format, which loads on any number of ranks.

        Args:
            directory: an existing folder.
        """
        full = dict(self.weights())
        if self.rank == 0:
            self.policy.model.save_pretrained(directory, state_dict=full)
            # transformers writes the type of the live (master) weights; whoever loads this wants that of the files
            config = directory / "config.json"
            values = json.loads(config.read_text()) | {"dtype": self.run.model.dtype}
            config.write_text(json.dumps(values, indent=2) + "\n")
        model_state, optimizer_state = get_state_dict(self.policy, self.optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory / "trainer_state")

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote, also when it was written by another number of ranks."""
        model_state, optimizer_state = get_state_dict(self.policy, self.optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=directory / "trainer_state")
        set_state_dict(
            self.policy, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
