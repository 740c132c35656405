"""A model's operations, recorded once for a number of tokens and then run again without the model's Python.

What CUDA graphs are on a GPU: the same operations on the same memory, with other contents. What is left out are
modules, vLLM's dispatch, views and allocations, on which a CPU spends a fifth of a step of few tokens. The operations
are those of vLLM, so that results are the same to the bit; attention is one of them, which looks up the requests of a
step itself.

A recording repeats the Python of the pass as it went then. Python that depends on values is noticed only where it
obtains them by an operation of torch (`.item()`, `nonzero`), which is refused; `.tolist()` and `.numpy()` pass unseen.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from streamrl.generation.instance.few_rows import ARRANGED, BIAS, OPERATION, multiply, product_call
from streamrl.generation.instance.layer_ops import ADD_AND_NORM, GATE, NORM, gate_call, norm_call
from streamrl.generation.instance.native_calls import NativeCall, NativeCalls

ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)
"""Operations whose result has no contents."""
INTO: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.silu.default: torch._C._nn.silu,
    torch.ops.aten.mul.Tensor: torch.mul,
    OPERATION: multiply,
}
"""Frequent operations, by the function that writes the same result into given memory (`out`)."""
IN_C: dict[Any, Callable[..., NativeCall | None]] = {
    OPERATION: product_call,
    NORM: lambda x, weight, epsilon, out: norm_call(x, None, weight, epsilon, out),
    ADD_AND_NORM: lambda x, residual, weight, epsilon, _: norm_call(x, residual, weight, epsilon, x),
    GATE: gate_call,
}
"""Operations of our own, by the function that returns their call in C for their arguments and result."""
BY_CONTENTS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operations that give Python what depends on the contents of a tensor: a value or a shape."""
PACKED = "cpu_linear"
"""Attribute of vLLM's linear layers: the function that multiplies with packed weights; new weights bring a new one."""


class CannotRecord(Exception):
    """The operations do what a recording could not repeat; the message says what."""


@dataclass(frozen=True)
class _Call:
    """An operation as it was called."""

    function: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    result: Any

    @property
    def given(self) -> list[torch.Tensor]:
        return list(_tensors((self.args, self.named)))

    @property
    def made(self) -> list[torch.Tensor]:
        """Results in memory that it was not given."""
        given = {_address(one) for one in self.given}
        return [one for one in _tensors(self.result) if _address(one) not in given]

    @property
    def computes(self) -> bool:
        """Whether it does more than to allocate memory, or to view memory otherwise."""
        views = not self.made and any(True for _ in _tensors(self.result)) and not self.function._schema.is_mutable
        return not views and self.function._schema.name not in ALLOCATIONS


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, result))  # keeps the memory, so that no address comes twice
        return result


@dataclass(frozen=True)
class _Kept:
    """A parameter, buffer or arranged copy, whose contents new weights replace."""

    owner: dict[str, Any]
    name: str
    tensor: torch.Tensor
    address: int

    def unmoved(self) -> bool:
        return self.owner.get(self.name) is self.tensor and _address(self.tensor) == self.address


@dataclass
class _Packed:
    """An argument that belongs to a layer's packed weights, which new weights replace by others.

    References to it are weak: strong ones would keep the old weights during an update.
    """

    layer: dict[str, Any]
    cell: int
    form: tuple[Any, ...]
    function: Callable[[], Any] = lambda: None
    """The layer's `PACKED` that was seen last."""
    tensor: Callable[[], Any] = lambda: None
    """The tensor in its closure."""

    def follow(self) -> bool:
        """Take over what the layer has now; return whether it has the same form."""
        if (known := self.function()) is not None and self.layer.get(PACKED) is known:
            return True
        tensor = _packed_tensors(self.layer).get(self.cell)
        if tensor is None or _form(tensor) != self.form:
            return False
        self.function, self.tensor = weakref.ref(self.layer[PACKED]), weakref.ref(tensor)
        return True


Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass
class Recording:
    """A forward pass of a model over a fixed number of tokens; see `record`."""

    ids: torch.Tensor
    positions: torch.Tensor
    result: torch.Tensor
    steps: list[Operation]
    kept: list[_Kept]
    packed: list[_Packed]
    agreed: int = 0
    """Steps in which it gave the same as the model."""

    def follow_weights(self) -> bool:
        """Take over weights that were packed anew; return whether all others are where they were."""
        return all(one.unmoved() for one in self.kept) and all(one.follow() for one in self.packed)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of tokens, in memory that the next call overwrites."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        for function, args, named in self.steps:
            function(*args, **named)
        return self.result


def record(
    model: torch.nn.Module,
    forward: Callable[[torch.Tensor, torch.Tensor], Any],
    ids: torch.Tensor,
    positions: torch.Tensor,
    instead: Mapping[Any, Callable[..., Callable[[], object] | None]] = MappingProxyType({}),
) -> Recording:
    """Record a forward pass.

    Args:
        model: model with its weights.
        forward: computes the hidden states of ids and positions, [tokens] each.
        ids: an example; the recording keeps it as its memory for ids.
        positions: likewise.
        instead: by operation, the function that returns what does its work, for its arguments, or None.

    Raises:
        CannotRecord: a recording would compute something else than the model.
    """
    with _Recorder() as recorder:
        result = forward(ids, positions)
    if not isinstance(result, torch.Tensor):
        raise CannotRecord("the model returns more than hidden states")
    calls = recorder.calls
    known_kept, known_packed = _weights(model)
    lives: dict[int, tuple[int, float]] = {}
    kept: dict[int, _Kept] = {}
    for number, call in enumerate(calls):
        _refuse_unrepeatable(call)
        for tensor in call.given:
            address = _address(tensor)
            if address in lives:
                lives[address] = lives[address][0], number
            elif address in known_kept:
                kept[address] = known_kept[address]
            elif address not in known_packed and address not in (_address(ids), _address(positions)):
                raise CannotRecord(f"{call.function} reads a tensor of unknown origin")
        for tensor in call.made:
            lives[_address(tensor)] = number, number
    if _address(result) in lives:
        lives[_address(result)] = lives[_address(result)][0], math.inf
    moved = _shared_memory(calls, lives)
    steps: list[Operation | NativeCall] = []
    packed: list[_Packed] = []
    for call in calls:
        if not call.computes:
            continue
        step = _step(call, moved, instead)
        if isinstance(step, NativeCall):
            steps.append(step)
            continue
        function, args, named = step
        theirs = {
            id(one): _Packed(*place, _form(one)) for one in call.given if (place := known_packed.get(_address(one)))
        }
        if theirs:
            if not (theirs.keys() <= {id(one) for one in args} and all(one.follow() for one in theirs.values())):
                raise CannotRecord(f"{call.function} views packed weights otherwise")
            packed += theirs.values()
            function, args = _with_packed, (function, *(theirs.get(id(one), one) for one in args))
        steps.append((function, args, named))
    return Recording(ids, positions, moved(result), _joined(steps), list(kept.values()), packed)


def _joined(steps: Sequence[Operation | NativeCall]) -> list[Operation]:
    """Return the steps with each row of calls in C as one."""
    joined: list[Operation] = []
    row: list[NativeCall] = []
    for step in [*steps, None]:
        if isinstance(step, NativeCall):
            row.append(step)
            continue
        if row:
            joined.append((NativeCalls(row), (), {}))
            row = []
        if step is not None:
            joined.append(step)
    return joined


def _refuse_unrepeatable(call: _Call) -> None:
    if any(one is not None and not isinstance(one, torch.Tensor) for one in tree_leaves(call.result)):
        raise CannotRecord(f"{call.function} gives Python a value")
    if call.made and not isinstance(call.result, torch.Tensor):
        raise CannotRecord(f"{call.function} makes several tensors, or one in a list")
    if BY_CONTENTS.intersection(call.function.tags):
        raise CannotRecord(f"{call.function} gives Python what depends on a tensor's contents")


def _step(
    call: _Call,
    moved: Callable[[torch.Tensor], torch.Tensor],
    instead: Mapping[Any, Callable[..., Callable[[], object] | None]],
) -> Operation | NativeCall:
    """Return an operation on the recording's memory: what makes a new tensor writes into the one that was made."""
    args: tuple[Any, ...]
    named: dict[str, Any]
    args, named, result = tree_map_only(torch.Tensor, moved, (call.args, call.named, call.result))
    if call.function in IN_C and not named and (in_c := IN_C[call.function](*args, result)) is not None:
        return in_c
    if call.function in instead and (other := instead[call.function](*args, **named)) is not None:
        return other, (), {}
    if not call.made:
        return call.function._op, args, named
    if call.function in INTO:
        return INTO[call.function], args, named | {"out": result}
    if call.function is torch.ops.aten.embedding.default:
        return _look_up, (result, *args[:2]), {}
    return _write, (result, call.function._op, *args), named


def _look_up(result: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    torch.index_select(table, 0, ids, out=result)


def _write(result: torch.Tensor, function: Any, *args: Any, **named: Any) -> None:
    result.copy_(function(*args, **named))


def _with_packed(function: Any, *args: Any, **named: Any) -> None:
    function(*[one.tensor() if type(one) is _Packed else one for one in args], **named)


def _weights(model: torch.nn.Module) -> tuple[dict[int, _Kept], dict[int, tuple[dict[str, Any], int]]]:
    """Return a model's parameters and buffers, and (layer, cell) of weights that are only packed, by their address."""
    kept: dict[int, _Kept] = {}
    packed: dict[int, tuple[dict[str, Any], int]] = {}
    for module in model.modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None and tensor.numel():
                    kept.setdefault(_address(tensor), _Kept(owner, name, tensor, _address(tensor)))
        for name in (ARRANGED, BIAS):
            if (copy := module.__dict__.get(name)) is not None:
                kept.setdefault(_address(copy), _Kept(module.__dict__, name, copy, _address(copy)))
    for module in model.modules():
        for cell, tensor in _packed_tensors(module.__dict__).items():
            place = module.__dict__, cell
            if _address(tensor) not in kept and packed.setdefault(_address(tensor), place) is not place:
                raise CannotRecord("layers share packed weights")
    return kept, packed


def _packed_tensors(layer: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Return the tensors in the closure of a layer's `PACKED`, by their cell: packed weights, or a pointer to them."""
    cells = getattr(layer.get(PACKED), "__closure__", None) or ()
    contents = [getattr(cell.cell_contents, "handler_tensor", cell.cell_contents) for cell in cells]
    return {number: one for number, one in enumerate(contents) if isinstance(one, torch.Tensor) and one.numel()}


def _shared_memory(calls: list[_Call], lives: dict[int, tuple[int, float]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that moves a tensor to memory which others use before and after its own (first, last) call."""
    sizes = {_address(one): one.untyped_storage().nbytes() for call in calls for one in call.made}
    blocks: dict[int, list[tuple[float, torch.UntypedStorage]]] = defaultdict(list)
    places: dict[int, torch.UntypedStorage] = {}
    for address, (first, last) in sorted(lives.items(), key=lambda one: one[1][0]):
        alike = blocks[sizes[address]]
        free = next((block for block in alike if block[0] < first), None)
        if free is not None:
            alike.remove(free)
        places[address] = torch.UntypedStorage(sizes[address]) if free is None else free[1]
        alike.append((last, places[address]))
    made: dict[int, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel() or _address(tensor) not in places:
            return tensor
        if id(tensor) not in made:  # the calls keep it, so that its id is its own
            new = torch.empty(0, dtype=tensor.dtype)
            new.set_(places[_address(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride())
            made[id(tensor)] = new
        return made[id(tensor)]

    return moved


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors among nested values; those without elements have no memory."""
    return (one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.numel())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.size(), tensor.stride()
