"""Parts of a sample as vLLM gives them: tokens, the policy version of each, and times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streamrl.rollouts.seeds import derive_seed
from streamrl.rollouts.types import ByteArray, PartialSample

UNNAMED_VERSION = -1
"""Number of the weights that were loaded at start; no sample of a run is drawn from them."""


def join(kept: PartialSample, more: PartialSample) -> PartialSample:
    """Join one sample's tokens from two instances, in order; times but `t_last_part` are those of the first."""

    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(kept, name), getattr(more, name)])

    return replace(
        kept,
        completion_tokens=both("completion_tokens"),
        logprobs=both("logprobs"),
        token_versions=both("token_versions"),
        experts=_experts(kept, more),
        t_last_part=more.t_dispatched,
    )


def _experts(kept: PartialSample, more: PartialSample) -> ByteArray | None:
    """Return the rows of both; those of a prompt come with the first part that has tokens."""
    if kept.experts is None or not len(kept.completion_tokens):
        return more.experts if not len(kept.completion_tokens) else None
    return None if more.experts is None else np.concatenate([kept.experts, more.experts])


def seed_after(seed: int, produced: int) -> int:
    """Return the seed for the rest of a sample; with the original seed, the rest would repeat the same noise."""
    return derive_seed(seed, str(produced))


def token_versions(spans: Any, length: int) -> np.ndarray:
    """Convert vLLM's spans (version, start, end) to one version number per token, shape [length]."""
    return versions_from([(span.version, span.start) for span in spans or []], length)


def versions_from(starts: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """Convert pairs (version, its first token) to one version number per token, shape [length]."""
    versions = np.zeros(length, dtype=np.int32)
    for version, start in starts:
        # vLLM calls the weights "default" until they are numbered
        versions[start:] = int(version) if version.isdecimal() else UNNAMED_VERSION
    return versions


def first_token(t_dispatched: float, started: float, first: float) -> float:
    """Return the unix seconds of a request's first token; `started` and `first` are monotonic (0: no token yet)."""
    return t_dispatched + max(0.0, first - started) if first else t_dispatched
