"""The commands that make the namespaces, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.emulation.namespaces import (
    DIRECTORY,
    Layout,
    create,
    enter,
    namespaces_available,
    remove,
    remove_leftovers,
    run_commands,
    tbf_arguments,
)
from streamrl.emulation.network import EmulatedNetwork
from streamrl.emulation.shaping import LinkShape
from streamrl.errors import RunFailed, UserError
from tests.emulation.sockets import Home, connect, inside
from tests.ports import free_port
from tests.waiting import scaled

LAYOUT = Layout("abc123", 77, "east", {"west": 6.25e6, "south": None})


def present(layout: Layout) -> list[str]:
    return [name for name in layout.names if (DIRECTORY / name).exists()]


def falls_back(folder: Path) -> bool:
    """True where namespaces cannot be had; then the network must say so and work without."""
    if (why := namespaces_available()) is None:
        return False
    network = EmulatedNetwork(folder, "east", {"west": LinkShape(1e6)}, [free_port()])
    assert (network.mode, network.why_not_namespaces) == ("proxy", why)
    with network:
        assert network.namespace("west") is None
        assert network.listen_address() == "127.0.0.1"
    return True


def test_the_commands_of_a_small_network() -> None:
    commands = [" ".join(command) for command in LAYOUT.create_commands()]
    wan, west = "streamrl.77.abc123.wan", "streamrl.77.abc123.site.west"
    assert commands[:2] == [f"ip netns add {wan}", f"ip -n {wan} link set lo up"]
    assert [command for command in commands if "site1" in command or west in command] == [
        f"ip netns add {west}",
        f"ip -n {west} link set lo up",
        f"ip link add wan0 netns {west} type veth peer name site1 netns {wan}",
        f"ip -n {west} address add 198.18.0.6/30 dev wan0",
        f"ip -n {wan} address add 198.18.0.5/30 dev site1",
        f"ip -n {west} link set wan0 up",
        f"ip -n {wan} link set site1 up",
        f"tc -n {west} qdisc replace dev wan0 root tbf rate 52279006bit burst 26140b latency 50ms",
        f"tc -n {wan} qdisc replace dev site1 root tbf rate 52279006bit burst 26140b latency 50ms",
    ]
    assert sum("tbf" in command for command in commands) == 2  # neither home nor the unlimited link
    assert LAYOUT.names == [wan, "streamrl.77.abc123.site.east", west, "streamrl.77.abc123.site.south"]


def test_names_and_addresses_stay_valid_with_many_sites() -> None:
    layout = Layout("abc123", 77, "home", {f"site-with-a-rather-long-name-{i}": 1e6 for i in range(200)})
    addresses = [address(site) for site in layout.sites for address in (layout.address, layout.wan_address)]
    assert len(set(addresses)) == len(addresses)
    assert all(address.startswith("198.18.") for address in addresses)
    assert all(int(part) < 255 for address in addresses for part in address.split("."))
    devices = [layout.wan_device(site) for site in layout.sites]
    assert len(set(devices)) == len(devices)
    assert max(map(len, devices)) <= 15


@pytest.mark.parametrize(("bandwidth", "burst"), [(1e4, "6056b"), (6.25e6, "26140b"), (1.25e9, "262144b")])
def test_a_bucket_holds_some_packets_and_no_more_than_a_few_milliseconds(bandwidth: float, burst: str) -> None:
    arguments = tbf_arguments(bandwidth)
    assert arguments[arguments.index("burst") + 1] == burst


def test_a_failing_command_is_named_with_what_it_said() -> None:
    with pytest.raises(RunFailed, match=r"`sh -c echo bad >&2; exit 3` failed with exit code 3: bad"):
        run_commands([["sh", "-c", "echo bad >&2; exit 3"]])
    with pytest.raises(RunFailed, match="no-such-program"):
        run_commands([["no-such-program"]])


@pytest.mark.parametrize(("missing", "why"), [("ip", "`ip`"), ("tc", "`tc`"), ("root", "need root")])
def test_without_root_or_iproute2_the_network_falls_back_and_says_why(
    missing: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    network = EmulatedNetwork(tmp_path, "east", {"west": LinkShape(1e6)}, [1])
    assert network.mode == "proxy"
    assert why in (network.why_not_namespaces or "")
    with pytest.raises(UserError, match=why):
        EmulatedNetwork(tmp_path, "east", {"west": LinkShape(1e6)}, [1], namespaces=True)


def test_a_kernel_that_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "ip"
    fake.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    shutil.copy(fake, tmp_path / "tc")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    why = namespaces_available() or ""
    assert why.startswith("the kernel refuses: `ip netns add streamrl.")
    assert why.endswith("Operation not permitted")


def test_every_site_has_a_namespace_and_reaches_home_over_its_link_only(tmp_path: Path) -> None:
    if falls_back(tmp_path):
        return
    port = free_port()
    with EmulatedNetwork(tmp_path, "east", {"west": LinkShape(1e6, 0.01)}, [port]) as network:
        home = Home(network, port)
        try:
            with connect(network, port) as sock:
                sock.sendall(b"ex")
                assert sock.recv(1) == b"x"
            direct = (network.listen_address(), port)
            with pytest.raises(OSError, match="unreachable"):
                inside(network.namespace("west"), lambda: socket.create_connection(direct, 5))
            done = subprocess.run(
                [sys.executable, "-c", "import socket; print([name for _, name in socket.if_nameindex()])"],
                capture_output=True,
                text=True,
                timeout=scaled(20),
                check=True,
                preexec_fn=lambda: enter(network.namespace("west") or ""),
            )
            assert "'wan0'" in done.stdout
            assert "eth0" not in done.stdout
        finally:
            home.close()


def test_nothing_is_left_after_the_end_and_after_an_exception(tmp_path: Path) -> None:
    if falls_back(tmp_path):
        return
    network = EmulatedNetwork(tmp_path, "east", {"west": LinkShape(1e6)}, [free_port()])
    for error in (None, ValueError("of the run")):
        try:
            with network:
                layout = Layout(**json.loads((tmp_path / "namespaces.json").read_text()))
                assert len(present(layout)) == 3
                if error:
                    raise error
        except ValueError as raised:
            assert raised is error
        assert present(layout) == []


def test_nothing_is_left_of_a_network_that_could_not_be_made(tmp_path: Path) -> None:
    if falls_back(tmp_path):
        return
    layout = Layout.new("east", {"west": 1e-9})  # tc refuses a bandwidth of zero
    with pytest.raises(RunFailed, match="tbf"):
        create(layout)
    assert present(layout) == []


def test_nothing_is_left_when_the_proxy_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if falls_back(tmp_path):
        return
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(RunFailed, match="proxy ended with exit code 1"),
        EmulatedNetwork(tmp_path, "east", {"west": LinkShape(1e6)}, [free_port()]),
    ):
        pass
    assert present(Layout(**json.loads((tmp_path / "namespaces.json").read_text()))) == []


def test_what_a_killed_run_has_left_is_removed_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    if falls_back(tmp_path):
        return
    with subprocess.Popen(["sleep", "60"]) as other:
        layout = replace(Layout.new("east", {"west": 1e6}), pid=other.pid)
        try:
            create(layout)
            assert layout.wan not in remove_leftovers()
            assert len(present(layout)) == 3
            other.send_signal(signal.SIGKILL)
            other.wait()
            assert {layout.wan, layout.namespace("east"), layout.namespace("west")} <= set(remove_leftovers())
            assert present(layout) == []
        finally:
            other.kill()
            remove(layout)
