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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from streamrl.weights.quantize import full_precision
from streamrl.weights.version import CorruptWeights
from streamrl.weights.version_store import WeightStore


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

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Open the store."""
        self._store = WeightStore(Path(init_info.directory))

    def start_weight_update(self) -> None:
        """Prepare every layer, whose weights may be packed for the kernels, for weights in checkpoint format."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        """Load one version.

        8-bit codes are converted back to the model's type: the engine computes with weights of their precision, not
        with the codes.

        Raises:
            CorruptWeights: the store holds other weights under that number, or codes without their scales.
        """
        if self._store is None:
            raise RuntimeError("init_transfer_engine was not called")
        manifest, buffer = self._store.open(update_info.number)
        if manifest.version.content_hash != update_info.content_hash:
            raise CorruptWeights(f"version {update_info.number} in the store is not the one announced")
        model: Any = self.model
        dtype: Any = self.model_config.dtype  # a torch.dtype here; vLLM's annotation also allows its name
        model.load_weights(full_precision(manifest, buffer, dtype))

    def finish_weight_update(self) -> None:
        """Pack the loaded layers for the kernels again."""
        finalize_layerwise_reload(self.model, self.model_config)
        # A tied output head receives no weights of its own, so the reload leaves it as it was; its CPU kernel holds a
        # packed copy of the old embedding, which must be packed again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                method: Any = module.quant_method
                method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Do nothing: no resource is held open."""
