"""The end of an episode is that of its agent: what is answered later is not trained, and nothing waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamrl.agents import agent_program
from streamrl.agents.agent_host import AgentHost
from streamrl.agents.chat_endpoint import ABORTED, LATE
from streamrl.agents.episode import Episode, EpisodeOrder, EpisodeOutcome, GeneratedTurn, TurnOrder
from streamrl.agents.live_episode import LEFT
from streamrl.agents.session import SessionLimits
from streamrl.agents.turns import CallError
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.run import RunConfig
from tests.agents.agents_module import enter_folder_with
from tests.agents.test_agent_host import ORDER, TOKENIZER, USER, Model, call, hosting, never
from tests.agents.test_refused_calls import FULL
from tests.agents.test_session import MORE, answered, lose, session
from tests.agents.test_session import call as asked
from tests.agents.test_turns_that_count import trained
from tests.agents.test_workers import agent, order, play, started
from tests.waiting import scaled, until

AGENTS = """
import asyncio, os, threading, time
import httpx2

def ask(url, text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    answer = httpx2.post(url + "/chat/completions", json=body, timeout=600, trust_env=False)
    open("status", "w").write(str(answer.status_code))

def ask_after(ended, url):
    ended.wait()
    ask(url, "late")

def wait_for(path, then=lambda: None):
    while not os.path.exists(path): time.sleep(0.01)
    then()

async def end_slowly():
    try: await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(0.5)
        open("ended", "w").close()

async def run(task, client):
    in_thread = asyncio.get_running_loop().run_in_executor
    match task["prompt"]:
        case "pid": return os.getpid()
        case "waits": await asyncio.sleep(1000)
        case "calls when it has ended":
            await client.chat([{"role": "user", "content": "first"}])
            ended = threading.Event()
            asyncio.current_task().add_done_callback(lambda _: ended.set())
            in_thread(None, ask_after, ended, client.base_url)
        case "ends during a call":
            await client.chat([{"role": "user", "content": "first"}])
            in_thread(None, ask, client.base_url, "second")
            task["left"] = asyncio.create_task(client.chat([{"role": "user", "content": "third"}]))
            while not os.path.exists("both"): await asyncio.sleep(0.01)
            if task["raises"]: raise ValueError("no answer is good")
        case "leaves a tool":
            task["left"] = asyncio.create_task(client.tool("search", asyncio.sleep, 1000))
            await asyncio.sleep(0)
        case "leaves a thread": in_thread(None, wait_for, "go")
        case "leaves what kills": in_thread(None, wait_for, "go", lambda: os._exit(3))
        case "leaves what ends slowly":
            task["left"] = asyncio.create_task(end_slowly())
            await asyncio.sleep(0)
    return 1.0
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with(AGENTS, tmp_path, monkeypatch)


def test_an_answer_that_came_after_the_end_is_in_no_row_and_is_not_the_conversation() -> None:
    here = session()
    first = answered(here, asked(USER))
    late = answered(here, asked(USER, first.answer, MORE), reason="length")
    late.known = 3.0
    assert here.cut and here.end(2.5) == [late]
    (row,) = here.rows()
    assert row.tokens.tolist() == first.tokens.tolist()
    assert here.conversation() == [USER, first.answer] and not here.cut


def test_of_a_fork_the_branch_that_was_answered_before_the_end_stays() -> None:
    here = session()
    first = answered(here, asked(USER))
    late = answered(here, asked(USER, first.answer, MORE), "no")
    kept = answered(here, asked(USER, first.answer, {"role": "user", "content": "Why?"}), "yes")
    late.known = 3.0
    assert here.end(2.0) == [late]
    (row,) = here.rows()
    assert row.tokens.tolist() == kept.tokens.tolist()


def test_an_answer_that_only_a_call_after_the_end_goes_on_from_does_not_count() -> None:
    here = session()
    lost = lose(answered(here, asked(USER)))
    second, _ = here.call(asked(USER, lost.answer, MORE), 3.0)
    assert lost.counts and second.parent is lost
    assert here.end(2.5) == [lost] and here.rows() == []


@pytest.mark.parametrize("at", [0.5, 1.0])
def test_a_refusal_after_the_end_is_none_of_the_episode(at: float) -> None:
    here = session()
    with pytest.raises(CallError):
        here.call(asked(FULL), 1.0)
    here.end(at)
    assert here.over == here.cut == (at == 1.0)


def test_what_the_endpoint_answers_after_the_end_of_the_agent_is_not_trained_and_a_step_says_so() -> None:
    class Agents:
        async def run(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
            async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as client:
                assert (await call(client)).is_success
                ended = time.monotonic()
                assert (await call(client, MORE)).is_success
                assert (await call(client, MORE, stream=True)).is_success
                assert not (await call(client, FULL)).is_success
            return EpisodeOutcome(1.0, None, ended=ended)

    async def main() -> Episode:
        async with hosting(Model("in time", "late", "later"), never, max_context=500) as host:
            host._workers = Agents()
            return await host.run(ORDER)

    episode = asyncio.run(main())
    assert (trained(episode), episode.reward, episode.finish_reason) == (["in time"], 1.0, "stop")
    left_out = [(step.name, step.detail) for step in episode.steps if step.name.endswith("left out")]
    assert left_out == [("turn 1 left out", LATE), ("turn 2 left out", LATE)]


def test_a_call_whose_body_comes_when_its_episode_has_ended_begins_no_turn() -> None:
    model, sent = Model(), list[Any]()
    begun, rest = asyncio.Event(), asyncio.Event()
    body = json.dumps({"model": "policy", "messages": [USER]}).encode()

    async def receive() -> Any:
        begun.set()
        await rest.wait()
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        async with hosting(model, never) as host:
            opened = host._endpoint.open(ORDER, SessionLimits(max_context=500, max_turns=9))
            scope = {
                "type": "http",
                "method": "POST",
                "path": f"/sessions/{opened.id}/v1/chat/completions",
                "headers": [],
            }
            calling = asyncio.ensure_future(host._endpoint.app(scope, receive, send))
            await begun.wait()
            await host._endpoint.close(opened)
            rest.set()
            await calling

    asyncio.run(asyncio.wait_for(main(), scaled(60)))
    assert sent[0]["status"] == 503 and b"episode_over" in sent[1]["body"] and model.orders == []


@asynccontextmanager
async def with_workers(model: Model, **use: Any) -> AsyncIterator[AgentHost]:
    """Run agents in worker processes, or as programs."""
    task = {"kind": "agent", "name": "sums", "items": "m:g", **(use or {"run": "mischievous_agents:run"})}
    run = RunConfig.model_validate({"model": {"path": "some/model", "max_context": 500}, "tasks": [task]})
    workers = EpisodeWorkers(run.agent_tasks, 1)
    host = AgentHost(run, TOKENIZER, model.generate, workers)
    await workers.start(scaled(60))
    await host.start()
    try:
        yield host
    finally:
        await host.close()
        await workers.close()


def to(prompt: str, **item: Any) -> EpisodeOrder:
    return order(prompt, task="sums", **item)


def test_a_call_that_an_agent_leaves_to_a_thread_and_that_begins_when_it_has_ended_is_not_trained() -> None:
    async def scenario() -> None:
        async with with_workers(Model("in time", "late")) as host:
            episode = await host.run(to("calls when it has ended"))
            assert (trained(episode), episode.reward) == (["in time"], 1.0), episode.void
            await until(lambda: Path("status").exists() and Path("status").read_text())
            assert Path("status").read_text() in ("200", "401", "503")

    asyncio.run(scenario())


class AnswersOnce(Model):
    """Answers the first call, and no other."""

    async def generate(self, order: TurnOrder) -> GeneratedTurn:
        if self.orders:
            self.gate.clear()
        return await super().generate(order)


@pytest.mark.parametrize("raises", [False, True])
def test_calls_that_run_when_the_agent_ends_are_aborted_at_once_and_spoil_no_worker(raises: bool) -> None:
    model = AnswersOnce("in time")

    async def scenario() -> None:
        async with with_workers(model) as host:
            (worker,) = host._workers._workers  # type: ignore[attr-defined]
            playing = asyncio.ensure_future(host.run(to("ends during a call", raises=raises)))
            await until(lambda: len(model.orders) == 3)
            Path("both").touch()
            episode = await playing
            assert model.cancelled == 2 and trained(episode) == ["in time"]
            assert episode.reward == (None if raises else 1.0)
            left_out = [step.detail for step in episode.steps if step.name.endswith("left out")]
            assert left_out == [ABORTED] * 2
            await until(lambda: Path("status").exists() and Path("status").read_text() == "503")
            await asyncio.wait_for(worker.idle.wait(), scaled(30))
            assert worker.open and not worker.ended

    asyncio.run(scenario())


PROGRAM = """
import json, os, subprocess, sys, urllib.request

ASK = '''
import json, os, time, urllib.request

def ask(text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    url, sent = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(url, sent, {"content-type": "application/json"})).read()
'''
LATER = '''
open("ready", "w").close()
while not os.path.exists("noticed"): time.sleep(0.01)
ask("late")
'''

exec(ASK)
ask("first")
subprocess.Popen([sys.executable, "-c", ASK + LATER])
while not os.path.exists("ready"): time.sleep(0.01)
print(json.dumps({"reward": 1}))
"""


def test_what_a_program_has_started_is_not_trained_for_what_it_asks_once_the_program_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exit_of, model = agent_program._exit_of, Model("in time", "late")

    async def noticed(process: asyncio.subprocess.Process) -> tuple[int, float]:
        found = await exit_of(process)
        Path("noticed").touch()  # the child asks only now
        return found

    monkeypatch.setattr(agent_program, "_exit_of", noticed)
    monkeypatch.setattr(agent_program, "LAST_WORDS_S", scaled(60))  # which end with the child

    async def scenario() -> None:
        async with with_workers(model, command=[sys.executable, "-c", PROGRAM]) as host:
            episode = await host.run(to(""))
            assert (trained(episode), episode.reward) == (["in time"], 1.0), episode.void
            assert model.texts == []  # the child was answered

    asyncio.run(scenario())


def test_a_tool_that_an_agent_leaves_running_is_a_step_that_says_so() -> None:
    async def scenario() -> None:
        async with started() as owner:
            outcome = await play(owner, None, order("leaves a tool"))
            assert [(step.name, step.detail) for step in outcome.steps] == [("search", LEFT)]
            assert outcome.reward == 1.0

    asyncio.run(scenario())


def test_an_outcome_does_not_wait_for_what_its_agent_has_left_behind() -> None:
    async def scenario() -> None:
        async with started(agent()) as owner:
            (worker,) = owner._workers
            assert (await play(owner, None, order("leaves a thread"))).reward == 1.0
            assert not worker.idle.is_set()
            Path("go").touch()
            await asyncio.wait_for(worker.idle.wait(), scaled(30))
            assert (await play(owner, None, order("pid"))).reward == worker.process.pid

    asyncio.run(scenario())


def test_an_episode_is_not_blamed_for_what_an_ended_one_has_left_behind_that_kills_their_worker() -> None:
    async def scenario() -> None:
        async with started() as owner:
            assert (await play(owner, None, order("leaves what kills"))).reward == 1.0
            other = play(owner, None, order("waits"))
            (worker,) = owner._workers
            await until(lambda: len(worker.playing) == 2)
            Path("go").touch()
            assert (await other).again

    asyncio.run(scenario())


def test_a_worker_for_one_episode_ends_what_its_agent_has_left_behind() -> None:
    async def scenario() -> None:
        async with started() as owner:
            owner._suspects.add("one")
            assert (await play(owner, None, order("leaves what ends slowly", "one"))).reward == 1.0
            assert os.path.exists("ended")

    asyncio.run(scenario())
