"""What the trainer's ranks agree on before they load a model. Collectives."""

from __future__ import annotations

import time

import torch.distributed as dist

from streamrl.config.run import MODEL_KEY, RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.run_dir.checkpoints import LOOK_S, SEEN_S, CheckpointFolder
from streamrl.training.packing_choice import Packing, decide_packing


def agreed_type(dtype: str) -> str:
    """Return the type that all ranks compute in: the one that each has chosen, or fp32 if they differ."""
    chosen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(chosen, dtype)
    return dtype if len(set(chosen)) == 1 else "float32"


def agreed_checkpoint(folder: CheckpointFolder) -> int | None:
    """Return the step of the newest checkpoint, which rank 0 chooses for all; None: there is none.

    Ranks of other nodes may see a new folder later, where it is shared over a network: they wait for it.

    Raises:
        RunFailed: on a rank that does not see that checkpoint within `SEEN_S`.
    """
    found: list[int | None] = [folder.latest() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    (step,) = found
    deadline = time.monotonic() + SEEN_S
    while step is not None and not folder.has(step):
        if time.monotonic() > deadline:
            raise RunFailed(
                f"rank {dist.get_rank()} does not see the checkpoint of step {step} in {folder.directory} within "
                f"{SEEN_S:.0f} s, and rank 0 loads it: all nodes of the trainer need the run's folder"
            )
        time.sleep(LOOK_S)
    return step


def agreed_packing(run: RunConfig, model_path: str, rows: int, key: str = MODEL_KEY) -> Packing:
    """Return how a model is packed (`packing_choice.py`): rank 0 decides for all.

    Args:
        run: the run's configuration.
        model_path: HF folder or id.
        rows: ranks that share each row (`trainer.sequence_parallel`).
        key: the model's key in the run file, for errors.

    Raises:
        RunFailed: on every rank, if nothing is proven right.
    """
    found: list[Packing | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            found[0] = decide_packing(run, model_path, key)
        except UserError as error:
            found[0] = str(error)
    dist.broadcast_object_list(found)
    if not isinstance(found[0], Packing):
        raise RunFailed(str(found[0]))
    if rows > 1 and found[0].undivided:
        raise RunFailed(f"trainer.sequence_parallel is {rows}, expected 1 for this model: {found[0].undivided}")
    return found[0]
