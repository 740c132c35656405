"""Compare step times with TRL's GRPOTrainer: same model, prompts, group size, token limit, machine, in turns.

    .venv/bin/pip install --no-deps trl==1.16.0     # in locks/cpu.txt already
    .venv/bin/python experiments/peer_trl.py        # half an hour, on a machine that does nothing else

All make optimizer steps of 8 prompts x 8 completions of at most 96 tokens with SmolLM2-135M-Instruct on all cores,
with the same AdamW learning rate, no KL term, the same reward and the same compute type: `--dtype`, by default the one
that this machine multiplies faster. In float32 TRL computes in fp32 throughout. In bfloat16 it runs twice: as it comes
(fp32 weights, bf16 autocast: the precision that this system keeps too), and with bf16 weights (faster and less exact:
no fp32 master copy). This system runs with schedule `stream`, on-policy as TRL is. They take turns, because a shared
machine's speed changes from hour to hour: in each block one after the other makes the same steps, TRL in processes that
wait in between. The first step of each process is left out (kernels are compiled and memory is got in it).

Beside each time is its bound: the operations that the step's own samples need, to generate them and to learn from
those whose group has a gradient, at the rate at which this machine multiplies large matrices on all cores, measured
before. Prints medians and ratios, also of every block, and writes experiments/results/peer_trl.json and .md (in float32
peer_trl_float32, in bfloat16 with AMX peer_trl_amx).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
from beside_trl import OURS, Step, TrlProcess, grpo_settings, own_step, show_times, step_gate
from bounds import GFLOP, Group, gemm_peak, generating, learning, shape_of
from running import LOCAL, Job, Sheet, machine, results_folder, run_job, terminal, write_results

from streamrl.cli.main import error_lines
from streamrl.config.run import RunConfig
from streamrl.machine.compute_type import decided
from streamrl.machine.cpu import this_cpu
from streamrl.machine.model_files import resolve_model
from streamrl.tasks.rewards import Scorer
from streamrl.tasks.source import PromptSource

TRL_VARIANTS = {
    "float32": {"TRL": "float32"},
    "bfloat16": {"TRL": "float32", "TRL, bf16 weights": "bfloat16"},
}
"""By the compute type: what is shown -> type of the weights."""
LIMIT_S = 1800
"""For one run of this system."""
PROMPTS, SIZE = 8, 8
"""Of a step, and completions of each."""


def run_config(steps: int, model: str, dtype: str, seed: int = 0) -> RunConfig:
    """The work that all do."""
    return RunConfig.model_validate(
        {
            "name": "peer",
            "steps": steps,
            "seed": seed,
            "model": {"path": model, "dtype": dtype},
            "batch": {"prompts_per_step": PROMPTS, "samples_per_prompt": SIZE},
            "sampling": {"max_tokens": 96},
            "schedule": {"name": "stream"},
            "optimizer": {"lr": 1e-5},
            "checkpoint": {"every": 1000},
        }
    )


def ours(config: RunConfig, folder: Path, name: str) -> list[Step]:
    """Run this system; return its steps but the first."""
    run_file = folder / f"{name}.yaml"
    run_file.write_text(json.dumps(config.model_dump(mode="json")))
    job = Job(name, LOCAL, run_file, config.steps)
    outcome = run_job(job, folder, lambda steps: None, LIMIT_S)
    if outcome.error:
        raise click.ClickException(outcome.error)
    found = []
    for row in outcome.rows[1:]:
        assert row.output_length_mean is not None
        operations = needed(config.model.path, rollouts(folder / name, row.step))
        found.append(own_step(row) | {"mean_length": row.output_length_mean} | operations)
    return found


def rollouts(run_dir: Path, step: int) -> list[Group]:
    """What a step of this system was made of."""
    table = pq.read_table(run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        if row["reward"] is not None:
            groups.setdefault(row["group_id"], []).append(row)
    return [
        group(
            len(rows[0]["prompt_tokens"]),
            [(int(row["output_length"]), float(row["reward"])) for row in rows],
        )
        for rows in groups.values()
    ]


def group(prompt: int, samples: Sequence[tuple[int, float]]) -> Group:
    """A group by the lengths and rewards of its completions."""
    lengths, rewards = zip(*samples, strict=True)
    return Group(prompt, lengths, len(set(rewards)) == 1)


def needed(model: str, groups: Sequence[Group]) -> Step:
    """Return the 10^9 operations that these groups need: `generating` and `learning`."""
    shape = shape_of(Path(resolve_model(model)))
    return {"generating": generating(shape, groups) / GFLOP, "learning": learning(shape, groups) / GFLOP}


def trl(model: str, weights: str, dtype: str, blocks: int, steps: int) -> None:
    """Run TRL in this process on the prompts of all blocks (of the first one those of its first step, too): wait for
    a line before each step, and print what it measured after it."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    configs = [run_config(steps + 1, model, dtype, seed) for seed in range(blocks)]
    config = configs[0]
    scorers = [Scorer(one.tasks, one.seed) for one in configs]
    sources = [PromptSource(one.tasks, one.seed) for one in configs]
    places = [(n, i) for n in range(blocks) for i in range(PROMPTS * (n > 0), PROMPTS * (steps + 1))]
    prompts = [sources[n].prompt(i) for n, i in places]
    path = resolve_model(model)
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.text}], "number": i} for i, p in enumerate(prompts)]
    )

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    made: dict[int, list[tuple[int, float]]] = {}

    def reward(completions: list[Any], number: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = [
            scorers[places[n][0]].score(prompts[n].task, text, prompts[n].reward_input)
            for n, text in zip(number, texts, strict=True)
        ]
        for n, ids, score in zip(number, completion_ids, scores, strict=True):
            made.setdefault(n, []).append((len(ids), score))
        return scores

    def operations() -> Step:
        """Those of what has been made since the last call."""
        lengths = {
            n: len(
                tokenizer.apply_chat_template(rows[n]["prompt"], add_generation_prompt=True, return_dict=True)[
                    "input_ids"
                ]
            )
            for n in made
        }
        groups = [group(lengths[n], samples) for n, samples in made.items()]
        made.clear()
        return needed(model, groups)

    def measure(logs: dict[str, float]) -> Step:
        return {"mean_length": logs["completions/mean_length"], "reward": logs["reward"]} | operations()

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=path,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=blocks * steps + 1,
                max_completion_length=config.sampling.max_tokens,
                temperature=config.sampling.temperature,
                learning_rate=config.optimizer.lr,
                **grpo_settings(PROMPTS, SIZE, dtype, weights),
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[step_gate(measure)],
        )
        trainer.train()


def tables(blocks: Sequence[dict[str, list[Step]]], dtype: str, peak: float) -> list[Sheet]:
    """What was measured, and the ratios; `peak` in GFLOP/s."""
    names = list(blocks[0])
    steps = {name: [step for block in blocks for step in block[name]] for name in names}
    medians = {name: statistics.median(step["seconds"] for step in steps[name]) for name in names}

    def mean(name: str, key: str) -> float:
        return statistics.mean(step[key] for step in steps[name])

    def bounds(name: str) -> list[float]:
        return [(step["generating"] + step["learning"]) / peak for step in steps[name]]

    def over_bound(name: str) -> float:
        each = zip(steps[name], bounds(name), strict=True)
        return statistics.median(step["seconds"] / bound for step, bound in each)

    def ratio(peer: str) -> list[str]:
        each = [
            statistics.median(s["seconds"] for s in block[peer]) / statistics.median(s["seconds"] for s in block[OURS])
            for block in blocks
        ]
        means = mean(peer, "seconds") / mean(OURS, "seconds")
        return [f"{medians[peer] / medians[OURS]:.2f}", f"{means:.2f}", ", ".join(f"{one:.2f}" for one in each)]

    return [
        Sheet(
            "Steps",
            (
                "system",
                "steps",
                "median s",
                "shortest",
                "longest",
                "bound s",
                "over it",
                "samples/s",
                "mean length",
                "reward",
            ),
            [
                [
                    name,
                    str(len(steps[name])),
                    f"{medians[name]:.1f}",
                    f"{min(step['seconds'] for step in steps[name]):.1f}",
                    f"{max(step['seconds'] for step in steps[name]):.1f}",
                    f"{statistics.median(bounds(name)):.1f}",
                    f"{over_bound(name):.2f}",
                    f"{PROMPTS * SIZE / medians[name]:.2f}",
                    f"{mean(name, 'mean_length'):.0f}",
                    f"{mean(name, 'reward'):.2f}",
                ]
                for name in names
            ],
            [
                f"all in {dtype}; first steps of each process left out",
                f"bound: the operations that each step's own samples need at {peak:.0f} GFLOP/s, the most that this "
                "machine makes of large matrices on all cores; a group without a gradient is generated and not learned "
                "from",
            ],
        ),
        Sheet(
            f"Samples/s of {OURS} over those of",
            ("peer", "by medians", "by means", "by medians of each block"),
            [[peer, *ratio(peer)] for peer in names[1:]],
        ),
    ]


@click.command(help=__doc__)
@click.option("--blocks", default=2, show_default=True, type=click.IntRange(1), help="turns of each")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1), help="steps of each in a turn")
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16"]))
@click.option("--bf16/--no-bf16", default=True, help="bfloat16: also TRL with bf16 weights")
@click.option("--only-trl", hidden=True, help="used by this script itself, in a process of its own")
def main(blocks: int, steps: int, model: str, dtype: str, bf16: bool, only_trl: str | None) -> None:
    if only_trl:
        trl(model, only_trl, dtype, blocks, steps)
        return
    console, out = terminal(), results_folder(None, "blocks", "steps", "model", "bf16")
    dtype = decided(run_config(1, model, dtype), cuda=False).model.dtype
    cores = os.cpu_count() or 1
    peaks = [gemm_peak(dtype, cores)]  # and after each block: one may fall into a slow moment of a shared machine
    console.print(f"{dtype}, products of large matrices at {peaks[0]:.0f} GFLOP/s", highlight=False)
    arguments = [__file__, "--dtype", dtype, "--model", model, "--blocks", str(blocks), "--steps", str(steps)]
    peers: dict[str, TrlProcess] = {}
    measured: list[dict[str, list[Step]]] = []
    try:
        for name, weights in list(TRL_VARIANTS[dtype].items())[: 1 + bf16]:
            peers[name] = TrlProcess([*arguments, "--only-trl", weights])
            show_times(console, "not counted", name, [peers[name].step()])
        with tempfile.TemporaryDirectory() as folder:
            for number in range(blocks):
                where = f"block {number + 1} of {blocks}"
                block = {OURS: ours(run_config(steps + 1, model, dtype, number), Path(folder), f"block-{number}")}
                show_times(console, where, OURS, block[OURS])
                for name, peer in peers.items():
                    block[name] = [peer.step() for _ in range(steps)]
                    show_times(console, where, name, block[name])
                measured.append(block)
                peaks.append(gemm_peak(dtype, cores))
    finally:
        for peer in peers.values():
            peer.end()
    sheets = tables(measured, dtype, peak := max(peaks))
    for sheet in sheets:
        sheet.show(console)
    kind = "_float32" if dtype == "float32" else "_amx" if "amx_bf16" in this_cpu().flags else ""
    target = out / f"peer_trl{kind}.json"
    record = {"machine": machine(), "dtype": dtype, "peak_gflops": peak, "blocks": measured}
    write_results(target, record, "Beside TRL 1.16", sheets)
    console.print(f"written to {target} and .md")


if __name__ == "__main__":
    with error_lines():
        main()
