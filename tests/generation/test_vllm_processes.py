"""Processes that vLLM forks from an instance."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import gc, os
from streamrl.generation.instance.vllm_processes import fork_where_safe
fork_where_safe(cuda=False)
assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
gc.freeze()
if (child := os.fork()) == 0:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    os._exit(0 if gc.get_freeze_count() >= frozen > 0 else 1)
assert os.waitpid(child, 0)[1] == 0
gc.unfreeze()
assert gc.get_freeze_count() == 0  # only forked processes end with what is frozen
"""


def test_a_forked_engine_thaws_nothing_when_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
