"""vLLM plugin: registers a weight-transfer engine that loads versions from the site's store.

It belongs to the entry-point group `vllm.general_plugins`, so that every vLLM process (the engine core is a separate
one) loads it. vLLM calls init, start, update and finish; in between, vLLM's own layer-wise reload does the work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from types import ModuleType, SimpleNamespace

from streamrl.generation.instance.engine_variables import EAGER, FEW_ROWS, QUANTIZATION
from streamrl.runtime.processes import end_with_parent, kill_with

_ends = 0
"""Id of the process that `_end_with_instance` has already set up."""


def register() -> None:
    """Register the weight-transfer engines that are not vLLM's own.

    vLLM calls this entry point in every process, possibly more than once.
    """
    _end_with_instance()
    from vllm import envs
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.utils import network_utils

    from streamrl.config.weight_sync import WEIGHT_PATHS
    from streamrl.weights.backends.base import LOAD_FORMATS

    for path in WEIGHT_PATHS.values():
        if path.engine_class is not None and path.engine not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(path.engine, *path.engine_class)
    # a killed engine leaves the file by which its workers meet: where its sockets are, that goes with the launcher
    network_utils.tempfile = SimpleNamespace(gettempdir=lambda: envs.VLLM_RPC_BASE_PATH)  # type: ignore[assignment]
    if EAGER in os.environ:  # an engine of a CPU
        import torch
        from vllm.model_executor.models import registry
        from vllm.triton_utils import dispatcher

        from streamrl.generation.instance import (
            layer_ops_vllm,
            routing_vllm,
            sampling_vllm,
            segments_vllm,
            xielu_vllm,
        )

        if os.environ[EAGER] == "1":  # a compiler must see the operations
            layer_ops_vllm.install()
        routing_vllm.install()
        sampling_vllm.install()
        segments_vllm.install()
        xielu_vllm.install()
        # vLLM looks at the class of a model it has not seen before in a process that imports everything again, so that
        # its own does not initialize CUDA: half a minute on a slow CPU, for nothing here
        registry._run_in_subprocess = lambda fn: fn()
        # vLLM replaces kernels that a CPU has not wherever one is held, and looks into every module of the process
        dispatcher.sys = _OwnModules()  # type: ignore[assignment]
        # vLLM's attention uses AMX without asking the kernel for it, which ends a forked engine unless a matrix product
        # has asked before, and any engine where the kernel refuses (a sandbox)
        if not torch.cpu._init_amx():
            torch.cpu._is_amx_tile_supported = lambda: False
        # some functions of vLLM are compiled at their first call even in an engine that compiles nothing
        torch.compiler.set_stance("force_eager" if os.environ[EAGER] == "1" else "default")
    if os.environ.get(QUANTIZATION) == FEW_ROWS:
        import streamrl.generation.instance.few_rows_vllm
    if os.environ.get(QUANTIZATION) in LOAD_FORMATS:
        import streamrl.generation.instance.eight_bit_vllm  # noqa: F401


class _OwnModules:
    """A stand-in for `sys` with the modules that may hold a kernel of vLLM: a seventh of those of an engine."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        """Modules of vLLM and of this package that are loaded now, by name."""
        return {name: one for name, one in sys.modules.items() if name.partition(".")[0] in ("vllm", "streamrl")}


def _end_with_instance() -> None:
    """End this process when its parent dies: an engine or worker without its instance would only hold memory."""
    global _ends
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or _ends == os.getpid():
        return
    _ends = os.getpid()  # a fork takes variables along, but no thread
    end_with_parent(signal.SIGKILL)
    kill_with(parent.pid, children=True)
