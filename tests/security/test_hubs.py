"""Inside one machine nobody but the run's user can speak to its processes."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from urllib.parse import urlparse

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed
from streamrl.launcher.site_setup import choose_addresses, prepare
from streamrl.runtime.process_context import Addresses
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from tests.security.another_user import as_nobody
from tests.security.sockets_of import listening

SITE = {"trainer": {"ranks": 1}, "generation": [{"name": "regular"}], "rewards": {"workers": 1}}
CLUSTER = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": SITE}})


def test_the_hubs_of_a_machine_are_sockets_in_a_folder_that_only_their_user_can_enter(tmp_path: Path) -> None:
    with prepare(CLUSTER, RunConfig(), tmp_path):
        addresses = Addresses.load(tmp_path)
        inside = [addresses.controller, addresses.publisher, *addresses.services.values()]
        folders = set()
        for address in inside:
            assert urlparse(address).scheme == "ipc"
            folders.add(Path(urlparse(address).path).parent)
        (folder,) = folders
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    assert not folder.exists()


def test_a_process_elsewhere_on_the_machine_reaches_no_port_of_a_hub(tmp_path: Path) -> None:
    before = listening([os.getpid()])

    async def speak() -> None:
        address = choose_addresses(CLUSTER, "here", tmp_path).controller
        hub = Hub("controller", WaitRegistry("controller")).bind(address)
        link = await Link("trainer-0", "trainer", WaitRegistry("trainer-0")).connect(address, 30)
        try:
            assert set(hub.peers) == {"trainer-0"}
            assert listening([os.getpid()]) == before
            if os.getuid() == 0:
                os.chmod(tmp_path, 0o700)
                place = urlparse(address).path
                assert await asyncio.to_thread(as_nobody, lambda: socket.socket(socket.AF_UNIX))
                connects = await asyncio.to_thread(as_nobody, lambda: socket.socket(socket.AF_UNIX).connect(place))
                assert not connects, "another user cannot connect"
        finally:
            await link.close()
            await hub.close()

    asyncio.run(speak())


def test_a_folder_whose_path_is_too_long_for_a_socket_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"is too long for a socket .107 bytes.: set TMPDIR to a shorter path"):
        choose_addresses(CLUSTER, "here", tmp_path / ("x" * 100))


def test_over_several_nodes_hubs_listen_on_the_nodes_address_alone(tmp_path: Path) -> None:
    addresses = choose_addresses(CLUSTER, "here", tmp_path, node="127.0.0.1")
    assert urlparse(addresses.controller).hostname == urlparse(addresses.services["here"]).hostname == "127.0.0.1"
