"""The check for files that processes of a run would import in place of what they mean.

Processes find the modules of rewards and agents in the folder where they are started, before all others, and then in
the folders and zip files of PYTHONPATH. Libraries in those are the user's choice: a checkout of one, say. Only the
standard library is imported here: what is checked for may replace `scheduler` already in this process.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder, all_suffixes
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


NOT_OF_RUNS = frozenset({"dev", "docs", "peer"})
"""Extras of this distribution whose libraries no process of a run imports."""
UNUSED_LIBRARIES = frozenset({"anthropic", "supervisor"})
"""Modules that vLLM requires and that no process of a run imports, with names that a file of agents may well have."""
START_ELSEWHERE = "give it another name, or start in another folder"
OFF_THE_PATH = "give it another name, or take its folder off PYTHONPATH"
ZIP_OFF_THE_PATH = "give it another name, or take the zip file off PYTHONPATH"
Found = tuple[Path, str]
"""A file or the folder of a package, and why it is refused."""


def check_shadowing() -> None:
    """Check that no module or package takes the name of one that a run imports.

    Raises:
        UserError: one line per file or package that does.
    """
    folder = Path.cwd()
    found = shadowing(folder)
    for other in _path_entries(folder):
        found += _own_and_standard(other, OFF_THE_PATH if other.is_dir() else ZIP_OFF_THE_PATH)
    if found:
        raise UserError("\n".join(f"{path}: {why}" for path, why in found))


def shadowing(folder: Path) -> list[Found]:
    """Return the modules and packages of a working folder that would replace others, and what to do about each.

    Libraries are looked for only if the standard library is what it should be: what looks for them needs it.
    """
    return _own_and_standard(folder, START_ELSEWHERE) or list(_libraries(folder))


def _own_and_standard(folder: Path, remedy: str) -> list[Found]:
    """Return what would replace packages of StreamRL or modules of the standard library in a folder or a zip file.

    Modules that are compiled into Python, such as `time`, are found before any file.
    """
    home = Path(__file__).parents[2]
    known = {*sys.stdlib_module_names, *OWN} - UNUSED
    found = []
    for name in sorted(_names(folder) & known if folder.is_dir() else known):
        if BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
            continue
        origin = _origin(name, [str(folder)])
        if origin is None or (name in OWN and _same(origin, home / name / "__init__.py")):
            continue
        whose = "a package of StreamRL" if name in OWN else "a module of Python's standard library"
        found.append(_refused(origin, whose, name, remedy))
    return found


def _libraries(folder: Path) -> Iterator[Found]:
    """Yield what would replace installed libraries of a run."""
    elsewhere = _elsewhere()
    for name in sorted(_names(folder) - {*sys.stdlib_module_names, *OWN, *UNUSED_LIBRARIES}):
        origin = _origin(name, [str(folder)])
        if origin is None or (there := PathFinder.find_spec(name, elsewhere)) is None:
            continue
        if there.origin is not None and os.path.realpath(there.origin) == os.path.realpath(origin):
            continue  # the working folder is where it is installed from
        if library := _installed_libraries().get(name):
            yield _refused(origin, f"a module of the installed library {library}", name, START_ELSEWHERE)


def _same(origin: str, other: Path) -> bool:
    """Return whether a module's file is another one; none in a zip file is."""
    return os.path.exists(origin) and os.path.samefile(origin, other)


def _refused(origin: str, whose: str, name: str, remedy: str) -> Found:
    path = Path(origin)
    what = f"processes of a run would import it in place of {whose}, {name!r}: {remedy}"
    return (path.parent if path.stem == "__init__" else path), what


def _names(folder: Path) -> set[str]:
    """Return names that files and folders of a folder may have as modules; none if it cannot be listed."""
    suffixes = tuple(all_suffixes())
    try:
        entries = os.listdir(folder)
    except OSError:  # Python imports nothing from it either
        return set()
    return {entry.partition(".")[0] for entry in entries if "." not in entry or entry.endswith(suffixes)}


def _origin(name: str, path: list[str]) -> str | None:
    """Return the file of a module; None: there is none, or a folder without `__init__.py`, which gives way to one."""
    spec = PathFinder.find_spec(name, path)
    return spec.origin if spec is not None else None


def _path_entries(working: Path) -> Iterator[Path]:
    """Yield what PYTHONPATH names, as folders and zip files, without the working folder and the standard library."""
    standard = os.path.realpath(os.path.dirname(os.__file__))
    apart = {os.path.realpath(working), standard, os.path.join(standard, "lib-dynload")}
    for entry in _python_path():
        if os.path.realpath(entry) not in apart:
            yield Path(entry)


def _python_path() -> list[str]:
    """Return the entries of PYTHONPATH; an empty one is the working folder."""
    path = os.environ.get("PYTHONPATH")
    return list(dict.fromkeys(path.split(os.pathsep))) if path else []


def _elsewhere() -> list[str]:
    """Return where modules are found by a process that starts in another folder than this one."""
    relative = {os.path.abspath(entry) for entry in _python_path() if not os.path.isabs(entry)}
    return [entry for entry in (sys.path if sys.flags.safe_path else sys.path[1:]) if entry not in relative]


@functools.cache  # takes a fifth of a second, which few folders need
def _installed_libraries() -> dict[str, str]:
    """Return the modules of the libraries that a run may import: those this distribution requires, and their own."""
    from importlib import metadata

    required = _required()
    of_modules = metadata.packages_distributions()
    return {
        module: names[0] for module, names in of_modules.items() if any(_canonical(name) in required for name in names)
    }


def _required() -> set[str]:
    """Return the installed distributions that this one requires, with any extra but `NOT_OF_RUNS`, and theirs."""
    from importlib import metadata

    pending: list[tuple[str, frozenset[str] | None]] = [("streamrl", None)]
    seen = set(pending)
    found = set()
    while pending:
        name, extras = pending.pop()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in requirements:
            what, _, marker = requirement.partition(";")
            extra = re.search(r"""extra\s*==\s*["']([^"']+)""", marker)
            if extra and (extra[1] in NOT_OF_RUNS if extras is None else extra[1] not in extras):
                continue
            if parts := re.match(r"\s*([\w.-]+)\s*(?:\[([^]]*)])?", what):
                wanted = frozenset(one.strip() for one in (parts[2] or "").split(","))
                one = (_canonical(parts[1]), wanted)
                if one not in seen:
                    seen.add(one)
                    pending.append(one)
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
