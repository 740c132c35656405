"""How the trainer's ranks find each other: nothing that another machine, or another user, can reach."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import save_resolved
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher.site_setup import choose_addresses
from streamrl.run_dir.start_stages import read_stages
from streamrl.runtime.inside_keys import inside_roles, make_inside_keys
from streamrl.runtime.interfaces import free_ports, interface_towards
from streamrl.runtime.process_plan import RANK_MEETING, plan_processes
from streamrl.training.rank_store import rank_store
from tests import warm
from tests.security.sockets_of import family, listening, reachable
from tests.tiny_model import save_tiny_model
from tests.waiting import finish, scaled, wait_for

NOBODYS = "192.0.2.1"
"""Address that no machine has (RFC 5737)."""


def test_no_process_of_a_one_node_trainer_listens_where_another_machine_could_reach_it(tmp_path: Path) -> None:
    ranks = {"ranks": 2, "sequence_parallel": 2, "threads": 1}
    site = {"trainer": ranks, "generation": [{"name": "regular"}], "rewards": {"workers": 1}}
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    model = {"path": str(save_tiny_model(tmp_path / "model")), "max_context": 96, "dtype": "float32"}
    run = RunConfig.model_validate({"model": model, "batch": {"packing": "separate"}, "sampling": {"max_tokens": 16}})
    save_resolved(tmp_path, cluster, run)
    keys = make_inside_keys(tmp_path, "here", inside_roles(cluster, run, "here"))
    replace(choose_addresses(cluster, "here", tmp_path), inside_keys=keys).save(tmp_path)
    spec = next(one for one in plan_processes(cluster, run, tmp_path) if one.role == "trainer")
    seen: set[str] = set()

    def ready() -> bool:
        seen.update(listening(family(trainer.pid)))
        stage = read_stages(tmp_path).get("trainer")
        return stage is not None and "controller" in stage.text

    with (tmp_path / "log").open("wb") as log:
        trainer = warm.Popen(spec.command, stderr=log, env=os.environ | spec.env, start_new_session=True)
    try:
        wait_for(ready, 120, trainer, what="both ranks to have met", tell=(tmp_path / "log").read_text)
        seen |= listening(family(trainer.pid))
        assert len(family(trainer.pid)) >= 3, "two ranks under their launcher"
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
    assert seen, "gloo and the publisher listen on the loopback interface"
    assert reachable(seen) == set()


def test_ranks_of_one_node_meet_in_a_folder_of_their_user_that_is_gone_afterwards(tmp_path: Path) -> None:
    told = subprocess.run(
        [*RANKS, "--ranks=2", "--", sys.executable, "-c", f"import os; print(os.environ['{RANK_MEETING}'])"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=scaled(60),
    )
    paths = set(told.stdout.split())
    assert told.returncode == 0 and len(paths) == 1, told.stderr
    assert Path(paths.pop()).is_relative_to(tmp_path) and list(tmp_path.iterdir()) == []


RANKS = [sys.executable, "-m", "streamrl.launcher.trainer_ranks"]
LOOK = f"""
import os, pathlib, sys
meeting, rank = os.environ["{RANK_MEETING}"], os.environ["RANK"]
folder = pathlib.Path(meeting).parent
pathlib.Path(sys.argv[1], "rank" + rank).write_text(" ".join(
    [oct(folder.stat().st_mode), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]
))
"""


def test_the_folder_is_closed_to_other_users_and_collectives_stay_on_the_loopback(tmp_path: Path) -> None:
    done = subprocess.run([*RANKS, "--ranks=2", "--", sys.executable, "-c", LOOK, str(tmp_path)], timeout=scaled(60))
    assert done.returncode == 0
    for rank in (0, 1):
        mode, of_gloo, of_nccl = (tmp_path / f"rank{rank}").read_text().split()
        assert stat.S_IMODE(int(mode, 8)) == 0o700 and of_gloo == "lo"
        assert of_nccl == "=lo", "by a bare name NCCL takes all interfaces that begin so"


ONE_FAILS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    HOW
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)])
def test_a_rank_that_fails_ends_the_others_and_their_launcher_ends_as_it_did(how: str, code: int) -> None:
    program = ONE_FAILS.replace("HOW", how)
    process = subprocess.Popen([*RANKS, "--ranks=3", "--", sys.executable, "-c", program], start_new_session=True)
    assert process.wait(scaled(60)) == code
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_launcher_of_ranks_that_is_told_to_stop_passes_it_on() -> None:
    program = "import os, time; os.write(1, b'there\\n'); time.sleep(600)"  # one write: lines do not mix
    command = [*RANKS, "--ranks=2", "--", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["there\n"] * 2
    process.terminate()
    finish(process, 30)
    assert process.returncode == 0


def environment(meeting: str, rank: int, ranks: int) -> dict[str, str]:
    return {RANK_MEETING: meeting, "RANK": str(rank), "WORLD_SIZE": str(ranks)}


def test_the_store_of_several_nodes_listens_on_the_stated_address_alone() -> None:
    meeting = f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
    before = listening([os.getpid()])
    first = rank_store(environment(meeting, 0, 2), 30)
    assert listening([os.getpid()]) - before <= {"127.0.0.1"} and "127.0.0.1" in listening([os.getpid()])
    second = rank_store(environment(meeting, 1, 2), 30)
    second.set("key", "value")
    assert first.get("key") == b"value" and isinstance(first, dist.TCPStore)


def test_a_meeting_at_an_address_that_the_node_does_not_have_is_an_error_before_the_model_is_loaded() -> None:
    with pytest.raises(RunFailed, match=f"rank 0 cannot listen on {NOBODYS}:29500, the address of its node"):
        rank_store(environment(f"{NOBODYS}:29500", 0, 2), 30)


def test_a_rank_that_cannot_reach_the_meeting_says_so() -> None:
    meeting = f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
    with pytest.raises(RunFailed, match=f"rank 1 cannot reach rank 0 at {meeting}"):
        rank_store(environment(meeting, 1, 2), 0.2)


def test_a_node_without_a_way_to_the_meeting_says_so_before_its_ranks_start() -> None:
    with pytest.raises(UserError, match=r"cannot reach 255\.255\.255\.255: "):
        interface_towards("255.255.255.255")
    several = ["--ranks=1", "--nodes=2", "--node=1", "--meeting=255.255.255.255:1"]
    done = subprocess.run([*RANKS, *several, "--", "false"], capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 1 and "LAST WORDS: " in done.stderr and "cannot reach 255.255.255.255" in done.stderr


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert interface_towards("127.0.0.1") in {name for _, name in socket.if_nameindex()}
