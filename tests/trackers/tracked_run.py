"""A run's folder with rows, and a tracker that keeps what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.config.load import load_cluster, load_run, save_resolved
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.trackers.tracker import RolloutTable
from tests.dashboard.samples import a_sample, write_samples

ROOT = Path(__file__).parents[2]


def make_run(folder: Path, trackers: str = "[{name: tensorboard}]", *keys: str) -> Path:
    """A run's folder with its configuration, further keys of the run file in it, and no rows."""
    run = load_run(None, [f"trackers={trackers}", *keys])
    save_resolved(folder, load_cluster(ROOT / "cluster_configs/local.yaml"), run)
    return folder


def train(folder: Path, steps: Iterable[int], reward: float = 0.5, began: float = 1000.0) -> None:
    """Append the rows of some steps, one second apart; each has eight samples, one of them void."""
    with RowWriter(folder / layout.METRICS, MetricsRow) as rows:
        for step in steps:
            samples = [
                a_sample(f"g{place // 4}.{place % 4}", step=step, reward=None if place == 3 else place / 8)
                for place in range(8)
            ]
            write_samples(folder / layout.ROLLOUTS, step, samples)
            rows.append(
                MetricsRow(
                    step=step,
                    time=began + step,
                    reward_mean=reward,
                    loss=1 / step,
                    reward_by_task={"sum": reward},
                    step_skipped=False,
                    mismatch_warning="a text",
                )
            )


def evaluate(folder: Path, step: int, began: float = 1000.0) -> None:
    """Append the evaluation of a step's weights."""
    scores = Scores(prompts=2, samples=4, reward_greedy=None, pass_greedy=None, reward_sampled=0.25, length_mean=9.0)
    scores = scores.model_copy(update={"pass_at": [0.25, 0.5]})
    with RowWriter(folder / layout.EVALUATIONS, EvaluationRow) as rows:
        at, by_task = began + step, {"sum": scores}
        rows.append(
            EvaluationRow(step=step, time=at, seconds=1.0, overall=scores, by_task=by_task, other_version_share=0)
        )


def back_to(folder: Path, step: int) -> None:
    """Do what a run does that goes on from the checkpoint of a step."""
    for name, model in ((layout.METRICS, MetricsRow), (layout.EVALUATIONS, EvaluationRow)):
        with RowWriter(folder / name, model) as rows:
            rows.rewind(step)


@dataclass
class KeptTracker:
    """A tracker in memory, which may be told to fail."""

    id: str = "kept"
    last_step: int | None = None
    can_rewind: bool = False
    steps: list[tuple[int, float, Mapping[str, float]]] = field(default_factory=list)
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    tables: list[tuple[int, RolloutTable]] = field(default_factory=list)
    fails_at: int | None = None
    closed: int = 0

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        self.steps.append((step, time, figures))

    def log_evaluation(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        self.evaluations.append((step, figures))

    def log_samples(self, step: int, table: RolloutTable) -> None:
        self.tables.append((step, table))

    def rewind(self, step: int) -> bool:
        if self.can_rewind:
            self.steps = [one for one in self.steps if one[0] <= step]
        return self.can_rewind

    def close(self) -> None:
        self.closed += 1

    @property
    def numbers(self) -> list[int]:
        return [step for step, _, _ in self.steps]
