"""Build a planning problem from files and options: GPUs and prices, links, model, lengths. No torch, no vllm."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import ErrorCode, UserError, why_unusable

if TYPE_CHECKING:
    import numpy as np

    from scheduler.capacity.problem import Offer, Problem, Route
    from scheduler.cost.hardware import Device
    from scheduler.cost.model_shapes import Transformer
    from streamrl.config.cluster import ClusterConfig, TrainerPool
    from streamrl.config.run import RunConfig
from streamrl.config.schedule import ContinuousSchedule

PAPER_TAIL, PAPER_MODE, PAPER_SPREAD = 0.12, 2200.0, 0.45
"""Share of the tail (from 4,000 tokens), and median and spread of log length of the other answers.

They imitate the lengths in StreamRL (arXiv 2504.15930): a mode near 2K and a thin flat tail to 20K. The values are
assumptions; only the shape is published.
"""
PAPER_LIMIT, PAPER_DRAWS = 20_000, 8192
"""Longest answer in tokens, and number of lengths drawn."""
SCALED = re.compile(r"(\d+(?:\.\d+)?)([kK]?)")
"""`--lengths` with the paper's shape: the longest answer."""
SAMPLES, PROMPT_TOKENS = 1024, 512
"""Samples of the paper's batch, and the assumed length of its prompts."""


@dataclass(frozen=True)
class Inputs:
    """A planning problem, and the sources of its figures."""

    problem: Problem
    lengths: str
    """Source of the lengths."""
    algorithm: str
    prices: tuple[str, ...]
    """Source of each offer's price."""
    trains_now: str
    """The site that trains in the cluster file."""


def load_devices(path: Path | None) -> dict[str, Device]:
    """Return the catalogue of devices, overridden by a user's file.

    Raises:
        UserError: the file cannot be read or is wrong.
    """
    from scheduler.cost.hardware import devices_from, known_devices
    from streamrl.config.load import ConfigError, load_plain

    if path is None:
        return known_devices()
    try:
        values = load_plain(path)
    except ConfigError as error:
        raise UserError(f"--hardware {error}") from error
    try:
        return known_devices(devices_from(values))
    except (ValueError, TypeError) as error:
        raise UserError(f"--hardware {path}: {error}") from error


def offers_of(
    cluster: ClusterConfig, devices: dict[str, Device], cluster_file: Path, in_turns: bool = False
) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    """Return all GPUs of the cluster file by site and type, whatever their pool and price, and the prices' sources.

    A `max_batch` that the file states limits replicas on all GPUs of that type, wherever they are, to the largest one
    stated: what a GPU can do does not depend on the pool that it is in. Where none is stated, memory is the limit.

    Args:
        cluster: the cluster file's content.
        devices: known types of GPUs.
        cluster_file: its path, for errors.
        in_turns: whether the trainer's GPUs of a site are those of its pools of the same type, which take turns.

    Raises:
        UserError: an unknown GPU type or none, or a price that is missing or zero.
    """
    from scheduler.capacity.problem import Offer
    from scheduler.cost.hardware import CPU, device
    from streamrl.config.cluster import GenerationPool
    from streamrl.planning.plan_keys import STATED

    # of each type at a site: GPUs and sources by price; 0.3 / 3 and 0.1 are one price
    counts: dict[tuple[str, str], dict[float, int]] = {}
    sources: dict[tuple[str, str], dict[str, None]] = {}
    slots: dict[str, int] = {}
    for site, entry in cluster.sites.items():
        pools: list[tuple[str, TrainerPool | GenerationPool, int, int]] = []
        pools += [(f"pool {p.name}", p, p.most_replicas, p.gpus_per_replica) for p in entry.generation]
        if entry.trainer is not None:
            pools.insert(len(pools) if in_turns else 0, ("trainer", entry.trainer, entry.trainer.ranks, 1))
        generate: Counter[str] = Counter()
        for what, pool, members, each in pools:
            try:
                found = device(pool.gpu, devices)
            except ValueError as error:
                unknown = f"{cluster_file}: site {site}, {what}: {error}; --hardware FILE adds types"
                raise UserError(ErrorCode.INSTALLATION.refer(unknown)) from error
            if found.name == CPU:
                if cluster.hardware == "cuda":
                    its = f"{cluster_file}: site {site}, {what}: gpu"
                    raise UserError(f"{its} is 'cpu' with hardware: cuda; expected the GPU type, such as H100")
                each *= pool.threads
            if "price_per_hour" in pool.model_fields_set:
                if pool.price_per_hour <= 0:
                    raise UserError(
                        f"{cluster_file}: site {site}, {what}: price_per_hour is {pool.price_per_hour:g}; a plan needs "
                        "prices above 0 (without the key, the catalogue's default is taken)"
                    )
                usd, source = pool.price_per_hour / each, STATED
            elif found.price is not None:
                usd, source = found.price.usd_per_hour, f"default of {found.price.date}: {found.price.source}"
            else:
                raise UserError(
                    f"{cluster_file}: site {site}, {what}: no price_per_hour, and {found.name} has no default; "
                    f"give one there, or {found.name}: {{usd_per_hour: ...}} in --hardware FILE"
                )
            key, count = (site, found.name), members * each
            if isinstance(pool, GenerationPool):
                generate[found.name] += count
                if "max_batch" in pool.model_fields_set:
                    slots[found.name] = max(pool.max_batch, slots.get(found.name, 0))
            elif in_turns:
                count = max(0, count - generate[found.name])
            if count:
                tiers = counts.setdefault(key, {})
                usd = next((price for price in tiers if math.isclose(price, usd)), usd)
                tiers[usd] = tiers.get(usd, 0) + count
                sources.setdefault(key, {})[source] = None
    offers = [
        Offer.at_prices(site, devices[gpu], ((count, usd) for usd, count in tiers.items()), slots.get(gpu))
        for (site, gpu), tiers in counts.items()
    ]
    return tuple(offers), tuple(" and ".join(sources[key]) for key in counts)


def routes_of(cluster: ClusterConfig) -> tuple[tuple[frozenset[str], Route], ...]:
    """Return the cluster's links as routes."""
    from scheduler.capacity.problem import Route

    return tuple(
        (frozenset(link.between), Route(link.bytes_per_s, link.rtt_s, link.price_per_gb, link.weight_share))
        for link in cluster.links
    )


def find_model(name: str, key: str = "--model") -> Transformer:
    """Return a model from the table, from a folder with a config.json, or from the hub.

    Args:
        name: what the user gives: a name of the table, a folder or its config.json, or a hub id.
        key: option or key with which.

    Raises:
        UserError: there is no such model, or its file cannot be used.
    """
    from scheduler.cost.model_shapes import MODELS, Transformer, uncounted
    from streamrl.machine.model_files import HUB_ID, hub_config

    plain = re.sub(r"^(qwen/)?(qwen2\.5-)?|^huggingfacetb/|-instruct$", "", name.lower())
    if plain in MODELS:
        return MODELS[plain]
    folder = Path(name).expanduser()
    path = folder / "config.json" if folder.is_dir() else folder
    if not path.is_file() and HUB_ID.match(name) and not folder.parent.is_dir():
        path = hub_config(name) or path
    if path.is_file():
        own = name if HUB_ID.match(name) and not folder.exists() else path.parent.name or name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{key} {name}: {path}: {why_unusable(error)}; expected a model's config.json") from error
        try:
            shape = Transformer.from_config(own, values)
        except ValueError as error:
            raise UserError(f"{key} {name}: {path}: {error}") from error
        if other := uncounted(values):
            raise UserError(f"{key} {name}: {path}: this model has {other}, which the cost model does not count")
        return shape
    near = difflib.get_close_matches(plain, MODELS, n=2, cutoff=0.5)
    hint = f", did you mean {' or '.join(near)}?" if near else ""
    known = f"{', '.join(MODELS)}, a folder with a config.json, or a hub id whose config.json is here or can be fetched"
    raise UserError(f"{key} {name}: no such model{hint}; known: {known}")


def find_lengths(text: str) -> tuple[np.ndarray, float, str]:
    """Return answer lengths [n], the longest that must fit, and their source.

    Args:
        text: the longest answer, such as 20k or 4096 (the paper's shape, scaled to it), or files of past rollouts.

    Raises:
        UserError: `text` is neither, or there is nothing usable.
    """
    import numpy as np

    if scaled := SCALED.fullmatch(text):
        limit = float(scaled[1]) * (1000 if scaled[2] else 1)
        if limit < 1:
            raise UserError(f"--lengths {text}: the longest answer needs a token or more")
        rng = np.random.default_rng(0)
        body = rng.lognormal(np.log(PAPER_MODE), PAPER_SPREAD, PAPER_DRAWS)
        tail = rng.uniform(4000, PAPER_LIMIT, PAPER_DRAWS)
        drawn = np.where(rng.random(PAPER_DRAWS) < PAPER_TAIL, tail, body)
        values = np.clip(drawn, 1, PAPER_LIMIT) * limit / PAPER_LIMIT
        return np.maximum(values, 1.0), limit, f"the paper's shape, scaled to {limit:.0f} tokens"
    from ranker.data import read_rollouts
    from ranker.errors import RankerError
    from streamrl.planning.workload import open_found

    try:
        rollouts = read_rollouts([text], open_found)
    except RankerError as error:
        raise UserError(f"--lengths {text}: expected the longest answer, like 20k, or rollouts: {error}") from error
    values = np.asarray(rollouts.output_length, dtype=np.float64)
    return values, float(values.max(initial=0.0)), f"{len(rollouts)} past rollouts in {text}"


def gather(
    cluster: ClusterConfig,
    cluster_file: Path,
    run: RunConfig | None,
    schedule: str,
    model: str | None,
    lengths: str | None,
    samples: int | None,
    prompt_tokens: int | None,
    algorithm: str | None,
    hardware: Path | None,
    budget: float | None,
    delta_ratio: float | None,
    acceptance: float | None,
    environment_s: float,
    environment_processes: int | None,
) -> Inputs:
    """Assemble the problem; options override the run file, and that overrides the paper's workload.

    Raises:
        UserError: something is missing or wrong.
    """
    from scheduler.capacity.problem import DELTA_RATIO, Problem
    from scheduler.cost.generation_cost import Batch
    from scheduler.cost.speculative_decoding import Speculation
    from scheduler.cost.trainer_work import GRPO, PPO
    from streamrl.config.speculation import SpeculationConfig

    devices = load_devices(hardware)
    offers, prices = offers_of(cluster, devices, cluster_file, run is not None and run.schedule.exclusive)
    shape = find_model(run.model.path, "model.path") if run and not model else find_model(model or "7b")
    if samples is None:
        samples = run.batch.prompts_per_step * run.batch.samples_per_prompt if run else SAMPLES
    if prompt_tokens is None:
        prompt_tokens = min(PROMPT_TOKENS, run.model.max_context - run.sampling.max_tokens) if run else PROMPT_TOKENS
    values, longest, source = find_lengths(lengths or (str(run.sampling.max_tokens) if run else "20k"))
    if run is not None and lengths and not SCALED.fullmatch(lengths):
        values, source = _cut(values, source, run)
    name = algorithm or (run.algorithm.name if run is not None else "grpo")
    work = PPO if name == "ppo" else GRPO
    sync_every = 1
    if run is not None:
        from streamrl.runtime.training_work import work_of

        work = work_of(run, algorithm)
        # launch refuses a trainer that does not hold a sample of the whole context, whatever the prompts' mean
        longest = float(max(run.sampling.max_tokens, run.model.max_context - prompt_tokens))
        if run.schedule.name == schedule:
            sync_every = run.schedule.sync_every
    if delta_ratio is None:
        delta_ratio = 1.0 if run is not None and run.weights.encoding == "raw" else DELTA_RATIO
    try:
        group = run.batch.samples_per_prompt if run else 1
        staleness = run.schedule.max_staleness if run and isinstance(run.schedule, ContinuousSchedule) else 1
        batch = Batch.of(values, samples, float(prompt_tokens), longest, group, staleness)
        if acceptance is not None:
            most = run.speculation.most_tokens if run else SpeculationConfig().most_tokens
            batch = replace(batch, speculation=Speculation(acceptance, most))
        of_run = sum(use.processes for use in run.environments) if run else 0
        batch = replace(batch, environment_s=environment_s, environment_processes=environment_processes or 1)
        problem = Problem(
            *(shape, batch, work, offers, routes_of(cluster)),
            *(math.inf if budget is None else budget, delta_ratio, cluster.trainer_site),
            sync_every=sync_every,
            site_processes=of_run or None if environment_processes is None else None,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return Inputs(problem, source, name, prices, cluster.trainer_site)


def _cut(values: np.ndarray, source: str, run: RunConfig) -> tuple[np.ndarray, str]:
    """Return past lengths and their source, cut to what the run can generate; an agent's have several completions."""
    import numpy as np

    most = run.sampling.max_tokens
    over = int((values > most).sum())
    if not over or run.agent_tasks:
        return values, source
    return np.minimum(values, most), f"{source}, {over} of them cut at the run's max_tokens, {most}"
