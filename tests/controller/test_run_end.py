"""A run ends when all is done, and without sites that are away then."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamrl.controller.controller import Controller
from streamrl.controller.run_end import RunEnd, patience_s
from streamrl.protocol.controller_site import WeightsReady
from streamrl.protocol.controller_trainer import PublishDone
from tests.security.conftest import controller as controller
from tests.security.conftest import sent as sent


@pytest.mark.parametrize(
    ("absence_s", "evaluates", "expected_s"), [(600.0, False, 10.0), (12.0, False, 6.0), (600.0, True, 300.0)]
)
def test_sites_have_more_time_to_come_back_if_an_evaluation_needs_them(
    absence_s: float, evaluates: bool, expected_s: float
) -> None:
    assert patience_s(absence_s, evaluates) == expected_s


def end_of(controller: Controller, evaluates: bool) -> RunEnd:
    """The end of the controller's run, with evaluations or without."""
    parts = controller.training, controller.services, controller.evaluator, controller.trust
    return RunEnd(*parts, absence_s=controller.context.cluster.absence_s, evaluates=evaluates)


def at_the_end(controller: Controller, away_s: float) -> None:
    """Let all steps be done, with the last version in flight to the other site, which was heard so long ago."""
    now = time.monotonic()
    for name, silent_s in (("service-home", 0.0), ("service-far", away_s)):
        controller.hub.peers[name].last_seen = now - silent_s
    vars(controller.evaluator).update(unfinished=0, due=lambda version: False)
    controller.training.resume_at(controller.config.steps)
    controller.training._publish_due = False
    asyncio.run(controller.services.spread(PublishDone(0, 0.0, 1.0, number=1, content_hash="hash", bytes=100)))
    controller.services._versions.ready("service-home", WeightsReady(1, None, 0.0, 0, 0.0, 0.0, {}))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("away_s", "evaluates", "saved", "without"),
    [
        (5.0, False, True, False),
        (20.0, False, True, True),
        (20.0, False, False, False),
        (20.0, True, True, False),
        (400.0, True, True, True),
    ],
)
def test_a_site_that_vanishes_after_the_last_step_does_not_hold_up_the_end(
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    *,
    away_s: float,
    evaluates: bool,
    saved: bool,
    without: bool,
    last: bool,
) -> None:
    assert controller.context.cluster.absence_s == 600
    at_the_end(controller, away_s)
    controller.training._checkpoint_due = not saved
    end = end_of(controller, evaluates)
    if last:
        monkeypatch.setattr(controller.services, "can_exclude", lambda name: False)
        without = without and not evaluates
    assert not end.reached
    asyncio.run(end.leave_absent())
    assert end.reached == without == ("service-far" in controller.services.excluded)
    if without:
        assert "and all steps are done" in controller.services.excluded["service-far"]


def test_the_loop_looks_again_when_a_site_is_away_at_the_end(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.controller.run_end.LOOK_AT_SITES_S", 0.0)
    at_the_end(controller, 20.0)

    async def play() -> None:
        looking = asyncio.ensure_future(controller.end.keep_looking(controller.hub.wake))
        await controller._receive()
        looking.cancel()

    asyncio.run(play())
