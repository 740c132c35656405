"""What `make install` can know before it fetches gigabytes, and what it reads from pip and uv: pure functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping

ENVIRONMENT_BYTES = 4.0e9
"""Disk space that an installation occupies at its peak (measured: 3.2e9 when done), with some to spare."""

VECTORS = {"avx2", "asimd", "neon"}
"""Instructions of which torch's and vLLM's CPU builds need one kind, as /proc/cpuinfo names them."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions for which torch is looked for where this one has none."""

NETWORK = re.compile(
    r"error sending request|after \d+ retries|response body|timed? ?out|connection (broken|reset|aborted|refused)"
    r"|connection ?error|incompleteread|protocolerror|max retries exceeded|before message length|unexpected eof"
    r"|incomplete-download|hash mismatch|do not match the hashes|not a valid zip|extract archive"
    r"|(server error|error:?) \(?5\d\d|too many requests|temporary failure in name|name or service not known",
    re.IGNORECASE,
)
"""What a failure says that may be gone at the next try, as against one that stays."""

PIP_TO_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "no-binary": "--no-binary",
    "only-binary": "--only-binary",
    "constraint": "--constraint",
}
PIP_TO_ENVIRONMENT = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}


def instruction_problem(cpuinfo: str) -> str | None:
    """What to say of a CPU for which there are no builds; None where it has the instructions or does not tell.

    Args:
        cpuinfo: text of /proc/cpuinfo; empty on systems without it.
    """
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    if not lines or any(VECTORS & set(line.split()) for line in lines):
        return None
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    which = f" ({name[1]})" if name else ""
    return (
        f"this CPU{which} has neither AVX2 (x86-64) nor NEON (arm64): torch and vLLM have no CPU kernels for it.\n"
        "  Nothing was installed. A virtual machine may hide what the CPU has: choose its CPU type 'host' then."
    )


def disk_problem(needed: float, there: float, free: float, folder: str) -> str | None:
    """How much disk space is missing; None where there is enough.

    Args:
        needed: bytes of the whole environment.
        there: bytes of it that are on the disk already.
        free: bytes that can still be written.
        folder: where it is made.
    """
    missing = needed - there - free
    if missing <= 0:
        return None
    return (
        f"{missing / 1e9:.1f} GB of disk space are missing: the environment needs {needed / 1e9:.1f} GB, "
        f"{folder} has {free / 1e9:.1f} GB free.\n  Make room, or choose another disk with: make VENV=/path/to/folder"
    )


def pip_settings(listed: str) -> dict[str, list[str]]:
    """pip's own configuration, merged as pip does.

    Args:
        listed: what `pip config list` prints: `section.key='value'` lines.

    Returns:
        Values by key; later sections win: global, install, environment variables.
    """
    order = ("global", "install", ":env:")
    settings: dict[str, list[str]] = {}
    for section in order:
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            where, _, key = name.partition(".")
            if where == section:
                settings[key] = str(ast.literal_eval(value)).split()
    return settings


def uv_arguments(settings: Mapping[str, Collection[str]]) -> list[str]:
    """uv's options for pip's settings. pip takes a version from whichever index has it, so uv does."""
    arguments = ["--index-strategy", "unsafe-best-match"]
    for key, option in PIP_TO_UV.items():
        for value in settings.get(key, ()):
            arguments += [option, value]
    if any(value.lower() in ("1", "true", "yes", "on") for value in settings.get("no-index", ())):
        arguments.append("--no-index")
    return arguments


def uv_environment(settings: Mapping[str, Collection[str]], environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for uv by pip's settings, less those that are set already."""
    found = {
        name: value for key, names in PIP_TO_ENVIRONMENT.items() for name in names for value in settings.get(key, ())
    }
    # uv would fetch a Python of its own from elsewhere, and begin 50 downloads at once, of which some time out on a
    # busy machine
    found |= {"UV_PYTHON_DOWNLOADS": "never", "UV_CONCURRENT_DOWNLOADS": "16", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    return {name: value for name, value in found.items() if name not in environment}


def versions_of(listed: str) -> list[str]:
    """Versions in what `pip index versions` prints."""
    line = re.search(r"^Available versions:(.*)$", listed, re.MULTILINE)
    return [version.strip() for version in line[1].split(",")] if line else []


def no_torch(torch: str, here: str, working: Iterable[str], index: str, unreachable: bool) -> str:
    """The message for a Python for which there is no CPU build of torch.

    Args:
        torch: the locked requirement.
        here: this Python's version.
        working: Python versions for which it was found.
        index: PyTorch's own index.
        unreachable: whether that index did not answer.
    """
    tail = "which cannot be reached from here" if unreachable else "nor is it there"
    lines = [f"{torch} is not to be had for Python {here}: not on the configured indexes, and on {index} ({tail})."]
    if working := list(working):
        lines.append(f"Found for Python {', '.join(working)}: take that one with: make PYTHON=python{working[-1]}")
    else:
        lines.append(f"Not found for Python {', '.join(PYTHONS)} either: is the right package index configured?")
    return "\n  ".join([*lines, "Nothing else was fetched."])


def words(lines: Iterable[str]) -> list[str]:
    """A log's lines that are for people: without debug messages and known noise."""
    noise = ("DEBUG ", "TRACE ", "INFO ", "WARNING: Location", "[notice]", "DEPRECATION")
    return [line for line in lines if line.strip() and not line.startswith(noise)]


def last_error(lines: Iterable[str], most: int = 15, width: int = 240) -> list[str]:
    """The error at the end of a log: from the first line on that says so, or the last lines, each cut to a width."""
    said = words(lines)
    first = next((i for i, line in enumerate(said) if line.lower().startswith("error:")), max(len(said) - most, 0))
    # pip lists all versions that there are
    return [line if len(line) <= width else line[:width] + " ..." for line in said[first:][-most:]]


def may_pass(lines: Iterable[str]) -> bool:
    """Whether a log tells a failure of the network, which may be gone at the next try."""
    return any(NETWORK.search(line) for line in words(lines))


def reason(error: list[str]) -> str:
    """A failure in one line: what failed, and its innermost cause."""
    if not error:
        return "it ended without a word"
    first = re.sub(r"^error:\s*", "", error[0].strip(), flags=re.IGNORECASE)
    causes = [line.strip().removeprefix("cause: ") for line in error if line.strip().startswith("cause: ")]
    if first == "Exception:":  # pip shows a traceback below
        return error[-1].strip()
    return f"{first}: {causes[-1]}" if causes else first


def uv_stage(lines: Iterable[str]) -> tuple[str, bool]:
    """(what uv does now, whether it waits for the network), of its log."""
    begun: dict[str, None] = {}
    done, building = set(), set()
    total, resolved, prepared = "", False, False
    for line in lines:
        text = line.split()
        if line.startswith("Resolved "):
            resolved, total = True, text[1]
        elif line.startswith("Downloading ") and len(text) > 1:
            begun[text[1]] = None
        elif line.startswith(" Downloaded "):
            done.add(text[1])
        elif line.startswith("   Building "):
            building.add(text[1])
        elif line.startswith("      Built "):
            building.discard(text[1])
        elif line.startswith("Prepared "):
            prepared = True
    if not resolved:
        return "asking the index", True
    if prepared:
        return f"putting {total} packages in place", False
    waiting = [name for name in begun if name not in done]
    large = f"{len(begun) - len(waiting)} of {len(begun)} large ones fetched" if begun else "fetching small ones"
    stage = f"{total} packages: {large}"
    if waiting:
        stage += f", under way: {', '.join(waiting[:3])}{' ...' if len(waiting) > 3 else ''}"
    if building:
        stage += f", building {', '.join(sorted(building))}"
    return stage, bool(waiting) or not building


def pip_stage(lines: Iterable[str]) -> tuple[str, bool]:
    """(what pip does now, whether it waits for the network), of its log."""
    said = words(lines)
    if any(line.startswith("Installing collected packages") for line in said):
        return "putting packages in place", False
    count = sum(line.startswith(("Collecting ", "Processing ", "Requirement already satisfied: ")) for line in said)
    last = said[-1].strip() if said else ""
    return f"{count} packages fetched", last.startswith(("Collecting ", "Downloading "))


def own_retries(lines: Iterable[str]) -> list[str]:
    """What uv or pip tries again by itself, as a sentence each."""
    found = []
    for line in lines:
        if match := re.search(r"Transient .*?`?(\S+/[^\s`]+)`?[;,] retrying", line):
            name = match[1].rstrip("/").rsplit("/", 1)[-1]
            found.append(f"the download of {name} broke; it is tried again")
        elif line.startswith("WARNING: Attempting to resume incomplete download"):
            found.append("a download broke; it is resumed")
        elif line.startswith("WARNING: Retrying ("):
            found.append("the package index did not answer; it is asked again")
    return found


class Pace:
    """Tells that a download is too slow: fewer than `least` bytes in `window` seconds in which it waited for some."""

    def __init__(self, window: float, least: float) -> None:
        self.window, self.least = window, least
        self.since: tuple[float, float] | None = None

    def slow(self, now: float, written: float | None, fetching: bool) -> bool:
        """One look at it; the clock starts again whenever enough came, or nothing was waited for."""
        if written is None or not fetching:
            self.since = None
            return False
        if self.since is None or written - self.since[1] >= self.least:
            self.since = (now, written)
        return now - self.since[0] >= self.window
