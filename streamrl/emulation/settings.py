"""The configuration file of an emulated network's proxy, which is replaced atomically."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

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
        replace_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> ProxySettings:
        """Read the file.

        Raises:
            ValueError: the file cannot be read, or is no configuration.
        """
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
        if unknown := {forward.link for forward in settings.forwards} - settings.links.keys():
            raise ValueError(f"{path}: a forward names the unknown link {unknown.pop()!r}")
        return settings
