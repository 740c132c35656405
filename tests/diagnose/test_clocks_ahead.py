"""Folders of machines whose clock is ahead of the reader's: how old their last sign of life is, nobody knows."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamrl.cli.why_stuck import command
from streamrl.dashboard.stuck_view import stuck_view
from streamrl.diagnose.facts import Facts, SiteFacts
from streamrl.diagnose.stuck import judge
from streamrl.run_dir import status
from tests.diagnose.test_stuck import NOW, SAMPLES, facts, family, process
from tests.report.synthetic import make_status

GONE = tuple(replace(one, alive="gone", cpu=None) for one in family())
HIDDEN = tuple(replace(one, pid=None, alive="unknown") for one in family())


def test_a_killed_run_whose_status_is_dated_in_the_future_has_ended() -> None:
    verdict = judge(facts(SAMPLES, processes=GONE, age_s=-3600.0))
    assert (verdict.state, verdict.exit_code) == ("ended", 1)
    assert verdict.sentence.startswith("ended: at step 6 of 40, dated 3600 s from now (a clock was set back, or ")


@pytest.mark.parametrize("processes", [(), HIDDEN])
def test_a_run_elsewhere_whose_status_is_dated_in_the_future_may_be_alive(processes: tuple[()]) -> None:
    seen = facts(SAMPLES, processes=processes, age_s=-11.0)
    verdict = judge(seen)
    assert verdict.state == "slow" and verdict.edges == []
    assert "whether the run is alive is unknown: the last sign of it is dated 11 s from now" in verdict.sentence
    assert judge(replace(seen, launcher_gone=True)).state == "ended"
    assert judge(facts(SAMPLES, processes=processes, age_s=-9.0)).state == "healthy", "clocks differ a little"


def test_a_controller_whose_status_is_dated_in_the_future_does_not_write() -> None:
    verdict = judge(facts(SAMPLES, age_s=-60.0))
    assert verdict.state == "stuck" and "status.json" in verdict.sentence
    assert verdict.sentence.startswith("stuck: the last update of the controller (pid 4701) is dated 60 s from now")
    computes = family(controller={"cpu": 1.0, "loop": "none"})
    assert judge(facts(state="starting", step=0, processes=computes, age_s=-60.0)).state == "starting"


def test_a_step_that_began_in_the_future_has_no_duration() -> None:
    verdict = judge(facts(SAMPLES, into_step_s=-60.0))
    assert verdict.sentence.startswith("healthy: step 7 of 40; ")
    assert judge(facts(SAMPLES, into_step_s=-3.0)).sentence.startswith("healthy: step 7 of 40, 0.0 s into a step")


def test_a_site_whose_own_status_is_dated_in_the_future() -> None:
    site = SiteFacts("b", "serving", NOW + 60.0, 0.2, 3)
    service = process("service-b", "service", 51)
    ended = judge(Facts(NOW, None, (replace(service, alive="gone"),), site=site))
    assert ended.failed and ended.sentence.startswith("ended: dated 60 s from now")
    unseen = judge(Facts(NOW, None, (replace(service, pid=None, alive="unknown"),), site=site))
    assert unseen.state == "slow" and "whether site b is alive is unknown" in unseen.sentence
    silent = judge(Facts(NOW, None, (service,), site=site))
    assert silent.sentence.startswith("stuck: the last update of service-b is dated 60 s from now")


def test_the_command_and_the_dashboard_call_no_such_run_healthy(tmp_path: Path) -> None:
    status.write_status(tmp_path, make_status(3, 20, time.time() + 3600))
    result = CliRunner().invoke(command, [str(tmp_path)])
    for sentence in (result.output, stuck_view(tmp_path)["sentence"]):
        assert sentence.startswith("slow: whether the run is alive is unknown") and "from now" in sentence
    assert "-36" not in result.output, "no process has said something in the future"
