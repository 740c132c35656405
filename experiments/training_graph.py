"""Count operations, bytes and memory of a training step from its graph, on any machine and for any size.

    .venv/bin/python experiments/training_graph.py

The step is that of a run: its own model code, its attention, its head, its copies of the weights and AdamW. The tensors
are fake (torch's `FakeTensorMode`): they have shapes, types and storages, but no numbers, so a 1.5 B model with 32k
tokens needs no memory. What code chooses by the kind of device is chosen as on a GPU (`gpu_ways`). So the counts hold
for the graph that a GPU is given; what its caching allocator and libraries add does not appear, and speed does not
either.

The memory is compared with the formula by which `plan` and the check before a run judge (`cost.training_memory`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from scheduler.cost.model_shapes import Transformer
from scheduler.cost.trainer_work import TrainingWork
from scheduler.cost.training_memory import TrainerLayout, memory_per_gpu
from streamrl.config.optimizer import Recomputation
from streamrl.config.run import RunConfig
from streamrl.training import attention, merged_attention, token_logprobs
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.learner import Division, Learner
from streamrl.training.operations import ModelOperations, TrainingOperations
from streamrl.training.packing import PackedBatch, pack
from streamrl.training.policy_model import Policy, in_training
from streamrl.verify.hardware_measurement import Size
from streamrl.verify.hardware_stages import GPU
from streamrl.verify.hardware_trainer import random_group, shape_config

RESULT = Path(__file__).parent / "results" / "training_graph.json"
RECOMPUTATIONS: tuple[Recomputation, ...] = (False, "selective", True)
TOKENS = 130
"""A dimension of more than this that is no size of the model is a number of tokens."""
COLLECT_EVERY = 100
"""Operations between two collections of dead tensors."""


@dataclass(frozen=True)
class GraphCount:
    """What a step of two micro-batches does."""

    context: int
    """Tokens of the longest sequence."""
    tokens: int
    """Tokens of the row: a prompt and its completions."""
    recomputation: str
    flops: float
    """Operations of one micro-batch's passes, forward and backward, by torch's counter."""
    products: float
    """Those of matrix products alone: torch counts attention as if every query saw every key of its sequence."""
    formula_flops: float
    """`flops` by the formula behind MFU, which counts nothing twice and causal attention once."""
    moved_bytes: float
    """Bytes that the operations of one micro-batch read and write: the sizes of all their tensors."""
    score_matrices: tuple[tuple[int, ...], ...]
    """Shapes of tensors with two dimensions of tokens; (): there are none."""
    attention_rows: int
    """Most rows of queries in one call of attention: those of the packed row, if nothing is padded."""
    memory_bytes: float
    """Most bytes that exist at once."""
    formula_bytes: float
    """The same by `memory_per_gpu`."""

    @property
    def off(self) -> float:
        """Relative error of the formula."""
        return self.formula_bytes / self.memory_bytes - 1


class Storages(TorchDispatchMode):
    """Adds up the storages that exist, and the bytes that operations touch."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = self.moved = 0
        self.shapes: set[tuple[int, ...]] = set()
        """Shapes of all results."""
        self.attention_rows = 0
        self._at_most: list[tuple[int, tuple[str, tuple[int, ...], str]]] = []
        self._operations = self._collected = 0
        self._live: dict[int, tuple[int, tuple[str, tuple[int, ...], str]]] = {}
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what is new."""
        self._operations += 1
        out = func(*args, **(kwargs or {}))
        results = _tensors(out)
        if not func.is_view:
            touched = [*_tensors((args, kwargs)), *results]
            self.moved += sum(x.numel() * x.element_size() for x in touched)
        if "flash_attention_forward" in str(func):
            self.attention_rows = max(self.attention_rows, len(args[0]))
        for x in results:
            self.shapes.add(tuple(x.shape))
            storage = x.untyped_storage()
            if storage in self._known:
                continue
            self._known.add(storage)
            key, size = id(storage), storage.nbytes()
            self._live[key] = size, (str(func), tuple(x.shape), str(x.dtype))
            self.bytes += size
            weakref.finalize(storage, self._drop, key)
            if self.bytes > self.most:
                self._collect()
            if self.bytes > self.most:
                self.most, self._at_most = self.bytes, list(self._live.values())
        return out

    @property
    def parts(self) -> dict[tuple[str, tuple[int, ...], str], int]:
        """(operation, shape, type) -> bytes of the storages that existed with the most."""
        found: dict[tuple[str, tuple[int, ...], str], int] = {}
        for size, name in self._at_most:
            found[name] = found.get(name, 0) + size
        return found

    def _collect(self) -> None:
        """Free dead tensors: the hooks of a mode make cycles that keep some; without a mode there are none."""
        if self._operations - self._collected > COLLECT_EVERY:
            self._collected = self._operations
            gc.collect()

    def _drop(self, key: int) -> None:
        self.bytes -= self._live.pop(key)[0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree; of sharded ones, what this rank has."""
    found = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x._local_tensor if isinstance(x, DTensor) else x for x in found]


@contextlib.contextmanager
def gpu_ways() -> Iterator[None]:
    """Let tensors without a device take the ways of a GPU: its kernels, and its sizes of parts."""
    slabs = patch.dict(token_logprobs.SLAB_BYTES, cpu=token_logprobs.SLAB_BYTES["cuda"])
    whole = patch.object(token_logprobs, "_cached", lambda slab, products: iter([(slab, products.float())]))
    made_again = patch.object(token_logprobs, "_may_keep", lambda count, weight, distribution: False)
    kernels = patch.object(merged_attention, "on_gpu", lambda x: True)
    filled = patch.object(token_logprobs, "filled_rows", lambda rows: rows)
    with slabs, whole, made_again, filled, kernels, patch.object(attention, "PLAIN_SCORES", -1):
        yield


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Be the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = Division().mesh(torch.device("cpu"))  # it has numbers, so it is made outside of the mode
    try:
        with patch.object(Division, "mesh", lambda division, device: mesh):
            yield
    finally:
        dist.destroy_process_group()


def count(size: Size, context: int, recomputation: Recomputation, ranks: int = 1) -> tuple[GraphCount, Storages]:
    """Return what a step of a shape does: two micro-batches and an update, after a first one.

    Args:
        size: the model's shape.
        context: tokens of the longest sequence.
        recomputation: what the backward pass computes again.
        ranks: ranks that share the model.
    """
    config = shape_config(size, context)
    config._attn_implementation = SHARED_PREFIX
    run = RunConfig.model_validate(
        {"model": {"dtype": "bfloat16", "max_context": context}, "optimizer": {"gradient_checkpointing": recomputation}}
    )
    packed = pack([random_group(context, size.vocabulary)])
    gc.collect()
    gc.freeze()  # the collections inside look at what the step makes alone
    storages = Storages()
    with fake_ranks(ranks), gpu_ways(), FakeTensorMode(allow_non_fake_inputs=True), storages:
        storages.most = 2**63  # of the second step alone
        policy = Policy(in_training(Qwen2ForCausalLM(config), recomputation))
        object.__setattr__(policy, "to", lambda device: policy)  # fake tensors cannot be moved in place
        learner = Learner(policy, 1e-5, run, torch.device("cpu"))
        fake: dict[str, Any] = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in packed.tensors.items()}
        batch = replace(packed, **fake)
        with FlopCounterMode(display=False) as counter:  # it takes some operations apart, so memory is not of this step
            _micro_batch(learner, batch, is_last=True)
        learner.optimizer.step()
        learner.clear()
        storages.most, storages.moved = storages.bytes, 0
        _micro_batch(learner, batch, is_last=False)
        moved = storages.moved
        _micro_batch(learner, batch, is_last=True)
    operations = counter.get_flop_counts()["Global"]
    shape = Transformer.from_config("counted", config.to_dict())
    work, layout = TrainingWork(recompute=recomputation), TrainerLayout(ranks, 1, ranks > 1)
    found = GraphCount(
        context=context,
        tokens=packed.input_ids.numel(),
        recomputation=str(recomputation).lower(),
        flops=sum(operations.values()),
        products=sum(flops for name, flops in operations.items() if "attention" not in str(name)),
        formula_flops=TrainingOperations(ModelOperations(shape, False), False, False, None).count(packed, True),
        moved_bytes=moved,
        score_matrices=tuple(sorted(shape for shape in storages.shapes if _of_tokens(shape, config) > 1)),
        attention_rows=storages.attention_rows,
        memory_bytes=storages.most,
        formula_bytes=memory_per_gpu(shape, work, layout, packed.input_ids.numel()),
    )
    gc.unfreeze()
    return found, storages


def _of_tokens(shape: Sequence[int], config: Qwen2Config) -> int:
    """Return how many dimensions of a tensor are numbers of tokens: large, and no size of the model."""
    width = config.hidden_size // config.num_attention_heads
    sizes = {config.hidden_size, config.intermediate_size, config.vocab_size, config.num_key_value_heads * width}
    return sum(dim > TOKENS and dim not in sizes for dim in shape)


def _micro_batch(learner: Learner[Policy], batch: PackedBatch, is_last: bool) -> None:
    learner.backward(learner.model(batch, 1.0).logprobs.sum(), is_last)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count all contexts and recomputations of the shape that the kit trains on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(GPU.contexts))
    parser.add_argument("--out", type=Path, help=f"default: {RESULT.name} in results; with --contexts here")
    parser.add_argument("--parts", action="store_true", help="print what the memory consists of")
    given = parser.parse_args(arguments)
    found = []
    for context in given.contexts:
        for recomputation in RECOMPUTATIONS:
            one, storages = count(GPU, context, recomputation)
            found.append(asdict(one) | {"off": one.off})
            has = f"{one.memory_bytes / 2**30:.2f} GiB, formula {one.off:+.1%}"
            print(f"{context} tokens, {one.recomputation}: {has}", flush=True)
            if given.parts:
                for name, size in sorted(storages.parts.items(), key=lambda item: -item[1])[:12]:
                    print(f"  {size / 2**30:.3f} {name}")
    # those of other contexts do not replace the published counts
    out = given.out or (RESULT if given.contexts == list(GPU.contexts) else Path(RESULT.name))
    out.write_text(json.dumps({"model": asdict(GPU), "counts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
