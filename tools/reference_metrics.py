"""The sections of docs/reference/metrics.md about the names of figures outside of the run's files."""

from __future__ import annotations

from collections.abc import Iterator

from reference_types import filled, table


def tracker_names() -> Iterator[str]:
    """Yield the section about the names that figures have in trackers."""
    from streamrl.run_dir.figures import EVALUATION_PREFIX, LABELS, NOT_FIGURES, STEP_PREFIX

    several = {key: "/".join(f"<{name}>" for name in names) for key, names in LABELS.items()}
    yield from ("## Names in trackers", "")
    yield filled(f"""
    A key of `metrics.jsonl` is `{STEP_PREFIX}/<key>` in [trackers](../how-to/trackers.md), with the optimizer step as
    its step; true is 1 and false 0. What has no figure is not sent. Texts and the length audit are none:
    {", ".join(f"`{name}`" for name in sorted(NOT_FIGURES - {"step", "time"}))}. Figures with several numbers
    have one name for each:
    """)
    yield ""
    yield from table(
        ("key", "name"), ((f"`{key}`", f"`{STEP_PREFIX}/{key}/{names}`") for key, names in several.items())
    )
    yield filled("""
    A task or a metric of an agent may have `/` in its name. Where two figures of a step would get the same name so, `/`
    within a part becomes `%2F` in both, and `%` becomes `%25`.
    """)
    yield ""
    yield filled(f"""
    Evaluations are `{EVALUATION_PREFIX}/seconds`, `{EVALUATION_PREFIX}/other_version_share`,
    `{EVALUATION_PREFIX}/overall/<key>` and `{EVALUATION_PREFIX}/by_task/<task>/<key>`, with the evaluated version as
    their step and the keys of [`Scores`](#scores); `pass_at` is `pass_at_1`, `pass_at_2` and so on, and `reward` is the
    greedy reward, or without greedy completions the sampled one. Tables of samples are called `samples`.
    """)
    yield ""


def prometheus_metrics() -> Iterator[str]:
    """Yield the section about the metrics that a launcher serves."""
    from streamrl.exporter.metric_families import RUN, full_name
    from streamrl.run_dir.figures import LABELS, STEP_PREFIX

    yield from ("## Metrics for Prometheus", "")
    several = ", ".join(f"`streamrl_{STEP_PREFIX}_{key}` ({', '.join(names)})" for key, names in LABELS.items())
    yield filled(f"""
    A launcher serves these ([how](../how-to/prometheus.md)), each with the label `run`, and the figures of the newest
    step as gauges `streamrl_{STEP_PREFIX}_<key>`, with the keys of `metrics.jsonl` below, without a `_total` at their
    end, which Prometheus keeps for counters. Of these, some have further labels: {several}. Counters begin at 0
    with each launch, and never fall during one: steps that a run takes back and trains again count twice. What has no
    figure is not served.
    """)
    yield ""
    rows = (
        (f"`{full_name(name)}`", kind.type, ", ".join(f"`{label}`" for label in kind.labels), kind.help)
        for name, kind in RUN.items()
    )
    yield from table(("metric", "type", "labels", "meaning"), rows)
