"""No sample is lost or trained twice; files appear whole; advantages are the formula's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ranker.data import read_rollouts
from scheduler.cost.length_forecast import Forecast
from streamrl.config.run import RunConfig
from streamrl.controller.length_predictor import COLUMNS
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_recorder import Recorder
from streamrl.errors import RunFailed, UserError
from streamrl.protocol.controller_site import Generate
from streamrl.protocol.message import parse, wire
from streamrl.protocol.samples import (
    groups_from_wire,
    groups_to_wire,
    request_from_wire,
    request_to_wire,
    sample_from_wire,
    sample_to_wire,
)
from streamrl.rollouts.advantage import group_advantages
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.ledger import Ledger, pack_content, unpack_content
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.rank_shares import balance
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.train_groups import train_groups
from streamrl.rollouts.types import Group, PartialSample, Sample, Scored
from streamrl.rollouts.void import Void, VoidCause
from streamrl.transport.wire import Message, decode, encode
from tests.run_dir.conftest import file_size_limit
from tests.training.conftest import random_groups

CONTRACT_COLUMNS = [
    "sample_id",
    "group_id",
    "prompt_id",
    "task",
    "epoch",
    "step",
    "prompt",
    "prompt_tokens",
    "completion_tokens",
    "output_length",
    "finish_reason",
    "reward",
    "advantage",
    "weight_versions",
    "site",
    "instance",
    "pool",
    "route",
    "predicted_length",
    "t_queued",
    "t_dispatched",
    "t_first_token",
    "t_finished",
    "t_received",
    "t_trained",
]


LATE = Void(VoidCause.TIMEOUT, "timed out after 20 s")
"""Why a reward of None is void."""


def make_sample(sample_id: str, step: int = 1, length: int = 3) -> Sample:
    return Sample(
        sample_id=sample_id,
        group_id=sample_id.split(".")[0],
        completion_tokens=np.arange(length, dtype=np.int32),
        logprobs=np.linspace(-2, -0.1, length).astype(np.float32),
        token_versions=np.full(length, step - 1, dtype=np.int32),
        finish_reason="stop",
        site="here",
        instance="here-regular-0",
        pool="regular",
        route="regular",
        t_queued=1.0,
        t_dispatched=2.0,
        t_first_token=3.0,
        t_finished=4.0,
        text="abc",
    )


def make_group(group_id: str = "g", rewards: tuple[float | None, ...] = (0.0, 1.0), step: int = 1) -> Group:
    group = Group(group_id, step, 0, "task/0", "task", 0, "a prompt", np.arange(4, dtype=np.int32), len(rewards))
    for number, reward in enumerate(rewards):
        sample = make_sample(f"{group_id}.{number}", step, length=2 + number)
        group.scored[sample.sample_id] = Scored(sample, reward, LATE if reward is None else None, 5.0)
    values = group_advantages(group.rewards(), "group_std")
    group.advantages = {m.sample.sample_id: a for m, a in zip(group.survivors(), values, strict=True)}
    return group


def finish_and_score(ledger: Ledger, group: Group, content: bytes = b"x") -> None:
    ledger.issue((sample_id, group.group_id, b"prompt") for sample_id in sorted(group.scored))
    ledger.finish([(m.sample, content) for m in group.members()])
    ledger.score(group.members())


def test_a_sample_walks_from_issue_to_training_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    group = make_group()
    ids = sorted(group.scored)
    ledger.issue((sample_id, "g", b"prompt") for sample_id in ids)
    first = group.members()[0].sample
    assert ledger.finish([(first, b"x")]) == {ids[0]}
    assert ledger.finish([(first, b"x")]) == set()  # delivered twice
    assert ledger.finish([(make_sample("never.0"), b"x")]) == set()  # never issued
    with pytest.raises(RunFailed, match="trained 2 samples and dropped 0, of which 0 are scored"):
        ledger.train(1, 1, [group], 9.0)
    ledger.finish([(group.members()[1].sample, b"x")])
    ledger.score(group.members())
    ledger.train(1, 1, [group], 9.0)
    assert ledger.counts() == {"trained": 2}
    assert ledger.trained_ids() == ids
    with pytest.raises(RunFailed, match="of which 0 are scored and untrained"):
        ledger.train(1, 1, [group], 9.0)


def test_rewinding_forgets_later_steps_and_what_no_step_has_trained(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (1, 2, 3):
        group = make_group(f"g{step}", step=step)
        finish_and_score(ledger, group)
        if step < 3:
            ledger.train(step, step, [group], 0.0)
    assert ledger.counts() == {"trained": 4, "scored": 2}
    assert ledger.rewind(2) == 2  # trained samples of step 2
    assert ledger.trained_ids() == ["g1.0", "g1.1"]
    assert ledger.counts() == {"trained": 2}
    ledger.close()
    assert Ledger(tmp_path / "ledger.sqlite").counts() == {"trained": 2}  # durable


def test_dropped_samples_are_accounted_for_with_the_step_that_dropped_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    kept, dropped = make_group("g1"), make_group("g2", (1.0, 1.0))
    for group in (kept, dropped):
        finish_and_score(ledger, group)
    ledger.train(1, 1, [kept], 0.0, [dropped])
    assert ledger.counts() == {"trained": 2, "dropped": 2}
    assert ledger.rewind(1) == 2
    assert ledger.counts() == {}


def test_void_samples_are_dropped_while_their_group_is_trained_and_the_account_balances(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    group, gone = make_group("g1", (1.0, None, 0.0)), make_group("g2", (None, 1.0, None))
    for one in (group, gone):
        finish_and_score(ledger, one)
    assert ledger.counts() == {"scored": 6}
    ledger.train(1, 1, [group], 0.0, [gone])
    assert ledger.counts() == {"trained": 2, "dropped": 4}
    assert ledger.counts_void() == {"timeout": 3}
    assert ledger.trained_ids() == ["g1.0", "g1.2"]
    with pytest.raises(RunFailed, match="of which 0 are scored and untrained"):
        ledger.train(2, 2, [group], 0.0)  # not even the void one again


def test_a_ledger_of_an_older_run_gets_the_column_for_causes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as older:
        older.execute("ALTER TABLE samples DROP COLUMN void_cause")
    ledger = Ledger(path)
    finish_and_score(ledger, make_group("g", (1.0, None)))
    assert ledger.counts_void() == {"timeout": 1}


def test_a_void_sample_keeps_its_length_and_its_cause_on_disk_and_has_no_reward(tmp_path: Path) -> None:
    group = make_group("g", (1.0, None, 0.0))
    group.t_trained = 10.0
    rows = pq.read_table(RolloutStore(tmp_path).write(1, [group])).to_pylist()
    assert [row["reward"] for row in rows] == [1.0, None, 0.0]
    assert [row["void_cause"] for row in rows] == [None, "timeout", None]
    assert [row["reward_error"] for row in rows] == [None, "timed out after 20 s", None]
    assert [row["output_length"] for row in rows] == [2, 3, 4]
    assert (rows[1]["advantage"], rows[1]["t_trained"], rows[0]["t_trained"]) == (None, None, 10.0)


def test_rollouts_of_before_there_were_causes_are_still_read(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    older = pq.read_table(store.write(1, [make_group("g0")])).drop_columns(["void_cause"])
    pq.write_table(older, store.directory / "step_000001.parquet")
    store.write(2, [make_group("g1", (None, 1.0, 0.0))])
    assert [row["output_length"] for row in store.newest(COLUMNS, 99)] == [2, 3, 2, 3, 4]
    assert read_rollouts([store.directory]).output_length.tolist() == [2, 3, 2, 3, 4]  # what `train-ranker` reads


def test_rollouts_with_a_column_of_earlier_versions_are_still_read(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    table = pq.read_table(store.write(1, [make_group("g0")]))
    assert "predicted_rank" not in table.column_names
    pq.write_table(table.append_column("predicted_rank", [[0.5, 1.0]]), store.directory / "step_000001.parquet")
    store.write(2, [make_group("g1", (None, 1.0, 0.0))])
    assert [row["output_length"] for row in store.newest(COLUMNS, 99)] == [2, 3, 2, 3, 4]
    assert read_rollouts([store.directory]).output_length.tolist() == [2, 3, 2, 3, 4]


def test_rollouts_are_on_disk_before_the_ledger_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(("on disk", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        assert pq.read_table(source).num_rows == 2
        events.append(("renamed", source.name))
        replace(source, target)

    class ForgetfulLedger:
        def train(self, *_: object) -> None:
            events.append(("forgotten", ""))
            raise RunFailed("enough")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    parts: list[Any] = [RolloutStore(tmp_path / "rollouts"), ForgetfulLedger(), *[None] * 5]
    recorder: Any = Recorder(*parts)
    batch = StepBatch(RunConfig(), 1, {"g": make_group("g")})
    with pytest.raises(RunFailed, match="enough"):
        asyncio.run(recorder.step_done(batch, *[None] * 6))
    partial = events[1][1]
    assert partial.startswith(".step_000001.parquet.")
    assert events == [
        ("on disk", tmp_path.name),
        ("on disk", partial),
        ("renamed", partial),
        ("on disk", "rollouts"),
        ("forgotten", ""),
    ]


def test_rollouts_that_the_disk_has_no_room_for_are_named(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    limit = "raise the limit on the size of a file (`ulimit -f`)"
    words = re.escape(f"cannot write {store.path(1)}: [Errno 27] File too large; {limit} (see docs: E1007)")
    with file_size_limit(8), pytest.raises(RunFailed, match=f"^{words}$"):
        store.write(1, [make_group("g")])
    assert list(store.directory.iterdir()) == []


def test_all_rows_of_a_step_say_that_step_whatever_they_were_issued_for(tmp_path: Path) -> None:
    class FullLedger:
        def train(self, *_: object) -> None:
            raise RunFailed("enough")

    store = RolloutStore(tmp_path / "rollouts")
    parts: list[Any] = [store, FullLedger(), *[None] * 5]
    groups = {name: make_group(name) for name in ("taken", "dropped", "not_finite")}
    groups["taken"].step, groups["dropped"].step, groups["not_finite"].step = 6, 7, 6
    lists = {name: [groups[name]] for name in ("dropped", "not_finite")}
    batch = StepBatch(RunConfig(), 6, {"taken": groups["taken"]}, **lists)
    recorder: Any = Recorder(*parts)
    with pytest.raises(RunFailed, match="enough"):
        asyncio.run(recorder.step_done(batch, *[None] * 6))
    assert set(pq.read_table(store.path(6))["step"].to_pylist()) == {6}


def test_rollouts_that_cannot_be_read_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    for step in (1, 2, 3, 4):
        store.write(step, [make_group(f"g{step}")])
    store.path(2).write_bytes(b"")  # as a power failure leaves it
    store.path(4).unlink()
    store.path(4).mkdir()
    assert [row["group_id"] for row in store.newest(["group_id"], 4)] == ["g1", "g1", "g3", "g3"]
    told = [
        record.getMessage().partition(" is left out, expected a readable Parquet file: ") for record in caplog.records
    ]
    assert [path for path, _, _ in told] == [str(store.path(4)), str(store.path(2))]
    assert all(why for _, _, why in told)


def test_committed_content_can_be_read_back() -> None:
    sample = make_sample("g.0")
    back = sample_from_wire(Sample, *unpack_content(pack_content(*sample_to_wire(sample))))
    assert back.sample_id == "g.0"
    np.testing.assert_array_equal(back.logprobs, sample.logprobs)


def test_rollout_rows_are_the_contracts(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    groups = [make_group("g0"), make_group("g1", (1.0, 1.0, 0.0))]
    for group in groups:
        group.t_trained = 10.0
    path = store.write(1, groups)
    table = pq.read_table(path)
    assert set(CONTRACT_COLUMNS) <= set(table.column_names)
    assert table.num_rows == 5
    rows = {row["sample_id"]: row for row in table.to_pylist()}
    row = rows["g1.2"]
    assert row["output_length"] == len(row["completion_tokens"]) == len(row["weight_versions"]) == 4
    assert row["advantage"] == pytest.approx(groups[1].advantages["g1.2"])
    assert row["t_trained"] == 10.0
    assert row["prompt_tokens"] == [0, 1, 2, 3]
    store.write(2, groups)
    store.rewind(2)
    assert [p.name for p in store.directory.iterdir()] == ["step_000001.parquet"]


OTHERS = ("step_000003.old.parquet", "step_000003 (copy).parquet", "step_3.parquet", "step_best.parquet")
"""Names of files that are no step's."""


def test_a_file_that_is_no_steps_is_left_alone(tmp_path: Path) -> None:
    store, kept = RolloutStore(tmp_path / "rollouts"), KeptMicroBatches(tmp_path / "refused")
    for step in (2, 1_000_000):
        store.write(step, [make_group(f"g{step}")])
        kept.write(KeptStep(step, 1.0, "loss", {}, []))
    for folder in (store.directory, kept.directory):
        for name in OTHERS:
            (folder / name).write_bytes((folder / "step_000002.parquet").read_bytes())
    assert [row["group_id"] for row in store.newest(["group_id"], 99)] == ["g2"] * 2 + ["g1000000"] * 2
    assert kept.steps() == [2, 1_000_000]
    with pytest.raises(UserError, match=r"kept are those of step 2, 1000000$"):
        kept.read(3)
    store.rewind(2)
    kept.rewind(2)
    for folder in (store.directory, kept.directory):
        assert {path.name for path in folder.iterdir()} == set(OTHERS)


def test_micro_batches_survive_the_wire_and_ranks_get_equal_shares() -> None:
    groups = random_groups(7)
    back = from_wire(*to_wire(groups))
    for ours, theirs in zip(groups, back, strict=True):
        np.testing.assert_array_equal(ours.prompt_tokens, theirs.prompt_tokens)
        for a, b in zip(ours.sequences, theirs.sequences, strict=True):
            np.testing.assert_array_equal(a.completion_tokens, b.completion_tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
            assert a.advantage == b.advantage
    shares = balance(groups, 3)
    assert sorted(g.group_id for share in shares for g in share) == sorted(g.group_id for g in groups)
    loads = [sum(g.tokens for g in share) for share in shares]
    assert max(loads) - min(loads) <= max(g.tokens for g in groups)
    assert from_wire(*to_wire([])) == []


def test_a_group_is_trained_in_the_order_of_its_ids_not_of_arrival() -> None:
    group = make_group(rewards=(0.0, 1.0, 0.5))
    shuffled = make_group(rewards=(0.0, 1.0, 0.5))
    shuffled.scored = dict(reversed(list(shuffled.scored.items())))
    for a, b in zip(train_groups(group)[0].sequences, train_groups(shuffled)[0].sequences, strict=True):
        np.testing.assert_array_equal(a.completion_tokens, b.completion_tokens)
        assert a.advantage == b.advantage


def test_groups_and_requests_come_back_from_the_wire_as_they_were() -> None:
    groups = [make_group("g0"), make_group("g1")]
    groups[0].forecast, groups[0].oldest = Forecast((1.0, 2.0), (3.0, 4.0)), 6
    samples = [[("g0.0", 5, None), ("g0.1", 6, 0.0)], [("g1.0", 7, None)]]
    issued, arrays = groups_to_wire(groups, samples, 9.5, budget=64)
    kind, body = wire(issued)
    received = decode([bytes(frame) for frame in encode(Message(kind, "s", 1, body, dict(arrays)))])
    (first, forecast, episode, oldest), (second, none, *_) = groups_from_wire(
        parse(Generate, received.body), received.arrays
    )
    assert forecast == groups[0].forecast and none is None and episode is None and oldest == 6
    assert [(r.sample_id, r.group_id, r.seed, r.temperature, r.pause_at, r.t_queued) for r in [*first, *second]] == [
        ("g0.0", "g0", 5, None, 64, 9.5),
        ("g0.1", "g0", 6, 0.0, 64, 9.5),
        ("g1.0", "g1", 7, None, 64, 9.5),
    ]
    np.testing.assert_array_equal(second[0].prompt_tokens, groups[1].prompt_tokens)

    kept = PartialSample("g1.0", *[np.arange(3, dtype=t) for t in ("int32", "float32", "int32")], 1.0, 2.0)
    moved = replace(second[0], kept=kept)
    again = request_from_wire(*request_to_wire(moved, "tail"))
    assert again.kept is not None and (again.seed, again.kept.t_first_token) == (7, 2.0)
    np.testing.assert_array_equal(again.kept.logprobs, kept.logprobs)
    assert request_from_wire(*request_to_wire(second[0], "regular")).kept is None


def test_what_a_killed_controller_has_left_goes_when_the_run_goes_back(tmp_path: Path) -> None:
    store, kept = RolloutStore(tmp_path / "rollouts"), KeptMicroBatches(tmp_path / "refused")
    store.write(1, [make_group("g0")])
    kept.write(KeptStep(1, 1.0, "loss", {}, []))
    for folder in (store.directory, kept.directory):
        for step in (1, 2):
            (folder / f".step_{step:06d}.parquet.{'a1' * 8}").touch()
        (folder / ".mine").touch()
    store.rewind(2)
    kept.rewind(2)
    for folder in (store.directory, kept.directory):
        assert sorted(path.name for path in folder.iterdir()) == [".mine", "step_000001.parquet"]
