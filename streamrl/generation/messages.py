"""How requests and finished samples look on the wire: (body, arrays) and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.transport.wire import Arrays

_SAMPLE_ARRAYS = ("completion_tokens", "logprobs", "token_versions")


def request_to_wire(request: SampleRequest) -> tuple[dict[str, Any], Arrays]:
    """One request."""
    body = {key: value for key, value in request.__dict__.items() if key != "prompt_tokens"}
    return body, {"prompt_tokens": request.prompt_tokens}


def request_from_wire(body: dict[str, Any], arrays: Arrays) -> SampleRequest:
    """One request; the body may hold more keys than a request has."""
    keys = SampleRequest.__dataclass_fields__.keys() - {"prompt_tokens"}
    return SampleRequest(prompt_tokens=arrays["prompt_tokens"], **{key: body[key] for key in keys})


def sample_to_wire(sample: Sample) -> tuple[dict[str, Any], Arrays]:
    """One finished sample."""
    body = {key: value for key, value in sample.__dict__.items() if key not in _SAMPLE_ARRAYS}
    return body, {name: getattr(sample, name) for name in _SAMPLE_ARRAYS}


def sample_from_wire(body: dict[str, Any], arrays: Arrays) -> Sample:
    """One finished sample.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    return Sample(**(body | {name: np.asarray(arrays[name]) for name in _SAMPLE_ARRAYS}))
