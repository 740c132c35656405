"""C sources that are compiled on first use: what is in the cache, which compiler, and why there is none."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.machine import compiled_c
from streamrl.machine.compiled_c import library_name, load
from tests.waiting import scaled


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of its own, and an empty cache."""
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path / "cache")
    file = tmp_path / "half_of.c"
    file.write_text("int half(int x) { return x / 2; }")
    return file


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program in place of the compiler."""
    program = folder / "own-cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    return program


def in_cache(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "compiled").iterdir())


def test_a_library_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(source, "slow")
    assert library is not None and library.half(6) == 3
    (file,) = in_cache(source)
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    monkeypatch.setattr(compiled_c.subprocess, "run", None)
    again = load(source, "slow")
    assert again is not None and again.half(8) == 4


def test_the_name_of_a_library_is_known_before_it_is_compiled(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = library_name(source)
    assert load(source, "slow") is not None
    assert [file.name for file in in_cache(source)] == [name]
    source.write_text("int half(int x) { return x >> 1; }")
    assert library_name(source) not in (name, "none")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library_name(source) == "none"


def test_a_library_that_cannot_be_loaded_has_no_name(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    compiler(tmp_path, monkeypatch, "exit 3")
    assert library_name(source) == "none" and not caplog.messages
    compiler(tmp_path, monkeypatch, 'exec cc "$@"')
    assert library_name(source) != "none"


def test_a_cache_without_room_for_the_library_is_replaced_by_a_temporary_folder(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = f'for last; do :; done; case "$last" in {tmp_path}/cache/*) echo "No space left" >&2; exit 1; esac'
    compiler(tmp_path, monkeypatch, f'{full}; exec cc "$@"')
    library = load(source, "slow")
    assert library is not None and library.half(6) == 3
    assert in_cache(source) == []


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_one_that_cannot_be_loaded_is_compiled_again(content: bytes, source: Path) -> None:
    first = load(source, "slow")
    assert first is not None
    _ctypes.dlclose(first._handle)  # else it is found by its name
    (file,) = in_cache(source)
    file.write_bytes(content)
    file.chmod(0o700)
    library = load(source, "slow")
    assert library is not None and library.half(6) == 3
    assert in_cache(source) == [file] and file.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_one_that_is_damaged_but_loads_is_compiled_again(damage: str, source: Path) -> None:
    source.write_text("int values[4096] = {0x0a0b0c0d}; int first(void) { return values[0]; }")
    loads = f"from pathlib import Path\nfrom {load.__module__} import load\nlibrary = load(Path({str(source)!r}), '')\n"
    command = [sys.executable, "-c", f"{loads}assert library.first() == 0x0a0b0c0d"]  # apart: it may end by a signal
    environment = os.environ | {"STREAMRL_CACHE": str(source.parent / "cache")}
    subprocess.run(command, env=environment, check=True, timeout=scaled(60))
    (file,) = in_cache(source)
    whole = file.read_bytes()
    changed = whole.replace(bytes.fromhex("0d0c0b0a"), bytes.fromhex("0d0c0b0b"))
    file.write_bytes(whole[: len(whole) // 2] if damage == "cut off" else changed)
    subprocess.run(command, env=environment, check=True, timeout=scaled(60))
    assert in_cache(source) == [file] and file.read_bytes() == whole


def test_a_cache_from_which_nothing_may_be_executed_is_replaced_by_a_temporary_folder(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tried = ctypes.CDLL, []

    def refused(path: str) -> ctypes.CDLL:
        tried.append(path)
        if Path(path).is_relative_to(source.parent / "cache"):
            raise OSError("failed to map segment from shared object")
        return plain(path)

    monkeypatch.setattr(compiled_c.ctypes, "CDLL", refused)
    library = load(source, "slow")
    assert library is not None and library.half(6) == 3
    assert not Path(tried[-1]).exists()


def test_the_words_of_cc_are_the_compilers_command(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = compiler(tmp_path, monkeypatch, f'echo "$1" > {tmp_path}/first; shift; exec cc "$@"')
    monkeypatch.setenv("CC", f"{program} '-a word'")
    library = load(source, "slow")
    assert library is not None and library.half(6) == 3
    assert (tmp_path / "first").read_text() == "-a word\n"


@pytest.mark.parametrize(
    ("value", "reason"), [("no-such-compiler -m64", "there is no no-such-compiler"), ("'cc", "No closing quotation")]
)
def test_a_compiler_that_is_not_there_is_told(
    value: str, reason: str, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", value)
    assert load(source, "all is slow") is None
    assert f"all is slow, because half_of.c could not be compiled: {reason}" in caplog.text


def test_what_a_compiler_says_is_told_and_it_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    compiler(tmp_path, monkeypatch, 'for last; do :; done; echo half > "$last"; echo "no such flag" >&2; exit 3')
    assert load(source, "slow") is None
    assert "exit status 3. no such flag" in caplog.text
    assert in_cache(source) == []


def test_a_compiler_that_takes_too_long_is_ended(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled_c, "COMPILE_S", 0.2)
    compiler(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    assert load(source, "slow") is None
    assert "timed out" in caplog.text and in_cache(source) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_library_changes_with_the_headers_beside_its_source(source: Path) -> None:
    header = source.with_name("numbers.h")
    header.write_text("#define PARTS 2")
    source.write_text('#include "numbers.h"\nint half(int x) { return x / PARTS; }')
    first = load(source, "slow")
    header.write_text("#define PARTS 3")
    second = load(source, "slow")
    assert first is not None and second is not None and (first.half(6), second.half(6)) == (3, 2)
