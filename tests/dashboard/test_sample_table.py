"""The samples of a run as a table: filters, order, pages; files that come, go, are old or broken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pytest import MonkeyPatch

from streamrl.dashboard import sample_table
from streamrl.dashboard.sample_table import OUTCOMES, SampleFilter, SampleTable, outcomes
from streamrl.dashboard.text_search import TextSearch
from streamrl.errors import UserError
from tests.dashboard.samples import a_sample, write_samples
from tests.stepped_clock import SteppedClock

VOID = {"reward": None, "void_cause": "timeout", "reward_error": "no answer", "advantage": None, "t_trained": None}
DROPPED = {"t_trained": None, "advantage": None}


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    write_samples(
        tmp_path,
        1,
        [
            a_sample("a.0", reward=0.0, output_length=30),
            a_sample("a.1", output_length=10, finish_reason="length", route="tail"),
            a_sample("b.0", task="letters", output_length=20, **DROPPED),
        ],
    )
    write_samples(tmp_path, 2, [a_sample("c.0", step=2, output_length=40, **VOID)])
    found = SampleTable(tmp_path)
    found.look()
    return found


def ids(table: SampleTable, offset: int = 0, limit: int = 100, **wanted: Any) -> list[str]:
    columns = table.page(SampleFilter(**wanted), offset, limit)["columns"]
    assert isinstance(columns["sample_id"], list)
    return columns["sample_id"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, {"a.0", "a.1", "b.0", "c.0"}),
        ({"task": "letters"}, {"b.0"}),
        ({"finish_reason": "length"}, {"a.1"}),
        ({"route": "tail"}, {"a.1"}),
        ({"group_id": "a"}, {"a.0", "a.1"}),
        ({"outcome": "trained"}, {"a.0", "a.1"}),
        ({"outcome": "void"}, {"c.0"}),
        ({"outcome": "dropped"}, {"b.0"}),
        ({"reward_min": 1.0}, {"a.1", "b.0"}),
        ({"reward_max": 0.5}, {"a.0"}),
        ({"length_min": 20, "length_max": 30}, {"a.0", "b.0"}),
        ({"step_min": 2}, {"c.0"}),
        ({"step_max": 1, "task": "sum"}, {"a.0", "a.1"}),
    ],
)
def test_a_filter_keeps_what_it_says(table: SampleTable, wanted: dict[str, Any], expected: set[str]) -> None:
    assert set(ids(table, **wanted)) == expected


def test_pages_are_parts_of_one_order_with_missing_values_last(table: SampleTable) -> None:
    assert ids(table, sort="output_length", descending=False) == ["a.1", "b.0", "a.0", "c.0"]
    assert ids(table, 1, 2, sort="output_length", descending=False) == ["b.0", "a.0"]
    assert ids(table, sort="reward", descending=True)[2:] == ["a.0", "c.0"]
    assert ids(table, sort="reward", descending=False)[0] == "a.0"
    assert table.page(SampleFilter(task="sum"), 2, 1)["total"] == 3
    assert ids(table, 99) == []
    assert (
        ids(table, sort="task")[:3] == ["a.0", "a.1", "c.0"] and ids(table, sort="task", descending=False)[0] == "b.0"
    )


def test_a_page_says_each_samples_outcome(table: SampleTable) -> None:
    page = table.page(SampleFilter(sort="output_length", descending=False), 0, 10)
    assert page["columns"]["outcome"] == ["trained", "dropped", "trained", "void"]
    assert page["all"] == 4


def test_what_was_cut_has_no_loss_where_the_run_masks_it(table: SampleTable, tmp_path: Path) -> None:
    masks = True
    masked = SampleTable(tmp_path, lambda: masks)
    masked.look()
    place = masked.find("a.1")
    assert place is not None and masked.outcome(place) == "masked"
    assert ids(masked, outcome="masked") == ["a.1"] and ids(masked, outcome="trained") == ["a.0"]
    masks = False
    masked.look()
    assert ids(masked, outcome="masked") == []


def test_new_replaced_and_deleted_files_are_seen(table: SampleTable, tmp_path: Path) -> None:
    write_samples(tmp_path, 3, [a_sample("d.0", step=3)])
    write_samples(tmp_path, 2, [a_sample("c.9", step=2)])
    table.look()
    assert ids(table) == ["d.0", "c.9", "a.0", "a.1", "b.0"]
    (tmp_path / "step_000003.parquet").unlink()
    table.look()
    assert ids(table, step_min=2) == ["c.9"]
    assert table.find("d.0") is None


def test_a_file_is_read_once(table: SampleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    kept = sample_table.read_columns
    monkeypatch.setattr(sample_table, "read_columns", lambda path, *rest: read.append(path) or kept(path, *rest))
    table.look()
    assert read == []
    path = write_samples(tmp_path, 3, [a_sample("d.0", step=3)])
    table.look()
    assert read == [path]


def test_new_files_are_read_in_slices_to_the_same_table(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_samples(tmp_path, step, [a_sample(f"s{step}.{number}", step=step) for number in range(step)])
    whole, sliced = SampleTable(tmp_path), SampleTable(tmp_path)
    whole.look()
    assert [sliced.look_for(-1.0) for _ in range(8)] == [False] * 6 + [True] * 2
    assert sliced.look().equals(whole.look()) and ids(sliced) == ids(whole)
    assert sliced.place(27) == whole.place(27)
    write_samples(tmp_path, 3, [a_sample("new.0", step=3)])
    assert [sliced.look_for(-1.0) for _ in range(5)] == [False] * 4 + [True]
    assert sliced.look().equals(whole.look()) and ids(sliced) == ids(whole)


def test_files_of_a_folder_that_has_not_changed_are_seldom_looked_at(
    table: SampleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, listed, plain_names = SteppedClock(), [], sample_table.plain_names
    monkeypatch.setattr(sample_table, "time", clock)

    def names(folder: Path, **options: Any) -> list[str]:
        listed.append(clock.monotonic())
        return plain_names(folder, **options)

    monkeypatch.setattr(sample_table, "plain_names", names)
    fresh = SampleTable(tmp_path)
    for _ in range(30):
        fresh.look()
        clock.sleep(1.0)
    began = listed[0]
    assert [at - began for at in listed] == [0, 1, 2, 12, 22]
    write_samples(tmp_path, 3, [a_sample("d.0", step=3)])
    fresh.look()
    assert fresh.find("d.0") is not None
    clock.sleep(3.0)
    fresh.look()
    mark = tmp_path.stat()
    (tmp_path / "step_000003.parquet").unlink()
    os.utime(tmp_path, ns=(mark.st_atime_ns, mark.st_mtime_ns))  # as a change that its time does not show
    fresh.look()
    assert fresh.find("d.0") is not None
    clock.sleep(10.0)
    fresh.look()
    assert fresh.find("d.0") is None


def test_many_samples_take_a_hundred_bytes_each_and_are_not_copied_with_every_step(tmp_path: Path) -> None:
    table, copied, before = SampleTable(tmp_path), 0, pa.table({})
    for step in range(1, 33):
        ids = [f"{64 * step + number // 8:08d}.{number % 8:03d}" for number in range(512)]
        few = dict.fromkeys(("finish_reason", "route", "task"), "about ten characters")
        write_samples(tmp_path, step, [a_sample(one, step=step, prompt_id=f"sum/{one[:8]}", **few) for one in ids])
        now = table.look()
        old = {chunk.buffers()[1].address for chunk in before["step"].chunks} if before else set()
        copied += sum(len(chunk) for chunk in now["step"].chunks if chunk.buffers()[1].address not in old)
        before = now
    assert len(now) == 32 * 512 and now.nbytes < 100 * len(now)
    assert now.get_total_buffer_size() < 110 * len(now)  # no chunk keeps more than it has
    assert copied < 8 * len(now)  # by each step: 16 times
    assert ids[7:9] == table.page(SampleFilter(descending=False), 31 * 512 + 7, 2)["columns"]["sample_id"]


def test_a_file_that_can_be_read_again_is_shown_with_those_after_it(
    tmp_path: Path, table: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path, 3, [a_sample("d.0", step=3)])
    write_samples(tmp_path, 2, [a_sample("c.1", step=2), a_sample("c.2", step=2)])
    kept, fails = sample_table.read_columns, True

    def read(path: Path, *rest: Any) -> pa.Table:
        if fails and path.stem == "step_000002":
            raise OSError("Stale file handle")
        return kept(path, *rest)

    monkeypatch.setattr(sample_table, "read_columns", read)
    for _ in range(2):
        table.look()
        assert "Stale" in table.notes[0] and ids(table, step_min=2) == ["d.0"]
    fails = False
    table.look()
    assert table.notes == [] and ids(table, step_min=2) == ["d.0", "c.1", "c.2"]
    index = table.find("d.0")
    assert index is not None and table.place(index) == (tmp_path / "step_000003.parquet", 0)


def test_a_copy_of_a_file_is_left_out(table: SampleTable, tmp_path: Path) -> None:
    before = ids(table)
    (tmp_path / "step_000001 (copy).parquet").write_bytes((tmp_path / "step_000001.parquet").read_bytes())
    table.look()
    assert ids(table) == before


def test_a_broken_file_is_left_out_and_said(table: SampleTable, tmp_path: Path) -> None:
    (tmp_path / "step_000004.parquet").write_bytes(b"PAR1 cut")
    table.look()
    assert len(ids(table)) == 4
    assert len(table.notes) == 1 and "step_000004.parquet could not be read" in table.notes[0]


def test_an_older_file_without_some_columns_is_shown(tmp_path: Path) -> None:
    old = {
        "sample_id": ["x", "y"],
        "group_id": ["g", "g"],
        "step": [1, 1],
        "reward": [1.0, None],
        "t_trained": [2.0, None],
    }
    pq.write_table(pa.table(old | {"output_length": pa.array([3, 4], pa.int64())}), tmp_path / "step_000001.parquet")
    found = SampleTable(tmp_path)
    assert [OUTCOMES[one] for one in outcomes(found.look())] == ["trained", "void"]
    assert found.choices() == {"task": [], "finish_reason": [], "route": []}
    assert found.lengths()["columns"]["sample_id"] == []


def test_an_episode_is_one_sample_at_the_place_of_its_first_row(tmp_path: Path) -> None:
    rows = [a_sample("a.0"), a_sample("a.0#1"), a_sample("a.1"), a_sample("a.1#1"), a_sample("a.2")]
    path = write_samples(tmp_path, 1, rows)
    found = SampleTable(tmp_path)
    assert len(found.look()) == 3
    index = found.find("a.1")
    assert index is not None and found.place(index) == (path, 2)


def test_lengths_are_of_samples_with_a_prediction(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [a_sample("a.0", predicted_length=None), a_sample("a.1", predicted_length=7.0)])
    found = SampleTable(tmp_path)
    found.look()
    columns = found.lengths()["columns"]
    assert (columns["sample_id"], columns["predicted_length"], columns["output_length"]) == (["a.1"], [7.0], [4])


def test_a_query_becomes_a_filter_and_bad_values_are_named() -> None:
    parsed = SampleFilter.parse({"task": "sum", "reward_min": "0.5", "length_max": "", "sort": "reward", "offset": "7"})
    assert parsed == SampleFilter(task="sum", reward_min=0.5, sort="reward")
    assert SampleFilter.parse({"descending": "false"}).descending is False
    for key, value in {"reward_min": "much", "sort": "secret", "outcome": "lost"}.items():
        with pytest.raises(UserError, match=key):
            SampleFilter.parse({key: value})


def test_a_text_is_found_in_prompts_answers_and_every_row_of_an_episode(tmp_path: Path) -> None:
    said = {"messages": [{"role": "user", "content": 'a "Zebra"\nof Żory'}], "steps": []}
    episode = a_sample("e.0", prompt="", completion="", conversation=json.dumps(said))
    second = a_sample("e.0", prompt="", completion="later Wombat") | {"sample_id": "e.0#1"}
    write_samples(tmp_path, 1, [a_sample("a.0"), episode, second, a_sample("b.0", prompt="A WOMBAT? 100 %")])
    write_samples(tmp_path, 2, [a_sample("c.0", step=2, completion=None, prompt="a zebra_")])
    found = SampleTable(tmp_path)
    found.look()
    for text, expected in {
        "wombat": {"e.0", "b.0"},
        "0 %": {"b.0"},
        "zebra": {"e.0", "c.0"},
        '"zebra"\nof': {"e.0"},
        "Żory": {"e.0"},
        "zebra_": {"c.0"},
        "content": set(),
        "user": set(),
        ".": set(),
    }.items():
        assert set(ids(found, text=text)) == expected, text
    assert set(ids(found, text="wombat", step_max=1, group_id="b")) == {"b.0"}


@pytest.mark.parametrize("escaped", [False, True], ids=["plain", "as an earlier version wrote it"])
def test_upper_and_lower_case_are_the_same_in_conversations_of_all_letters(tmp_path: Path, escaped: bool) -> None:
    said = {"messages": [{"role": "user", "content": "Привет, École (😀)\n" + "Ж" * 500}], "steps": []}
    episode = a_sample("e.0", prompt="", completion="", conversation=json.dumps(said, ensure_ascii=escaped))
    write_samples(tmp_path, 1, [episode, a_sample("a.0", prompt="привет")])
    found = SampleTable(tmp_path)
    found.look()
    for text, expected in {
        "привет": {"e.0", "a.0"},
        "ПРИВЕТ": {"e.0", "a.0"},
        "ПРИвет, é": {"e.0"},
        "ÉCOLE (😀)\n": {"e.0"},
        "ж" * 500: {"e.0"},
        "ж" * 501: set(),
        "u0416": set(),
    }.items():
        assert set(ids(found, text=text)) == expected, text


def test_a_search_that_takes_long_is_continued_newest_files_first(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for step in (1, 2, 3):
        write_samples(tmp_path, step, [a_sample(f"g{step}.0", step=step)])
    monkeypatch.setattr(TextSearch.look, "__defaults__", (-1.0,))
    found = SampleTable(tmp_path)
    found.look()
    wanted = SampleFilter(text="it is")
    pages = [found.page(wanted, 0, 10) for _ in range(4)]
    assert [(page["searched"], page["files"]) for page in pages] == [(1, 3), (2, 3), (3, 3), (3, 3)]
    assert [page["columns"]["sample_id"] for page in pages[:3]] == [
        ["g3.0"],
        ["g3.0", "g2.0"],
        ["g3.0", "g2.0", "g1.0"],
    ]
    write_samples(tmp_path, 2, [a_sample("g2.0", step=2, completion="nothing")])
    found.look()
    assert [ids(found, text="it is") for _ in range(2)] == [["g3.0", "g1.0"]] * 2
    (tmp_path / "step_000003.parquet").unlink()
    assert found.look() is not None and ids(found, text="it is") == ["g1.0"]


def test_a_text_of_any_length_is_not_taken(table: SampleTable) -> None:
    with pytest.raises(UserError, match="text: expected at most 1000 characters, got 1001"):
        SampleFilter.parse({"text": "x" * 1001})
    assert ids(table, text="x" * 1000) == []
