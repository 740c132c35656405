"""Calls the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl.cli import main as cli


def streamrl(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Calls the command; its exit code."""
    monkeypatch.setattr(sys, "argv", ["streamrl", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
