"""The weight paths that push: the trainer broadcasts each version into a group with all instances' workers.

`gloo`, `nccl` and `ipc` are this module and `vllm_broadcast.py`, each with its own communicator (`gloo.py`, `nccl.py`,
`ipc.py`). Who is in the group, and when it is formed anew, `weights/membership.py` decides; the instances are reached
through the controller and the site's service (`generation/site/pushed_weights.py`).

    rank 0                  controller -> service -> instances
    members, join, pause    each answered
    load, and meanwhile the tensors, in the group

The other ranks wait in a collective for what rank 0 says next. However long that takes, it says every `SIGN_S` that it
still waits, so their limit is of no consequence. Only while tensors are gathered does it say nothing: there one
broadcast may take `deadlines.weights_s`, which has to be below the limit of a collective (`launcher/new_run_check.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import math
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from streamrl.errors import RunFailed
from streamrl.machine.loopback import is_loopback
from streamrl.protocol.controller_site import Meeting, WeightAnswer, WeightCall
from streamrl.protocol.message import wire
from streamrl.runtime.interfaces import address_towards, interface_towards, nccl_on
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.ip_addresses import host_of
from streamrl.weights.backends.base import Compute, Published, PublishedModel, WeightBackend
from streamrl.weights.backends.communicator import (
    Communicator,
    GroupBroken,
    communicator_of,
    lead,
    open_meeting,
)
from streamrl.weights.backends.parcels import send
from streamrl.weights.membership import Push, PushedGroup, PushStep, world_size
from streamrl.weights.version import type_name

log = logging.getLogger(__name__)

Asked = concurrent.futures.Future[WeightAnswer]
WAIT, SEND, DONE = "wait", "send", "done"
"""What rank 0 has its ranks do next; anything else is why the publish has failed."""
SIGN_S = 5.0
"""Seconds after which rank 0, while it waits, has the other ranks wait on."""


def meeting_address(controller: str, one_machine: bool, backend: str) -> str:
    """Return the address of this node at which the site's other nodes reach it, for the group's rendezvous.

    That is the one from which this node reaches the controller; nothing is sent to find it out.

    Args:
        controller: the controller's ZeroMQ address, `tcp://host:port` if there are several nodes.
        one_machine: whether all processes of the site are on this machine.
        backend: name of the weight path.

    Raises:
        RunFailed: there are several nodes, and this one reaches the controller by its loopback alone.
        UserError: it does not reach the controller at all.
    """
    if one_machine:
        return "127.0.0.1"
    if is_loopback(own := address_towards(host_of(controller.removeprefix("tcp://")))):
        raise RunFailed(
            f"weights.backend: {backend} needs an address of the trainer's node that other nodes reach, and the "
            f"controller is at {controller}; start Ray with --node-ip-address, or set weights.backend: stream"
        )
    return own


def nccl_environment(context: RoleContext) -> dict[str, str]:
    """Return what changes in the environment of the trainer's ranks, before their first collective.

    Ranks on one node have NCCL listen on the loopback interface. If it takes their weights to other nodes as well, it
    listens on the interface by which this node reaches the controller, as the group's rendezvous does.

    Raises:
        UserError: this node does not reach the controller.
    """
    if context.run.weights.backend != "nccl" or context.one_machine or context.cluster.trainer.nodes > 1:
        return {}
    return nccl_on(interface_towards(host_of(context.addresses.controller.removeprefix("tcp://"))))


class _Calls:
    """Calls to the instances, made from the computing thread and answered in the event loop."""

    def __init__(self, link: Link, limit_s: float) -> None:
        self._link, self._limit_s = link, limit_s
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._open: dict[str, asyncio.Future[WeightAnswer]] = {}
        self._heard = time.monotonic()
        """When the latest answer came, monotonic seconds."""

    def answered(self, answer: WeightAnswer) -> None:
        self._heard = time.monotonic()
        call = self._open.get(answer.call)
        if call is not None and not answer.pending and not call.done():
            call.set_result(answer)

    def begin(self, step: Literal["members", "join", "pause", "load"], **values: Any) -> Asked:
        """Begin a call; for the computing thread."""
        call = WeightCall(call=f"{step}-{next(self._numbers)}", step=step, **values)
        return asyncio.run_coroutine_threadsafe(self._ask(call), self._loop)

    async def _ask(self, call: WeightCall) -> WeightAnswer:
        self._open[call.call] = self._loop.create_future()
        whom = ", ".join(member.name for member in call.members) or "the site's service"
        self._heard = time.monotonic()
        try:
            await self._link.send(*wire(call))
            # the service tells in time which instance does not answer; this is for a service that says nothing at all
            async with self._link.waits.deadline(
                f"{whom} to answer {call.step} of version {call.number}",
                self._limit_s,
                lambda: time.monotonic() - self._heard,
            ):
                return await self._open[call.call]
        finally:
            del self._open[call.call]


class _OtherRanks:
    """The ranks above 0, as rank 0 sees them; they are in `told` whenever it calls a method."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, order: str) -> None:
        """Have all ranks do something next."""
        dist.broadcast_object_list([order])
        self._told = time.monotonic()

    def keep_waiting(self) -> None:
        """Have them wait on, if they have heard nothing for `SIGN_S`."""
        if time.monotonic() - self._told >= SIGN_S:
            self.tell(WAIT)

    def answer(self, asked: Asked) -> WeightAnswer:
        """Return the answer to a call, for which they wait, too."""
        while not concurrent.futures.wait([asked], SIGN_S).done:
            self.keep_waiting()
        return asked.result()


def told() -> str:
    """Return what rank 0 has this rank, another one, do next."""
    orders = [WAIT]
    while orders == [WAIT]:
        dist.broadcast_object_list(orders)
    return orders[0]


class BroadcastBackend(WeightBackend):
    """The trainer's side of a path that pushes; rank 0 sends."""

    def __init__(self, context: RoleContext, compute: Compute) -> None:
        """
        Raises:
            RunFailed: the run has 8-bit generation weights, which are not pushed.
        """
        self._name = context.run.weights.backend
        if (kind := context.run.weights.generation_dtype) != "same":
            raise RunFailed(
                f"weights.backend: {self._name} does not send weights.generation_dtype: {kind}; set weights.backend: "
                "stream"
            )
        self.context, self._compute = context, compute
        self._limit_s = context.run.deadlines.weights_s
        self._kind = communicator_of(context.run.weights.path.engine)
        self._calls: _Calls | None = None
        self._group = PushedGroup()
        self._ranks = _OtherRanks()
        self._communicator: Communicator | None = None

    async def serve(self) -> None:
        """Return at once: instances are members of the group and fetch nothing."""

    def answered(self, answer: WeightAnswer) -> None:
        """Take what became of a call to the instances."""
        if self._calls is not None:
            self._calls.answered(answer)

    async def publish(self, model: PublishedModel, number: int, controller: Link, behind: bool = False) -> Published:
        """Broadcast the weights to all instances, or to those that are `behind`.

        Raises:
            RunFailed: on every rank, if a weight is not finite, or after `membership.TRIES` tries.
        """
        if self._calls is None:
            self._calls = _Calls(controller, self._limit_s)
        applied = await self._compute(self._push, model, number, behind, self._calls)
        size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in model.layout.described())
        return Published(number, "", size if applied else 0, applied, behind)

    # -- in the computing thread, on every rank

    def _push(self, model: PublishedModel, number: int, behind: bool, calls: _Calls) -> dict[str, tuple[float, float]]:
        """Publish one version; a collective of the trainer's ranks, of which rank 0 alone speaks with others."""
        push = Push(self._group)
        while (order := self._ordered(model.rank, push, number, behind, calls)) == SEND:
            tensors = model.layout.tensors()
            if model.rank == 0:
                self._send(model, tensors, push, number, calls)
            else:
                for _ in tensors:  # gathered by all
                    pass
        if order != DONE:
            raise RunFailed(f"version {number} is not published: {order}")
        return push.applied

    def _ordered(self, rank: int, push: Push, number: int, behind: bool, calls: _Calls) -> str:
        """Return what all ranks do next, as rank 0 says."""
        if rank > 0:
            return told()
        try:
            order = self._up_to_sending(push, number, behind, calls)
        except Exception as error:  # the others wait for an order
            order = str(error) or type(error).__name__
        self._ranks.tell(order)
        return order

    def _up_to_sending(self, push: Push, number: int, behind: bool, calls: _Calls) -> str:
        """Take the steps of a publish up to the one that needs all ranks."""
        while True:
            if not self._group.members:
                self._leave()
            match push.step:
                case PushStep.ASK:
                    if push.why:
                        log.warning("publishing version %d again: %s", number, push.why)
                    asked = calls.begin("members", number=number, members=[], behind=behind)
                    push.present(self._ranks.answer(asked).members)
                case PushStep.FORM:
                    self._form(push, number, calls)
                case PushStep.PAUSE:
                    asked = calls.begin("pause", number=number, members=list(push.members))
                    push.paused(self._ranks.answer(asked))
                case PushStep.SEND:
                    return SEND
                case PushStep.DONE:
                    return DONE
                case PushStep.FAILED:
                    return f"{push.why} (try {push.tries})"

    def _form(self, push: Push, number: int, calls: _Calls) -> None:
        """Form a group with the members of a try."""
        self._leave()
        host = meeting_address(self.context.addresses.controller, self.context.one_machine, self._name)
        world, broken = world_size(push.members), ""
        store, port = open_meeting(host, world, self._limit_s)
        meeting = Meeting(host=host, port=port, world=world)
        asked = calls.begin("join", number=number, members=list(push.members), meeting=meeting)

        def stopped() -> str:
            self._ranks.keep_waiting()
            return _gone_wrong(asked)

        try:
            self._communicator = lead(self._kind, store, host, world, self._limit_s, stopped)
        except GroupBroken as error:
            broken = str(error)
        del store  # members that still wait for it notice
        push.formed(self._ranks.answer(asked), broken)
        if push.step is PushStep.PAUSE:
            log.info("a group with %s, %d ranks", ", ".join(member.name for member in push.members), world)

    def _send(
        self,
        model: PublishedModel,
        tensors: Iterator[tuple[str, torch.Tensor]],
        push: Push,
        number: int,
        calls: _Calls,
    ) -> None:
        """Send all tensors; where that is of no use any more, take them from the other ranks all the same."""
        group, broken, found = self._communicator, "", ""
        assert group is not None
        asked = calls.begin("load", number=number, members=list(push.members))

        def end_early(_: Asked) -> None:
            if why := _gone_wrong(asked):
                group.abort(why)

        asked.add_done_callback(end_early)
        described = [(name, type_name(dtype), shape) for name, dtype, shape in model.layout.described()]
        try:
            found = send(group, described, tensors)
        except GroupBroken as error:
            broken = str(error)
            self._leave()
            for _ in tensors:
                pass
        except BaseException:  # a weight that is not finite: no rank publishes
            self._leave()
            raise
        try:
            push.sent(self._ranks.answer(asked), broken)
        except RunFailed as error:
            push.sent(WeightAnswer(call=""), str(error))
        if push.step is PushStep.DONE:
            if push.why:
                log.warning("version %d was not loaded by all: %s", number, push.why)
            log.info("version %d (%s) is loaded by %s", number, found, ", ".join(sorted(push.applied)) or "nobody")

    def _leave(self) -> None:
        """Leave the group, if there is one."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None


def _gone_wrong(asked: Asked) -> str:
    """Return why it is of no use to wait for all members any longer; '': it still is."""
    if not asked.done():
        return ""
    if (error := asked.exception()) is not None:
        return str(error)
    answer = asked.result()
    causes = answer.lost | answer.failed
    return "; ".join(f"{name}: {causes[name]}" for name in sorted(causes))


def make_backend(context: RoleContext, hub: Hub, compute: Compute) -> BroadcastBackend:
    """Make the backend of a trainer rank; nothing is fetched from `hub`."""
    return BroadcastBackend(context, compute)
