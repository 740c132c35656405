"""The requests that run in an engine, and the work that it has done since its start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from streamrl.generation.instance.sample_experts import first_row
from streamrl.rollouts.types import SampleRequest


@dataclass(frozen=True)
class Worked:
    """The work that an engine has done since its start."""

    tokens: int = 0
    """Generated tokens."""
    request_s: float = 0.0
    """Running seconds, summed over all requests."""
    busy_s: float = 0.0
    """Seconds with at least one running request."""
    context: int = 0
    """Tokens of context, prompt and generated, of the requests that run now."""


@dataclass(frozen=True)
class RunningRequest:
    """What is known of a request while it runs."""

    t_dispatched: float
    """Its arrival, in unix seconds."""
    started: float
    """The same in monotonic seconds."""
    prompt: int
    """Tokens of its prompt."""
    first_row: int
    """Position of its first row of experts (`sample_experts.py`)."""


class RunningRequests:
    """The requests that run now, by the ids of their samples; it counts the work as they come and go."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._requests: dict[str, RunningRequest] = {}
        self.count = 0
        """Number of the requests that run."""
        self.busy_since: float | None = None
        """Unix seconds since which at least one request has been running; None: nothing runs."""
        self._ended_tokens = 0
        """Tokens generated here by requests that have ended."""
        self._worked = Worked()
        """Work up to `_counted`; its `tokens` and `context` are not used."""
        self._counted = clock()

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._requests

    def __getitem__(self, sample_id: str) -> RunningRequest:
        return self._requests[sample_id]

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the requests that run."""
        return frozenset(self._requests)

    @contextmanager
    def noted(self, request: SampleRequest, t_dispatched: float, started: float) -> Iterator[None]:
        """Note a request among those that run.

        Args:
            request: the request.
            t_dispatched: its arrival, in unix seconds.
            started: the same in monotonic seconds.
        """
        self._change(1)
        self.busy_since = self.busy_since or t_dispatched
        prompt = len(request.prompt_tokens)
        self._requests[request.sample_id] = RunningRequest(t_dispatched, started, prompt, first_row(request))
        try:
            yield
        finally:
            self._change(-1)
            del self._requests[request.sample_id]
            if self.count == 0:
                self.busy_since = None

    def ended(self, tokens: int) -> None:
        """Record the tokens that were generated here for a request that has ended."""
        self._ended_tokens += tokens

    def worked(self, produced: Mapping[str, int], kept: Mapping[str, int]) -> Worked:
        """Return the work done so far.

        Args:
            produced: tokens that each running request has produced, here and elsewhere.
            kept: how many of these it had already when it arrived here.
        """
        self._change(0)
        made = sum(tokens - kept.get(sample_id, 0) for sample_id, tokens in produced.items())
        prompts = {sample_id: request.prompt for sample_id, request in self._requests.items()}
        context = sum(prompts.get(sample_id, 0) + tokens for sample_id, tokens in produced.items())
        return replace(self._worked, tokens=self._ended_tokens + made, context=context)

    def _change(self, by: int) -> None:
        """Bring the counted work up to date, then change the number of running requests."""
        now = self._clock()
        past = now - self._counted
        busy_s = self._worked.busy_s + (past if self.count else 0.0)
        self._worked = Worked(0, self._worked.request_s + past * self.count, busy_s)
        self._counted = now
        self.count += by
