"""Training report: the figures measured when a model was trained, kept in the model's file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Figures:
    """A ranking's figures on samples of prompts that it had not seen."""

    recall: dict[str, float]
    """Recall by the share of the longest samples: '0.2', '0.1', '0.05'."""
    kendall_tau: float | None
    """Kendall's tau-b; None when the ranking has only one value."""


@dataclass
class Many:
    """Ranking of the prompts that have many samples."""

    prompts: int
    """Number of them, each counted once per step: groups."""
    ceiling: dict[str, float]
    """Recall of ranking by the expected length, taken from these samples (`ranker.ceiling.ceiling_of_many`)."""
    recall: dict[str, float]
    """Recall of the kept kind on the same samples."""


@dataclass
class Captured:
    """Result of dispatch by one kind of forecast, in simulated generation."""

    makespan: float
    """Makespan as a share of that of least-loaded dispatch."""
    captured: float | None
    """Share of the saving that true lengths give; None where they save next to nothing."""


@dataclass
class Dispatch:
    """Simulated generation of held-out prompts, dispatched by forecasts."""

    setting: str
    """Description of the batches and the instances."""
    oracle: float
    """Makespan with the true lengths, as a share of that of least-loaded dispatch."""
    forecasts: dict[str, Captured]
    """Results by the forecast names of `ranker.held_out`."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Dispatch:
        """Restore what `asdict` produced."""
        forecasts = {name: Captured(**figures) for name, figures in values["forecasts"].items()}
        return cls(**values | {"forecasts": forecasts})


@dataclass
class Report:
    """Figures of a training, and what they were measured on.

    A ranking's figures are of held-out samples, at most four of each prompt; all folds of a split by prompt together.
    Those of `candidates` chose the kind. Those of `held_out` and `with_history` are by expected length, on samples that
    took no part in the choice: it was made again for each fold, without it.
    """

    samples: int
    prompts: int
    tasks: int
    cap: int | None
    kind: str
    """The kept kind of model; 'constant' when nothing could be learned."""
    criterion: str
    candidates: dict[str, Figures] = field(default_factory=dict)
    """Figures of each kind on new prompts without any history, by which one was chosen."""
    held_out: Figures | None = None
    """Figures on new prompts without any history; None after a refit."""
    kinds: list[str] = field(default_factory=list)
    """Kinds that were chosen for the folds of `held_out`."""
    new_tasks: Figures | None = None
    """Figures on tasks that were left out of the fit; None with fewer than two tasks."""
    with_history: Figures | None = None
    """Figures of the kept kind with the lengths that had finished earlier; None when the rollouts have no history."""
    baselines: dict[str, Figures] = field(default_factory=dict)
    limit: dict[str, float] = field(default_factory=dict)
    """Recall that no ranking can exceed, as equal lengths (at the cap) are ordered by chance."""
    many: Many | None = None
    """Figures on prompts with many samples; None if there are too few."""
    coverage: dict[str, float] = field(default_factory=dict)
    """Share of new prompts' lengths that are at most the quantile, by its level. It is 1 where the quantile is the
    cap."""
    coverage_with_history: dict[str, float] = field(default_factory=dict)
    """The same with the lengths that had finished earlier; empty when the rollouts have no history."""
    messages: list[str] = field(default_factory=list)
    dispatch: list[Dispatch] = field(default_factory=list)
    """Savings of dispatch by forecasts for new prompts, by fleet; empty where it was not simulated (a refit)."""
    extra: dict[str, float] = field(default_factory=dict)
    """Figures that other code adds."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """Restore a report that `to_json` wrote.

        Raises:
            KeyError, TypeError: it was not written by `to_json`.
        """
        one = {name: Figures(**values[name]) for name in ("held_out", "with_history", "new_tasks") if values[name]}
        many = values.get("many")
        return cls(
            **values
            | one
            | {
                "candidates": {name: Figures(**f) for name, f in values["candidates"].items()},
                "baselines": {name: Figures(**f) for name, f in values["baselines"].items()},
                "many": Many(**many) if many else None,
                "dispatch": [Dispatch.from_json(dispatch) for dispatch in values.get("dispatch", [])],
            }
        )
