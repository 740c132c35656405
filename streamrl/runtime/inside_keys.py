"""The key pairs of one site's processes, so that nobody else is one of them, and none is another.

A launcher makes them anew at each start, on one machine as over several, and removes them at its end:

    <run folder>/keys/inside-<site>/<process>.key_secret   both keys, mode 0600 in a folder of mode 0700
    <run folder>/addresses.json                            the public keys, by which hubs and processes know each other

Every process of the plan has its own, each rank of the trainer and instances that are not started yet included; only
the operator's commands have one in common. A process that is restarted is the same one, with the same pair. All nodes
mount the run folder, so that the secrets are on no command line, in no environment and in no call through Ray. A pair
opens the site's inner doors under its process's name and role (`inside_admission`), and none of the doors for other
sites.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError, as_typed
from streamrl.protocol.speakers import HubKind, role_at
from streamrl.run_dir import layout
from streamrl.runtime.process_plan import plan_processes, possible_instances, rank_names
from streamrl.transport.curve import KeyPair, load_own, make_keys, secret_file
from streamrl.transport.hello import Admit

OPERATOR = "operator"
"""Owner of the key of operator commands (`streamrl scale`), which come and go as `operator-<number>`."""


def inside_roles(cluster: ClusterConfig, run: RunConfig, site: str) -> dict[str, str]:
    """Return the role of each process of a site that has a key pair, by the name of the pair's owner."""
    here = Path()
    planned = [*plan_processes(cluster, run, here, [site]), *possible_instances(cluster, run, site, here)]
    roles: dict[str, str] = {}
    for spec in planned:
        names = rank_names(spec) if spec.role == "trainer" else [spec.name]
        roles |= dict.fromkeys(names, str(spec.role))
    return roles | ({OPERATOR: "operator"} if site == cluster.trainer_site else {})


def inside_admission(
    roles: Mapping[str, str],
    hub: HubKind,
    wrong_with: Callable[[str, dict[str, Any]], str | None] = lambda role, meta: None,
) -> Admit:
    """Return what decides on hellos at an inner door: a process has its own name, and the role that the plan gives it.

    Args:
        roles: as `inside_roles`.
        hub: what the door leads to.
        wrong_with: returns why a process of a role cannot be let in with the meta of its hello, or None.
    """

    def admit(name: str, role: str, meta: dict[str, Any], owner: str | None) -> str | None:
        prefix, _, number = name.rpartition("-")
        own = OPERATOR if prefix == OPERATOR and number.isdecimal() else name
        if own != owner:
            return f"the key is that of {owner!r}, the hello is of {name!r}"
        if own not in roles or name == OPERATOR:
            return f"the plan has no process {name!r} inside this site"
        if role != role_at(hub, roles[own]):
            return f"process {name!r} is no {role!r:.99} here"
        return wrong_with(role, meta)

    return admit


def make_inside_keys(run_dir: Path, site: str, processes: Collection[str]) -> dict[str, str]:
    """Make a pair for each process of this launch, in place of earlier ones; return the public keys in Z85.

    Raises:
        UserError: the files cannot be written, others could read them, or something else is in the folder's place.
    """
    remove_inside_keys(run_dir, site)
    folder = _folder(run_dir, site)
    if os.path.lexists(folder):  # a link, which may lead to a folder of somebody else's
        raise UserError(f"{folder}: is no folder of keys, and cannot be removed; remove it")
    for process in processes:
        make_keys(folder, process)
    return {process: _load(run_dir, site, process).public.decode() for process in processes}


def load_inside_keys(run_dir: Path, site: str, process: str, public: Mapping[str, str]) -> KeyPair:
    """Load a process's pair of this launch.

    Args:
        public: the public keys, as the launcher has written them beside the addresses.

    Raises:
        UserError: a file is missing, malformed, open to others, or of another process, site or launch.
    """
    pair = _load(run_dir, site, process)
    if pair.public != public.get(process, "").encode():
        raise UserError(
            f"{secret_file(_folder(run_dir, site), process)}: the keys of another process, site or launch, not those "
            f"that {run_dir / layout.ADDRESSES} states for {process!r}; {_remedy(run_dir)}"
        )
    return pair


def remove_inside_keys(run_dir: Path, site: str) -> None:
    """Remove a site's pairs, and the folder of keys if nothing else is in it."""
    shutil.rmtree(_folder(run_dir, site), ignore_errors=True)
    with contextlib.suppress(OSError):
        (run_dir / layout.KEYS).rmdir()


def _folder(run_dir: Path, site: str) -> Path:
    return run_dir / layout.KEYS / f"inside-{site}"


def _remedy(run_dir: Path) -> str:
    return f"`streamrl launch` makes them at each start: continue with --resume {as_typed(run_dir)}"


def _load(run_dir: Path, site: str, process: str) -> KeyPair:
    folder = _folder(run_dir, site)
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link, and may lead to keys of somebody else's; {_remedy(run_dir)}")
    pair = load_own(folder, process, _remedy(run_dir))
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise UserError(
            f"{folder}: mode {mode:04o} opens it to others than you; do: chmod 700 {as_typed(folder)} "
            "(a file system that does not keep modes can hold no run)"
        )
    return pair
