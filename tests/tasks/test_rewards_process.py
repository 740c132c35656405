"""The rewards process of a site: its signs of life for a launcher of its own, and what is left of it at its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.launcher.local_backend import environment
from streamrl.launcher.site_setup import prepare
from streamrl.run_dir import layout, start_stages
from streamrl.run_dir.start_stages import waiting_for
from streamrl.tasks import rewards_process
from streamrl.tasks.rewards_process import RewardsProcess
from tests.waiting import finish, until, wait_for


class Pool:
    """Workers that never start."""

    async def start(self, limit_s: float) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("remote", [True, False])
def test_it_touches_its_file_from_its_start_on_where_the_controllers_launcher_does_not_watch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(rewards_process, "SIGN_EVERY_S", 0.01)
    sign, said = tmp_path / layout.REWARDS_SIGN, asyncio.Event()
    run = SimpleNamespace(deadlines=SimpleNamespace(startup_s=300.0))
    context = SimpleNamespace(name="rewards-west", run=run, run_dir=tmp_path, remote=remote, say=lambda _: said.set())
    process: Any = SimpleNamespace(context=context, pool=Pool())
    process._give_signs = lambda: RewardsProcess._give_signs(process)

    async def play() -> None:
        running = asyncio.create_task(RewardsProcess.run(cast(RewardsProcess, process)))
        await said.wait()
        for _ in range(2 if remote else 0):
            await until(lambda: sign.exists() and sign.stat().st_mtime > 1.0)
            os.utime(sign, (1.0, 1.0))
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(play())
    assert sign.exists() == remote


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_of_it_is_left_in_the_folder_for_temporary_files(
    how: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{}]}}})
    run = RunConfig.model_validate({"tasks": [{"kind": "reasoning_gym", "name": "chain_sum"}]})
    (run_dir := tmp_path / "run").mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # not pytest's: paths of sockets are short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        with prepare(cluster, run, run_dir) as share:
            spec = next(spec for spec in share.processes() if spec.role == "rewards")
            env = os.environ | environment(spec, False, share.env, 0) | {"TMPDIR": temporary}
            with subprocess.Popen(
                spec.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as (process):

                def said() -> list[str]:
                    return [stage.text for stage in start_stages.history(run_dir, spec.name)]

                wait_for(lambda: waiting_for(["the controller"]) in said(), 120, process)  # its workers run
                process.send_signal(how)
                finish(process, 60)
                assert process.returncode == code
            assert share.scratch is not None
            assert os.listdir(temporary) == [share.scratch.name]  # goes with the launcher, however that ends
        assert os.listdir(temporary) == []
