"""The part of an instance on a further node: vLLM's workers without an engine of their own.

Node 0 (`generation/instance/instance_process.py`) talks to the service and, through vLLM, to these workers; it handles
samples, heartbeats and new weights. When one part ends, the whole instance ends and is restarted as one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamrl.generation.instance.eight_bits import choose_here, with_computation
from streamrl.generation.instance.engine_config import Place, engine_config
from streamrl.generation.instance.vllm_processes import fork_where_safe
from streamrl.runtime.process_context import RoleContext

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class NodeShard:
    """The process that runs one node's workers."""

    def __init__(self, context: RoleContext, pool: str, place: Place) -> None:
        """
        Args:
            context: context of the instance.
            pool: name of the instance's pool.
            place: place of this node.
        """
        self.context, self.place = context, place
        self.pool = context.pool(pool)

    async def run(self) -> None:
        """Work until a worker ends; vLLM's first node ends them.

        Raises:
            RuntimeError: vLLM failed, or the other nodes did not connect.
        """
        executor = self._start()
        try:
            await asyncio.to_thread(executor.start_worker_monitor, inline=True)
        finally:
            executor.shutdown()

    def _start(self) -> MultiprocExecutor:
        """Start the workers; takes 5 to 60 s and blocks, as only a process without further threads can fork them."""
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        cuda = self.context.cluster.hardware == "cuda"
        computation = choose_here(self.context.run, cuda, self.pool.gpus_per_replica)
        config = engine_config(self.pool, with_computation(self.context.run, computation), cuda, self.place)
        fork_where_safe(cuda)
        return MultiprocExecutor(config, monitor_workers=False)
