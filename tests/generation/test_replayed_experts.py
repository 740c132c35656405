"""Real vLLM returns the experts that it has computed with, and a trainer that replays them computes what vLLM did."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine import Engine
from streamrl.machine.router_shape import RouterShape, router_shape
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.packing import pack
from streamrl.training.policy_model import Policy, in_training
from streamrl.training.router_replay import ROUTERS
from streamrl.verify.families import FAMILIES
from streamrl.verify.small_folder import save_small_models
from streamrl.weights.version import lay_out
from streamrl.weights.version_store import WeightStore
from tests.waiting import scaled, until
from tests.weights.world import fill

POOL = GenerationPool(max_batch=4, kv_cache_gb=0.00015)
"""Its KV cache holds fewer tokens than four requests need, so that vLLM preempts some and computes them again."""
PROMPT, TOKENS = 70, 40


def run_file(model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "max_context": 128, "dtype": "bfloat16"},
            "sampling": {"max_tokens": TOKENS},
            "algorithm": {"name": "grpo", "router_replay": True},
        }
    )


def request(number: int, prompt: int = 0) -> SampleRequest:
    ids = np.random.default_rng(prompt).integers(3, 250, PROMPT).astype(np.int32)
    return SampleRequest(f"g.{number}", "g", ids, number, 0.0)


class Found(NamedTuple):
    """What one engine gave."""

    shape: RouterShape
    models: list[Path]
    kv_tokens: int
    siblings: list[Sample]
    """Samples of one prompt, one after the other: later ones have most of it from the prefix cache."""
    crowd: list[Sample]
    """Samples of other prompts, all at once."""
    moved: Sample
    """Taken off once, and continued from its tokens."""
    unknown: Sample
    """Continued from tokens whose experts were lost."""
    reported: PartialSample
    """What the engine reported of the sample that was taken off while it ran."""
    across: Sample
    """Begun with the first weights, continued with the second ones."""


async def draw(engine: Engine, folder: Path, second: Path) -> tuple[object, ...]:
    async def sample(asked: SampleRequest) -> Sample:
        drawn = await engine.generate(asked, "regular")
        assert isinstance(drawn, Sample)
        return drawn

    async def running(prompt: int) -> AsyncIterator[tuple[SampleRequest, asyncio.Task[Sample | PartialSample]]]:
        """Requests that are running now: an engine may be done with many before anybody looks, beside other work."""
        deadline = time.monotonic() + scaled(60)
        for number in itertools.count(20):
            asked = request(number, prompt)
            begun = asyncio.create_task(engine.generate(asked, "regular"))
            await until(lambda name=asked.sample_id, begun=begun: begun.done() or engine.produced().get(name, 0) >= 5)
            if not begun.done():
                yield asked, begun
                await begun
            assert time.monotonic() < deadline, f"{number - 19} requests have ended before anybody looked"

    await engine.set_up_weights({"directory": str(folder)}, 0)
    await engine.warm_up()
    siblings: list[Sample] = []
    for number in range(10):  # any of them may draw the end of the text
        one = await sample(request(number))
        if siblings or len(one.completion_tokens) == TOKENS:
            siblings.append(one)
        if len(siblings) == 2:
            break
    crowd = await asyncio.gather(*(sample(request(10 + n, prompt=n + 1)) for n in range(4)))

    async for asked, begun in running(5):
        told = engine.progress({})
        await engine.release(asked.sample_id)
        kept = await begun
        if isinstance(kept, PartialSample) and told:
            break
    [(start, reported)] = told
    assert start == 0
    assert isinstance(kept, PartialSample) and 0 < len(kept.completion_tokens) < TOKENS
    moved = await sample(SampleRequest(**asked.__dict__ | {"kept": kept}))
    lost = PartialSample(**kept.__dict__ | {"experts": None})
    unknown = await sample(SampleRequest(**asked.__dict__ | {"kept": lost}))

    weights = list(AutoModelForCausalLM.from_pretrained(second, dtype=torch.bfloat16).named_parameters())
    manifest, buffer = lay_out(1, weights)
    fill(WeightStore(folder), manifest, buffer)
    async for asked, begun in running(6):
        await engine.pause("recompute_kv", 1)
        if not begun.done() and engine.produced().get(asked.sample_id, TOKENS) <= 3 * TOKENS // 4:
            break
        await engine.resume()
    await engine.start_weight_update()
    await engine.update_weights({"number": 1, "content_hash": manifest.version.content_hash})
    await engine.finish_weight_update(1)
    await engine.resume()
    across = await begun
    return siblings, list(crowd), moved, unknown, reported, across


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    folder = tmp_path_factory.mktemp("experts")
    first, second = save_small_models(FAMILIES["Qwen3-MoE"](), folder)

    async def work() -> Found:
        engine = Engine(POOL, run_file(first), False, "one", "here")
        try:
            drawn = await draw(engine, folder / "store", second)
            return Found(router_shape(first), [first, second], engine.kv_tokens, *drawn)  # type: ignore[arg-type]
        finally:
            engine.close()

    yield asyncio.run(work())


def group_of(shape: RouterShape, asked: SampleRequest, samples: list[Sample]) -> TrainGroup:
    prompt = len(asked.prompt_tokens)
    sequences = []
    for one in samples:
        assert one.experts is not None
        assert shape.wrong_with(one.experts, prompt + len(one.completion_tokens) - 1) is None
        sequences.append(TrainSequence(one.completion_tokens, one.logprobs, 1.0, experts=one.experts[prompt:]))
    assert samples[0].experts is not None
    return TrainGroup("g", asked.prompt_tokens, sequences, prompt_experts=samples[0].experts[:prompt])


class Compared(NamedTuple):
    """A trainer's pass over samples beside vLLM's."""

    differ: float
    """Share of (token, layer) whose set of experts is another one than vLLM's."""
    mismatch: np.ndarray
    """|difference of log-probability| of each token, in nats."""


def compare(shape: RouterShape, model: Path, group: TrainGroup, dtype: torch.dtype, replays: bool) -> Compared:
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=SHARED_PREFIX)
    policy = Policy(in_training(loaded), replays=replays)
    used: list[torch.Tensor] = []
    for number in shape.layers:
        router = policy.model.base_model.get_submodule(f"layers.{number}.{ROUTERS[shape.kind][0]}")
        router.register_forward_hook(lambda _m, _i, output: used.append(output[2]))
    batch = pack([group])
    assert batch.experts is not None and batch.recorded is not None
    with torch.no_grad():
        logprobs = policy(batch, 1.0).logprobs
    ours = np.sort(torch.stack(used, dim=1).numpy()[batch.recorded.numpy()], axis=-1)
    theirs = np.sort(shape.from_rows(batch.experts.numpy()[batch.recorded.numpy()]), axis=-1)
    mismatch = np.abs(logprobs.float().numpy() - batch.generator_logprobs.numpy())
    return Compared(float((ours != theirs).any(-1).mean()), mismatch)


def test_vllms_experts_are_those_of_the_model_and_replay_brings_the_trainer_nearer(found: Found) -> None:
    assert len(found.siblings[0].completion_tokens) == TOKENS and found.siblings[1].cached_tokens > 0
    assert found.kv_tokens < 4 * (PROMPT + TOKENS), "the crowd cannot run at once"
    groups = [group_of(found.shape, request(0), found.siblings)]
    groups += [group_of(found.shape, request(10 + n, prompt=n + 1), [one]) for n, one in enumerate(found.crowd)]
    rows = {}
    for replays in (False, True):
        each = [compare(found.shape, found.models[0], group, torch.bfloat16, replays) for group in groups]
        rows[replays] = float(np.mean([one.differ for one in each])), np.concatenate([one.mismatch for one in each])
        mean, most = float(rows[replays][1].mean()), float(rows[replays][1].max())
        print(f"replay {replays}: {rows[replays][0]:.2%} other experts, |difference| mean {mean:.4f}, most {most:.3f}")
    assert 0 < rows[False][0] < 0.1, "experts of other tokens, layers or requests would differ in most places"
    assert rows[True][0] == 0
    assert rows[True][1].mean() < rows[False][1].mean() and rows[True][1].max() < rows[False][1].max()


def test_parts_of_a_sample_join_to_the_experts_of_the_whole(found: Found) -> None:
    asked = request(20, prompt=5)
    for one in (found.moved, found.unknown):
        each = compare(found.shape, found.models[0], group_of(found.shape, asked, [one]), torch.bfloat16, False)
        assert each.differ < 0.1
    part, whole = found.reported.experts, found.moved.experts
    assert part is not None and whole is not None
    assert len(part) == PROMPT + len(found.reported.completion_tokens) - 1
    assert np.array_equal(part, whole[: len(part)]), "what is noted while it runs is what it ends with"


def test_a_sample_over_two_versions_has_the_experts_of_the_weights_that_drew_each_token(found: Found) -> None:
    group = group_of(found.shape, request(30, prompt=6), [found.across])
    versions = found.across.token_versions
    cut = int(np.argmax(versions == 1))
    assert 5 <= cut < TOKENS - 5
    assert group.prompt_experts is not None and group.sequences[0].experts is not None
    rows = np.concatenate([group.prompt_experts, group.sequences[0].experts])
    shares = []
    for model in found.models:
        own = chosen(found.shape, model, np.concatenate([group.prompt_tokens, found.across.completion_tokens]))
        theirs = np.sort(found.shape.from_rows(rows), axis=-1)
        other = (np.sort(own[:-1], axis=-1) != theirs).any(-1)
        shares.append((float(other[: PROMPT + cut - 1].mean()), float(other[PROMPT + cut - 1 :].mean())))
    (first_before, first_after), (second_before, second_after) = shares
    # of so few tokens some may have two experts that are about as good
    assert first_before < 0.3 < second_before and second_after < 0.3 < first_after


def chosen(shape: RouterShape, model: Path, tokens: np.ndarray) -> np.ndarray:
    """A model's own choice, [tokens, layers, top_k]."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    used: list[torch.Tensor] = []
    for number in shape.layers:
        router = policy.base_model.get_submodule(f"layers.{number}.{ROUTERS[shape.kind][0]}")
        router.register_forward_hook(lambda _m, _i, output: used.append(output[2]))
    with torch.no_grad():
        policy(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    return torch.stack(used, dim=1).numpy()
