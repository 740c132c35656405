"""The token journal: what it was told it gives back, also to the next service; what has ended is forgotten."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl.generation.site.journal_file import open_journal
from streamrl.generation.site.token_journal import TokenJournal, drawn_from
from streamrl.protocol.samples import progress_from_wire, progress_to_wire
from streamrl.rollouts.types import PartialSample, SampleRequest

SOURCE = b"prompt and settings"


def part(sample_id: str, first: int, count: int) -> PartialSample:
    tokens = np.arange(first, first + count, dtype=np.int32)
    return PartialSample(sample_id, tokens, (-tokens / 7).astype(np.float32), tokens // 4, 10.0, 11.0)


def assert_holds(journal: TokenJournal, sample_id: str, count: int) -> None:
    kept, whole = journal.kept(sample_id), part(sample_id, 0, count)
    assert kept is not None
    assert kept.completion_tokens.tolist() == whole.completion_tokens.tolist()
    assert kept.logprobs.tobytes() == whole.logprobs.tobytes()
    assert kept.token_versions.tolist() == whole.token_versions.tolist()
    assert (kept.t_dispatched, kept.t_first_token) == (10.0, 11.0)


def test_parts_add_up_and_what_comes_twice_counts_once(tmp_path: Path) -> None:
    journal = TokenJournal(tmp_path / "journal.sqlite")
    assert journal.kept("a") is None
    assert journal.add(0, part("a", 0, 5)) and journal.add(3, part("a", 3, 6))
    assert not journal.add(20, part("a", 20, 2))  # of no use: what lies before it is missing
    assert journal.add(0, part("a", 0, 4))
    assert_holds(journal, "a", 9)


def test_the_next_service_finds_what_was_written_and_not_what_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for name in ("a", "b", "c"):
        journal.add(0, part(name, 0, 3))
    journal.flush()
    journal.add(3, part("a", 3, 4))
    journal.forget(["b", "unknown"])
    journal.add(0, part("d", 0, 2))
    journal.forget(["d"])
    journal.flush()
    journal.add(7, part("a", 7, 1))  # not written: lost with the process
    found = TokenJournal(path)
    assert_holds(found, "a", 7)
    assert_holds(found, "c", 3)
    assert found.kept("b") is None and found.kept("d") is None


def test_tokens_of_an_ended_request_stay_in_the_file_until_its_sample_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for name in ("a", "b", "c"):
        journal.add(0, part(name, 0, 3))
    journal.ended("a")  # before anything of it is in the file
    journal.flush()
    for name in ("b", "c", "unknown"):
        journal.ended(name)
    assert all(journal.kept(name) is None for name in ("a", "b", "c", "unknown"))
    assert_holds(TokenJournal(path), "a", 3)
    for name in ("a", "b", "unknown"):
        journal.committed(name)
    journal.flush()
    found = TokenJournal(path)
    assert all(found.kept(name) is None for name in ("a", "b", "unknown"))
    assert_holds(found, "c", 3)


def test_a_refused_sample_that_is_given_again_keeps_the_tokens_of_its_second_attempt_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    journal.add(0, part("a", 0, 3))
    journal.add(3, part("a", 3, 5))
    journal.flush()
    journal.ended("a")
    assert journal.begin("a", SOURCE, 1.0) is None
    journal.add(0, part("a", 0, 2))  # before the refusal is acknowledged
    journal.committed("a")
    assert journal.add(2, part("a", 2, 2))
    journal.close()
    assert_holds(TokenJournal(path), "a", 4)


def test_tokens_are_continued_only_under_the_prompt_and_the_settings_that_they_were_drawn_with(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    request = SampleRequest("a", "g", np.arange(4, dtype=np.int32), 1, 1.0)
    source = drawn_from(request, "settings")
    others = [
        drawn_from(replace(request, prompt_tokens=np.arange(5, dtype=np.int32)), "settings"),
        drawn_from(replace(request, temperature=0.0), "settings"),
        drawn_from(request, "other settings"),
    ]
    for other in others:
        journal = TokenJournal(path)
        assert journal.begin("a", source, 1.0) is None
        journal.add(0, part("a", 0, 3))
        journal.flush()
        assert journal.begin("a", source, 1.0) is not None
        journal.ended("a")  # it is in the file alone
        journal.close()
        later = TokenJournal(path)
        assert later.begin("b", source, 1.0) is None and later.begin("a", source, 1.0) is not None
        assert later.begin("a", other, 1.0) is None
        later.close()
        assert TokenJournal(path).kept("a") is None
    journal.forget("ab")
    journal.ended("b")
    assert journal._origins == {}


def test_the_time_of_issue_is_that_of_the_first_tokens_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    def issued(t_queued: float, tokens: int, source: bytes = SOURCE) -> float | None:
        """The time that a service which gets the request then has of it; afterwards it has so many tokens."""
        journal = TokenJournal(path)
        had = journal.begin("a", source, t_queued)
        journal.add(0, part("a", 0, tokens))
        journal.close()
        return None if had is None else had[1]

    assert [issued(1.0, 0), issued(2.0, 3)] == [None, None]
    assert [issued(3.0, 5), issued(4.0, 5)] == [2.0, 2.0]
    assert [issued(5.0, 2, b"another prompt"), issued(6.0, 2, b"another prompt")] == [None, 5.0]


def test_a_journal_of_an_earlier_version_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    TokenJournal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE token_parts DROP COLUMN t_queued")
    journal = TokenJournal(path)
    journal.add(0, part("a", 0, 2))
    journal.close()
    assert_holds(TokenJournal(path), "a", 2)


def test_a_request_that_is_made_again_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    journal.add(0, part("a", 0, 8))
    journal.flush()
    journal.forget(["a"])
    journal.add(0, part("a", 0, 2))
    journal.close()
    assert_holds(TokenJournal(path), "a", 2)


def test_a_file_that_cannot_be_read_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"no database at all" * 300)
    journal = TokenJournal(path)
    journal.add(0, part("a", 0, 2))
    journal.close()
    assert_holds(TokenJournal(path), "a", 2)


def test_a_file_that_cannot_be_opened_for_now_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    journal.add(0, part("a", 0, 2))
    journal.close()
    in_the_way = tmp_path / "journal.sqlite-wal"
    in_the_way.mkdir()  # SQLite cannot open its file, as when the process has no more descriptors
    second = TokenJournal(path)
    assert second.kept("a") is None and "kept in memory alone: unable to open" in caplog.text
    second.add(0, part("b", 0, 3))
    second.flush()
    second.ended("b")
    second.close()
    in_the_way.rmdir()
    assert_holds(TokenJournal(path), "a", 2)


def test_a_file_that_the_disk_does_not_give_for_now_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    journal.add(0, part("a", 0, 2))
    journal.close()
    errors = [sqlite3.OperationalError("disk I/O error")]
    errors[0].sqlite_errorcode = sqlite3.SQLITE_IOERR_READ

    def load(db: sqlite3.Connection) -> None:
        if errors:
            raise errors.pop()

    open_journal(path, "", load).close()
    assert_holds(TokenJournal(path), "a", 2)


def test_what_a_full_disk_did_not_take_is_written_when_it_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for name in ("a", "b", "c"):
        journal.add(0, part(name, 0, 10))
    journal.flush()
    ((pages,),) = journal._db.execute("PRAGMA page_count")
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    journal.add(10, part("a", 10, 5000))
    journal.ended("b")
    journal.committed("b")
    journal.add(10, part("c", 10, 20))
    journal.ended("c")
    journal.flush()
    journal.flush()
    assert caplog.messages == ["the token journal cannot be written: database or disk is full"]
    assert {TokenJournal(path).kept(name) is None for name in ("a", "b", "c")} == {False}
    journal._db.execute("PRAGMA max_page_count = 1000")
    journal.add(5010, part("a", 5010, 10))
    journal.close()
    later = TokenJournal(path)
    assert_holds(later, "a", 5020)
    assert_holds(later, "c", 30)
    assert later.kept("b") is None


def test_nothing_of_a_file_that_is_damaged_in_the_middle_is_taken_for_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for n in range(300):
        journal.add(0, part(f"request {n:03}", 0, 100))
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) - len(whole) // 2))
    later = TokenJournal(path)
    in_memory = {n: one for n in range(300) if (one := later.kept(f"request {n:03}")) is not None}
    assert not in_memory
    later.add(0, part("request 000", 0, 120))
    later.close()
    assert_holds(TokenJournal(path), "request 000", 120)


def test_progress_over_the_wire_is_what_was_sent() -> None:
    sent = [(0, part("a", 0, 3)), (5, part("b", 5, 1)), (2, part("c", 2, 4))]
    found = progress_from_wire(*progress_to_wire(sent))
    assert [start for start, _ in found] == [0, 5, 2]
    for (_, one), (_, other) in zip(sent, found, strict=True):
        assert one.sample_id == other.sample_id
        assert one.completion_tokens.tolist() == other.completion_tokens.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.token_versions.tolist() == other.token_versions.tolist()
        assert (one.t_dispatched, one.t_first_token) == (other.t_dispatched, other.t_first_token)


def test_what_begins_before_its_request_is_not_added(tmp_path: Path) -> None:
    journal = TokenJournal(tmp_path / "journal.sqlite")
    assert not journal.add(-2, part("a", 0, 4)) and journal.kept("a") is None
    journal.close()


def test_bytes_that_were_changed_on_disk_are_no_tokens(tmp_path: Path) -> None:
    wrong = 0
    for seed in range(30):
        path = tmp_path / f"{seed}.sqlite"
        journal = TokenJournal(path)
        for name in "abcdefgh":
            for first in (0, 50, 100):
                journal.add(first, part(name, first, 50))
                journal.flush()
        journal.close()
        noise = np.random.default_rng(seed)
        content = bytearray(path.read_bytes())
        for start in noise.integers(200, len(content) - 64, size=4).tolist():
            content[start : start + 64] = noise.bytes(64)
        path.write_bytes(content)
        found = TokenJournal(path)
        for name in "abcdefgh":
            if (kept := found.kept(name)) is not None:
                assert_holds(found, name, len(kept.completion_tokens))
                wrong += len(kept.completion_tokens) < 150
            else:
                wrong += 1
    assert wrong > 0  # damage was done, and noticed


DAMAGE, LOSS = "UPDATE token_parts SET checksum = checksum + 1", "DELETE FROM token_parts"


def damage(path: Path, start: int, how: str = DAMAGE) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"{how} WHERE start = ?", (start,))


@pytest.mark.parametrize("how", [DAMAGE, LOSS])
def test_what_follows_a_damaged_or_missing_part_never_follows_another_draw(tmp_path: Path, how: str) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for first in (0, 10, 20):
        journal.add(first, part("a", first, 10))
        journal.flush()
    journal.close()
    damage(path, 10, how)
    second = TokenJournal(path)
    assert_holds(second, "a", 10)
    drawn = replace(part("a", 10, 10), completion_tokens=np.full(10, 7, np.int32))
    assert second.add(10, drawn)
    second.flush()
    second.close()
    kept = TokenJournal(path).kept("a")
    assert kept is not None and kept.completion_tokens.tolist() == [*range(10), *[7] * 10]


def test_nothing_stays_of_a_request_whose_first_part_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for first in (0, 10):
        journal.add(first, part("a", first, 10))
        journal.flush()
    journal.close()
    damage(path, 0)
    TokenJournal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT COUNT(*) FROM token_parts").fetchone() == (0,)


def test_requests_with_tokens_of_newer_weights_are_forgotten_for_good(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = TokenJournal(path)
    for name, count in (("a", 12), ("b", 13), ("c", 20)):  # of versions up to 2, 3 and 4
        journal.add(0, part(name, 0, 8))
        journal.add(8, part(name, 8, count - 8))
    journal.flush()
    journal.forget_newer(2)
    journal.flush()
    for left in (journal, TokenJournal(path)):
        assert_holds(left, "a", 12)
        assert left.kept("b") is None and left.kept("c") is None


def test_a_request_keeps_the_memory_of_its_own_tokens_alone_however_many_parts_it_came_in(tmp_path: Path) -> None:
    """Others' tokens, of the same messages, are not kept by the one that runs longest."""
    path = tmp_path / "journal.sqlite"
    journal, count = TokenJournal(path), 0
    counts = np.random.default_rng(7).integers(1, 40, 300).tolist()
    whole = np.arange(2 * sum(counts), dtype=np.uint8).reshape(-1, 2)
    for number, more in enumerate(counts):
        long = replace(part("long", count, more), experts=whole[count : count + more])
        other = replace(part(f"other {number}", 0, 500), experts=np.zeros((500, 2), np.uint8))
        message, arrays = progress_to_wire([(count, long), (0, other)])
        for start, found in progress_from_wire(message, arrays):
            assert journal.add(start, found)
        journal.ended(other.sample_id)
        count += more
    parts = [*journal._parts["long"], *(one for _, one in journal._new["long"])]
    held = [one for got in parts for one in (got.completion_tokens, got.logprobs, got.token_versions, got.experts)]
    assert all(one is not None and one.base is None for one in held)
    lengths = [len(one.completion_tokens) for one in journal._parts["long"]]
    assert sum(lengths) == count and lengths == sorted(lengths, reverse=True) and len(lengths) < 20
    journal.flush()
    for one in (journal, TokenJournal(path)):
        assert_holds(one, "long", count)
        kept = one.kept("long")
        assert kept is not None and kept.experts is not None and kept.experts.tobytes() == whole.tobytes()
