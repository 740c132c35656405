"""The ledger against a dictionary, under any order of calls, repeats, nonsense, and kills at any moment.

A kill is what SIGKILL leaves: the database and its write-ahead log as they lie on disk, before a transaction's COMMIT,
after it, or with the log's last bytes missing (a power cut).
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from streamrl.errors import RunFailed
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.rollouts.void import Void, VoidCause
from streamrl.run_dir import layout

GROUP_SIZE = 2
VOID = "void_cause IS NOT NULL AND reward IS NULL"
MOMENTS = ("before", "torn", "after")
"""Of a kill, by the transaction's COMMIT."""

places = st.lists(st.integers(0, 99), max_size=6)
"""Samples or groups, counted among those there are."""


class Killed(Exception):
    """The process has ended here."""


class Connection:
    """A ledger's connection that can be killed at its next COMMIT; what is on disk then is copied to `left`."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self._path, self._log = db, path, path.with_name(path.name + "-wal")
        self.moment: str | None = None
        self.left = path
        self.committed = False
        """Whether the killed transaction is among what is left."""
        self._log_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE":
            self._log_bytes = self._size()
        if sql != "COMMIT" or self.moment is None:
            return self._db.execute(sql, *values)
        if self.moment != "before":
            self._db.execute(sql)
        self._copy()
        raise Killed

    def _size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _copy(self) -> None:
        grown = self._size() - self._log_bytes
        torn = self.moment == "torn" and grown > 0
        self.committed = self.moment != "before" and not torn
        self.left = self._path.with_name(f"{self._path.stem}+.sqlite")
        shutil.copyfile(self._path, self.left)
        if self._log.exists():
            log = self.left.with_name(self.left.name + "-wal")
            log.write_bytes(self._log.read_bytes()[: -max(1, grown // 3) if torn else None])


@dataclass(frozen=True)
class Row:
    """What the ledger has to know of a sample."""

    group: str
    state: str = "issued"
    step: int | None = None
    reward: float | None = None
    content: bytes | None = None
    version: int = 0
    """The newest one of its tokens; that of its first token is smaller by 1."""

    def after_training(self, state: str, step: int, checkpoint: int) -> Row:
        content = self.content if self.version <= checkpoint else None
        return replace(self, state=state, step=step, content=content)


def prompt_of(group_id: str) -> bytes:
    return b"prompt of " + group_id.encode()


def sample(sample_id: str, version: int = 0) -> Sample:
    tokens = np.zeros(2, np.int32), np.zeros(2, np.float32), np.array([version - 1, version], np.int32)
    return Sample(sample_id, "g", *tokens, "stop", "here", "here-0", "pool", "regular", 1.0, 2.0, 3.0, 4.0)


def scored_as(sample_id: str, reward: float | None) -> Scored:
    return Scored(sample(sample_id), reward, Void(VoidCause.TIMEOUT, "late") if reward is None else None, 5.0)


def group_of(group_id: str, rewards: dict[str, float | None]) -> Group:
    scored = {sample_id: scored_as(sample_id, reward) for sample_id, reward in rewards.items()}
    return Group(group_id, 1, 0, "p", "task", 0, "a prompt", np.zeros(3, np.int32), len(scored), scored=scored)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        memory = (
            layout.SHARED_MEMORY if layout.SHARED_MEMORY.is_dir() else None
        )  # an fsync of a disk takes longer than all the rest
        self.folder = tempfile.TemporaryDirectory(dir=memory)
        self.rows: dict[str, Row] = {}
        self.steps: dict[int, int] = {}
        """Samples that each step trained."""
        self.kept: dict[str, Row] = {}
        """Samples that a resume need not generate again."""
        self.checkpoint = 0
        self.made = 0
        self.ledger: Ledger
        self.db: Connection
        self._open(Path(self.folder.name) / "ledger.sqlite")

    def _open(self, path: Path) -> None:
        self.ledger = Ledger(path)
        self.db = Connection(self.ledger._db, path)
        self.ledger._db = self.db  # type: ignore[assignment]
        self.checkpoint = 0  # until it is told

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def _ids(self, where: list[int], strangers: bool = True) -> list[str]:
        known = [*self.rows, *(["never.0", "never.1"] if strangers else [])]
        return [known[place % len(known)] for place in where] if known else []

    def _groups(self, where: list[int]) -> list[Group]:
        """Any groups; those that are scored are more likely than others."""
        members: dict[str, list[str]] = {}
        for sample_id, row in self.rows.items():
            members.setdefault(row.group, []).append(sample_id)
        scored = [name for name, ids in members.items() if {self.rows[i].state for i in ids} == {"scored"}]
        names = scored * 20 + list(members)
        chosen = list(dict.fromkeys(names[place % len(names)] for place in where)) if names else []
        return [group_of(name, {i: self.rows[i].reward for i in members[name]}) for name in chosen]

    # -- what a run does

    @rule(groups=st.integers(0, 3))
    def issue(self, groups: int) -> None:
        ids = [(f"g{self.made + g}.{n}", f"g{self.made + g}") for g in range(groups) for n in range(GROUP_SIZE)]
        self.made += groups
        self._issue(ids)

    def _issue(self, ids: list[tuple[str, str]]) -> None:
        self.ledger.issue((sample_id, group, prompt_of(group)) for sample_id, group in ids)
        self.rows |= {sample_id: Row(group) for sample_id, group in ids}

    @rule()
    def issue_again_what_is_kept(self) -> None:
        self._issue([(i, row.group) for i, row in self.kept.items() if i not in self.rows])

    @precondition(lambda self: self.rows)
    @rule(where=places.filter(bool))
    def issue_what_is_there(self, where: list[int]) -> None:
        known = self._ids(where, strangers=False)
        with pytest.raises(RunFailed):
            self.ledger.issue([(f"new{self.made}.0", "new", b""), (known[0], self.rows[known[0]].group, b"")])

    @rule(where=places, version=st.integers(0, 8))
    def finish(self, where: list[int], version: int) -> None:
        ids = self._ids(where)
        news = {
            sample_id for sample_id in ids if self.rows.get(sample_id, Row("")).state == "issued"
        } & self.rows.keys()
        contents = [(sample(sample_id, version), f"{sample_id}, {n}".encode()) for n, sample_id in enumerate(ids)]
        assert self.ledger.finish(contents) == news
        for sample_id in news:  # of one that comes twice in a batch, the first counts
            content = f"{sample_id}, {ids.index(sample_id)}".encode()
            self.rows[sample_id] = replace(self.rows[sample_id], state="finished", content=content, version=version)
            self.kept.pop(sample_id, None)

    @rule(version=st.integers(0, 8))
    def finish_all(self, version: int) -> None:
        self.finish(list(range(len(self.rows))), version)

    @rule(where=places, reward=st.none() | st.floats(-2, 2))
    def score(self, where: list[int], reward: float | None) -> None:
        ids = self._ids(where)
        self.ledger.score([scored_as(sample_id, reward) for sample_id in ids])
        for sample_id in ids:
            if sample_id in self.rows and self.rows[sample_id].state == "finished":
                self.rows[sample_id] = replace(self.rows[sample_id], state="scored", reward=reward)

    @rule()
    def score_all(self) -> None:
        self.score(list(range(len(self.rows))), 1.0)

    @rule(where=places, dropped=st.integers(0, 3), step=st.integers(1, 8))
    def train(self, where: list[int], dropped: int, step: int) -> None:
        groups = self._groups(where)
        split = {"dropped": groups[:dropped], "trained": groups[dropped:]}
        ids = {state: [i for group in some for i in group.scored] for state, some in split.items()}
        ids["dropped"] += [i for i in ids["trained"] if self.rows[i].reward is None]  # void
        ids["trained"] = [i for i in ids["trained"] if self.rows[i].reward is not None]
        scored = all(self.rows[i].state == "scored" for some in ids.values() for i in some)
        if not scored or step in self.steps:
            with pytest.raises(RunFailed):
                self.ledger.train(step, step, split["trained"], 9.0, split["dropped"])
            return
        self.ledger.train(step, step, split["trained"], 9.0, split["dropped"])
        self.steps[step] = len(ids["trained"])
        for state, some in ids.items():
            self.rows |= {i: self.rows[i].after_training(state, step, self.checkpoint) for i in some}

    @rule(step=st.integers(1, 8))
    def checkpoint_made(self, step: int) -> None:
        self.ledger.checkpointed(step)
        self.rows |= {
            i: replace(row, content=None) for i, row in self.rows.items() if self.checkpoint < (row.step or 0) <= step
        }
        self.checkpoint, self.kept = step, {}

    @rule()
    def forget_contents(self) -> None:
        self.ledger.forget_contents()
        self.rows = {i: replace(row, content=None) for i, row in self.rows.items()}
        self.kept = {}

    @rule(where=places.filter(bool), dropped=st.booleans(), step=st.integers(1, 8))
    def train_a_group_twice_in_one_step(self, where: list[int], dropped: bool, step: int) -> None:
        if groups := self._groups(where):
            with pytest.raises(RunFailed):
                self.ledger.train(step, step, [*groups, *([] if dropped else groups)], 9.0, groups if dropped else [])

    @rule(first=st.integers(1, 9))
    def rewind(self, first: int) -> None:
        undone = {i for i, row in self.rows.items() if row.step is None or row.step >= first}
        assert self.ledger.rewind(first) == sum(self.rows[i].state == "trained" for i in undone)
        self._forget(first)

    def _forget(self, first: int) -> None:
        self.kept = {i: row for i, row in self.kept.items() if row.version < first}
        self.kept |= {
            i: row
            for i, row in self.rows.items()
            if (row.step is None or row.step >= first) and row.version < first and row.content is not None
        }
        self.checkpoint = first - 1
        self.rows = {
            i: replace(row, content=None) for i, row in self.rows.items() if row.step is not None and row.step < first
        }
        self.steps = {step: count for step, count in self.steps.items() if step < first}

    # -- what happens to it

    @rule()
    def close_and_open(self) -> None:
        self.ledger.close()
        self._open(self.ledger.path)

    @rule(moment=st.sampled_from(MOMENTS), act=st.sampled_from(["finish", "train", "rewind", "issue"]))
    def kill(self, moment: str, act: str) -> None:
        """In the middle of a write; the next process opens what is left."""
        before = dict(self.rows), dict(self.steps), dict(self.kept)
        self.db.moment = moment
        scored = self._groups([0]) if any(row.state == "scored" for row in self.rows.values()) else []
        issued = [i for i, row in self.rows.items() if row.state == "issued"]
        step = max(self.steps, default=0) + 1
        with pytest.raises(Killed):
            if act == "finish" and issued:
                self.rows |= {i: replace(self.rows[i], state="finished", content=b"x") for i in issued}
                self.kept = {i: row for i, row in self.kept.items() if i not in issued}
                self.ledger.finish([(sample(i), b"x") for i in issued])
            elif act == "train" and scored and {self.rows[i].state for i in scored[0].scored} == {"scored"}:
                for i, one in scored[0].scored.items():
                    state = "dropped" if one.void else "trained"
                    self.rows[i] = self.rows[i].after_training(state, step, self.checkpoint)
                self.steps[step] = len(scored[0].rewards())
                self.ledger.train(step, step, scored, 9.0)
            elif act == "rewind":
                self._forget(1)
                self.ledger.rewind(1)
            else:
                self.made += 1
                self.rows[f"g{self.made - 1}.0"] = Row(f"g{self.made - 1}")
                self.ledger.issue([(f"g{self.made - 1}.0", f"g{self.made - 1}", prompt_of(f"g{self.made - 1}"))])
        if not self.db.committed:
            self.rows, self.steps, self.kept = before
        self.db.close()
        self._open(self.db.left)

    # -- what always holds

    @invariant()
    def every_sample_is_in_the_state_that_the_model_says(self) -> None:
        assert self.ledger.counts() == dict(Counter(row.state for row in self.rows.values()))
        assert self.ledger.trained_ids() == sorted(i for i, row in self.rows.items() if row.state == "trained")
        table = "samples LEFT JOIN contents USING (sample_id)"
        assert self._read(f"sample_id, group_id, state, step, reward, content FROM {table}") == {
            (i, row.group, row.state, row.step, row.reward, row.content) for i, row in self.rows.items()
        }
        assert self._read("COUNT(*) FROM contents") == {(sum(row.content is not None for row in self.rows.values()),)}
        assert self._read("step, samples FROM steps") == set(self.steps.items())
        assert self._read("sample_id, prompt, newest, content FROM kept") == {
            (i, prompt_of(row.group), row.version, row.content) for i, row in self.kept.items()
        }
        scored = [row for row in self.rows.values() if row.state not in ("issued", "finished")]
        void = {("timeout", "late", sum(row.reward is None for row in scored))} - {("timeout", "late", 0)}
        assert self._read(f"void_cause, error, COUNT(*) FROM samples WHERE {VOID} GROUP BY 1, 2") == void
        assert self.ledger.counts_void() == {cause: count for cause, _, count in void}

    def _read(self, what: str) -> set[tuple[Any, ...]]:
        """As another process sees it."""
        reader = sqlite3.connect(self.ledger.path)
        try:
            return set(reader.execute(f"SELECT {what}"))
        finally:
            reader.close()


def test_the_account_balances_whatever_comes_in_whatever_order_and_whenever_it_is_killed() -> None:
    limits = settings(derandomize=True, max_examples=40, stateful_step_count=30)
    run_state_machine_as_test(LedgerMachine, settings=limits)
