"""Real vLLM on tiny models: steps that are replayed give what vLLM's own give, to the bit, with new weights too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance import engine_config
from streamrl.generation.instance.engine_config import REPLAYED_MODELS, REPLAYING_WORKER, _replays
from streamrl.machine.engine_settings import DEFAULT, MOST_REPLAYED, EngineSettings
from streamrl.training.small_config import small_config
from streamrl.verify.families import FAMILIES
from tests.tiny_model import save_tiny_model

POOL = GenerationPool(max_batch=MOST_REPLAYED + 4, kv_cache_gb=0.05)
SIZES = (1, 2, 5, MOST_REPLAYED, MOST_REPLAYED + 4)
TOKENS = 6


def saved(folder: Path, family: str, seed: int) -> Path:
    save_tiny_model(folder)
    config = small_config(FAMILIES[family]())
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def completions(engine: Any, rounds: int) -> list[Any]:
    """Tokens and log-probabilities of batches of each of `SIZES`, all of which run at the same time."""
    from vllm import SamplingParams

    found = []
    for size in SIZES:
        rng = np.random.default_rng(size)
        for number in range(size):
            prompt = {"prompt_token_ids": rng.integers(0, 300, 9).tolist(), "cache_salt": str(rounds)}
            params = SamplingParams(seed=number, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
            engine.add_request(f"{rounds}-{size}-{number}", prompt, params)
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        for name in sorted(ended):
            rows = [{token: one.logprob for token, one in row.items()} for row in ended[name].logprobs]
            found.append((list(ended[name].token_ids), rows))
    return found


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_replayed_steps_are_those_of_vllm(tmp_path: Path, family: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.engine.llm_engine import LLMEngine

    from streamrl.generation.instance.replay_vllm import ReplayedForward
    from streamrl.weights.backends.vllm_reload import ReloadingEngine

    first, second = (saved(tmp_path / str(seed), family, seed) for seed in (1, 2))
    assert REPLAYED_MODELS.issuperset(AutoConfig.from_pretrained(first).architectures)
    values = {"path": str(first), "max_context": 64, "dtype": "bfloat16"}
    run = RunConfig.model_validate({"model": values, "sampling": {"max_tokens": 24}})
    made = engine_config.engine_config(POOL, run, cuda=False)
    assert made.parallel_config.worker_cls == REPLAYING_WORKER
    engine = LLMEngine.from_vllm_config(made)
    worker = engine.engine_core.engine_core.model_executor.driver_worker  # type: ignore[attr-defined]
    runner = getattr(worker, "worker", worker).model_runner
    replay = runner._model_forward
    assert isinstance(replay, ReplayedForward)

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
    assert recordings.keys() == {size for size in SIZES if size <= MOST_REPLAYED} | {9}  # and the single prompt
    assert all(one is not None for one in recordings.values())
    weights = AutoModelForCausalLM.from_pretrained(second, dtype=torch.bfloat16).state_dict()
    reloading = Reloading()  # type: ignore[abstract]
    with set_current_vllm_config(made), torch.no_grad():
        reloading.start_weight_update()
        reloading.load(weights.items(), "the other model")
        reloading.finish_weight_update()
    after = both(2)
    assert after != before
    assert replay.recordings == recordings  # they follow new weights
    cleanup_dist_env_and_memory()


def test_engines_replay_models_on_which_it_was_tried(tmp_path: Path) -> None:
    def replays(
        config: str, settings: EngineSettings = DEFAULT, pool: GenerationPool = POOL, other: bool = False
    ) -> bool:
        (tmp_path / "config.json").write_text(config)
        return _replays(tmp_path, settings, pool, other)

    llama = '{"architectures": ["LlamaForCausalLM"]}'
    assert replays(llama)
    assert not replays("{}")
    assert not replays('{"architectures": ["MixtralForCausalLM"]}')
    assert not replays('{"architectures": ["LlamaForCausalLM"], "quantization_config": {}}')
    assert not replays(llama, EngineSettings(replayed=False))
    assert not replays(llama, EngineSettings(compiled=True))
    assert not replays(llama, pool=GenerationPool(gpus_per_replica=2))
    assert not replays(llama, other=True)  # fp32 with its own products, or 8 bits
