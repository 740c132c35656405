"""A model sharded over the ranks (FSDP2), with AdamW if it is trained. Every method is a collective.

A single rank has nothing to share. Its model is not wrapped, because FSDP would copy every weight and gradient in each
step; if it computes in another type than that of its master weights (fp32), `compute_copies.py` converts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from scheduler.cost.training_memory import reduces_once
from streamrl.config.optimizer import OptimizerConfig
from streamrl.config.run import RunConfig
from streamrl.machine.own_share import total_memory
from streamrl.protocol.controller_trainer import Refusal
from streamrl.training.compute_copies import ComputeCopies, cast_inputs
from streamrl.training.critic import Critic
from streamrl.training.decoder_layers import decoder_layers, decoder_of
from streamrl.training.policy_model import Policy
from streamrl.training.sliced_loading import is_empty
from streamrl.training.tensor_parallel import parallelize
from streamrl.training.update_bound import stays_finite
from streamrl.weights.finite import first_not_finite, largest, local, whole

Model = TypeVar("Model", Policy, Critic)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments, by torch's names."""


def compute_type(run: RunConfig) -> torch.dtype:
    """Return the type that forward and backward passes use.

    Raises:
        ValueError: `model.dtype: auto` has not been resolved for this process (`streamrl.machine.compute_type`).
    """
    if run.model.dtype == "auto":
        raise ValueError("model.dtype: auto has to be decided before anything computes")
    return torch.bfloat16 if run.model.dtype == "bfloat16" else torch.float32


@dataclass(frozen=True)
class Division:
    """The division of a model and its work among the ranks: copies x shards x layers = all ranks.

    Ranks that share layers or rows are adjacent. Those that share rows have different shards.
    """

    copies: int = 1
    """Sharded copies of the model (HSDP). Gradients are reduced inside a copy first, then each rank's part between
    copies."""
    layers: int = 1
    """Ranks that share each layer (tensor parallel) and work on the same micro-batches."""
    reduction: Literal["auto", "step", "micro_batch"] = "auto"
    """How often the ranks sum their gradients (`trainer.reduce_gradients`)."""
    rows: int = 1
    """Ranks that share each row of tokens (sequence parallel, `sequence_parallel.py`) and so work on the same
    micro-batches."""

    @property
    def sharing(self) -> int:
        """Number of adjacent ranks that work on the same micro-batches."""
        return self.layers * self.rows

    @property
    def averaged(self) -> int:
        """Number of ranks, or sets that share layers, of whose gradients FSDP takes the mean.

        Those that share rows count one by one, as each has the gradient of its own tokens.
        """
        return dist.get_world_size() // self.layers

    def reduces_once(self, weights: int, device: torch.device) -> bool:
        """Return whether gradients are reduced once per step; the same on every rank. A collective.

        Args:
            weights: number of a model's weights.
            device: this rank's device.
        """
        if self.averaged == 1 or self.reduction != "auto":
            return self.averaged == 1 or self.reduction == "step"
        if device.type == "cuda":
            memory: float = torch.cuda.get_device_properties(device).total_memory
        else:
            memory = total_memory() / dist.get_world_size()
        agreed = torch.tensor(float(reduces_once(weights / self.layers, memory)), device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed)

    @property
    def shards(self) -> int:
        """Number of parts into which FSDP2 divides each weight, or each part of it that tensor parallelism makes."""
        return self.averaged // self.copies

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the device mesh with the dimensions copies, shards, layers."""
        shape = self.copies, self.shards, self.layers
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards", "layers"))
        if self.layers > 1:
            # norms are then reduced by one operation, to the same bits on all ranks
            mesh["shards", "layers"]._flatten()
        return mesh


def shard(
    model: Model, run: RunConfig, device: torch.device, trainable: bool, division: Division | None = None
) -> Model:
    """Shard a model by FSDP2, if several ranks train it: each decoder layer is a unit, the rest is the root.

    What is trained keeps fp32 weights; what is frozen has no need of them.

    Args:
        model: the model in fp32, loaded or, where several ranks train it, empty (`sliced_loading.py`).
        run: the run's configuration, for its compute type.
        device: this rank's device.
        trainable: whether the model is trained; else it is frozen.
        division: division among the ranks; None: fully sharded over all.

    Raises:
        RunFailed: the layers cannot be shared among ranks, or are not found; or as the empty model's `fill`.
    """
    dtype = compute_type(run)
    if not trainable:
        model.requires_grad_(False).eval()
        for parameter in model.parameters():  # buffers keep their types, as FSDP2 lets them
            parameter.data = parameter.data.to(dtype)
    if dist.get_world_size() > 1:
        _fully_shard(model, run, device, division or Division())
        return model
    model.to(device)
    if dtype != torch.float32:
        layers = decoder_layers(model.model)
        cast_inputs(layers, dtype)
        if trainable:
            model.copies = ComputeCopies(model, dtype)
    return model


def _fully_shard(model: Policy | Critic, run: RunConfig, device: torch.device, division: Division) -> None:
    """Shard a model that is empty or in host memory.

    Of an empty one each rank reads its own shards once all is divided. Of one in host memory a device that could not
    hold it all gets one unit after the other: torch moves each unit's weights and buffers to the mesh's device, this
    process's current one, and keeps its shard. With tensor parallelism a rank's part of all layers is then there before
    the first unit is sharded.
    """
    mesh = division.mesh(device)
    precision = MixedPrecisionPolicy(param_dtype=compute_type(run), reduce_dtype=torch.float32)
    if division.layers > 1:
        parallelize(model, decoder_of(model.model), mesh["layers"])
    of_data = mesh["copies", "shards"] if division.copies > 1 else mesh["shards"]
    several = mesh["shards"].size() > 1
    for unit in (*decoder_layers(model.model), model):
        # a single rank frees nothing by resharding: keep the compute copy over forward, backward and micro-batches
        fully_shard(unit, mesh=of_data, mp_policy=precision, reshard_after_forward=several)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(several)
    if is_empty(model.model):
        model.fill(device)
        model.to(device)  # buffers; and FSDP2 takes the new parameters


def reshard(model: Policy | Critic) -> None:
    """Free the layers' compute copies.

    The parameters are the sharded fp32 ones again, with the reduced gradients, and the next forward pass copies the
    updated weights.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if model.copies is not None:
        model.copies.give_back()


@torch.no_grad()
def copy_weights(source: Model, target: Model) -> None:
    """Copy the weights of `source` to `target`, shard by shard; both are the same model, sharded identically."""
    reshard(source)
    reshard(target)
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.copy_(theirs)


class Learner(Generic[Model]):
    """A sharded model and its optimizer."""

    def __init__(
        self,
        model: Model,
        lr: float,
        run: RunConfig,
        device: torch.device,
        division: Division | None = None,
        prefix: str = "",
    ) -> None:
        """Shard the model and make its optimizer.

        Args:
            model: see `shard`.
            lr: initial learning rate.
            run: the run's configuration; `optimizer` has the other options of AdamW.
            device: this rank's device.
            division: see `shard`.
            prefix: what the names of weights begin with where they are told.
        """
        self.division, self._prefix = division or Division(), prefix
        weights = sum(parameter.numel() for parameter in model.parameters())
        self._reduces_once = self.division.reduces_once(weights, device)
        self.model: Model = shard(model, run, device, True, self.division)
        self._weights: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        """Master weights by name, also while the model computes with copies of them."""
        self.options: OptimizerConfig = run.optimizer
        self.optimizer = torch.optim.AdamW(
            self._weights.values(),
            lr=lr,
            fused=True,
            **self._adamw_options(),
        )
        self._factor: float | None = None
        """Factor of the gradient in the next update, between `divide` and `update`."""
        self._sizes: list[list[float]] = []
        """Largest absolute value of each weight with a gradient and of its moments, from `divide` on."""

    def _adamw_options(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in ("betas", "eps", "weight_decay")}

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradient of a summed loss; `is_last` marks the last micro-batch of a batch.

        Only the last one reduces the gradients over the ranks, unless whole gradients are too large to be kept: then
        each does inside a copy of the model, and the last one between copies.
        """
        if isinstance(self.model, FSDPModule):
            if self._reduces_once:
                self.model.set_requires_gradient_sync(is_last)
            else:
                self.model.set_requires_all_reduce(is_last)
        loss.backward()
        if self.model.copies is not None:
            self.model.copies.add_gradients()
        if is_last:
            reshard(self.model)

    def may_idle(self, is_last: bool) -> bool:
        """Return whether a rank without work may leave out a pass, because no other rank waits for it.

        A pass gathers the weights of every layer from the shards, so ranks with parts of them all take part; the last
        pass reduces the gradients. An optimizer step needs some gradient, be it 0.

        Args:
            is_last: whether it is the last pass of a batch.
        """
        if self.division.averaged > self.division.copies:
            return False
        if not is_last:
            return True
        has_gradient = any(weight.grad is not None for weight in self._weights.values())
        return has_gradient and not isinstance(self.model, FSDPModule)

    def divide(self, normalizer: float) -> float:
        """Let the next update divide the accumulated gradient by the normalizer.

        What the check before the update reads comes to the host together with the norm, as a GPU has nothing to do
        while the host waits.

        Args:
            normalizer: normalizer of the whole batch, over all ranks.

        Returns:
            The L2 norm of the divided gradient over all ranks, to the same bits on each; NaN or inf if some entry is.
        """
        reshard(self.model)  # a forward pass since the last backward one has left compute copies, without gradients
        # FSDP has averaged the ranks' sums, so multiplying by their number gives the batch's sum
        scale = self.division.averaged / normalizer
        trained: list[torch.Tensor] = [weight for weight in self._weights.values() if weight.grad is not None]
        gradients = [weight.grad for weight in trained if weight.grad is not None]
        norm: torch.Tensor = whole(torch.nn.utils.get_total_norm(gradients))
        none = norm.new_zeros(0)  # a moment before the first update
        states: list[dict[str, torch.Tensor]] = [self.optimizer.state.get(weight, {}) for weight in trained]
        checked: list[torch.Tensor] = [largest(trained)]
        checked += [largest(state.get(moment, none) for state in states) for moment in MOMENTS]
        values: list[float] = torch.cat([norm.double()[None], *(one.to(norm.device) for one in checked)]).tolist()
        norm_of_sum, sizes, count = values[0], values[1:], len(trained)
        self._sizes = [sizes[at : at + count] for at in range(0, len(sizes), count)] if count else [[], [], []]
        divided: float = norm_of_sum * scale
        # as torch.nn.utils.clip_grads_with_norm_ clips
        self._factor = scale * min(1.0, self.options.max_grad_norm / (divided + 1e-6))
        return divided

    def damage(self) -> Refusal | None:
        """Return which weight or moment of AdamW is not finite on this rank; None: all are."""
        if name := first_not_finite(self._weights):
            return Refusal("weight", self._prefix + name)
        for moment in MOMENTS:
            states = {
                name: self.optimizer.state[weight][moment]
                for name, weight in self._weights.items()
                if moment in self.optimizer.state.get(weight, {})
            }
            if name := first_not_finite(states):
                return Refusal(f"AdamW's {moment}", self._prefix + name)
        return None

    def bad_gradient(self) -> Refusal | None:
        """Return which weight's accumulated gradient is not finite on this rank; None: all are."""
        gradients = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
        name = first_not_finite(gradients)
        return None if name is None else Refusal("gradient", self._prefix + name)

    def overflow(self, norm: float, lr: float) -> Refusal | None:
        """Return which weight the update might leave non-finite on this rank; None: it provably leaves all finite.

        Args:
            norm: the result of `divide`.
            lr: learning rate of the update.
        """
        trained = [name for name, weight in self._weights.items() if weight.grad is not None]
        clipped = min(norm, self.options.max_grad_norm) * (1.0 + 1e-5)
        for name, weight, *both in zip(trained, *self._sizes, strict=True):
            if not stays_finite(weight, clipped, (both[0], both[1]), lr, self.options):
                return Refusal("update", self._prefix + name)
        return None

    def update(self, lr: float) -> None:
        """Divide and clip the gradient, update the weights, and clear the gradient.

        Args:
            lr: learning rate of this update.
        """
        assert self._factor is not None
        if gradients := [local(weight.grad) for weight in self._weights.values() if weight.grad is not None]:
            torch._foreach_mul_(gradients, self._factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Discard the gradient; weights and optimizer state stay as they are."""
        self._factor, self._sizes = None, []
        if self.model.copies is not None:
            self.model.copies.forget_gradients()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that this rank keeps on its device: AdamW's state, then weights and accumulated gradients.

        Layers' compute copies are freed.
        """
        reshard(self.model)
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        for weight in self._weights.values():
            yield weight
            if weight.grad is not None:
                yield weight.grad

    def state(self, prefix: str) -> dict[str, Any]:
        """Return sharded weights (`<prefix>model`) and AdamW's state (`<prefix>optimizer`) for torch's checkpoints.

        Every weight has a state, so that a checkpoint lacks none that a resumed run asks for.
        """
        reshard(self.model)
        self._begin_states()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {f"{prefix}model": model, f"{prefix}optimizer": optimizer}

    def _begin_states(self) -> None:
        """Give weights that never had a gradient the state that AdamW begins with.

        torch would leave them out of a checkpoint, and yet miss them there. Before the first step it would count one.
        """
        for weight in self._weights.values():
            if weight.requires_grad and not self.optimizer.state[weight]:
                step = torch.zeros((), dtype=torch.float32, device=weight.device)
                self.optimizer.state[weight] = {"step": step} | {name: torch.zeros_like(weight) for name in MOMENTS}

    def restore(self, prefix: str, state: dict[str, Any]) -> None:
        """Restore what `state` returned; AdamW's options stay those of the run file, which may have changed."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state[f"{prefix}model"],
            optim_state_dict=state[f"{prefix}optimizer"],
        )
        for group in self.optimizer.param_groups:  # torch has set those of the checkpoint
            group |= self._adamw_options()


AnyLearner = Learner[Policy] | Learner[Critic]
