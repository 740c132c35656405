"""Find the tokenizer of a run on this machine, to show its token ids as text."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.machine.known_models import KNOWN_MODELS
from streamrl.machine.user_folders import cache_directory
from streamrl.plain_files import read_plain
from streamrl.report.live_view import latest_checkpoint

Decoder = Callable[[list[int]], str]

LARGEST_TOKENIZER = 256 << 20
"""Most bytes that are read of a tokenizer."""


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
        return None, "Tokens are not decoded: install the package that does it with: pip install tokenizers."
    why_not = "no tokenizer.json in a checkpoint or in the model's folder"
    for folder, below in ((latest_checkpoint(run_dir), run_dir), (_model_folder(config_text), None)):
        if folder is None:
            continue
        path = folder / "tokenizer.json"
        path = path if below is not None else path.resolve()  # Hugging Face's cache is made of links
        try:
            return partial(_decode, Tokenizer.from_buffer(read_plain(path, below=below, largest=LARGEST_TOKENIZER))), ""
        except FileNotFoundError:
            continue
        except Exception as error:  # of a file that is no tokenizer the package raises plain exceptions
            why_not = str(error)
    return None, f"Completions are not decoded: {why_not}."


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def _model_folder(config_text: str | None) -> Path | None:
    """Return the model's folder on this machine by the configuration: a path, a known name or a cached hub id."""
    import yaml

    try:
        config = yaml.safe_load(config_text or "")
        model = config.get("run", config)["model"]["path"]
        known = model in KNOWN_MODELS
        folder = cache_directory() / "models" / model if known else Path(os.path.expanduser(model))
        if folder.is_dir():
            return folder
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, OSError, RecursionError, UserError):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "tokenizer.json")
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None
