"""`streamrl scale` waits for the pool's new size, and no longer than there is a launcher that could bring it about."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.cli import scale as scale_module
from streamrl.launcher import supervisor
from streamrl.protocol.operator import PoolScaled
from streamrl.run_dir.status import write_status
from streamrl.runtime import operator_link
from tests.cli.calling import streamrl
from tests.report.synthetic import make_status

POOL = "here/regular"
Captured = pytest.CaptureFixture[str]
NOW = time.time()


@pytest.fixture(autouse=True)
def _controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer: the pool has a new target."""

    async def answers(*_: object) -> PoolScaled:
        return PoolScaled(pool=POOL, before=1, after=2)

    monkeypatch.setattr(operator_link, "ask_controller", answers)


def show(folder: Path, wanted: int, ready: int, updated_at: float, starting: int = 0, *dead: str) -> None:
    """`dead`: names of what has died for good and is still there; it was added since, and did nothing."""
    there = {"there": {POOL: ready + starting + len(dead)}, "dead": {POOL: dead}}
    coming = [{"instance": name, "requested_at": NOW + 3600} for name in dead]
    scaling = {"wanted": {POOL: wanted}, "ready": {POOL: ready}, **there, "coming": coming}
    write_status(folder, make_status(3, 20, updated_at, scaling=scaling))


def scale(monkeypatch: pytest.MonkeyPatch, folder: Path, *meanwhile: Callable[[], None]) -> int:
    """Calls the command, at whose pauses these things happen, one at each; its exit code."""
    left = list(meanwhile)

    def sleep(_: float) -> None:
        if not left:
            raise AssertionError("it waits on")
        left.pop(0)()

    clock = SimpleNamespace(sleep=sleep, time=lambda: time.time(), monotonic=lambda: time.monotonic())
    monkeypatch.setattr(scale_module, "time", clock)
    return streamrl(monkeypatch, "scale", folder, "--pool", "regular", "--replicas", "2")


def test_waiting_ends_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """All processes were killed at once: nobody wrote how the run ended."""
    show(tmp_path, 2, 1, time.time())
    assert scale(monkeypatch, tmp_path, lambda: show(tmp_path, 2, 1, NOW - 600)) == 1
    error = f"error: no launcher runs {tmp_path} any more; streamrl launch --resume continues it\n"
    assert capsys.readouterr().err == error


def test_waiting_goes_on_while_a_launcher_starts_a_silent_controller_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    show(tmp_path, 2, 1, NOW - 600)
    with supervisor._locked(tmp_path):
        assert scale(monkeypatch, tmp_path, lambda: show(tmp_path, 2, 2, time.time())) == 0
    assert capsys.readouterr().out.endswith(f"pool {POOL} has 2 instances\n")


def test_a_clock_that_is_set_meanwhile_changes_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def set_clock() -> None:
        monkeypatch.setattr(time, "time", lambda: NOW + 3600)

    show(tmp_path, 1, 1, time.time())  # written before the controller had the order
    with supervisor._locked(tmp_path):
        assert scale(monkeypatch, tmp_path, set_clock, lambda: show(tmp_path, 2, 2, NOW + 3600)) == 0
    shown = capsys.readouterr().out
    assert "changed the target" not in shown and shown.endswith(f"pool {POOL} has 2 instances\n")


def test_a_status_from_before_the_answer_says_nothing_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The controller died before it wrote another one, and is slow to start again."""

    def later() -> None:
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)

    show(tmp_path, 1, 1, NOW)
    with supervisor._locked(tmp_path):
        assert scale(monkeypatch, tmp_path, later, lambda: show(tmp_path, 2, 2, NOW + 60)) == 0
    shown = capsys.readouterr().out
    assert "changed the target" not in shown and shown.endswith(f"pool {POOL} has 2 instances\n")
    show(tmp_path, 2, 1, NOW)
    with supervisor._locked(tmp_path):
        assert scale(monkeypatch, tmp_path, later, lambda: show(tmp_path, 3, 1, NOW + 60)) == 0
    assert capsys.readouterr().out.endswith("changed the target since: it is 3 now\n")


def test_waiting_ends_once_all_that_the_pool_lacks_has_died_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def dies(ready: int, starting: int) -> Callable[[], None]:
        return lambda: show(tmp_path, 2, ready, NOW, starting, "here-regular-1")

    show(tmp_path, 2, 0, NOW, 2)
    with supervisor._locked(tmp_path):
        assert scale(monkeypatch, tmp_path, dies(0, 1), dies(1, 0)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: pool {POOL} has 1 of 2 instances: here-regular-1 died and got no further restart")
    assert f"streamrl status {tmp_path} says why" in error
    show(tmp_path, 2, 0, NOW, 2)
    with supervisor._locked(tmp_path):  # others took its place
        assert scale(monkeypatch, tmp_path, dies(1, 1), dies(2, 0)) == 0
    assert capsys.readouterr().out.endswith(f"pool {POOL} has 2 instances\n")


def test_what_has_died_for_good_before_is_waited_for_as_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    show(tmp_path, 2, 1, NOW, 0, "here-regular-1")
    with supervisor._locked(tmp_path):
        assert scale(monkeypatch, tmp_path, *[partial(show, tmp_path, 2, n, NOW, 2 - n) for n in (1, 2)]) == 0
    assert capsys.readouterr().out.endswith(f"pool {POOL} has 2 instances\n")
