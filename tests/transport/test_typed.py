"""Messages by type: what fits reaches the owner, what does not is refused with the field's name, and counted."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import msgspec
import pytest

from streamrl.protocol import controller_rewards, controller_site, controller_trainer
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.controller_site import Park, Use
from streamrl.protocol.message import MessageReader, Right, TypedMessage, kind_of, parse, wire
from streamrl.protocol.site_instance import FinishedSample, GenerateSample, KeptTokens, ReleasedSample
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.rollouts.void import Void, VoidCause
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link, Speaker
from streamrl.transport.wire import MalformedMessage
from tests.messages import EDGES, messages
from tests.ports import free_port
from tests.waiting import scaled, until


def test_no_sender_has_two_messages_of_one_kind() -> None:
    for edge in EDGES[:-1]:
        for name, sent in vars(edge).items():
            if name.startswith("FROM_"):
                kinds = [kind_of(one) for one in sent]
                assert len(set(kinds)) == len(kinds) > 0, f"{edge.__name__}.{name}"


def test_every_message_can_be_sent_by_somebody() -> None:
    bases = {controller_trainer.MicroBatch, controller_trainer.Answer, TypedMessage}
    for edge in EDGES[:-1]:
        sent = {one for name, some in vars(edge).items() if name.startswith("FROM_") for one in some}
        own = {one for one in messages(edge) if one.__module__ == edge.__name__}
        assert own - bases <= sent, edge.__name__


@pytest.mark.parametrize(
    ("message", "record", "more"),
    [
        (FinishedSample, Sample, set()),
        (ReleasedSample, PartialSample, set()),
        (KeptTokens, PartialSample, set()),
        (GenerateSample, SampleRequest, {"route"}),
    ],
)
def test_messages_of_samples_have_the_fields_of_the_records(message: type, record: type, more: set[str]) -> None:
    arrays = {"completion_tokens", "logprobs", "token_versions", "prompt_tokens", "experts"}
    plain = {field.name for field in dataclasses.fields(record)} - arrays
    assert {field.name for field in msgspec.structs.fields(message)} == plain | more


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "missing required field `sample_ids`"),
        ({"sample_ids": ["a", 3]}, r"\$.sample_ids\[1\]"),
        ({"sample_ids": [], "less": 1}, "unknown field `less`"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_the_fields_name(body: dict[str, Any], says: str) -> None:
    with pytest.raises(MalformedMessage, match=f"'park'.*{says}"):
        parse(Park, body)
    assert parse(Park, {"sample_ids": ["a"]}) == Park(sample_ids=["a"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": float("nan")}, "the reward must be finite, got nan"),
        ({"reward": 1e200}, r"the reward must be between -1e\+12 and 1e\+12, got 1e\+200"),
        ({"reward": None}, "a void reward has a cause and a text"),
        ({"reward": None, "error": "late"}, "a void reward has a cause and a text"),
        ({"reward": None, "void_cause": "timeout"}, "a void reward has a cause and a text"),
        ({"void_cause": "timeout", "error": "late"}, "a void reward has a cause and a text"),
        ({"reward": None, "void_cause": "weather", "error": "rain"}, "weather"),
        ({"reward": None, "void_cause": "crash", "error": "x" * 1001}, "an error of 1001 and .* at most 1000"),
        ({"reward": None, "void_cause": "crash", "error": "x", "traceback": "y" * 2001}, "a traceback of 2001"),
    ],
)
def test_a_reward_is_a_finite_number_or_void_with_its_cause(changes: dict[str, Any], says: str) -> None:
    whole = {"sample_id": "a", "reward": 1.0, "seconds": 0.5}
    with pytest.raises(MalformedMessage, match=says):
        parse(ScoreAnswer, whole | changes)
    void = parse(ScoreAnswer, whole | {"reward": None, "void_cause": "timeout", "error": "late"})
    assert void.void == Void(VoidCause.TIMEOUT, "late") and parse(ScoreAnswer, whole).void is None
    assert parse(ScoreAnswer, wire(void)[1]) == void
    longest = {"reward": None, "void_cause": "crash", "error": "x" * 1000, "traceback": "y" * 2000}
    assert parse(ScoreAnswer, whole | longest).void == Void(VoidCause.CRASH, "x" * 9999), "what is sent is cut"


def test_what_is_refused_is_counted_and_acknowledged_and_the_next_message_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        hub = Hub("controller", WaitRegistry("controller")).bind(address)
        hub.reads = MessageReader({"rewards": Right(controller_rewards.FROM_REWARDS)})
        link = await Link("rewards-home", "rewards", WaitRegistry("rewards")).connect(address, scaled(10))
        link.reads = MessageReader(controller_site.FROM_CONTROLLER)
        answer = ScoreAnswer(sample_id="a", reward=1.0, seconds=0.5)
        kind, fields = wire(answer)
        await link.send(kind, fields | {"reward": "high"})
        await link.send("scale", {"pool": "regular", "site": "", "replicas": 9})  # an operator's
        await link.send(kind, fields)
        delivery = await hub.receive()
        assert delivery.body == answer and (delivery.peer, delivery.kind) == ("rewards-home", "scored")
        delivery.ack()
        await link.flush(scaled(10))
        assert hub.malformed == 2
        await hub.send("rewards-home", "use", {"instances": "all"})
        await hub.send("rewards-home", *wire(Use(instances=["a"])))
        delivery = await link.receive()
        assert delivery.body == Use(instances=["a"]) and link.malformed == 1
        delivery.ack()
        await until(lambda: not hub.peers["rewards-home"].outbox.pending)
        await link.close()
        await hub.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert "`$.reward`" in caplog.text and "`$.instances`" in caplog.text


def test_a_role_without_messages_may_send_nothing() -> None:
    reads = MessageReader({"rewards": Right(controller_rewards.FROM_REWARDS)})
    with pytest.raises(MalformedMessage, match="trainer may not send 'scored'; expected one of none"):
        reads(Speaker("trainer-0", "trainer"), "scored", {})
    with pytest.raises(MalformedMessage, match="rewards may not send 'scale'; expected one of scored"):
        reads(Speaker("rewards-here", "rewards"), "scale", {})
