"""A controller that hears a hostile site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.controller.controller import Controller
from tests.security.hostile_world import Sent, two_sites


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def controller(tmp_path: Path, sent: Sent) -> Iterator[Controller]:
    with two_sites(tmp_path, sent) as made:
        yield made
