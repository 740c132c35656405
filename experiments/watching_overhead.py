"""Measure what trackers and metrics cost beside a run, in CPU seconds.

    build/trackers/bin/python experiments/watching_overhead.py runs/demo     # after `make test-trackers`

Each tracker of the environment follows a copy of the run's files from the beginning, in the process that a launch
starts, and then has nothing to do for a while; the metrics are scraped 100 times.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
from running import cpu_seconds

from streamrl.config.cluster import MetricsEndpoint
from streamrl.config.load import load_resolved, save_resolved
from streamrl.config.trackers import TRACKER_PACKAGES
from streamrl.exporter.metrics_server import serving_metrics
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics
from streamrl.trackers.backends.opener import missing_packages
from streamrl.trackers.tracker_process import tracker_keys

SCRAPES = 100
SCRAPE_EVERY_S = 15
COPIED = (layout.METRICS, layout.EVALUATIONS, layout.ROLLOUTS, layout.STATUS, layout.PROCESSES)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds without anything to send")
    options = parser.parse_args()
    rows = read_metrics(options.run / layout.METRICS)
    lasted = sum(row.step_time_s or 0.0 for row in rows)
    print(f"{len(rows)} steps in {lasted:.0f} s")
    cluster, run = load_resolved(options.run)
    for name in TRACKER_PACKAGES:
        keys = tracker_keys(run, name)
        if list(missing_packages([keys])):
            print(f"{name}: not installed")
            continue
        if name == "wandb":
            keys = keys.model_copy(update={"mode": "offline"})
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            save_resolved(folder, cluster, run.model_copy(update={"trackers": [keys]}))
            for part in COPIED:
                if (source := options.run / part).is_dir():
                    shutil.copytree(source, folder / part)
                elif source.exists():
                    shutil.copy(source, folder / part)
            busy, idle = follow(folder, name, len(rows), options.idle)
        share = busy / lasted + idle / options.idle
        print(
            f"{name}: {busy:.2f} CPU s for start and all steps, {1000 * idle / options.idle:.1f} ms per idle second, "
            f"{100 * share:.2f} % of one core over the run"
        )
    with serving_metrics(MetricsEndpoint(port=0), "metrics", options.run, 0) as address:
        urllib.request.urlopen(address).read()
        began = time.process_time()
        for _ in range(SCRAPES):
            urllib.request.urlopen(address).read()
        cost = (time.process_time() - began) / SCRAPES
    share = 100 * cost / SCRAPE_EVERY_S
    print(
        f"metrics: {1000 * cost:.1f} CPU ms a scrape with its client, {share:.3f} % of a core every {SCRAPE_EVERY_S} s"
    )


def follow(folder: Path, name: str, steps: int, idle_s: float) -> tuple[float, float]:
    """Return the CPU seconds of a tracker's process until it has sent all steps, and in `idle_s` seconds after that."""
    record = folder / layout.TRACKERS / f"{name}.jsonl"
    command = [sys.executable, "-m", "streamrl.trackers.tracker_process", str(folder), name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not record.exists() or f'"step": {steps},' not in record.read_text():
            time.sleep(0.2)
        time.sleep(5.0)  # what a thread of the package still writes
        process = psutil.Process(child.pid)
        busy = cpu_seconds(process)
        time.sleep(idle_s)
        return busy, cpu_seconds(process) - busy
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(60)


if __name__ == "__main__":
    main()
