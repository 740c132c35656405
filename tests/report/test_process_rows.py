"""The tables of processes of a large run, whose instances share rows."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from streamrl.report.panels import render, render_start
from streamrl.report.process_rows import details_of, process_rows, stage_rows
from streamrl.report.start_lines import joined
from streamrl.run_dir.start_stages import READY, Stage
from streamrl.run_dir.status import RunStatus
from tests.report.synthetic import START, make_status


def of_instances(states: Mapping[str, Mapping[str, Any]]) -> RunStatus:
    """A run with a controller, a service and these instances."""
    usual: dict[str, Any] = {"role": "instance", "state": "generating", "since": START, "weight_version": 3}
    roles: dict[str, dict[str, Any]] = {"controller": {"role": "controller", "state": "running", "since": START}}
    roles["service-here"] = {"role": "service", "state": "dispatching", "since": START}
    roles |= {name: {**usual, **values} for name, values in states.items()}
    return RunStatus.model_validate(make_status(8, 20, START + 184, roles=roles))


def shown(picture: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def rows_of(status: RunStatus) -> list[tuple[str, str, int]]:
    return [(row.name, row.role.state, row.count) for row in process_rows(status)]


def test_a_thousand_instances_take_a_row_for_each_pool_and_state_and_unusual_ones_have_names() -> None:
    states: dict[str, dict[str, Any]] = {f"here-regular-{number}": {} for number in range(1000)}
    states |= {f"far-tail-{number}": {} for number in range(30)}
    for number in (7, 500):
        states[f"here-regular-{number}"] = {"state": "loading"}
    for number in range(10, 20):
        states[f"here-regular-{number}"] = {"state": "dead", "detail": "SIGKILL"}
    for number in range(100, 150):
        states[f"here-regular-{number}"] = {"state": "idle"}
    status = of_instances(states)
    assert rows_of(status) == [
        ("controller", "running", 1),
        ("service-here", "dispatching", 1),
        ("here-regular: 938", "generating", 938),
        ("here-regular-7", "loading", 1),
        *[(f"here-regular-{number}", "dead", 1) for number in range(10, 20)],
        ("here-regular: 50", "idle", 50),
        ("here-regular-500", "loading", 1),
        ("far-tail: 30", "generating", 30),
    ]
    assert len(shown(render(status, [], START + 185))) < 40
    low = "\n".join(shown(render(status, [], START + 185, height=18)))
    assert "here-regular-10 " in low and "938 generating" not in low and "968 generating" in low


def test_a_row_of_several_has_their_sums_their_range_of_versions_and_the_longest_time() -> None:
    one = {"running": 2, "waiting": 1, "tokens_per_s": 100.0, "memory_gb": 0.5}
    states: dict[str, dict[str, Any]] = {f"here-regular-{number}": dict(one) for number in range(21)}
    states["here-regular-4"] |= {"weight_version": 2, "since": START - 60, "detail": "long prompts"}
    states["here-regular-5"] |= {"memory_gb": None, "tokens_per_s": None}
    (_, _, row) = process_rows(of_instances(states))
    together = row.role
    assert (row.versions, together.since, together.detail) == ("2-3", START - 60, "here-regular-4: long prompts")
    assert (together.running, together.waiting, together.tokens_per_s) == (42, 21, 2000.0)
    assert together.memory_gb == 10.0
    none = {name: {"weight_version": None, "detail": "waking up"} for name in states}
    (_, _, row) = process_rows(of_instances(none))
    assert (row.versions, row.role.running, row.role.memory_gb, row.role.detail) == ("", None, None, "waking up")


def test_a_row_of_several_names_those_with_a_rare_detail_and_counts_those_that_it_leaves_out() -> None:
    names = [f"here-regular-{number}" for number in range(30)]
    details = dict.fromkeys(names, "")
    assert details_of(details) == ""
    details |= dict.fromkeys(names[:20], "step times guessed") | {names[20]: "slow"}
    assert details_of(details) == "20 step times guessed; here-regular-20: slow"
    details |= {name: f"error {name}" for name in names[21:]} | dict.fromkeys(names[21:23], "no memory")
    assert details_of(details) == (
        "20 step times guessed; here-regular-21, here-regular-22: no memory; here-regular-20: slow; and 7 more"
    )


def test_up_to_twenty_instances_have_a_row_each_and_many_dead_ones_share_one() -> None:
    assert len(process_rows(of_instances({f"here-regular-{number}": {} for number in range(20)}))) == 22
    dead = of_instances({f"here-regular-{number}": {"state": "dead"} for number in range(21)})
    assert rows_of(dead)[2:] == [("here-regular: 21", "dead", 21)]


def test_starting_instances_share_rows_and_words_of_the_log() -> None:
    stages = {f"here-regular-{number}": Stage(READY, START + number, START) for number in range(1000)}
    stages |= {"here-regular-3": Stage("importing vLLM", START, START), "trainer": Stage("loading", START, START)}
    assert [(name, stage.text, stage.since, count) for name, stage, count in stage_rows(stages)] == [
        ("here-regular: 999", READY, START, 999),
        ("here-regular-3", "importing vLLM", START, 1),
        ("trainer", "loading", START, 1),
    ]
    assert len(shown(render_start("demo", stages, START + 10))) < 12
    texts = {name: stage.text for name, stage in stages.items()}
    assert joined(texts) == "here-regular (999): ready; here-regular-3: importing vLLM; trainer: loading"
    assert joined({"a": "x", "here-regular-1": "x", "b": "y"}) == "a, here-regular-1: x; b: y"
