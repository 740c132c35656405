"""Write examples/monitoring/grafana_dashboard.json: `make docs`.

    .venv/bin/python tools/grafana.py            # write the dashboard
    .venv/bin/python tools/grafana.py --check    # exit with 1 if the file differs from what would be written

Panels are listed here by their PromQL; names, units and places follow. Grafana's own model of a dashboard is checked by
`make test-trackers`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from written_files import write_files

TARGET = Path(__file__).parents[1] / "examples" / "monitoring" / "grafana_dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""


@dataclass(frozen=True)
class Chart:
    """A panel: its title, expressions with their legends, and the unit of its axis in Grafana's words."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    about: str = ""


def _of(name: str, *labels: str) -> str:
    return f'streamrl_{name}{{run=~"$run"{"".join(f", {label}" for label in labels)}}}'


def _train(key: str, legend: str = "{{run}}") -> tuple[str, str]:
    return _of(f"train_{key}"), legend


ROWS: dict[str, list[Chart]] = {
    "Now": [
        Chart("State", [(f"{_of('run_state')} == 1", "{{run}} {{state}}")], kind="stat", width=6, height=4),
        Chart("Steps", [(_of("run_steps"), "{{run}}")], kind="stat", width=4, height=4),
        Chart("Reward", [_train("reward_mean")], kind="stat", width=4, height=4),
        Chart("Since the last step", [(_of("step_age_seconds"), "{{run}}")], "s", "stat", 5, 4),
        Chart("Free disk", [(_of("disk_free_bytes"), "{{run}}")], "decbytes", "stat", 5, 4),
    ],
    "Learning": [
        Chart("Reward", [_train("reward_mean"), _train("reward_by_task", "{{run}} {{task}}")]),
        Chart("Evaluation", [(_of("evaluation_reward"), "{{run}} {{task}}")]),
        Chart(
            "Output length", [_train("output_length_mean", "{{run}} mean"), _train("output_length_p90", "{{run}} p90")]
        ),
        Chart("Loss", [_train("loss")]),
        Chart("Gradient norm", [_train("grad_norm"), _train("critic_grad_norm", "{{run}} critic")]),
        Chart("Entropy", [_train("entropy")], about="nats per completion token"),
    ],
    "Off-policy": [
        Chart("Trainer-generator mismatch", [_train("logprob_gap_mean")], about="mean |difference|, nats"),
        Chart("Staleness", [_train("staleness_max", "{{run}} max"), (_of("staleness_limit"), "{{run}} limit")]),
        Chart("Effective sample size", [_train("ess_token")], "percentunit"),
    ],
    "Speed": [
        Chart("Time of a step", [_train("step_time_s"), (_of("step_usual_seconds"), "{{run}} usual")], "s"),
        Chart(
            "Idle share",
            [
                _train("bubble_fraction_generation", "{{run}} instances"),
                _train("bubble_fraction_training", "{{run}} trainer"),
            ],
            "percentunit",
        ),
        Chart(
            "Tokens per second",
            [_train("tokens_per_s", "{{run}} generated"), _train("train_tokens_per_s", "{{run}} trained")],
        ),
        Chart("Time lost to new weights", [_train("weight_sync_exposed_s")], "s"),
        Chart("Cost", [(_of("usd_total"), "{{run}}")], "currencyUSD", about="of the steps since the launch"),
        Chart("Samples of the step", [(_of("progress_samples"), "{{run}} {{kind}}")]),
    ],
    "Failures": [
        Chart("Void rewards by cause", [_train("void_rate_by_cause", "{{run}} {{cause}}")], "percentunit"),
        Chart("Longest wait, as a share of its limit", [(_of("wait_used_ratio"), "{{run}} {{owner}}")], "percentunit"),
        Chart("Refused messages", [(f"rate({_of('messages_refused_total')}[5m])", "{{run}} {{cause}}")], "ops"),
        Chart("Refused steps", [(_of("steps_refused_total"), "{{run}}")], about="since the launch"),
        Chart("Silent sites", [(_of("site_silent_seconds"), "{{run}} {{site}}")], "s"),
        Chart("Steps that trackers lack", [(_of("tracker_steps_waiting"), "{{run}} {{tracker}}")]),
    ],
    "Processes": [
        Chart("Up", [(_of("process_up"), "{{run}} {{process}}")]),
        Chart("Memory", [(_of("process_memory_bytes"), "{{run}} {{process}}")], "bytes"),
        Chart("Requests running", [(_of("process_requests_running", 'role="instance"'), "{{run}} {{process}}")]),
        Chart("Tokens per second", [(_of("process_tokens_per_second"), "{{run}} {{process}}")]),
        Chart("Weight version", [(_of("process_weight_version"), "{{run}} {{process}}")]),
        Chart(
            "Instances",
            [(_of("instances_ready"), "{{run}} {{pool}} ready"), (_of("instances_wanted"), "{{run}} {{pool}} wanted")],
        ),
    ],
}


def panel(chart: Chart, number: int, x: int, y: int) -> dict[str, Any]:
    """Return a panel at a place of the grid."""
    found: dict[str, Any] = {
        "id": number,
        "type": chart.kind,
        "title": chart.title,
        "datasource": SOURCE,
        "gridPos": {"h": chart.height, "w": chart.width, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": chart.unit, "custom": {}}, "overrides": []},
        "targets": [
            {"datasource": SOURCE, "refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(chart.queries)
        ],
    }
    if chart.about:
        found["description"] = chart.about
    if chart.kind == "stat":
        name = "name" if chart.title == "State" else "value_and_name"
        calcs = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        found["options"] = {"reduceOptions": calcs, "textMode": name, "colorMode": "none", "graphMode": "none"}
    else:
        found["fieldConfig"]["defaults"]["custom"] = {"drawStyle": "line", "lineWidth": 1, "spanNulls": True}
        tooltip = {"mode": "multi", "sort": "desc"}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        found["options"] = {"legend": legend, "tooltip": tooltip}
    return found


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS.items():
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        row = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        panels.append(row)
        x, y = 0, y + 1
        for chart in charts:
            if x + chart.width > WIDTH:
                x, y = 0, y + chart.height
            panels.append(panel(chart, len(panels) + 1, x, y))
            x += chart.width
        y += charts[-1].height
    return {
        "uid": "streamrl",
        "title": "StreamRL",
        "tags": ["streamrl"],
        "timezone": "browser",
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "hide": 0},
                {
                    "type": "query",
                    "name": "run",
                    "label": "Run",
                    "datasource": SOURCE,
                    "query": "label_values(streamrl_run_info, run)",
                    "refresh": 2,
                    "sort": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "hide": 0,
                },
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def main(arguments: Sequence[str]) -> int:
    """Write the dashboard, or compare it with the panels here (`--check`)."""
    return write_files({TARGET: json.dumps(dashboard(), indent=2) + "\n"}, "tools/grafana.py", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
