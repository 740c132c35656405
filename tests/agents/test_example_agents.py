"""The example agents over the whole way: host, endpoint, worker processes, and a model that searches by halves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.agents import try_again
from examples.agents.guess_number import HIGHEST, hint
from streamrl.agents.agent_host import AgentHost
from streamrl.agents.episode import Episode, EpisodeOrder, GeneratedTurn, TurnOrder
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.load import load_run
from streamrl.config.tasks import AgentTask
from streamrl.tasks.source import PromptSource
from tests.agents.random_sessions import small_tokenizer
from tests.marks import descendants
from tests.waiting import until

ROOT = Path(__file__).parents[2]
TOKENIZER = small_tokenizer()


class Searcher:
    """A model that halves the interval that the hints in its prompt leave."""

    def __init__(self) -> None:
        self.turns = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, order: TurnOrder) -> GeneratedTurn:
        """Answer one turn."""
        self.turns += 1
        await self.hold.wait()
        low, high = 1, HIGHEST
        for direction, guess in re.findall(r"(higher|lower) than (\d+)", TOKENIZER.decode(order.prompt_tokens)):
            low, high = (max(low, int(guess) + 1), high) if direction == "higher" else (low, min(high, int(guess) - 1))
        text = str((low + high) // 2)
        ids = np.asarray(TOKENIZER.encode(text) + TOKENIZER.encode("<|im_end|>"), np.int32)
        return GeneratedTurn(ids, np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32), "stop", text)


@asynccontextmanager
async def hosting(example: str, model: Searcher) -> AsyncIterator[tuple[AgentHost, list[EpisodeOrder]]]:
    run = load_run(ROOT / "examples" / "agents" / example)
    (task,) = run.tasks
    assert isinstance(task, AgentTask)
    items = [PromptSource([task], 0).prompt(number).reward_input for number in range(64)]
    orders = [EpisodeOrder(f"g.{number:03}", "g", task.key, item, 7, None) for number, item in enumerate(items)]
    workers = EpisodeWorkers([task], 1)
    host = AgentHost(run, TOKENIZER, model.generate, workers)
    try:
        await workers.start()
        await host.start()
        yield host, orders
    finally:
        await workers.close()
        await host.close()


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def right(order: EpisodeOrder, episode: Episode) -> None:
    """Check an episode against the game played by hand."""
    low, high, guesses = 1, HIGHEST, 1
    while (guess := (low + high) // 2) != order.item["number"]:
        low, high = (guess + 1, high) if guess < order.item["number"] else (low, guess - 1)
        guesses += 1
    assert episode.void is None, episode.void
    assert episode.reward == pytest.approx(1.0 - 0.1 * (guesses - 1))
    (row,) = episode.rows
    sampled = TOKENIZER.decode(row.tokens[row.sampled])
    assert sampled.count("<|im_end|>") == guesses
    assert sum(step.kind == "generate" for step in episode.steps) == guesses


def test_many_games_are_played_at_once_each_in_one_row() -> None:
    async def scenario() -> None:
        async with hosting("guess_number.yaml", Searcher()) as (host, orders):
            episodes = await asyncio.gather(*(host.run(order) for order in orders))
            for order, episode in zip(orders, episodes, strict=True):
                right(order, episode)
                assert episode.metrics["found"] == 1.0

    asyncio.run(scenario())


def test_episodes_whose_worker_is_killed_are_played_again_in_sessions_of_their_own() -> None:
    async def scenario() -> None:
        model = Searcher()
        async with hosting("guess_number.yaml", model) as (host, orders):
            model.hold.clear()
            playing = [asyncio.ensure_future(host.run(order)) for order in orders[:3]]
            await until(lambda: model.turns == 3, 30)
            (worker,) = [one for one, words in descendants() if "streamrl.agents.worker" in words]
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: model.turns > 3, 60)
            model.hold.set()
            for order, episode in zip(orders, await asyncio.gather(*playing), strict=False):
                right(order, episode)

    asyncio.run(scenario())


def test_an_unmodified_program_plays_by_its_two_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to(sys.executable)  # the file calls it `python`, as in an active environment
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))

    async def scenario() -> None:
        async with hosting("guess_number_openai.yaml", Searcher()) as (host, orders):
            episodes = await asyncio.gather(*(host.run(order) for order in orders[:2]))
            for order, episode in zip(orders, episodes, strict=False):
                right(order, episode)

    asyncio.run(scenario())


def test_hints_lead_to_the_number_and_nearer_guesses_score_more() -> None:
    assert hint("7", 7) == ("Right.", 1.0)
    assert hint("I say 3 or 12", 7)[0] == "My number is lower than 12. Guess again."
    assert hint("3", 7)[0] == "My number is higher than 3. Guess again."
    assert hint("none", 7) == ("That is no number. Answer with one number.", 0.0)
    assert 0 < hint("20", 1)[1] < hint("6", 7)[1] < 0.5
    assert hint("9" * 50, 7)[1] == 0.0


@pytest.mark.parametrize(("wrong", "reward"), [(0, 1.0), (1, 0.7), (2, 0.4), (3, 0.0)])
def test_each_further_try_costs_and_the_conversation_only_grows(wrong: int, reward: float) -> None:
    task = try_again.item(0, 5)
    answers = ["The result is 3."] * wrong + [f"12; \n<answer>{task['answer']}</answer>"]
    seen: list[list[dict[str, Any]]] = []

    class Client:
        async def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
            assert seen == [] or messages[: len(seen[-1])] == seen[-1]
            seen.append(list(messages))
            return {"role": "assistant", "content": answers[len(seen) - 1]}

    played = asyncio.run(try_again.run(task, Client()))
    assert played == {"reward": pytest.approx(reward), "tries": len(seen)}
    assert len(seen) == min(wrong + 1, try_again.TRIES)
