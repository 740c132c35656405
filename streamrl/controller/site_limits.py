"""What a site may speak of: the samples that it was given, its own instances, and versions that exist.

`protocol/speakers.py` says which kinds of messages a role may send; this says what they may be about. Content from
another process never ends the run: what is said of something that the sender does not hold is refused, and counted by
cause and sender (`streamrl status`). Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.generation import EightBits
from streamrl.controller.group_source import group_of
from streamrl.controller.weight_canary import HISTORY
from streamrl.machine.router_shape import RouterShape
from streamrl.protocol.controller_site import CanaryMeasured, GivenBack, InstanceState, WeightsReady
from streamrl.protocol.instance_reports import MOST_SLOTS, can_work
from streamrl.protocol.samples import fleet_from_wire
from streamrl.rollouts.canary import MOST_TOKENS
from streamrl.rollouts.plain_text import MOST_TEXT_BYTES, utf8_bytes
from streamrl.rollouts.trajectory import (
    MOST_METRICS,
    MOST_NAME,
    MOST_ROWS,
    MOST_STEPS,
    MOST_TOLD,
    Trajectory,
)
from streamrl.rollouts.types import Sample
from streamrl.transport.wire import MAX_NAME

LATEST = 1e11
"""Latest time in unix seconds, some thousand years away; times beyond it are no times."""
LOWEST_LOGPROB, HIGHEST_LOGPROB = -1e4, 1e-2
"""Log-probabilities between which a sampled token's lies. No sampler draws a token near the lower one; rounding can
bring a certain token above 0."""
CHARACTERS_PER_TOKEN = 512
"""Most characters of a token."""
MOST_BYTES = 2**60
"""Most bytes of a version of weights."""
MOST_DIGITS = 9
"""Most digits of an instance's number."""
MOST_DRAFTED = 2**31 - 1
"""Most drafted tokens of a sample that rollouts can record."""
COMPUTE_TYPES = frozenset({"float32", "bfloat16", "float16", *get_args(EightBits)})
"""What an instance may compute in."""


AHEAD_S = 86_400.0
"""Seconds that a time may lie after the controller's own: a site's clock may be wrong, and not compared yet."""
LONGEST_S = 1e6
"""Longest transfer or load of weights, and longest time that an instance has a sample, in seconds."""


def is_unix_time(value: float) -> bool:
    """Return whether a number can be a time in unix seconds."""
    return 0 <= value < LATEST


def past_spans(spans: Mapping[str, tuple[float, float]], now: float) -> dict[str, tuple[float, float]]:
    """Return those of some spans (start, end) that can have been; what a site says of others is not recorded."""
    return {name: span for name, span in spans.items() if is_past_span(*span, now)}


def is_past_span(start: float, end: float, now: float) -> bool:
    """Return whether something can have lasted from one time to another; all are unix seconds, `now` the present."""
    return 0 <= start <= end <= min(now + AHEAD_S, start + LONGEST_S)


def past_part(start: float, end: float, now: float) -> tuple[float, float] | None:
    """Return the part of a span that lies before `now`; None if there is none, or it is longer than anything lasts.

    All are unix seconds. A site's clock may have been set forward during the span.
    """
    end = min(end, now)
    return (start, end) if start <= end <= start + LONGEST_S else None


@dataclass(frozen=True)
class SampleLimits:
    """Limits that every sample of the run keeps."""

    most_tokens: int
    """Tokens of a completion."""
    most_context: int
    """Tokens of a row of an episode."""
    vocabulary: int | None
    """Number of token ids; None: the model's configuration does not say."""
    routers: RouterShape | None = None
    """Routers whose experts every sample brings; None: no replay, and none does."""

    def wrong_with_sample(self, sample: Sample, newest: int, prompt_tokens: int = 0) -> str | None:
        """Return which limit a sample breaks, or None.

        Args:
            sample: the sample.
            newest: the newest version that exists.
            prompt_tokens: tokens of its prompt; what it is for an episode does not matter.
        """
        arrays = sample.completion_tokens, sample.logprobs, sample.token_versions
        times = [sample.t_queued, sample.t_dispatched, sample.t_first_token, sample.t_finished]
        times += [sample.t_last_part] if sample.t_last_part is not None else []
        tokens, _, versions = arrays
        if [array.dtype for array in arrays] != [np.int32, np.float32, np.int32]:
            return f"arrays of types {', '.join(str(array.dtype) for array in arrays)}"
        if group_of(sample.sample_id) != sample.group_id:
            return f"is no sample of group {sample.group_id!r:.99}"
        if sample.finish_reason not in ("stop", "length") or not all(map(is_unix_time, times)):
            return "has an unknown end, or a time that is none"
        if (wrong := self._wrong_with_length(sample) or _wrong_with_trajectory(sample)) is not None:
            return wrong
        if not 0 <= sample.accepted_tokens <= sample.drafted_tokens <= MOST_DRAFTED:
            return f"says that {sample.accepted_tokens} of {sample.drafted_tokens} drafted tokens were accepted"
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= (self.vocabulary or 2**31)):
            return "has tokens outside the vocabulary"
        versions = versions if sample.trajectory is None else sample.sampled_versions
        if len(versions) and (versions.min() < 0 or versions.max() > newest):
            return f"has tokens of versions outside 0..{newest}"
        most, size = CHARACTERS_PER_TOKEN * (1 + self.most_tokens), utf8_bytes(sample.text)
        if len(sample.text) > most or size > MOST_TEXT_BYTES:
            return f"has {len(sample.text)} characters, {size} bytes, for {len(tokens)} tokens"
        if len(sample.route) > MAX_NAME:
            return f"has a route of {len(sample.route)} characters"
        return self._wrong_with_experts(sample, prompt_tokens)

    def _wrong_with_experts(self, sample: Sample, prompt_tokens: int) -> str | None:
        """Return what makes a sample's experts unusable, or None; without replay it has none."""
        if self.routers is None:
            return None if sample.experts is None else "has experts, none were ordered"
        tokens = len(sample.completion_tokens)
        return self.routers.wrong_with(sample.experts, prompt_tokens + tokens - 1 if tokens else 0)

    def _wrong_with_length(self, sample: Sample) -> str | None:
        """Return why a sample, or a row of an episode, is longer than it can be, or None."""
        if sample.trajectory is None:
            length, most = len(sample.completion_tokens), self.most_tokens
        else:
            length = max((row.tokens for row in sample.trajectory.rows), default=0)
            most = self.most_context
        return f"has {length} tokens, at most {most} were ordered" if length > most else None


@dataclass(frozen=True)
class SiteOwn:
    """What belongs to a site."""

    site: str
    pools: Mapping[str, int]
    """Most instances of each pool of the site."""
    limits: SampleLimits
    remote: bool = False
    """Whether it is another site than the one that trains."""

    def is_instance(self, name: str, pool: str) -> bool:
        """Return whether an instance of this name can be in a pool of the site."""
        number = name.removeprefix(f"{self.site}-{pool}-")
        if pool not in self.pools or number == name or not number.isdecimal() or len(number) > MOST_DIGITS:
            return False
        return str(int(number)) == number and int(number) < self.pools[pool]

    def has_instance(self, name: str) -> bool:
        """Return whether an instance of this name can be in any pool of the site."""
        return any(self.is_instance(name, pool) for pool in self.pools)

    def wrong_with_sample(self, sample: Sample, newest: int, prompt_tokens: int = 0) -> str | None:
        """Return what makes a sample of this site unusable, or None.

        Args:
            sample: the sample.
            newest: the newest version that exists.
            prompt_tokens: tokens of its prompt; what it is for an episode does not matter.
        """
        named = bool(sample.instance or sample.pool or sample.trajectory is None or sample.trajectory.rows)
        if sample.site != self.site or (named and not self.is_instance(sample.instance, sample.pool)):
            return f"names {sample.instance!r:.99} in pool {sample.pool!r:.99} of site {sample.site!r:.99}"
        wrong = self.limits.wrong_with_sample(sample, newest, prompt_tokens)
        return wrong or self._wrong_with_logprobs(sample.logprobs)

    def _wrong_with_logprobs(self, logprobs: np.ndarray) -> str | None:
        """Return what makes log-probabilities unusable, or None.

        Those of the trainer's own site are left to the trainer, which refuses the step and finds out where they begin.
        """
        if self.remote and not ((logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)).all():  # NaN is neither
            return f"has log-probabilities that are not within {LOWEST_LOGPROB:g}..0"
        return None

    def wrong_with_fleet(self, fleet: object, states: Mapping[str, InstanceState] | None) -> str | None:
        """Return why a report on the site's instances cannot be used, or None.

        Args:
            fleet: as in `FleetChanged`.
            states: state of every instance, those of `fleet` included; None: a hello, which has none.
        """
        try:
            most = sum(self.pools.values())
            if not isinstance(fleet, list) or len(fleet) > most:
                return f"is no list of at most {most} instances"
            present = fleet_from_wire(fleet)
            if not all(map(_can_generate, present)):
                return "an instance without slots, or with step times that cannot be"
            if states is not None and (unknown := {one.name for one in present} - states.keys()):
                return f"names {min(unknown)!r:.99} without its state"
            states = states or {}
            lives = {one.life for one in states.values()}
            if len({one.name for one in present}) < len(present) or any(len(life) > MAX_NAME for life in lives):
                return "an instance twice, or in no stage of life"
            names = [(one.name, one.pool) for one in present] + [(name, one.pool) for name, one in states.items()]
            foreign = [name for name, pool in names if not self.is_instance(name, pool)]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            return f"cannot be read: {error!r:.200}"
        return f"names {foreign[0]!r:.99}, which is not of site {self.site}" if foreign else None

    def wrong_with_state(self, instances: Iterable[str], agents: Iterable[str] = ()) -> str | None:
        """Return why a heartbeat with the state of these instances and agents processes cannot be used, or None."""
        foreign = [name for name in instances if not self.has_instance(name)]
        foreign += [name for name in agents if name != f"agents-{self.site}"]
        return f"speaks for {foreign[0]!r:.99}, which is not of site {self.site}" if foreign else None

    def wrong_with_given_back(self, part: GivenBack, now: float) -> str | None:
        """Return why a report on a sample that an instance has returned cannot be used, or None.

        Args:
            part: the report.
            now: the present, in unix seconds.
        """
        if not self.has_instance(part.instance):
            return f"names {part.instance!r:.99}, which is not of site {self.site}"
        return None if is_past_span(part.started, part.ended, now) else "has times that are none"

    def wrong_with_ready(
        self, report: WeightsReady, ordered: int, newest: int, sites: Mapping[str, object]
    ) -> str | None:
        """Return why a report on loaded weights cannot be used, or None.

        Its times do not matter: a site's clock may have been set meanwhile, and the report comes only once. What they
        say is recorded if it can be (`past_spans`).

        Args:
            report: the report.
            ordered: the version in flight to the site, for which a newer one may come.
            newest: the newest version that exists.
            sites: all sites, by name.
        """
        if not 0 <= report.transfer_s <= LONGEST_S or not 0 <= report.bytes < MOST_BYTES:
            return "has a duration or bytes that are none"
        if not max(0, ordered) <= report.number <= newest:
            return f"is of version {report.number}, {ordered} was ordered and the newest is {newest}"
        if report.source is not None and report.source not in sites:
            return f"names the unknown site {report.source!r:.99}"
        foreign = [name for name in report.applied if not self.has_instance(name)]
        return f"names {foreign[0]!r:.99}, which is not of site {self.site}" if foreign else None

    def wrong_with_canary(self, canary: CanaryMeasured, logprobs: object, newest: int) -> str | None:
        """Return why an instance's canary cannot be used, or None."""
        if not isinstance(logprobs, np.ndarray) or logprobs.dtype != np.float32 or logprobs.ndim != 1:
            return "has no float32 log-probabilities"
        if len(logprobs) > MOST_TOKENS or canary.dtype not in COMPUTE_TYPES:
            return f"has {len(logprobs)} log-probabilities in {canary.dtype!r:.99}"
        if not max(0, newest - HISTORY) <= canary.number <= newest or not self.has_instance(canary.instance):
            return f"is of version {canary.number} on {canary.instance!r:.99}"
        return None


def _can_generate(one: SimulatedInstance) -> bool:
    """Return whether numbers are those of an instance: slots, and a curve of finite step times."""
    return isinstance(one.slots, int) and 0 < one.slots < MOST_SLOTS and can_work(one.curve)


def _wrong_with_trajectory(sample: Sample) -> str | None:
    """Return what makes unusable what an episode tells of itself, or None."""
    trajectory = sample.trajectory
    if trajectory is None:
        return None
    if len(trajectory.steps) > MOST_STEPS or len(trajectory.rows) > MOST_ROWS or trajectory.told_bytes > MOST_TOLD:
        return f"tells {len(trajectory.steps)} steps of {len(trajectory.rows)} rows in {trajectory.told_bytes} bytes"
    if wrong := _wrong_with_numbers(trajectory):
        return wrong
    if not all(is_unix_time(time) for step in trajectory.steps for time in (step.started, step.finished)):
        return "has a step at a time that is none"
    return None


def _wrong_with_numbers(trajectory: Trajectory) -> str | None:
    """Return which numbers of an episode are too many, or have too long names, or None."""
    longest = max(map(len, trajectory.metrics), default=0)
    if len(trajectory.metrics) > MOST_METRICS or longest > MOST_NAME:
        return f"has {len(trajectory.metrics)} numbers beside its reward, the longest name with {longest} characters"
    return None
