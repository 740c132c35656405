"""MLflow: a run on a tracking server or in a database, written through its client."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from streamrl.config.trackers import MLflowTracker
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import RolloutTable, TrackedRun

STEP_TAG = "streamrl.step"
"""Tag with the newest step, set in the same request as its figures: MLflow would keep a step that is sent twice."""
LONGEST_NAME = 250
"""Characters of the name of a figure or a parameter that MLflow takes."""
LONGEST_VALUE = 6_000
"""Characters of a parameter that MLflow takes."""
MOST_PARAMETERS = 100
"""Parameters in one request, and MOST_FIGURES likewise."""
MOST_FIGURES = 1_000


class MLflowRun:
    """A run of MLflow."""

    def __init__(self, config: MLflowTracker, run: TrackedRun, sent: SentRows) -> None:
        """Create the run, or continue it.

        Raises:
            mlflow.exceptions.MlflowException: the server cannot be reached, or does not know the run any more.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # what fails is sent again later
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow import MlflowClient

        default = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve().parent / 'mlflow.db'}"
        uri = config.tracking_uri or default
        self._client: Any = MlflowClient(uri)
        self.last_step: int | None = None
        if sent.id:
            self.id = sent.id
            known = self._client.get_run(self.id).data
            tag = known.tags.get(STEP_TAG)
            self.last_step = None if tag is None else int(tag)
            self._client.update_run(self.id, status="RUNNING")
            self._log_settings(run, known.params)
        else:
            self.id = self._new_run(config, run, local=uri.startswith("sqlite:"))
            sent.name(self.id)
            self._log_settings(run, {})

    def _new_run(self, config: MLflowTracker, run: TrackedRun, local: bool) -> str:
        experiment = self._client.get_experiment_by_name(config.experiment)
        if experiment is None:
            # MLflow would put tables into the working directory, wherever that is
            artifacts = (run.folder.resolve().parent / "mlflow_artifacts").as_uri() if local else None
            number = self._client.create_experiment(config.experiment, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        return str(self._client.create_run(number, run_name=run.name).info.run_id)

    def _log_settings(self, run: TrackedRun, known: Mapping[str, str]) -> None:
        """Send the settings that the run does not have: MLflow refuses another value of one that it has."""
        from mlflow.entities import Param

        params = [
            Param(key, value[:LONGEST_VALUE]) for key, value in dict(_flat(run.settings)).items() if key not in known
        ]
        for first in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(self.id, params=params[first : first + MOST_PARAMETERS])

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Send a step's figures and its number in one request."""
        from mlflow.entities import RunTag

        self._log(step, time, figures, [RunTag(STEP_TAG, str(step))])
        self.last_step = step

    def log_evaluation(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Send an evaluation's figures."""
        self._log(step, time, figures, [])

    def _log(self, step: int, time: float, figures: Mapping[str, float], tags: list[Any]) -> None:
        from mlflow.entities import Metric

        # the tag goes with the last part: a step is there when all of it is
        metrics = [Metric(_name(name), value, round(1000 * time), step) for name, value in figures.items()]
        parts = [metrics[first : first + MOST_FIGURES] for first in range(0, len(metrics), MOST_FIGURES)] or [[]]
        for part in parts[:-1]:
            self._client.log_batch(self.id, metrics=part)
        self._client.log_batch(self.id, metrics=parts[-1], tags=tags)

    def log_samples(self, step: int, table: RolloutTable) -> None:
        """Send a table as a file of its own."""
        columns = {name: [row[place] for row in table.rows] for place, name in enumerate(table.columns)}
        self._client.log_table(self.id, data=columns, artifact_file=f"samples/step_{step:06d}.json")

    def rewind(self, step: int) -> bool:
        """Return False: MLflow keeps every figure that it was sent."""
        return False

    def close(self) -> None:
        """Mark the run as ended; a later launch continues it."""
        self._client.set_terminated(self.id)


def _name(name: str) -> str:
    """Return a name that MLflow takes: as it is, or made one and told from others by a part of its hash.

    MLflow refuses other characters, long names, and what is no path in its shortest form.
    """
    plain = "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "_-. /:" else "_" for letter in name)
    plain = "/".join("_" * max(1, len(part)) if part in ("", ".", "..") else part for part in plain.split("/"))
    if plain.startswith(".."):
        plain = f"_{plain[1:]}"
    if plain == name and len(name) <= LONGEST_NAME:
        return name
    mark = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain[: LONGEST_NAME - 9]}-{mark}"


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [pair for place, item in enumerate(value) for pair in _flat(item, f"{name}.{place}")]
    return [(_name(name), str(value))]
