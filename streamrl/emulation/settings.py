"""The configuration file of an emulated network's proxy, which is replaced atomically.

Standard library only, so that the proxy starts quickly and stays small.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.atomic_files import replace_json
from streamrl.emulation.shaping import LinkShape


@dataclass(frozen=True)
class LinkSettings:
    """Current settings of a link."""

    shape: LinkShape
    paced: bool = True
    """Whether the proxy limits the bandwidth; if False, the kernel does, and the proxy adds only delay and loss."""
    down: bool = False
    """Whether the link is cut: nothing passes, nothing is closed."""
    reset: int = 0
    """Counter; when it increases, all connections of the link are reset."""


@dataclass(frozen=True)
class Forwarding:
    """A relay of connections from `listen` to `connect`, over a link."""

    link: str
    listen: tuple[str, int]
    """Host and port; port 0: a free one, which the stats file reports."""
    connect: tuple[str, int]


@dataclass(frozen=True)
class ProxySettings:
    """The whole configuration; changes of the links' settings are applied, everything else is read once."""

    stats: str
    """Path of the stats file."""
    links: dict[str, LinkSettings]
    forwards: tuple[Forwarding, ...]
    seed: int = 0
    """Seed of the losses."""
    revision: int = 0
    """Number of the change; the stats file reports the one that has been applied."""

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        replace_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> ProxySettings:
        """Read the file.

        Raises:
            ValueError: the file cannot be read, or is no configuration.
        """
        try:
            values = json.loads(path.read_text())
            return cls(
                stats=str(values["stats"]),
                links={name: _link(link) for name, link in values["links"].items()},
                forwards=tuple(_forwarding(forward, values["links"]) for forward in values["forwards"]),
                seed=int(values.get("seed", 0)),
                revision=int(values.get("revision", 0)),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def _link(values: dict[str, Any]) -> LinkSettings:
    return LinkSettings(**{**values, "shape": LinkShape(**values["shape"])})


def _forwarding(values: dict[str, Any], links: dict[str, Any]) -> Forwarding:
    if values["link"] not in links:
        raise ValueError(f"a forward names the unknown link {values['link']!r}")
    (listen_host, listen_port), (host, port) = values["listen"], values["connect"]
    return Forwarding(values["link"], (str(listen_host), int(listen_port)), (str(host), int(port)))
