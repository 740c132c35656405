"""Conversion of groups, requests and samples to wire form, (body or message, arrays), and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.protocol.controller_site import Generate, IssuedEpisode, IssuedForecast, IssuedGroup
from streamrl.protocol.site_instance import FinishedSample, GenerateSample, KeptTokens, Progress, ReleasedSample
from streamrl.rollouts.types import Group, PartialSample, Sample, SampleRequest
from streamrl.transport.wire import Arrays, MalformedMessage

UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, MalformedMessage)
"""What is raised for samples, or parts of them, whose fields and arrays do not fit together."""
TOKEN_ARRAYS = {"completion_tokens": np.dtype("<i4"), "logprobs": np.dtype("<f4"), "token_versions": np.dtype("<i4")}
"""Name and type of a sample's arrays, each of shape [C]."""
EXPERTS = "experts"
"""A sample's experts, uint8 [rows, row bytes], and those of several, one sample's after the other."""
_EXPERT_ROWS = "expert_rows"
"""Number of rows of experts of each part, int64, -1 of one without; left out, as the rows, where no part has any."""
S = TypeVar("S", Sample, PartialSample)
GeneratedTokens = FinishedSample | ReleasedSample | Progress
"""A message with tokens that an instance has produced."""
_KEPT = "kept."
"""Prefix of the arrays with the tokens that a request has already produced."""


def issued_group(group: Group, samples: Sequence[tuple[str, int, float | None]]) -> IssuedGroup:
    """Return a group as `Generate` has it; `samples` as for `groups_to_wire`."""
    return IssuedGroup(
        group.group_id,
        list(samples),
        IssuedForecast(group.forecast.lengths, group.forecast.tail) if group.forecast else None,
        IssuedEpisode(group.task, group.reward_input) if group.agent else None,
        max(0, group.oldest),
    )


def groups_to_wire(
    groups: Sequence[Group],
    samples: Sequence[Sequence[tuple[str, int, float | None]]],
    t_queued: float,
    budget: int | None = None,
    train_tokens_s: float | None = None,
    newest: int = 0,
    more: bool = False,
) -> tuple[Generate, Arrays]:
    """Convert groups that are issued together, so that they can be dispatched together.

    `samples` has (sample id, seed, temperature or None for the run's) of each group's completions; the other arguments
    are fields of `Generate`.
    """
    described = [issued_group(group, some) for group, some in zip(groups, samples, strict=True)]
    prompts = [group.prompt_tokens for group in groups]
    arrays = {
        "prompt_tokens": np.concatenate(prompts) if prompts else np.empty(0, np.int32),
        "prompt_lengths": np.asarray([len(prompt) for prompt in prompts], dtype=np.int32),
    }
    return Generate(t_queued, budget, described, train_tokens_s, newest, more), arrays


class IncomingGroup(NamedTuple):
    """A group as a service gets it."""

    requests: list[SampleRequest]
    forecast: Forecast | None
    episode: IssuedEpisode | None
    oldest: int = 0


def groups_from_wire(message: Generate, arrays: Arrays) -> list[IncomingGroup]:
    """Return the requests of each group's completions, or episodes, with its forecast.

    Raises:
        ValueError, KeyError, TypeError: the message or its arrays are malformed.
    """
    lengths, tokens = arrays["prompt_lengths"], arrays["prompt_tokens"]
    if not lengths.ndim == tokens.ndim == 1 or not lengths.dtype == tokens.dtype == np.int32:
        raise ValueError("prompts are not of int32 tokens [n] and lengths [groups]")
    if (lengths < 0).any() or lengths.sum(dtype=np.int64) != len(tokens):
        raise ValueError(f"lengths of prompts do not add up to {len(tokens)} tokens")
    prompts = np.split(tokens, np.cumsum(lengths)[:-1])
    found = []
    for group, prompt in zip(message.groups, prompts, strict=True):
        requests = [
            SampleRequest(sample_id, group.group_id, prompt, seed, message.t_queued, temperature, message.budget)
            for sample_id, seed, temperature in group.samples
        ]
        issued = group.forecast
        forecast = None if issued is None else Forecast(issued.lengths, issued.tail)
        found.append(IncomingGroup(requests, forecast, group.episode, group.oldest))
    return found


def request_to_wire(request: SampleRequest, route: str) -> tuple[GenerateSample, Arrays]:
    """Convert a request, with the tokens that it has already produced and the route that the policy counts it under."""
    arrays = {"prompt_tokens": request.prompt_tokens}
    kept = None
    if request.kept is not None:
        fields, kept_arrays = sample_to_wire(request.kept)
        kept = KeptTokens(**fields)
        arrays |= {_KEPT + name: array for name, array in kept_arrays.items()}
    values = {key: value for key, value in request.__dict__.items() if key not in ("prompt_tokens", "kept")}
    return GenerateSample(**values, route=route, kept=kept), arrays


def request_from_wire(message: GenerateSample, arrays: Arrays) -> SampleRequest:
    """Return the request of a message.

    Raises:
        ValueError, KeyError, TypeError: its arrays are not those of a request.
    """
    values = msgspec.structs.asdict(message)
    del values["route"]
    if message.kept is not None:
        own = {name.removeprefix(_KEPT): array for name, array in arrays.items() if name.startswith(_KEPT)}
        values["kept"] = sample_from_wire(PartialSample, msgspec.structs.asdict(message.kept), own)
    prompt = arrays["prompt_tokens"]
    if prompt.ndim != 1:
        raise ValueError(f"a prompt is tokens [P], not {prompt.shape}")
    return SampleRequest(prompt_tokens=prompt, **values)


def token_count(arrays: Arrays) -> int:
    """Return the number of a sample's tokens.

    Raises:
        ValueError: its arrays are not those of a sample.
    """
    if arrays.keys() - {EXPERTS} != TOKEN_ARRAYS.keys():
        raise ValueError(f"a sample has the arrays {list(TOKEN_ARRAYS)}, not {list(arrays)}")
    if (experts := arrays.get(EXPERTS)) is not None and (experts.dtype != np.uint8 or experts.ndim != 2):
        raise ValueError(f"experts are uint8 [rows, row bytes], not {experts.dtype} {experts.shape}")
    lengths = {arrays[name].shape for name in TOKEN_ARRAYS}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise ValueError(f"a sample's arrays have one length; these have the shapes {lengths}")
    for name, dtype in TOKEN_ARRAYS.items():
        if arrays[name].dtype != dtype:
            raise ValueError(f"array {name!r} is of type {dtype}, not {arrays[name].dtype}")
    return len(arrays["completion_tokens"])


def sample_to_wire(sample: Sample | PartialSample) -> tuple[dict[str, Any], Arrays]:
    """Convert a sample, finished or not."""
    body = {key: value for key, value in sample.__dict__.items() if key not in (*TOKEN_ARRAYS, EXPERTS)}
    arrays = {name: getattr(sample, name) for name in TOKEN_ARRAYS}
    return body, arrays if sample.experts is None else arrays | {EXPERTS: sample.experts}


def sample_from_wire(record: type[S], body: dict[str, Any], arrays: Arrays) -> S:
    """Return a sample, finished or not, from its wire form.

    Args:
        record: what to return.
        body: its fields, of the right types.
        arrays: its arrays.

    Raises:
        ValueError, KeyError, TypeError: it is no such sample.
    """
    token_count(arrays)
    experts = arrays.get(EXPERTS)
    return record(**(body | {name: np.asarray(arrays[name]) for name in TOKEN_ARRAYS}), experts=experts)


def progress_to_wire(parts: Sequence[tuple[int, PartialSample]]) -> tuple[Progress, Arrays]:
    """Convert the new tokens of running requests: (index of the first token, tokens) of each."""
    described = [
        (part.sample_id, start, len(part.completion_tokens), part.t_dispatched, part.t_first_token)
        for start, part in parts
    ]
    arrays = {name: np.concatenate([getattr(part, name) for _, part in parts]) for name in TOKEN_ARRAYS}
    if rows := [part.experts for _, part in parts if part.experts is not None]:
        counts = [-1 if part.experts is None else len(part.experts) for _, part in parts]
        arrays |= {EXPERTS: np.concatenate(rows), _EXPERT_ROWS: np.asarray(counts, dtype=np.int64)}
    return Progress(parts=described), arrays


def progress_from_wire(message: Progress, arrays: Arrays) -> list[tuple[int, PartialSample]]:
    """Invert `progress_to_wire`.

    Raises:
        ValueError, KeyError, TypeError: the message and its arrays do not fit together.
    """
    counts = [count for _, _, count, _, _ in message.parts]
    tokens = token_count({name: array for name, array in arrays.items() if name != _EXPERT_ROWS})
    if min(counts, default=0) < 0 or sum(counts) != tokens or any(start < 0 for _, start, *_ in message.parts):
        raise ValueError(f"{len(counts)} parts begin before their requests, or do not add up to {tokens} tokens")
    ends = np.cumsum(counts, dtype=np.int64)
    columns = [np.split(np.asarray(arrays[name]), ends[:-1]) for name in TOKEN_ARRAYS]
    experts: list[np.ndarray | None] = [None] * len(message.parts)
    if EXPERTS in arrays:
        numbers = arrays[_EXPERT_ROWS]
        known = np.maximum(numbers, 0)
        if numbers.shape != (len(message.parts),) or numbers.min(initial=0) < -1 or known.sum() != len(arrays[EXPERTS]):
            raise ValueError("rows of experts are not those of the parts")
        rows = np.split(arrays[EXPERTS], np.cumsum(known)[:-1])
        experts = [None if number < 0 else some for number, some in zip(numbers, rows, strict=True)]
    found = []
    for n, (sample_id, start, _, t_dispatched, t_first_token) in enumerate(message.parts):
        ids, logprobs, versions = (column[n] for column in columns)
        times = t_dispatched, t_first_token
        found.append((start, PartialSample(sample_id, ids, logprobs, versions, *times, experts[n])))
    return found


def parts_from_wire(message: GeneratedTokens, arrays: Arrays) -> list[tuple[int, PartialSample]]:
    """Return the parts of requests that an instance reports or releases: (index of the first token, tokens) of each.

    A finished sample is only checked, and has none.

    Raises:
        UNREADABLE: the message and its arrays do not fit together.
    """
    match message:
        case Progress():
            return progress_from_wire(message, arrays)
        case ReleasedSample():
            return [(0, sample_from_wire(PartialSample, msgspec.structs.asdict(message), arrays))]
        case FinishedSample():
            token_count(arrays)
            return []


def fleet_to_wire(fleet: Sequence[SimulatedInstance]) -> list[dict[str, Any]]:
    """Convert a site's instances, with their step times."""
    return [instance.__dict__ | {"curve": instance.curve.to_json()} for instance in fleet]


def fleet_from_wire(values: Sequence[dict[str, Any]]) -> list[SimulatedInstance]:
    """Return a site's instances, with their step times, from their wire form.

    Raises:
        ValueError, KeyError, TypeError: these are not instances.
    """
    return [SimulatedInstance(**(value | {"curve": StepCurve.from_json(value["curve"])})) for value in values]
