"""A running network of two sites, in both modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.emulation.namespaces import namespaces_available
from streamrl.emulation.network import EmulatedNetwork
from streamrl.emulation.shaping import LinkShape
from tests.emulation.sockets import Home, home_at
from tests.ports import free_port

SHAPE = LinkShape(10e6, 0.01)
"""80 Mbit/s, 20 ms round trip."""


@pytest.fixture(params=["proxy", "namespaces"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmulatedNetwork]:
    """Where namespaces cannot be had, the network that wants them must fall back and say why, and work as well."""
    wanted = request.param == "namespaces"
    network = EmulatedNetwork(tmp_path / "net", "east", {"west": SHAPE}, [free_port()], None if wanted else False)
    if wanted:
        assert network.why_not_namespaces == namespaces_available()
        assert network.mode == ("proxy" if network.why_not_namespaces else "namespaces")
    else:
        assert (network.mode, network.why_not_namespaces) == ("proxy", "not wanted")
    with network:
        yield network


@pytest.fixture
def home(network: EmulatedNetwork) -> Iterator[Home]:
    with home_at(network, network.ports[0]) as home:
        yield home
