"""An engine's work is counted while requests come and go, by a clock of the test's."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from streamrl.generation.instance.running_requests import RunningRequest, RunningRequests, Worked
from streamrl.rollouts.types import SampleRequest


def request(name: str, prompt: int) -> SampleRequest:
    return SampleRequest(name, "g", np.arange(prompt, dtype=np.int32), 0, 0.0)


def test_seconds_count_once_for_the_engine_and_once_for_each_request() -> None:
    now = 100.0
    running = RunningRequests(lambda: now)
    now = 103.0
    assert running.worked({}, {}) == Worked() and running.busy_since is None
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(running.noted(request("a", 5), 1000.0, now))
        now = 104.0
        second.enter_context(running.noted(request("b", 7), 1001.0, now))
        now = 106.0
        assert running.worked({"a": 30, "b": 2}, {"a": 10}) == Worked(20 + 2, 1 + 2 * 2, 3.0, 5 + 30 + 7 + 2)
        assert (running.count, running.ids, running.busy_since) == (2, {"a", "b"}, 1000.0)
        assert running["b"] == RunningRequest(1001.0, 104.0, 7, 0) and "c" not in running
        first.close()
        running.ended(25)
        now = 107.0
        assert running.worked({"b": 4}, {}) == Worked(25 + 4, 6.0, 4.0, 7 + 4)
        assert running.busy_since == 1000.0, "it has been busy since the first one came"
    now = 200.0
    assert running.worked({}, {}) == Worked(25, 6.0, 4.0)
    assert (running.count, running.ids, running.busy_since) == (0, frozenset(), None)


def test_a_request_that_fails_runs_no_longer() -> None:
    running = RunningRequests(lambda: 0.0)
    try:
        with running.noted(request("a", 5), 1000.0, 0.0):
            raise ValueError
    except ValueError:
        assert (running.count, "a" in running, running.busy_since) == (0, False, None)
