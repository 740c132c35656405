"""Mixtures of experts train by transformers' own layers, with the experts' weights in shards."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from streamrl.machine.router_shape import RouterShape, shape_of
from streamrl.rollouts.rank_shares import balance
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.packing import pack
from streamrl.training.packing_proof import proof_groups, prove, small_model
from streamrl.training.policy_model import Policy, in_training
from streamrl.training.trainer import Trainer
from streamrl.verify.families import FAMILIES
from tests.ports import free_port
from tests.training.conftest import random_groups, relative_error, run_config, run_ranks


def with_experts(groups: list[TrainGroup], shape: RouterShape) -> list[TrainGroup]:
    """Return the groups with random experts, the same on every rank."""
    rng = np.random.default_rng(3)

    def rows(count: int) -> np.ndarray:
        places = count, len(shape.layers), shape.experts
        return shape.to_rows(
            rng.permuted(np.broadcast_to(np.arange(shape.experts), places), axis=-1)[..., : shape.top_k]
        )

    return [
        replace(
            group,
            prompt_experts=rows(len(group.prompt_tokens)),
            sequences=[replace(one, experts=rows(len(one.completion_tokens) - 1)) for one in group.sequences],
        )
        for group in groups
    ]


@pytest.mark.parametrize("size", [1000, 1002, 1004])
def test_experts_of_any_size_are_computed_and_proven(size: int) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    few = {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size}
    config = Qwen3MoeConfig(**sizes | few)
    assert all(not way.differs for way in prove(config).ways if way.kind == "shared")
    small = small_model(config).config
    assert small.moe_intermediate_size % 8 == size % 8  # so that it is computed alike
    assert small._experts_implementation == ("grouped_mm" if size == 1000 else "eager")
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=SHARED_PREFIX)
        policy = Policy(in_training(model, "selective")).to(dtype)
        policy(pack(proof_groups(50)), 1.0)[0].sum().backward()
        found = {name: one.grad for name, one in policy.named_parameters() if ".experts." in name}
        assert found and all(one is not None and one.isfinite().all() and one.any() for one in found.values())


def _rank(rank: int, ranks: int, port: int, models: list[str], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for number, (model, replays) in enumerate(itertools.product(models, [False, True])):
        run = run_config(Path(model), algorithm={"name": "grpo", "router_replay": replays})
        trainer = Trainer(run, model, torch.device("cpu"))
        experts = [p for name, p in trainer.policy.named_parameters() if ".experts." in name]
        assert experts
        groups = random_groups(4)
        if replays:
            groups = with_experts(groups, shape_of(trainer.policy.model.config.to_dict()))
        share = balance(groups, ranks)[rank]
        trainer.accumulate(share[:1], is_last=False)
        trainer.accumulate(share[1:], is_last=True)
        found = {}
        for name, p in trainer.policy.named_parameters():
            assert p.grad is not None
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[name] = ranks * whole.clone()
        if ranks > 1:
            for p in experts:
                assert isinstance(p, DTensor) and p.to_local().numel() * ranks == p.numel()
        if rank == 0:
            torch.save(found, Path(out, f"{number}-{ranks}.pt"))
        trainer.step(0, float(sum(group.loss_tokens for group in groups)))
    dist.destroy_process_group()


def test_experts_in_two_shards_have_the_gradient_of_whole_ones(tmp_path: Path) -> None:
    configs = {family: FAMILIES[family]() for family in ("Qwen3-MoE", "gpt-oss")}
    configs["of an odd size"] = Qwen3MoeConfig(norm_topk_prob=True, moe_intermediate_size=1001)
    families = list(configs)
    for family, config in configs.items():
        small_model(config, seed=0).save_pretrained(tmp_path / family)
    models = [str(tmp_path / family) for family in families]
    for ranks in (1, 2):
        run_ranks(ranks, _rank, ranks, free_port(), models, str(tmp_path))
    for number, family in enumerate(family for family in families for _ in range(2)):
        one, two = (torch.load(tmp_path / f"{number}-{ranks}.pt") for ranks in (1, 2))
        assert set(one) == set(two)
        if number % 2:  # with experts that routers would not choose
            plain = torch.load(tmp_path / f"{number - 1}-1.pt")
            assert max(relative_error(one[name], plain[name]) for name in one) > 0.1
        for name, gradient in one.items():
            assert relative_error(two[name], gradient) < 1e-4, f"{family}: {name}"
        routers = [name for name in one if "gate.weight" in name or "router.weight" in name]
        assert routers and all(float(one[name].norm()) > 0 for name in routers), "routers learn as well"
