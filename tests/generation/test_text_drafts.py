"""Drafts from known text: what is found, who votes, what is forgotten."""

from __future__ import annotations

import numpy as np

from streamrl.generation.drafts.acceptance import PRIOR, RunningAcceptance
from streamrl.generation.drafts.text_drafts import LEAD, Draft, KnownCompletions, draft, text_of

PROMPT = "the prompt of a group: "


def known(*completions: tuple[str, int]) -> KnownCompletions:
    """Completions of `PROMPT` with their versions, oldest first."""
    made = KnownCompletions(per_prompt=8, most_tokens=10_000)
    for completion, version in completions:
        made.add(PROMPT, completion, version)
    return made


def drafted(store: KnownCompletions, text: str, most: int = 4, version: int = 5) -> Draft | None:
    return draft(PROMPT + text, store.of(PROMPT), most, version)


def test_tokens_of_any_number_become_one_code_point_each() -> None:
    tokens = np.asarray([0, 65, 0xD800, 151_935, 1_000_000], dtype=np.int32)
    assert [ord(point) for point in text_of(tokens)] == tokens.tolist()


def test_a_completion_is_continued_as_its_sibling_was() -> None:
    assert drafted(known(("alpha beta gamma", 5)), "alpha be") == Draft("ta g", (1.0,) * 4, "sibling", 16)


def test_the_first_token_is_found_by_the_end_of_the_prompt() -> None:
    found = drafted(known(("alpha", 5)), "")
    assert found is not None
    assert (found.tokens, found.matched) == ("alph", LEAD)


def test_the_longest_match_decides() -> None:
    found = drafted(known(("xab1", 5), ("zzzzzcab2", 5)), "zzzzzcab", most=1)
    assert found is not None
    assert found.tokens == "2"


def test_places_vote_and_the_share_is_that_of_the_votes() -> None:
    found = drafted(known(("abcX.", 5), ("abcY.", 5), ("abcY!", 5)), "abc", most=2)
    assert found is not None
    assert found.tokens[0] == "Y"
    assert found.shares == (2 / 3, 1 / 2)


def test_of_equal_votes_the_newest_wins_and_its_age_is_told() -> None:
    found = drafted(known(("abcX", 2), ("abcY", 3)), "abc", most=1)
    assert found is not None
    assert (found.tokens, found.source, found.age) == ("Y", "earlier", 2)


def test_a_draft_ends_where_the_completion_ended() -> None:
    found = drafted(known(("abcde", 5), ("other", 5)), "abc", most=8)
    assert found is not None
    assert found.tokens == "de"
    assert drafted(known(("abcde", 5)), "abcde") is None


def test_the_requests_own_text_is_searched_where_nothing_else_is_known() -> None:
    assert draft("one two one", None, 4, 0) == Draft(" two", (1.0,) * 4, "own", 3)
    assert draft("abxab", None, 4, 0) is None  # two tokens recur by chance


def test_a_row_is_known_by_the_longest_prompt_that_it_begins_with() -> None:
    store = KnownCompletions(2, 1000)
    store.add("ab", "x", 0)
    store.expect("abc", 9.0)
    assert store.prompt_of("abcd") == "abc"
    assert store.prompt_of("abd") == "ab"
    assert store.prompt_of("b") is None
    assert store.prompt_of("abc") == "ab"  # nothing follows the longer one yet
    assert store.expected("abc") == 9.0
    assert store.expected("ab") is None
    assert store.of("abc") is None


def test_the_oldest_completion_of_a_prompt_is_forgotten_first() -> None:
    store = KnownCompletions(2, 1000)
    for number in range(3):
        store.add("p", f"text {number}", number)
    kept = store.of("p")
    assert kept is not None
    assert kept.versions == (2, 1)
    assert store.tokens == 1 + 2 * 6


def test_the_prompt_that_was_not_used_for_longest_is_forgotten_first() -> None:
    store = KnownCompletions(2, 30)
    store.add("old", "0123456789", 0)
    store.add("mid", "0123456789", 0)
    store.add("old", "0", 0)
    store.add("new", "0123456789", 0)
    assert store.of("mid") is None
    assert store.prompt_of("mid!") is None
    assert store.of("old") is not None
    assert store.tokens == 3 + 11 + 3 + 10


def test_the_rate_of_acceptance_moves_from_its_prior_to_what_was_seen() -> None:
    seen, one = RunningAcceptance(), Draft("abcd", (1.0,) * 4, "own", 3)
    assert seen.chances(one) == [PRIOR] * 4
    for _ in range(100):
        seen.saw(one, verified=4, accepted=0)
    assert seen.chances(one)[0] < 0.06
    assert seen.chances(one)[1] == PRIOR  # longer matches were never judged: the token before was rejected
    assert (seen.by_age["own"].drafted, seen.by_age["own"].accepted) == (400, 0)


def test_tokens_after_a_rejected_one_are_not_judged() -> None:
    seen, one = RunningAcceptance(), Draft("abcdefgh", (0.5,) * 8, "earlier", 16, age=2)
    seen.saw(one, verified=6, accepted=2)
    # three judged with half a vote each, two accepted; the prior counts as 8
    assert seen.rate("earlier", 20) == (2 + PRIOR * 8) / (1.5 + 8)
    assert (seen.by_age["earlier 2"].drafted, seen.by_age["earlier 2"].accepted) == (6, 2)


def test_counts_of_drafts_do_not_grow_with_the_age_of_what_they_are_from() -> None:
    seen = RunningAcceptance()
    for age in range(1, 2001):
        seen.saw(Draft("ab", (1.0, 1.0), "earlier", 16, age), verified=2, accepted=1)
    assert [*seen.by_age][:5] == ["earlier 1", "earlier 2", "earlier 3-4", "earlier 5-8", "earlier 9-16"]
    assert (seen.by_age["earlier 5-8"].drafted, seen.by_age["earlier 5-8"].accepted) == (8, 4)
    assert len(seen.by_age) == 12
    assert sum(counts.drafted for counts in seen.by_age.values()) == 4000


def test_new_weights_bring_rates_back_towards_the_prior() -> None:
    seen, one = RunningAcceptance(), Draft("a", (1.0,), "own", 3)
    for _ in range(8):
        seen.saw(one, verified=1, accepted=0)
    assert seen.rate("own", 3) == PRIOR * 8 / 16
    seen.new_weights()
    assert seen.rate("own", 3) == PRIOR * 8 / 12
    assert seen.best_rate() == PRIOR
