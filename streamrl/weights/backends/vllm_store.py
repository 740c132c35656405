"""The vLLM weight-transfer engine of this project; it runs inside vLLM's worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, materialize_meta_tensor

from streamrl.weights.backends.base import LOAD_FORMATS
from streamrl.weights.engine_codes import CodeCount, version_as_codes
from streamrl.weights.quantize import full_precision
from streamrl.weights.version import CorruptWeights
from streamrl.weights.version_store import WeightStore

PACKED_ONCE = {UnquantizedMoeBackend.CPU}
"""Back ends for which vLLM packs experts only as it makes their kernel: with a kept one, a reload would leave new
weights unpacked where it reads packed ones."""
WRITTEN_DIRECTLY = {"OAIAttention", "GptOssRoutedExperts"}
"""Modules of vLLM into which a model's `load_weights` (gpt-oss) copies tensors itself, past the loaders that a reload
replaces; without help the reload would drop them and keep the old ones."""


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    """Arguments of the engine's initialization: the folder of the site's store."""

    directory: str


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):
    """Arguments of an update: the version to load."""

    number: int
    content_hash: str


class StoreWeightTransferEngine(WeightTransferEngine[StoreInitInfo, StoreUpdateInfo]):
    """A weight-transfer engine that loads verified versions in checkpoint (HF) format from this host's store."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo

    _store: WeightStore | None = None
    _wanted: frozenset[str] | set[str] = frozenset()
    """Names of the parameters that an update has to bring, as vLLM calls them."""
    _scales: list[Any]
    """Scales of the codes that are loaded: oneDNN's kernels keep their address and no reference."""
    _new_scales: list[Any]
    _codes: CodeCount | None = None
    """Count of the codes of an update; None: the engine computes in the model's type."""

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Open the store."""
        self._store = WeightStore(Path(init_info.directory))
        self._scales = []

    def start_weight_update(self) -> None:
        """Prepare every layer, whose weights may be packed for the kernels, for weights in checkpoint format."""
        before = {name for name, _ in self.model.named_parameters()}  # tied ones come once
        initialize_layerwise_reload(self.model)
        # without those that vLLM made as it packed the weights
        self._wanted = before & {name for name, _ in self.model.named_parameters()}
        for module in self.model.modules():
            experts: Any = getattr(module, "quant_method", None)
            if isinstance(experts, UnquantizedFusedMoEMethod) and experts.unquantized_backend in PACKED_ONCE:
                experts.moe_kernel = None
            if type(module).__name__ in WRITTEN_DIRECTLY:
                materialize_layer(module, get_layerwise_info(module))
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

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        """Load one version.

        8-bit codes are converted back to the model's type, with which the engine computes; one that computes in 8 bits
        takes codes, and quantizes what was not sent so.

        Raises:
            CorruptWeights: the store holds other weights under that number, codes without their scales, or fewer
                weights than the model has, or other codes than vLLM's layers take.
        """
        if self._store is None:
            raise RuntimeError("init_transfer_engine was not called")
        manifest, buffer = self._store.open(update_info.number)
        if manifest.version.content_hash != update_info.content_hash:
            raise CorruptWeights(f"version {update_info.number} in the store is not the one announced")
        model: Any = self.model
        dtype: Any = self.model_config.dtype  # a torch.dtype here; vLLM's annotation also allows its name
        if self._codes is None:
            loaded: set[str] | None = model.load_weights(full_precision(manifest, buffer, dtype))
        else:
            expected = self._codes.held_by(self.model)  # before the first layer is packed
            tensors = version_as_codes(manifest, buffer, self._codes.kind, dtype)
            loaded = model.load_weights(self._codes.counted(tensors))
            if problem := self._codes.problem(expected):
                raise CorruptWeights(f"version {update_info.number}: {problem}")
        if loaded is not None and (missing := sorted(self._wanted - loaded)):
            # vLLM would replace them by whatever is in the memory of the layers that it makes anew
            raise CorruptWeights(
                f"version {update_info.number} has no weights for {len(missing)} of vLLM's parameters: {missing[0]}"
            )

    def finish_weight_update(self) -> None:
        """Pack the loaded layers for the kernels again."""
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if type(module).__name__ in WRITTEN_DIRECTLY and info.can_load():
                _layerwise_process(module, info)
        finalize_layerwise_reload(self.model, self.model_config)
        self._scales = self._new_scales  # only now no kernel reads the old ones
        # A tied output head receives no weights of its own, so the reload leaves it as it was; its CPU kernel holds a
        # packed copy of the old embedding, which must be packed again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                method: Any = module.quant_method
                method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Do nothing: no resource is held open."""
