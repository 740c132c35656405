"""The `speculation:` of a run file: whether instances draft tokens and verify several in a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from streamrl.config.cluster import StrictModel


class SpeculationConfig(StrictModel):
    """Speculative decoding: tokens are drafted, and verified several in a step.

    What is sampled keeps its distribution, and log-probabilities are the model's own.
    """

    method: Literal["none", "auto", "ngram"] = Field(
        "none",
        description="origin of drafted tokens; none: no speculation; ngram: the request's own text; auto: the run's "
        "recent completions of the same prompt too; of what is found, only as much is verified as pays",
    )
    most_tokens: int = Field(8, ge=1, le=32, description="most drafted tokens of a request in a step")
