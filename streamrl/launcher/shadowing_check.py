"""The check of the working folder for files that processes of a run would import in place of what they mean.

Processes find the modules of rewards and agents in the folder where they are started, before all others. Only
the standard library is imported here: what is checked for may replace `scheduler` already in this process.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

from streamrl.errors import UserError

OWN = ("ranker", "scheduler", "streamrl")
"""Packages that this distribution installs, beside each other."""
UNUSED = frozenset(
    {
        *("aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "imp", "mailcap"),
        *("nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
        *("antigravity", "idlelib", "lib2to3", "this", "turtle", "turtledemo"),
    }
)
"""Modules of the standard library that no process of a run imports: those that Python 3.12 and 3.13 have removed, and
toys. Of all others some dependency may import any."""


def check_shadowing() -> None:
    """Check that the working folder has no module or package that takes the name of one that a run imports.

    Raises:
        UserError: one line per file or package that does.
    """
    if found := shadowing(Path.cwd()):
        raise UserError("\n".join(f"{path}: {why}" for path, why in found))


def shadowing(folder: Path) -> list[tuple[Path, str]]:
    """Return the modules and packages of a folder that would replace others of their names, and what to do about each.

    Modules that are compiled into Python, such as `time`, are found before any file.
    """
    home = Path(__file__).parents[2]
    found = []
    for name in sorted({*sys.stdlib_module_names, *OWN} - UNUSED):
        if BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
            continue
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is None or spec.origin is None:  # a folder without __init__.py gives way to a module or a package
            continue
        if name in OWN and os.path.samefile(spec.origin, home / name / "__init__.py"):
            continue
        whose = "a package of StreamRL" if name in OWN else "a module of Python's standard library"
        path = Path(spec.origin)
        found.append(
            (
                path.parent if path.stem == "__init__" else path,
                f"processes of a run would import it in place of {whose}, {name!r}: give it another name, or start in "
                "another folder",
            )
        )
    return found
