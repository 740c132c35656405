"""Whose starter has been killed ends within the stated time, with all that it has started, whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.runtime.processes import is_alive
from streamrl.runtime.warden import AFTER_S, ENDS_WITHIN_S, STOP_S, wait_for_an_end
from tests.tiny_model import save_tiny_model
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
TELLS = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

def tell(name):
    path = Path(f"{name}.{os.getpid()}")
    path.with_suffix(".new").write_text("")
    path.with_suffix(".new").rename(path)

def stay(name):
    tell(name)
    while True:
        time.sleep(1000)
"""
"""Each process of a test leaves an empty file with its name and its id."""
ROLE = """
from streamrl.launcher.entry_point import end_with_starter
end_with_starter()
"""
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + TELLS + "stay('engine')"
subprocess.Popen([sys.executable, "-S", "-c", engine])
"""
"""A role that hears nothing, with an engine that does not either."""


def script(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(f"TELLS = {TELLS!r}\n{TELLS}\n{text}")
    return str(path)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a script in the test's folder."""
    started = []

    def begin(*command: str) -> subprocess.Popen[bytes]:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with (tmp_path / "log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def there(folder: Path, *names: str) -> dict[str, int]:
    """Ids of the processes with these names, once all of them have told theirs."""

    def told() -> dict[str, int] | None:
        found = {path.stem: int(path.suffix[1:]) for path in folder.glob("*.[0-9]*")}
        return {name: found[name] for name in names} if found.keys() >= set(names) else None

    log = folder / "log"
    found = wait_for(told, 60, what=f"{names} to be there", tell=lambda: log.read_text())
    assert found is not None
    return found


def all_end(pids: dict[str, int], within_s: float = ENDS_WITHIN_S) -> None:
    wait_for(lambda: not any(map(is_alive, pids.values())), within_s, tell=lambda: [is_alive(p) for p in pids.values()])


LAUNCHER = """
from streamrl.launcher.local_backend import start
from streamrl.runtime.process_plan import ProcessSpec
for name in sys.argv[1:]:
    start(ProcessSpec(name, "instance", "here", "regular", [sys.executable, f"{name}.py"]), Path("."), False)
stay("launcher")
"""


def test_the_stages_of_ending_fit_into_the_stated_time() -> None:
    assert STOP_S + 2 * AFTER_S <= ENDS_WITHIN_S


@pytest.mark.parametrize("state", ["deaf", "stopped", "holding the lock"])
def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path, run: Callable[..., object], state: str) -> None:
    hold = "import itertools; tell('role'); sum(itertools.repeat(0))" if state == "holding the lock" else "stay('role')"
    script(tmp_path, "role", ROLE + (DEAF if state != "stopped" else "") + hold)
    launcher = run(script(tmp_path, "launch", LAUNCHER), "role")
    pids = there(tmp_path, "launcher", "role", *(["engine"] if state != "stopped" else []))
    if state == "stopped":
        os.kill(pids["role"], signal.SIGSTOP)
    family = {str(one.pid): one.pid for one in psutil.Process(pids["launcher"]).children(recursive=True)}
    assert len(family) >= 2 and all(map(is_alive, pids.values()))
    launcher.kill()  # type: ignore[attr-defined]
    all_end(pids | family)


def test_a_role_whose_starter_lives_goes_on_and_what_it_leaves_behind_ends(
    tmp_path: Path, run: Callable[..., object]
) -> None:
    script(tmp_path, "role", ROLE + DEAF + "stay('role')")
    run(script(tmp_path, "launch", LAUNCHER), "role")
    pids = there(tmp_path, "launcher", "role", "engine")
    assert wait_for_an_end(list(pids.values()), 1.0) is None
    family = {str(one.pid): one.pid for one in psutil.Process(pids["role"]).children(recursive=True)}
    assert len(family) == 2  # a warden and the engine
    os.kill(pids["role"], signal.SIGKILL)
    all_end(family)
    assert is_alive(pids["launcher"])


PROGRAMS = """
import asyncio
from streamrl.agents.agent_program import play_program
from streamrl.agents.episode import EpisodeOrder
from streamrl.config.tasks import EpisodeDeadlines
program = f"import subprocess, sys{TELLS}subprocess.Popen([sys.executable, '-S', 'child.py']); stay('program')"
tell("role")
order = EpisodeOrder("e", "g", "t", {}, 0, None)
asyncio.run(play_program([sys.executable, "-c", program], order, "http://x/v1", "k", EpisodeDeadlines(), len))
"""


def test_nothing_is_left_of_agents_programs_when_the_process_that_runs_them_is_killed(
    tmp_path: Path, run: Callable[..., object]
) -> None:
    script(tmp_path, "role", ROLE + PROGRAMS)
    (tmp_path / "child.py").write_text(f"{TELLS}\nstay('child')")
    run(script(tmp_path, "launch", LAUNCHER), "role")
    pids = there(tmp_path, "launcher", "role", "program", "child")
    assert os.getpgid(pids["child"]) == pids["program"]  # no group of the role's
    os.kill(pids["role"], signal.SIGKILL)
    all_end({name: pids[name] for name in ("program", "child")})


RAYLET = """
subprocess.Popen([sys.executable, "actor.py"])
stay("raylet")
"""
ACTOR = """
from streamrl.launcher.local_backend import spawn
from streamrl.launcher.ray_node import NodeProcess
NodeProcess()
spawn([sys.executable, "role.py"], Path("log"), os.environ)
stay("actor")
"""
ORPHANED = """
worker = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + TELLS + "stay('worker')"
subprocess.run(["sh", "-c", '"$0" -S -c "$1" &', sys.executable, worker])
stay("role")
"""
"""A role that has started a process whose own parent is gone, as vLLM's worker is once the role has been killed."""


def test_nothing_is_left_under_a_killed_raylet(tmp_path: Path, run: Callable[..., subprocess.Popen[bytes]]) -> None:
    script(tmp_path, "actor", ACTOR)
    script(tmp_path, "role", ROLE + ORPHANED)
    raylet = run(script(tmp_path, "raylet", RAYLET))
    pids = there(tmp_path, "raylet", "actor", "role", "worker")
    family = {str(one.pid): one.pid for one in psutil.Process(pids["raylet"]).children(recursive=True)}
    assert not family.keys() & {str(pids["worker"])}
    raylet.kill()
    all_end(pids | family)


def test_the_ranks_end_with_their_launcher_and_with_the_one_behind_it(
    tmp_path: Path, run: Callable[..., object]
) -> None:
    script(tmp_path, "rank", ROLE + DEAF + "stay('rank' + os.environ['RANK'])")
    agent = [sys.executable, "-m", "streamrl.launcher.trainer_ranks", "--ranks=2", "--", sys.executable, "rank.py"]
    text = f"""
from streamrl.launcher.local_backend import start
from streamrl.runtime.process_plan import ProcessSpec
start(ProcessSpec("trainer", "trainer", "here", None, {agent!r}), Path("."), False)
stay("launcher")
"""
    run(script(tmp_path, "launch", text))
    pids = there(tmp_path, "launcher", "rank0", "rank1", "engine")
    agent_pid = psutil.Process(pids["rank0"]).ppid()
    family = psutil.Process(agent_pid).children(recursive=True)
    os.kill(agent_pid, signal.SIGKILL)
    all_end({str(one.pid): one.pid for one in family})
    assert is_alive(pids["launcher"])


def test_a_role_whose_starter_died_before_it_began_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        pass
    env = os.environ | {"STREAMRL_PARENT": str(ended.pid), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ROLE + "print('began')"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


ENGINE = """
import multiprocessing
from streamrl.generation.instance import vllm_plugin

def engine():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    vllm_plugin.end_with_parent = lambda number: None
    vllm_plugin._end_with_instance()
    subprocess.Popen([sys.executable, "-S", "-c", TELLS + "stay('worker')"])
    stay("engine")

if __name__ == "__main__":
    multiprocessing.get_context(os.environ["METHOD"]).Process(target=engine).start()
    stay("instance")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_vllms_processes_end_with_who_started_them_without_the_systems_signal(
    tmp_path: Path, run: Callable[..., object], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("METHOD", method)
    instance = run(script(tmp_path, "instance", ENGINE))
    pids = there(tmp_path, "instance", "engine", "worker")
    instance.kill()  # type: ignore[attr-defined]
    all_end(pids)


VLLM = """
import asyncio
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine import Engine

async def main():
    pool = GenerationPool(max_batch=4, kv_cache_gb=0.05)
    model = {"path": "model", "max_context": 64, "dtype": "float32"}
    run = RunConfig.model_validate({"model": model, "sampling": {"max_tokens": 8}})
    tell("role")
    Engine(pool, run, cuda=False, instance="i", site="here")
    stay("ready")

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *told: None)  # as asyncio's handler: noted, and looked at later
    asyncio.run(main())
"""


def test_an_instance_that_starts_vllm_ends_with_its_launcher(tmp_path: Path, run: Callable[..., object]) -> None:
    save_tiny_model(tmp_path / "model")
    script(tmp_path, "role", ROLE + VLLM)
    launcher = run(script(tmp_path, "launch", LAUNCHER), "role")
    pids = there(tmp_path, "launcher", "role")
    role = psutil.Process(pids["role"])

    def engine() -> bool:
        assert role.status() != psutil.STATUS_ZOMBIE, (tmp_path / "log").read_text()
        return len(role.children(recursive=True)) >= 2

    wait_for(engine, 120, what="vLLM's engine")
    family = {str(one.pid): one.pid for one in role.children(recursive=True)}
    launcher.kill()  # type: ignore[attr-defined]
    all_end(pids | family)
