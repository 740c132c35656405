"""What `make install` refuses, asks and tries again; broken downloads are real ones, of a server of the test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

from tests.install.conftest import TOOLS


@pytest.mark.parametrize(
    "cpuinfo",
    [
        "",  # not Linux
        "processor: 0\nmodel name\t: An i7\nflags\t\t: fpu sse4_2 avx avx2 bmi1\n",
        "processor: 0\nFeatures\t: fp asimd aes\n",
        "processor: 0\nFeatures\t: half thumb neon vfpv4\n",
        "processor: 0\nsomething else: entirely\n",
    ],
)
def test_a_cpu_that_may_do_is_not_refused(checks: ModuleType, cpuinfo: str) -> None:
    assert checks.instruction_problem(cpuinfo) is None


@pytest.mark.parametrize(
    "cpuinfo",
    [
        "model name\t: Old One\nflags\t\t: fpu sse4_2 avx avx2x\n",
        "model name\t: Old One\nFeatures\t: half thumb vfpv3\n",
    ],
)
def test_a_cpu_without_vector_instructions_is_named(checks: ModuleType, cpuinfo: str) -> None:
    problem = checks.instruction_problem(cpuinfo)
    assert "this CPU (Old One) has neither AVX2 (x86-64) nor NEON (arm64)" in problem


def test_missing_disk_space_is_told_in_gigabytes(checks: ModuleType) -> None:
    assert checks.disk_problem(4e9, 0, 4e9, "/data") is None
    assert checks.disk_problem(4e9, 3e9, 1e9, "/data") is None  # most of it is there already
    problem = checks.disk_problem(4e9, 1e9, 1.5e9, "/data")
    assert problem.startswith("1.5 GB of disk space are missing: the environment needs 4.0 GB, /data has 1.5 GB free")


def test_a_full_disk_an_old_cpu_and_missing_headers_end_the_installation(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("torch==2.13.0+cpu\n")
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path / "a" / "b"), "--lock", str(lock)])
    with monkeypatch.context() as full:
        full.setattr(install.checks, "ENVIRONMENT_BYTES", 1e18)
        assert install.main() == 1
    assert "GB of disk space are missing" in capsys.readouterr().err
    with monkeypatch.context() as old:
        old.setattr(install.checks, "VECTORS", {"no_such_instruction"})
        assert install.main() == 1
    assert "has neither AVX2" in capsys.readouterr().err
    with monkeypatch.context() as bare:
        bare.setattr(install.sysconfig, "get_path", lambda *names: str(tmp_path / "-".join(names)))
        assert install.main() == 1
        assert f"the headers of {sys.executable} are missing (Python.h)" in capsys.readouterr().err
        headers = tmp_path / "include-posix_prefix"
        headers.mkdir()
        (headers / "Python.h").touch()
        bare.setattr(install.checks, "ENVIRONMENT_BYTES", 1e18)
        assert install.main() == 1  # it goes on to the next check
        assert "GB of disk space are missing" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_torch_that_is_not_to_be_had_names_the_pythons_that_work(checks: ModuleType) -> None:
    said = checks.no_torch("torch==2.13.0+cpu", "3.13.0", ["3.11", "3.12"], "https://example.org/cpu", True)
    assert "torch==2.13.0+cpu is not available for Python 3.13.0" in said
    assert "https://example.org/cpu (which cannot be reached from here)" in said
    assert "Found for Python 3.11, 3.12: take that one with: make PYTHON=python3.12" in said
    nowhere = checks.no_torch("torch==2.13.0+cpu", "3.13.0", [], "https://example.org/cpu", False)
    assert "nor on https://example.org/cpu." in nowhere and "is the right package index configured?" in nowhere


def test_versions_are_read_from_the_answer_of_pip(checks: ModuleType) -> None:
    listed = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\n  INSTALLED: 2.13.0+cpu\n"
    assert checks.versions_of(listed) == ["2.15.0", "2.13.0+cpu", "2.13.0"]
    assert checks.versions_of("ERROR: No matching distribution found for torch\n") == []


# pip's configuration, for uv


def test_the_configuration_of_pip_is_merged_as_pip_does(checks: ModuleType) -> None:
    settings = checks.pip_settings(
        ":env:.find-links='/c'\n"
        "global.extra-index-url='https://a/simple https://b/simple'\n"
        "global.find-links='/a'\n"
        "install.find-links='/b'\n"
        "download.find-links='/not/asked'\n"
        "global.trusted-host='\\na\\nb'\n"
    )
    assert settings == {
        "extra-index-url": ["https://a/simple", "https://b/simple"],
        "find-links": ["/c"],
        "trusted-host": ["a", "b"],
    }


def test_uv_is_given_the_configuration_of_pip(checks: ModuleType) -> None:
    settings = {"index-url": ["https://i"], "extra-index-url": ["https://a", "https://b"], "trusted-host": ["i:8"]}
    assert checks.uv_arguments(settings) == [
        *["--index-strategy", "unsafe-best-match", "--default-index", "https://i"],
        *["--index", "https://a", "--index", "https://b", "--allow-insecure-host", "i:8"],
    ]
    assert checks.uv_arguments({"no-index": ["true"], "find-links": ["/w"]})[2:] == ["--find-links", "/w", "--no-index"]
    assert "--no-index" not in checks.uv_arguments({"no-index": ["0"]})


def test_settings_of_the_user_for_uv_win(checks: ModuleType) -> None:
    found = checks.uv_environment({"cert": ["/c.pem"], "timeout": ["60"]}, {"SSL_CERT_FILE": "/own.pem"})
    assert found["UV_HTTP_TIMEOUT"] == "60"
    assert found["UV_PYTHON_DOWNLOADS"] == "never"
    assert "SSL_CERT_FILE" not in found


# what the installers say


UV_LOG = """\
DEBUG uv 0.13.9
Using Python 3.11.7 environment at: e
Resolved 3 packages in 3ms
Downloading ray (75.6MiB)
Downloading torch (180.1MiB)
   Building pycosat==0.6.6
 Downloaded ray
""".splitlines()


def test_the_stage_of_uv_is_read_from_its_log(checks: ModuleType) -> None:
    assert checks.uv_stage(UV_LOG[:2]) == ("asking the index", True)
    stage = "3 packages: 1 of 2 large ones fetched, under way: torch, building pycosat==0.6.6"
    assert checks.uv_stage(UV_LOG) == (stage, True)
    assert checks.uv_stage(UV_LOG[:3]) == ("3 packages: fetching small ones", True)
    building = [*UV_LOG, " Downloaded torch"]
    assert checks.uv_stage(building) == ("3 packages: 2 of 2 large ones fetched, building pycosat==0.6.6", False)
    built = [*building, "      Built pycosat==0.6.6", "Prepared 3 packages in 9.1s"]
    assert checks.uv_stage(built) == ("putting 3 packages in place", False)


def test_the_stage_of_pip_is_read_from_its_log(checks: ModuleType) -> None:
    log = ["Collecting a==1", "  Downloading a-1.whl (3 MB)", "Requirement already satisfied: b", "Collecting c"]
    assert checks.pip_stage(log[:2]) == ("1 packages fetched", True)
    assert checks.pip_stage([*log, "  Preparing metadata: started"]) == ("3 packages fetched", False)
    assert checks.pip_stage([*log, "Installing collected packages: a, b"])[1] is False


UV_CUT = """\
DEBUG Sending fresh GET request
error: Failed to download `beta==1.0`
  cause: Failed to write to the distribution cache
  cause: end of file before message length reached
""".splitlines()
UV_NONE = """\
error: No solution found when resolving dependencies
  cause: Because there is no version of beta==1.0 and you require beta==1.0, we can conclude that
""".splitlines()
PIP_CUT = [
    "Collecting a",
    "ERROR: Exception:",
    "Traceback (most recent call last):",
    "ReadTimeoutError: Read timed out.",
]


def test_a_failure_is_told_in_one_line(checks: ModuleType) -> None:
    said = checks.reason(checks.last_error(UV_CUT))
    assert said == "Failed to download `beta==1.0`: end of file before message length reached"
    assert checks.reason(checks.last_error(PIP_CUT)) == "ReadTimeoutError: Read timed out."
    assert checks.reason([]) == "it ended without a word"
    assert checks.last_error(["ERROR: " + "x" * 500])[0] == "ERROR: " + "x" * 233 + " ..."


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        *((line, True) for line in (UV_CUT[-1], PIP_CUT[-1])),
        ("  cause: HTTP status server error (503 Service Unavailable) for url (http://h/x.whl)", True),
        ("  cause: Request failed after 3 retries in 6.3s", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("  cause: HTTP status client error (404 Not Found) for url (http://h/x.whl)", False),
        (UV_NONE[-1], False),
        ("error: No space left on device (os error 28)", False),
        ("DEBUG connection reset, but tried again with success", False),
    ],
)
def test_only_failures_of_the_network_are_worth_another_try(checks: ModuleType, line: str, passes: bool) -> None:
    assert checks.may_pass([line]) is passes


def test_a_download_is_slow_that_brings_too_little_in_the_window(checks: ModuleType) -> None:
    pace = checks.Pace(window=10, least=100)
    assert not pace.slow(0, 0, True)
    assert not pace.slow(9, 99, True)
    assert pace.slow(10, 99, True)
    assert not pace.slow(11, 100, True)  # enough came: the clock starts again
    assert not pace.slow(20, 100, True)
    assert not pace.slow(25, 100, False)  # builds something
    assert not pace.slow(30, 100, True)
    assert not pace.slow(60, None, True)  # the system does not tell


# real downloads


def test_what_the_installers_try_again_is_told(checks: ModuleType) -> None:
    log = [
        "DEBUG Transient failure while handling response from `http://h/beta-1.0.whl`; retrying after 1s...",
        "WARNING: Attempting to resume incomplete download (1 MB/2 MB, attempt 1)",
        "WARNING: Retrying (Retry(total=4)) after connection broken by 'ReadTimeoutError(\"timed out\")': /simple/",
        "Collecting a",
    ]
    assert checks.own_retries(log) == [
        "the download of beta-1.0.whl broke; it is tried again",
        "a download broke; it is resumed",
        "the package index did not answer; it is asked again",
    ]


FAKE_PIP = """\
import sys
words = sys.argv[1:]
version = words[words.index("--python-version") + 1] if "--python-version" in words else "3.9"
extra = "--extra-index-url" in words
if version in HAVE or (extra and version in HAVE_EXTRA):
    print("torch (9)\\nAvailable versions: 9, 2.13.0+cpu")
else:
    sys.exit("ERROR: No matching distribution found for torch")
"""


@pytest.mark.parametrize(
    ("have", "have_extra", "found"),
    [
        (["3.9", "3.12"], [], None),
        (["3.12"], ["3.9"], "https://download.pytorch.org/whl/cpu"),
        (["3.12"], ["3.11"], "Found for Python 3.11, 3.12: take that one with: make PYTHON=python3.12"),
        ([], [], "is the right package index configured?"),
    ],
)
def test_the_configured_indexes_are_asked_for_torch_first_and_that_of_pytorch_second(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    have: list[str],
    have_extra: list[str],
    found: str | None,
) -> None:
    answering = (
        tmp_path / "pip.py"
    )  # a real program that answers as `pip index versions` does, for an index of the test
    answering.write_text(FAKE_PIP.replace("HAVE_EXTRA", repr(have_extra)).replace("HAVE", repr(have)))
    monkeypatch.setattr(install, "pip", lambda python, *words: [sys.executable, str(answering), *words])
    torch = "torch==2.13.0+cpu"
    without = tmp_path / "python"  # an interpreter without torch
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    without.chmod(0o755)
    if found is None or found.startswith("https"):
        assert install.find_torch(without, torch) == found
    else:
        with pytest.raises(install.InstallError, match=re.escape(found)):
            install.find_torch(without, torch)


def test_the_lock_pins_uv(install: ModuleType) -> None:
    lock = install.read_lock(TOOLS.parent / "locks" / "cpu.txt")
    assert sum(line.startswith("uv==") for line in lock) == 1


def test_a_torch_that_is_installed_already_is_not_asked_for(install: ModuleType) -> None:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    version = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert install.find_torch(Path(sys.executable), f"torch=={version}") is None


# the folder of the environment


def install_into(
    install: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Carry out the installer for a folder, with a lock whose torch no index has; return what it says as it fails."""
    lock = folder.parent / "lock.txt"
    lock.write_text("torch==2.13.0+cpu\n")
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(folder), "--lock", str(lock)])

    def nowhere(python: Path, torch: str) -> None:
        assert python.exists()
        raise install.InstallError(f"no {torch}")

    monkeypatch.setattr(install, "find_torch", nowhere)
    assert install.main() == 1
    return capsys.readouterr().err


@pytest.fixture
def quick_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments without pip, which takes seconds to copy."""
    real = venv.create
    monkeypatch.setattr(venv, "create", lambda folder, with_pip, clear: real(folder, clear=clear))


@pytest.mark.parametrize("others", [["letter.txt"], ["letter.txt", "bin/python"]])
def test_a_folder_with_other_things_is_refused_and_keeps_them(
    install: ModuleType,
    quick_venv: None,
    others: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "mine"
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("dear")
    said = install_into(install, folder, monkeypatch, capsys)
    assert f"VENV={folder} holds something else than a Python environment" in said
    assert f"make VENV={folder}/" in said
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(others)


def test_a_file_in_place_of_the_folder_is_refused(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("dear")
    assert "something else" in install_into(install, tmp_path / "mine", monkeypatch, capsys)
    assert (tmp_path / "mine").read_text() == "dear"


@pytest.mark.parametrize("was_there", [False, True])
def test_a_new_environment_goes_if_there_is_no_torch_and_an_empty_folder_stays(
    install: ModuleType,
    quick_venv: None,
    was_there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "env"
    if was_there:
        folder.mkdir()
    assert "no torch==2.13.0+cpu" in install_into(install, folder, monkeypatch, capsys)
    assert folder.exists() == was_there
    assert not was_there or list(folder.iterdir()) == []


def test_an_environment_that_works_stays_if_there_is_no_torch(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.create(tmp_path / "env")
    (tmp_path / "env" / "own.txt").write_text("kept")
    assert "no torch==2.13.0+cpu" in install_into(install, tmp_path / "env", monkeypatch, capsys)
    assert (tmp_path / "env" / "own.txt").exists()


def test_a_broken_environment_is_made_anew(install: ModuleType, quick_venv: None, tmp_path: Path) -> None:
    folder = tmp_path / "env"
    folder.mkdir()
    for name in ("pyvenv.cfg", "left.txt"):
        (folder / name).write_text("home = /gone\n")
    assert install.make_venv(folder) == folder / "bin" / "python"
    assert (folder / "bin" / "python").exists() and not (folder / "left.txt").exists()


@pytest.mark.parametrize("was_there", [False, True])
def test_what_is_half_made_goes_and_the_package_with_pip_is_named(
    install: ModuleType, was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "env"
    if was_there:
        folder.mkdir()

    def no_ensurepip(folder: Path, with_pip: bool, clear: bool) -> None:
        (folder / "lib").mkdir(parents=True)
        (folder / "pyvenv.cfg").touch()
        (folder / "lib64").symlink_to("lib")
        raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(venv, "create", no_ensurepip)
    with pytest.raises(install.InstallError, match=r"apt install python3.*-venv"):
        install.make_venv(folder)
    assert folder.exists() == was_there
    assert not was_there or list(folder.iterdir()) == []


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run this project's Makefile in another folder, without what a `make` around the tests hands down."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VENV", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--directory", str(folder), "--file", str(TOOLS.parent / "Makefile"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_clean_removes_environments_and_nothing_else(tmp_path: Path) -> None:
    for name in ("env/pyvenv.cfg", "mine/letter.txt", "build/old"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    done = make(tmp_path, "clean", "VENV=mine")
    assert done.returncode == 0 and "mine stays: it holds no environment" in done.stderr
    assert (tmp_path / "mine" / "letter.txt").exists() and not (tmp_path / "build").exists()
    assert make(tmp_path, "clean", "VENV=env").returncode == 0
    assert not (tmp_path / "env").exists()
    assert make(tmp_path, "clean", "VENV=gone").stderr == ""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("name", ["", "a b"])
def test_make_refuses_an_environment_that_it_cannot_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    done = make(tmp_path, "clean", f"VENV={name}")
    assert done.returncode == 2 and "choose another with: make VENV=" in done.stderr
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()


@pytest.mark.parametrize("columns", [80, 20, 2])
def test_the_rewritten_line_fits_into_one_row_of_the_terminal(
    run: ModuleType, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stage = "fetching " + "a_package_with_a_long_name, " * 9
    progress = run.Progress(0.0)
    progress.show(stage, 3e9)
    assert f"{stage}, 3.00 GB unpacked (0 s)\n" in capsys.readouterr().out, "a line of a file is whole"
    progress.terminal = True
    progress.show(stage, 3e9)
    line = capsys.readouterr().out.removeprefix("\r\033[K")
    assert len(line) == max(2, columns - 1)
    if columns == 80:
        assert line.startswith("  fetching a_pack") and line.endswith(", 3.00 GB unpacked (0 s)")
