"""Emulate the network between a cluster's sites when all of them are on one machine.

Home (the site that trains) listens on two ports; every other site connects to them over its own link. A proxy process
emulates the links. There are two modes:

    namespaces   Linux with root: every site has its own network namespace. The kernel limits the bandwidth; the proxy,
                 in the middle, adds delay and loss. A site can reach home over its link only.
    proxy        anywhere: all sites are on loopback and the proxy does everything. Sites could bypass it.

    with EmulatedNetwork(folder, "east", {"west": LinkShape(6.25e6, 0.02, 0.0)}, [7000, 7001]) as network:
        ...      # home's sockets bind to (network.listen_address(), 7000), in namespace network.namespace("east")
        ...      # west connects to network.address_of_home("west", 7000), in network.namespace("west")

All state is in the network's folder, so another process can change or cut a link of a running network (`set_link_in`)
and read how much went over it (`read_stats`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from streamrl.atomic_files import replace_json
from streamrl.emulation.namespaces import (
    Layout,
    create,
    enter,
    namespaces_available,
    remove,
    remove_leftovers,
    run_commands,
)
from streamrl.emulation.settings import Forwarding, LinkSettings, ProxySettings
from streamrl.emulation.shaping import LinkShape
from streamrl.errors import RunFailed, UserError

CONFIG_FILE = "proxy.json"
STATS_FILE = "stats.json"
LOG_FILE = "proxy.log"
LAYOUT_FILE = "namespaces.json"
LOCK_FILE = ".lock"
LOG_TAIL_LINES = 12
START_S = 20.0
"""Seconds until the proxy must listen; a busy machine may take seconds to start Python."""
APPLY_S = 10.0
"""Seconds until the proxy must have applied a change; it looks for one ten times a second."""
STOP_S = 5.0
POLL_S = 0.02


LinkStats = dict[str, int | bool]
"""A link's counters: `to_home`, `from_home` (bytes delivered), `connections` (open now), `opened`, `resets`, `down`."""


class LinkChange(TypedDict, total=False):
    """The values of a link to change; the others stay."""

    bandwidth_bytes_per_s: float | None
    """Bytes per second in each direction; None: unlimited."""
    delay_s: float
    """One way."""
    loss: float
    """Share of segments that are lost."""
    down: bool
    """True: cut the link, connections freeze; False: they go on."""
    reset: bool
    """True: reset all connections that the link has now."""


class EmulatedNetwork:
    """An emulated network, as a context manager: it runs inside the `with` block.

    Args:
        folder: folder of its configuration, stats and log; made if missing.
        home: name of the site that listens.
        links: shape of each link, by remote site.
        ports: ports that home listens on.
        namespaces: True: required; False: not used; None: used if available.
        seed: seed of the losses.

    Raises:
        UserError: namespaces are required but not available, or home has a link to itself.
    """

    def __init__(
        self,
        folder: Path,
        home: str,
        links: Mapping[str, LinkShape],
        ports: Sequence[int],
        namespaces: bool | None = None,
        seed: int = 0,
    ) -> None:
        if home in links:
            raise UserError(f"the emulated network has a link from {home!r} to itself")
        self.folder = folder
        self.home = home
        self.links = dict(links)
        self.ports = tuple(ports)
        self.seed = seed
        self.why_not_namespaces = "not wanted" if namespaces is False else namespaces_available()
        """Why namespaces are not used; None in namespace mode."""
        if namespaces and self.why_not_namespaces:
            raise UserError(f"the emulated network cannot use network namespaces: {self.why_not_namespaces}")
        self.mode = "proxy" if self.why_not_namespaces else "namespaces"
        self._layout: Layout | None = None
        self._addresses: dict[tuple[str, int], tuple[str, int]] = {}
        """Where a remote site reaches a port of home, by (site, port)."""
        self._process: subprocess.Popen[bytes] | None = None
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Make the network; when this returns, every port of home accepts connections over every link.

        Raises:
            RunFailed: a command or the proxy failed; nothing is left behind.
        """
        with contextlib.ExitStack() as started:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (STATS_FILE, LAYOUT_FILE):
                (self.folder / name).unlink(missing_ok=True)
            if self.mode == "namespaces":
                remove_leftovers()
                layout = Layout.new(
                    self.home, {site: shape.bandwidth_bytes_per_s for site, shape in self.links.items()}
                )
                create(layout)
                started.callback(remove, layout)
                replace_json(self.folder / LAYOUT_FILE, asdict(layout))
                self._layout = layout
            reached = [(site, port) for site in self.links for port in self.ports]
            ProxySettings(
                stats=str((self.folder / STATS_FILE).absolute()),
                links={site: LinkSettings(shape, paced=self._layout is None) for site, shape in self.links.items()},
                forwards=tuple(
                    Forwarding(site, self._listen_for(site, port), (self.listen_address(), port))
                    for site, port in reached
                ),
                seed=self.seed,
            ).save(self.folder / CONFIG_FILE)
            self._start()
            started.callback(self._stop)
            self._addresses = dict(zip(reached, self._wait_until_it_listens(), strict=True))
            self._exit = started.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()
        self._layout = None

    def _listen_for(self, site: str, port: int) -> tuple[str, int]:
        """Return where the proxy listens for a remote site; port 0: any free one."""
        return ("127.0.0.1", 0) if self._layout is None else (self._layout.wan_address(site), port)

    def _start(self) -> None:
        command = [sys.executable, "-m", "streamrl.emulation.proxy"]
        command += ["--config", str((self.folder / CONFIG_FILE).absolute()), "--parent", str(os.getpid())]
        with (self.folder / LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C should end the run first, and the network after it
                preexec_fn=partial(enter, self._layout.wan) if self._layout else None,
            )

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=STOP_S)

    def _wait_until_it_listens(self) -> list[tuple[str, int]]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(RunFailed):
                return [(str(host), int(port)) for host, port in _read(self.folder / STATS_FILE)["listening"]]
            time.sleep(POLL_S)
        raise RunFailed(f"the emulated network's proxy does not listen after {START_S:.0f} s; see {self._log}")

    @property
    def _log(self) -> Path:
        return self.folder / LOG_FILE

    def listen_address(self) -> str:
        """Return the host on which home must listen for the other sites."""
        return "127.0.0.1" if self._layout is None else self._layout.address(self.home)

    def address_of_home(self, site: str, port: int) -> tuple[str, int]:
        """Return the host and port to which a remote site connects for a port of home."""
        return self._addresses[site, port]

    def namespace(self, site: str) -> str | None:
        """Return the network namespace that a site's processes (home's, too) must enter; None in proxy mode."""
        return None if self._layout is None else self._layout.namespace(site)

    def check(self) -> None:
        """Check that the proxy is alive.

        Raises:
            RunFailed: the proxy has died; the message ends with its last output.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "\n".join(f"    {line}" for line in lines)
        raise RunFailed(f"the emulated network's proxy ended with exit code {code}; the end of {self._log}:\n{tail}")


def set_link_in(folder: Path, site: str, **change: Unpack[LinkChange]) -> None:
    """Change a remote site's link of the network that runs in a folder; when this returns, the change is in force.

    Raises:
        RunFailed: no network runs there, it has no such link, or the change did not come into force.
        ValueError: the values make no link.
    """
    with _changing(folder):
        settings, link = _settings_of(folder, site)
        before = link.shape.bandwidth_bytes_per_s
        shape = LinkShape(
            change.get("bandwidth_bytes_per_s", before),
            change.get("delay_s", link.shape.delay_s),
            change.get("loss", link.shape.loss),
        )
        reset = link.reset + change.get("reset", False)
        link = LinkSettings(shape, link.paced, change.get("down", link.down), reset)
        if not link.paced and shape.bandwidth_bytes_per_s != before:
            layout = Layout(**_read(folder / LAYOUT_FILE))
            run_commands(layout.bandwidth_commands(site, shape.bandwidth_bytes_per_s))
        revision = settings.revision + 1
        settings = replace(settings, links=settings.links | {site: link}, revision=revision)
        settings.save(folder / CONFIG_FILE)
        _wait_for(
            lambda: _read(folder / STATS_FILE)["revision"] >= revision, f"{folder}: the proxy did not apply the change"
        )


def read_stats(folder: Path) -> dict[str, LinkStats]:
    """Return the counters of each link, by remote site; while the network runs, at most half a second old.

    Raises:
        RunFailed: there are no stats.
    """
    links: dict[str, LinkStats] = _read(folder / STATS_FILE)["links"]
    return links


def _settings_of(folder: Path, site: str) -> tuple[ProxySettings, LinkSettings]:
    try:
        settings = ProxySettings.load(folder / CONFIG_FILE)
    except ValueError as error:
        raise RunFailed(f"no emulated network runs in {folder}: {error}") from error
    if site not in settings.links:
        raise RunFailed(f"the emulated network in {folder} has no link to {site!r}, only to {sorted(settings.links)}")
    return settings, settings.links[site]


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFailed(f"{path}: {error}") from error
    return values


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Hold the lock that lets only one process at a time change a network."""
    try:
        lock = (folder / LOCK_FILE).open("w", encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"no emulated network runs in {folder}: {error}") from error
    with lock:
        _wait_for(lambda: _locked(lock.fileno()), f"{folder}: another process did not finish changing a link")
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + APPLY_S
    while not condition():
        if time.monotonic() > deadline:
            raise RunFailed(f"{otherwise} within {APPLY_S:.0f} s")
        time.sleep(POLL_S)
