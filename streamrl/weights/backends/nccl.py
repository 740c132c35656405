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
from streamrl.protocol.controller_site import WeightAnswer, WeightCall
from streamrl.protocol.message import wire
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights.backends.base import Compute, Published, PublishedModel, WeightBackend


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
        size = sum(math.prod(shape) for shape in model.shapes().values())
        return Published(number, "", size * self._dtype.itemsize)

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.context.run.model.dtype)
        return found

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

        dtype = self._dtype

        class Source(WeightSource):
            """The policy's parameters in the compute type."""

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, dtype, shape) for name, shape in model.shapes().items()]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return model.weights()

        site = self.context.cluster.sites[self.context.cluster.trainer_site]
        workers = sum(pool.replicas * pool.gpus_per_replica for pool in site.generation)
        info = NCCLTrainerInitInfo(
            master_address=site.address,
            master_port=self.context.addresses.nccl_port,
            world_size=1 + workers,
            packed=True,
            rank=model.rank,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=Source())


def make_backend(context: RoleContext, hub: Hub, compute: Compute) -> NcclBackend:
    """Make the backend of a trainer rank; nothing is fetched from `hub`."""
    return NcclBackend(context, compute)
