"""The open episodes of a site: which agents lead, and whose turns are being generated. Pure: no I/O.

    run_episode -> agents;  order_turn -> dispatcher, instance;  turn_done -> agents;  episode_done -> controller

An episode stays open until the controller has committed it. A new agents process is given all open ones again, from
their start; turns that the old one had ordered run to their end and are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.cost.length_forecast import Forecast
from streamrl.protocol.controller_site import IssuedEpisode
from streamrl.protocol.message import body_of
from streamrl.protocol.samples import IncomingGroup
from streamrl.protocol.site_agents import EpisodeDone, OrderTurn, RunEpisode, TurnDone
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.types import SampleRequest
from streamrl.transport.wire import Arrays


def is_turn(sample_id: str) -> bool:
    """Return whether an id is that of an episode's turn, '<sample id>/<attempt>.<number>', and not of a sample."""
    return "/" in sample_id


@dataclass
class _Open:
    """An episode that the controller has issued and not yet committed."""

    request: SampleRequest
    """Its `prompt_tokens` are those that the length was predicted for, not those of any turn."""
    forecast: Forecast | None
    order: RunEpisode
    last: FinishedSample | None = None
    """Its newest finished turn."""
    done: bool = False
    """Whether its end is on its way to the controller."""


@dataclass
class SiteEpisodes:
    """The open episodes of a site and their turns."""

    site: str
    most_context: int
    """Tokens of a prompt and its answer (`model.max_context`)."""
    episodes: dict[str, _Open] = field(default_factory=dict)
    """Open episodes, by sample id."""
    turns: dict[str, str] = field(default_factory=dict)
    """Sample id of the episode of each turn that is being generated, by turn id."""

    def begin(self, groups: Iterable[IncomingGroup]) -> list[RunEpisode]:
        """Enter the episodes of groups; return the orders for the agents process."""
        orders = []
        for group in groups:
            if group.episode is None:
                continue
            for request in group.requests:
                order = _order(request, group.episode)
                self.episodes[request.sample_id] = _Open(request, group.forecast, order)
                orders.append(order)
        return orders

    def restart(self) -> list[RunEpisode]:
        """Begin anew with a new agents process; return the orders of what it has to lead."""
        self.turns = {}
        return [one.order for one in self.episodes.values() if not one.done]

    def turn(self, message: OrderTurn, arrays: Arrays) -> IncomingGroup | str:
        """Return the request of a turn; or, as text, what is wrong with it."""
        one = self.episodes.get(message.sample_id)
        prompt = arrays.get("prompt_tokens")
        if one is None or one.done:
            return f"a turn of {message.sample_id!r:.99}, which is no open episode"
        if message.turn_id in self.turns or not message.turn_id.startswith(f"{message.sample_id}/"):
            return f"the turn {message.turn_id!r:.99}, which is none of {message.sample_id!r:.99} or known already"
        if prompt is None or prompt.ndim != 1 or prompt.dtype != "int32" or not len(prompt):
            return f"the turn {message.turn_id!r:.99} without its prompt, int32 [P]"
        if len(prompt) >= self.most_context:
            return f"the turn {message.turn_id!r:.99}, whose {len(prompt)} tokens leave no room for an answer"
        self.turns[message.turn_id] = message.sample_id
        request = SampleRequest(
            sample_id=message.turn_id,
            group_id=one.request.group_id,
            prompt_tokens=prompt,
            seed=message.seed,
            t_queued=one.request.t_queued,
            temperature=one.request.temperature,
        )
        return IncomingGroup([request], one.forecast, None)

    def turn_done(self, sample: FinishedSample) -> TurnDone | None:
        """Return the answer to a turn's order; None: the agents process that ordered it is gone."""
        owner = self.turns.pop(sample.sample_id, None)
        if owner is None or owner not in self.episodes:
            return None
        self.episodes[owner].last = sample
        return TurnDone(turn_id=sample.sample_id, finish_reason=sample.finish_reason, text=sample.text)

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


def _order(request: SampleRequest, episode: IssuedEpisode) -> RunEpisode:
    return RunEpisode(
        sample_id=request.sample_id,
        group_id=request.group_id,
        task=episode.task,
        item=episode.item,
        seed=request.seed,
        temperature=request.temperature,
    )
