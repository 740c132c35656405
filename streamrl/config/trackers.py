"""The `trackers:` of a run file: the services and folders to which the run's figures are copied."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from streamrl.config.cluster import StrictModel


class TrackerBase(StrictModel):
    """Keys that every tracker has."""

    samples: int = Field(
        8, ge=0, le=200, description="samples in each table of rollouts, spread over the step's rewards; 0: no tables"
    )
    samples_every: int = Field(10, ge=1, description="optimizer steps between two tables of rollouts")

    def samples_due(self, step: int) -> bool:
        """Return whether a step has a table of rollouts."""
        return self.samples > 0 and (step == 1 or step % self.samples_every == 0)


class TensorBoardTracker(TrackerBase):
    """Event files for TensorBoard."""

    name: Literal["tensorboard"] = "tensorboard"
    folder: str | None = Field(
        None,
        min_length=1,
        description="folder in which the run's event files have a folder of its name, or with a number after it if "
        "another run has that; none: `trackers/tensorboard` in the run's folder",
    )


class WandbTracker(TrackerBase):
    """A run of Weights & Biases."""

    name: Literal["wandb"] = "wandb"
    project: str = Field("streamrl", min_length=1)
    entity: str | None = Field(None, min_length=1, description="user or team; none: the default of the API key")
    group: str | None = Field(None, min_length=1, description="group of runs that it is shown in")
    tags: list[str] = Field(default_factory=list)
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline: write to `trackers/wandb` in the run's folder, for `wandb sync`; needs neither a network "
        "nor a key; none: WANDB_MODE, else online",
    )


class MLflowTracker(TrackerBase):
    """A run of MLflow."""

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(
        None,
        min_length=1,
        description="address of the tracking server, or a database such as sqlite:////data/mlflow.db; none: "
        "MLFLOW_TRACKING_URI, else mlflow.db beside the run's folder",
    )
    experiment: str = Field("streamrl", min_length=1)


class TrackioTracker(TrackerBase):
    """A run of Trackio."""

    name: Literal["trackio"] = "trackio"
    project: str = Field("streamrl", min_length=1)
    space_id: str | None = Field(
        None, min_length=1, description="Hugging Face Space that shows it; none: this machine (`trackio show`)"
    )


TrackerConfig = Annotated[
    TensorBoardTracker | WandbTracker | MLflowTracker | TrackioTracker, Field(discriminator="name")
]

TRACKER_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The package that each tracker imports; the extra that installs it has the tracker's name."""
