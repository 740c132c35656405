"""A transfer that fails at the publisher: its relay hears why at once, and the next try may succeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.weights import publisher as publisher_module
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import Encoding, NotPublished
from tests.weights.world import Policy, World, in_world


def fail_once(monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> None:
    real, failed = getattr(of, name), False

    def fails(*rest: Any) -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise MemoryError("no room")
        return real(*rest)

    monkeypatch.setattr(of, name, fails)


@pytest.mark.parametrize("encoding", ["raw", "delta"])
@pytest.mark.parametrize(("of", "name"), [(publisher_module, "describe"), (WeightPublisher, "_send_ranges")])
def test_a_relay_hears_of_a_transfer_that_fails_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, encoding: Encoding
) -> None:
    async def body(world: World) -> None:
        relay = await world.relay("site", encoding)
        await world.publisher.publish(*(version := Policy().step()))
        with pytest.raises(NotPublished, match=r"sending it failed: MemoryError: no room\); it has \[1\]"):
            await world.fetch(relay, version)
        await world.fetch(relay, version)

    fail_once(monkeypatch, of, name)
    in_world(tmp_path, body, kind=WeightPublisher)
