"""Who may say what: the kinds of messages that a hub accepts, by the sender's role and the side it comes from.

    hub          role       inside the hub's site        from another site
    controller   trainer    answers, weight_call         nothing
                 service    everything a service says    the same without weight_answer
                 rewards    scored                       scored
                 operator   scale, checkpoint            nothing
    publisher    relay      fetch, again, have           fetch, again, have
    service      instance   everything an instance says  nothing
                 agents     order_turn, episode_done         nothing

`RIGHTS` is that table; a hub asks it for every message (`MessageReader`), before its owner sees the message. A process
of another site has a role only if the run's plan gives it to a process of that name there (`role_at`). What a message
may be *about* is asked where the sample, the reward or the version is kept (`controller/site_limits.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from streamrl.protocol import (
    controller_rewards,
    controller_site,
    controller_trainer,
    operator,
    site_agents,
    site_instance,
    weights,
)
from streamrl.protocol.message import Right, TypedMessage

HubKind = Literal["controller", "publisher", "service"]
Kinds = tuple[type[TypedMessage], ...]


def _without(kinds: Kinds, *left_out: type[TypedMessage]) -> Kinds:
    return tuple(kind for kind in kinds if kind not in left_out)


RIGHTS: Mapping[HubKind, Mapping[str, Right]] = {
    "controller": {
        "trainer": Right(controller_trainer.FROM_TRAINER),
        "service": Right(
            controller_site.FROM_SERVICE, _without(controller_site.FROM_SERVICE, controller_site.WeightAnswer)
        ),
        "rewards": Right(controller_rewards.FROM_REWARDS, controller_rewards.FROM_REWARDS),
        "operator": Right(operator.FROM_OPERATOR),
    },
    "publisher": {"relay": Right(weights.FROM_RELAY, weights.FROM_RELAY)},
    "service": {"instance": Right(site_instance.FROM_INSTANCE), "agents": Right(site_agents.FROM_AGENTS)},
}


def role_at(hub: HubKind, role: str) -> str | None:
    """Return the role in which a process connects to a hub, by its role in the plan; None: it has no business there."""
    if hub == "publisher":
        return "relay" if role == "service" else None
    return role if role in RIGHTS[hub] else None
