"""Keys of a run file or a cluster file that would do nothing, or let a run do nothing, told where a file is read.

The configuration in a run's folder is not asked: it has all keys, and earlier versions began runs with such values. For
the same reason a key with its default value is never told: a file may be copied from such a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.dispatch.registry import POLICIES
from streamrl.config.algorithm import PPOConfig
from streamrl.config.cluster import ClusterConfig, StrictModel
from streamrl.config.mistakes import ConfigProblem, KeyPath, dotted
from streamrl.config.run import RunConfig
from streamrl.config.schedule import PartialRolloutsConfig, TailBatchingConfig
from streamrl.config.weight_sync import FETCHING
from streamrl.surrogates import SURROGATES

UNUSED = {
    "none": (("level", "low", "high"), "truncate or mask"),
    "truncate": (("low",), "mask"),
    "mask": ((), ""),
}
"""Keys of `off_policy` that each correction has no use for, and those that have."""

LIKELIEST_ALONE = 1e-6
"""`sampling.top_p` that the likeliest token has alone: of no vocabulary has it less."""


def unused_keys(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield what a run would not use although it was set to something else than its default.

    The keys in `also` are those that leave it without use.
    """
    yield from _nothing_learned(run)
    yield from _unused_of_algorithm(run)
    yield from _unused_of_length_limit(run)
    yield from _unused_of_decay(run)
    yield from _unused_of_ratio(run)
    yield from _unused_elsewhere(run)
    yield from _unused_of_dispatch(run)
    yield from _unused_after_failures(run)
    yield from _unused_rounds(run)


def _nothing_learned(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield sampling and batches that leave every gradient 0."""
    alone = {"top_k": run.sampling.top_k == 1, "min_p": run.sampling.min_p == 1}
    alone["top_p"] = run.sampling.top_p <= LIKELIEST_ALONE
    for sampler in (name for name, is_so in alone.items() if is_so):
        reason = f"is {getattr(run.sampling, sampler):g}, which leaves only the likeliest token: its log-probability is"
        yield ConfigProblem(("sampling", sampler), f"'sampling.{sampler}' {reason} 0, and nothing is learned")
    samples = run.batch.prompts_per_step * run.batch.samples_per_prompt
    one_token = run.sampling.max_tokens == 1 and not run.agent_tasks
    if isinstance(run.algorithm, PPOConfig) and run.algorithm.whiten_advantages and samples == 1 and one_token:
        reason = (
            "makes every advantage 0: the only token of a step (batch.prompts_per_step, batch.samples_per_prompt and "
            "sampling.max_tokens are 1) is the mean of its step; expected whiten_advantages: false, or a larger batch"
        )
        yield ConfigProblem(("algorithm", "whiten_advantages"), f"'algorithm.whiten_advantages' {reason}")
    if run.algorithm.advantage == "batch" and samples == 1:
        reason = (
            "is 1, as is batch.samples_per_prompt, and advantage: batch compares the samples of a batch: every "
            "advantage would be 0; expected 2 or more of one of them"
        )
        yield ConfigProblem(("batch", "prompts_per_step"), f"'batch.prompts_per_step' {reason}")


def _unused_of_algorithm(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield keys of corrections, of the KL term and of dynamic sampling that have no use."""
    algorithm = run.algorithm
    keys, others = UNUSED[algorithm.off_policy.correction]
    for key in _changed(algorithm.off_policy, keys):
        yield _problem(
            ("algorithm", "off_policy", key),
            ("algorithm", "off_policy", "correction"),
            f"has no use with correction: {algorithm.off_policy.correction}: leave it out, or choose {others}",
        )
    if algorithm.off_policy.correction == "mask" and algorithm.off_policy.low == algorithm.off_policy.high == 1:
        reason = "is 1, as is high, and a mask keeps weights from low to high: expected a lower one, or a higher high"
        yield _problem(("algorithm", "off_policy", "low"), ("algorithm", "off_policy", "high"), reason)
    if not algorithm.needs_reference:
        for key in _changed(algorithm.kl, ("estimator", "placement")):
            reason = "has no use with coef: 0, without a KL term: leave it out, or set coef"
            yield _problem(("algorithm", "kl", key), ("algorithm", "kl", "coef"), reason)
    if not algorithm.dynamic_sampling:
        for key in _changed(algorithm, ("max_replaced",)):
            reason = "has no use without dynamic_sampling: leave it out, or set dynamic_sampling: true"
            yield _problem(("algorithm", key), ("algorithm", "dynamic_sampling"), reason)
    elif not algorithm.most_replaced(prompts := run.batch.prompts_per_step):
        reason = (
            f"is {algorithm.max_replaced:g}, of batch.prompts_per_step {prompts} less than one group: none would be "
            "replaced; expected more, or dynamic_sampling: false"
        )
        yield _problem(("algorithm", "max_replaced"), ("batch", "prompts_per_step"), reason)


def _unused_of_length_limit(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield penalties and masks that would meet every answer."""
    algorithm = run.algorithm
    margin = None if algorithm.overlong is None else algorithm.overlong.margin_tokens
    if margin is not None and margin >= run.sampling.max_tokens:
        reason = (
            f"is {margin}, and sampling.max_tokens {run.sampling.max_tokens}: every token of every answer would be "
            "penalised; expected a margin below sampling.max_tokens"
        )
        yield _problem(("algorithm", "overlong", "margin_tokens"), ("sampling", "max_tokens"), reason)
    if run.sampling.max_tokens == 1 and (algorithm.mask_truncated or (algorithm.overlong and margin is None)):
        key = "mask_truncated" if algorithm.mask_truncated else "overlong"
        what = "no answer with a token of its own would be trained" if algorithm.mask_truncated else "all are penalised"
        reason = f"is 1, which every answer reaches: with algorithm.{key} {what}; expected 2 or more, or no {key}"
        yield _problem(("sampling", "max_tokens"), ("algorithm", key), reason)


def _unused_of_decay(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield what the learning rate's decay has no use for."""
    optimizer = run.optimizer
    if optimizer.decay == "constant":
        for key in _changed(optimizer, ("min_lr_fraction",)):
            reason = "has no use with decay: constant: leave it out, or choose linear, cosine or wsd"
            yield _problem(("optimizer", key), ("optimizer", "decay"), reason)
    elif optimizer.min_lr_fraction == 1:
        reason = f"is 1, with which decay: {optimizer.decay} changes nothing: set it lower, or leave decay out"
        yield _problem(("optimizer", "min_lr_fraction"), ("optimizer", "decay"), reason)


def _unused_rounds(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield rounds that could not carry anything over."""
    match run.schedule.rounds:
        case PartialRolloutsConfig(round_tokens=tokens, over_issue=1) if tokens >= run.sampling.max_tokens:
            key, shorter = (
                "round_tokens",
                f"is {tokens}, and no answer is longer than sampling.max_tokens: set it lower",
            )
        case TailBatchingConfig(over_issue=1):
            key, shorter = "over_issue", "is 1: set it higher"
        case _:
            return
    reason = f"could not carry anything over: 'schedule.rounds.{key}' {shorter}, or leave rounds out"
    yield _problem(("schedule", "rounds"), ("sampling", "max_tokens"), reason)


def unused_cluster_keys(cluster: ClusterConfig) -> Iterable[ConfigProblem]:
    """Yield what would run somewhere else than a cluster file seems to say; `backend: local` says it plainly."""
    for name, site in cluster.sites.items():
        if "backend" not in site.launch.model_fields_set:
            for key in _changed(site.launch, ("address",)):
                reason = "has no use with backend: local, on this machine alone: leave it out, or set backend: ray"
                yield _problem(("sites", name, "launch", key), ("sites", name, "launch", "backend"), reason)


def _unused_of_ratio(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield the choice of a surrogate, and keys of it, where the ratio that it takes is always 1.

    At a ratio of 1 all surrogates with a ratio of each token have the same gradient, whatever their keys. One with a
    ratio of each sequence differs where a correction weighs its tokens.
    """
    algorithm = run.algorithm
    if algorithm.off_policy.ratio_to != "proximal" or run.updates_per_version > 1:
        return
    usual = type(algorithm).model_fields["surrogate"].default
    choice = () if any(SURROGATES[one].by_sequence for one in (algorithm.surrogate, usual)) else ("surrogate",)
    # another surrogate needs other keys
    for key in _changed(algorithm, choice) or _changed(algorithm, SURROGATES[algorithm.surrogate].keys):
        reason = (
            "has no use with off_policy.ratio_to: proximal and one update between publications, where the ratio is "
            "always 1: leave it out, or choose ratio_to: generator, or schedule.sync_every, batch.epochs or "
            "mini_batches: 2 or more"
        )
        updates = ("schedule", "sync_every"), ("batch", "epochs"), ("batch", "mini_batches")
        beside = ("algorithm", "off_policy", "ratio_to"), *updates
        yield ConfigProblem(("algorithm", key), f"'algorithm.{key}' {reason}", beside)


def _unused_elsewhere(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield keys of features that are off (not of speculation, which `streamrl plan` reads all the same)."""
    if not run.elasticity.enabled:
        for key in _changed(run.elasticity, ("patience", "settle", "margin", "min_saving")):
            reason = "has no use without elasticity: leave it out, or set enabled: true"
            yield _problem(("elasticity", key), ("elasticity", "enabled"), reason)
    if run.evaluation is not None and not run.evaluation.samples:
        for key in _changed(run.evaluation, ("temperature",)):
            reason = "has no use with samples: 0, as greedy completions have none: leave it out, or set samples"
            yield _problem(("evaluation", key), ("evaluation", "samples"), reason)
    weights = run.weights
    if not weights.path.fetched:
        for key in _changed(weights, FETCHING):
            reason = (
                f"has no use with backend: {weights.backend}, where nothing is fetched: leave it out, or set stream"
            )
            yield _problem(("weights", key), ("weights", "backend"), reason)
        if run.schedule.rolling:
            reason = f"has no use with weights.backend: {weights.backend}, of which all instances load together"
            reason += ": leave it out, or choose backend: stream"
            yield _problem(("schedule", "rolling"), ("weights", "backend"), reason)
    elif weights.encoding == "raw":
        for key in _changed(weights, ("anchor_every",)):
            reason = "has no use with encoding: raw, without deltas: leave it out, or choose delta"
            yield _problem(("weights", key), ("weights", "encoding"), reason)


def _unused_of_dispatch(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield keys that need lengths to be predicted, or a prompt to have several completions."""
    policy = run.dispatch.policy
    kind = POLICIES.get(policy)
    if run.ranker.path is None and not run.ranker.refit_every:
        nowhere = "refit_every: 0 and no path, where nothing is predicted: leave it out, or set one"
        for key in _changed(run.ranker, ("window",)):
            yield _problem(("ranker", key), ("ranker", "refit_every"), f"has no use with {nowhere}")
        # the turns of episodes are predicted without a ranker
        if kind is not None and not (kind.blind or kind.learns or run.agent_tasks):
            reason = f"is {policy}, which needs predicted lengths, with ranker.{nowhere}"
            yield _problem(("dispatch", "policy"), ("ranker", "refit_every"), reason)
    if kind is not None and kind.learns and run.batch.samples_per_prompt == 1:
        reason = (
            f"is {policy}, which learns from a prompt's other completions, with samples_per_prompt: 1: choose another"
        )
        yield _problem(("dispatch", "policy"), ("batch", "samples_per_prompt"), reason)


def _unused_after_failures(run: RunConfig) -> Iterable[ConfigProblem]:
    """Yield keys of restarts, tries and void rewards that there are none of."""
    if not run.recovery.restarts:
        for key in _changed(run.recovery, ("window_s", "pause_s", "longest_pause_s")):
            reason = "has no use with restarts: 0: leave it out, or allow restarts"
            yield _problem(("recovery", key), ("recovery", "restarts"), reason)
    if run.rewards.attempts == 1:
        for key in _changed(run.rewards, ("retry_pause_s", "longest_pause_s")):
            reason = "has no use with attempts: 1, after which nothing is tried again: leave it out, or set attempts"
            yield _problem(("rewards", key), ("rewards", "attempts"), reason)
    if run.rewards.max_void_rate is None:
        for key in _changed(run.rewards, ("void_window",)):
            reason = "has no use with max_void_rate: null, where nothing is judged: leave it out, or set a rate"
            yield _problem(("rewards", key), ("rewards", "max_void_rate"), reason)


def _changed(section: StrictModel, keys: Iterable[str]) -> list[str]:
    """Return the keys that have another value than their default."""
    return [key for key in keys if getattr(section, key) != type(section).model_fields[key].default]


def _problem(key: KeyPath, beside: KeyPath, reason: str) -> ConfigProblem:
    return ConfigProblem(key, f"'{dotted(key)}' {reason}", (beside,))
