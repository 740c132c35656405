"""Predict for `emulated_sites.py`: configurations, calibration from a measured run, and the simulator on it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import yaml
from running import HERE, Outcome
from scipy.optimize import nnls

from scheduler.cost.decode import StepCurve
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.stages import SimulatedLink, Stages
from streamrl.config.cluster import SiteLink
from streamrl.run_dir.appended_lines import parse_event
from streamrl.run_dir.layout import TRACE as TRACE_FILE
from streamrl.run_dir.trace import trace_origin

CLUSTER = HERE / "clusters" / "two_sites.yaml"
PROMPTS, SAMPLES, MAX_TOKENS = 4, 6, 32
TASK = "name: chain_sum, answer: last_number, config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
"""Its answers have different lengths, so a group's shaped rewards differ."""
OVERRIDES = (
    f"batch.prompts_per_step={PROMPTS}",
    f"batch.samples_per_prompt={SAMPLES}",
    f"sampling.max_tokens={MAX_TOKENS}",
    f"tasks=[{{kind: reasoning_gym, {TASK}}}]",
    f"algorithm.overlong={{margin_tokens: {MAX_TOKENS - 1}}}",
    "checkpoint.every=1000",
)
DRAWS = 50
"""Simulated runs per prediction."""
WEIGHT_TRIPS, SAMPLE_TRIPS = 2.0, 1.0
"""Round trips; each of these goes one way: a version is announced, asked for, sent, and said to be served; prompts go
out, samples come home."""
SLOTS = yaml.safe_load(CLUSTER.read_text())["sites"]["generate"]["generation"][0]["max_batch"]

Groups = list[tuple[int, list[int]]]
"""(prompt tokens, output lengths of all its samples) by group, in the order of issue."""
Sample = dict[str, Any]
"""A row of the rollouts."""


@dataclass(frozen=True)
class Arm:
    """A link, and what is done over it."""

    schedule: Literal["sync", "stream", "async"]
    encoding: Literal["raw", "delta"]
    mbit_s: float
    """10^6 bits per second."""
    rtt_ms: float
    steps: int = 8
    seed: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.schedule}, {self.encoding}, {self.mbit_s:g} Mbit/s, {self.rtt_ms:g} ms"

    def cluster(self) -> dict[str, Any]:
        """Its cluster file."""
        values: dict[str, Any] = yaml.safe_load(CLUSTER.read_text())
        values["links"][0] |= {"bandwidth_gbit_s": self.mbit_s / 1e3, "rtt_ms": self.rtt_ms}
        return values

    def link(self) -> SiteLink:
        """The link as it is declared."""
        return SiteLink(**self.cluster()["links"][0])

    def overrides(self) -> tuple[str, ...]:
        """Settings of the run file that differ."""
        bound = ", max_staleness: 1" if self.schedule == "async" else ""
        own = f"schedule={{name: {self.schedule}{bound}}}", f"weights.encoding={self.encoding}", f"seed={self.seed}"
        return (*OVERRIDES, *own)


@dataclass(frozen=True)
class StepFacts:
    """One step of the calibration run, by its trace and rollouts. In `sync` one thing follows the other."""

    fetch_s: float
    """From when the trainer had made the version until the site had it: announced, coded, sent, verified."""
    load_s: float
    """From there to the first request at the instance: loaded, told, prompts sent."""
    home_s: float
    """From the last sample's end to the begin of training."""
    train_s: float
    optimizer_s: float
    """With making the version, for which the trainer stands still."""
    nbytes: int
    """Bytes of the version."""
    groups: Groups
    ends: list[tuple[int, float]]
    """(output length, seconds from the first request at the instance to its end) of each sample."""


@dataclass(frozen=True)
class Calibration:
    """What predictions are made of; see `StepFacts`."""

    groups: Groups
    curve: StepCurve
    train_tokens_s: float
    """Prompts included."""
    optimizer_s: float
    home_s: float
    fetch_s: float
    load_s: float
    nbytes: dict[str, float]
    """Of a version, by encoding."""


def fit_curve(steps: Sequence[StepFacts], largest: int) -> StepCurve:
    """Step time by batch size from when samples ended: non-negative least squares of

        end of a sample of n tokens = prefill x prompt tokens + sum over its tokens of (base + slope x requests running)

    where requests run until their last token, and a group's prompt is read in once.

    Args:
        steps: in each all requests began together.
        largest: batch size of the curve's last point.
    """
    rows, seconds = [], []
    for step in steps:
        lengths = np.asarray([length for length, _ in step.ends])
        running = (lengths[None, :] >= np.arange(1, lengths.max() + 1)[:, None]).sum(axis=1).cumsum()
        prompts = sum(prompt for prompt, _ in step.groups)
        for length, end in step.ends:
            rows.append((prompts, length, running[length - 1]))
            seconds.append(end)
    (prefill, base, slope), _ = nnls(np.asarray(rows, dtype=np.float64), np.asarray(seconds))
    points = {batch: float(base + slope * batch) for batch in (1, largest)}
    return StepCurve.measured(points, per_prefill_token=float(prefill))


def calibrate(steps: Sequence[StepFacts], raw_bytes: float) -> Calibration:
    """Means over steps: what is measured is one, too.

    Args:
        steps: of the calibration run, warm.
        raw_bytes: of a complete version.
    """

    def mean(value: Callable[[StepFacts], float]) -> float:
        return statistics.mean(value(step) for step in steps)

    return Calibration(
        [group for step in steps for group in step.groups],
        fit_curve(steps, SLOTS),
        mean(lambda step: sum(prompt + n for prompt, lengths in step.groups for n in lengths))
        / mean(lambda step: step.train_s),
        mean(lambda step: step.optimizer_s),
        mean(lambda step: step.home_s),
        mean(lambda step: step.fetch_s),
        mean(lambda step: step.load_s),
        {"delta": mean(lambda step: step.nbytes), "raw": raw_bytes},
    )


def stages(found: Calibration, arm: Arm) -> Stages:
    """What follows generation, over an arm's link.

    A delta is coded before it is sent and applied after it has come, so what that takes adds to the link's time. Raw
    weights are not coded, and written to their place as they come.
    """
    link = arm.link()
    coding_s = found.fetch_s if arm.encoding == "delta" else 0.0
    delay_s = coding_s + found.load_s + WEIGHT_TRIPS * link.rtt_s
    return Stages(
        found.train_tokens_s,
        found.optimizer_s,
        found.home_s + SAMPLE_TRIPS * link.rtt_s,
        found.nbytes[arm.encoding] / 1e9,
        SimulatedLink(link.bandwidth_gbit_s * link.weight_share, delay_s),
    )


def transfer_s(found: Calibration, arm: Arm) -> float:
    """Predicted seconds from a version's announcement until the site has it; only to be shown."""
    after = stages(found, arm)
    return after.link.seconds(after.weights_gb) - found.load_s - 0.5 * arm.link().rtt_s


def simulated(found: Calibration, arm: Arm, groups: Groups, warmup: int) -> float:
    """Mean step time of a run that generates these groups, without its first steps."""
    requests = [
        [SimulatedRequest(f"{g}.{n}", float(length), f"{g}", prompt) for n, length in enumerate(lengths)]
        for g, (prompt, lengths) in enumerate(groups)
    ]
    policy = make_policy("least-loaded", MAX_TOKENS, affinity=SAMPLES)
    instance = SimulatedInstance("regular-0", found.curve, SLOTS)
    pipeline = Pipeline(policy, [instance], stages(found, arm), make_schedule(arm.schedule), PROMPTS)
    ends = pipeline.run(requests, arm.steps).stepped
    return (ends[-1] - ends[warmup - 1]) / (arm.steps - warmup)


def predict(found: Calibration, arm: Arm, warmup: int) -> tuple[float, float]:
    """(mean, standard deviation) over runs on whole groups drawn from the calibration's (a bootstrap)."""
    drawn = np.random.default_rng(0).integers(len(found.groups), size=(DRAWS, arm.steps * PROMPTS)).tolist()
    means = [simulated(found, arm, [found.groups[n] for n in numbers], warmup) for numbers in drawn]
    return statistics.mean(means), statistics.stdev(means)


def read_samples(run_dir: Path) -> list[Sample]:
    """All samples of a run, in the order of issue."""
    columns = ["step", "group_id", "prompt_tokens", "output_length", "t_dispatched", "t_finished"]
    files = sorted((run_dir / "rollouts").glob("*.parquet"))
    samples = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    return sorted(samples, key=lambda row: str(row["group_id"]))


def grouped(samples: Sequence[Sample]) -> Groups:
    """By group, in their order."""
    lengths: dict[str, list[int]] = defaultdict(list)
    prompts = {row["group_id"]: len(row["prompt_tokens"]) for row in samples}
    for row in samples:
        lengths[row["group_id"]].append(row["output_length"])
    return [(prompts[name], some) for name, some in lengths.items()]


def read_spans(run_dir: Path) -> defaultdict[tuple[str, int], list[tuple[float, float]]]:
    """Start and end (unix seconds) of the trace's spans, by name and by step or version."""
    origin = 0.0
    spans: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with (run_dir / TRACE_FILE).open("rb") as lines:
        for event in filter(None, map(parse_event, lines)):
            if event["ph"] == "M":
                origin = trace_origin([event]) or origin
            elif event["ph"] == "X":
                number = event["args"].get("step", event["args"].get("version"))
                start = origin + event["ts"] / 1e6
                spans[event["name"], number].append((start, start + event["dur"] / 1e6))
    return spans


def read_facts(run_dir: Path, outcome: Outcome) -> list[StepFacts]:
    """Of every step of a `sync` run but the first, for which no version is made.

    Raises:
        ValueError: the trace lacks a span.
    """
    spans, all_samples, facts = read_spans(run_dir), read_samples(run_dir), []
    for row in outcome.rows[1:]:
        (publish,), (load,) = spans["publish", row.step], spans["load weights", row.step - 1]
        train, (step,) = spans["train", row.step], spans["step", row.step]
        samples = [sample for sample in all_samples if sample["step"] == row.step]
        first = min(sample["t_dispatched"] for sample in samples)
        last = max(sample["t_finished"] for sample in samples)
        facts.append(
            StepFacts(
                load[0] - publish[1],
                first - load[0],
                train[0][0] - last,
                sum(end - start for start, end in train),
                publish[1] - publish[0] + step[1] - step[0],
                row.weight_bytes_sent or 0,
                grouped(samples),
                [(sample["output_length"], sample["t_finished"] - first) for sample in samples],
            )
        )
    return facts
