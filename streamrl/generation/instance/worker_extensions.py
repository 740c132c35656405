"""The classes by which vLLM's worker gets the methods that an instance calls in it; vLLM takes one, by name."""

from __future__ import annotations

from streamrl.generation.drafts.drafter import DrafterWorker
from streamrl.weights.backends.vllm_broadcast import GroupWorker

__all__ = ["DrafterWorker", "DraftingGroupWorker", "GroupWorker"]


class DraftingGroupWorker(DrafterWorker, GroupWorker):
    """Extension for an instance with a drafter whose weights the trainer pushes."""
