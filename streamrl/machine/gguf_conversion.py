"""Converts a 4-bit GGUF file to a bf16 Llama: `python -m streamrl.machine.gguf_conversion FILE TARGET`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, target: Path) -> None:
    """Write the model of a GGUF file in HF format.

    Args:
        gguf: the file; its architecture is Llama's.
        target: folder for config, safetensors in bf16, and tokenizer.
    """
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

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


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
