"""Time of an optimizer step, and which trainers there are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.cost.hardware import device, machines_of
from scheduler.cost.model_shapes import MODELS, Transformer
from scheduler.cost.trainer_work import GRPO, PPO
from scheduler.cost.training_cost import REACHED, StepTokens, compute_seconds, exactly, switch_seconds, trainer_times
from scheduler.cost.training_memory import (
    TrainerLayout,
    layout_on,
    memory_per_gpu,
    sequence_parallel_degrees,
    smallest_trainer,
    usable,
)
from streamrl.config.cluster import Site, TrainerPool

STEP = StepTokens(1024 * 2000.0, 1024 * 2000.0**2, 8000.0, 1024)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.5b", 0.49), ("1.5b", 1.54), ("7b", 7.61), ("32b", 32.5), ("72b", 72.7)]
)
def test_parameters_are_those_that_the_models_cards_tell(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_config_json_gives_the_same_shape_as_the_table() -> None:
    values = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    made = Transformer.from_config("mine", values)
    assert replace(made, name=MODELS["7b"].name, source=MODELS["7b"].source) == MODELS["7b"]
    assert sequence_parallel_degrees(device("H100"), made)
    kinds = ["full_attention", "sliding_attention"] * 14
    assert Transformer.from_config("mine", values | {"layer_types": kinds, "mamba_d_ssm": None}).attends_alone
    others = [{"layer_types": ["conv", *kinds[1:]]}, {"layer_types": ["linear_attention"] * 28}]
    for other in ({"mamba_d_ssm": 1024}, *others):
        hybrid = Transformer.from_config("mine", values | other)
        assert not hybrid.attends_alone and sequence_parallel_degrees(device("H100"), hybrid) == []


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "num_hidden_layers"),
        ([], "config.json"),
        ({"num_experts": 64}, "mixture of experts"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "many"}, "many"),
    ],
)
def test_a_config_that_is_not_understood_says_what(values: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Transformer.from_config("mine", values)


def test_compute_is_products_attention_and_bytes_each_at_its_own_rate() -> None:
    model, gpu = MODELS["7b"], replace(device("H100"), matmul_share=0.5, attention_share=0.25)
    work = replace(GRPO, recompute=False)
    time = exactly(model, work, gpu, 8, StepTokens(1e6, 0.0, 100.0, 1000))
    assert time is not None and time.tensor_parallel == 1
    peak = gpu.bf16_tflops * 1e12
    # 6 operations per weight and token; 68 bytes per token, layer and channel forward, twice that backward
    products = 6 * model.computed * 1e6 / (peak * 0.5)
    moved = 3 * 68 * model.hidden * model.layers * 1e6 / (gpu.memory_bandwidth_gb_s * 1e9 * 0.9)
    assert time.compute_s == pytest.approx((products + moved) / REACHED / 8)
    # one sequence of S tokens: S^2 / 2 pairs, two products of 2 operations each, per layer and channel, three times
    with_attention = compute_seconds(model, work, gpu, 1000, 1000.0**2) - compute_seconds(model, work, gpu, 1000, 0.0)
    operations = 3 * 4 * 1000**2 / 2 * model.layers * model.hidden
    assert with_attention == pytest.approx(operations / (peak * 0.25) / REACHED)


MPT = {  # non-gated: two products of 4 x hidden are three of 8 / 3
    "7b": Transformer("mpt-7b", 32, 4096, 32, 32, 128, 10923, 50368, True, "llm-foundry"),
    "13b": Transformer("mpt-13b", 40, 5120, 40, 40, 128, 13653, 50368, True, "llm-foundry"),
    "70b": Transformer("mpt-70b", 80, 8192, 64, 64, 128, 21845, 50368, True, "llm-foundry"),
}


@pytest.mark.parametrize(
    ("name", "gpu", "tokens", "published", "off"),
    [
        ("7b", "H100", 4096, 0.50, 0.06),
        ("7b", "H100", 8192, 0.44, 0.06),
        ("7b", "H100", 32768, 0.30, 0.30),
        ("13b", "H100", 4096, 0.52, 0.06),
        ("13b", "H100", 16384, 0.39, 0.15),
        ("70b", "H100", 2048, 0.56, 0.06),
        ("7b", "A100-80", 4096, 0.68, 0.17),
        ("7b", "A100-80", 8192, 0.64, 0.15),
        ("7b", "A100-80", 32768, 0.48, 0.12),
    ],
)
def test_the_share_of_the_peak_is_near_published_fsdp_steps(
    name: str, gpu: str, tokens: int, published: float, off: float
) -> None:
    model, found = MPT[name], device(gpu)
    seconds = compute_seconds(model, GRPO, found, tokens, float(tokens) ** 2)
    share = 4 * model.forward_flops(tokens, float(tokens) ** 2) / seconds / (found.bf16_tflops * 1e12)
    assert share == pytest.approx(published, rel=off)


def test_the_utilisation_falls_with_the_length_and_rises_with_the_width() -> None:
    def share(name: str, tokens: float, gpu: str = "H100") -> float:
        model, found = MODELS[name], device(gpu)
        flops = 4 * model.forward_flops(tokens, tokens**2)
        return flops / compute_seconds(model, GRPO, found, tokens, tokens**2) / (found.bf16_tflops * 1e12)

    assert share("7b", 2e3) > share("7b", 2e4) and share("72b", 2e3) > share("1.5b", 2e3)
    assert share("7b", 2e3, "H20") > share("7b", 2e3, "H800"), "it has more bandwidth for its compute"


@pytest.mark.parametrize(("name", "memory_gb", "whole"), [("3b", 100.0, True), ("7b", 130.0, False)])
def test_each_pass_gathers_again_and_each_update_is_an_optimizer_step(name: str, memory_gb: float, whole: bool) -> None:
    model = MODELS[name]
    gpu = replace(device("H100"), memory_gb=memory_gb, per_machine=1, network_gbit_s=800.0)
    step = StepTokens(2 * 8 * 32_768.0, 0.0, 2048.0, 256)  # eight micro-batches of each of two ranks
    once, twice, parts = (
        exactly(model, replace(GRPO, epochs=epochs, mini_batches=mini_batches), gpu, 2, step)
        for epochs, mini_batches in ((1, 1), (2, 1), (2, 2))
    )
    assert once is not None and twice is not None and parts is not None
    assert [one.shard for one in (once, twice, parts)] == [2, 2, 2]
    assert [one.optimizer_s / once.optimizer_s for one in (once, twice, parts)] == pytest.approx([1, 2, 4])
    assert [one.compute_s / once.compute_s for one in (once, twice, parts)] == pytest.approx([1, 2, 2])
    assert twice.communication_s == pytest.approx(2 * once.communication_s)
    # two more reductions in fp32, half of which goes to the other rank
    more = 2 * 4 * model.parameters / 2 / (gpu.network_gbit_s * 1e9 / 8) if whole else 0.0
    assert parts.communication_s == pytest.approx(twice.communication_s + more)


def test_more_gpus_are_never_slower_and_never_more_than_offered() -> None:
    times = trainer_times(MODELS["32b"], PPO, device("H800"), 128, STEP)
    seconds = [math.inf if one is None else one.seconds for one in times]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one is None or one.gpus <= place for place, one in enumerate(times))
    assert math.isinf(seconds[1]) and math.isfinite(seconds[-1])


def test_no_rank_is_done_before_the_longest_sample() -> None:
    step = StepTokens(64 * 100.0 + 30_000, 64 * 100.0**2 + 30_000.0**2, 30_000.0, 65)
    few, many = (exactly(MODELS["1.5b"], GRPO, device("H100"), gpus, step) for gpus in (16, 64))
    assert few is not None and many is not None
    assert few.compute_s == many.compute_s


def test_memory_counts_what_is_held_and_the_smallest_trainer_just_fits() -> None:
    model, gpu = MODELS["7b"], device("H800")
    assert memory_per_gpu(model, PPO, TrainerLayout(1), 0) - memory_per_gpu(
        model, GRPO, TrainerLayout(1), 0
    ) == pytest.approx(18 * model.parameters)
    enough = smallest_trainer(model, PPO, gpu, 8000)
    assert enough is not None and enough > 1
    short = [memory_per_gpu(model, PPO, TrainerLayout((enough - 1) // tp, tp), 8000) for tp in (1, 2, 4) if enough > tp]
    assert min(short) > usable(gpu)
    assert exactly(model, PPO, gpu, enough, STEP) is not None
    assert exactly(model, PPO, gpu, enough - 1, STEP) is None


def test_recomputing_activations_takes_time_and_saves_memory() -> None:
    kept, again = replace(GRPO, recompute=False), GRPO
    model, gpu = MODELS["7b"], device("H100")
    assert memory_per_gpu(model, kept, TrainerLayout(8), 8000) > memory_per_gpu(model, again, TrainerLayout(8), 8000)
    seconds = [compute_seconds(model, work, gpu, STEP.tokens, STEP.squares) for work in (kept, again)]
    assert seconds[1] == pytest.approx(seconds[0] * 4 / 3)


def test_tensor_parallelism_makes_a_72b_trainer_with_long_samples_fit() -> None:
    """PPO with 20k-token answers on 64 H800, 72B: too much for FSDP alone."""
    model, gpu = MODELS["72b"], device("H800")
    step = StepTokens(1024 * 3000.0, 1024 * 3000.0**2, 20_512.0, 1024)
    assert memory_per_gpu(model, PPO, TrainerLayout(64), 20_512) > usable(gpu)
    assert memory_per_gpu(model, PPO, TrainerLayout(8, 8), 20_512) < usable(gpu)
    found = exactly(model, PPO, gpu, 64, step)
    assert found is not None and found.tensor_parallel > 1
    assert smallest_trainer(model, PPO, gpu, 20_512) == 56


def test_tensor_parallelism_costs_two_all_reduces_a_layer_and_pass() -> None:
    gpu, model = device("H800"), MODELS["72b"]
    step = StepTokens(1024 * 3000.0, 1024 * 3000.0**2, 20_512.0, 1024)
    fast = exactly(model, PPO, replace(gpu, link_gb_s=4000.0), 64, step)
    slow = exactly(model, PPO, gpu, 64, step)
    assert fast is not None and slow is not None and fast.tensor_parallel >= slow.tensor_parallel
    assert slow.compute_s > compute_seconds(model, PPO, gpu, step.tokens, step.squares) / 64


VERY_LONG = StepTokens(64 * 60_000.0, 64 * 60_000.0**2, 60_000.0, 64)


def test_gpus_share_rows_of_tokens_where_no_number_holds_a_sample_otherwise() -> None:
    model, gpu = MODELS["72b"], device("RTX4090")
    assert sequence_parallel_degrees(gpu, model) == [2, 4, 8]
    assert exactly(model, GRPO, gpu, 10_000, VERY_LONG) is None
    enough = smallest_trainer(model, GRPO, gpu, VERY_LONG.longest)
    assert enough is not None and enough % 8 == 0
    found = exactly(model, GRPO, gpu, enough, VERY_LONG, by_rows=True)
    assert found is not None and (found.sequence_parallel, found.tensor_parallel) == (8, 1)
    assert found.busy_ranks(VERY_LONG.tokens, VERY_LONG.longest) == min(enough / 8, 64)
    assert exactly(model, GRPO, gpu, enough - 8, VERY_LONG, by_rows=True) is None


def test_sequence_parallelism_costs_four_all_to_alls_a_layer_and_pass() -> None:
    gpu, model = device("H100"), MODELS["7b"]
    step = StepTokens(64 * 50_000.0, 64 * 50_000.0**2, 50_000.0, 64)
    slow, fast = (exactly(model, GRPO, replace(gpu, link_gb_s=rate), 4, step, True) for rate in (900.0, 1800.0))
    assert slow is not None and fast is not None and slow.sequence_parallel == fast.sequence_parallel
    sharing, own = slow.sequence_parallel, step.tokens / 4
    widths = 2 * 128 * (28 + max(4, sharing))  # queries and output, keys and values
    moved = 3 * 28 * (sharing - 1) / sharing * own * widths * 2  # passes, layers, a rank's tokens, in bf16
    assert slow.compute_s - fast.compute_s == pytest.approx(moved / 450e9 - moved / 900e9)
    assert slow.compute_s > compute_seconds(model, GRPO, gpu, step.tokens, step.squares) / 4


def test_a_slower_network_makes_sharding_across_machines_slower() -> None:
    gpu = device("H100")
    slow = replace(gpu, network_gbit_s=5.0)
    fast_time, slow_time = (exactly(MODELS["32b"], PPO, one, 64, STEP) for one in (gpu, slow))
    assert fast_time is not None and slow_time is not None
    assert slow_time.seconds > fast_time.seconds


def test_turns_cost_more_for_larger_states() -> None:
    gpu = device("H800")
    assert switch_seconds(MODELS["7b"], PPO, gpu, 32, 32) > switch_seconds(MODELS["7b"], GRPO, gpu, 32, 32) > 0


def test_gradients_are_reduced_once_where_the_whole_of_them_is_small_and_are_counted_so() -> None:
    gpu, step = device("H100"), StepTokens(4e6, 4e9, 8000, 1000)
    small, large = MODELS["1.5b"], MODELS["7b"]  # 6 and 30 GB of gradients, of 80 GB
    assert layout_on(gpu, small, 8).whole_gradients and not layout_on(gpu, large, 8).whole_gradients
    assert not layout_on(gpu, small, 1).whole_gradients  # nothing is summed over ranks
    kept, sharded = (memory_per_gpu(small, PPO, TrainerLayout(8, 1, whole), 8000) for whole in (True, False))
    assert kept - sharded == pytest.approx(2 * 4 * small.parameters * 7 / 8)
    once = exactly(small, GRPO, gpu, 8, step)
    assert once is not None
    rounds = math.ceil(step.tokens / 8 / 32_768)
    weights = small.parameters * (once.shard - 1) / once.shard
    link = gpu.link_gb_s * 1e9 / 2
    if once.shard > 1:
        assert once.communication_s == pytest.approx((rounds * 4 + 4) * weights / link)


def test_a_sample_that_must_fit_takes_memory_and_no_time() -> None:
    gpu, model = device("H100"), MODELS["7b"]
    step = StepTokens(256 * 1000.0, 256 * 1000.0**2, 2000.0, 256)
    plain = trainer_times(model, GRPO, gpu, 64, step)
    roomy = trainer_times(model, GRPO, gpu, 64, replace(step, limit=32_768.0))
    assert plain[64] is not None and roomy[64] is not None
    assert roomy[64].compute_s == pytest.approx(plain[64].compute_s, rel=0.01)
    assert sum(one is None for one in roomy) > sum(one is None for one in plain)
    assert (step.must_fit, replace(step, limit=10.0).must_fit, replace(step, limit=1e5).must_fit) == (2e3, 2e3, 1e5)


def test_a_trainer_is_spread_evenly_over_as_few_machines_as_hold_it() -> None:
    gpu, odd = device("H100"), replace(device("H100"), per_machine=6)
    spread = [machines_of(gpu, gpus) for gpus in (1, 8, 9, 10, 11, 12, 13, 14, 16, 20, 24)]
    assert spread == [1, 1, None, 2, None, 2, None, 2, 2, None, 3]
    assert [machines_of(gpu, gpus, 4) for gpus in (4, 8, 12, 16, 24)] == [1, 1, None, 2, 3]
    assert [machines_of(odd, gpus, 4) for gpus in (4, 6, 8, 12)] == [1, None, 2, 3]  # four of each machine


@pytest.mark.parametrize("name", ["0.5b", "1.5b", "7b", "32b"])
def test_each_layout_that_is_planned_is_one_that_a_cluster_file_can_state(name: str) -> None:
    for gpu in (device("H100"), device("L40S"), replace(device("A100-80"), per_machine=6)):
        found = [one for gpus in range(1, 65) if (one := exactly(MODELS[name], GRPO, gpu, gpus, STEP)) is not None]
        assert found
        for time in found:
            pool = TrainerPool.model_validate({"ranks": time.gpus, **time.keys})
            Site.model_validate({"launch": {"backend": "ray"}, "trainer": pool.model_dump()})
            assert pool.ranks // pool.nodes <= gpu.per_machine
            copies = pool.nodes if pool.sharding == "hybrid" else 1  # as `training/trainer_process.py` has it
            assert (copies, pool.ranks // copies // pool.tensor_parallel) == (time.copies, time.shard)
            assert pool.tensor_parallel == time.tensor_parallel
