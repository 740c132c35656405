"""Find the tokenizer of a run on this machine, to show its token ids as text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.report.live_view import latest_checkpoint

Decoder = Callable[[list[int]], str]


def find_decoder(run_dir: Path, config_text: str | None) -> tuple[Decoder | None, str]:
    """Return a function from token ids to text, and else why there is none, in one sentence.

    The `tokenizers` package suffices; every transformers installation has it, and it loads fast.

    Args:
        run_dir: the run's folder.
        config_text: its `config.yaml`; None: it has none.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "Completions are shown as token counts only: the tokenizers package is not installed."
    for folder in (latest_checkpoint(run_dir), _model_folder(config_text)):
        if folder is not None and (path := folder / "tokenizer.json").is_file():
            return partial(_decode, Tokenizer.from_file(str(path))), ""
    return None, "Completions are not decoded: no tokenizer.json in a checkpoint or in the model's folder."


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def _model_folder(config_text: str | None) -> Path | None:
    """Return the model's folder on this machine by the configuration: a path, or a Hugging Face id in the cache."""
    import yaml

    try:
        config = yaml.safe_load(config_text or "")
        model = config.get("run", config)["model"]["path"]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return None
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "tokenizer.json")
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None
