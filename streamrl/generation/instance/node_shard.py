"""An instance's part on a further node: vLLM's workers there, without an engine of their own.

The node that schedules (`generation/instance/instance_process.py`) talks to the service, and to these workers through
vLLM: samples, heartbeats and new weights are its business. When one part ends, the whole instance does, and is started
again as one.
"""

from __future__ import annotations

import asyncio

from streamrl.generation.instance.engine_config import Place, engine_config
from streamrl.runtime.process_context import RoleContext


class Shard:
    """Runs the workers of one node."""

    def __init__(self, context: RoleContext, pool: str, place: Place) -> None:
        """
        Args:
            context: of the instance.
            pool: its pool.
            place: of this node.
        """
        self.context, self.place = context, place
        self.pool = context.pool(pool)

    async def run(self) -> None:
        """Works until a worker ends, which vLLM's first node brings about.

        Raises:
            RuntimeError: vLLM failed, or the other nodes did not come.
        """
        await asyncio.to_thread(self._work)

    def _work(self) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        cuda, several_sites = self.context.cluster.hardware == "cuda", bool(self.context.cluster.remote_sites)
        config = engine_config(self.pool, self.context.run, cuda, several_sites, self.place)
        executor = MultiprocExecutor(config, monitor_workers=False)
        try:
            executor.start_worker_monitor(inline=True)
        finally:
            executor.shutdown()
