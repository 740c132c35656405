"""The key pair that the processes of one site have in common, so that nobody else on their network is one of them.

A launcher makes it for a site whose processes are spread over machines, anew at each start, and removes it at its end:

    <run folder>/keys/inside-<site>.key_secret   both keys, mode 0600 in a folder of mode 0700
    <run folder>/addresses.json                  the public key, by which a process knows the pair of its own launch

All nodes mount the run folder, so that the secret is on no command line, in no environment and in no call through Ray.
Whoever has the pair is inside: it opens the site's inner doors, and none of those for other sites.
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from streamrl.errors import UserError
from streamrl.run_dir import layout
from streamrl.transport.curve import KeyPair, load_own, make_keys, public_file, secret_file


def make_inside_keys(run_dir: Path, site: str) -> str:
    """Make a site's pair for this launch, in place of an earlier one, and return its public key in Z85.

    Raises:
        UserError: the files cannot be written, or others could read them.
    """
    make_keys(run_dir / layout.KEYS, _name(site), replace=True)
    return _load(run_dir, site).public.decode()


def load_inside_keys(run_dir: Path, site: str, public: str) -> KeyPair:
    """Load the pair of this launch.

    Args:
        public: its public key, as the launcher has written it beside the addresses.

    Raises:
        UserError: a file is missing, malformed, open to others, or of another site or launch.
    """
    pair = _load(run_dir, site)
    if pair.public != public.encode():
        raise UserError(
            f"{secret_file(run_dir / layout.KEYS, _name(site))}: the keys of another site or of another launch, not "
            f"those that {run_dir / layout.ADDRESSES} states for site {site!r}; {_remedy(run_dir)}"
        )
    return pair


def remove_inside_keys(run_dir: Path, site: str) -> None:
    """Remove a site's pair, and the folder if nothing else is in it."""
    folder = run_dir / layout.KEYS
    for path in (secret_file(folder, _name(site)), public_file(folder, _name(site))):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _name(site: str) -> str:
    return f"inside-{site}"


def _remedy(run_dir: Path) -> str:
    return f"`streamrl launch` makes them at each start: continue with --resume {run_dir}"


def _load(run_dir: Path, site: str) -> KeyPair:
    folder = run_dir / layout.KEYS
    pair = load_own(folder, _name(site), _remedy(run_dir))
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise UserError(f"{folder}: mode {mode:04o} opens it to others than you; do: chmod 700 {folder}")
    return pair
