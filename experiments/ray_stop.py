"""Measure how long a launcher takes to stop a run's processes on Ray, by their number.

    .venv/bin/python experiments/ray_stop.py                     # some minutes; 64 MB or more a process
    .venv/bin/python experiments/ray_stop.py --summary-only      # the table from the JSON again

A Ray cluster of one node starts so many actors, each of which runs a process as a launcher has it run
(`launcher/ray_backend.py`); the process itself only sleeps. Then `ProcessGroup.stop` ends them, as Ctrl-C does:

*obedient*: they end at SIGTERM. *stubborn*: they ignore it, and are killed when the grace period is over. *frozen*:
their actors are stopped (SIGSTOP), as on a node that hangs: neither SIGTERM nor a kill is answered, and what is left to
a launcher is one deadline for all of them, and Ray's own kill of an actor.

*One after the other* is what a launcher must not do: the same frozen processes, each with that deadline of its own. It
is measured with the fewest only. After each stop nothing of them may be alive.

Writes experiments/results/ray_stop.json and .md.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil
from running import Sheet, explanation, machine_with_load, read_record, results_folder, terminal, write_tables

from streamrl.config.cluster import ClusterConfig
from streamrl.launcher.process_group import STOP_S, ProcessGroup
from streamrl.launcher.started_process import KILL_S
from streamrl.run_dir import layout
from streamrl.runtime.process_plan import ProcessSpec

OBEDIENT = "import time; time.sleep(3600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
START_S = 600.0
"""Seconds within which all actors and their processes must run."""
GONE_S = 30.0
"""Seconds after a stop within which nothing of it may be alive."""
KINDS = ("obedient", "stubborn", "frozen")


def begin(site: Any, folder: Path, count: int, code: str) -> ProcessGroup:
    """Start processes through Ray, and wait until all of them run."""
    command = [sys.executable, "-S", "-c", code]
    specs = [ProcessSpec(f"here-{n}", "instance", "here", "regular", command, index=n) for n in range(count)]
    share = SimpleNamespace(
        run_dir=folder,
        folders={"here": folder},
        hosts={"here": site},
        env={},
        place=lambda check_stop: None,
        processes=lambda: specs,
        possible_instances=lambda site: {},
        namespace=lambda site: None,
    )
    group = ProcessGroup(share, resume=False)  # type: ignore[arg-type]
    group.start()
    deadline = time.monotonic() + START_S
    while not all(process.pid for process in group._processes):
        assert time.monotonic() < deadline, "Ray does not start them"
        time.sleep(0.2)
    time.sleep(1.0)  # for their Python to have set its handler
    assert all(process.exit_code is None for process in group._processes)
    return group


def workers_of(pids: list[int]) -> list[psutil.Process]:
    """Return the actors' own processes."""
    return [parent for pid in pids if (parent := psutil.Process(pid).parent()) is not None]


def measure(site: Any, folder: Path, count: int, kind: str, one_by_one: bool = False) -> dict[str, Any]:
    """Start so many processes, stop them, and return what that took."""
    group = begin(site, folder, count, STUBBORN if kind == "stubborn" else OBEDIENT)
    pids = [process.pid for process in group._processes]
    workers = workers_of(pids)
    memory = sum(one.memory_full_info().pss for one in workers) / count
    if kind == "frozen":
        for one in workers:
            one.send_signal(signal.SIGSTOP)
    started = time.perf_counter()
    if one_by_one:
        for process in group._processes:
            process.kill()
    else:
        group.stop()
    seconds = time.perf_counter() - started
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < deadline, f"alive after the stop: {left}"
        time.sleep(0.1)
    return {"count": count, "kind": kind, "one_by_one": one_by_one, "seconds": seconds, "actor_bytes": memory}


def measure_all(counts: list[int]) -> list[dict[str, Any]]:
    """Measure all kinds and numbers on one cluster."""
    import ray
    from ray.cluster_utils import Cluster

    from streamrl.launcher.ray_backend import RaySite

    head = {"num_cpus": 4 * max(counts), "include_dashboard": False, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        launch = {"backend": "ray", "address": made.address}
        one = {"launch": launch, "trainer": {"gpu": "cpu"}, "generation": [{"gpu": "cpu"}]}
        cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": one}})
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / layout.LOGS).mkdir()
            site = RaySite(cluster, "here", folder)
            measure(site, folder, min(counts), "obedient")  # the first start loads Ray's worker
            found = [measure(site, folder, count, kind) for count in counts for kind in KINDS]
            return [*found, measure(site, folder, min(counts), "frozen", one_by_one=True)]
    finally:
        ray.shutdown()
        made.shutdown()


def sheet(values: dict[str, Any]) -> Sheet:
    """Return the table."""
    found = {(one["count"], one["kind"], one["one_by_one"]): one["seconds"] for one in values["stops"]}
    rows = []
    for count in values["counts"]:
        alone = found.get((count, "frozen", True))
        seconds = [f"{found[count, kind, False]:.1f}" for kind in KINDS]
        rows.append((str(count), *seconds, "" if alone is None else f"{alone:.1f}"))
    return Sheet(
        "Seconds to stop processes on Ray",
        ("processes", *KINDS, "frozen, one after the other"),
        rows,
        [f"deadlines for all together: {STOP_S:g} s from SIGTERM to the kill, {KILL_S:g} s for kills to be answered"],
    )


@click.command()
@click.option("--counts", default="4,16,48", show_default=True, help="numbers of processes")
@click.option("--summary-only", is_flag=True, help="write the table from the JSON again")
def main(counts: str, summary_only: bool) -> None:
    """Measure, and write the table."""
    out = results_folder(None, "counts")
    path = out / "ray_stop.json"
    if not summary_only:
        numbers = [int(one) for one in counts.split(",")]
        stops = measure_all(numbers)
        on = machine_with_load()
        path.write_text(json.dumps({"machine": on, "counts": numbers, "stops": stops}, indent=1) + "\n")
    values = read_record(path, "machine", "counts", "stops")
    made = sheet(values)
    about = explanation(__doc__)
    write_tables(path.with_suffix(".md"), "Stopping processes on Ray", f"{values['machine']}.", [made], about)
    made.show(terminal())


if __name__ == "__main__":
    main()
