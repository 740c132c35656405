"""Write locks/cpu.txt from pyproject.toml: `make lock`.

pip resolves the base requirements and the extras below; the result is written with exact versions, without the packages
of LEFT_OUT. The lock is installed with `--no-deps`. Run this with an interpreter whose environment has `packaging` and
a current pip (older ones download every package to resolve it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("cpu", "dashboard", "ray", "tasks", "peer", "dev")
LEFT_OUT = {
    "torchvision": "comes as a CUDA build that breaks `import transformers`; no image model is trained here",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "triton": "1 GB; the build on PyPI has no CPU back end, so vLLM switches it off",
}
PYTHONS = ("3.11", "3.12", "3.13")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    """Resolve the requirements and write the lock; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("locks/cpu.txt"))
    options = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    report = resolve([*wanted, *project_build_requires()])
    # a package that only another Python version needs is resolved as if this one needed it
    while more := needed_elsewhere(report):
        wanted += more
        report = resolve([*wanted, *project_build_requires()])
    options.out.write_text(render(report))
    print(f"{options.out}: {len(report['install']) - len(LEFT_OUT)} packages")
    return 0


def project_build_requires() -> list[str]:
    """Return the project's build requirements; it is built in the environment itself, so they are locked, too."""
    return list(tomllib.loads(Path("pyproject.toml").read_text())["build-system"]["requires"])


def resolve(requirements: list[str]) -> dict[str, Any]:
    """Return pip's installation report for the requirements; download metadata only."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    for index in ([], ["--extra-index-url", TORCH_INDEX]):
        done = subprocess.run([*command, *index, *requirements], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            report: dict[str, Any] = json.loads(done.stdout)
            return report
    errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    raise SystemExit("pip could not resolve:\n" + "\n".join(errors[-20:]))


def needed_elsewhere(report: dict[str, Any]) -> list[str]:
    """Return requirements of resolved packages that apply on another supported Python and are not resolved here."""
    resolved = {canonicalize_name(item["metadata"]["name"]): item for item in report["install"]}
    missing = set()
    for item in resolved.values():
        requirements = [Requirement(line) for line in item["metadata"].get("requires_dist", [])]
        for version in PYTHONS:
            environment = {**report["environment"], "python_version": version, "python_full_version": f"{version}.1"}
            for requirement in requirements:
                if canonicalize_name(requirement.name) in resolved or requirement.marker is None:
                    continue
                extras = ["", *item.get("requested_extras", [])]
                if any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras):
                    missing.add(f"{requirement.name}{requirement.specifier}")
    return sorted(missing)


def render(report: dict[str, Any]) -> str:
    """Return the lock file's text."""
    environment = report["environment"]
    lines = [
        "# Written by `make lock` from pyproject.toml; installed by `make install` with --no-deps.",
        f"# Resolved for extras {', '.join(EXTRAS)} on {environment['platform_system']} "
        f"{environment['platform_machine']},"
        f" Python {', '.join(PYTHONS)}.",
        "# Left out on purpose:",
        *(f"#   {name}: {reason}" for name, reason in LEFT_OUT.items()),
    ]
    pins = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    # on Linux the CPU build of torch has its own version; without the suffix PyPI's CUDA build would match
    pins["torch"] = pins["torch"].split("+")[0] + "+cpu"
    lines += [f"{name}=={pins[name]}" for name in sorted(pins) if name not in LEFT_OUT]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
