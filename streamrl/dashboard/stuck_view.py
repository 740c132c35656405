"""Says what `streamrl why-stuck` says of a run: whether it makes progress, and the chain of who waits for whom.

The processes are looked at from outside and never asked, as a dashboard changes nothing. So whether an event loop runs
stays unknown here; everything else is judged as the command does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamrl.diagnose.snapshot import collect
from streamrl.diagnose.stuck import judge
from streamrl.run_dir.jsonl import finite


def stuck_view(folder: Path) -> dict[str, Any]:
    """Return the verdict on a run, ready for JSON; takes half a second while its processes run on this machine.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        facts = collect(folder, ask=False)
        known = facts.run is not None or facts.site is not None or bool(facts.processes)
        verdict = judge(facts)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:  # of an older version, or damaged
        why = f"unknown: the run's state cannot be judged: {type(error).__name__}: {error}"
        return {"state": "unknown", "sentence": why, "chain": [], "details": []}
    if not known:
        return {"state": "unknown", "sentence": "", "chain": [], "details": []}
    cpu = {one.name: one.cpu for one in facts.processes}
    clean: dict[str, Any] = finite(
        {
            "state": verdict.state,
            "sentence": verdict.sentence,
            "chain": [asdict(edge) | {"cpu": cpu.get(edge.target)} for edge in verdict.edges],
            "details": verdict.details,
        }
    )
    return clean
