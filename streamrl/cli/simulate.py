"""`streamrl simulate`: compares dispatch policies on a recorded run or on drawn lengths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scheduler.schedule.schedules import NAMES
from streamrl.errors import UserError
from streamrl.finite_float import FiniteFloat
from streamrl.given_options import given_options
from streamrl.output_files import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scheduler.schedule.rounds import Rounds
    from scheduler.schedule.schedules import Schedule
    from scheduler.simulation.generation_simulator import Outcome, SimulatedInstance
    from scheduler.simulation.stages import PipelineOutcome, Stages
    from streamrl.planning.workload import Workload

OF_ITERATIONS = (
    *("over_issue", "round_tokens", "schedules", "sync_every", "max_age", "max_staleness", "train_rate"),
    *("colocated_train_rate", "colocated_instances", "switch_s", "environment_s", "environment_processes", "reward_s"),
    *("weights_gb", "link_gbit", "link_ms", "trainer_price"),
)
"""Parameters of the command that only --iterations uses."""


@click.command(name="simulate")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Replay a run's folder, a file (.parquet, .jsonl) with prompt and output_length, or a folder of such files, "
    "each as one batch.",
)
@click.option(
    "--lengths",
    default="lognormal:7.6,0.8",
    show_default=True,
    help="Without --trace, distribution of lengths: lognormal:MU,SIGMA, uniform:LOW,HIGH, or constant:N (tokens).",
)
@click.option("--requests", default=1024, show_default=True, type=click.IntRange(1), help="Without --trace: requests.")
@click.option(
    "--limit", default=20_000, show_default=True, type=click.IntRange(1), help="Without --trace: longest length."
)
@click.option("--ranker", type=click.Path(path_type=Path), help="With --trace: ranker file that forecasts lengths.")
@click.option(
    "--noise", default=0.0, show_default=True, type=FiniteFloat(0, 100), help="Error of forecasts (log scale)."
)
@click.option("--instances", default=8, show_default=True, type=click.IntRange(1), help="vLLM instances.")
@click.option(
    "--slots",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Largest batch of an instance; with --device, as far as its memory holds it.",
)
@click.option("--device", default="H800", show_default=True, help="GPU type of the instances (7B model, roofline).")
@click.option("--curve", type=click.Path(path_type=Path), help="Instead of --device: file of `streamrl calibrate`.")
@click.option(
    "--acceptance",
    type=FiniteFloat(0, 1),
    help="Probability that a drafted token is accepted: instances speculate. Default: they do not.",
)
@click.option(
    "--most-drafts", default=8, show_default=True, type=click.IntRange(1), help="With --acceptance: tokens in a step."
)
@click.option("--policy", "policies", multiple=True, help="Policy; may be repeated. Default: all.")
@click.option("--price", default=0.0, type=FiniteFloat(0), help="USD per instance and hour.")
@click.option("--iterations", type=click.IntRange(1), help="Simulate this many whole iterations (see above).")
@click.option("--schedule", "schedules", multiple=True, type=click.Choice(NAMES), help="May be repeated. Default: all.")
@click.option("--max-staleness", default=1, show_default=True, type=click.IntRange(1), help="Limit of async, in steps.")
@click.option("--sync-every", default=1, show_default=True, type=click.IntRange(1), help="Steps between publications.")
@click.option("--over-issue", type=FiniteFloat(1, 1000), help="Also simulate tail batching with this over-issue.")
@click.option("--round-tokens", type=click.IntRange(1), help="Also simulate partial rollouts of this many tokens.")
@click.option("--max-age", type=click.IntRange(0), help="Largest age of groups deferred by rounds, in steps.")
@click.option("--train-rate", type=FiniteFloat(0, min_open=True), metavar="TOKENS/S", help="Rate of the trainer.")
@click.option(
    "--colocated-train-rate",
    type=FiniteFloat(0, min_open=True),
    metavar="TOKENS/S",
    help="Rate of training on all devices; required for colocated.",
)
@click.option("--colocated-instances", type=click.IntRange(1), help="Instances on all devices. Default: --instances.")
@click.option("--switch-s", default=0.0, show_default=True, type=FiniteFloat(0), help="Colocated: seconds to switch.")
@click.option(
    "--weights-gb",
    default=15.2,
    show_default=True,
    type=FiniteFloat(0),
    help="Size of a weight version, 10^9 bytes.",
)
@click.option(
    "--link-gbit",
    default=80.0,
    show_default=True,
    type=FiniteFloat(0, min_open=True),
    help="Bandwidth of the link, 10^9 bits per second.",
)
@click.option("--link-ms", default=0.0, show_default=True, type=FiniteFloat(0), help="Delay of the link.")
@click.option("--reward-s", default=0.0, show_default=True, type=FiniteFloat(0), help="Seconds per reward.")
@click.option(
    "--environment-s",
    default=0.0,
    show_default=True,
    type=FiniteFloat(0),
    help="Seconds for which an environment steps in one sample: a run's environment_s / samples_total.",
)
@click.option(
    "--environment-processes", default=1, show_default=True, type=click.IntRange(1), help="Processes that step."
)
@click.option("--trainer-price", default=0.0, type=FiniteFloat(0), help="USD per hour for the trainer.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("simulation.svg"),
    show_default=True,
    help="Plot; .svg is added to a name without an ending.",
)
def command(
    trace: Path | None,
    lengths: str,
    requests: int,
    limit: int,
    ranker: Path | None,
    noise: float,
    instances: int,
    slots: int,
    device: str,
    curve: Path | None,
    acceptance: float | None,
    most_drafts: int,
    policies: tuple[str, ...],
    price: float,
    iterations: int | None,
    schedules: tuple[str, ...],
    max_staleness: int,
    sync_every: int,
    over_issue: float | None,
    round_tokens: int | None,
    max_age: int | None,
    train_rate: float | None,
    colocated_train_rate: float | None,
    colocated_instances: int | None,
    switch_s: float,
    weights_gb: float,
    link_gbit: float,
    link_ms: float,
    reward_s: float,
    environment_s: float,
    environment_processes: int,
    trainer_price: float,
    seed: int,
    out: Path,
) -> None:
    """Compare dispatch policies, or with --iterations whole schedules, on the same requests, without a GPU.

    Policies see the true lengths, unless --noise or --ranker gives them forecasts. Makespans cover generation alone;
    "saved" is relative to least-loaded, "USD/1k" is per thousand samples.

    With --iterations every step generates, rewards, trains (--train-rate, by one trainer) and sends its weights;
    samples of environments have stepped before they are rewarded (--environment-s). Each schedule runs under each
    policy (default: least-loaded and skew-aware). A bubble is the share of time in which the instances, or the trainer,
    are idle; staleness counts groups by steps. Under colocated both take turns on all devices
    (--colocated-train-rate), and weights cross no link. With --over-issue and --round-tokens sync and stream also run
    in rounds that defer unfinished work: "+tail" issues more groups than it needs; "+partial" parks samples that have
    used up the round's tokens, and issues more only with --over-issue.

    \b
    Examples:
      streamrl simulate --requests 1024 --instances 16 --noise 0.4
      streamrl simulate --trace runs/demo --ranker ranker.lgb --policy least-loaded --policy skew-aware
      streamrl simulate --iterations 10 --train-rate 60000 --schedule stream --schedule async --max-staleness 2
      streamrl simulate --iterations 10 --train-rate 60000 --schedule sync --round-tokens 4096 --max-age 3
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from scheduler.cost.speculative_decoding import Speculation
    from scheduler.dispatch.registry import POLICIES
    from scheduler.simulation.stages import SimulatedLink, Stages
    from streamrl.planning.simulated_fleet import simulated_fleet, slots_in_memory
    from streamrl.planning.workload import draw, replay

    _refuse_conflicts(click.get_current_context().params)
    out = _plot_file(out)
    in_rounds = {"--over-issue": over_issue, "--round-tokens": round_tokens}
    drafts = None if acceptance is None else Speculation(acceptance, most_drafts)

    def fleet_of(count: int) -> list[SimulatedInstance]:
        return simulated_fleet(count, curve, device, held, drafts)

    def held_by(workload: Workload) -> int:
        """Return the slots of an instance, and say where memory decides."""
        if curve is not None:
            return slots
        most = slots_in_memory(device, slots, workload.batches)
        if most < slots:
            click.echo(f"an instance decodes at most {most} of these requests at once, not {slots}: memory of {device}")
        return most

    # rounds issue more than they train, and may have as much again deferred at the end
    batches = 1 if iterations is None else round((iterations + 1) * (over_issue or 1)) + 3
    if iterations is None or train_rate is None:
        workload = replay(trace, ranker, noise, seed) if trace else draw(lengths, requests, limit, noise, seed)
        held = held_by(workload)
        fleet = fleet_of(instances)
        _compare_policies(workload, fleet, list(dict.fromkeys(["least-loaded", *(policies or POLICIES)])), price, out)
    else:
        chosen = _schedules(schedules, max_staleness, sync_every, colocated_train_rate is not None)
        if colocated_instances is not None and colocated_train_rate is None:
            raise UserError("--colocated-instances needs --colocated-train-rate")
        if max_age is not None and not any(in_rounds.values()):
            raise UserError("--max-age needs --over-issue or --round-tokens: it bounds how long rounds defer a group")
        if environment_s and (option := next((name for name, value in in_rounds.items() if value), "")):
            raise UserError(f"{option} does not go with --environment-s: a step of an environment cannot be withdrawn")
        if any(in_rounds.values()) and not any(map(_has_rounds, chosen)):
            option = next(option for option, value in in_rounds.items() if value)
            raise UserError(
                f"{option} goes with sync or stream and weights after every step; "
                f"chosen: {', '.join(schedule.name for schedule in chosen)}, --sync-every {sync_every}"
            )
        workload = replay(trace, ranker, noise, seed) if trace else draw(lengths, requests, limit, noise, seed, batches)
        held = held_by(workload)
        stages = Stages(
            train_rate,
            reward_s=reward_s,
            weights_gb=weights_gb,
            link=SimulatedLink(link_gbit, link_ms / 1e3),
            switch_s=switch_s,
            environment_s=environment_s,
            environment_processes=environment_processes,
        )
        rows = _run_schedules(
            workload,
            (fleet_of(instances), stages),
            (
                fleet_of(colocated_instances or instances),
                replace(stages, train_tokens_s=colocated_train_rate or train_rate),
            ),
            iterations,
            policies or ("least-loaded", "skew-aware"),
            chosen,
            (over_issue, round_tokens, max_age),
        )
        _compare_schedules(rows, workload, instances, price * instances + trainer_price, out)
    click.echo(f"plot written to {out}")


def _refuse_conflicts(params: Mapping[str, Any]) -> None:
    """Refuse parameters of the command that do not go together, whichever schedules are chosen.

    Raises:
        UserError: some do not.
    """
    from scheduler.dispatch.registry import POLICIES

    for name in params["policies"]:
        if name not in POLICIES:
            raise UserError(f"--policy {name}: there is no such policy; expected one of {', '.join(POLICIES)}")
    if params["trace"] is not None and (given := given_options("lengths", "requests", "limit")):
        raise UserError(f"{given[0]} does not go with --trace: the lengths are those of the rollouts")
    if params["curve"] is not None and given_options("device"):
        raise UserError("--device does not go with --curve: the step times are those of the file")
    if params["ranker"] is not None and params["trace"] is None:
        raise UserError("--ranker needs --trace: it predicts from the prompts of a recorded run")
    if params["iterations"] is not None and params["train_rate"] is None:
        raise UserError("--iterations needs --train-rate: the tokens that the trainer works through per second")
    if params["iterations"] is None and (given := given_options(*OF_ITERATIONS)):
        raise UserError(f"{given[0]} needs --iterations: without it only generation is simulated")
    if params["acceptance"] is None and given_options("most_drafts"):
        raise UserError("--most-drafts needs --acceptance: without it instances do not speculate")
    if params["ranker"] is not None and given_options("noise"):
        raise UserError("--noise does not go with --ranker: the forecasts are the ranker's own")


def _plot_file(out: Path) -> Path:
    """Return the file of the plot, an SVG unless its name has another ending; matplotlib would silently add its own.

    Raises:
        UserError: it cannot be written, or its ending is no format of pictures.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    check_output("--out", out)
    if not out.suffix:
        out = out.with_name(f"{out.name}.svg")
        check_output("--out", out)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if out.suffix[1:].lower() not in formats:
        known = ", ".join(f".{ending}" for ending in formats)
        raise UserError(f"--out {out}: {out.suffix} is no format of pictures; expected one of {known}")
    return out


def _compare_policies(
    workload: Workload, fleet: Sequence[SimulatedInstance], names: Sequence[str], price: float, out: Path
) -> None:
    """Simulate and compare generation alone, under each policy."""
    from scheduler.dispatch.registry import make_policy
    from scheduler.simulation.generation_simulator import simulate
    from streamrl.report.terminal import ruled_table, terminal

    outcomes = {
        name: [simulate(make_policy(name, workload.longest), batch, fleet) for batch in workload.batches]
        for name in names
    }
    _plot(outcomes, _draw_running, out)
    total = sum(map(len, workload.batches))
    click.echo(f"{total} requests ({workload.source}) on {len(fleet)} instances")
    spans = {name: sum(outcome.makespan for outcome in some) for name, some in outcomes.items()}
    rows = []
    for name, some in outcomes.items():
        busy = sum(sum(outcome.busy.values()) for outcome in some)
        cost = price * len(fleet) * spans[name] / 3600 / total * 1000
        saved, bubble = 1 - spans[name] / spans["least-loaded"], 1 - busy / (len(fleet) * spans[name])
        rows.append(
            (
                *(name, f"{spans[name]:.1f} s", f"{saved:+.1%}", f"{bubble:.1%}"),
                str(sum(outcome.moves for outcome in some)),
                f"{sum(outcome.tokens for outcome in some) / spans[name]:.0f}",
                f"{cost:.4f}" if price else "-",
            )
        )
    titles = ("policy", "makespan", "saved", "bubble", "moves", "tokens/s", "USD/1k")
    terminal().print(ruled_table("", titles, titles[:1], rows))


def _schedules(names: Sequence[str], max_staleness: int, sync_every: int, colocated: bool) -> list[Schedule]:
    """Return the chosen schedules or, by default, all that the other options allow.

    Raises:
        UserError: a chosen schedule conflicts with the other options.
    """
    from scheduler.schedule.schedules import KINDS, make_schedule

    if "colocated" in names and not colocated:
        raise UserError("--schedule colocated needs --colocated-train-rate: the trainer's tokens/s with all devices")
    if names and colocated and "colocated" not in names:
        raise UserError(f"--colocated-train-rate is for --schedule colocated; chosen: {', '.join(names)}")
    impossible = {
        name
        for name, kind in KINDS.items()
        if (kind.exclusive and not colocated) or (kind.overlaps and not kind.continuous and sync_every > 1)
    }
    made = []
    for name in dict.fromkeys(names or (name for name in NAMES if name not in impossible)):
        try:
            made.append(make_schedule(name, max_staleness if KINDS[name].continuous else None, sync_every))
        except ValueError as error:
            raise UserError(f"--sync-every {sync_every} --max-staleness {max_staleness}: {error}") from error
    return made


def _has_rounds(schedule: Schedule) -> bool:
    """Return whether a run file takes rounds for a schedule with these bounds."""
    return not schedule.max_staleness and not schedule.exclusive


def _rounds(
    batch: int, over_issue: float | None, round_tokens: int | None, max_age: int | None
) -> dict[str, Rounds | None]:
    """Create the rounds by the suffix of their row; the first entry is without rounds."""
    from scheduler.schedule.rounds import PartialRollouts, TailBatching

    made: dict[str, Rounds | None] = {"": None}
    if over_issue:
        made["+tail"] = TailBatching(batch, over_issue, max_age)
    if round_tokens:
        made["+partial"] = PartialRollouts(batch, round_tokens, over_issue or 1.0, max_age)
    return made


def _run_schedules(
    workload: Workload,
    apart: tuple[Sequence[SimulatedInstance], Stages],
    together: tuple[Sequence[SimulatedInstance], Stages],
    iterations: int,
    policies: Sequence[str],
    schedules: Sequence[Schedule],
    rounds: tuple[float | None, int | None, int | None],
) -> dict[tuple[str, str], PipelineOutcome]:
    """Simulate whole iterations; return the outcomes by (schedule, policy).

    Args:
        workload: the requests to train on.
        apart: instances and stages when trainer and generation have devices of their own.
        together: the same when they share all devices.
        iterations: optimizer steps.
        policies: dispatch policies.
        schedules: schedules, each run under each policy.
        rounds: over-issue, tokens and largest age of the rounds in which some schedules run as well.
    """
    from scheduler.dispatch.registry import make_policy, objective_of
    from scheduler.simulation.pipeline import Pipeline

    batch = len({request.group_id for request in workload.batches[0]})
    wanted = iterations * batch
    groups = workload.groups(round((wanted + batch) * (rounds[0] or 1)) + 2 * batch)
    outcomes = {}
    for schedule in schedules:
        fleet, stages = together if schedule.exclusive else apart
        for suffix in _rounds(batch, *rounds) if _has_rounds(schedule) else ("",):
            for policy in policies:
                planner = _rounds(batch, *rounds)[suffix]
                objective = objective_of(schedule.name, stages.train_tokens_s)
                made = make_policy(policy, workload.longest, objective=objective)
                run = Pipeline(made, fleet, stages, schedule, batch, planner)
                outcomes[schedule.name + suffix, policy] = run.run(groups if planner else groups[:wanted], iterations)
    return outcomes


def _compare_schedules(
    outcomes: dict[tuple[str, str], PipelineOutcome], workload: Workload, instances: int, price: float, out: Path
) -> None:
    """Plot the outcomes, then print them; `price`: USD per hour for everything."""
    from streamrl.report.terminal import ruled_table, terminal

    _plot({f"{schedule}, {policy}": outcome for (schedule, policy), outcome in outcomes.items()}, _draw_steps, out)
    first = next(iter(outcomes.values()))
    click.echo(
        f"{len(first.stepped)} iterations of {first.samples // len(first.stepped)} requests ({workload.source}) "
        f"on {instances} instances and one trainer"
    )
    rows = [
        (
            schedule,
            policy,
            f"{outcome.total / len(outcome.stepped):.1f} s",
            f"{outcome.generation_bubble:.1%}",
            f"{outcome.training_bubble:.1%}",
            f"{outcome.samples_per_second:.2f}",
            ", ".join(f"{steps}: {groups}" for steps, groups in outcome.staleness.items()),
            f"{outcome.cost_per_1k(price):.4f}" if price else "-",
        )
        for (schedule, policy), outcome in outcomes.items()
    ]
    titles = ("schedule", "policy", "step", "bubble", "trainer", "samples/s", "staleness", "USD/1k")
    terminal().print(ruled_table("", titles, titles[:2], rows))


def _draw_running(axis: Axes, name: str, some: list[Outcome]) -> None:
    """Plot the number of running requests over time."""
    import numpy as np

    starts = np.cumsum([0.0, *(outcome.makespan for outcome in some[:-1])])
    ends = np.concatenate([start + outcome.ends() for start, outcome in zip(starts, some, strict=True)])
    axis.step(np.sort(ends), np.arange(len(ends))[::-1], where="post", label=name)
    axis.set_ylabel("requests still to finish")


def _draw_steps(axis: Axes, name: str, outcome: PipelineOutcome) -> None:
    """Plot the number of completed steps over time."""
    axis.step([0.0, *outcome.stepped], range(len(outcome.stepped) + 1), where="post", label=name)
    axis.set_ylabel("optimizer steps done")


def _plot(outcomes: dict[str, Any], draw: Any, out: Path) -> None:
    """Write a plot with one line per outcome, drawn by `draw(axis, name, outcome)`.

    It comes before anything is printed: a reader that ends early (`| head`) ends the command.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, outcome in outcomes.items():
        draw(axis, name, outcome)
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)
    axis.legend()
    try:
        figure.savefig(out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error
