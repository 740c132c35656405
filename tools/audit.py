"""Compare the locked packages with the published advisories, using pip-audit; part of `make lint`.

It fails if a package has a known vulnerability that a newer version fixes. If the advisories cannot be reached (no
network, an index without any), it reports that nothing was audited, and does not fail. Advisories in ACCEPTED are only
reported.
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
"""Reason why each accepted advisory does not concern this project."""


def audited(found: dict[str, Any]) -> int:
    """Return how many packages were compared with advisories, from pip-audit's output."""
    return sum("skip_reason" not in one for one in found["dependencies"])


def findings(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return lines about vulnerabilities from pip-audit's output: (those that can be fixed, those only reported)."""
    failing, noted = [], []
    for package in found["dependencies"]:
        for one in package.get("vulns", ()):
            names = {one["id"], *one.get("aliases", ())}
            line = f"{package['name']} {package['version']}: {one['id']}"
            if reason := next((ACCEPTED[name] for name in sorted(names) if name in ACCEPTED), ""):
                noted.append(f"{line} (accepted: {reason})")
            elif one["fix_versions"]:
                failing.append(f"{line}, fixed in {', '.join(one['fix_versions'])}")
            else:
                noted.append(f"{line} (no version fixes it)")
    return failing, noted


def main() -> int:
    """Audit one lock file; return the exit code."""
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
    failing, noted = findings(found)
    for line in (*failing, *noted):
        print(f"audit: {line}")
    print(f"audit: {count} packages of {len(found['dependencies'])} audited, {len(failing)} vulnerabilities to fix")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
