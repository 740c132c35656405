"""Random sessions against an independent reconstruction of their tokens.

`experiments/agent_tokens.py` plays more of them, with the tokenizer of a real model.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from streamrl.agents.rendering import ChatRenderer
from streamrl.rollouts.types import IntArray
from tests.agents.random_sessions import SYSTEM, play, same_rows, small_tokenizer

SESSIONS = 100


def test_every_trained_token_was_sampled_and_every_other_one_rendered() -> None:
    tokenizer = small_tokenizer()
    renderer = ChatRenderer(tokenizer, SYSTEM)
    sampled = forks = extended = changed = 0
    for seed in range(SESSIONS):
        played = play(tokenizer, renderer, seed)
        rows = played.session.rows()
        assert same_rows(rows, played.rows()), seed
        before_the_end = Random(seed).randrange(len(played.turns) + 1)
        of_whole = list(played.session.turns)
        assert played.session.end(before_the_end - 0.5) == of_whole[before_the_end:]
        assert same_rows(played.session.rows(), replace(played, turns=played.turns[:before_the_end]).rows()), seed
        trained = [pair for row in rows for pair in pairs(row.tokens[row.sampled], row.versions[row.sampled])]
        of_turns = [pair for turn in played.turns for pair in pairs(turn.generated.tokens, turn.generated.versions)]
        assert sorted(trained) == sorted(of_turns)  # each sampled token is trained exactly once
        sampled += len(trained)
        extended += len(played.turns) - len(rows)
        forks += sum(turn.parent is not None for turn in played.turns) - (len(played.turns) - len(rows))
        changed += sum(
            tokenizer.encode(turn.generated.text, add_special_tokens=False) != turn.generated.tokens[:-1].tolist()
            for turn in played.turns
        )
    # the sessions are of the kind that finds mistakes
    assert sampled > 2000 and extended > 150 and forks > 20 and changed > 100


def pairs(tokens: IntArray, versions: IntArray) -> list[tuple[int, int]]:
    return list(zip(tokens.tolist(), versions.tolist(), strict=True))
