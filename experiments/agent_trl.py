"""Compare a tool task with the same in TRL (GRPOTrainer, `environment_factory`): samples per second, and rewards.

    .venv/bin/pip install --no-deps trl==1.16.0     # in locks/cpu.txt already
    .venv/bin/python experiments/agent_trl.py       # a quarter of an hour, on a machine that does nothing else

The task is agent_trl_task.py: a sum, two solved ones before it, and a calculator as a tool; at most 3 answers of the
model in an episode. Both make optimizer steps of `--prompts` x 8 episodes with SmolLM2-135M-Instruct under the chat
template of Qwen3-2507 (its own knows no tools), with the same prompts, description of the tool, reward, AdamW learning
rate, temperature and compute type; no KL term, on-policy. TRL keeps fp32 weights, as this system does, and generates
with transformers. An answer has at most 64 tokens here; TRL limits the episode instead, to 128 without its question.

They take turns, TRL in a process that waits in between, and this system in a run that is resumed. The first step of
each start is left out: kernels are compiled and memory is got in it. Writes experiments/results/agent_trl.json, .md and
.svg.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
from agent_learning import turns_by_step
from agent_trl_task import SCHEMA, TURNS, Calculator, conversation, reward
from beside_trl import OURS, Step, TrlProcess, grpo_settings, own_step, show_times, step_gate
from matplotlib.figure import Figure
from running import RESULTS, Sheet, launch_or_resume, machine, results_folder, terminal, write_results

from streamrl.cli.main import error_lines
from streamrl.config.run import RunConfig
from streamrl.machine.compute_type import decided
from streamrl.machine.known_models import CHECKSUMS
from streamrl.machine.model_files import resolve_model
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics
from streamrl.tasks.source import PromptSource

OUT = RESULTS / "agent_trl.json"
TRL = "TRL"
SIZE = 8
"""Episodes of a prompt."""
LR, TEMPERATURE = 2e-5, 1.0


def model_folder(folder: Path) -> Path:
    """Make SmolLM2 with the chat template of Qwen3-2507, as TRL has it."""
    import trl

    source = Path(resolve_model("smollm2-135m"))
    model = folder / "model"
    shutil.copytree(source, model, ignore=shutil.ignore_patterns(CHECKSUMS))
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    (model / "chat_template.jinja").write_text(template.read_text())
    return model


def run_config(model: Path, steps: int, prompts: int) -> RunConfig:
    """Return the work of this system."""
    task = {"kind": "agent", "name": "sums", "max_turns": TURNS, "deadlines": {"episode_s": 600}}
    functions = {"run": "experiments.agent_trl_task:run", "items": "experiments.agent_trl_task:item"}
    return RunConfig.model_validate(
        {
            "name": "agent-trl",
            "steps": steps,
            "seed": 0,
            "model": {"path": str(model), "max_context": 1024},
            "tasks": [task | functions],
            "batch": {"prompts_per_step": prompts, "samples_per_prompt": SIZE, "micro_batch_tokens": 4096},
            "sampling": {"max_tokens": 64, "temperature": TEMPERATURE},
            "schedule": {"name": "stream"},
            "optimizer": {"lr": LR},
            "algorithm": {"name": "grpo", "aggregation": "token"},
            "checkpoint": {"every": 5, "keep": 1},
        }
    )


def ours(run_dir: Path, steps: int, prompts: int) -> list[Step]:
    """Run this system until it has made so many steps in all; return those of this start."""
    before = len(read_metrics(run_dir / layout.METRICS)) if run_dir.exists() else 0
    launch_or_resume(run_dir, steps, run_dir.parent / "run.yaml")
    turns = turns_by_step(run_dir)
    shown = sum(message["role"] == "assistant" for message in conversation(0, 0))
    found: list[Step] = []
    for row in read_metrics(run_dir / layout.METRICS)[before:]:
        rows = pq.read_table(run_dir / layout.ROLLOUTS / f"step_{row.step:06d}.parquet", columns=["mask", "reward"])
        sampled = sum(sum(one["mask"]) for one in rows.to_pylist() if one["reward"] is not None)
        found.append(own_step(row) | {"sampled": sampled / (prompts * SIZE), "turns": turns[row.step]["turns"] - shown})
    return found


def trl(model: str, dtype: str, steps: int, prompts: int) -> None:
    """Run TRL in this process: wait for a line before each step, and print what was measured after it."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    assert get_json_schema(Calculator().calculate) == SCHEMA  # both describe the tool alike
    config = run_config(Path(model), steps, prompts)
    source = PromptSource(config.tasks, config.seed)
    items = [source.prompt(number).reward_input for number in range(prompts * steps)]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    made: list[int] = []

    def rewards(completions: Any, environments: Any, a: Any, b: Any, **_: Any) -> list[float]:
        made.extend(sum(one["role"] == "assistant" for one in told) for told in completions)
        each = zip(completions, environments, a, b, strict=True)
        return [reward(one.computed, told[-1], first + second) for told, one, first, second in each]

    def measure(logs: dict[str, float]) -> Step:
        turns = statistics.mean(made)
        made.clear()
        return {"reward": logs["reward"], "sampled": logs["completions/mean_length"], "turns": turns}

    rows = [{"prompt": plain(conversation(one["a"], one["b"])), "a": one["a"], "b": one["b"]} for one in items]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            environment_factory=Calculator,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                max_completion_length=2 * config.sampling.max_tokens,
                max_tool_calling_iterations=TURNS - 1,
                temperature=TEMPERATURE,
                learning_rate=LR,
                loss_type="dapo",  # every trained token of the step counts alike, as `aggregation: token` does
                **grpo_settings(prompts, SIZE, dtype, weights="float32"),
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[step_gate(measure)],
        )
        trainer.train()


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as a data set's column takes them: calls without ids, arguments as objects."""
    found = []
    for message in messages:
        kept = {"role": message["role"], "content": message["content"]}
        if "tool_calls" in message:
            calls = [one["function"] for one in message["tool_calls"]]
            calls = [{"name": one["name"], "arguments": json.loads(one["arguments"])} for one in calls]
            kept["tool_calls"] = [{"type": "function", "function": one} for one in calls]
        if message["role"] == "tool":
            kept["name"] = message["name"]
        found.append(kept)
    return found


def tables(blocks: list[dict[str, list[Step]]], dtype: str, prompts: int, beside: str) -> list[Sheet]:
    """Make the tables."""
    steps = {name: [step for block in blocks for step in block[name]] for name in (OURS, TRL)}
    medians = {name: statistics.median(step["seconds"] for step in steps[name] if step["timed"]) for name in steps}

    def mean(name: str, key: str, which: slice = slice(None)) -> float:
        return statistics.mean(step[key] for step in steps[name][which])

    rows = [
        [
            name,
            f"{sum(step['timed'] for step in steps[name]):.0f}",
            f"{medians[name]:.1f}",
            f"{min(step['seconds'] for step in steps[name] if step['timed']):.1f}",
            f"{max(step['seconds'] for step in steps[name] if step['timed']):.1f}",
            f"{prompts * SIZE / medians[name]:.2f}",
            f"{mean(name, 'sampled'):.0f}",
            f"{mean(name, 'turns'):.2f}",
            f"{mean(name, 'reward', slice(4)):.2f}",
            f"{mean(name, 'reward', slice(-4, None)):.2f}",
        ]
        for name in steps
    ]
    heads = ("system", "steps", "median s", "shortest", "longest", "samples/s", "tokens", "turns")
    notes = [
        f"{dtype}; samples/s of {OURS} over TRL's: {medians[TRL] / medians[OURS]:.2f}; first steps are not timed",
        "tokens: what was sampled of an episode (TRL counts results of tools in); rewards: of the first and the "
        "last 4 of all steps",
        *[beside] * bool(beside),
    ]
    return [Sheet(f"Steps of {prompts} prompts x {SIZE} episodes", (*heads, "reward at first", "at last"), rows, notes)]


def draw(blocks: list[dict[str, list[Step]]], path: Path) -> None:
    """Draw the rewards of both."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in (OURS, TRL):
        rewards = [step["reward"] for block in blocks for step in block[name]]
        axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label=name)
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1.02), title="sums with a calculator as a tool")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--blocks", default=2, show_default=True, type=click.IntRange(1), help="turns of each")
@click.option("--steps", default=6, show_default=True, type=click.IntRange(2), help="steps of each in a turn")
@click.option("--prompts", default=4, show_default=True, type=click.IntRange(1), help="of a step")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="of both; by default what the machine has")
@click.option("--beside", default="", help="a remark about the machine, for the table")
@click.option("--only-trl", nargs=2, hidden=True, help="used by this script itself, in a process of its own")
def main(
    blocks: int, steps: int, prompts: int, dtype: str | None, beside: str, only_trl: tuple[str, str] | None
) -> None:
    if only_trl:
        trl(*only_trl, blocks * steps, prompts)
        return
    console, peer = terminal(), None
    target = results_folder(None, "blocks", "steps", "prompts", "dtype") / OUT.name
    measured: list[dict[str, list[Step]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_folder(folder)
        config = run_config(model, blocks * steps, prompts)
        dtype = dtype or decided(config, cuda=False).model.dtype
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        (folder / "run.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
        try:
            for number in range(blocks):
                block = {OURS: ours(folder / config.name, (number + 1) * steps, prompts)}
                numbers = ["--blocks", str(blocks), "--steps", str(steps), "--prompts", str(prompts)]
                peer = peer or TrlProcess([__file__, *numbers, "--only-trl", str(model), dtype])
                block[TRL] = [peer.step() for _ in range(steps)]
                for system, made in block.items():
                    for place, step in enumerate(made):
                        step["timed"] = float(place > 0 or (system == TRL and number > 0))
                    show_times(console, f"block {number + 1} of {blocks}", system, made)
                measured.append(block)
        finally:
            if peer is not None:
                peer.end()
    sheets = tables(measured, dtype, prompts, beside)
    for sheet in sheets:
        sheet.show(console)
    record = {"machine": machine(), "dtype": dtype, "episodes": prompts * SIZE, "blocks": measured, "beside": beside}
    write_results(target, record, "A tool task beside TRL 1.16", sheets)
    draw(measured, target.with_suffix(".svg"))


if __name__ == "__main__":
    with error_lines():
        main()
