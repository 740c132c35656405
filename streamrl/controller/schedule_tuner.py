"""The tuner of `schedule: auto`: profiles the first steps, then chooses a schedule; changes it at the end of a step.

    profiling  with trainer and instances in turns on all devices (colocated), where they can share them
    profiling  with the devices split between them (stream)
    running    under the choice of `scheduler.capacity.auto_schedule`, which predicts again when lengths or the
               trainer's speed drift

A *setup* is a schedule, the instances that generate under it, and the trainer's CPU cores. CPU cores can change hands
in a running job; CUDA devices cannot, so with CUDA every setup has the devices that the cluster file gives each role.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from scheduler.capacity.auto_schedule import AutoSchedule, Decision, Option, Profile
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy, objective_of, policy_for
from scheduler.schedule.schedules import KINDS, SEPARATE, Schedule, make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.schedule import AutoScheduleConfig
from streamrl.controller.environment_time import environment_time
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_times import Interval
from streamrl.machine.hardware_here import hardware_here
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import plan_processes

WINDOW_STEPS = 8
"""Number of newest steps whose lengths a prediction draws from."""
FIRST_REVIEW = 4
"""Number of steps after which a choice is reviewed with the measurements since; doubles with each review.

A profile is only a few steps long, and chance may move a step's time by a fifth."""
MOST_SPLITS = 4
"""Limit on the splits compared: predicting takes a fraction of a second for each pair of split and schedule."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """A schedule with its division of the devices."""

    label: str
    schedule: Schedule
    instances: tuple[str, ...]
    """Instances that generate; the others are idle."""
    trainer_cores: tuple[int, ...]
    """CPU cores of the trainer; (): those of the cluster file."""


@dataclass
class _Measured:
    """Measurements of the steps under one division of the devices."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Tokens per second of training, prompts included, by step."""
    slowdowns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Measured seconds of generation over those simulated for the same lengths from the instances' step times."""


def setups(
    instances: dict[str, tuple[int, ...]], trainer_cores: tuple[int, ...], shareable: bool, max_staleness: int
) -> list[Setup]:
    """Return all setups of a job.

    Args:
        instances: CPU cores of each instance; () if it is not pinned.
        trainer_cores: CPU cores of the trainer; () if it is not pinned.
        shareable: whether generation and training may take turns on the same devices.
        max_staleness: staleness bound of `async`, in versions.
    """
    names = tuple(instances)
    made = {name: make_schedule(name, max_staleness if KINDS[name].continuous else None) for name in SEPARATE}
    found = []
    if shareable:
        found.append(Setup("colocated", make_schedule("colocated"), names, trainer_cores))
    for count, own in _splits(instances, trainer_cores):
        where = f", {count} of {len(names)} instances" if count < len(names) else ""
        found += [Setup(name + where, schedule, names[:count], own) for name, schedule in made.items()]
    return found


def _splits(instances: dict[str, tuple[int, ...]], trainer_cores: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Return up to `MOST_SPLITS` splits: (number of instances that generate, cores left to the trainer)."""
    found = []
    for count in range(1, len(instances) + 1):
        taken = {core for cores in list(instances.values())[:count] for core in cores}
        left = tuple(core for core in trainer_cores if core not in taken)
        if left or not trainer_cores or not taken:
            found.append((count, left))
    # among splits that leave the trainer the same cores, the one with the most instances is best
    best = {left: (count, left) for count, left in found}
    ordered = list(best.values())
    if len(ordered) <= MOST_SPLITS:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (MOST_SPLITS - 1))] for place in range(MOST_SPLITS)]


def _to_profile(choices: Sequence[Setup]) -> list[Setup]:
    """Return the setups that are profiled: one for each division of the devices, in this order."""
    shared = [setup for setup in choices if setup.schedule.exclusive]
    split = [setup for setup in choices if setup.schedule.name == "stream"]
    return [*shared[:1], *split[len(split) // 2 :][:1]]


def _with_warm_up(steps: int) -> int:
    """Return the steps that a division runs for `steps` measured ones; the first one only warms it up."""
    return steps + 1


def first_free_step(cluster: ClusterConfig, run: RunConfig) -> int:
    """Return the first optimizer step that runs under a choice of `schedule: auto`; 1: another schedule is named.

    The choice is made beside the step that follows the profile.
    """
    config = run.schedule
    if not isinstance(config, AutoScheduleConfig):
        return 1
    names = [spec.name for spec in plan_processes(cluster, run, Path()) if spec.role == "instance"]
    divisions = len(_to_profile(_setups_of(cluster, config, run, names)))
    return divisions * _with_warm_up(config.profile_steps) + 2


class Auto:
    """The profile and the decisions of `schedule: auto`. Pure: no I/O and no clock."""

    def __init__(
        self,
        run: RunConfig,
        choices: Sequence[Setup],
        fleet: Sequence[SimulatedInstance],
        steps: int,
        environment_processes: int = 1,
        hardware: str = "",
    ) -> None:
        """Begin to profile each division of the devices in `choices` for `steps` steps, after one warm-up step.

        Args:
            run: the run file.
            choices: setups to choose among.
            fleet: all instances with their step times.
            steps: steps to profile under each division.
            environment_processes: processes of environments, at all sites together.
            hardware: the hardware in words; speeds of other hardware are not taken over from a checkpoint.
        """
        self.hardware = hardware
        self.run, self.choices = run, list(choices)
        self.fleet = {instance.name: instance for instance in fleet}
        self._to_profile = deque(_to_profile(self.choices))
        self.setup = self._to_profile.popleft()
        """The setup that runs now."""
        self.note = f"profiling under {self.setup.label}"
        """Last decision, as shown to the operator."""
        self._environment_processes = environment_processes
        self._each, self._left = steps, _with_warm_up(steps)
        self._measured: dict[tuple[int, ...], _Measured] = {}
        """Measurements by the trainer's cores; those of colocated steps are under (-1,)."""
        self._groups: deque[list[tuple[int, list[int]]]] = deque(maxlen=WINDOW_STEPS)
        self._optimizer: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._weights: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._rewards: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Seconds from a sample's end to its reward, by step."""
        self._environments: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Seconds that environments stepped per sample, by step."""
        self._choice: AutoSchedule | None = None
        self._decided = False
        self._review_in, self._patience = 0, FIRST_REVIEW

    def state(self) -> dict[str, Any]:
        """Return the choice and what it rests on, as plain values for a checkpoint; {}: nothing is chosen yet."""
        if not self._decided or self._choice is None:
            return {}
        measured = [[list(division), list(one.rates), list(one.slowdowns)] for division, one in self._measured.items()]
        chosen = {"label": self.setup.label, "note": self.note, "changed_at": self._choice.changed_at}
        return chosen | {"measured": measured, "choices": self._named_choices(), "hardware": self.hardware}

    def restore(self, state: dict[str, Any]) -> bool:
        """Continue with the choice in a checkpoint, and review it after the next steps; return whether that is done.

        It is not, and the profile begins anew, if nothing was chosen, there are other setups to choose among, or the
        hardware is another: speeds of one that has not run since would be compared with those of one that has.

        Args:
            state: what `state` returned; {}: nothing.
        """
        if not state or state["choices"] != self._named_choices() or state.get("hardware") != self.hardware:
            return False
        self.setup = next(setup for setup in self.choices if setup.label == state["label"])
        self.note, self._decided = state["note"], True
        self._to_profile.clear()
        self._left, self._review_in = 0, self._patience
        for division, rates, slowdowns in state["measured"]:
            measured = self._measured[tuple(division)] = _Measured()
            measured.rates.extend(rates)
            measured.slowdowns.extend(slowdowns)
        self._choice = AutoSchedule([self._option(setup) for setup in self.choices])
        self._choice.resume(self.setup.label, state["changed_at"])
        return True

    def _named_choices(self) -> list[list[Any]]:
        return [[setup.label, list(setup.instances), list(setup.trainer_cores)] for setup in self.choices]

    def step_done(self, batch: StepBatch, times: Interval, trainer: Sequence[tuple[str, float, float]]) -> None:
        """Record a finished step; `trainer`: (command, start, end) of the trainer's work in it, unix seconds.

        A step in which nothing took time is no measurement: a clock was set in it.
        """
        on_policy = self.setup.schedule.max_staleness == 0  # then exactly a step's samples are generated in it
        if not times.seconds or (on_policy and not times.generate_s):
            return
        groups = group_lengths(batch)
        self._groups.append(groups)
        self._environments.append(environment_s_per_sample(batch))
        if (reward_s := times.reward_s) is not None:
            self._rewards.append(reward_s)
        self._optimizer.append(sum(end - start for command, start, end in trainer if command == "step"))
        micro_batches_s = sum(end - start for command, start, end in trainer if command == "train")
        self._weights.extend(end - start for start, end in times.syncs if end > start)
        measured = self._measured.setdefault(self._division(self.setup), _Measured())
        tokens = sum(prompt + length for prompt, lengths in groups for length in lengths)
        if micro_batches_s > 0:
            measured.rates.append(tokens / micro_batches_s)
        if on_policy:
            alone = self._simulated(groups, self.setup)
            measured.slowdowns.append(times.generate_s / alone if alone > 0 else 1.0)
        self._left -= 1
        self._review_in -= 1
        if self._choice is None and self._left == self._each:  # the first step of a division only warms it up
            measured.rates.clear()
            measured.slowdowns.clear()

    def next_setup(self) -> Setup | None:
        """Return the setup to profile next; None: keep the current one."""
        if self._choice is not None or self._left > 0 or not self._to_profile:
            return None
        self.setup, self._left = self._to_profile.popleft(), _with_warm_up(self._each)
        self.note = f"profiling under {self.setup.label}"
        return self.setup

    def wants_choice(self) -> bool:
        """Return whether to predict: the profile has just been completed or has drifted, or a review is due."""
        if self._left > 0 or self._to_profile or not self._groups:
            return False
        return self._choice is None or self._review_in <= 0 or self._choice.drifted(self._profile())

    def choice_job(self, step: int) -> Callable[[], Decision]:
        """Return a job that predicts and decides on the present measurements; it takes seconds: run it in a thread."""
        self._review_in, self._patience = self._patience, 2 * self._patience
        options = [self._option(setup) for setup in self.choices]
        if self._choice is None:
            self._choice = AutoSchedule(options)
        run, policy = self.run, policy_factory(self.run)
        return partial(
            self._choice.choose, self._profile(), policy, run.batch.prompts_per_step, step, run.seed, options
        )

    def decided(self, decision: Decision) -> Setup | None:
        """Record a decision; return the setup to change to, or None if it runs already."""
        self.note, self._decided = decision.why, True
        before = self.setup
        self.setup = next(setup for setup in self.choices if setup.label == decision.option.label)
        return None if self.setup == before else self.setup

    def _division(self, setup: Setup) -> tuple[int, ...]:
        return (-1,) if setup.schedule.exclusive else setup.trainer_cores

    def _profile(self) -> Profile:
        split = [m for division, m in self._measured.items() if division != (-1,)]
        shared = self._measured.get((-1,))
        rates = [rate for m in split for rate in m.rates] or [1.0]
        return Profile(
            [group for groups in self._groups for group in groups],
            statistics.median(rates),
            statistics.median(shared.rates) if shared and shared.rates else None,
            statistics.median(self._optimizer),
            statistics.median(self._rewards or [0.0]),
            weights_s=min(self._weights, default=0.0),
            environment_s=statistics.median(self._environments),
            environment_processes=self._environment_processes,
            after_batch=self.run.after_batch,
        )

    def _option(self, setup: Setup) -> Option:
        """Return the setup with its instances slowed down as measured, and the trainer's rate on its cores."""
        division = self._division(setup)
        own = self._measured.get(division)
        split = [value for other, m in self._measured.items() if other != (-1,) for value in m.slowdowns]
        slowdown = statistics.median(own.slowdowns if own and own.slowdowns else split or [1.0])
        fleet = (self.fleet[name] for name in setup.instances)
        instances = tuple(replace(instance, curve=instance.curve.scaled(slowdown)) for instance in fleet)
        rate = statistics.median(own.rates) if own and own.rates else self._rate_of(len(setup.trainer_cores))
        return Option(setup.label, setup.schedule, instances, rate)

    def _rate_of(self, cores: int) -> float | None:
        """Return the trainer's rate on that many cores, on a line through the measured ones; None: none is measured."""
        cores_of = {self._division(setup): len(setup.trainer_cores) for setup in self.choices}
        known = sorted(
            (cores_of[division], statistics.median(m.rates)) for division, m in self._measured.items() if m.rates
        )
        if not known:
            return None
        (few, slow), (many, fast) = known[0], known[-1]
        if few == many:
            return slow * cores / few if few and cores else slow
        return max(slow * 0.1, slow + (fast - slow) * (cores - few) / (many - few))

    def _simulated(self, groups: Sequence[tuple[int, list[int]]], setup: Setup) -> float:
        """Return the seconds that the setup's instances need for these groups, simulated from their own step times."""
        requests = [
            SimulatedRequest(f"{g}.{n}", float(max(1, length)), f"{g}", prompt)
            for g, (prompt, lengths) in enumerate(groups)
            for n, length in enumerate(lengths)
        ]
        policy = make_policy("least-loaded", affinity=self.run.batch.samples_per_prompt)
        return simulate(policy, requests, [self.fleet[name] for name in setup.instances]).makespan


def group_lengths(batch: StepBatch) -> list[tuple[int, list[int]]]:
    """Return (prompt tokens, output lengths) of each of a step's groups."""
    return [
        (len(group.prompt_tokens), [m.sample.output_length for m in group.members()]) for group in batch.groups.values()
    ]


def environment_s_per_sample(batch: StepBatch) -> float:
    """Return the seconds for which environments stepped, mean over a step's samples; 0: there is no environment."""
    members = [member for group in batch.groups.values() for member in group.survivors()]
    trajectories = (member.sample.trajectory for member in members)
    time = environment_time(one.steps for one in trajectories if one is not None)
    return time.stepped_s / len(members) if time is not None else 0.0


def environment_processes(run: RunConfig, sites: int) -> int:
    """Return the number of processes of environments, 1 or more.

    Args:
        run: the run file.
        sites: sites with agents, each of which has all environments.
    """
    return max(1, sites * sum(use.processes for use in run.environments))


def policy_factory(run: RunConfig, train_tokens_s: float | None = None) -> Callable[[], DispatchPolicy]:
    """Return a function that makes the run's dispatch policy with its schedule's objective, without requests.

    Args:
        run: the run file.
        train_tokens_s: tokens, prompts included, that the trainer processes per second; None: unknown.
    """
    return partial(
        make_policy,
        policy_for(run.schedule.name, run.dispatch.policy),
        run.sampling.max_tokens,
        run.batch.samples_per_prompt,
        objective_of(run.schedule.name, train_tokens_s or math.inf),
    )


class FixedSchedule:
    """The schedule choice of a run with a fixed schedule: it never changes."""

    first_setup: Setup | None = None
    """Setup that the run begins with; None: that of the run file."""
    note = ""
    """Text that is shown of the choice."""

    def state(self) -> dict[str, Any]:
        """Return the choice as plain values, for a checkpoint; {}: there is none."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Begin with a checkpoint's choice, if it still is one; `state` as returned by the method of that name."""

    async def step_done(
        self, step: int, batch: StepBatch, times: Interval, trainer: Sequence[tuple[str, float, float]]
    ) -> Setup | None:
        """Return the setup to change to at the end of a step; None: keep the current one.

        Args:
            step: number of optimizer steps done.
            batch: the step's batch.
            times: the step's times.
            trainer: (command, start, end) of the trainer's work in the step, unix seconds.
        """
        return None


class TunedSchedule(FixedSchedule):
    """The schedule choice of `schedule: auto`: profiles, predicts in a thread, and decides at the end of a step."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.first_setup = auto.setup
        self._choosing: asyncio.Task[Decision] | None = None

    @property
    def note(self) -> str:  # type: ignore[override]
        """Present activity of the tuner, or the reason for its choice."""
        return self.auto.note

    def state(self) -> dict[str, Any]:
        """Return the choice and what it rests on, as plain values for a checkpoint; {}: nothing is chosen yet."""
        return self.auto.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Begin with a checkpoint's choice, if it still is one; `state` as returned by the method of that name."""
        if self.auto.restore(state):
            self.first_setup = self.auto.setup
        elif state:
            log.warning("schedule: there are other instances, cores or hardware than at the checkpoint: profiling anew")

    async def step_done(
        self, step: int, batch: StepBatch, times: Interval, trainer: Sequence[tuple[str, float, float]]
    ) -> Setup | None:
        """Continue profiling, start a prediction, or decide; arguments and result as in `FixedSchedule.step_done`."""
        self.auto.step_done(batch, times, trainer)
        setup = self.auto.next_setup()
        if self._choosing is not None and self._choosing.done():
            setup = self.auto.decided(self._choosing.result())
            self._choosing = None
            log.info("schedule: %s", self.auto.note)
        elif setup is None and self._choosing is None and self.auto.wants_choice():
            self._choosing = asyncio.ensure_future(asyncio.to_thread(self.auto.choice_job(step)))
        return setup


def _setups_of(
    cluster: ClusterConfig, config: AutoScheduleConfig, run: RunConfig, instances: Sequence[str]
) -> list[Setup]:
    """Return the setups of a run with these instances."""
    cores_of = {spec.name: spec.cores for spec in plan_processes(cluster, run, Path())}
    on_cpus = cluster.hardware == "cpu"  # else cores do not compute: what shares them takes nothing away
    cores = {name: cores_of[name] if on_cpus else () for name in instances}
    own = cores_of["trainer"] if on_cpus else ()
    shareable = on_cpus and any(not some or not own or set(some) & set(own) for some in cores.values())
    return setups(cores, own, shareable, config.max_staleness)


def make_choice(context: RoleContext, fleet: Sequence[SimulatedInstance]) -> FixedSchedule:
    """Make the schedule choice of a run that begins, with all instances and their step times in `fleet`."""
    config = context.run.schedule
    if not isinstance(config, AutoScheduleConfig):
        return FixedSchedule()
    choices = _setups_of(context.cluster, config, context.run, [instance.name for instance in fleet])
    specs = plan_processes(context.cluster, context.run, context.run_dir)
    stepping = environment_processes(context.run, sum(spec.role == "agents" for spec in specs))
    hardware = hardware_here(context.cluster.hardware == "cuda")
    return TunedSchedule(Auto(context.run, choices, fleet, config.profile_steps, stepping, hardware))
