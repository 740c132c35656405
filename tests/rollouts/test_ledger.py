"""The ledger's rows as another program reads them, and a write that fails: nothing is half done."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.errors import RunFailed
from streamrl.rollouts.ledger import KnownSteps, Ledger, pack_content, unpack_content
from tests.rollouts.test_rollouts import LATE, finish_and_score, make_group, make_sample
from tests.run_dir.conftest import file_size_limit


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """What is committed, read by a connection of its own."""
    with contextlib.closing(sqlite3.connect(path)) as reader:
        return reader.execute(sql).fetchall()


SAMPLES = (
    "SELECT sample_id, state, reward, error, void_cause, step, content "
    "FROM samples LEFT JOIN contents USING (sample_id) ORDER BY sample_id"
)


def test_an_acknowledged_sample_survives_a_power_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    assert rows(path, "PRAGMA journal_mode") == [("wal",)]
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_each_state_is_committed_with_what_belongs_to_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger, group = Ledger(path), make_group("g", (0.5, None), step=7)
    assert not ledger.has("g.0")
    ledger.issue([("g.0", "g", b""), ("g.1", "g", b"")])
    assert ledger.has("g.0") and not ledger.has("g.2")
    assert rows(path, SAMPLES) == [(f"g.{n}", "issued", None, None, None, None, None) for n in (0, 1)]
    assert rows(path, "SELECT DISTINCT group_id FROM samples") == [("g",)]
    ledger.score(group.members())  # not finished: nothing to score
    assert ledger.counts() == {"issued": 2}
    assert ledger.finish([(m.sample, m.sample.sample_id.encode()) for m in group.members()]) == {"g.0", "g.1"}
    assert rows(path, SAMPLES) == [(f"g.{n}", "finished", None, None, None, None, f"g.{n}".encode()) for n in (0, 1)]
    ledger.score(group.members())
    scored = [
        ("g.0", "scored", 0.5, None, None, None, b"g.0"),
        ("g.1", "scored", None, LATE.text, "timeout", None, b"g.1"),
    ]
    assert rows(path, SAMPLES) == scored
    assert ledger.finish([(group.members()[0].sample, b"again")]) == set() and rows(path, SAMPLES) == scored
    ledger.train(7, 6, [group], 12.5)
    assert rows(path, SAMPLES) == [
        ("g.0", "trained", 0.5, None, None, 7, None),
        ("g.1", "dropped", None, LATE.text, "timeout", 7, None),
    ]
    assert rows(path, "SELECT * FROM steps") == [(7, 6, 1, 12.5)]
    assert ledger.counts_void() == {"timeout": 1} and ledger.trained_ids() == ["g.0"]


def test_a_ledger_of_before_void_rewards_gets_their_column_and_its_contents_their_table(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as older:
        older.execute("CREATE TABLE samples (sample_id, group_id, step, state, reward, error, content)")
        older.execute("INSERT INTO samples VALUES ('g.0', 'g', 1, 'trained', 0.5, NULL, NULL)")
        older.execute("INSERT INTO samples VALUES ('g.1', 'g', NULL, 'finished', NULL, NULL, x'7A')")
        older.commit()
    for _ in range(2):  # opened again, it has them
        ledger = Ledger(path)
        found = [("g.0", "trained", 0.5, None, None, 1, None), ("g.1", "finished", None, None, None, None, b"z")]
        assert rows(path, SAMPLES) == found
        ledger.close()


def test_pages_of_contents_are_used_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    pages = []
    for step in (1, 2):
        groups = [make_group(f"{step}.{n}", step=step) for n in range(8)]
        for group in groups:
            finish_and_score(ledger, group, content=bytes(3000))
        ledger.train(step, step, groups, 0.0)
        ledger.checkpointed(step)
        pages += ledger._db.execute("PRAGMA page_count").fetchone()
    assert pages[1] <= pages[0] + 2, "16 samples, whose rows need about 100 bytes each"


def test_what_a_ledger_of_before_checksums_has_kept_is_generated_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    for name in ("g.0", "g.1"):  # the first one is kept over a resume already
        ledger.rewind(100)
        ledger.issue([(name, "g", b"prompt")])
        ledger.finish([(make_sample(name), name.encode())])
    for table in ("samples", "kept"):
        ledger._db.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    ledger.close()
    for _ in range(2):  # opened again, it has the column
        ledger = Ledger(path)
        assert ledger.kept(["g.0"], b"prompt") == []
        ledger.rewind(100)
        assert ledger.count_kept() == 0
        ledger.close()


def test_kept_content_that_is_damaged_or_anothers_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    names = ["g.0", "g.1", "g.2"]
    ledger.issue([(name, "g", b"prompt") for name in names])
    ledger.finish([(make_sample(name), name.encode()) for name in names])
    ledger.rewind(100)
    assert len(ledger.kept(names, b"prompt")) == 3
    ledger._db.execute("UPDATE kept SET content = x'ff' WHERE sample_id = 'g.0'")
    other = "SELECT content, checksum FROM kept WHERE sample_id = 'g.2'"
    ledger._db.execute(f"UPDATE kept SET (content, checksum) = ({other}) WHERE sample_id = 'g.1'")
    assert ledger.kept(names, b"prompt") == [("g.2", b"g.2")]
    assert [f"kept sample {name} is damaged" in caplog.text for name in names] == [True, True, False]


def test_a_ledger_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    words = re.escape(f"cannot open the ledger {tmp_path / 'ledger.sqlite'}: ") + r".*\(see docs: E1007\)$"
    with file_size_limit(8), pytest.raises(RunFailed, match=words):
        Ledger(tmp_path / "ledger.sqlite")
    assert Ledger(tmp_path / "ledger.sqlite").counts() == {}
    with pytest.raises(RunFailed, match=r"cannot open the ledger .*: unable to open database file$"):
        Ledger(tmp_path)  # more room would not help


def test_a_closed_ledger_is_one_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issue([("g.0", "g", b"")])
    ledger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_only_new_samples_of_a_batch_are_finished(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issue([("g.0", "g", b""), ("g.1", "g", b"")])
    ledger.finish([(make_sample("g.0"), b"first")])
    both = [(make_sample(f"g.{n}"), b"second") for n in range(3)]
    assert ledger.finish([*both, (make_sample("g.1"), b"third")]) == {"g.1"}
    contents = rows(tmp_path / "ledger.sqlite", "SELECT sample_id, content FROM contents ORDER BY 1")
    assert contents == [("g.0", b"first"), ("g.1", b"second")]


def test_a_write_that_fails_changes_nothing_names_the_file_and_the_next_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    with pytest.raises(RunFailed, match=r"cannot write the ledger .*ledger\.sqlite: UNIQUE.* other rows .*E1009\)$"):
        ledger.issue([("a", "g", b""), ("b", "g", b""), ("a", "g", b"")])
    assert ledger.counts() == {} and not ledger._db.in_transaction
    ledger.issue([("a", "g", b"")])
    assert ledger.counts() == {"issued": 1}
    # the second statement of a step fails: neither samples nor step are recorded
    for name in ("x", "y"):
        finish_and_score(ledger, make_group(name))
    ledger.train(1, 1, [make_group("x")], 0.0)
    with pytest.raises(RunFailed, match="UNIQUE"):
        ledger.train(1, 1, [make_group("y")], 0.0)
    assert ledger.counts() == {"issued": 1, "trained": 2, "scored": 2}


def test_a_step_whose_account_does_not_balance_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    known, unknown = make_group("x"), make_group("y", (1.0, 0.0, 2.0))
    finish_and_score(ledger, known)
    with pytest.raises(RunFailed, match="step 3 trained 2 samples and dropped 3, of which 2 are scored"):
        ledger.train(3, 3, [known], 0.0, [unknown])
    with pytest.raises(RunFailed, match="trained 4 samples and dropped 0, of which 2 are scored"):
        ledger.train(3, 3, [known, known], 0.0)  # twice in one step
    assert ledger.counts() == {"scored": 2} and rows(ledger.path, "SELECT * FROM steps") == []


def test_rewinding_keeps_earlier_steps_whole_and_removes_the_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    for step, name in enumerate("abc", start=1):
        finish_and_score(ledger, make_group(name, (1.0, None, 0.0)))
        ledger.train(step, step, [make_group(name, (1.0, None, 0.0))], 0.0)
    ledger.issue([("d.0", "d", b"")])
    assert ledger.rewind(2) == 4  # not the two void ones
    assert rows(path, "SELECT sample_id, step FROM samples ORDER BY 1") == [("a.0", 1), ("a.1", 1), ("a.2", 1)]
    assert rows(path, "SELECT step FROM steps") == [(1,)]
    assert ledger.rewind(2) == 0


def test_none_is_known_as_the_newest_checkpoint_until_there_is_one_and_a_regular_one_before_a_later_step(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.known() == KnownSteps(0, 0)
    due = []
    for step in range(1, 6):
        due.append(ledger.known().due(2))
        ledger.train(step, step, [], 0.0)
    assert [*due, ledger.known().due(2)] == [0, 0, 0, 2, 2, 4]


def test_content_is_bytes_and_back() -> None:
    content = pack_content({"text": "abc"}, {"tokens": np.arange(3, dtype=np.int32)})
    body, arrays = unpack_content(content)
    assert isinstance(content, bytes) and body == {"text": "abc"} and arrays["tokens"].tolist() == [0, 1, 2]
