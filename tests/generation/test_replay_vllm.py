"""Real vLLM on tiny models: steps that are replayed give what vLLM's own give, to the bit, with new weights too.

What imports vLLM is imported in the tests: all of pytest's workers collect this file, and one of them runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance import engine_config
from streamrl.generation.instance.engine_config import REPLAYING_WORKER, TRIED_MODELS, _replays
from streamrl.generation.instance.few_rows import ARRANGED, products
from streamrl.machine.engine_settings import DEFAULT, MOST_REPLAYED, EngineSettings
from streamrl.training.small_config import small_config
from streamrl.verify.families import FAMILIES
from tests.generation.test_recording import Model, inputs
from tests.tiny_model import save_tiny_model

POOL = GenerationPool(max_batch=MOST_REPLAYED + 4, kv_cache_gb=0.05)
SIZES = (1, 2, 5, MOST_REPLAYED, MOST_REPLAYED + 4)
TOKENS = 6


def saved(folder: Path, family: str, seed: int, dtype: torch.dtype) -> Path:
    save_tiny_model(folder)
    config = small_config(FAMILIES[family]())
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def completions(engine: Any, rounds: int) -> list[Any]:
    """Tokens and log-probabilities of batches of each of `SIZES`, whose requests all run at the same time, and of
    batches whose requests come one after the other: prompts are computed beside the next tokens of others."""
    from vllm import SamplingParams

    from streamrl.generation.instance.replay_vllm import TRIALS

    found = []
    for batch, (size, steps_between) in enumerate([*((size, 0) for size in SIZES), *[(3, 2)] * TRIALS]):
        rng = np.random.default_rng(size)
        ended = {}

        def step(ended: dict[str, Any] = ended) -> None:
            ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}

        for number in range(size):
            prompt = {"prompt_token_ids": rng.integers(0, 300, 9).tolist(), "cache_salt": str(rounds)}
            params = SamplingParams(seed=number, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
            engine.add_request(f"{rounds}-{batch}-{number}", prompt, params)
            for _ in range(steps_between):
                step()
        while engine.has_unfinished_requests():
            step()
        for name in sorted(ended):
            rows = [{token: one.logprob for token, one in row.items()} for row in ended[name].logprobs]
            found.append((list(ended[name].token_ids), rows))
    return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("Llama", torch.float32), ("Qwen2", torch.bfloat16), ("Qwen3", torch.bfloat16)],
    ids=["Llama", "Qwen2", "Qwen3"],
)
def test_replayed_steps_are_those_of_vllm(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.engine.llm_engine import LLMEngine

    from streamrl.generation.instance.attention_vllm import INSTEAD
    from streamrl.generation.instance.replay_vllm import TRIALS, ReplayedForward
    from streamrl.weights.backends.vllm_reload import ReloadingEngine

    monkeypatch.setattr(replay_vllm(), "PATIENCE", 0)
    first, second = (saved(tmp_path / str(seed), family, seed, dtype) for seed in (1, 2))
    assert TRIED_MODELS.issuperset(AutoConfig.from_pretrained(first).architectures)
    values = {"path": str(first), "max_context": 64, "dtype": str(dtype).removeprefix("torch.")}
    run = RunConfig.model_validate({"model": values, "sampling": {"max_tokens": 24}})
    made = engine_config.engine_config(POOL, run, cuda=False)
    assert made.parallel_config.worker_cls == REPLAYING_WORKER
    engine = LLMEngine.from_vllm_config(made)
    worker = engine.engine_core.engine_core.model_executor.driver_worker  # type: ignore[attr-defined]
    runner = getattr(worker, "worker", worker).model_runner
    replay = runner._model_forward
    assert isinstance(replay, ReplayedForward)
    layers = [module for module in runner.model.modules() if hasattr(module, "quant_method")]
    arranged = [module for module in layers if getattr(module, ARRANGED, None) is not None]
    assert len(arranged) == (4 * made.model_config.hf_config.num_hidden_layers + 1 if products(dtype) else 0)

    def both(rounds: int) -> list[Any]:
        runner._model_forward = replay
        replayed = completions(engine, rounds)
        runner._model_forward = replay._plain
        assert replayed == completions(engine, rounds + 1)
        return replayed

    class Reloading(ReloadingEngine[Any, Any]):
        """It holds no connection; the rest of what vLLM calls is of no use here."""

        def __init__(self) -> None:
            self.model, self.model_config, self.vllm_config = runner.model, runner.model_config, made

    Reloading.__abstractmethods__ = frozenset()
    before = both(0)
    recordings = dict(replay.recordings)
    prompts = {9 * size for size in SIZES} | {9 + 1, 9 + 2}  # all at once, and beside that many other requests
    assert recordings.keys() == {size for size in {*SIZES, *prompts, 3} if size <= MOST_REPLAYED}
    once = {9 * size for size in SIZES if size > 1}
    assert all(one is not None and one.agreed == (1 if size in once else TRIALS) for size, one in recordings.items())
    weights = AutoModelForCausalLM.from_pretrained(second, dtype=dtype).state_dict()
    reloading = Reloading()  # type: ignore[abstract]
    with set_current_vllm_config(made), torch.no_grad():
        reloading.start_weight_update()
        reloading.load(weights.items(), "the other model")
        reloading.finish_weight_update()
    after = both(2)
    assert after != before
    assert replay.recordings == recordings  # they follow new weights
    functions = {id(step[0]) for one in recordings.values() if one is not None for step in one.steps}
    assert functions.isdisjoint(id(operation._op) for operation in INSTEAD), "attention runs without vLLM's Python"
    if products(dtype):  # in each layer: the rotation, two operations of attention, and all else in one call of C
        layers = made.model_config.hf_config.num_hidden_layers
        few = [one for size, one in recordings.items() if one is not None and size <= products(dtype).most_rows]
        assert few and all(len(one.steps) <= 4 * layers + 3 for one in few), [len(one.steps) for one in few]
    attention = made.compilation_config.static_forward_context.values()
    for layer in attention:
        layer.kv_cache = layer.kv_cache.clone()
    assert both(4) == after
    cleanup_dist_env_and_memory()


class Plain:
    """A model's forward pass as vLLM's runner calls it, which counts its calls."""

    def __init__(self, change: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda hidden, at: hidden) -> None:
        from streamrl.generation.instance.replay_vllm import ReplayedForward

        self.model, self.calls, self.change = Model(), 0, change
        self.model.load(0)
        self.replay = ReplayedForward(lambda: self.model, self)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        self.calls += 1
        return self.change(self.model(input_ids, positions), positions.tolist())

    def steps(self, count: int) -> list[int]:
        """Its calls in each of so many steps, whose results are its own."""
        found = []
        for seed in range(count):
            before = self.calls
            given = self.replay(*inputs(seed), intermediate_tensors=None)
            found.append(self.calls - before)
            assert torch.equal(given.view(torch.uint8), self(*inputs(seed)).view(torch.uint8))
        return found


def replay_vllm() -> Any:
    from streamrl.generation.instance import replay_vllm

    return replay_vllm


@pytest.fixture
def in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(attn_metadata={})
    monkeypatch.setattr(replay_vllm(), "get_forward_context", lambda: context)
    monkeypatch.setattr(replay_vllm(), "PATIENCE", 0)


@torch.inference_mode()
def test_a_size_is_recorded_once_it_came_often_enough(in_a_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_vllm(), "PATIENCE", 3)
    plain = Plain()
    assert plain.steps(7) == [1, 1, 1, 2, 1, 0, 0]
    plain.model.scale = torch.nn.Parameter(torch.full_like(plain.model.scale, 2))
    assert plain.steps(3) == [2, 1, 0], "it is known to come often"


@torch.inference_mode()
def test_a_size_is_recorded_and_compared_twice_and_then_replayed(in_a_step: None) -> None:
    plain = Plain()
    assert plain.steps(4) == [2, 1, 0, 0]
    plain.model.load(1)
    assert plain.steps(1) == [0]
    plain.model.scale = torch.nn.Parameter(torch.full_like(plain.model.scale, 2))
    assert plain.steps(3) == [2, 1, 0], "parameters at another place are recorded anew"
    before = plain.calls
    plain.replay(*inputs(0), intermediate_tensors=torch.ones(1))
    assert plain.calls == before + 1


def fails_on_zeros(hidden: torch.Tensor, at: list[int]) -> torch.Tensor:
    if not any(at):
        raise AttributeError("zeros")
    return hidden


@torch.inference_mode()
@pytest.mark.parametrize(
    ("change", "calls", "why"),
    [
        (lambda hidden, at: hidden * hidden.sum().item(), [3, 1, 1], "gives Python a value"),
        (lambda hidden, at: hidden * (2 if any(at) else 1), [3, 1, 1], "something else"),
        (lambda hidden, at: hidden * (2 if at == inputs(1)[1].tolist() else 1), [2, 2, 1], "something else"),
        (fails_on_zeros, [3, 1, 1], "AttributeError: zeros"),
    ],
)
def test_what_a_recording_would_not_repeat_is_left_to_vllm(
    in_a_step: None, caplog: pytest.LogCaptureFixture, change: Any, calls: list[int], why: str
) -> None:
    assert Plain(change).steps(3) == calls
    (message,) = caplog.messages
    assert message.startswith("steps of 3 tokens are not replayed: ") and why in message


@torch.inference_mode()
def test_weights_that_are_not_finite_leave_later_ones_their_recordings(in_a_step: None) -> None:
    assert Plain(lambda hidden, at: hidden * math.nan).steps(3) == [2, 1, 0], "the same to the bit"
    plain = Plain(lambda hidden, at: hidden * (math.nan if any(at) else 1))
    assert plain.steps(1) == [3]
    plain.change = lambda hidden, at: hidden
    assert plain.steps(3) == [2, 1, 0]


def test_engines_replay_models_on_which_it_was_tried(tmp_path: Path) -> None:
    def replays(config: str, settings: EngineSettings = DEFAULT, pool: GenerationPool = POOL) -> bool:
        (tmp_path / "config.json").write_text(config)
        return _replays(tmp_path, settings, pool)

    llama = '{"architectures": ["LlamaForCausalLM"]}'
    assert replays(llama)
    assert not replays("{}")
    assert not replays('{"architectures": ["MixtralForCausalLM"]}')
    assert not replays('{"architectures": ["LlamaForCausalLM"], "quantization_config": {}}')
    assert not replays(llama, EngineSettings(replayed=False))
    assert not replays(llama, EngineSettings(compiled=True))
    assert not replays(llama, pool=GenerationPool(gpus_per_replica=2))
