"""What a service makes of the journals of an earlier one, when it hears of the run's weights. Nothing is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.generation.site.service import GenerationService
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.protocol.controller_site import Finish, Generate, IssuedGroup, LoadWeights
from streamrl.protocol.message import TypedMessage
from streamrl.rollouts.types import PartialSample
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses, RoleContext

CLUSTER = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{}]}}})


def weights(number: int) -> LoadWeights:
    return LoadWeights(number=number, content_hash="", source=None)


def group(newest: int, *names: str) -> Generate:
    issued = IssuedGroup(group_id="g", samples=[(name, 1, None) for name in names], forecast=None)
    return Generate(t_queued=1.0, budget=None, groups=[issued], newest=newest)


def continued(folder: Path, *orders: TypedMessage) -> list[str]:
    """The requests that a new service goes on with from the tokens, of versions 9 and 17, that an earlier one noted."""
    context = RoleContext("service-here", "here", folder, CLUSTER, RunConfig(), Addresses("", "", {}), True)
    earlier = TokenJournal(folder / layout.TOKEN_JOURNAL)
    for version in (9, 17):
        arrays = np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.full(3, version, np.int32)
        earlier.add(0, PartialSample(f"of {version}", *arrays, 1.0, 2.0))
    earlier.close()

    async def play() -> list[str]:
        service = GenerationService(context)
        prompts = {"prompt_tokens": np.arange(4, dtype=np.int32), "prompt_lengths": np.full(1, 4, np.int32)}
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
        return [name for name, request in service.dispatcher.requests.items() if request.kept is not None]

    return asyncio.run(play())


@pytest.mark.parametrize("first", [weights(10), group(10, "another")])
def test_tokens_of_weights_that_are_no_more_are_not_taken_for_later_ones_of_that_number(
    first: TypedMessage, tmp_path: Path
) -> None:
    assert continued(tmp_path, first, weights(17), group(17, "of 9", "of 17")) == ["of 9"]


def test_a_restarted_service_goes_on_from_all_tokens_of_the_run(tmp_path: Path) -> None:
    assert continued(tmp_path, weights(17), group(17, "of 9", "of 17")) == ["of 9", "of 17"]
