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
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from scheduler.cost.decode import StepCurve
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.drafts.exact_verification import ensure_exact_verification
from streamrl.generation.drafts.undrafted_steps import VerifyingSampler
from streamrl.generation.instance.engine import Engine
from streamrl.rollouts.canary import mean_mismatch, mismatch_bound
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.training.truncation import Truncation, truncate_
from streamrl.weights.version_store import WeightStore
from tests.generation.test_engine import ENDLESS, canary_by_torch, logprobs_of, longer, stored, taken_off, update
from tests.tiny_model import save_tiny_model

FREE_ROWS = StepCurve((1, 1000), (1.0, 1.0))
"""Step times with which every draft pays."""
SKEWED: dict[str, object] = {"temperature": 0.7, "top_k": 3, "top_p": 0.95, "max_tokens": 4}
"""Sampling under which few sequences are likely."""
PROMPT = np.arange(3, 23, dtype=np.int32)
POOL = GenerationPool(max_batch=32, kv_cache_gb=0.1)


class Speculating:
    """An engine that speculates, at version 0 with the weights of model 0; what it does must run in its loop."""

    def __init__(self, folder: Path) -> None:
        self.models = [save_tiny_model(folder / f"model-{seed}", seed, endless=True) for seed in range(2)]
        self.store = WeightStore(folder / "store")
        self.loop = asyncio.Runner()
        self.loop.run(self._start())

    def config(self, **sampling: object) -> RunConfig:
        model = {"path": str(self.models[0]), "max_context": ENDLESS + 96, "dtype": "float32"}
        some = {"model": model, "sampling": {"max_tokens": 24} | sampling, "speculation": {"method": "auto"}}
        return RunConfig.model_validate(some)

    async def _start(self) -> None:
        self.engine = Engine(POOL, self.config(), cuda=False, instance="i", site="here")
        await self.engine.set_up_weights({"directory": str(self.store.directory)}, 0)
        # before it knows step times it drafts nothing, so no time can be lost by drafting from nothing
        self.engine.run = self.config(**SKEWED)
        await self.samples(128, "known")
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
    world.engine.run = world.config(**SKEWED)
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
    drawn: list[Sample] = []
    accepted = drafted = 0
    for more in range(8):  # a drafter that rests drafts nothing for many steps, in which a whole part may end
        drawn += world.loop.run(world.samples(16, f"logprobs-{more}"))
        accepted, drafted = sum(s.accepted_tokens for s in drawn), sum(s.drafted_tokens for s in drawn)
        if 0 < accepted < drafted:
            break
    assert 0 < accepted < drafted, "tokens of both kinds are compared"
    for sample in drawn:
        assert np.abs(logprobs_of(world.models[0], PROMPT, sample, 0.6) - sample.logprobs).max() < 1e-3


def test_greedy_tokens_are_those_without_drafts(world: Speculating) -> None:
    policy = AutoModelForCausalLM.from_pretrained(world.models[0], dtype=torch.float32)
    ids = torch.from_numpy(PROMPT)[None].long()
    expected = policy.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, len(PROMPT) :].tolist()
    world.engine.run = world.config(max_tokens=40)

    async def until_known() -> list[Sample]:
        found: list[Sample] = []
        for n in range(20):  # nothing is drafted while an earlier test's losses are not yet made good
            drawn = await world.engine.generate(SampleRequest(f"greedy.{n}", "g", PROMPT, n, 0.0, 0.0), "regular")
            assert isinstance(drawn, Sample)
            found.append(drawn)
            if drawn.accepted_tokens > 0.5 * drawn.output_length:  # all of it was known
                break
            await world.engine.teach_drafter()
        return found

    drawn = world.loop.run(until_known())
    assert all(sample.completion_tokens.tolist() == expected[: sample.output_length] for sample in drawn)
    assert drawn[-1].accepted_tokens > 0.5 * drawn[-1].output_length


def test_a_stop_string_within_a_draft_ends_the_sample_with_the_token_that_completes_it(world: Speculating) -> None:
    accepted: list[int] = []
    """Tokens accepted in the engine's life after each sample; vLLM tells none of a sample that such a string ends."""

    async def greedy(name: str, **sampling: object) -> Sample:
        world.engine.run = world.config(max_tokens=60, **sampling)
        drawn = await world.engine.generate(SampleRequest(f"{name}.0", name, PROMPT, 0, 0.0, 0.0), "regular")
        assert isinstance(drawn, Sample)
        counts = await world.engine.teach_drafter()
        assert counts is not None
        accepted.append(sum(one["accepted"] for one in counts.values()))
        return drawn

    async def stopped(name: str) -> tuple[Sample, dict[str, Sample]]:
        whole = await greedy(name)
        ends = sorted({text for text in whole.text if text.isascii()})  # of one byte, which is one token
        return whole, {end: await greedy(f"{name}-{ord(end)}", stop=[end]) for end in ends}

    tokenizer = AutoTokenizer.from_pretrained(world.models[0])
    for more in range(8):  # nothing is drafted while an earlier test's losses are not yet made good
        whole, found = world.loop.run(stopped(f"stop-{more}"))
        texts = [tokenizer.decode([token]) for token in whole.completion_tokens]
        for end, drawn in found.items():
            length = texts.index(end) + 1
            assert drawn.finish_reason == "stop"
            assert drawn.completion_tokens.tolist() == whole.completion_tokens[:length].tolist()
            assert np.abs(drawn.logprobs - whole.logprobs[:length]).max() < 1e-3
            assert drawn.token_versions.tolist() == [0] * length
        if accepted[-1] - accepted[0] > 100:  # so some of so many ends are within a step
            break
    assert accepted[-1] - accepted[0] > 100


def test_a_moved_sample_goes_on_with_drafts_and_right_logprobs(world: Speculating) -> None:

    async def moved(seeds: range) -> list[Sample]:
        world.engine.run = world.config(temperature=0.2, max_tokens=90)
        await world.samples(8, "before")
        world.engine.run = world.config(temperature=0.2, max_tokens=ENDLESS)
        requests = [SampleRequest(f"moved.{seed}", "g", PROMPT, seed, 0.0) for seed in seeds]
        running = [asyncio.create_task(world.engine.generate(one, "regular")) for one in requests]
        await longer(world.engine)
        partials = await taken_off(world.engine, requests, running)
        begun = max(len(partial.completion_tokens) for partial in partials)
        world.engine.run = world.config(temperature=0.2, max_tokens=begun + 60)
        found = []
        for one, partial in zip(requests, partials, strict=True):
            whole = await world.engine.generate(replace(one, kept=partial), "regular")
            assert isinstance(whole, Sample)
            begun = len(partial.completion_tokens)
            assert whole.completion_tokens[:begun].tolist() == partial.completion_tokens.tolist()
            found.append(whole)
        return found

    wholes: list[Sample] = []
    for more in range(8):  # a drafter that rests may rest for as long as they take
        wholes += world.loop.run(moved(range(100 + 6 * more, 106 + 6 * more)))
        if sum(whole.drafted_tokens for whole in wholes):
            break
    assert sum(whole.drafted_tokens for whole in wholes) > 0
    for whole in wholes:
        assert np.abs(logprobs_of(world.models[0], PROMPT, whole, 0.2) - whole.logprobs).max() < 1e-3


def test_weights_that_come_in_mid_sequence_draw_what_follows(world: Speculating) -> None:
    old, new = world.models
    content_hash = stored(world.store, 1, new, torch.float32)

    async def crossing() -> list[PartialSample]:
        world.engine.run = world.config(temperature=0.8, max_tokens=100)
        await world.samples(8, "known")
        world.engine.run = world.config(temperature=0.8, max_tokens=ENDLESS)
        requests = [SampleRequest(f"crossing.{n}", "g", PROMPT, 50 + n, 0.0) for n in range(6)]
        running = [asyncio.create_task(world.engine.generate(one, "regular")) for one in requests]
        await longer(world.engine)
        await update(world.engine, "recompute_kv", 1, content_hash)
        await longer(world.engine)
        found = await taken_off(world.engine, requests, running)
        canary = await world.engine.measure_canary()
        assert canary is not None
        assert mean_mismatch(canary, canary_by_torch(new)) < mismatch_bound("float32", "float32")
        return found

    for sample in world.loop.run(crossing()):
        assert set(sample.token_versions.tolist()) == {0, 1}
        by_version = np.stack([logprobs_of(model, PROMPT, sample, 0.8) for model in (old, new)])
        own = by_version[sample.token_versions, np.arange(len(sample.completion_tokens))]
        assert np.abs(own - sample.logprobs).max() < 1e-3


ROWS, VOCABULARY = 3, 11


def settings(generators: dict[int, torch.Generator]) -> SamplingMetadata:
    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=torch.tensor([0.5, 1.0, 2.0]),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(ROWS)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def seeded() -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(row) for row in range(ROWS)}


@pytest.fixture
def plain() -> Sampler:
    current_platform.register_triton_kernel_overrides()  # as vLLM's workers do
    ensure_exact_verification()
    return Sampler(logprobs_mode="processed_logprobs")


def test_a_step_without_drafts_draws_as_without_speculation_and_draws_once(plain: Sampler) -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    theirs, ours = seeded(), seeded()
    expected = plain(logits=logits.clone(), sampling_metadata=settings(theirs))
    nothing = SpecDecodeMetadata.make_dummy([[] for _ in range(ROWS)], torch.device("cpu"))
    found = VerifyingSampler(RejectionSampler(plain))(nothing, None, logits.clone(), settings(ours))
    assert found.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert found.sampled_token_ids.shape == (ROWS, 1)
    assert torch.equal(found.logprobs_tensors.logprobs, expected.logprobs_tensors.logprobs)
    assert all(torch.equal(ours[row].get_state(), theirs[row].get_state()) for row in range(ROWS))


def test_one_draft_in_the_step_is_verified(plain: Sampler) -> None:
    certain = torch.full((ROWS + 1, VOCABULARY), -50.0)  # rows: 4 drafted and then 7; 5; 6
    for row, token in enumerate((4, 7, 5, 6)):
        certain[row, token] = 50.0
    drafted = SpecDecodeMetadata.make_dummy([[4], [], []], torch.device("cpu"))
    drafted.target_logits_indices, drafted.bonus_logits_indices = torch.tensor([0]), torch.tensor([1, 2, 3])
    found = VerifyingSampler(RejectionSampler(plain))(drafted, None, certain, settings(seeded()))
    assert found.sampled_token_ids.tolist() == [[4, 7], [5, -1], [6, -1]]
