"""The plan is what launch starts; GPUs are dealt without overlap; a process's last words are found."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import RestartNeeded, UserError
from streamrl.launcher import entry_point
from streamrl.launcher.local_backend import LocalProcess, start
from streamrl.launcher.supervisor import run
from streamrl.runtime.process_plan import CORES, ProcessSpec, plan_processes, possible_instances
from tests.waiting import scaled


def cluster(hardware: str = "cuda") -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "hardware": hardware,
            "sites": {
                "here": {
                    "trainer": {"ranks": 2, "gpu": "H100", "price_per_hour": 3.0},
                    "generation": [
                        {"name": "regular", "replicas": 2, "gpus_per_replica": 2, "gpu": "H100", "price_per_hour": 6.0},
                        {"name": "tail", "replicas": 1, "gpus_per_replica": 1, "gpu": "L40S"},
                    ],
                }
            },
        }
    )


def test_every_process_is_planned_once_and_gpus_do_not_overlap() -> None:
    specs = plan_processes(cluster(), RunConfig(), Path("runs/x"))
    assert [spec.name for spec in specs] == [
        "controller",
        "trainer",
        "service-here",
        "here-regular-0",
        "here-regular-1",
        "here-tail-0",
        "rewards-here",
    ]
    gpus = {spec.name: spec.gpu_ids for spec in specs if spec.gpu_ids}
    assert gpus == {"trainer": (0, 1), "here-regular-0": (2, 3), "here-regular-1": (4, 5), "here-tail-0": (6,)}
    trainer = specs[1]
    assert "--ranks=2" in trainer.command
    assert sum(spec.price_per_hour for spec in specs) == 2 * 3.0 + 2 * 6.0


def test_the_agents_of_a_site_have_room_for_the_processes_of_their_environments() -> None:
    lake = {"kind": "agent", "name": "a", "environment": {"name": "lake", "processes": 3, "memory_gb": 0.5}}
    walker = {"kind": "agent", "name": "b", "environment": {"name": "walker", "processes": 4}}
    run_file = RunConfig.model_validate({"tasks": [lake, lake | {"name": "c"}, walker]})
    values = cluster().model_dump()
    values["sites"]["here"]["agents"] = {"workers": 2, "cores": [4, 5]}
    for place, env in ((values, "4,5"), (cluster().model_dump(), None)):
        specs = plan_processes(ClusterConfig.model_validate(place), run_file, Path("runs/x"))
        agents = next(spec for spec in specs if spec.role == "agents")
        workers = 2 if env else 1
        assert (agents.threads, agents.memory_gb) == (workers + 3 + 4, 3 * 0.5 + 4 * 2.0)
        assert agents.env.get(CORES) == env


@pytest.mark.parametrize(
    ("pool", "pinned"),
    [
        ({"replicas": 2, "threads": 2}, ["0,1", "2,3"]),
        ({"replicas": 2, "threads": 1, "gpus_per_replica": 2}, ["0,1", "2,3"]),
        ({"replicas": 1, "max_replicas": 2, "threads": 2}, ["0,1"]),
        ({"replicas": 3, "threads": 1}, ["0", "1", "2"]),
        ({"replicas": 3, "threads": 2}, ["0,1,2,3"] * 3),
        ({"replicas": 2, "threads": 2, "gpus_per_replica": 2}, ["0,1,2,3"] * 2),
    ],
)
def test_cores_are_divided_among_instances_if_they_are_enough_for_all_their_threads(
    pool: dict[str, int], pinned: list[str]
) -> None:
    values = {"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{"cores": [0, 1, 2, 3]} | pool]}}}
    specs = plan_processes(ClusterConfig.model_validate(values), RunConfig(), Path("runs/x"))
    assert [spec.env[CORES] for spec in specs if spec.role == "instance"] == pinned


@pytest.mark.parametrize(
    ("pool", "pinned"),
    [
        ({"replicas": 4}, ["0,1,2,3", "4,5,6,7", "8,9,10,11", "12,13,14,15"]),
        ({"replicas": 2, "max_replicas": 8, "threads": 8}, ["0,1", "2,3"]),
        ({"replicas": 3}, ["0,1,2,3,4", "5,6,7,8,9", "10,11,12,13,14,15"]),
        ({"replicas": 2, "gpus_per_replica": 7}, ["0,1,2,3,4,5,6,7", "8,9,10,11,12,13,14,15"]),
        ({"replicas": 2, "gpus_per_replica": 8}, [",".join(map(str, range(16)))] * 2),
    ],
)
def test_instances_on_gpus_share_the_cores_evenly_if_there_are_enough(pool: dict[str, int], pinned: list[str]) -> None:
    pools = [{"cores": list(range(16)), "gpu": "H100"} | pool]
    values = {"hardware": "cuda", "sites": {"here": {"trainer": {"gpu": "H100"}, "generation": pools}}}
    specs = plan_processes(ClusterConfig.model_validate(values), RunConfig(), Path("runs/x"))
    assert [spec.env[CORES] for spec in specs if spec.role == "instance"] == pinned


def test_every_instance_that_may_come_has_its_gpus_from_the_start() -> None:
    values = cluster().model_dump()
    values["sites"]["here"]["generation"][0]["max_replicas"] = 3
    grown = ClusterConfig.model_validate(values)
    possible = {spec.name: spec.gpu_ids for spec in possible_instances(grown, RunConfig(), "here", Path("runs/x"))}
    assert possible == {
        "here-regular-0": (2, 3),
        "here-regular-1": (4, 5),
        "here-regular-2": (6, 7),
        "here-tail-0": (8,),
    }
    begun = {spec.name: spec.gpu_ids for spec in plan_processes(grown, RunConfig(), Path("runs/x"))}
    assert "here-regular-2" not in begun and begun["here-tail-0"] == (8,)


@pytest.mark.parametrize("limits", [{"min_replicas": 3}, {"max_replicas": 1}, {"replicas": 5, "max_replicas": 4}])
def test_replicas_lie_between_their_limits(limits: dict[str, int]) -> None:
    values = cluster().model_dump()
    values["sites"]["here"]["generation"][0] |= limits
    with pytest.raises(ValueError, match="min_replicas <= replicas <= max_replicas"):
        ClusterConfig.model_validate(values)


def started(tmp_path: Path, code: str) -> LocalProcess:
    process = start(ProcessSpec("worker", "rewards", "here", None, [sys.executable, "-c", code]), tmp_path, False)
    process.process.wait(timeout=scaled(30))
    return process


def test_last_words_are_the_cause_or_the_end_of_the_log(tmp_path: Path) -> None:
    said = started(tmp_path, "print('LAST WORDS: out of luck'); print('noise'); raise SystemExit(1)")
    assert said.last_words() == "worker ended with exit code 1: out of luck"
    (tmp_path / "worker.log").unlink()
    crashed = started(tmp_path, "print('before'); raise ValueError('deep down')")
    assert "ValueError: deep down" in crashed.last_words()
    (tmp_path / "worker.log").unlink()
    killed = started(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "was killed by SIGKILL (out of memory" in killed.last_words()


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by another launcher"):
            run(cluster("cpu"), RunConfig(), tmp_path, resume=False, plain=True)


def test_a_role_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamrl.launcher.entry_point", "controller", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 1
    assert any(line.startswith("LAST WORDS: ") for line in done.stderr.splitlines())


def test_a_role_that_fails_waits_for_no_thread() -> None:
    may_end, ended = threading.Event(), threading.Event()

    async def fail() -> None:
        computing = asyncio.create_task(asyncio.to_thread(lambda: (may_end.wait(scaled(5)), ended.set())))
        await asyncio.sleep(0)  # it begins
        assert not computing.done()
        raise RestartNeeded("an instance hangs")

    with pytest.raises(RestartNeeded):
        entry_point._run(fail())
    assert not ended.is_set()
    may_end.set()


@pytest.mark.parametrize("cores", ["1022", f"{2**70}", "no"])
def test_a_role_that_cannot_be_pinned_says_what_there_is(cores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    monkeypatch.setenv(CORES, cores)
    with pytest.raises(UserError) as refusal:
        entry_point._pin()
    said = str(refusal.value)
    assert said.startswith(f"the cluster file pins this process to the CPU cores {cores}, and that failed")
    assert said.endswith(f"change `cores` to some of those that it may use here ({usable}), or leave it out")


def test_a_process_that_cannot_be_pinned_has_that_as_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamrl.launcher.entry_point", "controller", "--run-dir", str(tmp_path)]
    env = os.environ | {CORES: "1022"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), env=env)
    (words,) = [line for line in done.stderr.splitlines() if line.startswith("LAST WORDS")]
    assert words.startswith("LAST WORDS: the cluster file pins this process to the CPU cores 1022, and that failed")
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_a_role_is_pinned_to_its_cores_if_it_has_any(tmp_path: Path) -> None:
    code = (
        "import os, sys; from streamrl.launcher.entry_point import _pin\n"
        "for cores in sys.argv[2:]:\n"
        "    os.environ[sys.argv[1]] = cores; _pin(); print(sorted(os.sched_getaffinity(0)))"
    )
    usable = sorted(os.sched_getaffinity(0))
    pinned = {"": usable, str(usable[-1]): usable[-1:], ",".join(map(str, usable)): usable}
    command = [sys.executable, "-c", code, CORES, *pinned]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert done.stdout.splitlines() == [str(cores) for cores in pinned.values()]
