"""vLLM's worker for CPUs, which records the model's operations for small batches and replays them (`recording.py`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker.cpu_worker import CPUWorker

from streamrl.generation.instance.attention_vllm import INSTEAD
from streamrl.generation.instance.recording import Recording, record
from streamrl.machine.engine_settings import MOST_REPLAYED

log = logging.getLogger(__name__)
PATIENCE = 3
"""Steps of each number of tokens before it is recorded, which takes as long as eight such steps lose: numbers that come
once or twice are not recorded, as those of prompts."""
TRIALS = 2
"""First steps of each number of tokens in which its recording is compared with vLLM's forward pass."""


class ReplayedForward:
    """Forward passes of a model, in place of vLLM's `_model_forward`."""

    def __init__(self, model: Callable[[], torch.nn.Module], plain: Callable[..., Any]) -> None:
        """
        Args:
            model: returns the model.
            plain: vLLM's own forward pass.
        """
        self._model, self._plain = model, plain
        self.recordings: dict[int, Recording | None] = {}
        """Recording of each number of tokens; None: vLLM's forward pass is used."""
        self._seen: Counter[int] = Counter()
        """Steps of each number of tokens, before it was recorded."""

    def __call__(
        self, input_ids: torch.Tensor | None = None, positions: torch.Tensor | None = None, **others: Any
    ) -> Any:
        """Return the hidden states of a step; those of a small one are overwritten by the next step."""
        if input_ids is None or positions is None or not _is_small(input_ids, positions, others):
            return self._plain(input_ids=input_ids, positions=positions, **others)
        recording = self.recordings.get(len(input_ids))
        if recording is not None and not recording.follow_weights():
            self.recordings.clear()
            recording = None
        if recording is not None and recording.agreed >= TRIALS:
            return recording(input_ids, positions)
        if recording is None and (len(input_ids) in self.recordings or self._is_new(len(input_ids))):
            return self._forward(input_ids, positions)
        return self._trial(input_ids, positions, recording)

    def _is_new(self, tokens: int) -> bool:
        """Count a step of so many tokens; return whether there were too few for a recording."""
        self._seen[tokens] += 1
        return self._seen[tokens] <= PATIENCE

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self._plain(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)

    def _trial(self, ids: torch.Tensor, positions: torch.Tensor, recording: Recording | None) -> Any:
        """Compute a step as vLLM does, and try whether a recording of another one (None: made here) gives the same.

        What this writes to the KV cache in between are the step's own places, which are written again.
        """
        result = self._forward(ids, positions)
        self.recordings[len(ids)] = None
        try:
            if recording is None:
                recording = record(
                    self._model(), self._forward, torch.zeros_like(ids), torch.zeros_like(positions), INSTEAD
                )
            if torch.equal(recording(ids, positions).view(torch.uint8), result.view(torch.uint8)):  # NaN equals itself
                recording.agreed += 1
                self.recordings[len(ids)] = recording
                return result
            reason = "it computes something else"
            if not result.isfinite().all():
                del self.recordings[len(ids)]  # of such weights; later ones may do
        except Exception as error:  # whatever goes wrong, vLLM's own forward pass remains
            reason = f"{type(error).__name__}: {error}"
        log.warning("steps of %d tokens are not replayed: %s", len(ids), reason)
        return self._forward(ids, positions)


def _is_small(ids: torch.Tensor, positions: torch.Tensor, others: dict[str, Any]) -> bool:
    return (
        ids.shape == positions.shape
        and len(ids) <= MOST_REPLAYED
        and all(one is None for one in others.values())
        and get_forward_context().attn_metadata is not None  # of no requests: a trial of vLLM's own
    )


class ReplayingWorker(CPUWorker):
    """vLLM's worker for CPUs with a `ReplayedForward`."""

    def init_device(self) -> None:
        super().init_device()
        runner: Any = self.model_runner
        runner._model_forward = ReplayedForward(lambda: runner.model, runner._model_forward)
