"""A sandbox that isolates nothing, for programs that are the tests' own."""

from __future__ import annotations

from streamrl.config.tasks import Sandbox

BARE = ["sh", "-c", 'exec "$0" -S "$@"']
"""Its command. The programs need no installed package (-S), which doubles the start of Python."""
NOTHING = Sandbox(command=BARE, seconds=20)
