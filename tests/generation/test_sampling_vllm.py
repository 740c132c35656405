"""Tokens are drawn by their probabilities, exactly, by one number each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from streamrl.generation.instance import sampling_vllm
from streamrl.generation.instance.sampling_vllm import PART, _library, draw, draw_, gather_logprobs, sample

JUST_BELOW_1 = float(np.nextafter(1.0, 0.0))


def distributions(vocabulary: int) -> torch.Tensor:
    """Flat, skewed, with many tokens that cannot be, and with a single one that can."""
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[1] *= 8
    logits[2] = logits[2].where(torch.arange(vocabulary) % 7 == vocabulary % 7 - 1, -torch.inf)
    logits[2, 0] = 0.0
    logits[3] = -torch.inf
    logits[3, vocabulary // 2] = 0.0
    return logits.softmax(-1)


Drawing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def drawn_in_c(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    assert _library() is not None, "no C compiler on this machine"
    rows = probabilities if probabilities.stride(0) else probabilities[:1]  # one that is repeated
    logits = rows.log().expand(len(numbers), -1).contiguous()
    tokens = draw_(logits, numbers)
    ends = torch.stack([logits.amin(0, True), logits.amax(0, True)]) if len(rows) == 1 else logits[None]
    exact = rows.log().log_softmax(-1).expand_as(ends)
    torch.testing.assert_close(ends, exact, equal_nan=True)
    return tokens


@pytest.fixture(params=["torch", "C"])
def drawn_of(request: pytest.FixtureRequest) -> Drawing:
    """Draws tokens by probabilities and numbers."""
    return {"torch": draw, "C": drawn_in_c}[request.param]


@pytest.mark.parametrize("vocabulary", [1, 2, PART - 1, PART, PART + 1, 3 * PART, 5000])
def test_each_token_has_its_share_of_the_numbers(vocabulary: int, drawn_of: Drawing) -> None:
    every = min(20_001, 20_000_000 // vocabulary)
    numbers = (torch.arange(every, dtype=torch.float64) + 0.5) / every
    for row in distributions(vocabulary):
        drawn = drawn_of(row.expand(every, -1), numbers)
        share = torch.bincount(drawn, minlength=vocabulary) / every
        exact = row.double() / row.double().sum()
        assert float((share - exact).abs().max()) < 2 / every
        assert float(share[row == 0].sum()) == 0
        assert torch.equal(drawn, drawn.sort().values)  # tokens in the order of their numbers: none has two shares


@pytest.mark.parametrize("vocabulary", [1, 2, PART - 1, PART, PART + 1, 3 * PART, 5000])
@pytest.mark.parametrize("number", [0.0, 1e-300, JUST_BELOW_1])
def test_the_ends_of_the_range_draw_tokens_that_can_be(vocabulary: int, number: float, drawn_of: Drawing) -> None:
    rows = distributions(vocabulary)
    drawn = drawn_of(rows, torch.full((len(rows),), number, dtype=torch.float64))
    assert bool((rows.gather(-1, drawn[:, None]) > 0).all())


def test_a_number_beyond_what_a_parts_tokens_add_up_to_draws_the_last_that_can_be(drawn_of: Drawing) -> None:
    beyond = 0
    for seed in range(20):
        row = torch.zeros(1, 2 * PART)
        row[0, :200] = torch.rand(200, generator=torch.Generator().manual_seed(seed))
        beyond += bool(row[0, :PART].sum().double() > row.double().sum())  # rounded up
        assert int(drawn_of(row, torch.tensor([JUST_BELOW_1], dtype=torch.float64))) == 199
    assert beyond > 3


def test_rows_of_a_padded_vocabulary_are_drawn_in_c_and_their_padding_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(sampling_vllm, "draw")  # what torch would do
    logits, numbers = torch.randn(3, 320), torch.rand(3, dtype=torch.float64)
    padded, exact = logits.clone(), logits[:, :257].contiguous()
    assert draw_(padded[:, :257], numbers).tolist() == draw_(exact, numbers).tolist()
    assert torch.equal(padded[:, :257], exact) and torch.equal(padded[:, 257:], logits[:, 257:])


def test_a_rare_token_at_the_end_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    row = torch.full((1, 50_000), 1e-4)  # ten whole ones, beside which fp32 forgets what comes last
    row[0, -1] = 1e-7
    total = float(row.double().sum())
    for share, token in ((0.25, 49_999), (0.75, 49_999), (-0.5, 49_998)):
        wanted = (total - 1e-7 * (1 - share)) / total if share > 0 else (total - 1e-7 - 5e-5) / total
        assert int(draw(row, torch.tensor([wanted], dtype=torch.float64))) == token


def test_a_rare_token_at_the_end_of_a_large_vocabulary_is_drawn_in_c_as_often_as_it_should() -> None:
    rare = float(torch.tensor(-6.9).exp())
    total = 49_999 + rare
    for beyond, token in ((rare * 0.75, 49_999), (rare * 0.25, 49_999), (rare + 0.5, 49_998)):
        logits = torch.zeros(1, 50_000)
        logits[0, -1] = -6.9
        assert int(draw_(logits, torch.tensor([(total - beyond) / total], dtype=torch.float64))) == token


@pytest.mark.parametrize("vocabulary", [1, PART - 1, PART + 1, 1000])
def test_a_row_that_is_not_finite_draws_some_token_and_leaves_other_rows_alone(
    vocabulary: int, drawn_of: Drawing
) -> None:
    rows = torch.full((3, vocabulary), torch.nan)
    rows[1] = 1.0
    drawn = drawn_of(rows, torch.full((3,), JUST_BELOW_1, dtype=torch.float64))
    assert drawn[1] == vocabulary - 1 and bool((drawn >= 0).all()) and bool((drawn < vocabulary).all())


@pytest.mark.parametrize("without_compiler", [False, True])
def test_a_request_with_a_seed_draws_by_it_alone_and_log_probabilities_are_those_it_was_drawn_from(
    without_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = TopKTopPSampler("processed_logprobs")
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))

    def drawn(seeds: dict[int, int], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
        tokens, logprobs = sample(sampler, logits[rows].clone(), generators, None, None)
        assert logprobs is not None
        return tokens, logprobs

    if without_compiler:
        monkeypatch.setattr(sampling_vllm, "_library", lambda: None)
    many = [drawn({0: seed, 2: 7}, [0, 1, 2])[0] for seed in range(40)]
    assert len({int(one[0]) for one in many}) > 20
    assert len({int(one[1]) for one in many}) > 20  # it has no seed
    assert {int(one[2]) for one in many} == {int(drawn({0: 7}, [2])[0])}  # in whatever row it is
    torch.testing.assert_close(drawn({}, [0, 1, 2])[1], logits.log_softmax(-1))
    k = torch.tensor([1, 2, 1000])
    tokens, cut = sample(sampler, logits.clone(), {}, k, None)
    assert cut is not None and cut.isfinite().sum(-1).tolist() == [1, 2, 1000]
    assert bool(cut.gather(-1, tokens[:, None]).isfinite().all())
    for mode in ("processed_logits", "raw_logprobs"):
        _, returned = sample(TopKTopPSampler(mode), logits.clone(), {}, None, None)
        assert returned is None if mode == "raw_logprobs" else torch.equal(returned, logits)


def test_of_a_sampled_token_alone_no_rank_is_counted_and_of_others_vllm_tells_all() -> None:
    logprobs = torch.randn(3, 50).log_softmax(-1)
    tokens = torch.tensor([4, 49, 0])
    ours = gather_logprobs(logprobs, 0, tokens)
    with torch.compiler.set_stance("force_eager"):  # vLLM compiles the counting of ranks, for many seconds
        theirs = gather_logprobs(logprobs, 2, tokens)
    assert ours.logprob_token_ids.tolist() == [[4], [49], [0]] and ours.logprob_token_ids.dtype == torch.int32
    assert torch.equal(ours.logprobs, theirs.logprobs[:, :1])
    assert ours.selected_token_ranks.tolist() == [0, 0, 0]
    assert theirs.logprobs.shape == (3, 3) and bool((theirs.selected_token_ranks > 0).all())


def test_a_vllm_that_samples_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TopKTopPSampler.forward_cpu
    monkeypatch.delattr(Sampler, "gather_logprobs")
    with pytest.raises(RuntimeError, match=r"has no Sampler\.gather_logprobs"):
        sampling_vllm.install()
    assert TopKTopPSampler.forward_cpu is before
