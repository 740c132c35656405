"""What was measured when a model was trained; kept in the model's file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Figures:
    """A ranking's figures on samples of prompts that it had not seen."""

    recall: dict[str, float]
    """By the share of the longest samples: '0.2', '0.1', '0.05'."""
    kendall_tau: float | None
    """tau-b; None when the ranking has only one value."""


@dataclass
class Many:
    """Ranking of the prompts that have many samples."""

    prompts: int
    ceiling: dict[str, float]
    """Recall of ranking by the expected length, taken from these samples (`ranker.ceiling.ceiling_of_many`)."""
    recall: dict[str, float]
    """The kept kind's, on the same samples."""


@dataclass
class Captured:
    """What dispatching by one kind of forecast comes to, in simulated generation."""

    makespan: float
    """Share of least-loaded dispatch's time."""
    captured: float | None
    """Share of the saving that true lengths give; None where they give next to none."""


@dataclass
class Dispatch:
    """Simulated generation of held-out prompts, dispatched by forecasts."""

    setting: str
    """The batches and the instances, in words."""
    oracle: float
    """With the true lengths: share of least-loaded dispatch's time."""
    forecasts: dict[str, Captured]
    """By the names of `ranker.held_out`."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Dispatch:
        """What `asdict` made of it."""
        forecasts = {name: Captured(**figures) for name, figures in values["forecasts"].items()}
        return cls(**values | {"forecasts": forecasts})


@dataclass
class Report:
    """A training report.

    A ranking's figures are of held-out samples, at most four of each prompt; all folds of a split by prompt together.
    """

    samples: int
    prompts: int
    tasks: int
    cap: int | None
    kind: str
    """The kept kind of model; 'constant' when nothing could be learned."""
    criterion: str
    candidates: dict[str, Figures] = field(default_factory=dict)
    """Each kind on new prompts without any history."""
    with_history: Figures | None = None
    """The kept kind, with what had finished earlier; None when there is no history in the rollouts."""
    baselines: dict[str, Figures] = field(default_factory=dict)
    ceiling: dict[str, float] | None = None
    """Recall of ranking by the true expected length (`ranker.ceiling`); None without repeated samples."""
    many: Many | None = None
    """None where too few prompts have many samples."""
    coverage: dict[str, float] = field(default_factory=dict)
    """Share of new prompts' lengths that are at most the quantile, by its level. It is 1 where
    the quantile is the cap."""
    messages: list[str] = field(default_factory=list)
    dispatch: list[Dispatch] = field(default_factory=list)
    """What dispatching by forecasts for new prompts saves, by fleet; empty where it was not simulated (a refit)."""
    extra: dict[str, float] = field(default_factory=dict)
    """Figures of others."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The report that `to_json` wrote.

        Raises:
            KeyError, TypeError: it was not written by `to_json`.
        """
        history, many = values["with_history"], values.get("many")
        return cls(
            **values
            | {
                "candidates": {name: Figures(**f) for name, f in values["candidates"].items()},
                "baselines": {name: Figures(**f) for name, f in values["baselines"].items()},
                "with_history": Figures(**history) if history else None,
                "many": Many(**many) if many else None,
                "dispatch": [Dispatch.from_json(dispatch) for dispatch in values.get("dispatch", [])],
            }
        )
