"""The vLLM weight-transfer engine of the weight path `stream`: it loads versions from the site's store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from streamrl.weights.backends.vllm_reload import ReloadingEngine
from streamrl.weights.engine_codes import version_as_codes
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


class StoreWeightTransferEngine(ReloadingEngine[StoreInitInfo, StoreUpdateInfo]):
    """A weight-transfer engine that loads verified versions in checkpoint (HF) format from this host's store."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo

    _store: WeightStore | None = None

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Open the store."""
        self._store = WeightStore(Path(init_info.directory))

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
        dtype: Any = self.model_config.dtype  # a torch.dtype here; vLLM's annotation also allows its name
        version = f"version {update_info.number}"
        if self._codes is None:
            self.load(full_precision(manifest, buffer, dtype), version)
            return
        codes, expected = self._codes, self._codes.held_by(self.model)  # before the first layer is packed
        tensors = version_as_codes(manifest, buffer, codes.kind, dtype)
        self.load(codes.counted(tensors), version, lambda: codes.problem(expected))
