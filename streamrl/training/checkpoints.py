"""The `checkpoints/` folder: `step_<n>` is complete or does not exist."""

from __future__ import annotations

import shutil
from pathlib import Path


class CheckpointFolder:
    """Names, completes and prunes checkpoints; step n means n optimizer steps done."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.directory / f"step_{step}"

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        steps = self._steps()
        return steps[-1] if steps else None

    def begin(self, step: int) -> Path:
        """An empty folder to write a checkpoint into; a left-over of a crash is removed."""
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, keep: int) -> Path:
        """Gives a written checkpoint its name and deletes all but the newest `keep`."""
        target = self.path(step)
        shutil.rmtree(target, ignore_errors=True)
        self._partial(step).rename(target)
        for old in self._steps()[:-keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return target

    def _partial(self, step: int) -> Path:
        return self.directory / f".partial_step_{step}"

    def _steps(self) -> list[int]:
        found = (path.name.removeprefix("step_") for path in self.directory.glob("step_*") if path.is_dir())
        return sorted(int(step) for step in found if step.isdigit())
