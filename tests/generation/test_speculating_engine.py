"""Real vLLM with the drafter: distribution and log-probabilities stay the model's, over updates and moves too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.cost.decode import StepCurve
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine import Engine
from streamrl.rollouts.canary import difference, mismatch_bound
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.training.truncation import Truncation, truncate_
from streamrl.weights.version_store import WeightStore
from tests.generation.test_engine import canary_by_torch, logprobs_of, stored, update
from tests.tiny_model import save_tiny_model
from tests.waiting import until

FREE_ROWS = StepCurve((1, 1000), (1.0, 1.0))
"""Step times with which every draft pays."""
PROMPT = np.arange(3, 23, dtype=np.int32)
POOL = GenerationPool(max_batch=32, kv_cache_gb=0.1)


class Speculating:
    """An engine that speculates, at version 0 with the weights of model 0; what it does must run in its loop."""

    def __init__(self, folder: Path) -> None:
        self.models = [save_tiny_model(folder / f"model-{seed}", seed=seed) for seed in range(2)]
        self.store = WeightStore(folder / "store")
        self.loop = asyncio.Runner()
        self.loop.run(self._start())

    def config(self, **sampling: object) -> RunConfig:
        model = {"path": str(self.models[0]), "max_context": 128, "dtype": "float32"}
        some = {"model": model, "sampling": {"max_tokens": 24} | sampling, "speculation": {"method": "auto"}}
        return RunConfig.model_validate(some)

    async def _start(self) -> None:
        self.engine = Engine(POOL, self.config(), cuda=False, instance="i", site="here")
        await self.engine.set_up_weights({"directory": str(self.store.directory)}, 0)
        await self.engine.teach_drafter(FREE_ROWS)

    async def samples(self, count: int, name: str = "g") -> list[Sample]:
        """Samples of one prompt, the later half after the drafter was taught the earlier one."""
        found: list[Sample] = []
        for part in (range(count // 2), range(count // 2, count)):
            requests = [SampleRequest(f"{name}.{n}", name, PROMPT, n, 0.0) for n in part]
            for drawn in await asyncio.gather(*(self.engine.generate(one, "regular") for one in requests)):
                assert isinstance(drawn, Sample)
                found.append(drawn)
            await self.engine.teach_drafter()
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculating]:
    made = Speculating(tmp_path_factory.mktemp("speculating"))
    yield made
    made.engine.close()
    made.loop.close()


def sequence_odds(model: Path, run: RunConfig, length: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of `length` tokens after `PROMPT`, by transformers and the trainer's truncation."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cut = Truncation(run.sampling.top_k, run.sampling.top_p, run.sampling.min_p)
    odds: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, odd in odds.items():
            ids = torch.from_numpy(np.concatenate([PROMPT, np.asarray(tokens, dtype=np.int32)]))[None].long()
            with torch.no_grad():
                logits = policy(input_ids=ids).logits[0, -1:].float() / run.sampling.temperature
            truncate_(logits, logits.argmax(-1), cut)
            each = torch.softmax(logits, -1)[0]
            longer |= {(*tokens, int(n)): odd * float(each[n]) for n in torch.nonzero(each)[:, 0]}
        odds = longer
    return odds


def chi_square(counts: Counter[tuple[int, ...]], odds: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells of less than 5 expected samples are pooled."""
    total = counts.total()
    large = {cell: odd * total for cell, odd in odds.items() if odd * total >= 5}
    rest = total - sum(large.values())
    cells = [(counts[cell], expected) for cell, expected in large.items()]
    if rest > 1:
        cells.append((total - sum(counts[cell] for cell in large), rest))
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


def test_tokens_have_the_models_frequencies_although_most_are_drafted(world: Speculating) -> None:
    world.engine.run = world.config(temperature=0.7, top_k=3, top_p=0.95, max_tokens=4)
    world.loop.run(world.samples(128, "known"))  # while it has nothing to draft from, the drafter rests
    drawn = world.loop.run(world.samples(640, "frequencies"))
    odds = sequence_odds(world.models[0], world.engine.run, 4)
    counts = Counter(tuple(sample.completion_tokens.tolist()) for sample in drawn)
    assert counts.keys() <= odds.keys()
    statistic, freedom = chi_square(counts, odds)
    assert sum(sample.accepted_tokens for sample in drawn) > 320
    # 5 standard deviations above the mean of chi-square
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)
    for sample in drawn[:8] + drawn[-8:]:
        told = np.cumsum(sample.logprobs)[-1]
        assert told == pytest.approx(np.log(odds[tuple(sample.completion_tokens.tolist())]), abs=1e-3)


def test_logprobs_are_the_models_at_any_temperature(world: Speculating) -> None:
    world.engine.run = world.config(temperature=0.6, max_tokens=60)
    drawn = world.loop.run(world.samples(16, "logprobs"))
    assert 0 < sum(s.accepted_tokens for s in drawn) < sum(s.drafted_tokens for s in drawn)
    for sample in drawn:
        assert np.abs(logprobs_of(world.models[0], PROMPT, sample, 0.6) - sample.logprobs).max() < 1e-3


def test_greedy_tokens_are_those_without_drafts(world: Speculating) -> None:
    policy = AutoModelForCausalLM.from_pretrained(world.models[0], dtype=torch.float32)
    ids = torch.from_numpy(PROMPT)[None].long()
    expected = policy.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, len(PROMPT) :].tolist()
    world.engine.run = world.config(max_tokens=40)

    async def twice() -> list[Sample]:
        found = []
        for n in range(2):
            drawn = await world.engine.generate(SampleRequest(f"greedy.{n}", "g", PROMPT, n, 0.0, 0.0), "regular")
            assert isinstance(drawn, Sample)
            found.append(drawn)
            await world.engine.teach_drafter()
        return found

    first, second = world.loop.run(twice())
    assert first.completion_tokens.tolist() == expected[: first.output_length] == second.completion_tokens.tolist()
    assert second.accepted_tokens > 0.5 * second.output_length  # all of it was known


def test_a_moved_sample_goes_on_with_drafts_and_right_logprobs(world: Speculating) -> None:
    world.engine.run = world.config(temperature=0.6, max_tokens=90)

    async def moved() -> list[Sample]:
        await world.samples(8, "before")
        requests = [SampleRequest(f"moved.{n}", "g", PROMPT, 123 + n, 0.0) for n in range(6)]
        running = [asyncio.create_task(world.engine.generate(one, "regular")) for one in requests]
        await until(lambda: min(world.engine.produced().values(), default=0) >= 15)
        for one in requests:
            await world.engine.release(one.sample_id)
        found = []
        for one, partial in zip(requests, await asyncio.gather(*running), strict=True):
            if isinstance(partial, PartialSample):  # else it has ended before
                whole = await world.engine.generate(replace(one, kept=partial), "regular")
                assert isinstance(whole, Sample)
                begun = len(partial.completion_tokens)
                assert whole.completion_tokens[:begun].tolist() == partial.completion_tokens.tolist()
                found.append(whole)
        return found

    wholes = world.loop.run(moved())
    assert sum(whole.drafted_tokens for whole in wholes) > 0
    for whole in wholes:
        assert np.abs(logprobs_of(world.models[0], PROMPT, whole, 0.6) - whole.logprobs).max() < 1e-3


def test_weights_that_come_in_mid_sequence_draw_what_follows(world: Speculating) -> None:
    old, new = world.models
    world.engine.run = world.config(temperature=0.8, max_tokens=100)
    content_hash = stored(world.store, 1, new, torch.float32)

    async def crossing() -> list[Sample]:
        await world.samples(8, "known")
        requests = [SampleRequest(f"crossing.{n}", "g", PROMPT, 50 + n, 0.0) for n in range(6)]
        running = [asyncio.create_task(world.engine.generate(one, "regular")) for one in requests]
        await until(lambda: min(world.engine.produced().values(), default=0) >= 15)
        await update(world.engine, "recompute_kv", 1, content_hash)
        found = await asyncio.gather(*running)
        canary = await world.engine.measure_canary()
        assert canary is not None
        assert difference(canary, canary_by_torch(new)) < mismatch_bound("float32", "float32")
        return [one for one in found if isinstance(one, Sample)]

    drawn = world.loop.run(crossing())
    assert any(set(s.token_versions.tolist()) == {0, 1} for s in drawn)
    for sample in drawn:
        by_version = np.stack([logprobs_of(model, PROMPT, sample, 0.8) for model in (old, new)])
        own = by_version[sample.token_versions, np.arange(sample.output_length)]
        assert np.abs(own - sample.logprobs).max() < 1e-3
