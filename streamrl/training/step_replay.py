"""A refused optimizer step computed again, group by group, with a look at where the first NaN or inf appears.

Each group runs alone, forward and backward, on one rank. Hooks on all modules record the first one whose output is not
finite in the forward pass; if the forward pass is finite, the first one whose output has a gradient that is not, in the
order of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from streamrl.config.run import CRITIC_KEY, RunConfig
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.kept_micro_batches import KeptStep
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.training.trainer import Trainer
from streamrl.training.trainer_models import CRITIC_PREFIX
from streamrl.weights.finite import largest


@dataclass(frozen=True)
class ReplayedGroup:
    """One group of a refused step, computed again."""

    micro_batch: int
    """Number of its micro-batch, from 1."""
    group_id: str
    samples: tuple[str, ...]
    tokens: int
    """Completion tokens."""
    loss: float
    """Sum over its tokens, divided by the step's normalizer."""
    grad_norm: float
    critic_grad_norm: float | None
    """None: there is no critic."""
    inputs: str
    """What of its input is not finite, e.g. 'advantage of 12.3'; '': nothing."""
    where: str
    """First module whose output, or its gradient, is not finite; '': none."""

    @property
    def finite(self) -> bool:
        """Whether everything about the group is finite."""
        norms = self.grad_norm, self.critic_grad_norm or 0.0
        return math.isfinite(self.loss) and all(map(math.isfinite, norms)) and not self.inputs and not self.where


class StepReplay:
    """A trainer of one rank in which a step is computed again."""

    def __init__(self, run: RunConfig, model_path: str, checkpoints: CheckpointFolder, step: int) -> None:
        """Load the newest checkpoint before a step, or the initial model if there is none.

        Args:
            run: the run's configuration, with its compute type decided.
            model_path: HF folder or id of the initial weights.
            checkpoints: the run's checkpoints.
            step: number of the step, from 1.

        Raises:
            UserError: the critic's own initial weights are not on this machine.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        # single operations are watched
        uncompiled = run.optimizer.model_copy(update={"compile": False})
        critic = resolve_model(run.critic_path, CRITIC_KEY) if run.critic_path else None
        self.checkpoint: int | None = checkpoints.newest_before(step)
        """Step of the checkpoint that was loaded; None: the initial model."""
        run = run.model_copy(update={"optimizer": uncompiled})
        self.trainer = Trainer(run, model_path, device, critic, resumed=self.checkpoint is not None)
        if self.checkpoint is not None:
            self.trainer.load(checkpoints.path(self.checkpoint))

    def bad_weight(self) -> str | None:
        """Describe the first weight or moment of AdamW that is not finite; None: all are."""
        found = next((bad for one in self.trainer.learners if (bad := one.damage())), None)
        return None if found is None else str(found)

    def groups(self, kept: KeptStep) -> Iterator[ReplayedGroup]:
        """Compute every group of a kept step again, and yield what comes out."""
        for number, shares in enumerate(kept.micro_batches, 1):
            for group in (group for share in shares for group in share):
                with _watched(self.trainer) as found:
                    stats = self.trainer.accumulate([group], True, group.has_reference)
                result = self.trainer.step(kept.step - 1, kept.normalizer, skip=True)
                yield ReplayedGroup(
                    micro_batch=number,
                    group_id=group.group_id,
                    samples=tuple(sequence.sample_id for sequence in group.sequences),
                    tokens=group.loss_tokens,
                    loss=(stats.loss_sum + stats.value_loss_sum) / kept.normalizer,
                    grad_norm=result.grad_norm,
                    critic_grad_norm=result.critic_grad_norm,
                    inputs=bad_inputs(group),
                    where=found[0] if found else "",
                )


def bad_inputs(group: TrainGroup) -> str:
    """Describe what came to the trainer as NaN or inf; '' if nothing did."""
    found = []
    for number, one in enumerate(group.sequences):
        name = one.sample_id or f"sequence {number}"
        if not math.isfinite(one.advantage):
            found.append(f"advantage of {name} is {one.advantage}")
        for what, values in (
            ("log-probability", one.logprobs),
            ("reference log-probability", one.reference_logprobs),
            ("advantage, return or value", None if one.estimates is None else one.estimates.sum(axis=1)),
        ):
            if values is not None and not np.isfinite(values).all():
                found.append(f"{what} of token {int(np.argmin(np.isfinite(values)))} of {name} is not finite")
    return "; ".join(found)


@contextmanager
def _watched(trainer: Trainer) -> Iterator[list[str]]:
    """Yield a list to which the first module whose output, or its gradient, is not finite is added."""
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> Any:
        words = f"{name} ({type(module).__name__})"

        def after(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not found and not _finite(tensor):
                    found.append(f"output of {words}")
                if tensor.requires_grad:
                    tensor.register_hook(backwards)

        def backwards(gradient: torch.Tensor) -> None:
            if not found and not _finite(gradient):
                found.append(f"gradient of the output of {words}")

        return module.register_forward_hook(after)

    models: list[tuple[str, nn.Module]] = [("", trainer.policy)]
    if trainer.critic:
        models.append((CRITIC_PREFIX, trainer.critic.model))
    hooks = [
        watch(prefix + (name or "the whole"), module)
        for prefix, model in models
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _finite(tensor: torch.Tensor) -> bool:
    return math.isfinite(float(largest([tensor])))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the floating tensors of a module's output: a tensor, a sequence, or a mapping."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
