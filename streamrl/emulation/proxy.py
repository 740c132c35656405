"""The process that emulates the links of a network: `python -m streamrl.emulation.proxy --config FILE`.

It relays TCP connections, each over its link (`tcp_relay.py`). The configuration (`settings.py`) is JSON:

    {"stats": "stats.json", "seed": 0, "revision": 0,
     "links": {"west": {"shape": {"bandwidth_bytes_per_s": 6.25e6, "delay_s": 0.02, "loss": 0.0},
                        "paced": true, "down": false, "reset": 0}},
     "forwards": [{"link": "west", "listen": ["127.0.0.1", 0], "connect": ["127.0.0.1", 7000]}]}

The file is read again when it is replaced; the links' settings then apply at once:

    shape         new bandwidth, delay and loss, for bytes sent from now on.
    down: true    a cut cable. Established connections freeze: no bytes pass, nothing is closed. New ones are not
                  completed: on Linux the kernel drops their first packet, so the peer keeps trying.
    down: false   everything continues where it stopped; no byte is lost.
    reset: n      when n has grown, all connections of the link are reset, at both ends.

The stats file is replaced twice a second, and when a new configuration has been applied. The process ends on SIGTERM,
and when its parent is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from streamrl.atomic_files import replace_json
from streamrl.emulation.settings import Forwarding, ProxySettings
from streamrl.emulation.tcp_relay import RelayLink, set_buffers

log = logging.getLogger(__name__)

POLL_S = 0.1
STATS_S = 0.5
LISTEN_BACKLOG = 64
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # Linux, asm-generic/socket.h; Python has no names for them


class Listener:
    """One forward's listening socket.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, forward: Forwarding, link: RelayLink) -> None:
        self._forward, self._link = forward, link
        self._open = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_buffers(self._socket, link.shape)  # accepted sockets inherit it
        try:
            self._socket.bind(forward.listen)
        except OSError as error:
            raise OSError(f"cannot listen on {forward.listen[0]}:{forward.listen[1]}: {error}") from error
        self._socket.listen(LISTEN_BACKLOG)
        self.address: tuple[str, int] = self._socket.getsockname()
        """Host and port."""

    def update(self) -> None:
        """Start or stop accepting, as the link is up or down."""
        wanted = self._link.up.is_set()
        if wanted == self._open:
            return
        self._open = wanted
        loop = asyncio.get_running_loop()
        if wanted:
            _drop_packets(self._socket, False)
            loop.add_reader(self._socket, self._accept)
        else:
            loop.remove_reader(self._socket)
            _drop_packets(self._socket, True)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:  # the peer has given up meanwhile
            return
        accepted.setblocking(False)
        self._link.accept(accepted, self._forward.connect)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()


def _drop_packets(sock: socket.socket, drop: bool) -> None:
    """Make the kernel drop everything sent to a listening socket; except on Linux, connections only queue up."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # detaching where none is attached
        if drop:
            program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction: return 0 bytes
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
        else:
            sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, struct.pack("i", 0))


class Proxy:
    """All links and forwards of one configuration file."""

    def __init__(self, config: Path) -> None:
        """Read the configuration and bind all listeners.

        Raises:
            ValueError: the file is no configuration.
            OSError: an address cannot be bound.
        """
        self._config = config
        self._version = _version(config)
        self._settings = ProxySettings.load(config)
        self._stats = Path(self._settings.stats)
        self._links = {
            name: RelayLink(name, settings, self._settings.seed) for name, settings in self._settings.links.items()
        }
        self._listeners = [Listener(forward, self._links[forward.link]) for forward in self._settings.forwards]

    async def run(self, parent: int) -> None:
        """Relay until SIGTERM or SIGINT, or until process `parent` is no longer the parent.

        Raises:
            RuntimeError: the relaying itself failed; a network that lost bytes must not look like one that works.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        failures: list[str] = []

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            loop.default_exception_handler(context)
            failures.append(repr(context.get("exception") or context["message"]))
            stop.set()

        loop.set_exception_handler(failed)
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.set)
        for listener in self._listeners:
            listener.update()
        self._write_stats()
        written = loop.time()
        while not stop.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_S)
            if self._follow() or loop.time() >= written + STATS_S - POLL_S / 2:
                self._write_stats()
                written = loop.time()
        for listener in self._listeners:
            listener.close()
        for link in self._links.values():
            link.close()
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next round
        self._write_stats()
        if failures:
            raise RuntimeError(f"relaying failed: {failures[0]}")

    def _follow(self) -> bool:
        """Apply a changed configuration; return whether there was one."""
        if (version := _version(self._config)) == self._version:
            return False
        self._version = version
        try:
            self._settings = ProxySettings.load(self._config)
        except ValueError as error:
            log.error("the new configuration is ignored: %s", error)
            return False
        for name, link in self._links.items():
            if name in self._settings.links:
                link.apply(self._settings.links[name])
        for listener in self._listeners:
            listener.update()
        return True

    def _write_stats(self) -> None:
        values = {
            "time": time.time(),
            "pid": os.getpid(),
            "revision": self._settings.revision,
            "listening": [listener.address for listener in self._listeners],
            "links": {name: link.stats() for name, link in self._links.items()},
        }
        try:
            replace_json(self._stats, values)
        except OSError as error:
            log.error("cannot write %s: %s", self._stats, error)


def _version(path: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever the file is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


async def _run(config: Path, parent: int) -> None:  # a proxy is made inside its event loop
    await Proxy(config).run(parent)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m streamrl.emulation.proxy")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="ends when this process is not its parent")
    args = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_run(args.config, args.parent))
    except (OSError, ValueError) as error:
        print(f"the proxy cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
