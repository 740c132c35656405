"""Sessions: what a call extends, what a retry gets, and which limits end an episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.agents.episode import EpisodeOrder, GeneratedTurn
from streamrl.agents.rendering import ChatRenderer
from streamrl.agents.session import Session, SessionLimits, TooManyRun
from streamrl.agents.turns import Call, CallError, Turn
from tests.agents.random_sessions import TOOL, body_of, small_tokenizer

USER = {"role": "user", "content": "What is 7 + 5?"}
MORE = {"role": "user", "content": "And 8 + 5?"}
ORDER = EpisodeOrder("s.000", "s", "t", {}, 7, 0.5)
RENDERER = ChatRenderer(small_tokenizer())


def session(**limits: int) -> Session:
    return Session(ORDER, RENDERER, SessionLimits(**{"max_context": 500, "max_turns": 20, **limits}))


def call(*messages: dict[str, Any], tools: Any = (), **more: Any) -> Call:
    return Call(list(messages), list(tools), body_of(list(messages), list(tools)), **more)


def answered(of: Session, asked: Call, text: str = "12", reason: Any = "stop") -> Turn:
    turn, new = of.call(asked, 1.0)
    assert new
    ids = RENDERER._ids(text) + RENDERER._ids("<|im_end|>")
    size = len(ids)
    generated = GeneratedTurn(
        np.asarray(ids, np.int32), np.full(size, -1.0, np.float32), np.full(size, 3, np.int32), reason, text
    )
    of.finish(turn, generated, 2.0)
    turn.deliver(2.0)
    return turn


def lose(turn: Turn) -> Turn:
    """Let no client have got the answer of a turn."""
    turn.delivered, turn.known = False, None
    return turn


def test_a_conversation_that_goes_on_is_one_row() -> None:
    here = session()
    first = answered(here, call(USER))
    second = answered(here, call(USER, first.answer, MORE), "13")
    assert second.parent is first
    assert second.order.prompt_tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
    (row,) = here.rows()
    assert row.prompt_length == len(first.order.prompt_tokens)
    assert row.sampled.sum() == len(first.tokens) + len(second.tokens) - len(first.order.prompt_tokens) - len(
        second.order.prompt_tokens
    )
    assert here.conversation() == [USER, first.answer, MORE, second.answer]
    assert (second.order.temperature, second.order.group_id) == (0.5, "s")
    assert len({first.order.seed, second.order.seed, 7}) == 3


def test_a_token_that_the_model_lacks_is_refused() -> None:
    largest = int(session().call(call(USER), 1.0)[0].order.prompt_tokens.max())
    assert session(rows=largest + 1).call(call(USER), 1.0)[1]
    for asked in (call(USER), Call([], [], b"", prompt_tokens=np.asarray([1, largest], np.int32))):
        with pytest.raises(CallError, match=f"has token {largest}, but the model knows {largest} tokens") as caught:
            session(rows=largest).call(asked, 1.0)
        assert caught.value.code == "unknown_token"


def test_messages_of_which_the_template_makes_no_token_are_refused() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    limits = SessionLimits(max_context=500, max_turns=20)
    assert Session(ORDER, ChatRenderer(tokenizer), limits).call(call(USER), 1.0)[1]
    with pytest.raises(CallError, match="the chat template makes no token of the messages") as caught:
        Session(ORDER, ChatRenderer(tokenizer), limits).call(call({"role": "system", "content": "Be brief."}), 1.0)
    assert caught.value.code == "invalid_messages"


def test_turn_ids_are_never_those_of_another_attempt() -> None:
    one, other = (answered(session(), call(USER)).order.turn_id for _ in range(2))
    assert one.startswith("s.000/") and one.endswith(".0") and one != other


def test_a_fork_shares_its_beginning_without_training_it_twice() -> None:
    here = session()
    first = answered(here, call(USER))
    answered(here, call(USER, first.answer, MORE))
    fork = answered(here, call(USER, first.answer, {"role": "user", "content": "Why?"}))
    one, other = here.rows()
    shared = len(first.tokens)
    assert one.tokens[:shared].tolist() == other.tokens[:shared].tolist()
    assert other.prompt_length == len(fork.order.prompt_tokens) and not other.sampled[:shared].any()


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda answer: {**answer, "refusal": None, "audio": None, "name": "model"},
        lambda answer: {"tool_calls": [{**c, "index": 0, "function": spaced(c)} for c in answer["tool_calls"]], **{
            k: v for k, v in answer.items() if k != "tool_calls"}},
    ],
)  # fmt: skip
def test_what_client_libraries_change_in_an_answer_does_not_break_the_row(rewrite: Callable[[Any], Any]) -> None:
    here = session()
    text = '<tool_call>{"name": "calculate", "arguments": {"x": 1, "y": [2]}}</tool_call>'
    first = answered(here, call(USER, tools=[TOOL]), text)
    assert first.answer["tool_calls"][0]["function"] == {"name": "calculate", "arguments": '{"x": 1, "y": [2]}'}
    result = {"role": "tool", "content": "12", "tool_call_id": first.answer["tool_calls"][0]["id"]}
    assert answered(here, call(USER, rewrite(first.answer), result, tools=[TOOL])).parent is first


THOUGHT = "<think>\nSeven and five.\n</think>\n\n"
CALL_OF_IT = '<tool_call>{"name": "calculate", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize("parts", [("\nSeven and five.\n", "\n\n"), ("Seven and five.", "")], ids=["litellm", "vllm"])
@pytest.mark.parametrize("told", ["It is 12.", CALL_OF_IT])
def test_an_answer_whose_reasoning_a_library_has_split_off_is_the_one_that_was_sampled(
    parts: tuple[str, str], told: str
) -> None:
    here = session()
    first = answered(here, call(USER, tools=[TOOL]), THOUGHT + told)
    reasoning, gap = parts
    rest = "" if "tool_calls" in first.answer else gap + told
    split = {**first.answer, "content": rest, "reasoning_content": reasoning}
    second = answered(here, call(USER, split, MORE, tools=[TOOL]), THOUGHT + "13")
    again = {**second.answer, "content": gap + "13", "reasoning_content": reasoning}
    third = answered(here, call(USER, split, MORE, again, USER, tools=[TOOL]))
    assert (second.parent, third.parent) == (first, second) and len(here.rows()) == 1
    assert here.conversation()[1] == first.answer
    other = {**split, "reasoning_content": "Eight and four."}
    assert answered(here, call(USER, other, MORE, tools=[TOOL])).parent is None


def test_an_answer_whose_reasoning_a_library_has_joined_with_other_line_breaks_is_the_one_that_was_sampled() -> None:
    here = session()
    first = answered(here, call(USER), THOUGHT + "It is 12.")
    joined = {**first.answer, "content": "<think>\n\nSeven and five.\n\n</think>\n\n\n\nIt is 12."}
    assert answered(here, call(USER, joined, MORE)).parent is first
    assert here.conversation()[1] == first.answer
    other = {**joined, "content": joined["content"].replace("12", "13")}
    assert answered(here, call(USER, other, MORE)).parent is None


SPELLINGS = ("<think>\na\n</think>\n\nyes", "<think>a</think>yes", "<think>a</think>\nyes", "a</think>yes")


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("sent", range(len(SPELLINGS)))
def test_an_answer_that_comes_back_as_it_was_sampled_is_no_other_one(sent: int, reason: str) -> None:
    here = session()
    turns = [answered(here, call(USER), text, reason) for text in SPELLINGS]
    lose(turns[sent])  # it comes back, so somebody knows it
    later = answered(here, call(USER, turns[sent].answer, MORE))
    assert later.call.messages[1] == turns[sent].answer
    assert later.parent is (turns[sent] if reason == "stop" else None)


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_an_answer_whose_reasoning_was_split_off_is_the_one_with_its_line_breaks(sent: int) -> None:
    here = session()
    turns = [answered(here, call(USER), text) for text in SPELLINGS]
    reasoning, rest = SPELLINGS[sent].removeprefix("<think>").split("</think>")
    split = {"role": "assistant", "content": rest, "reasoning_content": reasoning}
    assert answered(here, call(USER, split, MORE)).parent is turns[sent]


def test_an_answer_with_line_breaks_of_no_sample_is_the_first_that_a_client_got() -> None:
    here = session()
    turns = [answered(here, call(USER), text) for text in SPELLINGS]
    lose(turns[0])
    changed = {"role": "assistant", "content": "<think>\n\na</think>\n\n\nyes"}
    assert answered(here, call(USER, changed, MORE)).parent is turns[1]


def test_the_reasoning_of_an_answer_ends_with_its_last_mark() -> None:
    here = session()
    first = answered(here, call(USER), "<think>\nIt ends with </think>.\n\n</think>\n\nIt is 12.")
    split = {"role": "assistant", "content": "It is 12.", "reasoning_content": "It ends with </think>."}
    assert answered(here, call(USER, split, MORE)).parent is first


def test_answers_that_differ_in_their_calls_alone_are_told_apart() -> None:
    here = session()
    first = answered(here, call(USER, tools=[TOOL]), THOUGHT + CALL_OF_IT)
    split = {**first.answer, "content": "", "reasoning_content": "Seven and five."}
    (called,) = split["tool_calls"]
    called = {**called, "function": {**called["function"], "arguments": '{"x": 2}'}}
    result = {"role": "tool", "content": "12", "tool_call_id": called["id"]}
    assert answered(here, call(USER, {**split, "tool_calls": [called]}, result, tools=[TOOL])).parent is None
    assert answered(here, call(USER, split, result, tools=[TOOL])).parent is first


def spaced(tool_call: dict[str, Any]) -> dict[str, Any]:
    return {"name": "calculate", "arguments": '{"y":[2],"x":1}'}


@pytest.mark.parametrize(("opens", "special"), [(True, False), (False, False), (True, True)])
def test_a_draft_in_reasoning_that_the_prompt_begins_is_no_call(opens: bool, special: bool) -> None:
    tokenizer = small_tokenizer()
    if opens:
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n'", "assistant\n<think>\n'")
    if special:  # then no text of an answer says where it ends
        tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    here = Session(ORDER, ChatRenderer(tokenizer), SessionLimits(max_context=500, max_turns=20))
    text = 'Maybe\n<tool_call>{"name": "calculate", "arguments": {"x": 1}}</tool_call>'
    turn = answered(here, call(USER, tools=[TOOL]), text)
    assert bool(turn.answer.get("tool_calls")) == (not opens or special)
    assert turn.parsed is not None and bool(turn.parsed.malformed) == (opens and not special)
    later = answered(here, call(USER, MORE, tools=[TOOL]), f"{text}\n</think>\n\nIt is 12.")
    assert "tool_calls" not in later.answer or special or not opens


def test_edited_history_other_tools_and_cut_answers_begin_a_row() -> None:
    here = session()
    first = answered(here, call(USER))
    edited = answered(here, call(USER, {"role": "assistant", "content": "13"}, MORE))
    tools = answered(here, call(USER, first.answer, MORE, tools=[TOOL]))
    assert (edited.parent, tools.parent) == (None, None)
    cut = answered(here, call(MORE), reason="length")
    assert answered(here, call(MORE, cut.answer, USER)).parent is None
    assert here.cut and len(here.rows()) == 5


def test_the_same_call_again_is_a_new_sample_unless_it_is_a_retry() -> None:
    here = session()
    first = answered(here, call(USER))
    assert answered(here, call(USER)) is not first
    assert here.call(call(USER, attempt=1), 1.0) == (here.turns[-1], False)
    running, _ = here.call(call(MORE, idempotency_key="k"), 1.0)
    assert here.call(call(MORE, idempotency_key="k"), 1.0) == (running, False)
    with pytest.raises(CallError, match="Idempotency-Key"):
        here.call(call(USER, idempotency_key="k"), 1.0)


def test_an_answer_that_nobody_got_is_given_to_the_same_call_again() -> None:
    here = session()
    lost = answered(here, call(USER))
    lose(lost)
    assert here.call(call(USER), 1.0) == (lost, False)
    lost.clients = 1  # somebody waits for it: the second call wants a sample of its own
    assert here.call(call(USER), 1.0)[1]


def test_a_call_that_joined_a_turn_by_its_body_is_known_by_its_own_key_from_then_on() -> None:
    here = session()
    lost, _ = here.call(call(USER, idempotency_key="k1"), 1.0)  # whose client goes away
    assert here.call(call(USER, idempotency_key="k2"), 1.0) == (lost, False)
    lost.deliver(2.0)  # and lost on its way
    assert here.call(call(USER, idempotency_key="k2"), 1.0) == (lost, False)
    with pytest.raises(CallError, match="Idempotency-Key"):
        here.call(call(MORE, idempotency_key="k2"), 1.0)


def test_a_turn_is_known_by_every_key_of_the_calls_that_asked_for_it() -> None:
    here = session()
    turn, _ = here.call(call(USER, idempotency_key="a"), 1.0)
    assert here.call(call(USER, idempotency_key="b"), 1.0) == (turn, False)  # nobody has got its answer
    turn.clients = 1
    for key in ("a", "b"):
        assert here.call(call(USER, idempotency_key=key), 1.0) == (turn, False)
    assert here.call(call(USER, idempotency_key="c"), 1.0)[1]


def test_the_retry_of_a_call_whose_turn_failed_is_a_new_sample() -> None:
    here = session()

    def waited_for(attempt: int = 0) -> Turn:
        turn, new = here.call(call(USER, attempt=attempt), 1.0)
        assert new
        turn.clients = 1
        return turn

    first = [waited_for() for _ in range(3)]
    for turn in first[:2]:
        here.fail(turn)
    again = [waited_for(attempt=1) for _ in range(2)]
    here.fail(again[0])
    last = [waited_for(attempt=2)]
    here.fail(again[1])
    last.append(waited_for(attempt=2))
    here.fail(first[2])
    last.append(waited_for(attempt=1))
    assert here.turns == last
    here.forgo(call(USER))  # its client went away while it waited
    waited_for(attempt=1)


@pytest.mark.parametrize("gave_up_after", [0, 2])
def test_a_client_that_gave_up_takes_nothing_from_the_retries_of_later_equal_calls(gave_up_after: int) -> None:
    here = session()
    for attempt in range(gave_up_after + 1):
        failed, new = here.call(call(USER, attempt=attempt), 1.0)
        assert new
        here.fail(failed)
    own = answered(here, call(USER))
    here.fail(here.call(call(USER), 1.0)[0])  # an equal call, which tries again below
    assert here.call(call(USER, attempt=1), 1.0)[1]
    if gave_up_after:  # the last of three attempts has no retry; the first of one might have
        here.turns[-1].clients = 1
        assert here.call(call(USER, attempt=1), 1.0) == (own, False)


def test_a_retry_whose_call_never_came_is_no_retry_of_another_one() -> None:
    here = session()
    own = answered(here, call(USER))
    assert here.call(call(USER, attempt=1), 1.0) == (own, False)
    assert answered(here, call(USER, attempt=1)) is not own
    assert answered(here, call(USER, idempotency_key="k", attempt=1)) is not own
    assert here.call(call(USER, attempt=2), 1.0)[0] in (own, here.turns[1])


def test_a_call_that_fails_leaves_one_retry_however_many_of_its_attempts_waited() -> None:
    here = session()
    turn, _ = here.call(call(USER), 1.0)
    turn.clients = 1  # whose end has not been noticed when the next attempt comes
    assert here.call(call(USER, attempt=1), 1.0) == (turn, False)
    turn.clients = 2
    other = answered(here, call(USER))
    here.fail(turn)
    assert here.call(call(USER, attempt=1), 1.0) == (other, False)
    assert here.call(call(USER, attempt=2), 1.0)[1]


def test_a_retry_gets_the_answer_that_nobody_got_before_one_that_somebody_got() -> None:
    here = session()
    lost, got = answered(here, call(USER)), answered(here, call(USER))
    lose(lost)
    assert here.call(call(USER, attempt=1), 1.0) == (lost, False)
    lost.deliver(2.0)
    assert here.call(call(USER, attempt=1), 1.0) == (got, False)


def test_a_turn_that_failed_leaves_nothing_and_no_id_is_used_twice() -> None:
    here = session()
    turn, _ = here.call(call(USER), 1.0)
    here.fail(turn)
    assert here.rows() == [] and here.conversation() == []
    ids = {turn.order.turn_id}
    for attempt in range(1, 5):
        kept, new = here.call(call(MORE), 1.0)
        failed, _ = here.call(call(USER, attempt=attempt), 1.0)
        kept.deliver(2.0)
        here.fail(failed)
        assert new
        ids |= {kept.order.turn_id, failed.order.turn_id}
    assert len(ids) == 9


@pytest.mark.parametrize("phrase", ["prompt is too long", "this model's maximum context length is 40 tokens"])
def test_a_full_context_is_told_in_words_by_which_libraries_know_it(phrase: str) -> None:
    here = session(max_context=40)
    long = call({"role": "user", "content": "x " * 50})
    with pytest.raises(CallError, match=phrase):
        here.call(long, 1.0)
    assert phrase in str(here.too_large(long, 1000, 1.0)) and phrase in str(here.too_large(None, 1000, 1.0))


def test_a_prompt_needs_room_for_one_token() -> None:
    length = len(answered(session(), call(USER)).order.prompt_tokens)
    answered(session(max_context=length + 1), call(USER))
    with pytest.raises(CallError, match=f"too long: {length} tokens > {length - 1} maximum.* no room"):
        session(max_context=length).call(call(USER), 1.0)


@pytest.mark.parametrize(
    ("limits", "before", "code"),
    [
        ({"max_context": 20}, 0, "context_length_exceeded"),
        ({"max_turns": 2}, 2, "max_turns_exceeded"),
    ],
)
def test_a_limit_refuses_the_call_and_says_which_one(limits: dict[str, int], before: int, code: str) -> None:
    here = session(**limits)
    for _ in range(before):
        answered(here, call(USER))
    with pytest.raises(CallError) as refused:
        here.call(call(USER), 1.0)
    assert refused.value.code == code
    assert here.cut == (code == "context_length_exceeded") and len(here.turns) == before


def test_a_call_has_to_wait_while_too_many_run() -> None:
    here = session(max_in_flight=1)
    running, _ = here.call(call(USER), 1.0)
    running.clients = 1
    with pytest.raises(TooManyRun):
        here.call(call(USER), 1.0)
    here.fail(running)
    assert here.call(call(USER), 1.0)[1]
    here.turns[-1].clients = 1
    for _ in range(2):  # it stays the retry of a call without a turn while it waits
        with pytest.raises(TooManyRun):
            here.call(call(USER, attempt=1), 1.0)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_call_whose_client_went_away_several_times_counts_once(gone: int) -> None:
    here = session(max_in_flight=1)
    answered(here, call(USER))  # of an equal call
    running, _ = here.call(call(MORE), 1.0)
    for attempt in range(gone):
        with pytest.raises(TooManyRun):
            here.call(call(USER, attempt=attempt), 1.0)
        here.forgo(call(USER, attempt=attempt))
    here.fail(running)
    own = answered(here, call(USER, attempt=gone))  # not the equal call's
    assert here.call(call(USER, attempt=gone + 1), 1.0) == (own, False)  # its answer was lost on its way


def test_calls_whose_clients_went_away_and_those_whose_turn_failed_count_each() -> None:
    here = session(max_in_flight=1)
    running, _ = here.call(call(USER), 1.0)
    running.clients = 1
    for attempt in (0, 1):
        for _ in range(2):
            with pytest.raises(TooManyRun):
                here.call(call(USER, attempt=attempt), 1.0)
            here.forgo(call(USER, attempt=attempt))
        if not attempt:
            here.fail(running)
            running, _ = here.call(call(MORE), 1.0)
    here.fail(running)
    own = [answered(here, call(USER, attempt=attempt)) for attempt in (2, 2, 1)]
    assert here.call(call(USER, attempt=3), 1.0) == (own[1], False)
    assert here.call(call(USER, attempt=2), 1.0) == (own[2], False)


def test_tokens_that_begin_with_a_turn_extend_it() -> None:
    here = session()
    first = answered(here, call(USER))
    tokens = np.concatenate([first.tokens, [5, 6]]).astype(np.int32)
    asked = replace(call(), prompt_tokens=tokens)
    second = answered(here, asked)
    assert second.parent is first and second.order.prompt_tokens.tolist() == tokens.tolist()
    assert answered(here, replace(asked, prompt_tokens=tokens[1:], body=b"other")).parent is None
    assert len(here.rows()) == 2
