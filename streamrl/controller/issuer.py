"""The issuer, which decides what is generated next and which complete groups may be trained.

schedule          decides which groups may be issued and taken now (`scheduler/schedule/schedules.py`)
rounds            optional: issue in rounds that do not wait for their stragglers (`live_rounds.py`)
schedule choice   `schedule: auto` may change the schedule at the end of a step (`schedule_tuner.py`)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from scheduler.capacity.auto_schedule import during_change
from scheduler.schedule.schedules import ScheduleState, make_schedule
from streamrl.config.run import RunConfig
from streamrl.controller.given_work import parking, resuming
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.live_rounds import make_rounds
from streamrl.controller.schedule_tuner import Setup
from streamrl.controller.site_services import Services
from streamrl.protocol.controller_site import Parked
from streamrl.rollouts.types import Group

SendGroups = Callable[[list[Group], int | None], Awaitable[None]]
"""Function that sends new groups to the services; their samples are parked after that many tokens (None: never)."""


class Issuer:
    """Decisions on what is generated and trained next; the controller makes neither by itself."""

    def __init__(
        self, run: RunConfig, pool: GroupPool, services: Services, new_group: Callable[[], Group], generate: SendGroups
    ) -> None:
        """
        Args:
            run: the run file.
            pool: groups that are issued and that no step has taken.
            services: the generation services.
            new_group: makes the next prompt's group and enters it into the pool.
            generate: sends new groups to the services.
        """
        self.run, self.pool, self.services = run, pool, services
        self._new_group, self._generate = new_group, generate
        schedule = run.schedule
        if schedule.name == "auto":
            self.schedule = make_schedule("sync")  # until the instances have reported their step times
        else:
            self.schedule = make_schedule(schedule.name, schedule.max_staleness, schedule.sync_every)
        self.rounds = make_rounds(run, pool)
        self._taking = self.rounds.taking(self.schedule)
        """The schedule that decides which complete groups may be trained."""
        self._issued_before: set[str] = set()
        """Open groups that the previous schedule issued; empty when a change of schedules is complete."""

    def change_to(self, setup: Setup) -> None:
        """Change the schedule from the next step on; groups of the previous one are still taken by its rules."""
        before, self.schedule = self.schedule, setup.schedule
        self._issued_before = set(self.pool.groups)
        self._taking = during_change(before, self.schedule) if self._issued_before else self.schedule

    def oldest_version(self, group: Group, step: int) -> int:
        """Return the oldest weight version that a group which is issued now may have tokens of, from before a resume.

        It may be taken as late as in the step that it is issued for. Rounds count its age from its issue: 0.

        Args:
            group: the group.
            step: number of optimizer steps done.
        """
        return 0 if self.rounds.active else max(step, group.step - 1) - self.schedule.max_staleness

    def _state(self, step: int, taken: int) -> ScheduleState:
        return self.pool.state(self.services.version, step, taken, self._taking.max_staleness)

    async def issue(self, step: int, taken: int) -> None:
        """Send the services as many groups as the schedule admits now, or those of a round that begins now.

        Args:
            step: number of optimizer steps done.
            taken: number of groups that the current step has taken.
        """
        if self.services.version < 0 or step == self.run.steps:
            return
        if self.rounds.active:
            await self._next_rounds(step)
            return
        while groups := self._admitted(step, taken):
            await self._generate(groups, None)  # groups kept over a resume may end at once, and admit others

    def _admitted(self, step: int, taken: int) -> list[Group]:
        """Make all groups that the schedule admits now."""
        groups: list[Group] = []
        state = self._state(step, taken)
        while self.schedule.may_issue(state):
            groups.append(self._new_group())
            state = state._replace(issued=self.pool.issued)
        return groups

    async def _next_rounds(self, step: int) -> None:
        """End the current round if it is over, and begin the next one if it may begin."""
        rounds = self.rounds
        while (deferred := rounds.end_if_over()) or rounds.may_begin(self.services.version, step):
            if deferred:
                await self.services.tell(*parking(self.pool.unfinished(deferred)))
                continue
            begun = rounds.begin(self.services.version)
            groups = [self._new_group() for _ in range(begun.new)]
            rounds.started(group.group_id for group in groups)
            resumed = self.pool.unfinished(begun.resumed)
            await self.services.tell(*resuming(resumed, begun.budget, rounds.number))
            await self._generate(groups, begun.budget)

    def group_to_take(self, step: int, taken: int) -> Group | None:
        """Return the complete group that the current step may take next; None if it has to wait.

        Args:
            step: number of optimizer steps done.
            taken: number of groups that the current step has taken.
        """
        if not self.rounds.may_train(step, self.schedule.whole_batches):
            return None
        group = self.pool.first()
        if group is None or not self._taking.may_take(self._state(step, taken), group.issue_version):
            return None
        return group

    def taken(self, group_id: str) -> None:
        """Record that a step has taken a group."""
        self.rounds.taken(group_id)
        if self._issued_before:
            self._issued_before.discard(group_id)
            if not self._issued_before:
                self._taking = self.schedule

    def parked(self, parked: Parked, group_id: str) -> None:
        """Record that a sample has used up its token budget."""
        self.rounds.parked(parked.sample_id, group_id, parked.round)
