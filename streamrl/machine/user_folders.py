"""Folders of this user outside of runs: for what is kept between commands."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from streamrl.errors import UserError

CONFIG, CACHE = ("XDG_CONFIG_HOME", ".config"), ("XDG_CACHE_HOME", ".cache")
CACHES_OF_LIBRARIES = {"VLLM_CACHE_ROOT": ("vllm", [CACHE]), "MPLCONFIGDIR": ("matplotlib", [CONFIG, CACHE])}
"""Variables by which libraries get the folder, of this name, that they else make in each of a user's folders (variable,
below the home), and of which they complain in many lines if they cannot write there."""
REMEDY = "set HOME to a folder of yours (or STREAMRL_CACHE and STREAMRL_ENVIRONMENTS)"


def user_folder(variable: str, below_home: str) -> Path:
    """Return the folder streamrl/ in one of the user's folders; `streamrl-UID` in that for temporary files if there is
    no home folder in which it is or could be made.

    A user id of a container that is in no list of users has HOME=/ from Docker and Kubernetes, or none.

    Args:
        variable: environment variable that names the user's folder, such as XDG_CACHE_HOME.
        below_home: the user's folder, seen from the home folder, if the variable is not set.

    Raises:
        UserError: there is no such home folder, and somebody else has made or could write to the folder in its place.
    """
    if given := os.environ.get(variable):
        return Path(given) / "streamrl"
    return _at_home(below_home, "streamrl") or _without_home()


def cache_directory() -> Path:
    """Return the cache folder: $STREAMRL_CACHE, or streamrl/ in the user's cache folder.

    Raises:
        UserError: this user has no home folder, and none can be used in its place.
    """
    if own := os.environ.get("STREAMRL_CACHE"):
        return Path(own)
    return user_folder("XDG_CACHE_HOME", ".cache")


def settle_caches() -> None:
    """Let libraries keep their caches in this user's folder for temporary files if it has no home folder for them.

    What the environment says already is kept. This process and all that it starts are concerned, and only libraries
    that are imported afterwards.
    """
    for name, (library, places) in CACHES_OF_LIBRARIES.items():
        usual = [_at_home(below_home, library) for variable, below_home in places if not os.environ.get(variable)]
        if name not in os.environ and not all(folder is not None and _may_write(folder) for folder in usual):
            with contextlib.suppress(UserError):  # they only complain, and do without
                os.environ[name] = str(_without_home() / library)


def _at_home(below_home: str, name: str) -> Path | None:
    """Return a folder in the home folder; None: there is no home folder in which it is or could be made."""
    try:
        folder = Path.home() / below_home / name
    except RuntimeError:
        return None
    return folder if os.path.isdir(folder) or _can_be_made(folder) else None


def is_own(path: Path) -> bool:
    """Whether it is there, is this user's, and no link, and nobody else may write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _can_be_made(folder: Path) -> bool:
    """Whether this user may write to the nearest folder above it that there is."""
    # not Path.exists, which raises where this user may not look
    above = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
    return os.path.isdir(above) and _may_write(above)


def _may_write(folder: Path) -> bool:
    """Whether this user may write to a folder, or could once it is made."""
    return not os.path.exists(folder) or os.access(folder, os.W_OK | os.X_OK)


def _without_home() -> Path:
    """Make the folder of a user without a home folder of its own, or take the one that is there."""
    try:
        folder = Path(tempfile.gettempdir()) / f"streamrl-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        found = f"this user has no home folder to write to, nor one for temporary files ({error})"
        raise UserError(f"{found}; {REMEDY}") from error
    if not is_own(folder) or not folder.is_dir():
        raise UserError(
            f"this user has no home folder to write to, and {folder} is no folder to which this user alone can write; "
            f"{REMEDY}"
        )
    return folder
