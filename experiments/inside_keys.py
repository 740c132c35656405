"""What a site's own keys cost: samples and weights through a hub over TCP, with and without them.

    .venv/bin/python experiments/inside_keys.py                  # 1 minute of two cores
    .venv/bin/python experiments/inside_keys.py --summary-only   # the tables from the JSON again

One process binds two hubs on the loopback interface as the trainer's site does, one with the keys of a site over
several nodes and one without; another process has a link to each. The two take turns, so that both meet the same other
work.

*Samples*: messages of finished samples of some 1,000 tokens, the second process to the first, each acknowledged;
credits are the usual ones. *Weights*: one version in chunks of `weights.chunk_mb`, with the publisher's credits, from
the first process to the second, through the site's relay into its store, with all its checks. *Bytes*: the same chunks,
acknowledged and dropped: what the connection itself can carry.

The loopback interface costs next to nothing, so that the ratios are the worst ones: a network of 10 Gbit/s carries
1.25 GB/s at most. A step pays for each of its samples and once for the weights. Its share is the CPU time of the
dearer end, as if nothing else were done meanwhile: both ends work at once, each in one thread of libzmq's. CPU time
depends less on other work on the machine than rates do. What coding a delta costs is in delta_codec.md; on the
trainer's own node the weights' file is copied, whatever the keys.

Writes experiments/results/inside_keys.json and .md.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import zmq
from running import HERE, Sheet, machine, terminal

from streamrl.launcher.local_backend import free_ports
from streamrl.transport.curve import ClientSecurity, KeyPair, ServerSecurity
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Flow, Hub, Link
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version import lay_out
from streamrl.weights.version_store import WeightStore

OUT = HERE / "results"
WAYS = {False: "without keys", True: "with keys"}
TOKENS = 1000
"""Tokens of a sample."""
SAMPLES = 2000
"""Samples of one turn."""
CHUNK_BYTES = 4 * 2**20
"""Default of `weights.chunk_mb`."""
TRANSFER_BYTES = 128 * 2**20
"""Bytes of one turn that sends bytes, and of a version."""
PUBLISHER_CREDITS = 16
LIMIT_S = 300.0

Addresses = dict[bool, tuple[str, str]]
"""Addresses of the hub for samples and of the publisher, by whether they have keys."""

DELTA = 2.96 / 269
"""Bytes of a delta, as a share of the weights: one version of SmolLM2-135M (experiments/results/two_sites.md)."""
STEPS = {
    "`make demo` on two cores (docs/results.md): 64 samples, fp32, sent whole": (64, 0.54e9, 38.8),
    "7B in bf16, 1,024 samples, 120 s, a delta (`auto`)": (1024, 15.2e9 * DELTA, 120.0),
    "7B in bf16, 1,024 samples, 120 s, sent whole (`raw`)": (1024, 15.2e9, 120.0),
    "72B in bf16, 1,024 samples, 300 s, a delta (`auto`)": (1024, 145e9 * DELTA, 300.0),
    "72B in bf16, 1,024 samples, 300 s, sent whole (`raw`)": (1024, 145e9, 300.0),
}
"""Samples, bytes of weights and seconds of a step between nodes; all but the demo's are assumed, not measured."""


@dataclass(frozen=True)
class Turn:
    """One measurement."""

    keys: bool
    what: str
    per_s: float
    """Samples, or bytes, per second."""
    hub_s: float
    """CPU seconds of the process with the hub, of a sample or a byte."""
    link_s: float
    """The same of the process with the link."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of both."""
        return self.hub_s + self.link_s


def make_sample(number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what an instance sends of a finished sample."""
    rng = np.random.default_rng(number)
    body = {"sample_id": f"{number}.0", "group_id": number, "text": "word " * TOKENS, "t_finished": time.time()}
    tokens = rng.integers(0, 49152, TOKENS, dtype=np.int32)
    versions = np.zeros(TOKENS, np.int32)
    return body, {"completion_tokens": tokens, "logprobs": rng.random(TOKENS, np.float32), "token_versions": versions}


async def samples(hub: Hub) -> int:
    """Take samples, and return how many."""
    for _ in range(SAMPLES):
        (await hub.receive()).ack()
    return SAMPLES


async def carry(hub: Hub) -> int:
    """Send chunks until all are acknowledged, and return their bytes."""
    data = np.frombuffer(np.random.default_rng(0).bytes(CHUNK_BYTES), np.uint8)
    left = count = TRANSFER_BYTES // CHUNK_BYTES
    done = asyncio.Event()

    def acknowledged() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    for _ in range(count):
        await hub.send("other", "chunk", {}, {"data": data}, on_ack=acknowledged)
    await done.wait()
    return TRANSFER_BYTES


async def weights(_: Hub) -> int:
    """Let the other process fetch a version, and return its bytes."""
    return TRANSFER_BYTES


def version() -> Any:
    """Return a version of random weights."""
    generator = torch.Generator().manual_seed(0)
    rows = TRANSFER_BYTES // 2 // 16 // 1024
    return lay_out(0, [(f"layer{n}", torch.randn(rows, 1024, generator=generator).bfloat16()) for n in range(16)])


async def first(connection: Connection, keys: bytes, secret: bytes, addresses: Addresses, turns: int) -> list[Turn]:
    """The process with the hubs."""
    pair = KeyPair(keys, secret)
    hubs: dict[bool, Hub] = {}
    publishers: dict[bool, tuple[Hub, WeightPublisher]] = {}
    for way, (address, publisher_at) in addresses.items():
        security = ServerSecurity(pair, {pair.public: "other"}) if way else None
        flow = Flow(credits=PUBLISHER_CREDITS)
        hubs[way] = Hub("first", WaitRegistry("first"), flow=flow).bind(address, security)
        hub = Hub("publisher", WaitRegistry("publisher"), flow=flow).bind(publisher_at, security)
        publishers[way] = hub, WeightPublisher(hub, chunk_of=lambda peer: CHUNK_BYTES)
        await hubs[way].wait_for({"other"}, LIMIT_S)
    made = version()
    found: list[Turn] = []
    for publisher in publishers.values():
        await publisher[1].publish(*made)
    tasks = [asyncio.create_task(one.serve()) for _, one in publishers.values()]
    measures: dict[str, Callable[[Hub], Awaitable[int]]] = {"samples": samples, "bytes": carry, "weights": weights}
    for turn in range(turns + 1):
        for way in (False, True) if turn % 2 else (True, False):
            for what, measure in measures.items():
                cpu, started = time.process_time(), time.perf_counter()
                connection.send((way, what))
                amount = await measure(hubs[way])
                theirs = await asyncio.to_thread(connection.recv)
                seconds, own = time.perf_counter() - started, time.process_time() - cpu
                one = Turn(way, what, amount / seconds, own / amount, theirs / amount)
                found += [one] if turn else []  # the first turn warms up
    connection.send((False, "end"))
    for task in tasks:
        task.cancel()
    for hub in [*hubs.values(), *(hub for hub, _ in publishers.values())]:
        await hub.close()
    return found


async def other(connection: Connection, keys: bytes, secret: bytes, addresses: Addresses) -> None:
    """The process with the links."""
    links: dict[bool, Link] = {}
    fetching: dict[bool, Link] = {}
    for way, (address, publisher_at) in addresses.items():
        security = ClientSecurity(KeyPair(keys, secret), keys) if way else None
        links[way] = await Link("other", "instance", WaitRegistry("other")).connect(address, LIMIT_S, security)
        made = Link("relay", "relay", WaitRegistry("relay"))
        fetching[way] = await made.connect(publisher_at, LIMIT_S, security)
    manifest, _ = version()
    ready = [make_sample(number) for number in range(SAMPLES)]
    while (order := await asyncio.to_thread(connection.recv))[1] != "end":
        way, what = order
        cpu = time.process_time()
        if what == "samples":
            for body, arrays in ready:
                await links[way].send("sample", body, arrays)
            await links[way].flush(LIMIT_S)
        elif what == "bytes":
            for _ in range(TRANSFER_BYTES // CHUNK_BYTES):
                (await links[way].receive()).ack()
        else:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                relay = WeightRelay(fetching[way], WeightStore(Path(folder) / "store"), LIMIT_S)
                await relay.fetch(0, manifest.version.content_hash)
        connection.send(time.process_time() - cpu)
    for link in [*links.values(), *fetching.values()]:
        await link.close()


def run_other(connection: Connection, *rest: Any) -> None:
    """Run the process with the links."""
    asyncio.run(other(connection, *rest))


def sheets(values: dict[str, Any]) -> list[Sheet]:
    """Return the tables."""
    turns = [Turn(**one) for one in values["turns"]]
    rows = []
    more = {}
    for what, unit, scale in (("samples", "sample", 1.0), ("bytes", "GB", 1e9), ("weights", "GB", 1e9)):
        ways = [[one for one in turns if one.what == what and one.keys == way] for way in WAYS]
        per_s = [statistics.median(one.per_s for one in way) / scale for way in ways]
        costs = [statistics.median(one.cpu_s for one in way) * scale for way in ways]
        for end in ("hub_s", "link_s"):
            plain, keyed = (statistics.median(getattr(one, end) for one in way) for way in ways)
            more[what, end] = keyed - plain
        quicker = [b.per_s / a.per_s for a, b in zip(*ways, strict=True)]
        dearer = [b.cpu_s / a.cpu_s for a, b in zip(*ways, strict=True)]
        unit_s = "ms" if scale == 1.0 else "s"
        cells = [f"{one * (1e3 if scale == 1.0 else 1):.2f}" for one in costs]
        rates = [f"{one:,.0f}" if scale == 1.0 else f"{one:.2f}" for one in per_s]
        rows.append((f"{what}: {unit}/s; CPU {unit_s} a {unit}", *rates, spread(quicker), *cells, spread(dearer)))
    columns = (
        "what",
        *(f"rate {way}" for way in WAYS.values()),
        "ratio",
        *(f"CPU {way}" for way in WAYS.values()),
        "ratio",
    )
    further = []
    for name, (count, nbytes, step_s) in STEPS.items():
        ends = [count * more["samples", end] + nbytes * more["weights", end] for end in ("hub_s", "link_s")]
        further.append((name, *(f"{one:.2f}" for one in ends), f"{max(ends) / step_s:.1%}"))
    return [
        Sheet("Through one hub", columns, rows, ["ratio: with keys to without, median of neighbouring turns (range)"]),
        Sheet(
            "Of a step",
            ("step", "CPU s more, trainer's end", "CPU s more, service's end", "share of the step"),
            further,
        ),
    ]


def spread(ratios: list[float]) -> str:
    """Return the median of ratios with their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


@click.command()
@click.option("--turns", default=8, show_default=True, help="turns of each way")
@click.option("--summary-only", is_flag=True, help="write the tables from the JSON again")
def main(turns: int, summary_only: bool) -> None:
    """Measure, and write the tables."""
    path = OUT / "inside_keys.json"
    if not summary_only:
        public, secret = zmq.curve_keypair()
        ports = free_ports(4, "127.0.0.1")
        places = [f"tcp://127.0.0.1:{port}" for port in ports]
        addresses = {False: (places[0], places[1]), True: (places[2], places[3])}
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(target=run_other, args=(far, public, secret, addresses), daemon=True)
        process.start()
        found = asyncio.run(first(near, public, secret, addresses, turns))
        process.join(LIMIT_S)
        path.write_text(
            json.dumps(
                {
                    "machine": f"{machine()}, load average {os.getloadavg()[1]:.0f}",
                    "turns": [asdict(one) for one in found],
                },
                indent=1,
            )
            + "\n"
        )
    values = json.loads(path.read_text())
    made = sheets(values)
    about = (__doc__ or "").partition("One process")
    text = ["# Keys inside a site", f"Written by `experiments/inside_keys.py`. {values['machine']}."]
    text.append("".join(about[1:]).strip())
    (OUT / "inside_keys.md").write_text("\n\n".join([*text, *(sheet.markdown() for sheet in made)]) + "\n")
    for sheet in made:
        sheet.show(terminal())


if __name__ == "__main__":
    main()
