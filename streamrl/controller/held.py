"""What a site may speak of: the samples that it was given, its own instances, and versions that exist.

`protocol/speakers.py` says which kinds of messages a role may send; this says what they may be about. Content from
another process never ends the run: what is said of something that the sender does not hold is refused, and counted by
cause and sender (`streamrl status`). Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from streamrl.controller.group_source import group_of
from streamrl.protocol.controller_site import CanaryMeasured, FleetChanged, WeightsReady
from streamrl.protocol.samples import fleet_from_wire
from streamrl.rollouts.types import Sample


@dataclass(frozen=True)
class SampleLimits:
    """Limits that every sample of the run keeps."""

    most_tokens: int
    vocabulary: int | None
    """Number of token ids; None: the model's configuration does not say."""


@dataclass(frozen=True)
class SiteOwn:
    """What belongs to a site."""

    site: str
    pools: frozenset[str]
    limits: SampleLimits

    def is_instance(self, name: str, pool: str) -> bool:
        """Return whether an instance of this name can be in a pool of the site."""
        return pool in self.pools and name.startswith(f"{self.site}-{pool}-")

    def has_instance(self, name: str) -> bool:
        """Return whether an instance of this name can be in any pool of the site."""
        return any(self.is_instance(name, pool) for pool in self.pools)

    def wrong_with_sample(self, sample: Sample, newest: int) -> str | None:
        """Return what makes a sample of this site unusable, or None; `newest` is the newest version that exists."""
        arrays = sample.completion_tokens, sample.logprobs, sample.token_versions
        times = sample.t_queued, sample.t_dispatched, sample.t_first_token, sample.t_finished
        tokens, _, versions = arrays
        if [array.dtype for array in arrays] != [np.int32, np.float32, np.int32]:
            return f"arrays of types {', '.join(str(array.dtype) for array in arrays)}"
        if group_of(sample.sample_id) != sample.group_id:
            return f"is no sample of group {sample.group_id!r:.99}"
        if sample.site != self.site or not self.is_instance(sample.instance, sample.pool):
            return f"names {sample.instance!r:.99} in pool {sample.pool!r:.99} of site {sample.site!r:.99}"
        if sample.finish_reason not in ("stop", "length") or not all(map(math.isfinite, times)):
            return "has an unknown end, or a time that is not finite"
        if len(tokens) > self.limits.most_tokens:
            return f"has {len(tokens)} tokens, at most {self.limits.most_tokens} were ordered"
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= (self.limits.vocabulary or 2**31)):
            return "has tokens outside the vocabulary"
        if len(versions) and (versions.min() < 0 or versions.max() > newest):
            return f"has tokens of versions outside 0..{newest}"
        return None

    def wrong_with_fleet(self, report: FleetChanged) -> str | None:
        """Return why a report on the site's instances cannot be used, or None."""
        try:
            fleet = fleet_from_wire(report.fleet)
            names = [(one.name, one.pool) for one in fleet] + [
                (name, one.pool) for name, one in report.instances.items()
            ]
            numbers = [one.slots for one in fleet]
            if not all(isinstance(slots, int) and 0 < slots < 2**20 for slots in numbers):
                return "an instance without slots"
            foreign = [name for name, pool in names if not self.is_instance(name, pool)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"cannot be read: {error!r:.200}"
        return f"names {foreign[0]!r:.99}, which is not of site {self.site}" if foreign else None

    def wrong_with_ready(self, report: WeightsReady, newest: int, sites: Mapping[str, object]) -> str | None:
        """Return why a report on loaded weights cannot be used, or None."""
        spans = [time for span in report.applied.values() for time in span]
        if not all(map(math.isfinite, (report.transfer_s, report.started, report.fetched, *spans))) or report.bytes < 0:
            return "has times or bytes that are none"
        if not 0 <= report.number <= newest:
            return f"is of version {report.number}, the newest is {newest}"
        if report.source is not None and report.source not in sites:
            return f"names the unknown site {report.source!r:.99}"
        foreign = [name for name in report.applied if not self.has_instance(name)]
        return f"names {foreign[0]!r:.99}, which is not of site {self.site}" if foreign else None

    def wrong_with_canary(self, canary: CanaryMeasured, logprobs: object, newest: int) -> str | None:
        """Return why an instance's canary cannot be used, or None."""
        if not isinstance(logprobs, np.ndarray) or logprobs.dtype != np.float32 or logprobs.ndim != 1:
            return "has no float32 log-probabilities"
        if not 0 <= canary.number <= newest or not self.has_instance(canary.instance):
            return f"is of version {canary.number} on {canary.instance!r:.99}"
        return None
