"""Open a tracker by its keys; its package is imported only then."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable

from streamrl.config.trackers import TRACKER_PACKAGES, TrackerConfig
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import TrackedRun, Tracker

BACKENDS = {
    "tensorboard": ("tensorboard_files", "TensorBoardFiles"),
    "wandb": ("wandb_run", "WandbRun"),
    "mlflow": ("mlflow_run", "MLflowRun"),
    "trackio": ("trackio_run", "TrackioRun"),
}
"""Module and class of each tracker."""


def open_tracker(config: TrackerConfig, run: TrackedRun, sent: SentRows) -> Tracker:
    """Open a tracker for a run, or continue there.

    Raises:
        Exception: whatever its package raises.
    """
    module, name = BACKENDS[config.name]
    tracker: Tracker = getattr(importlib.import_module(f"{__package__}.{module}"), name)(config, run, sent)
    return tracker


def missing_packages(trackers: Iterable[TrackerConfig]) -> Iterable[str]:
    """Yield a line for each tracker whose package is not installed."""
    for tracker in trackers:
        package = TRACKER_PACKAGES[tracker.name]
        if importlib.util.find_spec(package) is None:
            yield (
                f"the tracker {tracker.name} needs the package {package}, which is not installed; install with: "
                f"pip install 'streamrl[{tracker.name}]'"
            )
