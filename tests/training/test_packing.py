"""Packed groups compute what separate sequences would."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, CTRLConfig, OlmoConfig, OPTConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.config.optimizer import Recomputation
from streamrl.errors import RunFailed
from streamrl.rollouts.micro_batch import split_into_micro_batches, split_into_rows
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training import attention
from streamrl.training.attention import OWN_ROWS, PLAIN_SCORES, SHARED_PREFIX
from streamrl.training.hidden_states import own_rows, padded_rows
from streamrl.training.packing import ROW_MULTIPLE, GroupLayout, pack
from streamrl.training.policy_model import in_training, load_policy
from streamrl.training.token_logprobs import measured_tokens
from tests.training.conftest import random_groups, relative_error, with_masks


def separate_logprobs(model: torch.nn.Module, groups: list[TrainGroup], temperature: float) -> torch.Tensor:
    """Log-probabilities of every completion token, each sequence run alone through the plain HF model."""
    rows = []
    for group in groups:
        for seq in group.sequences:
            ids = torch.tensor(np.concatenate([group.prompt_tokens, seq.completion_tokens]))[None].long()
            logits = model(input_ids=ids).logits[0].float() / temperature
            logp = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            rows.append(logp[len(group.prompt_tokens) - 1 :])
    return torch.cat(rows)


@pytest.mark.parametrize(("temperature", "plain_scores"), [(1.0, PLAIN_SCORES), (0.7, PLAIN_SCORES), (1.0, 0)])
def test_shared_prefix_packing_equals_separate_sequences(
    tiny_model: Path, temperature: float, plain_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PLAIN_SCORES", plain_scores)  # with 0 all goes through torch's own attention
    groups = random_groups(3)
    policy = load_policy(str(tiny_model))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    packed = policy(pack(groups), temperature).logprobs
    expected = separate_logprobs(plain, groups, temperature)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(len(expected))
    (packed * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, ours), (_, theirs) in zip(policy.model.named_parameters(), plain.named_parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-5, name


def test_tokens_that_were_not_sampled_are_context_without_a_loss(tiny_model: Path) -> None:
    groups = random_groups(3)
    some = with_masks(groups)
    chosen = np.concatenate([one.mask for group in some for one in group.sequences if one.mask is not None])
    policy = load_policy(str(tiny_model))
    every, batch = pack(groups), pack(some)
    assert batch.loss_tokens == chosen.sum() == sum(group.loss_tokens for group in some) < len(chosen)
    assert torch.equal(batch.input_ids, every.input_ids) and batch.layout == every.layout
    kept = torch.from_numpy(chosen)
    for name in ("targets", "generator_logprobs", "advantages", "sequence_ids", "source_index"):
        assert torch.equal(getattr(batch, name), getattr(every, name)[kept]), name
    torch.testing.assert_close(policy(batch, 1.0).logprobs, policy(every, 1.0).logprobs[kept])


def test_entropy_is_that_of_the_full_distribution(tiny_model: Path) -> None:
    groups = random_groups(2)
    batch = pack(groups)
    entropy = load_policy(str(tiny_model))(batch, 1.0).entropy
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    first = groups[0]
    ids = torch.tensor(np.concatenate([first.prompt_tokens, first.sequences[0].completion_tokens]))[None].long()
    place = int(measured_tokens(batch.targets)[0])
    assert place < len(first.sequences[0].completion_tokens)
    logits = plain(input_ids=ids).logits[0, len(first.prompt_tokens) - 1 + place]
    p = torch.softmax(logits.detach().float(), -1)
    assert float(entropy[0]) == pytest.approx(float(-(p * p.log()).sum()), rel=1e-4)
    assert len(entropy) == -(-batch.loss_tokens // 8)


@pytest.mark.parametrize("way", ["products", "kernels", OWN_ROWS, "sdpa", "eager"])
def test_recomputation_changes_no_gradient_and_selective_repeats_no_product(
    tiny_model: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "kernels":
        monkeypatch.setattr(attention, "PLAIN_SCORES", 0)
    name = SHARED_PREFIX if way in ("products", "kernels") else way
    batch = pack(random_groups(2))
    every: list[Recomputation] = [False, "selective", True]
    grads, flops = [], []
    for recomputation in every:
        policy = load_policy(str(tiny_model), recomputation, name)
        logprobs = policy(batch, 1.0).logprobs
        with FlopCounterMode(display=False) as counter:
            logprobs.sum().backward()
        flops.append(counter.get_total_flops())
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    if way == "kernels":  # no product and no attention is computed a second time
        assert flops[1] == flops[0] < flops[2]


def test_selective_recomputation_changes_no_gradient_where_a_layer_clamps_a_product_in_place() -> None:
    config = OlmoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, clip_qkv=0.05
    )
    model = AutoModelForCausalLM.from_config(config)
    grads = []
    ways: list[Recomputation] = [False, "selective"]
    for recomputation in ways:
        one = in_training(copy.deepcopy(model), recomputation)
        one(input_ids=torch.arange(3, 23)[None], use_cache=False).logits.log_softmax(-1)[0, :, 5].sum().backward()
        grads.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *grads))


def test_gradient_checkpointing_adds_no_dropout_that_a_layer_computes_itself() -> None:
    """OPT drops activations out in its layers' own `forward`, by their training mode."""
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, dropout=0.5
    )
    model = in_training(AutoModelForCausalLM.from_config(config))
    checkpointed = in_training(copy.deepcopy(model), True)
    ids = torch.arange(3, 23)[None]
    grads = []
    for one in (model, checkpointed, checkpointed):  # its layers checkpoint again after a pass
        one.zero_grad()
        with LayerCalls(one) as calls:
            one(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 5].sum().backward()
        assert calls.number == (2 if one is model else 4)  # the backward pass computes them again
        grads.append([p.grad.clone() for p in one.parameters()])
    for plain, first, second in zip(*grads, strict=True):
        torch.testing.assert_close(plain, first)
        torch.testing.assert_close(first, second)


def test_checkpointing_is_refused_where_no_layer_can_recompute() -> None:
    config = CTRLConfig(vocab_size=64, n_embd=32, dff=32, n_layer=1, n_head=2)
    with pytest.raises(RunFailed, match=r"optimizer.gradient_checkpointing: no layer of CTRLLMHeadModel can recompute"):
        in_training(AutoModelForCausalLM.from_config(config), True)


class LayerCalls:
    """Counts how often decoder layers compute."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.number = 0
        self._layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]

    def __enter__(self) -> LayerCalls:
        def count(*_: object) -> None:
            self.number += 1

        self._hooks = [layer.register_forward_pre_hook(count) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def test_every_sequence_is_in_exactly_one_micro_batch() -> None:
    groups = random_groups(9, samples=5)
    batches = split_into_micro_batches(groups, max_tokens=40)
    seen = [id(seq) for batch in batches for group in batch for seq in group.sequences]
    assert sorted(seen) == sorted(id(seq) for group in groups for seq in group.sequences)
    for batch in batches:
        assert sum(g.tokens for g in batch) <= 40 or (len(batch) == 1 and len(batch[0].sequences) == 1)


def test_empty_completion_takes_no_room_and_an_empty_prompt_is_refused() -> None:
    none, some = np.zeros(0, np.int32), np.arange(3, dtype=np.int32)
    empty = TrainSequence(none, none.astype(np.float32), 1.0)
    full = TrainSequence(some, some.astype(np.float32), -1.0)
    batch = pack([TrainGroup("g", some, [empty, full, empty])])
    assert batch.loss_tokens == 3
    assert batch.layout[0].completion_lengths == (3,)
    assert batch.source_index.tolist() == [2, 3, 4]
    assert batch.position_ids[0, :6].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="empty prompt"):
        pack([TrainGroup("g", none, [full])])


def test_squares_count_the_pairs_that_attention_multiplies() -> None:
    groups = random_groups(2)
    pairs = 0
    for group in groups:
        for seq in group.sequences:
            pairs += sum(len(group.prompt_tokens) + place + 0.5 for place in range(len(seq.completion_tokens)))
        pairs += sum(place + 0.5 for place in range(len(group.prompt_tokens)))
    batch = pack(groups)
    filler = batch.input_ids.numel() - sum(group.tokens for group in groups)  # sees itself only
    assert batch.squares(separate=False) == 2 * pairs + filler**2


def test_a_row_is_filled_up_to_a_multiple_and_what_fills_it_up_changes_nothing(tiny_model: Path) -> None:
    group = random_groups(1, samples=2)[0]
    missing = -group.tokens % ROW_MULTIPLE
    last = TrainSequence(np.resize(group.prompt_tokens, missing), np.zeros(missing, np.float32), 1.0)
    assert missing
    sequences = [*group.sequences, last]
    policy = load_policy(str(tiny_model))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    for groups in ([group], [TrainGroup("g", group.prompt_tokens, sequences)]):
        batch = pack(groups)
        assert batch.input_ids.numel() % ROW_MULTIPLE == 0
        assert len(batch.layout) - 1 == bool(sum(g.tokens for g in groups) % ROW_MULTIPLE)
        expected = separate_logprobs(plain, groups, 1.0)
        torch.testing.assert_close(policy(batch, 1.0)[0], expected, rtol=1e-5, atol=1e-5)


def test_rows_of_their_own_are_cut_by_their_padded_tokens() -> None:
    groups = random_groups(9, samples=5)
    parts = split_into_rows(groups, max_tokens=40)
    lengths = [[len(g.prompt_tokens) + len(s.completion_tokens) for g in part for s in g.sequences] for part in parts]
    assert all(len(part) * max(part) <= 40 or len(part) == 1 for part in lengths)
    assert all((len(one) + 1) * max(two[0], *one) > 40 for one, two in itertools.pairwise(lengths))
    without = split_into_rows(groups, max_tokens=40, padded=False)
    lengths = [[len(g.prompt_tokens) + len(s.completion_tokens) for g in part for s in g.sequences] for part in without]
    assert all(sum(part) <= 40 or len(part) == 1 for part in lengths) and len(without) < len(parts)
    assert all(sum(one) + two[0] > 40 for one, two in itertools.pairwise(lengths))
    seen = [(g.group_id, id(s)) for part in parts for g in part for s in g.sequences]
    assert seen == [(g.group_id, id(s)) for g in groups for s in g.sequences]


def test_rows_of_their_own_without_padding_have_the_tokens_of_the_padded_ones() -> None:
    for groups, parts in ((random_groups(4), 1), (random_groups(9, samples=5), 1), (random_groups(9, samples=5), 4)):
        layout = pack(groups).layout
        own, padded = own_rows(layout, parts), padded_rows(layout)
        assert len(own.places) == len(own.positions) == own.layout[-1].stop
        assert len(own.places) % (parts * ROW_MULTIPLE) == 0
        assert len(own.places) < int(padded.mask.sum()) + parts * ROW_MULTIPLE
        for row, mask, sequence in zip(padded.places, padded.mask, own.layout, strict=False):
            tokens = slice(sequence.start, sequence.stop)
            assert torch.equal(own.places[tokens], row[mask.bool()]) and sequence.completion_lengths == ()
            assert torch.equal(own.positions[tokens], torch.arange(sequence.prompt_length))
        columns = padded.places.shape[1]
        assert torch.equal(own.places[own.sources], padded.places.flatten()[padded.sources])
        assert torch.equal(own.positions[own.sources], padded.sources % columns)
        assert bool((own.sources.diff() > 0).all())


def test_a_batch_without_completions_has_a_row_as_well() -> None:
    own = own_rows((GroupLayout(0, 5, ()),))
    assert len(own.places) == ROW_MULTIPLE and own.sources.numel() == 0


def test_dropout_and_noise_of_training_are_off(tiny_model: Path) -> None:
    for checkpointing in (False, True):
        modules = list(load_policy(str(tiny_model), checkpointing).model.modules())
        training = [type(module).__name__ for module in modules if module.training]
        assert training == (["LlamaDecoderLayer"] * 2 if checkpointing else [])


class Products(TorchDispatchMode):
    """Notes the shapes of the matrix products that a pass computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm", "linear"):
            left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
            if left.dtype == torch.bfloat16:
                self.shapes.add((*left.shape[-2:], right.shape[-1]))
        return func(*args, **(kwargs or {}))


def test_products_in_bf16_have_few_shapes_whatever_the_lengths(tiny_model: Path) -> None:
    # oneDNN makes and keeps a kernel for every shape: a trainer's memory grew by half a gigabyte with every step
    policy = load_policy(str(tiny_model)).to(torch.bfloat16)
    products = Products()
    for number in range(6):
        batch = pack(random_groups(2, samples=3, seed=number))
        with products:
            policy(batch, 1.0)[0].sum().backward()
    assert len(products.shapes) > 10  # head, layers and attention, forward and backward
    assert {side % ROW_MULTIPLE for shape in products.shapes for side in shape} == {0}
