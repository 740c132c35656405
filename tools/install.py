"""Makes the virtual environment of this repository from a lock file: `make install`.

Standard library only, since nothing is installed yet. The locked packages are installed as they are listed
(`--no-deps`): that keeps out what the lock leaves out on purpose. torch's CPU build is not on PyPI, so torch has a
pip of its own, which asks the configured indexes first and PyTorch's index second; it runs while the other
packages are fetched. Byte-compilation is done at the end on all cores, less what is not imported here: pip does
it on one core and for everything, and leaving it to the first import fails where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_COMPILED = r"/(tests?|testing|pip|anthropic)/|/openai/types/|/(transformers|vllm|vllm/model_executor)/models/"
NOISE = ("WARNING: Location", "[notice]", "DEPRECATION")


class InstallError(Exception):
    """Installation failed; the message says what the user can do."""


def main() -> int:
    """Installs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--lock", type=Path, default=Path("locks/cpu.txt"))
    options = parser.parse_args()
    started = time.monotonic()
    try:
        check_machine()
        python = make_venv(options.venv)
        install_locked(python, read_lock(options.lock))
        say("the project itself, and byte-compilation")
        finish(Pip(python, ["--no-build-isolation", "-e", "."]))
        byte_compile(python)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"installed in {options.venv} in {time.monotonic() - started:.0f} s")
    return 0


def check_machine() -> None:
    """A missing compiler shows up minutes later and deep inside torch, so it is named here."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        raise InstallError(
            "no C compiler found: torch compiles CPU kernels with it and pycosat (of reasoning-gym) is built with it.\n"
            "  Debian/Ubuntu: apt install gcc g++ python3-dev"
        )


def make_venv(folder: Path) -> Path:
    """The environment's interpreter; creates the environment where there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"environment {folder} with Python {sys.version.split()[0]}")
        try:
            venv.create(folder, with_pip=True, clear=folder.exists())
        except (subprocess.CalledProcessError, ImportError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise InstallError(
                f"{sys.executable} cannot make an environment with pip ({error}).\n"
                f"  Debian/Ubuntu: apt install python{version}-venv"
            ) from error
    return python


def read_lock(path: Path) -> list[str]:
    """Requirements of a lock file, without comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def install_locked(python: Path, requirements: list[str]) -> None:
    """Installs torch and everything else at the same time (they write to different folders)."""
    torch = [line for line in requirements if line.startswith("torch==")]
    others = [line for line in requirements if line not in torch]
    say(f"{len(requirements)} packages")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(others) + "\n")
        listed.flush()
        torch_pip = Pip(python, torch)  # it ends first, so it has the time to compile by itself
        others_pip = Pip(python, ["--no-compile", "-r", listed.name])
        try:
            watch(others_pip, len(others))
            finish(others_pip)
            if torch_pip.wait() != 0:
                say(f"{torch[0]} is not on the configured index, trying {TORCH_INDEX}")
                torch_pip = Pip(python, [*torch, "--extra-index-url", TORCH_INDEX])
            finish(torch_pip)
        finally:
            torch_pip.stop()
            others_pip.stop()


def byte_compile(python: Path) -> None:
    """Compiles what is imported here; files that do not compile are templates or for other Pythons."""
    purelib = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    subprocess.run(
        [str(python.absolute()), "-m", "compileall", "-qq", "-j", "0", "-x", NOT_COMPILED, "."],
        cwd=purelib,
        stderr=subprocess.DEVNULL,
        check=False,
    )


class Pip:
    """A running `pip install --no-deps`, with its output in a file."""

    def __init__(self, python: Path, arguments: list[str]) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as this object
        self.process = subprocess.Popen(
            [str(python), "-m", "pip", "install", "--no-deps", "--progress-bar=off", *arguments],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )

    def wait(self) -> int:
        """Exit code, once it has ended."""
        return self.process.wait()

    def stop(self) -> None:
        """Ends it, for the case that the other one failed or Ctrl-C was pressed."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def lines(self) -> list[str]:
        """What it has written so far, without known noise."""
        text = os.pread(self.log.fileno(), 1 << 24, 0).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and not line.startswith(NOISE)]


def watch(pip: Pip, total: int) -> None:
    """Shows how far a pip is, until it ends: one line that is rewritten, or a few lines where there is no terminal."""
    terminal = sys.stdout.isatty()
    shown = ""
    while pip.process.poll() is None:
        lines = pip.lines()
        count = sum(
            line.startswith(("Collecting ", "Processing ", "Requirement already satisfied: ")) for line in lines
        )
        if any(line.startswith("Installing collected packages") for line in lines):
            now = f"unpacking {total} packages"
        else:
            step = 1 if terminal else 50
            now = f"fetched {count // step * step} of {total}"
        if now != shown:
            shown = now
            if terminal:
                print(f"\r\033[K  {now}", end="", flush=True)
            else:
                say(f"  {now}")
        time.sleep(0.3)
    if terminal:
        print("\r\033[K", end="", flush=True)


def finish(pip: Pip) -> None:
    """Waits; raises InstallError with pip's last words when it failed."""
    if pip.wait() != 0:
        raise InstallError("pip failed:\n" + "\n".join(f"  {line}" for line in pip.lines()[-15:]))


def say(text: str) -> None:
    """One line of progress."""
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
