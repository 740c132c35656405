"""Folders of CSV files: cells are the texts that were written, and no field gets lost."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import datasets
import pytest

from streamrl.errors import UserError
from streamrl.tasks.files import TaskRow, load_rows
from tests.tasks.test_files import _offline, file_task  # noqa: F401


def declare(folder: Path, answer: str) -> None:
    """Write a card that declares the columns' types, of which `answer` is the answer's."""
    features = f"  - {{name: prompt, dtype: string}}\n  - {{name: answer, dtype: {answer}}}\n"
    (folder / "README.md").write_text(f"---\ndataset_info:\n  features:\n{features}---\n")


def test_cells_of_a_folder_of_csv_are_the_texts_that_were_written(tmp_path: Path) -> None:
    texts = ["007", "NA", "None", "1e400", "true", "2024-01-02", 'x, "y"\nz', "12345678901234567890"]
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer", "in train alone"], *(["p", text, ""] for text in texts)])
    (tmp_path / "a" / "test.csv").write_text("prompt,answer\np,7\np,\n")
    datasets.load_dataset(str(tmp_path / "a"))  # what it has guessed is in its cache
    task = file_task(tmp_path / "a", kind="hf_dataset", reward="mine:function")
    assert [row.answer for row in load_rows(task)] == texts
    with pytest.raises(UserError, match=r"split test\), row 2: column 'answer' is null; every prompt needs its answer"):
        load_rows(task.model_copy(update={"split": "test"}))


def test_types_that_the_card_of_a_folder_of_csv_declares_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text("prompt,answer\np,007\n")
    declare(tmp_path / "a", answer="int64")
    assert load_rows(file_task(tmp_path / "a", kind="hf_dataset")) == [TaskRow("p", 7)]


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(
    ("rows", "line", "fields"),
    [
        ("How many legs?,4,animals\nWhat is 2+3?,5,sums\n", 2, 3),
        ("Tom eats one of 3 apples, how many stay?,2\n", 2, 3),
        ("p,1,2,3\n", 2, 4),
        ('"two\nlines",4\np,2,\n', 4, 3),
    ],
)
def test_a_row_of_csv_with_more_fields_than_the_header_is_refused(
    tmp_path: Path, typed: bool, rows: str, line: int, fields: int
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train-0.csv").write_text("prompt,answer\np,1\n")
    (tmp_path / "a" / "train-1.csv").write_text(f"prompt,answer\n{rows}")
    if typed:
        declare(tmp_path / "a", answer="string")
    where = rf"/a/train-1\.csv:{line}: expected 2 fields, as the header has, got {fields}"
    with pytest.raises(UserError, match=where):
        load_rows(file_task(tmp_path / "a", kind="hf_dataset"))


def test_a_compressed_csv_whose_rows_have_more_fields_than_the_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv.gz").write_bytes(gzip.compress(b"prompt,answer\np,1,2\n"))
    with pytest.raises(UserError, match=r"'mine': path: .*a row has more fields than the header of its file"):
        load_rows(file_task(tmp_path / "a", kind="hf_dataset"))


def test_a_column_that_the_card_of_a_folder_of_csv_names_as_the_index_stays_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text("prompt,answer\n7,p,1\n8,q,2\n".replace("prompt", "number,prompt"))
    card = "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  index_col: 0\n---\n"
    (tmp_path / "a" / "README.md").write_text(card)
    rows = load_rows(file_task(tmp_path / "a", kind="hf_dataset"))
    assert [(row.prompt, row.answer) for row in rows] == [("p", "1"), ("q", "2")]
