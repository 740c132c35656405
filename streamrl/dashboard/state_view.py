"""What a run's folder says of its current state: processes, sites, waits, progress, what was refused.

Everything here reads files only; no process is asked. A part that is missing or cannot be read is left out, and said in
`notes`, so that a copied or an old folder shows what it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.config.load import RESOLVED_NAME
from streamrl.errors import UserError
from streamrl.plain_files import strange_entries
from streamrl.report.panels import stale_message
from streamrl.report.process_rows import (
    BAD_STATES,
    FEW_ALIKE,
    MOST_ALONE,
    alike,
    details_of,
    in_order,
    label_of,
    sum_of,
    versions_of,
)
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, read_started
from streamrl.run_dir.jsonl import finite
from streamrl.run_dir.site_status import SiteStatus, read_site
from streamrl.run_dir.start_stages import Stage, read_stages
from streamrl.run_dir.status import RunStatus, read_status

MARKS = (layout.STATUS, layout.METRICS, layout.SITE_STATUS, RESOLVED_NAME, layout.ADDRESSES, layout.START_STAGES)
"""Files and folders of which each makes its folder a run's."""
MOST_TEXT = 4_000
"""Characters of last words and errors that are shown."""


def is_run(folder: Path) -> bool:
    """Whether the folder is a run's, or a site's; one in which nothing can be read is not."""
    try:
        return any((folder / name).exists() for name in MARKS)
    except OSError:  # of another user
        return False


def state_view(folder: Path, now: float) -> dict[str, Any]:
    """Return the run's current state, ready for JSON.

    Args:
        folder: the run's folder.
        now: unix seconds.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    notes = [f"{phrase}, and is not read." for phrase in strange_entries(folder, deep=False)]
    stages = _stages(folder)
    starts = any(not stage.ready for stage in stages.values()) or not _has_run(folder)
    status = _status(folder, notes, starts)
    folders = _site_folders(folder)
    started = _started(folders, notes)
    sites = {site: told for site, path in folders.items() if (told := _site(path))}
    seen = now if status is None else status.as_of(now)  # times of a run that has ended stand still
    view: dict[str, Any] = {
        "name": folder.name,
        "folder": str(folder),
        "now": now,
        "state": _state_word(status, sites, starts),
        "live": status is not None and status.is_live(now),
        "trouble": [text for text in (status and status.error, status and stale_message(status, now)) if text],
        "processes": _processes(status, stages, started, seen),
        "sites": _sites(status, sites, now),
        "waits": None if status is None else [_wait(one.model_dump(), seen) for one in status.waits],
        "refused": {} if status is None else status.refused,
        "notes": notes,
    }
    if status is not None:
        shown = ("step", "steps", "updated_at", "eta_s", "schedule", "schedule_note", "model", "hardware")
        view |= {key: getattr(status, key) for key in shown}
        view |= {
            "elapsed_s": status.elapsed(seen),
            "progress": status.progress.model_dump(),
            "ranker": status.ranker.model_dump(),
            "scaling": status.scaling.model_dump(),
            "verified": status.verified.words,
            "mismatch": status.verified.mismatch,
            "disk": status.disk_warning,
            "types": status.types,
        }
    clean: dict[str, Any] = finite(view)
    return clean


def _status(folder: Path, notes: list[str], starts: bool) -> RunStatus | None:
    try:
        return read_status(folder)
    except (UserError, OSError) as error:
        if (folder / layout.STATUS).exists():
            notes.append(f"The run's state is unknown: {error}.")
        elif not (folder / layout.SITE_STATUS).exists() and not starts:
            notes.append(f"There is no {layout.STATUS}, so only what the other files say is shown.")
        return None


def _stages(folder: Path) -> dict[str, Stage]:
    try:
        return read_stages(folder)
    except OSError:
        return {}


def _site_folders(folder: Path) -> dict[str, Path]:
    try:
        return layout.site_folders(folder)
    except OSError:
        return {"": folder}


def _started(folders: dict[str, Path], notes: list[str]) -> dict[str, StartedProcess]:
    found: dict[str, StartedProcess] = {}
    for path in folders.values():
        try:
            found |= {one.name: one for one in read_started(path)}
        except (OSError, ValueError, TypeError) as error:
            notes.append(f"{path.name}/{layout.PROCESSES} cannot be read: {error}.")
    return found


def _site(folder: Path) -> SiteStatus | None:
    try:
        return read_site(folder)
    except OSError:
        return None


def _has_run(folder: Path) -> bool:
    """Whether the folder has more than the files with which a run begins."""
    return any((folder / name).exists() for name in (layout.STATUS, layout.METRICS, layout.ROLLOUTS))


def _state_word(status: RunStatus | None, sites: dict[str, SiteStatus], starts: bool) -> str:
    """Return the run's state; `starts`: whether a run without a status starts, be it one that has steps already."""
    if status is not None:
        return status.state
    if "" in sites:
        return sites[""].state
    return "starting" if starts else "unknown"


def _processes(
    status: RunStatus | None, stages: dict[str, Stage], started: dict[str, StartedProcess], now: float
) -> list[dict[str, Any]]:
    """Return every process that a file names, in the order of `status.json`, then of the launcher.

    Those of a large pool that are alike share a row, as in `streamrl status`.
    """
    roles = status.roles if status is not None else {}
    found = []
    for name in dict.fromkeys([*roles, *started, *stages]):
        role, process, stage = roles.get(name), started.get(name), stages.get(name)
        row: dict[str, Any] = {"name": name, "role": process.role if process else "", "state": "", "detail": ""}
        if role is not None:
            row |= role.model_dump(exclude={"dtype_why", "packing_why"})
        if stage is not None and not stage.ready and (role is None or role.state in ("starting", "loading")):
            row |= {"state": "starting", "detail": stage.text, "since": stage.since}
        if process is not None and process.exit_code is not None:
            row |= {"state": "ended", "exit_code": process.exit_code, "last_words": process.last_words[:MOST_TEXT]}
        if not row["state"]:
            row["state"] = "ready" if stage is not None and stage.ready else "started"
        since = row.get("since")
        row["for_s"] = None if since is None else max(0.0, now - since)
        row["bad"] = row["state"] in BAD_STATES or bool(row.get("exit_code"))
        found.append(row)
    return _shared(found)


def _shared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, with one in place of those of many instances of a pool in one state."""
    by_name = {row["name"]: row for row in rows}
    instances = [row["name"] for row in rows if row["role"] == "instance"]
    kinds = {name: f"{by_name[name]['state']} {'bad' * by_name[name]['bad']}" for name in instances}
    shared = alike(instances, kinds.__getitem__, lambda kind: MOST_ALONE if kind.endswith("bad") else FEW_ALIKE)
    return [_together([by_name[name] for name in names]) for names in in_order(by_name, shared)]


def _together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for processes in one state: their sums, and the longest times."""
    if len(rows) == 1:
        return rows[0]
    sums = {name: sum_of(row.get(name) for row in rows) for name in ("running", "waiting", "tokens_per_s", "memory_gb")}
    times = {
        name: max((row[name] for row in rows if row.get(name) is not None), default=None)
        for name in ("for_s", "silent_s")
    }
    told = {row["name"]: "; ".join(filter(None, (row["detail"], row.get("last_words")))) for row in rows}
    return {
        "name": label_of([row["name"] for row in rows]),
        **{name: rows[0][name] for name in ("role", "state", "bad")},
        **sums,
        **times,
        "detail": details_of(told),
        "weight_versions": versions_of(row.get("weight_version") for row in rows) or None,
        "dtype": ", ".join(dict.fromkeys(row["dtype"] for row in rows if row.get("dtype"))),
    }


def _sites(status: RunStatus | None, sites: dict[str, SiteStatus], now: float) -> list[dict[str, Any]]:
    """Return the sites behind links: as the controller sees them, else as their own folders say."""
    remote = status.sites if status is not None else {}
    found = [
        {"name": name, **one.model_dump(), "away": one.away, "absence": one.absence} for name, one in remote.items()
    ]
    found += [
        {
            "name": one.site,
            **one.model_dump(exclude={"site"}),
            "away": one.away,
        }
        for one in sites.values()
        if one.site not in remote
    ]
    return found


def _wait(wait: dict[str, Any], now: float) -> dict[str, Any]:
    waited = max(0.0, now - wait["since"])
    return wait | {"waited_s": waited, "share": min(1.0, waited / wait["limit_s"]) if wait["limit_s"] else None}
