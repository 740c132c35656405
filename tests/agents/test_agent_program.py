"""Agents that are programs: they know two environment variables, and the last line that they print is their reward."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from streamrl.agents import agent_program
from streamrl.agents.agent_host import AgentHost
from streamrl.agents.agent_program import play_program
from streamrl.agents.episode import Episode, EpisodeOrder, EpisodeOutcome
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask, EpisodeDeadlines
from streamrl.rollouts.void import LONGEST_TRACEBACK, VoidCause
from streamrl.runtime.processes import is_alive
from tests.agents.model_server import ModelServer
from tests.agents.test_agent_host import TOKENIZER, Model
from tests.waiting import scaled, until, wait_for

UNMODIFIED = """
import json, os
from openai import OpenAI
task = json.loads(os.environ["TASK"])
answer = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": task["prompt"]}])
print("thinking aloud")
print(json.dumps({"reward": len(answer.choices[0].message.content), "words": 1}))
"""


def order(**item: object) -> EpisodeOrder:
    return EpisodeOrder("e", "g", "mine", {"prompt": "echo four", **item}, 0, None)


def played(code: str, seconds: float = 600.0, log: list[bytes] | None = None, **item: object) -> EpisodeOutcome:
    limits = EpisodeDeadlines(episode_s=seconds)
    kept = log if log is not None else []
    command = [sys.executable, "-c", code]
    return asyncio.run(play_program(command, order(**item), "http://x/v1", "k", limits, kept.append))


def test_a_program_with_the_openai_package_that_knows_only_its_environment_plays_an_episode() -> None:
    task = AgentTask(kind="agent", name="mine", command=[sys.executable, "-c", UNMODIFIED], items="unused:items")

    async def scenario() -> None:
        async with ModelServer().running() as server:
            owner = EpisodeWorkers([task], 1)
            await owner.start()
            outcome = await owner.run(order(), server.url, "its-key")
            await owner.close()
            assert (outcome.reward, outcome.void, outcome.metrics) == (4.0, None, {"words": 1.0})
            assert server.calls[0]["key"] == "Bearer its-key"

    asyncio.run(scenario())


def test_a_program_gets_its_item_and_what_it_prints_is_kept() -> None:
    code = (
        "import json, os, sys\n"
        "task = json.loads(os.environ['TASK'])\n"
        "print(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'])\n"
        "print('a complaint', file=sys.stderr)\n"
        "print(json.dumps({'reward': task['number']}))"
    )
    log: list[bytes] = []
    assert played(code, log=log, number=1.5, text="dreißig").reward == 1.5
    assert b"http://x/v1 k\n" in b"".join(log) and b"a complaint\n" in b"".join(log)


def test_a_program_reaches_the_endpoint_beside_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def scenario() -> None:
        async with ModelServer().running() as server:
            command = [sys.executable, "-c", UNMODIFIED]
            outcome = await play_program(command, order(), server.url, "k", EpisodeDeadlines(), len)
            assert outcome.reward == 4.0, outcome

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "cause", "says"),
    [
        ("raise SystemExit(3)", VoidCause.CRASH, "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", VoidCause.CRASH, "ended with SIGSEGV"),
        ("print('done')", VoidCause.VERIFIER, "expected {\"reward\": ...} as its last line, got 'done'"),
        ("pass", VoidCause.VERIFIER, "as its last line, got ''"),
        ("print('12')", VoidCause.VERIFIER, "as its last line, got '12'"),  # the model's answer, say
        ("print('true')", VoidCause.VERIFIER, "as its last line, got 'true'"),
        ("print('[0.5]')", VoidCause.VERIFIER, "as its last line, got '[0.5]'"),
        ("print('[' * 9999)", VoidCause.VERIFIER, "as its last line, got '[["),  # Python's parser fails on that
        ("print('{\"score\": 1}')", VoidCause.VERIFIER, "a mapping without `reward`"),
        ("print('{\"reward\": NaN}')", VoidCause.VERIFIER, "the reward must be finite"),
        ('print(\'{"reward": "1"}\')', VoidCause.VERIFIER, "the reward must be a number, got str"),
    ],
)
def test_a_program_that_fails_is_void_with_its_cause(code: str, cause: VoidCause, says: str) -> None:
    outcome = played(code)
    assert outcome.reward is None and outcome.void is not None
    assert (outcome.void.cause, says in outcome.void.text) == (cause, True), outcome.void


def test_a_program_that_ends_with_an_error_is_void_with_the_end_of_its_standard_error() -> None:
    outcome = played("import sys\nprint('ä' * 5000, file=sys.stderr)\nraise ValueError('its own words')")
    assert len(outcome.traceback) == LONGEST_TRACEBACK and outcome.traceback.startswith("ä")
    assert outcome.traceback.endswith("ValueError: its own words")
    assert played("import sys\nprint('a remark', file=sys.stderr)\nprint('{\"reward\": 1}')").traceback == ""


def test_a_program_that_does_not_start_is_void_as_is_an_item_that_no_variable_holds() -> None:
    limits = EpisodeDeadlines()
    gone = asyncio.run(play_program(["/no/such/program"], order(), "u", "k", limits, len))
    assert gone.void is not None and gone.void.cause == VoidCause.ENVIRONMENT
    assert played("print('{\"reward\": 1}')", text="x" * 130_000).reward == 1.0
    large = played("print('{\"reward\": 1}')", text="x" * 132_000)
    assert large.void is not None and "the variable TASK takes" in large.void.text


def test_a_program_that_prints_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "MOST_PRINTED", 1 << 20)
    outcome = played("while True: print('x' * 1000)")
    assert outcome.void is not None and "printed more than 1 MiB" in outcome.void.text


@pytest.mark.parametrize("output", ["None", "subprocess.DEVNULL"], ids=["holds the pipes", "has none"])
@pytest.mark.parametrize("end", ["print('{\"reward\": 1}')", "os._exit(3)"])
def test_what_a_program_leaves_behind_is_not_waited_for_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, end: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, subprocess, sys\n"
        "nap = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        f"child = subprocess.Popen(nap, stdout={output}, stderr={output})\n"
        "open('left', 'w').write(str(child.pid))\n" + end
    )
    assert played(code).reward == (1.0 if "reward" in end else None)
    pid = int(Path("left").read_text())
    wait_for(lambda: not is_alive(pid), 10)


ELSEWHERE = """
import os, subprocess, sys, time
nap = [sys.executable, "-c", "import time; time.sleep(1000)"]
null = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
browser = subprocess.Popen(nap, start_new_session=True, **null)
daemon = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
started = [sys.executable, "-c", daemon, *nap]
daemon = subprocess.run(started, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
open("pids", "w").write(f"{browser.pid} {int(daemon)}")
os.rename("pids", "all pids")
"""


@pytest.mark.parametrize("end", ["print('{\"reward\": 1}')", "os._exit(3)", "time.sleep(1000)"])
def test_what_a_program_has_started_in_a_session_of_its_own_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        command = [sys.executable, "-c", ELSEWHERE + end]
        playing = asyncio.ensure_future(play_program(command, order(), "u", "k", EpisodeDeadlines(), len))
        await until(Path("all pids").exists, 60)
        if "sleep" in end:
            playing.cancel()
        await asyncio.wait({playing})
        pids = [int(pid) for pid in Path("all pids").read_text().split()]
        await until(lambda: not any(map(is_alive, pids)), 10)

    asyncio.run(scenario())


DAEMON = """
import os, subprocess, sys
nap = [sys.executable, "-c", "import time; open('naps', 'w'); time.sleep(1000)"]
null = subprocess.DEVNULL
subprocess.Popen(nap, start_new_session=True, stdin=null, stdout=null, stderr=null)
while not os.path.exists("naps"):
    os.sched_yield()
print('{"reward": 1}')
"""


def test_the_log_names_what_has_ended_with_a_program_in_another_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log: list[bytes] = []
    assert played(DAEMON, log=log).reward == 1.0
    (line,) = [line for line in b"".join(log).decode().splitlines() if "session" in line]
    assert line.startswith(f"{sys.executable}: ended in a session of its own: python")


def test_programs_share_no_tmux_server_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "import os; print(os.path.isdir(path := os.environ['TMUX_TMPDIR']), path); print('{\"reward\": 1}')"

    def folder() -> str:
        log: list[bytes] = []
        assert played(says, log=log).reward == 1.0
        there, path = b"".join(log).decode().splitlines()[0].split()
        assert there == "True"
        return path

    monkeypatch.delenv("TMUX_TMPDIR", raising=False)
    one, other = folder(), folder()
    assert one != other and not Path(one).exists() and not Path(other).exists()
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    assert folder() == str(tmp_path) and tmp_path.is_dir()


TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids", "all pids")
time.sleep(1000)
"""


def test_a_program_ends_with_all_that_it_has_started_when_its_time_is_over_or_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seconds in (scaled(2.0), scaled(10.0), scaled(60.0)):  # it may take as long as that to start its child
        outcome = played(TREE, seconds=seconds)
        assert outcome.void is not None and outcome.void.cause == VoidCause.TIMEOUT
        assert f"the episode took more than {seconds:g} s, when {sys.executable} still ran" in outcome.void.text
        if Path("all pids").exists():
            break
    pids = [int(pid) for pid in Path("all pids").read_text().split()]

    async def scenario() -> None:
        await until(lambda: not any(map(is_alive, pids)), 10)
        os.remove("all pids")
        command = [sys.executable, "-c", TREE]
        playing = asyncio.ensure_future(play_program(command, order(), "u", "k", EpisodeDeadlines(), len))
        await until(lambda: Path("all pids").exists(), 10)
        playing.cancel()
        await asyncio.wait({playing})
        more = [int(pid) for pid in Path("all pids").read_text().split()]
        await until(lambda: not any(map(is_alive, more)), 10)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("more", "reward", "cause"),
    [
        ("[ask() for _ in range(9)]", 0.0, None),  # the endpoint takes two calls, and the package raises at the third
        ("ask(); raise SystemExit(3)", None, VoidCause.CRASH),
        ("[ask() for _ in range(2)]\ntry: ask()\nexcept Exception: pass\nprint('{\"reward\": 0.5}')", 0.5, None),
    ],
)
def test_a_program_that_ends_because_its_turns_are_used_up_has_no_reward_and_is_not_void(
    more: str, reward: float | None, cause: VoidCause | None
) -> None:
    code = f"{ASKS}\n{more}"
    episode = led(code, max_turns=2)
    assert (episode.reward, episode.void and episode.void.cause) == (reward, cause), episode
    assert episode.traceback == ""


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("ask('gpt-4o')", True),
        ("try: ask('gpt-4o')\nexcept Exception: raise SystemExit(1)", True),
        ("try: ask('gpt-4o')\nexcept Exception: ask()\nraise SystemExit(1)", False),  # a later call had an answer
    ],
)
def test_a_program_that_ends_after_a_refused_call_is_void_with_the_words_of_the_refusal(
    more: str, refused: bool
) -> None:
    episode = led(f"{ASKS}\n{more}", max_turns=2)
    assert episode.void is not None and episode.void.cause == VoidCause.CRASH
    told = "its last call had been refused: model_not_found: there is no model 'gpt-4o' here"
    assert (told in episode.void.text) == refused, episode.void


ASKS = """
from openai import OpenAI
client = OpenAI()
def ask(model="policy"):
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
"""


def led(code: str, max_turns: int) -> Episode:
    """Have a program play an episode with a real endpoint."""
    task = {"kind": "agent", "name": "mine", "items": "unused:items", "max_turns": max_turns}
    run = RunConfig.model_validate(
        {"model": {"path": "some/model"}, "tasks": [{**task, "command": [sys.executable, "-c", code]}]}
    )

    async def scenario() -> Episode:
        workers = EpisodeWorkers(run.agent_tasks, 1)
        host = AgentHost(run, TOKENIZER, Model().generate, workers)
        try:
            await workers.start()
            await host.start()
            return await host.run(order())
        finally:
            await workers.close()
            await host.close()

    return asyncio.run(scenario())
