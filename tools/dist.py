"""Build wheel and sdist into dist/, and try the wheel where there is no clone: `make dist`.

The wheel is built from the sdist, so that the sdist is known to be complete. The trial installs the wheel's base in a
new environment and calls what a newcomer calls, in an empty folder; `streamrl demo` has to refuse, for lack of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TRIALS = (
    (["--version"], 0, "version {version}"),
    (["init", "mine", "--model", "smollm2-135m", "--prompts", "example", "--gpus", "0"], 0, "mine/rewards.py"),
    (["explain", "E1003"], 0, "E1003. A package is missing"),
    (["simulate", "--requests", "64", "--policy", "least-loaded"], 0, "least-loaded"),
    (["demo", "--dry-run"], 2, "not installed: torch, vllm, transformers, gguf, reasoning_gym"),
)
"""Arguments of `streamrl`, the exit code to expect, and a text in its output."""


def main() -> int:
    """Build and try; return the exit code."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory() as folder:
        return try_wheel(DIST / f"streamrl-{version}-py3-none-any.whl", version, Path(folder))


def try_wheel(wheel: Path, version: str, folder: Path) -> int:
    """Install a wheel in a new environment in a folder, and call its commands there; return the exit code."""
    venv.create(folder / "venv", with_pip=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bin_folder, empty = folder / "venv" / "bin", folder / "empty"
    install = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run([*install, "--constraint", str(ROOT / "locks" / "cpu.txt")], check=True, env=clean)
    empty.mkdir()
    failed = 0
    for arguments, code, text in TRIALS:
        command = [str(bin_folder / "streamrl"), *arguments]
        done = subprocess.run(command, cwd=empty, env=clean, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        right = done.returncode == code and text.format(version=version) in output
        failed += not right
        print(f"{'ok' if right else 'failed'}: streamrl {' '.join(arguments)}", flush=True)
        if not right:
            print(f"exit code {done.returncode}, expected {code} and {text!r}; it printed:\n{output}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
