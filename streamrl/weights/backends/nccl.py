"""The CUDA path inside a site: vLLM's own NCCL weight-transfer engine (PyNccl), driven by the trainer.

vLLM's trainer-side engine gathers each parameter (a collective of the trainer's ranks) and broadcasts it to all
instances' workers in one NCCL group; this module gives it a client that reaches the instances through the
controller and the site's service.

Not run so far: it needs a trainer GPU and an instance GPU in one machine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from streamrl.errors import RunFailed
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.endpoint import Link

if TYPE_CHECKING:
    from streamrl.training.trainer import Trainer


class _Client:
    """vLLM's `VLLMWeightSyncClient` over our link: synchronous calls, made from the engine's threads."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.link, self.loop, self.limit_s = link, loop, limit_s
        self.version = 0
        self._calls = itertools.count()

    def _call(self, method: str, payload: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(self._ask(method, payload), self.loop).result()

    async def _ask(self, method: str, payload: dict[str, Any]) -> None:
        call = f"{method}-{next(self._calls)}"
        await self.link.send("weight_call", {"call": call, "method": method, "payload": payload})
        async with self.link.waits.deadline(f"all instances to answer {method}", self.limit_s):
            # the controller sends nothing else to a trainer that is publishing
            delivery = await self.link.receive()
            delivery.ack()
            if delivery.kind != "weight_answer" or delivery.body.get("call") != call:
                raise RunFailed(f"expected the answer of {call}, got {delivery.kind} {delivery.body}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", {"version": weight_version or str(self.version)})


class NcclSender:
    """Trainer's side of the NCCL path; every rank holds one, rank 0 sends."""

    def __init__(self, trainer: Trainer, context: RoleContext, link: Link) -> None:
        self.trainer, self.context = trainer, context
        self.client = _Client(link, asyncio.get_running_loop(), context.run.deadlines.weights_s)
        self._engine: Any = None
        parameters = list(trainer.policy.model.parameters())
        self.dtype: torch.dtype = getattr(torch, trainer.run.model.dtype)
        self.nbytes = sum(p.numel() for p in parameters) * self.dtype.itemsize

    def send(self, version: int) -> None:
        """Sends the current weights to all instances as `version`; to be called in the thread that computes."""
        self.client.version = version
        if self._engine is None:
            self._engine = self._connect()
        self._engine.send_weights()

    def _connect(self) -> Any:
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        trainer, dtype = self.trainer, self.dtype

        class Source(WeightSource):
            """The policy's parameters in the compute type."""

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(n, dtype, tuple(p.shape)) for n, p in trainer.policy.model.named_parameters()]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return trainer.weights()

        site = self.context.cluster.sites[self.context.cluster.trainer_site]
        workers = sum(pool.replicas * pool.gpus_per_replica for pool in site.generation)
        info = NCCLTrainerInitInfo(
            master_address=site.address,
            master_port=self.context.addresses.nccl_port,
            world_size=1 + workers,
            packed=True,
            rank=trainer.rank,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=self.client, source=Source())
