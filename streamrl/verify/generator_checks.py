"""The model in vLLM: its log-probabilities against the trainer's, and what new weights do to a running engine.

The engines run in a process of their own (`generator_stages.py`), so that what vLLM cannot do ends a stage and not the
command. One such process checks any number of models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from streamrl.generation.instance.settings_trial import error_of
from streamrl.runtime.module_process import run_module
from streamrl.runtime.process_plan import ONE_BLAS_THREAD, PASSIVE_WAITING
from streamrl.verify.findings import Finding, Support
from streamrl.verify.generator_order import (
    AGAINST,
    BEFORE,
    BETWEEN_TOKENS,
    DELIVERED,
    FRESH,
    FRESH_IN_INT8,
    IN_INT8,
    LIMIT_S,
    VERSION,
    Order,
    in_codes,
)
from streamrl.weights.quantize import CodeKind

IMPORT_S = 120.0
"""Seconds that the process may take to import torch and vLLM."""
BOUND = 5e-3
"""Largest difference of a log-probability, in nats, that counts as rounding between two fp32 implementations."""

StageValues = dict[str, dict[str, Any]]
Samples = Sequence[dict[str, list[float]]]


def check_generators(orders: Sequence[Order]) -> list[list[Finding]]:
    """Check models in vLLM on this machine's CPU, in fp32; returns the findings of each order."""
    limit_s = IMPORT_S + LIMIT_S * len(orders)
    said, done = run_module(
        "streamrl.verify.generator_stages",
        limit_s=limit_s,
        environment=PASSIVE_WAITING | ONE_BLAS_THREAD | {"OMP_NUM_THREADS": "1"},
        given="".join(json.dumps(asdict(order)) + "\n" for order in orders),
    )
    missing = f"vLLM: {error_of(done.stderr)}" if done else f"vLLM gave no answer within {limit_s:.0f} s"
    answers = [json.loads(line) for line in said.splitlines() if line.startswith('{"stages"')]
    rest = [_unanswered(order, "refused", missing) for order in orders[len(answers) :]]
    return [findings_of(order, answer) for order, answer in zip(orders, answers, strict=False)] + rest


def _unanswered(order: Order, verdict: Support, reason: str) -> list[Finding]:
    """Return the findings where nothing was compared; `verdict` is that of the first, the others are not checked."""
    skipped = [VERSION, BETWEEN_TOKENS, *map(in_codes, order.codes), *([IN_INT8] if order.in_int8 else [])]
    return [
        Finding(AGAINST, verdict, reason),
        *(Finding(name, "not checked", reason, optional=name != VERSION) for name in skipped),
    ]


def findings_of(order: Order, answer: dict[str, Any]) -> list[Finding]:
    """Return what an order's answer (`generator_stages.answer`) shows."""
    if lacks := answer.get("lacks"):
        return _unanswered(order, "not checked", lacks)
    stages: StageValues = answer["stages"]
    failed = f"vLLM: {error_of(answer['errors'])}" if answer["in_time"] else f"vLLM took more than {LIMIT_S:.0f} s"
    if AGAINST not in stages:
        reason = "the model does not run in vLLM here"
        return [Finding(AGAINST, "refused", failed), *_unanswered(order, "not checked", reason)[1:]]
    return [
        _against(stages[AGAINST]),
        _version(order, stages, failed),
        _between_tokens(stages, failed),
        *(_codes(kind, stages, failed) for kind in order.codes),
        *([_in_int8(stages, failed)] if order.in_int8 else []),
    ]


def _against(found: dict[str, Any]) -> Finding:
    what = f"log-probabilities of {found['tokens']} sampled tokens"
    if found["error"] <= BOUND:
        return Finding(AGAINST, "works", f"{what} within {found['error']:.1g} nats (fp32)", measured=True)
    differs = f"{what} differ by up to {found['error']:.1g} nats (fp32), more than {BOUND:g}"
    return Finding(AGAINST, "refused", differs, measured=True)


def _version(order: Order, stages: StageValues, failed: str) -> Finding:
    if DELIVERED not in stages or FRESH not in stages:
        return Finding(VERSION, "refused", failed)
    found, ours, theirs = stages[DELIVERED], stages[DELIVERED]["samples"], stages[FRESH]["samples"]
    differs = difference(ours, theirs, "a fresh engine's")
    if not differs and order.models[0] != order.models[1] and not difference(stages[BEFORE]["samples"], ours, ""):
        differs = "the engine kept its old weights"
    if differs:
        return Finding(VERSION, "refused", differs, measured=True)
    path = f"trainer's layout, publisher, {found['kind']}, store and vLLM's reload, {found['mb']:.2f} MB"
    tokens = sum(len(one["tokens"]) for one in ours)
    says = f"{tokens} tokens and their log-probabilities equal bit for bit ({path})"
    return Finding(VERSION, "works", says, measured=True)


def _between_tokens(stages: StageValues, failed: str) -> Finding:
    if BETWEEN_TOKENS not in stages:
        return Finding(BETWEEN_TOKENS, "refused", failed, optional=True)
    found = stages[BETWEEN_TOKENS]
    if not found["crossed"]:
        return Finding(BETWEEN_TOKENS, "not checked", "all samples ended before the new weights", optional=True)
    says = f"{found['tokens']} later tokens of running samples within {found['error']:.1g} nats of the new policy's"
    return Finding(BETWEEN_TOKENS, "works" if found["error"] <= BOUND else "refused", says, optional=True)


def _codes(kind: CodeKind, stages: StageValues, failed: str) -> Finding:
    name = in_codes(kind)
    if name not in stages:
        return Finding(name, "refused", failed, optional=True)
    found = stages[name]
    if differs := difference(found["codes"], found["plain"], "those of the weights that the codes stand for"):
        return Finding(name, "refused", differs, optional=True)
    if not difference(found["codes"], stages[DELIVERED]["samples"], ""):
        return Finding(name, "not checked", "no weight of the small model is sent in 8 bits", optional=True)
    says = f"loads bit for bit as the weights that the codes stand for, {found['mb']:.2f} MB"
    return Finding(name, "works", says, optional=True)


def _in_int8(stages: StageValues, failed: str) -> Finding:
    found = stages.get(IN_INT8, {})
    if lacks := found.get("lacks"):
        return Finding(IN_INT8, "not checked", lacks, optional=True)
    if "samples" not in found or FRESH_IN_INT8 not in stages:
        return Finding(IN_INT8, "refused", failed, optional=True)
    theirs = stages[FRESH_IN_INT8]["samples"]
    differs = difference(found["samples"], theirs, "a fresh engine's in int8")
    if not differs and not difference(found["before"], theirs, ""):
        differs = "the engine kept its old weights"
    if differs:
        return Finding(IN_INT8, "refused", differs, optional=True)
    tokens = sum(len(one["tokens"]) for one in theirs)
    says = (
        f"{tokens} tokens equal a fresh engine's bit for bit; {found['mismatch']:.2g} nats from the trainer in the mean"
    )
    return Finding(IN_INT8, "works", says, optional=True)


def difference(ours: Samples, theirs: Samples, whose: str) -> str:
    """Say where two lists of samples differ; '': nowhere.

    Args:
        ours, theirs: tokens and log-probabilities of each sample.
        whose: whose the second ones are.
    """
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one["tokens"] != other["tokens"]:
            return f"sample {number}: other tokens than {whose}"
        if one["logprobs"] != other["logprobs"]:
            worst = float(np.abs(np.subtract(one["logprobs"], other["logprobs"])).max())
            return f"sample {number}: log-probabilities differ from {whose} by up to {worst:.1g} nats"
    return ""
