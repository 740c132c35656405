"""Whole runs over two sites: real vLLM, real trainer, real encrypted sockets over shaped links, a tiny model."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from streamrl.emulation.network import read_stats, set_link_in
from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.site_status import read_site
from streamrl.run_dir.status import read_status
from tests import warm
from tests.end_to_end.project import Project, trained_rows, wait_for
from tests.ports import free_port
from tests.waiting import finish, scaled

ROOT = Path(__file__).parents[2]
POOL = {"replicas": 1, "threads": 1, "max_batch": 8, "kv_cache_gb": 0.05}
ASYNC = {"schedule": {"name": "async", "max_staleness": 1}, "steps": 4}


def two_sites(project: Project, port: int = 5600, **link: object) -> Path:
    """A cluster file in which one site trains and another generates; a project's commands then use it."""
    cluster = {
        "hardware": "cpu",
        "sites": {
            "train": {"port": port, "trainer": {"ranks": 1, "threads": 1}},
            "generate": {"generation": [{"name": "regular", **POOL}]},
        },
        "links": [{"between": ["generate", "train"], "bandwidth_gbit_s": 0.05, "rtt_ms": 20, **link}],
        "absence_s": scaled(60),
        "emulation": {"trainer_threads": 1, "kv_cache_gb": 0.05, "max_batch": 8},
    }
    path = project.folder / "two.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def command(project: Project, *extra: str, **changes: object) -> list[str]:
    made = project.command(*extra, **changes)
    return [*made, "--cluster", "two.yaml"] if "--resume" not in extra else made


@contextmanager
def started(project: Project, *extra: str, **changes: object) -> Iterator[subprocess.Popen[str]]:
    process = warm.Popen(
        command(project, *extra, **changes),
        cwd=project.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=project.env,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            finish(process, 30)


def ended(process: subprocess.Popen[str], project: Project, code: int = 0) -> str:
    output = finish(process, 280, project.logs)
    assert process.returncode == code, output + project.logs()
    return output


def easy(project: Project) -> None:
    rows = [{"prompt": f"say {n}", "answer": ""} for n in range(99)]
    (project.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


def assert_all_trained(run_dir: Path, steps: int) -> None:
    rows = trained_rows(run_dir)
    ids = [str(row["sample_id"]) for row in rows if row["t_trained"] is not None]
    assert len(ids) == len(set(ids)) == 18 * steps
    assert Ledger(run_dir / "ledger.sqlite").trained_ids() == sorted(ids)
    assert {row["site"] for row in rows} == {"generate"}


def test_an_emulated_link_that_is_down_for_a_while_loses_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path, dtype="bfloat16")
    easy(project)
    two_sites(project)
    network = project.run_dir() / "network"
    with started(project, "--emulate", **ASYNC | {"steps": 12}) as process:  # enough to be cut in the middle
        wait_for(lambda: len(trained_rows(project.run_dir())) >= 18, 200, process)
        set_link_in(network, "generate", down=True)
        wait_for(lambda: read_status(project.run_dir()).sites["generate"].away, 60, process)
        time.sleep(2)  # sleeps: who watches is told of it meanwhile
        set_link_in(network, "generate", down=False)
        output = ended(process, project)
    assert_all_trained(project.run_dir(), 12)
    metrics = read_metrics(project.run_dir() / "metrics.jsonl")
    assert max(row.staleness_max or 0 for row in metrics) <= 1
    received = [row.weight_bytes_sent or 0 for row in metrics]
    assert received[0] == 0 < sum(received)  # version 0 is the model that the site has
    assert "generate: no sign of it" in output and "generate is back" in output
    assert read_stats(network)["generate"]["from_home"] > sum(received)
    for row in trained_rows(project.run_dir()):
        times = [row[name] for name in ("t_queued", "t_dispatched", "t_first_token", "t_finished", "t_received")]
        # across two sites, by one clock: as exact as half a round trip, which is longer while connections begin
        assert all(later > earlier - scaled(0.05) for earlier, later in itertools.pairwise(times))


FLOOD = 100_000
"""Messages of a hostile site."""
MOST_MEMORY = 300 * 2**20
"""Bytes by which the controller's memory may grow meanwhile."""
GATED_REWARDS = '''
import time
from pathlib import Path
FOLDER = Path(__file__).parent
def reward(completion, *, prompt, answer):
    """The first 20 come at once, the others when all of the flood has been read and looked at."""
    with (FOLDER / "asked").open("a") as asked:
        asked.write("x")
    while (FOLDER / "asked").stat().st_size > 20 and not (FOLDER / "looked").exists():
        time.sleep(0.05)
    return completion.count("e") / 10 + len(completion) % 3
'''


@contextmanager
def flooding(run_dir: Path, site: str, begin: Path, done: Path) -> Iterator[subprocess.Popen[str]]:
    """A hostile site with a valid key, which floods from when a file is there and makes one when all has been read."""
    arguments = [str(run_dir), site, str(FLOOD), str(begin), str(done)]
    command = [sys.executable, "-m", "tests.end_to_end.hostile_site", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_a_flood_is_survived(run_dir: Path, site: str, hostile: subprocess.Popen[str], done: Path) -> None:
    """Wait until a flood has been read, and look at what the controller shows of it and at its memory."""
    pid = next(one.pid for one in read_started(run_dir) if one.name == "controller")
    memory: list[int] = []

    def excluded() -> str:
        sites = read_status(run_dir).sites
        return sites[site].excluded if site in sites else ""

    wait_for(excluded, 250, hostile)

    def measure() -> None:
        memory.append(psutil.Process(pid).memory_info().rss)

    measure()
    wait_for(done.exists, 250, hostile, meanwhile=measure)
    assert max(memory) - memory[0] < MOST_MEMORY, memory
    status = read_status(run_dir)
    assert status.state == "running" and "cannot be read" in excluded()
    assert {"malformed", "not allowed", "not its own", "too many", "hello"} <= status.refused.keys()
    assert sum(sum(counts.values()) for counts in status.refused.values()) > 0.8 * FLOOD  # samples: once per turn


def test_a_site_with_another_run_file_is_refused_and_one_with_the_same_does_its_share_in_a_flood(
    tmp_path: Path,
) -> None:
    project = Project(tmp_path, dtype="bfloat16")
    easy(project)
    (tmp_path / "own_rewards.py").write_text(GATED_REWARDS)
    path = two_sites(project, free_port())
    cluster = yaml.safe_load(path.read_text())
    cluster["sites"]["hostile"] = cluster["sites"]["generate"]
    cluster["links"].append(cluster["links"][0] | {"between": ["hostile", "train"]})
    path.write_text(yaml.safe_dump(cluster))
    changes = ASYNC | {"deadlines": {"reward_s": scaled(250)}}
    keys = [sys.executable, "-m", "streamrl.cli.main", "keys", "--cluster", str(path)]
    assert "generate" in warm.run(keys, scaled(60), env=project.env).stdout
    generate_dir = project.folder / "runs" / "tiny-generate"
    train_dir = project.folder / "runs" / "tiny-train"
    with started(project, "--site", "train", **changes) as train:
        wait_for(lambda: (train_dir / "status.json").exists(), 60, train)
        with started(project, "--site", "generate", "--set", "sampling.max_tokens=17", **changes) as generate:
            output = ended(generate, project, code=1)
        assert "run sampling.max_tokens is 17 at generate and 16 at train" in output
        assert train.poll() is None
        shutil.rmtree(generate_dir)
        # the hostile site gets work because it is there first, and floods while the other one's samples come in
        with flooding(train_dir, "hostile", tmp_path / "asked", tmp_path / "flooded") as hostile:
            wait_for(lambda: "hostile" in read_status(train_dir).sites, 60, hostile)
            with started(project, "--site", "generate", **changes) as generate:
                assert_a_flood_is_survived(train_dir, "hostile", hostile, tmp_path / "flooded")
                (tmp_path / "looked").touch()
                ended(train, project)
                output = ended(generate, project)
    assert_all_trained(train_dir, 4)
    status = read_site(generate_dir)
    assert status is not None
    assert (status.state, status.samples_waiting) == ("done", 0)
    assert status.samples_sent >= 72
    assert "samples sent" in output
    secrets = (tmp_path / "keys" / "generate.key_secret").read_text()
    secret = next(line.split('"')[1] for line in secrets.splitlines() if "secret-key" in line)
    for file in project.folder.glob("runs/*/**/*"):
        if file.is_file():
            assert secret not in file.read_text(errors="replace"), file


def test_a_third_site_gets_its_fp8_weights_from_the_second_ones_relay(tmp_path: Path) -> None:
    project = Project(tmp_path, dtype="bfloat16")
    easy(project)
    path = two_sites(project, free_port())
    cluster = yaml.safe_load(path.read_text())
    cluster["sites"]["generate"]["port"] = free_port()
    cluster["sites"]["far"] = {"generation": [{"name": "regular", **POOL}]}
    # a detour is quicker: what is declared counts until something else is measured
    cluster["links"].append({"between": ["train", "far"], "bandwidth_gbit_s": 0.05, "rtt_ms": 100})
    cluster["links"].append({"between": ["generate", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 1})
    path.write_text(yaml.safe_dump(cluster))
    keys = [sys.executable, "-m", "streamrl.cli.main", "keys", "--cluster", str(path)]
    assert warm.run(keys, scaled(60), env=project.env).returncode == 0
    changes = ASYNC | {"weights": {"generation_dtype": "fp8"}}
    with (
        started(project, "--site", "far", **changes) as far,
        started(project, "--site", "generate", **changes) as generate,
        started(project, "--site", "train", **changes) as train,
    ):
        for process in (train, generate, far):
            ended(process, project)
    rows = trained_rows(project.folder / "runs" / "tiny-train")
    assert len({row["sample_id"] for row in rows if row["t_trained"] is not None}) == 72
    assert {row["site"] for row in rows} <= {"generate", "far"}
    log = (project.folder / "runs" / "tiny-far" / "logs" / "service-far.log").read_text()
    assert "from the relay of generate" in log
    assert "getting weights" not in log  # it never had to fall back
    status = read_site(project.folder / "runs" / "tiny-far")
    assert status is not None and status.weight_bytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "start each where it is with --site NAME, or try all of them on this machine with --emulate"),
        (["--site", "generat"], "did you mean generate?"),
        (["--site", "generate", "--emulate"], "give one of both"),
        (["--site", "generate"], "make them here: streamrl keys"),
        (["--emulate", "--set", "schedule.name=colocated"], "gives the same devices"),
    ],
)
def test_bad_input_is_told_in_one_message_before_anything_starts(
    tmp_path: Path, options: list[str], message: str
) -> None:
    project = Project(tmp_path, dtype="bfloat16")
    two_sites(project)
    done = warm.run(command(project, *options), scaled(60), cwd=tmp_path, env=project.env)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
