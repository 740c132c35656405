"""Tensor parallelism: a few ranks share every layer, by the plan in the model's transformers configuration.

    colwise    the module's outputs are split: query, key and value heads, the MLP's inner units
    rowwise    its inputs are split, and its outputs summed over the ranks
    the rest   (embedding, norms, heads) is whole on every rank, and all compute the same with it

Weights that are whole, and yet work on one rank's heads or units, are refused: such are norms of query and key heads.
Where their shape is that of all heads nothing fits, else each rank would learn another copy.

All parameters are DTensors over these ranks, so FSDP shards them further over the other ranks, and checkpoints record
their layout. The ranks that share a layer get the same micro-batches.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from streamrl.errors import RunFailed

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class Replicated(ParallelStyle):
    """A style that keeps the whole module on every rank; its inputs and outputs are equal plain tensors on all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return tuple(
            DTensor.from_local(one, mesh, (Replicate(),), run_check=False) if isinstance(one, torch.Tensor) else one
            for one in inputs
        )

    @staticmethod
    def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return plain_tensor(output)


def plan_of(trunk: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """Return the styles of the modules in a trunk's layers, by their names (`*` for any number).

    Args:
        trunk: the part of a model that its plan describes.
        ranks: number of ranks that share a layer.

    Raises:
        RunFailed: the model has no plan, one with other styles or that leaves out weights of what it splits, or heads
            or units that cannot be divided evenly.
    """
    config: Any = trunk.config
    text = config.get_text_config()
    plan = {name: style for name, style in (text.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if other := sorted(set(plan.values()) - STYLES.keys()) or ([] if plan else ["none"]):
        raise RunFailed(
            f"trainer.tensor_parallel: not supported for {text.model_type}, whose plan has {', '.join(other)}; "
            f"expected one of {' and '.join(STYLES)}"
        )
    if left := _left_whole(trunk, plan):
        raise RunFailed(
            f"trainer.tensor_parallel: not supported for {text.model_type} with {', '.join(left)}, which its plan "
            "leaves out beside what it splits; expected trainer.tensor_parallel: 1"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % ranks:
        raise RunFailed(f"trainer.tensor_parallel is {ranks}: it must divide the model's {heads} key-value heads")
    for name, module in trunk.named_modules():
        style = plan.get(_in_plan(name))
        if style is not None and isinstance(module, nn.Linear):
            units = module.out_features if style == "colwise" else module.in_features
            if units % ranks:
                raise RunFailed(f"trainer.tensor_parallel is {ranks}: it must divide the {units} units of {name}")
    return {name: STYLES[style]() for name, style in plan.items()}


def _left_whole(trunk: nn.Module, plan: dict[str, str]) -> list[str]:
    """Return the weights that a plan leaves out of the modules of which it splits parts, by their names in the plan."""
    found: set[str] = set()
    for name, module in trunk.named_modules():
        if any(_in_plan(f"{name}.{child}") in plan for child, _ in module.named_children()):
            weights = [_in_plan(f"{name}.{weight}") for weight, _ in module.named_parameters()]
            found |= {weight for weight in weights if weight.rpartition(".")[0] not in plan}
    return sorted(found)


def _in_plan(name: str) -> str:
    """Return a module's name as plans have it, with `*` for every number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def parallelize(model: nn.Module, trunk: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a model's layers among ranks, in place, before FSDP shards it.

    Args:
        model: the model with its heads.
        trunk: the part of it that the plan describes.
        mesh: the ranks that share a layer.

    Raises:
        RunFailed: see `plan_of`.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    parallelize_module(trunk, mesh, plan_of(trunk, mesh.size()))
    for module in list(model.modules()):
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own):
            parallelize_module(module, mesh, Replicated())
    for (first, name), *others in places.values():  # tied parameters, such as a head that is the embedding, stay tied
        for module, other in others:
            module.register_parameter(other, first.get_parameter(name))


def plain_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Return a replicated tensor as a plain one, for computing with it outside its module."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
