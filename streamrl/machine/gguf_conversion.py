"""Converts a 4-bit GGUF file to a bf16 Llama: `python -m streamrl.machine.gguf_conversion FILE TARGET`."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from streamrl.imports import importing

MAGIC = b"GGUF"
"""First bytes of each such file."""


def convert(gguf: Path, target: Path) -> None:
    """Write the model of a GGUF file in HF format.

    Args:
        gguf: the file; its architecture is Llama's.
        target: folder for config, safetensors in bf16, and tokenizer.

    Raises:
        ValueError: it is no such file.
    """
    with gguf.open("rb") as file:  # before the imports, which take seconds
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{gguf.name} does not begin as a GGUF file")
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    with importing():
        import gguf as gguf_library
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # transformers parses the whole file four times, and makes the table of names for every module anew
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf_library, name, functools.cache(getattr(gguf_library, name)))
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the copy below is not quantized
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(source.to(torch.bfloat16).state_dict(), assign=True)
    model.tie_weights()
    model.config.name_or_path = ""
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # taking down torch and transformers takes seconds
