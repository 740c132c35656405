"""Measure the dashboard in a headless Chromium: first paint, scrolling and searching 100,000 samples, processor time.

    make build/browser && PYTHONPATH=build/browser:. .venv/bin/python experiments/dashboard.py

Writes experiments/results/dashboard.json and dashboard.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Browser, sync_playwright
from running import RESULTS
from served_dashboard import served_dashboard

from streamrl.rollouts.rollout_store import SCHEMA
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.trace import TraceWriter

STEPS, SAMPLES_PER_STEP = 100, 1_000
REPEATS = 5
WATCHED_S = 30.0
SCROLL = """async () => {
  const list = document.querySelector(".list"), times = [], began = performance.now();
  while (performance.now() - began < 5000) {
    times.push(await new Promise(requestAnimationFrame));
    list.scrollTop = (list.scrollTop + 900) % (list.scrollHeight - list.clientHeight);
  }
  return times;
}"""
"""Scrolls by a screen and more with each frame, through pages that were not asked for before, for 5 s."""


def write_big_run(folder: Path) -> None:
    """Write a finished run of 100 steps with 100,000 samples of 64 to 512 tokens."""
    draw = np.random.default_rng(0)
    (folder / "rollouts").mkdir(parents=True)
    with RowWriter(folder / "metrics.jsonl", MetricsRow) as metrics, TraceWriter(folder / "trace.json") as trace:
        for step in range(1, STEPS + 1):
            begin = 1_700_000_000.0 + 60 * step
            metrics.append(MetricsRow(step=step, time=begin + 60, reward_mean=step / 100, step_time_s=60.0))
            trace.span("trainer", "train", begin, begin + 50, step=step)
            rows = []
            for number in range(SAMPLES_PER_STEP):
                length, name = int(draw.integers(64, 512)), f"{step:04}{number // 8:04}.{number % 8:03}"
                trace.async_span(f"here-{number % 4}", "sample", begin, begin + length / 10, name)
                tokens = draw.integers(0, 50_000, length).tolist()
                rows.append(
                    {
                        **{"sample_id": name, "trajectory_id": name, "group_id": name[:8], "task": "sum", "step": step},
                        **{"prompt": "What is 1 + 1?", "completion": "x " * length, "completion_tokens": tokens},
                        **{"logprobs": [-0.5] * length, "weight_versions": [step - 1] * length, "route": "regular"},
                        **{"output_length": length, "reward": float(number % 2), "finish_reason": "stop"},
                        **{"predicted_length": length * 1.1, "t_trained": begin},
                    }
                )
            table = pa.Table.from_pylist(rows, schema=SCHEMA)
            pq.write_table(table, folder / "rollouts" / f"step_{step:06}.parquet", compression="zstd")


def first_paint(browser: Browser, address: str, wait: str) -> tuple[float, float]:
    """Return the seconds to the first paint, and until an element is there, in a fresh context."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(address)
    page.locator(wait).first.wait_for()
    there = time.perf_counter() - began
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    context.close()
    return painted, there


def measure(browser: Browser, address: str, server: psutil.Process) -> dict[str, Any]:
    """Return all figures."""
    cold = first_paint(browser, f"{address}#/run/big/samples", ".row .number")
    paints = [first_paint(browser, f"{address}#/run/big", "text=Processes") for _ in range(REPEATS)]
    rows = [first_paint(browser, f"{address}#/run/big/samples", ".row .number") for _ in range(REPEATS)]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}#/run/big/samples")
    page.locator(".row .number").first.wait_for()
    times = page.evaluate(SCROLL)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    searched = time.perf_counter()
    page.goto(f"{address}#/run/big/samples?text=needle")
    page.get_by_text("0 of 100,000 samples", exact=True).wait_for()
    searched = time.perf_counter() - searched
    page.goto(f"{address}#/run/big")
    before = sum(server.cpu_times()[:2])
    page.wait_for_timeout(1000 * WATCHED_S)
    return {
        "first_paint_s": round(statistics.median(paint for paint, _ in paints), 3),
        "samples_cold_s": round(cold[1], 2),
        "samples_warm_s": round(statistics.median(there for _, there in rows), 2),
        "frames_per_s": round(1000 * len(gaps) / sum(gaps), 1),
        "frame_gap_p95_ms": round(float(np.quantile(gaps, 0.95)), 1),
        "text_searched_s": round(searched, 2),
        "server_cpu_share": round((sum(server.cpu_times()[:2]) - before) / WATCHED_S, 4),
        "niceness": os.nice(0),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def render(figures: dict[str, Any]) -> str:
    """Return the page of the results."""
    rows = {
        "first paint of a run's page": f"{figures['first_paint_s']} s",
        "first of 100,000 samples shown, files never read before": f"{figures['samples_cold_s']} s",
        "the same, files read before": f"{figures['samples_warm_s']} s",
        "frames per second while scrolling them, 900 pixels a frame": f"{figures['frames_per_s']}",
        "95th percentile between two frames": f"{figures['frame_gap_p95_ms']} ms",
        "a text that is in none of them is searched in all": f"{figures['text_searched_s']} s",
        "processor time of the server while one page watches, of a core": f"{100 * figures['server_cpu_share']:.1f} %",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    machine = f"one machine of {figures['cores']} cores"
    beside = f"at niceness {figures['niceness']} beside a load average of {figures['load_average']}"
    run = f"a finished run of {STEPS} steps with {STEPS * SAMPLES_PER_STEP:,} samples"
    command = "`make build/browser`, then `PYTHONPATH=build/browser:. .venv/bin/python experiments/dashboard.py`"
    about = f"Headless Chromium (software rendering) and server on {machine},\n{beside}; {run}.\n\nCommand: {command}."
    return f"# Dashboard\n\n{about}\n\n| what | measured |\n|---|---|\n{table}\n"


def main() -> None:
    """Serve a big run, measure, write."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        write_big_run(Path(folder) / "big")
        with served_dashboard(Path(folder), driver) as (address, server, browser):
            figures = measure(browser, address, server)
    (RESULTS / "dashboard.json").write_text(json.dumps(figures, indent=1) + "\n")
    (RESULTS / "dashboard.md").write_text(render(figures))
    print(render(figures))


if __name__ == "__main__":
    main()
