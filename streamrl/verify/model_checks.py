"""All checks of a model, in order; later ones are left out where an earlier one refuses the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from streamrl.errors import UserError
from streamrl.training.packing_choice import Packing, packing_proof
from streamrl.verify.findings import Finding
from streamrl.verify.generator_checks import AGAINST, VERSION, check_generator
from streamrl.verify.small_folder import save_small_models
from streamrl.verify.tokenizer_checks import check_tokenizer
from streamrl.verify.training_checks import check_packing, check_settings

SCHEDULES = "schedules"


def verify(folder: Path, full: bool, say: Callable[[str], None]) -> list[Finding]:
    """Check a model.

    Args:
        folder: the model in HF format; `config.json` is enough, unless `full`.
        full: whether vLLM and the trainer are compared with the real weights as well.
        say: called with what is being done.

    Raises:
        UserError: the folder has no configuration that transformers can read.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
    say("packing: small and random, against lone sequences")
    proof = packing_proof(folder)
    assert proof is not None  # transformers needs torch
    found, packing = check_packing(proof)
    findings = [found]
    if packing is not None:
        say("vLLM: log-probabilities, and a weight version")
        of_vllm = _in_vllm(config, folder if full else None, packing)
        findings += of_vllm
        findings.append(_schedules(of_vllm))
        say("settings of the trainer")
        findings += check_settings(config, packing)
    say("tokenizer")
    findings += check_tokenizer(folder, config.get_text_config().vocab_size)
    return findings


def _in_vllm(config: PretrainedConfig, weights: Path | None, packing: Packing) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="streamrl-verify-") as name:
        folder = Path(name)
        if weights is not None:  # the second version is the first: a reload that changes nothing must change nothing
            return check_generator((weights, weights), packing, folder)
        return check_generator(save_small_models(config, folder), packing, folder)


def _schedules(of_vllm: list[Finding]) -> Finding:
    """Say which schedules work: all of them need what vLLM has shown, and nothing else of the model."""
    verdicts = {one.check: one.verdict for one in of_vllm}
    if verdicts[VERSION] == "works" and verdicts[AGAINST] == "works":
        return Finding(SCHEDULES, "works", "all: weights can be replaced between steps and between tokens")
    return Finding(SCHEDULES, "not checked", "they need a generator that takes new weights")
