"""Checks of `make install` before it fetches gigabytes, and parsers for the output of pip and uv. Pure functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping

ENVIRONMENT_BYTES = 4.0e9
"""Bytes that an installation occupies at its peak (measured: 3.2e9 when done), with some to spare."""

VECTORS = {"avx2", "asimd", "neon"}
"""Instruction sets of which torch's and vLLM's CPU builds need one, by their names in /proc/cpuinfo."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Python versions for which torch is looked for if there is none for this one."""

NETWORK = re.compile(
    r"error sending request|after \d+ retries|response body|timed? ?out|connection (broken|reset|aborted|refused)"
    r"|connection ?error|incompleteread|protocolerror|max retries exceeded|before message length|unexpected eof"
    r"|incomplete-download|hash mismatch|do not match the hashes|not a valid zip|extract archive"
    r"|(server error|error:?) \(?5\d\d|too many requests|temporary failure in name|name or service not known",
    re.IGNORECASE,
)
"""Pattern of failures that a retry may fix."""

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
    """Return the message for a CPU without builds; None if it has the instructions or does not report them.

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
    """Return the message for missing disk space; None if there is enough.

    Args:
        needed: bytes of the whole environment.
        there: bytes of it that are already on the disk.
        free: bytes that can still be written.
        folder: folder of the environment.
    """
    missing = needed - there - free
    if missing <= 0:
        return None
    return (
        f"{missing / 1e9:.1f} GB of disk space are missing: the environment needs {needed / 1e9:.1f} GB, "
        f"{folder} has {free / 1e9:.1f} GB free.\n"
        "  Make room, or choose another disk with: make VENV=/path/to/new-folder"
    )


def pip_settings(listed: str) -> dict[str, list[str]]:
    """Return pip's configuration, merged as pip does.

    Args:
        listed: output of `pip config list`: `section.key='value'` lines.

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
    """Return uv's options for pip's settings; like pip, uv takes a version from any index that has it."""
    arguments = ["--index-strategy", "unsafe-best-match"]
    for key, option in PIP_TO_UV.items():
        for value in settings.get(key, ()):
            arguments += [option, value]
    if any(value.lower() in ("1", "true", "yes", "on") for value in settings.get("no-index", ())):
        arguments.append("--no-index")
    return arguments


def uv_environment(settings: Mapping[str, Collection[str]], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for uv from pip's settings, without those already set."""
    found = {
        name: value for key, names in PIP_TO_ENVIRONMENT.items() for name in names for value in settings.get(key, ())
    }
    # by default uv would fetch its own Python from elsewhere, and start 50 downloads at once, some of which time out
    # on a busy machine
    found |= {"UV_PYTHON_DOWNLOADS": "never", "UV_CONCURRENT_DOWNLOADS": "16", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    return {name: value for name, value in found.items() if name not in environment}


def versions_of(listed: str) -> list[str]:
    """Return the versions in the output of `pip index versions`."""
    line = re.search(r"^Available versions:(.*)$", listed, re.MULTILINE)
    return [version.strip() for version in line[1].split(",")] if line else []


def no_torch(torch: str, here: str, working: Iterable[str], index: str, unreachable: bool) -> str:
    """Return the message for a Python without a CPU build of torch.

    Args:
        torch: the locked requirement.
        here: this Python's version.
        working: Python versions for which there is one.
        index: PyTorch's own index.
        unreachable: whether that index did not answer.
    """
    other = f"{index} (which cannot be reached from here)" if unreachable else index
    lines = [f"{torch} is not available for Python {here}: not on the configured indexes, nor on {other}."]
    if working := list(working):
        lines.append(f"Found for Python {', '.join(working)}: take that one with: make PYTHON=python{working[-1]}")
    else:
        lines.append(f"Not found for Python {', '.join(PYTHONS)} either: is the right package index configured?")
    return "\n  ".join([*lines, "Nothing else was fetched."])


def words(lines: Iterable[str]) -> list[str]:
    """Return a log's lines without debug messages and known noise."""
    noise = ("DEBUG ", "TRACE ", "INFO ", "WARNING: Location", "[notice]", "DEPRECATION")
    return [line for line in lines if line.strip() and not line.startswith(noise)]


def last_error(lines: Iterable[str], most: int = 15, width: int = 240) -> list[str]:
    """Return the error at the end of a log: from the first line with "error:" on, or the last lines, cut to a width."""
    said = words(lines)
    first = next((i for i, line in enumerate(said) if line.lower().startswith("error:")), max(len(said) - most, 0))
    # pip lists all existing versions, so lines are cut
    return [line if len(line) <= width else line[:width] + " ..." for line in said[first:][-most:]]


def may_pass(lines: Iterable[str]) -> bool:
    """Return whether a log reports a failure of the network, which a retry may fix."""
    return any(NETWORK.search(line) for line in words(lines))


def reason(error: list[str]) -> str:
    """Describe a failure in one line: what failed, and its innermost cause."""
    if not error:
        return "it ended without a word"
    first = re.sub(r"^error:\s*", "", error[0].strip(), flags=re.IGNORECASE)
    causes = [line.strip().removeprefix("cause: ") for line in error if line.strip().startswith("cause: ")]
    if first == "Exception:":  # pip shows a traceback below
        return error[-1].strip()
    return f"{first}: {causes[-1]}" if causes else first


def uv_stage(lines: Iterable[str]) -> tuple[str, bool]:
    """Return (what uv does now, whether it waits for the network), from its log."""
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
    """Return (what pip does now, whether it waits for the network), from its log."""
    said = words(lines)
    if any(line.startswith("Installing collected packages") for line in said):
        return "putting packages in place", False
    count = sum(line.startswith(("Collecting ", "Processing ", "Requirement already satisfied: ")) for line in said)
    last = said[-1].strip() if said else ""
    return f"{count} packages fetched", last.startswith(("Collecting ", "Downloading "))


def own_retries(lines: Iterable[str]) -> list[str]:
    """Return a sentence about each retry that uv or pip makes by itself."""
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
    """A detector of slow downloads: fewer than `least` bytes in `window` seconds of waiting for the network."""

    def __init__(self, window: float, least: float) -> None:
        self.window, self.least = window, least
        self.since: tuple[float, float] | None = None

    def slow(self, now: float, written: float | None, fetching: bool) -> bool:
        """Return whether the download is too slow now; the clock restarts when enough came or nothing is awaited."""
        if written is None or not fetching:
            self.since = None
            return False
        if self.since is None or written - self.since[1] >= self.least:
            self.since = (now, written)
        return now - self.since[0] >= self.window
