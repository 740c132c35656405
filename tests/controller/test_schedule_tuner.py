"""`schedule: auto` in a run: which setups there are, what is profiled, what is chosen, with hand-made steps."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from scheduler.dispatch.dispatch_objective import MAKESPAN, Streamed
from scheduler.dispatch.planned import SkewAware
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.schedule_tuner import (
    Auto,
    Setup,
    TunedSchedule,
    _Measured,
    environment_processes,
    environment_s_per_sample,
    first_free_step,
    make_choice,
    policy_factory,
    setups,
)
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_times import Interval
from streamrl.rollouts.trajectory import EpisodeStep, RowExtent, Trajectory
from streamrl.rollouts.types import Group, Scored
from streamrl.runtime.process_context import Addresses, RoleContext
from tests.rollouts.test_rollouts import make_sample

RUN = RunConfig.model_validate(
    {
        "schedule": {"name": "auto", "max_staleness": 1},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "dispatch": {"policy": "least-loaded"},
    }
)
FLEET = [SimulatedInstance(name, StepCurve((1, 8), (0.1, 0.1)), 8) for name in ("a", "b")]


def labels(found: list[Setup]) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    return [(s.label, s.instances, s.trainer_cores) for s in found if s.schedule.name in ("colocated", "stream")]


def test_shared_cores_may_be_used_in_turns_or_split() -> None:
    assert labels(setups({"a": (0,), "b": (1,)}, (0, 1), True, 1)) == [
        ("colocated", ("a", "b"), (0, 1)),
        ("stream, 1 of 2 instances", ("a",), (1,)),
    ]


def test_roles_with_devices_of_their_own_keep_them() -> None:
    assert labels(setups({"a": (0,), "b": (1,)}, (2, 3), False, 1)) == [("stream", ("a", "b"), (2, 3))]
    assert labels(setups({"a": (), "b": ()}, (), False, 1)) == [("stream", ("a", "b"), ())]  # CUDA


@pytest.mark.parametrize("pinned", [[0, 1, 2, 3], None])
def test_cores_that_feed_gpus_bound_no_schedule(tmp_path: Path, pinned: list[int] | None) -> None:
    gpus = {"trainer": {"cores": pinned}, "generation": [{"replicas": 2, "cores": pinned}]}
    cluster = ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": gpus}})
    context = RoleContext("controller", "here", tmp_path, cluster, RUN, Addresses("", "", {}), False)
    fleet = [replace(FLEET[0], name=f"here-default-{n}") for n in range(2)]
    choice: Any = make_choice(context, fleet)
    names = tuple(one.name for one in fleet)
    assert labels(choice.auto.choices) == [("stream", names, ())]


def test_without_pinning_all_share_everything() -> None:
    assert labels(setups({"a": (), "b": ()}, (), True, 1)) == [
        ("colocated", ("a", "b"), ()),
        ("stream", ("a", "b"), ()),
    ]


def test_only_some_of_many_splits_are_tried() -> None:
    found = setups({f"i{n:02d}": (n,) for n in range(16)}, tuple(range(16)), True, 2)
    counts = [len(s.instances) for s in found if s.schedule.name == "async"]
    assert counts == [1, 6, 10, 15]
    assert all(s.schedule.max_staleness == 2 for s in found if s.schedule.name == "async")


def step(length: int, environment_s: float = 0.0) -> StepBatch:
    batch = StepBatch(RUN, 1)
    stepped = [EpisodeStep("environment", "lake step", 0.0, environment_s)] * bool(environment_s)
    played = Trajectory(rows=[RowExtent(tokens=length, prompt=1)], reward=0.0, messages=[], steps=stepped)
    for name in "wxyz":
        group = Group(name, 1, 0, "t/0", "t", 0, "p", np.arange(10, dtype=np.int32), 2)
        for number in range(2):
            sample = make_sample(f"{name}.{number}", length=length)
            if environment_s and number:  # one of two
                versions = np.array([-1] + [0] * (length - 1), dtype=np.int32)  # the prompt's token was not sampled
                sample = replace(sample, trajectory=played, token_versions=versions)
            group.scored[sample.sample_id] = Scored(sample, float(number), None, 0.0)
        batch.take(group)
    return batch


def play(
    auto: Auto, length: int, generate_s: float, train_s: float, environment_s: float = 0.0, reward_s: float = 0.0
) -> None:
    """A step in which generation, rewards and training took so long."""
    rewarded = generate_s + reward_s
    end = rewarded + train_s
    spans = {"a": ((0.0, generate_s),), "b": ((0.0, generate_s),)}
    training = (rewarded, end)
    present = {"a": (0.0, end), "b": (0.0, end)}
    rewards = ((generate_s, rewarded),) * 7 + ((0.0, rewarded),)
    times = Interval(0.0, end, (training,), (), spans, {"a": (), "b": ()}, (), present, rewarding=rewards)
    auto.step_done(step(length, environment_s), times, [("train", *training), ("step", end, end)])


def profiled(auto: Auto, length: int, shared: tuple[float, float], split: tuple[float, float], **others: float) -> None:
    """Two steps and one for warming up under each division: (generating, training) seconds."""
    for number, times in enumerate((shared, split)):
        assert not auto.wants_choice()
        for _ in range(3):
            assert auto.next_setup() is None
            play(auto, length, *times, **others)
        setup = auto.next_setup()
        assert (setup is None) == (number == 1)
    assert auto.wants_choice()


def make_auto() -> Auto:
    return Auto(RUN, setups({"a": (0,), "b": (1,)}, (0, 1), True, 1), FLEET, steps=2)


def test_it_profiles_turns_then_a_split_and_overlaps_what_takes_equally_long() -> None:
    auto = make_auto()
    assert auto.setup.label == "colocated"
    # two instances take 5 s for 50 tokens, one as well (all fit its batch); training 5 s on one core, 4.8 s on two
    profiled(auto, 50, shared=(5.0, 4.8), split=(5.0, 5.0))
    setup = auto.decided(auto.choice_job(6)())
    assert setup is not None and setup.schedule.name == "async"
    assert auto.setup is setup and setup.label in auto.note and "overlap" in auto.note
    assert auto.decided(auto.choice_job(7)()) is None  # it runs already


def test_the_first_step_under_a_choice_is_known_before_the_start(tmp_path: Path) -> None:
    site = {"trainer": {"cores": [0, 1]}, "generation": [{"name": name, "cores": [n]} for n, name in enumerate("ab")]}
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    context = RoleContext("controller", "here", tmp_path, cluster, RUN, Addresses("", "", {}), False)
    choice: Any = make_choice(context, [replace(FLEET[0], name=f"here-{name}-0") for name in "ab"])
    auto, steps = choice.auto, 0
    while not auto.wants_choice():
        auto.next_setup()
        play(auto, 50, 5.0, 5.0)
        steps += 1
    assert first_free_step(cluster, RUN) == steps + 2  # it is predicted beside the next one


def test_what_environments_take_is_measured_and_hidden_where_that_saves_time() -> None:
    assert environment_s_per_sample(step(50)) == 0.0
    assert environment_s_per_sample(step(50, environment_s=3.0)) == 1.5  # half of the samples are such episodes
    chosen = {}
    for seconds in (0.0, 6.0):  # in all 24 s per step, by one process
        auto = make_auto()
        profiled(auto, 50, shared=(5.0, 1.0), split=(5.0, 2.0), environment_s=seconds)
        decision = auto.choice_job(6)()
        chosen[seconds] = {found.option.label: found.step_s for found in decision.predictions}
    slower = {label: chosen[6.0][label] - chosen[0.0][label] for label in chosen[0.0]}
    assert slower["colocated"] > 23.5, "nothing is hidden where all wait for the episodes' ends"
    assert min(chosen[6.0], key=chosen[6.0].__getitem__).startswith(("async", "one_step_off"))


def test_passes_after_the_first_are_not_predicted_to_run_beside_generation() -> None:
    predicted = {}
    for epochs in (1, 4):
        run = RUN.model_copy(update={"batch": RUN.batch.model_copy(update={"epochs": epochs})})
        auto = Auto(run, setups({"a": (0,), "b": (1,)}, (0, 1), True, 1), FLEET, steps=2)
        for length in (10, 20, 30, 40):  # of the groups, whose steps take 4 s to generate and 4 s to train
            auto._groups.append([(10, [length] * 2)])
        auto._optimizer.append(0.0)
        auto._environments.append(0.0)
        auto._measured[auto._division(auto.choices[-1])] = _Measured(rates=deque([280 / 4.0]))
        predicted[epochs] = {p.option.schedule.name: p.step_s for p in auto.choice_job(6)().predictions}
    assert predicted[4]["sync"] == pytest.approx(predicted[1]["sync"])
    assert predicted[1]["stream"] < predicted[4]["stream"] - 0.5
    assert predicted[4]["stream"] < predicted[4]["sync"]


def test_rewards_take_their_time_and_are_hidden_where_that_saves_time() -> None:
    for seconds, staleness in ((0.0, 0), (5.0, 1)):
        auto = make_auto()
        profiled(auto, 50, shared=(5.0, 0.1), split=(5.0, 0.1), reward_s=seconds)
        decision = auto.choice_job(6)()
        predicted = {found.option.schedule.name: found.step_s for found in decision.predictions}
        assert predicted["sync"] == pytest.approx(5.1 + seconds, rel=0.01)
        assert predicted["async"] == pytest.approx(5.0, rel=0.03)
        assert decision.option.schedule.max_staleness == staleness


def test_tasks_with_the_same_environment_share_its_processes_at_each_site() -> None:
    assert environment_processes(RUN, 2) == 1
    lake = {"kind": "agent", "name": "a", "environment": {"name": "lake", "processes": 3}}
    other = lake | {"name": "c", "environment": {"name": "walker", "processes": 4}}
    run = RunConfig.model_validate({"tasks": [lake, lake | {"name": "b"}, other]})
    assert environment_processes(run, 2) == 2 * (3 + 4)


def test_all_devices_in_turns_win_where_both_are_faster_with_all_of_them() -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(5.0, 20.0), split=(5.0, 40.0))
    setup = auto.decided(auto.choice_job(6)())
    assert setup is not None and setup.label == "colocated" and setup.trainer_cores == (0, 1)


def test_a_profile_that_drifts_is_predicted_anew() -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(5.0, 4.8), split=(5.0, 5.0))
    auto.decided(auto.choice_job(6)())
    assert not auto.wants_choice()
    for _ in range(8):
        play(auto, 200, 20.0, 5.0)
    assert auto.wants_choice()


def test_a_choice_that_a_lucky_step_has_made_is_corrected_by_what_is_measured_afterwards() -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(2.5, 2.0), split=(5.0, 5.0))  # in turns: 4.5 s, overlapped: 5 s
    setup = auto.decided(auto.choice_job(6)())
    assert setup is not None and setup.label == "colocated"
    for _ in range(4):
        assert not auto.wants_choice()
        play(auto, 50, 5.0, 4.8)
    assert auto.wants_choice()
    setup = auto.decided(auto.choice_job(10)())
    assert setup is not None and setup.schedule.name == "async"


def resumed(state: dict[str, Any], auto: Auto) -> TunedSchedule:
    """What a resumed run begins with that got this state from its checkpoint."""
    choice = TunedSchedule(auto)
    choice.restore(json.loads(json.dumps(state)))
    return choice


def test_a_resumed_run_goes_on_with_its_choice_and_reviews_it() -> None:
    auto = make_auto()
    assert auto.state() == {}
    profiled(auto, 50, shared=(2.5, 2.0), split=(5.0, 5.0))  # in turns: 4.5 s, overlapped: 5 s
    job = auto.choice_job(6)
    assert auto.state() == {}, "what is not decided yet is profiled again"
    decision = job()
    assert auto.state() == {}
    assert auto.decided(decision) is not None
    again = make_auto()
    choice = resumed(auto.state(), again)
    assert choice.first_setup == again.setup == auto.setup and again.setup.label == "colocated"
    assert choice.note == auto.note and choice.state() == auto.state()
    assert not again.wants_choice()
    for _ in range(4):
        assert not again.wants_choice() and again.next_setup() is None
        play(again, 50, 5.0, 4.8)
    assert again.wants_choice()
    predicted = {found.option.label: found.step_s for found in again.choice_job(10)().predictions}
    assert predicted["stream, 1 of 2 instances"] == pytest.approx(10.0, rel=0.05), "as measured before"
    changed = again.decided(again.choice_job(10)())
    assert changed is not None and changed.schedule.name == "async" and again.state()["changed_at"] == 10
    assert resumed(again.state(), make_auto()).state() == again.state()


def test_a_resumed_run_with_other_instances_profiles_anew() -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(5.0, 4.8), split=(5.0, 5.0))
    auto.decided(auto.choice_job(6)())
    fleet = [replace(one, name=name) for one, name in zip(FLEET, "ac", strict=True)]
    other = Auto(RUN, setups({"a": (0,), "c": (1,)}, (0, 1), True, 1), fleet, steps=2)
    assert [setup.label for setup in other.choices] == [setup.label for setup in auto.choices]
    assert resumed(auto.state(), other).note == "profiling under colocated"


def test_a_resumed_run_begins_under_another_setup_than_the_first_profiled() -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(5.0, 4.8), split=(5.0, 5.0))
    auto.decided(auto.choice_job(6)())
    choice = resumed(auto.state(), make_auto())
    assert choice.first_setup == auto.setup and auto.setup.schedule.name == "async"


def test_a_resumed_run_on_other_hardware_profiles_anew(caplog: pytest.LogCaptureFixture) -> None:
    auto, slower = (
        Auto(RUN, setups({"a": (0,), "b": (1,)}, (0, 1), True, 1), FLEET, steps=2, hardware=name)
        for name in ("2 cores of a fast CPU", "2 cores of a slow CPU")
    )
    profiled(auto, 50, shared=(2.5, 2.0), split=(5.0, 5.0))
    auto.decided(auto.choice_job(6)())
    assert resumed(auto.state(), slower).note == "profiling under colocated"
    assert "other instances, cores or hardware" in caplog.text
    profiled(slower, 50, shared=(5.0, 4.0), split=(10.0, 10.0))


def test_the_tuner_knows_the_hardware_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.controller.schedule_tuner.hardware_here", lambda cuda: f"a machine, {cuda}")
    for hardware, told in (("cpu", "a machine, False"), ("cuda", "a machine, True")):
        site = {"trainer": {}, "generation": [{"name": "a"}]}
        cluster = ClusterConfig.model_validate({"hardware": hardware, "sites": {"here": site}})
        context = RoleContext("controller", "here", tmp_path, cluster, RUN, Addresses("", "", {}), False)
        choice: Any = make_choice(context, [replace(FLEET[0], name="here-a-0")])
        assert choice.auto.hardware == told


def test_a_resumed_run_with_other_cores_profiles_anew(caplog: pytest.LogCaptureFixture) -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(5.0, 4.8), split=(5.0, 5.0))
    auto.decided(auto.choice_job(6)())
    other = Auto(RUN, setups({"a": (0,), "b": (1,)}, (0, 1, 2), True, 1), FLEET, steps=2)
    assert resumed(auto.state(), other).note == "profiling under colocated"
    assert "profiling anew" in caplog.text
    caplog.clear()
    assert resumed({}, other).note == "profiling under colocated" and not caplog.text


@pytest.mark.parametrize("later", [False, True])
def test_a_step_in_which_the_clock_was_set_is_no_measurement(later: bool) -> None:
    auto = make_auto()
    if later:
        play(auto, 50, 5.0, 4.8)
    play(auto, 50, 0.0, 0.0)
    play(auto, 50, 0.0, 1.0)  # and one that it shows without any generation
    if not later:
        play(auto, 50, 5.0, 4.8)
    for _ in range(2):
        assert auto.next_setup() is None
        play(auto, 50, 5.0, 4.8)
    assert auto.next_setup() is not None
    for _ in range(3):
        assert not auto.wants_choice()
        play(auto, 50, 5.0, 5.0)
    setup = auto.decided(auto.choice_job(6)())
    assert setup is not None and setup.schedule.name == "async"


def test_generation_that_is_slower_than_measured_alone_is_predicted_slower() -> None:
    auto = make_auto()
    profiled(auto, 50, shared=(10.0, 1.0), split=(10.0, 1.0))  # its step times say 5 s
    decision = auto.choice_job(6)()
    stream = next(p for p in decision.predictions if p.option.schedule.name == "sync")
    assert stream.step_s == pytest.approx(11.0, rel=0.05)


def test_predictions_use_the_policy_with_the_objective_of_the_schedule() -> None:
    streamed = RunConfig.model_validate({"schedule": {"name": "stream"}})
    for rate, objective in ((50.0, Streamed(50.0)), (None, Streamed(float("inf")))):
        policy = policy_factory(streamed, rate)()
        assert isinstance(policy, SkewAware) and policy.objective == objective
        assert policy.longest == streamed.sampling.max_tokens and policy.affinity == streamed.batch.samples_per_prompt
    plain = policy_factory(RunConfig.model_validate({"schedule": {"name": "sync"}}), 50.0)()
    assert isinstance(plain, SkewAware) and plain.objective is MAKESPAN


def test_one_instance_on_all_cores_of_the_trainer_is_profiled_in_turns_only() -> None:
    choices = setups({"a": (0, 1)}, (0, 1), True, 1)
    assert {setup.schedule.name for setup in choices} == {"colocated"}
    auto = Auto(RUN, choices, FLEET[:1], steps=2)
    assert auto.setup.schedule.name == "colocated"
    assert auto.next_setup() is None
