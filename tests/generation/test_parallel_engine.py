"""Real vLLM engines of two workers, on one node or on two that meet over TCP: new weights reach the shards of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.cpu_worker import CPUWorker

from streamrl.config.cluster import ClusterConfig, GenerationPool
from streamrl.config.load import save_resolved
from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import WeightSyncConfig
from streamrl.generation.instance.engine import Engine
from streamrl.generation.instance.engine_config import Place, worker_extension
from streamrl.launcher.site_setup import choose_addresses
from streamrl.rollouts.types import Sample
from streamrl.run_dir.layout import SHARED_MEMORY
from streamrl.runtime.processes import is_alive
from streamrl.verify.families import FAMILIES
from streamrl.verify.small_folder import save_small_models
from streamrl.weights.backends.communicator import Communicator, lead, open_meeting
from streamrl.weights.backends.gloo import GlooCommunicator
from streamrl.weights.backends.parcels import send
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.version import lay_out, type_name
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
from tests.ports import free_port
from tests.tiny_model import save_tiny_model
from tests.waiting import scaled, wait_for
from tests.weights.world import fill

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


@pytest.mark.parametrize(("drafts", "pushed"), [(True, False), (False, True), (True, True)])
def test_vllms_worker_gets_what_an_instance_calls_and_nothing_that_it_has(drafts: bool, pushed: bool) -> None:
    name = worker_extension(drafts, pushed)
    assert name is not None and worker_extension(False, False) is None
    calls = {one for one in dir(resolve_obj_by_qualname(name)) if not one.startswith("__")}
    pushing = {"join_weight_group", "receive_version"} if pushed else set()
    assert calls == pushing | ({"teach_drafter"} if drafts else set())
    assert not [one for one in calls if hasattr(CPUWorker, one)]


POOL = GenerationPool(gpus_per_replica=2, max_batch=4, kv_cache_gb=0.05)
LIMIT_S = 60.0


def digests_of_stream(model: Path, version: Path, store: WeightStore) -> list[dict[str, str]]:
    """Checksums of each worker's shards, of an engine that has loaded a version from its site's store."""
    weights = ShardedLayout(AutoModelForCausalLM.from_pretrained(version, dtype=torch.bfloat16), torch.bfloat16)
    manifest, buffer = lay_out(1, weights.tensors())
    fill(store, manifest, buffer)

    async def body() -> list[dict[str, str]]:
        before = set(SHARED_MEMORY.glob("vllm_dist_*"))
        engine = Engine(POOL, config(model), cuda=False, instance="i", site="here")
        try:
            named = "vLLM's segments have names, which would stay when its workers are killed"
            wait_for(lambda: not set(SHARED_MEMORY.glob("vllm_dist_*")) - before, 1, what=named)
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            await update(engine, "recompute_kv", 1, manifest.version.content_hash)
            return await engine._llm.compute_weight_checksums()
        finally:
            engine.close()

    return asyncio.run(body())


class PushingTrainer:
    """Rank 0 of the group with an engine's workers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.group: Communicator

    async def meet(self) -> str:
        """Meets the workers in a new group; returns what they say."""
        world = 1 + POOL.gpus_per_replica
        store, port = open_meeting("127.0.0.1", world, scaled(LIMIT_S))
        place = {"host": "127.0.0.1", "port": port, "world": world, "first_rank": 1, "limit_s": scaled(LIMIT_S)}
        joined = asyncio.ensure_future(self.engine.join_weight_group(place))
        self.group = await asyncio.to_thread(lead, GlooCommunicator, store, "127.0.0.1", world, scaled(LIMIT_S))
        return await joined

    async def push(self, folder: Path, number: int, breaks_after: int | None = None) -> str:
        """Pushes a model; returns what the workers say. `breaks_after`: tensors after which the trainer is gone."""
        layout = ShardedLayout(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), torch.bfloat16)
        described = [(name, type_name(dtype), shape) for name, dtype, shape in layout.described()]

        def work() -> None:
            try:
                tensors = itertools.islice(layout.tensors(), breaks_after)
                send(self.group, described, tensors)
            except StopIteration:
                self.group.close()

        await self.engine.pause("recompute_kv", number)
        await self.engine.start_weight_update()
        sending = asyncio.create_task(asyncio.to_thread(work))
        said = await self.engine.receive_version(number)
        await sending
        if not said:
            await self.engine.finish_weight_update(number)
            await self.engine.resume()
        return said


def test_a_mixture_pushed_to_two_workers_is_in_each_what_the_stream_path_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for a push after a group that broke in the middle as well."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = save_small_models(FAMILIES["Qwen3-MoE"](), tmp_path)
    expected = digests_of_stream(first, second, WeightStore(tmp_path / "store"))
    assert len(expected) == 2 and expected[0] != expected[1]
    run = config(first).model_copy(update={"weights": WeightSyncConfig(backend="gloo")})

    async def body() -> None:
        engine = Engine(POOL, run, cuda=False, instance="i", site="here")
        try:
            trainer = PushingTrainer(engine)
            await engine.set_up_weights(None, 0)
            assert await engine._llm.compute_weight_checksums() != expected
            assert await trainer.meet() == ""
            assert "the weight group is broken" in await trainer.push(second, 1, breaks_after=7)
            assert await trainer.meet() == ""  # nobody takes an answer of before for one of now
            assert await trainer.push(second, 2) == ""
            assert await engine._llm.compute_weight_checksums() == expected
            trainer.group.close()
        finally:
            assert_it_ends_although_vllm_cannot_name_a_process(engine)

    asyncio.run(body())


def assert_it_ends_although_vllm_cannot_name_a_process(engine: Engine) -> None:
    """Close an engine that is slow to end, one of whose processes ends while vLLM kills them."""
    resources = engine._llm.engine_core.resources
    (core,) = resources.engine_manager.processes
    family = [core.pid, *(child.pid for child in psutil.Process(core.pid).children(recursive=True))]
    assert len(family) > POOL.gpus_per_replica
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(psutil.Process, "name", gone)
        engine.close()
    wait_for(lambda: not any(map(is_alive, family)), 10)
    assert resources.input_socket.closed and resources.output_socket.closed


def gone(process: psutil.Process) -> str:
    raise psutil.NoSuchProcess(process.pid)
