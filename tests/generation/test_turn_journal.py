"""The turn journal: what a later service gets of the turns that an earlier one has seen to their end."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from streamrl.generation.site.turn_journal import ARRAYS, KeptTurn, TurnJournal, turn_key
from streamrl.protocol.site_instance import FinishedSample

PROMPT = np.arange(5, dtype=np.int32)
KEY = turn_key(7, PROMPT)


def kept(turn_id: str = "g.000/aa.0", *versions: int) -> KeptTurn:
    sample = FinishedSample(
        **dict(sample_id=turn_id, group_id="g", finish_reason="stop", site="here", instance="here-regular-0"),
        **dict(pool="regular", route="tail", t_queued=1.0, t_dispatched=2.0, t_first_token=3.0),
        **dict(t_finished=4.0, text="\u00e9\x00", cached_tokens=3),
    )
    values = {"completion_tokens": [9, 2], "logprobs": [-0.25, -1e-7], "token_versions": versions or (3, 4)}
    return KeptTurn(sample, {name: np.asarray(values[name], kind) for name, kind in ARRAYS.items()})


def found(journal: TurnJournal, episode: str = "g.000", version: int | None = 9) -> KeptTurn:
    turn = journal.find(episode, KEY, version)
    assert turn is not None
    return turn


def filled(path: Path) -> TurnJournal:
    journal = TurnJournal(path)
    for episode in ("g.000", "g.001"):
        journal.add(episode, KEY, kept(f"{episode}/aa.0"))
    return journal


def test_a_later_journal_has_every_value_of_what_was_written(tmp_path: Path) -> None:
    filled(tmp_path / "turns").close()
    turn, before = found(TurnJournal(tmp_path / "turns")), kept()
    assert turn.sample == before.sample
    for name, kind in ARRAYS.items():
        assert turn.arrays[name].dtype == kind and np.array_equal(turn.arrays[name], before.arrays[name])


def test_a_call_is_known_by_its_seed_and_every_token_of_its_prompt(tmp_path: Path) -> None:
    journal = filled(tmp_path / "turns")
    assert turn_key(7, PROMPT.astype(np.int64)) == KEY
    for seed, prompt in ((8, PROMPT), (7, PROMPT[:-1]), (7, PROMPT[::-1])):
        assert journal.find("g.000", turn_key(seed, prompt), 9) is None
    assert journal.find("g.002", KEY, 9) is None
    found(journal, "g.000"), found(journal, "g.001")


@pytest.mark.parametrize(("version", "usable"), [(9, True), (4, True), (3, False), (None, False)])
def test_turns_of_weights_that_are_no_more_are_left_out(version: int | None, usable: bool, tmp_path: Path) -> None:
    assert (filled(tmp_path / "turns").find("g.000", KEY, version) is not None) == usable


def test_a_committed_episode_is_forgotten_in_the_file_too(tmp_path: Path) -> None:
    journal = filled(tmp_path / "turns")
    journal.flush()
    journal.forget("g.000")
    journal.add("g.002", KEY, kept("g.002/aa.0"))
    journal.forget("g.002")  # before it was written
    journal.close()
    later = TurnJournal(tmp_path / "turns")
    assert later.find("g.000", KEY, 9) is None and later.find("g.002", KEY, 9) is None
    found(later, "g.001")


def test_a_damaged_turn_is_dropped_and_the_others_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "turns").close()
    with sqlite3.connect(tmp_path / "turns") as db:
        ((whole,),) = db.execute("SELECT kept FROM turns WHERE episode = 'g.000'")
        damaged = bytes([*whole[:-1], whole[-1] ^ 1])
        db.execute("UPDATE turns SET kept = ? WHERE episode = 'g.000'", (damaged,))
    db.close()
    later = TurnJournal(tmp_path / "turns")
    assert later.find("g.000", KEY, 9) is None and "damaged" in caplog.text
    found(later, "g.001")


def test_what_a_full_disk_did_not_take_is_written_when_it_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = filled(tmp_path / "turns")
    journal.flush()
    assert journal._db is not None
    ((pages,),) = journal._db.execute("PRAGMA page_count")
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    keys = [turn_key(n, PROMPT) for n in range(40)]
    for n, key in enumerate(keys):
        journal.add("g.002", key, kept(f"g.002/{n}.0"))
        journal.add("g.003", key, kept(f"g.003/{n}.0"))
    journal.forget("g.000")
    journal.flush()
    journal.flush()
    assert caplog.messages == ["the turn journal cannot be written: database or disk is full"]
    journal.forget("g.003")  # it ends meanwhile
    meanwhile = TurnJournal(tmp_path / "turns")
    found(meanwhile, "g.000"), found(meanwhile, "g.001")
    assert not any(meanwhile.find(episode, key, 9) for episode in ("g.002", "g.003") for key in keys)
    journal._db.execute("PRAGMA max_page_count = 1000")
    journal.close()
    later = TurnJournal(tmp_path / "turns")
    found(later, "g.001")
    assert all(later.find("g.002", key, 9) for key in keys) and later.find("g.000", KEY, 9) is None
    assert not any(later.find("g.003", key, 9) for key in keys)


def test_an_unreadable_file_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "turns").write_bytes(b"no database" * 500)
    filled(tmp_path / "turns").close()
    assert "unreadable" in caplog.text
    later = TurnJournal(tmp_path / "turns")
    found(later, "g.000"), found(later, "g.001")


def test_turns_of_newer_weights_are_forgotten_for_good(tmp_path: Path) -> None:
    other = turn_key(8, PROMPT)
    journal = filled(tmp_path / "turns")
    journal.add("g.000", other, kept("g.000/aa.1", 4, 5))
    journal.flush()
    journal.add("g.001", other, kept("g.001/aa.1", 6, 6))  # not in the file yet
    journal.forget_newer(4)
    journal.close()
    for left in (journal, TurnJournal(tmp_path / "turns")):
        assert left.find("g.000", other, 9) is None and left.find("g.001", other, 9) is None
        found(left), found(left, "g.001")
