"""Real vLLM on a tiny model: samples can be repeated, and updated weights are exactly those of a checkpoint."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.config.schedule import OnUpdate
from streamrl.generation.instance.calibration import Stopwatch
from streamrl.generation.instance.engine import Engine
from streamrl.generation.instance.engine_config import CPU_BLOCK_SIZE
from streamrl.generation.instance.step_trials import TimingTrial
from streamrl.generation.instance.stop_strings import detokenizer_after
from streamrl.rollouts.canary import canary, mean_mismatch, mismatch_bound
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy
from streamrl.training.truncation import Truncation
from streamrl.weights.quantize import CodeKind, dequantize, is_quantized, quantize
from streamrl.weights.version import lay_out
from streamrl.weights.version_store import WeightStore
from tests.tiny_model import save_tiny_model
from tests.waiting import holds, scaled, until
from tests.weights.world import fill

T = TypeVar("T")
POOL = GenerationPool(max_batch=4, kv_cache_gb=0.05)
ENDLESS = 16_000
"""Tokens of a request that has to run until somebody takes it off, however late that is."""


def config(model: Path, **sampling: object) -> RunConfig:
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    folder = {"path": str(model), "max_context": min(positions, ENDLESS + 96), "dtype": "bfloat16"}
    return RunConfig.model_validate({"model": folder, "sampling": {"max_tokens": 24} | sampling})


def request(number: int, seed: int = 0) -> SampleRequest:
    prompt = np.arange(number + 3, number + 13, dtype=np.int32)
    return SampleRequest(f"g.{number}-{seed}", "g", prompt, seed, 0.0)


async def sample(engine: Engine, asked: SampleRequest) -> Sample:
    drawn = await engine.generate(asked, "regular")
    assert isinstance(drawn, Sample)
    return drawn


async def longer(engine: Engine, tokens: int = 15) -> None:
    """Waits until every request has so many tokens more than now, at least one request among them."""
    before = engine.produced()

    def grown() -> bool:
        now, begun = engine.produced(), engine.begun
        return bool(begun) and all(now.get(name, 0) >= before.get(name, 0) + tokens for name in begun)

    await until(grown)


async def taken_off(
    engine: Engine, asked: list[SampleRequest], running: list[asyncio.Task[Sample | PartialSample]]
) -> list[PartialSample]:
    """Takes running requests off; what they have by then."""
    for one in asked:
        await engine.release(one.sample_id)
    partial = await asyncio.gather(*running)
    found = [one for one in partial if isinstance(one, PartialSample)]
    assert len(found) == len(asked), f"{ENDLESS} tokens were drawn meanwhile"
    return found


async def sample_all(engine: Engine, count: int = 4) -> list[Sample]:
    return [await sample(engine, request(n, seed=n)) for n in range(count)]


def exact(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"model": run.model.model_copy(update={"dtype": "float32"})})


def logprobs_of(folder: Path, prompt: np.ndarray, sample: Sample | PartialSample, temperature: float) -> np.ndarray:
    """What a model says of each of a sample's tokens."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = np.concatenate([prompt, sample.completion_tokens])
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor(ids)[None].long()).logits[0].float() / temperature
    each = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids)[1:, None].long())
    return each[len(prompt) - 1 :, 0].numpy()


def assert_logprobs_are_the_models(folder: Path, prompt: np.ndarray, sample: Sample, temperature: float) -> None:
    assert np.abs(logprobs_of(folder, prompt, sample, temperature) - sample.logprobs).max() < 1e-3


def stored(store: WeightStore, number: int, model: Path, dtype: torch.dtype) -> str:
    """Puts a model into the store as a version; returns its hash."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    manifest, buffer = lay_out(number, weights.named_parameters())
    fill(store, manifest, buffer)
    return manifest.version.content_hash


async def update(engine: Engine, on_update: OnUpdate, number: int, content_hash: str) -> None:
    await engine.pause(on_update, number)
    await engine.start_weight_update()
    await engine.update_weights({"number": number, "content_hash": content_hash})
    await engine.finish_weight_update(number)
    await engine.resume()


def assert_same(ours: list[Sample], theirs: list[Sample]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.completion_tokens, b.completion_tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


class Engines:
    """Engines that tests share, one of each type: a start takes longer than all that is asked of one."""

    def __init__(self, folder: Path) -> None:
        self.models = [save_tiny_model(folder / f"model-{seed}", seed, endless=True) for seed in range(3)]
        self.store = WeightStore(folder / "store")
        self._runner = asyncio.Runner()
        self._kept: dict[str, Engine] = {}
        self._number = 0

    def next_number(self) -> int:
        """A version's; none is used twice, nor is that which engines start with."""
        self._number += 1
        return self._number

    def run(self, run: RunConfig, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Does something with an engine that has the weights of model 0, as version `engine.version`. One in which
        that fails is not used again."""
        return self._runner.run(self._run(run, work))

    def start(self) -> None:
        """Starts both, while what is started belongs to no single test."""
        for run in (exact(config(self.models[0])), config(self.models[0])):
            self.run(run, lambda engine: engine.warm_up())

    async def _run(self, run: RunConfig, work: Callable[[Engine], Awaitable[T]]) -> T:
        assert run.model.path == str(self.models[0])
        dtype = run.model.dtype
        engine = self._kept.pop(dtype, None)
        try:
            if engine is None:
                engine = Engine(POOL, run, cuda=False, instance="i", site="here")
                await engine.set_up_weights({"directory": str(self.store.directory)}, 0)
            else:
                engine.run, number = run, self.next_number()
                content_hash = stored(self.store, number, self.models[0], getattr(torch, dtype))
                await update(engine, "recompute_kv", number, content_hash)
            result = await work(engine)
            assert not engine.begun and not engine.produced()
        except BaseException:
            if engine is not None:
                engine.close()
            raise
        self._kept[dtype] = engine
        return result

    def fresh(self, run: RunConfig, version: int, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Does something with an engine that loads a model of its own, under that version."""

        async def body() -> T:
            engine = Engine(POOL, run, cuda=False, instance="i", site="here")
            try:
                await engine.set_up_weights({"directory": str(self.store.directory)}, version)
                return await work(engine)
            finally:
                engine.close()

        return self._runner.run(body())

    def close(self) -> None:
        for engine in self._kept.values():
            engine.close()
        self._runner.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    made.start()
    yield made
    made.close()


def test_updated_weights_equal_a_fresh_engine_loaded_from_the_checkpoint(engines: Engines) -> None:
    old, new = engines.models[:2]
    number = engines.next_number()
    content_hash = stored(engines.store, number, new, torch.bfloat16)

    async def updated(engine: Engine) -> tuple[int, list[Sample], list[Sample], list[Sample]]:
        first, before, again = engine.version, await sample_all(engine), await sample_all(engine)
        await update(engine, "recompute_kv", number, content_hash)
        return first, before, again, await sample_all(engine)

    first, before, again, after = engines.run(config(old), updated)
    assert_same(before, again)  # seeds repeat a sample
    assert {int(v) for s in before for v in s.token_versions} == {first}
    assert {int(v) for s in after for v in s.token_versions} == {number} != {first}
    assert any(not np.array_equal(a.completion_tokens, b.completion_tokens) for a, b in zip(before, after, strict=True))
    # the tied output head included: it is most of what differs
    assert_same(after, engines.fresh(config(new), number, sample_all))


def test_an_update_that_broke_off_is_begun_anew(engines: Engines) -> None:
    old, new = engines.models[:2]
    half, number = engines.next_number(), engines.next_number()
    weights = AutoModelForCausalLM.from_pretrained(engines.models[2], dtype=torch.bfloat16)
    tensors = list(weights.named_parameters())
    manifest, buffer = lay_out(half, tensors[: len(tensors) // 2])
    fill(engines.store, manifest, buffer)
    content_hash = stored(engines.store, number, new, torch.bfloat16)

    async def updated(engine: Engine) -> list[Sample]:
        with pytest.raises(Exception, match="has no weights for"):
            await update(engine, "recompute_kv", half, manifest.version.content_hash)
        await update(engine, "recompute_kv", number, content_hash)
        return await sample_all(engine)

    after = engines.run(config(old), updated)
    assert_same(after, engines.fresh(config(new), number, sample_all))


def canary_by_torch(folder: Path, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """What a model of its own says of the canary's completion."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one = canary(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), 128)
    ids = torch.from_numpy(np.concatenate([one.prompt_tokens, one.completion_tokens]))[None].long()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(input_ids=ids).logits[0].float()
    each = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])
    return each[len(one.prompt_tokens) - 1 :, 0].numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_shows_which_weights_an_engine_computes_with(engines: Engines, dtype: str, tmp_path: Path) -> None:
    run = exact(config(engines.models[0])) if dtype == "float32" else config(engines.models[0])
    type_, old, new = getattr(torch, dtype), *engines.models[:2]
    weights = AutoModelForCausalLM.from_pretrained(new, dtype=type_)
    with torch.no_grad():
        weights.model.layers[0].mlp.down_proj.weight.zero_()  # one wrong tensor of a version that is right otherwise
    shutil.copytree(new, tmp_path / "wrong")
    weights.save_pretrained(tmp_path / "wrong")
    versions = [(engines.next_number(), folder) for folder in (new, tmp_path / "wrong")]
    hashes = [stored(engines.store, number, folder, type_) for number, folder in versions]

    async def measured(engine: Engine) -> list[np.ndarray]:
        before, found = engine.worked(), [await engine.measure_canary()]
        for (number, _), content_hash in zip(versions, hashes, strict=True):
            await update(engine, "recompute_kv", number, content_hash)
            found.append(await engine.measure_canary())
        assert engine.worked() == before  # not counted as a sample
        return [one for one in found if one is not None]

    of_old, of_new, of_wrong = engines.run(run, measured)
    bound = mismatch_bound(dtype, dtype)
    by_torch = [canary_by_torch(folder, type_) for folder in (old, new)]
    mismatches = [mean_mismatch(ours, theirs) for ours, theirs in zip((of_old, of_new), by_torch, strict=True)]
    assert max(mismatches) < bound / 2, mismatches
    assert mean_mismatch(of_new, by_torch[0]) > bound  # the version before
    assert mean_mismatch(of_wrong, by_torch[1]) > bound


def stored_as_codes(store: WeightStore, number: int, model: Path, kind: CodeKind, rounded: Path) -> str:
    """Puts a model with 8-bit linear weights into the store; `rounded` becomes a checkpoint of what they stand for."""
    weights, tensors = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), {}
    for name, parameter in weights.named_parameters():
        tensors[name] = parameter.detach().clone()
        if is_quantized(name, tuple(parameter.shape)):
            tensors[name], tensors[f"{name}.scale"] = codes, scales = quantize(tensors[name], kind)
            parameter.data.copy_(dequantize(codes, scales, torch.bfloat16))
    shutil.copytree(model, rounded)
    weights.save_pretrained(rounded)
    manifest, buffer = lay_out(number, tensors.items())
    fill(store, manifest, buffer)
    return manifest.version.content_hash


def test_8_bit_codes_load_as_a_checkpoint_of_the_weights_that_they_stand_for(engines: Engines, tmp_path: Path) -> None:
    old, new = engines.models[:2]
    rounded = tmp_path / "rounded"
    coded, whole = engines.next_number(), engines.next_number()
    content_hash = stored_as_codes(engines.store, coded, new, "fp8", rounded)
    unrounded_hash = stored(engines.store, whole, new, torch.bfloat16)

    async def updated(engine: Engine) -> tuple[list[Sample], list[Sample]]:
        await update(engine, "recompute_kv", coded, content_hash)
        after = await sample_all(engine)
        await update(engine, "recompute_kv", whole, unrounded_hash)
        return after, await sample_all(engine)

    after, unrounded = engines.run(config(old), updated)
    assert_same(after, engines.fresh(config(rounded), coded, sample_all))
    with pytest.raises(AssertionError):  # what was rounded away would show
        assert_same(after, unrounded)


def test_a_sample_over_three_versions_has_each_tokens_logprob_under_the_weights_that_drew_it(engines: Engines) -> None:
    models = engines.models
    new = {engines.next_number(): model for model in models[1:]}
    versions = {number: stored(engines.store, number, model, torch.float32) for number, model in new.items()}

    async def body(engine: Engine) -> tuple[list[int], list[PartialSample]]:
        numbers = [engine.version, *versions]
        asked = [request(n, seed=n) for n in range(4)]
        running = [asyncio.create_task(engine.generate(one, "regular")) for one in asked]
        await longer(engine)
        for number, content_hash in versions.items():
            await update(engine, "recompute_kv", number, content_hash)
            await longer(engine)
        return numbers, await taken_off(engine, asked, running)

    numbers, samples = engines.run(exact(config(models[0], max_tokens=ENDLESS, temperature=0.8)), body)
    for number, drawn in enumerate(samples):
        order = np.array([numbers.index(version) for version in drawn.token_versions.tolist()])
        assert sorted(set(order)) == [0, 1, 2] and order.tolist() == sorted(order.tolist())
        told = np.stack([logprobs_of(model, request(number).prompt_tokens, drawn, 0.8) for model in models])
        own = told[order, np.arange(len(order))]
        assert np.abs(own - drawn.logprobs).max() < 1e-3
        assert np.abs(told[0] - drawn.logprobs).max() > 1e-2  # one version alone does not explain them


def test_new_requests_meet_a_prefix_that_older_weights_computed_only_where_they_say_so(engines: Engines) -> None:
    """Also when running requests keep their KV cache over the update."""
    old, new = engines.models[:2]
    number = engines.next_number()
    content_hash = stored(engines.store, number, new, torch.float32)
    prompt = np.arange(3, 80, dtype=np.int32)  # two whole blocks of KV cache

    async def body(engine: Engine) -> tuple[int, PartialSample, Sample, Sample, Sample, Sample]:
        before, asked = engine.version, SampleRequest("g.0", "g", prompt, 0, 0.0)
        first = asyncio.create_task(engine.generate(asked, "regular"))
        await longer(engine)
        await update(engine, "keep_kv", number, content_hash)
        await longer(engine)
        engine.run = exact(config(old, max_tokens=90))
        second = await sample(engine, SampleRequest("g.1", "g", prompt, 1, 0.0))
        turn = np.concatenate([prompt, second.completion_tokens, prompt[:9]])  # one that extends it
        third = await sample(engine, SampleRequest("g.2", "g", turn, 2, 0.0))
        (drawn,) = await taken_off(engine, [asked], [first])
        turn = np.concatenate([prompt, drawn.completion_tokens[:9]])  # one of an episode that keeps its cache
        kept = await sample(engine, SampleRequest("g.3", "g", turn, 3, 0.0, cache_version=before))
        engine.line += 1  # this number means other weights now
        last = await sample(engine, SampleRequest("g.4", "g", prompt, 4, 0.0))
        return before, drawn, second, third, kept, last

    before, first, second, third, kept_turn, last = engines.run(exact(config(old, max_tokens=ENDLESS)), body)
    assert kept_turn.cached_tokens >= len(prompt) // CPU_BLOCK_SIZE * CPU_BLOCK_SIZE > 0
    known = len(prompt) + second.output_length - 1  # nothing was computed from the last token
    assert last.cached_tokens == 0
    assert (second.cached_tokens, third.cached_tokens) == (0, known // CPU_BLOCK_SIZE * CPU_BLOCK_SIZE)
    assert_logprobs_are_the_models(new, np.concatenate([prompt, second.completion_tokens, prompt[:9]]), third, 1.0)
    assert set(first.token_versions.tolist()) == {before, number} and set(second.token_versions.tolist()) == {number}
    assert_logprobs_are_the_models(new, prompt, second, 1.0)
    kept = first.token_versions == number  # these went on from a KV cache of the old weights
    assert np.abs(logprobs_of(new, prompt, first, 1.0) - first.logprobs)[kept].max() > 1e-2


def test_waiting_for_running_requests_lets_them_end_under_their_weights(engines: Engines) -> None:
    model = engines.models[0]
    number = engines.next_number()
    content_hash = stored(engines.store, number, model, torch.float32)

    async def body(engine: Engine) -> tuple[int, Sample, Sample]:
        before = engine.version
        first = asyncio.create_task(sample(engine, request(0)))
        await until(lambda: first.done() or any(engine.produced().values()))  # one that waits is there with 0
        updating = asyncio.create_task(update(engine, "wait", number, content_hash))
        async with asyncio.timeout(scaled(30)):
            while not await engine._llm.is_paused():
                assert not updating.done()
        second = await sample(engine, request(1))  # waits for the new weights
        await updating
        return before, await first, second

    before, first, second = engines.run(exact(config(model, max_tokens=60)), body)
    assert set(first.token_versions.tolist()) == {before} != {number}
    assert set(second.token_versions.tolist()) == {number}


def test_a_budget_parks_a_sample_which_goes_on_from_its_tokens_and_greedy_requests_repeat(engines: Engines) -> None:
    model = engines.models[0]

    async def body(engine: Engine) -> tuple[PartialSample, Sample, list[Sample]]:
        parked = await engine.generate(replace(request(0), pause_at=10), "regular")
        assert isinstance(parked, PartialSample)
        whole = await sample(engine, replace(request(0), kept=parked, pause_at=40))
        greedy = [replace(request(1, seed), temperature=0.0) for seed in (1, 2)]
        return parked, whole, [await sample(engine, asked) for asked in greedy]

    parked, whole, greedy = engines.run(exact(config(model, max_tokens=40)), body)
    assert len(parked.completion_tokens) == 10
    assert (whole.output_length, whole.finish_reason) == (40, "length")
    np.testing.assert_array_equal(whole.completion_tokens[:10], parked.completion_tokens)
    assert_logprobs_are_the_models(model, request(0).prompt_tokens, whole, 1.0)
    np.testing.assert_array_equal(greedy[0].completion_tokens, greedy[1].completion_tokens)


SETTINGS = [
    {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    for temperature, top_p, top_k, min_p in itertools.product((0.7, 1.0, 1.3), (1.0, 0.9, 0.5), (0, 20), (0.0, 0.05))
]


def test_with_equal_weights_every_importance_ratio_is_1_whatever_the_sampling(engines: Engines) -> None:
    """The trainer's model computes the distribution that vLLM has drawn from, for every supported combination."""
    model = engines.models[0]
    policy = load_policy(str(model))

    async def draw(engine: Engine) -> list[list[Sample]]:
        drawn = []
        for setting in SETTINGS:
            engine.run = exact(config(model, max_tokens=24, **setting))
            asked = [replace(request(n, seed=n), sample_id=f"{len(drawn)}.{n}") for n in range(4)]
            drawn.append(await asyncio.gather(*(sample(engine, one) for one in asked)))
        return drawn

    edges = 0
    for setting, samples in zip(SETTINGS, engines.run(exact(config(model)), draw), strict=True):
        groups = [
            TrainGroup(str(n), request(n).prompt_tokens, [TrainSequence(one.completion_tokens, one.logprobs, 0.0)])
            for n, one in enumerate(samples)
        ]
        batch = pack(groups)
        truncation = Truncation(*(setting[name] for name in ("top_k", "top_p", "min_p")))
        with torch.no_grad():
            found = policy(batch, setting["temperature"], truncation)
        differs = ((found.logprobs - batch.generator_logprobs).abs() > 1e-4) | found.outside
        edges += int(differs.sum())
        assert setting["top_p"] < 1 or not differs.any(), setting
        if truncation:  # the full softmax is another distribution
            full = policy(batch, setting["temperature"]).logprobs.detach()
            assert float((full - batch.generator_logprobs).abs().max()) > 0.01, setting
    assert edges <= 3  # of 3,456: whether the token at the edge of a nucleus is in it may depend on a rounding


def test_a_sleeping_engine_wakes_up_with_new_weights(engines: Engines) -> None:
    model = engines.models[0]
    number = engines.next_number()
    content_hash = stored(engines.store, number, model, torch.float32)

    async def body(engine: Engine) -> Sample:
        await engine.sleep()
        waiting = asyncio.create_task(sample(engine, request(0)))
        await holds(lambda: not waiting.done(), 0.1)
        await engine.wake_for_update()
        await engine.start_weight_update()
        await engine.update_weights({"number": number, "content_hash": content_hash})
        await engine.finish_weight_update(number)
        assert not waiting.done()
        await engine.wake_up()
        return await waiting

    assert engines.run(exact(config(model, max_tokens=10)), body).output_length == 10


def test_a_request_that_is_taken_off_goes_on_with_its_tokens(engines: Engines) -> None:
    model = engines.models[0]

    async def body(engine: Engine) -> tuple[int, PartialSample, Sample, dict[str, int], Sample]:
        asked = request(0, seed=5)
        at_once = asyncio.create_task(engine.generate(asked, "regular"))
        await asyncio.sleep(0)  # vLLM does not know of it yet
        await engine.release(asked.sample_id)
        assert isinstance(await at_once, PartialSample)
        running = asyncio.create_task(engine.generate(asked, "regular"))
        await longer(engine)
        (partial,) = await taken_off(engine, [asked], [running])
        assert not engine.produced()
        engine.run = exact(config(model, max_tokens=len(partial.completion_tokens) + 60))
        again = asyncio.create_task(sample(engine, replace(asked, kept=partial)))
        produced = await until(engine.produced)
        whole = await again
        await engine.release(asked.sample_id)  # it has ended: nothing happens
        return engine.version, partial, whole, produced, await sample(engine, request(1))

    version, partial, whole, produced, _ = engines.run(exact(config(model, max_tokens=ENDLESS)), body)
    had = len(partial.completion_tokens)
    assert 15 <= had <= produced[partial.sample_id]
    assert whole.output_length == had + 60 and whole.finish_reason == "length"
    np.testing.assert_array_equal(whole.completion_tokens[:had], partial.completion_tokens)
    np.testing.assert_array_equal(whole.logprobs[:had], partial.logprobs)
    assert set(whole.token_versions.tolist()) == {version}
    assert whole.t_dispatched == partial.t_dispatched and whole.t_first_token == partial.t_first_token
    assert whole.t_last_part is not None and partial.t_first_token < whole.t_last_part < whole.t_finished
    # the rest is not drawn with the noise of the beginning again
    more = whole.completion_tokens[had:]
    assert more[:had].tolist() != partial.completion_tokens[: len(more)].tolist()
    assert_logprobs_are_the_models(model, request(0).prompt_tokens, whole, 1.0)


def test_made_up_prompts_have_no_token_that_the_model_lacks(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: Engine) -> tuple[int, int]:
        larger = copy.deepcopy(engine._tokenizer)
        larger.add_tokens([f"<added {n}>" for n in range(1000)])
        before = engine.vocabulary
        monkeypatch.setattr(engine, "_tokenizer", larger)
        return before, engine.vocabulary

    known = AutoModelForCausalLM.from_pretrained(engines.models[0]).config.vocab_size
    before, after = engines.run(config(engines.models[0]), work)
    assert before <= known
    assert after == known


def test_a_stop_string_ends_a_completion_and_text_is_decoded(engines: Engines) -> None:
    model = engines.models[0]
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = engines.run(config(model, max_tokens=64), lambda engine: sample_all(engine, 2))
    stop = plain[0].text[10:12]
    stopped = engines.run(config(model, max_tokens=64, stop=[stop]), lambda engine: sample_all(engine, 1))
    assert plain[0].text == tokenizer.decode(plain[0].completion_tokens, skip_special_tokens=True)
    assert plain[0].finish_reason == "length"
    assert stopped[0].finish_reason == "stop"
    assert stopped[0].output_length < plain[0].output_length
    with pytest.raises(AssertionError):
        assert_same(plain[:1], stopped)


def test_a_special_token_can_be_a_stop_string(engines: Engines) -> None:
    run = exact(config(engines.models[0], max_tokens=64))
    special = {token: text for token, text in ((258, "<|user|>"), (259, "<|assistant|>"), (260, "<|system|>"))}

    async def work(engine: Engine) -> tuple[int, int, Sample]:
        for seed in range(40):
            plain = await sample(engine, request(0, seed))
            tokens = plain.completion_tokens.tolist()
            if at := next((n for n, token in enumerate(tokens[:-1]) if token in special), 0):
                break
        engine.run = exact(config(engines.models[0], max_tokens=64, stop=[special[tokens[at]]]))
        return at, len(tokens), await sample(engine, request(0, seed))

    at, length, stopped = engines.run(run, work)
    assert stopped.finish_reason == "stop" and len(stopped.completion_tokens) == at + 1 < length


def test_calibration_draws_tokens_as_the_run_does(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(engines.models[0], temperature=0.7, top_p=0.9, top_k=20)

    async def work(engine: Engine) -> list[Any]:
        asked, generate = [], engine._llm.generate
        monkeypatch.setattr(engine._llm, "generate", lambda *args: asked.append(args[1]) or generate(*args))
        await Stopwatch(engine).trial(TimingTrial(2, 8, 3, "prefill"))
        monkeypatch.undo()
        return asked

    asked = engines.run(run, work)
    assert [(one.temperature, one.top_p, one.top_k, one.ignore_eos) for one in asked] == 2 * [(0.7, 0.9, 20, True)]


def test_a_stop_string_of_which_a_part_was_kept_ends_the_completion(engines: Engines) -> None:
    model = engines.models[0]
    whole, *_ = engines.run(exact(config(model, max_tokens=64)), lambda engine: sample_all(engine, 1))

    def beginning(tokens: int) -> SampleRequest:
        """The request with its first tokens, of one byte each, from another instance."""
        arrays = whole.completion_tokens[:tokens], whole.logprobs[:tokens], whole.token_versions[:tokens]
        return replace(request(0), kept=PartialSample(whole.sample_id, *arrays, 1.0, 2.0))

    async def work(engine: Engine) -> tuple[int, str, Sample, Sample]:
        for tokens in range(8, 60):
            plain = await sample(engine, beginning(tokens))
            across = engine._tokenizer.decode(plain.completion_tokens[tokens - 1 : tokens + 1])
            if len(across) == 2 and across.isascii() and across.isprintable():
                break
        engine.run = exact(config(model, max_tokens=64, stop=["of which nothing is kept", across]))
        return tokens, across, plain, await sample(engine, beginning(tokens))

    tokens, across, plain, stopped = engines.run(exact(config(model, max_tokens=64)), work)
    assert plain.finish_reason == "length" and stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.completion_tokens, plain.completion_tokens[: tokens + 1])
    assert stopped.text.endswith(across)


@pytest.mark.parametrize("slow", [False, True])
def test_a_text_is_decoded_as_if_it_had_not_been_interrupted(
    slow: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(engines.models[0])
    if slow:
        monkeypatch.setattr("vllm.v1.engine.detokenizer.uses_fast_detokenizer", lambda tokenizer: False)
    prompt, answer = (tokenizer.encode(text) for text in ("End with .</\u7b54>! ", "7.</\u7b54>x"))  # bytes are tokens
    for kept in range(1, len(answer) - 2):
        asked = SimpleNamespace(
            request_id="g.0",
            prompt_token_ids=prompt + answer[:kept],
            prompt_embeds=None,
            sampling_params=SamplingParams(stop=["</\u7b54>"]),
        )
        detokenizer = detokenizer_after(tokenizer, asked, kept)
        found = {count: detokenizer.update([token], False) for count, token in enumerate(answer[kept:], kept + 1)}
        assert [count for count, stop in found.items() if stop] == [len(answer) - 1], kept
        assert detokenizer.output_token_ids == answer[kept:] and detokenizer.num_output_tokens() == len(answer) - kept
