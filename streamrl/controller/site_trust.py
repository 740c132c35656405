"""What follows from what a site got wrong: its refused samples are given again, and a site that fails is excluded.

    a refused sample   -> a site that has not failed on it -> usable
                       -> there is none: any site, `MOST_TRIES` in all -> void, since nobody can generate it
    a site             -> excluded: what it owes goes to the others (samples, and rewards if it has a rewards process),
                          and nothing more is sent to it or taken from it

A site other than the trainer's is excluded when it sends a batch that cannot be read, when `FEWEST_REFUSED` of its
samples and more than `MOST_REFUSED` of all that it delivered were refused, when the instances in its first hello make
no sense, and at a canary that is to end the run (`mismatch.on_mismatch`). The last site that can generate is
never excluded. A site stays excluded until the controller is restarted. Void samples count like void rewards: the run
ends once there are too many of them (`void_watch.py`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.given_work import GivenWork, parking
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import group_of, samples_of
from streamrl.controller.live_rounds import NoRounds
from streamrl.controller.reward_client import Rewarders
from streamrl.controller.site_services import Services
from streamrl.controller.step_times import StepTimes
from streamrl.rollouts.trajectory import Trajectory
from streamrl.rollouts.types import Group, Sample
from streamrl.rollouts.void import Void, VoidCause

log = logging.getLogger(__name__)

MOST_TRIES = 3
"""Times that a sample is generated if every site has failed on it."""
FEWEST_REFUSED = 8
"""Refused samples from which on a site's share of them is judged."""
MOST_REFUSED = 0.1
"""Share of a site's samples that may be refused."""


def open_work(
    keys: Iterable[str], alone: Mapping[str, str], pool: GroupPool, evaluator: Evaluator, seed: int
) -> list[GivenWork]:
    """Return what generation still owes of some work of a site.

    Args:
        keys: groups, and samples that were given again.
        alone: samples that were given again, with their groups; they are no longer part of their groups' work.
        pool: groups of training.
        evaluator: groups of evaluations.
        seed: the run's.
    """
    evaluated, found = evaluator.open_groups(), []
    for key in keys:
        group_id = alone.get(key, key)
        if (group := pool.groups.get(group_id)) is not None:
            left = set(pool.unfinished([group_id]))
            draws = [draw for draw in samples_of(group, seed) if draw[0] in left]
        elif (group := evaluated.get(group_id)) is not None:
            draws = evaluator.unfinished_samples(group)
        else:
            continue
        draws = [draw for draw in draws if (draw[0] == key if key in alone else draw[0] not in alone)]
        if draws:
            found.append(GivenWork(key, group, draws, evaluation=group_id in evaluated))
    return found


def empty_sample(sample_id: str, group: Group, site: str, void: Void, now: float) -> Sample:
    """Return a sample without tokens, in place of one that no site could generate; the last try was `site`'s."""
    trajectory = None
    if group.agent:
        trajectory = Trajectory(rows=[], reward=None, void_cause=void.cause, void_text=void.text, messages=[], steps=[])
    nothing = np.empty(0, np.int32)
    arrays = nothing, nothing.astype(np.float32), nothing
    return Sample(
        sample_id, group.group_id, *arrays, "length", site, "", "", "", now, now, now, now, trajectory=trajectory
    )


class SiteTrust:
    """The record of what sites got wrong."""

    def __init__(
        self,
        services: Services,
        rewarders: Rewarders,
        pool: GroupPool,
        evaluator: Evaluator,
        rounds: NoRounds,
        times: StepTimes,
        seed: int,
    ) -> None:
        """
        Args:
            services: the generation services.
            rewarders: the rewards processes.
            pool: groups of training.
            evaluator: groups of evaluations.
            rounds: the run's rounds.
            times: times of the current step.
            seed: the run's.
        """
        self.services, self.pool, self._evaluator, self._rounds = services, pool, evaluator, rounds
        self._rewarders, self._times, self._seed = rewarders, times, seed
        self._failed: defaultdict[str, list[str]] = defaultdict(list)
        """Services that delivered an unusable sample, by sample; samples that arrived since are left out."""
        self._delivered: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def usable(self, service: str, sample_id: str) -> None:
        """Record a sample that arrived and makes sense."""
        self._delivered[service] += 1
        self._failed.pop(sample_id, None)

    async def give_again(self, service: str, sample_id: str, why: str) -> Void | None:
        """Have a refused sample, which a service's site owes, generated again; exclude the site if it fails too often.

        Returns:
            None; or, if no site can generate the sample, the cause for which it is void.
        """
        self._delivered[service] += 1
        self._refused[service] += 1
        failed = self._failed[sample_id]
        failed.append(service)
        untried = set(self.services.generating) - set(failed)
        if not untried and len(failed) >= MOST_TRIES:
            del self._failed[sample_id]
            text = f"sample {sample_id} was refused {len(failed)} times; the last one, from {service}, {why}"
            log.warning("no site can generate it: %s", text)
            return Void(VoidCause.GENERATION, text)
        group_id = group_of(sample_id)
        work = open_work([sample_id], {sample_id: group_id}, self.pool, self._evaluator, self._seed)
        for one in work:
            self.services.take_back(sample_id, group_id)
            await self._give([one], avoid=failed)
        refused = self._refused[service]
        if refused >= FEWEST_REFUSED and refused > MOST_REFUSED * self._delivered[service]:
            await self.exclude(service, f"{refused} of its {self._delivered[service]} samples cannot be used")
        return None

    async def exclude(self, service: str, why: str) -> bool:
        """Stop using a site, and give what it owes to the others.

        Returns:
            Whether it is excluded; False: it is the trainer's, or no other site can generate.
        """
        if service in self.services.excluded:
            return True
        if not self.services.can_exclude(service):
            return False
        log.error("%s is not used any more: %s", service, why)
        work = open_work(
            self.services.exclude(service, why), self.services.alone, self.pool, self._evaluator, self._seed
        )
        await self._give(work)
        self._rewarders.exclude(self.services.site_of(service))
        if not self.services.updating:  # it may have been the last one that was loading weights
            self._times.weights_served(time.time(), time.monotonic())
        return True

    async def _give(self, work: list[GivenWork], avoid: Collection[str] = ()) -> None:
        await self.services.give(work, self._rounds.budget, avoid)
        resting = {draw[0] for one in work for draw in one.draws} & set(self._rounds.resting_samples())
        if resting:
            await self.services.tell(*parking(sorted(resting)))
