"""Train the small reasoner: build its tokenizer, generate solutions, train, save, evaluate.

.venv/bin/python experiments/small_reasoner/train.py      # about ten minutes on one CPU core
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from muon import Muon
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from solutions import PHRASES, StyleMix, problems, solution
from start import structured_start
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
CONTEXT = 1024  # tokens
ROPE_BASE = 500.0
TRAIN_SEED = 1_000_000_000  # far above the seeds used for rollouts and evaluation
Example = tuple[list[int], int]  # token ids; length of the prompt in tokens
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: Mostly unchecked and tagged first, to learn the tasks; then the mix that the finished model samples.
WARMUP_MIX = StyleMix(checked=0.05, no_tags=0.05)
FINAL_MIX = StyleMix()
WEIGHTS = {"chain_sum": 2.0, "number_sorting": 2.0}  # harder tasks are seen more often


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer (lossless on any text), fixed wordings as one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, normalized=False) for text in PHRASES])
    spare = -inner.get_vocab_size() % 64
    inner.add_special_tokens([AddedToken(f"<|spare_{i}|>", special=True) for i in range(spare)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama of under one million parameters, with structured starting weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    structured_start(model, ROPE_BASE)
    return model


def examples(tokenizer: PreTrainedTokenizerFast, seed: int, mix: StyleMix, count: int) -> list[Example]:
    """``count`` examples (token ids, length of the prompt in tokens), at most ``CONTEXT`` tokens each."""
    rng = random.Random(seed)
    found: list[Example] = []
    for problem in problems(seed, count, WEIGHTS):
        prompt = f"<|bos|><|user|>{problem.question}<|assistant|>"
        head = tokenizer.encode(prompt, add_special_tokens=False)
        text = solution(problem, mix, rng) + "<|end|>"
        body = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        found.append(((head + body)[:CONTEXT], len(head)))
    return found


def batches(
    found: list[Example], budget: int, pad: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of examples of like length, at most ``budget`` tokens with padding, in random order.

    Yields (ids, labels), both int64 of shape (rows, longest); labels are -100 on prompt and padding.
    """
    groups: list[list[Example]] = [[]]
    for item in sorted(found, key=lambda pair: (len(pair[0]), rng.random())):
        if (len(groups[-1]) + 1) * len(item[0]) > budget:
            groups.append([])
        groups[-1].append(item)
    rng.shuffle(groups)
    for group in groups:
        longest = max(len(ids) for ids, _ in group)
        ids = torch.full((len(group), longest), pad)
        labels = torch.full((len(group), longest), -100)
        for row, (tokens, head) in enumerate(group):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, head : len(tokens)] = torch.tensor(tokens[head:])
        yield ids, labels


def stream(
    tokenizer: PreTrainedTokenizerFast, seed: int, budget: int, mix_at: list[StyleMix]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end; ``mix_at[0]`` is read anew for every pool of examples."""
    rng = random.Random(seed)
    pool, size = 0, 2500
    while True:
        found = examples(tokenizer, TRAIN_SEED + seed * 10**7 + pool * size, mix_at[0], size)
        yield from batches(found, budget, tokenizer.pad_token_id, rng)
        pool += 1


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tokens: int,
    minutes: float,
    budget: int,
    peak: float,
    seed: int,
) -> None:
    """Train in place for ``tokens`` tokens or ``minutes``, whichever comes first."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(matrices, lr=peak), peak),
        (torch.optim.AdamW(others, lr=2 * peak, betas=(0.9, 0.97), weight_decay=0.0), 2 * peak),
    ]
    mix_at = [WARMUP_MIX]
    begin, seen, loss_shown = time.monotonic(), 0, math.nan
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=1.0)
        for ids, labels in stream(tokenizer, seed, budget, mix_at):
            done = max(seen / tokens, (time.monotonic() - begin) / (60 * minutes))
            if done >= 1:
                break
            mix_at[0] = WARMUP_MIX if done < 0.65 else FINAL_MIX
            scale = min(1.0, done / 0.03 + 0.01) * (0.03 + 0.97 * min(1.0, 2 * (1 - done)))
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = scale * rate
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, _ in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen += ids.numel()
            loss_shown = loss.item() if math.isnan(loss_shown) else 0.95 * loss_shown + 0.05 * loss.item()
            text = f"loss {loss_shown:.3f} tokens {seen / 1e6:.2f}M"
            progress.update(bar, completed=done, description=text)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save in bfloat16 with tokenizer and generation settings."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name older transformers releases know
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "model", help="Model folder.")
@click.option("--tokens", default=4_000_000, help="Training tokens (with padding).")
@click.option("--minutes", default=15.0, help="Limit on training time, in minutes.")
@click.option("--budget", default=800, help="Tokens in a batch.")
@click.option("--peak", default=0.006, help="Peak learning rate of Muon (AdamW: twice that).")
@click.option("--threads", default=1, help="CPU threads (a second one hardly helps).")
@click.option("--seed", default=0, help="Seed of weights, problems and styles.")
@click.option("--evaluate/--no-evaluate", default=True, help="Evaluate with vLLM afterwards.")
def main(
    out: Path,
    tokens: int,
    minutes: float,
    budget: int,
    peak: float,
    threads: int,
    seed: int,
    evaluate: bool,
) -> None:
    """Train the small reasoner and write its model folder and evaluation.json."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    size = sum(p.numel() for p in model.parameters())
    click.echo(f"{size / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}")
    train(model, tokenizer, tokens, minutes, budget, peak, seed)
    save(model, tokenizer, out)
    click.echo(f"saved to {out}")
    if evaluate:
        command = [sys.executable, str(HERE / "evaluate.py"), "--model", str(out)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
