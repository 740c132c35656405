"""C sources of this package, compiled for the machine's own CPU on first use and kept in the cache.

What they compute has another way in torch or vLLM, which remains where there is no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.atomic_files import replacing
from streamrl.errors import UserError
from streamrl.machine.cpu import this_cpu
from streamrl.machine.user_folders import cache_directory, is_own
from streamrl.scratch_folders import ScratchFolder

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILE_S = 60
LAST_WORDS = 500
"""Characters of what a compiler says that are logged."""
HEADERS = Path(__file__).parent
"""Folder of the headers that sources of several folders include."""
DIGEST_BYTES = 16
"""Bytes at the end of a library, which loaders leave alone, with the digest of all others."""


def load(source: Path, instead: str) -> ctypes.CDLL | None:
    """Return the library that a source compiles to; None: there is no compiler, or it failed, which is logged.

    Args:
        source: the C file.
        instead: what is done without it, for the log.
    """
    try:
        compiler = compiler_words()
        return _loaded(_name(source, compiler), _command(compiler, source))
    except subprocess.CalledProcessError as error:
        reason = f"{error} {error.stderr.decode(errors='replace')[-LAST_WORDS:]}"
    except (OSError, ValueError, subprocess.SubprocessError, UserError) as error:
        reason = str(error)
    log.warning("%s, because %s could not be compiled: %s", instead, source.name, reason)
    return None


def library_name(source: Path) -> str:
    """Return the file name of the library that a source compiles to on this machine; 'none': it cannot be loaded.

    It changes with the source, the headers beside it and in `HEADERS`, the compiler, its flags and the CPU.
    """
    try:
        compiler = compiler_words()
        _loaded(name := _name(source, compiler), _command(compiler, source))
    except (OSError, ValueError, subprocess.SubprocessError, UserError):
        return "none"
    return name


def _name(source: Path, compiler: list[str]) -> str:
    cpu = this_cpu()
    headers = [file for folder in (HEADERS, source.parent) for file in sorted(folder.glob("*.h"))]
    code = [file.read_text(encoding="utf-8") for file in (source, *headers)]
    facts = [*code, *FLAGS, *compiler, platform.machine(), cpu.name, *sorted(cpu.flags)]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return f"{source.stem.replace('_', '-')}-{digest}.so"


def _command(compiler: list[str], source: Path) -> list[str]:
    return [*compiler, *FLAGS, f"-I{HEADERS}", str(source), "-lm"]


def compiler_words() -> list[str]:
    """Return the words that start a command of the compiler: those of CC, or cc, or gcc.

    Raises:
        OSError: there is none.
        ValueError: CC has a quotation without an end.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for first, *others in [named] if named else [["cc"], ["gcc"]]:
        if found := shutil.which(first):
            return [found, *others]
    raise OSError(f"there is no {named[0] if named else 'C compiler'}")


def _loaded(name: str, command: list[str]) -> ctypes.CDLL:
    """Return the library of this name in the cache; without it, or if it is damaged or cannot be loaded, compile it.

    Raises:
        OSError: no file could be written, or the library cannot be loaded.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    with _own_folder(cache_directory() / "compiled", name) as folder:
        library = folder / name
        for is_again in (False, True):
            try:
                if is_again or not _is_whole(library):
                    _compile(command, library)
                return ctypes.CDLL(str(library))
            except subprocess.CalledProcessError:
                break  # perhaps there is no room for what it writes
            except OSError:
                continue
    with ScratchFolder() as private:  # nothing can be written to, or executed from, the cache
        _compile(command, private / name)
        return ctypes.CDLL(str(private / name))


def _compile(command: list[str], library: Path) -> None:
    with replacing(library, lasting=True) as part:
        subprocess.run([*command, "-o", str(part)], check=True, capture_output=True, timeout=COMPILE_S)
        with part.open("ab") as file:
            file.write(_digest(part.read_bytes()))
        part.chmod(0o700)


def _is_whole(library: Path) -> bool:
    """Whether a library is there, is this user's, and has the content that it was compiled with.

    One that is cut off or damaged may load, and then end the process by a signal, or compute something else.

    Raises:
        OSError: it cannot be read.
    """
    if not is_own(library):
        return False
    content = library.read_bytes()
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


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
