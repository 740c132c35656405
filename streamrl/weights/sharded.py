"""Lay out a version of a sharded model: each rank writes its own rows into one buffer that all ranks share.

    plan (once)      names, types and places of all tensors, from the parameters' shapes: the same on every rank
    map              rank 0 makes a shared buffer of the version's size, the others map it
    write            each rank: the rows of its shards, converted to the compute type or to codes
    checksums        tensors are dealt to the ranks by their bytes; the sums are gathered

So no rank gathers the model, and a host holds each version once, in shared memory. The buffer is an anonymous file
(`memfd_create`): it has no name in any file system, so nothing is left of it however its processes end, and the size of
/dev/shm does not bound it. Each version has its own buffer, because the previous one is still being sent; once no
process holds a buffer any more, its file serves a later version.

With ranks on several hosts the buffer is on rank 0's. If that host's ranks together own all rows (HSDP: a copy on
every node), nothing changes; else tensors are gathered, one at a time, and rank 0 writes them.

Parameters in memory may differ from the checkpoint's tensors, which the engine's loader expects: transformers fuses the
experts of a mixture, for instance. The conversion of `save_pretrained` (`revert_weight_conversion`) is first tried on
meta tensors: most tensors come out unchanged, perhaps renamed, and are written by rows. Tensors that are really
converted are gathered, one conversion at a time.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from streamrl.errors import RunFailed, with_limit
from streamrl.machine.own_share import free_memory
from streamrl.runtime.processes import this_host
from streamrl.weights.finite import first_not_finite, whole
from streamrl.weights.quantize import SCALE_SUFFIX, CodeKind, is_quantized, quantize, quantized
from streamrl.weights.version import (
    HASHING_THREADS,
    Manifest,
    TensorEntry,
    WeightVersion,
    bytes_of,
    checksum,
    content_hash,
    places,
    type_name,
)

SPARE_FILES = 2
"""Most unused buffers kept for later versions: while one version is sent, another one is made."""

Tensors = dict[str, torch.Tensor]
Revert = Callable[[Tensors], Tensors]
"""Function from tensors in memory to those of the checkpoint, both by name."""


@dataclass(frozen=True)
class Conversion:
    """Parameters that must be converted together, and the tensors they become."""

    sources: tuple[str, ...]
    targets: dict[str, tuple[int, ...]]
    """Shapes by name in the checkpoint."""
    is_same: bool
    """Whether one tensor keeps its values; only its name may change."""


def conversions(shapes: Mapping[str, tuple[int, ...]], revert: Revert) -> list[Conversion]:
    """Find how parameters become the checkpoint's tensors, in the parameters' order and in the smallest pieces.

    Pieces are found by trial, on tensors without bytes: a layer must become the same alone as within the whole model,
    and a parameter the same alone as within its layer.

    Raises:
        RunFailed: a conversion needs parameters of several layers.
    """
    metas = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    whole, found = _shapes(revert(metas)), []
    for names in _layers(metas):
        layer = {name: metas[name] for name in names}
        result = _tried(revert, layer)
        origin = {id(tensor): name for name, tensor in layer.items()}
        kept = {origin[id(tensor)]: target for target, tensor in result.items() if id(tensor) in origin}
        rest = tuple(name for name in names if name not in kept)
        made = {target: tuple(t.shape) for target, t in result.items() if id(t) not in origin}
        alone = [_shapes(_tried(revert, {name: metas[name]})) for name in rest]
        if sum(map(len, alone)) == len(made) and {k: v for one in alone for k, v in one.items()} == made:
            parts = [Conversion((name,), targets, False) for name, targets in zip(rest, alone, strict=True)]
        else:
            parts = [Conversion(rest, made, False)] if rest else []
        parts += [Conversion((name,), {target: shapes[name]}, True) for name, target in kept.items()]
        found += sorted(parts, key=lambda part: names.index(part.sources[0]))
    pieces = [target for part in found for target in part.targets.items()]
    if len(pieces) != len(whole) or dict(pieces) != whole:
        raise RunFailed("not supported: weights whose checkpoint form mixes parameters of several layers")
    return found


def persistent_buffers(model: PreTrainedModel) -> Tensors:
    """Return the buffers that belong to a model's checkpoint, by name; none is trained.

    Such are the biases by which DeepSeek's routers balance their experts. Whoever loads weights without them has zeros,
    or whatever is in its memory, in their place.
    """
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def kept_buffers(model: PreTrainedModel) -> Tensors:
    """Return the persistent buffers that versions have, in fp32: those of a floating type."""
    return {name: buffer for name, buffer in persistent_buffers(model).items() if buffer.is_floating_point()}


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return indexes of `sizes` for each rank, with about equal sums: largest first, to the rank with the least."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(index)
        loads[rank] += sizes[index]
    return dealt


class ShardedLayout:
    """The layout of one model's versions; `lay_out` needs torch.distributed to be initialised."""

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, generation_dtype: Literal["same"] | CodeKind = "same"
    ) -> None:
        """Plan the layout.

        Args:
            model: the model in fp32, sharded (FSDP2) or not; its parameters keep their names and shapes. One on the
                meta device is enough to learn the tensors of a version (`slots`).
            dtype: type of the published weights.
            generation_dtype: same: everything in `dtype`; otherwise linear weights are codes.

        Raises:
            RunFailed: the model's checkpoint form cannot be made, or not in pieces.
            ValueError: the model cannot be quantized.
        """
        self.dtype = dtype
        self.kind: CodeKind | None = None if generation_dtype == "same" else generation_dtype
        buffers = kept_buffers(model)
        self._parameters = dict(model.named_parameters()) | buffers  # tied ones come once
        self._revert: Revert = lambda tensors: revert_weight_conversion(model, tensors)
        self._parts = conversions({name: tuple(p.shape) for name, p in self._parameters.items()}, self._revert)
        plain = {
            name: ("float32" if set(part.sources) <= buffers.keys() else type_name(dtype), shape)
            for part in self._parts
            for name, shape in part.targets.items()
        }
        described = plain if self.kind is None else quantized(plain, self.kind)
        self._files: list[int] = []
        """Spare files of `shared_buffer`."""
        weakref.finalize(self, _close, self._files)
        slots, self.nbytes = places((name, kind, shape) for name, (kind, shape) in described.items())
        self.slots = {slot.name: slot for slot in slots}
        """Tensors of a version by name, in its order, without checksums."""

    def lay_out(self, number: int) -> tuple[Manifest, np.ndarray]:
        """Lay out the model's current weights as version `number`; a collective.

        Returns:
            The manifest, on every rank, and the shared buffer (uint8 [nbytes]; empty on another host than rank 0's).

        Raises:
            RunFailed: on every rank, if one has no room, or if some published value is not finite.
        """
        near = ranks_of_first_host()
        buffer = shared_buffer(self.nbytes, near, self._files)
        fail_together(self._write(buffer, near))
        slots, ranks = list(self.slots.values()), dist.get_world_size()
        dealt = dict(zip(near, deal([slot.nbytes for slot in slots], len(near)), strict=True))
        mine = dealt.get(dist.get_rank(), [])
        with ThreadPoolExecutor(HASHING_THREADS) as pool:  # hashing releases the GIL
            sums = dict(zip(mine, pool.map(lambda i: _checked_sum(slots[i], buffer), mine), strict=True))
        gathered: list[dict[int, str | None]] = [{}] * ranks
        dist.all_gather_object(gathered, sums)
        found = {index: digest for one in gathered for index, digest in one.items()}
        if bad := [slots[index].name for index in sorted(found) if found[index] is None]:
            share = f"{len(bad)} of {len(slots)} tensors"
            raise RunFailed(f"version {number} is not published: weight {bad[0]!r} is not finite ({share})")
        entries = tuple(replace(slot, checksum=found[index] or "") for index, slot in enumerate(slots))
        return Manifest(WeightVersion(number, None, content_hash(entries)), self.nbytes, entries), buffer

    def described(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return (name, type, shape) of what `tensors` yields, in its order; no collective."""
        targets = [(name, shape) for part in self._parts for name, shape in part.targets.items()]
        return [(name, getattr(torch, self.slots[name].dtype), shape) for name, shape in targets]

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of the current weights as the checkpoint has them, each gathered from all ranks.

        For a path that sends tensors instead of a laid-out version; a collective at every tensor. Weights that are
        converted together (the experts of a layer) are held at once.

        Raises:
            RunFailed: on every rank, at a weight that is not finite.
            ValueError: the version would consist of codes.
        """
        if self.kind is not None:
            raise ValueError(f"a version in {self.kind} has no plain tensors")
        for part in self._parts:
            if part.is_same:  # buffers of it may have a type of their own
                (name,), (target,) = part.sources, part.targets
                dtype = getattr(torch, self.slots[target].dtype)
                found = {target: whole(self._parameters[name].detach().to(dtype))}
            else:
                found = self._revert({name: self._gather(self._parameters[name]) for name in part.sources})
            if bad := first_not_finite(found):
                raise RunFailed(f"weight {bad!r} is not finite: it is not published")
            yield from ((target, found[target]) for target in part.targets)

    @torch.no_grad()
    def _write(self, buffer: np.ndarray, near: Sequence[int]) -> str | None:
        """Write this rank's part; return a problem instead of raising it, as the others wait in collectives."""
        problem = None
        for index, part in enumerate(self._parts):
            values: Iterable[tuple[str, int, torch.Tensor]]
            if part.is_same:
                (name,), (target,) = part.sources, part.targets
                values = [(target, first, rows) for first, rows in self._own_rows(self._parameters[name], near)]
            else:
                gathered = {name: self._gather(self._parameters[name]) for name in part.sources}
                mine = near[index % len(near)] == dist.get_rank()
                values = [(name, 0, tensor) for name, tensor in self._revert(gathered).items()] if mine else []
            for name, first, tensor in values:
                try:
                    self._write_rows(buffer, name, first, tensor)
                except ValueError as error:
                    problem = problem or f"weight {name!r} cannot be published: {error}"
        return problem

    def _own_rows(self, parameter: torch.Tensor, near: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Return (first row, rows) of a parameter that this rank has to write.

        This is a collective if the parameter is not sharded by rows, or if ranks that are not near own some of them.
        """
        if not isinstance(parameter, DTensor):
            return [(0, parameter)] if dist.get_rank() == 0 else []
        mesh, placements = parameter.device_mesh, parameter.placements
        by_rows = all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in placements)
        first_copy = mesh.mesh[tuple(0 if isinstance(p, Replicate) else slice(None) for p in placements)]
        if not by_rows or not set(first_copy.flatten().tolist()) <= set(near):
            full = self._gather(parameter)
            return [(0, full)] if dist.get_rank() == 0 else []
        coordinate = mesh.get_coordinate()
        if coordinate is None or any(
            isinstance(p, Replicate) and at > 0 for p, at in zip(placements, coordinate, strict=True)
        ):
            return []  # another rank has the same rows
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        return [(offset[0] if offset else 0, parameter.to_local().reshape(shape))]

    def _gather(self, parameter: torch.Tensor) -> torch.Tensor:
        return whole(parameter.detach().to(self.dtype))

    def _write_rows(self, buffer: np.ndarray, name: str, first: int, rows: torch.Tensor) -> None:
        """Convert rows (or a whole scalar) and write them from row `first` on.

        Raises:
            ValueError: they cannot be quantized.
        """
        slot = self.slots[name]
        target = slot.view(buffer)
        if not rows.ndim:
            target.copy_(rows)
        elif self.kind is None or not is_quantized(name, slot.shape):
            target[first : first + len(rows)].copy_(rows)
        else:
            codes, scales = quantize(rows.to(self.dtype), self.kind)
            target[first : first + len(rows)].copy_(codes)
            self.slots[name + SCALE_SUFFIX].view(buffer)[first : first + len(rows)].copy_(scales)


def _checked_sum(slot: TensorEntry, buffer: np.ndarray) -> str | None:
    """Return the checksum of a tensor in a buffer (uint8 [nbytes]); None: it is not finite.

    Codes of 8 bits are finite, as `quantize` refuses anything else.
    """
    tensor = slot.view(buffer)
    if tensor.is_floating_point() and tensor.itemsize > 1 and first_not_finite({slot.name: tensor}):
        return None
    return checksum(bytes_of(slot, buffer))


def ranks_of_first_host() -> list[int]:
    """Return the ranks that can open rank 0's files through /proc, itself included, in order; a collective."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, this_host())
    return [rank for rank, host in enumerate(hosts) if rank == 0 or (host and host == hosts[0])]


def shared_buffer(nbytes: int, near: Sequence[int], files: list[int]) -> np.ndarray:
    """Return one file-backed buffer (uint8 [nbytes]) for the ranks `near`, an empty one for others; a collective.

    Args:
        nbytes: size of each buffer, always the same.
        near: the ranks on rank 0's host.
        files: on rank 0, descriptors of files that no process maps any more. Their memory is reused, because finding
            and clearing new pages costs more than laying weights out. When rank 0 releases a buffer, its file goes
            there, unless there are `SPARE_FILES`; the other ranks must have released it by then.

    Raises:
        RunFailed: on every rank, if one cannot make or map the buffer.
    """
    problem, descriptor = None, -1
    try:
        if dist.get_rank() == 0:
            try:
                descriptor = files.pop() if files else _anonymous_file(nbytes)
            except (OSError, MemoryError) as error:
                problem = f"no shared memory for {nbytes / 2**20:.0f} MiB of weights: {with_limit(error)}"
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}"]
        dist.broadcast_object_list(paths)
        path, mapped = paths[0], np.zeros(0, np.uint8)
        if problem is None and dist.get_rank() in near:
            try:
                mapped = np.memmap(path, dtype=np.uint8, mode="r+", shape=(nbytes,))
            except (OSError, ValueError) as error:
                problem = f"rank {dist.get_rank()} cannot map the weights of rank 0 ({path}): {error}"
        fail_together(problem)
        if descriptor >= 0:  # open as long as the buffer lives: a relay on this host may copy the file by its path
            weakref.finalize(mapped, _let_go, descriptor, files)
            descriptor = -1
        return mapped
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _close(files: list[int]) -> None:
    for descriptor in files:
        os.close(descriptor)


def _let_go(descriptor: int, files: list[int]) -> None:
    if len(files) < SPARE_FILES:
        files.append(descriptor)
    else:
        os.close(descriptor)


def fail_together(problem: str | None) -> None:
    """Raise on every rank if any rank has a problem; a collective.

    Raises:
        RunFailed: with the problem of the first rank that has one.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next((p for p in problems if p is not None), None):
        raise RunFailed(first)


def _anonymous_file(nbytes: int) -> int:
    """Return the descriptor of a new file in memory."""
    free = free_memory()
    if free < nbytes:  # pages are allocated when they are written, which is too late to report a problem
        raise MemoryError(f"{free / 2**20:.0f} MiB free")
    descriptor = os.memfd_create("streamrl-weights")
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _layers(names: Iterable[str]) -> list[list[str]]:
    """Group names by their part up to the first number, i.e. by decoder layer, in order of first mention."""
    layers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        layers.setdefault(name if number is None else ".".join(parts[: number + 1]), []).append(name)
    return list(layers.values())


def _tried(revert: Revert, tensors: Tensors) -> Tensors:
    """Convert tensors; return nothing if they cannot be converted without others."""
    try:
        return revert(tensors)
    except Exception:  # a conversion that lacks some of its tensors may raise anything
        return {}


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
