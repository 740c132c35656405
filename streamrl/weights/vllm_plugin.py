"""vLLM's weight-transfer extension point: an engine that loads versions from the site's store.

Registered under the entry-point group `vllm.general_plugins`, so that every vLLM process (the engine core is one of
its own) knows it. vLLM calls init, start, update, finish; what is done in between is vLLM's own layer-wise reload.
"""

from __future__ import annotations

import multiprocessing
import signal

from streamrl.processes import end_with_parent

BACKEND = "streamrl"


def register() -> None:
    """Entry point: makes `WeightTransferConfig(backend="streamrl")` known. Called once or more per process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if multiprocessing.parent_process() is not None:  # an engine, or one of its workers: alone it only holds memory
        end_with_parent(signal.SIGKILL)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "streamrl.weights.vllm_engine", "StoreWeightTransferEngine"
        )
