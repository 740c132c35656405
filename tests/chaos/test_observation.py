"""What is read of a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from streamrl.chaos.audit import audit
from streamrl.chaos.observation import Logs, interrupted, look, processes_of, read_account
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.status import write_status

LINE = "2026-01-01 WARNING fleet: here-tail-0 had 3 requests with 700 tokens, of which 650 are in the journal\n"


def group(prompt: int, step: int) -> Group:
    ids = [f"{prompt:08d}.{n:03d}" for n in range(2)]
    scored = {}
    for sample_id in ids:
        arrays = (np.arange(4, dtype=np.int32), np.full(4, -1.0, np.float32), np.full(4, step - 1, np.int32))
        where = ("stop", "here", "here-tail-0", "tail", "tail", 1.0, 2.0, 3.0, 4.0)
        scored[sample_id] = Scored(Sample(sample_id, f"{prompt:08d}", *arrays, *where), 0.5, None, 5.0)
    found = Group(f"{prompt:08d}", step, prompt, "p", "t", 0, "prompt", np.arange(2, dtype=np.int32), 2, scored=scored)
    found.t_trained = 6.0
    return found


@pytest.mark.parametrize("name", ["run", "a#b", "what?", "50%25"])
def test_a_whole_folder_gives_an_account_that_is_clean(tmp_path: Path, name: str) -> None:
    tmp_path /= name
    tmp_path.mkdir()
    ledger, store = Ledger(tmp_path / "ledger.sqlite"), RolloutStore(tmp_path / "rollouts")
    metrics = RowWriter(tmp_path / "metrics.jsonl", MetricsRow)
    for step, prompts in ((1, (0, 1)), (2, (3,))):
        groups = [group(prompt, step) for prompt in prompts]
        members = [one for each in groups for one in each.members()]
        ledger.issue((one.sample.sample_id, one.sample.group_id, b"") for one in members)
        ledger.finish([(one.sample, b"") for one in members])
        ledger.score(members)
        store.write(step, groups)
        ledger.train(step, step, groups, 7.0)
        metrics.append(MetricsRow(step=step, time=7.0, prompts_too_long=0))
    checkpoint = tmp_path / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"prompts": {"next_index": 4, "again": [2]}}))
    account = read_account(tmp_path)  # the ledger is still open
    ledger.close()
    assert account.step_sizes == {1: 4, 2: 2}
    assert (account.next_index, account.again) == (4, frozenset({2}))
    found = audit(account)
    assert not found.faults
    assert (found.samples, found.open) == (6, 1)
    assert [folder.name for folder in tmp_path.parent.iterdir()] == [name]


def test_logs_are_followed_from_now_on_and_by_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "service-here.log"
    log.parent.mkdir()
    log.write_text("beginning the token journal anew\n")
    logs = Logs(tmp_path)
    with log.open("a") as file:
        file.write("nothing of note\n" + LINE + "fetching comp")
        file.flush()
        assert interrupted(logs.read(), frozenset({"here-tail-0"})) == (3, 700, 650)
        file.write("lete weights\n")
    assert len(logs.read()) == 2
    assert interrupted(logs.lines, frozenset({"here-regular-0"})) is None


def test_an_observation_has_the_processes_of_all_sites_and_the_controllers_status(tmp_path: Path) -> None:
    (tmp_path / "sites" / "west").mkdir(parents=True)
    write_started(tmp_path, [StartedProcess("controller", "controller", 11)])
    write_started(tmp_path / "sites" / "west", [StartedProcess("west-a-0", "instance", 12, 2, -9, "was killed")])
    assert look(tmp_path).state == ""  # nothing is told before the controller is there
    role = {"role": "instance", "state": "dead", "since": 1.0, "detail": "was killed"}
    status = {"run": "x", "state": "running", "step": 3, "steps": 9, "started_at": 1.0, "updated_at": 2.0}
    scaling = {"wanted": {"west/a": 1}, "ready": {"west/a": 0}}
    site = {"west": {"silent_s": 0.5}}
    write_status(tmp_path, status | {"roles": {"west-a-0": role}, "scaling": scaling, "sites": site})
    seen = look(tmp_path, ["a line"], launched=False)
    assert (seen.state, seen.step, seen.step_at, seen.said, seen.launched) == ("running", 3, 0.0, ("a line",), False)
    assert (seen.processes["west-a-0"].site, seen.processes["west-a-0"].exit_code) == ("west", -9)
    assert seen.processes == processes_of(tmp_path)
    assert seen.roles["west-a-0"].state == "dead"
    assert (seen.wanted, seen.ready, seen.sites["west"].silent_s) == ({"west/a": 1}, {"west/a": 0}, 0.5)
