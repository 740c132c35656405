"""Keys of sites, and admission by key (CURVE, https://rfc.zeromq.org/spec/26).

Every site has one key pair, made by `streamrl keys`: `<site>.key` is public and goes to every site, `<site>.key_secret`
stays at its own. Files have the format of `zmq.auth`, keys are in Z85 (40 characters for 32 bytes). Inside a site each
process has another pair, of one launch (`runtime/inside_keys.py`).

libzmq asks the process's only authenticator about each client that has proved to own a key. The authenticator knows
the doors of the process's hubs by their domains and answers from the door's list of keys; an unknown key ends the
handshake.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.asyncio
from zmq.auth import create_certificates, load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from streamrl.errors import ErrorCode, UserError, as_typed

log = logging.getLogger(__name__)

NEW_KEYS = ".new-"
"""Beginning of the name of a folder, beside the keys, in which a site's are made."""


def make_with(site: str, cluster_file: str = "F") -> str:
    """Return the command that makes a site's keys; it is for that site, where its secret then lies."""
    return as_typed("streamrl", "keys", "--cluster", cluster_file, "--site", site)


@dataclass(frozen=True)
class KeyPair:
    """A site's long-term key pair, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerSecurity:
    """The keys that a hub needs to admit other sites, or the processes of its own."""

    own: KeyPair
    allowed: Mapping[bytes, str]
    """Owner of each public key that is admitted: another site, or a process of the hub's own."""

    @classmethod
    def load(cls, folder: Path, site: str, others: Iterable[str]) -> Self:
        """Load the site's own keys and the public keys of other sites.

        Raises:
            UserError: a file is missing, open to others or malformed, or two sites have the same key.
        """
        allowed: dict[bytes, str] = {}
        for other in others:
            if (known := allowed.setdefault(load_public(folder, other), other)) != other:
                raise UserError(f"sites {known!r} and {other!r} have the same key in {folder}: each needs its own")
        return cls(load_own(folder, site), allowed)


@dataclass(frozen=True)
class ClientSecurity:
    """The keys that a link needs to connect to another site's hub, and to no impostor."""

    own: KeyPair
    server: bytes
    """Public key of the hub's site, or of the hub's process."""

    @classmethod
    def load(cls, folder: Path, site: str, server_site: str) -> Self:
        """Load the site's own keys and the server's public key.

        Raises:
            UserError: a file is missing, open to others or malformed.
        """
        return cls(load_own(folder, site), load_public(folder, server_site))


def public_file(folder: Path, site: str) -> Path:
    """Return the file of a site's public key."""
    return folder / f"{site}.key"


def secret_file(folder: Path, site: str) -> Path:
    """Return the file of a site's secret key (which also contains the public one)."""
    return folder / f"{site}.key_secret"


def make_keys(folder: Path, site: str, replace: bool = False) -> bool:
    """Make a site's two files, unless one of them exists; a new folder is readable by the user only (0700).

    The secret file is 0600 before anything is written to it, and both get their names when they are complete.

    Returns:
        Whether they were made; False: they exist, and `replace` is False.

    Raises:
        UserError: the folder or the files cannot be written.
    """
    public, secret = public_file(folder, site), secret_file(folder, site)
    try:
        if not replace and (public.exists() or secret.exists()):
            return False
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix=NEW_KEYS) as new:
            os.close(os.open(secret_file(Path(new), site), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            made_public, made_secret = create_certificates(new, site)
            os.chmod(made_public, 0o644)
            os.replace(made_secret, secret)
            os.replace(made_public, public)
    except OSError as error:
        raise UserError(f"cannot write the keys of site {site!r} to {folder}: {error.strerror or error}") from error
    return True


def load_own(folder: Path, site: str, remedy: str = "", cluster_file: str = "F") -> KeyPair:
    """Load a site's own keys.

    Args:
        remedy: what to do about a missing or malformed file; '': make the keys of sites anew.
        cluster_file: the cluster file that messages name.

    Raises:
        UserError: the secret file is missing, open to others or malformed, or the public file does not match it.
    """
    path, beside = secret_file(folder, site), public_file(folder, site)
    make = make_with(site, cluster_file)
    anew = remedy or f"copy it anew from where it was made, or make both of the site's keys anew: {make} --replace"
    missing = remedy or (anew if beside.exists() else f"site {site!r} needs its own keys, make them here: {make}")
    public, secret = _read(path, forbidden=0o077, fix=0o600, missing=missing, malformed=anew)
    try:
        if secret is None or zmq.curve_public(secret) != public:
            raise ValueError
    except (zmq.ZMQError, ValueError) as error:
        raise _malformed(path, "no pair of a public and a secret key", anew) from error
    if beside.exists() and load_public(folder, site, cluster_file) != public:
        raise _malformed(beside, f"not the public key of {path.name}", anew)
    return KeyPair(public, secret)


def load_public(folder: Path, site: str, cluster_file: str = "F") -> bytes:
    """Load a site's public key.

    Args:
        cluster_file: the cluster file that messages name.

    Raises:
        UserError: its file is missing, writable by others or malformed.
    """
    path = public_file(folder, site)
    anew = f"copy it from site {site!r}, where this makes it: {make_with(site, cluster_file)}"
    return _read(path, forbidden=0o022, fix=0o644, missing=anew, malformed=anew)[0]


def _read(path: Path, forbidden: int, fix: int, missing: str, malformed: str) -> tuple[bytes, bytes | None]:
    """Read a file's public and secret key.

    Args:
        forbidden: permission bits that it must not have.
        fix: those to advise.
        missing: what to do if there is no such file.
        malformed: what to do if it holds something else.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & forbidden:
            what = "readable or writable" if forbidden & 0o044 else "writable"
            exposed = f"{path}: mode {mode:04o} makes it {what} by others than you; do: chmod {fix:o} {as_typed(path)}"
            raise UserError(ErrorCode.KEYS.refer(exposed))
        public, secret = load_certificate(path)
        if len(z85.decode(public)) != 32:
            raise ValueError
    except FileNotFoundError as error:
        raise UserError(ErrorCode.KEYS.refer(f"{path}: no such file; {missing}")) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise _malformed(path, "no public key", malformed) from error
    return public, secret


def _malformed(path: Path, holds: str, remedy: str) -> UserError:
    return UserError(ErrorCode.KEYS.refer(f"{path}: it holds {holds}; {remedy}"))


def stays_on_machine(address: str) -> bool:
    """Whether only processes of this machine can connect to a ZeroMQ address."""
    kind, _, place = address.partition("://")
    return kind in ("ipc", "inproc") or (kind == "tcp" and place.rpartition(":")[0] in ("127.0.0.1", "[::1]"))


class KeyCheck:
    """The keys that one door of a hub admits, and a count of the others."""

    def __init__(self, security: ServerSecurity) -> None:
        self.security = security
        self.refused = 0
        """Handshakes with unknown keys; a client keeps trying."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide on a handshake; the authenticator calls this."""
        if key in self.security.allowed:
            return True
        self.refused += 1
        if str(self.refused).strip("0") == "1":
            log.warning("refused %d handshakes with an unknown key so far; this one: %s", self.refused, key.decode())
        return False

    def owner_of(self, frame: zmq.Frame) -> str | None:
        """Return the site or process whose key a frame's connection has proved to own, or None."""
        try:
            user_id = frame.get("User-Id")
        except zmq.ZMQError:  # the connection was not authenticated
            return None
        return self.security.allowed.get(str(user_id).encode())


class _Authenticator(AsyncioAuthenticator):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Stop, and free the socket's name at once for the next authenticator; closing alone takes a moment."""
        if self.zap_socket:
            self.zap_socket.unbind("inproc://zeromq.zap.01")
        super().stop()


_running: dict[zmq.Context, _Authenticator] = {}
"""Authenticator of each context; libzmq allows one per context."""


def guard(socket: zmq.asyncio.Socket, domain: str, check: KeyCheck) -> None:
    """Make a socket admit only clients with a known key; call it before binding, in a running event loop."""
    context = socket.context
    running = _running.get(context)
    if running is not None and running.loop is not asyncio.get_running_loop():  # its loop ended without `unguard`
        running.stop()
        running = None
    if running is None:
        running = _running[context] = _Authenticator(context)
        running.start()
    running.configure_curve_callback(domain, check)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else clients are admitted unchecked without an authenticator
    socket.setsockopt(zmq.CURVE_SECRETKEY, check.security.own.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, check.security.own.public)
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def unguard(context: zmq.asyncio.Context, domain: str) -> None:
    """Remove the hub of a domain, which has closed; the last one stops the authenticator."""
    if (running := _running.get(context)) is not None:
        running.credentials_providers.pop(domain, None)
        if not running.credentials_providers:
            _running.pop(context).stop()
