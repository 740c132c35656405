"""Make the virtual environment of this repository from a lock file: `make install`.

Standard library only, since nothing is installed yet. Problems that can be known beforehand are checked before anything
large is fetched: the CPU, the disk, and whether there is a torch for this Python. Its CPU build is not on PyPI, so the
configured indexes are asked first, PyTorch's own second. The locked packages are installed exactly as listed
(`--no-deps`), which excludes what the lock leaves out on purpose. uv installs them, with pip's configuration, or pip if
uv cannot. Packages imported here are byte-compiled at the end on all cores: pip would use one core, both would compile
everything, and leaving it to the first import fails where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterable
from pathlib import Path

import install_checks as checks
from install_run import InstallError, Patience, Progress, Running, Unreachable, follow, install, say

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_COMPILED = (
    r"/(tests?|testing|pip|anthropic|mcp|mypyc?|numba|fontTools|sentry_sdk|dns)/|/openai/types/|/pygments/lexers/"
    r"|/sympy/physics/|/ray/(data|llm|rllib|serve|train|tune)/|/(transformers|vllm|vllm/model_executor)/models/"
)
MACHINE = re.compile(r'platform_machine == "(\w+)"')
"""What tools/lock.py writes for a package that only some kinds of machine need."""
PATIENCE = Patience()


def main() -> int:
    """Install; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--lock", type=Path, default=Path("locks/cpu.txt"))
    options = parser.parse_args()
    started = time.monotonic()
    try:
        check_machine(options.venv)
        requirements = read_lock(options.lock)
        was_there, fresh = options.venv.exists(), not (options.venv / "bin" / "python").exists()
        python = make_venv(options.venv)
        torch = next((line for line in requirements if line.startswith("torch==")), None)
        try:
            extra = find_torch(python, torch) if torch else None
        except InstallError:
            if fresh:  # else a later try with another Python would use it
                remove(options.venv, was_there)
            raise
        install_locked(python, options.venv / ".downloads", requirements, torch, extra)
        byte_compile(python)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"installed in {options.venv} in {time.monotonic() - started:.0f} s")
    return 0


def check_machine(folder: Path) -> None:
    """Raise at once for problems that would show minutes later: no C compiler or headers, an old CPU, a full disk."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        raise InstallError(
            "no C compiler found: torch compiles CPU kernels with it and pycosat (of reasoning-gym) is built with it.\n"
            "  Debian/Ubuntu: apt install gcc g++ python3-dev"
        )
    # Debian's default scheme may name a folder for packages' headers
    folders = [sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")]
    folders += os.environ.get("CPATH", "").split(os.pathsep)
    if not any((Path(one) / "Python.h").exists() for one in folders if one):
        raise InstallError(
            f"the headers of {sys.executable} are missing (Python.h): pycosat (of reasoning-gym) is built with them.\n"
            f"  Debian/Ubuntu: apt install python{sys.version_info.major}.{sys.version_info.minor}-dev"
        )
    cpuinfo = Path("/proc/cpuinfo")
    if problem := checks.instruction_problem(cpuinfo.read_text() if cpuinfo.exists() else ""):
        raise InstallError(problem)
    folder = folder.absolute()
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(existing).free
    if free < checks.ENVIRONMENT_BYTES and (
        problem := checks.disk_problem(checks.ENVIRONMENT_BYTES, size(folder), free, str(existing))
    ):
        raise InstallError(problem)


def size(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(
        os.lstat(os.path.join(path, name)).st_blocks * 512 for path, _, names in os.walk(folder) for name in names
    )


def make_venv(folder: Path) -> Path:
    """Return the environment's interpreter; create the environment if there is none.

    Raises:
        InstallError: the folder holds something else than an environment, or none can be made.
    """
    python = folder / "bin" / "python"
    was_there = folder.exists()
    if was_there and not is_for_environment(folder):
        raise InstallError(
            f"VENV={folder} holds something else than a Python environment, and nothing of it was touched.\n"
            f"  Name a folder inside it with: make VENV={folder / 'streamrl-env'}"
        )
    if not python.exists():
        say(f"environment {folder} with Python {platform.python_version()}")
        try:
            venv.create(folder, with_pip=True, clear=was_there)
        except (subprocess.CalledProcessError, ImportError) as error:
            remove(folder, was_there)
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise InstallError(
                f"{sys.executable} cannot make an environment with pip ({error}).\n"
                f"  Debian/Ubuntu: apt install python{version}-venv"
            ) from error
    return python.absolute()


def is_for_environment(folder: Path) -> bool:
    """Whether what exists there may become, or is, an environment: an empty folder, or one with pyvenv.cfg."""
    return folder.is_dir() and ((folder / "pyvenv.cfg").exists() or not any(folder.iterdir()))


def remove(folder: Path, was_there: bool) -> None:
    """Remove the environment that this run made; a folder that was there before stays, empty."""
    for path in list(folder.iterdir()) if was_there else [folder]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_lock(path: Path) -> list[str]:
    """Return the requirements of a lock file that this machine needs, without comments and markers.

    Raises:
        InstallError: a marker is not of the form that tools/lock.py writes.
    """
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    requirements = []
    for line in filter(None, lines):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        machines = MACHINE.findall(marker)
        if " or ".join(f'platform_machine == "{machine}"' for machine in machines) != marker:
            raise InstallError(f"{path}: the marker of {requirement} is not understood; write the file by: make lock")
        if not machines or platform.machine() in machines:
            requirements.append(requirement)
    return requirements


def pip(python: Path, *arguments: str) -> list[str]:
    """Return a pip command of the environment."""
    return [str(python), "-m", "pip", *arguments, "--disable-pip-version-check"]


def ask(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a short command and return its result."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def find_torch(python: Path, torch: str) -> str | None:
    """Look for torch before anything else is fetched.

    Returns:
        The index to use besides the configured ones; None: those suffice.

    Raises:
        InstallError: no index has it for this Python; the message names the Pythons for which there is one.
    """
    wanted = torch.partition("==")[2]
    installed = ask([str(python), "-c", "import importlib.metadata as m; print(m.version('torch'))"])
    if installed.stdout.strip() == wanted:
        return None
    question = [*pip(python, "index", "versions", "torch"), "--retries", "1"]
    here = ask(question)
    if wanted in checks.versions_of(here.stdout):
        return None
    if here.returncode and "No matching distribution" not in here.stderr:
        return None  # this pip or index does not support the query
    say(f"{torch} is not on the configured indexes, asking {TORCH_INDEX}")
    there = ask([*question, "--extra-index-url", TORCH_INDEX])
    if wanted in checks.versions_of(there.stdout):
        return TORCH_INDEX
    if checks.may_pass(refusal := here.stderr.splitlines()):
        cause = checks.reason(checks.last_error(refusal))
        raise InstallError(f"the configured package indexes cannot be reached:\n  {cause}")
    unreachable = checks.may_pass(there.stderr.splitlines())
    say("it is not there either; looking for other Python versions")
    index = [] if unreachable else ["--extra-index-url", TORCH_INDEX]
    working = [
        version
        for version in checks.PYTHONS
        if wanted
        in checks.versions_of(ask([*question, *index, "--python-version", version, "--only-binary=:all:"]).stdout)
    ]
    raise InstallError(checks.no_torch(torch, platform.python_version(), working, TORCH_INDEX, unreachable))


def install_locked(python: Path, cache: Path, requirements: list[str], torch: str | None, extra: str | None) -> None:
    """Install the locked packages and the project, by uv, or by pip if uv cannot.

    Args:
        python: the environment's interpreter.
        cache: uv's cache, on the environment's disk, so that uv can link packages into place. If an installation fails,
            it is kept for the next.
        requirements: all locked requirements.
        torch: the requirement of torch, among them.
        extra: an index for torch besides the configured ones.
    """
    others = [line for line in requirements if line != torch]
    try:
        uv = Uv(python, cache, next((line for line in requirements if line.startswith("uv==")), "uv"))
        with_torch = torch is None or (extra is None and uv.finds(torch))
        say(f"{len(requirements)} packages, by {uv.name}")
        uv.install(requirements if with_torch else others)
    except Unreachable:
        raise
    except InstallError as error:
        say(f"uv cannot be used, so pip installs (slower):\n{error}")
        with_torch, uv = False, None
        pip_install(python, [line for line in others if not line.startswith("uv==")])
    if torch and not with_torch:
        index = ["--extra-index-url", extra] if extra else []
        say(f"{torch}{f' from {extra}' if extra else ''}")
        if uv is not None and uv.finds(torch, *index):
            uv.install([torch], *index)
        else:
            pip_install(python, [torch], *index)
    if uv is not None:
        uv.install(["--editable", "."], "--no-build-isolation")
        shutil.rmtree(cache, ignore_errors=True)
    else:
        pip_install(python, ["--editable", "."], "--no-build-isolation")


class Uv:
    """The installer uv, in the environment."""

    def __init__(self, python: Path, cache: Path, requirement: str) -> None:
        """Install uv by pip.

        Raises:
            InstallError: pip cannot install it.
        """
        pip_install(python, [requirement])
        self.python = python
        self.name = requirement.replace("==", " ")
        settings = checks.pip_settings(ask(pip(python, "config", "list")).stdout)
        self.arguments = checks.uv_arguments(settings)
        self.environment = checks.uv_environment(settings, os.environ)
        if "UV_CACHE_DIR" not in os.environ:
            self.environment["UV_CACHE_DIR"] = str(cache.absolute())

    def command(self, requirements: Iterable[str], *options: str) -> list[str]:
        """Return a uv command, with debug messages, which report its retries."""
        command = [str(self.python.parent / "uv"), "pip", "install", "--verbose", "--no-deps"]
        return [*command, "--python", str(self.python), *self.arguments, *options, *requirements]

    def finds(self, requirement: str, *options: str) -> bool:
        """Return whether uv's indexes have a package; fetch nothing."""
        running = Running(self.command([requirement], "--dry-run", *options), self.environment)
        return running.process.wait() == 0

    def install(self, requirements: list[str], *options: str) -> None:
        """Install packages.

        Raises:
            InstallError: the installation failed.
        """
        install(lambda: Running(self.command(requirements, *options), self.environment), checks.uv_stage, PATIENCE)


def pip_install(python: Path, requirements: list[str], *options: str) -> None:
    """Install packages by pip exactly as listed.

    Raises:
        InstallError: the installation failed.
    """
    command = pip(python, "install", "--no-deps", "--no-compile", "--progress-bar=off", *options, *requirements)
    install(lambda: Running(command), checks.pip_stage, PATIENCE)


def byte_compile(python: Path) -> None:
    """Byte-compile the packages imported here; files that do not compile are templates or for other Pythons."""
    purelib = ask([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
    say("byte-compilation")
    command = [str(python), "-m", "compileall", "-j", "0", "-x", NOT_COMPILED, "."]

    def stage(lines: Iterable[str]) -> tuple[str, bool]:
        return f"{sum(line.startswith('Compiling ') for line in lines)} files compiled", False

    follow(Running(command, cwd=purelib), stage, Progress(PATIENCE.every_s), None)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
