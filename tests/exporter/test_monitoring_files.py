"""The Grafana dashboard and the alert rules of examples/monitoring fit the metrics that are served."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("prometheus_client")

from streamrl.exporter.metric_families import KINDS, full_name

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "monitoring"
LABELS = {full_name(name): {"run", *kind.labels} for name, kind in KINDS.items()}


def panels() -> Iterator[tuple[str, str]]:
    """Expressions of the dashboard with their legends."""
    for panel in json.loads((FILES / "grafana_dashboard.json").read_text())["panels"]:
        yield from ((target["expr"], target["legendFormat"]) for target in panel.get("targets", ()))


def rules() -> list[dict[str, object]]:
    (group,) = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bstreamrl_\w+", expression))


def test_every_metric_and_label_that_the_dashboard_and_the_alerts_ask_for_is_served() -> None:
    asked = [*panels(), *((str(rule["expr"]), json.dumps(rule["annotations"])) for rule in rules())]
    assert len(asked) > 40
    for expression, texts in asked:
        names = metrics_in(expression)
        assert names and names <= set(LABELS), expression
        known = set.union(*(LABELS[name] for name in names)) | {"value"}
        used = set(re.findall(r"\{\{ *\$?(?:labels\.|)(\w+)", texts))
        assert used <= known, (expression, used - known)
        matched = set(re.findall(r"[{,] *(\w+) *(?:=~|=)", expression))
        assert matched <= known, expression
    assert {"Stuck", "VoidRewards", "Mismatch", "Staleness", "Disk"} <= {
        str(rule["alert"]).removeprefix("StreamRL") for rule in rules()
    }


def test_the_bytes_that_an_alert_tells_of_a_disk_are_those_that_are_free() -> None:
    (disk,) = (rule for rule in rules() if rule["alert"] == "StreamRLDisk")
    value, _, when = str(disk["expr"]).partition("\nand ")
    assert value == "streamrl_disk_free_bytes" and "predict_linear" in when and "humanize1024" in str(disk)


def test_the_dashboard_is_what_its_list_of_panels_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "grafana.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
