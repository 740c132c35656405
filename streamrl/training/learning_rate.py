"""Learning-rate schedules: a pure function of the optimizer step, so a resumed run continues where it was.

The position is the number of the step, which is part of every checkpoint, and of the update on its batch. A step that
is refused and tried again keeps its number and its rate; one that is skipped counts. Nothing else is stored.
"""

from __future__ import annotations

import math

from streamrl.config.optimizer import OptimizerConfig


def warm_up(step: int, warmup_steps: int, update: int = 0, updates: int = 1) -> float:
    """Return the factor of a linear warm-up at an update of a step (both 0-based), 1 at its last one.

    It goes on from update to update: with one per step it is 1 / warmup_steps at the first.
    """
    return min(1.0, (step * updates + update + 1) / (warmup_steps * updates)) if warmup_steps else 1.0


def learning_rate(step: int, total_steps: int, config: OptimizerConfig, update: int = 0, updates: int = 1) -> float:
    """Return the learning rate of an update of a step (both 0-based).

    Behind the warm-up, a decay leads from `lr` to `lr * min_lr_fraction` at the last step, also if only that is left;
    a run of a single update has `lr`:

        constant   no decay
        linear     a straight line
        cosine     half a cosine (SGDR without restarts, arXiv 1608.03983, eq. 5)
        wsd        constant, then a straight line over the last `decay_steps` (warm-up, stable, decay: arXiv 2404.06395,
                   section 4; straight: arXiv 2405.18392)

    Args:
        step: the step.
        total_steps: steps of the run; a run that is resumed with more steps decays towards the new end.
        config: the run file's `optimizer`.
        update: the update of the step's batch.
        updates: updates of each step; warm-up and decay go on from each to the next.
    """
    position, warmup_updates = step * updates + update, config.warmup_steps * updates
    if position < warmup_updates:
        return config.lr * warm_up(step, config.warmup_steps, update, updates)
    if config.decay == "constant":
        return config.lr
    last, first = total_steps * updates - 1, warmup_updates
    if config.decay == "wsd":
        first = max(first, last - config.decay_length(total_steps) * updates)
    # with no more than the last update behind a warm-up, which has reached `lr`, that is the decay's end
    progress = min(1.0, max(0.0, (position - first) / (last - first))) if last > first else float(last > 0)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * left)
