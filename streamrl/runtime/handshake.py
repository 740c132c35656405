"""The handshake between sites: a site is admitted only if its configuration files match, and its model's tokenizer.

The canary compares log-probabilities of tokens that are given. So it does not see where a site's copy of the model ends
its answers at other tokens, or puts other tokens around a conversation: these are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blake3 import blake3

from scheduler.cost.model_shapes import text_part
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode
from streamrl.machine.model_files import read_config, resolve_model

OWN_RUN_KEYS = ("name", "steps", "ranker.path", "model.path")
"""Keys of the run file that may differ between sites: local paths, and what only the trainer's site uses."""
OWN_CLUSTER_KEYS = ("security.keys", "emulation")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
MOST_NAMED = 5


def agreement(cluster: ClusterConfig, run: RunConfig) -> dict[str, Any]:
    """Return what a site sends with its hello: flat keys and plain values."""
    values = {
        **_flat("cluster", cluster.model_dump(mode="json"), OWN_CLUSTER_KEYS),
        **_flat("run", run.model_dump(mode="json"), OWN_RUN_KEYS),
        "streamrl version": version("streamrl"),
    }
    folder = Path(resolve_model(run.model.path))
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            values[f"model's {name} (BLAKE3)"] = _hash((folder / name).read_bytes())
    return values | _ends_and_template(folder)


def _ends_and_template(folder: Path) -> dict[str, Any]:
    """Return what ends a model's answers, and its chat template: by content, whatever else the files say."""
    tokenizer, name = read_config(folder, "tokenizer_config.json"), "generation_config.json"
    generated = (folder / name).exists()
    config = read_config(folder, name) if generated else read_config(folder)
    ends, last = config.get("eos_token_id"), tokenizer.get("eos_token")
    if ends is None and not generated:
        ends = text_part(config).get("eos_token_id")
    ids = sorted(str(one) for one in (ends if isinstance(ends, list) else [ends]) if one is not None)
    template = tokenizer.get("chat_template")
    if (own := folder / "chat_template.jinja").is_file():  # takes the place of the other
        template = own.read_text(encoding="utf-8")
    plain = template.strip() if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return {
        "model's end tokens": ", ".join(ids),
        "model's eos_token": str(last.get("content") if isinstance(last, dict) else last),
        "model's chat template (BLAKE3)": _hash(plain.encode()) if template else None,
    }


def _hash(content: bytes) -> str:
    return blake3(content).hexdigest()[:16]


def disagreement(own: Mapping[str, Any], other: object, site: str, other_site: str) -> str | None:
    """Describe the first differences between two sites' agreements; None if they are equal.

    It is read at either site, so it names both.

    Args:
        own: the agreement of the site that compares.
        other: what the other site sent, not checked yet: anything that is not a dict is a disagreement.
        site: name of the site that compares.
        other_site: name of the other one.
    """
    if not isinstance(other, dict):
        return "it does not say what it was started with"
    differing = [key for key in sorted(own.keys() | other.keys()) if own.get(key) != other.get(key)]
    if not differing:
        return None
    named = [
        f"{key} is {other.get(key)!r} at {other_site} and {own.get(key)!r} at {site}" for key in differing[:MOST_NAMED]
    ]
    more = f"; and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
    return ErrorCode.SITES.refer(f"it was started with other files: {'; '.join(named)}{more}")


def _flat(prefix: str, value: Any, left_out: tuple[str, ...]) -> dict[str, Any]:
    return {
        f"{prefix} {path}": leaf
        for path, leaf in _leaves(value, "")
        if not any(path == key or path.startswith(f"{key}.") for key in left_out)
    }


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
