"""vLLM's weight-transfer extension point: an engine that loads versions from the site's store.

Registered under the entry-point group `vllm.general_plugins`, so that every vLLM process (the engine core is one of
its own) knows it. vLLM calls init, start, update, finish; what is done in between is vLLM's own layer-wise reload.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

from streamrl.runtime.processes import end_with_parent, kill_all_with

EAGER = "STREAMRL_EAGER"
"""Environment variable: 1 in an engine that compiles nothing."""
FEW_ROWS = "streamrl_few_rows"
"""vLLM's name of the method and the norms with which small batches are computed (`few_rows_vllm.py`)."""
QUANTIZATION = "STREAMRL_QUANTIZATION"
"""Environment variable: `FEW_ROWS` in an engine that is to know it."""
_ends = 0
"""Process that ends with its parent already."""


def register() -> None:
    """Entry point: makes `WeightTransferConfig(backend="streamrl")` known. Called once or more per process."""
    _end_with_instance()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from streamrl.weights.backends.base import STREAMED

    if STREAMED.engine not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            STREAMED.engine, "streamrl.weights.backends.vllm_store", "StoreWeightTransferEngine"
        )
    if EAGER in os.environ:
        # vLLM's sampler has a function of its own compiled, the rank of a sampled token, which nobody reads here: 7 s
        # of an instance's start with an empty cache, 1.5 s with a full one. Computed as it is written, it takes 0.04 ms
        # of a step for one request, 3 ms for 64 of a vocabulary of 49,152
        import torch

        torch.compiler.set_stance("force_eager" if os.environ[EAGER] == "1" else "default")
    if os.environ.get(QUANTIZATION) == FEW_ROWS:
        import streamrl.generation.instance.few_rows_vllm  # noqa: F401


def _end_with_instance() -> None:
    """An engine, or one of its workers, only holds memory once who started it has died."""
    global _ends
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or _ends == os.getpid():
        return
    _ends = os.getpid()  # a fork takes variables along, but no thread
    end_with_parent(signal.SIGKILL)
    kill_all_with(parent.pid)
