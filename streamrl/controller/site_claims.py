"""What each service may speak of at this moment: what its site was given, awaits or has.

`site_limits.py` has the limits of what may be said of it. The hub has already refused kinds of messages that the
sender's role may not send (`protocol/speakers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.controller.evaluation_plan import PREFIX
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import group_of
from streamrl.controller.site_limits import SiteOwn
from streamrl.controller.site_services import Services
from streamrl.protocol.controller_site import (
    FROM_SERVICE,
    CanaryMeasured,
    FleetChanged,
    GivenBack,
    Parked,
    SiteAsleep,
    WeightsReady,
)
from streamrl.protocol.heartbeats import read_state
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.types import Sample
from streamrl.transport.endpoint import Delivery, Speaker
from streamrl.transport.wire import MalformedMessage


class SiteClaims:
    """The judge of what services say."""

    def __init__(
        self,
        own: Mapping[str, SiteOwn],
        services: Services,
        pool: GroupPool,
        evaluator: Evaluator,
        ledger: Ledger,
        sites: Mapping[str, object],
    ) -> None:
        """
        Args:
            own: what belongs to each service's site, by the service's name.
            services: the generation services.
            pool: groups of training.
            evaluator: groups of evaluations.
            ledger: the run's ledger.
            sites: all sites, by name.
        """
        self.own, self._services, self._sites = own, services, sites
        self._pool, self._evaluator, self._ledger = pool, evaluator, ledger

    def service_of(self, instance: str) -> str:
        """Return the service to whose site an instance belongs."""
        return next(name for name, own in self.own.items() if own.has_instance(instance))

    def wrong_with_first_fleet(self, name: str, fleet: object) -> str | None:
        """Return why the instances in a hello of a service cannot be used, or None."""
        return self.own[name].wrong_with_fleet(fleet, None) or (None if fleet else "is empty")

    def owes(self, peer: str, sample_id: str) -> bool:
        """Return whether a service's site owes a sample."""
        return self._awaits(sample_id) and self._services.holds(peer, sample_id, group_of(sample_id))

    def wrong_with_sample(self, peer: str, sample: Sample, newest: int) -> str | None:
        """Return why a sample is not taken: it is not its sender's, or makes no sense; None: it is taken, or known.

        Args:
            peer: the service that has sent it.
            sample: the sample.
            newest: the newest version that exists.
        """
        why = self.wrong_with_claim(peer, sample.sample_id, sample.trajectory is not None)
        if why is not None or not self.owes(peer, sample.sample_id):
            return why
        return self.own[peer].wrong_with_sample(sample, newest, self._prompt_tokens(sample))

    def wrong_with_claim(self, peer: str, sample_id: str, episode: bool) -> str | None:
        """Return why a sample is not to come from a service, whatever it is; None: it is, or it is known.

        Args:
            peer: the service that has sent it.
            sample_id: the sample.
            episode: whether it is an agent's episode.
        """
        if self.owes(peer, sample_id):
            if self._agent_leads(sample_id) != episode:
                return "is an episode, a completion was ordered" if episode else "is no episode of an agent"
            return None
        known = sample_id.startswith(PREFIX) or self._ledger.has(sample_id)
        if known and not self._awaits(sample_id):
            return None  # repeated by a process that has restarted
        return "is not to come from its site"

    def wrong_with(self, delivery: Delivery, newest: int, now: float) -> str | None:
        """Return why a message is about nothing that its sender's site holds, or None.

        Args:
            delivery: the message.
            newest: the newest version that exists.
            now: the present, in unix seconds.
        """
        peer = delivery.peer
        if peer not in self.own:
            return "from no service of the plan" if isinstance(delivery.body, FROM_SERVICE) else None
        own = self.own[peer]
        if peer in self._services.excluded:
            return "its site is not used any more"
        match delivery.body:
            case Parked(sample_id=sample_id):
                return None if self.owes(peer, sample_id) else f"sample {sample_id!r:.99}"
            case GivenBack() as part:
                return own.wrong_with_given_back(part, now)
            case WeightsReady() if not self._services.awaits_weights(peer):
                return "it was sent no weights"
            case WeightsReady() as ready:
                ordered = self._services.version_in_flight(peer)
                return own.wrong_with_ready(ready, ordered, newest, self._sites)
            case CanaryMeasured() as canary:
                return own.wrong_with_canary(canary, delivery.arrays.get("logprobs"), newest)
            case SiteAsleep():
                return None if self._services.awaits_sleep() else "nobody was told to sleep"
            case FleetChanged() as report:
                return own.wrong_with_fleet(report.fleet, report.instances)
        return None

    def _awaits(self, sample_id: str) -> bool:
        """Return whether generation owes a sample."""
        return self._evaluator.generates(sample_id) or sample_id in self._pool.unfinished([group_of(sample_id)])

    def _prompt_tokens(self, sample: Sample) -> int:
        """Return the length of the prompt of a sample that is owed; 0: its group is not known any more."""
        if self._evaluator.awaits(sample.sample_id):
            return len(self._evaluator.group_of(sample.sample_id).prompt_tokens)
        group = self._pool.groups.get(sample.group_id)
        return 0 if group is None else len(group.prompt_tokens)

    def _agent_leads(self, sample_id: str) -> bool:
        """Return whether a sample that is owed must be an agent's episode."""
        if self._evaluator.awaits(sample_id):
            return self._evaluator.group_of(sample_id).agent
        group = self._pool.groups.get(group_of(sample_id))
        return group is not None and group.agent


def read_heartbeat(own: Mapping[str, SiteOwn], speaker: Speaker, state: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of the state in a heartbeat; `own` as in `SiteClaims`.

    Raises:
        MalformedMessage: it does not fit, or speaks for processes that are not of the sender's site.
    """
    kept = read_state(speaker, state)
    site, others = own.get(speaker.name), (kept["instances"], kept["agents"])
    if (wrong := site.wrong_with_state(*others) if site else "has instances" if any(others) else None) is not None:
        raise MalformedMessage(f"state of {speaker.name} {wrong}")
    return kept
