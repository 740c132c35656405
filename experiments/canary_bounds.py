"""Measure how far the canary's log-probabilities differ: right computations among each other, right and wrong weights.

    .venv/bin/python experiments/canary_bounds.py [--model smollm2-135m]

Source of the bounds in `streamrl/rollouts/canary.py`. By transformers alone, in the mean over the canary's completion.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, cast, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.cli.main import error_lines
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.canary import canary, difference
from streamrl.rollouts.types import FloatArray
from streamrl.weights.quantize import CodeKind, dequantize, is_quantized, quantize

LEARNING_RATES = (1e-6, 5e-6, 1e-4)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    folder = resolve_model(parser.parse_args().model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one = canary(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), 1000)
    ids = torch.from_numpy(np.concatenate([one.prompt_tokens, one.completion_tokens]))[None].long()

    def measured(model: Any) -> FloatArray:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        each = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])
        return cast(FloatArray, each[len(one.prompt_tokens) - 1 :, 0].numpy())

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32)
    start = {name: value.clone() for name, value in model.named_parameters()}
    exact = measured(model)
    print(f"{len(one.completion_tokens)} tokens, {exact.mean():.2f} nats in the mean\n")
    print("| computed with | mean difference, nats |\n|---|---:|")
    print(f"| float32 twice | {difference(measured(model), exact):.1e} |")
    bf16 = measured(load(folder, dtype=torch.bfloat16))
    eager = measured(load(folder, dtype=torch.bfloat16, attn_implementation="eager"))
    print(f"| bfloat16 and float32 | {difference(bf16, exact):.1e} |")
    print(f"| bfloat16 and bfloat16, another attention | {difference(bf16, eager):.1e} |")
    cases = [(kind, rounded(start, kind)) for kind in get_args(CodeKind)]
    for what, weights in (*cases, *wrong(start, model.config.num_hidden_layers)):
        model.load_state_dict(weights, strict=False)
        print(f"| {what} | {difference(measured(model), exact):.1e} |", flush=True)


if __name__ == "__main__":
    with error_lines():
        main()
