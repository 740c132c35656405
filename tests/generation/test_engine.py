"""Real vLLM on a tiny model: samples can be repeated, and updated weights are exactly those of a checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.engine import Engine
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.weights.store import WeightStore
from streamrl.weights.version import lay_out
from tests.tiny_model import save_tiny_model

POOL = GenerationPool(max_batch=4, kv_cache_gb=0.05)


def config(model: Path, **sampling: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": str(model), "max_context": 128}, "sampling": {"max_tokens": 24} | sampling}
    )


def request(number: int, seed: int = 0) -> SampleRequest:
    prompt = np.arange(number + 3, number + 13, dtype=np.int32)
    return SampleRequest(f"g.{number}-{seed}", "g", prompt, seed, 1, 0.0)


async def sample(engine: Engine, asked: SampleRequest) -> Sample:
    drawn = await engine.generate(asked, "regular")
    assert isinstance(drawn, Sample)
    return drawn


async def sample_all(engine: Engine, count: int = 4) -> list[Sample]:
    return [await sample(engine, request(n, seed=n)) for n in range(count)]


def exact(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"model": run.model.model_copy(update={"dtype": "float32"})})


def assert_logprobs_are_the_models(folder: Path, prompt: np.ndarray, sample: Sample, temperature: float) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = np.concatenate([prompt, sample.completion_tokens])
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor(ids)[None].long()).logits[0].float() / temperature
    expected = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids)[1:, None].long())[len(prompt) - 1 :, 0]
    assert float((expected - torch.tensor(sample.logprobs)).abs().max()) < 1e-3


def assert_same(ours: list[Sample], theirs: list[Sample]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.completion_tokens, b.completion_tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_updated_weights_equal_a_fresh_engine_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    old = save_tiny_model(tmp_path / "old", seed=0)
    new = save_tiny_model(tmp_path / "new", seed=1)
    store = WeightStore(tmp_path / "store")
    weights = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16)
    manifest, buffer = lay_out(5, weights.named_parameters())
    store.begin(manifest)[:] = buffer
    store.commit(manifest, np.memmap(store.directory / "version_5.partial", dtype=np.uint8, mode="r"))

    async def updated() -> tuple[list[Sample], list[Sample], list[Sample]]:
        engine = Engine(POOL, config(old), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            before = await sample_all(engine)
            again = await sample_all(engine)
            await engine.pause(keep_kv=False)
            await engine.start_weight_update()
            await engine.update_weights({"number": 5, "content_hash": manifest.version.content_hash})
            await engine.finish_weight_update(5)
            await engine.resume()
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


def test_running_requests_continue_over_an_update_with_versions_per_token_and_logprobs_match_the_model(
    tmp_path: Path,
) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    store = WeightStore(tmp_path / "store")
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    manifest, buffer = lay_out(1, weights.named_parameters())
    store.begin(manifest)[:] = buffer
    store.commit(manifest, np.memmap(store.directory / "version_1.partial", dtype=np.uint8, mode="r"))

    async def body() -> list[Sample]:
        run = exact(config(model, max_tokens=100, temperature=0.8))
        engine = Engine(POOL, run, cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(store.directory)}, 0)
            running = [asyncio.create_task(sample(engine, request(n, seed=n))) for n in range(4)]
            await asyncio.sleep(0.15)
            await engine.pause(keep_kv=True)
            await engine.start_weight_update()
            await engine.update_weights({"number": 1, "content_hash": manifest.version.content_hash})
            await engine.finish_weight_update(1)
            await engine.resume()
            return list(await asyncio.gather(*running))
        finally:
            engine.close()

    samples = asyncio.run(body())
    crossing = [s for s in samples if set(s.token_versions.tolist()) == {0, 1}]
    assert crossing, [s.token_versions.tolist() for s in samples]
    assert all(s.token_versions.tolist() == sorted(s.token_versions.tolist()) for s in samples)

    # the weights were replaced by equal ones, so one model explains every log-probability, at the temperature sampled
    for number, drawn in enumerate(samples):
        assert_logprobs_are_the_models(model, request(number).prompt_tokens, drawn, 0.8)


def test_a_request_that_is_taken_off_goes_on_with_its_tokens(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)

    async def body() -> tuple[PartialSample, Sample, dict[str, int], Sample]:
        engine = Engine(POOL, exact(config(model, max_tokens=100)), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": str(tmp_path)}, 3)
            asked = request(0, seed=5)
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
