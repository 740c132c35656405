"""The way of a sample through the controller, from its arrival to its group being complete.

arrival -> checked -> ledger -> acknowledged -> reward asked for -> reward -> ledger -> group complete
    ^        \\-> refused, generated again                 (an agent has said its own)
    |
kept over a resume (`take_kept`)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from streamrl.controller.arrivals import Arrival, read_arrivals
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import group_of
from streamrl.controller.kept_samples import KeptSample
from streamrl.controller.live_rounds import NoRounds
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.reward_client import Rewarders, SampleReward
from streamrl.controller.site_claims import SiteClaims
from streamrl.controller.site_limits import past_part
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import SiteTrust, empty_sample
from streamrl.controller.step_times import StepTimes
from streamrl.controller.void_watch import VoidWatch
from streamrl.errors import RunFailed
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.controller_site import GivenBack
from streamrl.protocol.samples import sample_to_wire
from streamrl.rollouts.ledger import Ledger, pack_content
from streamrl.rollouts.length_audit import LengthAudit
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.rollouts.void import Void
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery
from streamrl.transport.refusals import RefusalCause, Refusals

log = logging.getLogger(__name__)

MOST_PARTS = 1000
"""Most parts of a sample that are recorded, whatever its site says."""


@dataclass(frozen=True)
class SampleIntake:
    """The taker of samples and of their rewards."""

    claims: SiteClaims
    trust: SiteTrust
    refusals: Refusals
    services: Services
    rewarders: Rewarders
    evaluator: Evaluator
    pool: GroupPool
    rounds: NoRounds
    ledger: Ledger
    audit: LengthAudit
    times: StepTimes
    scaling: Scaling
    waits: WaitRegistry
    void_watch: VoidWatch
    complete: Callable[[Group], None]
    """Called with each group that has all of its rewards."""

    async def commit_samples(self, deliveries: Sequence[Delivery], newest: int) -> None:
        """Commit finished samples, acknowledge them and request their rewards; have unusable ones generated again.

        What sites send that are not used any more is acknowledged unread.

        Args:
            deliveries: messages of samples.
            newest: the newest version that exists.

        Raises:
            RunFailed: as `commit_rewards`.
        """
        usable = await self._refuse_unusable(deliveries, newest)
        contents = [(one.sample, one.content) for one in usable if not self.evaluator.awaits(one.sample.sample_id)]
        new = self.ledger.finish(contents) if contents else set()
        for delivery in deliveries:
            delivery.ack()
        now = time.time()
        rewards: list[SampleReward] = []
        for peer, sample in ((one.peer, one.sample) for one in usable):
            if self.evaluator.generates(sample.sample_id):
                group = self.evaluator.received(sample)
            elif sample.sample_id in new:
                group = self._received(sample, now)
            else:
                log.debug("ignoring sample %s, which has arrived before", sample.sample_id)
                continue
            self.trust.usable(peer, sample.sample_id)
            self.services.finished(sample.sample_id, group.group_id, sample.output_length)
            self.scaling.sample_came(sample, now)
            self._generated(sample.instance, sample.last_began, sample.t_finished, now)
            rewards += self._request_reward(group, sample)
        if usable:
            self.waits.end("samples")
        self._record(rewards)

    async def _refuse_unusable(self, deliveries: Sequence[Delivery], newest: int) -> list[Arrival]:
        """Refuse the samples that cannot be used, and return the others; arguments as for `commit_samples`."""
        used = []
        for delivery in deliveries:
            if delivery.peer in self.services.excluded:
                self.refusals.count("not its own", delivery.peer, "samples: its site is not used any more")
            else:
                used.append(delivery)
        read, refused = read_arrivals(used, self.claims.wrong_with_claim)
        # what is refused may become void, or another site's, so everything else is judged only then
        await self._refuse([(one.peer, one.sample_id, one.why) for one in refused])
        usable: list[Arrival] = []
        wrong: list[tuple[str, str | None, str]] = []
        for arrival in read:
            why = self.claims.wrong_with_sample(arrival.peer, arrival.sample, newest)
            if why is None:
                usable.append(arrival)
            else:
                wrong.append((arrival.peer, arrival.sample.sample_id, why))
        await self._refuse(wrong)
        return [one for one in usable if one.peer not in self.services.excluded]  # a refusal may have excluded its site

    def given_back(self, peer: str, part: GivenBack) -> None:
        """Record for how long an instance had a sample that it has returned; those no longer owed are ignored."""
        if not self.claims.owes(peer, part.sample_id):
            return
        evaluated = self.evaluator.generates(part.sample_id)
        group = self.evaluator.group_of(part.sample_id) if evaluated else self.pool.groups[group_of(part.sample_id)]
        parts = group.given_back.setdefault(part.sample_id, [])
        if len(parts) < MOST_PARTS:
            parts.append((part.instance, part.started, part.ended))
            self._generated(*parts[-1], time.time())

    def _generated(self, instance: str, start: float, end: float, now: float) -> None:
        """Record when an instance had a sample, as far as that has passed: the rest would count in later steps."""
        if (part := past_part(start, end, now)) is not None:
            self.times.generating.append((instance, *part))

    def take_kept(self, kept: Sequence[KeptSample]) -> None:
        """Take samples that were kept over a resume, of groups that have just been issued, as if they had arrived.

        Raises:
            RunFailed: as `commit_rewards`.
        """
        self.ledger.finish(kept)
        now = time.time()
        rewards: list[SampleReward] = []
        for sample, _ in kept:
            group = self._received(sample, now)
            group.kept += 1
            rewards += self._request_reward(group, sample)
        self._record(rewards)

    def _request_reward(self, group: Group, sample: Sample) -> list[SampleReward]:
        """Request a sample's reward; return that of an episode, which its agent has said."""
        if (trajectory := sample.trajectory) is None:
            self.rewarders.ask(group, sample.sample_id, sample.text)
            return []
        return [SampleReward(sample.sample_id, trajectory.reward, trajectory.void, trajectory.void_traceback)]

    async def _refuse(self, wrong: Sequence[tuple[str, str | None, str]]) -> None:
        """Refuse samples, as (service, sample, why); those that the service's site owes are generated again.

        A batch of which not even the samples are known comes from no service that works: its site is not used any more.
        """
        for peer, sample_id, why in wrong:
            owed = sample_id is not None and self.claims.owes(peer, sample_id)
            cause: RefusalCause = "unreadable" if owed or sample_id is None else "not its own"
            self.refusals.count(cause, peer, f"sample {sample_id!r:.99} {why}")
            if owed and sample_id is not None:
                if (void := await self.trust.give_again(peer, sample_id, why)) is not None:
                    self._give_up(peer, sample_id, void)
            elif sample_id is None:
                await self.trust.exclude(peer, f"a batch of samples cannot be read: {why:.200}")

    def _give_up(self, peer: str, sample_id: str, void: Void) -> None:
        """Let a sample that no site can generate be void; `peer` is the service that tried last.

        Raises:
            RunFailed: as `commit_rewards`.
        """
        now, evaluated = time.time(), self.evaluator.generates(sample_id)
        group = self.evaluator.group_of(sample_id) if evaluated else self.pool.groups[group_of(sample_id)]
        sample = empty_sample(sample_id, group, self.services.site_of(peer), void, now)
        if evaluated:
            self.evaluator.received(sample)
        else:
            body, arrays = sample_to_wire(sample)
            self.ledger.finish([(sample, pack_content(msgspec.to_builtins(body), arrays))])
            self._received(sample, now)
        self.services.finished(sample_id, group.group_id, 0)
        self._record([SampleReward(sample_id, None, void)])

    def _received(self, sample: Sample, now: float) -> Group:
        """Record a finished sample that will be trained on; return its group."""
        group = self.pool.finish(sample, now)
        if not self.rounds.active:  # some tokens may be older, from before a resume
            group.issue_version = int(sample.sampled_versions.min(initial=group.issue_version))
        self.audit.finished(sample.sample_id, group.group_id, sample.output_length)
        self.rounds.finished(group.group_id)
        return group

    def commit_rewards(self, deliveries: Sequence[Delivery]) -> None:
        """Record the answers of the rewards processes.

        Raises:
            RunFailed: too many rewards of samples to train on are void.
        """
        rewards = []
        for delivery in deliveries:
            answer: ScoreAnswer = delivery.body
            if self.rewarders.answered(delivery.peer, answer.sample_id):
                rewards.append(SampleReward(answer.sample_id, answer.reward, answer.void, answer.traceback))
            else:
                self.refusals.count("not its own", delivery.peer, f"the reward of sample {answer.sample_id!r:.99}")
        try:
            self._record(rewards)
        finally:
            for delivery in deliveries:
                delivery.ack()

    def _record(self, rewards: Sequence[SampleReward]) -> None:
        """Record rewards, also void ones, in one transaction.

        Raises:
            RunFailed: as `commit_rewards`.
        """
        now = time.time()
        scored: list[Scored] = []
        problems = []
        for one in rewards:
            if self.evaluator.awaits(one.sample_id):
                self.evaluator.scored(one.sample_id, one.reward, now)  # its row counts void ones
                self.waits.end("rewards")
            elif one.sample_id in self.pool.received:
                member, group = self.pool.score(one.sample_id, one.reward, one.void)
                scored.append(member)
                if not group.kept:  # a kept sample ended before the resume
                    self.times.rewarding.append((member.sample.t_finished, now))
                problems.append(self.void_watch.record(group.task, group.group_id, one.void, one.traceback))
                if group.complete:
                    self.complete(group)
            else:
                log.debug("ignoring the reward of sample %s, which is not awaited", one.sample_id)
        if scored:
            self.ledger.score(scored)
            self.waits.end("rewards")
        for problem in filter(None, problems):
            raise RunFailed(problem)
