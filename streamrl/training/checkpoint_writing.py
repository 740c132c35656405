"""The files of a checkpoint, and failures to write or read them in words.

Of a failure to write that is the system's own error, whatever library met it:

Python        OSError
safetensors   SafetensorError, with the number of the system's error in its text
torch         CheckpointException on every rank, with the error of each rank that failed; it is no Exception
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlan
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from streamrl.errors import FULL, ErrorCode, RunFailed
from streamrl.run_dir.checkpoint_sums import TRAINER_STATE
from streamrl.run_dir.checkpoints import unfitting, unreadable
from streamrl.training.generation_defaults import writable
from streamrl.weights.finite import first_not_finite, whole
from streamrl.weights.sharded import persistent_buffers

NUMBER = re.compile(r"\(os error (\d+)\)")
"""What libraries in Rust say of the system's error."""
PASSING = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of reading that may not come again, except that of a file that is not there."""
UNTAKEN = "Weights in checkpoint that the model does not have"
UNFITTING = ("Missing key in checkpoint", "Size mismatch between saved", UNTAKEN)
"""How torch, or `_WholeModels`, begins to say that a sound checkpoint lacks a tensor, has one of another shape, or has
further ones."""


@contextmanager
def told_in_words(folder: Path) -> Iterator[None]:
    """Run the writing of a checkpoint.

    Args:
        folder: where it is written.

    Raises:
        RunFailed: it cannot be written there. Errors that are not the system's pass unchanged.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        if (cause := system_error(error)) is None:
            raise
        text = f"the trainer cannot write checkpoint {folder}: {cause}"
        if cause.errno in FULL:
            text = ErrorCode.DISK.refer(f"{text}; make room there, then --resume")
        raise RunFailed(text) from cause


@contextmanager
def read_in_words(checkpoint: Path) -> Iterator[None]:
    """Run torch's reading of a checkpoint, by all ranks.

    Args:
        checkpoint: its folder.

    Raises:
        RunFailed: on every rank, if one cannot read its files, or they are of another model or algorithm. What has
            other causes than the files, such as too little memory or a file system that is away, passes unchanged: a
            restarted trainer may read them.
    """
    try:
        yield
    except CheckpointException as error:
        causes = [failure for _, (failure, _) in sorted(error.failures.items())]
        passing = [one for one in causes if isinstance(one, PASSING) and not isinstance(one, FileNotFoundError)]
        if passing or not causes:
            raise
        told = unfitting if str(causes[0]).startswith(UNFITTING) else unreadable
        raise told(checkpoint, causes[0]) from error


def load_state(state: dict[str, Any], checkpoint: Path) -> None:
    """Load what a checkpoint has of a state, into its tensors. A collective.

    Args:
        state: tensors by name under `[<prefix>]model` and `[<prefix>]optimizer`.
        checkpoint: the checkpoint's folder.

    Raises:
        RunFailed: as `read_in_words`, also where the checkpoint has further weights of a model.
    """
    with read_in_words(checkpoint):
        dcp.load(state, checkpoint_id=checkpoint / TRAINER_STATE, planner=_WholeModels())


def system_error(error: BaseException) -> OSError | None:
    """Return the system's error that a library reports; None: it is another one."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, CheckpointException):
        found = (system_error(failure) for _, (failure, _) in sorted(error.failures.items()))
        return next((one for one in found if one is not None), None)
    if number := NUMBER.search(str(error)):
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return None


def checkpoint_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of a model's parameters, then of its persistent buffers. A collective.

    Args:
        model: the model; it has no copies of its weights left.
        dtype: type of the parameters, but for those that transformers keeps in fp32; buffers keep their own.

    Raises:
        RunFailed: on every rank, at a weight that is not finite.
    """
    kept = kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        yield name, _finite(name, whole(parameter).to(torch.float32 if name in kept else dtype))
    for name, buffer in persistent_buffers(model).items():
        yield name, _finite(name, whole(buffer))


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of a model's parameters that transformers loads in fp32, whatever the type of the others.

    Such are the router and its biases in ERNIE 4.5, where a rounded one may choose another expert.

    Args:
        model: the model.
        dtype: type of the others.
    """
    if not (patterns := list(model._get_dtype_plan(dtype))):
        return set()
    found = build_glob_alternation(patterns)[0]
    return {name for name, _ in model.named_parameters() if found.search(name)}


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be published or saved.

    Raises:
        RunFailed: it is not finite.
    """
    if tensor.is_floating_point() and first_not_finite({name: tensor}):
        raise RunFailed(f"weight {name!r} is not finite: it is neither published nor saved")
    return tensor


def write_model(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]], directory: Path, dtype: str, writes: bool
) -> None:
    """Write the model's files of a checkpoint. A collective: each rank gathers each tensor, and none holds all on its
    device.

    Args:
        model: the model, for its configuration.
        weights: (name, full tensor), gathered as it is asked for.
        directory: an existing folder.
        dtype: type of the files' weights; transformers would write that of the live (master) ones.
        writes: whether this rank writes; one does.
    """
    full: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if writes:
            full[name] = tensor.cpu()
        del tensor  # else it would live on while the next one is gathered
    if not writes:
        return
    if model.can_generate() and model.generation_config is not None:
        model.generation_config = writable(model.generation_config)
    model.save_pretrained(directory, state_dict=full)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


class StateWriter(FileSystemWriter):
    """torch's writer of checkpoints into a folder, which fails with the system's error."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Files()


class _Files(FileSystem):
    """Files in which an error of the system ends as itself.

    While torch leaves the archive that it could not write, it raises another error ('unexpected pos'), and what that
    came from is lost on the way to the other ranks.
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            if not isinstance(cause := error.__context__, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, os.fspath(path)) from error


class _WholeModels(DefaultLoadPlanner):
    """torch's planner of a load, which also refuses weights of the checkpoint that a model does not have.

    torch reads what it is asked for, so a model with fewer layers would lose the others without a word. A model that
    is not asked for at all, such as a critic, is left where it is.
    """

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        asked = tuple(f"{name}." for name in self.original_state_dict if name.endswith("model"))
        saved = {name for name in self.metadata.state_dict_metadata if name.startswith(asked)}
        if untaken := sorted(saved - set(self.state_dict)):
            raise ValueError(f"{UNTAKEN}: {', '.join(untaken[:3])}{', ...' if untaken[3:] else ''}")
        return plan
