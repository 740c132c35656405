"""What makes an agent's episode unusable, whoever sends it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import msgpack
import msgspec
import numpy as np
import pytest

from streamrl.controller.arrivals import UNREADABLE, read_sample
from streamrl.controller.site_limits import LONGEST_S, SampleLimits, SiteOwn, past_part
from streamrl.protocol.samples import sample_to_wire
from streamrl.rollouts.plain_text import MOST_TEXT_BYTES
from streamrl.rollouts.trajectory import MOST_STEPS, MOST_TOLD, EpisodeStep
from streamrl.rollouts.types import Sample
from tests.rollouts.test_row_parts import FORK, TWO_TURNS, episode

OWN = SiteOwn("here", {"regular": 2}, SampleLimits(most_tokens=2, most_context=7, vocabulary=50))
SAMPLE = replace(episode("g.0", [TWO_TURNS, FORK]), group_id="g")


def telling(**changes: object) -> Sample:
    assert SAMPLE.trajectory is not None
    return replace(SAMPLE, trajectory=msgspec.structs.replace(SAMPLE.trajectory, **changes))


def test_an_episode_may_be_as_long_as_the_context_in_each_of_its_rows() -> None:
    assert OWN.wrong_with_sample(SAMPLE, newest=3) is None
    short = replace(OWN, limits=replace(OWN.limits, most_context=6))
    assert "has 7 tokens, at most 6" in str(short.wrong_with_sample(SAMPLE, newest=3))


def test_only_sampled_tokens_need_a_version_that_exists() -> None:
    assert "versions outside 0..2" in str(OWN.wrong_with_sample(SAMPLE, newest=2))
    other = np.where(SAMPLE.token_versions == -1, -1, -2).astype(np.int32)
    assert "versions outside" in str(OWN.wrong_with_sample(replace(SAMPLE, token_versions=other), newest=3))


def test_no_more_tokens_are_accepted_than_were_drafted() -> None:
    assert OWN.wrong_with_sample(replace(SAMPLE, drafted_tokens=4, accepted_tokens=4), newest=3) is None
    for drafted, accepted in ((4, 5), (-1, -1), (4, -1), (2**31, 0)):
        wrong = OWN.wrong_with_sample(replace(SAMPLE, drafted_tokens=drafted, accepted_tokens=accepted), newest=3)
        assert f"{accepted} of {drafted} drafted tokens" in str(wrong)


def test_a_text_is_as_long_as_its_tokens_and_a_message_can_be() -> None:
    assert OWN.wrong_with_sample(replace(SAMPLE, text="-" * 1536), newest=3) is None
    assert "has 1537 characters" in str(OWN.wrong_with_sample(replace(SAMPLE, text="-" * 1537), newest=3))
    long = replace(OWN, limits=replace(OWN.limits, most_tokens=32_768))  # some vocabularies have a token of 76 dashes
    for text in ("-" * 76 * 32_768, "-" * MOST_TEXT_BYTES, "\u00e9" * (MOST_TEXT_BYTES // 2)):
        assert long.wrong_with_sample(replace(SAMPLE, text=text), newest=3) is None
        longer = text + "-" * (MOST_TEXT_BYTES - len(text.encode()) + 1)
        assert "8000001 bytes, for" in str(long.wrong_with_sample(replace(SAMPLE, text=longer), newest=3))


def test_an_episode_without_a_turn_names_no_instance_and_any_other_does() -> None:
    assert SAMPLE.trajectory is not None
    nobody = replace(SAMPLE, instance="", pool="")
    empty = replace(
        nobody,
        completion_tokens=SAMPLE.completion_tokens[:0],
        logprobs=SAMPLE.logprobs[:0],
        token_versions=SAMPLE.token_versions[:0],
        trajectory=msgspec.structs.replace(SAMPLE.trajectory, rows=[]),
    )
    assert OWN.wrong_with_sample(empty, newest=3) is None
    assert "names ''" in str(OWN.wrong_with_sample(nobody, newest=3))


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"steps": [EpisodeStep("tool", "add", 1.0, 2.0)] * (MOST_STEPS + 1)}, "tells 1001 steps"),
        ({"messages": [{"role": "user", "content": "x" * MOST_TOLD}]}, "bytes"),
        ({"metrics": {str(n): 1.0 for n in range(101)}}, "has 101 numbers beside its reward"),
        ({"metrics": {"x" * 101: 1.0}}, "the longest name with 101 characters"),
        ({"steps": [EpisodeStep("tool", "add", 1.0, float("inf"))]}, "a time that is none"),
        ({"steps": [EpisodeStep("tool", "add", float("nan"), 2.0)]}, "a time that is none"),
    ],
)
def test_an_episode_that_tells_too_much_or_nonsense_is_refused(told: dict[str, object], why: str) -> None:
    assert why in str(OWN.wrong_with_sample(telling(**told), newest=3))


@pytest.mark.parametrize(
    "value",
    [b"x", {b"x": 1}, msgpack.Timestamp(1, 2), msgpack.ExtType(5, b"x"), functools.reduce(lambda v, _: [v], range(16))],
    ids=["bytes", "key", "time", "extension", "nesting"],
)
def test_an_episode_whose_conversation_json_cannot_hold_cannot_be_read(value: object) -> None:
    body, arrays = sample_to_wire(SAMPLE)
    told = msgspec.to_builtins(body["trajectory"])
    for content in ("x", value):
        body["trajectory"] = told | {"messages": [{"role": "user", "content": content}]}
        with contextlib.nullcontext() if content == "x" else pytest.raises(UNREADABLE, match="JSON cannot hold"):
            read_sample(body, arrays)


@pytest.mark.parametrize(("text", "length"), [("void_text", 1001), ("void_traceback", 2001)])
def test_an_episode_cannot_say_more_of_why_it_is_void_than_is_ever_sent(text: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} characters, at most {length - 1} are sent"):
        telling(**{text: "x" * length})


def test_an_episode_may_have_all_the_numbers_and_words_that_there_is_room_for() -> None:
    full = telling(
        metrics={f"{n:0100}": 1.0 for n in range(100)},
        void_text="x" * 1000,
        void_traceback="x" * 2000,
    )
    assert OWN.wrong_with_sample(full, newest=3) is None


@pytest.mark.parametrize(
    ("span", "part"),
    [
        ((90.0, 95.0), (90.0, 95.0)),
        ((90.0, 1e5), (90.0, 100.0)),
        ((101.0, 102.0), None),
        ((95.0, 90.0), None),
        ((90.0 - 2 * LONGEST_S, 95.0), None),
    ],
)
def test_only_what_has_passed_of_a_span_counts(span: tuple[float, float], part: tuple[float, float] | None) -> None:
    assert past_part(*span, now=100.0) == part
