"""One sample and one group as the page shows them: tokens, conversation, why it was not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from streamrl.config.algorithm import Algorithm, CriticConfig, GRPOConfig, PPOConfig
from streamrl.dashboard.sample_detail import (
    MOST_CHARACTERS,
    MOST_MEMBERS,
    MOST_TOKENS,
    group_view,
    read_rows_at,
    sample_view,
    token_columns,
    why_not_trained,
)
from streamrl.dashboard.sample_table import SampleTable
from tests.dashboard.samples import a_sample, write_samples

GRPO, WITH_ENTROPY = GRPOConfig(name="grpo"), GRPOConfig(name="grpo", entropy_coef=0.1)


def table_of(folder: Path, rows: list[dict[str, Any]], **options: Any) -> SampleTable:
    write_samples(folder, 1, rows, **options)
    table = SampleTable(folder)
    table.look()
    return table


def words(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def test_a_sample_has_a_log_probability_version_and_mask_for_each_token(tmp_path: Path) -> None:
    rows = [a_sample("a.0", completion_tokens=[7]), a_sample("a.1", mask=[True, False, True, True])]
    rows[1]["weight_versions"] = [4, -1, 5, 5]
    view = sample_view(table_of(tmp_path, rows), "a.1", words, False, GRPO)
    assert view is not None
    (tokens,) = view["rows"]
    assert tokens["ids"] == [10, 11, 12, 13]
    assert tokens["texts"] == ["<10>", "<11>", "<12>", "<13>"]
    assert tokens["logprobs"] == [-0.5, -0.25, -4.0, 0.0]
    assert tokens["versions"] == [4, None, 5, 5]
    assert tokens["sampled"] == [True, False, True, True]
    assert (view["advantage"], view["prompt"], view["completion"]) == (0.5, "What is 1 + 1?", "It is 2")
    assert tokens["prompt_tokens"] == 3


def test_without_a_tokenizer_ids_are_all_there_is(tmp_path: Path) -> None:
    view = sample_view(table_of(tmp_path, [a_sample("a.0", completion=None)]), "a.0", None, False, GRPO)
    assert view is not None and view["completion"] is None and view["rows"][0]["texts"] is None


PIECES = ["▁new", "ly", "▁é", "▁", "▁▁", "<s>"]
BYTES = ["Ġnew", "ly", "ĠÃ©", "Ġ", "ĠĠ", "<s>", "Ã", "©Ã"]
STRIPPING = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize(
    ("vocabulary", "decoder", "parts"),
    [
        ([*PIECES, "<0xC3>", "<0xA9>"], STRIPPING, ["\ufffd", "\ufffd"]),
        (PIECES, decoders.Metaspace(), []),
        (BYTES, decoders.ByteLevel(), ["\ufffd", "\ufffd\ufffd"]),
    ],
)
def test_tokens_keep_their_leading_spaces(vocabulary: list[str], decoder: Any, parts: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(vocabulary)}, "<s>"))
    tokenizer.decoder = decoder
    record = a_sample("a.0", completion_tokens=[*range(len(vocabulary)), 0])
    texts = token_columns(record, tokenizer.decode, None)["texts"]
    assert texts == [" new", "ly", " é", " ", "  ", "<s>", *parts, " new"]


def test_long_rows_are_cut_unless_all_is_asked_for() -> None:
    record = a_sample("a.0", completion_tokens=[1] * 9, logprobs=[-1.0] * 9, weight_versions=[3])
    cut = token_columns(record, None, 5)
    assert cut["total"] == 9 and len(cut["ids"]) == len(cut["logprobs"]) == 5
    assert cut["versions"] == [3] * 5, "an older file has one version for all tokens"
    assert len(token_columns(record, None, None)["ids"]) == 9


def test_long_texts_are_cut_where_they_say_so_unless_all_is_asked_for(tmp_path: Path) -> None:
    told = {"messages": [{"role": "user", "content": "m" * (MOST_CHARACTERS + 2)}], "steps": []}
    plain = a_sample("a.0", prompt="p" * (MOST_CHARACTERS + 1000), completion="c" * MOST_CHARACTERS)
    ids = a_sample("a.1", completion=None, completion_tokens=[7] * (MOST_TOKENS + 1))
    table = table_of(tmp_path, [plain, ids, a_sample("a.2", conversation=json.dumps(told)), a_sample("a.3")])

    def view(sample_id: str, everything: bool) -> dict[str, Any]:
        return sample_view(table, sample_id, words, everything, GRPO) or {}

    cut = view("a.0", False)
    assert cut["prompt"] == "p" * MOST_CHARACTERS + "\n[... 1,000 more characters]"
    assert (cut["completion"], cut["cut"]) == ("c" * MOST_CHARACTERS, True)
    assert view("a.1", False)["completion"] == "<7>" * MOST_TOKENS + "\n[... 1 more tokens]"
    assert view("a.2", False)["messages"][0]["content"].endswith("m\n[... 2 more characters]")
    assert not view("a.3", False)["cut"]
    whole = [view(name, True) for name in ("a.0", "a.1", "a.2")]
    assert whole[0]["prompt"] == plain["prompt"] and whole[1]["completion"] == "<7>" * (MOST_TOKENS + 1)
    assert whole[2]["messages"][0]["content"] == "m" * (MOST_CHARACTERS + 2)
    assert not any(one["cut"] for one in whole)
    group = group_view(table, "a", words, GRPO)
    assert group is not None and group["prompt"] == cut["prompt"]


def test_an_episode_has_its_conversation_and_all_its_rows_and_no_others(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    told = {
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "2"}]},
        ],
        "steps": [{"kind": "tool", "name": "add", "started": 1.0, "finished": 2.5, "detail": "", "tokens": 0}],
    }
    first = a_sample("a.1", conversation=json.dumps(told))
    rows = [a_sample("a.0"), first, a_sample("a.1#1", completion_tokens=[8]), a_sample("a.2")]
    table = table_of(tmp_path, rows, row_group_size=2)
    view = sample_view(table, "a.1", None, False, GRPO)
    assert view is not None
    assert [row["row_id"] for row in view["rows"]] == ["a.1", "a.1#1"]
    assert [(one["role"], one["calls"]) for one in view["messages"]] == [
        ("user", []),
        ("assistant", ['add({"a": 1})']),
        ("tool", []),
    ]
    assert '"text": "2"' in view["messages"][2]["content"]
    assert view["steps"][0]["name"] == "add"
    group = group_view(table, "a", None, GRPO)
    assert group is not None
    assert [one["text"] for one in group["members"]] == ["It is 2", 'add({"a": 1})', "It is 2"]


@pytest.mark.parametrize("told", ["no json", "[]", '{"messages": [{}], "steps": []}', '{"messages": 3}', "[" * 9999])
def test_a_conversation_that_cannot_be_read_is_said_and_the_tokens_stay(tmp_path: Path, told: str) -> None:
    view = sample_view(table_of(tmp_path, [a_sample("a.0", conversation=told)]), "a.0", None, False, GRPO)
    assert view is not None and view["messages"] is None and len(view["rows"][0]["ids"]) == 4
    assert view["notes"] == ["The conversation of this sample cannot be read."]


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    table = table_of(tmp_path, [a_sample("a.0")])
    assert sample_view(table, "../../etc/passwd", None, False, GRPO) is None
    assert group_view(table, "z", None, GRPO) is None


def test_rows_are_found_in_any_row_group(tmp_path: Path) -> None:
    rows = [a_sample(f"a.{number}") for number in range(150)]
    path = write_samples(tmp_path, 1, rows, row_group_size=40)
    for number in (0, 39, 40, 149):
        assert [row["sample_id"] for row in read_rows_at(path, number, f"a.{number}")] == [f"a.{number}"]


@pytest.mark.parametrize(
    ("outcome", "rewards", "advantage", "expected"),
    [
        ("trained", [1.0, 0.0], 0.0, ""),
        ("trained", [1.0, 1.0], 0.0, "gradient is zero"),
        ("trained", [1.0], 0.0, ""),
        ("masked", [1.0, 0.0], 0.0, "cut by the token limit"),
        ("void", [1.0], None, "void (timeout): no answer"),
        ("dropped", [1.0], None, "too few samples"),
        ("dropped", [1.0], 1.0, "not finite"),
        ("dropped", [0.0, 0.0, 0.0], None, "all rewards of its group are equal"),
        ("dropped", [0.0, 0.0, 0.0], 0.0, "not finite"),
        ("dropped", [0.0, 1.0], 0.5, "not finite"),
        ("dropped", [0.0, 1.0], None, "not finite"),
    ],
)
def test_it_is_said_why_a_sample_was_not_trained(
    outcome: str, rewards: list[float], advantage: float | None, expected: str
) -> None:
    sample = {"outcome": outcome, "void_cause": "timeout", "reward_error": "no answer"}
    why = why_not_trained(sample, [(reward, advantage) for reward in rewards], GRPO)
    assert (why == "") if not expected else (expected in why)


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0], [0.0, 1.0]])
def test_a_group_that_a_critics_run_dropped_was_not_finite(rewards: list[float]) -> None:
    """It has no advantages there, and none is replaced that has a reward."""
    ppo = PPOConfig(name="ppo", critic=CriticConfig())
    assert "was not finite" in why_not_trained({"outcome": "dropped"}, [(one, None) for one in rewards], ppo)


def test_equal_rewards_mean_no_gradient_only_where_the_run_has_none_for_them(tmp_path: Path) -> None:
    flat = [a_sample(f"a.{number}", advantage=0.0) for number in range(2)]
    void = a_sample("a.2", reward=None, advantage=None, void_cause="timeout", t_trained=None)
    penalised = [a_sample("b.0", advantage=0.5), a_sample("b.1", advantage=-0.5)]
    older = [a_sample(f"c.{number}", advantage=None) for number in range(2)]
    table = table_of(tmp_path, [*flat, void, *penalised, *older])

    def whys(algorithm: Algorithm) -> list[str]:
        views = [sample_view(table, name, None, False, algorithm) for name in ("a.0", "b.0", "c.0")]
        return [view["why"] for view in views if view]

    equal = "trained; all rewards of its group are equal"
    assert whys(WITH_ENTROPY) == [equal] * 3
    assert whys(GRPO) == ["trained, but all rewards of its group are equal: its gradient is zero", equal, equal]
    group = group_view(table, "a", None, GRPO)
    assert group is not None and "gradient is zero" in group["members"][0]["why"]


def test_groups_of_the_same_prompt_and_of_the_same_step_are_offered_beside_a_group(tmp_path: Path) -> None:
    write_samples(
        tmp_path, 1, [a_sample("a.0", prompt_id="p"), a_sample("b.0", reward=0.0), a_sample("b.1", reward=None)]
    )
    write_samples(tmp_path, 2, [a_sample("c.0", step=2, prompt_id="p", reward=0.25), a_sample("d.0", step=2)])
    table = SampleTable(tmp_path)
    table.look()
    view = group_view(table, "a", None, GRPO)
    assert view is not None and view["step"] == 1
    assert view["others"] == {
        "prompt": [{"group_id": "c", "step": 2, "reward": 0.25}],
        "step": [{"group_id": "b", "step": 1, "reward": 0.0}],
    }


def test_a_group_says_how_many_samples_it_has_beside_those_that_are_shown(tmp_path: Path) -> None:
    sizes = {"a": MOST_MEMBERS + 6, "b": 3}
    table = table_of(tmp_path, [a_sample(f"{name}.{n:03}") for name, size in sizes.items() for n in range(size)])
    views = [group_view(table, name, None, GRPO) for name in sizes]
    counts = [(view["samples"], len(view["members"])) for view in views if view]
    assert counts == [(MOST_MEMBERS + 6, MOST_MEMBERS), (3, 3)]
