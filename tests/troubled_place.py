"""A folder with all files of a run, in which commands are called and go wrong."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE

from streamrl.config.load import load_cluster, load_run, save_resolved
from streamrl.launcher import site_setup, supervisor
from streamrl.launcher.local_backend import LocalProcess, start
from streamrl.runtime.process_plan import ProcessSpec
from streamrl.transport.curve import make_keys
from tests.cli.calling import streamrl
from tests.ports import free_port
from tests.waiting import scaled

LIMIT_S = 20.0
"""Seconds that a process of a test may take."""
HERE: dict[str, Any] = {"trainer": {"threads": 1}, "generation": [{"name": "one", "kv_cache_gb": 0.05}]}
RUN: dict[str, Any] = {
    "name": "tiny",
    "steps": 4,
    "model": {"path": "model", "max_context": 64},
    "sampling": {"max_tokens": 8},
    "tasks": [{"kind": "file", "name": "mine", "path": "prompts.jsonl", "reward": "exact_match"}],
    "recovery": {"restarts": 0},
}
SLEEP = "import time; time.sleep(3600)"


def python(script: str) -> list[str]:
    """The command of a process; without installed packages (-S), which doubles its start, unless it needs ours."""
    return [sys.executable, *([] if "from streamrl" in script else ["-S"]), "-c", script]


@dataclass(frozen=True)
class TinyShare(site_setup.Share):
    """What is planned is started, but each process runs a few lines of Python."""

    scripts: Mapping[str, str] = field(default_factory=dict)

    def processes(self) -> list[ProcessSpec]:
        commands = {s.name: python(self.scripts.get(s.name, SLEEP)) for s in super().processes()}
        return [replace(spec, command=commands[spec.name]) for spec in super().processes()]


class Place:
    """A folder with all files of a run, in which commands are called and nothing real is started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capfd = folder, monkeypatch, capfd
        monkeypatch.chdir(folder)
        self.write_cluster()
        self.write_run()
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}))
        model = folder / "model"  # as much of one as is looked at before a run
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512}))
        Tokenizer(BPE(vocab={"a": 0}, merges=[], unk_token="a")).save(str(model / "tokenizer.json"))
        (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (model / "model.safetensors").write_bytes(bytes(2**20))

    def write_cluster(self, hardware: str = "cpu", **here: Any) -> Place:
        """One site."""
        values = {"hardware": hardware, "sites": {"here": HERE | here}}
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return self

    def write_two_sites(self, keys: tuple[str, ...] = (), **changes: Any) -> Place:
        """The second one generates; some have keys."""
        sites = {"here": HERE | {"port": free_port()}, "west": {"generation": HERE["generation"]}}
        link = {"between": ["here", "west"], "bandwidth_gbit_s": 1, "rtt_ms": 1}
        values = {"hardware": "cpu", "sites": sites, "links": [link]} | changes
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        for site in keys:
            make_keys(self.folder / "keys", site)
        return self

    def write_run(self, **changes: Any) -> Place:
        (self.folder / "run.yaml").write_text(yaml.safe_dump(RUN | changes, sort_keys=False))
        return self

    def say(self, *arguments: str, code: int = 2) -> str:
        """Calls a command; what it prints to stderr."""
        self.capfd.readouterr()
        assert streamrl(self.monkeypatch, *arguments) == code
        return self.capfd.readouterr().err

    def read(self, *arguments: str) -> str:
        """Calls a command; what it prints to stdout."""
        self.capfd.readouterr()
        assert streamrl(self.monkeypatch, *arguments) == 0
        return self.capfd.readouterr().out

    def launch(self, *arguments: str, code: int = 2) -> str:
        """What `streamrl launch --dry-run` prints to stderr."""
        return self.say("launch", "--cluster", "cluster.yaml", "--run", "run.yaml", "--dry-run", *arguments, code=code)

    def supervise(self, scripts: dict[str, str], *options: str, code: int = 1, **run: Any) -> str:
        """What a launch prints, all of it, whose processes are scripts; it fails, or is interrupted."""
        self.write_run(**run)

        @contextlib.contextmanager
        def prepared(*arguments: Any) -> Iterator[site_setup.Share]:
            with site_setup.prepare(*arguments) as real:
                yield TinyShare(real.cluster, real.run, real.folders, real.network, scripts=scripts)

        self.monkeypatch.setattr(supervisor, "prepare", prepared)
        self.monkeypatch.setattr(supervisor, "SETTLE_S", 0.1)
        self.monkeypatch.setattr(supervisor, "write_report", lambda run_dir: None)
        self.capfd.readouterr()
        command = ("launch", "--cluster", "cluster.yaml", "--run", "run.yaml", "--plain")
        assert streamrl(self.monkeypatch, *command, *options) == code
        printed = self.capfd.readouterr()
        return printed.out + printed.err

    def resume(self, *arguments: str) -> str:
        """What `streamrl launch --resume` prints to stderr."""
        self.save_run()
        return self.say("launch", "--resume", "runs/tiny", *arguments)

    def save_run(self) -> Path:
        """The folder of a run that was started before."""
        run_dir = self.folder / "runs" / "tiny"
        save_resolved(run_dir, load_cluster("cluster.yaml"), load_run("run.yaml"))
        return run_dir

    def process(self, name: str, script: str) -> LocalProcess:
        """One that has ended."""
        ended = start(ProcessSpec(name, "instance", "here", "one", python(script)), self.folder, False)
        ended.process.wait(timeout=scaled(LIMIT_S))
        return ended
