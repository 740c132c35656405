"""Which instance gets what, by which forecasts, and how many instances there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scheduler.dispatch.registry import AUTO, DEFAULTS, POLICIES
from streamrl.config.cluster import StrictModel

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[(AUTO, *POLICIES)]
SUMMARIES = "; ".join(f"{name}: {kind.summary}" for name, kind in POLICIES.items())


class RankerConfig(StrictModel):
    """The ranker, which predicts output lengths from prompts and learns from the run's own rollouts."""

    path: str | None = Field(
        None, description="initial ranker, a file written by `streamrl train-ranker`; none: start without predictions"
    )
    refit_every: int = Field(
        1,
        ge=0,
        description="fewest optimizer steps between refits on the newest rollouts (0: never); no step waits for any "
        "but the first, and a pause of 10 times its seconds follows (100 times where nothing is placed by predictions, "
        "as on one site under a policy that ignores them)",
    )
    window: int = Field(20_000, ge=100, description="number of newest samples that a refit learns from")


class DispatchConfig(StrictModel):
    """Dispatch of requests to instances."""

    policy: PolicyName = Field(
        "auto",
        description="dispatch policy (compare them with `streamrl simulate`); auto: skew-aware under the schedules "
        f"{', '.join(DEFAULTS)}, least-loaded under async and auto, where no policy is known to be faster; skew-aware "
        f"acts as least-loaded until length predictions are trusted; {SUMMARIES}",
    )
    price_tolerance: float = Field(
        0.0, ge=0, le=1, description="with several sites: share of time that may be lost by choosing a cheaper site"
    )


class ElasticityConfig(StrictModel):
    """Elasticity, which balances generation and training: after a step it may add or remove one instance of a pool."""

    enabled: bool = Field(
        False, description="adjust pools within their min_replicas and max_replicas of the cluster file"
    )
    patience: int = Field(2, ge=1, description="consecutive steps that must call for the same change")
    settle: int = Field(1, ge=0, description="steps ignored after a change")
    margin: float = Field(
        0.05, ge=0, lt=1, description="share of a stage's time by which the imbalance must exceed what a change saves"
    )
    min_saving: float = Field(
        0.05, ge=0, lt=1, description="share of the generation time that an added instance must save"
    )
