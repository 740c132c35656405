"""vLLM's worker for CPUs, which records the model's operations for small batches and replays them (`recording.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker.cpu_worker import CPUWorker

from streamrl.generation.instance.recording import CannotRecord, Recording, record
from streamrl.machine.engine_settings import MOST_REPLAYED

log = logging.getLogger(__name__)


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
        """By number of tokens; None: vLLM's forward pass is used."""

    def __call__(
        self, input_ids: torch.Tensor | None = None, positions: torch.Tensor | None = None, **others: Any
    ) -> Any:
        """Return the hidden states of a step; those of a small one are overwritten by the next step."""
        small = (
            input_ids is not None
            and positions is not None
            and input_ids.shape == positions.shape
            and len(input_ids) <= MOST_REPLAYED
            and all(one is None for one in others.values())
            and get_forward_context().attn_metadata is not None  # of no requests: a trial of vLLM's own
        )
        if not small or input_ids is None or positions is None:
            return self._plain(input_ids=input_ids, positions=positions, **others)
        recording = self.recordings.get(len(input_ids))
        if recording is not None:
            if recording.follow_weights():
                return recording(input_ids, positions)
            self.recordings.clear()
        if len(input_ids) not in self.recordings:
            return self._first(input_ids, positions)
        return self._plain(input_ids=input_ids, positions=positions, **others)

    def _first(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Compute a step as vLLM does, and try whether a recording of another one would give the same.

        What this writes to the KV cache in between are the step's own places, which are written again.
        """

        def forward(ids: torch.Tensor, positions: torch.Tensor) -> Any:
            return self._plain(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)

        result = forward(ids, positions)
        self.recordings[len(ids)] = None
        try:
            recording = record(self._model(), forward, torch.zeros_like(ids), torch.zeros_like(positions))
            if torch.equal(recording(ids, positions), result):
                self.recordings[len(ids)] = recording
                return result
            reason = "it computes something else"
        except CannotRecord as error:
            reason = str(error)
        log.warning("steps of %d tokens are not replayed: %s", len(ids), reason)
        return forward(ids, positions)


class ReplayingWorker(CPUWorker):
    """vLLM's worker for CPUs with a `ReplayedForward`."""

    def init_device(self) -> None:
        super().init_device()
        runner: Any = self.model_runner
        runner._model_forward = ReplayedForward(lambda: runner.model, runner._model_forward)
