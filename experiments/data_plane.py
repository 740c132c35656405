"""Measure the path of a finished sample from instance to trainer, samples/s, MB/s, memory, back-pressure; and a peer's.

    .venv/bin/python experiments/data_plane.py --peer-python PATH     # 6 minutes; PATH: see below
    .venv/bin/python experiments/data_plane.py --seconds 12 --arm ceiling   # into the current folder
    .venv/bin/python experiments/data_plane.py --summary-only         # tables and plot from the JSON again

Processes of their own, over ZeroMQ on loopback, made of the system's own parts: synthetic instances (`Link`), a
service (`Hub`, `Uplink`), a controller (`Hub`, `arrived`, `Ledger`, groups, `Trainers`) and a trainer that turns
micro-batches into numpy arrays and answers. Samples have lognormal lengths (mean about 1000 tokens, at most 8192):
token ids and versions int32, log-probabilities float32, 4 bytes of text a token. An instance has 64 of them ready and
sends them again under new ids: making them is not in the figures. Requests go down as ids only: prompts are not
measured. The controller issues groups of 8 as long as at most 2048 samples are ahead of the trainer (that stands for
admission); the service gives an instance at most 128 samples at a time, and none while its uplink is congested. "Near"
is the form inside a site: a sample a message, unless several wait. "Far" is the form over a link: batches of up to 256
KB or 50 ms; the link is declared as 1 Gbit/s and 20 ms and is loopback in truth. A commit is one SQLite transaction
with synchronous=FULL for all that has come; groups are scored (0) at once in a second one, and every 64 trained groups
are a step. The ledger is on the disk of the results' folder: a commit takes as long as that disk's fsync does, and
"commit ms" says how long the first one was.

*steady*: 50,000 samples a minute are offered. Latency is from the instance's send to the commit. Slopes of memory are
least-squares lines over the second half. *ceiling*: as many as go, also without the ledger. CPU is percent of one core:
what is near 100 % bounds it, or all cores together do, or the disk. *backpressure*: the same offer in five equal
parts: free, trainer at a tenth, free, commits at a tenth, free. The uplink's high mark is here the smallest there is
(4 MB, of a slow link): inside a site it is 256 MB, and 128 samples for each of a few instances never reach it.

*peer*: TransferQueue (`pip install transferqueue` into a virtual environment of its own, whose Python is PATH), with
its default store (SimpleStorage, two units, ZeroMQ, memory) on a local Ray: as many producer actors put the same
arrays, one or 32 samples a put; a consumer asks for 32 at a time, turns them into numpy and clears them. It keeps
samples in memory only: no ledger, no acknowledgement by the receiver, and what a dead consumer had fetched does not
come again. A put beyond a set capacity raises; by default there is none, and a producer that is faster than the
consumer is not held. It gives in exchange what this path does not: reads by column and key, several consumers of one
sample. So "no ledger" is the row to compare it with. Writes experiments/results/data_plane.json, .md and .svg.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import click
from data_plane_figures import ceiling_sheet, draw, pressure_sheet, steady_sheets
from data_plane_measure import PHASES, RATE, measure
from data_plane_peer import measure_peer
from running import OUT_HELP, explanation, machine_with_load, results_folder, terminal, write_tables

from streamrl.generation.site.uplink import MIN_MARK

ARMS = ("steady", "ceiling", "backpressure", "peer")
FORMS = {"near": False, "far": True}


def surroundings(seconds: float, instances: int) -> str:
    """The machine, and how many processes want its cores just now."""
    return f"{instances} instances, {seconds:g} s each; {machine_with_load()} before"


def measured(arm: str, seconds: float, instances: int, peer_python: Path | None) -> dict[str, Any]:
    """One arm, as plain values."""
    run = functools.partial(measure, seconds, instances)
    match arm:
        case "steady":
            return {name: run(RATE, far, True).figures(0, seconds) for name, far in FORMS.items()}
        case "ceiling":
            return {
                f"{name}, {'ledger' if ledger else 'no ledger'}": run(float("inf"), far, ledger).figures(0, seconds)
                for name, far in FORMS.items()
                for ledger in (True, False)
            }
        case "backpressure":
            series, part = run(RATE, False, True, phased=True, near_mark=MIN_MARK), seconds / len(PHASES)
            phases = {name: series.figures(n * part, (n + 1) * part) for n, name in enumerate(PHASES)}
            return {"phases": phases, "lines": series.lines()}
        case _:
            return measure_peer(peer_python, seconds, instances)


@click.command(help=__doc__)
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(min=5), help="Of each measurement.")
@click.option("--instances", default=4, show_default=True, type=click.IntRange(min=1), help="Synthetic ones.")
@click.option("--arm", "arms", multiple=True, type=click.Choice(ARMS), default=ARMS, help="Several.")
@click.option("--peer-python", type=click.Path(path_type=Path), help="Python that has TransferQueue.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Measure nothing: tables and plot from the JSON.")
def main(
    seconds: float,
    instances: int,
    arms: tuple[str, ...],
    peer_python: Path | None,
    out: Path | None,
    summary_only: bool,
) -> None:
    out = results_folder(out, "seconds", "instances")
    console = terminal()
    kept = out / "data_plane.json"
    values: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {"on": {}}
    for arm in () if summary_only else arms:
        values["on"][arm] = surroundings(seconds, instances)
        console.print(f"{arm}: {values['on'][arm]}", highlight=False)
        values[arm] = measured(arm, seconds, instances, peer_python)
        kept.write_text(json.dumps(values, indent=1) + "\n")
    sheets = steady_sheets(values["steady"]) if "steady" in values else []
    if "ceiling" in values or "peer" in values:
        sheets.append(ceiling_sheet(values.get("ceiling", {}), values.get("peer")))
    if "backpressure" in values:
        sheets.append(pressure_sheet(values["backpressure"]["phases"]))
    for sheet in sheets:
        sheet.show(console)
    machines = "\n".join(f"- {arm}: {where}" for arm, where in values["on"].items())
    about = f"{machines}\n\n{explanation(__doc__)}"
    write_tables(kept.with_suffix(".md"), "The data plane", "", sheets, about)
    draw(values, out / "data_plane.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
