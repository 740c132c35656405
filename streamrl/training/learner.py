"""A model sharded over the ranks (FSDP2), with its AdamW where it learns. Every method is a collective.

One rank that computes in the type of its master weights (fp32) has nothing to share and nothing to convert: its model
stays as it is, because FSDP would hold every weight and every gradient twice and copy both in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from streamrl.config.run import OptimizerConfig, RunConfig
from streamrl.training.critic import Critic
from streamrl.training.policy_model import Policy
from streamrl.training.tensor_parallel import parallelize

Model = TypeVar("Model", Policy, Critic)


def compute_type(run: RunConfig) -> torch.dtype:
    """The type that forward and backward passes use.

    Raises:
        ValueError: `model.dtype: auto` has not been decided for this process (`streamrl.machine.compute_type`).
    """
    if run.model.dtype == "auto":
        raise ValueError("model.dtype: auto has to be decided before anything computes")
    return torch.bfloat16 if run.model.dtype == "bfloat16" else torch.float32


def agreed_type(dtype: str) -> str:
    """The type that all ranks compute in: what each has decided for its device, fp32 where they differ."""
    chosen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(chosen, dtype)
    return dtype if len(set(chosen)) == 1 else "float32"


@dataclass(frozen=True)
class Division:
    """How the ranks divide a model, and the work on it: copies x shards x layers = all ranks, the last one adjacent."""

    copies: int = 1
    """Sharded copies of the model (HSDP). Gradients are reduced inside a copy first, and between copies only what each
    rank holds."""
    layers: int = 1
    """Ranks that share each layer (tensor parallel) and work on the same micro-batches."""

    @property
    def workers(self) -> int:
        """Ranks, or groups of them, that work on micro-batches of their own."""
        return dist.get_world_size() // self.layers

    def mesh(self, device: torch.device) -> DeviceMesh:
        """With the dimensions copies, shards, layers."""
        shape = self.copies, self.workers // self.copies, self.layers
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards", "layers"))
        if self.layers > 1:
            mesh[
                "shards", "layers"
            ]._flatten()  # norms are then reduced by one operation, to the same bits on all ranks
        return mesh


def shard(
    model: Model, run: RunConfig, device: torch.device, trainable: bool, division: Division | None = None
) -> Model:
    """FSDP2, where it has work: each decoder layer is a unit, the rest is the root's. Master weights stay fp32.

    Args:
        model: loaded, fp32.
        run: for its compute type.
        device: this rank's.
        trainable: else it is frozen.
        division: among the ranks; None: fully sharded over all.

    Raises:
        RunFailed: its layers cannot be shared.
    """
    model.to(device)
    if dist.get_world_size() > 1 or compute_type(run) != torch.float32:
        _fully_shard(model, run, device, division or Division())
    if not trainable:
        model.requires_grad_(False).eval()
    return model


def _fully_shard(model: Policy | Critic, run: RunConfig, device: torch.device, division: Division) -> None:
    mesh = division.mesh(device)
    precision = MixedPrecisionPolicy(param_dtype=compute_type(run), reduce_dtype=torch.float32)
    trunk: Any = model.model.base_model
    if division.layers > 1:
        parallelize(model, trunk, mesh["layers"])
    of_data = mesh["copies", "shards"] if division.copies > 1 else mesh["shards"]
    several = mesh["shards"].size() > 1
    for unit in (*trunk.layers, model):
        # with one rank there is nothing to free: keep the compute copy over forward, backward and micro-batches
        fully_shard(unit, mesh=of_data, mp_policy=precision, reshard_after_forward=several)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(several)


def reshard(model: nn.Module) -> None:
    """Frees the layers' compute copies: parameters are the sharded fp32 ones again, with the reduced gradients, and
    the next forward makes its copies from updated weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives `target` the weights of `source`, shard by shard; both are the same model, sharded alike."""
    reshard(source)
    reshard(target)
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.copy_(theirs)


class Learner(Generic[Model]):
    """A sharded model and its optimizer."""

    def __init__(
        self, model: Model, lr: float, run: RunConfig, device: torch.device, division: Division | None = None
    ) -> None:
        """Shards the model.

        Args:
            model: loaded, fp32.
            lr: learning rate to begin with.
            run: betas, weight decay and the like are `optimizer`'s.
            device: this rank's.
            division: see `shard`.
        """
        self.division = division or Division()
        self.model: Model = shard(model, run, device, True, self.division)
        self.options: OptimizerConfig = run.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=lr,
            betas=self.options.betas,
            eps=self.options.eps,
            weight_decay=self.options.weight_decay,
            fused=True,
        )

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of a summed loss; the last of a batch reduces gradients over ranks.

        With several ranks every micro-batch reduces, which keeps the gradient sharded; with one, only the last does.
        """
        if self.division.workers == 1 and isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        loss.backward()
        if is_last:
            reshard(self.model)

    def update(self, normalizer: float, lr: float, skip: bool) -> float:
        """Divides the accumulated gradient by the normalizer, clips, updates, and clears it.

        Args:
            normalizer: of the whole batch, over all ranks.
            lr: learning rate of this update.
            skip: throw the gradient away; weights and optimizer state stay as they are.

        Returns:
            The L2 norm of the divided gradient, before clipping.
        """
        # FSDP has averaged the workers' sums: times workers it is the batch's sum
        scale = self.division.workers / normalizer
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)
        if not skip:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def state(self, prefix: str) -> dict[str, Any]:
        """Weights as `<prefix>model` and AdamW's state as `<prefix>optimizer`, sharded, for torch's checkpoints."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {f"{prefix}model": model, f"{prefix}optimizer": optimizer}

    def restore(self, prefix: str, state: dict[str, Any]) -> None:
        """Takes what `state` gave."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state[f"{prefix}model"],
            optim_state_dict=state[f"{prefix}optimizer"],
        )
