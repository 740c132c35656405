"""The dashboard of a folder of runs, and a headless Chromium to look at it, for the studies of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Playwright
from running import ROOT


@contextmanager
def served_dashboard(runs: Path, driver: Playwright) -> Iterator[tuple[str, psutil.Process, Browser]]:
    """Serve a folder of runs; yields the server's address and process, and a browser."""
    command = [sys.executable, "-m", "streamrl.cli.main", "dashboard", str(runs), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[2]
        urllib.request.urlopen(f"{address}api/runs").close()  # it imports its libraries at the start
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        try:
            yield address, psutil.Process(server.pid), browser
        finally:
            browser.close()
    finally:
        server.terminate()
        server.wait()
