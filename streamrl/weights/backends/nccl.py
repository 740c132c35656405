"""The NCCL weight path inside a site with GPUs: vLLM's own weight-transfer engine (PyNccl), driven by the trainer.

vLLM's trainer-side engine gathers each parameter (a collective of the trainer's ranks) and broadcasts it to all
instances' workers in one NCCL group; this module gives it a client that reaches the instances through the
controller and the site's service.

It has not been run so far: it needs a trainer GPU and an instance GPU in one machine.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from streamrl.errors import RunFailed
from streamrl.machine.loopback import is_loopback
from streamrl.protocol.controller_site import WeightAnswer, WeightCall
from streamrl.protocol.message import wire
from streamrl.runtime.interfaces import address_towards, free_ports
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights.backends.base import Compute, Published, PublishedModel, WeightBackend


def meeting_address(controller: str, one_machine: bool) -> str:
    """Return the address of this node at which the site's other nodes reach it, for the group's rendezvous.

    That is the one from which this node reaches the controller; nothing is sent to find it out.

    Args:
        controller: the controller's ZeroMQ address, `tcp://host:port` if there are several nodes.
        one_machine: whether all processes of the site are on this machine.

    Raises:
        RunFailed: there are several nodes, and this one reaches the controller by its loopback alone.
        UserError: it does not reach the controller at all.
    """
    if one_machine:
        return "127.0.0.1"
    host = controller.removeprefix("tcp://").rpartition(":")[0]
    if is_loopback(own := address_towards(host)):
        raise RunFailed(
            f"weights.backend: nccl needs an address of the trainer's node that other nodes reach, and the controller "
            f"is at {controller}; start Ray with --node-ip-address, or set weights.backend: stream"
        )
    return own


class _Client:
    """vLLM's `VLLMWeightSyncClient` over the controller's link: synchronous calls from the engine's threads."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.link, self.loop, self.limit_s = link, loop, limit_s
        self.version = 0
        self._calls = itertools.count()

    def _call(self, method: str, payload: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(self._ask(method, payload), self.loop).result()

    async def _ask(self, method: str, payload: dict[str, Any]) -> None:
        call = f"{method}-{next(self._calls)}"
        await self.link.send(*wire(WeightCall(call=call, method=method, payload=payload)))
        async with self.link.waits.deadline(f"all instances to answer {method}", self.limit_s):
            # the controller sends nothing else to a trainer that is publishing
            delivery = await self.link.receive()
            delivery.ack()
            if delivery.body != WeightAnswer(call=call):
                raise RunFailed(f"expected the answer of {call}, got {delivery.body}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", {"version": weight_version or str(self.version)})


class NcclBackend(WeightBackend):
    """The trainer's side of the NCCL path; rank 0 sends."""

    def __init__(self, context: RoleContext, compute: Compute) -> None:
        """
        Raises:
            RunFailed: the run has 8-bit generation weights, which NCCL does not send.
        """
        if (kind := context.run.weights.generation_dtype) != "same":
            raise RunFailed(f"NCCL does not send weights.generation_dtype: {kind}; set weights.backend: stream")
        self.context, self._compute = context, compute
        self._client: _Client | None = None
        self._engine: Any = None

    async def serve(self) -> None:
        """Return at once: instances are members of the group and fetch nothing."""

    async def publish(self, model: PublishedModel, number: int, controller: Link) -> Published:
        """Broadcast the weights to all instances; the first call forms the group."""
        if self._client is None:
            self._client = _Client(controller, asyncio.get_running_loop(), self.context.run.deadlines.weights_s)
        self._client.version = number
        await self._compute(self._send, model, self._client)
        size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in model.layout.described())
        return Published(number, "", size)

    def _send(self, model: PublishedModel, client: _Client) -> None:
        if self._engine is None:
            self._engine = self._connect(model, client)
        self._engine.send_weights()

    def _connect(self, model: PublishedModel, client: _Client) -> Any:
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        class Source(WeightSource):
            """The policy's tensors, named and shaped as the instances' loader expects them."""

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(*one) for one in model.layout.described()]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return model.layout.tensors()

        site = self.context.cluster.sites[self.context.cluster.trainer_site]
        workers = sum(pool.replicas * pool.gpus_per_replica for pool in site.generation)
        host = meeting_address(self.context.addresses.controller, self.context.one_machine)
        (port,) = free_ports(1, host)
        info = NCCLTrainerInitInfo(
            master_address=host,
            master_port=port,
            world_size=1 + workers,
            packed=True,
            rank=model.rank,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=Source())


def make_backend(context: RoleContext, hub: Hub, compute: Compute) -> NcclBackend:
    """Make the backend of a trainer rank; nothing is fetched from `hub`."""
    return NcclBackend(context, compute)
