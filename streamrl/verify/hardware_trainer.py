"""The trainer's stage of `streamrl verify --hardware`: real optimizer steps on a random model of a chosen shape."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from scheduler.cost.model_shapes import Transformer
from scheduler.cost.trainer_work import TrainingWork
from scheduler.cost.training_memory import USABLE_MEMORY, TrainerLayout, memory_per_gpu
from streamrl.config.optimizer import Recomputation
from streamrl.config.run import RunConfig
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.scratch_folders import ScratchFolder
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.packing_choice import Packing
from streamrl.training.trainer import Trainer
from streamrl.verify.hardware_measurement import Measurement, Size, sheet_peak

PROMPT_SHARE = 0.1
"""Part of a context that is prompt."""
SAMPLES = 4
"""Completions of a prompt; the longest fills the context, the others are a quarter of it."""
STEPS = 3
"""Steps that are measured, after one that is not."""


def train(size: Size, device: torch.device) -> Iterator[Measurement]:
    """Yield tokens/s, the share of the device's peak and the peak memory of whole steps, for each context.

    Args:
        size: shape of the model and contexts.
        device: where it is trained.
    """
    with ScratchFolder() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        model = save_model(size, folder / "model", max(size.contexts), device)
        one: Trainer | None = None
        for context in size.contexts:
            group = random_group(context, size.vocabulary)
            recomputation = least_recomputation(size, group.tokens, device)
            if one is None or one.run.optimizer.gradient_checkpointing != recomputation:
                one = None  # its memory is free before another one is made
                gc.collect()
                one = trainer_of(model, max(size.contexts), recomputation, device)
            yield from _steps(one, group, context, device)
            if device.type == "cuda":
                needed = memory_of(size, group.tokens, recomputation) / 2**30
                yield Measurement(f"trainer, {context} tokens, memory by the formula", needed, "GiB")
        dist.destroy_process_group()


def trainer_of(model: Path, context: int, recomputation: Recomputation, device: torch.device) -> Trainer:
    """Return a trainer of a model, in the type that the device computes fast."""
    run = RunConfig.model_validate(
        {
            "model": {
                "path": str(model),
                "dtype": "bfloat16" if device.type == "cuda" else "float32",
                "max_context": context,
            },
            "sampling": {"max_tokens": context // 2},
            "optimizer": {"gradient_checkpointing": recomputation},
        }
    )
    return Trainer(run, str(model), device, packing=Packing("shared", SHARED_PREFIX, "for its speed"))


def memory_of(size: Size, tokens: int, recomputation: Recomputation) -> float:
    """Return the bytes that a trainer of one GPU needs for a row of so many tokens, by the formula of the plan."""
    shape = Transformer.from_config("measured", shape_config(size, tokens).to_dict())
    return memory_per_gpu(shape, TrainingWork(recompute=recomputation, compiled=True), TrainerLayout(1), tokens)


def least_recomputation(size: Size, tokens: int, device: torch.device) -> Recomputation:
    """Return the least recomputation with which a row of so many tokens fits, by the formula of the plan."""
    if device.type != "cuda":
        return False
    has = USABLE_MEMORY * torch.cuda.get_device_properties(device).total_memory
    ways: tuple[Recomputation, ...] = (False, "selective", True)
    return next((way for way in ways if memory_of(size, tokens, way) <= has), True)


def _steps(one: Trainer, group: TrainGroup, context: int, device: torch.device) -> Iterator[Measurement]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    best, stats = float("inf"), None
    for step in range(STEPS + 1):
        began = time.perf_counter()
        stats = one.accumulate([group], is_last=True)
        one.step(step, float(group.loss_tokens))
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step:
            best = min(best, time.perf_counter() - began)
    assert stats is not None
    peak = sheet_peak(device)
    rate = stats.flops / best / 1e12
    share = f", {rate / peak:.0%} of the data sheet's peak (MFU)" if peak else ""
    yield Measurement(
        f"trainer, {context} tokens",
        stats.row_tokens / best,
        "tokens/s",
        f"{rate:.3g} TFLOP/s{share}; {stats.row_tokens} tokens of a prompt with {SAMPLES} completions; "
        f"gradient_checkpointing: {str(one.run.optimizer.gradient_checkpointing).lower()}",
    )
    used = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else _resident()
    yield Measurement(f"trainer, {context} tokens, memory", used, "GiB", "peak")


def _resident() -> float:
    """Return the most memory that this process has used, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def save_model(size: Size, folder: Path, context: int, device: torch.device) -> Path:
    """Write a random model of this shape, for sequences of so many tokens, in bf16; the device draws its weights."""
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(shape_config(size, context))
    model.bfloat16().save_pretrained(folder)
    return folder


def shape_config(size: Size, context: int) -> Qwen2Config:
    """Return the configuration of a model of this shape for sequences of so many tokens."""
    return Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )


def random_group(context: int, vocabulary: int) -> TrainGroup:
    """Return a prompt with completions of different lengths, the longest of which fills the context."""
    rng = np.random.default_rng(0)
    prompt = int(context * PROMPT_SHARE)
    lengths = [context - prompt, *[(context - prompt) // 4] * (SAMPLES - 1)]

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocabulary, count).astype(np.int32)

    sequences = [
        TrainSequence(tokens(length), np.full(length, -np.log(vocabulary), np.float32), float(number - 1.5))
        for number, length in enumerate(lengths)
    ]
    return TrainGroup("group", tokens(prompt), sequences)
