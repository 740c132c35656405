"""What Prometheus gets of a run's folder, over a socket, and who gets it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from streamrl.config.cluster import MetricsEndpoint
from streamrl.config.run import RunConfig
from streamrl.diagnose.snapshot import collect
from streamrl.exporter import metrics_server, run_collector
from streamrl.exporter.metric_families import KINDS, STEP, full_name, step_name
from streamrl.exporter.metrics_server import endpoint_problems, serving_metrics
from streamrl.exporter.run_collector import RunCollector
from streamrl.launcher import supervisor
from streamrl.launcher.site_setup import Share
from streamrl.run_dir import layout
from streamrl.run_dir.figures import NOT_FIGURES
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.site_status import write_site
from streamrl.run_dir.status import write_status
from tests.security.endless_requests import ENDLESS, ENOUGH, taken
from tests.trackers.tracked_run import back_to, evaluate
from tests.waiting import scaled, settled, wait_for

NOW = 2000.0


def write_state(folder: Path, **changes: object) -> None:
    """A running run's status, with a trainer, a site behind a link and two waits of the controller."""
    roles = {
        "controller": {"role": "controller", "state": "running", "since": 1.0, "memory_gb": 0.5},
        "here-regular-0": {"role": "instance", "state": "generating", "since": 1.0, "running": 7, "silent_s": 0.5},
    }
    waits = [
        {"owner": "controller", "waiting_for": f"{count} samples", "since": NOW - 90, "limit_s": limit}
        for count, limit in ((3, 900.0), (4, 100.0))
    ]
    values = {"run": "run", "state": "running", "step": 3, "steps": 9, "started_at": 900.0, "updated_at": NOW - 1}
    more = {"roles": roles, "waits": waits, "sites": {"west": {"silent_s": 12.0}}, "model": "tiny", "schedule": "async"}
    write_status(folder, values | more | {"refused": {"malformed": {"a stranger": 2, "west": 1}}} | changes)


def write_steps(folder: Path, *rows: dict[str, object]) -> None:
    with RowWriter(folder / layout.METRICS, MetricsRow) as file:
        for row in rows:
            file.append(MetricsRow.model_validate({"time": 1900.0, **row}))


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Samples of an answer by name and labels in their order, without `run`."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[key_of(sample)] = sample.value
    return found


def key_of(sample: Sample) -> tuple[str, ...]:
    assert sample.labels["run"] == "run"
    return (sample.name.removeprefix("streamrl_"), *(v for k, v in sample.labels.items() if k != "run"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def scrape(folder: Path) -> Iterator[object]:
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 4) as address:
        yield lambda: samples_of(urllib.request.urlopen(address, timeout=scaled(10)).read().decode())


def test_a_scrape_has_the_state_every_process_and_the_newest_step(folder: Path) -> None:
    write_state(folder)
    collector = RunCollector(folder, 4, lambda: NOW)
    steps = [
        {"step": n, "step_time_s": 10.0 * n, "samples_total": 8, "samples_void": n, "reward_by_task": {"sum": n / 4}}
        for n in (1, 2, 3)
    ]
    write_steps(folder, *steps)
    evaluate(folder, 2)
    write_started(
        folder,
        [
            StartedProcess("controller", "controller", 1),
            StartedProcess("rewards-here", "rewards", 2, exit_code=-9),
            StartedProcess("here-regular-1", "instance", 3, exit_code=0),
        ],
    )
    (folder / "trackers").mkdir()
    (folder / "trackers" / "wandb.jsonl").write_text('{"id": "x"}\n{"kind": "step", "step": 1, "time": 5.0}\n')
    found = {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}
    expected = {
        ("run_info", "tiny", "async", ""): 1,
        ("run_state", "running"): 1,
        ("run_state", "failed"): 0,
        ("run_steps_target",): 9,
        ("status_age_seconds",): 1,
        ("step_age_seconds",): 100,
        ("step_usual_seconds",): 20,
        ("wait_used_ratio", "controller"): 0.9,
        ("process_memory_bytes", "controller", "controller"): 2**29,
        ("process_requests_running", "here-regular-0", "instance"): 7,
        ("process_up", "controller", "controller", ""): 1,
        ("process_up", "rewards-here", "rewards", ""): 0,
        ("site_silent_seconds", "west"): 12,
        ("messages_refused_total", "malformed"): 3,
        ("messages_refused_total", "wrong key"): 0,
        ("samples_trained_total",): 24,
        ("samples_void_total",): 6,
        ("train_reward_by_task", "sum"): 0.75,
        ("train_samples_void",): 3,
        ("train_samples",): 8,
        ("evaluation_pass_at", "sum", "2"): 0.5,
        ("evaluation_reward", ""): 0.25,
        ("tracker_steps_waiting", "wandb"): 2,
        ("staleness_limit",): 4,
        ("mismatch",): 0,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert not any(key[:2] == ("process_up", "here-regular-1") for key in found)  # it was asked to leave
    assert ("usd_total",) not in found  # the cluster file has no prices


@pytest.mark.parametrize("ahead", [0.5, 3600.0])
def test_a_status_from_the_future_is_not_shown_as_fresh(folder: Path, ahead: float) -> None:
    collector = RunCollector(folder, 4, lambda: NOW)
    write_site(folder, {"site": "west", "updated_at": NOW + ahead, "state": "generating", "trainer_silent_s": 1.0})
    of_site = {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}
    (folder / layout.SITE_STATUS).unlink()
    write_state(folder, updated_at=NOW + ahead)
    of_run = {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}
    assert of_site["status_age_seconds",] == of_run["status_age_seconds",] == -ahead


def test_every_process_has_its_site_whether_its_launcher_emulates_others_or_not(folder: Path) -> None:
    write_started(folder, [StartedProcess("controller", "controller", 1)])
    (folder / "sites" / "west").mkdir(parents=True)
    write_started(folder / "sites" / "west", [StartedProcess("service-west", "service", 2)])
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 4, "here") as address:
        found = samples_of(urllib.request.urlopen(address, timeout=scaled(10)).read().decode())
    up = {key for key in found if key[0] == "process_up"}
    assert up == {("process_up", "controller", "controller", "here"), ("process_up", "service-west", "service", "west")}


def test_counters_are_there_before_their_first_increment(folder: Path) -> None:
    write_state(folder, refused={})
    collector = RunCollector(folder, None, lambda: NOW)

    def found() -> dict[tuple[str, ...], float]:
        return {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}

    begun = found()
    counters = {name.removeprefix("streamrl_") for name in map(full_name, KINDS) if name.endswith("_total")}
    assert {name for name, *_ in begun if name.endswith("_total")} == counters - {"usd_total"}
    assert all(value == 0 for (name, *_), value in begun.items() if name.endswith("_total"))
    assert len([key for key in begun if key[0] == "messages_refused_total"]) == 9
    write_steps(folder, {"step": 1, "step_refused": "not finite", "usd": 0.5})
    assert (found()["steps_refused_total",], found()["usd_total",]) == (1, 0.5)
    back_to(folder, 0)
    assert found()["steps_refused_total",] == 1, "a counter that falls is taken for one that began at 0 again"


@pytest.mark.parametrize(
    ("schedule", "limit"),
    [
        ({"name": "async", "max_staleness": 3}, 3),
        ({"name": "sync", "sync_every": 2}, 1),
        ({"name": "stream"}, 0),
        ({"name": "one_step_off"}, 1),
        ({"name": "auto", "max_staleness": 2}, 2),
        ({"name": "stream", "rounds": {"kind": "tail_batching", "max_age": 2}}, 2),
        ({"name": "sync", "rounds": {"kind": "partial_rollouts", "round_tokens": 64}}, None),
    ],
)
def test_the_limit_of_staleness_is_that_of_the_schedule_or_of_its_rounds(
    folder: Path, schedule: dict[str, object], limit: int | None
) -> None:
    write_state(folder)
    cluster = SimpleNamespace(sites={"here": SimpleNamespace(metrics=MetricsEndpoint(port=0))})
    run = RunConfig.model_validate({"schedule": schedule})
    share = SimpleNamespace(folders={"here": folder}, cluster=cluster, run=run, run_dir=folder)
    with supervisor._metrics(cast(Share, share)) as address:
        answer = samples_of(urllib.request.urlopen(address, timeout=scaled(10)).read().decode())
    assert answer.get(("staleness_limit",)) == limit


def test_totals_follow_a_run_that_goes_on_and_never_fall_as_it_goes_back_to_a_checkpoint(folder: Path) -> None:
    write_state(folder)
    collector = RunCollector(folder, 0, lambda: NOW)

    def trained() -> list[float]:
        families = {family.name: family for family in collector.collect()}
        return [families[f"streamrl_{name}"].samples[0].value for name in ("samples_trained", "mismatch")]

    write_steps(folder, {"step": 1, "samples_total": 8}, {"step": 2, "samples_total": 8})
    assert trained() == [16, 0]
    write_steps(folder, {"step": 3, "samples_total": 8, "mismatch_warning": "too far"})
    assert trained() == [24, 1]
    back_to(folder, 1)
    assert trained() == [24, 0]
    write_steps(folder, {"step": 2, "samples_total": 8, "time": 1950.0})
    assert trained() == [32, 0], "it was trained twice"


@pytest.mark.parametrize(
    ("state", "step", "since", "age"),
    [
        ("running", 3, 1.0, 100.0),  # since the newest step ended
        ("running", 3, NOW - 5, 5.0),  # a resume whose start took long
        ("starting", 3, NOW - 900, None),
        ("running", 9, 1.0, None),  # all steps are done, and their evaluation may take longer than a step
        ("done", 9, 1.0, None),
    ],
)
def test_the_age_of_a_step_counts_from_where_why_stuck_counts_and_ends_with_the_last_one(
    folder: Path, state: str, step: int, since: float, age: float | None
) -> None:
    write_state(
        folder, state=state, step=step, roles={"controller": {"role": "controller", "state": state, "since": since}}
    )
    write_steps(folder, {"step": step, "step_time_s": 1.0})
    collector = RunCollector(folder, 0, lambda: NOW)
    found = {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}
    assert found.get(("step_age_seconds",)) == age
    began = collect(folder, ask=False).step_began
    assert age is None or began == NOW - age


def test_the_end_of_a_run_does_not_wait_for_the_server_to_look_whether_it_shall_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever, began = metrics_server.MetricsServer.serve_forever, time.monotonic()
    monkeypatch.setattr(metrics_server.MetricsServer, "serve_forever", lambda self: forever(self, scaled(30)))
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 0):
        pass
    assert time.monotonic() - began < scaled(20)


def test_totals_of_a_resumed_run_begin_at_0(folder: Path) -> None:
    write_state(folder)
    write_steps(folder, *({"step": n, "samples_total": 8, "usd": 0.5} for n in range(1, 11)))
    collector = RunCollector(folder, 0, lambda: NOW)

    def found() -> list[float]:
        found = {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}
        return [found[name,] for name in ("samples_trained_total", "usd_total", "train_samples")]

    back_to(folder, 9)
    write_steps(folder, {"step": 10, "samples_total": 6, "usd": 0.25, "time": 1950.0})
    assert found() == [6, 0.25, 6]
    assert found() == [6, 0.25, 6]


def test_scrapes_that_overlap_count_each_step_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(folder)
    collector = RunCollector(folder, 0, lambda: NOW)
    write_steps(folder, *({"step": n, "samples_total": 8} for n in (1, 2, 3)))
    trained: list[float] = []

    def scrape() -> None:
        found = {key_of(sample): sample.value for family in collector.collect() for sample in family.samples}
        trained.append(found.get(("samples_trained_total",), 0))

    other, parse = threading.Thread(target=scrape), run_collector.parse_row

    def at_what() -> tuple[object, int]:
        frame = sys._current_frames().get(other.ident or 0)
        return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)

    def parse_beside_the_other(model: type[MetricsRow], line: bytes) -> MetricsRow | None:
        if other.ident is None:
            other.start()
            settled(at_what)  # it has ended, or waits
        return parse(model, line)

    monkeypatch.setattr(run_collector, "parse_row", parse_beside_the_other)
    scrape()
    other.join(scaled(30))
    assert trained == [24, 24]


def test_a_folder_without_anything_readable_still_answers(folder: Path, scrape: object) -> None:
    assert callable(scrape)
    assert set(scrape()) == {("disk_free_bytes",)}
    (folder / layout.STATUS).write_text('{"half')
    (folder / layout.METRICS).write_text('{"step": 1, "tim')
    (folder / layout.PROCESSES).write_text("[")
    assert set(scrape()) == {("disk_free_bytes",)}
    write_state(folder)
    assert scrape()["run_steps",] == 3


def test_an_integer_beyond_any_float_is_left_out(folder: Path, scrape: object) -> None:
    assert callable(scrape)
    write_state(folder)
    status = json.loads((folder / layout.STATUS).read_text())
    (folder / layout.STATUS).write_text(json.dumps(status | {"step": 10**400}))
    write_steps(folder, {"step": 1, "samples_total": 8, "loss": 0.5})
    with (folder / layout.METRICS).open("a") as file:
        file.write(f'{{"step": {10**400}, "time": 5.0}}\n{{"step": 2, "time": 6.0, "samples_total": {10**400}}}\n')
    found = scrape()
    assert ("run_steps",) not in found and found["run_steps_target",] == 9
    assert ("train_samples",) not in found and found["samples_trained_total",] == 8


def get(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=scaled(10)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_newest_evaluation_is_that_of_the_newest_version_whichever_ends_last(folder: Path) -> None:
    for step in (2, 6, 4):
        evaluate(folder, step)
    families = {family.name: family.samples for family in RunCollector(folder, 4).collect()}
    assert [sample.value for sample in families["streamrl_evaluation_step"]] == [6]


def test_names_that_utf_8_cannot_encode_are_shown_as_far_as_they_are_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"gr\xf6sse")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes no such name")
    write_state(folder)
    write_steps(folder, {"step": 1, "reward_by_task": {"su\ud83dm": 0.5}})
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 4) as address:
        text = urllib.request.urlopen(address, timeout=scaled(10)).read().decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert families["streamrl_run_steps"][0].labels == {"run": "gr\ufffdsse"}
    (reward,) = families["streamrl_train_reward_by_task"]
    assert (reward.labels["task"], reward.value) == ("su\ufffdm", 0.5)


def test_on_loopback_only_this_machines_names_are_answered_and_elsewhere_only_the_token(folder: Path) -> None:
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 0) as address:
        assert [get(address), get(address, Host="evil.example"), get(address + "x")] == [200, 421, 404]
        assert get(address.replace("/metrics", "/")) == 404
    secret = folder / "token"
    secret.write_text("a-token-of-some-length\n")
    secret.chmod(0o600)
    endpoint = MetricsEndpoint(port=0, listen="0.0.0.0", token_file=str(secret))
    with serving_metrics(endpoint, "metrics", folder, 0) as address:
        address = address.replace("0.0.0.0", "127.0.0.1")
        assert [get(address), get(address, Authorization="Bearer wrong")] == [401, 401]
        assert get(address, Authorization="Bearer a-token-of-some-length", Host="node7") == 200


def test_an_endpoint_that_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def problem(**keys: object) -> str:
        [text] = endpoint_problems(MetricsEndpoint.model_validate({"port": 0, **keys}), "sites.here.metrics")
        return text

    assert "which other machines can reach: name a token_file" in problem(listen="0.0.0.0")
    assert "cannot be read" in problem(token_file=str(tmp_path / "none"))
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o644)
    assert "others can read" in problem(token_file=str(token))
    token.chmod(0o600)
    assert list(endpoint_problems(MetricsEndpoint(port=0, token_file=str(token)), "x")) == []
    token.write_text("short")
    assert "at least 16 characters" in problem(token_file=str(token))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen at 127.0.0.1" in problem(port=taken.getsockname()[1])


def test_names_are_valid_and_counters_end_in_total() -> None:
    names = [full_name(name) for name in KINDS]
    assert len(names) == len(set(names))
    assert all(full_name(name).endswith("_total") == (kind.type == "counter") for name, kind in KINDS.items())
    assert set(map(step_name, MetricsRow.model_fields.keys() - NOT_FIGURES)) == set(STEP)
    assert all(name.replace("_", "").isalnum() and name == name.lower() for name in names)
    assert full_name("usd") == "streamrl_usd_total" and full_name("train_usd") == "streamrl_train_usd"


def test_whoever_reaches_the_port_can_neither_fill_the_launcher_with_threads_nor_keep_a_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[threading.Timer] = []
    start = threading.Timer.start
    monkeypatch.setattr(threading.Timer, "start", lambda timer: ends.append(timer) or start(timer))
    monkeypatch.setattr(metrics_server, "MOST_CONNECTIONS", 3)
    before = threading.active_count()
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 0) as address, contextlib.ExitStack() as stack:
        host, port = address.split("/")[2].split(":")
        strangers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(20)]
        for one in strangers:
            one.settimeout(scaled(30))
        assert all(one.recv(1) == b"" for one in strangers[3:]), "those without a place are closed unheard"
        assert threading.active_count() <= before + 1 + 2 * 3
        assert len(ends) == 3 and all(timer.interval == metrics_server.REQUEST_S for timer in ends)
        for number, one in enumerate(strangers[:3]):
            one.sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
            ends[number].function(*ends[number].args)  # its time is over
            assert one.recv(1) == b""
        wait_for(lambda: threading.active_count() <= before + 1, 30)
        assert get(address) == 200


def test_a_connection_for_which_no_thread_can_be_started_is_closed_and_gives_its_place_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    def answers(address: str) -> bool:
        with contextlib.suppress(OSError):
            return get(address) == 200
        return False

    monkeypatch.setattr(metrics_server, "MOST_CONNECTIONS", 1)
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 0) as address:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Timer, "start", cannot)
            assert not answers(address)
        wait_for(lambda: answers(address), 30)


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_request_that_never_ends_is_not_collected(folder: Path, kind: str) -> None:
    with serving_metrics(MetricsEndpoint(port=0), "metrics", folder, 0) as address:
        host, port = address.split("/")[2].split(":")
        assert taken(host, int(port), kind) < ENOUGH
