"""Load a model that several ranks share: each reads only its own slices of the weights from the safetensors files.

    empty_model   the model without weights, on torch's meta device
    (sharded by FSDP2, divided by tensor parallelism: still without a byte)
    fill          each rank's slice of each weight, converted, straight to the rank's device; then the buffers

So no rank ever has the whole model in memory. transformers does the reading (what it does for its own
`distributed_config`): its loader reads of a weight that is a DTensor only this rank's slice, renames and converts it as
in any other load, and computes the buffers that no file has, such as the frequencies of rotary positions. Therefore
every bit is that of `from_pretrained`.

Some models cannot be read in slices (`NotInSlices`): their ranks load them whole, each into host memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from streamrl.machine.model_files import NotInSlices, sliceable_files, transformers_config


def empty_model(kind: type[Any], path: str, attention: str, shards: int) -> PreTrainedModel:
    """Return a model in fp32 on the meta device, which `fill` can give its weights once it is divided.

    Args:
        kind: AutoModelForCausalLM, or AutoModel for the trunk alone.
        path: folder of an HF model.
        attention: transformers' name of the attention.
        shards: number of shards into which FSDP2 will divide each weight.

    Raises:
        NotInSlices: `from_pretrained` alone can load this folder, or would do more than read it.
    """
    files = sliceable_files(Path(path))
    model = _on_meta(kind, path, attention)
    _check(model, files, shards)
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # no such file: as `from_pretrained` does then
            model.generation_config = GenerationConfig.from_pretrained(
                path, config_file_name="config.json", _from_model_config=True
            )
    return model


def is_empty(model: PreTrainedModel) -> bool:
    """Return whether a model waits for `fill`."""
    return bool(model.device.type == "meta")


@torch.no_grad()
def fill(model: PreTrainedModel, device: torch.device) -> None:
    """Read this rank's part of an empty model's weights, and compute its buffers.

    Weights keep their types: frozen ones may be converted to the compute type before, while they are empty.

    Args:
        model: what `empty_model` returned, with DTensors as parameters. They are replaced by others.
        device: this rank's device.

    Raises:
        RuntimeError: a weight has another shape than the configuration says.
    """
    path = model.config.name_or_path
    on_host = dict.fromkeys((name for name, _ in model.named_non_persistent_buffers()), "cpu")  # as a whole load does
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=path,
        device_map={"": device} | on_host,
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
    )
    slices: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in sliceable_files(Path(path)):
            tensors = stack.enter_context(safe_open(file, framework="pt"))
            slices |= {key: tensors.get_slice(key) for key in list(tensors.keys())}
        # not by `_load_pretrained_model`, which first takes as much of a GPU's memory as the whole model has bytes
        info, _ = convert_and_load_state_dict_in_model(model, slices, options)
    model._finalize_model_loading(model, options, info)


def empty_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return another empty model, which nothing has divided, of the kind of an empty or filled causal LM."""
    return _on_meta(AutoModelForCausalLM, model.config.name_or_path, "eager")


def _on_meta(kind: type[Any], path: str, attention: str) -> PreTrainedModel:
    config = transformers_config(path)
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.config.name_or_path = path  # that of a model of text and images is another configuration's
    return model.eval()


def _check(model: PreTrainedModel, files: list[Path], shards: int) -> None:
    """Compare the tensors of files with what a model has, without reading them.

    Raises:
        NotInSlices: a rank would need more of them than its own slices, or would make weights itself.
    """
    expected: dict[str, torch.Tensor] = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    operations = {pattern: one.operations for one in converters for pattern in one.source_patterns}
    found = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            keys = list(tensors.keys())
        for key in keys:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
            if name not in expected and key in expected:  # it keeps its name
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
            found.add(name)
            if pattern is None or name not in expected:
                continue
            if not all(map(_keeps_rows, operations[pattern])):
                raise NotInSlices(f"its files have {name} in another form, of which a part is no part of it")
            rows = len(expected[name])
            if -(-rows // shards) * (shards - 1) >= rows:
                raise NotInSlices(f"{name} has {rows} experts, too few for {shards} ranks")
    tied = model.all_tied_weights_keys
    if both := sorted(found & tied.keys()):
        raise NotInSlices(f"its files have {both[0]}, which is tied to {tied[both[0]]}")
    if missing := sorted(expected.keys() - found - tied.keys()):
        raise NotInSlices(f"its files lack {missing[0]}")


def _keeps_rows(operation: Any) -> bool:
    """Return whether rows of an operation's result come from the same rows, or the experts, of what it is given."""
    if isinstance(operation, MergeModulelist):
        return bool(operation.dim == 0)
    return isinstance(operation, Concatenate) and operation.dim > 0
