"""`streamrl export` called by tests, and cluster files for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cli.calling import streamrl

SCHEMA = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text())
RAY = {"backend": "ray", "address": "auto"}
SELECTORS = [text for gpu in ("H20", "H800") for text in ("--node-selector", f"{gpu}=nvidia.com/gpu.product={gpu}")]


def two_types() -> dict[str, Any]:
    """A cluster file: one site that trains on H800s and generates on H20s."""
    trainer = {"ranks": 16, "nodes": 2, "gpu": "H800", "threads": 6}
    pools = [
        {"name": "tail", "replicas": 2, "gpu": "H20", "gpus_per_replica": 4},
        {"name": "regular", "replicas": 12, "min_replicas": 4, "max_replicas": 24, "gpu": "H20"},
    ]
    site = {"launch": RAY, "trainer": trainer, "generation": pools, "rewards": {"workers": 3}}
    return {"hardware": "cuda", "sites": {"here": site}}


def one_type() -> dict[str, Any]:
    """One node with two GPUs is enough for this."""
    trainer, pools = {"ranks": 1, "gpu": "H100"}, [{"replicas": 1, "gpu": "H100"}]
    return {"hardware": "cuda", "sites": {"here": {"launch": RAY, "trainer": trainer, "generation": pools}}}


def two_sites() -> dict[str, Any]:
    train = {"launch": RAY, "trainer": {"ranks": 8, "gpu": "H800"}, "listen": "0.0.0.0", "port": 5600}
    west = {"launch": RAY, "generation": [{"replicas": 8, "gpu": "H20"}]}
    link = {"between": ["train", "west"], "bandwidth_gbit_s": 10, "rtt_ms": 20}
    return {"hardware": "cuda", "sites": {"train": train, "west": west}, "links": [link]}


def file(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
    return folder / "cluster.yaml"


class Export:
    """Calls the command."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.capture = folder, patch, capture

    def __call__(self, kind: str, values: dict[str, Any], *options: str) -> str:
        """What it writes."""
        code, out, error = self.tried(kind, values, *options)
        assert code == 0, error
        return out

    def tried(self, kind: str, values: dict[str, Any], *options: str) -> tuple[int, str, str]:
        """Its exit code, output, and output of errors."""
        cluster = file(self.folder, values)
        code = streamrl(self.patch, "export", "--format", kind, "--cluster", cluster, *options)
        shown = self.capture.readouterr()
        return code, shown.out, shown.err

    def kuberay(self, values: dict[str, Any], *options: str) -> dict[str, dict[str, Any]]:
        """Documents of the manifest, by kind; the RayJob holds to its schema."""
        text = self("kuberay", values, "--image", "example.org/streamrl:1", "--volume-claim", "shared", *options)
        documents: dict[str, dict[str, Any]] = {}
        for one in yaml.safe_load_all(text):
            sites = one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-sites")
            documents["for sites" if sites else one["kind"]] = one
        jsonschema.validate(documents["RayJob"], SCHEMA)
        return documents
