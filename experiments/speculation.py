r"""Compare speculative with plain decoding on the small reasoner: generation time, rewards and acceptance.

    .venv/bin/python experiments/speculation.py            # some 6 minutes on 2 cores
    .venv/bin/python experiments/speculation.py --temperature 2 --max-tokens 150 \
        --out experiments/results/speculation_noise.json   # nothing recurs: what it costs

Two engines, one that speculates and one that does not, take turns on the same prompts and seeds: a round is what `sync`
generates for a step, all samples at once and then waiting for the last one. The prompts recur, as over epochs; the
weights do not change. The first round of a workload, in which nothing is known of its prompts, is reported by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import psutil
import reasoning_gym
from running import HERE, RESULTS

from scheduler.cost.decode import StepCurve, replica_time
from scheduler.cost.speculative_decoding import Speculation, speculated
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.config.tasks import ReasoningGymTask
from streamrl.generation.instance.calibration import measure_quickly
from streamrl.generation.instance.engine import Engine
from streamrl.rollouts.types import Sample, SampleRequest

MODEL = HERE / "small_reasoner" / "model"
CONTEXT, MOST, SLOTS = 768, 640, 64
TEACH_S = 0.25
LONG = [
    ("chain_sum", {"min_terms": 7, "max_terms": 10, "min_digits": 1, "max_digits": 1}),
    ("count_bits", {"min_n": 512, "max_n": 4095}),
]
"""Tasks whose answers are long."""
WORKLOADS = [("8 requests", 2, 4, 8), ("32 requests", 4, 8, 5), ("128 requests, 64 slots", 16, 8, 3)]
"""(Name, prompts, samples of each, rounds); the rounds of a workload have the same prompts."""


def items(count: int) -> list[tuple[Any, dict[str, Any]]]:
    """Return (data set, item) of prompts."""
    sets = [reasoning_gym.create_dataset(name, size=count, seed=11, **config) for name, config in LONG]
    return [(sets[n % len(sets)], sets[n % len(sets)][n // len(sets)]) for n in range(count)]


class Side:
    """One of the two engines."""

    def __init__(self, method: str, slots: int, temperature: float, most_tokens: int) -> None:
        self.method = method
        run = {
            "model": {"path": str(MODEL), "max_context": CONTEXT, "dtype": "float32"},
            "sampling": {"max_tokens": most_tokens, "temperature": temperature},
            "speculation": {"method": method},
        }
        pool = GenerationPool(max_batch=slots, kv_cache_gb=0.5)
        others = set(psutil.Process().children())
        self.engine = Engine(pool, RunConfig.model_validate(run), False, method, "here")
        self._processes = set(psutil.Process().children()) - others
        self.counts: dict[str, dict[str, int]] = {}

    def cpu_s(self) -> float:
        """Return the CPU seconds of the engine's processes so far; other work does not change them much."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes if process.is_running()))

    async def round(self, prompts: list[np.ndarray], samples: int, number: int) -> tuple[float, list[Sample]]:
        """Generate a round; return its seconds and its samples."""
        teaching = asyncio.create_task(self._teach())
        requests = [
            SampleRequest(f"{number}.{g}.{n}", f"{number}.{g}", prompt, 10_000 * number + 100 * g + n, 0.0)
            for g, prompt in enumerate(prompts)
            for n in range(samples)
        ]
        started = time.perf_counter()
        drawn = await asyncio.gather(*(self.engine.generate(one, "regular") for one in requests))
        seconds = time.perf_counter() - started
        teaching.cancel()
        self.counts = await self.engine.teach_drafter() or self.counts
        return seconds, [one for one in drawn if isinstance(one, Sample)]

    async def _teach(self) -> None:
        while True:
            await asyncio.sleep(TEACH_S)
            self.counts = await self.engine.teach_drafter() or self.counts


def score(drawn: list[Sample], tasks: list[tuple[Any, dict[str, Any]]], samples: int) -> float:
    """Return the mean reward, by the verifiers of the data sets on the tagged answers."""
    from streamrl.tasks.answers import EXTRACTORS

    find = EXTRACTORS[ReasoningGymTask(name="chain_sum").answer]
    values = []
    for n, sample in enumerate(drawn):
        dataset, item = tasks[n // samples]
        answer = find(sample.text)
        values.append(float(dataset.score_answer(answer, item)) if answer is not None else 0.0)
    return float(np.mean(values))


async def compare(sides: list[Side], prompts: int, samples: int, rounds: int, first: int) -> list[dict[str, Any]]:
    """Let both sides generate rounds in turns; return a row per round."""
    tasks = items(prompts)
    tokenizer = sides[0].engine._tokenizer
    texts = [
        np.asarray(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": item["question"]}], add_generation_prompt=True, return_dict=False
            ),
            dtype=np.int32,
        )
        for _, item in tasks
    ]
    rows = []
    for number in range(first, first + rounds):
        row: dict[str, Any] = {"round": number - first, "requests": prompts * samples}
        for side in sides if number % 2 else sides[::-1]:
            before = side.cpu_s()
            seconds, drawn = await side.round(texts, samples, number)
            lengths = [one.output_length for one in drawn]
            row[side.method] = {
                "seconds": seconds,
                "cpu_s": side.cpu_s() - before,
                "tokens": sum(lengths),
                "longest": max(lengths),
                "lengths": lengths,
                "reward": score(drawn, tasks, samples),
                "logprob": float(np.concatenate([one.logprobs for one in drawn]).mean()),
                "drafted": sum(one.drafted_tokens for one in drawn),
                "accepted": sum(one.accepted_tokens for one in drawn),
            }
        print(json.dumps({key: _short(value) for key, value in row.items()}), flush=True)
        rows.append(row)
    return rows


def _short(value: Any) -> Any:
    return {k: round(v, 3) for k, v in value.items() if k != "lengths"} if isinstance(value, dict) else value


def simulated(rows: list[dict[str, Any]], curve: StepCurve, most: int) -> dict[str, float]:
    """Return the share of plain decoding's time that rounds take with speculation, simulated and measured.

    Each round is simulated by the exact time of an instance, with the lengths that both sides drew and the acceptance
    that was measured, per drafted token.
    """
    plain = faster = 0.0
    drafted = sum(row["auto"]["drafted"] for row in rows)
    acceptance = sum(row["auto"]["accepted"] for row in rows) / max(1, drafted)
    quicker = speculated(curve, Speculation(acceptance, most), SLOTS)
    for row in rows:
        plain += replica_time(row["none"]["lengths"], curve, slots=SLOTS)
        faster += replica_time(row["auto"]["lengths"], quicker, slots=SLOTS)
    measured = [sum(row[name]["seconds"] for row in rows) for name in ("auto", "none")]
    cpu = [sum(row[name]["cpu_s"] for row in rows) for name in ("auto", "none")]
    return {
        "acceptance": acceptance,
        "simulated": faster / plain,
        "measured": measured[0] / measured[1],
        "measured_cpu": cpu[0] / cpu[1],
        "measured_per_token": measured[0]
        / measured[1]
        * sum(row["none"]["tokens"] for row in rows)
        / sum(row["auto"]["tokens"] for row in rows),
        "plain_simulated_s": plain,
        "plain_measured_s": measured[1],
    }


async def main(quick: bool, temperature: float, most_tokens: int, out: Path) -> None:
    """Run the study and write its figures."""
    sides = [Side(method, SLOTS, temperature, most_tokens) for method in ("none", "auto")]
    try:
        for side in sides:
            await side.engine.warm_up()
        found, _ = await measure_quickly(sides[0].engine, SLOTS, CONTEXT, lambda text: None)
        curve = found.curve
        print("step times", curve.to_json(), found.doubts, flush=True)
        await sides[1].engine.teach_drafter(curve)
        most = sides[1].engine.run.speculation.most_tokens
        figures: dict[str, Any] = {"step_times": curve.to_json(), "workloads": {}}
        for n, (name, prompts, samples, rounds) in enumerate(WORKLOADS):
            rows = await compare(sides, prompts, samples, 2 if quick else rounds, 100 * n)
            figures["workloads"][name] = {
                "rounds": rows,
                "first": simulated(rows[:1], curve, most),
                "later": simulated(rows[1:], curve, most),
            }
            figures["by_source_and_age"] = sides[1].counts
            out.write_text(json.dumps(figures, indent=1) + "\n")
            for part in ("first", "later"):
                print(name, part, _short(figures["workloads"][name][part]), flush=True)
        print(figures["by_source_and_age"])
    finally:
        for side in sides:
            side.engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--temperature", type=float, default=1.0, help="2: noise, of which nothing recurs")
    parser.add_argument("--max-tokens", type=int, default=MOST)
    parser.add_argument("--out", type=Path, help="default: speculation.json in results; with other options, here")
    options = parser.parse_args()
    published = (options.temperature, options.max_tokens, options.quick) == (1.0, MOST, False)
    options.out = options.out or (RESULTS if published else Path()) / "speculation.json"
    asyncio.run(main(options.quick, options.temperature, options.max_tokens, options.out))
