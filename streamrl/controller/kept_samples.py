"""Samples that were finished before a run went back to a checkpoint, and need not be generated again.

The ledger keeps those whose tokens were all drawn from the checkpoint's weights or older ones (`Ledger.rewind`). They
are taken as the same prompt is issued again, unless they would be staler than the schedule allows. What is damaged, or
breaks a limit of the run's samples, is generated again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import NamedTuple

from streamrl.controller.arrivals import UNREADABLE, read_sample
from streamrl.controller.group_source import sample_ids
from streamrl.controller.site_limits import SampleLimits
from streamrl.rollouts.ledger import Ledger, unpack_content
from streamrl.rollouts.types import Group, Sample

log = logging.getLogger(__name__)


class KeptSample(NamedTuple):
    """A finished sample with the content that the ledger keeps of it."""

    sample: Sample
    content: bytes


def prompt_digest(group: Group) -> bytes:
    """Return a digest of all that a group's samples are generated from, besides the weights.

    These are the prompt's tokens, the run file's sampling and model, which may be edited before a resume, and of an
    agent what its task gives it.
    """
    given = group.settings
    given += json.dumps(group.reward_input, sort_keys=True, default=str) if group.agent else ""
    return hashlib.blake2b(group.prompt_tokens.tobytes() + given.encode(), digest_size=16).digest()


def issue_groups(ledger: Ledger, groups: Sequence[Group]) -> None:
    """Record the samples of new groups, which will be generated."""
    prompts = [(group, prompt_digest(group)) for group in groups]
    ledger.issue((sample_id, group.group_id, prompt) for group, prompt in prompts for sample_id in sample_ids(group))


def kept_samples(ledger: Ledger, group: Group, oldest: int, newest: int, limits: SampleLimits) -> list[KeptSample]:
    """Return the kept samples of a group that has just been issued.

    Args:
        ledger: the run's ledger.
        group: the group.
        oldest: oldest weight version that a token may be drawn from.
        newest: the newest version that exists.
        limits: limits of the run's samples.
    """
    found = []
    for sample_id, content in ledger.kept(sample_ids(group), prompt_digest(group)):
        try:
            sample = read_sample(*unpack_content(content))
        except UNREADABLE as error:  # of another version of this program
            log.warning("the kept sample %s cannot be read and is generated again: %r", sample_id, error)
            continue
        wrong = limits.wrong_with_sample(sample, newest, len(group.prompt_tokens))
        if sample.sample_id != sample_id or (sample.trajectory is not None) != group.agent:
            wrong = "is another sample"
        if wrong is not None:
            log.warning("the kept sample %s %s; it is generated again", sample_id, wrong)
            continue
        void = sample.trajectory is not None and sample.trajectory.void is not None
        if not void and sample.sampled_versions.min(initial=newest) >= oldest:  # a void episode gets another chance
            found.append(KeptSample(sample, content))
    return found
