"""Real vLLM on a tiny model: samples can be repeated, and updated weights are exactly those of a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.config.schedule import OnUpdate
from streamrl.generation.engine import Engine
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.weights.quantize import Kind, dequantize, is_quantized, quantize
from streamrl.weights.store import WeightStore
from streamrl.weights.version import lay_out
from tests.tiny_model import save_tiny_model

POOL = GenerationPool(max_batch=4, kv_cache_gb=0.05)


def config(model: Path, **sampling: object) -> RunConfig:
    values = {"path": str(model), "max_context": 128, "dtype": "bfloat16"}
    return RunConfig.model_validate({"model": values, "sampling": {"max_tokens": 24} | sampling})


def request(number: int, seed: int = 0) -> SampleRequest:
    prompt = np.arange(number + 3, number + 13, dtype=np.int32)
    return SampleRequest(f"g.{number}-{seed}", "g", prompt, seed, 0.0)


async def sample(engine: Engine, asked: SampleRequest) -> Sample:
    drawn = await engine.generate(asked, "regular")
    assert isinstance(drawn, Sample)
    return drawn


async def sample_all(engine: Engine, count: int = 4) -> list[Sample]:
    return [await sample(engine, request(n, seed=n)) for n in range(count)]


def exact(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"model": run.model.model_copy(update={"dtype": "float32"})})


def logprobs_of(folder: Path, prompt: np.ndarray, sample: Sample, temperature: float) -> np.ndarray:
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
    store.begin(manifest)[:] = buffer
    partial = store.directory / f"version_{number}.partial"
    store.commit(manifest, np.memmap(partial, dtype=np.uint8, mode="r"))
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


def test_updated_weights_equal_a_fresh_engine_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    old = save_tiny_model(tmp_path / "old", seed=0)
    new = save_tiny_model(tmp_path / "new", seed=1)
    store = WeightStore(tmp_path / "store")
    content_hash = stored(store, 5, new, torch.bfloat16)

    async def updated() -> tuple[list[Sample], list[Sample], list[Sample]]:
        engine = Engine(POOL, config(old), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            before = await sample_all(engine)
            again = await sample_all(engine)
            await update(engine, "recompute_kv", 5, content_hash)
            return before, again, await sample_all(engine)
        finally:
            engine.close()

    async def fresh() -> list[Sample]:
        engine = Engine(POOL, config(new), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 5)
            return await sample_all(engine)
        finally:
            engine.close()

    before, again, after = asyncio.run(updated())
    assert_same(before, again)  # seeds repeat a sample
    assert {int(v) for s in before for v in s.token_versions} == {0}
    assert {int(v) for s in after for v in s.token_versions} == {5}
    assert any(not np.array_equal(a.completion_tokens, b.completion_tokens) for a, b in zip(before, after, strict=True))
    assert_same(after, asyncio.run(fresh()))  # the tied output head included: it is most of what differs


def stored_as_codes(store: WeightStore, number: int, model: Path, kind: Kind, rounded: Path) -> str:
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
    store.begin(manifest)[:] = buffer
    store.commit(manifest, np.memmap(store.directory / f"version_{number}.partial", dtype=np.uint8, mode="r"))
    return manifest.version.content_hash


def test_8_bit_codes_load_as_a_checkpoint_of_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    old, new = save_tiny_model(tmp_path / "old", seed=0), save_tiny_model(tmp_path / "new", seed=1)
    rounded = tmp_path / "rounded"
    store = WeightStore(tmp_path / "store")
    content_hash = stored_as_codes(store, 5, new, "fp8", rounded)
    unrounded_hash = stored(store, 6, new, torch.bfloat16)

    async def updated() -> tuple[list[Sample], list[Sample]]:
        engine = Engine(POOL, config(old), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            await update(engine, "recompute_kv", 5, content_hash)
            after = await sample_all(engine)
            await update(engine, "recompute_kv", 6, unrounded_hash)
            return after, await sample_all(engine)
        finally:
            engine.close()

    async def fresh() -> list[Sample]:
        engine = Engine(POOL, config(rounded), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 5)
            return await sample_all(engine)
        finally:
            engine.close()

    after, unrounded = asyncio.run(updated())
    assert_same(after, asyncio.run(fresh()))
    with pytest.raises(AssertionError):  # what was rounded away would show
        assert_same(after, unrounded)


def test_a_sample_over_three_versions_has_each_tokens_logprob_under_the_weights_that_drew_it(tmp_path: Path) -> None:
    models = [save_tiny_model(tmp_path / f"model-{seed}", seed=seed) for seed in range(3)]
    store = WeightStore(tmp_path / "store")
    hashes = {number: stored(store, number, models[number], torch.float32) for number in (1, 2)}

    async def body() -> list[Sample]:
        run = exact(config(models[0], max_tokens=100, temperature=0.8))
        engine = Engine(POOL, run, cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            running = [asyncio.create_task(sample(engine, request(n, seed=n))) for n in range(4)]
            for number, content_hash in hashes.items():
                while min(engine.produced().values(), default=0) < 15 * number:
                    await asyncio.sleep(0.001)
                await update(engine, "recompute_kv", number, content_hash)
            return list(await asyncio.gather(*running))
        finally:
            engine.close()

    samples = asyncio.run(body())
    crossing = [s for s in samples if set(s.token_versions.tolist()) == {0, 1, 2}]
    assert crossing, [s.token_versions.tolist() for s in samples]
    for number, drawn in enumerate(samples):
        assert drawn.token_versions.tolist() == sorted(drawn.token_versions.tolist())
        told = np.stack([logprobs_of(model, request(number).prompt_tokens, drawn, 0.8) for model in models])
        own = told[drawn.token_versions, np.arange(drawn.output_length)]
        assert np.abs(own - drawn.logprobs).max() < 1e-3
        assert np.abs(told[0] - drawn.logprobs).max() > 1e-2  # one version alone does not explain them


def test_new_requests_never_meet_a_prefix_that_older_weights_computed(tmp_path: Path) -> None:
    """Also when running requests keep their KV cache over the update."""
    old, new = save_tiny_model(tmp_path / "old", seed=0), save_tiny_model(tmp_path / "new", seed=1)
    store = WeightStore(tmp_path / "store")
    content_hash = stored(store, 1, new, torch.float32)
    prompt = np.arange(3, 80, dtype=np.int32)  # two whole blocks of KV cache

    async def body() -> tuple[Sample, Sample]:
        engine = Engine(POOL, exact(config(old, max_tokens=30)), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            first = asyncio.create_task(sample(engine, SampleRequest("g.0", "g", prompt, 0, 0.0)))
            while engine.produced().get("g.0", 0) < 5:
                await asyncio.sleep(0.001)
            await update(engine, "keep_kv", 1, content_hash)
            second = await sample(engine, SampleRequest("g.1", "g", prompt, 1, 0.0))
            return await first, second
        finally:
            engine.close()

    first, second = asyncio.run(body())
    assert set(first.token_versions.tolist()) == {0, 1} and set(second.token_versions.tolist()) == {1}
    assert_logprobs_are_the_models(new, prompt, second, 1.0)
    kept = first.token_versions == 1  # these went on from a KV cache of the old weights
    assert np.abs(logprobs_of(new, prompt, first, 1.0) - first.logprobs)[kept].max() > 1e-2


def test_waiting_for_running_requests_lets_them_end_under_their_weights(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    store = WeightStore(tmp_path / "store")
    content_hash = stored(store, 1, model, torch.float32)

    async def body() -> tuple[Sample, Sample]:
        engine = Engine(POOL, exact(config(model, max_tokens=60)), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            first = asyncio.create_task(sample(engine, request(0)))
            while not (first.done() or any(engine.produced().values())):  # one that waits is there with 0
                await asyncio.sleep(0.001)
            updating = asyncio.create_task(update(engine, "wait", 1, content_hash))
            await asyncio.sleep(0.02)
            second = await sample(engine, request(1))  # waits for the new weights
            await updating
            return await first, second
        finally:
            engine.close()

    first, second = asyncio.run(body())
    assert set(first.token_versions.tolist()) == {0} and set(second.token_versions.tolist()) == {1}


def test_a_budget_parks_a_sample_which_goes_on_from_its_tokens_and_greedy_requests_repeat(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)

    async def body() -> tuple[PartialSample, Sample, list[Sample]]:
        engine = Engine(POOL, exact(config(model, max_tokens=40)), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(tmp_path)}, 0)
            parked = await engine.generate(replace(request(0), pause_at=10), "regular")
            assert isinstance(parked, PartialSample)
            whole = await sample(engine, replace(request(0), kept=parked, pause_at=40))
            greedy = [replace(request(1, seed), temperature=0.0) for seed in (1, 2)]
            return parked, whole, [await sample(engine, asked) for asked in greedy]
        finally:
            engine.close()

    parked, whole, greedy = asyncio.run(body())
    assert len(parked.completion_tokens) == 10
    assert (whole.output_length, whole.finish_reason) == (40, "length")
    np.testing.assert_array_equal(whole.completion_tokens[:10], parked.completion_tokens)
    assert_logprobs_are_the_models(model, request(0).prompt_tokens, whole, 1.0)
    np.testing.assert_array_equal(greedy[0].completion_tokens, greedy[1].completion_tokens)


def test_a_sleeping_engine_wakes_up_with_new_weights(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    store = WeightStore(tmp_path / "store")
    content_hash = stored(store, 1, model, torch.float32)

    async def body() -> Sample:
        engine = Engine(POOL, exact(config(model, max_tokens=10)), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            await engine.sleep()
            waiting = asyncio.create_task(sample(engine, request(0)))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await engine.wake_up()
            await update(engine, "recompute_kv", 1, content_hash)
            return await waiting
        finally:
            engine.close()

    assert asyncio.run(body()).output_length == 10


def test_a_request_that_is_taken_off_goes_on_with_its_tokens(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)

    async def body() -> tuple[PartialSample, Sample, dict[str, int], Sample]:
        engine = Engine(POOL, exact(config(model, max_tokens=100)), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(tmp_path)}, 3)
            asked = request(0, seed=5)
            at_once = asyncio.create_task(engine.generate(asked, "regular"))
            await asyncio.sleep(0)  # vLLM does not know of it yet
            await engine.release(asked.sample_id)
            assert isinstance(nothing := await at_once, PartialSample) and len(nothing.completion_tokens) < 100
            running = asyncio.create_task(engine.generate(asked, "regular"))
            while engine.produced().get(asked.sample_id, 0) < 5:
                await asyncio.sleep(0.01)
            await engine.release(asked.sample_id)
            partial = await running
            assert isinstance(partial, PartialSample)
            assert not engine.produced()
            again = asyncio.create_task(sample(engine, replace(asked, kept=partial)))
            while not (produced := engine.produced()):
                await asyncio.sleep(0.001)
            whole = await again
            await engine.release(asked.sample_id)  # it has ended: nothing happens
            return partial, whole, produced, await sample(engine, request(1))
        finally:
            engine.close()

    partial, whole, produced, _ = asyncio.run(body())
    had = len(partial.completion_tokens)
    assert 5 <= had < 100
    assert produced[partial.sample_id] >= had
    assert whole.output_length == 100 and whole.finish_reason == "length"
    np.testing.assert_array_equal(whole.completion_tokens[:had], partial.completion_tokens)
    np.testing.assert_array_equal(whole.logprobs[:had], partial.logprobs)
    assert set(whole.token_versions.tolist()) == {3}
    assert whole.t_dispatched == partial.t_dispatched and whole.t_first_token == partial.t_first_token
    # the rest is not drawn with the noise of the beginning again
    assert whole.completion_tokens[had : 2 * had].tolist() != partial.completion_tokens.tolist()
    assert_logprobs_are_the_models(model, request(0).prompt_tokens, whole, 1.0)


def test_a_stop_string_ends_a_completion_and_text_is_decoded(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)

    async def body() -> tuple[list[Sample], list[Sample]]:
        free = Engine(POOL, config(model, max_tokens=64), cuda=False, instance="i", site="here")
        try:
            plain = await sample_all(free, 2)
        finally:
            free.close()
        stop = plain[0].text[10:12]
        stopping = Engine(POOL, config(model, max_tokens=64, stop=[stop]), cuda=False, instance="i", site="here")
        try:
            return plain, await sample_all(stopping, 1)
        finally:
            stopping.close()

    plain, stopped = asyncio.run(body())
    assert plain[0].text == tokenizer.decode(plain[0].completion_tokens, skip_special_tokens=True)
    assert plain[0].finish_reason == "length"
    assert stopped[0].finish_reason == "stop"
    assert stopped[0].output_length < plain[0].output_length
    with pytest.raises(AssertionError):
        assert_same(plain[:1], stopped)
