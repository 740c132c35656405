"""Weights that change from one version to the next, made, trained or of a run, and what their deltas cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from streamrl.config.load import load_resolved
from streamrl.config.optimizer import OptimizerConfig
from streamrl.machine.model_files import resolve_model
from streamrl.weights.codec.delta import decode_tensor, encode_tensor, entropy_bound_bits
from streamrl.weights.version import checksum

MODEL = "smollm2-135m"
DENSITIES = {
    "bfloat16": (0.0001, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0),
    "float16": (0.01, 0.2),
    "float32": (0.01, 0.2),
    "float8_e4m3fn": (0.01, 0.2),
}
"""Shares of elements that are changed."""
STEPS_OF_ULP = ((1, -1, 2, -2, 3, -5), (0.45, 0.45, 0.03, 0.03, 0.02, 0.02))
"""Differences and how often each is made."""
RATES = (1e-6, 5e-6, 2e-5)
SETTLED_STEPS = 2
"""Steps of each learning rate with settled masters."""
REPEATS = 3
"""Repeats of coding and decoding; the fastest counts: the machine may have other work."""
BATCH, LENGTH = 4, 64
"""Texts in a step, and tokens of each at most."""
TASKS = ("chain_sum", "spell_backward", "number_sorting", "count_bits")
GB = 1e9

Tensors = list[np.ndarray]
"""Bytes of each of a model's tensors, uint8 [nbytes]."""


@dataclass(frozen=True)
class Coded:
    """A model coded and decoded."""

    dtype: str
    density: float
    """Measured."""
    full_bytes: int
    delta_bytes: int
    bound_bytes: float
    given_exponents_bytes: float | None = None
    """The bound where each old exponent has a share of changes of its own; bf16 of real steps."""
    encode_gb_s: float | None = None
    decode_gb_s: float | None = None
    encode_checked_gb_s: float | None = None
    decode_checked_gb_s: float | None = None
    xor_bytes: int | None = None
    xor_gb_s: float | None = None
    pairs_bytes: int | None = None
    """int32 positions and values."""


@dataclass(frozen=True)
class Step:
    """A real optimizer step and the delta of its version."""

    lr: float
    settled: bool
    step: int
    loss: float
    coded: Coded


@dataclass(frozen=True)
class Live:
    """The steps of a run."""

    name: str
    lr: float
    steps: list[Coded]


def timed(done: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """CPU seconds of this thread, the fewest of all repeats, and the result."""
    fewest, result = math.inf, None
    for _ in range(repeats):
        began = time.thread_time()
        result = done()
        fewest = min(fewest, time.thread_time() - began)
    return fewest, result


def model_tensors(dtype: str) -> Tensors:
    """The model's tensors as this type; fp8 scaled by tensor, to fill its range."""
    return tensors_of(Path(resolve_model(MODEL)), dtype)


def tensors_of(folder: Path, dtype: str) -> Tensors:
    """A checkpoint's tensors, likewise."""
    tensors = []
    for _, tensor in sorted(load_file(folder / "model.safetensors").items()):
        if dtype.startswith("float8"):
            tensor = tensor.float() * (448 / tensor.float().abs().max().clamp(min=1e-6))
        tensors.append(tensor.to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8).numpy())
    return tensors


def words_of(dtype: str) -> type[np.unsignedinteger[Any]]:
    """Unsigned words of its size."""
    words: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    return words[getattr(torch, dtype).itemsize]


def changed(old: Tensors, dtype: str, density: float, rng: np.random.Generator) -> Tensors:
    """A copy of which a share of elements moved."""
    word = words_of(dtype)
    result = []
    for tensor in old:
        moved = tensor.copy()
        elements = moved.view(word)
        where = np.flatnonzero(rng.random(len(elements), dtype=np.float32) < density)
        steps = rng.choice(np.array(STEPS_OF_ULP[0]), len(where), p=STEPS_OF_ULP[1])
        elements[where] += steps.astype(word)
        result.append(moved)
    return result


def sizes(new: Tensors, old: Tensors, dtype: str) -> tuple[float, int, float]:
    """Share of changed elements, how many, and the bound in bytes."""
    word = words_of(dtype)
    count = sum(int(np.count_nonzero(n.view(word) != o.view(word))) for n, o in zip(new, old, strict=True))
    bits = sum(entropy_bound_bits(o, n, dtype) for n, o in zip(new, old, strict=True))
    return count / sum(len(n.view(word)) for n in new), count, bits / 8


def decode(payloads: Tensors, targets: Tensors, dtype: str) -> None:
    """Decode payloads into tensors, in place."""
    for payload, target in zip(payloads, targets, strict=True):
        decode_tensor(payload, target, dtype)


def code(new: Tensors, old: Tensors, dtype: str) -> Coded:
    """Encode, decode, compare bit for bit, and do what peers do."""
    pairs = list(zip(new, old, strict=True))
    full = sum(tensor.size for tensor in new)
    encode_s, payloads = timed(lambda: [encode_tensor(n, o, dtype) for n, o in pairs], REPEATS)
    decode_s = math.inf
    for _ in range(REPEATS):
        targets = [tensor.copy() for tensor in old]
        seconds, _ = timed(partial(decode, payloads, targets, dtype))
        decode_s = min(decode_s, seconds)
        if not all(map(np.array_equal, targets, new)):
            raise AssertionError("a tensor came back different")
    check_s, _ = timed(lambda: [checksum(tensor) for tensor in new], REPEATS)
    density, count, bound = sizes(new, old, dtype)
    zstd = pa.Codec("zstd", compression_level=3)
    xor_s, xored = timed(lambda: sum(len(zstd.compress(n ^ o)) for n, o in pairs))
    return Coded(
        dtype=dtype,
        density=density,
        full_bytes=full,
        delta_bytes=sum(payload.size for payload in payloads),
        bound_bytes=bound,
        encode_gb_s=full / encode_s / GB,
        decode_gb_s=full / decode_s / GB,
        encode_checked_gb_s=full / (encode_s + check_s) / GB,
        decode_checked_gb_s=full / (decode_s + check_s) / GB,
        xor_bytes=xored,
        xor_gb_s=full / xor_s / GB,
        pairs_bytes=count * (4 + getattr(torch, dtype).itemsize),
    )


def choice_bits(n: int, k: int) -> float:
    """log2 C(n, k)."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def given_exponents(new: Tensors, old: Tensors) -> float:
    """Bytes of the bound for bf16, positions chosen separately among elements of each old exponent.

    The receiver has the old tensor, so a coder could use this; ours does not.
    """
    bits = 0.0
    for n, o in zip(new, old, strict=True):
        after, before = n.view(np.uint16), o.view(np.uint16)
        moved = after != before
        exponents = (before >> 7).astype(np.uint8)
        totals = np.bincount(exponents, minlength=256)
        parts = np.bincount(exponents[moved], minlength=256)
        bits += entropy_bound_bits(o, n, "bfloat16") - choice_bits(len(after), int(moved.sum()))
        bits += sum(choice_bits(int(total), int(part)) for total, part in zip(totals, parts, strict=True))
    return bits / 8


def texts(seed: int) -> Iterator[list[str]]:
    """Batches of questions with their answers."""
    import reasoning_gym

    for step in range(10_000):
        items = [reasoning_gym.create_dataset(task, size=1, seed=seed + step)[0] for task in TASKS[:BATCH]]
        yield [f"{item['question']}\n{item['answer']}" for item in items]


def optimizer_steps(lr: float, settled: bool, steps: int, on_step: Callable[[Step], None]) -> None:
    """Real steps from the checkpoint; each version is coded against the one before."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    path = resolve_model(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    defaults = OptimizerConfig()
    if settled:
        with torch.no_grad():
            for weight in model.parameters():
                ulp = torch.exp2(torch.floor(torch.log2(weight.abs().clamp(min=2.0**-120))) - 7)
                weight += (torch.rand_like(weight) - 0.5) * ulp * 0.999
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, betas=defaults.betas, eps=defaults.eps, weight_decay=defaults.weight_decay
    )

    def version() -> Tensors:
        return [w.detach().bfloat16().reshape(-1).view(torch.uint8).numpy() for w in model.parameters()]

    old = version()
    for step, batch in zip(range(1, steps + 1), texts(seed=1), strict=False):
        rows = [tokenizer(text)["input_ids"][:LENGTH] for text in batch]
        loss = sum(model(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss for row in rows) / len(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), defaults.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        new = version()
        payloads = [encode_tensor(n, o, "bfloat16") for n, o in zip(new, old, strict=True)]
        for payload, before, tensor in zip(payloads, old, new, strict=True):
            target = before.copy()
            decode_tensor(payload, target, "bfloat16")
            if not np.array_equal(target, tensor):
                raise AssertionError("a tensor came back different")
        density, count, bound = sizes(new, old, "bfloat16")
        coded = Coded(
            dtype="bfloat16",
            density=density,
            full_bytes=sum(tensor.size for tensor in new),
            delta_bytes=sum(payload.size for payload in payloads),
            bound_bytes=bound,
            given_exponents_bytes=given_exponents(new, old),
            pairs_bytes=6 * count,
        )
        on_step(Step(lr, settled, step, loss.item(), coded))
        old = new


def live_steps(folder: Path) -> Live:
    """Every step of a run, from its model's file over its checkpoints.

    Raises:
        click.ClickException: not every step has a checkpoint.
    """
    run = load_resolved(folder)[1]
    checkpoints = [folder / "checkpoints" / f"step_{step}" for step in range(1, run.steps + 1)]
    if missing := [path.name for path in checkpoints if not (path / "model.safetensors").is_file()]:
        raise click.ClickException(f"{folder} has no checkpoint {', '.join(missing)}: run it with checkpoint.every=1")
    steps = []
    old = tensors_of(Path(resolve_model(run.model.path)), "bfloat16")
    for path in checkpoints:
        new = tensors_of(path, "bfloat16")
        steps.append(code(new, old, "bfloat16"))
        old = new
    return Live(run.name, run.optimizer.lr, steps)
