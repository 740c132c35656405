"""Compares the locked packages with the published advisories: part of `make lint`, by pip-audit.

Fails for a package with a known vulnerability that a newer version mends. Without a way to the advisories (no network,
an index that has none) it says that nothing was audited, and does not fail. Advisories in ACCEPTED are told, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 90
ACCEPTED: dict[str, str] = {}
"""Advisory -> why it does not concern this project."""


def audited(found: dict[str, Any]) -> int:
    """Packages that were compared with advisories, of pip-audit's answer."""
    return sum("skip_reason" not in one for one in found["dependencies"])


def findings(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(to be mended, told only): lines about vulnerabilities, of pip-audit's answer."""
    failing, told = [], []
    for package in found["dependencies"]:
        for one in package.get("vulns", ()):
            names = {one["id"], *one.get("aliases", ())}
            line = f"{package['name']} {package['version']}: {one['id']}"
            if reason := next((ACCEPTED[name] for name in sorted(names) if name in ACCEPTED), ""):
                told.append(f"{line} (accepted: {reason})")
            elif one["fix_versions"]:
                failing.append(f"{line}, mended in {', '.join(one['fix_versions'])}")
            else:
                told.append(f"{line} (no version mends it)")
    return failing, told


def main() -> int:
    """Audits one lock file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(options.lock)]
    command += ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--timeout", "10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        print("audit: NOT AUDITED: the advisories cannot be reached from here")
        return 0
    if not (count := audited(found)):
        print("audit: NOT AUDITED: this package index has no advisories")
        return 0
    failing, told = findings(found)
    for line in (*failing, *told):
        print(f"audit: {line}")
    print(f"audit: {count} packages of {len(found['dependencies'])} audited, {len(failing)} to be updated")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
