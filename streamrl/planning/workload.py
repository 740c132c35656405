"""Workloads of `streamrl simulate`: drawn lengths, or those of a recorded run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ranker.data import first_rows
from streamrl.errors import UserError
from streamrl.plain_files import open_plain
from streamrl.run_dir import layout

if TYPE_CHECKING:
    import numpy as np

    from scheduler.simulation.generation_simulator import SimulatedRequest


LARGEST_ROLLOUTS = 64 << 30
"""Most bytes of a file of rollouts; they are read some thousand rows at a time."""


@dataclass(frozen=True)
class Workload:
    """Requests to simulate, and the source of their lengths."""

    source: str
    batches: list[list[SimulatedRequest]]
    """Batches to simulate one after the other, such as a run's steps."""
    longest: float
    """Most tokens of a request."""

    def groups(self, least: int) -> list[list[SimulatedRequest]]:
        """Return at least `least` groups in order of issue, with unique ids; the batches repeat as needed."""
        made: list[list[SimulatedRequest]] = []
        for number, batch in enumerate(cycle(self.batches)):
            if len(made) >= least:
                break
            by_group: dict[str, list[SimulatedRequest]] = {}
            for one in batch:
                own = replace(one, request_id=f"{number}.{one.request_id}", group_id=f"{number}.{one.group_id}")
                by_group.setdefault(own.group_id, []).append(own)
            made.extend(by_group.values())
        return made


def draw(lengths: str, count: int, limit: int, noise: float, seed: int, batches: int = 1) -> Workload:
    """Draw lengths, in groups of eight requests.

    Args:
        lengths: a distribution, as in `--lengths` of `streamrl simulate`.
        count: requests of a batch.
        limit: most tokens of a request.
        noise: spread of the forecasts, see `_requests`.
        seed: seed of the draws.
        batches: number of batches.

    Raises:
        UserError: the distribution cannot be read.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    kind, _, numbers = lengths.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
        if not all(map(math.isfinite, values)):
            raise ValueError("expected finite numbers")
        drawn = {
            "lognormal": lambda: rng.lognormal(values[0], values[1], (batches, count)),
            "uniform": lambda: rng.uniform(values[0], values[1], (batches, count)),
            "constant": lambda: np.full((batches, count), values[0]),
        }[kind]()
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise UserError(
            f"--lengths {lengths}: expected lognormal:MU,SIGMA, uniform:LOW,HIGH or constant:N, in finite numbers, "
            "e.g. lognormal:7.6,0.8"
        ) from error
    drawn = np.clip(drawn, 1, limit).round()
    groups = [str(number // 8) for number in range(count)]
    made = [_requests(batch, groups, [0] * count, noise, limit, rng) for batch in drawn]
    return Workload(f"{lengths}, at most {limit}", made, limit)


def open_found(file: Path, given: Path) -> BinaryIO:
    """Open a file of rollouts for the ranker: one that the user named, or a plain file of a folder that was named.

    Raises:
        NotPlainFile: it is a link in that folder, no regular file, or too large.
    """
    if file == given:
        return open_plain(file.resolve(), largest=LARGEST_ROLLOUTS)
    return open_plain(file, below=given, largest=LARGEST_ROLLOUTS)


def replay(trace: Path, ranker: Path | None, noise: float, seed: int) -> Workload:
    """Read a run's steps: true lengths, groups and prompt lengths from its rollouts.

    Args:
        trace: a run's folder, its `rollouts`, or one file.
        ranker: file of the model that forecasts the requests' lengths; None: forecasts are the true lengths.
        noise: spread of the forecasts, see `_requests`.
        seed: seed of that spread.

    Raises:
        UserError: there are no rollouts, they have no rows, or they have the wrong form.
    """
    import numpy as np
    import pyarrow as pa

    from ranker.errors import RankerError
    from ranker.model import LengthModel
    from scheduler.cost.length_forecast import Forecast
    from streamrl.rollouts.parquet_files import read_columns

    folder = trace / layout.ROLLOUTS if (trace / layout.ROLLOUTS).is_dir() else trace
    files = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
    if not files:
        raise UserError(f"--trace {trace}: no rollouts (*.parquet) there; expected a run's folder")
    try:
        model = LengthModel.load(ranker) if ranker else None
        tables = [first_rows(read_columns(file, trace if trace.is_dir() else file.parent)) for file in files]
    except (RankerError, OSError, pa.ArrowInvalid) as error:
        raise UserError(f"--trace {trace}: {error}") from error
    if not any(table.num_rows for table in tables):
        raise UserError(f"--trace {trace}: its rollouts have no rows; expected those of a step at least")
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
            predicted = model.predict(table["prompt"].to_pylist(), tasks, limit=max(longest, model.limit))
            batch = [
                replace(request, forecast=Forecast.from_quantiles(predicted.levels, row))
                for request, row in zip(batch, predicted.quantiles, strict=True)
            ]
        batches.append(batch)
    return Workload(f"{trace}, {len(batches)} steps", [batch for batch in batches if batch], longest)


def _requests(
    lengths: np.ndarray, groups: list[str], prompts: list[int], noise: float, longest: float, rng: np.random.Generator
) -> list[SimulatedRequest]:
    """Make requests whose forecasts are their true lengths, or log-normal around a value that is off by `noise`."""
    import numpy as np

    from scheduler.cost.length_forecast import MIDPOINTS, Forecast
    from scheduler.simulation.generation_simulator import SimulatedRequest

    if noise:
        levels = np.linspace(-2.2, 2.2, len(MIDPOINTS))
        centres = lengths * np.exp(noise * rng.standard_normal(len(lengths)))
        quantiles = np.clip(centres[:, None] * np.exp(noise * levels), 1, longest)
        forecasts = [Forecast(tuple(row)) for row in quantiles.tolist()]
    else:
        forecasts = [Forecast.exactly(length) for length in lengths.tolist()]
    columns = zip(lengths.tolist(), groups, prompts, strict=True)
    return [
        SimulatedRequest(str(number), *values, forecast=forecast)
        for number, (values, forecast) in enumerate(zip(columns, forecasts, strict=True))
    ]
