"""The open episodes of a site: which agents lead, and whose turns are being generated. Pure: no I/O.

    run_episode -> agents;  order_turn -> dispatcher, instance;  turn_done -> agents;  episode_done -> controller

An episode stays open until the controller has committed it. A new agents process is given all open ones again. It runs
their agents from the start, and each call gets the turn that it got before: one that has finished is in the turn
journal, and one that still runs answers the call that asks for it now. So no token is lost or sampled twice, as long as
the agent does what it did before. Turns that nobody waits for any more, because their episode has ended, are abandoned.

A turn goes where the KV cache of the turn that it extends is, if it is anywhere: the instance that generated that turn,
while it is the same process with the same weights, since prefix caches are salted with the version. Where requests keep
their KV cache over an update of the weights (`schedule.on_update: keep_kv`), episodes do, too: their turns stay salted
with the version of the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from scheduler.cost.length_forecast import Forecast
from streamrl.generation.site.turn_journal import KeptTurn, TurnJournal, TurnKey, turn_key
from streamrl.generation.site.turn_lengths import TurnLengths
from streamrl.protocol.controller_site import IssuedEpisode
from streamrl.protocol.message import body_of
from streamrl.protocol.samples import IncomingGroup
from streamrl.protocol.site_agents import EpisodeDone, OrderTurn, RunEpisode, TurnDone
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.types import SampleRequest
from streamrl.transport.wire import Arrays

PrefixCache = tuple[int, int]
"""Identity of an instance's prefix cache: number of its process, and version of the weights that it is salted with."""
_TURN_ID = re.compile(r"(?P<sample>.+)/[^/.]+\.(?P<place>\d{1,9})")


def is_turn(sample_id: str) -> bool:
    """Return whether an id is that of an episode's turn, '<sample id>/<attempt>.<number>', and not of a sample."""
    return "/" in sample_id


@dataclass(frozen=True)
class _Ordered:
    """A turn that is being generated."""

    sample_id: str
    answers: str
    """Id of the order that it answers: another one than its own if its episode is run again meanwhile."""
    key: TurnKey
    place: int
    """Its place in its episode, from 0."""
    prompt: int
    """Tokens of its prompt."""
    cache_version: int | None
    """Version with which its prefix is salted; None: that of its first token."""


@dataclass(frozen=True)
class _Cached:
    """A finished turn that is in the prefix cache of an instance."""

    instance: str
    cache: PrefixCache
    tokens: int
    """Tokens of its prompt and its output."""


@dataclass(frozen=True)
class RequestedTurn:
    """A turn for the dispatcher; the arguments of `Dispatcher.submit_turn`."""

    request: SampleRequest
    forecast: Forecast | None
    home: str
    cached: int


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn that is not generated, because its episode has it from before."""

    answer: TurnDone
    arrays: Arrays


@dataclass
class _Open:
    """An episode that the controller has issued and not yet committed."""

    request: SampleRequest
    """Its `prompt_tokens` are those that the length was predicted for, not those of any turn."""
    order: RunEpisode
    last: FinishedSample | None = None
    """Its newest finished turn."""
    done: bool = False
    """Whether its end is on its way to the controller."""
    cached: dict[str, _Cached] = field(default_factory=dict)
    """Its finished turns that are in a prefix cache, by turn id."""


@dataclass
class SiteEpisodes:
    """The open episodes of a site and their turns."""

    site: str
    most_context: int
    """Tokens of a prompt and its answer (`model.max_context`)."""
    most_tokens: int
    """Tokens of an answer (`sampling.max_tokens`)."""
    cache_of: Callable[[str], PrefixCache | None]
    """Returns the prefix cache of an instance now; None: it is gone, or caches nothing."""
    keeps_kv: bool = False
    """Whether KV caches outlive an update of the weights."""
    episodes: dict[str, _Open] = field(default_factory=dict)
    """Open episodes, by sample id."""
    turns: dict[str, _Ordered] = field(default_factory=dict)
    """Turns that are being generated, by id."""
    lengths: TurnLengths = field(default_factory=TurnLengths)
    """Lengths of the turns that have ended."""
    journal: TurnJournal = field(default_factory=TurnJournal)
    """Finished turns of the open episodes."""

    def begin(self, groups: Iterable[IncomingGroup]) -> list[RunEpisode]:
        """Enter the episodes of groups; return the orders for the agents process."""
        orders = []
        for group in groups:
            if group.episode is None:
                continue
            for request in group.requests:
                order = _order(request, group.episode)
                self.episodes[request.sample_id] = _Open(request, order)
                orders.append(order)
        return orders

    def abandon(self, sample_id: str) -> list[str]:
        """Forget the turns of an episode that are being generated; return their ids."""
        left = [turn_id for turn_id, turn in self.turns.items() if sample_id == turn.sample_id]
        for turn_id in left:
            del self.turns[turn_id]
        return left

    def restart(self) -> list[RunEpisode]:
        """Return the orders of what a new agents process has to lead."""
        return [one.order for one in self.episodes.values() if not one.done]

    def turn(
        self, message: OrderTurn, arrays: Arrays, version: int | None = None
    ) -> RequestedTurn | AnsweredTurn | str | None:
        """Return the request of a turn, or the answer that the episode has from before; or what is wrong, as text.

        Args:
            message: the order.
            arrays: its arrays.
            version: weight version of the run now, if it has one.

        Returns:
            None: it is being generated already.
        """
        one = self.episodes.get(message.sample_id)
        prompt = arrays.get("prompt_tokens")
        if one is None or one.done:
            return f"a turn of {message.sample_id!r:.99}, which is no open episode"
        named = _TURN_ID.fullmatch(message.turn_id)
        if message.turn_id in self.turns or named is None or named["sample"] != message.sample_id:
            return f"the turn {message.turn_id!r:.99}, which is none of {message.sample_id!r:.99} or known already"
        if prompt is None or prompt.ndim != 1 or prompt.dtype != "int32" or not len(prompt):
            return f"the turn {message.turn_id!r:.99} without its prompt, int32 [P]"
        if len(prompt) >= self.most_context:
            return f"the turn {message.turn_id!r:.99}, whose {len(prompt)} tokens leave no room for an answer"
        key = turn_key(message.seed, prompt)
        if (kept := self.journal.find(message.sample_id, key, version)) is not None:
            return self._again(message.turn_id, one, kept)
        for turn_id, running in self.turns.items():
            if running.sample_id == message.sample_id and running.key == key:
                self.turns[turn_id] = replace(running, answers=message.turn_id)
                return None
        before = one.cached.get(message.extends or "")
        if before is not None and not (before.tokens <= len(prompt) and self._is_cached(before)):
            before = None
        salt = before.cache[1] if before is not None and self.keeps_kv else None
        ordered = _Ordered(message.sample_id, message.turn_id, key, int(named["place"]), len(prompt), salt)
        self.turns[message.turn_id] = ordered
        request = SampleRequest(
            sample_id=message.turn_id,
            group_id=one.request.group_id,
            prompt_tokens=prompt,
            seed=message.seed,
            t_queued=one.request.t_queued,
            temperature=one.request.temperature,
            cache_version=salt,
        )
        most = min(self.most_tokens, self.most_context - len(prompt))
        forecast = self.lengths.forecast(one.order.task, ordered.place, most)
        if before is None:
            return RequestedTurn(request, forecast, "", 0)
        return RequestedTurn(request, forecast, before.instance, before.tokens)

    def turn_done(self, sample: FinishedSample, arrays: Arrays) -> TurnDone | None:
        """Keep a finished turn, and return the answer to its order; None: its episode has ended."""
        turn = self.turns.pop(sample.sample_id, None)
        if turn is None or (one := self.episodes.get(turn.sample_id)) is None:
            return None
        one.last = sample
        versions = arrays["token_versions"]
        self.lengths.record(one.order.task, turn.place, len(versions))
        if (cache := self.cache_of(sample.instance)) is not None and len(versions):
            salt = int(versions[0]) if turn.cache_version is None else turn.cache_version
            found = _Cached(sample.instance, (cache[0], salt), turn.prompt + len(versions))
            if self._is_cached(found):
                one.cached[sample.sample_id] = one.cached[turn.answers] = found
        self.journal.add(turn.sample_id, turn.key, KeptTurn(sample, arrays))
        return _answer(turn.answers, sample, from_before=turn.answers != sample.sample_id)

    def _again(self, turn_id: str, one: _Open, kept: KeptTurn) -> AnsweredTurn:
        """Answer an order with a finished turn."""
        one.last = kept.sample
        if (cached := one.cached.get(kept.sample.sample_id)) is not None:
            one.cached[turn_id] = cached
        return AnsweredTurn(_answer(turn_id, kept.sample, from_before=True), kept.arrays)

    def _is_cached(self, turn: _Cached) -> bool:
        """Return whether a finished turn is still in a cache that the next one may use."""
        now = self.cache_of(turn.instance)
        return now is not None and (now[0] == turn.cache[0] if self.keeps_kv else now == turn.cache)

    def end(self, message: EpisodeDone) -> FinishedSample | str:
        """Return the sample of an ended episode; or, as text, what is wrong with it.

        Its instance is that of its last turn. An episode that ended before its first turn names none.
        """
        one = self.episodes.get(message.sample_id)
        if one is None or one.done:
            return f"the end of {message.sample_id!r:.99}, which is no open episode"
        one.done = True
        last = one.last
        fields = body_of(message)
        started = fields.pop("t_started")
        fields["trajectory"] = message.trajectory
        return FinishedSample(
            **fields,
            group_id=one.request.group_id,
            site=self.site,
            instance=last.instance if last else "",
            pool=last.pool if last else "",
            route=last.route if last else "regular",
            t_queued=one.request.t_queued,
            t_dispatched=started,
        )

    def committed(self, sample_id: str) -> None:
        """Forget an episode that the controller has committed."""
        self.episodes.pop(sample_id, None)
        self.journal.forget(sample_id)


def _answer(turn_id: str, sample: FinishedSample, *, from_before: bool) -> TurnDone:
    return TurnDone(
        turn_id=turn_id,
        finish_reason=sample.finish_reason,
        text=sample.text,
        cached_tokens=sample.cached_tokens,
        from_before=from_before,
    )


def _order(request: SampleRequest, episode: IssuedEpisode) -> RunEpisode:
    return RunEpisode(
        sample_id=request.sample_id,
        group_id=request.group_id,
        task=episode.task,
        item=episode.item,
        seed=request.seed,
        temperature=request.temperature,
    )
