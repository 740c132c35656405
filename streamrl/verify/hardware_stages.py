"""The stages of `streamrl verify --hardware`, each in a process of its own: what fails or hangs ends one stage.

`python -m streamrl.verify.hardware_stages NAME` prints a measurement per line, as JSON. A stage measures the same on a
CPU and on GPUs, through the code that a run uses.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from streamrl.machine.cpu import this_cpu
from streamrl.scratch_folders import ScratchFolder
from streamrl.verify.hardware_measurement import Measurement, Size, sheet_peak

SECONDS = 0.5
"""Seconds over which a quick operation is repeated."""


CPU = Size(1024, 256, (128, (400, 60, 80, 60)), 4, 512, 8, 2, 1536, 8192, (512,))
GPU = Size(8192, 4096, (2048, (8000, 500, 900, 700)), 28, 1536, 12, 2, 8960, 151_936, (2048, 8192, 32_768))
"""A trainer of the shape of Qwen2.5-1.5B."""


def device_here() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def size_here() -> Size:
    """Return the size for this machine's devices."""
    return GPU if torch.cuda.is_available() else CPU


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def quickest(work: Callable[[], object], seconds: float | None = None) -> float:
    """Return the shortest time of one call, in seconds, after a first one, of those that fit into `seconds`."""
    work()
    _wait()
    best, until = float("inf"), time.perf_counter() + (SECONDS if seconds is None else seconds)
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        _wait()
        best = min(best, time.perf_counter() - began)
    return best


def devices() -> Iterator[Measurement]:
    """Name the devices: memory, what others use of it, the driver."""
    yield Measurement("CPU", os.cpu_count(), "threads", str(this_cpu()))
    if not torch.cuda.is_available():
        why = (
            "torch was built without CUDA" if torch.version.cuda is None else "torch sees no GPU, or its driver is old"
        )
        yield Measurement("GPUs", 0, "", why)
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    mixed = "" if len(set(names)) == 1 else "; of several kinds: give each kind a site or pool of its own"
    yield Measurement("GPUs", len(names), "", f"{', '.join(sorted(set(names)))}; CUDA {torch.version.cuda}{mixed}")
    for index, name in enumerate(names):
        free, total = torch.cuda.mem_get_info(index)
        context = torch.cuda.memory_reserved(index)
        used = (total - free - context) / 2**30
        others = f"; {used:.1f} GiB in use, by this process's context or by others" if used > 1 else ""
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        yield Measurement(f"memory of GPU {index}", total / 2**30, "GiB", f"{name}, capability {capability}{others}")


def products() -> Iterator[Measurement]:
    """Multiply large matrices in each type."""
    device, side = device_here(), size_here().side
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rate = 2.0 * side**3 / quickest(partial(torch.mm, a, b)) / 1e12
        peak = sheet_peak(device)
        share = f"{rate / peak:.0%} of the data sheet's" if peak and dtype == torch.bfloat16 else ""
        name = str(dtype).removeprefix("torch.")
        threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else ""
        yield Measurement(f"products in {name}", rate, "TFLOP/s", share or threads)


def memory() -> Iterator[Measurement]:
    """Read and copy memory that no cache holds; between host and GPU as well."""
    device, count = device_here(), size_here().megabytes * 2**18
    data = torch.ones(count, device=device)
    yield Measurement("memory, reading", 4 * count / quickest(data.sum) / 1e9, "GB/s")
    other = torch.empty_like(data)
    yield Measurement("memory, copying", 8 * count / quickest(partial(other.copy_, data)) / 1e9, "GB/s", "both ways")
    if device.type == "cuda":
        host = torch.empty(count // 8, pin_memory=True)
        part = data[: count // 8]
        for way, copy in (("to the GPU", partial(part.copy_, host)), ("from the GPU", partial(host.copy_, part))):
            yield Measurement(f"memory, {way}", count / 2 / quickest(copy) / 1e9, "GB/s", "pinned")


def peers() -> Iterator[Measurement]:
    """Copy between each two GPUs."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        yield Measurement("peers", None, "", f"{gpus} GPU(s): nothing to copy between")
        return
    slowest, pair = float("inf"), ""
    missing = []
    for source in range(gpus):
        for target in range(gpus):
            if source == target:
                continue
            if not torch.cuda.can_device_access_peer(source, target):
                missing.append(f"{source} -> {target}")
            data = torch.ones(2**26, device=f"cuda:{source}")
            other = torch.empty_like(data, device=f"cuda:{target}")
            rate = data.numel() * 4 / quickest(partial(_copy, data, other), 0.1) / 1e9
            if rate < slowest:
                slowest, pair = rate, f"{source} -> {target}"
    note = f"no peer access {', '.join(missing[:8])}" if missing else "all have peer access"
    yield Measurement("peers, slowest pair", slowest, "GB/s", f"{pair}; {note}")


def _copy(data: torch.Tensor, other: torch.Tensor) -> None:
    """Copy to another GPU, and wait for both: neither need be the current one."""
    other.copy_(data)
    for one in (data, other):
        torch.cuda.synchronize(one.device)


def collectives() -> Iterator[Measurement]:
    """Sum a tensor over all GPUs by NCCL, or over two processes by gloo."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        yield Measurement("all-reduce", None, "", "1 GPU: nothing to sum over")
        return
    ranks, megabytes = (gpus, 512) if gpus else (2, 16)
    with ScratchFolder() as folder:
        results = folder / "seconds"
        mp.start_processes(
            _all_reduce, (ranks, megabytes, f"file://{folder}/meet", str(results)), nprocs=ranks, start_method="spawn"
        )
        seconds = float(results.read_text(encoding="utf-8"))
    moved = 2 * (ranks - 1) / ranks * megabytes * 2**20
    backend = "NCCL" if gpus else "gloo"
    yield Measurement("all-reduce", moved / seconds / 1e9, "GB/s", f"bus bandwidth of {ranks} ranks, {backend}")


def _all_reduce(rank: int, ranks: int, megabytes: int, meeting: str, results: str) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=meeting, rank=rank, world_size=ranks)
    data = torch.ones(megabytes * 2**18, device="cuda" if cuda else "cpu")
    best = float("inf")
    for _ in range(5):  # a fixed number: the ranks must agree on it
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        _wait()
        best = min(best, time.perf_counter() - began)
    if rank == 0:
        Path(results).write_text(str(best), encoding="utf-8")
    dist.destroy_process_group()


def attention() -> Iterator[Measurement]:
    """Compare the shared-prefix attention with lone sequences in fp64, and with torch's own in time."""
    from streamrl.verify.hardware_attention import measure

    yield from measure(size_here(), device_here(), quickest)


def head() -> Iterator[Measurement]:
    """Compare the output head with fp64, and time it."""
    from streamrl.verify.hardware_head import measure

    yield from measure(size_here(), device_here(), quickest)


def trainer() -> Iterator[Measurement]:
    """Train a random model with the run's own trainer: tokens/s and the share of the products' rate."""
    from streamrl.verify.hardware_trainer import train

    yield from train(size_here(), device_here())


def turns() -> Iterator[Measurement]:
    """Move a trainer's state to host memory and back, as it does where it shares a GPU with an instance."""
    from streamrl.training.host_offload import HostOffload

    device, count = device_here(), size_here().megabytes * 2**18
    state, offload = torch.arange(count, device=device, dtype=torch.float32), HostOffload(device.type == "cuda")
    before, best = state.clone(), [float("inf"), float("inf")]
    moves: tuple[Callable[[], object], ...] = (partial(offload.hold, [state]), offload.restore)
    for _ in range(3):  # the first time host memory is allocated
        for way, move in enumerate(moves):
            _wait()
            began = time.perf_counter()
            move()
            _wait()
            best[way] = min(best[way], time.perf_counter() - began)
    if not torch.equal(state, before):
        raise ValueError("the state that came back from host memory has other bits")
    for name, seconds in zip(("to host memory", "back"), best, strict=True):
        yield Measurement(f"trainer's state, {name}", 4 * count / seconds / 1e9, "GB/s", "the same bits came back")


def weights() -> Iterator[Measurement]:
    """Encode and decode a version of which some elements changed, as a site gets it."""
    from streamrl.weights.codec.delta import decode_tensor, encode_tensor

    rng = np.random.default_rng(0)
    count = size_here().megabytes * 2**16
    old = rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16
    before = old.astype(np.uint16)
    after = np.where(rng.random(count) < 0.01, before ^ 1, before).astype(np.uint16)
    for name, base in (("a delta, 1 % changed", before.view(np.uint8)), ("a complete tensor", None)):
        payload = encode_tensor(after.view(np.uint8), base, "bfloat16")
        target = (np.zeros_like(after) if base is None else before.copy()).view(np.uint8)
        encoding = quickest(partial(encode_tensor, after.view(np.uint8), base, "bfloat16"))
        copy = target.copy()
        began = time.perf_counter()
        decode_tensor(payload, copy, "bfloat16")
        decoding = time.perf_counter() - began
        if not np.array_equal(copy, after.view(np.uint8)):
            raise ValueError(f"{name} does not decode to the same bits")
        smaller = 2 * count / len(payload)
        note = f"decoded at {2 * count / decoding / 1e9:.2f} GB/s to the same bits; {smaller:.1f} x smaller"
        yield Measurement(f"weights, {name}", 2 * count / encoding / 1e9, "GB/s", note)


STAGES: dict[str, Callable[[], Iterator[Measurement]]] = {
    stage.__name__: stage
    for stage in (devices, products, memory, peers, collectives, attention, head, trainer, turns, weights)
}
"""All stages, in their order."""


def main() -> None:
    """Run one stage."""
    for found in STAGES[sys.argv[1]]():
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
