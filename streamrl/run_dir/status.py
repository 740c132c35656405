"""`status.json`: the current state of the run, replaced by the controller about twice a second.

Writer and readers use the same models, so a status that a reader could not show is refused when it is written. The file
is replaced atomically, so a reader never sees half of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from streamrl.atomic_files import overwrite, replace_json
from streamrl.errors import UserError, as_typed
from streamrl.plain_files import read_plain
from streamrl.run_dir import layout
from streamrl.run_dir.jsonl import finite
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.remote_site import RemoteSite
from streamrl.run_dir.status_model import StatusModel

STALE_AFTER_S = 10.0
"""Age in seconds at which a status is stale: the controller has missed twenty updates."""

RunState = Literal["starting", "running", "stopping", "done", "interrupted", "failed"]
FINAL_STATES: frozenset[str] = frozenset({"done", "interrupted", "failed"})


class RoleStatus(StatusModel):
    """The state of one process."""

    role: Literal["controller", "trainer", "service", "instance", "rewards", "agents"]
    state: str
    detail: str = ""
    since: float = Field(description="unix seconds at which it entered this state")
    pid: int | None = None
    memory_gb: float | None = Field(
        None, description="memory of the process and of those below it, GiB; none: not measured, as on another machine"
    )
    silent_s: float | None = Field(
        None, description="seconds since its last sign of life; none: it reports to another process"
    )
    session: str = Field(
        "", description="the process that gave the last sign of life: another text after each start; '': none has"
    )
    running: int | None = Field(None, description="requests being worked on")
    waiting: int | None = Field(None, description="requests in its queue")
    tokens_per_s: float | None = None
    weight_version: int | None = None
    drafts: str = Field(
        "",
        description="tokens accepted / drafted since an instance's start, by source and age of the drafted text in "
        "weight versions; '': it does not speculate",
    )
    dtype: str = Field("", description="its compute type; '': it does not compute, or has not reported it yet")
    dtype_why: str = ""
    packing: str = Field("", description="a trainer's packing, shared or separate; '': no trainer, or not decided yet")
    packing_why: str = ""


LENGTH_BINS = 32
"""Bins of `LengthCounts`."""


class LengthCounts(StatusModel):
    """Numbers of samples by length, in `LENGTH_BINS` equally wide bins from 0."""

    counts: list[int]
    width: int = Field(description="tokens of a bin")
    median: int = Field(description="median length, the higher of two, tokens")
    longest: int = Field(description="tokens of the longest")


class StepProgress(StatusModel):
    """The progress of the current step."""

    groups_total: int = 0
    groups_complete: int = 0
    samples_total: int = 0
    samples_finished: int = 0
    samples_trained: int = 0
    tokens_generated: int = 0
    length_counts: LengthCounts | None = Field(
        None, description="output lengths of the samples finished in this step; none: none has"
    )
    predicted_length_counts: LengthCounts | None = Field(
        None, description="predicted lengths of all of this step's samples, in the same bins; none: none is predicted"
    )


HEARS_END = " to hear that the run is over"
"""What a wait of the controller at the end is for, after the name of a site's service."""
TOLD_WITHIN_S = 2.0
"""Seconds within which a site that is there hears that the run is over."""


class WaitStatus(StatusModel):
    """A registered wait of a process."""

    owner: str
    waiting_for: str
    since: float = Field(
        description="what the limit counts from (unix seconds): the start of the wait, or the latest sign of progress"
    )
    limit_s: float


class RankerStatus(StatusModel):
    """The quality of the length predictions over the newest steps."""

    trusted: bool = False
    used: bool = Field(
        False, description="whether dispatch goes by the predictions: trusted, and the policy reads them"
    )
    recall_at_20: float | None = None
    kendall_tau: float | None = None
    doubts: str = Field("", description="why they are not trusted; '': they are")
    note: str = Field("", description="newest change of trust and its consequence")


class ComingInstance(StatusModel):
    """An instance added to the running job; times are unix seconds, None: not yet."""

    instance: str
    requested_at: float
    ready_at: float | None = Field(None, description="time at which it had loaded the current weights")
    first_sample_at: float | None = Field(None, description="time at which its first sample was in the ledger")


class ScalingStatus(StatusModel):
    """The instances of each pool; pools are named site/pool."""

    wanted: dict[str, int] = Field(default_factory=dict)
    ready: dict[str, int] = Field(default_factory=dict)
    there: dict[str, int] = Field(
        default_factory=dict, description="instances including those that are starting or leaving"
    )
    dead: dict[str, list[str]] = Field(
        default_factory=dict, description="names of those that have died and are not restarted any more"
    )
    coming: list[ComingInstance] = Field(default_factory=list, description="instances added most recently")
    note: str = Field("", description="last decision, or current observation, of the run's elasticity")


SINCE = "since the controller last started"
"""What is said of counts that begin at 0 with every resume and every restart of the controller."""


class VerifiedStatus(StatusModel):
    """The comparison of the instances with the trainer, since the controller started."""

    versions: int = Field(0, description="weight versions on which instances and trainer agree")
    comparisons: int = Field(0, description="comparisons of an instance with the trainer")
    worst: float | None = Field(None, description="largest mean |difference| of log-probabilities so far, nats")
    bound: float | None = Field(None, description="largest difference allowed, nats")
    mismatch: str = Field("", description="newest mismatch; '': there was none")

    @property
    def words(self) -> str:
        """'verified end to end, 3 versions (...)'; '' before the first comparison."""
        if not self.comparisons:
            return ""
        detail = f"{self.comparisons} comparisons, largest difference {self.worst or 0:.2g} nats"
        found = f"verified end to end, {self.versions} versions ({detail}, bound {self.bound or 0:.2g})"
        return f"{found} {SINCE}"


RESUME = "continue with: streamrl launch --resume"
"""Beginning of the last line of an error of a run that can be continued."""


class RunStatus(StatusModel):
    """The content of `status.json`; times are unix seconds."""

    run: str
    state: RunState
    step: int = Field(ge=0, description="optimizer steps completed")
    steps: int = Field(ge=0, description="optimizer steps in total")
    started_at: float = Field(description="start of the controller, anew with every resume and every restart of it")
    first_started_at: float | None = Field(
        None, description="start of the run's first process, by its first launch as far as known; none: `started_at`"
    )
    updated_at: float = Field(allow_inf_nan=False)
    elapsed_s: float | None = Field(
        None,
        description="seconds from the run's first start to `updated_at`, by a clock that nobody sets since the launch; "
        "none: unknown, as in runs of earlier versions",
    )
    eta_s: float | None = Field(
        None, description="seconds left at the pace of the last steps; none: unknown, or no step is left to do"
    )
    schedule: str = ""
    schedule_note: str = Field("", description="newest automatic choice of the schedule, and why")
    disk_warning: str = Field(
        "",
        description="when the disk will be full, if that is before the last step; '': it has room, as far as known",
    )
    model: str = ""
    hardware: str = ""
    absence_s: float | None = Field(
        None, description="seconds of a site's silence after which the run ends; none: there is one site"
    )
    roles: dict[str, RoleStatus] = Field(default_factory=dict)
    sites: dict[str, RemoteSite] = Field(default_factory=dict)
    scaling: ScalingStatus = Field(default_factory=ScalingStatus)
    progress: StepProgress = Field(default_factory=StepProgress)
    verified: VerifiedStatus = Field(default_factory=VerifiedStatus)
    ranker: RankerStatus = Field(default_factory=RankerStatus)
    latest: MetricsRow | None = None
    refused: dict[str, dict[str, int]] = Field(
        default_factory=dict,
        description="what processes refused since the controller started, by cause and peer; 'peer at process' unless "
        "the controller did",
    )
    waits: list[WaitStatus] = Field(default_factory=list)
    untold: list[str] = Field(
        default_factory=list,
        description="sites that could not be told that the run is done; each waits until `absence_s` has passed",
    )
    error: str | None = None
    """Why the run has failed, in one or more lines, which may end with a traceback of the user's code."""

    @property
    def types(self) -> str:
        """Compute types of trainer and instances: 'float32', or 'trainer bfloat16, instances float32'."""
        of_role: defaultdict[str, set[str]] = defaultdict(set)
        for one in self.roles.values():
            if one.dtype:
                of_role["instances" if one.role == "instance" else one.role].add(one.dtype)
        if len(every := set().union(*of_role.values())) < 2:
            return "".join(every)
        return ", ".join(f"{role} {' and '.join(sorted(types))}" for role, types in of_role.items())

    @property
    def why_types(self) -> str:
        """Reasons for the compute types, with processes of the same reason grouped."""
        causes: defaultdict[str, list[str]] = defaultdict(list)
        for name, one in self.roles.items():
            if one.dtype:
                causes[f"{one.dtype} ({one.dtype_why})"].append(name)
        return "; ".join(f"{', '.join(names)}: {cause}" for cause, names in causes.items())

    @property
    def short_error(self) -> str:
        """The error without the traceback that it may contain, which its first line sums up; '': none."""
        before, traceback, rest = (self.error or "").partition("\nTraceback (most recent call last):\n")
        last = rest.splitlines()[-1:]
        return "\n".join([before, *(line for line in last if RESUME in line)]) if traceback else before

    @property
    def refused_words(self) -> str:
        """'not its own: service-west 3; malformed: a stranger 1'; '' if nothing was refused."""
        causes = (
            f"{cause}: {', '.join(f'{peer} {count}' for peer, count in sorted(peers.items()))}"
            for cause, peers in sorted(self.refused.items())
        )
        return "; ".join(causes)

    @property
    def why_packing(self) -> str:
        """The trainer's packing and the reason for it; '': not decided yet."""
        return next((f"{one.packing} ({one.packing_why})" for one in self.roles.values() if one.packing), "")

    @property
    def first_start(self) -> float:
        """Start of the run by its first launch, in unix seconds."""
        return self.started_at if self.first_started_at is None else self.first_started_at

    def elapsed(self, until: float, since: float | None = None) -> float:
        """Return the seconds between two times; a clock that is set during the launch changes them by nothing.

        Args:
            until: unix seconds.
            since: unix seconds, not after the controller's start; None: the run's first start.
        """
        if self.elapsed_s is None:
            whole = until - self.first_start
        else:
            whole = self.elapsed_s + max(0.0, until - self.updated_at)
        return whole if since is None else whole - (since - self.first_start)

    @property
    def farewell(self) -> str:
        """What holds up the end of a run that is done: sites that are away; '': nothing, or not for long yet."""
        late = [one for one in self.waits if self.updated_at - one.since > TOLD_WITHIN_S]
        names = {one.waiting_for.removesuffix(HEARS_END): one for one in late if one.waiting_for.endswith(HEARS_END)}
        if self.state != "done" or not names:
            return ""
        limit = f"waiting up to {max(one.limit_s for one in names.values()):.0f} s"
        return f"the run is done; {limit} for {', '.join(names)} to come back and hear of it (Ctrl-C ends this)"

    @property
    def final(self) -> bool:
        """Whether the run has ended, successfully or not."""
        return self.state in FINAL_STATES

    def stale_for(self, now: float) -> float | None:
        """Return the seconds since the last update if they do not speak for a live run, else None.

        They are too many, or negative: a clock was set back, or that of the run's machine is ahead, and the age of the
        update is unknown.
        """
        age = now - self.updated_at
        return age if not self.final and abs(age) > STALE_AFTER_S else None

    def is_live(self, now: float) -> bool:
        """Whether the status says what the run does now: it has not ended, and the controller still writes."""
        return not self.final and self.stale_for(now) is None

    def as_of(self, now: float) -> float:
        """Return the time of which the status tells: now, but that of its last update if it is not live."""
        return now if self.is_live(now) else self.updated_at


def step_began(state: str, running_since: float | None, last_ended: float | None) -> float | None:
    """Return when the present step began: when the last one ended, or when the controller began to run, if later.

    Args:
        state: the run's state.
        running_since: when the controller entered its state, in unix seconds; None: unknown.
        last_ended: when the newest step ended; None: none has.

    Returns:
        Unix seconds; None: it is unknown, or the run still starts.
    """
    began = [value for value in (running_since, last_ended) if value is not None]
    return None if state == "starting" else max(began, default=None)


KEPT = {"run", "state", "step", "steps", "started_at", "first_started_at", "updated_at", "elapsed_s", "model", "error"}
"""Keys of a status that is written in place of another when there is no room for a new file."""


def write_status(run_dir: Path, status: dict[str, Any]) -> None:
    """Replace the status file; NaN and infinities become null.

    Raises:
        pydantic.ValidationError: a value that does not fit `RunStatus`.
        OSError: the file cannot be written.
    """
    clean = finite(status)
    RunStatus.model_validate(clean)
    replace_json(run_dir / layout.STATUS, clean)


def overwrite_status(run_dir: Path, status: dict[str, Any]) -> None:
    """Write the last status in place of the old one, without what it says of processes: a full disk allows that.

    It fits into the blocks that the file has: the end of a long error is cut off. Without a file nothing is written.
    """
    kept = {key: item for key, item in finite(status).items() if key in KEPT}

    def shorter_and_shorter() -> Iterator[bytes]:
        yield json.dumps(kept).encode()
        while kept["error"]:
            kept["error"] = kept["error"][: len(kept["error"]) // 2]
            yield json.dumps(kept).encode()

    overwrite(run_dir / layout.STATUS, shorter_and_shorter())


def touch_status(run_dir: Path) -> None:
    """Make the status file, if there is one, seem written now: a full disk allows that, too."""
    with contextlib.suppress(OSError):
        os.utime(run_dir / layout.STATUS)


def read_status(run_dir: Path) -> RunStatus:
    """Read the run's state as last written.

    Raises:
        UserError: the folder does not exist, holds no run or is that of a site that only generates, or its status file
            is invalid, no plain file, or not for this user to read.
    """
    path = run_dir / layout.STATUS
    try:
        return _parse_status(read_plain(path, below=layout.whole_folder(run_dir)))
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
    if (run_dir / layout.SITE_STATUS).exists():
        raise UserError(
            f"{run_dir} is the folder of a site that only generates; expected the folder of the trainer's site, which "
            "has the run's state, on that site's machine"
        )
    from streamrl.config.load import RESOLVED_NAME  # takes long, and few readers come here

    if (run_dir / RESOLVED_NAME).exists():
        raise UserError(
            f"the run in {run_dir} has no {layout.STATUS}: it starts, or its launcher died before it wrote one; if "
            f"nothing runs, {RESUME} {as_typed(run_dir)} (with the same --site or --emulate, if any)"
        )
    raise UserError(f"{run_dir} holds no run (no {layout.STATUS} in it){_known_runs(run_dir)}")


def _parse_status(content: bytes) -> RunStatus:
    """Return a status without keys of another version, in its newest metrics too, as in `read_metrics`.

    Raises:
        ValidationError: it is no status.
    """
    try:
        return RunStatus.model_validate_json(content)
    except ValidationError as error:
        if {(one["type"], one["loc"][:1]) for one in error.errors()} != {("extra_forbidden", ("latest",))}:
            raise
    values = json.loads(content)
    values["latest"] = {key: item for key, item in values["latest"].items() if key in MetricsRow.model_fields}
    return RunStatus.model_validate(values)


def _known_runs(parent: Path) -> str:
    """Return '; there are: ...' with the run folders in `parent`, newest first, or ''."""
    found = sorted(parent.glob(f"*/{layout.STATUS}"), key=_written, reverse=True)
    return "; there are: " + ", ".join(str(path.parent) for path in found[:5]) if found else ""


def _written(path: Path) -> float:
    """Return when a file was written, in unix seconds; 0: it is gone by now."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
