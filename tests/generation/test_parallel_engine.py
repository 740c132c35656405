"""One real vLLM engine over two nodes (two processes that meet over TCP): new weights reach the shards of both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import save_resolved
from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine import Engine
from streamrl.generation.instance.engine_config import Place
from streamrl.launcher.site_setup import choose_addresses
from streamrl.rollouts.types import Sample
from streamrl.weights.version_store import WeightStore
from tests import warm
from tests.generation.test_engine import (
    assert_logprobs_are_the_models,
    config,
    exact,
    request,
    sample_all,
    stored,
    update,
)
from tests.tiny_model import save_tiny_model
from tests.training.conftest import free_port

NODES = 2
CLUSTER = ClusterConfig.model_validate(
    {
        "hardware": "cpu",
        "sites": {
            "here": {
                "trainer": {},
                "generation": [{"gpus_per_replica": NODES, "nodes": NODES, "max_batch": 4, "kv_cache_gb": 0.05}],
                "launch": {"backend": "ray"},
            }
        },
    }
)


@contextlib.contextmanager
def second_node(run: RunConfig, folder: Path, meeting: str) -> Iterator[None]:
    """Its part of the instance, as Ray's actor starts and ends it."""
    folder.mkdir()
    save_resolved(folder, CLUSTER, run)
    choose_addresses(CLUSTER, "here", folder).save(folder)
    command = [
        sys.executable,
        "-m",
        "streamrl.launcher.entry_point",
        "instance",
        "--run-dir",
        str(folder),
        "--site",
        "here",
    ]
    command += ["--pool", "regular", "--name", "i", "--node", "1", "--meeting", meeting]
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    process = warm.Popen(command, env=env, start_new_session=True)
    try:
        yield
        assert process.poll() is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_engine_over_two_nodes_gets_new_weights_on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    old, new = save_tiny_model(tmp_path / "old", seed=0), save_tiny_model(tmp_path / "new", seed=1)
    store = WeightStore(tmp_path / "store")
    content_hash = stored(store, 5, new, torch.float32)
    run, meeting = exact(config(old)), f"127.0.0.1:{free_port()}"
    pool = CLUSTER.sites["here"].generation[0]

    async def updated() -> tuple[list[Sample], list[Sample]]:
        engine = Engine(pool, run, cuda=False, instance="i", site="here", place=Place(0, meeting))
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            before = await sample_all(engine)
            await update(engine, "recompute_kv", 5, content_hash)
            return before, await sample_all(engine)
        finally:
            engine.close()

    with second_node(run, tmp_path / "run", meeting):
        before, after = asyncio.run(updated())
    for number, (older, newer) in enumerate(zip(before, after, strict=True)):
        prompt = request(number).prompt_tokens
        assert_logprobs_are_the_models(old, prompt, older, 1.0)
        assert_logprobs_are_the_models(new, prompt, newer, 1.0)
