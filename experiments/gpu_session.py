"""Measure on a GPU, in one command, what only a GPU can show; nothing is downloaded and vLLM is not needed.

    python experiments/gpu_session.py --out gpu_session.json     # on a machine with a GPU: some 20 minutes
    python experiments/gpu_session.py --tiny --out /tmp/x.json   # the same code on a CPU, with tiny shapes

The stages, each a process with a time limit whose results are written at once, so that what fails or hangs costs itself
alone:

    kit        devices, products, memory, peers, collectives, attention and head against fp64, the move of the trainer's
               state to host memory and back (stages of `streamrl verify --hardware`)
    versus-*   the same batch by this trainer and by TRL's GRPOTrainer (with Liger's layers where it is installed), in
               turns in one process, at each length: tokens/s of both, and their ratio; of ours the share of the data
               sheet's peak (MFU) and memory, with attention by torch's kernels and by those of flash-attn-4 where it is
               installed. TRL computes samples of one length at a time, and all at once where they fit
    grpo       steps of GRPO on a random model of that shape with generation by transformers: seconds of each part, and
               the difference between the generator's log-probabilities and the trainer's
    tiny run   a whole run with vLLM, where it is installed

Needs torch, transformers, numpy, pydantic, pyyaml, msgspec, pyzmq, blake3, psutil, rich, click; trl, datasets,
accelerate and liger-kernel for the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NEEDED = ("torch", "transformers", "numpy", "pydantic", "yaml", "msgspec", "zmq", "blake3", "psutil", "rich", "click")
FOR_TRL = ("trl", "datasets", "accelerate")
LIMIT_S = {"kit": 900, "versus": 420, "grpo": 420, "tiny run": 600}
"""Seconds of each stage; of the kit's, all of its stages together."""
SAMPLES, NEW_TOKENS, STEPS = 8, 128, 3
"""Of the GRPO steps: completions of a prompt, tokens of a completion, steps."""
PROMPTS = 4
MOST_PADDED = 16_384
"""Padded tokens up to which TRL computes all samples of a group at once, too. With 32,768 it ran out of the 140 GiB of
an H200 (151,936 tokens of vocabulary), with gradient checkpointing as well."""
REPETITIONS = 3
"""Steps of each side that are timed in a comparison, after one that is not."""


def missing(names: Sequence[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def main() -> None:
    """Run one stage, or all of them as processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_session.json"), help="JSON file with the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the code on a CPU")
    parser.add_argument("--stage", help="run this stage alone, in this process")
    parser.add_argument("--only", nargs="+", help="stages to run (default: all)")
    parser.add_argument("--model", type=Path, help="folder of the model that the stages share (default: a new one)")
    given = parser.parse_args()
    if absent := missing(NEEDED):
        sys.exit(f"error: not installed: {', '.join(absent)}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder, "model")
        if given.stage:
            for found in stages(given.tiny, model)[given.stage]():
                print(json.dumps(found), flush=True)
            return
        for name in given.only or [*stages(given.tiny, model), "tiny run"]:
            began = time.monotonic()
            results[name] = tiny_run_found() if name == "tiny run" else in_process(name, given.tiny, model)
            results[name]["seconds"] = round(time.monotonic() - began, 1)
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {results[name]['seconds']} s {results[name]['error']}".rstrip(), flush=True)
            for found in results[name]["found"]:
                print(f"  {json.dumps(found)}", flush=True)


def in_process(name: str, tiny: bool, model: Path) -> dict[str, Any]:
    """Run a stage in a process of its own; return what it found until it ended or its time was over."""
    command = [sys.executable, __file__, "--stage", name, "--model", str(model), *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        error = ""
        try:
            done = subprocess.run(
                command, stdout=said, stderr=errors, timeout=LIMIT_S[name.partition(" ")[0]], env=os.environ
            )
        except subprocess.TimeoutExpired:
            error = "no end in time"
        else:
            if done.returncode:
                errors.seek(0)
                error = errors.read().strip()[-2000:] or f"exit code {done.returncode}"
        said.seek(0)
        found = [json.loads(line) for line in said if line.startswith("{")]
    return {"found": found, "error": error}


def stages(tiny: bool, model: Path) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """Return the stages, in their order; the first that trains writes the model's folder for all."""
    contexts = (40, 80) if tiny else (2048, 8192, 32_768)
    return {
        "kit": lambda: kit(tiny),
        **{f"versus {context}": partial(versus, context, tiny, model) for context in contexts},
        "grpo": lambda: grpo(tiny, model),
    }


def shape(tiny: bool) -> Any:
    """Return the shape that is trained."""
    from streamrl.verify.hardware_stages import CPU, GPU

    small = replace(CPU, layers=2, hidden=64, heads=4, kv_heads=2, inner=128, vocabulary=512, contexts=(40, 80))
    return replace(small, side=64, megabytes=1, attention=(16, (20, 10))) if tiny else GPU


def kit(tiny: bool) -> Iterator[dict[str, Any]]:
    """Run the kit's stages, but for the trainer's, which `versus` measures, and weights, which use no GPU."""
    from streamrl.verify import hardware_stages

    if tiny:
        hardware_stages.CPU = shape(tiny)
    for name in ("devices", "products", "memory", "peers", "collectives", "attention", "head", "turns"):
        for found in hardware_stages.STAGES[name]():
            yield {"stage": name} | asdict(found)


def shared_model(tiny: bool, folder: Path, device: Any) -> Path:
    """Return the folder of the model, written if it is not there yet."""
    from streamrl.verify.hardware_trainer import save_model

    if not folder.exists():
        part = folder.with_suffix(".part")  # a stage that is ended leaves no half model
        save_model(shape(tiny), part, max(shape(tiny).contexts), device).rename(folder)
    return folder


def versus(context: int, tiny: bool, model: Path) -> Iterator[dict[str, Any]]:
    """Time the same batch by this trainer and by TRL's, in turns."""
    import torch
    import torch.distributed as dist

    from streamrl.training import flash_kernels
    from streamrl.verify.hardware_measurement import sheet_peak
    from streamrl.verify.hardware_stages import device_here
    from streamrl.verify.hardware_trainer import least_recomputation, memory_of, random_group, trainer_of

    if absent := missing(FOR_TRL):
        raise SystemExit(f"not installed: {', '.join(absent)}")
    size, device = shape(tiny), device_here()
    group = random_group(context, size.vocabulary)
    tokens = sum(len(group.prompt_tokens) + len(one.completion_tokens) for one in group.sequences)
    with tempfile.TemporaryDirectory() as folder:
        shared_model(tiny, model, device)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        recomputation = least_recomputation(size, group.tokens, device)
        trainer = trainer_of(model, context, recomputation, device)
        peak = sheet_peak(device)
        seconds = float("inf")
        for library in attention_libraries(size, device):
            flops: list[float] = []
            with only_torch_attends() if library == "torch" else contextlib.nullcontext():
                took = timed(our_step(trainer, group, flops))
            seconds = min(seconds, took)
            yield {
                "side": "this trainer",
                "attention": library,
                "attention_failed": sorted(flash_kernels.failed),
                "recomputation": str(recomputation).lower(),
                **step_figures(took, tokens),
                "formula_gib": memory_of(size, group.tokens, recomputation) / 2**30,
                "tflop_per_s": flops[-1] / took / 1e12,
                "mfu": flops[-1] / took / 1e12 / peak if peak else None,
            }
        del trainer
        gc.collect()  # its memory is free before TRL's trainer is made
        if device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(len(one.completion_tokens) for one in group.sequences)
        padded = len(group.sequences) * (len(group.prompt_tokens) + longest)
        ways = [(True, False), *([(False, False)] if padded <= MOST_PADDED else [])]
        for unpadded, recompute in ways:
            about = {
                "side": "TRL",
                "unpadded": unpadded,
                "gradient_checkpointing": recompute,
                "liger_layers": liger(device),
                "attention": attention_of_trl(device),
            }
            try:
                other = timed(trl_step(model, Path(folder, "trl"), group, device, unpadded, recompute))
            except torch.OutOfMemoryError:
                yield about | {"out_of_memory": True}
                if unpadded and not recompute:
                    ways.append((True, True))
            else:
                yield about | step_figures(other, tokens) | {"ours_over_theirs": round(other / seconds, 3)}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        dist.destroy_process_group()


def attention_libraries(size: Any, device: Any) -> list[str]:
    """Return the libraries whose kernels this trainer can use for the shape's attention, the quickest first."""
    import torch

    from streamrl.training.flash_kernels import newer_agrees

    kind = torch.bfloat16, size.heads, size.kv_heads, size.hidden // size.heads, False
    newer = device.type == "cuda" and newer_agrees(device, *kind)
    return ["flash-attn-4", "torch"] if newer else ["torch"]


@contextlib.contextmanager
def only_torch_attends() -> Iterator[None]:
    """Leave attention to torch's kernels."""
    from streamrl.training import flash_kernels

    with patch.object(flash_kernels, "NEWER_CAPABILITIES", ()):
        flash_kernels.newer_agrees.cache_clear()
        yield
    flash_kernels.newer_agrees.cache_clear()


def our_step(trainer: Any, group: Any, flops: list[float]) -> Callable[[], None]:
    """Return a function that makes this trainer's step on a group, and appends the operations of each step."""

    def step() -> None:
        flops.append(trainer.accumulate([group], is_last=True).flops)
        trainer.step(0, float(group.loss_tokens))

    return step


def timed(work: Callable[[], None]) -> float:
    """Return the seconds of the quickest of some calls, after one that is not timed."""
    import torch

    best = float("inf")
    for number in range(REPETITIONS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - began)
    return best


def step_figures(seconds: float, tokens: int) -> dict[str, Any]:
    """Return figures of a step over sequences of so many tokens, each with its prompt."""
    import torch

    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_gib": memory}


def liger(device: Any) -> bool:
    """Return whether TRL can use Liger's kernels here."""
    return device.type == "cuda" and not missing(["liger_kernel"])


def attention_of_trl(device: Any) -> str:
    """Return the attention of transformers that TRL's model uses."""
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


def trl_step(model: Path, folder: Path, group: Any, device: Any, unpadded: bool, recompute: bool) -> Callable[[], None]:
    """Return a function that makes TRL's GRPO step on a group: its loss, backward, clipping, AdamW.

    Args:
        model: the model's folder.
        folder: folder for its output.
        group: the samples.
        device: where it computes.
        unpadded: compute samples of one length at a time, and sum up their gradients; else all at once, padded.
        recompute: use gradient checkpointing.
    """
    import torch

    trainer = trl_trainer(model, folder, group, device, recompute)
    batches = trl_batches(group, device, unpadded)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # each loss is divided by all samples' tokens, so they add up

    def step() -> None:
        for batch in batches:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, batch)
            trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return step


def trl_trainer(model: Path, folder: Path, group: Any, device: Any, recompute: bool) -> Any:
    """Return TRL's GRPO trainer with its optimizer, for groups of such samples; see `trl_step`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from streamrl.verify.small_folder import save_byte_tokenizer

    save_byte_tokenizer(folder)
    from transformers import AutoTokenizer

    samples = len(group.sequences)
    cuda = device.type == "cuda"
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=samples,
        num_generations=samples,
        max_completion_length=max(len(one.completion_tokens) for one in group.sequences),
        beta=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        use_liger_kernel=liger(device),
        gradient_checkpointing=recompute,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        report_to="none",
        save_strategy="no",
    )
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=attention_of_trl(device)
    )
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * samples),
        processing_class=AutoTokenizer.from_pretrained(folder, pad_token="<|end|>"),
    )
    if liger(device):  # as transformers' `Trainer.train` does when it begins
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
    trainer.create_optimizer()
    return trainer


def trl_batches(group: Any, device: Any, unpadded: bool) -> list[dict[str, Any]]:
    """Return the batches of a group's samples on which TRL computes the loss; see `trl_step`."""
    import torch

    samples = len(group.sequences)
    longest = max(len(one.completion_tokens) for one in group.sequences)
    prompt = torch.tensor(group.prompt_tokens).long().expand(samples, -1).to(device)
    completions = torch.zeros(samples, longest, dtype=torch.int64)
    mask = torch.zeros(samples, longest, dtype=torch.int64)
    old = torch.zeros(samples, longest)
    for row, one in enumerate(group.sequences):
        length = len(one.completion_tokens)
        completions[row, :length] = torch.tensor(one.completion_tokens).long()
        mask[row, :length] = 1
        old[row, :length] = torch.tensor(one.logprobs)
    advantages = torch.tensor([one.advantage for one in group.sequences])
    lengths = [len(one.completion_tokens) if unpadded else 0 for one in group.sequences]
    shares = [[row for row in range(samples) if lengths[row] == length] for length in dict.fromkeys(lengths)]
    batches = []
    for rows in shares:
        width = max(len(group.sequences[row].completion_tokens) for row in rows)
        own = {
            "prompt_ids": prompt[rows],
            "prompt_mask": torch.ones_like(prompt[rows]),
            "completion_ids": completions[rows, :width],
            "completion_mask": mask[rows, :width],
            "old_per_token_logps": old[rows, :width],
            "advantages": advantages[rows],
            "num_items_in_batch": mask.sum(),
        }
        batches.append({name: value.to(device) for name, value in own.items()})
    return batches


def grpo(tiny: bool, model: Path) -> Iterator[dict[str, Any]]:
    """Make steps of GRPO: generation by transformers, a reward of the text, this trainer, the new weights back."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
    from streamrl.verify.hardware_stages import device_here
    from streamrl.verify.hardware_trainer import trainer_of

    size, device = shape(tiny), device_here()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    new_tokens = 12 if tiny else NEW_TOKENS
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        shared_model(tiny, model, device)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        trainer = trainer_of(model, 2048, False, device)
        generator = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        prompts = [rng.integers(0, size.vocabulary, 32) for _ in range(PROMPTS)]
        for step in range(STEPS):
            began = time.perf_counter()
            groups, rewards = [], []
            for number, prompt in enumerate(prompts):
                ids = torch.tensor(prompt)[None].expand(SAMPLES, -1).to(device)
                with torch.no_grad():
                    out = generator.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=True,
                        temperature=1.0,
                        top_k=0,
                        top_p=1.0,
                        max_new_tokens=new_tokens,
                        min_new_tokens=new_tokens,
                        return_dict_in_generate=True,
                        output_logits=True,
                        pad_token_id=0,
                    )
                logits = torch.stack(out.logits, 1).float()
                new = out.sequences[:, ids.shape[1] :]
                logprobs = torch.log_softmax(logits, -1).gather(-1, new[..., None])[..., 0].cpu().numpy()
                reward = (new % 2 == 0).float().mean(1).cpu().numpy()  # the share of even tokens
                rewards.append(reward)
                advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
                rows = [
                    TrainSequence(row.astype(np.int32), own.astype(np.float32), float(one))
                    for row, own, one in zip(new.cpu().numpy(), logprobs, advantage, strict=True)
                ]
                groups.append(TrainGroup(f"{step}-{number}", prompt.astype(np.int32), rows))
            generated = time.perf_counter()
            stats = trainer.accumulate(groups, is_last=True)
            result = trainer.step(step, float(sum(group.loss_tokens for group in groups)))
            if device.type == "cuda":
                torch.cuda.synchronize()
            trained = time.perf_counter()
            generator.load_state_dict({name: weight.to(device) for name, weight in trainer.weights()}, strict=False)
            tied = generator.get_output_embeddings().weight
            assert tied is generator.get_input_embeddings().weight
            yield {
                "step": step,
                "reward": float(np.mean(rewards)),
                "generate_s": generated - began,
                "train_s": trained - generated,
                "publish_s": time.perf_counter() - trained,
                "tokens": stats.tokens,
                "mean_abs_logprob_gap": stats.mismatch_sum / stats.tokens,
                "grad_norm": result.grad_norm,
            }
        dist.destroy_process_group()


def tiny_run_found() -> dict[str, Any]:
    """Launch the kit's whole tiny run, if vLLM is installed."""
    if missing(["vllm"]):
        return {"found": [], "error": "vLLM is not installed"}
    from streamrl.verify.tiny_run import tiny_run

    found, error = tiny_run()
    return {"found": [asdict(one) for one in found], "error": error}


if __name__ == "__main__":
    main()
