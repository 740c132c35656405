"""Checks whether a run's models are of the kind that can be trained, and whether its critic fits the policy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scheduler.cost.model_shapes import EXPERT_COUNTS, text_part, undivided_heads
from streamrl.config.algorithm import PPOConfig
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import CRITIC_KEY, RunConfig
from streamrl.errors import ErrorCode, UserError
from streamrl.machine.model_files import read_config, resolve_model, token_rows

FULL_ON_CPU = {"fp8", "mxfp4"}
"""Kinds of quantized weights that transformers turns into full ones as it loads them, where there is no GPU."""

POSITIONS_BY_FAMILY = {
    **dict.fromkeys(("codegen", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"), "n_positions"),
    "dbrx": "max_seq_len",
    "kimi_linear": "model_max_length",
    "rwkv": "context_length",
}
"""Key of config.json for the positions, of those values of `model_type` that do not call them max_position_embeddings
(the attribute maps of transformers 5.19); in other families these keys may mean nothing."""


def trained_folders(run: RunConfig) -> list[Path]:
    """Return the folders of the models that a run trains: the policy's, and PPO's critic's, which may be the same.

    Raises:
        UserError: there is no such model.
    """
    policy = Path(resolve_model(run.model.path))
    if not isinstance(run.algorithm, PPOConfig):
        return [policy]
    return [policy, Path(resolve_model(run.critic_path, CRITIC_KEY)) if run.critic_path else policy]


def config_of(run: RunConfig) -> dict[str, Any]:
    """Return the `config.json` of a run's model; empty if it cannot be read.

    Raises:
        UserError: see `resolve_model`.
    """
    return read_config(Path(resolve_model(run.model.path)))


def check_model(run: RunConfig) -> Iterable[str]:
    """Check that the model is present, has full weights, and a context long enough."""
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError as error:
        yield str(error)
        return
    config = json.loads((folder / "config.json").read_bytes())
    # an instance would be built for the file's codes and scales, and every version has full weights
    if (kind := _quantized(config)) is not None:
        yield f"model.path: {_needs_full(run.model.path, kind)}"
    if (longest := _positions(config)) is not None and run.model.max_context > longest:
        asked = f"{run.model.path} has {longest} positions, {run.model.max_context} are asked for"
        yield ErrorCode.CONTEXT.refer(f"model.max_context: {asked}")


def check_heads(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that the model's attention heads, and its MLPs in the trainer, can be split as the cluster file says."""
    try:
        values = text_part(config_of(run))
    except UserError:
        return  # reported by `check_model`
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    kv_heads = kv_heads if isinstance(kv_heads, int) else None
    for name, site in cluster.sites.items():
        for pool in site.generation:
            each = pool.gpus_per_replica
            if isinstance(heads, int) and (problem := undivided_heads(heads, kv_heads, each)):
                yield f"sites.{name}.generation ({pool.name}).gpus_per_replica is {each}: {problem} of {run.model.path}"
    yield from _undivided_by_trainer(cluster, values, run.model.path)


def check_critic(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that a critic with weights of its own has full ones, reads what the policy writes, and can be split."""
    if (path := run.critic_path) is None:
        return
    try:
        folder, policy = Path(resolve_model(path)), Path(resolve_model(run.model.path))
    except UserError:
        return  # reported by `check_model` and `check_packing`
    if folder == policy:
        return
    config = read_config(folder)
    if (kind := _quantized(config)) is not None and not (cluster.hardware == "cpu" and kind in FULL_ON_CPU):
        yield f"algorithm.critic.path: {_needs_full(path, kind)}"
    if (longest := _positions(config)) is not None and run.model.max_context > longest:
        asked = f"{path} has {longest} positions, {run.model.max_context} are asked for"
        yield ErrorCode.CONTEXT.refer(f"model.max_context: the critic {asked}")
    known, (own, used), (read, _) = token_rows(folder), _vocabulary(policy), _vocabulary(folder)
    if known is not None and used > known:
        yield f"algorithm.critic.path: {path} knows {known} tokens, and the tokenizer of {run.model.path} has {used}"
    elif others := sum(read[number] != token for number, token in own.items() if number in read):
        yield (
            f"algorithm.critic.path: {path} has another tokenizer than {run.model.path}: {others} of {len(own)} "
            "tokens have other numbers"
        )
    yield from _undivided_by_trainer(cluster, text_part(config), path)


def critic_warnings(run: RunConfig) -> Iterable[str]:
    """Warn about a critic whose trained head is left out, or that has fewer rows of tokens than the policy.

    The policy may write a token that its tokenizer lacks.
    """
    if (path := run.critic_path) is None:
        return
    folder, policy = Path(resolve_model(path)), Path(resolve_model(run.model.path))
    built_as = [str(name) for name in read_config(folder).get("architectures") or ()]
    if headed := [name for name in built_as if name.endswith("ForSequenceClassification")]:
        yield (
            f"algorithm.critic.path: {path} is a reward model or classifier ({headed[0]}): only the layers below its "
            "head are taken, and the critic's own head begins at 0"
        )
    known, written = token_rows(folder), token_rows(policy)
    if known is not None and written is not None and known < written and _vocabulary(policy)[1] <= known:
        yield (
            f"algorithm.critic.path: {path} has {known} rows of tokens, and {run.model.path} {written}: a token beyond "
            "those of the tokenizer, which trained models hardly ever write, would end the run"
        )


def _quantized(config: Mapping[str, Any]) -> str | None:
    """Return the kind of a model's quantized weights; None: they are full."""
    if not (found := config.get("quantization_config")):
        return None
    return str(found.get("quant_method", "of an unknown kind")) if isinstance(found, dict) else "of an unknown kind"


def _needs_full(path: str, kind: str) -> str:
    return f"{path} is quantized ({kind}): the trainer needs full weights; use the unquantized model"


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model's context has; None: it does not say."""
    for part in (config, text_part(config)):
        named = POSITIONS_BY_FAMILY.get(str(part.get("model_type")), "max_position_embeddings")
        if longest := part.get(named) or part.get("max_position_embeddings"):
            break
    return longest if isinstance(longest, int) else None


def _vocabulary(folder: Path) -> tuple[dict[int, str], int]:
    """Return a model's tokens by number, and their count up to the last one; ({}, 0): not known.

    The tokens are without special ones, whose names differ among relatives; the count is with them.
    """
    values = read_config(folder, "tokenizer.json")
    special = {token["id"] for token in values.get("added_tokens", ())}
    model = values.get("model")
    found = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(found, dict):
        tokens = {number: token for token, number in found.items()}
    else:  # a list, with a score each
        tokens = {number: token for number, (token, _) in enumerate(found or ())}
    count = max([*tokens, *special], default=-1) + 1
    return {number: token for number, token in tokens.items() if number not in special}, count


def _undivided_by_trainer(cluster: ClusterConfig, values: Mapping[str, Any], path: str) -> Iterable[str]:
    trainer = cluster.trainer
    heads, ranks = values.get("num_key_value_heads") or values.get("num_attention_heads"), trainer.tensor_parallel
    key = f"sites.{cluster.trainer_site}.trainer.tensor_parallel"
    if isinstance(heads, int) and heads % ranks:
        yield f"{key} is {ranks}: expected a divisor of the {heads} key-value heads of {path}"
    units = values.get("intermediate_size")
    experts = any(values.get(name) for name in EXPERT_COUNTS)  # those are not split, and need not have that size
    if isinstance(units, int) and units % ranks and not experts:
        yield f"{key} is {ranks}: expected a divisor of the {units} inner units (intermediate_size) of {path}"
