"""What an instance tells its drafter: collected between two calls, and handed over at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import StepCurve
from streamrl.generation.drafts.drafter import Completion
from streamrl.rollouts.types import SampleRequest


class DrafterLessons:
    """What the drafter has not been told yet. Pure."""

    def __init__(self) -> None:
        self._ended: list[Completion] = []
        self._expected: dict[bytes, float | None] = {}
        self._told: int | None = None
        """Version of the weights that the drafter was told last."""

    def begins(self, request: SampleRequest) -> None:
        """Note the forecast length of a request that begins."""
        self._expected[request.prompt_tokens.tobytes()] = request.expected

    def ends(self, request: SampleRequest, completion: npt.NDArray[np.int32], version: int) -> None:
        """Note a completion, shape [tokens], whose last token is of this version."""
        self._ended.append((request.prompt_tokens.tobytes(), completion.tobytes(), version))

    def take(self, version: int, curve: StepCurve | None) -> tuple[Any, ...] | None:
        """Return the arguments of `RolloutDrafter.teach`, and forget them; None: there is nothing to tell.

        Args:
            version: version of the weights now.
            curve: step time of the engine without speculation; None: as before.
        """
        if curve is None and not self._ended and not self._expected and self._told == version:
            return None
        lesson = version, curve and curve.to_json(), self._ended, list(self._expected.items())
        self._ended, self._expected, self._told = [], {}, version
        return lesson
