"""A folder with all that a run needs, and ways to start one through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from streamrl.training.packing_proof import small_model
from streamrl.verify.families import FAMILIES
from tests import warm
from tests.tiny_model import save_tiny_model
from tests.waiting import finish, scaled
from tests.waiting import wait_for as wait_for

CLUSTER = """
hardware: cpu
sites:
  here:
    trainer: {ranks: RANKS, sequence_parallel: SHARING, threads: 1}
    generation:
      - {name: regular, replicas: 1, max_replicas: 2, threads: 1, max_batch: BATCH, kv_cache_gb: 0.05}
      - {name: tail, replicas: 1, threads: 1, max_batch: SMALLER, kv_cache_gb: 0.05}
    rewards: {workers: 1}
"""

TAIL = "      - {name: tail, replicas: 1, threads: 1, max_batch: SMALLER, kv_cache_gb: 0.05}\n"

REWARDS = '''
import os, time, zlib
def reward(completion, *, prompt, answer):
    """More of the letter e is better; one prompt crashes the worker, one hangs once, some answers are void."""
    digest = zlib.crc32(completion.encode())
    if prompt == "crash":
        os._exit(3)
    if prompt == "hang" and not os.path.exists(marker := os.path.join(os.path.dirname(__file__), "hung")):
        open(marker, "w").close()
        time.sleep(1000)
    if prompt.startswith("what is") and digest % 5 == 0:
        return None
    return completion.count("e") / 10 + len(completion) % 3
'''


class Project:
    """A folder with a tiny model, a cluster file, a run file and a reward function."""

    def __init__(
        self,
        folder: Path,
        tail: bool = True,
        dtype: str = "float32",
        warm: bool = True,
        mixture: bool = False,
        batch: int = 8,
    ) -> None:
        """
        Args:
            folder: all of it is there.
            tail: whether there is a second pool, with an instance for long answers.
            dtype: of its model, which every CPU has kernels for; bfloat16: what is about its rounding and small deltas.
            warm: its processes begin with everything imported (`tests/warm.py`), which is quicker than a user's do.
            mixture: whether its model is a mixture of experts, a small Qwen3-MoE.
            batch: most samples at once of an instance of the first pool, and of the second with 2 less.
        """
        self.folder, self.dtype, self.warm = folder, dtype, warm
        self.cluster = CLUSTER if tail else CLUSTER.replace(TAIL, "")
        self.cluster = self.cluster.replace("BATCH", str(batch)).replace("SMALLER", str(batch - 2))
        save_tiny_model(folder / "model")
        if mixture:  # with the tokenizer of the other
            model = small_model(FAMILIES["Qwen3-MoE"]())
            model.config.update({"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257})
            model.save_pretrained(folder / "model")
        (folder / "own_rewards.py").write_text(REWARDS)
        rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four", "five")]
        rows[3]["prompt"], rows[4]["prompt"] = "crash", "hang"
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    @property
    def env(self) -> dict[str, str]:
        """Of its commands: the folder's own reward function can be imported."""
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def command(self, *extra: str, ranks: int = 1, sharing: int = 1, **changes: object) -> list[str]:
        """The command that launches a run: `ranks` of the trainer, `sharing` of them for each row."""
        cluster = self.cluster.replace("RANKS", str(ranks)).replace("SHARING", str(sharing))
        (self.folder / "cluster.yaml").write_text(cluster)
        run = {
            "name": "tiny",
            "steps": 3,
            "model": {"path": str(self.folder / "model"), "max_context": 96},
            "tasks": [
                {
                    "kind": "file",
                    "name": "own",
                    "path": str(self.folder / "prompts.jsonl"),
                    "reward": "own_rewards:reward",
                },
                {"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2}, "answer": "full"},
            ],
            "batch": {"prompts_per_step": 6, "samples_per_prompt": 3, "micro_batch_tokens": 128},
            "sampling": {"max_tokens": 16},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 1, "keep": 2},
            "deadlines": {"reward_s": scaled(1) + 1},
            "recovery": {"suspect_s": scaled(3)},
            "rewards": {"retry_pause_s": 0},
        } | changes
        run["model"] = {"dtype": self.dtype, **run["model"]}  # type: ignore[dict-item]
        (self.folder / "run.yaml").write_text(json.dumps(run))
        files = ["--cluster", "cluster.yaml", "--run", "run.yaml"]
        return [
            sys.executable,
            "-m",
            "streamrl.cli.main",
            "launch",
            *(files if "--resume" not in extra else []),
            *extra,
        ]

    def start(self, *extra: str, **changes: object) -> subprocess.Popen[str]:
        return (warm.Popen if self.warm else subprocess.Popen)(
            self.command(*extra, **changes),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
        )

    def launch(self, *extra: str, code: int = 0, **changes: object) -> str:
        process = self.start(*extra, **changes)
        output = finish(process, 280, self.logs)
        assert process.returncode == code, output + self.logs()
        return output

    def logs(self) -> str:
        parts = [f"== {path}\n{path.read_text()[-1500:]}" for path in self.folder.glob("runs/*/logs/*.log")]
        return "\n".join(parts)

    def run_dir(self, name: str = "tiny") -> Path:
        return self.folder / "runs" / name


def trained_rows(run_dir: Path) -> list[dict[str, object]]:
    files = sorted((run_dir / "rollouts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]
