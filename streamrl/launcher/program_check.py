"""The check of agents that are scripts: the file must be where the agents run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask

INTERPRETER = re.compile(r"(python|pypy)[\d.]*|bash|dash|sh|zsh|node|bun|deno")
SCRIPTS = (".py", ".sh", ".js")


def check_scripts(cluster: ClusterConfig, run: RunConfig, site: str | None) -> Iterable[str]:
    """Check that scripts of agents exist, seen from this folder, in which the agents of this machine run.

    Only a script right after a known interpreter is looked for: other programs may look for theirs elsewhere.

    Args:
        cluster: the resolved cluster file.
        run: the resolved run file.
        site: the only site started here; None: all.
    """
    sites = [cluster.sites[site]] if site is not None else cluster.sites.values()
    if not any(one.generation and not one.on_ray for one in sites):
        return  # agents run on other machines
    held_out = run.evaluation.tasks if run.evaluation else []
    named = [(f"tasks.{number}", task) for number, task in enumerate(run.tasks)]
    named += [(f"evaluation.tasks.{number}", task) for number, task in enumerate(held_out)]
    for key, task in named:
        match task.command if isinstance(task, AgentTask) else None:
            case [program, script, *_] if script.endswith(SCRIPTS) and INTERPRETER.fullmatch(Path(program).name):
                if not Path(script).is_file():
                    yield f"{key}.command: there is no file {script!r} for {program} in this folder"
