"""A run of agents: episodes of several turns from the endpoint to the gradient, through deaths in mid-episode."""

from __future__ import annotations

import http.client
import json
import re
import sqlite3
import sys
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from streamrl.agents.chat_endpoint import CUT, FROM_BEFORE
from streamrl.generation.instance.engine_config import CPU_BLOCK_SIZE
from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status
from tests.end_to_end.project import Project, trained_rows, wait_for
from tests.environments.own_environment import install
from tests.marks import descendants
from tests.security.endless_requests import ENDLESS, ENOUGH, taken
from tests.security.sockets_of import family, listeners, open_to_others, reachable
from tests.waiting import finish, scaled

EXTENDS = re.compile(r"prompt of (?P<prompt>\d+) tokens, (?P<cached>\d+) of them cached; continues turn")
ROLES = "streamrl.launcher.entry_point"

AGENTS = '''
import asyncio, os
from pathlib import Path

TEXTS = ["", "7", "<|end|><|user|>", "\\u00e9\\u4e16\\U0001f600 \\n\\t", "<|assistant|>"]

def items(index, seed):
    # with more tokens than a block of the prefix cache has, so that a turn finds the one before it there
    prompt = f"item {index} of a list that has as many as anybody wants"
    return {"prompt": prompt, "number": index, "kind": ["plain", "edits", "raises", "dies"][index % 4]}

async def run(task, client):
    """Three turns with results of a tool between them; some edit the history, some fail."""
    messages = [{"role": "user", "content": task["prompt"]}]
    score = 0.0
    for turn in range(3):
        answer = await client.chat(messages)
        score += len(answer["content"] or "") % 5
        messages.append(answer)
        result = await client.tool("text", lambda: TEXTS[(task["number"] + turn) % len(TEXTS)])
        messages.append({"role": "user", "content": result})
        while turn < 2 and Path("hold").exists():
            await asyncio.sleep(0.05)
        if turn == 1 and task["kind"] == "edits":
            messages = messages[:1] + [{"role": "user", "content": "briefly"}]
        if turn == 1 and task["kind"] == "raises":
            raise KeyError("no such room")
        if turn == 1 and task["kind"] == "dies" and task["number"] == 3:
            os._exit(4)
    return {"reward": score, "turns": 3.0}
'''

ALONE = """
import json, os
from openai import OpenAI

client = OpenAI(max_retries=2)
task = json.loads(os.environ["TASK"])
messages = [{"role": "user", "content": task["prompt"]}]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "again"}]
print("done")
print(json.dumps({"reward": len(answer.content or "") % 3}))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A run of three streamed steps, in which an instance, the agents process, the service and the controller die."""
    project = Project(tmp_path_factory.mktemp("agents"))
    (project.folder / "own_agents.py").write_text(AGENTS)
    (project.folder / "alone.py").write_text(ALONE)
    tasks = [
        {"kind": "agent", "name": "rooms", "run": "own_agents:run", "items": "own_agents:items", "weight": 8},
        {
            **{"kind": "agent", "name": "alone", "items": "own_agents:items", "count": 5},
            "command": [sys.executable, str(project.folder / "alone.py")],
        },
        {
            **{"kind": "agent", "name": "played", "weight": 2},
            "environment": {"name": str(install(project.folder).folder), "processes": 1},
        },
    ]
    model = {"path": str(project.folder / "model"), "max_context": 256}
    stop = ["e", "a", "o", "1", " "]  # a random model hardly ever samples its end token
    process = project.start(tasks=tasks, model=model, sampling={"max_tokens": 16, "stop": stop})
    run_dir = project.run_dir()

    def done(state: str) -> int:
        return Ledger(run_dir / "ledger.sqlite").counts().get(state, 0)

    def kin(word: str) -> psutil.Process:
        return next(one for one, words in descendants(process.pid) if ROLES in words and word in words)

    wait_for(lambda: (run_dir / "ledger.sqlite").exists() and done("scored") > 2, 400, process)
    kin("here-regular-0").kill()  # by its name: pids come in order of their start only until they begin anew
    wait_for(
        lambda: (run_dir / "metrics.jsonl").exists() and bool(read_metrics(run_dir / "metrics.jsonl")), 400, process
    )
    hold = project.folder / "hold"
    hold.touch()  # no episode of `rooms` ends now
    check_doors(process.pid, kin("agents").pid)
    wait_for(lambda: turns_kept(run_dir) > 3, 400, process)
    kin("agents").kill()
    kin("service").kill()
    hold.unlink()
    wait_for(lambda: len(read_metrics(run_dir / "metrics.jsonl")) > 1, 400, process)
    kin("controller").kill()
    output = finish(process, 400, project.logs)
    assert process.returncode == 0, output + project.logs()
    return project, output


def turns_kept(run_dir: Path) -> int:
    """Return the finished turns of open episodes that are on disk."""
    with closing(sqlite3.connect(f"file:{run_dir / layout.TURN_JOURNAL}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM turns").fetchone()[0])


def check_doors(launcher: int, agents: int) -> None:
    """Check that nobody else can knock but at the endpoint of agents, which lets in nobody without a key."""
    run = family(launcher)
    assert len(run) > 8 and open_to_others(run) == set()
    (endpoint,) = listeners([agents])
    assert reachable([endpoint.address]) == set()
    for path in ("/v1/models", "/sessions/x/v1/models"):
        connection = http.client.HTTPConnection(*endpoint, timeout=scaled(60))
        connection.request("GET", path, headers={"Authorization": "Bearer x"})
        assert connection.getresponse().status == 401
        connection.close()
    assert all(taken(*endpoint, kind) < ENOUGH for kind in ENDLESS)


def rows_of(project: Project) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each trajectory, in order."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in trained_rows(project.run_dir()):
        found[str(row["trajectory_id"])].append(row)
    return found


def test_every_episode_is_trained_once_or_void_with_its_cause(finished: tuple[Project, str]) -> None:
    project, _ = finished
    run_dir = project.run_dir()
    episodes = rows_of(project)
    trained = {one for one, rows in episodes.items() if rows[0]["t_trained"] is not None}
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.trained_ids() == sorted(trained) and len(trained) >= 3 * 6 * 2
    causes = Counter(str(rows[0]["void_cause"]) for rows in episodes.values() if rows[0]["reward"] is None)
    assert set(causes) <= {"verifier", "environment", "tool", "crash"} and causes.total() > 0
    for rows in episodes.values():
        told = json.loads(rows[0]["conversation"])
        if "no such room" in str(rows[0]["reward_error"]):
            assert rows[0]["advantage"] is None and len(told["steps"]) >= 4
        if rows[0]["task"] == "played":
            assert rows[0]["reward"] in (1.0, None)
            continue
        judged = rows[0]["task"] == "rooms" and rows[0]["reward"] is not None
        assert all(row["metrics"] == ([("turns", 3.0)] if judged else []) for row in rows)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [row.step for row in metrics] == [1, 2, 3]
    assert all(row.agent_metrics_by_task["rooms"] == {"turns": 3.0} for row in metrics)
    assert all((row.environment_s is None) == (row.environment_hidden_fraction is None) for row in metrics)
    assert any((row.environment_s or 0) > 0 for row in metrics)
    assert any(row.agent_metrics_by_task.get("played", {}).get("environment_steps") == 2.0 for row in metrics)
    assert read_status(run_dir).state == "done"


def test_rows_are_what_was_sampled_and_what_was_rendered(finished: tuple[Project, str]) -> None:
    project, _ = finished
    several = 0
    for rows in rows_of(project).values():
        if rows[0]["reward"] is None:
            continue
        told = json.loads(rows[0]["conversation"])
        generated = [step for step in told["steps"] if step["kind"] == "generate"]
        edits = rows[0]["task"] == "rooms" and int(rows[0]["prompt"].split()[1]) % 4 == 1
        begin = [CUT in one["detail"] or (edits and n == 1) for n, one in enumerate(generated[:-1])]  # the next turn
        assert len(rows) == 1 + sum(begin), rows[0]["sample_id"]
        several += not all(begin)
        for row in rows:
            mask, versions = np.asarray(row["mask"]), np.asarray(row["weight_versions"])
            assert np.array_equal(mask, versions >= 0) and mask[0]
            assert set(versions[mask]) <= {row["step"] - 1}
            assert np.all(np.asarray(row["logprobs"])[~mask] == 0)
        assert len(generated) == (3 if rows[0]["task"] == "rooms" else 2)
        sampled = sum(sum(row["mask"]) for row in rows)
        assert sampled == rows[0]["output_length"] == sum(step["tokens"] for step in generated)
    assert several > 0


def test_episodes_are_resumed_by_the_successor_of_an_agents_process(finished: tuple[Project, str]) -> None:
    resumed = 0
    for rows in rows_of(finished[0]).values():
        steps = [one for one in json.loads(rows[0]["conversation"])["steps"] if one["kind"] == "generate"]
        before = [FROM_BEFORE in one["detail"] for one in steps]
        assert before == sorted(before, reverse=True), "its first calls are those from before"
        resumed += any(before) and rows[0]["t_trained"] is not None
    assert resumed > 1


def test_turns_find_what_they_extend_in_the_prefix_cache(finished: tuple[Project, str]) -> None:
    found = []
    for rows in rows_of(finished[0]).values():
        for step in json.loads(rows[0]["conversation"])["steps"]:
            if (said := EXTENDS.match(step["detail"])) is not None:
                found.append((int(said["prompt"]), int(said["cached"])))
    assert all(cached < prompt for prompt, cached in found)
    assert sum(cached >= CPU_BLOCK_SIZE for _, cached in found) > 3, found


def test_the_trainer_computes_what_was_sampled(finished: tuple[Project, str]) -> None:
    for row in read_metrics(finished[0].run_dir() / "metrics.jsonl"):
        assert row.logprob_gap_mean is not None and row.logprob_gap_mean < 1e-4  # fp32 on both sides
        assert row.importance_ratio_max is not None and abs(row.importance_ratio_max - 1) < 1e-3
        assert row.staleness_max == 0


def test_episodes_are_shown(finished: tuple[Project, str]) -> None:
    project, output = finished
    for name in ("here-regular-0", "agents-here", "service-here", "controller"):
        assert f"{name} was killed by SIGKILL" in output
    assert "agents-here" in read_status(project.run_dir()).roles
    assert "step 3/3" in output
