"""Processes that hang are found; those that could not speak, or whose clock was set, are left alone."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.run import RunConfig
from streamrl.launcher.local_backend import LocalProcess
from streamrl.launcher.silence import LOOK_EVERY_S, MOST_S, Silences
from streamrl.launcher.watchdog import Watchdog
from streamrl.run_dir import layout
from streamrl.run_dir.site_status import touch_rewards, write_site
from streamrl.run_dir.start_stages import say
from streamrl.run_dir.status import write_status
from streamrl.runtime.process_plan import ProcessSpec

STARTED = {"one": 100.0}


def looked_at(start: float = 100.0) -> Silences:
    silences = Silences()
    assert silences.look(start, STARTED)
    return silences


def look(silences: Silences, *times: float, started: dict[str, float] = STARTED) -> None:
    for now in times:
        assert silences.look(now, started)


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    silences = looked_at()
    assert not silences.has_spoken("one")
    look(silences, 101, 102.5)
    assert silences.silent_s("one") == 2.5 and not silences.has_spoken("one")
    silences.sign("one")
    assert silences.silent_s("one") == 0 and silences.has_spoken("one")
    look(silences, 104, 105)
    assert silences.silent_s("one") == 2.5
    silences.sign("one", 1.5)
    silences.sign("one", 2.0)  # older than one that is known
    assert silences.silent_s("one") == 1.5


def test_looks_that_follow_too_soon_do_not_count() -> None:
    silences = looked_at()
    for now in (100, 100.5, 100 + LOOK_EVERY_S - 1e-6):
        assert not silences.look(now, STARTED)
    look(silences, 100 + LOOK_EVERY_S)
    assert silences.silent_s("one") == LOOK_EVERY_S


@pytest.mark.parametrize("step_s", [3600.0, 61.0, -61.0, -3600.0])
def test_a_standstill_or_a_step_of_the_clock_is_no_silence(step_s: float) -> None:
    silences = looked_at()
    silences.sign("one")
    look(silences, 101, 102 + step_s)
    assert silences.silent_s("one") == 1 + (MOST_S if step_s > 0 else 0)
    look(silences, 103 + step_s)
    assert silences.silent_s("one") == 2 + (MOST_S if step_s > 0 else 0)


def test_whoever_looks_seldom_still_finds_silence() -> None:
    silences = looked_at()
    look(silences, *range(110, 210, 10))
    assert silences.silent_s("one") == 10 * MOST_S


def test_a_silence_that_another_process_recorded_over_a_standstill_is_none_here() -> None:
    silences = looked_at()
    look(silences, 101)
    silences.sign("one", 0.5)
    look(silences, 102)
    silences.sign("one", 1.5)
    assert silences.silent_s("one") == 1.5
    look(silences, 4000)
    silences.sign("one", 3899.5)
    assert silences.silent_s("one") == 1.5 + MOST_S


def test_a_process_is_silent_from_its_start_on_and_an_earlier_ones_signs_do_not_count() -> None:
    silences = Silences()
    look(silences, 1000, started={"one": 999.5})  # the first look
    assert silences.silent_s("one") == 0.5
    silences.sign("one")
    look(silences, 1001.5, started={"one": 999.5, "two": 1001.0})
    assert silences.silent_s("two") == 0.5 and silences.has_spoken("one")
    look(silences, 1003, started={"one": 1002.0, "two": 1001.0})
    assert silences.silent_s("one") == 1.0 and not silences.has_spoken("one")
    assert silences.silent_s("two") == 2.0
    silences.sign("one", 1.0)  # it, or the earlier one
    assert not silences.has_spoken("one")
    silences.sign("one", 0.5)
    assert silences.has_spoken("one")


def test_a_process_that_started_during_a_standstill_is_no_older_than_the_last_look() -> None:
    silences = looked_at()
    look(silences, 4000, started={"one": 200.0})
    assert silences.silent_s("one") == MOST_S
    look(silences, 4001, started={"one": 4100.0})  # the clock was set back since
    assert silences.silent_s("one") == 0


class Place:
    """A watchdog of a launcher of two sites, its clock and the files that it looks at."""

    def __init__(self, folder: Path, server_is_off_by_s: float = 0.0, **deadlines: float) -> None:
        run = RunConfig.model_validate({"deadlines": {"heartbeat_s": 5, "startup_s": 50} | deadlines})
        folders = {"here": folder, "there": folder / "there"}
        folders["there"].mkdir()
        cluster = SimpleNamespace(trainer_site="here", hardware="cpu", remote_sites=[])
        share: Any = SimpleNamespace(run=run, folders=folders, cluster=cluster)
        self.folder, self.now, self._written = folder, 100.0, itertools.count(time.time() + server_is_off_by_s)
        self.started = dict.fromkeys(("controller", "service", "trainer", "rewards", "instance"), 100.0)
        self.write(trainer=99.0)  # left from an earlier launch
        self.watchdog = Watchdog(share, lambda: self.now)
        self.look()

    def write(self, state: str = "running", session: str = "", **silences: float | None) -> None:
        of_all = {"state": "idle", "since": 0.0, "session": session}
        roles = {name: of_all | {"role": name, "silent_s": silent_s} for name, silent_s in silences.items()}
        running = {"run": "x", "state": state, "step": 1, "steps": 2, "started_at": 0.0, "updated_at": 0.0}
        write_status(self.folder, running | {"roles": roles})
        self._stamp(self.folder / layout.STATUS)

    def write_there(self, agents_silent_s: float | None = None, session: str = "", state: str = "serving") -> None:
        there = self.folder / "there"
        values = {"site": "there", "updated_at": 0.0, "state": state, "trainer_silent_s": 0.0}
        write_site(there, values | {"agents_silent_s": agents_silent_s, "agents_session": session})
        self._stamp(there / layout.SITE_STATUS)

    def touch_rewards(self) -> None:
        touch_rewards(self.folder / "there")
        self._stamp(self.folder / "there" / layout.REWARDS_SIGN)

    def _stamp(self, path: Path) -> None:
        written = next(self._written)
        os.utime(path, (written, written))

    def look(self) -> list[str]:
        return sorted(self.watchdog.hanging(self.started))

    def let_pass(self, seconds: int, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        """Names of the processes that hang at the end, after looks like those of the supervisor."""
        found: list[str] = []
        for _ in range(seconds):
            self.now += 1
            meanwhile()
            found = self.look()
        return found


@pytest.mark.parametrize("server_is_off_by_s", [0.0, -3600.0, 3600.0])
def test_a_process_without_heartbeats_is_found_whatever_the_clock_of_the_file_server(
    tmp_path: Path, server_is_off_by_s: float
) -> None:
    place = Place(tmp_path, server_is_off_by_s)
    assert place.let_pass(50) == []  # it may still be starting
    assert place.let_pass(1) == ["controller"]
    place.write(service=1.0, trainer=9.0, rewards=None, instance=99.0)
    assert place.let_pass(1) == ["trainer"]  # instances are judged by their service
    place.started["trainer"] = place.now + 0.5
    assert place.let_pass(2) == []  # a new one, that has not said anything
    trainer = place.started.pop("trainer")
    assert place.let_pass(3) == []  # dead: known to be
    place.started["trainer"] = trainer
    assert place.let_pass(1) == ["controller"]  # what it says of others is old
    place.write(trainer=0.2)
    assert place.let_pass(1) == []
    place.started["controller"] = place.now + 0.5
    assert place.let_pass(20) == []  # a new one: what the earlier one said is old, too


def test_each_stage_of_a_start_is_a_sign_of_life_until_the_first_status(tmp_path: Path) -> None:
    place = Place(tmp_path)
    del place.started["trainer"]
    assert place.let_pass(45) == []
    say(tmp_path, "controller", "going back to the newest checkpoint")
    assert place.let_pass(50) == [] and place.watchdog.limit_of("controller") == "deadlines.startup_s"
    assert place.let_pass(2) == ["controller"]
    place.write()
    assert place.let_pass(5) == [] and place.watchdog.limit_of("controller") == "deadlines.heartbeat_s"
    say(tmp_path, "controller", "ready")
    assert place.let_pass(2) == ["controller"]  # it has spoken: its status is its sign


def test_a_controller_that_speaks_is_left_alone_and_one_that_stops_is_found(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.let_pass(100, lambda: place.write(trainer=0.2)) == []
    assert place.let_pass(5) == [] and place.let_pass(1) == ["controller"]
    place.write("done", trainer=99.0)
    place.write_there()
    assert place.let_pass(9) == []  # it has ended, with all the others
    assert place.let_pass(2) == [] and place.let_pass(1) == ["controller"]  # but its process is still there


def test_a_machine_that_was_suspended_ends_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, heartbeat_s=10)
    place.started["service-there"] = 100.0

    def speak() -> None:
        place.write(trainer=0.2, rewards=0.1)
        place.write_there()

    assert place.let_pass(5, speak) == []
    place.now += 3600
    assert place.look() == []
    place.write(trainer=3600.0, rewards=3600.0)  # before it has heard them again
    assert place.let_pass(5) == []
    assert place.let_pass(5, speak) == []
    assert place.let_pass(10) == [] and place.let_pass(1) == ["controller", "service-there"]


def test_a_silence_that_the_controller_records_is_measured_here(tmp_path: Path) -> None:
    place = Place(tmp_path)
    silent = itertools.count(0.5)
    assert place.let_pass(5, lambda: place.write(trainer=next(silent), service=0.2)) == []
    place.now += 0.25
    assert place.let_pass(1, lambda: place.write(trainer=next(silent), service=0.2)) == ["trainer"]


def test_a_process_that_starts_again_is_not_judged_by_the_silence_of_the_one_before(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.let_pass(5, lambda: place.write(session="1", rewards=0.2)) == []
    place.started["rewards"] = place.now + 0.5
    # a hub takes its own delays off a silence: that of the one before may seem to have ended after the new one's start
    assert place.let_pass(2, lambda: place.write(session="1", rewards=0.2)) == []
    assert place.let_pass(20, lambda: place.write(session="1", rewards=19.0)) == []
    assert place.let_pass(5, lambda: place.write(session="2", rewards=0.2)) == []
    silent = itertools.count(1)
    assert place.let_pass(5, lambda: place.write(session="2", rewards=next(silent))) == []
    assert place.let_pass(1, lambda: place.write(session="2", rewards=next(silent))) == ["rewards"]


@pytest.mark.parametrize("session", ["", "1"])
def test_a_process_that_starts_again_and_hangs_is_found_by_its_own_limits_for_the_start(
    tmp_path: Path, session: str
) -> None:
    place = Place(tmp_path)
    assert place.let_pass(5, lambda: place.write(session="1", rewards=0.2, service=0.2)) == []
    place.started |= dict.fromkeys(("rewards", "service"), place.now)
    silence = 99.0 if session else None

    def speak() -> None:
        place.write(session=session, rewards=silence, service=silence)

    assert place.let_pass(105, speak) == []  # twice startup_s, and heartbeat_s
    assert place.let_pass(1, speak) == ["rewards"]  # a service may wait for its instances
    place.write("starting", session, rewards=silence)
    assert place.let_pass(1) == []  # a new controller waits for all
    place.write(session="2", rewards=0.2)
    assert place.let_pass(1) == []
    assert place.let_pass(200, lambda: place.write(rewards=None)) == []  # its service is gone, and will say more


def test_the_service_of_another_site_is_watched_by_its_file(tmp_path: Path) -> None:
    place = Place(tmp_path)
    del place.started["controller"]
    place.started["service-there"] = 100.0
    assert place.let_pass(50) == [] and place.let_pass(1) == ["service-there"]
    place.write_there()
    assert place.let_pass(6) == [] and place.let_pass(1) == ["service-there"]
    del place.started["service-there"]
    assert place.let_pass(9) == []


def test_the_agents_process_of_another_site_is_watched_by_what_its_service_writes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.started = dict.fromkeys(("service-there", "agents-there"), 100.0)
    assert place.let_pass(60, place.write_there) == []  # it has not connected yet
    assert place.let_pass(5, lambda: place.write_there(0.2, "1")) == []
    silent = itertools.count(1)
    assert place.let_pass(5, lambda: place.write_there(next(silent), "1")) == []
    assert place.let_pass(1, lambda: place.write_there(next(silent), "1", "done")) == []  # they end now
    assert place.let_pass(1, lambda: place.write_there(next(silent), "1")) == ["agents-there"]
    place.started["agents-there"] = place.now
    assert place.let_pass(20, lambda: place.write_there(next(silent), "1")) == []
    assert place.let_pass(5, lambda: place.write_there(0.2, "2")) == []
    place.write_there(0.2, "2")
    assert place.let_pass(6) == [] and place.let_pass(1) == ["service-there"]  # what it has written is old
    del place.started["service-there"]
    assert place.let_pass(6, lambda: place.write_there(9.0, "2")) == []  # so it is after its end


def test_the_rewards_process_of_another_site_is_watched_by_its_file(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.started = dict.fromkeys(("service-there", "rewards-there"), 100.0)
    assert place.let_pass(60, place.write_there) == []  # its own limits are for its start
    place.touch_rewards()
    assert place.let_pass(6, place.write_there) == [] and place.let_pass(1, place.write_there) == ["rewards-there"]
    del place.started["service-there"]
    assert place.let_pass(1) == ["rewards-there"]
    assert place.let_pass(9, place.touch_rewards) == []


def test_a_sign_of_the_rewards_process_follows_no_link_and_ends_nothing(tmp_path: Path) -> None:
    sign, elsewhere = tmp_path / layout.REWARDS_SIGN, tmp_path / "elsewhere"
    sign.symlink_to(elsewhere)
    touch_rewards(tmp_path)
    assert not elsewhere.exists()
    sign.unlink()
    touch_rewards(tmp_path)
    os.utime(sign, (1.0, 1.0))
    touch_rewards(tmp_path)
    assert sign.stat().st_mtime > 1.0 and sign.stat().st_size == 0
    touch_rewards(tmp_path / "gone")


def test_watchdog_and_processes_go_by_the_same_clock_that_nobody_sets(tmp_path: Path) -> None:
    assert inspect.signature(Watchdog).parameters["clock"].default is time.monotonic
    spec = ProcessSpec("trainer", "trainer", "here", None, [])
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        started = LocalProcess(spec, tmp_path / "log", process=process).started
    assert before <= started <= time.monotonic()
