"""Discrete-event simulation of whole iterations: generate, reward, train, send the weights, for every schedule.

Generation is simulated by `generation_simulator.py`, under any dispatch policy. If samples are episodes in an
environment, one of its processes then steps `environment_s`, one sample after the other: an episode's steps lie between
its turns, but put together behind its last token they load the processes, and delay the sample, as much. Only then has
the sample been generated. It gets its reward `reward_s` after its end (rewards run in parallel). A group is complete
when all its samples have their rewards. One trainer processes one group after the other, at a rate of tokens per
second; a share of that work may have to follow the step's last group (`after_batch`), and the step ends with
`optimizer_s`. Its ranks share samples, not tokens: a sample takes one rank as long as its tokens take at a rank's share
of the rate, and a step does not end before its last sample has. New weights take

    delay + bytes / bandwidth

to reach generation, one version after the other, while the trainer continues if the schedule allows it; running
requests continue as well, without another prefill, after a pause of `load_s`. Under an exclusive schedule trainer and
instances take turns on the same devices: the weights cross no link, but every change of turn takes `switch_s`. The
schedule (`schedules.py`) decides what may start when, together with the rounds (`rounds.py`) where groups are issued
in rounds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.schedule.rounds import Rounds, taking
from scheduler.schedule.schedules import Schedule, ScheduleState, due_within
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, Simulation, uncollected
from scheduler.simulation.stages import PipelineOutcome, Stages


@dataclass
class _Group:
    """A group that was issued and not yet trained."""

    name: str
    requests: dict[str, SimulatedRequest]
    version: int
    """Policy version at issue."""
    generating: set[str]
    """Samples that have not ended."""
    parked: set[str] = field(default_factory=set)
    """Unfinished samples that have used up their budget of the round."""


_PLAYED, _REWARDED, _TRAINED, _STEPPED = "played", "rewarded", "trained", "stepped"
_PUBLISHED, _SWITCHED = "published", "switched"


class Pipeline:
    """Simulates one run under one schedule; see the module."""

    def __init__(
        self,
        policy: DispatchPolicy,
        instances: Sequence[SimulatedInstance],
        stages: Stages,
        schedule: Schedule,
        batch: int,
        rounds: Rounds | None = None,
    ) -> None:
        """Set up a run.

        Args:
            policy: places requests.
            instances: instances that generate.
            stages: rates and times of the other stages.
            schedule: decides what may start; under an exclusive one, instances and stages describe all devices
                together.
            batch: groups per optimizer step.
            rounds: issues the groups; its age bound then replaces the schedule's staleness.

        Raises:
            ValueError: no instances, an empty batch, or rounds with another batch, a schedule that overlaps them, or
                environments.
        """
        if batch < 1:
            raise ValueError(f"a batch needs at least one group, got {batch}")
        if rounds is not None and (rounds.batch != batch or schedule.max_staleness):
            raise ValueError(
                f"rounds go with colocated, sync or stream, sync_every 1 and the same batch; got "
                f"{schedule.name}, every {schedule.sync_every}, {rounds.batch} and {batch} groups"
            )
        if rounds is not None and stages.environment_s:
            raise ValueError("rounds of episodes in environments are not simulated: a step cannot be withdrawn")
        self.simulation = Simulation(policy, instances)
        self.stages, self.schedule, self.batch, self.rounds = stages, schedule, batch, rounds
        self._taking = schedule if rounds is None else taking(schedule, rounds)
        self._events: list[tuple[float, int, str, str]] = []
        self._numbers = itertools.count()
        self._groups: dict[str, _Group] = {}
        self._of: dict[str, str] = {}
        """Group of each sample that has not ended."""
        self._untaken: Counter[int] = Counter()
        """Groups that are issued and not taken, by version: counted as they come and go, for it is asked often."""
        self._complete: list[tuple[int, int, str]] = []
        """Heap of (version, order, group): groups that are due first come first."""
        self._source: Iterator[Sequence[SimulatedRequest]] = iter(())
        self._iterations = 0
        self._issued = self._generated = self._version = self._step = self._taken = 0
        self._round_version = -1
        """Version of the last round."""
        self._training = False
        """Whether the trainer works or is waking up."""
        self._refused: tuple[int, ...] = ()
        """State on which the schedule last refused a group."""
        self._full: tuple[int, ...] = ()
        """State in which no further group may be issued."""
        self._trainers_turn = not schedule.exclusive
        self._environments_free = [0.0] * stages.environment_processes
        """Heap: when each process of the environment is free."""
        self._link_free = self._training_busy = 0.0
        self._ranks_done = 0.0
        """When the last rank ends the samples that were taken so far."""
        self._after_batch = self._after_batch_on_one_rank = 0.0
        """Seconds of training that follow the step's last group: of all its groups, and of its longest sample."""
        self._steps: list[list[str]] = [[]]
        self._stepped: list[float] = []
        self._busy_until: list[tuple[float, float]] = []
        self._published: list[float] = []
        self._staleness: Counter[int] = Counter()
        self._stale = [0]
        """Sum of the staleness of each step's groups."""
        self._samples, self._tokens, self._deferrals = 0, 0.0, 0

    def run(self, groups: Iterable[Sequence[SimulatedRequest]], iterations: int) -> PipelineOutcome:
        """Simulate so many optimizer steps.

        Args:
            groups: groups in the order of issue, each of at least one request, all ids different. As many are used as
                the schedule may issue until the last step has been trained, or fewer if there are no more.
            iterations: optimizer steps.

        Raises:
            ValueError: a group is empty, or two requests have the same id.
            RuntimeError: there are too few groups for the steps, or the policy leaves requests waiting.
        """
        self._source, self._iterations = iter(groups), iterations
        with uncollected():
            now = self._run()
        return PipelineOutcome(
            stepped=tuple(self._stepped),
            published=tuple(self._published),
            trained=tuple(map(tuple, self._steps[:iterations])),
            samples=self._samples,
            tokens=self._tokens,
            generation_busy=self._generation_busy(now),
            training_busy=self._training_busy,
            busy_until=tuple(self._busy_until),
            staleness=dict(sorted(self._staleness.items())),
            staleness_by_step=tuple(total / self.batch for total in self._stale[:iterations]),
            deferred=self._deferrals,
            left=len(self._groups),
        )

    def _run(self) -> float:
        """Simulate until the last weights have arrived, and return when that is."""
        now, events, simulation = 0.0, self._events, self.simulation
        self._start_what_may(now)
        while self._version < self._iterations:
            generated, event = simulation.next_end(), events[0][0] if events else math.inf
            if generated <= event:
                if generated == math.inf:
                    raise RuntimeError(
                        f"step {self._step + 1} of {self._iterations} cannot be trained: {len(self._groups)} groups "
                        f"are in flight, {simulation.policy.waiting} requests wait, and nothing runs"
                    )
                now, request_id = simulation.finish_next()
                self._sample_ended(request_id, now)
            else:
                now, _, kind, name = heapq.heappop(events)
                self._happened(kind, name, now)
            self._start_what_may(now)
        return now

    def _generation_busy(self, now: float) -> float:
        """Return the mean busy time of the instances until now."""
        engines = self.simulation.engines.values()
        return sum(e.busy + (now - e.now if e.running else 0.0) for e in engines) / len(engines)

    def _after(self, now: float, seconds: float, kind: str, name: str = "") -> None:
        heapq.heappush(self._events, (now + seconds, next(self._numbers), kind, name))

    def _sample_ended(self, request_id: str, now: float) -> None:
        group = self._groups[self._of[request_id]]
        reached = self.simulation.requests[request_id].length
        if reached < group.requests[request_id].length:
            self._park(group, request_id, reached, now)
        elif self.stages.environment_s:
            begins = max(now, self._environments_free[0])
            heapq.heapreplace(self._environments_free, begins + self.stages.environment_s)
            self._after(begins, self.stages.environment_s, _PLAYED, request_id)
        else:
            self._sample_complete(request_id, now)

    def _sample_complete(self, request_id: str, now: float) -> None:
        """Have a sample rewarded that is generated and, if it is an episode, played."""
        group = self._groups[self._of.pop(request_id)]
        group.generating.discard(request_id)
        if not group.generating:
            self._generated += 1
            self._after(now, self.stages.reward_s, _REWARDED, group.name)  # the last of its rewards: all take as long
        else:
            self._note_parked(group, now)

    def _park(self, group: _Group, request_id: str, reached: float, now: float) -> None:
        """Withdraw a sample that has used up its budget of the round."""
        self.simulation.withdraw({request_id}, now)  # forgets it, so that it may be submitted again
        group.requests[request_id] = replace(group.requests[request_id], kept=reached)
        group.parked.add(request_id)
        self._note_parked(group, now)

    def _note_parked(self, group: _Group, now: float) -> None:
        if self.rounds is not None and group.parked == group.generating:
            self.rounds.parked(group.name)
            self._end_round_if_over(now)

    def _happened(self, kind: str, name: str, now: float) -> None:
        if kind == _PLAYED:
            self._sample_complete(name, now)
        elif kind == _REWARDED:
            self._rewarded(name, now)
        elif kind == _SWITCHED:
            self._training, self._trainers_turn = False, True
        elif kind == _TRAINED:
            self._training = False
            if self._taken == self.batch:
                self._training = True
                self._training_busy += self.stages.optimizer_s
                behind = max(self._after_batch, self._after_batch_on_one_rank)
                self._after_batch = self._after_batch_on_one_rank = 0.0
                self._after(max(now, self._ranks_done), behind + self.stages.optimizer_s, _STEPPED)
        elif kind == _STEPPED:
            self._training = False
            self._step += 1
            self._taken = 0
            self._steps.append([])
            self._stale.append(0)
            self._stepped.append(now)
            self._busy_until.append((self._generation_busy(now), self._training_busy))
            if self.schedule.publishes(self._step, self._iterations):
                self._publish(now)
        else:
            self._version = int(name)
            self._trainers_turn = not self.schedule.exclusive
            self._published.append(now)
            if self.stages.load_s:
                self.simulation.pause(self.stages.load_s, now)

    def _publish(self, now: float) -> None:
        if self.schedule.exclusive:
            self._after(now, self.stages.switch_s, _PUBLISHED, f"{self._step}")
            return
        # versions are sent one after the other
        seconds = self.stages.link.seconds(self.stages.weights_gb)
        begin = max(now, self._link_free)
        self._link_free = begin + seconds
        self._after(begin, seconds, _PUBLISHED, f"{self._step}")

    def _rewarded(self, name: str, now: float) -> None:
        group = self._groups[name]
        heapq.heappush(self._complete, (group.version, next(self._numbers), group.name))
        if self.rounds is not None:
            self.rounds.completed(group.name)
            self._end_round_if_over(now)

    def _end_round_if_over(self, now: float) -> None:
        assert self.rounds is not None
        if self.rounds.over:
            for name in self.rounds.end():
                self._withdraw(self._groups[name], now)

    def _withdraw(self, group: _Group, now: float) -> None:
        """Defer a group; its samples that have ended keep their rewards."""
        self._deferrals += 1
        kept = self.simulation.withdraw(group.generating - group.parked, now)
        group.requests |= {name: replace(group.requests[name], kept=tokens) for name, tokens in kept.items()}
        group.parked.clear()

    def _state(self, due: tuple[int, ...] = ()) -> ScheduleState:
        return ScheduleState(
            self.batch,
            self._issued,
            self._generated,
            self._version,
            self._step,
            self._taken,
            len(self._complete),
            due,
            self._iterations,
        )

    def _start_what_may(self, now: float) -> None:
        if self._version >= self._iterations:
            return
        if self.rounds is None:
            self._issue(now)
        else:
            self._begin_rounds(self.rounds, now)
        if self._complete and not self._training:
            self._train(now)

    def _issue(self, now: float) -> None:
        if self._issued >= self._iterations * self.batch:
            return
        if self._question() == self._full:
            return  # nothing has changed that matters to issuing
        fresh: list[SimulatedRequest] = []
        state = self._state()  # `due` matters to training only
        while self.schedule.may_issue(state):
            group = next(self._source, None)
            if group is None:
                break
            fresh.extend(self._admit(group).requests.values())
            state = self._state()
        self._full = self._question()
        if fresh:
            self.simulation.submit(fresh, now)

    def _question(self) -> tuple[int, ...]:
        """Return what decides whether a group may be issued; what is generated does so only at a barrier."""
        return self._issued, self._generated if self.schedule.issue_barrier else 0, self._version

    def _admit(self, requests: Sequence[SimulatedRequest]) -> _Group:
        if not requests:
            raise ValueError("a group needs at least one request")
        by_name = {request.request_id: request for request in requests}
        if len(by_name) < len(requests):
            raise ValueError(f"two requests of a group have one id: {sorted(r.request_id for r in requests)}")
        group = _Group(f"{self._issued}", by_name, self._version, set(by_name))
        self._issued += 1
        self._groups[group.name] = group
        self._untaken[group.version] += 1
        self._of.update(dict.fromkeys(by_name, group.name))
        return group

    def _begin_rounds(self, rounds: Rounds, now: float) -> None:
        """Begin the round of new weights, or another under the same ones; one that is over at once is ended."""
        while rounds.round is None and (rounds.again or self._round_version < self._version == self._step):
            self._round_version = self._version
            current = rounds.begin(self._version)
            admitted = [self._admit(group) for group in itertools.islice(self._source, current.new)]
            rounds.started(group.name for group in admitted)
            groups = [*(self._groups[name] for name in current.resumed), *admitted]
            if current.needed and not groups:
                return  # nothing is left to issue, so the round cannot get what it needs
            self.simulation.submit([r for group in groups for r in _to_submit(group, current.budget)], now)
            self._end_round_if_over(now)

    def _train(self, now: float) -> None:
        """Train the complete group that is due first, if the schedule lets the trainer, which is idle, take it."""
        if self.rounds is not None and (
            self._round_version != self._step or (self.schedule.whole_batches and self.rounds.round is not None)
        ):
            return  # this step's round has not begun, or whole batches wait for its end
        version, _, name = self._complete[0]
        question = (version, len(self._complete), self._issued, self._step, self._taken)
        if question == self._refused:
            return  # nothing has changed that matters to training
        due = due_within(self._untaken, self._step, self._taking.max_staleness)
        if not self._taking.may_take(self._state(due), version):
            self._refused = question
            return
        if not self._trainers_turn:
            if not self.simulation.where and not self.simulation.policy.waiting:
                self._training = True
                self._after(now, self.stages.switch_s, _SWITCHED)
            return
        heapq.heappop(self._complete)
        group = self._groups.pop(name)
        self._untaken[group.version] -= 1
        if not self._untaken[group.version]:
            del self._untaken[group.version]
        if self.rounds is not None:
            self.rounds.taken(name)
        requests = group.requests.values()
        tokens = [request.prompt_tokens + request.length for request in requests]
        seconds = sum(tokens) / self.stages.train_tokens_s
        on_one_rank = max(tokens) / self.stages.train_tokens_s * self.stages.train_ranks
        behind = self.stages.after_batch
        self._after_batch += behind * seconds
        self._after_batch_on_one_rank = max(self._after_batch_on_one_rank, behind * on_one_rank)
        self._ranks_done = max(self._ranks_done, now + (1 - behind) * on_one_rank)
        self._training = True
        self._training_busy += seconds
        self._taken += 1
        self._steps[-1].append(name)
        self._staleness[self._step - group.version] += 1
        self._stale[-1] += self._step - group.version
        self._samples += len(requests)
        self._tokens += sum(request.length for request in requests)
        self._after(now, (1 - behind) * seconds, _TRAINED)


def _to_submit(group: _Group, budget: int | None) -> list[SimulatedRequest]:
    """Return a group's unfinished samples, with lengths limited to what the round allows."""
    requests = [request for name, request in group.requests.items() if name in group.generating]
    if budget is None:
        return requests
    return [
        replace(r, length=min(r.length, r.kept + budget), forecast=_capped(r.forecast, r.kept + budget))
        for r in requests
    ]


def _capped(forecast: Forecast | None, most: float) -> Forecast | None:
    if forecast is None:
        return None
    return Forecast(tuple(min(n, most) for n in forecast.lengths), tuple(min(n, most) for n in forecast.tail))
