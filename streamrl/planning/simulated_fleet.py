"""The instances of `streamrl simulate`: step times of a file or of a GPU type, with or without speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path

import click

from scheduler.cost.decode import QWEN_7B, StepCurve, roofline
from scheduler.cost.hardware import device as find
from scheduler.cost.speculative_decoding import Speculation, speculated
from scheduler.simulation.generation_simulator import SimulatedInstance
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
