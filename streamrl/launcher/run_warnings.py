"""What a run file asks for that may train worse than its author expects; nothing here depends on a machine."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.config.algorithm import PPOConfig
from streamrl.config.run import RunConfig
from streamrl.config.schedule import staleness_limit
from streamrl.config.speculation import SpeculationConfig
from streamrl.surrogates import SURROGATES


def run_warnings(run: RunConfig) -> Iterable[str]:
    """Say where samples of other weights count as the trainer's, and what is never reached, published or drafted."""
    yield from _about_staleness(run)
    yield from _about_eight_bits(run)
    default = SpeculationConfig.model_fields["most_tokens"].default
    if run.speculation.method == "none" and run.speculation.most_tokens != default:
        yield (
            f"speculation.most_tokens is {run.speculation.most_tokens}, and nothing is drafted with method: none: "
            "choose ngram or auto, or leave it out"
        )
    if run.schedule.sync_every > run.steps:
        yield (
            f"schedule.sync_every is {run.schedule.sync_every}, and the run has {run.steps} steps: all of them train "
            "on samples of the initial weights"
        )
    if run.optimizer.warmup_steps > run.steps:
        yield _never_reached("optimizer", run.optimizer.warmup_steps, run.steps)
    elif run.optimizer.warmup_steps == run.steps and run.optimizer.decay != "constant":
        yield (
            f"optimizer.decay: {run.optimizer.decay} never begins: optimizer.warmup_steps is as many as the run has "
            f"steps, {run.steps}"
        )
    elif run.steps * run.batch.updates == 1 and run.optimizer.decay != "constant":
        yield f"optimizer.decay: {run.optimizer.decay} never begins: the run has a single update, with optimizer.lr"
    if isinstance(run.algorithm, PPOConfig) and run.algorithm.critic.warmup_steps > run.steps:
        yield _never_reached("algorithm.critic", run.algorithm.critic.warmup_steps, run.steps)


def _about_staleness(run: RunConfig) -> Iterable[str]:
    """Say that samples may be of weights older than the last published, and that nothing in the loss sees it."""
    limit = staleness_limit(run.schedule)
    newest_only = limit is not None and limit < run.schedule.sync_every
    if newest_only or (found := _blind_to_generator(run)) is None:
        return
    blind, remedy = found
    kind = run.schedule.name if run.schedule.rounds is None else f"{run.schedule.name} with rounds"
    yield (
        f"schedule {kind} may train on samples of older weights, and {blind} without a correction takes them for new "
        f"ones: {remedy} weighs for the difference"
    )


def _about_eight_bits(run: RunConfig) -> Iterable[str]:
    """Say that instances get weights of 8 bits, and that nothing in the loss sees it.

    `generation.compute` is refused without a correction; runs with these weights began without one.
    """
    sent = run.weights.generation_dtype
    if sent != "same" and (found := _blind_to_generator(run)) is not None:
        blind, remedy = found
        yield (
            f"weights.generation_dtype: {sent} samples from weights that are not quite the trainer's, and {blind} "
            f"without a correction takes them for the same: {remedy} weighs for the difference"
        )


def _blind_to_generator(run: RunConfig) -> tuple[str, str] | None:
    """Return the key by which the loss does not see what a sample's probability was, and what would.

    None: it sees it.
    """
    options = run.algorithm.off_policy
    if options.correction != "none":
        return None
    if not SURROGATES[run.algorithm.surrogate].has_ratio:
        return f"algorithm.surrogate: {run.algorithm.surrogate}", "off_policy.correction: truncate"
    if options.ratio_to == "proximal":
        return "off_policy.ratio_to: proximal", "off_policy.correction: truncate, or ratio_to: generator,"
    return None


def _never_reached(section: str, warmup_steps: int, steps: int) -> str:
    return f"{section}.lr is never reached: {section}.warmup_steps is {warmup_steps}, and the run has {steps} steps"
