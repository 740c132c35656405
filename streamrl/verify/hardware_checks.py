"""`streamrl verify --hardware`: what this machine can do, measured by the code that a run uses.

Every stage is a process with a deadline, so a crash or a hang is one line of the table. The last stage is a whole run
of a tiny model: generation, rewards, training, new weights.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from streamrl.generation.instance.settings_trial import error_of
from streamrl.output_files import write_output
from streamrl.runtime.module_process import run_module
from streamrl.runtime.process_plan import PASSIVE_WAITING
from streamrl.verify.hardware_measurement import Measurement
from streamrl.verify.tiny_run import TINY_RUN, tiny_run

STAGE_S = 300.0
"""Seconds that a stage may take."""
STAGES = ("devices", "products", "memory", "peers", "collectives", "attention", "head", "trainer", "turns", "weights")
"""Stages that `hardware_stages.py` runs."""
PACKAGES = ("torch", "vllm", "transformers", "numpy", "pyzmq")


@dataclass(frozen=True)
class StageResult:
    """The result of one stage."""

    stage: str
    seconds: float
    measurements: tuple[Measurement, ...]
    error: str
    """Why it ended early; '': it did not."""


def check_hardware(say: Callable[[str], None], stages: Sequence[str] = (*STAGES, TINY_RUN)) -> list[StageResult]:
    """Run the stages one after the other.

    Args:
        say: called with the name of each stage when it begins.
        stages: their names.
    """
    found = []
    for number, stage in enumerate(stages, start=1):
        say(f"{stage} ({number} of {len(stages)})")
        began = time.monotonic()
        measurements, error = tiny_run() if stage == TINY_RUN else _stage(stage)
        found.append(StageResult(stage, time.monotonic() - began, tuple(measurements), error))
    return found


def _stage(name: str) -> tuple[list[Measurement], str]:
    said, done = run_module("streamrl.verify.hardware_stages", name, limit_s=STAGE_S, environment=PASSIVE_WAITING)
    late = f"no end within {STAGE_S:.0f} s"
    error = late if done is None else error_of(done.stderr) if done.returncode else ""
    return [Measurement(**json.loads(line)) for line in said.splitlines() if line.startswith('{"what"')], error


def table_of(results: Sequence[StageResult]) -> Table:
    """Return the results as a table."""
    table = Table("stage", "measured", "value", "note", title=Text(f"hardware of {platform.node()}"))
    for result in results:
        for number, one in enumerate(result.measurements):
            table.add_row("" if number else result.stage, Text(one.what), str(one), Text(one.note))
        if result.error:
            table.add_row("" if result.measurements else result.stage, Text("failed", "red"), "", Text(result.error))
    return table


def as_json(results: Sequence[StageResult]) -> dict[str, Any]:
    """Return the results with the versions of packages, to be sent to the project; it names no user and no host."""
    versions: dict[str, str | None] = {}
    for package in ("streamrl", *PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": versions,
        "stages": [asdict(result) for result in results],
    }


def write_json(path: Path, results: Sequence[StageResult]) -> None:
    """Write the results as a JSON file.

    Raises:
        OSError: it cannot be written; a file that is there stays as it is.
    """
    write_output(path, json.dumps(as_json(results), indent=1) + "\n")
