"""Whole runs through the command line: real vLLM, real trainer, real sockets, real processes, a tiny model."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.rollouts.advantage import group_advantages
from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir import layout, start_stages
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status
from streamrl.runtime.process_context import Addresses
from streamrl.runtime.warden import ENDS_WITHIN_S
from tests import warm
from tests.end_to_end.project import Project, trained_rows, wait_for
from tests.run_dir.trace_events import events_of
from tests.security.shown_secrets import shown_secrets
from tests.security.sockets_of import family, open_to_others
from tests.waiting import finish, scaled


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A run of three streamed steps with a crashing and a hanging reward."""
    project = Project(tmp_path_factory.mktemp("finished"), dtype="bfloat16")
    return project, project.launch()


@dataclass(frozen=True)
class Killed:
    """A run whose launcher has been killed."""

    time: float
    left: list[list[str]]
    """Command lines of processes that outlived it."""
    done: int
    """Steps done."""
    kept: set[str]
    """Samples that the weights of its newest checkpoint have finished."""


def in_ledger(run_dir: Path, sql: str, *values: object) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as reader:
        return reader.execute(sql, values).fetchall()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Killed, str]:
    """The same run in fp32 with one instance, resumed after a SIGKILL of its launcher, and the resumed run's output."""
    project = Project(tmp_path_factory.mktemp("resumed"), tail=False)
    process = project.start("--steps", "3")
    run_dir = project.run_dir()
    finished_since = "SELECT COUNT(*) FROM samples WHERE newest >= 1"  # by the weights of the first checkpoint
    wait_for(
        lambda: (run_dir / "checkpoints" / "step_1").exists() and in_ledger(run_dir, finished_since) != [(0,)],
        400,
        process,
    )
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=scaled(ENDS_WITHIN_S))
    checkpoint = CheckpointFolder(run_dir / "checkpoints").latest() or 0
    having_content = "SELECT sample_id FROM samples JOIN contents USING (sample_id) WHERE newest = ?"
    kept = in_ledger(run_dir, having_content, checkpoint)
    killed = Killed(time.time(), [p.cmdline() for p in alive], read_status(run_dir).step, {str(row[0]) for row in kept})
    return project, killed, project.launch("--resume", str(run_dir))


def test_every_sample_is_trained_once_and_accounted_for(finished: tuple[Project, str]) -> None:
    run_dir = finished[0].run_dir()
    every = trained_rows(run_dir)
    rows = [row for row in every if row["t_trained"] is not None]
    assert len(rows) == 3 * 6 * 3
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.counts() == {"trained": 54, "dropped": len(every) - 54}
    assert ledger.trained_ids() == sorted(str(row["sample_id"]) for row in rows)
    assert {row["instance"] for row in rows} == {"here-regular-0", "here-tail-0"}
    for row in rows:
        assert set(row["weight_versions"]) == {row["step"] - 1}  # on-policy: step k is sampled by version k - 1
        ours = [row[name] for name in ("t_queued", "t_received", "t_trained")]
        theirs = [row[name] for name in ("t_dispatched", "t_first_token", "t_finished")]
        assert (ours, theirs) == (sorted(ours), sorted(theirs))
        # a site's times are converted to the controller's clock, with an error of up to half a round trip
        assert ours[0] < theirs[0] + scaled(1) and theirs[-1] < ours[1] + scaled(1)


def test_lengths_are_predicted_once_there_is_something_to_learn_from(finished: tuple[Project, str]) -> None:
    rows = trained_rows(finished[0].run_dir())
    assert {row["predicted_length"] for row in rows if row["step"] == 1} == {None}
    later = [row for row in rows if row["step"] > 1]
    assert all(1 <= row["predicted_length"] <= 16 for row in later)
    assert all(row["route"] == "regular" for row in rows)  # 18 samples a step are too few to trust anything
    first = read_metrics(finished[0].run_dir() / "metrics.jsonl")[0]
    assert first.ranker_recall_at_20 is None and first.dispatch_by_prediction is False


def test_a_ranker_that_is_wrong_here_is_not_used_before_it_is_tried_nor_after(tmp_path: Path) -> None:
    project = Project(tmp_path)
    sums = ["what is " + " + ".join(["7"] * terms) + "?" for terms in range(2, 62)]
    rows = [{"prompt": text, "output_length": 5 * len(text) + n} for text in sums for n in range(4)]
    (tmp_path / "past.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = ["-m", "streamrl.cli.main", "train-ranker", "--rollouts", "past.jsonl", "--out", "ranker.lgb"]
    train += ["--model", str(tmp_path / "model")]
    assert warm.run([sys.executable, *train], scaled(200), cwd=tmp_path).returncode == 0
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text, "answer": "e"}) for text in sums))
    batch = {"prompts_per_step": 12, "samples_per_prompt": 3, "micro_batch_tokens": 512}
    model = {"path": str(tmp_path / "model"), "max_context": 512}
    changes = {"batch": batch, "ranker": {"path": str(tmp_path / "ranker.lgb"), "refit_every": 0}, "model": model}
    output = project.launch(**changes)
    assert "length predictions are trusted from the start" not in output, "no step has been replayed by them"
    metrics = read_metrics(project.run_dir() / "metrics.jsonl")
    assert metrics[0].ranker_recall_at_20 is not None and not metrics[0].dispatch_by_prediction
    assert not metrics[-1].dispatch_by_prediction
    assert_void_rewards_cost_their_samples_only(project.run_dir(), groups=36)


def assert_void_rewards_cost_their_samples_only(run_dir: Path, groups: int) -> None:
    """A fifth of the answers is void, by a hash: the account balances, and no group with two survivors is lost."""
    by_group: defaultdict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in trained_rows(run_dir):
        by_group[row["group_id"]].append(row)
    trained = 0
    for rows in by_group.values():
        alive = [row for row in rows if row["reward"] is not None]
        dead = [row for row in rows if row["reward"] is None]
        assert {(row["void_cause"], row["reward_error"]) for row in dead} <= {
            ("verifier", "the reward function returned None")
        }
        assert len(rows) == 3 and all(row["output_length"] > 0 for row in rows)
        assert all((row["t_trained"], row["advantage"]) == (None, None) for row in dead)
        assert [row["t_trained"] is not None for row in alive] == [len(alive) >= 2] * len(alive)
        if len(alive) >= 2:
            trained += len(alive)
            expected = group_advantages([row["reward"] for row in alive], "group_std")
            assert [row["advantage"] for row in alive] == pytest.approx(expected)
    kept = [rows for rows in by_group.values() if any(row["t_trained"] is not None for row in rows)]
    assert len(kept) == groups
    assert any(row["reward"] is None for rows in kept for row in rows)  # some of them have lost one
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.counts() == {"trained": trained, "dropped": 3 * len(by_group) - trained}
    void = sum(row["reward"] is None for rows in by_group.values() for row in rows)
    assert ledger.counts_void() == {"verifier": void}
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert sum(row.samples_void or 0 for row in metrics) == void
    assert sum(row.groups_void or 0 for row in metrics) == len(by_group) - groups
    assert sum(row.samples_total or 0 for row in metrics) == trained


def test_a_crashing_reward_is_void_and_a_hanging_one_is_tried_again(finished: tuple[Project, str]) -> None:
    project, output = finished
    rows = trained_rows(project.run_dir())
    void = [row for row in rows if row["reward"] is None]
    assert {row["prompt"] for row in void} == {"crash"}
    assert {(row["void_cause"], row["reward_error"]) for row in void} == {
        ("crash", "the reward's process died: exit code 3")
    }
    assert all((row["t_trained"], row["advantage"]) == (None, None) for row in void)  # its groups were replaced
    assert (project.folder / "hung").exists()
    assert all(row["reward"] is not None for row in rows if row["prompt"] == "hang")
    metrics = read_metrics(project.run_dir() / "metrics.jsonl")
    assert (
        sum(row.samples_void or 0 for row in metrics) == len(void) == 3 * sum(row.groups_void or 0 for row in metrics)
    )
    assert "rewards void (" in output and ": crash " in output


def test_metrics_status_trace_and_report_are_there(finished: tuple[Project, str]) -> None:
    project, output = finished
    run_dir = project.run_dir()
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [row.step for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert row.logprob_gap_mean is not None
        assert row.logprob_gap_mean < 0.05
        assert row.staleness_max == 0
        # the first step begins when the first weights are served
        assert (row.weight_sync_exposed_s or 0) < (row.step_time_s or 0)
        assert (row.weight_sync_exposed_s == 0) == (row.step == 1)
        assert 0 <= (row.bubble_fraction_generation or 0) <= 1
        assert row.groups_total == 6
    status = read_status(run_dir)
    assert (status.state, status.step, status.error) == ("done", 3, None)
    # every version on both instances, also the last one, from which nothing is sampled
    verified = status.verified
    assert (verified.versions, verified.comparisons, verified.mismatch) == (4, 8, "")
    assert verified.worst is not None and verified.bound is not None and verified.worst < verified.bound / 2
    assert "verified end to end, 4 versions" in output
    assert "verified end to end, 4 versions" in (run_dir / "report.html").read_text()
    assert [(row.step_refused, row.groups_not_finite, row.mismatch_warning) for row in metrics] == [(None, 0, None)] * 3
    events = events_of(run_dir / "trace.json")
    tracks = {e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert {"trainer", "here-regular-0", "here-tail-0"} <= tracks
    assert sum(e["ph"] == "b" for e in events) == 54
    assert "<svg" in (run_dir / "report.html").read_text()
    assert "step 3/3" in output
    assert "report.html" in output


COMPUTE_TYPE = "choosing the type to compute in"


def test_every_process_says_in_order_what_it_does_until_the_first_sample(finished: tuple[Project, str]) -> None:
    project, output = finished
    files = sorted((project.run_dir() / layout.START_STAGES).iterdir())
    stages = {path.stem: [one.text for one in start_stages.history(project.run_dir(), path.stem)] for path in files}
    instances = ["here-regular-0", "here-tail-0"]
    assert list(stages) == ["controller", *instances, "rewards-here", "service-here", "trainer"]
    first = "starting Python", "importing libraries"
    assert list(dict.fromkeys(text.partition("waiting")[0] for text in stages["controller"])) == [
        *(*first, "loading the tokenizer and the tasks", "", "ready")
    ]
    loading = "importing torch", COMPUTE_TYPE, "deciding how to pack groups", "loading the model"
    assert stages["trainer"] == ["starting Python", *loading, "waiting for the controller", "ready"]
    waits = "waiting for the controller", "waiting for the trainer", "ready"
    assert stages["service-here"][:3] == [*first, f"waiting for {', '.join(instances)}"]
    assert tuple(stages["service-here"][-3:]) == waits
    assert stages["rewards-here"] == [*first, "starting the reward workers", "waiting for the controller", "ready"]
    for name in instances:
        # an instance on a loaded machine says after its last wait which step times it has left out
        said = [text.partition(" (step times")[0] for text in stages[name]]
        known = [text for text in said if not text.startswith("measuring step times, ")]
        assert known == [
            *(*first, COMPUTE_TYPE, "importing vLLM", "loading the model into vLLM", "warming up"),
            *("waiting for service-here", "ready"),
        ]
    assert "measuring step times, 1 of 2 batch sizes done" in stages["here-tail-0"]
    for name in stages:
        assert any(name in line for line in output.splitlines() if line.startswith("[")), output
    assert output.index("tiny: starting") < output.index("the first sample is finished") < output.index("step 1/3")


def test_the_checkpoint_is_the_published_version_and_loads_with_transformers(
    finished: tuple[Project, str],
) -> None:
    run_dir = finished[0].run_dir()
    folders = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert folders == ["step_2", "step_3"]
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step_3")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(run_dir / "checkpoints" / "step_3").chat_template
    start = load_file(finished[0].folder / "model" / "model.safetensors")
    changed = [not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items() if name in start]
    assert any(changed)


def test_no_process_and_no_shared_memory_is_left(finished: tuple[Project, str]) -> None:
    run_dir = str(finished[0].run_dir())
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if run_dir in " ".join(p.info["cmdline"] or [])]
    assert left == []
    addresses = Addresses.load(finished[0].run_dir())
    store = Path(addresses.shared_memory)
    assert store.parent == layout.SHARED_MEMORY and not store.exists()
    assert not (finished[0].run_dir() / layout.WEIGHTS).exists()


def test_sync_with_two_pairs_of_ranks_that_share_rows_trains_the_samples_of_stream_and_gives_the_same_gradient(
    resumed: tuple[Project, Killed, str], tmp_path: Path
) -> None:
    """It runs in fp32: with bf16's rounding a rare token differs at other batch sizes, and so do the gradients."""
    other = Project(tmp_path, tail=False)
    other.launch("--steps", "1", ranks=4, sharing=2, schedule={"name": "sync"})

    def first_step(project: Project) -> dict[str, list[int]]:
        rows = [row for row in trained_rows(project.run_dir()) if row["step"] == 1]
        return {str(row["sample_id"]): row["completion_tokens"] for row in rows}

    assert first_step(other) == first_step(resumed[0])
    stream = read_metrics(resumed[0].run_dir() / "metrics.jsonl")[0]
    sync = read_metrics(other.run_dir() / "metrics.jsonl")[0]
    assert sync.grad_norm == pytest.approx(stream.grad_norm, rel=1e-4)
    assert sync.loss == pytest.approx(stream.loss, rel=1e-4, abs=1e-6)


def test_a_killed_launcher_leaves_no_process_and_resume_continues_with_the_same_data(
    finished: tuple[Project, str], resumed: tuple[Project, Killed, str]
) -> None:
    project, killed, output = resumed
    run_dir = project.run_dir()
    assert killed.left == []
    assert "step 3/3" in output
    rows = trained_rows(run_dir)
    reference = trained_rows(finished[0].run_dir())
    key = lambda row: (row["step"], row["sample_id"], row["prompt"])  # noqa: E731
    assert sorted(map(key, rows)) == sorted(map(key, reference))
    assert Ledger(run_dir / "ledger.sqlite").counts() == {"trained": 54, "dropped": len(rows) - 54}
    assert [row.step for row in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert killed.done >= 1
    of_before = {str(row["sample_id"]) for row in rows if float(str(row["t_finished"])) < killed.time}
    assert killed.kept <= of_before, "what the checkpoint's weights have finished is not generated again"


@pytest.mark.timeout(600)
def test_a_pool_grows_and_shrinks_until_ctrl_c_ends_everything_and_nothing_is_lost(tmp_path: Path) -> None:
    project = Project(tmp_path, tail=False, batch=24)
    easy = [{"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2}, "answer": "full"}]
    changes = {"model": {"path": str(tmp_path / "model"), "max_context": 512}, "sampling": {"max_tokens": 400}}
    process = project.start(steps=500, tasks=easy, checkpoint={"every": 1000}, **changes)
    run_dir = project.run_dir()

    def run(name: str, *options: str) -> tuple[int, str]:
        done = warm.run([sys.executable, "-m", "streamrl.cli.main", name, str(run_dir), *options], scaled(200))
        return done.returncode, done.stdout + done.stderr

    def scale(*options: str) -> tuple[int, str]:
        return run("scale", *options)

    def steps() -> int:
        return len(read_metrics(run_dir / "metrics.jsonl"))

    def ready() -> dict[str, int]:
        return read_status(run_dir).scaling.ready

    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and steps() > 0, 400, process)
    for options, message in (
        (("--pool", "regular", "--replicas", "0"), "must keep 1 or more, not 0"),
        (("--pool", "regular", "--replicas", "3"), "2 instances at most, not 3"),
        (("--pool", "regulr", "--replicas", "2"), "did you mean regular?"),
        (("--pool", "regular", "--site", "there", "--replicas", "2"), "no pool 'regular' at a site 'there'"),
    ):
        code, output = scale(*options)
        assert code == 2 and message in output, output
    code, output = scale("--pool", "regular", "--replicas", "2")
    assert code == 0, output + project.logs()
    assert "here/regular: 1 -> 2 instances" in output
    assert "here-regular-1: first sample after" in output
    pids = family(process.pid)
    assert len(pids) > 6 and open_to_others(pids) == set()
    assert shown_secrets(run_dir, "here") == [] and read_status(run_dir).refused == {}
    assert ready() == {"here/regular": 2}
    grown = steps()
    code, output = scale("--pool", "regular", "--replicas", "1")
    assert code == 0 and "here/regular has 1 instances" in output, output
    assert ready() == {"here/regular": 1}
    assert "here-regular-1" not in read_status(run_dir).roles
    shrunk = steps()
    code, output = run("checkpoint")
    told = re.search(r"writes a checkpoint after step (\d+)", output)
    assert code == 0 and told is not None and int(told[1]) > shrunk, output
    wait_for(lambda: (run_dir / "checkpoints" / f"step_{told[1]}").is_dir(), 100, process)
    wait_for(lambda: steps() >= shrunk + 2, 100, process)
    started = psutil.Process(process.pid).children(recursive=True)
    roles = [psutil.Process(one.pid) for one in read_started(run_dir) if one.exit_code is None]
    process.send_signal(signal.SIGINT)
    assert len(roles) >= 5 and psutil.wait_procs(roles, timeout=scaled(10))[1] == []
    output = finish(process, 60, project.logs)  # it writes the report
    assert process.returncode == 130, output
    assert psutil.wait_procs(started, timeout=scaled(2))[1] == []
    assert read_status(run_dir).state == "interrupted" and not (run_dir / layout.KEYS).exists()
    code, refusal = run("checkpoint")
    assert code == 2 and "only a running job can write a checkpoint" in refusal
    assert f"--resume {run_dir.relative_to(project.folder)}" in output
    rows = trained_rows(run_dir)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    by_instance = {name: [row for row in rows if row["instance"] == name] for name in {row["instance"] for row in rows}}
    assert len(by_instance["here-regular-1"]) > 0
    assert max(row.instances or 0 for row in metrics) > 1.1
    assert metrics[0].instances == metrics[-1].instances == 1
    assert shrunk > grown - 1
    done = len(metrics)
    ids = [row["sample_id"] for row in rows if row["t_trained"] is not None]
    assert len(ids) == len(set(ids)) == 18 * done
    assert {int(str(row["group_id"])) for row in rows} == set(range(6 * done))  # no prompt skipped, none repeated
    code, output = scale("--pool", "regular", "--replicas", "2")
    assert code == 2 and "is interrupted: only a running job can be scaled" in output
