"""All checks of a model, in order; later ones are left out where an earlier one refuses the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from streamrl.errors import UserError
from streamrl.generation.instance.architectures import no_architecture
from streamrl.generation.instance.engine_config import lacks_heads_on_cpus
from streamrl.machine.model_files import read_config, transformers_config
from streamrl.scratch_folders import ScratchFolder
from streamrl.training.packing_choice import Packing, packing_proof
from streamrl.verify.findings import Finding
from streamrl.verify.generator_checks import check_generators
from streamrl.verify.generator_order import Order
from streamrl.verify.kept_comparison import keep_comparison
from streamrl.verify.small_folder import small_order
from streamrl.verify.tokenizer_checks import check_tokenizer
from streamrl.verify.training_checks import check_packing, check_settings


def verify(
    folder: Path, full: bool, say: Callable[[str], None], variables: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Check a model.

    Args:
        folder: the model in HF format; `config.json` is enough, unless `full`.
        full: whether vLLM and the trainer are compared with the real weights as well.
        say: called with what is being done.
        variables: variables of the chat template (`model.chat_template_kwargs`).

    Raises:
        UserError: the folder has no configuration that transformers can read.
    """
    try:
        config: PretrainedConfig = transformers_config(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
    say("packing: small and random, against lone sequences")
    proof = packing_proof(folder)
    assert proof is not None  # transformers needs torch
    found, packing = check_packing(proof)
    findings = [found]
    if packing is not None:
        say("vLLM: log-probabilities, and new weights in fp32, in 8 bits and between tokens")
        in_vllm = _in_vllm(config, folder if full else None, packing)
        if not full:  # of the real weights, which others of this architecture do not have
            keep_comparison(folder, in_vllm)
        findings += in_vllm
        findings += [check_architecture(folder), check_heads(folder)]
        say("settings of the trainer")
        findings += check_settings(config, packing)
    say("tokenizer")
    findings += check_tokenizer(folder, config.get_text_config().vocab_size, variables)
    return findings


def check_architecture(folder: Path) -> Finding:
    """Check that vLLM has the architecture that config.json names; the small model names its own."""
    lacks = no_architecture(folder, on_cpus=False)
    return Finding("architecture in vLLM", "refused" if lacks else "works", lacks or "generates, by vLLM's source")


def check_heads(folder: Path) -> Finding:
    """Check that vLLM has attention on CPUs for the heads of a model; the small one has heads of another size."""
    lacks = lacks_heads_on_cpus(str(folder), read_config(folder))
    return Finding(
        "heads on CPUs", "refused" if lacks else "works", lacks or "of no size that vLLM lacks", optional=True
    )


def _in_vllm(config: PretrainedConfig, weights: Path | None, packing: Packing) -> list[Finding]:
    with ScratchFolder() as folder:
        if weights is None:
            order = small_order(config, packing, folder)
        else:  # the second version is the first: a reload that changes nothing must change nothing
            order = Order((str(weights), str(weights)), packing.attention, str(folder), codes=(), in_int8=False)
        return check_generators([order])[0]
