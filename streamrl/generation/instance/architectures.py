"""Whether vLLM generates with a model's architecture, by vLLM's and transformers' sources.

They are read, not imported: importing vLLM takes 20 s, and this is asked before anything starts.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from scheduler.cost.model_shapes import text_part
from streamrl.machine.model_files import read_config, transformers_config

Implementation = tuple[str, str]
"""Module and class of an architecture in vLLM."""

GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""vLLM's tables of architectures that generate."""
OTHERS = (
    "_EMBEDDING_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
    "_SPECULATIVE_DECODING_MODELS",
)
"""vLLM's tables of other architectures, of which some are computed by a class that generates (LlamaModel)."""
EARLIER = "_PREVIOUSLY_SUPPORTED_MODELS"
"""vLLM's table of architectures that it had up to a version."""
MAKES_NO_TEXT = re.compile(
    r"(For(?!CausalLM|ConditionalGeneration)\w+|RewardModel|EmbeddingModel|ClassificationModel)$"
)
"""Ends of names for which vLLM starts an engine that refuses to generate."""
FAILS = {"PhimoeForCausalLM": "vLLM computes it by transformers, and ends at its routers"}
"""Architectures for which vLLM starts, and ends at the first token."""
RECURRENT = frozenset({"conv", "hybrid", "linear_attention", "mamba", "recurrent"})
"""transformers' names of layers that are more or other than attention, which vLLM cannot compute for it."""
MAMBA_1 = "its recurrent layers (Mamba 1) need a kernel (selective_scan_fwd) that vLLM has on GPUs only"
PLAIN_EXPERTS = "its experts have no gate, and vLLM computes such experts on GPUs only"


def no_architecture(folder: Path, on_cpus: bool) -> str:
    """Return why vLLM cannot generate with the model of a folder; '': it can, or vLLM is not here, or is unknown.

    Args:
        folder: the model's folder.
        on_cpus: whether instances compute on CPUs.
    """
    tables, config = _tables("vllm", "model_executor/models/registry.py"), read_config(folder)
    if not {*GENERATING, *OTHERS} <= tables.keys() or "model_type" not in config:
        return ""
    kind, names = str(config["model_type"]), config.get("architectures") or []
    auto = _tables("transformers", "models/auto/modeling_auto.py")
    own = auto.get("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    name = str(names[0] if names else auto.get("MODEL_MAPPING_NAMES", {}).get(kind, ""))
    found = _implementation(tables, name)
    if others := [other for other, built in own.items() if name in _names(built) and other != kind]:
        wanted = _names(own.get(kind, ()))
        if name not in wanted and all(_implementation(tables, one) != found for one in wanted):
            return (
                f"architectures in its config.json is {name}, of which model_type is {others[0]}, and not {kind}: "
                "vLLM would compute another model than the trainer; correct the one that is wrong"
            )
    generates = {tuple(one) for table in GENERATING for one in tables[table].values()}
    pooling = bool(re.search("(?<!LMHead)(?<!Chat)Model$", name)) if found is None else found not in generates
    if pooling or MAKES_NO_TEXT.search(name):
        what = f"{name} (architectures in config.json)" if names else "a model whose config.json has no architectures"
        expected = "".join(f", such as {one}" for one in _names(own.get(kind, ()))[:1])
        return f"vLLM does not generate with {what}; expected a causal language model{expected}"
    if name in FAILS:
        return f"{name}: {FAILS[name]}; use another model"
    if found is None:
        return _why_unknown(folder, config, name, tables)
    return _why_not_with(found, folder, config, on_cpus)


def _why_unknown(folder: Path, config: Mapping[str, Any], name: str, tables: Mapping[str, Any]) -> str:
    """Return why vLLM cannot compute by transformers what it does not have itself; '': it may."""
    if _has_plugins():
        return ""  # they may bring it
    lacks = f"vLLM has no {name or 'architecture'} (architectures in config.json)"
    if until := tables.get(EARLIER, {}).get(name):
        lacks += f"; the last version that had it is {until}"
    if (source := _source_of(str(config["model_type"]), name)) is None:
        return f"{lacks}, nor has transformers; use another model"
    # as transformers' `_can_set_attn_implementation`
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    supported = re.search(r"^\s+_supports_attention_backend\s*(: bool)?\s*= True", source, re.MULTILINE)
    if own and not supported and "ALL_ATTENTION_FUNCTIONS.get_interface(" not in source:
        return f"{lacks}, and transformers' has an attention of its own, which vLLM cannot compute; use another model"
    if kinds := RECURRENT.intersection(_layer_kinds(folder, config)):
        odd = ", ".join(sorted(kinds))
        return f"{lacks}, and transformers' has layers that vLLM cannot compute ({odd}); use another model"
    return ""


def _why_not_with(found: Implementation, folder: Path, config: Mapping[str, Any], on_cpus: bool) -> str:
    """Return why vLLM cannot compute a model with a class of its own."""
    match found[0]:
        case "qwen2" | "qwen3" if config.get("use_sliding_window") and len(set(_layer_kinds(folder, config))) > 1:
            return (
                "vLLM computes windows (use_sliding_window) in all layers of its family or in none, and "
                "max_window_layers in its config.json leaves some without; use another model"
            )
        case "mamba" | "jamba" if on_cpus:
            return f"{MAMBA_1}; use another model, or hardware: cuda"
        case "nemotron_h" if on_cpus and "moe" in _layer_kinds(folder, config):
            return f"{PLAIN_EXPERTS}; use another model, or hardware: cuda"
    return ""


def _implementation(tables: Mapping[str, Any], name: str) -> Implementation | None:
    """Return the module and class by which vLLM computes an architecture; None: it does not have it."""
    found = next((tables[table][name] for table in (*GENERATING, *OTHERS) if name in tables[table]), None)
    return None if found is None else (str(found[0]), str(found[1]))


def _names(built: Any) -> tuple[str, ...]:
    """Return the names of the classes of a `model_type` in one of transformers' tables."""
    return (built,) if isinstance(built, str) else tuple(built)


def _layer_kinds(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of a model's layers, as config.json lists them or transformers derives them; []: not known."""
    written = text_part(config)
    if listed := written.get("layer_types") or written.get("layers_block_type"):
        return list(listed)
    with contextlib.suppress(Exception):  # not installed, or not a model that it knows
        return list(getattr(transformers_config(folder).get_text_config(), "layer_types", None) or ())
    return []


def _source_of(kind: str, name: str) -> str | None:
    """Return the source of the models of a `model_type` in transformers, if it has that class."""
    if (root := _root("transformers")) is None:
        return None
    folders = [root / "models" / kind.replace("-", "_"), *sorted((root / "models").glob(f"*{kind[:4]}*"))]
    for file in (file for folder in folders for file in folder.glob("modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        if re.search(rf"^class {re.escape(name)}\(", source, re.MULTILINE):
            return source
    return None


def _tables(package: str, file: str) -> dict[str, dict[str, Any]]:
    """Return the tables of constants in a package's module, by name; {}: it is not installed, or has none."""
    root = _root(package)  # asked each time, as a package that is not found now may be found later
    return {} if root is None else _tables_in(root / file)


@lru_cache
def _tables_in(module: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of constants in a module, by name."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            if entries := dict(_entries(node.value)):
                found[node.targets[0].id] = entries
    return found


def _entries(value: ast.expr) -> Iterator[tuple[str, Any]]:
    """Yield the constants of a table, which is a dict, or an OrderedDict of pairs."""
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    pairs: Iterable[Any] = ()
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
    elif isinstance(value, ast.List):
        pairs = (one.elts for one in value.elts if isinstance(one, ast.Tuple) and len(one.elts) == 2)
    for key, one in pairs:
        if key is not None:  # another table's entries
            with contextlib.suppress(ValueError):
                yield ast.literal_eval(key), ast.literal_eval(one)


def _root(package: str) -> Path | None:
    """Return the folder of a package, which is not imported; None: it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a test has put something else in its place
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _has_plugins() -> bool:
    """Return whether others add something to vLLM, such as architectures."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(not point.value.startswith(("streamrl.", "vllm.")) for point in points)
