"""The stages of a model's checks in vLLM, in a process that has imported everything once: it forks one per engine.

`python -m streamrl.verify.generator_stages` reads an order per line of JSON and prints a line of JSON per order: its
stages, and what the engines wrote. Forked processes have a single thread, so that vLLM can fork its engines as well
(`Engine`), and torch and vLLM, which take longer to import than a small model to check, are imported once.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
import vllm.v1.engine.async_llm  # noqa: F401  (before the first fork: every engine needs it)
from transformers import AutoModelForCausalLM
from vllm.platforms import current_platform

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.eight_bits import device_lacks
from streamrl.generation.instance.engine import Engine
from streamrl.machine.cpu import this_cpu
from streamrl.machine.model_files import token_rows
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.runtime.processes import end_with_parent
from streamrl.training.layer_kernels import take_kernels
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from streamrl.verify.generator_order import (
    AGAINST,
    BEFORE,
    BETWEEN_TOKENS,
    DELIVERED,
    FRESH,
    FRESH_IN_INT8,
    IN_INT8,
    LIMIT_S,
    Order,
    in_codes,
)
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.quantize import full_precision
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version import Manifest, lay_out
from streamrl.weights.version_store import WeightStore

LENGTHS = (1, 5, 12, 20)
"""Prompt lengths of the samples: shorter and longer than a small model's window."""
TOKENS = 24
"""Tokens of a sample."""
LONG_TOKENS = 40
"""Tokens of a sample during which new weights come."""
ATTEMPTS = 5
"""Tries to load new weights while samples are generated."""
POLL_S = 0.001
"""Seconds between two looks at how far running samples are."""
FIRST, SECOND = 0, 1
"""Numbers of the versions that are compared with a fresh engine."""
END_OF_LOG = 20_000
"""Characters kept of what the engines of an order wrote."""

ReportStage = Callable[..., None]
"""Function that reports a stage: its name, then values by keyword."""
Body = Callable[[Order, ReportStage], Awaitable[None]]


def _run_file(model: str, in_int8: bool) -> RunConfig:
    folder = {"path": model, "max_context": 64, "dtype": _type_with_int8() if in_int8 else "float32"}
    values = {"model": folder, "sampling": {"max_tokens": LONG_TOKENS}}
    if in_int8:
        corrected = {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate"}}
        values |= {"generation": {"compute": "int8"}, "algorithm": corrected}
    return RunConfig.model_validate(values)


def _type_with_int8() -> str:
    """Return the type of all but the linear layers in engines that multiply in int8."""
    return "bfloat16" if this_cpu().has_bf16 else "float32"


def _requests(model: str, tokens: int) -> list[SampleRequest]:
    rows = token_rows(Path(model)) or 2**31 - 1
    prompts = [np.arange(3 + n, 3 + n + length, dtype=np.int32) % rows for n, length in enumerate(LENGTHS)]
    return [SampleRequest(f"verify-{n}", "verify", prompt, n, 0.0, pause_at=tokens) for n, prompt in enumerate(prompts)]


async def _together(engine: Engine, tokens: int = TOKENS) -> list[Any]:
    """Draw all samples at once, so that batches of several sizes are computed."""
    return list(
        await asyncio.gather(
            *(engine.generate(request, "regular") for request in _requests(engine.run.model.path, tokens))
        )
    )


async def _drawn(engine: Engine) -> list[Any]:
    """Draw the samples one by one: which ones share a step depends on times, and the last bits on the batch's size."""
    requests = _requests(engine.run.model.path, TOKENS)
    return [await engine.generate(request, "regular") for request in requests]


def _plain(samples: Iterable[Any]) -> list[dict[str, list[float]]]:
    """Return samples as JSON keeps them exactly."""
    return [{"tokens": one.completion_tokens.tolist(), "logprobs": one.logprobs.tolist()} for one in samples]


def _trainer_logprobs(model: str, samples: Sequence[Any], attention: str) -> list[np.ndarray]:
    """Return the trainer's log-probabilities of every sample's tokens, [T] each."""
    groups = [
        TrainGroup("verify", request.prompt_tokens, [TrainSequence(one.completion_tokens, one.logprobs, 0.0)])
        for request, one in zip(_requests(model, TOKENS), samples, strict=True)
    ]
    policy = load_policy(model, attention=attention)
    take_kernels(policy)
    with torch.no_grad():
        values: np.ndarray = policy(pack(groups), 1.0)[0].numpy()
    return np.split(values, np.cumsum([len(one.completion_tokens) for one in samples])[:-1])


class _Delivery:
    """The real path of weights: a trainer's layout, publisher, relay, store, and an engine's update."""

    def __init__(self, engine: Engine, publisher: WeightPublisher, relay: WeightRelay) -> None:
        self.engine, self.publisher, self.relay = engine, publisher, relay

    async def publish(self, manifest: Manifest, buffer: np.ndarray) -> None:
        await self.publisher.publish(manifest, buffer)
        await self.relay.fetch(manifest.version.number, manifest.version.content_hash)

    async def load(self, manifest: Manifest) -> None:
        number = manifest.version.number
        await self.engine.pause("recompute_kv", number)
        await self.engine.start_weight_update()
        await self.engine.update_weights({"number": number, "content_hash": manifest.version.content_hash})
        await self.engine.finish_weight_update(number)
        await self.engine.resume()

    async def deliver(self, manifest: Manifest, buffer: np.ndarray) -> None:
        await self.publish(manifest, buffer)
        await self.load(manifest)


@asynccontextmanager
async def _delivery(folder: str, engine: Engine) -> Any:
    address = f"ipc://{folder}/publisher"
    hub = Hub("publisher", WaitRegistry("publisher")).bind(address)
    publisher = WeightPublisher(hub, chunk_of=lambda peer: 2**20)
    serving = asyncio.create_task(publisher.serve())
    link = await Link("relay", "relay", WaitRegistry("relay")).connect(address, 10)
    try:
        yield _Delivery(engine, publisher, WeightRelay(link, WeightStore(Path(folder)), 60, "delta"))
    finally:
        serving.cancel()
        await link.close()
        await hub.close()


@asynccontextmanager
async def _engine(model: str, folder: str, number: int, in_int8: bool = False) -> Any:
    pool, run = GenerationPool(max_batch=len(LENGTHS), kv_cache_gb=0.05), _run_file(model, in_int8)
    engine = Engine(pool, run, False, "verify", "here")
    try:
        await engine.set_up_weights({"directory": folder}, number)
        yield engine
    finally:
        engine.close()


@contextmanager
def _one_rank() -> Iterator[None]:
    """Make this process a trainer's only rank, as layouts are collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


async def _updated(order: Order, say: ReportStage) -> None:
    """Compare an engine with the trainer, then give it new weights in all ways."""
    first, second = order.models
    async with _engine(first, order.folder, FIRST) as engine:
        batch = await _together(engine)
        theirs = _trainer_logprobs(first, batch, order.attention)
        errors = [np.abs(ours.logprobs - one).max() for ours, one in zip(batch, theirs, strict=True)]
        say(AGAINST, error=float(np.max(errors)), tokens=sum(len(one.logprobs) for one in batch))
        say(BEFORE, samples=_plain(await _drawn(engine)))
        with _one_rank():
            old, new = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (first, second))
            async with _delivery(order.folder, engine) as path:
                await path.publish(*ShardedLayout(old, torch.float32).lay_out(FIRST))
                manifest, buffer = ShardedLayout(new, torch.float32).lay_out(SECOND)
                await path.deliver(manifest, buffer)
                kind = path.relay.last.kind if path.relay.last else "raw"
                say(DELIVERED, samples=_plain(await _drawn(engine)), kind=kind, mb=manifest.nbytes / 1e6)
                number = SECOND
                for codes in order.codes:
                    coded = ShardedLayout(new, torch.float32, codes).lay_out(number + 1)
                    await path.deliver(*coded)
                    drawn = await _drawn(engine)
                    await path.deliver(*lay_out(number + 2, full_precision(*coded, torch.float32)))
                    plain = _plain(await _drawn(engine))
                    say(in_codes(codes), codes=_plain(drawn), plain=plain, mb=coded[0].nbytes / 1e6)
                    number += 2
                layouts = [ShardedLayout(one, torch.float32) for one in (old, new)]
                await _between_tokens(order, path, layouts, number + 1, say)


async def _between_tokens(
    order: Order, path: _Delivery, layouts: Sequence[ShardedLayout], number: int, say: ReportStage
) -> None:
    """Load the first model's weights while samples are generated; the trainer knows what the later tokens are worth.

    All samples may have ended before the weights come, as this process may stand still: then it is tried again.

    Args:
        layouts: those of the first model and of the second one.
        number: that of the first version.
    """
    old, new = layouts
    for attempt in range(ATTEMPTS):
        if attempt:
            await path.deliver(*new.lay_out(number + 2 * attempt - 1))
        samples, later = await _crossing(path, old.lay_out(number + 2 * attempt))
        if crossed := sum(bool(which.any() and not which.all()) for which in later):
            break
    theirs = _trainer_logprobs(order.models[0], samples, order.attention)
    errors = [np.abs(one.logprobs - values)[which] for one, values, which in zip(samples, theirs, later, strict=True)]
    every = np.concatenate(errors)
    say(
        BETWEEN_TOKENS,
        error=float(every.max(initial=0.0)),
        tokens=len(every),
        crossed=crossed,
    )


async def _crossing(path: _Delivery, version: tuple[Manifest, np.ndarray]) -> tuple[list[Sample], list[np.ndarray]]:
    """Load a version while samples are generated; return them, and which tokens of each, [T], it has drawn."""
    engine, number = path.engine, version[0].version.number
    await path.publish(*version)
    running = asyncio.create_task(_together(engine, LONG_TOKENS))
    while not running.done() and max(engine.produced().values(), default=0) < 4:
        await asyncio.sleep(POLL_S)
    await path.load(version[0])
    samples = await running
    return samples, [one.token_versions == number for one in samples]


async def _fresh(order: Order, say: ReportStage) -> None:
    """Draw from an engine that has started with the second model's weights."""
    async with _engine(order.models[1], order.folder, SECOND) as engine:
        say(FRESH, samples=_plain(await _drawn(engine)))


async def _updated_in_int8(order: Order, say: ReportStage) -> None:
    """Give an engine that multiplies in int8 the second model's weights."""
    first, second = order.models
    if lacks := device_lacks("int8", _type_with_int8(), this_cpu()):
        say(IN_INT8, lacks=lacks)
        return
    folder = Path(order.folder) / "int8"
    folder.mkdir()
    kind = getattr(torch, _type_with_int8())
    async with _engine(first, str(folder), FIRST, in_int8=True) as engine:
        before = _plain(await _drawn(engine))
        with _one_rank():
            new = AutoModelForCausalLM.from_pretrained(second, dtype=kind)
            async with _delivery(str(folder), engine) as path:
                await path.deliver(*ShardedLayout(new, kind).lay_out(SECOND))
                drawn = await _drawn(engine)
                theirs = _trainer_logprobs(second, drawn, order.attention)
                mismatches = [np.abs(ours.logprobs - one).mean() for ours, one in zip(drawn, theirs, strict=True)]
    say(IN_INT8, before=before, samples=_plain(drawn), mismatch=float(np.mean(mismatches)))


async def _fresh_in_int8(order: Order, say: ReportStage) -> None:
    """Draw from an engine that has started in int8 with the second model's weights."""
    async with _engine(order.models[1], order.folder, SECOND, in_int8=True) as engine:
        say(FRESH_IN_INT8, samples=_plain(await _drawn(engine)))


def _in_child(body: Body, order: Order, log: Path, deadline: float) -> tuple[str, bool]:
    """Run a body in a fork of this process; return its lines of JSON, and whether it ended in time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            end_with_parent(signal.SIGKILL)  # nobody else would keep to the deadline
            os.close(read)
            with log.open("a", encoding="utf-8") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            with os.fdopen(write, "w", encoding="utf-8") as out:
                asyncio.run(body(order, _say_to(out)))  # type: ignore[arg-type]
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # its lines say what became of it
    os.close(write)
    chunks, in_time = [], True
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            in_time = False
            os.kill(child, signal.SIGKILL)  # its engine's process ends with it
            break
        if not (chunk := os.read(read, 2**16)):
            break
        chunks.append(chunk)
    os.close(read)
    os.waitpid(child, 0)
    return b"".join(chunks).decode(), in_time


def _say_to(out: IO[str]) -> ReportStage:
    def say(stage: str, **values: Any) -> None:
        print(json.dumps({"stage": stage} | values), file=out, flush=True)

    return say


def answer(order: Order) -> dict[str, Any]:
    """Return what became of an order: {stages by name, errors: the end of what was written, in_time}.

    Where vLLM would not compute on the CPU, as the engines' settings suppose, there are no stages and `lacks` says why.
    """
    if not current_platform.is_cpu():
        device = current_platform.device_type or "devices that are not here"
        lacks = f"these checks compute on the CPU, and the vLLM that is installed computes on {device}"
        return {"stages": {}, "errors": "", "in_time": True, "lacks": lacks}
    log, deadline = Path(order.folder) / "engines.log", time.monotonic() + LIMIT_S
    stages: dict[str, Any] = {}
    bodies: list[Body] = [_updated, _fresh]
    if order.in_int8:
        bodies += [_updated_in_int8, _fresh_in_int8]
    for body in bodies:
        said, in_time = _in_child(body, order, log, deadline)
        for line in said.splitlines():
            values = json.loads(line)
            stages[values.pop("stage")] = values
        if (
            not in_time
            or AGAINST not in stages
            or (body is _updated_in_int8 and "samples" not in stages.get(IN_INT8, {}))
        ):
            break
    errors = log.read_text(encoding="utf-8", errors="replace")
    return {"stages": stages, "errors": errors[-END_OF_LOG:], "in_time": in_time}


def main() -> None:
    """Answer the orders of standard input."""
    for line in sys.stdin:
        print(json.dumps(answer(Order(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
