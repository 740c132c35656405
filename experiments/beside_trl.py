"""What the studies beside TRL share: TRL's process, its settings, and the gate before each of its optimizer steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

if TYPE_CHECKING:  # TRL's own process imports them, not the one that runs StreamRL beside it
    from transformers import TrainerCallback

    from streamrl.run_dir.metrics import MetricsRow

OURS = "StreamRL"
MEASURED = "MEASURED "
"""Start of a line of TRL's process that holds a step."""

Step = dict[str, float]
"""`seconds` and `reward` of an optimizer step, and whatever else the study compares."""


def own_step(row: MetricsRow) -> Step:
    """Return the seconds and the reward of a step of StreamRL."""
    assert row.step_time_s is not None and row.reward_mean is not None
    return {"seconds": row.step_time_s, "reward": row.reward_mean}


class TrlProcess:
    """TRL in a process of its own, which makes a step when it is told to."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> Step:
        """Make one step, and return what the process measured of it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MEASURED):  # beside what TRL prints
                step: Step = json.loads(line.removeprefix(MEASURED))
                return step
        raise click.ClickException("TRL has ended; its last words are above")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def step_gate(measure: Callable[[dict[str, float]], Step]) -> TrainerCallback:
    """Make the callback that waits for a line before each optimizer step, and prints its seconds after it.

    Args:
        measure: Returns, by TRL's logs of the step, what is printed besides; its own time is not measured.
    """
    from transformers import TrainerCallback

    class Gate(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            self.started = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.monotonic() - self.started

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "reward" in logs:
                print(MEASURED + json.dumps({"seconds": self.seconds} | measure(logs)), flush=True)

    return Gate()


def grpo_settings(prompts: int, size: int, dtype: str, weights: str) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig` that make TRL's step that of StreamRL's `stream`: on-policy, no KL term.

    Args:
        prompts: Prompts of a step. One group makes one forward and backward pass, and their gradients accumulate.
        size: Completions of each.
        dtype: Type to compute in: `float32`, or `bfloat16` by autocast.
        weights: Type of the weights.
    """
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": prompts,
        "num_generations": size,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "bf16": dtype == "bfloat16",
        "use_cpu": True,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": weights},
    }


def show_times(console: Console, where: str, name: str, steps: Sequence[Step]) -> None:
    """Print what was just measured."""
    times = ", ".join(f"{step['seconds']:.1f}" for step in steps)
    console.print(f"  {where}: {name}: {times} s", highlight=False)
