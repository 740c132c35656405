"""A controller of two sites without sockets: what it hears from their services, and what it sends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from scheduler.sites.site_dispatch import SiteGroup
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.controller import Controller
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_source import GroupSource
from streamrl.controller.kept_samples import issue_groups
from streamrl.generation.site.sample_batches import pack_samples
from streamrl.protocol.controller_rewards import ScoreRequest
from streamrl.protocol.controller_site import (
    SampleBatch,
)
from streamrl.protocol.message import TypedMessage, kind_of
from streamrl.protocol.samples import fleet_to_wire, sample_to_wire
from streamrl.rollouts.types import Group, Sample
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.endpoint import Delivery
from streamrl.transport.wire import Message
from tests.messages import every_message, generated, type_of
from tests.tiny_model import save_tiny_model

CLUSTER = ClusterConfig.model_validate(
    {
        "hardware": "cpu",
        "sites": {"home": {"port": 5600, "trainer": {}, "generation": [{}]}, "far": {"generation": [{}]}},
        "links": [{"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 30}],
    }
)
REQUEST = ScoreRequest(sample_id="", task="t", completion="", reward_input={})
OWN = np.arange(4, dtype=np.int32)
SITES = {"service-home": "home", "service-far": "far"}


class Sent:
    """What a controller has sent, in place of its hub."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, dict[str, Any]]] = []
        """(peer, kind, body) of each message."""

    async def send(self, peer: str, kind: str, body: dict[str, Any], arrays: object = None, **options: object) -> None:
        self.messages.append((peer, kind, body))

    def ordered(self) -> list[tuple[str, list[str]]]:
        """Return (service, samples to generate) of each order, in the order in which they were sent."""
        orders = [(peer, body["groups"]) for peer, kind, body in self.messages if kind == "generate"]
        return [(peer, [draw[0] for group in groups for draw in group["samples"]]) for peer, groups in orders]


@contextmanager
def two_sites(tmp_path: Path, sent: Sent, **changes: Any) -> Iterator[Controller]:
    """A controller of two sites, each of which has been given one group of two samples."""
    model = save_tiny_model(tmp_path / "model")
    run = RunConfig.model_validate({"model": {"path": str(model)}, "batch": {"samples_per_prompt": 2}} | changes)
    made: list[Controller] = []

    async def begin() -> None:
        context = RoleContext("controller", "home", tmp_path, CLUSTER, run, Addresses("", "", {}), False)
        one = Controller(context)
        made.append(one)
        none = SimpleNamespace(
            awaits=lambda _: False, generates=lambda _: False, generating=0, unscored=0, open_groups=dict
        )
        one._build(cast(GroupSource, None), cast(Evaluator, none))  # no evaluation is in flight
        one.hub.send = sent.send  # type: ignore[method-assign]
        for name, site in SITES.items():
            one.hub.peers[name] = SimpleNamespace(  # type: ignore[assignment]
                name=name,
                role="service",
                session="s",
                meta={"fleet": fleet_of(site)},
                state={},
                last_seen=0.0,
                empty_connections=0,
                flow=None,
            )
        one.services.joined()
        for number, site in enumerate(SITES.values()):
            issue(one, number, site)
        one.rewarders.ask = _asked(one)  # type: ignore[method-assign]

    asyncio.run(begin())
    yield made[0]
    made[0].ledger.close()


def issue(controller: Controller, number: int, site: str) -> Group:
    """Issue a group of two samples, p<number>-0, to a site."""
    group = Group(f"p{number}-0", 1, number, f"p{number}", "t", 0, "", OWN, 2)
    controller.pool.issue([group], 0)
    issue_groups(controller.ledger, [group])
    dispatch = controller.services._dispatch
    for other in SITES.values():
        (dispatch.unhold if other == site else dispatch.hold)(other)
    dispatch.submit([SiteGroup(group.group_id, 2, None, 4)])
    assert dict(dispatch.decide()) == {group.group_id: site}
    return group


def _asked(controller: Controller) -> Callable[..., None]:
    def ask(group: Group, sample_id: str, text: str) -> None:
        controller.rewarders._open["rewards-home"][sample_id] = REQUEST

    return ask


def fleet_of(site: str, pool: str = "regular", step_s: float = 0.01) -> list[dict[str, Any]]:
    curve = StepCurve((1, 8), (step_s, 2 * step_s), 0.0, 0.0)
    return fleet_to_wire([SimulatedInstance(f"{site}-{pool}-0", curve, 8, pool)])


def sample(at: str, group: int, number: int = 0, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        **{"sample_id": f"p{group}-0.{number:03d}", "group_id": f"p{group}-0", "completion_tokens": OWN},
        **{"logprobs": OWN.astype(np.float32) * -0.1, "token_versions": OWN * 0, "finish_reason": "stop"},
        **{"site": at, "instance": f"{at}-regular-0", "pool": "regular", "route": "regular", "text": "4"},
        **{"t_queued": 0.0, "t_dispatched": 1.0, "t_first_token": 2.0, "t_finished": 3.0},
    }
    return Sample(**(values | changes))


def batch(peer: str, *samples: Sample) -> Delivery:
    wires = map(sample_to_wire, samples)
    body, arrays = pack_samples([(msgspec.to_builtins(fields), arrays) for fields, arrays in wires])
    return Delivery(peer, "samples", SampleBatch(**body), arrays, lambda: None)


def said(peer: str, message: TypedMessage, **arrays: np.ndarray) -> Delivery:
    return Delivery(peer, kind_of(message), message, arrays, lambda: None)


def hear(controller: Controller, *deliveries: Delivery) -> dict[str, dict[str, int]]:
    """Let the controller handle deliveries as its loop does; return what it has refused."""

    async def handle() -> None:
        await controller._handle_all(list(deliveries))

    asyncio.run(handle())
    return controller.hub.refused()


def nonsense(session: str, first: int, count: int, site: str = "far") -> Iterator[Message]:
    """Yield messages of a site's service, numbered from `first`: every kind, with wrong and boundary values."""
    dice, kinds = random.Random(count), [(kind_of(one), type_of(one)) for one in every_message()]
    body, arrays = pack_samples([sample_to_wire(sample(site, 99, n)) for n in range(3)])
    for number in range(first, first + count):
        match dice.randrange(10):
            case 0:
                yield Message("heartbeat", session, 0, {"instances": {"trainer-0": {"state": "x" * 999}}})
            case 1:
                about = {"name": f"service-{number}", "role": "service", "meta": {"site": site, "fleet": [1] * 99}}
                yield Message("hello", session, 0, about)
            case 2:
                yield Message("samples", session, number, body, arrays)
            case _:
                kind, fields = dice.choice(kinds)
                if kind != "samples":  # one batch that cannot be read would be enough to exclude the site
                    yield Message(kind, session, number, generated(fields, dice))
