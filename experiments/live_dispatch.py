"""Compare dispatch policies on real vLLM instances of this machine, and the simulator's figures for the same work.

    .venv/bin/python experiments/live_dispatch.py            # some 20 minutes on 2 cores; wants a quiet machine

Every workload is a batch of prompts with seeded samples, so that each policy generates the same answers. It is played
under every policy in turn (twice, interleaved) on the same two instances, by the generation service's dispatcher.
Step times are measured first, on both instances at once. Then the simulator is given the lengths that came and these
step times. Forecasts are those of a ranker trained on experiments/data/<set>.parquet, whose prompts are others;
"known" is told the true lengths. Writes experiments/results/live_dispatch/.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml
from rich.console import Console
from rich.table import Table

from ranker.data import read_rollouts
from ranker.model import LengthModel
from ranker.train import train
from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.machine.compute_type import decided
from streamrl.machine.model_files import resolve_model
from streamrl.runtime.process_plan import PASSIVE_WAITING

HERE = Path(__file__).parent
OUT = HERE / "results" / "live_dispatch"
PROMPT_SEED = 1007
"""Not the one of the data sets: the ranker has not seen these prompts."""
CALIBRATION_S = 120.0
"""Seconds for which the step times of both instances are measured, at most."""
CLOSE = 0.03
"""Policies whose measured times differ by less are not expected to be simulated in that order."""


@dataclass(frozen=True)
class Workload:
    """A batch to generate."""

    name: str
    data: str
    """Set of `collect_lengths.py`: its run file says model and tasks."""
    run: str
    prompts: int
    samples: int
    cap: int
    slots: tuple[int, int]
    """Of both instances."""


SMALL = ("small_reasoner", "examples/small_reasoner.yaml")
SMOL = ("smollm2", "experiments/runs/smollm2_lengths.yaml")
WORKLOADS = (
    Workload("small reasoner, 16 x 8", *SMALL, 16, 8, 640, (48, 24)),
    Workload("small reasoner, 48 x 4", *SMALL, 48, 4, 640, (96, 96)),
    Workload("small reasoner, 64 x 8", *SMALL, 64, 8, 640, (64, 64)),
    Workload("small reasoner, 32 x 8, caps 96 and 32", *SMALL, 32, 8, 640, (96, 32)),
    Workload("SmolLM2, 8 x 8", *SMOL, 8, 8, 192, (48, 24)),
    Workload("SmolLM2, 16 x 4", *SMOL, 16, 4, 256, (32, 32)),
    Workload("SmolLM2, 24 x 4, caps 16", *SMOL, 24, 4, 128, (16, 16)),
)
POLICIES = {
    "round-robin": ("round-robin", "none"),
    "least-loaded": ("least-loaded", "none"),
    "Algorithm 2, ranker": ("algorithm2", "ranker"),
    "ours, ranker": ("skew-aware", "ranker"),
    "ours, known lengths": ("skew-aware", "known"),
}
"""Shown name -> (policy, what it is told)."""


@dataclass
class Played:
    """One policy's turn."""

    seconds: float
    lengths: dict[str, int]
    moves: int


@dataclass
class Result:
    """A workload under a policy: medians over the repeats, seconds."""

    workload: str
    policy: str
    measured: float
    simulated: float
    measured_ratio: float = 0.0
    """To round-robin."""
    simulated_ratio: float = 0.0
    moves: int = 0
    all_measured: list[float] = field(default_factory=list)


class Bench:
    """Two real instances of one model."""

    def __init__(self, workload: Workload) -> None:
        from transformers import AutoTokenizer

        from streamrl.controller.group_source import GroupSource
        from streamrl.generation.instance.engine import Engine
        from streamrl.tasks.source import PromptSource

        self.workload = workload
        values = yaml.safe_load((HERE.parent / workload.run).read_text())
        values["sampling"]["max_tokens"] = workload.cap
        values["batch"] = {"prompts_per_step": workload.prompts, "samples_per_prompt": workload.samples}
        values["model"]["max_context"] = max(workload.cap + 384, int(values["model"]["max_context"]))
        self.run = decided(RunConfig.model_validate(values), cuda=False)
        self.engines = {}
        for number, slots in enumerate(workload.slots):
            pool = GenerationPool(max_batch=slots, kv_cache_gb=0.5)
            self.engines[f"i{number}"] = Engine(pool, self.run, False, f"i{number}", "here")
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self.run.model.path))
        source = GroupSource(self.run, PromptSource(self.run.tasks, PROMPT_SEED), tokenizer)
        self.groups = source.batch(1)
        self.fleet: list[SimulatedInstance] = []

    async def calibrate(self) -> None:
        """Both instances at once, as they will work."""
        from streamrl.generation.instance.calibration import measure

        for engine in self.engines.values():
            await engine.warm_up()
        measured = await asyncio.gather(
            *(
                measure(engine, slots, self.run.model.max_context // 2, CALIBRATION_S, lambda _: None)
                for engine, slots in zip(self.engines.values(), self.workload.slots, strict=True)
            )
        )
        for trials, load in measured:
            if trials.doubts:
                print(f"doubtful step times: {trials.doubts}; {load}")
        mean = StepCurve.mean([trials.curve for trials, _ in measured])
        self.fleet = [
            SimulatedInstance(name, mean, slots) for name, slots in zip(self.engines, self.workload.slots, strict=True)
        ]

    def policy(self, name: str) -> DispatchPolicy:
        """A fresh one that knows the instances."""
        policy = make_policy(name, self.workload.cap, affinity=self.workload.samples)
        for instance in self.fleet:
            policy.join(instance.name, instance.slots, instance.curve)
        return policy

    async def play(self, policy: DispatchPolicy, forecasts: dict[str, Forecast]) -> Played:
        """Generates the whole batch."""
        from streamrl.controller.group_source import samples_of
        from streamrl.generation.site.dispatcher import Dispatcher
        from streamrl.protocol.message import parse
        from streamrl.protocol.samples import request_from_wire
        from streamrl.protocol.site_instance import GenerateSample
        from streamrl.rollouts.types import PartialSample, SampleRequest

        lengths: dict[str, int] = {}
        done = asyncio.Event()
        total = sum(group.size for group in self.groups)

        async def work(instance: str, body: dict[str, Any], arrays: Any) -> None:
            drawn = await self.engines[instance].generate(
                request_from_wire(parse(GenerateSample, body), arrays), body["route"]
            )
            if isinstance(drawn, PartialSample):
                await dispatcher.released(drawn)
                return
            lengths[drawn.sample_id] = drawn.output_length
            await dispatcher.finished(drawn.sample_id, drawn.output_length)
            if len(lengths) == total:
                done.set()

        def produced(sample_id: str) -> float:
            return max(engine.produced().get(sample_id, 0) for engine in self.engines.values())

        for engine in self.engines.values():  # empty caches
            await engine.pause("recompute_kv", engine.version)
            await engine.resume()
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:

            async def send(instance: str, kind: str, body: dict[str, Any], arrays: Any) -> None:
                if kind == "release":
                    tasks.create_task(self.engines[instance].release(body["sample_id"]))
                else:
                    tasks.create_task(work(instance, body, arrays))

            dispatcher = Dispatcher(policy, send, produced)
            # a known length is one sample's: then each goes in as a group of its own
            asked = []
            for group in self.groups:
                for sample_id, seed, _ in samples_of(group, self.run.seed):
                    request = SampleRequest(sample_id, group.group_id, group.prompt_tokens, seed, 0.0)
                    asked.append(([request], forecasts.get(sample_id)))
            await dispatcher.submit(asked)
            async with asyncio.timeout(900):
                await done.wait()
        return Played(time.monotonic() - began, lengths, dispatcher.moves)

    def simulate(self, policy: str, lengths: dict[str, int], forecasts: dict[str, Forecast]) -> float:
        """Seconds that the simulator expects of the same work."""
        requests = [
            SimulatedRequest(
                sample_id,
                lengths[sample_id],
                group.group_id,
                len(group.prompt_tokens),
                forecast=forecasts.get(sample_id),
            )
            for group in self.groups
            for sample_id in sorted(name for name in lengths if name.startswith(group.group_id))
        ]
        fresh = make_policy(policy, self.workload.cap, affinity=self.workload.samples)
        return simulate(fresh, requests, self.fleet).makespan

    def ranked(self, model: LengthModel) -> dict[str, Forecast]:
        """The ranker's forecast of every sample."""
        from streamrl.controller.group_source import samples_of

        prompts, tasks = [g.prompt for g in self.groups], [g.task for g in self.groups]
        predicted = model.predict(prompts, tasks, limit=self.workload.cap)
        return {
            sample_id: Forecast.from_quantiles(predicted.levels, row)
            for group, row in zip(self.groups, predicted.quantiles, strict=True)
            for sample_id, _, _ in samples_of(group, self.run.seed)
        }

    def close(self) -> None:
        """Ends the instances."""
        for engine in self.engines.values():
            engine.close()


async def compare(workload: Workload, model: LengthModel, repeats: int, console: Console) -> list[Result]:
    """Plays a workload under every policy, in turn."""
    bench = Bench(workload)
    try:
        await bench.calibrate()
        ranked = bench.ranked(model)
        first = await bench.play(bench.policy("round-robin"), {})  # warms up, and tells the lengths
        known = {sample_id: Forecast.exactly(length) for sample_id, length in first.lengths.items()}
        told = {"none": {}, "ranker": ranked, "known": known}
        played: dict[str, list[Played]] = {name: [] for name in POLICIES}
        for _, (name, (policy, knows)) in itertools.product(range(repeats), POLICIES.items()):
            played[name].append(await bench.play(bench.policy(policy), told[knows]))
            console.print(f"  {workload.name}: {name} {played[name][-1].seconds:.2f} s", highlight=False)
        results = []
        for name, (policy, knows) in POLICIES.items():
            expected = [bench.simulate(policy, turn.lengths, told[knows]) for turn in played[name]]
            times = [turn.seconds for turn in played[name]]
            results.append(
                Result(
                    workload.name,
                    name,
                    statistics.median(times),
                    statistics.median(expected),
                    moves=played[name][-1].moves,
                    all_measured=times,
                )
            )
        for result in results:
            result.measured_ratio = result.measured / results[0].measured
            result.simulated_ratio = result.simulated / results[0].simulated
        return results
    finally:
        bench.close()


def agreement(results: Sequence[Result], in_every_repeat: bool = False) -> tuple[int, int]:
    """Pairs of policies of a workload that measured apart: (simulated in the same order, all).

    Args:
        results: of all workloads.
        in_every_repeat: only pairs of which one was quicker in each of its repeats than the other in any.
    """
    same = count = 0
    for _, some in itertools.groupby(results, key=lambda result: result.workload):
        for a, b in itertools.combinations(list(some), 2):
            quicker, slower = sorted((a, b), key=lambda result: result.measured)
            apart = max(quicker.all_measured) < min(slower.all_measured)
            if slower.measured > (1 + CLOSE) * quicker.measured and (apart or not in_every_repeat):
                count += 1
                same += (a.measured < b.measured) == (a.simulated < b.simulated)
    return same, count


@click.command(help=__doc__)
@click.option("--repeats", default=2, show_default=True)
@click.option("--only", multiple=True, help="Part of a workload's name; several.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT)
def main(repeats: int, only: tuple[str, ...], out: Path) -> None:
    os.environ.update(PASSIVE_WAITING | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    console = Console()
    models: dict[str, LengthModel] = {}
    results: list[Result] = []
    for workload in WORKLOADS:
        if only and not any(part in workload.name for part in only):
            continue
        if workload.data not in models:
            models[workload.data], _ = train(read_rollouts([HERE / "data" / f"{workload.data}.parquet"]), 0, 1)
        results += asyncio.run(compare(workload, models[workload.data], repeats, console))
    table = Table(title="Generation of the same prompts; seconds, and ratios to round-robin", title_justify="left")
    for column in ("workload", "policy", "measured", "simulated", "error", "ratio", "simulated", "moves"):
        table.add_column(column, justify="left" if column in ("workload", "policy") else "right")
    for result in results:
        table.add_row(
            result.workload,
            result.policy,
            f"{result.measured:.2f}",
            f"{result.simulated:.2f}",
            f"{result.simulated / result.measured - 1:+.0%}",
            f"{result.measured_ratio:.3f}",
            f"{result.simulated_ratio:.3f}",
            str(result.moves),
            end_section=result.policy == list(POLICIES)[-1],
        )
    console.print(table)
    errors = [abs(result.simulated / result.measured - 1) for result in results]
    same, count = agreement(results)
    console.print(f"median error of the simulated time {statistics.median(errors):.1%}", highlight=False)
    same_apart, apart = agreement(results, in_every_repeat=True)
    console.print(f"policies that measured over {CLOSE:.0%} apart: {same} of {count} pairs simulated in that order")
    console.print(f"of those whose repeats do not overlap: {same_apart} of {apart}")
    for name in list(POLICIES)[1:]:
        mine = [result for result in results if result.policy == name]
        measured = statistics.geometric_mean(result.measured_ratio for result in mine)
        expected = statistics.geometric_mean(result.simulated_ratio for result in mine)
        console.print(f"{name}: {measured:.3f} of round-robin's time, simulated {expected:.3f}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    summary = {"median_error": statistics.median(errors), "same_order": same, "pairs": count}
    summary |= {"same_order_apart": same_apart, "pairs_apart": apart}
    (out / "results.json").write_text(json.dumps(summary | {"results": [asdict(r) for r in results]}, indent=1) + "\n")
    plot(results, out / "prediction.svg")


def plot(results: Sequence[Result], path: Path) -> None:
    """Simulated against measured, and each policy's ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in POLICIES:
        mine = [result for result in results if result.policy == name]
        left.scatter([r.measured for r in mine], [r.simulated for r in mine], s=18, label=name)
        right.plot([r.measured_ratio for r in mine], range(len(mine)), "o", label=name)
    most = max(max(r.measured, r.simulated) for r in results)
    left.plot([0, most], [0, most], color="grey", lw=0.8, ls=":")
    left.set_xlabel("measured, s")
    left.set_ylabel("simulated, s")
    left.legend(fontsize=8)
    right.set_yticks(range(len({r.workload for r in results})), list(dict.fromkeys(r.workload for r in results)))
    right.set_xlabel("measured time / round-robin's")
    right.invert_yaxis()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
