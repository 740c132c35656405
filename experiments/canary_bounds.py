"""Measure how far the canary's log-probabilities differ: right computations among each other, right and wrong weights.

    .venv/bin/python experiments/canary_bounds.py [--model smollm2-135m]
    .venv/bin/python experiments/canary_bounds.py --families     # all of `verify/families.py`, small and random

Source of the bounds in `streamrl/rollouts/canary.py`. By transformers alone, in the mean over the canary's completion;
with `--families` over as many random tokens, the largest of 8 texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, cast, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.cli.main import error_lines
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.canary import MOST_TOKENS, PROMPT_TOKENS, canary, mean_mismatch
from streamrl.rollouts.types import FloatArray
from streamrl.training.packing_proof import small_model, vocabulary_of
from streamrl.verify.families import FAMILIES
from streamrl.weights.quantize import CodeKind, dequantize, is_quantized, quantize

LEARNING_RATES = (1e-6, 5e-6, 1e-4)
TEXTS = 8
KINDS: tuple[CodeKind, ...] = ("int8", "fp8")
Weights = dict[str, torch.Tensor]


def rounded(weights: Weights, kind: CodeKind) -> Weights:
    """Return the weights that 8-bit codes of the linear ones stand for."""
    return {
        name: dequantize(*quantize(value.bfloat16(), kind), torch.float32)
        if is_quantized(name, tuple(value.shape))
        else value
        for name, value in weights.items()
    }


def wrong(weights: Weights, layers: int) -> Iterator[tuple[str, Weights]]:
    """Yield weights with one mistake each, and a description of it."""
    middle = f"model.layers.{layers // 2}"
    for name in (f"{middle}.self_attn.q_proj.weight", f"{middle}.mlp.down_proj.weight", "model.norm.weight"):
        yield f"{name} is 0", weights | {name: torch.zeros_like(weights[name])}
    name = f"{middle}.mlp.down_proj.weight"
    row = weights[name].clone()
    row[0] = row[1]
    yield f"one row of {name} is another", weights | {name: row}
    generator = torch.Generator().manual_seed(0)
    for rate in LEARNING_RATES:
        moved = {
            name: value + rate * torch.sign(torch.randn(value.shape, generator=generator))
            for name, value in weights.items()
        }
        yield f"the version before, a first AdamW step at lr {rate:g} away", moved


def of_families() -> None:
    """Print how far right computations of small random models differ from those in fp32."""
    print("| family | bfloat16 | int8 weights | fp8 weights |\n|---|---:|---:|---:|")
    generator = torch.Generator().manual_seed(0)
    for family, config in FAMILIES.items():
        model = small_model(config())
        texts = torch.randint(3, vocabulary_of(model), (TEXTS, MOST_TOKENS), generator=generator)

        def measured(model: Any, texts: torch.Tensor = texts) -> list[FloatArray]:
            return [logprobs(model, text[None])[PROMPT_TOKENS - 1 :] for text in texts]

        exact, start = measured(model), {name: value.clone() for name, value in model.named_parameters()}
        others = [measured(deepcopy(model).bfloat16())]
        for kind in KINDS:
            model.load_state_dict(rounded(start, kind), strict=False)
            others.append(measured(model))
        worst = [max(map(mean_mismatch, other, exact)) for other in others]
        print(f"| {family} | {' | '.join(f'{one:.3f}' for one in worst)} |", flush=True)


def logprobs(model: Any, ids: torch.Tensor) -> FloatArray:
    """Return the log-probabilities of all tokens but the first, [T - 1]; `ids` are [1, T]."""
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float()
    return cast(FloatArray, torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--families", action="store_true")
    options = parser.parse_args()
    if options.families:
        return of_families()
    folder = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one = canary(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), 1000)
    ids = torch.from_numpy(np.concatenate([one.prompt_tokens, one.completion_tokens]))[None].long()

    def measured(model: Any) -> FloatArray:
        return logprobs(model, ids)[len(one.prompt_tokens) - 1 :]

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32)
    start = {name: value.clone() for name, value in model.named_parameters()}
    exact = measured(model)
    print(f"{len(one.completion_tokens)} tokens, {exact.mean():.2f} nats in the mean\n")
    print("| computed with | mean difference, nats |\n|---|---:|")
    print(f"| float32 twice | {mean_mismatch(measured(model), exact):.1e} |")
    bf16 = measured(load(folder, dtype=torch.bfloat16))
    eager = measured(load(folder, dtype=torch.bfloat16, attn_implementation="eager"))
    print(f"| bfloat16 and float32 | {mean_mismatch(bf16, exact):.1e} |")
    print(f"| bfloat16 and bfloat16, another attention | {mean_mismatch(bf16, eager):.1e} |")
    cases = [(kind, rounded(start, kind)) for kind in get_args(CodeKind)]
    for what, weights in (*cases, *wrong(start, model.config.num_hidden_layers)):
        model.load_state_dict(weights, strict=False)
        print(f"| {what} | {mean_mismatch(measured(model), exact):.1e} |", flush=True)


if __name__ == "__main__":
    with error_lines():
        main()
