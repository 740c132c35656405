"""Router replay: a forward pass has exactly the experts that were recorded, and everything else stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from streamrl.config.optimizer import Recomputation
from streamrl.errors import RunFailed, UserError
from streamrl.machine.router_shape import RouterShape, shape_of
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.training.attention import OWN_ROWS, SHARED_PREFIX
from streamrl.training.packing import pack
from streamrl.training.packing_proof import GRADIENT_BOUND, LOGPROB_BOUND, proof_groups, small_model
from streamrl.training.policy_model import Policy, in_training
from streamrl.training.router_replay import ROUTERS, RouterReplay
from streamrl.training.small_config import small_config
from streamrl.training.trainer import Trainer
from streamrl.verify.families import FAMILIES
from tests.training.conftest import run_config

REPLAYED = ["Qwen3-MoE", "Qwen3-MoE, some layers dense, weights not normalised", "gpt-oss"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # several wait for each other where others compute


def family_config(family: str) -> Any:
    if "dense" in family:
        kinds = ["full_attention"] * 3 + ["sliding_attention"]  # a last kind keeps all four layers
        return Qwen3MoeConfig(norm_topk_prob=False, mlp_only_layers=[0, 3], num_hidden_layers=4, layer_types=kinds)
    return FAMILIES[family]()


def build(family: str, attention: str, recomputation: Recomputation = False) -> PreTrainedModel:
    """A small model in fp32 (experts have no fp64), always with the same weights."""
    model = small_model(family_config(family))
    model.set_attn_implementation(attention)
    return in_training(model, recomputation)


def routers_of(model: PreTrainedModel, shape: RouterShape) -> list[nn.Module]:
    return [model.base_model.get_submodule(f"layers.{n}.{ROUTERS[shape.kind][0]}") for n in shape.layers]


@contextmanager
def chosen_by(routers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collects what each router gives to its experts, one after the other."""
    found: list[torch.Tensor] = []
    hooks = [r.register_forward_hook(lambda _m, _i, output: found.append(output[2].clone())) for r in routers]
    yield found
    for hook in hooks:
        hook.remove()


@cache
def recorded(family: str) -> tuple[RouterShape, list[TrainGroup]]:
    """Groups with the experts of passes over each prompt and each completion alone, with perturbed router inputs."""
    model = build(family, "eager")
    shape = shape_of(model.config.to_dict())
    routers = routers_of(model, shape)
    noise = torch.Generator().manual_seed(7)

    def perturb(_router: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] + 0.6 * torch.randn(inputs[0].shape, generator=noise, dtype=inputs[0].dtype),)

    hooks = [router.register_forward_pre_hook(perturb) for router in routers]

    def rows(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad(), chosen_by(routers) as found:
            model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
        return shape.to_rows(torch.stack(found, dim=1).numpy())

    groups = []
    for group in proof_groups():
        of_prompt, prompt = rows(group.prompt_tokens), len(group.prompt_tokens)
        with_prompt = [np.concatenate([group.prompt_tokens, one.completion_tokens]) for one in group.sequences]
        sequences = [
            replace(one, experts=rows(tokens)[prompt:-1])
            for one, tokens in zip(group.sequences, with_prompt, strict=True)
        ]
        groups.append(replace(group, sequences=sequences, prompt_experts=of_prompt))
    for hook in hooks:
        hook.remove()
    return shape, groups


def weights_by_definition(kind: str, router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The weights of chosen experts, by a mask over all of them."""
    among = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)
    if kind == "gpt_oss":
        return logits.masked_fill(~among, -torch.inf).softmax(-1).gather(-1, chosen)
    weights = logits.float().softmax(-1) * among
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.gather(-1, chosen).to(logits.dtype)


@cache
def alone(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of their sum by transformers' own forward, each recorded completion alone, in
    whose routers the recorded experts stand by hand."""
    model, (shape, groups) = build(family, "eager"), recorded(family)
    routers = routers_of(model, shape)
    parts = []
    for group in groups:
        for one in group.sequences:
            assert group.prompt_experts is not None and one.experts is not None
            tokens = np.concatenate([group.prompt_tokens, one.completion_tokens]).astype(np.int64)
            given = torch.from_numpy(shape.from_rows(np.concatenate([group.prompt_experts, one.experts]))).long()

            def forced(at: int, router: Any, _inputs: Any, output: Any, given: torch.Tensor = given) -> Any:
                chosen = torch.cat([given[:, at], output[2][len(given) :]])  # nobody sees the last token
                return output[0], weights_by_definition(shape.kind, router, output[0], chosen), chosen

            hooks = [router.register_forward_hook(partial(forced, at)) for at, router in enumerate(routers)]
            logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0] / 0.8
            for hook in hooks:
                hook.remove()
            start = len(group.prompt_tokens)
            each = logits.log_softmax(-1)[start - 1 : -1].gather(-1, torch.from_numpy(tokens)[start:, None])
            parts.append(each[:, 0])
    logprobs = torch.cat(parts)
    logprobs.sum().backward()
    return logprobs.detach(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def replayed(policy: Policy, groups: list[TrainGroup]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = policy(pack(groups), 0.8).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), gradients_of(policy.model)


def without(groups: list[TrainGroup]) -> list[TrainGroup]:
    return [replace(group, prompt_experts=None) for group in groups]


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(one.norm()) for one in theirs.values())
    for name, one in theirs.items():
        assert float((ours[name] - one).norm()) <= bound * (float(one.norm()) + 1e-3 * largest), name


@pytest.mark.parametrize("attention", [SHARED_PREFIX, OWN_ROWS, "eager"])
@pytest.mark.parametrize("family", REPLAYED)
def test_packed_or_apart_every_pass_has_the_recorded_experts_and_their_gradient(family: str, attention: str) -> None:
    shape, groups = recorded(family)
    assert shape.layers == ((1, 2) if "dense" in family else (0, 1))
    policy = Policy(build(family, attention), attention != SHARED_PREFIX, replays=True)
    routers = routers_of(policy.model, shape)
    batch = pack(groups)
    assert batch.experts is not None and batch.recorded is not None
    with torch.no_grad(), chosen_by(routers) as own:
        policy(pack(without(groups)), 0.8)
    with torch.no_grad(), chosen_by(routers) as used:
        policy(batch, 0.8)
    if attention == SHARED_PREFIX:
        known = batch.recorded
        wanted = torch.from_numpy(shape.from_rows(batch.experts.numpy())).long()
        for at in range(len(routers)):
            assert torch.equal(used[at][known], wanted[known, at])
        assert not torch.equal(torch.stack(own)[:, known], torch.stack(used)[:, known])
        assert int(known.sum()) < len(known), "last tokens and the filling have none"
    logprobs, gradients = replayed(policy, groups)
    expected, expected_gradients = alone(family)
    assert float((logprobs - expected).abs().max()) < LOGPROB_BOUND
    assert_close(gradients, expected_gradients, GRADIENT_BOUND)
    of_routers = [name for name in gradients if "gate.weight" in name or "router.weight" in name]
    assert len(of_routers) == len(routers) and all(float(gradients[name].norm()) > 1e-3 for name in of_routers)


def own_choice(policy: Policy, shape: RouterShape, groups: list[TrainGroup]) -> list[TrainGroup]:
    """The groups with the experts that the policy itself chooses for them in a packed row."""
    with torch.no_grad(), chosen_by(routers_of(policy.model, shape)) as found:
        policy(pack(without(groups)), 0.8)
    rows, at, changed = shape.to_rows(torch.stack(found, dim=1).numpy()), 0, []
    for group in groups:
        of_prompt = rows[at : at + len(group.prompt_tokens)]
        at += len(group.prompt_tokens)
        sequences = []
        for one in group.sequences:
            sequences.append(replace(one, experts=rows[at : at + len(one.completion_tokens) - 1]))
            at += len(one.completion_tokens)
        changed.append(replace(group, sequences=sequences, prompt_experts=of_prompt))
    return changed


@pytest.mark.parametrize("family", REPLAYED)
def test_replaying_its_own_choice_changes_no_bit(family: str) -> None:
    shape, groups = recorded(family)
    policy = Policy(build(family, SHARED_PREFIX), replays=True)
    plain = Policy(build(family, SHARED_PREFIX))
    mine = own_choice(policy, shape, groups)
    for ours, theirs in ((replayed(policy, mine), replayed(plain, mine)), (replayed(policy, without(mine)),) * 2):
        assert torch.equal(ours[0], theirs[0])
        assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
    assert not torch.equal(replayed(policy, groups)[0], replayed(plain, groups)[0])


@pytest.mark.parametrize(
    ("family", "recomputation"),
    [("Qwen3-MoE", True), ("Qwen3-MoE", "selective"), ("gpt-oss", True), ("gpt-oss", "selective")],
)
def test_what_is_computed_again_has_the_experts_of_its_own_pass(family: str, recomputation: Recomputation) -> None:
    shape, groups = recorded(family)
    kept = Policy(build(family, SHARED_PREFIX), replays=True)
    again = Policy(build(family, SHARED_PREFIX, recomputation), replays=True)
    expected = replayed(kept, groups)
    with chosen_by(routers_of(again.model, shape)) as used:
        logprobs = again(pack(groups), 0.8).logprobs
        with torch.no_grad():  # passes in between: over others, and over the same without experts
            again(pack(own_choice(again, shape, groups)[:2]), 0.8)
            again(pack(without(groups)), 0.8)
        before = len(used)
        logprobs.sum().backward()
    assert len(used) - before == len(shape.layers), "each layer was computed again"
    assert torch.equal(logprobs.detach(), expected[0])
    assert_close(gradients_of(again.model), expected[1], 1e-6)


def test_a_group_in_parts_keeps_the_experts_of_its_prompt() -> None:
    _, groups = recorded("Qwen3-MoE")
    whole = Policy(build("Qwen3-MoE", SHARED_PREFIX), replays=True)
    parts = split_into_micro_batches(groups, 32)
    assert sum(map(len, parts)) > len(groups)
    with torch.no_grad():
        apart = torch.cat([whole(pack(part), 0.8).logprobs for part in parts])
        assert float((apart - whole(pack(groups), 0.8).logprobs).abs().max()) < LOGPROB_BOUND


def test_numbers_of_two_bytes_are_read_as_they_are_written() -> None:
    config = small_config(family_config("Qwen3-MoE"))
    config.num_experts = 300
    replay = RouterReplay(AutoModelForCausalLM.from_config(config))
    chosen = np.array([[[299, 0], [255, 256]], [[1, 2], [3, 258]]])
    rows = replay.shape.to_rows(chosen)
    assert rows.shape == (2, 8) and replay.shape.wrong_with(rows, 2) is None
    assert np.array_equal(replay.shape.from_rows(rows), chosen)
    found = replay.choices(torch.from_numpy(rows), torch.tensor([True, False]))
    assert found[0].tolist() == chosen[0].tolist() and found[1].unique().tolist() == [-1]
    with pytest.raises(ValueError, match="expected 8 for each position"):
        replay.choices(torch.from_numpy(rows[:, :4]), torch.tensor([True, False]))


def test_a_trainer_refuses_groups_without_experts_and_models_that_have_none(
    one_rank: None, tmp_path: Path, tiny_model: Path
) -> None:
    small_model(FAMILIES["Qwen3-MoE"]()).save_pretrained(tmp_path)
    off_policy = {"ratio_to": "proximal", "correction": "truncate"}
    algorithm = {"name": "grpo", "router_replay": True, "kl": {"coef": 0.1}, "off_policy": off_policy}
    config = run_config(tmp_path, algorithm=algorithm, schedule={"name": "sync", "sync_every": 2})
    trainer = Trainer(config, str(tmp_path), torch.device("cpu"))
    groups = recorded("Qwen3-MoE")[1]
    with pytest.raises(ValueError, match="bring the generator's experts"):
        trainer.accumulate([groups[0], without(groups)[1]], is_last=True)
    stats = trainer.accumulate(groups, is_last=True)
    assert stats.tokens == sum(group.loss_tokens for group in groups)
    reference = torch.from_numpy(trainer.precompute_reference(without(groups)))
    again = torch.from_numpy(trainer.precompute_reference(groups))
    assert torch.equal(reference, again), "the reference chooses its own"
    assert trainer.proximal is not None
    with torch.no_grad():
        policy, old = (trainer._sampled_from(one, pack(groups)).logprobs for one in (trainer.policy, trainer.proximal))
    assert torch.equal(policy, old) and not torch.allclose(old, reference, atol=1e-2)
    with pytest.raises(UserError, match="'llama'"):
        Trainer(run_config(tiny_model, algorithm=algorithm), str(tiny_model), torch.device("cpu"))


def test_a_model_whose_layers_are_not_those_of_its_configuration_is_refused() -> None:
    model = build("Qwen3-MoE", "eager")
    model.config.mlp_only_layers = [0]
    with pytest.raises(RunFailed, match="layers"):
        RouterReplay(model)


def test_experts_of_other_lengths_than_the_tokens_are_refused() -> None:
    _, groups = recorded("Qwen3-MoE")
    first = groups[0]
    assert first.prompt_experts is not None and first.sequences[0].experts is not None
    longer: Callable[[np.ndarray], np.ndarray] = lambda rows: np.concatenate([rows, rows[:1]])  # noqa: E731
    with pytest.raises(ValueError, match="its prompt"):
        pack([replace(first, prompt_experts=longer(first.prompt_experts))])
    wrong = replace(first.sequences[0], experts=longer(first.sequences[0].experts))
    with pytest.raises(ValueError, match="a completion"):
        pack([replace(first, sequences=[wrong])])


def test_a_pass_that_failed_leaves_no_experts_to_the_next_one() -> None:
    shape, groups = recorded("Qwen3-MoE")
    policy = Policy(build("Qwen3-MoE", SHARED_PREFIX), replays=True)
    with torch.no_grad():
        plain = policy(pack(without(groups)), 0.8).logprobs

        def fail(_router: nn.Module, _inputs: Any) -> None:
            raise MemoryError

        hook = routers_of(policy.model, shape)[0].register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            policy(pack(groups), 0.8)
        hook.remove()
        assert torch.equal(policy(pack(without(groups)), 0.8).logprobs, plain)
