"""Collect output lengths with real vLLM: the data sets of the ranker's and the dispatcher's studies.

    .venv/bin/python experiments/collect_lengths.py small_reasoner    # some 10 minutes on 2 cores
    .venv/bin/python experiments/collect_lengths.py smollm2           # some 50 minutes on 2 cores

Draws samples at temperature 1 for prompts of the run file's task mix, in one vLLM process per core, and writes
experiments/data/<set>.parquet: one row per sample with prompt, task, output length and finish reason, in the columns
that `streamrl train-ranker` reads. Some prompts get many samples: the noise ceiling is estimated from those. Lengths
only, no texts; nothing is scored.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console
from running import HERE, ROOT

from streamrl.cli.main import error_lines
from streamrl.config.run import RunConfig
from streamrl.machine.model_files import resolve_model
from streamrl.tasks.source import PromptSource

DATA = HERE / "data"
SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("sample_id", "group_id", "prompt_id", "task", "prompt", "finish_reason")],
        *[(name, pa.int32()) for name in ("epoch", "step", "prompt_length", "output_length")],
    ]
)


@dataclass(frozen=True)
class Collection:
    """What is collected."""

    run: str
    """Run file whose model, tasks and temperature are used."""
    prompts: int
    samples: int
    """Of each prompt."""
    repeated: int
    """Prompts that get `many` samples instead."""
    many: int
    cap: int
    """Most tokens of a sample."""
    context: int
    batch: int
    """Sequences that one instance decodes together."""


SETS = {
    "small_reasoner": Collection("examples/small_reasoner.yaml", 3000, 4, 100, 32, 960, 1024, 128),
    "smollm2": Collection("experiments/runs/smollm2_lengths.yaml", 1600, 4, 64, 32, 512, 1024, 96),
}


def collect(spec: Collection, first: int, last: int, seed: int) -> list[dict[str, Any]]:
    """Sample prompts first .. last - 1 in this process, in portions, so that progress can be shown."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

    config = RunConfig.model_validate(yaml.safe_load((ROOT / spec.run).read_text()))
    source = PromptSource(config.tasks, seed)
    llm = LLM(
        resolve_model(config.model.path),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=spec.context,
        max_num_seqs=spec.batch,
        kv_cache_memory_bytes=2**30,
        seed=seed + first,
    )
    rows: list[dict[str, Any]] = []
    portion = 2 * spec.batch // spec.samples
    for begin in range(first, last, portion):
        asked = [source.prompt(index) for index in range(begin, min(begin + portion, last))]
        settings = [
            SamplingParams(
                temperature=config.sampling.temperature,
                n=spec.many if index < spec.repeated else spec.samples,
                max_tokens=spec.cap,
                detokenize=False,
            )
            for index in range(begin, begin + len(asked))
        ]
        chats: list[list[ChatCompletionMessageParam]]
        chats = [[{"role": "user", "content": prompt.text}] for prompt in asked]
        results = llm.chat(chats, settings, use_tqdm=False)
        for index, prompt, result in zip(range(begin, last), asked, results, strict=False):
            assert result.prompt_token_ids is not None
            for number, completion in enumerate(result.outputs):
                rows.append(
                    {
                        "sample_id": f"{index:08d}.{number:03d}",
                        "group_id": f"{index:08d}",
                        "prompt_id": prompt.prompt_id,
                        "task": prompt.task,
                        "prompt": prompt.text,
                        "finish_reason": completion.finish_reason,
                        "epoch": prompt.epoch,
                        "step": index // 64 + 1,
                        "prompt_length": len(result.prompt_token_ids),
                        "output_length": len(completion.token_ids),
                    }
                )
        print(f"{min(begin + portion, last) - first}/{last - first} prompts", file=sys.stderr, flush=True)
    return rows


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(list(SETS)))
@click.option("--workers", default=2, show_default=True, help="vLLM processes, one core each")
@click.option("--prompts", type=int, help="instead of the set's number")
@click.option("--seed", default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="instead of experiments/data/<set>.parquet")
@click.option("--part", nargs=2, type=int, hidden=True, help="used by this script itself: first and last prompt")
def main(
    name: str, workers: int, prompts: int | None, seed: int, out: Path | None, part: tuple[int, int] | None
) -> None:
    spec = SETS[name]
    if part:
        json.dump(collect(spec, *part, seed), sys.stdout)
        return
    console = Console()
    count = prompts or spec.prompts
    # the repeated prompts come first: split so that every worker has as many samples
    total = count * spec.samples + min(count, spec.repeated) * (spec.many - spec.samples)
    cuts, done = [0], 0
    for index in range(count):
        done += spec.many if index < spec.repeated else spec.samples
        if done >= total * len(cuts) / workers:
            cuts.append(index + 1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for first, last in itertools.pairwise(cuts):
            target = Path(folder) / f"{first}.json"
            command = [sys.executable, __file__, name, "--seed", str(seed), "--part", str(first), str(last)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            with target.open("w") as stdout:
                running.append((target, subprocess.Popen(command, stdout=stdout, env=environment)))
        for target, process in running:
            if process.wait():
                raise click.ClickException(f"the process of prompts from {target.stem} ended with {process.returncode}")
        rows = [row for target, _ in running for row in json.loads(target.read_text().splitlines()[-1])]
    target = out or DATA / f"{name}.parquet"
    target.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), target, compression="zstd")
    lengths = sorted(row["output_length"] for row in rows)
    capped = sum(row["finish_reason"] == "length" for row in rows) / len(rows)
    console.print(
        f"{len(rows)} samples of {count} prompts in {time.monotonic() - began:.0f} s; lengths: median "
        f"{lengths[len(lengths) // 2]}, p90 {lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}, "
        f"{capped:.1%} at the cap; {target} ({target.stat().st_size / 1e6:.2f} MB)"
    )


if __name__ == "__main__":
    with error_lines():
        main()
