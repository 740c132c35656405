"""What a site cannot be trusted with is done by others: samples are given again, and the site is no longer used."""

from __future__ import annotations

import asyncio
import io
import math
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from streamrl.controller import arrivals
from streamrl.controller.controller import Controller
from streamrl.controller.pool_sizes import MOST_COMING
from streamrl.controller.reward_client import Rewarders
from streamrl.controller.site_claims import read_heartbeat
from streamrl.controller.site_trust import MOST_TRIES, open_work
from streamrl.controller.weight_canary import Measured
from streamrl.errors import RunFailed
from streamrl.generation.site.sample_batches import pack_samples
from streamrl.protocol.controller_site import (
    CanaryMeasured,
    FleetChanged,
    InstanceState,
    SampleBatch,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import PublishDone
from streamrl.protocol.samples import sample_to_wire
from streamrl.report.panels import render
from streamrl.run_dir.status import read_status
from streamrl.transport import endpoint_base
from streamrl.transport.delivery import Outbox
from streamrl.transport.endpoint import Delivery, Flow, Speaker
from streamrl.transport.endpoint_base import PeerLost
from streamrl.transport.peer import Peer, PeerRoute
from streamrl.transport.wire import MalformedMessage, Message, encode
from tests.ports import free_port
from tests.security.hostile_world import OWN, Sent, batch, fleet_of, hear, issue, nonsense, said, sample, two_sites
from tests.waiting import until

NAN = {"logprobs": np.full(4, np.nan, "f4")}
NONSENSE = Delivery(
    *("service-far", "samples", SampleBatch(packing="zstd", samples=2, tokens=8, bodies=9)),
    *({"payload": np.frombuffer(b"no zstd", np.uint8)}, lambda: None),
)


def test_what_can_be_read_of_a_batch_is_taken_and_the_rest_given_again(controller: Controller, sent: Sent) -> None:
    (body, arrays), other = sample_to_wire(sample("far", 1)), sample_to_wire(sample("far", 1, 1))
    packed, packed_arrays = pack_samples([(body | {"text": 5}, arrays), other])
    mixed = Delivery("service-far", "samples", SampleBatch(**packed), packed_arrays, lambda: None)
    assert hear(controller, mixed) == {"unreadable": {"service-far": 1}}
    assert list(controller.pool.received) == ["p1-0.001"] and sent.ordered() == [("service-home", ["p1-0.000"])]


def test_what_cannot_be_read_at_all_excludes_its_site_and_others_do_its_work(
    controller: Controller, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(controller, 2, "far")
    hear(controller, batch("service-far", sample("far", 2)), batch("service-far", sample("far", 1, **NAN)))
    refused = hear(controller, NONSENSE)
    assert refused == {"unreadable": {"service-far": 2}}
    assert sent.ordered() == [("service-home", ["p1-0.000"]), ("service-home", ["p1-0.001", "p2-0.001"])]
    assert list(controller.services.excluded) == ["service-far"]
    late = [sample("far", 1), sample("far", 1, 1), sample("far", 2, 1)]
    unread = [batch("service-far", *late), said("service-far", FleetChanged(fleet=fleet_of("far"), instances={}))]
    acknowledged: list[int] = []
    with monkeypatch.context() as unpacked:
        unpacked.setattr(arrivals, "unpack_samples", None)
        hear(controller, *(replace(one, ack=lambda: acknowledged.append(1)) for one in unread))
    assert len(acknowledged) == 2
    assert controller.hub.refused() == refused | {"not its own": {"service-far": 2}}
    hear(controller, batch("service-home", *(replace(one, site="home", instance="home-regular-0") for one in late)))
    assert controller.ledger.counts() == {"issued": 2, "finished": 4}
    assert controller.pool.missing("p1-0") == controller.pool.missing("p2-0") == 0


def test_a_site_most_of_whose_samples_cannot_be_used_is_excluded_and_shown(controller: Controller) -> None:
    publish(controller, 0)
    hear(controller, ready("service-home", 0))
    for number in range(2, 10):
        issue(controller, number, "far")
    for number in range(2, 9):
        hear(controller, batch("service-far", sample("far", number, **NAN)))
    assert not controller.services.excluded and controller.times.started is None
    hear(controller, batch("service-far", sample("far", 9, **NAN)))
    assert controller.times.started is not None  # nobody that is used has yet to load the first weights
    assert controller.services.excluded == {"service-far": "8 of its 8 samples cannot be used"}
    assert all(
        controller.services.holds("service-home", f"p{n}-0.{k:03d}", f"p{n}-0") for n in range(10) for k in (0, 1)
    )
    controller.telemetry.write()
    status = read_status(controller.context.run_dir)
    assert status.sites["far"].excluded == "8 of its 8 samples cannot be used"
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(render(status, [], time.time(), [], []))
    assert "not used any more: 8 of its 8 samples" in " ".join(shown.export_text().split())


def test_the_rewards_of_a_site_that_is_not_used_any_more_come_from_others(controller: Controller, sent: Sent) -> None:
    names = {"rewards-home": "home", "rewards-far": "far"}
    rewarders = Rewarders(controller.hub, names)
    group = controller.pool.groups["p1-0"]

    def requests() -> list[tuple[str, str]]:
        return [(peer, body["sample_id"]) for peer, kind, body in sent.messages if kind == "score"]

    async def exclude() -> None:
        rewarders.start()
        rewarders.names = ["rewards-far"]  # as if that one were the group's
        for name in ("p1-0.000", "p1-0.001"):
            rewarders.ask(group, name, "4")
        await until(lambda: len(requests()) == 2)
        rewarders.names = list(names)
        await controller._handle_all([NONSENSE])
        rewarders.ask(group, "p1-0.002", "4")
        await until(lambda: len(requests()) == 5)

    for name in names:
        controller.hub.peers[name] = SimpleNamespace(name=name)  # type: ignore[assignment]
    controller.trust._rewarders = rewarders
    asyncio.run(exclude())
    assert requests()[2:] == [("rewards-home", f"p1-0.00{number}") for number in range(3)]
    assert not rewarders.answered("rewards-far", "p1-0.000") and rewarders.answered("rewards-home", "p1-0.000")
    controller.rewarders = rewarders
    assert controller.hub.can_lose(Speaker("rewards-far", "rewards", "far"))
    assert not controller.hub.can_lose(Speaker("rewards-home", "rewards"))


def test_a_site_that_is_seldom_wrong_stays(controller: Controller) -> None:
    controller.trust._delivered["service-far"], controller.trust._refused["service-far"] = 1000, 50
    hear(controller, batch("service-far", sample("far", 1, **NAN)))
    assert not controller.services.excluded


def fail_thrice(controller: Controller, group: int, number: int = 0, **wrong: Any) -> None:
    """Let whichever site owes a sample deliver a wrong one, until it has been tried as often as it may."""
    for _ in range(MOST_TRIES):
        name = f"p{group}-0.{number:03d}"
        service = next(one for one in controller.own if controller.services.holds(one, name, f"p{group}-0"))
        hear(controller, batch(service, sample(controller.own[service].site, group, number, **wrong)))


@pytest.mark.parametrize("agent", [False, True], ids=["completion", "episode"])
def test_a_sample_that_no_site_can_generate_is_void_with_what_was_found(controller: Controller, agent: bool) -> None:
    group = controller.pool.groups["p1-0"]
    group.agent = agent
    fail_thrice(controller, 1, completion_tokens=OWN + 10**6)
    void = group.scored["p1-0.000"].void
    assert void is not None and void.cause == "generation"
    found = "is no episode of an agent" if agent else "has tokens outside the vocabulary"
    assert re.fullmatch(rf"sample p1-0.000 was refused 3 times; the last one, from service-\w+, {found}", void.text)
    assert controller.pool.unfinished(["p1-0"]) == ["p1-0.001"] and controller.pool.missing("p1-0") == 1
    assert not any(controller.claims.owes(name, "p1-0.000") for name in controller.own)
    assert controller.ledger.counts_void() == {"generation": 1}
    assert controller.ledger.counts() == {"issued": 3, "scored": 1}
    assert controller.trust._failed == {}


@pytest.mark.parametrize("lone", [False, True], ids=["two sites", "lone site"])
def test_samples_are_counted_once_whatever_comes_together_with_refused_copies(
    controller: Controller, lone: bool
) -> None:
    dice, pool = random.Random(7), controller.pool
    if lone:
        controller.services._fleets.pop("service-home")  # as if it could not generate
        controller.services._dispatch.hold("home")
    for number in range(2, 8):
        issue(controller, number, "far")
    for _ in range(20):
        packed = []
        group, number = dice.randint(1, 7), dice.randint(0, 1)
        for wrong in dice.sample(["", "unreadable", "unusable"], dice.randint(1, 3)):
            changes = {"completion_tokens": OWN + 10**6} if wrong == "unusable" else {}
            body, arrays = sample_to_wire(sample("far", group, number, **changes))
            packed += [(body | ({"text": 5} if wrong == "unreadable" else {}), arrays)] * dice.randint(1, 4)
        dice.shuffle(packed)
        body, arrays = pack_samples(packed)
        hear(controller, Delivery("service-far", "samples", SampleBatch(**body), arrays, lambda: None))
        for group_id, group in pool.groups.items():
            assert pool.missing(group_id) == len(pool.unfinished([group_id]))
            assert not group.scored.keys() & pool.received.keys()
    assert pool.received and bool(controller.ledger.counts_void()) == lone


def test_a_sample_of_an_evaluation_that_no_site_can_generate_is_void(controller: Controller) -> None:
    scores: list[tuple[str, float | None]] = []
    group = issue(controller, 7, "far")
    controller.pool.groups.pop("p7-0")
    vars(controller.evaluator).update(
        awaits=lambda name: name.startswith("p7"),
        generates=lambda name: name == "p7-0.000" and not scores,
        group_of=lambda _: group,
        open_groups=lambda: {"p7-0": group},
        unfinished_samples=lambda _: [("p7-0.000", 0, None)],
        received=lambda made: None,
        scored=lambda name, reward, now: scores.append((name, reward)),
    )
    fail_thrice(controller, 7, completion_tokens=OWN + 10**6)
    assert scores == [("p7-0.000", None)] and controller.ledger.counts_void() == {}


def test_a_lone_site_that_sends_nothing_but_nan_ends_the_run_with_what_was_found(controller: Controller) -> None:
    controller.services._fleets.pop("service-home")  # as if it could not generate
    with pytest.raises(RunFailed) as failure:
        for group in range(2, 100):
            issue(controller, group, "far")
            for number in (0, 1):
                fail_thrice(controller, group, number, logprobs=NAN["logprobs"])
    assert controller.ledger.counts_void() == {"generation": 32} and not controller.services.excluded
    words = str(failure.value)
    assert re.search(r"generation of task 't' does not work: all 32 .*\(32 of 32\); see 'turned away' in", words)
    assert re.search(r"The last one: sample p17-0.001 .* from service-far, has log-prob.* not within", words)


def test_the_trainers_site_and_the_last_one_are_not_excluded(controller: Controller) -> None:
    home = replace(NONSENSE, peer="service-home")
    hear(controller, home)
    assert not controller.services.excluded
    controller.services._fleets.pop("service-home")  # as if it could not generate
    hear(controller, NONSENSE)
    assert not controller.services.excluded


def test_a_sample_given_again_goes_again_to_a_service_that_was_restarted(controller: Controller) -> None:
    hear(controller, batch("service-far", sample("far", 1, **NAN)))
    services, seed = controller.services, controller.config.seed

    def owed(site: str) -> list[str]:
        keys = services._dispatch.groups_of(site)
        work = open_work(keys, services.alone, controller.pool, controller.evaluator, seed)
        return [draw[0] for one in work for draw in one.draws]

    assert (owed("home"), owed("far")) == (["p0-0.000", "p0-0.001", "p1-0.000"], ["p1-0.001"])


def publish(controller: Controller, number: int) -> None:
    made = PublishDone(rank=0, started=0.0, finished=1.0, number=number, content_hash="h", bytes=1)
    asyncio.run(controller.services.spread(made))


def ready(service: str, number: int, **changes: Any) -> Delivery:
    values: dict[str, Any] = {"source": None, "transfer_s": 0.1, "bytes": 5, "started": 1.0, "fetched": 2.0}
    return said(service, WeightsReady(**({"number": number, "applied": {}} | values | changes)))


def test_the_run_goes_by_the_versions_of_the_sites_that_are_used(controller: Controller) -> None:
    publish(controller, 0)
    hear(controller, ready("service-home", 0))
    assert controller.services.version == -1 and controller.services.updating
    hear(controller, NONSENSE)
    assert controller.services.version == 0 and not controller.services.updating
    assert controller.waits.begun == frozenset()
    controller.services.gone("service-far")  # its goodbye is waited for no more
    assert controller.waits.begun == frozenset()


def test_weights_that_nobody_was_sent_fill_nothing(controller: Controller) -> None:
    publish(controller, 0)
    spans = {"far-regular-0": (1.0, 2.0)}
    hear(controller, *(ready("service-far", 0, applied=spans) for _ in range(100)))
    assert len(controller.times.loading) == 1
    assert controller.hub.refused() == {"not its own": {"service-far": 99}}


FAR_OFF = r"more than 0\.1 .*No rounding explains this.*`streamrl verify .*on_mismatch: warn trains .*E1016"


@pytest.mark.parametrize("measured_first", ["trainer", "instance"])
@pytest.mark.parametrize(
    ("site", "wanted", "ends"),
    [("far", "stop", ""), ("home", "stop", "on_mismatch is stop"), ("far", "auto", ""), ("home", "auto", FAR_OFF)],
)
def test_a_canary_that_differs_excludes_its_site_and_that_of_the_trainers_site_ends_the_run(
    tmp_path: Path, sent: Sent, site: str, wanted: str, ends: str, measured_first: str
) -> None:
    """`auto` acts only where no rounding explains it: weights are sent in bf16 here, and the difference is 2 nats."""
    with two_sites(tmp_path, sent, mismatch={"on_mismatch": wanted}) as controller:
        canary = CanaryMeasured(number=0, instance=f"{site}-regular-0", dtype="float32")
        differs = said(f"service-{site}", canary, logprobs=np.full(3, -2.0, np.float32))
        measured = measured_of_trainer()

        def play() -> None:
            if measured_first == "instance":
                hear(controller, differs)
            asyncio.run(controller.guard.judge_canaries(controller.canary.trainer_measured(0, measured)))
            if measured_first == "trainer":
                hear(controller, differs)

        if site == "home":
            with pytest.raises(RunFailed, match=rf"version 0 on home-regular-0 .*{ends}"):
                play()
        else:
            play()
            assert "does not compute what the trainer computes" in controller.services.excluded["service-far"]
            assert sent.ordered() == [("service-home", ["p1-0.000", "p1-0.001"])]


def measured_of_trainer() -> Measured:
    return Measured("float32", np.zeros(3, np.float32))


def test_a_canary_that_differs_again_and_again_is_said_once(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    controller.canary.trainer_measured(0, measured_of_trainer())
    canary = CanaryMeasured(number=0, instance="far-regular-0", dtype="float32")
    hear(controller, *(said("service-far", canary, logprobs=np.full(3, -0.5, np.float32)) for _ in range(50)))
    assert caplog.text.count("mismatch: version 0 on far-regular-0") == 1
    assert not controller.services.excluded  # bf16 could explain as much elsewhere


def test_a_run_that_is_to_warn_goes_on_whatever_its_instances_compute(
    tmp_path: Path, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    with two_sites(tmp_path, sent, mismatch={"on_mismatch": "warn"}) as controller:
        controller.canary.trainer_measured(0, measured_of_trainer())
        for site in ("home", "far"):
            canary = CanaryMeasured(number=0, instance=f"{site}-regular-0", dtype="float32")
            hear(controller, said(f"service-{site}", canary, logprobs=np.full(3, -9.0, np.float32)))
            assert caplog.text.count(f"mismatch: version 0 on {site}-regular-0") == 1
        assert not controller.services.excluded


@pytest.mark.parametrize("fleet", [None, 5, [], {}, [5], [{"name": "far-regular-0"}], [{"curve": 5}], "home"], ids=str)
def test_a_site_whose_first_hello_makes_no_sense_is_excluded_and_the_others_start(
    controller: Controller, fleet: object
) -> None:
    controller.services._fleets.clear()
    controller.services._dispatch._sites.clear()
    controller.hub.peers["service-far"].meta = {"fleet": fleet_of("home") if fleet == "home" else fleet}
    asyncio.run(controller._join_services())
    assert list(controller.services.excluded) == ["service-far"]
    assert controller.services.instances() == {"home-regular-0"}


def test_a_trainers_site_whose_hello_makes_no_sense_ends_the_run(controller: Controller) -> None:
    controller.services._fleets.clear()
    controller.services._dispatch._sites.clear()
    controller.hub.peers["service-home"].meta = {"fleet": [{}]}
    with pytest.raises(RunFailed, match="service-home cannot be used"):
        asyncio.run(controller._join_services())


def test_instances_that_come_and_go_for_ever_are_not_remembered_for_ever(controller: Controller) -> None:
    states = {"far-regular-0": InstanceState("regular", "ready", "")}
    reports = (FleetChanged(fleet=[], instances=states if n % 2 else {}) for n in range(4 * MOST_COMING))
    hear(controller, *(said("service-far", report) for report in reports))
    assert controller.hub.refused() == {} and len(controller.scaling.coming) == MOST_COMING


@pytest.mark.parametrize("name", ["trainer-0", "controller", "home-regular-0", "far-regular-1", "far-regular-0\n"])
def test_a_site_cannot_show_anothers_processes(controller: Controller, name: str) -> None:
    far = Speaker("service-far", "service", "far")
    read_heartbeat(controller.own, far, {"instances": {"far-regular-0": {"state": "busy"}}})
    for speaker in (far, Speaker("rewards-far", "rewards", "far")):
        with pytest.raises(MalformedMessage, match=r"of site far|has instances"):
            read_heartbeat(controller.own, speaker, {"instances": {name: {}}})


@pytest.mark.parametrize("name", ["trainer-0", "agents-home", "far-regular-0", "agents-far\n"])
def test_a_site_shows_no_agents_but_its_own(controller: Controller, name: str) -> None:
    far = Speaker("service-far", "service", "far")
    read_heartbeat(controller.own, far, {"agents": {"agents-far": {"state": "busy"}}})
    for speaker in (far, Speaker("rewards-far", "rewards", "far")):
        with pytest.raises(MalformedMessage, match=r"of site far|has instances"):
            read_heartbeat(controller.own, speaker, {"agents": {name: {}}})


@pytest.mark.parametrize(
    "state",
    [
        {"instances": {"far-regular-0": {"running": 1, "stalled_s": math.nan}}},
        {"instances": {"far-regular-0": {"running": 1, "stalled_s": -1e9}}},
        {"instances": {"far-regular-0": {"busy_since": math.inf}}},
        {"rtt_s": math.nan},
        {"tokens_per_s": 1e300},
        {"weights_refetched": 2**62},
        {"waits": [{"owner": "a", "waiting_for": "b", "since": 0.0, "limit_s": 1.0}] * 20_000},
    ],
    ids=lambda state: str(state)[:40],
)
def test_numbers_and_lists_of_a_heartbeat_have_an_end(controller: Controller, state: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match="state of service"):
        read_heartbeat(controller.own, Speaker("service-far", "service", "far"), state)


FLOOD = 20_000
MOST_MEMORY = 30 * 2**20
"""Bytes by which memory may grow meanwhile: what may be queued, and what Python keeps for itself."""


def test_20_000_messages_of_nonsense_leave_a_controller_as_it_was(controller: Controller) -> None:
    async def body() -> int:
        hub, memory = controller.hub, psutil.Process().memory_info
        hub.bind_outside(f"tcp://127.0.0.1:{free_port()}", None)
        hub._answer = lambda route, answer: True  # type: ignore[method-assign]
        route = PeerRoute(hub._doors[0], b"far")
        hub.peers.clear()  # those of the fixture are no peers
        meta = {"site": "far", "fleet": fleet_of("far"), "agreement": controller.context.agreement}
        about = {"name": "service-far", "role": "service", "meta": meta}
        hub._arrived(route, list(encode(Message("hello", "life", 0, about))), None)
        controller.recovery = SimpleNamespace(hello=_nothing)  # type: ignore[assignment]
        before = most = memory().rss
        for number, message in enumerate(nonsense("life", 1, FLOOD)):
            hub._arrived(route, list(encode(message)), None)
            if number % 1000 == 0:
                while not hub._inbox.empty():
                    await controller._receive()
                most = max(most, memory().rss)
        await hub.close()
        return most - before

    assert asyncio.run(body()) < MOST_MEMORY
    assert {"not allowed", "malformed", "not its own", "too many", "hello"} <= controller.hub.refused().keys()
    assert not controller.services.excluded and controller.ledger.counts() == {"issued": 4}
    hear(controller, batch("service-far", sample("far", 1)), batch("service-home", sample("home", 0)))
    assert controller.ledger.counts() == {"issued": 2, "finished": 2}


def test_the_silence_of_a_site_that_is_not_used_any_more_ends_nothing(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.01)
    hear(controller, NONSENSE)

    async def body() -> None:
        hub = controller.hub
        for name, site in (("service-far", "far"), ("service-home", None)):
            hub.peers[name] = Peer(name, "service", {}, "life", Outbox(1), Flow(lost_after_s=0.05), site)
        beating = asyncio.create_task(hub._beat())
        with pytest.raises(PeerLost, match="service-home has been silent"):
            await hub.receive()
        assert hub.peers["service-far"].lost and hub.receive_now() is None
        beating.cancel()

    asyncio.run(body())


async def _nothing(*_: object) -> None:
    pass
