"""The tokens of one episode: which call extends which, what a retry gets, and the rows that are trained.

A session holds a tree of turns. A turn has a prompt and, once it is generated, an answer. A new call is compared with
what the session knows: if its messages begin with those of a turn and that turn's answer, it extends the turn, and
its prompt is the turn's tokens (prompt and output, bit for bit) with a suffix. The longest match wins; of turns with
the same answer, the first that counts. Otherwise it begins a new row, rendered whole. Not extended are: an answer that
a token limit cut, one that came under other tools, and one whose turn the chat template rewrites.

A path from the root to a leaf is a row. Turns that are on several paths (a fork: two calls that go on from one
answer) are trained in the first of these rows; in the others the same tokens are context, with mask 0. So every
sampled token is trained exactly once, and nothing else is. A turn that no client got any of (it gave up first, and
nobody called again) is in no row: the agent never saw what its reward would be for. Neither is one of which clients got
nothing before the agent ended (`end`): its reward was fixed without it.

A call is a retry, and gets the turn that is recorded or still running, if it has the `Idempotency-Key` of an earlier
one; or the same body, and either no answer to that body was delivered, or it says that it is the k-th retry and attempt
k - 1 asked for that turn. The same body again is otherwise a new sample, and so is the retry of a call whose turn
failed. The numbers tell the retries of equal calls apart: the last attempt of a client that gave up is retried by none.

Nothing here does input or output, or asks for the time.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from streamrl.agents.episode import EpisodeOrder, GeneratedTurn, TrajectoryRow, TurnOrder
from streamrl.agents.message_digests import digest_of_split, digest_with, digests, distance, has_reasoning, meaning
from streamrl.agents.refused_calls import NO_ROOM, NO_TURNS, RefusedCalls
from streamrl.agents.rendering import ChatMessage, ChatRenderer, HistoryRewritten, Rendered, TemplateError
from streamrl.agents.row_reasons import RowReasons
from streamrl.agents.tool_calls import THOUGHT_END, ParsedAnswer
from streamrl.agents.turns import Call, CallError, Turn
from streamrl.rollouts.seeds import derive_seed
from streamrl.rollouts.trajectory import NOT_SAMPLED
from streamrl.rollouts.types import IntArray

BYTES_READ = 8
"""Times the bytes that may leave room for an answer of which a call is read at all."""


class TooManyRun(Exception):
    """The episode generates as many turns as it may at a time; the call can be made once one of them has ended."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits on what one episode may ask for."""

    max_context: int
    """Tokens of a prompt and its answer together."""
    max_turns: int
    """Turns of one episode."""
    max_in_flight: int = 16
    """Turns that one episode generates at a time."""
    rows: int | None = None
    """Number of tokens that the model knows; None: not known."""


class Session:
    """The turns of one episode."""

    def __init__(self, order: EpisodeOrder, renderer: ChatRenderer, limits: SessionLimits) -> None:
        self.order, self.renderer, self.limits = order, renderer, limits
        self.turns: list[Turn] = []
        """All turns that did not fail, in the order of their calls."""
        self._refused = RefusedCalls()
        """Its conversations that context or turns ended."""
        self._reasons = RowReasons()
        self._attempt = secrets.token_hex(4)
        self._numbers = 0
        self._answered: defaultdict[bytes, list[Turn]] = defaultdict(list)
        """Turns that can be extended, by digest of their messages and answer: several samples may have one text."""
        self._reasoned: defaultdict[bytes, list[Turn]] = defaultdict(list)
        """Turns whose answer has reasoning, by digest of their messages and of the answer as libraries split it."""
        self._unmet: Counter[tuple[bytes, int]] = Counter()
        """Calls that got no turn, by body and number of their latest attempt: retries of them get no other's turn."""

    @property
    def cut(self) -> bool:
        """Whether a token limit cut an answer that counts, or left no room for one, with which a conversation ended."""
        return self._refused.no_room or any(turn.counts and _reason(turn) == "length" for turn in self.turns)

    @property
    def over(self) -> bool:
        """Whether context or turns were used up in a conversation that did not go on since, whatever others do."""
        return bool(self._refused)

    def call(self, call: Call, now: float) -> tuple[Turn, bool]:
        """Find the turn of a call, or begin it.

        Args:
            call: the call.
            now: unix seconds.

        Returns:
            The turn, and whether it is new and has to be generated.

        Raises:
            CallError: a limit is reached, no token fits or the model lacks one, or the template does not accept the
                messages.
            TooManyRun: it has to wait for another turn.
        """
        call = self._restored(call)
        if (known := self._repeated(call)) is not None:
            self._take(call, known)
            return known, False
        if len(self.turns) >= self.limits.max_turns:
            self._refused.add(NO_TURNS, call, None, now, self.turns)
            raise CallError(400, NO_TURNS, f"this episode has made its {self.limits.max_turns} turns (max_turns)")
        if sum(turn.generated is None for turn in self.turns) >= self.limits.max_in_flight:
            raise TooManyRun
        turn = self._with_tokens(call, now) if call.prompt_tokens is not None else self._with_messages(call, now)
        length = len(turn.order.prompt_tokens)
        if not length:
            text = "the chat template makes no token of the messages: expected messages that it writes"
            raise CallError(400, "invalid_messages", text)
        if length >= self.limits.max_context:
            raise self._no_room(call, turn.parent, f"{length} tokens > {self.limits.max_context - 1} maximum", now)
        rows, largest = self.limits.rows, int(turn.order.prompt_tokens.max(initial=0))
        if rows is not None and largest >= rows:
            text = f"the prompt has token {largest}, but the model knows {rows} tokens, from 0"
            raise CallError(400, "unknown_token", text)
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.become_known(now)
        self._refused.begins(turn)
        self._take(call, turn)
        self._numbers += 1
        return turn, True

    def too_large(self, call: Call | None, most: int, now: float) -> CallError:
        """Record a call whose body is larger than any that leaves room for an answer, without making tokens of it.

        Args:
            call: the call; None: its body was too large even to be read.
            most: bytes of a body that may leave room.
            now: unix seconds.

        Returns:
            The refusal.
        """
        if call is None:
            return self._no_room(Call([], [], b""), None, f"the call has more than {BYTES_READ * most} bytes", now)
        _, parent = next(self._extended(call), (0, None))
        return self._no_room(call, parent, f"the call has more than {most} bytes", now)

    def _no_room(self, call: Call, parent: Turn | None, length: str, now: float) -> CallError:
        """Record a call that leaves no room for an answer; libraries know such a refusal by phrases of its text."""
        self._refused.add(NO_ROOM, call, parent, now, self.turns)
        text = (
            f"the prompt is too long: {length}, which leaves no room for an answer, as this model's maximum context "
            f"length is {self.limits.max_context} tokens (model.max_context)"
        )
        return CallError(400, NO_ROOM, text)

    def finish(self, turn: Turn, generated: GeneratedTurn, now: float) -> None:
        """Record a turn's answer; from now on it can be extended."""
        turn.generated, turn.finished = generated, now
        usable = bool(turn.call.tools) and turn.call.reads_calls and generated.finish_reason == "stop"
        turn.parsed = ParsedAnswer(generated.text)
        if usable:
            thinks = turn.rendered is not None and self.renderer.begins_reasoning(turn.rendered)
            turn.parsed = self.renderer.tools.parse(generated.text, turn.call.tools, thinks)
        turn.answer = {"role": "assistant", "content": turn.parsed.content}
        if turn.parsed.calls:
            turn.answer["tool_calls"] = [
                {
                    "id": f"call_{turn.order.seed:08x}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(turn.parsed.calls)
            ]
        if THOUGHT_END in turn.answer["content"]:
            before = digests(turn.call.messages, turn.call.tools)[-1]
            self._reasoned[digest_of_split(before, turn.answer)].append(turn)
        if generated.finish_reason == "stop" and turn.rendered is not None:
            self._answered[digests([*turn.call.messages, turn.answer], turn.call.tools)[-1]].append(turn)

    def fail(self, turn: Turn) -> None:
        """Forget a turn that could not be generated; the retry of each call that asked for it begins another one."""
        self.turns.remove(turn)
        self._unmet.update((turn.call.body, attempt) for attempt in turn.attempts)

    def forgo(self, call: Call) -> None:
        """Forget a call that had to wait and whose client went away; a retry begins a turn."""
        if call.idempotency_key is None:
            self._met(call)  # by its earlier attempt it counts already
            self._unmet[call.body, call.attempt] += 1

    def end(self, at: float) -> list[Turn]:
        """Leave out what came after the end of the agent: answers that became known then, and refusals.

        No call can have gone on from such an answer before, so that the rows of all others stay whole.

        Args:
            at: when the agent ended, in unix seconds.

        Returns:
            The turns that are left out.
        """
        late = [turn for turn in self.turns if turn.known is not None and turn.known > at]
        for turn in late:
            turn.known = None
        self._refused.end(at)
        return late

    def rows(self) -> list[TrajectoryRow]:
        """Return the rows of all turns that count, in the order in which they begin.

        Raises:
            AssertionError: a turn's prompt does not begin with the tokens of the turn that it extends.
        """
        rows: list[_Row] = []
        row_of: dict[Turn, _Row] = {}
        for turn in self.turns:
            if not turn.counts:
                continue
            row = None if turn.parent is None else row_of[turn.parent]
            if (
                row is None or row.last is not turn.parent
            ):  # a row of its own, or a fork: shared tokens are context here
                row = _Row()
                rows.append(row)
            row.add(turn)
            row_of[turn] = row
        return [row.finished() for row in rows]

    def conversation(self) -> list[ChatMessage]:
        """Return the messages of the last call whose turn counts, and its answer."""
        for turn in reversed(self.turns):
            if turn.counts:
                return [*turn.call.messages, turn.answer]
        return []

    def _restored(self, call: Call) -> Call:
        """Put answers back whose reasoning a library has split off or joined anew: they become what was sampled.

        Answers to the same messages may differ by no more than the line breaks around the reasoning. What comes back
        as it was sampled stays, and of the others the one that is nearest is put back.
        """
        if not any(map(has_reasoning, call.messages)):
            return call
        messages, digest = list[ChatMessage](), digests([], call.tools)[0]
        for message in call.messages:
            if has_reasoning(message) and (likely := self._reasoned.get(digest_of_split(digest, message))):
                likely = sorted(likely, key=_preference)
                message = min((turn.answer for turn in likely), key=partial(distance, message))
            messages.append(message)
            digest = digest_with(digest, meaning(message))
        return replace(call, messages=messages)

    def _repeated(self, call: Call) -> Turn | None:
        """Return the turn of which the call is a retry, if it is one.

        Raises:
            CallError: its idempotency key belongs to another call.
        """
        same = [turn for turn in reversed(self.turns) if turn.call.body == call.body]
        if (key := call.idempotency_key) is not None:
            known = next((turn for turn in reversed(self.turns) if key in turn.keys), None)
            if known is not None and known not in same:
                raise CallError(400, "idempotency_key_reused", "this Idempotency-Key belongs to another call")
            if known is not None:
                return known
        left = [turn for turn in same if not (turn.delivered or turn.clients)]
        lost = next((turn for turn in left if call.attempt - 1 in turn.attempts), left[0] if left else None)
        if lost is not None or call.attempt == 0 or key is not None or self._unmet[call.body, call.attempt - 1]:
            return lost
        return next((turn for turn in same if call.attempt - 1 in turn.attempts), None)

    def _take(self, call: Call, turn: Turn) -> None:
        """Note that a call has got a turn."""
        if call.idempotency_key is not None:  # its retries are known by that
            turn.keys.add(call.idempotency_key)
            return
        if call.attempt and call.attempt - 1 in turn.attempts:
            turn.attempts.remove(call.attempt - 1)
        else:
            self._met(call)
        turn.attempts.append(call.attempt)

    def _met(self, call: Call) -> None:
        if call.attempt and self._unmet[call.body, call.attempt - 1]:
            self._unmet[call.body, call.attempt - 1] -= 1

    def _extended(self, call: Call) -> Iterator[tuple[int, Turn]]:
        """Yield the turns that a call may go on from, each after how many of its messages that is, the most first."""
        found = digests(call.messages, call.tools)
        for known in range(len(call.messages), 0, -1):
            if same := self._answered.get(found[known]):
                yield known, min(same, key=_preference)

    def _with_messages(self, call: Call, now: float) -> Turn:
        renderer, note = self.renderer, ""
        try:
            for known, parent in self._extended(call):
                assert parent.rendered is not None and parent.generated is not None
                answer = renderer.stand_in(parent.generated.text)
                appended = call.messages[known:]
                end = renderer.end_text(parent.generated.tokens)
                try:
                    suffix = renderer.extend(parent.rendered, parent.history, answer, appended, call.tools, end)
                except (HistoryRewritten, TemplateError) as error:
                    note = note or str(error)
                    continue
                tokens = np.concatenate([parent.tokens, suffix.tokens])
                history = [*parent.history, answer.message, *appended]
                if any(turn.parent is parent for turn in self.turns):  # a fork
                    note = note or self._reasons.why(call, self.turns)
                return self._turn(call, tokens, parent, suffix, history, now, note)
            whole = renderer.whole(call.messages, call.tools)
        except TemplateError as error:
            raise CallError(400, "invalid_messages", str(error)) from error
        note = note or self._reasons.why(call, self.turns)
        return self._turn(call, whole.tokens, None, whole, call.messages, now, note)

    def _with_tokens(self, call: Call, now: float) -> Turn:
        assert call.prompt_tokens is not None
        parent, covered = None, 0
        for turn in sorted(self.turns, key=_preference):
            if turn.generated is None or turn.generated.finish_reason != "stop":
                continue
            known = turn.tokens
            if covered < len(known) and np.array_equal(call.prompt_tokens[: len(known)], known):
                parent, covered = turn, len(known)
        return self._turn(call, call.prompt_tokens, parent, None, [], now)

    def _turn(
        self,
        call: Call,
        tokens: IntArray,
        parent: Turn | None,
        rendered: Rendered | None,
        history: list[ChatMessage],
        now: float,
        note: str = "",
    ) -> Turn:
        number, order = self._numbers, self.order
        turn = TurnOrder(
            turn_id=f"{order.sample_id}/{self._attempt}.{number}",
            sample_id=order.sample_id,
            group_id=order.group_id,
            prompt_tokens=tokens,
            seed=derive_seed(order.seed, f"turn/{number}"),
            temperature=order.temperature,
            extends=parent.order.turn_id if parent is not None else None,
        )
        return Turn(number, turn, call, parent, rendered, history, now, note)


@dataclass
class _Row:
    """A row while it is put together."""

    tokens: list[IntArray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    last: Turn | None = None
    length: int = 0

    def add(self, turn: Turn) -> None:
        """Append a turn: what its prompt has beyond the row, as context, and its answer."""
        prompt, generated = turn.order.prompt_tokens, turn.generated
        assert generated is not None
        if self.last is not None:
            assert np.array_equal(prompt[: self.length], np.concatenate(self.tokens)), turn.order.turn_id
        rest = prompt[self.length :]
        self.tokens += [rest, generated.tokens]
        self.logprobs += [np.zeros(len(rest), np.float32), generated.logprobs]
        self.versions += [np.full(len(rest), NOT_SAMPLED, np.int32), generated.versions]
        self.length += len(rest) + len(generated.tokens)
        self.last = turn

    def finished(self) -> TrajectoryRow:
        tokens, versions = (np.concatenate(part).astype(np.int32) for part in (self.tokens, self.versions))
        sampled = versions != NOT_SAMPLED
        first = int(np.argmax(sampled)) if sampled.any() else len(tokens)
        return TrajectoryRow(tokens, np.concatenate(self.logprobs).astype(np.float32), versions, first)


def _preference(turn: Turn) -> tuple[bool, int]:
    """Return a key by which turns with the same answer are sorted: a call goes on from one that its agent knows."""
    return not turn.counts, turn.number


def _reason(turn: Turn) -> str:
    return "" if turn.generated is None else turn.generated.finish_reason
