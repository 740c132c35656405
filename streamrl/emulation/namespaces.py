"""One network namespace per site, joined by a "wan" namespace: the kernel's part of an emulated network (Linux, root).

    site a --veth, tbf--  wan (the proxy runs here)  --veth-- home
    site b --veth, tbf--

Each site has a veth pair to the wan, in its own subnet; the wan does not route, so a site can reach only the proxy. A
token bucket (tbf) at both ends of each remote site's pair limits its bandwidth. The proxy adds delay and loss, because
many kernels lack netem. No interface, address or route is added outside these namespaces.

The kernel counts Ethernet, IP and TCP headers. The bucket's rate is the declared bandwidth times 1514/1448, so that a
bandwidth means TCP payload bytes both with and without namespaces.

A namespace's name contains the pid of the process that made it, so the next run can remove what a killed run left.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from streamrl.emulation.shaping import MAX_CHUNK, QUEUE_S, SEGMENT
from streamrl.errors import RunFailed

DIRECTORY = Path("/run/netns")
CLONE_NEWNET = 0x40000000
COMMAND_S = 10.0
FRAME = 1514
"""Bytes on the wire, as tbf counts them, of a full segment."""
BURST_S = 0.004
"""Bucket size in seconds: how late the kernel's timer may be before bandwidth is lost."""
MIN_BURST = 4 * FRAME
SITE_DEVICE = "wan0"
"""Name of a site's end of its veth pair."""
_NAME = re.compile(r"^streamrl\.(\d{1,9})\.[0-9a-f]{6}\.")

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Layout:
    """Names and addresses of one emulated network; all commands follow from it."""

    token: str
    pid: int
    """Pid of the process that makes and removes it."""
    home: str
    bandwidths: Mapping[str, float | None]
    """Bytes per second of each remote site's link; None: unlimited."""

    @classmethod
    def new(cls, home: str, bandwidths: Mapping[str, float | None]) -> Layout:
        """Make a layout with a random token, for this process."""
        return cls(secrets.token_hex(3), os.getpid(), home, dict(bandwidths))

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites, home first."""
        return (self.home, *self.bandwidths)

    @property
    def wan(self) -> str:
        """The namespace in the middle."""
        return f"streamrl.{self.pid}.{self.token}.wan"

    def namespace(self, site: str) -> str:
        return f"streamrl.{self.pid}.{self.token}.site.{site}"

    @property
    def names(self) -> list[str]:
        """All namespaces."""
        return [self.wan, *map(self.namespace, self.sites)]

    def wan_device(self, site: str) -> str:
        """Return the wan's end of a site's veth pair."""
        return f"site{self.sites.index(site)}"

    def address(self, site: str) -> str:
        """Return a site's address on its veth, from 198.18.0.0/15, which RFC 2544 reserves for network tests."""
        return self._host(site, 2)

    def wan_address(self, site: str) -> str:
        """Return the wan's address on the veth to a site, where the proxy listens."""
        return self._host(site, 1)

    def _host(self, site: str, number: int) -> str:
        index = self.sites.index(site)
        return f"198.18.{index // 64}.{index % 64 * 4 + number}"

    def create_commands(self) -> list[list[str]]:
        """Return the commands that make all namespaces, devices, addresses and buckets."""
        commands = [_add(self.wan), _up(self.wan, "lo")]
        for site in self.sites:
            namespace, outer = self.namespace(site), self.wan_device(site)
            commands += [
                _add(namespace),
                _up(namespace, "lo"),
                f"ip link add {SITE_DEVICE} netns {namespace} type veth peer name {outer} netns {self.wan}".split(),
                ["ip", "-n", namespace, "address", "add", f"{self.address(site)}/30", "dev", SITE_DEVICE],
                ["ip", "-n", self.wan, "address", "add", f"{self.wan_address(site)}/30", "dev", outer],
                _up(namespace, SITE_DEVICE),
                _up(self.wan, outer),
            ]
        for site, bandwidth in self.bandwidths.items():
            if bandwidth is not None:
                commands += self.bandwidth_commands(site, bandwidth)
        return commands

    def bandwidth_commands(self, site: str, bandwidth: float | None) -> list[list[str]]:
        """Return the commands that limit a remote site's link, or remove the limit; they also work on a live link."""
        ends = ((self.namespace(site), SITE_DEVICE), (self.wan, self.wan_device(site)))
        if bandwidth is None:
            return [["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"] for namespace, device in ends]
        return [
            ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *tbf_arguments(bandwidth)]
            for namespace, device in ends
        ]


def tbf_arguments(bandwidth_bytes_per_s: float) -> list[str]:
    """Return the arguments of `tc ... tbf`: rate, burst and longest wait in its queue."""
    rate = bandwidth_bytes_per_s * FRAME / SEGMENT
    burst = min(MAX_CHUNK, max(MIN_BURST, math.ceil(rate * BURST_S)))
    return ["rate", f"{round(rate * 8)}bit", "burst", f"{burst}b", "latency", f"{round(QUEUE_S * 1e3)}ms"]


def _add(namespace: str) -> list[str]:
    return ["ip", "netns", "add", namespace]


def _up(namespace: str, device: str) -> list[str]:
    return ["ip", "-n", namespace, "link", "set", device, "up"]


def run_commands(commands: list[list[str]]) -> None:
    """Run commands one after the other.

    Raises:
        RunFailed: one of them failed or hung; the message has the command and its output.
    """
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunFailed(f"`{' '.join(command)}` failed: {error}") from error
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise RunFailed(f"`{' '.join(command)}` failed with exit code {done.returncode}: {said}")


def create(layout: Layout) -> None:
    """Make a network.

    Raises:
        RunFailed: it could not be made; none of it is left.
    """
    try:
        run_commands(layout.create_commands())
    except BaseException:
        remove(layout)
        raise


def remove(layout: Layout) -> None:
    """Remove a network; processes that still run in it keep it in the kernel until they end.

    Raises:
        RunFailed: part of it could not be removed.
    """
    _remove_all(name for name in layout.names if (DIRECTORY / name).exists())


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that have ended, and return their names.

    Raises:
        RunFailed: one of them could not be removed.
    """
    try:
        names = sorted(path.name for path in DIRECTORY.iterdir())
    except OSError:
        return []
    dead = [name for name in names if (match := _NAME.match(name)) and not psutil.pid_exists(int(match[1]))]
    _remove_all(dead)
    return dead


def _remove_all(names: Iterable[str]) -> None:
    """Remove namespaces, and with them their contents; a failure does not stop the removal of the others."""
    failed: RunFailed | None = None
    for name in names:
        try:
            run_commands([["ip", "netns", "delete", name]])
        except RunFailed as error:
            if (DIRECTORY / name).exists():  # else another process was faster
                failed = failed or error
    if failed:
        raise failed


def namespaces_available() -> str | None:
    """Return None if namespaces can be used here, else why not; make and remove a small network to find out."""
    if _libc is None:
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need the program `{program}` (iproute2)"
    probe = Layout.new("home", {"remote": 1e6})
    try:
        create(probe)
        remove(probe)
    except RunFailed as error:
        return f"the kernel refuses: {error}"
    return None


def enter(namespace: str) -> None:
    """Move the calling thread into a namespace, as `preexec_fn` of a child; existing sockets stay where they are.

    Raises:
        OSError: there is no such namespace, or the kernel refuses.
    """
    if _libc is None:
        raise OSError("network namespaces need Linux")
    descriptor = os.open(DIRECTORY / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)
