"""`status.json`: the run's state right now. The controller replaces it about twice a second; everyone else
reads it.

Both directions pass through the same models, so that a status that a reader could not show is refused where
it is written, and a reader never meets half a file (the file is replaced in one piece).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.atomic_files import replace_json
from streamrl.errors import UserError
from streamrl.run_dir import layout
from streamrl.run_dir.jsonl import finite
from streamrl.run_dir.metrics import MetricsRow

STALE_AFTER_S = 10.0
"""The controller writes every half second: twenty missed updates are no hiccup."""

RunState = Literal["starting", "running", "stopping", "done", "interrupted", "failed"]
FINAL_STATES: frozenset[str] = frozenset({"done", "interrupted", "failed"})


class StatusModel(BaseModel):
    """Values do not change after reading; keys of a newer version are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RoleStatus(StatusModel):
    """One process."""

    role: Literal["controller", "trainer", "service", "instance", "rewards"]
    state: str
    detail: str = ""
    since: float = Field(description="unix seconds at which it got into this state")
    pid: int | None = None
    memory_gb: float | None = None
    silent_s: float | None = Field(None, description="since its last sign of life; none: it speaks to another process")
    running: int | None = Field(None, description="requests being worked on")
    waiting: int | None = Field(None, description="requests in its queue")
    tokens_per_s: float | None = None
    weight_version: int | None = None
    dtype: str = Field("", description="the type that it computes in; '': it does not compute, or has not said it yet")
    dtype_why: str = ""


class StepProgress(StatusModel):
    """The step under way."""

    groups_total: int = 0
    groups_complete: int = 0
    samples_total: int = 0
    samples_finished: int = 0
    samples_trained: int = 0
    tokens_generated: int = 0
    lengths: list[int] = Field(default_factory=list, description="output lengths finished in this step, tokens")
    predicted_lengths: list[int] = Field(
        default_factory=list, description="what was predicted of each of this step's samples"
    )


class WaitStatus(StatusModel):
    """One registered wait."""

    owner: str
    waiting_for: str
    since: float
    limit_s: float


class RankerStatus(StatusModel):
    """How far output lengths can be told before; over the newest steps."""

    trusted: bool = False
    recall_at_20: float | None = None
    kendall_tau: float | None = None
    note: str = Field("", description="the newest change of trust, and what follows")


ABSENT_AFTER_S = 10.0
"""A site that has been silent for this long is shown as away, and gets no new work as long as another one can."""


class RemoteSite(StatusModel):
    """A site that generates behind a link, as the controller sees it."""

    silent_s: float = Field(description="since its service's last sign of life")
    rtt_ms: float | None = None
    clock_offset_s: float | None = Field(None, description="this site's clock minus its clock, before correction")
    samples_waiting: int = Field(0, description="finished there, and not yet committed here")
    compression: float | None = Field(None, description="raw bytes of samples for one that is sent")
    congested: bool = False
    weights_refetched: int = Field(0, description="parts of weights that arrived damaged and were fetched again")

    @property
    def away(self) -> bool:
        """Whether it is out of reach."""
        return self.silent_s > ABSENT_AFTER_S


class ComingInstance(StatusModel):
    """An instance that was added to the running job; times are unix seconds, None: not yet."""

    instance: str
    asked_at: float
    ready_at: float | None = Field(None, description="it holds the weights that are served")
    first_sample_at: float | None = Field(None, description="its first sample is in the ledger")


class ScalingStatus(StatusModel):
    """How many instances each pool has; pools are named site/pool."""

    wanted: dict[str, int] = Field(default_factory=dict)
    ready: dict[str, int] = Field(default_factory=dict)
    there: dict[str, int] = Field(default_factory=dict, description="with those that are coming or leaving")
    coming: list[ComingInstance] = Field(default_factory=list, description="the newest ones that were added")
    note: str = Field("", description="what the run's own elasticity has last decided, or watches")


class RunStatus(StatusModel):
    """A whole status file; times are unix seconds."""

    run: str
    state: RunState
    step: int = Field(ge=0, description="optimizer steps completed")
    steps: int = Field(ge=0, description="optimizer steps wanted")
    started_at: float
    updated_at: float
    eta_s: float | None = None
    schedule: str = ""
    schedule_note: str = Field("", description="what the schedule has chosen by itself, and why; the newest choice")
    model: str = ""
    hardware: str = ""
    roles: dict[str, RoleStatus] = Field(default_factory=dict)
    sites: dict[str, RemoteSite] = Field(default_factory=dict)
    scaling: ScalingStatus = Field(default_factory=ScalingStatus)
    progress: StepProgress = Field(default_factory=StepProgress)
    ranker: RankerStatus = Field(default_factory=RankerStatus)
    latest: MetricsRow | None = None
    waits: list[WaitStatus] = Field(default_factory=list)
    error: str | None = None

    @property
    def types(self) -> str:
        """What trainer and instances compute in: 'float32', or 'trainer bfloat16, instances float32'."""
        of_role: dict[str, set[str]] = {}
        for one in self.roles.values():
            if one.dtype:
                of_role.setdefault(one.role, set()).add(one.dtype)
        if len(set().union(*of_role.values())) < 2:
            return "".join(set().union(*of_role.values()))
        names = {"trainer": "trainer", "instance": "instances"}
        return ", ".join(f"{names.get(role, role)} {' and '.join(sorted(types))}" for role, types in of_role.items())

    @property
    def why_types(self) -> str:
        """Why these: what was measured, by process; processes of one cause are named together."""
        causes: dict[str, list[str]] = {}
        for name, one in self.roles.items():
            if one.dtype:
                causes.setdefault(f"{one.dtype} ({one.dtype_why})", []).append(name)
        return "; ".join(f"{', '.join(names)}: {cause}" for cause, names in causes.items())

    @property
    def final(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.state in FINAL_STATES

    def stale_for(self, now: float) -> float | None:
        """Seconds since the last update when that is too long for a run that has not ended, else None."""
        age = now - self.updated_at
        return age if not self.final and age > STALE_AFTER_S else None


def write_status(run_dir: Path, status: dict[str, Any]) -> None:
    """Replaces the status file; NaN and infinities become null.

    Raises:
        pydantic.ValidationError: a value that does not fit `RunStatus`.
        OSError: the file cannot be written.
    """
    clean = finite(status)
    RunStatus.model_validate(clean)
    replace_json(run_dir / layout.STATUS, clean)


def read_status(run_dir: Path) -> RunStatus:
    """The run's state as last written.

    Raises:
        UserError: the folder does not exist, holds no run, or its status file is not one.
    """
    path = run_dir / layout.STATUS
    try:
        return RunStatus.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        raise UserError(f"{run_dir} is a file; expected a run folder such as runs/NAME") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path} cannot be read: {where}: {first['msg']}") from error
    if not run_dir.exists():
        raise UserError(f"no such run folder: {run_dir}{_known_runs(run_dir.parent)}")
    raise UserError(f"{run_dir} holds no run (no {layout.STATUS} in it){_known_runs(run_dir)}")


def _known_runs(parent: Path) -> str:
    """'; there are: ...' with the run folders in `parent`, newest first, or nothing."""
    found = sorted(parent.glob(f"*/{layout.STATUS}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return "; there are: " + ", ".join(str(path.parent) for path in found[:5]) if found else ""
