"""C sources of this package, compiled for the machine's own CPU on first use and kept in the cache.

What they compute has another way in torch or vLLM, which remains where there is no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.errors import UserError
from streamrl.machine.cpu import this_cpu
from streamrl.machine.model_files import cache_directory
from streamrl.machine.user_folders import is_own
from streamrl.scratch_folders import ScratchFolder

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILE_S = 60


def load(source: Path, instead: str) -> ctypes.CDLL | None:
    """Return the library that a source compiles to; None: there is no compiler, or it failed, which is logged.

    Args:
        source: the C file.
        instead: what is done without it, for the log.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    cpu = this_cpu()
    facts = [source.read_text(), *FLAGS, compiler, platform.machine(), cpu.name, *sorted(cpu.flags)]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    name = f"{source.stem.replace('_', '-')}-{digest}.so"
    try:
        with _own_folder(cache_directory() / "compiled", name) as folder:
            library = folder / name
            if not is_own(library):
                part = library.with_suffix(f".{secrets.token_hex(8)}")
                command = [compiler, *FLAGS, str(source), "-o", str(part), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
                part.chmod(0o700)
                part.replace(library)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError, UserError) as error:
        log.warning("%s, because %s could not be compiled: %s", instead, source.name, error)
        return None


@contextmanager
def _own_folder(folder: Path, name: str) -> Iterator[Path]:
    """Give a folder that can have a file and to which nobody else can write: this one, or a temporary one if others can
    write to it (a shared cache) or this process cannot (a home folder that is only read)."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_own(folder) and (os.access(folder, os.W_OK) or is_own(folder / name)):
        yield folder
        return
    with ScratchFolder() as private:
        yield private
