"""Step time of this system beside TRL's GRPOTrainer: same model, prompts, group size, token limit, machine, one run.

    .venv/bin/pip install --no-deps trl==1.16.0     # in locks/cpu.txt already
    .venv/bin/python experiments/peer_trl.py --steps 3

Both make optimizer steps of 8 prompts x 8 completions of at most 96 tokens with SmolLM2-135M-Instruct on all cores,
with the same AdamW learning rate, no KL term, and the same reward. TRL runs twice: as it comes (fp32 weights, bf16
autocast: the precision that this system keeps too), and with bf16 weights (faster and less exact: no fp32 master copy).
The first step of each is left out (kernels are compiled in it). Prints the medians and the ratios, and writes
experiments/results/peer_trl.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from streamrl.config.run import RunConfig
from streamrl.launch.models import resolve_model
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.rewards import Scorer
from streamrl.tasks.source import PromptSource

HERE = Path(__file__).parent
TRL_VARIANTS = {"TRL": "float32", "TRL, bf16 weights": "bfloat16"}
"""What is shown -> type of the weights."""
console = Console()


def run_config(steps: int, model: str) -> RunConfig:
    """The work that both do."""
    return RunConfig.model_validate(
        {
            "name": "peer",
            "steps": steps,
            "model": {"path": model},
            "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "micro_batch_tokens": 1024},
            "sampling": {"max_tokens": 96},
            "optimizer": {"lr": 1e-5},
            "checkpoint": {"every": 1000},
        }
    )


def ours(config: RunConfig) -> dict[str, Any]:
    """Runs this system; per-step seconds, tokens and rewards."""
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / "run.yaml"
        run_file.write_text(json.dumps(config.model_dump(mode="json")))
        cluster = HERE.parent / "cluster_configs" / "local.yaml"
        command = [sys.executable, "-m", "streamrl.cli.main", "launch", "--cluster", str(cluster)]
        subprocess.run([*command, "--run", str(run_file), "--runs-dir", folder], check=True)
        rows = read_metrics(Path(folder) / config.name / "metrics.jsonl")
    return {
        "step_times_s": [row.step_time_s for row in rows],
        "mean_length": [row.output_length_mean for row in rows],
        "rewards": [row.reward_mean for row in rows],
        "groups_no_gradient": [row.groups_no_gradient for row in rows],
    }


def trl(config: RunConfig, dtype: str) -> dict[str, Any]:
    """Runs TRL on the same prompts in this process; per-step seconds, tokens and rewards."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    source, scorer = PromptSource(config.tasks, config.seed), Scorer(config.tasks, config.seed)
    count = config.steps * config.batch.prompts_per_step
    prompts = [source.prompt(index) for index in range(count)]
    model = resolve_model(config.model.path)
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.text}], "number": i} for i, p in enumerate(prompts)]
    )

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            scorer.score(prompts[n].task, text, prompts[n].reward_input) for n, text in zip(number, texts, strict=True)
        ]

    class Clock(TrainerCallback):
        """Seconds per optimizer step."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.monotonic() - self.started)
            print(f"  step {len(self.times)}: {self.times[-1]:.1f} s", file=sys.stderr)

    clock = Clock()
    size = config.batch.samples_per_prompt
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=config.steps,
                # one group per forward and backward, as many as there are prompts accumulated
                per_device_train_batch_size=size,
                gradient_accumulation_steps=config.batch.prompts_per_step,
                num_generations=size,
                max_completion_length=config.sampling.max_tokens,
                temperature=config.sampling.temperature,
                learning_rate=config.optimizer.lr,
                lr_scheduler_type="constant",
                beta=0.0,
                bf16=True,
                use_cpu=True,
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": dtype},
            ),
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return {
        "step_times_s": clock.times,
        "mean_length": [log.get("completions/mean_length") for log in logs],
        "rewards": [log["reward"] for log in logs],
    }


@click.command(help=__doc__)
@click.option("--steps", default=3, show_default=True, type=click.IntRange(2), help="optimizer steps of each")
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--only-trl", hidden=True, help="used by this script itself, in a process of its own")
def main(steps: int, model: str, only_trl: str | None) -> None:
    config = run_config(steps, model)
    if only_trl:
        json.dump(trl(config, only_trl), sys.stdout)
        return
    results = {"StreamRL": ours(config)}
    for name, dtype in TRL_VARIANTS.items():
        console.print(f"running {name} on the same prompts ...")
        answer = subprocess.run(
            [sys.executable, __file__, "--only-trl", dtype, "--steps", str(steps), "--model", model],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        results[name] = json.loads(answer.stdout.splitlines()[-1])
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt
    table = Table("system", "step time (s)", "samples/s", "mean length", "reward")
    medians = {}
    for name, result in results.items():
        medians[name] = statistics.median(result["step_times_s"][1:])
        table.add_row(
            name,
            f"{medians[name]:.1f}",
            f"{samples / medians[name]:.2f}",
            f"{statistics.mean(result['mean_length']):.0f}",
            f"{statistics.mean(result['rewards']):.2f}",
        )
    console.print(table)
    ratios = {name: medians[name] / medians["StreamRL"] for name in TRL_VARIANTS}
    for name, ratio in ratios.items():
        console.print(f"StreamRL makes {ratio:.1f} x the samples/s of {name} ({samples} samples a step)")
    target = HERE / "results" / "peer_trl.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"ratios": ratios, "median_step_s": medians, "runs": results}, indent=1) + "\n")
    console.print(f"written to {target}")


if __name__ == "__main__":
    main()
