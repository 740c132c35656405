"""Build the documentation site: `make site`.

The pages link to each other and to examples and results as they lie in the repository, so they are copied with that
layout; links, anchors and the pages of the navigation are checked by `mkdocs build --strict`. The tutorial notebook is
carried out by papermill and becomes a page with its outputs; a cell that fails ends the build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "site-pages"
FOLDERS = ("docs", "examples", "cluster_configs", "experiments", "locks")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
LEFT_OUT = ("__pycache__", "*.parquet", ".*")
NOTEBOOK = Path("docs/tutorial/plan_and_predict.ipynb")


def main() -> int:
    """Copy the pages, carry out the notebook, and build the site; return the exit code."""
    copy_pages()
    return run_notebook() or run("mkdocs", "build", "--strict")  # with --quiet nothing is counted


def copy_pages() -> None:
    """Copy pages, and what they link to, with the layout of the repository."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / name, PAGES)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, PAGES / name, ignore=shutil.ignore_patterns(*LEFT_OUT))


def run_notebook() -> int:
    """Carry out the notebook in its folder, and write it with its outputs as a page; return the exit code."""
    done = ROOT / "build" / NOTEBOOK.name
    failed = run(
        "papermill", str(ROOT / NOTEBOOK), str(done), "--cwd", str(ROOT / NOTEBOOK.parent), "--no-progress-bar"
    )
    return failed or run("nbconvert", "--to", "markdown", "--output-dir", str(PAGES / NOTEBOOK.parent), str(done))


def run(module: str, *arguments: str) -> int:
    """Run a module of the site's packages; return its exit code."""
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
