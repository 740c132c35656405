"""The metrics that Prometheus gets: names, types, labels and meanings; docs/reference/metrics.md is made from them.

Every one has the label `run`. The figures of the newest step are `streamrl_train_<key>`, with the keys of
`metrics.jsonl`; of `samples_total` and `groups_total` without `_total`, which only counters end in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamrl.rollouts.plain_text import plain_text
from streamrl.run_dir.figures import LABELS, NOT_FIGURES, STEP_PREFIX
from streamrl.run_dir.metrics import MetricsRow

PREFIX = "streamrl_"


@dataclass(frozen=True)
class MetricKind:
    """A metric: its labels, without `run`, and what it says."""

    labels: tuple[str, ...]
    help: str
    type: Literal["gauge", "counter"] = "gauge"


def _counter(help: str, *labels: str) -> MetricKind:
    return MetricKind(labels, help, "counter")


def _gauge(help: str, *labels: str) -> MetricKind:
    return MetricKind(labels, help)


RUN: Mapping[str, MetricKind] = {
    "run_info": _gauge("1; what the run is", "model", "schedule", "hardware"),
    "run_state": _gauge("1 for the run's state, 0 for the others", "state"),
    "run_steps": _gauge("optimizer steps completed"),
    "run_steps_target": _gauge("optimizer steps in total"),
    "status_age_seconds": _gauge(
        "time since the controller last wrote its status, twice a second if all is well; below 0 if the clock of its "
        "machine is ahead, or this one's was set back"
    ),
    "step_age_seconds": _gauge(
        "time since the newest step ended, or, if later, since the controller began to run; none once all are done"
    ),
    "step_usual_seconds": _gauge("median duration of the newest 20 steps"),
    "wait_used_ratio": _gauge("longest wait of a process as a share of its limit, at which the run ends", "owner"),
    "process_up": _gauge("1 if a process of this launcher runs, 0 if it has ended", "process", "role", "site"),
    "process_silent_seconds": _gauge("time since a process's last sign of life", "process", "role"),
    "process_memory_bytes": _gauge(
        "memory of a process and those below it, if it is on this machine", "process", "role"
    ),
    "process_requests_running": _gauge("requests that a process works on", "process", "role"),
    "process_requests_waiting": _gauge("requests in a process's queue", "process", "role"),
    "process_tokens_per_second": _gauge("tokens generated per second", "process", "role"),
    "process_weight_version": _gauge("weight version of a process", "process", "role"),
    "instances_wanted": _gauge("target number of instances", "pool"),
    "instances_ready": _gauge("instances that have loaded the current weights", "pool"),
    "site_silent_seconds": _gauge(
        "time since the last sign of life of a site behind a link; at a site that only generates, of the trainer's",
        "site",
    ),
    "site_samples_waiting": _gauge("samples finished at a site, but not committed by the controller", "site"),
    "site_excluded": _gauge("1 if a site is not used any more", "site"),
    "progress_samples": _gauge("samples of the step in progress: total, finished, trained", "kind"),
    "disk_free_bytes": _gauge("free space where the run's folder is"),
    "staleness_limit": _gauge(
        "most weight versions between sampling and training that the schedule allows; none if it allows any"
    ),
    "mismatch": _gauge("1 if instances and trainer disagree beyond the bound, on the fixed text or in the newest step"),
    "verified_difference_nats": _gauge("largest difference of instances and trainer on the fixed text"),
    "verified_bound_nats": _gauge("largest difference allowed"),
    "length_bias": _gauge("1 if trained and issued lengths differ significantly"),
    "tracker_steps_waiting": _gauge("steps that a tracker has not been sent", "tracker"),
    "evaluation_step": _gauge("weight version of the newest evaluation"),
    "evaluation_reward": _gauge("mean reward of the newest evaluation; task '': all", "task"),
    "evaluation_pass_at": _gauge("chance that one of k completions passes; task '': all", "task", "k"),
    "samples_trained": _counter("samples trained since the launch"),
    "samples_judged": _counter("samples of which a reward was asked for since the launch"),
    "samples_void": _counter("samples whose reward is void since the launch"),
    "tokens_trained": _counter("tokens trained since the launch"),
    "steps_refused": _counter("optimizer steps that the trainer has refused since the launch"),
    "messages_refused": _counter("messages that processes have refused", "cause"),
    "usd": _counter(
        "cost, at the prices of the cluster file, of the steps ended since the launch; without what was spent before "
        "the first of them began, and after the last one"
    ),
}
"""Name after `streamrl_` -> what it is; counters also end in `_total`, and are 0 at each launch."""


def step_name(key: str) -> str:
    """Return the name, after `streamrl_`, of a figure of the newest step."""
    return f"{STEP_PREFIX}_{key.removesuffix('_total')}"


STEP: Mapping[str, MetricKind] = {
    step_name(key): MetricKind(LABELS.get(key, ()), f"newest step: {field.description or key}")
    for key, field in MetricsRow.model_fields.items()
    if key not in NOT_FIGURES
}
"""The figures of the newest step."""

KINDS: Mapping[str, MetricKind] = {**RUN, **STEP}


def full_name(name: str) -> str:
    """Return a metric's name in Prometheus."""
    return f"{PREFIX}{name}{'_total' if KINDS[name].type == 'counter' else ''}"


class Families:
    """Metrics that are being filled for one answer."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a number; None: there is none.

        Args:
            name: a name of `KINDS`.
            value: the number.
            labels: values of its labels, in their order.
        """
        if value is None:
            return
        try:
            number = float(value)
        except OverflowError:  # an integer of a damaged file
            return
        kind = KINDS[name]
        if name not in self._found:
            family = CounterMetricFamily if kind.type == "counter" else GaugeMetricFamily
            self._found[name] = family(PREFIX + name, kind.help, labels=("run", *kind.labels))
        texts = [plain_text(label) for label in (self._run, *labels)]  # a folder's name need not be UTF-8
        self._found[name].add_metric(texts, number)

    @property
    def metrics(self) -> list[Metric]:
        """Metrics that have a number."""
        return list(self._found.values())
