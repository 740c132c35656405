"""The drafter that vLLM loads (`method: custom_class`), and the worker's method through which an instance teaches it.

vLLM gives a drafter the rows of its batch without the requests' names. So a row is known by its text: it begins with a
prompt that was taught. Moved and restarted requests need no more than that. Until it is taught a step curve, the
drafter drafts nothing: an instance that measures its step times runs as without speculation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import StepCurve
from scheduler.cost.speculative_decoding import draft_counts, expected_tokens, token_values
from streamrl.generation.drafts.acceptance import SUREST, RunningAcceptance
from streamrl.generation.drafts.draft_account import FEWEST, MEASURED, PAUSE, DraftAccounts
from streamrl.generation.drafts.exact_verification import ensure_exact_verification
from streamrl.generation.drafts.text_drafts import Draft, KnownCompletions, draft, text_of
from streamrl.generation.drafts.undrafted_steps import VerifyingSampler

PER_PROMPT = 16
"""Completions kept of a prompt: two epochs of a group of 8."""
MOST_TOKENS = 8_000_000
"""Tokens kept in all; at most 4 bytes each, twice."""
OVERHEAD = 0.05
"""Share of a single request's step that verification is assumed to add before it is measured."""
FRUITLESS = 4
"""Steps in a row without a draft that pays, after which the drafter rests: searching takes time, too."""
REST = 32
"""Steps of a rest; a batch that shrinks by a quarter ends it."""

Completion = tuple[bytes, bytes, int]
"""(prompt, completion, version of its last token); tokens as int32 bytes."""


class _VllmConfig(Protocol):
    """What is read of vLLM's configuration."""

    speculative_config: Any
    scheduler_config: Any
    model_config: Any


@dataclass
class _Row:
    """A row of the batch after the last step."""

    prompt: str | None
    """Known prompt that its text begins with."""
    tokens: int
    """Tokens that it had when its draft was made."""
    last: int
    """The last of them."""
    draft: Draft | None = None
    verified: int = 0
    """Tokens of the draft that were sent to be verified."""
    value_s: float = 0.0
    """Seconds that each accepted token of it saves."""


@dataclass
class _Step:
    """The last step, as it ended and its drafts were begun."""

    began: float
    """The clock's seconds."""
    requests: int
    searched: bool = False
    """Whether drafts were looked for."""
    drafted: int = 0
    """Tokens that were sent to be verified."""


class RolloutDrafter:
    """Drafts from the run's own recent completions, as many tokens as pay at the batch, acceptance and step times.

    Whether they did pay is kept in an account; where they did not, steps are plain.
    """

    def __init__(self, vllm_config: _VllmConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            vllm_config: configuration of the engine.
            clock: returns seconds, for the time between two steps.
        """
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._slots: int = vllm_config.scheduler_config.max_num_seqs
        self._longest: int = vllm_config.model_config.max_model_len
        self._clock = clock
        self._curve: StepCurve | None = None
        self._table = [0.0, 0.0]
        """Seconds of a step, by the number of its rows."""
        self._version = 0
        self._known = KnownCompletions(PER_PROMPT, MOST_TOKENS)
        self.acceptance = RunningAcceptance()
        self._rows: dict[int, _Row] = {}
        self._step: _Step | None = None
        self.accounts = DraftAccounts()
        self._fruitless = self._rest = self._rest_batch = 0
        self._beside: tuple[deque[float], deque[float]] = deque(maxlen=MEASURED), deque(maxlen=MEASURED)
        """Seconds that the newest steps took beyond the step curve: without drafts, with drafts."""

    def load_model(self, model: object) -> None:
        """Make sure that drafts are verified exactly; vLLM calls this once it has loaded the model.

        Raises:
            RuntimeError: they are not.
        """
        ensure_exact_verification()

    def teach(
        self,
        version: int,
        curve: dict[str, Any] | None,
        completions: Sequence[Completion],
        expected: Sequence[tuple[bytes, float | None]],
    ) -> dict[str, dict[str, int]]:
        """Take in what the instance knows.

        Args:
            version: version of the weights that verify from now on.
            curve: step time of the instance without speculation, as JSON; None: as before.
            completions: completions that have ended.
            expected: forecast tokens of a completion, by prompt.

        Returns:
            Tokens 'drafted' and 'accepted' since the start, by source and age of the draft.
        """
        if curve is not None:
            self._curve = StepCurve.from_json(curve)
            self._table = self._curve.table(self._slots * (1 + self._most)).tolist()
        if version != self._version:
            self._version = version
            self.acceptance.new_weights()
            self._beside[1].clear()  # measured again, in case that it was too long to draft at all
        for prompt, tokens in expected:
            self._known.expect(_text(prompt), tokens)
        for prompt, completion, drawn_by in completions:
            self._known.add(_text(prompt), _text(completion), drawn_by)
        return {name: asdict(counts) for name, counts in self.acceptance.by_age.items()}

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft the next tokens of each row.

        Args:
            sampled_token_ids: tokens that the step has sampled, by row; none in a row whose prompt is not complete.
            num_tokens_no_spec: [rows] tokens of each row, prompt and sampled ones.
            token_ids_cpu: [rows, longest] their ids.
            slot_mappings: not used; vLLM passes it.

        Returns:
            Drafted tokens by row.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._curve is None:
            return drafts
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        began = self._clock()  # so that drafting counts as part of the step that verifies
        saved = sum(self._judge(row, len(sampled_token_ids[row]), num_tokens_no_spec, token_ids_cpu) for row in rows)
        self._settle(began, len(rows), len(rows) == len(sampled_token_ids), saved)
        if not rows or self._rests(len(rows)) or not self._can_pay(len(rows)):
            self._rows.clear()
            return drafts
        self._rows = {row: found for row, found in self._rows.items() if row in rows}
        remaining = []
        for row in rows:
            length = int(num_tokens_no_spec[row])
            text = text_of(token_ids_cpu[row, :length])
            old = self._rows.get(row)
            prompt = old.prompt if old is not None and old.prompt and text.startswith(old.prompt) else None
            prompt = prompt or self._known.prompt_of(text)
            most = min(self._most, self._longest - length - 1)
            known = self._known.of(prompt) if prompt else None
            found = draft(text, known, most, self._version) if most > 0 else None
            self._rows[row] = _Row(prompt, length, int(token_ids_cpu[row, length - 1]), found)
            expected = self._known.expected(prompt) if prompt else None
            remaining.append(None if prompt is None or expected is None else expected - (length - len(prompt)))
        chances = [self.acceptance.chances(one) if (one := self._rows[row].draft) else [] for row in rows]
        values = token_values(self._curve, remaining, refilled=len(rows) >= self._slots)
        counts = draft_counts(self._curve, chances, values, self.overhead_s)
        for row, count, value in zip(rows, counts, values, strict=True):
            state = self._rows[row]
            if state.draft is not None and count:
                state.verified, state.value_s = count, value
                drafts[row] = [ord(token) for token in state.draft.tokens[:count]]
        if any(drafts):
            self._fruitless = 0
        elif (fruitless := self._fruitless + 1) < FRUITLESS:
            self._fruitless = fruitless
        else:
            self._fruitless, self._rest, self._rest_batch = 0, REST, len(rows)
        self._step = _Step(began, len(rows), searched=True, drafted=sum(map(len, drafts)))
        return drafts

    def _rests(self, batch: int) -> bool:
        """Return whether the drafter rests in this step."""
        if self._rest and batch > 0.75 * self._rest_batch:
            self._rest -= 1
            return True
        self._rest = 0
        return not self.accounts.may_draft(batch)

    @property
    def overhead_s(self) -> float:
        """Seconds that a step with drafts takes longer than one with as many rows, as measured so far."""
        without, with_drafts = self._beside
        if len(with_drafts) < FEWEST:
            return OVERHEAD * self._table[1]
        return max(0.0, median(with_drafts) - (median(without) if len(without) >= FEWEST else 0.0))

    def _can_pay(self, batch: int) -> bool:
        """Return whether drafts could pay if every one were found and were as good as the best so far."""
        rate, table = min(SUREST, self.acceptance.best_rate()), self._table
        single, whole = table[1], table[batch]
        for count in range(1, self._most + 1):
            more = expected_tokens(rate, count) - 1
            alone = more * max(single, whole / batch) - (table[batch + count] - whole)
            together = more * whole - (table[batch * (1 + count)] - whole)
            if max(alone, together) > self.overhead_s:
                return True
        return False

    def _settle(self, now: float, batch: int, decoded: bool, saved_s: float) -> None:
        """Take in what the step took and saved that has just ended, unless it prefilled or the batch has changed."""
        step, self._step = self._step, _Step(now, batch)
        if step is None or not decoded or step.requests != batch:
            return
        took, rows_s = now - step.began, self._table[batch + step.drafted]
        if took < PAUSE * rows_s:
            self._beside[step.drafted > 0].append(took - rows_s)
        if step.searched:
            self.accounts.drafted(batch, took, self._table[batch], rows_s - self._table[batch], saved_s)
        else:
            self.accounts.plain(batch, took, self._table[batch])

    def _judge(self, row: int, sampled: int, lengths: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> float:
        """Count what became of a row's draft, if the row still holds the same request; return the seconds it saved."""
        state = self._rows.get(row)
        if state is None or state.draft is None or not state.verified:
            return 0.0
        same = state.tokens + sampled == lengths[row] and token_ids[row, state.tokens - 1] == state.last
        if not same:
            return 0.0
        accepted = min(sampled - 1, state.verified)
        self.acceptance.saw(state.draft, state.verified, accepted)
        return accepted * state.value_s


class DrafterWorker:
    """Extension of vLLM's worker: the method that an instance calls in the engine's process."""

    model_runner: Any

    def teach_drafter(self, *lesson: Any) -> dict[str, dict[str, int]]:
        """Pass a lesson on to the drafter; see `RolloutDrafter.teach`. The first one makes undrafted steps plain."""
        runner = self.model_runner
        if not isinstance(runner.rejection_sampler, VerifyingSampler):
            runner.rejection_sampler = VerifyingSampler(runner.rejection_sampler)
        drafter: RolloutDrafter = runner.drafter
        return drafter.teach(*lesson)


def _text(tokens: bytes) -> str:
    return text_of(np.frombuffer(tokens, dtype=np.int32))
