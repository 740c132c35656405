"""The instances of `streamrl simulate`: step times of a file or of a GPU type, with or without speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from scheduler.cost.decode import QWEN_7B, StepCurve, roofline
from scheduler.cost.generation_cost import Batch, slots_of
from scheduler.cost.hardware import CPU
from scheduler.cost.hardware import device as find
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.speculative_decoding import Speculation, speculated
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from streamrl.errors import UserError, why_unusable


def simulated_fleet(
    count: int, curve: Path | None, device: str, slots: int, speculation: Speculation | None
) -> list[SimulatedInstance]:
    """Return equal instances.

    Args:
        count: number of instances.
        curve: file of `streamrl calibrate`; None: the roofline of a 7B model on `device`.
        device: GPU type.
        slots: largest batch of an instance.
        speculation: speculative decoding of the instances; None: they do not speculate.

    Raises:
        UserError: the file or the device is unknown.
    """
    steps = _curve(curve, device)
    if speculation is not None:
        steps = speculated(steps, speculation, slots)
    return [SimulatedInstance(f"i{n}", steps, slots) for n in range(count)]


def slots_in_memory(device: str, slots: int, batches: Sequence[Sequence[SimulatedRequest]]) -> int:
    """Return how many of `slots` requests a GPU's memory holds at once beside a 7B model, as plans count it.

    A CPU's has no such limit here: it is the machine's.

    Args:
        device: GPU type.
        slots: largest batch that is asked for.
        batches: requests of the simulation.

    Raises:
        UserError: the device is unknown, or holds not even the longest request.
    """
    try:
        found = find(device)
    except ValueError as error:
        raise UserError(f"--device {device}: {error}") from error
    if found.name == CPU:
        return slots
    every = [request for batch in batches for request in batch]
    prompts = float(np.mean([request.prompt_tokens for request in every]))
    # as many samples as slots, so that only memory and slots are limits
    batch = Batch.of(np.asarray([max(1.0, request.length) for request in every]), slots, prompts)
    longest = max(request.length + request.prompt_tokens for request in every)
    batch = replace(batch, longest=longest - prompts)
    held = slots_of(MODELS["7b"], found, 1, batch, slots)
    if not held:
        raise UserError(
            f"--device {device}: its {found.memory_gb:.0f} GB do not hold a 7B model and a request of {longest:.0f} "
            "tokens; expected a larger GPU, shorter requests, or --curve FILE of the instances that you have"
        )
    return held


def _curve(path: Path | None, device: str) -> StepCurve:
    """Return the measured step times of a file, or a 7B model's roofline."""
    if path is None:
        try:
            return roofline(QWEN_7B, find(device))
        except ValueError as error:
            raise UserError(f"--device {device}: {error}") from error
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        curve = StepCurve.from_json(values)
    except (OSError, ValueError) as error:
        raise UserError(f"--curve {path}: {why_unusable(error)}; streamrl calibrate writes such a file") from error
    if values.get("doubts"):
        click.echo(f"--curve {path} is doubtful: {values['doubts']}", err=True)
    if "per_context_token" not in values:
        click.echo(f"--curve {path} has no per_context_token: reading the context costs nothing here", err=True)
    return curve
