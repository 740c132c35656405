"""What ends an episode of verifiers by rule, without the package."""

from __future__ import annotations

import json
import re

import pytest

from streamrl.agents.chat_calls import error_answer
from streamrl.agents.client import OVER
from streamrl.agents.messages_calls import messages_error
from streamrl.agents.turns import CallError
from streamrl.environments.in_venv import verifiers_rollouts
from streamrl.environments.in_venv.verifiers_rollouts import _end_by_rule, _place


class ProviderError(Exception):
    """The exception of verifiers for a refusal of the endpoint."""


class HarnessError(Exception):
    """Another exception of verifiers."""


class Rollout:
    """What is used of a rollout of verifiers."""

    def __init__(self) -> None:
        self.trace = self
        self.stopped, self.failed = list[str](), list[Exception]()

    def stop(self, condition: str) -> None:
        self.stopped.append(condition)

    def fail(self, error: Exception) -> None:
        self.failed.append(error)


def test_the_codes_are_those_of_the_endpoint() -> None:
    assert verifiers_rollouts.OVER.keys() == OVER


@pytest.mark.parametrize("code", [*sorted(OVER), "invalid_request"])
def test_a_rollout_that_the_endpoint_ends_by_rule_stops_and_any_other_fails(code: str) -> None:
    class Played(Rollout):
        pass

    _end_by_rule(Played)
    for kind in (ProviderError, HarnessError):
        for answer in (error_answer, messages_error):
            told = json.dumps(answer(CallError(400, code, 'not "code":"max_turns_exceeded"')))
            error = kind(f"upstream 400: {told}")
            played = Played()
            played.fail(error)
            if kind is ProviderError and code in OVER:
                assert (played.stopped, played.failed) == ([verifiers_rollouts.OVER[code]], [])
            else:
                assert (played.stopped, played.failed) == ([], [error])


@pytest.mark.parametrize("item", [{}, {"index": "first"}, {"index": float("inf")}, {"index": []}])
def test_an_item_that_names_no_task_is_told_so(item: dict[str, object]) -> None:
    got = re.escape(repr(item.get("index")))
    with pytest.raises(ValueError, match=f"no whole number `index`, the place .*, got {got}: give it one"):
        _place(item)
    assert _place({"index": 7}) == 7
