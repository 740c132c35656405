"""Workloads of `streamrl simulate`: recorded rows as the ranker takes them, and forecasts that are honest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedRequest, simulate
from streamrl.errors import UserError
from streamrl.planning import workload as workloads
from streamrl.planning.simulated_fleet import simulated_fleet
from streamrl.planning.workload import Workload, draw, replay

PROMPTS = ["a", "b", "c", "d"]


def parquet(folder: Path, **columns: Any) -> Path:
    whole = {"prompt": PROMPTS, "output_length": [10, 20, 30, 40], **columns}
    pq.write_table(pa.table(whole), folder / "x.parquet")
    return folder / "x.parquet"


def lengths(workload: Workload) -> list[float]:
    return [request.length for batch in workload.batches for request in batch]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"output_length": [None, 20, 30, 40]}, [20, 30, 40]),
        ({"output_length": [float("nan"), 20, float("inf"), 40]}, [20, 40]),
        ({"output_length": [-1, 20, 2 * 10**9, 0]}, [20, 1]),
        ({"prompt": [None, "b", "c", "d"]}, [20, 30, 40]),
        ({"output_length": [0, 0, 30, 40], "finish_reason": ["length", "stop", "stop", "length"]}, [1, 30, 40]),
    ],
)
def test_rows_that_the_ranker_leaves_out_are_left_out_and_counted(
    columns: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    workload = replay(parquet(tmp_path, **columns), None, 0.0, 0)
    assert lengths(workload) == expected and workload.longest == max(expected)
    assert f"1 steps, {4 - len(expected)} rows without a prompt or a usable length left out" in workload.source


def test_prompts_count_by_their_tokens_or_by_the_number_of_them(tmp_path: Path) -> None:
    for given in ([3, 2, None, 0], [3.0, 2.0, float("nan"), 0.0], [[7, 7, 7], [7, 7], None, []]):
        (batch,) = replay(parquet(tmp_path, prompt_tokens=given), None, 0.0, 0).batches
        assert [request.prompt_tokens for request in batch] == [3, 2, 0, 0]


def test_samples_without_a_group_have_one_each(tmp_path: Path) -> None:
    (batch,) = replay(parquet(tmp_path, group_id=[None, None, "g", "g"]), None, 0.0, 0).batches
    assert len({request.group_id for request in batch}) == 3


def test_a_jsonl_file_with_a_byte_order_mark_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "y.jsonl"
    file.write_text('{"prompt": "a", "output_length": 5}\n', encoding="utf-8-sig")
    assert lengths(replay(file, None, 0.0, 0)) == [5]


def test_a_jsonl_file_and_a_folder_of_both_kinds_are_replayed(tmp_path: Path) -> None:
    file = tmp_path / "y.jsonl"
    rows = [{"prompt": "e", "output_length": 50, "prompt_tokens": 4}, {"prompt": None, "output_length": 60}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    workload = replay(file, None, 0.0, 0)
    assert lengths(workload) == [50] and workload.batches[0][0].prompt_tokens == 4
    further = [{**rows[0], "sample_id": "s", "trajectory_id": one} for one in ("s", "t")]
    file.write_text("\n".join(map(json.dumps, further)))  # the second row of an episode
    assert lengths(replay(file, None, 0.0, 0)) == [50]
    parquet(tmp_path)
    assert lengths(replay(tmp_path, None, 0.0, 0)) == [10, 20, 30, 40, 50]
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # now it is a run's, whose JSONL files hold other things
    assert lengths(replay(tmp_path, None, 0.0, 0)) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"output_length": ["long"] * 4}, "x.parquet, row 1: output_length is 'long'; expected a number"),
        ({"prompt": [1, 2, 3, 4]}, "x.parquet, row 1: prompt is 1; expected text"),
        ({"prompt_tokens": ["7"] * 4}, "x.parquet, row 1: prompt_tokens is '7'; expected a number"),
        ({"prompt_tokens": [1, -7, 1, 1]}, "x.parquet, row 2: prompt_tokens is -7"),
        ({"output_length": pa.nulls(4)}, "no rows with a prompt and a usable length"),
    ],
)
def test_rows_of_another_form_are_named(columns: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        replay(parquet(tmp_path, **columns), None, 0.0, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "y.jsonl, line 1: not JSON"),
        ("[]", "y.jsonl, line 1: expected an object"),
        ('{"prompt": "a"}', "no column output_length"),
        ('{"prompt": "a", "output_length": true}', "output_length is True; expected a number"),
    ],
)
def test_lines_of_another_form_are_named(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "y.jsonl").write_text(text)
    with pytest.raises(UserError, match=complaint):
        replay(tmp_path / "y.jsonl", None, 0.0, 0)


def errors(batch: list[SimulatedRequest]) -> tuple[float, float, float]:
    """Spread of log lengths around their forecasts, spread of the forecasts, and slope of lengths over forecasts."""
    told = np.log([request.forecast.lengths for request in batch if request.forecast])
    logs, centres = np.log([request.length for request in batch]), told.mean(axis=1)
    return float((logs - centres).std()), float(told.std(axis=1).mean()), float(np.polyfit(centres, logs, 1)[0])


@pytest.mark.parametrize(("spread", "noise"), [(3.0, 0.3), (0.5, 0.5), (0.2, 1.0)])
def test_forecasts_are_as_wrong_as_they_say(spread: float, noise: float) -> None:
    (batch,) = draw(f"lognormal:12,{spread}", 4096, 10**12, noise, 0).batches
    wrong, told, slope = errors(batch)
    # the spread of what two normal errors leave of each other; sixteen equally likely values have 0.98 of it
    left = spread * noise / np.hypot(spread, noise)
    assert wrong == pytest.approx(left, rel=0.05) and told == pytest.approx(left, rel=0.05)
    assert slope == pytest.approx(1.0, abs=0.05)
    values = np.log(batch[0].forecast.lengths if batch[0].forecast else ())
    assert np.diff(values)[-1] > 2 * np.diff(values)[7], "log-normal: sparse at the ends"


def test_no_forecast_is_longer_than_the_longest_answer_and_equal_lengths_are_known() -> None:
    (batch,) = draw("uniform:100,2000", 256, 20_000, 0.4, 0).batches
    assert max(max(request.forecast.lengths) for request in batch if request.forecast) <= 2000.001
    (batch,) = draw("constant:700", 16, 20_000, 0.4, 0).batches
    assert all(request.forecast and request.forecast.mean == pytest.approx(700) for request in batch)
    (batch,) = draw("constant:700", 16, 20_000, 0.0, 0).batches
    assert {request.forecast for request in batch} == {Forecast.exactly(700)}


def test_plans_by_such_forecasts_do_not_wait_for_tails_that_cannot_come() -> None:
    fleet = simulated_fleet(16, None, "H800", 64, None)
    for seed in range(3):
        workload = draw("uniform:100,2000", 1024, 20_000, 0.35, seed)
        plain, planned = (
            simulate(make_policy(name, workload.longest), workload.batches[0], fleet).makespan
            for name in ("least-loaded", "skew-aware")
        )
        assert planned < 1.03 * plain, seed


def test_a_simulation_has_no_more_requests_than_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="2,000,001 requests or more would be simulated"):
        draw("constant:5", 2_000_001, 10, 0.0, 0)
    one_group = replay(parquet(tmp_path, group_id=["g"] * 4), None, 0.0, 0)
    assert len(one_group.groups(3)) == 3
    monkeypatch.setattr(workloads, "MOST_REQUESTS", 20)
    assert len(Workload("", one_group.batches, 40.0).groups(5)) == 5
    with pytest.raises(UserError, match="24 requests or more would be simulated, at most 20"):
        Workload("", one_group.batches, 40.0).groups(6)
