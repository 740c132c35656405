"""Two real vLLM instances behind a site's dispatcher, without other processes: what `live_dispatch.py` and
`live_schedules.py` measure with."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import yaml
from running import ROOT

from ranker.model import LengthModel
from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.schedules import Schedule, ScheduleState, due_within
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.stages import Stages
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.controller.group_source import GroupSource, samples_of
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.machine.compute_type import decided
from streamrl.machine.model_files import resolve_model
from streamrl.protocol.message import parse
from streamrl.protocol.samples import request_from_wire
from streamrl.protocol.site_instance import GenerateSample
from streamrl.rollouts.types import Group, PartialSample, Sample, SampleRequest
from streamrl.tasks.source import PromptSource

PROMPT_SEED = 1007
"""Not the one of the data sets: the ranker has not seen these prompts."""
CALIBRATION_S = 120.0
"""Seconds for which the step times of both instances are measured, at most."""
LONGEST_S = 900.0
"""Seconds after which a turn has failed."""
Forecasts = Mapping[str, Forecast]


@dataclass(frozen=True)
class LiveWorkload:
    """A batch to generate."""

    name: str
    data: str
    """Set of `collect_lengths.py`: its run file says model and tasks."""
    run: str
    prompts: int
    samples: int
    cap: int
    slots: tuple[int, int]
    """Slots of both instances."""


SMALL = ("small_reasoner", "examples/small_reasoner.yaml")
SMOL = ("smollm2", "experiments/runs/smollm2_lengths.yaml")
WORKLOADS = (
    LiveWorkload("small reasoner, 16 x 8", *SMALL, 16, 8, 640, (48, 24)),
    LiveWorkload("small reasoner, 48 x 4", *SMALL, 48, 4, 640, (96, 96)),
    LiveWorkload("small reasoner, 64 x 8", *SMALL, 64, 8, 640, (64, 64)),
    LiveWorkload("small reasoner, 32 x 8, caps 96 and 32", *SMALL, 32, 8, 640, (96, 32)),
    LiveWorkload("SmolLM2, 8 x 8", *SMOL, 8, 8, 192, (48, 24)),
    LiveWorkload("SmolLM2, 16 x 4", *SMOL, 16, 4, 256, (32, 32)),
    LiveWorkload("SmolLM2, 24 x 4, caps 16", *SMOL, 24, 4, 128, (16, 16)),
)


class LiveEngine(Protocol):
    """What is needed of an `Engine`."""

    async def generate(self, request: SampleRequest, route: str) -> Sample | PartialSample:
        """Return a finished sample, or a partial one that was released."""

    async def release(self, sample_id: str) -> None:
        """Preempt a request."""

    def produced(self) -> dict[str, int]:
        """Tokens of each running request."""


@dataclass
class Played:
    """One policy's turn."""

    seconds: float
    lengths: dict[str, int]
    moves: int


class Work:
    """Requests that a policy places on engines."""

    def __init__(
        self,
        engines: Mapping[str, LiveEngine],
        policy: DispatchPolicy,
        seed: int,
        tasks: asyncio.TaskGroup,
        ended: Callable[[str], Awaitable[None]],
    ) -> None:
        """Set up a turn.

        Args:
            engines: by the names that the policy knows.
            policy: with all instances.
            seed: of the run, from which those of the samples follow.
            tasks: run the requests.
            ended: called with each finished sample's id.
        """
        self.engines, self.seed, self.tasks, self.ended = engines, seed, tasks, ended
        self.lengths: dict[str, int] = {}
        self.dispatcher = Dispatcher(policy, self._send, lambda name, one: self.engines[name].produced().get(one, 0))

    async def submit(self, groups: Sequence[Group], forecasts: Forecasts) -> None:
        # a forecast may be one sample's, so each sample goes in as a group of its own
        asked = [
            ([SampleRequest(sample_id, group.group_id, group.prompt_tokens, seed, 0.0)], forecasts.get(sample_id))
            for group in groups
            for sample_id, seed, _ in samples_of(group, self.seed)
        ]
        await self.dispatcher.submit(asked)

    async def _send(self, instance: str, kind: str, body: dict[str, Any], arrays: Any) -> None:
        if kind == "release":
            self.tasks.create_task(self.engines[instance].release(body["sample_id"]))
        else:
            self.tasks.create_task(self._generate(instance, body, arrays))

    async def _generate(self, instance: str, body: dict[str, Any], arrays: Any) -> None:
        request = request_from_wire(parse(GenerateSample, body), arrays)
        drawn = await self.engines[instance].generate(request, body["route"])
        if isinstance(drawn, PartialSample):
            await self.dispatcher.released(drawn, instance)
            return
        self.lengths[drawn.sample_id] = drawn.output_length
        await self.dispatcher.finished(drawn.sample_id, drawn.output_length, instance)
        await self.ended(drawn.sample_id)


async def play(
    engines: Mapping[str, LiveEngine],
    policy: DispatchPolicy,
    forecasts: Forecasts,
    groups: Sequence[Group],
    seed: int,
) -> Played:
    """Generate a whole batch."""
    done, left = asyncio.Event(), sum(group.size for group in groups)

    async def ended(sample_id: str) -> None:
        if len(work.lengths) == left:
            done.set()

    began = time.monotonic()
    async with asyncio.timeout(LONGEST_S), asyncio.TaskGroup() as tasks:
        work = Work(engines, policy, seed, tasks, ended)
        await work.submit(groups, forecasts)
        await done.wait()
    return Played(time.monotonic() - began, work.lengths, work.dispatcher.moves)


@dataclass
class Steps:
    """Steps of a schedule; training is modelled: a group takes its tokens by a rate."""

    schedule: Schedule
    batches: Sequence[Sequence[Group]]
    rate: float
    """Tokens, prompts included, per second."""
    issued: int = 0
    generated: int = 0
    step: int = 0
    taken: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    """Policy version at issue of each group that no step has taken."""
    complete: list[tuple[int, int, Group]] = field(default_factory=list)
    """Heap of (version, order, group)."""
    left: dict[str, int] = field(default_factory=dict)
    """Samples that each group still lacks."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def groups(self) -> list[Group]:
        return [group for batch in self.batches for group in batch]

    def _state(self, due: tuple[int, ...] = ()) -> ScheduleState:
        done = self.issued, self.generated, self.step, self.step, self.taken, len(self.complete)
        return ScheduleState(len(self.batches[0]), *done, due, len(self.batches))

    def issue(self) -> list[Group]:
        """Groups that may be issued now."""
        fresh = []
        while self.schedule.may_issue(self._state()):
            group = self.groups[self.issued]
            self.versions[group.group_id], self.left[group.group_id] = self.step, group.size
            self.issued += 1
            fresh.append(group)
        return fresh

    def ended(self, group: Group) -> None:
        """One sample of a group has ended."""
        self.left[group.group_id] -= 1
        if not self.left[group.group_id]:
            self.generated += 1
            heapq.heappush(self.complete, (self.versions[group.group_id], next(self._order), group))

    def take(self) -> Group | None:
        """Take the next group to train, if there is one."""
        due = due_within(Counter(self.versions.values()), self.step, self.schedule.max_staleness)
        if not self.complete or not self.schedule.may_take(self._state(due), self.complete[0][0]):
            return None
        group = heapq.heappop(self.complete)[2]
        del self.versions[group.group_id]
        self.taken += 1
        return group


async def play_steps(
    engines: Mapping[str, LiveEngine], policy: DispatchPolicy, forecasts: Forecasts, steps: Steps, seed: int
) -> Played:
    """Generate and train steps until the last one is trained."""
    of = {sample_id: group for group in steps.groups for sample_id, _, _ in samples_of(group, seed)}
    news = asyncio.Event()

    async def ended(sample_id: str) -> None:
        steps.ended(of[sample_id])
        news.set()
        await issue()

    async def issue() -> None:
        if fresh := steps.issue():
            await work.submit(fresh, forecasts)

    began = time.monotonic()
    async with asyncio.timeout(LONGEST_S), asyncio.TaskGroup() as tasks:
        work = Work(engines, policy, seed, tasks, ended)
        await issue()
        while steps.step < len(steps.batches):
            if (group := steps.take()) is None:
                await news.wait()
                news.clear()
                continue
            names = [sample_id for sample_id, _, _ in samples_of(group, seed)]
            tokens = sum(len(group.prompt_tokens) + work.lengths[name] for name in names)
            await asyncio.sleep(tokens / steps.rate)
            if steps.taken == len(steps.batches[0]):
                steps.step, steps.taken = steps.step + 1, 0
                await issue()
    return Played(time.monotonic() - began, work.lengths, work.dispatcher.moves)


class Bench:
    """Two real instances of one model."""

    def __init__(self, workload: LiveWorkload, steps: int = 1) -> None:
        """Start both instances.

        Args:
            workload: to generate.
            steps: batches of it.
        """
        from transformers import AutoTokenizer

        from streamrl.generation.instance.engine import Engine

        self.workload = workload
        values = yaml.safe_load((ROOT / workload.run).read_text())
        values["sampling"]["max_tokens"] = workload.cap
        values["batch"] = {"prompts_per_step": workload.prompts, "samples_per_prompt": workload.samples}
        values["model"]["max_context"] = max(workload.cap + 384, int(values["model"]["max_context"]))
        self.run = decided(RunConfig.model_validate(values), cuda=False)
        self.engines: dict[str, Engine] = {}
        for number, slots in enumerate(workload.slots):
            pool = GenerationPool(max_batch=slots, kv_cache_gb=0.5)
            self.engines[f"i{number}"] = Engine(pool, self.run, False, f"i{number}", "here")
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self.run.model.path))
        source = GroupSource(self.run, PromptSource(self.run.tasks, PROMPT_SEED), tokenizer)
        self.batches = [[source.next_group(1 + step) for _ in range(workload.prompts)] for step in range(steps)]
        self.fleet: list[SimulatedInstance] = []

    async def calibrate(self) -> None:
        """Measure the step times of both instances at once, as they will work."""
        from streamrl.generation.instance.calibration import measure

        for engine in self.engines.values():
            await engine.warm_up()
        measured = await asyncio.gather(
            *(
                measure(engine, slots, self.run.model.max_context // 2, CALIBRATION_S, lambda _: None)
                for engine, slots in zip(self.engines.values(), self.workload.slots, strict=True)
            )
        )
        for trials, load in measured:
            if trials.doubts:
                print(f"doubtful step times: {trials.doubts}; {load}")
        mean = StepCurve.mean([trials.curve for trials, _ in measured])
        self.fleet = [
            SimulatedInstance(name, mean, slots) for name, slots in zip(self.engines, self.workload.slots, strict=True)
        ]

    def fresh(self, name: str, objective: DispatchObjective = MAKESPAN) -> DispatchPolicy:
        """A policy without instances."""
        return make_policy(name, self.workload.cap, self.workload.samples, objective)

    def policy(self, name: str, objective: DispatchObjective = MAKESPAN) -> DispatchPolicy:
        """A policy that knows the instances."""
        policy = self.fresh(name, objective)
        for instance in self.fleet:
            policy.join(instance.name, instance.slots, instance.curve)
        return policy

    async def empty_caches(self) -> None:
        for engine in self.engines.values():
            await engine.pause("recompute_kv", engine.version)
            await engine.resume()

    async def play(self, policy: DispatchPolicy, forecasts: Forecasts) -> Played:
        """Generate the first batch."""
        await self.empty_caches()
        return await play(self.engines, policy, forecasts, self.batches[0], self.run.seed)

    async def play_steps(self, schedule: Schedule, policy: DispatchPolicy, forecasts: Forecasts, rate: float) -> Played:
        """Generate and train all batches."""
        await self.empty_caches()
        steps = Steps(schedule, self.batches, rate)
        return await play_steps(self.engines, policy, forecasts, steps, self.run.seed)

    def simulated(self, group: Group, lengths: Mapping[str, int], forecasts: Forecasts) -> list[SimulatedRequest]:
        """A group's requests as they came out."""
        return [
            SimulatedRequest(
                name, lengths[name], group.group_id, len(group.prompt_tokens), forecast=forecasts.get(name)
            )
            for name, _, _ in samples_of(group, self.run.seed)
        ]

    def simulate(self, policy: str, lengths: Mapping[str, int], forecasts: Forecasts) -> float:
        """Return the seconds that the simulator expects of the first batch."""
        requests = [one for group in self.batches[0] for one in self.simulated(group, lengths, forecasts)]
        return simulate(self.fresh(policy), requests, self.fleet).makespan

    def simulate_steps(
        self,
        schedule: Schedule,
        policy: DispatchPolicy,
        lengths: Mapping[str, int],
        forecasts: Forecasts,
        rate: float,
    ) -> float:
        """Return the seconds that the simulator expects of all steps; the policy has no instances yet."""
        groups = [self.simulated(group, lengths, forecasts) for batch in self.batches for group in batch]
        batch = len(self.batches[0])
        return Pipeline(policy, self.fleet, Stages(rate), schedule, batch).run(groups, len(self.batches)).total

    def ranked(self, model: LengthModel) -> dict[str, Forecast]:
        """The ranker's forecast of every sample."""
        groups = [group for batch in self.batches for group in batch]
        predicted = model.predict([g.prompt for g in groups], [g.task for g in groups], limit=self.workload.cap)
        return {
            sample_id: Forecast.from_quantiles(predicted.levels, row)
            for group, row in zip(groups, predicted.quantiles, strict=True)
            for sample_id, _, _ in samples_of(group, self.run.seed)
        }

    def close(self) -> None:
        """End the instances."""
        for engine in self.engines.values():
            engine.close()
