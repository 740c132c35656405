"""The runs that a dashboard shows: found in the folders it was given, and read when a page asks.

A page names a run by an id that was made here, never by a path. So nothing outside of these folders can be read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from streamrl.config.algorithm import Algorithm, AlgorithmConfig
from streamrl.config.load import ConfigError, read_resolved
from streamrl.dashboard.sample_table import SampleTable
from streamrl.dashboard.state_view import is_run, state_view
from streamrl.dashboard.step_series import StepSeries
from streamrl.errors import UserError
from streamrl.report.live_view import latest_checkpoint
from streamrl.report.run_decoder import Decoder, find_decoder
from streamrl.rollouts.plain_text import plain_text
from streamrl.run_dir import layout
from streamrl.run_dir.appended_lines import newest_row
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.trace_spans import TraceSpans

SLICE_S = 0.2
"""Seconds after which a look at new files of samples lets others use their run."""
PAUSE_S = 0.002
"""Seconds for others to begin: a lock that is taken again at once is nobody else's in between."""


class WatchedRun:
    """One run folder with what was read of it; `lock` is held while a part of it is used."""

    def __init__(self, id: str, folder: Path) -> None:
        self.id, self.folder = id, folder
        self.lock = threading.RLock()
        self.steps = StepSeries(folder)
        self.samples = SampleTable(folder / layout.ROLLOUTS, self._masks_truncated, self.steps.skipped)
        self.spans = TraceSpans(folder / layout.TRACE)
        self._decoder: tuple[Decoder | None, str] | None = None
        self._places: tuple[str | None, Path | None] = None, None
        """Where the decoder was looked for: the configuration, and the newest checkpoint."""

    def read_samples(self) -> None:
        """Read the files of samples that are new, in slices: of a long run, all of them take a minute.

        Others may use the run in between.
        """
        while True:
            with self.lock:
                if self.samples.look_for(SLICE_S):
                    return
            time.sleep(PAUSE_S)

    def summary(self, now: float) -> dict[str, Any]:
        """Return one line of the list of runs."""
        state = state_view(self.folder, now)
        last = None
        with contextlib.suppress(OSError):  # the run's own page says why; other runs are listed all the same
            last = newest_row(self.folder / layout.METRICS, MetricsRow)
        return {
            "id": self.id,
            "folder": str(self.folder),
            "name": self.folder.name,
            "state": state["state"],
            "live": state["live"],
            "step": last.step if last else state.get("step", 0),
            "steps": state.get("steps"),
            "reward": last.reward_mean if last else None,
            "length": last.output_length_mean if last else None,
            "step_time_s": last.step_time_s if last else None,
            "model": state.get("model", ""),
            "schedule": state.get("schedule", ""),
            "updated_at": state.get("updated_at") or (last.time if last else None),
        }

    def decoder(self) -> tuple[Decoder | None, str]:
        """Return the tokenizer's decoder, or why there is none; until it is found, each new checkpoint may bring it."""
        if self._decoder is None or self._decoder[0] is None:
            text = None
            with contextlib.suppress(ConfigError):  # the state's notes say what is no plain file
                text = read_resolved(self.folder)
            places = text, latest_checkpoint(self.folder)
            if self._decoder is None or places != self._places:
                self._decoder, self._places = find_decoder(self.folder, text), places
        return self._decoder

    def _masks_truncated(self) -> bool:
        algorithm = self.algorithm()
        return algorithm is not None and algorithm.mask_truncated

    def algorithm(self) -> Algorithm | None:
        """Return the run's algorithm; None if its configuration cannot be read."""
        with contextlib.suppress(ConfigError):
            return _algorithm_of(read_resolved(self.folder))
        return None


@lru_cache(maxsize=16)
def _algorithm_of(config_text: str) -> Algorithm | None:
    try:
        told = yaml.safe_load(config_text)["run"]["algorithm"]
        return TypeAdapter[Algorithm](AlgorithmConfig).validate_python(told)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):  # edited, or of another version
        return None


class WatchedRuns:
    """All runs in some folders: a run's own folder, or one whose subfolders are runs; new ones appear by themselves."""

    def __init__(self, folders: Sequence[Path], coming: bool = False) -> None:
        """Take the folders.

        Args:
            folders: run folders, or folders of run folders.
            coming: whether a run may appear later where there is none now.

        Raises:
            UserError: a folder does not exist, cannot be read, or holds no run.
        """
        self._folders = [folder.resolve() for folder in folders]
        self._runs: dict[Path, WatchedRun] = {}
        self._lock = threading.Lock()
        for given, folder in zip(folders, self._folders, strict=True):
            if coming:
                continue
            try:
                _check_folder(given, folder)
            except OSError as error:
                raise UserError(f"{given} cannot be read: {error.strerror}") from error

    def look(self) -> list[WatchedRun]:
        """Return all runs that are there now, those of the first folder first."""
        with self._lock:
            found = list(dict.fromkeys(run for folder in self._folders for run in _readable_runs_in(folder)))
            for folder in found:
                if folder not in self._runs:
                    self._runs[folder] = WatchedRun(self._new_id(folder), folder)
            return [self._runs[folder] for folder in found]

    def get(self, id: str) -> WatchedRun | None:
        """Return a run by its id, even if its folder is gone by now; None: there was never one."""
        self.look()
        return next((run for run in self._runs.values() if run.id == id), None)

    def _new_id(self, folder: Path) -> str:
        taken = {run.id for run in self._runs.values()}
        number, name = 1, plain_text(folder.name)
        while name in taken:
            number += 1
            name = f"{plain_text(folder.name)}~{number}"
        return name


def _check_folder(given: Path, folder: Path) -> None:
    if not folder.exists():
        raise UserError(f"no such folder: {given}; expected a run folder such as runs/demo, or a folder of runs")
    if not folder.is_dir():
        raise UserError(f"{given} is a file; expected a run folder such as runs/demo, or a folder of runs")
    if not _runs_in(folder):
        raise UserError(
            f"{given} holds no run: neither it nor a folder in it has a {layout.STATUS} or {layout.METRICS}"
        )


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else its subfolders that are; a link in it is not followed.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    if is_run(folder):
        return [folder]
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink() and is_run(path)]


def _readable_runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder that may be gone, or not readable (now): then none."""
    try:
        return _runs_in(folder)
    except OSError:
        return []
