"""The experts that a CPU engine's routers choose, captured for router replay.

vLLM returns them (`CompletionOutput.routed_experts`) from its second model runner only, which needs Triton, and refuses
to be asked without. All of it but the runner's calls works on a CPU as well: the callbacks of the routers, the store of
the experts of cached prefixes, the scheduler's part. So these two classes, which vLLM takes by name, make the calls
around the first runner's steps. They are for steps that sample one token per request, one step after the other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch


class CapturingScheduler(Scheduler):
    """vLLM's scheduler, which also tells the worker whose experts to keep and puts them into the outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class CapturingWorker(CPUWorker):
    """vLLM's worker for CPUs, which also returns the experts of each step's tokens."""

    _capture: AuxOutputWorkerConnector | None = None
    _step: SimpleNamespace | None = None
    """Rows of the step that has been computed but not sampled: `req_ids` and, per request, `num_computed_tokens_np`
    before it and `query_start_loc_np`."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        self._capture = get_aux_output_connector(self.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        capture = self._capture
        assert capture is not None
        capture.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        self._step = None
        if scheduler_output.total_num_scheduled_tokens:
            batch = self.model_runner.input_batch
            ids = list(batch.req_ids)
            counts = [scheduler_output.num_scheduled_tokens[one] for one in ids]
            self._step = SimpleNamespace(
                req_ids=ids,
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(ids)].copy(),
                query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
            )
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        output: ModelRunnerOutput = super().sample_tokens(grammar_output)
        step, self._step = self._step, None
        assert self._capture is not None and step is not None
        pending = self._capture.prepare_output(cast("InputBatch", step))
        assert pending is not None  # there is one worker only
        sampled = np.array([len(output.sampled_token_ids[output.req_id_to_index[one]]) for one in step.req_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = pending.process_output()
        return output

    def shutdown(self) -> None:
        if self._capture is not None:
            self._capture.close()
        super().shutdown()
