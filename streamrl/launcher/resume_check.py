"""Whether the run file of a run that is continued fits its newest checkpoint."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from streamrl.config.algorithm import PPOConfig
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.group_source import changed_since, written_by
from streamrl.errors import ErrorCode, RunFailed, UserError
from streamrl.machine.compute_type import ComputeType, TypeChoice
from streamrl.machine.model_files import resolve_model, weights_digest
from streamrl.rollouts.ledger import known_steps
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoint_sums import (
    STATE_FILE,
    TENSORS_FILE,
    TRAINER_STATE,
    DamagedFile,
    check_files,
    check_whole,
    read_sums,
)
from streamrl.run_dir.checkpoints import CheckpointFolder, unreadable
from streamrl.run_dir.resume_point import resume_point
from streamrl.run_dir.status import read_status
from streamrl.runtime.process_plan import plan_processes
from streamrl.tasks.chat_template import load_tokenizer
from streamrl.tasks.source import TaskContent


def check_newest(run: RunConfig, resumed: Path | None) -> Iterable[str]:
    """Check that the newest checkpoint that the run has completed is there with files of their sizes, or was given up.

    Where there is none, the ledger must know of the steps that have files.
    The files are read, and compared with their checksums, only by the processes that need them.
    """
    if resumed is None:
        return
    try:
        known = known_steps(resumed / layout.LEDGER)
    except (sqlite3.Error, OSError):  # it is damaged, or nobody may read it, of which the controller tells
        return
    try:
        step = resume_point(resumed, known, run.checkpoint.every)
    except RunFailed as error:
        yield str(error)
        return
    if not step:
        return
    folder = CheckpointFolder(resumed / layout.CHECKPOINTS).path(step)
    try:
        sums = read_sums(folder)
        needed = [name for name in sums if name == STATE_FILE or name.startswith(f"{TRAINER_STATE}/")]
        check_files(folder, sums, needed, read=False)
        check_whole(folder)
    except DamagedFile as error:
        yield str(unreadable(folder, error))
    except OSError:  # it may pass; if not, a process tells
        return


def check_checkpoint(run: RunConfig, resumed: Path | None) -> Iterable[str]:
    """Check that the newest checkpoint has the critic that the algorithm needs."""
    if (newest := _newest(resumed)) is None or not isinstance(run.algorithm, PPOConfig):
        return
    if has_critic(newest) is False:
        yield ErrorCode.RESUME.refer(
            f"algorithm.name: {run.algorithm.name} needs a critic, and checkpoint {newest} has none; expected the "
            "algorithm that wrote it, or a new run with this folder as its model.path"
        )


def checkpoint_warnings(
    run: RunConfig, resumed: Path | None, contents: Mapping[str, TaskContent] | None = None
) -> Iterable[str]:
    """Warn of what is not as it was at the newest checkpoint.

    That is the order, the rows and the writing of prompts, the KL reference, and a critic that the algorithm does not
    go on with. It loads transformers without torch, so it comes after all code of users that may need both.

    Args:
        run: the run.
        resumed: its folder; None: it is a new one.
        contents: what each task holds, by its key; one that is not there is not compared.
    """
    if (newest := _newest(resumed)) is None:
        return
    state = _state_of(newest)
    with suppress(LookupError, TypeError, AttributeError):  # damaged, or of an earlier version
        yield from changed_since(state["prompts"], run, _written_by(run), contents or {})
    before = str(state.get("reference", "")) if run.algorithm.needs_reference else ""
    if before and before != weights_digest(folder := Path(resolve_model(run.model.path))):
        yield (
            f"model.path: the weights in {folder} are not those of the KL term's reference up to checkpoint {newest}: "
            "from here on they are the reference"
        )
    if not isinstance(run.algorithm, PPOConfig) and has_critic(newest):
        yield (
            f"algorithm.name: checkpoint {newest} has a critic, and {run.algorithm.name} trains none: later "
            "checkpoints will be without it, and ppo cannot go on from them"
        )


def type_warnings(
    cluster: ClusterConfig, run: RunConfig, resumed: Path | None, site: str | None, now: TypeChoice
) -> Iterable[str]:
    """Warn of a compute type that is not the one in which trainer and instances computed when the run last ran.

    Each process with a GPU decides by that one, and each on a node of Ray by its node, so these are left out.

    Args:
        cluster: the cluster in which the run is continued.
        run: the run.
        resumed: its folder; None: it is a new one.
        site: the only site started here; None: all.
        now: the type chosen on this machine.
    """
    if cluster.hardware == "cuda" or (newest := _newest(resumed)) is None or resumed is None:
        return
    try:
        before = read_status(resumed).roles
    except UserError:  # it has none, or one that cannot be read
        return
    sites = [name for name in ([site] if site is not None else cluster.sites) if not cluster.sites[name].on_ray]
    here = [before[spec.name] for spec in plan_processes(cluster, run, resumed, sites) if spec.name in before]
    others = {*get_args(ComputeType)} - {now.dtype}  # an instance may have 8 bits there, which it decides itself
    changed = [one for one in here if one.dtype in others]
    if changed:
        whose = " and ".join(sorted({f"{one.role}s" if one.role == "instance" else one.role for one in changed}))
        yield (
            f"model.dtype: {whose} computed in {changed[0].dtype} before, and from checkpoint {newest} on in {now}: "
            "numbers are rounded in another way; to go on as before, resume on a CPU like the one before, with the "
            "same limits to its instructions"
        )


def _written_by(run: RunConfig) -> dict[str, str]:
    """Return what the run's prompts are written with; {}: the tokenizer cannot be loaded, of which others tell."""
    try:
        return written_by(load_tokenizer(resolve_model(run.model.path)))
    except (UserError, ImportError, AttributeError):
        return {}


def has_critic(checkpoint: Path) -> bool | None:
    """Return whether a checkpoint has a critic; None: it cannot be read."""
    try:  # the names of all tensors; torch's reader would execute what a pickle says
        return b"critic_model." in (checkpoint / TENSORS_FILE).read_bytes()
    except OSError:
        return None


def _state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the controller's part of a checkpoint; {}: it cannot be read."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):  # damaged, of which the controller tells
        return {}
    return state if isinstance(state, dict) else {}


def _newest(resumed: Path | None) -> Path | None:
    """Return the newest checkpoint of a run that is continued."""
    if resumed is None:
        return None
    checkpoints = CheckpointFolder(resumed / layout.CHECKPOINTS)
    step = checkpoints.latest()
    return None if step is None else checkpoints.path(step)
