"""Installed environments: a folder for each, with a virtual environment, the lock of its packages, and what it makes.

NAME/venv/                 the virtual environment
NAME/requirements.lock     the packages in it, with versions (`pip freeze`)
NAME/environment.json      what it makes; written last, so that a folder without it is no environment
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamrl.atomic_files import replace_text
from streamrl.errors import UserError
from streamrl.machine.user_folders import user_folder

MANIFEST, LOCK, VENV = "environment.json", "requirements.lock", "venv"
FOLDER = "STREAMRL_ENVIRONMENTS"
"""Environment variable: the folder of environments."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAKE = re.compile(r"(gymnasium|mcp|verifiers):\S+|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
LONGEST_OUTPUT = 3000
"""Most characters of pip's words in an error: their end."""
PIP_S = 3600.0
IMPORT = (
    "import importlib, sys; sys.path[:0] = sys.argv[3:]; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"
)


@dataclass(frozen=True)
class InstalledEnvironment:
    """An environment that `streamrl env add` has installed."""

    folder: Path
    make: str
    """'gymnasium:ID', 'verifiers:ID', 'mcp:PROGRAM', 'mcp:URL' or 'module:function'; '': programs only."""
    config: dict[str, Any] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    """Folders of modules that are no packages."""
    requirements: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the environment: its folder's."""
        return self.folder.name

    @property
    def python(self) -> Path:
        """The interpreter of its venv."""
        return self.folder / VENV / "bin" / "python"

    def program(self, name: str) -> str:
        """Return the path of a program that its packages have installed.

        Raises:
            UserError: there is none.
        """
        path = self.folder / VENV / "bin" / name
        if not os.access(path, os.X_OK):
            raise UserError(f"environment {self.name!r} has no program {name!r} in {path.parent}")
        return str(path)


def environments_folder() -> Path:
    """Return where environments are: $STREAMRL_ENVIRONMENTS, or streamrl/environments in the user's data folder.

    Raises:
        UserError: this user has no home folder, and none can be used in its place.
    """
    if own := os.environ.get(FOLDER):
        return Path(own)
    return user_folder("XDG_DATA_HOME", ".local/share") / "environments"


def folder_of(name: str, directory: Path | None) -> Path:
    """Return the folder of an environment in a folder of environments; None: the usual one.

    Raises:
        UserError: the name cannot be one.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of an environment: letters, digits, '.', '_' and '-'; --dir says where")
    return (directory or environments_folder()).absolute() / name


def find_environment(name: str) -> InstalledEnvironment:
    """Return the environment of a name, or that of a folder if `name` has a slash.

    Raises:
        UserError: it is not installed, or its record cannot be read.
    """
    folder = Path(name).expanduser().absolute() if "/" in name else environments_folder() / name
    if not (folder / MANIFEST).is_file():
        known = [one.name for one in list_environments(folder.parent)]
        there = f"installed there: {', '.join(known)}" if known else "none is installed there"
        raise UserError(
            f"environment {name!r} is not installed in {folder.parent} ({there}); "
            f"streamrl env add {folder.name} installs it"
        )
    try:
        found = _read(folder)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"environment {name!r}: {folder / MANIFEST} cannot be read: {error}") from error
    if not found.python.exists():
        raise UserError(
            f"environment {name!r}: there is no interpreter {found.python} (was Python removed or updated?); "
            f"streamrl env remove {found.name} and add it again"
        )
    return found


def list_environments(folder: Path) -> list[InstalledEnvironment]:
    """Return the environments of a folder by name; those that cannot be read are left out."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(_read(path))
    return found


def _read(folder: Path) -> InstalledEnvironment:
    """Read the record of an environment; OSError, ValueError or TypeError if it cannot be."""
    return InstalledEnvironment(folder, **json.loads((folder / MANIFEST).read_bytes()))


def _something_else(folder: Path) -> str:
    """Return the name of something in a folder that is no part of an environment; '': there is nothing such."""
    return min({one.name for one in folder.iterdir()} - {MANIFEST, LOCK, VENV}, default="")


def remove_environment(folder: Path) -> None:
    """Delete an environment, or what an interrupted installation has left.

    Raises:
        UserError: there is none, the folder holds something else, or it cannot be deleted.
    """
    if not folder.is_dir() or folder.is_symlink():
        known = ", ".join(one.name for one in list_environments(folder.parent)) or "none"
        raise UserError(f"there is no environment {folder.name!r} in {folder.parent}; installed: {known}")
    if strange := _something_else(folder):
        raise UserError(f"{folder} is no environment: it holds {strange!r}; nothing was removed")
    with _writing(folder), _locked(folder):
        (folder / MANIFEST).unlink(missing_ok=True)  # first, so that half of it is no environment
        shutil.rmtree(folder)


def add_environment(
    folder: Path,
    make: str,
    requirements: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    paths: Sequence[Path] = (),
    python: str = sys.executable,
    lock: Path | None = None,
) -> InstalledEnvironment:
    """Install an environment; if that fails, nothing of it is left.

    Args:
        folder: its folder; the last part is its name.
        make: what it makes, as in `InstalledEnvironment`.
        requirements: packages, as pip takes them.
        config: given to what makes the environment.
        paths: folders of modules that are no packages.
        python: interpreter that makes the venv.
        lock: file of `pip freeze`, the packages of which are installed as they are; `requirements` is then empty.

    Raises:
        UserError: an argument is wrong, it is installed already, the folder cannot be written, or a package cannot be
            installed; with pip's words.
    """
    _check(make, requirements, paths, lock)
    with _writing(folder), _locked(folder):
        if (folder / MANIFEST).is_file():
            raise UserError(
                f"environment {folder.name!r} is already installed in {folder.parent}; "
                f"streamrl env remove {folder.name} first"
            )
        if folder.exists():
            if strange := _something_else(folder):
                raise UserError(f"{folder} exists, and is no environment: it holds {strange!r}")
            shutil.rmtree(folder)  # an installation that was interrupted
        try:
            return _install(folder, make, requirements, dict(config or {}), paths, python, lock)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _install(
    folder: Path,
    make: str,
    requirements: Sequence[str],
    config: dict[str, Any],
    paths: Sequence[Path],
    python: str,
    lock: Path | None,
) -> InstalledEnvironment:
    found = InstalledEnvironment(folder, make, config, [str(one.absolute()) for one in paths], list(requirements))
    packages = ["-r", str(lock.absolute())] if lock is not None else list(requirements)
    _run([python, "-m", "venv", *([] if packages else ["--without-pip"]), str(folder / VENV)], "the venv")
    frozen = ""
    if packages:
        pip = [str(found.python), "-m", "pip"]
        _run([*pip, "install", "--no-input", *packages], f"pip install {' '.join(packages)}")
        _run([*pip, "check"], "pip check")
        frozen = _run([*pip, "freeze"], "pip freeze")
    if paths and not make.startswith(("gymnasium:", "verifiers:", "mcp:")) and make:
        module, _, function = make.partition(":")
        _run([str(found.python), "-I", "-c", IMPORT, module, function, *found.paths], f"the import of {make}")
    (folder / LOCK).write_text(frozen, encoding="utf-8")
    told = {name: value for name, value in asdict(found).items() if name != "folder"}
    replace_text(folder / MANIFEST, json.dumps(told, indent=2) + "\n")
    return found


def _check(make: str, requirements: Sequence[str], paths: Sequence[Path], lock: Path | None) -> None:
    if make and not MAKE.fullmatch(make):
        raise UserError(
            f"--make {make!r}: expected gymnasium:ID, verifiers:ID, mcp:PROGRAM, mcp:URL, or module:function"
        )
    if missing := next((path for path in paths if not path.is_dir()), None):
        raise UserError(f"--path {missing}: there is no such folder")
    if one := next((one for one in requirements if one.startswith("-")), ""):
        raise UserError(f"{one!r} is no package; options of pip belong in its configuration (PIP_INDEX_URL, ...)")
    if lock is not None and (requirements or not lock.is_file()):
        wrong = "leave the packages out: the lock names them" if requirements else "there is no such file"
        raise UserError(f"--lock {lock}: {wrong}")


def _run(command: list[str], what: str) -> str:
    """Run a command and return its output.

    Raises:
        UserError: it failed; with the end of its own words.
    """
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PIP_S,
            env=own | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{what} failed; nothing was installed: {error}") from error
    if done.returncode:
        words = (done.stdout + done.stderr).strip()[-LONGEST_OUTPUT:]
        raise UserError(f"{what} failed; nothing was installed. Its own words:\n{words}")
    return done.stdout


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say which file or folder of an environment cannot be written.

    Raises:
        UserError: one cannot be.
    """
    try:
        yield
    except OSError as error:
        path = error.filename or folder
        raise UserError(f"environment {folder.name!r}: cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands from one environment, in a folder that is made if there is none.

    The lock's file stays, as removing it would let two in.

    Raises:
        UserError: another command works on it.
        OSError: the folder cannot be made, or not be written to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"environment {folder.name!r}: another streamrl env command works on it") from None
        yield
