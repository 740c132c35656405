"""How requests and samples look on the wire: (body, arrays) and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.rollouts.types import Group, PartialSample, Sample, SampleRequest
from streamrl.transport.wire import Arrays

_TOKEN_ARRAYS = ("completion_tokens", "logprobs", "token_versions")
_KEPT = "kept."
"""Prefix of the arrays of what a request has produced already."""


def groups_to_wire(
    groups: Sequence[Group],
    samples: Sequence[Sequence[tuple[str, int, float | None]]],
    t_queued: float,
    budget: int | None = None,
) -> tuple[dict[str, Any], Arrays]:
    """Groups that are issued together, so that they can be dispatched as a whole.

    Args:
        groups: any number.
        samples: (sample id, seed, temperature or None for the run's) of each group's completions.
        t_queued: unix seconds.
        budget: tokens after which a sample is parked; None: it runs to its end.
    """
    described = [
        {
            "group_id": group.group_id,
            "samples": some,
            "forecast": group.forecast and {"lengths": group.forecast.lengths, "tail": group.forecast.tail},
        }
        for group, some in zip(groups, samples, strict=True)
    ]
    prompts = [group.prompt_tokens for group in groups]
    arrays = {
        "prompt_tokens": np.concatenate(prompts) if prompts else np.empty(0, np.int32),
        "prompt_lengths": np.asarray([len(prompt) for prompt in prompts], dtype=np.int32),
    }
    return {"t_queued": t_queued, "budget": budget, "groups": described}, arrays


def groups_from_wire(body: dict[str, Any], arrays: Arrays) -> list[tuple[list[SampleRequest], Forecast | None]]:
    """For each group the requests of its completions, and its forecast.

    Raises:
        ValueError, KeyError, TypeError: it is no such message.
    """
    lengths, tokens = arrays["prompt_lengths"], arrays["prompt_tokens"]
    if not lengths.ndim == tokens.ndim == 1 or not lengths.dtype == tokens.dtype == np.int32:
        raise ValueError("prompts are not of int32 tokens [n] and lengths [groups]")
    if (lengths < 0).any() or lengths.sum(dtype=np.int64) != len(tokens):
        raise ValueError(f"lengths of prompts do not add up to {len(tokens)} tokens")
    prompts = np.split(tokens, np.cumsum(lengths)[:-1])
    found = []
    for group, prompt in zip(body["groups"], prompts, strict=True):
        requests = [
            SampleRequest(sample_id, group["group_id"], prompt, seed, body["t_queued"], temperature, body["budget"])
            for sample_id, seed, temperature in group["samples"]
        ]
        told = group["forecast"]
        found.append((requests, None if told is None else Forecast(tuple(told["lengths"]), tuple(told["tail"]))))
    return found


def request_to_wire(request: SampleRequest) -> tuple[dict[str, Any], Arrays]:
    """One request, with what it has produced already."""
    body = {key: value for key, value in request.__dict__.items() if key not in ("prompt_tokens", "kept")}
    arrays = {"prompt_tokens": request.prompt_tokens}
    if request.kept is not None:
        kept, kept_arrays = sample_to_wire(request.kept)
        body["kept"] = kept
        arrays |= {_KEPT + name: array for name, array in kept_arrays.items()}
    return body, arrays


def request_from_wire(body: dict[str, Any], arrays: Arrays) -> SampleRequest:
    """One request; the body may hold more keys than a request has.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    kept = None
    if body.get("kept") is not None:
        kept = partial_from_wire(body["kept"], {n.removeprefix(_KEPT): a for n, a in arrays.items() if _KEPT in n})
    keys = {field.name for field in fields(SampleRequest)} - {"prompt_tokens", "kept"}
    prompt = arrays["prompt_tokens"]
    if prompt.ndim != 1:
        raise ValueError(f"a prompt is tokens [P], not {prompt.shape}")
    return SampleRequest(prompt_tokens=prompt, kept=kept, **{key: body[key] for key in keys})


def partial_from_wire(body: dict[str, Any], arrays: Arrays) -> PartialSample:
    """What a request has produced so far.

    Raises:
        ValueError, KeyError, TypeError: it is not that.
    """
    return PartialSample(**(body | {name: np.asarray(arrays[name]) for name in _TOKEN_ARRAYS}))


def sample_to_wire(sample: Sample | PartialSample) -> tuple[dict[str, Any], Arrays]:
    """One sample, finished or not."""
    body = {key: value for key, value in sample.__dict__.items() if key not in _TOKEN_ARRAYS}
    return body, {name: getattr(sample, name) for name in _TOKEN_ARRAYS}


def sample_from_wire(body: dict[str, Any], arrays: Arrays) -> Sample:
    """One finished sample.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    return Sample(**(body | {name: np.asarray(arrays[name]) for name in _TOKEN_ARRAYS}))


def progress_to_wire(parts: Sequence[tuple[int, PartialSample]]) -> tuple[dict[str, Any], Arrays]:
    """What running requests have produced since they were last asked: (number of the first token, tokens) of each."""
    body = [
        [part.sample_id, start, len(part.completion_tokens), part.t_dispatched, part.t_first_token]
        for start, part in parts
    ]
    arrays = {name: np.concatenate([getattr(part, name) for _, part in parts]) for name in _TOKEN_ARRAYS}
    return {"parts": body}, arrays


def progress_from_wire(body: dict[str, Any], arrays: Arrays) -> list[tuple[int, PartialSample]]:
    """The opposite of `progress_to_wire`.

    Raises:
        ValueError, KeyError, TypeError: it is not that.
    """
    ends = np.cumsum([count for _, _, count, _, _ in body["parts"]], dtype=np.int64)
    columns = [np.split(np.asarray(arrays[name]), ends[:-1]) for name in _TOKEN_ARRAYS]
    found = []
    for n, (sample_id, start, _, t_dispatched, t_first_token) in enumerate(body["parts"]):
        tokens, logprobs, versions = (column[n] for column in columns)
        found.append((int(start), PartialSample(sample_id, tokens, logprobs, versions, t_dispatched, t_first_token)))
    return found


def fleet_to_wire(fleet: Sequence[SimulatedInstance]) -> list[dict[str, Any]]:
    """A site's instances with their step times."""
    return [instance.__dict__ | {"curve": instance.curve.to_json()} for instance in fleet]


def fleet_from_wire(values: Sequence[dict[str, Any]]) -> list[SimulatedInstance]:
    """A site's instances with their step times.

    Raises:
        ValueError, KeyError, TypeError: it is not that.
    """
    return [SimulatedInstance(**(value | {"curve": StepCurve.from_json(value["curve"])})) for value in values]
