"""A controller that hears a hostile site, and a site whose processes have keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.controller.controller import Controller
from tests.security.hostile_world import Sent, two_sites
from tests.security.keyed_place import Place, make_place
from tests.tasks.same_process import same_process

__all__ = ["same_process"]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def controller(tmp_path: Path, sent: Sent) -> Iterator[Controller]:
    with two_sites(tmp_path, sent) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(params=["nodes", "machine"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return make_place(tmp_path, request.param == "nodes")
