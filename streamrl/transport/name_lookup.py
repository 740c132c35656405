"""The host name in a hub's address is looked up beside the event loop, and libzmq gets IP addresses only.

libzmq would look it up in its I/O thread at each attempt to connect: all sockets of the process would stand still for
as long as a name server does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import threading

from streamrl.transport.ip_addresses import host_of, host_port, resolve


class NameLookup:
    """Look-ups of one address, one at a time; `address` is as for `Link.connect`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.trouble = ""
        """Why the last look-up found no IP address; '': it has found one."""
        kind, _, place = address.partition("://")
        self._host, self._port = (host_of(place), place.rpartition(":")[2]) if kind == "tcp" else ("", "")
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self._host)
            self._host = ""
        self._going_on: asyncio.Future[str | OSError] | None = None

    @property
    def needed(self) -> bool:
        """Whether the address has a name: it may be that of another IP address tomorrow."""
        return bool(self._host)

    async def numeric(self, limit_s: float) -> str | None:
        """Return the address with an IP address in place of the name; None: none was found within `limit_s` seconds.

        A look-up that takes longer goes on, and the next call waits for it.
        """
        if not self.needed:
            return self.address
        if self._going_on is None:
            self._going_on = self._begin()
        await asyncio.wait([self._going_on], timeout=limit_s)
        why = f"no answer within {limit_s:g} s"
        if self._going_on.done():
            found, self._going_on = self._going_on.result(), None
            if isinstance(found, str):
                self.trouble = ""
                return f"tcp://{host_port(found, int(self._port))}"
            why = found.strerror or str(found)
        self.trouble = f"the name {self._host} cannot be resolved: {why}"
        return None

    def _begin(self) -> asyncio.Future[str | OSError]:
        """Look the name up in a thread of its own, for which no process waits at its end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str | OSError] = loop.create_future()

        def finish(found: str | OSError) -> None:
            if not future.done():
                future.set_result(found)

        def look() -> None:
            try:
                found: str | OSError = resolve(self._host)
            except OSError as error:
                found = error
            except UnicodeError as error:  # no name at all
                found = OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(finish, found)

        threading.Thread(target=look, name=f"name of {self._host}"[:15], daemon=True).start()
        return future
