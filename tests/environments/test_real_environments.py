"""Environments of gymnasium and verifiers, installed from PyPI or an index: `make test-environments`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.agents.agent_host import AgentHost
from streamrl.agents.episode import Episode, EpisodeOrder
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask, EnvironmentUse
from streamrl.environments.environment_pool import EnvironmentPlace, EnvironmentPool
from streamrl.environments.environment_trial import EnvironmentTrial, try_environment
from streamrl.environments.installed import MANIFEST, VENV, InstalledEnvironment, add_environment
from streamrl.errors import UserError
from streamrl.runtime.output_pipe import OutputLog
from tests.agents.model_server import ModelServer
from tests.agents.test_agent_host import TOKENIZER, Model

FOLDER = os.environ.get("STREAMRL_TEST_ENVIRONMENTS", "")
"""A folder that keeps the venvs between runs."""
pytestmark = pytest.mark.skipif(not FOLDER, reason="installs packages: make test-environments")
EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
MOVES = ["left", "down", "right", "up"]


def made(name: str, make: str, *packages: str, paths: Sequence[Path] = ()) -> InstalledEnvironment:
    folder = Path(FOLDER) / name
    if not (folder / "environment.json").exists():
        add_environment(folder, make, packages, paths=paths)
    return InstalledEnvironment(folder, make)


@pytest.fixture(scope="module")
def lake() -> InstalledEnvironment:
    return made("frozen_lake", "gymnasium:FrozenLake-v1", "gymnasium[toy-text,mujoco]")


async def tried(
    one: InstalledEnvironment, config: dict[str, Any], *answers: str, episodes: int = 8
) -> EnvironmentTrial:
    pool = EnvironmentPool(EnvironmentUse(name=one.name, config=config), one, OutputLog(None), 60, 120)
    await pool.start()
    try:
        return await try_environment(pool, episodes, 40, answers)
    finally:
        await pool.close()


def test_frozen_lake_is_walked_by_names(lake: InstalledEnvironment) -> None:
    config = {"actions": MOVES, "kwargs": {"is_slippery": False}}
    fallen = asyncio.run(tried(lake, config, "I go Down", "down? no, right"))
    assert fallen.problems() == [] and fallen.rewards == [0.0] * 8 and len(fallen.steps) == 16  # into the hole
    walked = asyncio.run(tried(lake, config, "down", "down", "right", "right", "down", "right"))
    assert walked.problems() == [] and walked.rewards == [1.0] * 8 and len(walked.steps) == 48
    assert (
        asyncio.run(tried(lake, {"kwargs": {"is_slippery": False}}, "1", "1", "2", "2", "1", "2")).rewards == [1.0] * 8
    )


def test_what_the_model_sees_of_a_lake(lake: InstalledEnvironment) -> None:
    async def look(place: EnvironmentPlace) -> list[str]:
        seen = [(await place.reset({"seed": 1})).result]
        seen += [(await place.step({"content": text})).result for text in ("down", "nowhere", "it is 7")]
        assert [one.get("metrics") for one in seen[2:]] == [{"unreadable": 1.0}] * 2
        return [one["messages"][0]["content"] for one in seen]

    async def scenario() -> list[str]:
        config = {"actions": MOVES, "kwargs": {"is_slippery": False}}
        pool = EnvironmentPool(EnvironmentUse(name="lake", config=config), lake, OutputLog(None), 60, 120)
        await pool.start()
        try:
            async with pool.place("a") as place:
                return await look(place)
        finally:
            await pool.close()

    first, second, third, _ = asyncio.run(scenario())
    assert first == "You act in FrozenLake-v1. Answer with one of: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert second.splitlines()[-4:] == ["SFFF", "[F]HFH", "FFFH", "HFFG"]
    assert third == "There is no action in your answer. Answer with one of: left, down, right, up."


def test_actions_of_several_numbers_and_a_simulator() -> None:
    hopper = made("frozen_lake", "gymnasium:Hopper-v5")
    trial = asyncio.run(tried(hopper, {}, episodes=4))
    assert trial.problems() == [] and min(trial.steps) > 0
    unreadable = asyncio.run(tried(hopper, {"unreadable": -1}, "0.1 0.2", episodes=1))  # it has three joints
    assert unreadable.rewards == [-40.0]


def test_a_taskset_of_verifiers_plays_and_scores_its_episodes() -> None:
    installed = made("reverse_text", "verifiers:reverse_text", "verifiers==0.4.0", paths=[EXAMPLES])
    use = {"name": str(installed.folder), "config": {"taskset": {"num_tasks": 2, "letters": 3}}}
    task = AgentTask.model_validate({"kind": "agent", "name": "reverse", "environment": use})

    async def scenario() -> None:
        owner = EpisodeWorkers([task], 1)
        async with ModelServer().running() as server:
            try:
                await owner.start(120)
                orders = [EpisodeOrder(str(n), "g", "reverse", {"index": n}, 1, None) for n in range(3)]
                played = await asyncio.gather(*(owner.run(one, server.url, f"key {one.sample_id}") for one in orders))
            finally:
                await owner.close()
        asked = {call["key"]: call["messages"] for call in server.calls}
        assert asked["Bearer key 0"] == asked["Bearer key 2"] != asked["Bearer key 1"]  # two tasks
        assert all(one.void is None and 0 < (one.reward or 0) < 1 for one in played)
        assert [[step.kind for step in one.steps] for one in played] == [["environment"]] * 3

    asyncio.run(scenario())


LOOP = """
import httpx
import verifiers.v1.harness as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

class LoopHarnessConfig(HarnessConfig): pass

class LoopHarness(vf.Harness[LoopHarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": self.resolve_prompt(data)[1]}]
        url, headers = endpoint.rstrip("/") + "/chat/completions", {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            for _ in range(5):
                answer = await client.post(url, json={"model": ctx.model, "messages": messages}, headers=headers)
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
                messages.append({"role": "user", "content": "more"})
        return ProgramResult(0, "", "")

__all__ = ["LoopHarness"]
"""


@pytest.mark.parametrize(
    ("limits", "turns", "cut"), [({}, 5, 0.0), ({"max_turns": 3}, 3, 1.0), ({"max_context": 70}, 2, 1.0)]
)
def test_what_was_played_of_an_episode_that_ends_by_rule_is_scored(
    tmp_path: Path, limits: dict[str, int], turns: int, cut: float
) -> None:
    installed = made("reverse_text", "verifiers:reverse_text", "verifiers==0.4.0", paths=[EXAMPLES])
    (tmp_path / "loop_harness.py").write_text(LOOP)
    looped = tmp_path / "looped"
    looped.mkdir()
    (looped / VENV).symlink_to(installed.folder / VENV)
    manifest = {"make": installed.make, "paths": [str(EXAMPLES), str(tmp_path)], "config": {}, "requirements": []}
    (looped / MANIFEST).write_text(json.dumps(manifest))
    agent = {"harness": {"id": "loop_harness"}, "runtime": {"type": "subprocess"}}
    use = {"name": str(looped), "config": {"taskset": {"num_tasks": 1, "letters": 3}, "agent": agent}}
    task = {"kind": "agent", "name": "looped", "environment": use, "max_turns": limits.pop("max_turns", 9)}
    run = RunConfig.model_validate(
        {"model": {"path": "some/model", **limits}, "sampling": {"max_tokens": 8}, "tasks": [task]}
    )

    async def scenario() -> Episode:
        workers = EpisodeWorkers(run.agent_tasks, 1)
        host = AgentHost(run, TOKENIZER, Model(*["abcdefgh"] * 5).generate, workers)
        try:
            await workers.start(120)
            await host.start()
            return await host.run(EpisodeOrder("e", "g", "looped", {"index": 0}, 1, None))
        finally:
            await workers.close()
            await host.close()

    played = asyncio.run(scenario())
    assert played.void is None and played.reward is not None and played.reward > 0
    assert played.metrics["cut"] == cut and [step.kind for step in played.steps].count("generate") == turns


def test_a_wrong_config_is_refused_at_the_start(lake: InstalledEnvironment) -> None:
    for config, text in (
        ({"action": []}, r"unknown keys \['action'\]; known are actions, digits"),
        ({"actions": ["left"]}, "actions: FrozenLake-v1 has 4, got 1 names"),
        ({"kwargs": {"size": 3}}, "unexpected keyword argument 'size'"),
    ):
        with pytest.raises(UserError, match=text):
            asyncio.run(tried(lake, config))
