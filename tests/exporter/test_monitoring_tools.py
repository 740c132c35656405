"""The alerts and the dashboard as the tools of Prometheus and Grafana read them (`make test-trackers`)."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.exporter.test_monitoring_files import FILES, panels, rules


def test_every_expression_is_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    for expression in [*(query for query, _ in panels()), *(str(rule["expr"]) for rule in rules())]:
        parser.parse(expression.replace("$run", ".*"))


def test_grafanas_own_model_takes_the_dashboard() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    written = json.loads((FILES / "grafana_dashboard.json").read_text())
    read = models.Dashboard.from_json(written)
    assert [panel.title for panel in read.panels] == [panel["title"] for panel in written["panels"]]
    for panel, given in zip(read.panels, written["panels"], strict=True):
        queries = [query.expr for query in getattr(panel, "targets", None) or ()]
        assert queries == [target["expr"] for target in given.get("targets", ())]  # read as queries of Prometheus


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: apt-get install prometheus)")
def test_promtool_takes_the_files_and_the_alerts_fire_when_they_should() -> None:
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=FILES, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
