"""What the trainer's ranks agree on before they load a model. Collectives."""

from __future__ import annotations

import torch.distributed as dist

from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.training.packing_choice import Packing, decide_packing


def agreed_type(dtype: str) -> str:
    """Return the type that all ranks compute in: the one that each has chosen, or fp32 if they differ."""
    chosen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(chosen, dtype)
    return dtype if len(set(chosen)) == 1 else "float32"


def agreed_packing(run: RunConfig, model_path: str, rows: int = 1) -> Packing:
    """Return how a model is packed (`packing_choice.py`): rank 0 decides for all.

    Args:
        run: the run's configuration.
        model_path: HF folder or id.
        rows: ranks that share each row (`trainer.sequence_parallel`).

    Raises:
        RunFailed: on every rank, if nothing is proven right.
    """
    found: list[Packing | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            found[0] = decide_packing(run, model_path)
        except UserError as error:
            found[0] = str(error)
    dist.broadcast_object_list(found)
    if not isinstance(found[0], Packing):
        raise RunFailed(str(found[0]))
    if rows > 1 and found[0].undivided:
        raise RunFailed(f"trainer.sequence_parallel is {rows}, expected 1 for this model: {found[0].undivided}")
    return found[0]
