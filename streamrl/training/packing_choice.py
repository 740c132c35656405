"""The packing of a run: `batch.packing`, with `auto` decided by the proof of `packing_proof.py`. No torch.

The proof is made once for an architecture, these versions of torch and transformers, this code and its kernel for this
CPU; then its result is read from the cache. It runs in a process of its own
(`python -m streamrl.training.packing_choice FOLDER`) unless the caller has imported torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from streamrl.config.run import MODEL_KEY, RunConfig
from streamrl.errors import ErrorCode, UserError
from streamrl.imports import importing
from streamrl.machine.code_hash import code_hash
from streamrl.machine.compiled_c import library_name
from streamrl.machine.first_time import announce
from streamrl.machine.kept_results import keep_text, result_file
from streamrl.machine.model_files import transformers_config
from streamrl.training.packing_ways import PackingKind, PackingProof, PackingWay

KERNEL = Path(__file__).with_name("group_attention.c")
"""Attention over shared prompts on a CPU; without it, torch computes it (`group_attention.py`)."""
LIMIT_S = 300.0
"""Seconds that the proving process may take; importing torch and transformers takes nearly all of them."""


@dataclass(frozen=True)
class Packing:
    """The way in which the trainer computes a batch."""

    kind: PackingKind
    attention: str
    """transformers' name of the attention."""
    why: str
    undivided: str = ""
    """Why several ranks cannot share rows (`trainer.sequence_parallel`); '': they can, as the proof of shared packing
    shows that tokens meet in the attention function alone."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})"


def choose_packing(
    asked: Literal["auto"] | PackingKind, proof: PackingProof, max_context: int, key: str = MODEL_KEY
) -> Packing:
    """Decide how a model is packed.

    Args:
        asked: `batch.packing`.
        proof: what was found for the model's architecture.
        max_context: `model.max_context`.
        key: the model's key in the run file, for errors.

    Raises:
        UserError: nothing is proven right, or what was asked for is proven wrong.
    """
    name = proof.model_type
    if proof.refuted:
        raise UserError(f"{key}: {name} cannot be trained: {proof.refuted}")
    if proof.longest is not None and max_context > proof.longest:
        raise UserError(
            f"model.max_context: {max_context} is more than the {proof.longest} tokens up to which the rotations of "
            f"{name} do not depend on the other rows of a batch; beyond, trainer and generator differ. "
            f"Set at most {proof.longest}"
        )
    if proof.unproven:
        if asked == "separate":
            undivided = f"nothing is proven for {name}"
            return Packing("separate", "eager", f"set by hand; not proven: {proof.unproven}", undivided)
        raise UserError(
            f"batch.packing: {asked}: nothing is proven for {name}, because its architecture {proof.unproven}. "
            "batch.packing: separate trains it with its own attention, unproven"
        )
    shared = [way for way in proof.ways if way.kind == "shared"]
    separate = next((way for way in proof.ways if way.kind == "separate" and not way.differs), None)
    wrong = next((way.differs for way in shared if way.differs), "")
    if asked != "separate" and not wrong:
        figures = max(way.logprob_error for way in shared), max(way.gradient_error for way in shared)
        return Packing("shared", shared[0].attention, f"proven for {name}, {_figures(*figures)}")
    if asked == "shared":
        refused = f"batch.packing: shared is wrong for {name}: {wrong}. Set batch.packing: auto"
        raise UserError(ErrorCode.PACKING.refer(refused))
    if separate is None:
        differs = [way.differs for way in proof.ways if way.kind == "separate"]
        raise UserError(f"{key}: {name} cannot be trained: with its own attention, {differs[-1]}")
    own = f"{separate.attention}, {_figures(separate.logprob_error, separate.gradient_error)}"
    reason = "set by hand" if asked == "separate" else f"shared is wrong for {name}: {wrong}"
    undivided = wrong and f"tokens of {name} meet outside of what attention decides: {wrong}"
    if not undivided and separate.attention == "eager":
        undivided = f"the padded rows of {name} are computed by its eager attention, not by sdpa"
    return Packing("separate", separate.attention, f"{reason}; {own}", undivided)


def decide_packing(run: RunConfig, folder: str, key: str = MODEL_KEY) -> Packing | None:
    """Decide how a run packs the model of a folder; None: this machine has no torch or no transformers,
    so the trainer decides.

    Args:
        run: the run's configuration.
        folder: the model's folder.
        key: the model's key in the run file, for errors.

    Raises:
        UserError: nothing is proven right, or what was asked for is proven wrong.
    """
    try:
        proof = packing_proof(Path(folder))
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    return None if proof is None else choose_packing(run.batch.packing, proof, run.model.max_context, key)


def packing_proof(folder: Path) -> PackingProof | None:
    """Return the proof for the model of a folder, made now or cached; None: torch or transformers is
    not installed.

    Raises:
        UserError: the proof could not be made, for a reason that is not the model's.
    """
    if any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")):
        return None
    path = result_file("packing", _key(folder))
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return _read(path.read_text(encoding="utf-8"))
    announce("proving how groups of this model's architecture can be packed (up to a minute)")
    text = _prove_here(folder) if "torch" in sys.modules else _prove_apart(folder)
    keep_text(path, text)  # an error that was not measured is inf, which is not strict JSON
    return _read(text)


def _read(text: str) -> PackingProof:
    values = json.loads(text)
    return PackingProof(**values | {"ways": tuple(PackingWay(**way) for way in values["ways"])})


def _figures(logprobs: float, gradient: float) -> str:
    return f"log-probabilities within {logprobs:.0e} nats, gradients within {gradient:.0e}"


def _key(folder: Path) -> str:
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    config = (folder / "config.json").read_bytes().decode(errors="replace")
    code = code_hash(Path(__file__).parent)  # it computes a batch and proves it
    facts = json.dumps([versions, code, library_name(KERNEL), config])
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def _prove_here(folder: Path) -> str:
    with importing():
        from streamrl.training.packing_proof import prove

    try:
        config = transformers_config(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
    return json.dumps(asdict(prove(config)))


def _prove_apart(folder: Path) -> str:
    command = [sys.executable, "-m", "streamrl.training.packing_choice", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"the packing of {folder} could not be proven: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise UserError(f"the packing of {folder} could not be proven: {last}")
    return done.stdout.splitlines()[-1]


def main() -> None:
    """Prove the packing of the model in a folder, and print what was found as JSON."""
    try:
        print(_prove_here(Path(sys.argv[1])), flush=True)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
    os._exit(0)  # taking down torch and transformers takes seconds
