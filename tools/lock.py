"""Write locks/cpu.txt from pyproject.toml: `make lock`.

pip resolves the base requirements and the extras below; the result is written with exact versions, without the packages
of LEFT_OUT. The lock is installed with `--no-deps`. Packages that only some kinds of machine need have a marker that
names them: there may be no build for others. Run this with an interpreter whose environment has `packaging` and a
current pip (older ones download every package to resolve it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
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
MACHINES = ("x86_64", "aarch64")
"""Supported kinds of machine, as `platform.machine()` names them on Linux."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    """Resolve the requirements and write the lock; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("locks/cpu.txt"))
    options = parser.parse_args()
    wanted = [*project_requires(), *project_build_requires()]
    resolved = list(wanted)
    report = resolve(resolved)
    # a package that only another Python version or machine needs is resolved as if this one needed it
    while more := needed_elsewhere(report):
        resolved += more
        report = resolve(resolved)
    options.out.write_text(render(report, wanted))
    print(f"{options.out}: {len(report['install']) - len(LEFT_OUT)} packages")
    return 0


def project_requires() -> list[str]:
    """Return the project's requirements with those of EXTRAS."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in EXTRAS)
    return [*project["dependencies"], *(line for extra in extras for line in extra)]


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


def elsewhere(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Return the values of markers on each supported machine and Python, from those of this one."""
    for machine in MACHINES:
        for version in PYTHONS:
            python = {"python_version": version, "python_full_version": f"{version}.1"}
            yield {**environment, **python, "platform_machine": machine}


def needed_elsewhere(report: dict[str, Any]) -> list[str]:
    """Return requirements of resolved packages that apply on another supported Python or machine, and are not resolved
    here."""
    resolved = {canonicalize_name(item["metadata"]["name"]): item for item in report["install"]}
    missing = set()
    for item in resolved.values():
        requirements = [Requirement(line) for line in item["metadata"].get("requires_dist", [])]
        for environment in elsewhere(report["environment"]):
            for requirement in requirements:
                if canonicalize_name(requirement.name) in resolved or requirement.marker is None:
                    continue
                extras = ["", *item.get("requested_extras", [])]
                if any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras):
                    missing.add(f"{requirement.name}{requirement.specifier}")
    return sorted(missing)


def needed(metadata: Mapping[str, list[str]], wanted: Iterable[str], environment: Mapping[str, str]) -> set[str]:
    """Return the names of all packages that an installation of some requirements needs.

    Args:
        metadata: the requirements of each package, by canonical name; a package that is not in it has none.
        wanted: the requirements.
        environment: the values of markers, without `extra`.
    """
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [("", Requirement(line)) for line in wanted]
    while waiting:
        extra, requirement = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        names.add(name)
        for more in {(name, one) for one in ("", *requirement.extras)} - seen:
            seen.add(more)
            waiting += [(more[1], Requirement(line)) for line in metadata.get(name, [])]
    return names


def markers(metadata: Mapping[str, list[str]], wanted: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the marker of each package that only some of MACHINES need, whatever the Python.

    A package that only some of PYTHONS need has none: it is installed for all. Arguments as for `needed`.
    """
    on: dict[str, set[str]] = {machine: set() for machine in MACHINES}
    for one in elsewhere(environment):
        on[one["platform_machine"]] |= needed(metadata, wanted, one)
    found = {}
    for name in set.union(*on.values()):
        machines = [machine for machine in MACHINES if name in on[machine]]
        if len(machines) < len(MACHINES):
            found[name] = " or ".join(f'platform_machine == "{machine}"' for machine in machines)
    return found


def render(report: dict[str, Any], wanted: Iterable[str]) -> str:
    """Return the lock file's text.

    Args:
        report: pip's installation report.
        wanted: the requirements of the project, without those of `needed_elsewhere`.
    """
    environment = report["environment"]
    lines = [
        "# Written by `make lock` from pyproject.toml; installed by `make install` with --no-deps.",
        f"# Resolved for extras {', '.join(EXTRAS)} on {environment['platform_system']} "
        f"{environment['platform_machine']}, for {', '.join(MACHINES)}, Python {', '.join(PYTHONS)}.",
        "# Left out on purpose:",
        *(f"#   {name}: {reason}" for name, reason in LEFT_OUT.items()),
    ]
    found = {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in report["install"]}
    pins: dict[str, str] = {name: metadata["version"] for name, metadata in found.items()}
    # on Linux the CPU build of torch has its own version; without the suffix PyPI's CUDA build would match
    pins["torch"] = pins["torch"].split("+")[0] + "+cpu"
    only = markers({name: one.get("requires_dist", []) for name, one in found.items()}, wanted, environment)
    lines += [
        f"{name}=={pins[name]}{f' ; {only[name]}' if name in only else ''}"
        for name in sorted(pins)
        if name not in LEFT_OUT
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
