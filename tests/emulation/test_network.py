"""A link over real sockets, with and without namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.emulation.network import EmulatedNetwork, read_stats, set_link_in
from streamrl.emulation.proxy import Proxy
from streamrl.emulation.settings import Forwarding, LinkSettings, ProxySettings
from streamrl.emulation.shaping import LinkShape
from streamrl.emulation.tcp_relay import Relay
from streamrl.errors import RunFailed, UserError
from streamrl.runtime.processes import is_alive
from tests.emulation.conftest import SHAPE
from tests.emulation.sockets import Home, connect, download, exactly, round_trips, upload
from tests.ports import free_port
from tests.waiting import scaled, settled, wait_for

BANDWIDTH = SHAPE.bandwidth_bytes_per_s or 0.0
RTT_S = 2 * SHAPE.delay_s
ATTEMPTS = 50
"""A busy machine may disturb a measurement, and only to the slower side: the best of these must be exact."""


def best(measure: Callable[[], float], limit: float) -> float:
    """Measure a time until it is within a limit, or attempts are used up; return the shortest."""
    times = [measure()]
    while times[-1] > limit and len(times) < ATTEMPTS:
        times.append(measure())
    return min(times)


def sent_up(network: EmulatedNetwork, home: Home, nbytes: int) -> float:
    """Upload random bytes; returns the seconds that it took, and forgets what home received."""
    seconds = upload(network, home, network.ports[0], os.urandom(nbytes))
    home.received.clear()
    return seconds


def test_bandwidth_and_round_trip_are_the_declared_ones(network: EmulatedNetwork, home: Home) -> None:
    port, nbytes = network.ports[0], 2_000_000
    with connect(network, port) as sock:
        sock.sendall(b"e")
        round_trips(sock, 2)
        assert RTT_S <= best(lambda: min(round_trips(sock, 20)), 1.1 * RTT_S) <= 1.1 * RTT_S
    expected = nbytes / BANDWIDTH
    up = best(lambda: sent_up(network, home, nbytes) - SHAPE.delay_s, 1.1 * expected)
    assert 0.9 * expected <= up <= 1.1 * expected
    down = best(lambda: download(network, home, port, nbytes) - RTT_S, 1.1 * expected)
    assert 0.9 * expected <= down <= 1.1 * expected


def test_connections_share_the_bandwidth(network: EmulatedNetwork, home: Home) -> None:
    data = os.urandom(1_500_000)
    socks = [connect(network, network.ports[0]) for _ in range(2)]
    for sock in socks:
        sock.sendall(b"s")
    received = wait_for(lambda: home.received if len(home.received) == 2 else None, 5)
    set_link_in(network.folder, "west", down=True)  # both are ready to send when it comes back
    senders = [threading.Thread(target=sock.sendall, args=(data,)) for sock in socks]
    for sender in senders:
        sender.start()
    begun = time.monotonic()
    set_link_in(network.folder, "west", down=False)
    wait_for(lambda: sum(got.nbytes for got in received) == 2 * len(data), 10)
    took = max(got.last for got in received) - begun
    # what was in the kernel's buffers before the link was back has not passed the bucket of namespaces in this time
    assert took >= 0.7 * 2 * len(data) / BANDWIDTH
    if network.mode == "proxy":  # it lets connections take turns
        assert min(got.last - got.first for got in received) >= 0.7 * max(got.last - got.first for got in received)
    for sender, sock in zip(senders, socks, strict=True):
        sender.join(scaled(5))
        sock.close()


def test_a_cut_link_loses_no_byte_and_lets_no_new_connection_through(network: EmulatedNetwork, home: Home) -> None:
    set_link_in(network.folder, "west", bandwidth_bytes_per_s=1e6)
    times: list[float] = []
    sender = threading.Thread(target=lambda: times.append(upload(network, home, network.ports[0], os.urandom(1 << 20))))
    sender.start()
    got = wait_for(lambda: home.received[0] if home.received and home.received[0].nbytes else None, 5)
    set_link_in(network.folder, "west", down=True)
    assert read_stats(network.folder)["west"]["down"]
    before = settled(lambda: got.nbytes)  # home reads what its kernel has
    assert 0 < before < 1 << 20
    if sys.platform == "linux":
        with pytest.raises(TimeoutError):
            connect(network, network.ports[0], timeout=0.5)
    assert settled(lambda: got.nbytes, 0.3) == before
    assert not got.done.is_set()
    set_link_in(network.folder, "west", down=False, bandwidth_bytes_per_s=BANDWIDTH)
    sender.join(scaled(10))  # upload() compares what has arrived
    assert times
    with connect(network, network.ports[0]) as sock:
        sock.sendall(b"e")
        round_trips(sock, 1)


def test_a_reset_closes_the_connections_of_both_ends_and_new_ones_work(network: EmulatedNetwork, home: Home) -> None:
    with connect(network, network.ports[0]) as sock, connect(network, network.ports[0]) as echo:
        sock.sendall(b"s1")
        echo.sendall(b"e")
        round_trips(echo, 1)
        got = wait_for(lambda: home.received[0] if home.received and home.received[0].nbytes else None, 5)
        assert read_stats(network.folder)["west"]["resets"] == 0
        set_link_in(network.folder, "west", reset=True)
        with pytest.raises(ConnectionResetError):
            echo.recv(1)
        assert got.done.wait(scaled(5))
        assert isinstance(got.error, ConnectionResetError)
        stats = read_stats(network.folder)["west"]
        assert (stats["resets"], stats["opened"]) == (1, 2)
        with connect(network, network.ports[0]) as again:
            again.sendall(b"e")
            round_trips(again, 1)
            wait_for(lambda: read_stats(network.folder)["west"]["connections"] == 1, 5)


def test_an_end_that_arrives_after_its_receiver_has_gone_ends_nothing_else(
    network: EmulatedNetwork, home: Home
) -> None:
    set_link_in(network.folder, "west", delay_s=0.5)
    with connect(network, network.ports[0]) as sock:
        sock.sendall(b"g" + bytes(8))  # home says nothing, and closes its half
        assert home.given.wait(scaled(20))  # after three crossings: home's end comes after the fourth
        set_link_in(network.folder, "west", down=True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.5)  # sleeps: the link's delay is over
    set_link_in(network.folder, "west", down=False, delay_s=SHAPE.delay_s)
    with connect(network, network.ports[0]) as sock:
        sock.sendall(b"e")
        round_trips(sock, 1)
    network.check()


def test_stats_count_what_was_delivered_in_each_direction(network: EmulatedNetwork, home: Home) -> None:
    with connect(network, network.ports[0]) as sock:
        sock.sendall(b"e" + bytes(9999))
        exactly(sock, 9999)
        sock.sendall(b"last")
        sock.shutdown(socket.SHUT_WR)
        assert exactly(sock, 4) == b"last"  # the other half stays open
        assert sock.recv(1) == b""
    wait_for(
        lambda: (
            read_stats(network.folder)["west"]["from_home"] == 10_003
            and read_stats(network.folder)["west"]["connections"] == 0
        ),
        5,
    )
    assert read_stats(network.folder)["west"] == {
        "to_home": 10_004,
        "from_home": 10_003,
        "connections": 0,
        "opened": 1,
        "resets": 0,
        "down": False,
    }


def test_a_receiver_that_does_not_read_stops_its_sender(network: EmulatedNetwork, home: Home) -> None:
    sent, piece = 0, bytes(1 << 16)
    with connect(network, network.ports[0]) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sock.sendall(b"i")
        sock.settimeout(1.0)
        with pytest.raises(TimeoutError):
            while sent < 64_000_000:
                sent += sock.send(piece)
    assert SHAPE.window < sent < SHAPE.window + 6_000_000  # six buffers in three kernels' sockets, and the window


def test_a_running_link_takes_a_new_shape(network: EmulatedNetwork, home: Home) -> None:
    port = network.ports[0]
    with connect(network, port) as sock:
        sock.sendall(b"e")
        round_trips(sock, 2)
        set_link_in(network.folder, "west", delay_s=0.06)
        assert min(round_trips(sock, 3)) >= 0.12
        set_link_in(network.folder, "west", delay_s=0.0, bandwidth_bytes_per_s=1e6)
        round_trips(sock, 2)
        wait_for(lambda: min(round_trips(sock, 5)) < RTT_S, 5)
    assert upload(network, home, port, os.urandom(500_000)) >= 0.9 * 0.5
    set_link_in(network.folder, "west", bandwidth_bytes_per_s=None)
    home.received.clear()
    assert best(lambda: sent_up(network, home, 500_000), 0.4) < 0.4


def test_a_loss_makes_a_connection_wait_for_the_retransmission(network: EmulatedNetwork, home: Home) -> None:
    with connect(network, network.ports[0]) as sock:
        sock.sendall(b"e")
        round_trips(sock, 1)
        set_link_in(network.folder, "west", loss=0.99)
        assert round_trips(sock, 1)[0] >= RTT_S + 0.2


def test_a_refused_connection_is_reset_at_the_remote_site(network: EmulatedNetwork) -> None:
    with connect(network, network.ports[0]) as sock, pytest.raises(ConnectionResetError):
        sock.recv(1)


def test_a_dead_proxy_is_reported(network: EmulatedNetwork) -> None:
    network.check()
    os.kill(json.loads((network.folder / "stats.json").read_text())["pid"], signal.SIGKILL)
    with pytest.raises(RunFailed, match="proxy ended with exit code -9"):
        wait_for(network.check, 5)


def test_the_proxy_resets_what_is_open_and_ends_well_when_it_is_told_to(network: EmulatedNetwork, home: Home) -> None:
    with connect(network, network.ports[0]) as sock:
        sock.sendall(b"e")
        round_trips(sock, 3)
        pid = json.loads((network.folder / "stats.json").read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    with pytest.raises(RunFailed, match="proxy ended with exit code 0"):
        wait_for(network.check, 5)
    stats = read_stats(network.folder)["west"]  # of its very end
    assert (stats["to_home"], stats["from_home"], stats["connections"]) == (4, 3, 0)


def test_unknown_links_and_wrong_values_are_refused(network: EmulatedNetwork, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"no link to 'south', only to \['west'\]"):
        set_link_in(network.folder, "south", down=True)
    with pytest.raises(ValueError, match="loss"):
        set_link_in(network.folder, "west", loss=1.5)
    with pytest.raises(RunFailed, match="no emulated network runs in"):
        set_link_in(tmp_path / "nowhere", "west", down=True)
    with pytest.raises(UserError, match="to itself"):
        EmulatedNetwork(tmp_path, "east", {"east": SHAPE}, [1])


def test_a_change_of_one_link_leaves_the_others_alone(tmp_path: Path) -> None:
    links = {"west": LinkShape(None, 0.05), "south": LinkShape(None, 0.0)}
    with EmulatedNetwork(tmp_path, "east", links, [free_port()], namespaces=False) as network:
        home = Home(network, network.ports[0])
        try:
            set_link_in(network.folder, "west", down=True)
            with connect(network, network.ports[0], "south") as sock:
                sock.sendall(b"e")
                trips = round_trips(sock, 3)

                def one_more() -> float:
                    trips.extend(round_trips(sock, 1))
                    return trips[-1]

                assert best(one_more, 0.1) < 0.1
            wait_for(lambda: read_stats(network.folder)["south"]["to_home"] == 1 + len(trips), 5)
            assert read_stats(network.folder)["west"]["to_home"] == 0
        finally:
            home.close()


def test_the_proxy_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from streamrl.emulation.network import EmulatedNetwork\n"
        "from streamrl.emulation.shaping import LinkShape\n"
        "with EmulatedNetwork(Path(sys.argv[1]), 'east', {'west': LinkShape(1e6)}, [9], namespaces=False):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        pid = json.loads((tmp_path / "stats.json").read_text())["pid"]
        assert is_alive(pid)
        parent.kill()
    wait_for(lambda: not is_alive(pid), 5)


def test_a_proxy_that_fails_at_relaying_ends_instead_of_losing_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, port = tmp_path / "proxy.json", free_port()
    link = LinkSettings(LinkShape(None))
    forward = Forwarding("west", ("127.0.0.1", port), ("127.0.0.1", free_port()))
    ProxySettings(str(tmp_path / "stats.json"), {"west": link}, (forward,)).save(config)

    async def broken(self: Relay, connect: tuple[str, int]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Relay, "_open", broken)

    async def run() -> None:
        proxy = Proxy(config)
        with socket.create_connection(("127.0.0.1", port), 5):
            async with asyncio.timeout(scaled(10)):
                await proxy.run(os.getppid())

    with pytest.raises(RuntimeError, match="relaying failed: ZeroDivisionError"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "ValidationError: Object missing required field `stats`"),
        ('{"links": {}, "forwards": 1, "stats": ""}', "ValidationError: Expected `array`"),
    ],
)
def test_a_proxy_without_a_usable_configuration_says_so(tmp_path: Path, content: str, said: str) -> None:
    config = tmp_path / "proxy.json"
    config.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.emulation.proxy", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=False,
    )
    assert done.returncode == 1
    assert f"the proxy cannot start: {config}: {said}" in done.stderr
