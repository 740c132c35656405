"""The check before an optimizer step that everything is finite, and stays so. A collective: all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from streamrl.protocol.controller_trainer import Refusal
from streamrl.training.learner import AnyLearner


def refusal(
    learners: Sequence[AnyLearner],
    norms: Sequence[float],
    rates: Sequence[float],
    bad_losses: Sequence[str],
    device: torch.device,
) -> Refusal | None:
    """Return what is not finite, or would not be after the update; the same on every rank; None: nothing.

    A good step costs one pass over weights and moments and, with several ranks, the reduction of one number.

    Args:
        learners: policy and critic, after `divide`.
        norms: norm of each learner's gradient.
        rates: learning rate of each learner's update; []: there will be none.
        bad_losses: names of this rank's micro-batches whose loss is not finite.
        device: this rank's device.
    """
    finite = not bad_losses and all(map(math.isfinite, norms))
    updates = zip(learners, norms, rates, strict=True) if rates else ()
    overflow = next((bad for one, norm, rate in updates if (bad := one.overflow(norm, rate))), None)
    flag = torch.tensor(float(not finite or overflow is not None), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    if not flag:
        return None
    damage = next((bad for one in learners if (bad := one.damage())), None)
    loss = Refusal("loss", bad_losses[0]) if bad_losses else None
    gradient = next((bad for one in learners if (bad := one.bad_gradient())), None)
    causes = [damage, loss, gradient, overflow]  # the cause before what follows from it
    of_ranks: list[list[Refusal | None]] = [causes] * dist.get_world_size()
    dist.all_gather_object(of_ranks, causes)
    found = [bad for one_cause in zip(*of_ranks, strict=True) for bad in one_cause if bad is not None]
    # finite entries whose squares overflow in the norm leave no tensor to name
    return found[0] if found else Refusal("gradient", "all weights together")
