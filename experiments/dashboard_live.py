"""Measure what a dashboard costs that is watched while a run goes on: its server's CPU time, and the run's steps.

    make build/browser && PYTHONPATH=build/browser:. .venv/bin/python experiments/dashboard_live.py    # 5 minutes

Runs examples/small_reasoner.yaml. A headless Chromium watches the run's page for every other stretch of steps; in
between nobody watches, and the server has nobody to tell. What the page costs that is opened first is told apart: the
server imports its libraries for it, and reads all files of the run. The browser works on the same machine here, and on
a user's own one elsewhere, so its time is told apart. Writes experiments/results/dashboard_live.json and .md.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import psutil
from playwright.sync_api import Browser, sync_playwright
from running import (
    LOCAL,
    RESULTS,
    ROOT,
    Job,
    Sheet,
    cpu_seconds,
    machine,
    results_folder,
    terminal,
    wait_for_steps,
    write_results,
)
from served_dashboard import served_dashboard

from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics

OUT = RESULTS / "dashboard_live.json"
WARM = 4
"""Steps before the first stretch: kernels are compiled, and step times are measured."""
LIMIT_S = 600
"""Most seconds of a stretch."""


def browser_cpu_s() -> float:
    """Return the CPU seconds of the browser, which is a descendant of this process."""
    every = psutil.Process().children(recursive=True)
    return sum(sum(one.cpu_times()[:2]) for one in every if "chrom" in one.name())


def watch(browser: Browser, address: str, name: str) -> Any:
    """Open the run's page."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}#/run/{name}")
    page.get_by_text("Processes").first.wait_for()
    return page


def stretches(
    browser: Browser, address: str, run_dir: Path, launched: subprocess.Popen[bytes], server: psutil.Process, steps: int
) -> tuple[float, list[dict[str, Any]]]:
    """Return the CPU seconds of the first page, and what each stretch of so many steps cost, by turns watched."""
    done, found = WARM, []
    wait_for_steps(run_dir, done, launched, LIMIT_S)
    before = cpu_seconds(server)
    watch(browser, address, run_dir.name).close()
    opening = cpu_seconds(server) - before
    for number in range(4):
        page = watch(browser, address, run_dir.name) if number % 2 else None
        before, browser_before, began = cpu_seconds(server), browser_cpu_s(), time.monotonic()
        wait_for_steps(run_dir, done + steps, launched, LIMIT_S)
        lasted = time.monotonic() - began
        used, browsed = cpu_seconds(server) - before, browser_cpu_s() - browser_before
        rows = read_metrics(run_dir / layout.METRICS)[done : done + steps]
        found.append(
            {
                "watched": page is not None,
                "seconds": lasted,
                "server_cpu_s": used,
                "browser_cpu_s": browsed,
                "step_s": statistics.median(row.step_time_s or 0.0 for row in rows),
            }
        )
        done += steps
        if page is not None:
            page.close()
    return opening, found


@click.command(help=__doc__)
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1), help="of a stretch; there are four")
def main(steps: int) -> None:
    target = results_folder(None, "steps") / OUT.name
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        run_file = ROOT / "examples" / "small_reasoner.yaml"
        job = Job("watched", LOCAL, run_file, WARM + 4 * steps + 2)
        log = (folder / "log").open("wb")
        launched = subprocess.Popen(job.command(folder), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        run_dir = folder / job.name
        try:
            while not (run_dir / layout.STATUS).exists() and launched.poll() is None:
                time.sleep(0.2)
            with served_dashboard(folder, driver) as (address, server, browser):
                opening, found = stretches(browser, address, run_dir, launched, server, steps)
        finally:
            launched.terminate()
            launched.wait()
    rows = [
        [
            "watched" if one["watched"] else "not watched",
            f"{one['seconds']:.0f}",
            f"{one['step_s']:.2f}",
            f"{100 * one['server_cpu_s'] / one['seconds']:.2f} %",
            f"{100 * one['browser_cpu_s'] / one['seconds']:.0f} %" if one["watched"] else "-",
        ]
        for one in found
    ]
    heads = ("stretch", "seconds", "median step, s", "server, of a core", "browser, of a core")
    notes = [f"{steps} steps each, of the small reasoner; server and browser are on the machine of the run"]
    notes.append(f"the first page that was opened took {opening:.1f} s of the server's CPU time, once")
    sheet = Sheet("A dashboard that is watched while a run goes on", heads, rows, notes)
    sheet.show(terminal())
    watched = [one for one in found if one["watched"]]
    share = sum(one["server_cpu_s"] for one in watched) / sum(one["seconds"] for one in watched)
    record = {"machine": machine(), "opening_cpu_s": opening, "stretches": found, "server_share": share}
    write_results(target, record, "A dashboard beside a run", [sheet])


if __name__ == "__main__":
    main()
