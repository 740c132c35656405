"""What this project's vLLM weight-transfer engines share: replacing a model's weights, in checkpoint (HF) format.

Where the tensors come from is the subclass's business: the site's store (`vllm_store.py`), or a group with the trainer
(`vllm_broadcast.py`). All of this runs inside vLLM's worker processes.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.layerwise import logger as vllm_log
from vllm.model_executor.model_loader.reload.meta import materialize_layer, materialize_meta_tensor

from streamrl.weights.backends.base import LOAD_FORMATS
from streamrl.weights.engine_codes import CodeCount
from streamrl.weights.version import CorruptWeights

PACKED_ONCE = {UnquantizedMoeBackend.CPU}
"""Back ends for which vLLM packs experts only as it makes their kernel: with a kept one, a reload would leave new
weights unpacked where it reads packed ones."""
WRITTEN_DIRECTLY = {"OAIAttention", "GptOssRoutedExperts"}
"""Modules of vLLM into which a model's `load_weights` (gpt-oss) copies tensors itself, past the loaders that a reload
replaces; without help the reload would drop them and keep the old ones."""
LAYER = re.compile(r".*?\.layers\.\d+\.")
"""How the names of a layer's tensors and modules begin."""

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class ReloadingEngine(WeightTransferEngine[Init, Update]):
    """A weight-transfer engine that replaces all weights through vLLM's layer-wise reload."""

    _wanted: frozenset[str] | set[str] = frozenset()
    """Names of the parameters that an update has to bring, as vLLM calls them."""
    _scales: tuple[Any, ...] | list[Any] = ()
    """Scales of the codes that are loaded: oneDNN's kernels keep their address and no reference."""
    _new_scales: list[Any]
    _codes: CodeCount | None = None
    """Count of the codes of an update; None: the engine computes in the model's type."""
    _written: dict[str, list[tuple[str, torch.nn.Module]]]
    """The modules of `WRITTEN_DIRECTLY` that have not got their weights, with their names, by layer."""
    _open = False
    """Whether an update has begun and not ended; the next one then begins anew."""

    def start_weight_update(self) -> None:
        """Prepare every layer, whose weights may be packed for the kernels, for weights in checkpoint format."""
        if self._open:
            self._abandon()
        self._open = True
        before = {name for name, _ in self.model.named_parameters()}  # tied ones come once
        initialize_layerwise_reload(self.model)
        # without those that vLLM made as it packed the weights
        self._wanted = before & {name for name, _ in self.model.named_parameters()}
        for module in self.model.modules():
            experts: Any = getattr(module, "quant_method", None)
            if isinstance(experts, UnquantizedFusedMoEMethod) and experts.unquantized_backend in PACKED_ONCE:
                experts.moe_kernel = None
        self._written = {}
        for name, module in self.model.named_modules():
            if type(module).__name__ in WRITTEN_DIRECTLY:
                self._written.setdefault(_layer_of(name), []).append((name, module))
        kind = LOAD_FORMATS.get(self.vllm_config.load_config.load_format)
        self._codes = None if kind is None else CodeCount(kind)
        self._new_scales = []
        if kind is None:
            return
        for name, module in self.model.named_modules():
            if getattr(module, "scheme", None) is None:
                continue
            # packed by oneDNN, codes are no parameter any more
            self._wanted |= {f"{name}.weight", f"{name}.weight_scale"}
            if getattr(getattr(module.scheme, "kernel", None), "dnnl_handler", None) is not None:
                module.weight_scale = materialize_meta_tensor(module.weight_scale)
                self._new_scales.append(module.weight_scale)

    def _abandon(self) -> None:
        """Leave an update that broke off: layers that have not got all of their weights are as they were before it."""
        model: Any = self.model
        model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if not info.can_load():
                continue
            if info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()

    def load(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        what: str,
        problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Load tensors in checkpoint format.

        Args:
            tensors: (checkpoint name, tensor) of all weights.
            what: what they are, in words.
            problem: returns, once all are loaded, what is wrong with them; None: nothing.

        Raises:
            CorruptWeights: there is a `problem`, or there are fewer than the model has.
        """
        model: Any = self.model
        loaded: set[str] | None = self._load_by_layer(tensors) if self._written else model.load_weights(tensors)
        if found := problem():
            raise CorruptWeights(f"{what}: {found}")
        if loaded is not None and (missing := sorted(self._wanted - loaded)):
            # vLLM would replace them by whatever is in the memory of the layers that it makes anew
            raise CorruptWeights(f"{what} has no weights for {len(missing)} of vLLM's parameters: {missing[0]}")

    def _load_by_layer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors, of which some are written directly into their modules; return vLLM's names of what was loaded.

        Each such module gets memory as its layer's first tensor comes, and is packed once it has all: versions come
        layer by layer, and a GPU has no room for all new experts beside the old ones.
        """
        model: Any = self.model
        loaded: set[str] = set()
        for layer, of_layer in itertools.groupby(tensors, lambda one: _layer_of(one[0])):
            waiting = self._written.get(layer, [])
            for _, module in waiting:
                materialize_layer(module, get_layerwise_info(module))
            loaded |= model.load_weights(of_layer)
            for name, module in waiting[:]:
                own = {f"{name}.{one}" for one, _ in module.named_parameters(recurse=False)}
                if own & self._wanted <= loaded:
                    _layerwise_process(module, get_layerwise_info(module))
                    waiting.remove((name, module))
        left = itertools.chain.from_iterable(self._written.values())
        return loaded - {f"{name}.{own}" for name, module in left for own in _without_memory(module)}

    def finish_weight_update(self) -> None:
        """Pack the loaded layers for the kernels again."""
        vllm_log.addFilter(without := _WithoutWeights(self.model))
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        finally:
            vllm_log.removeFilter(without)
        self._scales = self._new_scales  # only now no kernel reads the old ones
        # A tied output head receives no weights of its own, so the reload leaves it as it was; its CPU kernel holds a
        # packed copy of the old embedding, which must be packed again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                method: Any = module.quant_method
                method.process_weights_after_loading(module)
        self._open = False

    def shutdown(self) -> None:
        """Do nothing: no resource is held open."""


class _WithoutWeights(logging.Filter):
    """Leaves out what vLLM warns of after a reload, that it failed to load a module, of those that need no weights.

    Such a module has tied parameters only, which came with another one's, and buffers that are in no checkpoint, as a
    rotary embedding's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """
        Args:
            model: the model, with all weights of the reload and before its end.
        """
        super().__init__()
        infos = [(module, get_layerwise_info(module)) for module in model.modules()]
        came: set[int] = set()
        for module, info in infos:
            if not info.can_load():
                came |= {id(one) for one in module.parameters(recurse=False)}
            elif info.load_numel and info.kernel_tensors is not None:
                came |= {id(one) for one in info.kernel_tensors[0].values()}
        self.failed: set[str] = set()
        """Classes of the modules that lack weights."""
        for module, info in infos:
            if info.can_load() and not info.load_numel and info.kernel_tensors is not None:
                parameters, buffers = info.kernel_tensors
                # packing may have taken parameters out
                tied = all(name in parameters and id(parameters[name]) in came for name in info.restore_metadata[0])
                if not tied or buffers.keys() - info.kernel_non_persistent_buffers:
                    self.failed.add(type(module).__name__)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        kind, failed, _ = record.getMessage().partition(": Failed to load weights")
        return not failed or kind in self.failed


def _without_memory(module: torch.nn.Module) -> list[str]:
    """Return the parameters that drop what is written into them."""
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.is_meta]


def _layer_of(name: str) -> str:
    """Return how the names of a layer begin to which a tensor or module belongs; '': it belongs to none."""
    found = LAYER.match(name)
    return found.group() if found else ""
