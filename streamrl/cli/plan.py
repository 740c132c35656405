"""`streamrl plan`: chooses which GPUs of a cluster should train and which generate, and predicts the cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from scheduler.schedule.schedules import KINDS, SEPARATE
from streamrl.errors import UserError
from streamrl.finite_float import FiniteFloat
from streamrl.output_files import check_output

if TYPE_CHECKING:
    from rich.console import Console

    from scheduler.capacity.allocation import PlanObjective
    from scheduler.capacity.placement_plan import Colocated, PlacementPlan, Step
    from scheduler.capacity.problem import Offer, Problem
    from streamrl.planning.planning_inputs import Inputs

DEFAULT = "async"
"""Schedule that is planned for where neither an option nor the run file names one that can be."""


@click.command(name="plan")
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), required=True, help="cluster file (YAML)")
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="run file: model, batch, algorithm, schedule")
@click.option("--model", help="7b, 14b, 32b, 72b ... (Qwen2.5), or a folder with a config.json  [default: 7b]")
@click.option(
    "--lengths",
    help="length limit 5k, 10k, 20k ... (with the paper's distribution), or past rollouts (.parquet, .jsonl, a "
    "folder)  [default: 20k]",
)
@click.option("--samples", type=click.IntRange(1), help="samples per optimizer step  [default: 1024]")
@click.option("--prompt-tokens", type=click.IntRange(0), help="mean prompt length  [default: 512]")
@click.option(
    "--algorithm", type=click.Choice(["ppo", "grpo"]), help="algorithm (ppo also trains a critic)  [default: grpo]"
)
@click.option(
    "--schedule", type=click.Choice(SEPARATE), help=f"schedule of the run  [default: the run file's, else {DEFAULT}]"
)
@click.option("--objective", type=click.Choice(["throughput", "cost"]), default="throughput", show_default=True)
@click.option(
    "--budget", type=FiniteFloat(0, min_open=True), metavar="USD/H", help="upper limit of the cost of GPUs and traffic"
)
@click.option("--delta-ratio", type=FiniteFloat(1), help="compression of weights on links; 1: none  [default: 70]")
@click.option(
    "--acceptance",
    type=FiniteFloat(0, 1),
    help="probability that a drafted token is accepted: instances speculate  [default: they do not]",
)
@click.option(
    "--environment-s",
    type=FiniteFloat(0),
    default=0.0,
    help="seconds for which an environment steps in one sample (a run's environment_s / samples_total)  [default: 0]",
)
@click.option(
    "--environment-processes",
    type=click.IntRange(1),
    help="processes of environments, of all sites  [default: the run file's at each site that generates, else 1]",
)
@click.option("--hardware", type=click.Path(path_type=Path), help="YAML that adds GPU types or changes their figures")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="also write the plans to this file")
def command(
    cluster_file: Path,
    run_file: Path | None,
    schedule: str | None,
    objective: str,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Choose which GPUs of a cluster train and which generate; nothing is started, and no GPU is needed.

    Any GPU of the cluster file may train or generate, whatever pool it is in. The objective throughput minimises the
    step time, then the price of the GPUs for it (under async among steps within 1 %), and releases the others; cost
    minimises the USD per sample. The trainer moves to another site than the cluster file's only if that is more than
    1 % better. Times are predicted from data sheets, not measured: docs/explanation/cost_model.md names every
    assumption. Prices are the cluster file's, else dated defaults.

    \b
    Examples:
      streamrl plan --cluster cluster_configs/heterogeneous.yaml --model 7b --lengths 20k
      streamrl plan --cluster cluster_configs/cross_datacenter.yaml --objective cost --budget 40
      streamrl plan --cluster my.yaml --run my_run.yaml --lengths runs/demo --hardware prices.yaml --json plan.json
    """
    from scheduler.capacity.placement_plan import colocated
    from scheduler.capacity.plan_search import plans
    from streamrl.config.load import load_cluster, load_run
    from streamrl.planning.planning_inputs import gather
    from streamrl.report.terminal import terminal

    if json_file is not None:
        check_output("--json", json_file)
    cluster = load_cluster(cluster_file)
    run = None if run_file is None else load_run(run_file)
    of_run = None if run is None else run.schedule.name
    named = schedule or (of_run if of_run in SEPARATE else None)
    if named is None and of_run is not None:
        click.echo(
            f"the run file's schedule is {of_run}, and a plan that splits the GPUs needs one of {', '.join(SEPARATE)}: "
            f"this one is for {DEFAULT} (--schedule names another)"
        )
    if run is not None and run.model.dtype == "float32":
        click.echo(
            "the run file's model.dtype is float32, and a plan counts bfloat16: the run's weights and KV cache take "
            "twice the memory, its products take longer, and its deltas on links are some fifty times larger "
            "(--delta-ratio); a run with float32 is slower and may not fit"
        )
    inputs = gather(cluster, cluster_file, run, named or DEFAULT, **options)
    aim = cast("PlanObjective", objective)
    try:
        found = plans(inputs.problem, named or DEFAULT, aim)
    except ValueError as error:
        raise UserError(str(error)) from error
    together = colocated(inputs.problem, aim)
    if json_file is not None:  # before anything is printed: a reader that ends early (`| head`) ends the command
        try:
            json_file.write_text(
                json.dumps(_plain(inputs, found, together, objective), indent=1) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise UserError(f"--json {json_file}: {error.strerror or error}") from error
    _show(terminal(), inputs, found, together, objective, "asked for" if named else "default")
    if json_file is not None:
        click.echo(f"plans written to {json_file}")


def _show(
    console: Console,
    inputs: Inputs,
    found: Sequence[PlacementPlan],
    together: Colocated | None,
    objective: str,
    why: str,
) -> None:
    """Print the plans; `why`: where the schedule is from."""
    best, problem = found[0], inputs.problem
    batch = problem.batch
    _say(
        console,
        f"{problem.model.name} ({problem.model.parameters / 1e9:.2f} B weights), {inputs.algorithm}, {batch.samples} "
        f"samples a step, mean {batch.mean_length:.0f} tokens ({inputs.lengths}), prompts {batch.prompt_tokens:.0f}",
    )
    _table(
        console,
        f"split for {objective}, schedule {best.schedule}",
        ("site", "role", "GPU", "GPUs", "replicas x TP", "batch", "share", "USD/h"),
        _split_rows(best),
    )
    _show_stages(console, best, problem.delta_ratio)
    _show_schedules(console, best, problem, together, why)
    _show_choice(console, inputs, found)
    if len(found) > 1:
        columns = ("plan", "step (s)", "samples/s", "USD/h", "USD/1k samples")
        rows = [_step_row(one.chosen, one.text) for one in found[1:]]
        _table(console, "next-best plans", columns, [(*row[:2], *row[4:]) for row in rows])


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _show_stages(console: Console, best: PlacementPlan, delta_ratio: float) -> None:
    """Print how long each stage of a step takes."""
    time = best.split.time
    _table(
        console,
        "stages (predicted)",
        ("stage", "seconds", "of which"),
        [
            ("generation, a batch by itself", f"{best.makespan_s:.1f}", "the longest answers included"),
            ("generation, across steps", f"{best.steady_s:.1f}", "async by rates alone: nobody waits"),
            *_environment_rows(best),
            *_waiting_rows(best),
            (
                "training",
                f"{best.training_s:.1f}",
                f"compute {time.compute_s:.1f}, FSDP traffic beside it {time.communication_s:.1f}, "
                f"optimizer {time.optimizer_s:.2f}; shards of {time.shard}"
                + "".join(f", {name} {value}" for name, value in time.keys.items()),
            ),
            ("weights to the last site", f"{best.transfer_s:.2f}", f"1/{delta_ratio:g} of them over links"),
            ("weights into replicas", f"{best.load_s:.2f}", "generation paused"),
        ],
    )


def _show_schedules(
    console: Console, best: PlacementPlan, problem: Problem, together: Colocated | None, why: str
) -> None:
    """Print what a step takes and costs under each schedule."""
    rows = [_step_row(best.step(name), name + f" ({why})" * (name == best.schedule)) for name in SEPARATE]
    if together is not None:
        offer = problem.offers[together.offer]
        turns = f"colocated, all {together.gpus} {offer.device.name} in {offer.site}"
        rows.append(_step_row(together.step, turns))
    _table(
        console,
        "the same split under each schedule",
        ("schedule", "step (s)", "bubble gen.", "bubble train.", "samples/s", "USD/h", "USD/1k samples"),
        rows,
    )
    if together is not None and together.gpus > problem.offers[together.offer].device.per_machine:
        _say(
            console,
            "colocated is shown to compare: GPUs that take turns need launch.backend: local, which is one machine, of "
            f"{problem.offers[together.offer].device.per_machine} such GPUs",
        )


def _show_choice(console: Console, inputs: Inputs, found: Sequence[PlacementPlan]) -> None:
    """Print the best plan as keys of the cluster file, its price, and what it moves and releases."""
    from streamrl.planning.plan_keys import as_yaml, site_keys

    say = partial(_say, console)
    best, offers, step = found[0], inputs.problem.offers, found[0].chosen
    say("in the cluster file this plan is:")
    for line in as_yaml(site_keys(best, inputs.prices)).splitlines():
        say(f"  {line}")
    say(f"limit: {best.limit}")
    say(
        f"price: {step.usd_per_hour:.2f} USD/h, of which traffic {best.egress_usd * 3600 / step.seconds:.3f}; "
        f"{step.usd_per_1k:.4f} USD per 1,000 samples"
    )
    released = [f"{count} {offers[number].device.name} in {offers[number].site}" for number, count in best.released]
    trainer = offers[best.split.trainer]
    if trainer.site != inputs.trains_now:
        say(f"moved: the cluster file trains in {inputs.trains_now}, this plan in {trainer.site}")
    elif len(found) > 1 and offers[found[1].split.trainer].site != trainer.site and found[1].worth < best.worth:
        say(f"kept in {trainer.site}: {_kept(best, found[1])}")
    say(f"released: {', '.join(released) or 'none'}")
    for text in dict.fromkeys(
        f"price of {offer.device.name} in {offer.site}: {_prices(offer)} ({source})"
        for offer, source in zip(offers, inputs.prices, strict=True)
    ):
        say(text)


def _prices(offer: Offer) -> str:
    """Say what the GPUs of an offer cost."""
    if not offer.tiers:
        return f"{offer.usd_per_hour:g} USD/h"
    each = ", ".join(f"{usd:g} USD/h for {count}" for count, usd in offer.tiers)
    return f"{each}; those that are released are the dearest"


def _kept(best: PlacementPlan, other: PlacementPlan) -> str:
    """Say what a plan that moves the trainer would reach, and why that is not enough."""
    from scheduler.capacity.plan_search import MOVE

    there, (now, moved) = other.problem.offers[other.split.trainer].site, (best.chosen, other.chosen)
    better = "a step more than {:.0%} shorter" if best.objective == "throughput" else "samples more than {:.0%} cheaper"
    return (
        f"training in {there} would take {moved.seconds:.1f} s a step at {moved.usd_per_hour:.2f} USD/h, not "
        f"{now.seconds:.1f} s at {now.usd_per_hour:.2f} USD/h; the trainer moves only for {better.format(MOVE)}"
    )


def _environment_rows(best: PlacementPlan) -> list[tuple[str, str, str]]:
    """Return the row of the environments, if samples are played in some."""
    batch = best.batch
    if not batch.environment_s:
        return []
    longer = best.played_s(best.schedule) - (best.steady_s if KINDS[best.schedule].continuous else best.makespan_s)
    what = f"{batch.environment_s:g} s a sample on {batch.environment_processes} processes"
    return [("environments", f"{batch.stepping_s:.1f}", f"{what}; not hidden behind generation: {longer:.1f}")]


def _waiting_rows(best: PlacementPlan) -> list[tuple[str, str, str]]:
    """Return the row of what a simulated `async` step adds to its stages, if the plan is for `async`."""
    if not KINDS[best.schedule].continuous:
        return []
    waited = best.chosen.seconds - best.least_seconds(best.schedule)
    what = f"tails, groups and staleness, simulated: a step takes {best.chosen.seconds:.1f} s"
    return [("waiting, across steps", f"{waited:.1f}", f"{what}, its groups are {best.steady.staleness:.1f} steps old")]


def _split_rows(best: PlacementPlan) -> list[tuple[str, ...]]:
    offers = best.problem.offers
    home = offers[best.split.trainer]
    gpus = best.split.time.gpus
    price = f"{gpus * best.split.price(offers, best.split.trainer):.2f}"
    time = best.split.time
    spread = f"{time.copies} x " if time.copies > 1 else ""
    spread += f"FSDP {time.shard}" + (f" x TP {time.tensor_parallel}" if time.tensor_parallel > 1 else "")
    spread += f", SP {time.sequence_parallel}" if time.sequence_parallel > 1 else ""
    rows: list[tuple[str, ...]] = [(home.site, "trainer", home.device.name, str(gpus), spread, "", "", price)]
    for one, share in zip(best.split.generation, best.shares, strict=True):
        offer = offers[one.offer]
        shape, price = (
            f"{one.count} x {one.kind.tensor_parallel}",
            f"{one.gpus * best.split.price(offers, one.offer):.2f}",
        )
        where = (offer.site, "generation", offer.device.name, str(one.gpus))
        rows.append((*where, shape, str(one.kind.slots), f"{share:.0%}", price))
    return rows


def _step_row(step: Step, name: str) -> tuple[str, ...]:
    return (
        name,
        f"{step.seconds:.1f}",
        f"{step.generation_bubble:.0%}",
        f"{step.training_bubble:.0%}",
        f"{step.samples_per_s:.2f}",
        f"{step.usd_per_hour:.2f}",
        f"{step.usd_per_1k:.4f}",
    )


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from streamrl.report.terminal import ruled_table

    text_columns = {columns[0], "site", "role", "GPU", "of which"}
    console.print(ruled_table(title, columns, text_columns, rows))


def _plain(
    inputs: Inputs, found: Sequence[PlacementPlan], together: Colocated | None, objective: str
) -> dict[str, Any]:
    """Return the plans as plain values for --json."""
    from streamrl.planning.plan_keys import site_keys

    problem = inputs.problem
    return {
        "model": problem.model.name,
        "parameters": problem.model.parameters,
        "algorithm": inputs.algorithm,
        "objective": objective,
        "lengths": inputs.lengths,
        "samples": problem.batch.samples,
        "offers": [
            {
                "site": offer.site,
                "gpu": offer.device.name,
                "count": offer.count,
                "usd_per_hour": offer.usd_per_hour,
                "prices": [
                    {"gpus": count, "usd_per_hour": usd}
                    for count, usd in offer.tiers or ((offer.count, offer.usd_per_hour),)
                ],
                "price_source": source,
                "figures_source": offer.device.source,
            }
            for offer, source in zip(problem.offers, inputs.prices, strict=True)
        ],
        "plans": [_plain_plan(one) | {"sites": site_keys(one, inputs.prices)} for one in found],
        "colocated": None
        if together is None
        else {
            "site": problem.offers[together.offer].site,
            "gpus": together.gpus,
            "tensor_parallel": together.tensor_parallel,
            "switch_s": together.switch_s,
            **_plain_step(together.step),
        },
    }


def _plain_step(step: Step) -> dict[str, float]:
    return {
        "step_s": step.seconds,
        "generation_bubble": step.generation_bubble,
        "training_bubble": step.training_bubble,
        "samples_per_s": step.samples_per_s,
        "usd_per_hour": step.usd_per_hour,
        "usd_per_1k_samples": step.usd_per_1k,
    }


def _plain_plan(one: PlacementPlan) -> dict[str, Any]:
    offers = one.problem.offers
    trainer = offers[one.split.trainer]
    return {
        "schedule": one.schedule,
        "trainer": {
            "site": trainer.site,
            "gpu": trainer.device.name,
            "gpus": one.split.time.gpus,
            "shard": one.split.time.shard,
            "nodes": one.split.time.nodes,
            "sharding": one.split.time.keys.get("sharding", "full"),
            "tensor_parallel": one.split.time.tensor_parallel,
            "sequence_parallel": one.split.time.sequence_parallel,
        },
        "generation": [
            {
                "site": offers[pool.offer].site,
                "gpu": offers[pool.offer].device.name,
                "replicas": pool.count,
                "tensor_parallel": pool.kind.tensor_parallel,
                "slots": pool.kind.slots,
                "share": share,
            }
            for pool, share in zip(one.split.generation, one.shares, strict=True)
        ],
        "generation_s": one.makespan_s,
        "generation_across_steps_s": one.steady_s,
        "environments_s": one.batch.stepping_s,
        "training_s": one.training_s,
        "weights_s": one.transfer_s,
        "load_s": one.load_s,
        "egress_usd_per_step": one.egress_usd,
        "schedules": {name: _plain_step(one.step(name)) for name in SEPARATE},
        "released": [
            {"site": offers[number].site, "gpu": offers[number].device.name, "gpus": count}
            for number, count in one.released
        ],
        "limit": one.limit,
    }
