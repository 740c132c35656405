"""Installed packages: whether those that a command needs are there, and fit each other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator

from streamrl.errors import ErrorCode

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM requires and nothing here uses. A CUDA build of theirs beside a CPU build of torch makes
`import transformers` fail, and PyPI has only CUDA builds of them."""


def package_problems(names: Iterable[str], extras: str) -> Iterator[str]:
    """Report packages that are missing, or that do not fit the installed torch.

    Args:
        names: the packages that are needed, by the names of their imports.
        extras: the extras of streamrl that have them, such as `cpu,tasks`.
    """
    if absent := [name for name in names if importlib.util.find_spec(name) is None]:
        missing = f"not installed: {', '.join(absent)}; install with: pip install 'streamrl[{extras}]'"
        yield ErrorCode.INSTALLATION.refer(missing)
    if unfit := list(_unfit_companions()):
        wrong = f"{', '.join(unfit)}: no CPU build, as torch is; remove with: pip uninstall {' '.join(COMPANIONS)}"
        yield ErrorCode.INSTALLATION.refer(wrong)


def _unfit_companions() -> Iterator[str]:
    """Name the installed companions of a CPU build of torch that are no CPU builds."""
    if _version("torch").endswith("+cpu"):
        for name in COMPANIONS:
            if (version := _version(name)) and not version.endswith("+cpu"):
                yield f"{name} {version}"


def _version(name: str) -> str:
    """Return the version of an installed package; '': it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
