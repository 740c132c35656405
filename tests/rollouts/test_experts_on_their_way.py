"""Experts stay with their tokens on the way from an engine to a trainer: on the wire, in journals, on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl.controller.site_limits import SampleLimits, SiteOwn
from streamrl.errors import UserError
from streamrl.generation.instance.sample_experts import first_row, rows_since, with_experts
from streamrl.generation.instance.sample_parts import join
from streamrl.generation.site.sample_batches import pack_samples, sample_bytes, unpack_samples
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.machine.router_shape import RouterShape, shape_of
from streamrl.plain_files import NotPlainFile
from streamrl.protocol.controller_site import SampleBatch
from streamrl.protocol.message import body_of, parse, wire
from streamrl.protocol.samples import (
    progress_from_wire,
    progress_to_wire,
    request_from_wire,
    request_to_wire,
    sample_from_wire,
    sample_to_wire,
)
from streamrl.protocol.site_instance import GenerateSample
from streamrl.rollouts import parquet_files
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.ledger import pack_content, unpack_content
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence, train_groups
from streamrl.rollouts.types import ByteArray, Group, PartialSample, Sample, SampleRequest, Scored
from streamrl.rollouts.void import Void, VoidCause
from streamrl.training.packing import pack

SHAPE = RouterShape("qwen3_moe", layers=(1, 3), experts=8, top_k=2)
PROMPT = np.arange(5, 9, dtype=np.int32)


def rows(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return SHAPE.to_rows(np.stack([[rng.permutation(8)[:2] for _ in range(2)] for _ in range(count)]))


def sample(number: int, tokens: int, experts: np.ndarray | None) -> Sample:
    ids = np.arange(tokens, dtype=np.int32) + 10 * number
    values = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), "stop", "here", "here-p-0", "p", "regular"
    return Sample(f"g.{number}", "g", ids, *values, 1.0, 2.0, 3.0, 4.0, experts=experts)


def part(tokens: int, experts: np.ndarray | None, start: int = 0) -> PartialSample:
    ids = np.arange(start, start + tokens, dtype=np.int32)
    return PartialSample("g.0", ids, np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), 1.0, 2.0, experts)


def same(ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    return (ours is None) == (theirs is None) and (ours is None or np.array_equal(ours, theirs))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("with_some_without", [False, True])
def test_batches_and_the_ledger_keep_each_samples_experts(compress: bool, with_some_without: bool) -> None:
    sent = [sample(0, 3, rows(6)), sample(1, 0, rows(0 + 1)[:0]), sample(2, 2, rows(5, seed=2))]
    if with_some_without:
        sent.insert(1, sample(3, 2, None))
    packed = pack_samples([sample_to_wire(one) for one in sent], compress)
    assert packed[0]["packing"] == ("zstd" if compress else "raw")
    received = body_of(parse(SampleBatch, packed[0])), packed[1]
    found = [sample_from_wire(Sample, *item) for item in unpack_samples(*received)]
    assert all(same(a.experts, b.experts) for a, b in zip(found, sent, strict=True))
    back = sample_from_wire(Sample, *unpack_content(pack_content(*sample_to_wire(sent[0]))))
    assert same(back.experts, sent[0].experts)
    plain = sample_bytes(*sample_to_wire(replace(sent[0], experts=None)))
    assert sample_bytes(*sample_to_wire(sent[0])) == plain + 6 * SHAPE.row_bytes + 4


@pytest.mark.parametrize("compress", [False, True])
def test_a_batch_whose_experts_do_not_add_up_is_refused(compress: bool) -> None:
    body, arrays = pack_samples([sample_to_wire(sample(0, 3, rows(6)))], compress)
    changes: list[tuple[dict[str, object], dict[str, np.ndarray]]]
    if compress:
        changes = [({"experts": value}, {}) for value in ([5, 4], [6], [6, 2**40], "x", [-6, -4], [3, 8, 1])]
        assert len(unpack_samples(body, arrays)) == 1
    else:
        changes = [
            ({}, {"experts": rows(5)}),
            ({}, {"experts": rows(6).ravel()}),
            ({}, {"experts": rows(6).astype(np.int32)}),
            ({}, {"expert_rows": np.array([-2], np.int32)}),
            ({}, {"expert_rows": np.array([3, 3], np.int32)}),
            ({}, {"expert_rows": np.array([6], np.int64)}),
        ]
        for name in ("experts", "expert_rows"):
            with pytest.raises(ValueError, match="experts"):
                unpack_samples(body, {key: value for key, value in arrays.items() if key != name})
    for of_body, of_arrays in changes:
        with pytest.raises(ValueError):
            unpack_samples(body | of_body, {**arrays, **of_arrays})
    with pytest.raises(ValueError, match="different bytes"):
        pack_samples([sample_to_wire(sample(0, 3, rows(6))), sample_to_wire(sample(1, 3, rows(6)[:, :3]))])
    with pytest.raises(ValueError, match="experts"):
        sample(0, 3, rows(2))


def test_a_journal_joins_the_parts_that_were_reported_also_after_a_restart(tmp_path: Path) -> None:
    whole = rows(len(PROMPT) + 6 - 1)
    sent = [(0, part(2, whole[:5])), (2, part(2, whole[5:7], 2)), (3, part(3, whole[6:], 3))]
    sent = [(start, one) for start, one in progress_from_wire(*progress_to_wire(sent))]
    journal = TokenJournal(tmp_path / "journal")
    for start, one in sent:
        assert journal.add(start, one)
    for found in (journal.kept("g.0"), _reopened(journal, tmp_path / "journal").kept("g.0")):
        assert found is not None and found.completion_tokens.tolist() == list(range(6)) and same(found.experts, whole)
    journal = TokenJournal(tmp_path / "other")
    assert journal.add(0, sent[0][1]) and journal.add(2, replace(sent[1][1], experts=None))
    assert (kept := journal.kept("g.0")) is not None and kept.experts is None, "a gap: none are known"
    assert progress_to_wire([(0, part(2, None))])[1].keys() == {"completion_tokens", "logprobs", "token_versions"}
    mixed = [sent[0], (2, replace(sent[1][1], experts=None)), sent[2]]
    back = progress_from_wire(*progress_to_wire(mixed))
    assert [
        (start, same(one.experts, sample.experts)) for (start, one), (_, sample) in zip(back, mixed, strict=True)
    ] == [
        (0, True),
        (2, True),
        (3, True),
    ]
    message, arrays = progress_to_wire(sent)
    with pytest.raises(ValueError, match="rows of experts"):
        progress_from_wire(message, arrays | {"expert_rows": arrays["expert_rows"] + 1})


def _reopened(journal: TokenJournal, path: Path) -> TokenJournal:
    journal.close()
    return TokenJournal(path)


def test_a_request_that_goes_on_asks_for_what_it_does_not_know_and_joins_it() -> None:
    whole, cut = rows(len(PROMPT) + 6 - 1), 3
    engine = np.zeros((len(whole), 5, 2), np.uint8)  # of all layers, those without experts too
    engine[:, list(SHAPE.layers)] = SHAPE.from_rows(whole)
    fresh = SampleRequest("g.0", "g", PROMPT, 7, 1.0)
    began, first = with_experts(SHAPE, fresh, part(cut, None), engine[: len(PROMPT) + cut - 1])
    assert began is None and first_row(fresh) == 0
    over_the_wire = request_to_wire(replace(fresh, kept=first), "tail")
    moved = request_from_wire(parse(GenerateSample, wire(over_the_wire[0])[1]), over_the_wire[1])
    assert moved.kept is not None and same(moved.kept.experts, first.experts)
    begin = first_row(moved)
    assert begin == len(PROMPT) + cut - 1
    kept, more = with_experts(SHAPE, moved, part(6 - cut, None, cut), engine[begin:])
    assert kept is not None and same(join(kept, more).experts, whole)
    assert join(kept, replace(more, t_dispatched=9.0)).t_last_part == 9.0
    for lost in (None, rows(3)):  # unknown, or not those of all of its tokens
        unknown = replace(moved, kept=replace(first, experts=lost))
        assert first_row(unknown) == 0
        kept, more = with_experts(SHAPE, unknown, part(6 - cut, None, cut), engine)
        assert kept is not None and same(join(kept, more).experts, whole)
    empty = replace(fresh, kept=part(0, None))
    kept, more = with_experts(SHAPE, empty, part(6, None), engine)
    assert kept is not None and first_row(empty) == 0 and same(join(kept, more).experts, whole)
    _, none = with_experts(SHAPE, fresh, part(0, None), None)
    assert none.experts is not None and none.experts.shape == (0, SHAPE.row_bytes)
    for wrong in (None, engine[:-1], engine[:, :3], engine[..., :1]):
        with pytest.raises(RuntimeError, match="vLLM returned experts"):
            with_experts(SHAPE, fresh, part(6, None), wrong)


def test_what_a_running_request_has_produced_is_reported_with_its_experts() -> None:
    whole = rows(len(PROMPT) + 6 - 1)
    engine = np.zeros((len(whole), 4, 2), np.uint8)
    engine[:, list(SHAPE.layers)] = SHAPE.from_rows(whole)
    chunks = [engine[:4], engine[4:5], engine[5:]]
    assert same(rows_since(SHAPE, chunks, 0, len(PROMPT), (0, 2)), whole[:5])
    assert same(rows_since(SHAPE, chunks, 0, len(PROMPT), (2, 6)), whole[5:])
    assert same(rows_since(SHAPE, [engine[6:]], 6, len(PROMPT), (3, 6)), whole[6:]), "it arrived with three tokens"
    assert rows_since(SHAPE, chunks[:2], 0, len(PROMPT), (0, 6)) is None
    assert rows_since(SHAPE, [], 0, len(PROMPT), (0, 1)) is None
    assert rows_since(SHAPE, [engine[6:]], 6, len(PROMPT), (0, 6)) is None


def test_a_sample_is_taken_only_with_experts_that_its_tokens_can_have() -> None:
    limits = SampleLimits(most_tokens=9, most_context=20, vocabulary=100, routers=SHAPE)
    own, good = SiteOwn("here", {"p": 1}, limits), rows(len(PROMPT) + 3 - 1)
    assert own.wrong_with_sample(sample(0, 3, good), 0, len(PROMPT)) is None
    assert own.wrong_with_sample(sample(0, 0, good[:0]), 0, len(PROMPT)) is None
    twice = good.copy()
    twice[2, 1] = twice[2, 0]
    outside = good.copy()
    outside[-1, -1] = 8
    wrong = {"twice": twice, "expert 8": outside, "shape": good[:-1], "no rows": None, "expected": good[:, :-1]}
    for text, experts in wrong.items():
        assert text in str(own.wrong_with_sample(sample(0, 3, experts), 0, len(PROMPT))), text
    assert "shape" in str(own.wrong_with_sample(sample(0, 3, good), 0, len(PROMPT) + 1))
    plain = SiteOwn("here", {"p": 1}, replace(limits, routers=None))
    assert plain.wrong_with_sample(sample(0, 3, None), 0) is None
    assert "none were ordered" in str(plain.wrong_with_sample(sample(0, 3, good), 0))


def full_group() -> Group:
    found = Group("g", 1, 0, "p", "task", 0, "", PROMPT, size=4)
    samples = [sample(0, 0, None), *(sample(n, n + 1, rows(len(PROMPT) + n, seed=n)) for n in (1, 2, 3))]
    for one in samples:
        void = Void(VoidCause.PROVIDER, "x") if one.sample_id in ("g.0", "g.1") else None
        found.scored[one.sample_id] = Scored(one, None if void else 1.0, void, 5.0)
    found.advantages = {"g.2": 1.0, "g.3": -1.0}
    return found


def test_each_token_of_a_packed_row_has_its_own_experts_whatever_the_way_there(tmp_path: Path) -> None:
    group = full_group()
    [made] = train_groups(group, {"g.2", "g.3"})
    assert group.scored["g.1"].sample.experts is not None
    assert same(made.prompt_experts, group.scored["g.1"].sample.experts[: len(PROMPT)]), "of its first with tokens"
    kept = KeptMicroBatches(tmp_path)
    kept.write(KeptStep(1, 1.0, "x", {}, [[[made]]]))
    plain = replace(made, prompt_experts=None, sequences=[replace(one, experts=None) for one in made.sequences])
    sent = [plain, made, made]
    for one in (made, *from_wire(*to_wire(sent))[1:], kept.read(1).micro_batches[0][0][0]):
        check_packed(group, one)
    assert from_wire(*to_wire(sent))[0].prompt_experts is None
    assert pack(sent).experts is None and pack([plain]).recorded is None
    parts = split_into_micro_batches([made], len(PROMPT) + 4)
    assert len(parts) == 2 and all(same(part[0].prompt_experts, made.prompt_experts) for part in parts)


def kept_with(prompt: ByteArray, experts: list[ByteArray]) -> KeptStep:
    """A step of one group with a sequence for each array of experts."""
    zeros = np.zeros(1, np.float32)
    sequences = [TrainSequence(np.ones(1, np.int32), zeros, 0.5, None, None, "s", None, None, one) for one in experts]
    return KeptStep(1, 1.0, "x", {}, [[[TrainGroup("g", np.ones(2, np.int32), sequences, "", prompt)]]])


def test_a_large_refused_step_is_read_as_it_was_kept_and_a_small_file_stands_for_no_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "MOST_DECODED", 1 << 20)
    kept, rng = KeptMicroBatches(tmp_path / "refused"), np.random.default_rng(0)
    prompt, one = (rng.integers(0, 256, (size, 100), np.uint8) for size in (1000, 1))
    kept.write(kept_with(prompt, [one] * 64))  # 64 sequences of one prompt
    [group] = kept.read(1).micro_batches[0][0]
    assert same(group.prompt_experts, prompt) and len(group.sequences) == 64
    many = [rng.integers(0, 256, (1000, 100), np.uint8) for _ in range(20)]
    kept.write(kept_with(one, many))
    [group] = kept.read(1).micro_batches[0][0]
    assert all(same(sequence.experts, wanted) for sequence, wanted in zip(group.sequences, many, strict=True))
    kept.write(kept_with(one, [np.zeros((1000, 100), np.uint8)] * 20))
    with pytest.raises(NotPlainFile, match="unpacks to more than"):
        kept.read(1)


def check_packed(group: Group, made: TrainGroup) -> None:
    batch = pack([made])
    assert batch.experts is not None and batch.recorded is not None
    assert made.prompt_experts is not None
    at = len(PROMPT)
    assert same(batch.experts[:at].numpy(), made.prompt_experts) and batch.recorded[:at].all()
    for one, name in zip(made.sequences, ("g.2", "g.3"), strict=True):
        length, experts = len(one.completion_tokens), group.scored[name].sample.experts
        assert experts is not None
        assert same(batch.experts[at : at + length - 1].numpy(), experts[len(PROMPT) :])
        assert batch.recorded[at : at + length].tolist() == [True] * (length - 1) + [False]
        at += length
    assert at < len(batch.recorded) == batch.input_ids.numel() and not batch.recorded[at:].any()


def test_a_micro_batch_whose_experts_do_not_add_up_is_refused() -> None:
    [made] = train_groups(full_group(), {"g.2", "g.3"})
    body, arrays = to_wire([made])
    for wrong in (arrays["experts"][:-1], arrays["experts"].ravel(), arrays["experts"].astype(np.int32)):
        with pytest.raises(ValueError, match="experts in a micro-batch"):
            from_wire(body, {**arrays, "experts": wrong})


def test_routers_are_described_by_their_configuration_and_others_are_refused() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 257, "num_experts_per_tok": 3}
    sparse = config | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert shape_of(sparse) == RouterShape("qwen3_moe", (1, 5), 257, 3)
    assert shape_of(sparse).row_bytes == 2 * 3 * 2 and shape_of(config | {"num_experts": 256}).row_bytes == 6 * 3
    saved = {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert shape_of(saved | {"mlp_only_layers": [0]}).layers == (0, 1), "gpt-oss has no such key"
    for wrong, text in (
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'"),
        ({}, "None"),
        (config | {"num_experts": None}, "num_local_experts"),
        (config | {"mlp_only_layers": list(range(6))}, "0 layers"),
        (config | {"num_experts_per_tok": 258}, "258 of 257"),
        (config | {"num_experts": 2**16 + 1}, "cannot be replayed"),
    ):
        with pytest.raises(UserError, match=text):
            shape_of(wrong)
