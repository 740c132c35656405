"""Prompt files: every format gives the same rows, and a wrong file is named with its line or row."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask, FileTask
from streamrl.errors import UserError
from streamrl.launcher.preflight import check_tasks
from streamrl.tasks.arrow_values import cells
from streamrl.tasks.chat_template import ChatTemplate, load_tokenizer
from streamrl.tasks.files import MOST_BYTES, FileItems, TaskRow, load_records, load_rows
from tests.mere_user import without_right_to
from tests.tiny_model import save_tiny_model

ROWS = [TaskRow("one?", "1"), TaskRow("two?\nreally?", "2"), TaskRow("dreißig?", "30")]
COLUMNS = {"prompt": [row.prompt for row in ROWS], "answer": [row.answer for row in ROWS], "other": [1, 2, 3]}


def file_task(path: Path, **settings: Any) -> FileTask:
    return FileTask(**({"kind": "file", "name": "mine", "path": str(path)} | settings))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_jsonl_file_is_read_as_tasks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"prompt": "one?", "answer": "1"}', "", '{"answer": "2", "prompt": "two?\\nreally?"}']
    path.write_bytes("\ufeff".encode() + "\r\n".join([*lines, '{"prompt": "dreißig?", "answer": "30"}']).encode())
    assert load_rows(file_task(path)) == ROWS


def test_a_file_of_another_user_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one?", "answer": "1"}\n')
    refused = rf"task 'mine': path: {path}: cannot be read: Permission denied"
    for closed in (path, tmp_path):
        with without_right_to(closed), pytest.raises(UserError, match=refused):
            load_rows(file_task(path))


def test_parquet_with_other_column_names_and_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"question": pa.array(COLUMNS["prompt"]).dictionary_encode(), "solution": COLUMNS["answer"]})
    pq.write_table(table, path, row_group_size=2)
    assert load_rows(file_task(path, prompt_column="question", answer_column="solution")) == ROWS


def test_saved_hf_dataset_keeps_its_own_order(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({name: values[::-1] for name, values in COLUMNS.items()})
    data.select([2, 1, 0]).save_to_disk(tmp_path / "saved")
    assert load_rows(file_task(tmp_path / "saved", kind="hf_dataset")) == ROWS


CHAT = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "two?"}],
]
CHAT_ROWS = [TaskRow(chat[-1]["content"], str(n), tuple(chat[:-1])) for n, chat in enumerate(CHAT, start=1)]


def test_conversations_are_the_same_rows_in_every_format(tmp_path: Path) -> None:
    columns = {"prompt": CHAT, "answer": ["1", "2"]}
    lines = [json.dumps({"prompt": chat, "answer": str(n)}) for n, chat in enumerate(CHAT, start=1)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    named = [[{**message, "name": None} for message in chat] for chat in CHAT]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    pq.write_table(pa.table({"prompt": pa.array(named, kind), "answer": ["1", "2"]}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "folder" / "train.parquet")
    assert load_rows(file_task(tmp_path / "a.jsonl")) == CHAT_ROWS
    assert load_rows(file_task(tmp_path / "a.parquet")) == CHAT_ROWS
    assert load_rows(file_task(tmp_path / "saved", kind="hf_dataset")) == CHAT_ROWS
    assert load_rows(file_task(tmp_path / "folder", kind="hf_dataset")) == CHAT_ROWS


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([], "expected a conversation that ends with a message of the user, got no message"),
        (CHAT[1][:2], "expected a conversation that ends with a message of the user, got assistant"),
        ([{"role": "tool", "content": "x"}], "message 0 has the role 'tool', expected one of: system, user, assistant"),
        ([*CHAT[1], CHAT[0][0]], "message 3 has the role 'system', expected one of: user, assistant"),
        ([{"role": "user", "content": [{"text": "x"}]}], "message 0 must have a text as content, got list"),
        ([{"role": "user", "content": "x", "images": [1]}], "message 0 has images; expected role and content alone"),
        (["one?"], "message 0 must be a mapping with role and content, got str"),
        ([{"role": "user", "content": " "}], "is empty"),
    ],
)
def test_a_wrong_conversation_is_named_with_its_line_and_message(tmp_path: Path, chat: Any, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "ok", "answer": 1}) + "\n" + json.dumps({"prompt": chat, "answer": 1}))
    with pytest.raises(UserError, match=re.escape(f"{path}:2: column 'prompt'")) as caught:
        load_rows(file_task(path))
    assert words in str(caught.value)


def test_hf_folder_of_files_with_a_split(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    pq.write_table(pa.table(COLUMNS), folder / "train.parquet")
    pq.write_table(pa.table(COLUMNS).slice(0, 1), folder / "test.parquet")
    assert load_rows(file_task(folder, kind="hf_dataset", split="test")) == ROWS[:1]
    with pytest.raises(UserError, match="no split 'dev', but train, test"):
        load_rows(file_task(folder, kind="hf_dataset", split="dev"))


def test_a_folder_may_have_subsets_a_colon_and_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / "two:parts" / name).mkdir(parents=True)
        (tmp_path / "two:parts" / name / "train.jsonl").write_text(json.dumps({"prompt": "p", "answer": name}))
    assert [row.answer for row in load_rows(file_task(Path("~/two:parts/b"), kind="hf_dataset"))] == ["b"]
    assert [row.answer for row in load_rows(file_task(Path("~/two:parts"), kind="hf_dataset"))] == ["a", "b"]
    (tmp_path / "two:parts").rename(tmp_path / "parts")
    parts = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("a", "b"))
    (tmp_path / "parts" / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    assert [row.answer for row in load_rows(file_task(Path("~/parts:b"), kind="hf_dataset"))] == ["b"]


@pytest.mark.parametrize("other", ["parts", "{here}/parts:default", "{here}/parts", "{here}/../{name}/parts:default"])
def test_a_new_run_is_not_evaluated_on_its_training_rows_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    for split in ("train", "test"):
        (tmp_path / "parts" / f"{split}.jsonl").write_text(GOOD)
    path = other.format(here=tmp_path, name=tmp_path.name)

    def problems(split: str | None, resumed: bool = False) -> list[str]:
        held_out = file_task(Path(path), kind="hf_dataset", name="theirs", split=split)
        tasks = [file_task(Path("parts:default"), kind="hf_dataset")]
        run = RunConfig.model_validate({"tasks": tasks, "evaluation": {"tasks": [held_out]}})
        return list(check_tasks(run, rendered=False, resumed=resumed))

    says = f"evaluation.tasks.0: {path} is what task 'mine' is trained on: name another data set or split"
    assert problems(None) == [says] and problems("train") == [says]
    assert problems("test") == []
    assert problems(None, resumed=True) == []  # earlier versions began such runs


def test_the_split_of_a_data_set_that_was_saved_alone_is_the_one_that_it_holds(tmp_path: Path) -> None:
    unknown, known, several = (tmp_path / name for name in ("unknown", "known", "several"))
    datasets.Dataset.from_dict(COLUMNS).save_to_disk(unknown)
    datasets.Dataset.from_dict(COLUMNS, split=datasets.Split.TEST).save_to_disk(known)
    datasets.DatasetDict({"test": datasets.Dataset.from_dict(COLUMNS)}).save_to_disk(several)
    for folder, split in ((unknown, None), (unknown, "train"), (known, None), (known, "test"), (several, "test")):
        assert load_rows(file_task(folder, kind="hf_dataset", split=split)) == ROWS
    for folder, split, holds in ((unknown, "test", "of no known split"), (known, "train", "of split 'test'")):
        said = f"split is '{split}', but {folder} was saved alone and is {holds}: leave split out"
        with pytest.raises(UserError, match=re.escape(said)):
            load_rows(file_task(folder, kind="hf_dataset", split=split))
    with pytest.raises(UserError, match="has no split 'train', but test"):
        load_rows(file_task(several, kind="hf_dataset"))


def test_a_row_that_is_too_large_to_be_sent_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "p", "answer": "x" * size, "more": "y" * 99} for size in (MOST_BYTES - 99, MOST_BYTES)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = re.escape(f"{path}:2: ") + r"8,388,\d+ bytes .* 8,388,613 of them in 'answer': expected at most 8,388,608"
    with pytest.raises(UserError, match=words):
        load_rows(file_task(path, reward="mine:function"))
    agent = AgentTask(kind="agent", name="a", run="m:f", path=str(path))
    with pytest.raises(UserError, match=re.escape(f"{path}:1: ") + "8,388,.* in 'answer'"):  # with all columns
        load_records(agent)
    path.write_text(path.read_text().splitlines()[0])
    assert len(load_rows(file_task(path, reward="mine:function"))[0].answer) == MOST_BYTES - 99


def test_answers_are_sendable_whatever_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    answers = [{"n": decimal.Decimal("1.50"), "d": datetime.date(2024, 1, 2), "l": [1.5, None], "big": True}]
    pq.write_table(pa.table({"prompt": ["p"], "answer": answers}), path)
    (row,) = load_rows(file_task(path, reward="mine:function"))
    assert row.answer == {"n": "1.50", "d": "2024-01-02", "l": [1.5, None], "big": True}
    (tmp_path / "big.jsonl").write_text('{"prompt": "p", "answer": 100000000000000000000000}\n')
    (big,) = load_rows(file_task(tmp_path / "big.jsonl"))
    assert msgpack.unpackb(msgpack.packb(big.answer)) == "100000000000000000000000"


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_a_number_is_what_was_written_however_few_bits_the_column_has(tmp_path: Path, kind: pa.DataType) -> None:
    written = pa.array([0.1, -0.3, None, 72.0, 1.5e-5]).cast(kind)
    table = pa.table({"prompt": list("pqrst"), "answer": written}).filter(written.is_valid())
    pq.write_table(table, tmp_path / "a.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for task in (file_task(tmp_path / "a.parquet"), file_task(tmp_path / "saved", kind="hf_dataset")):
        assert [row.answer for row in load_rows(task)] == [0.1, -0.3, 72.0, 1.5e-5]


def test_numbers_of_few_bits_in_lists_and_mappings_are_what_was_written(tmp_path: Path) -> None:
    short = pa.float32()
    fields = {"list": pa.list_(short), "map": pa.map_(pa.string(), short), "one": pa.struct({"x": short})}
    kind = pa.struct(list(fields.items()))
    value = {"list": [0.1, None], "map": [("k", 0.3)], "one": {"x": -0.7}}
    pq.write_table(pa.table({"prompt": ["p"], "answer": pa.array([value], kind)}), tmp_path / "a.parquet")
    (row,) = load_rows(file_task(tmp_path / "a.parquet", reward="mine:function"))
    assert row.answer == value | {"map": {"k": 0.3}}
    assert cells(pa.array([0.1, None], short).dictionary_encode()) == [0.1, None]


def test_map_columns_are_mappings_wherever_they_are(tmp_path: Path) -> None:
    inner = pa.map_(pa.string(), pa.int64())
    kind = pa.map_(pa.string(), pa.list_(pa.struct({"m": inner})))
    answers = pa.array([[("a", [{"m": [("x", 1), ("y", None)]}, {"m": None}])], []], kind)
    numbers = pa.array([[(7, "seven")], None], pa.map_(pa.int64(), pa.string()))
    pq.write_table(pa.table({"prompt": ["p", "q"], "answer": answers, "n": numbers}), tmp_path / "a.parquet")
    rows = load_rows(file_task(tmp_path / "a.parquet", reward="mine:function"))
    assert [row.answer for row in rows] == [{"a": [{"m": {"x": 1, "y": None}}, {"m": None}]}, {}]
    agent = AgentTask(kind="agent", name="a", run="m:f", path=str(tmp_path / "a.parquet"))
    assert [row["n"] for row in load_records(agent)] == [{"7": "seven"}, None]
    lists = pa.map_(pa.list_(pa.int64()), pa.string())
    assert cells(pa.array([[([1], "v")]], lists)) == [[([1], "v")]]


MIXED: list[dict[str, Any]] = [
    {"prompt": CHAT[0], "answer": "x", "kept": {"list": ["x", 1], "map": {"a": "y"}}},
    {"prompt": "two?", "answer": 3, "kept": {"list": [], "map": {"b": [2.5]}}},
    {"prompt": "three?", "answer": "007", "kept": {"list": [None, True], "map": {"a": 1, "c": {}}}},
    {"prompt": "four?", "answer": "NaN", "kept": {"list": [], "map": {}}},
]
"""Rows whose columns hold values of several types."""


def test_columns_of_mixed_types_hold_the_same_values_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MIXED))
    data = datasets.load_dataset("json", data_files=str(path))["train"]
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for column in ("answer", "kept"):
        settings = {"reward": "mine:function", "answer_column": column}
        rows = load_rows(file_task(path, **settings))
        assert [row.answer for row in rows] == [row[column] for row in MIXED]
        for name, kind in (("folder", "hf_dataset"), ("saved", "hf_dataset"), ("a.parquet", "file")):
            assert load_rows(file_task(tmp_path / name, kind=kind, **settings)) == rows


@pytest.mark.parametrize("depth", [201, 505, 900])
@pytest.mark.parametrize("form", [("[", "]"), ('{"a":', "}")])
def test_a_value_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int, form: tuple[str, str]) -> None:
    path, (begin, end) = tmp_path / "a.jsonl", form

    def write(levels: int) -> None:
        path.write_text(f'{{"prompt": "p", "answer": 1, "other": {begin * levels}1{end * levels}}}\n')

    agent = AgentTask.model_validate({"kind": "agent", "name": "mine", "run": "m:f", "path": str(path)})
    loads: list[Callable[[], object]] = [
        lambda: load_rows(file_task(path, answer_column="other", reward="mine:function")),
        lambda: load_records(agent),
    ]
    for load in loads:
        write(depth)
        with pytest.raises(
            UserError, match=r"a\.jsonl:1: column 'other': its lists and mappings have more than 200 le"
        ):
            load()
        write(200)
        load()


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([2**62], pa.timestamp("us")), "of type timestamp[us] has a value that Python cannot hold: Overflow"),
        (pa.array([[10**8]], pa.list_(pa.date32())), "has a value that Python cannot hold: OverflowError: date value"),
        (pa.array([1], pa.timestamp("us", tz="Mars/X")), "of type timestamp[us, tz=Mars/X] has a value that Python"),
        (
            pa.array([b"\xff"]).view(pa.string()),
            "of type string has a value that Python cannot hold: UnicodeDecodeError",
        ),
    ],
)
def test_a_value_of_parquet_that_python_cannot_hold_is_refused_with_its_column(
    tmp_path: Path, column: pa.Array, says: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "answer": column}), path)
    with pytest.raises(UserError, match=re.escape(f"{path}: column 'answer' ")) as caught:
        load_rows(file_task(path, reward="mine:function"))
    assert says in str(caught.value)


def test_dates_in_a_folder_of_jsonl_stay_dates(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "train.jsonl"
    answers = [["2024-01-02", "1999-12-31"], ["2024-01-03"]]
    path.write_text("".join(json.dumps({"prompt": "p", "answer": answer}) + "\n" for answer in answers))
    rows = load_rows(file_task(path.parent, kind="hf_dataset", reward="mine:function"))
    assert [row.answer for row in rows] == answers


def test_midnight_among_times_stays_a_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "train.jsonl"
    days, times = ["2024-01-02", "2024-01-03"], ["2024-01-02T00:00:00", "2024-01-03T10:30:00"]
    answers = [{"day": day, "at": [time], "both": {"x": time}} for day, time in zip(days, times, strict=True)]
    rows = [{"prompt": "p", "answer": answer, "time": answer["at"][0]} for answer in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for column in ("answer", "time"):
        task = file_task(path.parent, kind="hf_dataset", reward="mine:function", answer_column=column)
        assert [row.answer for row in load_rows(task)] == [row[column] for row in rows]


def test_arrays_of_several_dimensions_are_read_as_lists(tmp_path: Path) -> None:
    features = {"prompt": datasets.Value("string"), "answer": datasets.Array2D((1, 2), "float32")}
    written = [[[0.1, 2.0]], [[-0.3, 4.0]]]
    data = datasets.Dataset.from_dict({"prompt": ["p", "q"], "answer": written}, datasets.Features(features))
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for name, kind in (("saved", "hf_dataset"), ("a.parquet", "file")):
        rows = load_rows(file_task(tmp_path / name, kind=kind, reward="mine:function"))
        assert [row.answer for row in rows] == written


def test_what_is_nested_too_deeply_to_be_read_as_json_is_text_or_named(tmp_path: Path) -> None:
    deep = "[" * 50_000
    answers = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array([deep]))
    pq.write_table(pa.table({"prompt": ["p"], "answer": answers}), tmp_path / "a.parquet")
    assert load_rows(file_task(tmp_path / "a.parquet")) == [TaskRow("p", deep)]
    (tmp_path / "a.jsonl").write_text(f'{GOOD}{{"prompt": "p", "answer": {deep}{"]" * 50_000}}}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: its lists and mappings are nested too deeply$"):
        load_rows(file_task(tmp_path / "a.jsonl"))


def test_a_file_without_an_answer_column_has_no_answers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n')
    assert load_rows(file_task(tmp_path / "a.jsonl", answer_column=None)) == [TaskRow("p", None)]


GOOD = '{"prompt": "p", "answer": 1}\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        (GOOD + "\n{oops}\n", r"a\.jsonl:3: expected one JSON object per line: .*, at character 2$"),
        (GOOD + "[1]\n", r"a\.jsonl:2: expected a JSON object, got list"),
        (GOOD + '{"promt": "p", "answer": 1}\n', r"a\.jsonl:2: no column 'prompt' .*did you mean promt"),
        (GOOD + '{"prompt": "p"}\n', r"a\.jsonl:2: no column 'answer' .*answer_column: null"),
        (
            GOOD + '{"prompt": null, "answer": 1}\n',
            r"a\.jsonl:2: column 'prompt' must be text or a list of chat messages, got null",
        ),
        (
            GOOD + '{"prompt": [{"role": "user"}], "answer": 1}\n',
            r"a\.jsonl:2: .*message 0 must have a text as content, got null",
        ),
        (GOOD + '{"prompt": " ", "answer": 1}\n', r"a\.jsonl:2: column 'prompt' is empty"),
        (GOOD + '{"prompt": "p", "answer": null}\n', r"a\.jsonl:2: column 'answer' is null"),
        (GOOD + '{"prompt": "p", "answer": NaN}\n', r"a\.jsonl:2: .*NaN is not JSON"),
        (GOOD + '{"prompt": "p", "answer": 1e999}\n', r"a\.jsonl:2: .*finite"),
        (GOOD.encode() + b'{"prompt": "\xff", "answer": 1}\n', r"a\.jsonl:2: .*utf-8"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str | bytes, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=says):
        load_rows(file_task(path))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompts": ["p"], "answer": ["1"]}, r"a\.parquet: no column 'prompt' .*did you mean prompts"),
        (
            {"prompt": ["p", None], "answer": ["1", "2"]},
            r"a\.parquet, row 2: column 'prompt' must be text or a list of chat messages, got null",
        ),
        ({"prompt": ["p", "q"], "answer": ["1", None]}, r"a\.parquet, row 2: column 'answer' is null"),
        (
            {"prompt": [1], "answer": ["1"]},
            r"a\.parquet, row 1: column 'prompt' must be text or a list of chat messages, got int",
        ),
        ({"prompt": ["p"], "answer": [b"1"]}, r"a\.parquet, row 1: column 'answer': .*got bytes"),
        ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "holds no prompts"),
    ],
)
def test_a_wrong_parquet_row_is_named(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=says):
        load_rows(file_task(tmp_path / "a.parquet"))


HALF = "\ud83d"
"""Half of a surrogate pair, which cannot be encoded."""


def test_half_of_a_surrogate_pair_reaches_tokenizer_and_messages_as_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answers = [HALF, {"a" + HALF: [HALF]}, "\ud83d\ude00"]
    chat = [{"role": role, "content": role + HALF} for role in ("system", "user", "assistant")]
    prompts = [f"one{HALF}?", [*chat, {"role": "user", "content": f"two{HALF}?"}], "three \ud83d\ude00"]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = FileItems(file_task(path, reward="mine:function"), 0)
    assert [items.question(index) for index in range(3)] == ["one\ufffd?", "two\ufffd?", "three \U0001f600"]
    given = [items.reward_input(index)["answer"] for index in range(3)]
    assert given == ["\ufffd", {"a\ufffd": ["\ufffd"]}, "\U0001f600"]
    assert [one["content"] for one in items.earlier(1)] == ["system\ufffd", "user\ufffd", "assistant\ufffd"]
    template = ChatTemplate(load_tokenizer(str(save_tiny_model(tmp_path / "model"))))
    for index in range(3):
        messages = [*items.earlier(index), {"role": "user", "content": items.question(index)}]
        assert len(template.tokens(messages)) > len(items.question(index))
        sent = [messages, items.reward_input(index)]
        assert msgpack.unpackb(msgpack.packb(sent)) == sent


def programs(path: Path, *answers: Any) -> FileTask:
    path.write_text("".join(json.dumps({"prompt": "Write add.", "tests": answer}) + "\n" for answer in answers))
    return file_task(path, reward="python_tests", answer_column="tests", sandbox={"command": ["env"]})


def test_a_list_of_tests_is_joined(tmp_path: Path) -> None:
    several = ["assert add(1, 2) == 3", "for n in range(3):\n    assert add(n, 0) == n"]
    rows = load_rows(programs(tmp_path / "a.jsonl", several[0], several))
    assert [row.answer for row in rows] == [several[0], "\n".join(several)]
    pq.write_table(pa.table({"prompt": ["p"], "answer": [several]}), tmp_path / "a.parquet")
    task = file_task(tmp_path / "a.parquet", reward="python_tests", sandbox={"command": ["env"]})
    assert load_rows(task)[0].answer == rows[1].answer
    plain = task.model_copy(update={"reward": "mine:function", "sandbox": None})
    assert load_rows(plain)[0].answer == several  # functions get lists as they are


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ({"inputs": ["1 2"], "outputs": ["3"]}, "dict"),
        ('{"inputs": ["1 2"], "outputs": ["3"]}', "JSON text of dict"),
        ('["assert add(1, 2) == 3"]', "JSON text of list"),
        ("3", "JSON text of int"),
        (3, "int"),
        (True, "bool"),
        (["assert add(1, 2) == 3", 3], "a list with int"),
        (["assert add(1, 2) == 3", '"3"'], "a list with JSON text of str"),
        ([], "no test"),
        ([" ", "\n"], "no test"),
        (" ", "no test"),
    ],
)
def test_what_is_no_test_is_named_with_its_line(tmp_path: Path, answer: Any, got: str) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(UserError) as caught:
        load_rows(programs(path, "assert add(1, 2) == 3", answer))
    expected = "reward python_tests expects Python that uses the program, or a list of such texts"
    assert str(caught.value) == f"{path}:2: column 'tests': {expected}, got {got}"


@pytest.mark.parametrize("reward", ["math_verify", "exact_match"])
@pytest.mark.parametrize(
    ("answer", "got"), [({"ground_truth": "72", "style": "rule"}, "dict"), (["Paris", "paris"], "list"), ([], "list")]
)
def test_what_no_completion_could_equal_is_named_with_its_line(
    tmp_path: Path, reward: str, answer: Any, got: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "answer": one}) + "\n" for one in ("72", answer)))
    said = f"{path}:2: column 'answer': reward {reward} compares with one text or number, got {got}"
    with pytest.raises(UserError, match=re.escape(said)):
        load_rows(file_task(path, reward=reward))
    assert len(load_rows(file_task(path, reward="mine:function"))) == 2


@pytest.mark.parametrize("reward", ["math_verify", "exact_match"])
def test_a_new_run_with_a_blank_answer_is_refused_with_its_line(tmp_path: Path, reward: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "answer": one}) + "\n" for one in ("72", " \n")))

    def problems(reward: str, resumed: bool = False) -> list[str]:
        run = RunConfig.model_validate({"tasks": [file_task(path, reward=reward)]})
        return list(check_tasks(run, rendered=False, resumed=resumed))

    said = f"tasks.0: {path}:2: column 'answer' is empty; every prompt needs its answer"
    assert problems(reward) == [said]
    assert problems(reward, resumed=True) == []  # earlier versions began such runs
    assert problems("builtins:print") != [said]


def test_unreadable_places_are_explained(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no Parquet file")
    (tmp_path / "a.csv").write_text("prompt,answer\np,1\n")
    for name, kind, says in [
        ("missing.jsonl", "file", "task 'mine': path: no file"),
        ("broken.parquet", "file", "not a readable Parquet file"),
        ("a.csv", "file", "must end in .jsonl, .ndjson or .parquet; kind: hf_dataset reads the folder of a CSV file"),
        ("", "file", "kind: hf_dataset reads folders"),
        ("nowhere", "hf_dataset", "cannot load the data set .*: there is no such folder"),
        ("broken.parquet", "hf_dataset", r"path: .*broken\.parquet is a file; kind: file reads it"),
        ("a.csv", "hf_dataset", r"path: .*a\.csv is a file; expected a folder or a name of the Hub"),
    ]:
        with pytest.raises(UserError, match=says):
            load_rows(file_task(tmp_path / name, kind=kind))


def test_a_name_that_is_no_folder_and_not_of_the_hub_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)

    def unreachable(*_: object, **__: object) -> None:
        log.warning("Retrying in 8s [Retry 5/5].")
        raise ConnectionError("Couldn't reach 'data/nosuch' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    said = "task 'mine': path: cannot load the data set 'data/nosuch': there is no folder data/nosuch here, and as a "
    with pytest.raises(UserError, match=said + "data set of the Hub: Couldn't reach"):
        load_rows(file_task(Path("data/nosuch"), kind="hf_dataset"))
    assert not caplog.records
    log.warning("the level is what it was")
    assert caplog.records
