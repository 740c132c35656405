"""Nodes of a Ray cluster on this machine, as patient at their start as the machine is slow."""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace

import psutil
import pytest
from ray._private import node
from ray.cluster_utils import Cluster

from streamrl.runtime.processes import kill_with_children
from tests.marks import MARK, started_by
from tests.waiting import scaled, slowness

STARTS = 4
"""Most starts of a node."""
AGENT_S = 30.0
"""Seconds that Ray gives a raylet's agents to report."""


class Nodes(Cluster):
    """A cluster whose nodes are its fixture's, also those that a test adds."""

    def __init__(self, **head: object) -> None:
        """Start the head, with these options."""
        self.mark = os.environ[MARK]
        settings = {
            "prestart_worker_first_driver": False,  # else each node starts workers that nobody needs
            "agent_register_timeout_ms": round(1000 * scaled(AGENT_S)),
        }
        # the monitor reads the logs of all processes again and again, for drivers that ask for them
        options = {"include_dashboard": False, "include_log_monitor": False, "_system_config": settings}
        super().__init__(initialize_head=True, head_node_args=options | head)

    def add_node(self, *args: object, **options: object) -> object:
        """Starts a node, again if it has ended by itself."""
        with started_by(self.mark), pytest.MonkeyPatch.context() as changed:
            # Ray waits 30 s for a raylet, by this clock and no setting
            slow = {**vars(time), "monotonic": lambda: time.monotonic() / slowness()}
            changed.setattr(node, "time", SimpleNamespace(**slow))
            for _ in range(STARTS - 1):
                before = set(psutil.Process().children())
                with contextlib.suppress(Exception):  # Ray raises nothing narrower
                    return super().add_node(*args, **options)
                for left in set(psutil.Process().children()) - before:  # such as the servers of a head
                    kill_with_children(left.pid)
            return super().add_node(*args, **options)
