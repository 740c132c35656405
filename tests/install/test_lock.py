"""What `make lock` writes for several kinds of machine, and what `make install` takes of it on each."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.install.conftest import TOOLS

LOCK = TOOLS.parent / "locks" / "cpu.txt"
ONLY_X86 = 'platform_machine == "x86_64"'


def report(**requires: list[str]) -> dict[str, Any]:
    """An installation report of pip: packages of version 1 with their requirements, resolved on x86-64."""
    items = [
        {"metadata": {"name": name, "version": "1", "requires_dist": lines}, "requested_extras": []}
        for name, lines in requires.items()
    ]
    environment = {**default_environment(), "platform_machine": "x86_64", "python_version": "3.12"}
    return {"environment": environment, "install": items}


def pins(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_what_only_some_machines_need_has_a_marker_and_so_has_what_it_brings(lock: ModuleType) -> None:
    resolved = report(
        torch=[],
        engine=[f"fast; {ONLY_X86}", 'slow; platform_machine == "aarch64"', "both"],
        fast=["below", "both"],
        below=[],
        both=[],
        slow=[],
    )
    assert pins(lock.render(resolved, ["engine", "torch"])) == [
        f"below==1 ; {ONLY_X86}",
        "both==1",
        "engine==1",
        f"fast==1 ; {ONLY_X86}",
        'slow==1 ; platform_machine == "aarch64"',
        "torch==1+cpu",
    ]


def test_a_package_that_only_another_python_needs_is_installed_for_all(lock: ModuleType) -> None:
    resolved = report(torch=['new; python_version >= "3.13"'], new=[])
    assert pins(lock.render(resolved, ["torch"])) == ["new==1", "torch==1+cpu"]


def test_a_machine_needs_what_any_python_needs_there(lock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "MACHINES", ("x86_64", "aarch64", "riscv64"))
    old = 'python_version == "3.11" and platform_machine'
    resolved = report(torch=[f'one; {old} == "x86_64"', f'two; {old} != "aarch64"'], one=[], two=[])
    assert pins(lock.render(resolved, ["torch"])) == [
        f"one==1 ; {ONLY_X86}",
        "torch==1+cpu",
        f'two==1 ; {ONLY_X86} or platform_machine == "riscv64"',
    ]


def test_extras_are_followed_and_extras_that_nobody_asks_for_are_not(lock: ModuleType) -> None:
    resolved = report(
        torch=["Both.Ways[on]"],
        both_ways=[f'x; extra == "on" and {ONLY_X86}', 'y; extra == "off"'],
        x=["torch"],
        y=[],
    )
    metadata = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in resolved["install"]}
    requires = {name: one["requires_dist"] for name, one in metadata.items()}
    assert lock.needed(requires, ["torch"], resolved["environment"]) == {"torch", "both-ways", "x"}
    arm = {**resolved["environment"], "platform_machine": "aarch64"}
    assert lock.needed(requires, ["torch"], arm) == {"torch", "both-ways"}


def test_what_only_another_machine_or_python_needs_is_resolved_too(lock: ModuleType) -> None:
    lines = [
        'slow>=2; platform_machine == "aarch64"',
        'new; python_version == "3.13"',
        'no; platform_machine == "s390x"',
    ]
    lines += ['both; extra == "on" and python_version == "3.11"', 'off; extra == "off"']
    resolved = report(torch=lines)
    assert lock.needed_elsewhere(resolved) == ["new", "slow>=2"]
    resolved["install"][0]["requested_extras"] = ["on"]
    assert lock.needed_elsewhere(resolved) == ["both", "new", "slow>=2"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="what x86-64 needs alone is installed only there")
def test_the_markers_of_the_lock_are_those_of_the_installed_packages(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TOOLS.parent)
    locked = {canonicalize_name(one.name): one for one in map(Requirement, pins(LOCK.read_text()))}
    requires = {name: importlib.metadata.requires(name) or [] for name in locked}
    wanted = [*lock.project_requires(), *lock.project_build_requires()]
    found = {name: str(one.marker) for name, one in locked.items() if one.marker is not None}
    computed = lock.markers(requires, wanted, default_environment())
    assert found == {name: marker for name, marker in computed.items() if name not in lock.LEFT_OUT} != {}
    for environment in lock.elsewhere(default_environment()):
        taken = {name for name, one in locked.items() if one.marker is None or one.marker.evaluate(environment)}
        assert taken == lock.needed(requires, wanted, environment) - lock.LEFT_OUT.keys(), environment


@pytest.mark.parametrize(("machine", "taken"), [("x86_64", 2), ("aarch64", 0), ("arm64", 0)])
def test_an_installation_takes_what_its_machine_needs_without_markers(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, machine: str, taken: int
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = install.read_lock(LOCK)
    assert sum(line.startswith("intel-") for line in found) == taken
    assert "numpy" in {line.partition("==")[0] for line in found}
    assert not any(";" in line or line != line.strip() for line in found)


def test_a_package_of_several_machines_is_taken_on_each(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock.txt").write_text(f'a==1 ; platform_machine == "riscv64" or {ONLY_X86}  # fast\n')
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert install.read_lock(tmp_path / "lock.txt") == ["a==1"]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert install.read_lock(tmp_path / "lock.txt") == []


@pytest.mark.parametrize("marker", ['python_version < "3.12"', f'{ONLY_X86} and os_name == "posix"', "x"])
def test_a_marker_that_the_installer_does_not_know_is_refused(install: ModuleType, tmp_path: Path, marker: str) -> None:
    (tmp_path / "lock.txt").write_text(f"a==1 ; {marker}\n")
    with pytest.raises(install.InstallError, match=r"the marker of a==1 is not understood; .* make lock"):
        install.read_lock(tmp_path / "lock.txt")
