"""The model in vLLM: its log-probabilities against the trainer's, and a weight version against a fresh engine.

Runs in a process of its own (`python -m streamrl.verify.generator_checks`), which reads an order as a line of JSON and
prints a line of JSON per stage, so that what vLLM cannot do ends a stage and not the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.settings_trial import error_of
from streamrl.rollouts.micro_batch import TrainGroup, TrainSequence
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.runtime.process_plan import ONE_BLAS_THREAD, PASSIVE_WAITING
from streamrl.training.packing_choice import Packing
from streamrl.verify.findings import Finding

if TYPE_CHECKING:
    from streamrl.generation.instance.engine import Engine

LIMIT_S = 400.0
"""Seconds that both engines may take."""
BOUND = 5e-3
"""Largest difference of a log-probability, in nats, that counts as rounding between two fp32 implementations."""
LENGTHS = (1, 5, 12, 20)
"""Prompt lengths of the samples: shorter and longer than a small model's window."""
TOKENS = 24
"""Tokens of a sample."""
AGAINST = "trainer against vLLM"
VERSION = "a weight version against a fresh engine"
FIRST, SECOND = 0, 1
"""Numbers of the versions."""


def check_generator(models: Sequence[Path], packing: Packing, folder: Path) -> list[Finding]:
    """Check a model in vLLM on this machine's CPU, in fp32.

    Args:
        models: two folders in HF format with the same architecture and different weights.
        packing: how the trainer packs the model.
        folder: folder for the versions.
    """
    order = {"models": [str(model) for model in models], "attention": packing.attention, "folder": str(folder)}
    environment = os.environ | PASSIVE_WAITING | ONE_BLAS_THREAD | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(order),
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return [Finding(AGAINST, "refused", f"vLLM gave no answer within {LIMIT_S:.0f} s")]
    stages = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"stage"'):
            values = json.loads(line)
            stages[values.pop("stage")] = values
    return [_against(stages, done.stderr), _version(stages, done.stderr)]


def _against(stages: dict[str, dict[str, Any]], errors: str) -> Finding:
    if AGAINST not in stages:
        return Finding(AGAINST, "refused", f"vLLM: {error_of(errors)}")
    found = stages[AGAINST]["logprob_error"]
    says = f"log-probabilities of {stages[AGAINST]['tokens']} sampled tokens within {found:.1g} nats (fp32)"
    return Finding(AGAINST, "works" if found <= BOUND else "refused", says)


def _version(stages: dict[str, dict[str, Any]], errors: str) -> Finding:
    if VERSION not in stages:
        if AGAINST not in stages:
            return Finding(VERSION, "not checked", "the model does not run in vLLM here")
        return Finding(VERSION, "refused", f"vLLM: {error_of(errors)}")
    found = stages[VERSION]
    if found["differs"]:
        return Finding(VERSION, "refused", found["differs"])
    path = f"publisher, {found['kind']}, store and vLLM's reload, {found['mb']:.2f} MB"
    return Finding(VERSION, "works", f"{found['tokens']} tokens and their log-probabilities equal bit for bit ({path})")


def _run_file(model: str) -> RunConfig:
    folder = {"path": model, "max_context": 64, "dtype": "float32"}
    return RunConfig.model_validate({"model": folder, "sampling": {"max_tokens": TOKENS}})


def _requests() -> list[SampleRequest]:
    prompts = [np.arange(3 + n, 3 + n + length, dtype=np.int32) for n, length in enumerate(LENGTHS)]
    return [SampleRequest(f"verify-{n}", "verify", prompt, n, 0.0) for n, prompt in enumerate(prompts)]


async def _samples(engine: Engine) -> list[Sample]:
    """Draw all samples at once, so that batches of several sizes are computed."""
    drawn = await asyncio.gather(*(engine.generate(request, "regular") for request in _requests()))
    return [sample for sample in drawn if isinstance(sample, Sample)]


def _trainer_logprobs(model: str, samples: Sequence[Sample], attention: str) -> np.ndarray:
    """Return the trainer's log-probability of every sampled token, [N]."""
    import torch

    from streamrl.training.packing import pack
    from streamrl.training.policy_model import load_policy

    groups = [
        TrainGroup("verify", request.prompt_tokens, [TrainSequence(s.completion_tokens, s.logprobs, 0.0)])
        for request, s in zip(_requests(), samples, strict=True)
    ]
    with torch.no_grad():
        values: np.ndarray = load_policy(model, attention=attention)(pack(groups), 1.0)[0].numpy()
    return values


async def _deliver(order: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Publish both versions, fetch them as a relay does, and load the second one into the engine."""
    import torch
    from transformers import AutoModelForCausalLM

    from streamrl.transport.deadlines import WaitRegistry
    from streamrl.transport.endpoint import Hub, Link
    from streamrl.weights.publisher import WeightPublisher
    from streamrl.weights.site_relay import WeightRelay
    from streamrl.weights.version import lay_out
    from streamrl.weights.version_store import WeightStore

    address = f"ipc://{order['folder']}/publisher"
    hub = Hub("publisher", WaitRegistry("publisher")).bind(address)
    publisher = WeightPublisher(hub, chunk_of=lambda peer: 2**20)
    serving = asyncio.create_task(publisher.serve())
    link = await Link("relay", "relay", WaitRegistry("relay")).connect(address, 10)
    relay = WeightRelay(link, WeightStore(Path(order["folder"])), 60, "delta")
    try:
        for number, folder in enumerate(order["models"]):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            manifest, buffer = lay_out(number, model.named_parameters())
            await publisher.publish(manifest, buffer)
            await relay.fetch(number, manifest.version.content_hash)
        await engine.pause("recompute_kv", SECOND)
        await engine.start_weight_update()
        await engine.update_weights({"number": SECOND, "content_hash": manifest.version.content_hash})
        await engine.finish_weight_update(SECOND)
        await engine.resume()
        return {"kind": relay.last.kind if relay.last else "raw", "mb": manifest.nbytes / 1e6}
    finally:
        serving.cancel()
        await link.close()
        await hub.close()


def _difference(ours: Sequence[Sample], theirs: Sequence[Sample]) -> str:
    """Say where two lists of samples differ; '': nowhere."""
    for one, other in zip(ours, theirs, strict=True):
        if not np.array_equal(one.completion_tokens, other.completion_tokens):
            return f"{one.sample_id}: other tokens than a fresh engine's"
        if not np.array_equal(one.logprobs, other.logprobs):
            worst = float(np.abs(one.logprobs - other.logprobs).max())
            return f"{one.sample_id}: log-probabilities differ from a fresh engine's by up to {worst:.1g} nats"
    return ""


async def _compare(order: dict[str, Any]) -> None:
    from streamrl.generation.instance.engine import Engine

    pool = GenerationPool(max_batch=len(LENGTHS), kv_cache_gb=0.05)

    async def with_engine(model: str, number: int) -> Engine:
        engine = Engine(pool, _run_file(model), False, "verify", "here")
        await engine.set_up_weights({"directory": order["folder"]}, number)
        return engine

    def say(stage: str, **values: Any) -> None:
        print(json.dumps({"stage": stage} | values), flush=True)

    first, second = order["models"]
    engine = await with_engine(first, FIRST)
    try:
        before = await _samples(engine)
        generated = np.concatenate([sample.logprobs for sample in before])
        errors = np.abs(_trainer_logprobs(first, before, order["attention"]) - generated)
        say(AGAINST, logprob_error=float(errors.max()), tokens=len(errors))
        way = await _deliver(order, engine)
        after = await _samples(engine)
    finally:
        engine.close()
    engine = await with_engine(second, SECOND)
    try:
        fresh = await _samples(engine)
    finally:
        engine.close()
    differs = _difference(after, fresh)
    if not differs and first != second and not _difference(before, after):
        differs = "the engine kept its old weights"
    say(VERSION, differs=differs, tokens=sum(len(sample.completion_tokens) for sample in fresh), **way)


if __name__ == "__main__":
    asyncio.run(_compare(json.load(sys.stdin)))
    os._exit(0)
