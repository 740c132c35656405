"""What every process of a run starts from: its run folder, the resolved configuration and the addresses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import load_resolved
from streamrl.config.run import RunConfig


@dataclass(frozen=True)
class Addresses:
    """ZeroMQ addresses of a run's hubs."""

    controller: str
    publisher: str
    services: dict[str, str]
    """By site."""
    nccl_port: int = 0
    """Rendezvous port of the NCCL weight path."""

    def save(self, run_dir: Path) -> None:
        """Writes them where the run's processes look."""
        (run_dir / "addresses.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(run_dir: Path) -> Addresses:
        """Reads them."""
        return Addresses(**json.loads((run_dir / "addresses.json").read_text()))


@dataclass(frozen=True)
class RoleContext:
    """Everything that a role is given."""

    name: str
    run_dir: Path
    cluster: ClusterConfig
    run: RunConfig
    addresses: Addresses
    resume: bool

    @staticmethod
    def load(name: str, run_dir: Path, resume: bool) -> RoleContext:
        """Reads a run folder."""
        cluster, run = load_resolved(run_dir)
        return RoleContext(name, run_dir, cluster, run, Addresses.load(run_dir), resume)
