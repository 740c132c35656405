"""Measure TransferQueue, the peer of `data_plane.py`, under a Python of its own that has nothing of this project."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil
from data_plane_roles import LIMIT_S, POOL, made_samples

PEER_BATCHES = (1, 32)


def peer_main(told: dict[str, Any]) -> None:
    """Run under the peer's Python, with `made_samples` beside it; print a line of JSON."""
    import importlib.metadata
    import json
    import time

    import numpy as np
    import psutil
    import ray
    import torch
    import transfer_queue
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    fields = ["tokens", "logprobs", "versions", "text"]
    seconds, instances = told["seconds"], told["instances"]
    # Ray's CPUs are only numbers here: the controller and each unit of the store claim one
    memory = 100 * 1024 * 1024
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=memory, _temp_dir=told["folder"])
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    client = transfer_queue.get_client()

    class Producer:
        def __init__(self, number: int) -> None:
            transfer_queue.init()
            self.client = transfer_queue.get_client()
            self.made = [(*map(torch.from_numpy, arrays), text) for *arrays, text in made_samples(told["pool"], number)]

        def ready(self) -> bool:
            return True

        def produce(self, partition: str, batch: int) -> int:
            count, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                some = [self.made[(count + n) % len(self.made)] for n in range(batch)]
                *columns, texts = zip(*some, strict=True)
                nested = [torch.nested.as_nested_tensor(list(column), layout=torch.jagged) for column in columns]
                values = [*nested, NonTensorStack(*texts)]
                data = TensorDict(dict(zip(fields, values, strict=True)), batch_size=[batch])
                self.client.put(data, partition_id=partition)
                count += batch
            return count

    remote = ray.remote(num_cpus=0)(Producer)
    producers: list[Any] = [remote.remote(number) for number in range(instances)]
    ray.get([producer.ready.remote() for producer in producers], timeout=told["limit_s"])
    watched = {
        process: process.name().removeprefix("ray::")
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
    }
    results = []
    for batch in told["batches"]:
        partition, got, nbytes = f"samples-{batch}", 0, 0
        before = {process: sum(process.cpu_times()[:2]) for process in watched}
        memory_before = sum(process.memory_info().rss for process in watched)
        began = time.monotonic()
        running = [producer.produce.remote(partition, batch) for producer in producers]
        while time.monotonic() < began + seconds:
            meta = client.get_meta(fields, told["get"], partition, mode="fetch", task_name="train")
            if meta.size == 0:
                time.sleep(0.002)
                continue
            data = client.get_data(meta)
            parts = [[part.numpy() for part in data[name].unbind()] for name in fields[:3]]
            nbytes += sum(part.nbytes for column in parts for part in column) + sum(map(len, data["text"]))
            got += len(np.concatenate(parts[0]).astype(np.int64)) and meta.size
            client.clear_samples(meta)
        took = time.monotonic() - began
        cpu = [(name, (sum(process.cpu_times()[:2]) - before[process]) / took) for process, name in watched.items()]
        memory_after = sum(process.memory_info().rss for process in watched)
        put = sum(ray.get(running, timeout=told["limit_s"]))
        results.append(
            {
                "batch": batch,
                "samples_per_s": got / took,
                "mb_per_s": nbytes / took / 1e6,
                "put_per_s": put / seconds,
                "cpu": [["consumer", cpu[0][1]], *([name, share] for name, share in cpu[1:] if share > 0.03)],
                "memory_mb": [memory_before / 1e6, memory_after / 1e6],
            }
        )
        client.clear_partition(partition)
    print(json.dumps({"version": importlib.metadata.version("transferqueue"), "results": results}), flush=True)
    transfer_queue.close()
    ray.shutdown()


def measure_peer(python: Path | None, seconds: float, instances: int) -> dict[str, Any]:
    """What `peer_main` says; or {"skipped": why}."""
    if python is None:
        return {"skipped": "no --peer-python was given"}
    source = "from __future__ import annotations\nimport json, sys\nfrom typing import Any\n"
    source += (
        "\n".join(inspect.getsource(some) for some in (made_samples, peer_main))
        + "\npeer_main(json.loads(sys.argv[1]))\n"
    )
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        told = {"seconds": seconds, "instances": instances, "folder": folder, "limit_s": LIMIT_S + seconds}
        told |= {"pool": POOL, "batches": PEER_BATCHES, "get": 32}
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}
        command = [str(python), "-c", source, json.dumps(told)]
        process = subprocess.Popen(
            command, env=os.environ | quiet, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = process.communicate(timeout=3 * LIMIT_S + 3 * seconds)
        except subprocess.TimeoutExpired:
            own = psutil.Process(process.pid)
            for child in (*own.children(recursive=True), own):
                child.kill()
            out, err = process.communicate(timeout=LIMIT_S)
            return {"skipped": "it did not end in time: " + err.strip()[-300:]}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"skipped": f"it failed: {err.strip()[-300:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found
