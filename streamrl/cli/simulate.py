"""`streamrl simulate`: dispatch policies side by side on a recorded run or on drawn lengths."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import numpy as np

    from scheduler.cost import StepCurve
    from scheduler.simulator import Outcome, SimulatedRequest


@dataclass(frozen=True)
class Workload:
    """What is to be generated, and where its lengths come from."""

    source: str
    batches: list[list[SimulatedRequest]]
    """Simulated one after the other: a run's steps."""
    longest: float
    """Most tokens of a request."""


@click.command(name="simulate")
@click.option("--trace", type=click.Path(path_type=Path), metavar="DIR", help="A run, or its rollouts, to replay.")
@click.option(
    "--lengths",
    default="lognormal:7.6,0.8",
    show_default=True,
    help="Without --trace: lognormal:MU,SIGMA, uniform:LOW,HIGH, or constant:N (tokens).",
)
@click.option("--requests", default=1024, show_default=True, type=click.IntRange(1), help="Without --trace: how many.")
@click.option("--limit", default=20_000, show_default=True, type=click.IntRange(1), help="Without --trace: longest.")
@click.option("--ranker", type=click.Path(path_type=Path), help="With --trace: forecasts of this ranker's file.")
@click.option("--noise", default=0.0, show_default=True, type=click.FloatRange(0), help="Spread of forecasts (log).")
@click.option("--instances", default=8, show_default=True, type=click.IntRange(1))
@click.option("--slots", default=256, show_default=True, type=click.IntRange(1), help="Largest batch of an instance.")
@click.option("--device", default="H800", show_default=True, help="GPU type of the instances (7B model, roofline).")
@click.option("--curve", type=click.Path(path_type=Path), help="Instead: what `streamrl calibrate` measured.")
@click.option("--policy", "policies", multiple=True, help="Several; all unless given.")
@click.option("--price", default=0.0, type=click.FloatRange(0), help="USD per hour and instance.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--out", type=click.Path(path_type=Path), default=Path("simulation.svg"), show_default=True, help="Plot.")
def command(
    trace: Path | None,
    lengths: str,
    requests: int,
    limit: int,
    ranker: Path | None,
    noise: float,
    instances: int,
    slots: int,
    device: str,
    curve: Path | None,
    policies: tuple[str, ...],
    price: float,
    seed: int,
    out: Path,
) -> None:
    """Compare dispatch policies on the same requests, without a GPU.

    Policies are told the true lengths, unless --noise or --ranker gives them forecasts. Makespans are of generation
    alone; "saved" is against least-loaded, "USD/1k" per thousand samples.

    \b
    Examples:
      streamrl simulate --requests 1024 --instances 16 --noise 0.4
      streamrl simulate --trace runs/demo --ranker ranker.lgb --policy least-loaded --policy skew-aware
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from rich.console import Console
    from rich.table import Table

    from scheduler.policies import POLICIES, make_policy
    from scheduler.simulator import SimulatedInstance, simulate
    from streamrl.errors import UserError

    names = list(dict.fromkeys(["least-loaded", *(policies or POLICIES)]))
    for name in names:
        if name not in POLICIES:
            raise UserError(f"--policy {name}: there is no such policy; expected one of {', '.join(POLICIES)}")
    if ranker is not None and trace is None:
        raise UserError("--ranker needs --trace: it predicts from the prompts of a recorded run")
    workload = _replay(trace, ranker, noise, seed) if trace else _draw(lengths, requests, limit, noise, seed)
    fleet = [SimulatedInstance(f"i{n}", _curve(curve, device), slots) for n in range(instances)]
    outcomes = {
        name: [simulate(make_policy(name, workload.longest), batch, fleet) for batch in workload.batches]
        for name in names
    }
    count = sum(map(len, workload.batches))
    click.echo(f"{count} requests ({workload.source}) on {instances} instances")
    table = Table()
    for column in ("policy", "makespan", "saved", "bubble", "moves", "tokens/s", "USD/1k"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    spans = {name: sum(outcome.makespan for outcome in some) for name, some in outcomes.items()}
    for name, some in outcomes.items():
        busy = sum(sum(outcome.busy.values()) for outcome in some)
        cost = price * instances * spans[name] / 3600 / count * 1000
        table.add_row(
            name,
            f"{spans[name]:.1f} s",
            f"{1 - spans[name] / spans['least-loaded']:+.1%}",
            f"{1 - busy / (instances * spans[name]):.1%}",
            str(sum(outcome.moves for outcome in some)),
            f"{sum(outcome.tokens for outcome in some) / spans[name]:.0f}",
            f"{cost:.4f}" if price else "-",
        )
    Console().print(table)
    _plot(outcomes, out)
    click.echo(f"plot written to {out}")


def _curve(path: Path | None, device: str) -> StepCurve:
    """Measured steps from a file, or a 7B model's roofline."""
    from scheduler.cost import ModelShape, StepCurve, roofline
    from scheduler.hardware import device as find
    from streamrl.errors import UserError

    if path is None:
        try:
            return roofline(ModelShape(7.6e9, 28, 2 * 4 * 128, 3584), find(device))
        except ValueError as error:
            raise UserError(f"--device {device}: {error}") from error
    try:
        return StepCurve.from_json(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"--curve {path}: {error}; streamrl calibrate writes such a file") from error


def _draw(lengths: str, count: int, limit: int, noise: float, seed: int) -> Workload:
    import numpy as np

    from streamrl.errors import UserError

    rng = np.random.default_rng(seed)
    kind, _, numbers = lengths.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
        drawn = {
            "lognormal": lambda: rng.lognormal(values[0], values[1], count),
            "uniform": lambda: rng.uniform(values[0], values[1], count),
            "constant": lambda: np.full(count, values[0]),
        }[kind]()
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"--lengths {lengths}: expected lognormal:MU,SIGMA, uniform:LOW,HIGH or constant:N, e.g. lognormal:7.6,0.8"
        ) from error
    drawn = np.clip(drawn, 1, limit).round()
    groups = [str(number // 8) for number in range(count)]
    return Workload(f"{lengths}, at most {limit}", [_requests(drawn, groups, [0] * count, noise, limit, rng)], limit)


def _replay(trace: Path, ranker: Path | None, noise: float, seed: int) -> Workload:
    """A run's steps: true lengths, groups and prompts' lengths from its rollouts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ranker.errors import RankerError
    from ranker.model import LengthModel
    from scheduler.forecast import Forecast
    from scheduler.simulator import SimulatedRequest
    from streamrl.errors import UserError

    folder = trace / "rollouts" if (trace / "rollouts").is_dir() else trace
    files = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
    if not files:
        raise UserError(f"--trace {trace}: no rollouts (*.parquet) there; expected a run's folder")
    try:
        model = LengthModel.load(ranker) if ranker else None
        tables = [pq.read_table(file) for file in files]
    except (RankerError, OSError, pa.ArrowInvalid) as error:
        raise UserError(f"--trace {trace}: {error}") from error
    batches = []
    longest = 1.0
    rng = np.random.default_rng(seed)
    for file, table in zip(files, tables, strict=True):
        if missing := {"output_length", "prompt"} - set(table.column_names):
            raise UserError(f"{file}: no column {', '.join(sorted(missing))}; expected a run's rollouts")
        lengths = np.maximum(np.asarray(table["output_length"].to_numpy(), dtype=np.float64), 1.0)
        longest = max(longest, float(lengths.max(initial=1.0)))
        groups = [str(g) for g in table["group_id"].to_pylist()] if "group_id" in table.column_names else []
        groups = groups or [str(number) for number in range(len(lengths))]
        known = "prompt_tokens" in table.column_names
        prompts = [len(p) for p in table["prompt_tokens"].to_pylist()] if known else [0] * len(lengths)
        batch = _requests(lengths, groups, prompts, noise, longest, rng)
        if model is not None:
            tasks = table["task"].to_pylist() if "task" in table.column_names else None
            predicted = model.predict(table["prompt"].to_pylist(), tasks)
            batch = [
                SimulatedRequest(
                    r.request_id,
                    r.length,
                    r.group_id,
                    r.prompt_tokens,
                    forecast=Forecast.from_quantiles(predicted.levels, row),
                )
                for r, row in zip(batch, predicted.quantiles, strict=True)
            ]
        batches.append(batch)
    return Workload(f"{trace}, {len(batches)} steps", [batch for batch in batches if batch], longest)


def _requests(
    lengths: np.ndarray, groups: list[str], prompts: list[int], noise: float, longest: float, rng: np.random.Generator
) -> list[SimulatedRequest]:
    """Requests whose forecasts are their true lengths, or log-normal around a value that is off by `noise`."""
    import numpy as np

    from scheduler.forecast import MIDPOINTS, Forecast
    from scheduler.simulator import SimulatedRequest

    if noise:
        levels = np.linspace(-2.2, 2.2, len(MIDPOINTS))
        centres = lengths * np.exp(noise * rng.standard_normal(len(lengths)))
        told = np.clip(centres[:, None] * np.exp(noise * levels), 1, longest)
        forecasts = [Forecast(tuple(row)) for row in told.tolist()]
    else:
        forecasts = [Forecast.exactly(length) for length in lengths.tolist()]
    return [
        SimulatedRequest(str(number), float(length), group, prompt, forecast=forecast)
        for number, (length, group, prompt, forecast) in enumerate(
            zip(lengths, groups, prompts, forecasts, strict=True)
        )
    ]


def _plot(outcomes: dict[str, list[Outcome]], out: Path) -> None:
    """How many requests still run, over time, under each policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from streamrl.errors import UserError

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, some in outcomes.items():
        starts = np.cumsum([0.0, *(outcome.makespan for outcome in some[:-1])])
        ends = np.concatenate([start + outcome.ends() for start, outcome in zip(starts, some, strict=True)])
        axis.step(np.sort(ends), np.arange(len(ends))[::-1], where="post", label=name)
    axis.set_xlabel("seconds")
    axis.set_ylabel("requests still to finish")
    axis.set_ylim(bottom=0)
    axis.legend()
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out}: {error}") from error
    finally:
        plt.close(figure)
