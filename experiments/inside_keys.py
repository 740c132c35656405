"""Measure what a site's own keys cost: samples and weights through a hub over TCP, with and without them.

    .venv/bin/python experiments/inside_keys.py                  # 3 minutes of two cores
    .venv/bin/python experiments/inside_keys.py --summary-only   # the tables from the JSON again

One process binds hubs on the loopback interface as the trainer's site does, with the keys of a site over several nodes
and without; another process has a link to each. The two ways take turns, so that both meet the same other work.

*Samples*: messages of finished samples of some 1,000 tokens, the second process to the first, each acknowledged;
credits are the usual ones. *Weights*: one version in chunks of `weights.chunk_mb`, with the publisher's credits, from
the first process to the second, through the site's relay into its store, with all its checks. *Deltas*: the same way
with `weights.encoding: auto` to another node: each version has 1.5 % of its elements changed, as a step of the demo has
(delta_codec.md), and the relay applies its delta to the stored version before. Coding, the same for both ways, is
done before the clock runs; applying it is not. *Bytes*: chunks that are acknowledged and dropped: what the connection
itself can carry.

The loopback interface costs next to nothing, so that the ratios are the worst ones: a network of 10 Gbit/s carries
1.25 GB/s at most. A step pays for each of its samples and once for the weights: CPU time with keys less that without,
mean of neighbouring turns, a delta by the bytes of the model that it changes. Its share is the CPU time of the dearer
end, as if nothing else were done meanwhile: both ends work at once, each in one thread of libzmq's. The limit is two
standard errors above. Where other work shares the machine, a delta's 1 MB drowns, at the service's end, in the checks
of the 128 MiB that it changes: a figure below zero there is such noise.

Writes experiments/results/inside_keys.json and .md.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
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
from running import Sheet, explanation, machine_with_load, read_record, results_folder, terminal, write_tables

from streamrl.runtime.interfaces import free_ports
from streamrl.transport.curve import ClientSecurity, KeyPair, ServerSecurity
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Flow, Hub, Link
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version import Manifest, lay_out
from streamrl.weights.version_store import WeightStore

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

Addresses = dict[bool, tuple[str, str, str]]
"""Addresses of the hub for samples and of the publishers of whole versions and of deltas, by whether they have keys."""

CHANGED = 0.015
"""Share of the elements that change from one version to the next: that of the demo's run (delta_codec.md)."""
DELTAS = 3
"""Versions of one turn that are sent as deltas."""
ALL_DELTAS = 10**6
"""More versions than there are from one anchor to the next: packing one would cost time beside a measurement."""
STEPS = {
    "`make demo` on two cores (docs/results.md): 64 samples, fp32, sent whole": (64, "weights", 0.54e9, 38.8),
    "the same, a delta (`auto`)": (64, "deltas", 0.54e9, 38.8),
    "7B in bf16, 1,024 samples, 120 s, a delta (`auto`)": (1024, "deltas", 15.2e9, 120.0),
    "7B in bf16, 1,024 samples, 120 s, sent whole (`raw`)": (1024, "weights", 15.2e9, 120.0),
    "72B in bf16, 1,024 samples, 300 s, a delta (`auto`)": (1024, "deltas", 145e9, 300.0),
    "72B in bf16, 1,024 samples, 300 s, sent whole (`raw`)": (1024, "weights", 145e9, 300.0),
}
"""Samples, how weights are sent, their bytes, and seconds of a step between nodes; seconds other than the demo's are
assumed."""
LARGEST_SHARE = 0.05
"""Target of the share of a step."""


@dataclass(frozen=True)
class Turn:
    """One measurement."""

    keys: bool
    what: str
    per_s: float
    """Samples, or bytes, per second."""
    hub_s: float
    """CPU seconds of the process with the hub, of a sample or a byte; a delta's are of a byte of the model."""
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
    """Let the other process fetch a version, and return the model's bytes."""
    return TRANSFER_BYTES


class Versions:
    """Versions of one model, each with some elements changed by one step of their type, as updates of RL are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = TRANSFER_BYTES // 2 // 16 // 1024
        self._tensors = {f"layer{n}": torch.randn(rows, 1024, generator=generator).bfloat16() for n in range(16)}
        self._rng = np.random.default_rng(0)
        self.number = 0
        """Number of the newest version."""

    def newest(self) -> tuple[Manifest, np.ndarray]:
        """Return the newest version, laid out."""
        return lay_out(self.number, self._tensors.items())

    def step(self) -> tuple[Manifest, np.ndarray]:
        """Make the next version."""
        for tensor in self._tensors.values():
            words = tensor.view(torch.int16).numpy().reshape(-1)
            words[np.unique(self._rng.integers(0, words.size, int(CHANGED * words.size)))] += 1
        self.number += 1
        return self.newest()


async def first(connection: Connection, keys: bytes, secret: bytes, addresses: Addresses, turns: int) -> dict[str, Any]:
    """The process with the hubs: return all turns, and the bytes of a delta."""
    pair = KeyPair(keys, secret)
    hubs: dict[bool, Hub] = {}
    open_hubs: list[Hub] = []
    publishers: dict[bool, WeightPublisher] = {}
    of_deltas: dict[bool, WeightPublisher] = {}

    def listen(name: str, address: str, way: bool) -> Hub:
        security = ServerSecurity(pair, {pair.public: "other"}) if way else None
        open_hubs.append(Hub(name, WaitRegistry(name), flow=Flow(credits=PUBLISHER_CREDITS)).bind(address, security))
        return open_hubs[-1]

    for way, (address, publisher_at, deltas_at) in addresses.items():
        hubs[way] = listen("first", address, way)
        publishers[way] = WeightPublisher(listen("publisher", publisher_at, way), lambda peer: CHUNK_BYTES)
        of_deltas[way] = WeightPublisher(
            listen("deltas", deltas_at, way), lambda peer: CHUNK_BYTES, anchor_every=ALL_DELTAS, eager=True
        )
        await hubs[way].wait_for({"other"}, LIMIT_S)
    versions = Versions()
    made = versions.newest()
    for publisher in [*publishers.values(), *of_deltas.values()]:
        await publisher.publish(*made)
    tasks = [asyncio.create_task(one.serve()) for one in [*publishers.values(), *of_deltas.values()]]
    measures: dict[str, Callable[[Hub], Awaitable[int]]] = {
        "samples": samples,
        "bytes": carry,
        "weights": weights,
        **dict.fromkeys((f"deltas {one}" for one in range(DELTAS)), weights),
    }
    found: list[Turn] = []
    sent: list[int] = []
    for turn in range(turns + 1):
        for what, measure in measures.items():
            manifest = made[0]
            if what.startswith("deltas"):
                version = await asyncio.to_thread(versions.step)
                manifest = version[0]
                for publisher in of_deltas.values():
                    await publisher.publish(*version)
                    while publisher.chain.newest != versions.number:
                        await asyncio.sleep(0.01)
            for way in (False, True) if turn % 2 else (True, False):
                cpu, started = time.process_time(), time.perf_counter()
                connection.send((way, what, manifest.version.number, manifest.version.content_hash))
                amount = await measure(hubs[way])
                theirs, nbytes = await asyncio.to_thread(connection.recv)
                seconds, own = time.perf_counter() - started, time.process_time() - cpu
                if turn:  # the first turn warms up, and fetches what deltas begin with
                    found.append(Turn(way, what.split()[0], amount / seconds, own / amount, theirs / amount))
                    sent += [nbytes] if what.startswith("deltas") else []
    connection.send((False, "end", 0, ""))
    for task in tasks:
        task.cancel()
    for hub in open_hubs:
        await hub.close()
    return {"turns": [asdict(one) for one in found], "delta_bytes": statistics.mean(sent)}


async def other(connection: Connection, keys: bytes, secret: bytes, addresses: Addresses) -> None:
    """The process with the links."""
    links: dict[bool, Link] = {}
    fetching: dict[bool, Link] = {}
    deltas: dict[bool, WeightRelay] = {}
    ready = [make_sample(number) for number in range(SAMPLES)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for way, (address, publisher_at, deltas_at) in addresses.items():
            security = ClientSecurity(KeyPair(keys, secret), keys) if way else None
            links[way] = await Link("other", "instance", WaitRegistry("other")).connect(address, LIMIT_S, security)
            made = [Link(name, "relay", WaitRegistry(name)) for name in ("relay", "deltas")]
            fetching[way] = await made[0].connect(publisher_at, LIMIT_S, security)
            store = WeightStore(Path(folder) / f"deltas-{way}")
            await made[1].connect(deltas_at, LIMIT_S, security)
            deltas[way] = WeightRelay(made[1], store, LIMIT_S, "delta")
        while (order := await asyncio.to_thread(connection.recv))[1] != "end":
            way, what, number, content_hash = order
            received = 0
            cpu = time.process_time()
            if what == "samples":
                for body, arrays in ready:
                    await links[way].send("sample", body, arrays)
                await links[way].flush(LIMIT_S)
            elif what == "bytes":
                for _ in range(TRANSFER_BYTES // CHUNK_BYTES):
                    (await links[way].receive()).ack()
            elif what == "weights":
                relay = WeightRelay(fetching[way], WeightStore(Path(folder) / "store"), LIMIT_S)
                await relay.fetch(number, content_hash)
            else:
                await deltas[way].fetch(number, content_hash)
                last = deltas[way].last
                assert last is not None
                received = last.nbytes
            cpu = time.process_time() - cpu
            if what == "weights":
                relay.store.clear()
            elif received:
                deltas[way].store.keep_only({number})
            connection.send((cpu, received))
        for link in [*links.values(), *fetching.values(), *(one.link for one in deltas.values())]:
            await link.close()


def run_other(connection: Connection, *rest: Any) -> None:
    """Run the process with the links."""
    asyncio.run(other(connection, *rest))


def more(turns: list[Turn], what: str, end: str) -> tuple[float, float]:
    """Return the CPU seconds that keys cost one end, of a sample or a byte: mean of all turns, and its error."""
    plain, keyed = ([getattr(one, end) for one in turns if one.what == what and one.keys == way] for way in WAYS)
    differences = [b - a for a, b in zip(plain, keyed, strict=True)]
    return statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def sheets(values: dict[str, Any]) -> list[Sheet]:
    """Return the tables."""
    turns = [Turn(**one) for one in values["turns"]]
    rows = []
    for what, unit, scale in (
        ("samples", "sample", 1.0),
        ("bytes", "GB", 1e9),
        ("weights", "GB", 1e9),
        ("deltas", "GB of the model", 1e9),
    ):
        ways = [[one for one in turns if one.what == what and one.keys == way] for way in WAYS]
        per_s = [statistics.median(one.per_s for one in way) / scale for way in ways]
        costs = [statistics.median(one.cpu_s for one in way) * scale for way in ways]
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
    for name, (count, what, nbytes, step_s) in STEPS.items():
        ends = []
        for end in ("hub_s", "link_s"):
            (sample_s, sample_error), (byte_s, byte_error) = (more(turns, one, end) for one in ("samples", what))
            error = ((count * sample_error) ** 2 + (nbytes * byte_error) ** 2) ** 0.5
            ends.append((count * sample_s + nbytes * byte_s, error))
        share = max(seconds for seconds, _ in ends) / step_s
        limit = max(seconds + 2 * error for seconds, error in ends) / step_s
        shortest = max(seconds for seconds, _ in ends) / LARGEST_SHARE
        cells = [f"{seconds:.2f} ± {2 * error:.2f}" for seconds, error in ends]
        further.append((name, *cells, f"{share:.1%}", f"{limit:.1%}", f"{shortest:.0f}"))
    model = (
        f"a delta has {values['delta_bytes'] / 1e6:.2f} MB, {values['delta_bytes'] / TRANSFER_BYTES:.2%} of its model"
    )
    return [
        Sheet(
            "Through one hub",
            columns,
            rows,
            ["ratio: with keys to without, median of neighbouring turns (range)", model],
        ),
        Sheet(
            "Of a step",
            (
                "step",
                "CPU s more, trainer's end",
                "CPU s more, service's end",
                "share of the step",
                "limit",
                f"{LARGEST_SHARE:.0%} of a step of so many s",
            ),
            further,
        ),
    ]


def spread(ratios: list[float]) -> str:
    """Return the median of ratios with their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


@click.command()
@click.option("--turns", default=8, show_default=True, type=click.IntRange(2), help="turns of each way")
@click.option("--summary-only", is_flag=True, help="write the tables from the JSON again")
def main(turns: int, summary_only: bool) -> None:
    """Measure, and write the tables."""
    out = results_folder(None, "turns")
    path = out / "inside_keys.json"
    if not summary_only:
        public, secret = zmq.curve_keypair()
        ports = free_ports(6, "127.0.0.1")
        places = [f"tcp://127.0.0.1:{port}" for port in ports]
        addresses: Addresses = {False: (places[0], places[1], places[2]), True: (places[3], places[4], places[5])}
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(target=run_other, args=(far, public, secret, addresses), daemon=True)
        process.start()
        found = asyncio.run(first(near, public, secret, addresses, turns))
        process.join(LIMIT_S)
        path.write_text(
            json.dumps(
                {
                    "machine": machine_with_load(),
                    **found,
                },
                indent=1,
            )
            + "\n"
        )
    values = read_record(path, "machine", "turns")
    made = sheets(values)
    about = explanation(__doc__)
    write_tables(path.with_suffix(".md"), "Keys inside a site", f"{values['machine']}.", made, about)
    for sheet in made:
        sheet.show(terminal())


if __name__ == "__main__":
    main()
