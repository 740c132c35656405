"""Workloads of `streamrl simulate`: drawn lengths, or those of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ranker.data import EPISODE, MOST, OF_RUNS, REQUIRED, ROW_IDS, first_rows, read_jsonl, says_length
from streamrl.errors import UserError, why_unusable
from streamrl.plain_files import NotPlainFile, open_plain
from streamrl.run_dir import layout

if TYPE_CHECKING:
    import numpy as np

    from scheduler.simulation.generation_simulator import SimulatedRequest


LARGEST_ROLLOUTS = 64 << 30
"""Most bytes of a file of rollouts; they are read some thousand rows at a time."""
COLUMNS = (*REQUIRED, "group_id", "task", "prompt_tokens", "finish_reason", "void_cause", EPISODE)
"""Columns of rollouts that are replayed; all but `REQUIRED` may be missing."""
VALUES = {"lognormal": 2, "uniform": 2, "constant": 1}
"""Numbers of each distribution of lengths."""
MOST_REQUESTS = 2_000_000
"""Most requests of a simulation: some gigabytes."""


@dataclass(frozen=True)
class Workload:
    """Requests to simulate, and the source of their lengths."""

    source: str
    batches: list[list[SimulatedRequest]]
    """Batches to simulate one after the other, such as a run's steps."""
    longest: float
    """Most tokens of a request."""

    def groups(self, least: int) -> list[list[SimulatedRequest]]:
        """Return at least `least` groups in order of issue, with unique ids; the batches repeat as needed.

        Raises:
            UserError: they have too many requests.
        """
        made: list[list[SimulatedRequest]] = []
        total = 0
        for number, batch in enumerate(cycle(self.batches)):
            if len(made) >= least:
                break
            total += len(batch)
            _check_count(total)
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
        noise: error of the forecasts, see `_requests`.
        seed: seed of the draws.
        batches: number of batches.

    Raises:
        UserError: the distribution cannot be read, or there are too many requests.
    """
    import numpy as np

    _check_count(count * batches)
    rng = np.random.default_rng(seed)
    kind, values = _distribution(lengths)
    drawn = {
        "lognormal": lambda: rng.lognormal(values[0], values[1], (batches, count)),
        "uniform": lambda: rng.uniform(values[0], values[1], (batches, count)),
        "constant": lambda: np.full((batches, count), values[0]),
    }[kind]()
    drawn = np.clip(drawn, 1, limit).round()
    groups = [str(number // 8) for number in range(count)]
    made = [_requests(batch, groups, [0] * count, noise, rng) for batch in drawn]
    return Workload(f"{lengths}, at most {limit}", made, limit)


def _distribution(text: str) -> tuple[str, list[float]]:
    """Return a distribution's kind and numbers.

    Raises:
        UserError: it is no distribution of lengths.
    """
    kind, _, numbers = text.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    fits = VALUES.get(kind) == len(values) and all(map(math.isfinite, values))
    if not fits or (values[1] < 0 if kind == "lognormal" else values[0] < 1 or values != sorted(values)):
        raise UserError(
            f"--lengths {text}: expected lognormal:MU,SIGMA (of the logarithm), uniform:LOW,HIGH or constant:N (of 1 "
            "token or more), e.g. lognormal:7.6,0.8"
        )
    return kind, values


def _check_count(requests: int) -> None:
    if requests > MOST_REQUESTS:
        raise UserError(
            f"{requests:,} requests or more would be simulated, at most {MOST_REQUESTS:,} are; expected fewer "
            "--requests or --iterations, or a smaller --over-issue"
        )


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

    Rows are left out, and counted, as `train-ranker` leaves them out.

    Args:
        trace: a run's folder, its `rollouts`, another folder of Parquet or JSONL files, or one file.
        ranker: file of the model that forecasts the requests' lengths; None: forecasts are the true lengths.
        noise: error of the forecasts, see `_requests`.
        seed: seed of that error.

    Raises:
        UserError: there are no rollouts, they have no rows, or they have the wrong form.
    """
    import numpy as np
    import pyarrow as pa

    from ranker.errors import RankerError
    from ranker.model import LengthModel
    from scheduler.cost.length_forecast import Forecast

    folder = trace / layout.ROLLOUTS if (trace / layout.ROLLOUTS).is_dir() else trace
    # beside a run's rollouts are JSONL files of other things
    kinds = ["*.parquet"] if any((folder / name).exists() for name in OF_RUNS) else ["*.parquet", "*.jsonl"]
    files = [folder] if folder.is_file() else sorted(file for kind in kinds for file in folder.glob(kind))
    if not files:
        raise UserError(f"--trace {trace}: no rollouts ({' or '.join(kinds)}) there; expected a run's folder or a file")
    try:
        model = LengthModel.load(ranker) if ranker else None
    except RankerError as error:
        raise UserError(f"--ranker {error}") from error
    found = []
    for file in files:
        try:
            found.append(list(_samples(file, trace if trace.is_dir() else file)))
        except pa.ArrowException as error:
            why = str(error).rstrip(".")
            told = f"{file}: cannot be read as Parquet: {why}; a file of JSON objects, one a line, ends in .jsonl"
            raise UserError(f"--trace {told}") from error
        except (RankerError, NotPlainFile) as error:
            raise UserError(f"--trace {trace}: {error}") from error
        except OSError as error:
            raise UserError(f"--trace {file}: {why_unusable(error)}") from error
    steps = [step for file in found if (step := [sample for sample in file if sample is not None])]
    left_out = sum(map(len, found)) - sum(map(len, steps))
    if not steps:
        usable = " with a prompt and a usable length" if left_out else ""
        raise UserError(f"--trace {trace}: its rollouts have no rows{usable}; expected those of a step at least")
    batches = []
    longest = max(sample.length for step in steps for sample in step)
    rng = np.random.default_rng(seed)
    for step in steps:
        lengths = np.asarray([sample.length for sample in step])
        batch = _requests(lengths, [one.group for one in step], [one.prompt_tokens for one in step], noise, rng)
        if model is not None:
            texts, tasks = [sample.prompt for sample in step], [sample.task for sample in step]
            predicted = model.predict(texts, tasks, limit=max(longest, model.limit))
            batch = [
                replace(request, forecast=Forecast.from_quantiles(predicted.levels, row))
                for request, row in zip(batch, predicted.quantiles, strict=True)
            ]
        batches.append(batch)
    source = f"{trace}, {len(batches)} steps"
    source += f", {left_out} rows without a prompt or a usable length left out" if left_out else ""
    return Workload(source, batches, longest)


@dataclass(frozen=True)
class _Sample:
    """What is replayed of a sample."""

    prompt: str
    length: float
    """Tokens, at least 1."""
    group: str
    task: str | None
    prompt_tokens: int


def _samples(file: Path, given: Path) -> Iterator[_Sample | None]:
    """Yield a file's samples; None for a row that the ranker leaves out too.

    Args:
        file: Parquet or, by its name, JSONL.
        given: the path that the user named: the file, or a folder above it.

    Raises:
        UserError: a row or a column has the wrong form.
        RankerError, OSError, pa.ArrowException: it cannot be read.
    """
    for number, row in enumerate(_jsonl(file, given) if file.suffix == ".jsonl" else _parquet(file, given), 1):
        where = f"{file}, row {number}"
        prompt, length = row.get("prompt"), _number(row.get("output_length"), "output_length", where)
        if prompt is not None and not isinstance(prompt, str):
            raise UserError(f"{where}: prompt is {prompt!r:.60}; expected text")
        ends = (row.get(name) for name in ("finish_reason", "void_cause", EPISODE))
        if prompt is None or not 0 <= length <= MOST or not says_length(length, *ends):
            yield None
            continue
        group, task, tokens = (row.get(name) for name in ("group_id", "task", "prompt_tokens"))
        known = math.nan if isinstance(tokens, list) else _number(tokens, "prompt_tokens", where)
        if not (math.isnan(known) or 0 <= known <= MOST):
            raise UserError(f"{where}: prompt_tokens is {tokens!r:.60}; expected tokens, or their number")
        yield _Sample(
            prompt,
            max(1.0, float(int(length))),
            f"row {number}" if group is None else str(group),
            None if task is None else str(task),
            len(tokens) if isinstance(tokens, list) else 0 if math.isnan(known) else int(known),
        )


def _number(value: Any, name: str, where: str) -> float:
    """Return a number, NaN for none; what is beyond `MOST` becomes infinite.

    Raises:
        UserError: it is something else.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise UserError(f"{where}: {name} is {value!r:.60}; expected a number")
    return math.inf if value > MOST else -math.inf if value < -MOST else float(value)


def _parquet(file: Path, given: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a Parquet file's rows; see `_samples`."""
    from streamrl.rollouts.parquet_files import read_columns

    table = first_rows(read_columns(file, file.parent if file == given else given, [*COLUMNS, *ROW_IDS]))
    _check_columns(file, table.column_names)
    for batch in table.to_batches(max_chunksize=1024):
        yield from batch.to_pylist()


def _jsonl(file: Path, given: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a JSONL file's rows; see `_samples`."""
    seen = False
    for _, row in read_jsonl(file, partial(open_found, file, given)):
        if not seen:
            _check_columns(file, list(row))
            seen = True
        yield row


def _check_columns(file: Path, there: list[str]) -> None:
    if missing := [name for name in REQUIRED if name not in there]:
        raise UserError(f"{file}: no column {', '.join(missing)}; expected a run's rollouts")


def _requests(
    lengths: np.ndarray, groups: list[str], prompts: list[int], noise: float, rng: np.random.Generator
) -> list[SimulatedRequest]:
    """Make requests whose forecasts are their true lengths, or what a forecaster honestly makes of a hint.

    The hint is the logarithm of the length plus a normal error with standard deviation `noise`. With m and v the mean
    and the variance of the batch's log lengths, the forecast is their posterior as if they were normal: log-normal
    around m + b (hint - m), b = v / (v + noise^2), with variance b noise^2. None is above the batch's longest.
    """
    import numpy as np

    from scheduler.cost.length_forecast import NORMAL_SCORES, Forecast
    from scheduler.simulation.generation_simulator import SimulatedRequest

    if noise:
        logs = np.log(lengths)
        hints = logs + noise * rng.standard_normal(len(logs))
        weight = logs.var() / (logs.var() + noise**2)
        centres = logs.mean() + weight * (hints - logs.mean())
        told = centres[:, None] + noise * np.sqrt(weight) * NORMAL_SCORES
        forecasts = [Forecast(tuple(row)) for row in np.exp(np.clip(told, 0.0, logs.max())).tolist()]
    else:
        forecasts = [Forecast.exactly(length) for length in lengths.tolist()]
    columns = zip(lengths.tolist(), groups, prompts, strict=True)
    return [
        SimulatedRequest(str(number), *values, forecast=forecast)
        for number, (values, forecast) in enumerate(zip(columns, forecasts, strict=True))
    ]
