"""The look at a run's sockets finds what others could knock at, so that finding none means something."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from tests.security.sockets_of import open_to_others


def test_what_others_can_knock_at_is_found_and_what_they_cannot_is_not() -> None:
    own = [os.getpid()]
    before = open_to_others(own)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # not pytest's, which only its user can enter
        kinds = (socket.AF_INET, socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX, socket.AF_UNIX)
        places = ("0.0.0.0", 0), ("127.0.0.1", 0), f"\0{folder}", f"{folder}/all", f"{folder}/own"
        os.chmod(folder, 0o755)
        sockets = [socket.socket(kind) for kind in kinds] + [socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        for one, place in zip(sockets, (*places, ("0.0.0.0", 0)), strict=True):
            one.bind(place)
            if one.type == socket.SOCK_STREAM:
                one.listen()
        os.chmod(places[3], 0o777)
        os.chmod(places[4], 0o700)
        assert {found.split()[0] for found in open_to_others(own) - before} == {"tcp", "udp", "unix"}
        assert len(open_to_others(own) - before) == 4
        os.chmod(folder, 0o700)
        assert len(open_to_others(own) - before) == 3
        for one in sockets:
            one.close()
    assert open_to_others(own) == before and not Path(folder).exists()
