"""What a service makes of the journals of an earlier one, when it hears of the run's weights. Nothing is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from streamrl.config.run import RunConfig
from streamrl.generation.site.service import GenerationService
from streamrl.generation.site.token_journal import TokenJournal, drawn_from
from streamrl.protocol.controller_site import Finish
from streamrl.protocol.message import TypedMessage
from streamrl.rollouts.types import IntArray, PartialSample, SampleRequest
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses, RoleContext
from tests.generation.test_service import CLUSTER, PROMPT, group, weights


def requests_continued(folder: Path, *orders: TypedMessage, prompt: IntArray = PROMPT) -> dict[str, SampleRequest]:
    """The requests that a new service goes on with from the tokens, of versions 9 and 17, that an earlier one noted.

    The earlier service had them of `prompt`, and got them at 1.0.
    """
    context = RoleContext("service-here", "here", folder, CLUSTER, RunConfig(), Addresses("", "", {}), True)
    earlier = TokenJournal(folder / layout.TOKEN_JOURNAL)
    for version in (9, 17):
        arrays = np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.full(3, version, np.int32)
        request = SampleRequest(f"of {version}", "g", prompt, 1, 1.0)
        earlier.begin(request.sample_id, drawn_from(request, RunConfig().drawn_with), request.t_queued)
        earlier.add(0, PartialSample(f"of {version}", *arrays, 1.0, 2.0))
    earlier.close()

    async def play() -> dict[str, SampleRequest]:
        service = GenerationService(context)
        prompts = {"prompt_tokens": PROMPT, "prompt_lengths": np.full(1, 4, np.int32)}
        waiting = [*orders, Finish(state="done", error=None)]
        received = [SimpleNamespace(body=one, arrays=prompts, ack=lambda: None) for one in waiting]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(service.controller, "receive", AsyncMock(side_effect=received))
            patched.setattr(service, "_update_weights", AsyncMock())
            async with asyncio.TaskGroup() as tasks:
                await service._from_controller(tasks)
        for part in (service.controller, service.weights, service.hub):
            await part.close()
        service.journal.close()
        return {name: one for name, one in service.dispatcher.requests.items() if one.kept is not None}

    return asyncio.run(play())


def continued(folder: Path, *orders: TypedMessage, prompt: IntArray = PROMPT) -> dict[str, int | None]:
    """The number of tokens at which each of `requests_continued` is parked."""
    return {name: one.pause_at for name, one in requests_continued(folder, *orders, prompt=prompt).items()}


@pytest.mark.parametrize("first", [weights(10), group(10, "another")])
def test_tokens_of_weights_that_are_no_more_are_not_taken_for_later_ones_of_that_number(
    first: TypedMessage, tmp_path: Path
) -> None:
    assert [*continued(tmp_path, first, weights(17), group(17, "of 9", "of 17"))] == ["of 9"]


def test_a_restarted_service_goes_on_from_all_tokens_of_the_run_and_of_the_same_prompt(tmp_path: Path) -> None:
    orders = weights(17), group(17, "of 9", "of 17")
    assert continued(tmp_path, *orders) == {"of 9": None, "of 17": None}
    assert continued(tmp_path, *orders, prompt=PROMPT[:3]) == {}


@pytest.mark.parametrize(("oldest", "left"), [(9, ["of 9", "of 17"]), (10, ["of 17"]), (18, [])])
def test_tokens_that_would_be_staler_than_the_schedule_allows_are_drawn_anew(
    oldest: int, left: list[str], tmp_path: Path
) -> None:
    assert [*continued(tmp_path, weights(17), group(17, "of 9", "of 17", oldest=oldest))] == left


def test_the_budget_of_a_round_counts_what_comes_after_the_tokens_of_earlier_rounds(tmp_path: Path) -> None:
    """A budget of 2 tokens, after the 3 that the journal has: an instance cannot generate fewer than none."""
    assert continued(tmp_path, weights(17), group(17, "of 9", "of 17", budget=2)) == {"of 9": 5, "of 17": 5}


def test_what_goes_on_was_issued_before_its_first_token(tmp_path: Path) -> None:
    found = requests_continued(tmp_path, weights(17), group(17, "of 9", "of 17", t_queued=30.0))
    assert {name: one.t_queued for name, one in found.items()} == {"of 9": 1.0, "of 17": 1.0}
