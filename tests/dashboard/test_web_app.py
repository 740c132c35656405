"""The routes of the dashboard: what they answer, to whom, and that they only read."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from starlette.testclient import TestClient

from streamrl.dashboard import watched_run
from streamrl.dashboard.access import AccessGuard, host_of_header, is_loopback
from streamrl.dashboard.watched_run import WatchedRun, WatchedRuns
from streamrl.dashboard.web_app import STATIC, make_app
from streamrl.run_dir.appended_lines import AppendedRows
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.priced_rows import PricedRows
from streamrl.run_dir.trace import TraceWriter
from tests.dashboard.samples import a_sample, write_samples
from tests.report.synthetic import make_row, write_run

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
VIEWS = ("state", "why_stuck", "steps", "timeline", "samples", "lengths")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one run, `demo`, of two steps and a sample with markup."""
    runs = tmp_path / "runs"
    runs.mkdir()
    write_run(runs / "demo", 2)
    write_samples(runs / "demo" / "rollouts", 9, [a_sample("m.0", step=9, completion=MARKUP)])
    return runs


def client_of(folder: Path, token: str | None = None, host: str = "127.0.0.1:7865") -> TestClient:
    charts = folder.parent / "plotly.min.js"
    charts.write_text("/* charts */")
    app = AccessGuard(make_app(WatchedRuns([folder]), charts), token, 7865)
    return TestClient(app, base_url=f"http://{host}", follow_redirects=False)


def test_the_page_its_scripts_and_the_charts_are_served(folder: Path) -> None:
    client = client_of(folder)
    page = client.get("/")
    assert page.status_code == 200 and 'type="module" src="/static/app.js"' in page.text
    for path in STATIC.iterdir():
        assert client.get(f"/static/{path.name}").status_code == 200
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/plotly.min.js").text == "/* charts */"


def test_runs_and_all_views_of_a_run_are_json(folder: Path) -> None:
    client = client_of(folder)
    told = client.get("/api/runs").json()
    assert [(run["id"], run["step"], run["reward"]) for run in told["runs"]] == [("demo", 2, pytest.approx(0.15))]
    for view in VIEWS:
        answer = client.get(f"/api/runs/demo/{view}")
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", view
    assert client.get("/api/runs/demo/samples?task=chain_sum&limit=3").json()["total"] == 64
    assert len(client.get("/api/runs/demo/samples?limit=3&offset=1").json()["columns"]["sample_id"]) == 3
    assert len(client.get("/api/runs/demo/group?id=s1-0").json()["members"]) == 8
    timeline = client.get("/api/runs/demo/timeline?start=0&end=5&pixels=500").json()
    assert {track["name"] for track in timeline["tracks"]} == {"here-regular-0", "here-regular-1", "trainer"}
    assert all(0 < seconds <= 5 for track in timeline["tracks"] for seconds in track["covered"].values())


def test_a_timeline_is_sent_again_only_if_it_has_changed(folder: Path) -> None:
    client, place = client_of(folder), "/api/runs/demo/timeline?pixels=500"
    whole = client.get(place).json()
    assert client.get(f"{place}&since={whole['cursor']}").json() == {"cursor": whole["cursor"], "unchanged": True}
    for other in ("&start=1", "&end=5", "0"):
        assert client.get(f"{place}{other}&since={whole['cursor']}").json()["tracks"], "another window"
    with TraceWriter(folder / "demo" / "trace.json") as trace:
        trace.span("trainer", "train", whole["origin"] + 1, whole["origin"] + 2)
        trace.span("trainer", "train", whole["origin"] + 2, whole["origin"] + 3)
        assert len(client.get(f"{place}&since={whole['cursor']}").json()["tracks"]) == len(whole["tracks"])


def test_a_folder_whose_name_is_not_utf_8_is_listed_and_shown_with_the_others(folder: Path) -> None:
    odd = folder / os.fsdecode(b"caf\xe9")
    write_run(folder / "cafe", 1)
    (folder / "cafe").rename(odd)
    client = client_of(folder)
    assert {run["id"] for run in client.get("/api/runs").json()["runs"]} == {"demo", "caf\ufffd"}
    assert client.get("/api/runs/caf\ufffd/state").json()["name"] == "caf\ufffd"
    for view in VIEWS:
        assert client.get(f"/api/runs/caf\ufffd/{view}").status_code == 200, view
    shutil.rmtree(odd)
    assert client.get("/api/runs/caf\ufffd/state").status_code == 410


def test_the_list_of_runs_reads_only_the_end_of_their_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rows: AppendedRows[MetricsRow]) -> NoReturn:
        pytest.fail("all rows are read")

    monkeypatch.setattr(AppendedRows, "look", refuse)
    (told,) = client_of(folder).get("/api/runs").json()["runs"]
    assert (told["step"], told["reward"]) == (2, pytest.approx(0.15))


@pytest.mark.parametrize(("text", "says"), [("{name: grpo}", "gradient is zero"), ("{name: ppo, critic: {}}", "equal")])
def test_what_equal_rewards_mean_is_read_from_the_runs_configuration(folder: Path, text: str, says: str) -> None:
    (folder / "demo" / "config.yaml").write_text(f"run:\n  algorithm: {text}\n")
    flat = [a_sample(f"f.{number}", step=8, advantage=0.0) for number in range(2)]
    write_samples(folder / "demo" / "rollouts", 8, flat)
    client = client_of(folder)
    assert client.get("/api/runs/demo/sample?id=f.0").json()["why"].endswith(says)
    assert client.get("/api/runs/demo/group?id=f").json()["members"][1]["why"].endswith(says)


def test_others_may_use_a_run_while_its_many_files_of_samples_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_run, "SLICE_S", -1.0)
    for step in range(10, 20):
        write_samples(folder / "demo" / "rollouts", step, [a_sample(f"f{step}.0", step=step)])
    run = WatchedRun("demo", folder / "demo")
    held: list[int] = []

    class Lock:
        def __enter__(self) -> None:
            held.append(run.samples._table.num_rows)

        def __exit__(self, *error: object) -> None:
            pass

    run.lock = Lock()  # type: ignore[assignment]
    run.read_samples()
    assert len(held) == len(set(held)) == 13 and run.samples.look().num_rows == held[-1] + 1


def test_whether_cut_samples_have_a_loss_is_read_from_the_runs_configuration(folder: Path) -> None:
    (folder / "demo" / "config.yaml").write_text("run:\n  algorithm: {name: grpo, mask_truncated: true}\n")
    write_samples(folder / "demo" / "rollouts", 8, [a_sample("f.0", step=8, finish_reason="length")])
    told = client_of(folder).get("/api/runs/demo/sample?id=f.0").json()
    assert told["outcome"] == "masked" and "mask_truncated" in told["why"]


def test_samples_of_a_step_that_changed_no_weights_were_not_trained(folder: Path) -> None:
    rollouts, client = folder / "demo" / "rollouts", client_of(folder)
    for step in (7, 8, 9):
        write_samples(rollouts, step, [a_sample(f"f{step}.0", step=step)])
    with RowWriter(folder / "demo" / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(7, step_skipped=False, optimizer_updates=1))
        metrics.append(make_row(8, step_skipped=True, optimizer_updates=1))  # the second of two updates
        metrics.append(make_row(9, step_skipped=True, optimizer_updates=0, step_refused="a loss; skipped"))
    told = [client.get(f"/api/runs/demo/sample?id=f{step}.0").json() for step in (7, 8, 9)]
    assert [one["outcome"] for one in told] == ["trained", "trained", "skipped"]
    assert "changed no weights" in told[2]["why"] and told[0]["why"] == told[1]["why"] == ""
    page = client.get("/api/runs/demo/samples?outcome=skipped").json()
    assert page["columns"]["sample_id"] == ["f9.0"]


def test_text_of_a_model_is_sent_as_json_and_nothing_may_run_that_is_no_file_of_the_dashboard(folder: Path) -> None:
    answer = client_of(folder).get("/api/runs/demo/sample?id=m.0")
    assert answer.json()["completion"] == MARKUP
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
    assert (policy["frame-ancestors"], policy["base-uri"]) == ("'none'", "'none'")


def test_the_page_makes_text_nodes_of_texts_and_has_no_inline_scripts() -> None:
    for path in STATIC.glob("*.js"):
        code = path.read_text()
        for way in (
            "insertAdjacentHTML",
            "document.write",
            "outerHTML",
            "eval(",
            "new Function",
            "DOMParser",
            ".innerHTML =",
        ):
            assert way not in code, f"{path.name} uses {way}"
        assert "http://" not in code and "https://" not in code, "nothing comes from elsewhere"
    page = (STATIC / "index.html").read_text()
    assert page.count("<script") == 1 and re.search(r"\son\w+=", page) is None


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("/api/runs/none/state", 404, "no such run"),
        ("/api/runs/..%2F..%2Fetc/state", 404, ""),
        ("/static/../web_app.py", 404, ""),
        ("/static/%2e%2e/web_app.py", 404, ""),
        ("/static/..%2Fweb_app.py", 404, ""),
        ("/api/runs/demo/secrets", 404, ""),
        ("/api/runs/demo/sample?id=../../config.yaml", 404, "no such sample"),
        ("/api/runs/demo/group?id=none", 404, "no such sample or group"),
        ("/api/runs/demo/samples?reward_min=much", 400, "reward_min: expected a number, got 'much'"),
        ("/api/runs/demo/samples?offset=nan", 400, "offset: expected a number"),
        ("/api/runs/demo/samples?offset=1e400", 400, "offset: expected a number"),
        ("/api/runs/demo/timeline?start=x", 400, "start: expected a number"),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_said(folder: Path, path: str, code: int, text: str) -> None:
    answer = client_of(folder).get(path)
    assert answer.status_code == code
    assert text in answer.text


def test_a_run_that_is_deleted_while_watched_is_gone_and_the_others_are_not(folder: Path) -> None:
    write_run(folder / "other", 1)
    client = client_of(folder)
    for view in VIEWS:
        assert client.get(f"/api/runs/demo/{view}").status_code == 200
    shutil.rmtree(folder / "demo")
    for view in (*VIEWS, "sample?id=m.0", "group?id=m"):
        answer = client.get(f"/api/runs/demo/{view}")
        assert (answer.status_code, "gone" in answer.json()["error"]) == (410, True), view
    assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["other"]


def test_a_run_that_cannot_be_read_any_more_hides_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(folder / "other", 1)
    client = client_of(folder)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(WatchedRun, "summary", lambda run, now: refused() if run.id == "demo" else {"id": run.id})
    assert client.get("/api/runs").json()["runs"] == [{"id": "other"}]


def test_nothing_is_written_and_nothing_but_reading_is_allowed(folder: Path) -> None:
    def content() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before, client = content(), client_of(folder)
    for view in (*VIEWS, "sample?id=m.0", "group?id=m"):
        client.get(f"/api/runs/demo/{view}")
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client.request(method, f"/api/runs/demo/{view}").status_code == 405
    assert content() == before


@pytest.mark.parametrize("host", ["127.0.0.1:7865", "localhost:7865", "LOCALHOST", "[::1]:7865", "127.0.0.2"])
def test_on_loopback_names_of_this_machine_are_answered(folder: Path, host: str) -> None:
    assert client_of(folder).get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7865", "localhost.evil.example", "10.0.0.1:7865", "", "[::2]"]
)
def test_on_loopback_other_hosts_are_refused(folder: Path, host: str) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/plotly.min.js"):
        assert client_of(folder).get(path, headers={"host": host}).status_code == 421


def test_elsewhere_a_token_is_needed_and_becomes_a_cookie(folder: Path) -> None:
    client = client_of(folder, "right", "node7:7865")
    for path in ("/", "/api/runs", "/static/app.js", "/plotly.min.js", "/?token=wrong", "/?token=", "/?token=%C3%A9"):
        answer = client.get(path)
        assert answer.status_code == 401 and "link" in answer.text and "demo" not in answer.text
    answer = client.get("/?token=right&x=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?x=1")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie and cookie.startswith("streamrl_dashboard_7865=")
    assert client.get("/api/runs").status_code == 200, "the client keeps the cookie"
    bearer = client_of(folder, "right", "node7").get("/api/runs", headers={"authorization": "Bearer right"})
    assert bearer.status_code == 200
    wrong = client_of(folder, "right", "node7").get("/api/runs", headers={"cookie": "streamrl_dashboard_7865=wrong"})
    assert wrong.status_code == 401


def test_the_link_with_a_token_leads_nowhere_else(folder: Path) -> None:
    answer = client_of(folder, "right", "node7").get("http://node7//evil.example/?token=right")
    assert answer.headers["location"] == "/evil.example/"


def test_hosts_are_read_from_their_header() -> None:
    assert [host_of_header(text) for text in ("a:1", "a", "[::1]:2", "[::1]", "::1")] == ["a", "a", "::1", "::1", "::1"]
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.1.1.1", "node7", "")] == [False] * 5


def test_costs_are_summed_by_site_and_process_dearest_first(folder: Path) -> None:
    with RowWriter(folder / "demo" / "metrics.jsonl", MetricsRow) as metrics:
        for step in (3, 4):
            costs = {"here": {"trainer": 0.25, "here-tail-0": 0.125}, "far": {"link": 0.5}}
            metrics.append(make_row(step, usd=0.875, usd_by_process=costs))
    client = client_of(folder)
    told = client.get("/api/runs/demo/steps").json()
    assert told["usd"] == 1.75
    assert told["costs"] == [
        {"site": "far", "process": "link", "usd": 1.0},
        {"site": "here", "process": "trainer", "usd": 0.5},
        {"site": "here", "process": "here-tail-0", "usd": 0.25},
    ]
    with RowWriter(folder / "demo" / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(5, usd=0.5, usd_by_process={"here": {"trainer": 0.5}}))
        told = client.get(f"/api/runs/demo/steps?since={told['cursor']}").json()
        assert (told["step"], told["usd"], [one["usd"] for one in told["costs"]]) == ([5], 2.25, [1.0, 1.0, 0.25])
        metrics.rewind(3)
    told = client.get(f"/api/runs/demo/steps?since={told['cursor']}").json()
    assert (told["reset"], told["usd"], sum(one["usd"] for one in told["costs"])) == (True, 0.875, 0.875)


def test_costs_of_processes_are_added_up_as_they_are_read_and_not_held(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(1))
        rows = PricedRows(tmp_path)
        rows.look()
        assert (rows.usd, dict(rows.usd_by_process)) == (None, {})
        for step in (2, 3):
            metrics.append(make_row(step, usd=0.5, usd_by_process={"here": {"trainer": 0.5}}))
            for _ in range(2):  # the second look finds nothing new
                rows.look()
            assert (rows.usd, dict(rows.usd_by_process)) == ((step - 1) * 0.5, {("here", "trainer"): (step - 1) * 0.5})
    assert [row.usd_by_process for row in rows.rows] == [{}] * 3
