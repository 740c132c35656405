"""Which GPUs train and which generate: against every possible split, and properties that must hold for any."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from scheduler.capacity import allocation
from scheduler.capacity.allocation import COARSE, FINE, Allocator, PlanObjective, Replicas, Split, following_seconds
from scheduler.capacity.placement_plan import colocated, evaluate
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost import generation_cost
from scheduler.cost.decode import replica_ends
from scheduler.cost.generation_cost import Batch, replica_kind, requests_of_share, slots_of
from scheduler.cost.hardware import device, tensor_parallel_degrees
from scheduler.cost.model_shapes import MODELS, Transformer
from scheduler.cost.speculative_decoding import Speculation, best_drafts
from scheduler.cost.trainer_work import GRPO, PPO, TrainingWork
from scheduler.cost.training_cost import TrainerTime
from scheduler.dispatch.baselines import RoundRobin
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

MODEL = MODELS["1.5b"]
LENGTHS = np.random.default_rng(0).lognormal(6.5, 0.8, 2000)
BATCH = Batch.of(LENGTHS, 256, 200)
LINK = Route(10e9 / 8, 0.01, 0.02)


def test_samples_cost_their_bytes_on_a_link() -> None:
    assert problem(offer("a", "H800", 4)).sample_bytes == 256 * (BATCH.mean_length + 200) * 12


def problem(*offers: Offer, **more: object) -> Problem:
    return Problem(MODEL, BATCH, GRPO, offers, **more)  # type: ignore[arg-type]


def test_gpus_share_rows_of_tokens_only_where_no_offer_holds_the_trainer_otherwise() -> None:
    lengths = np.full(64, 500_000.0)
    very_long = replace(problem(offer("a", "L40S", 16)), batch=Batch.of(lengths, 64, 200), work=GRPO)
    (times,) = Allocator(very_long).trainers.values()
    assert times[-1] is not None and times[-1].sequence_parallel > 1
    roomy = replace(very_long, offers=(*very_long.offers, offer("a", "H200", 16)))
    (number,) = Allocator(roomy).trainers
    last = Allocator(roomy).trainers[number][-1]
    assert roomy.offers[number].device.name == "H200" and last is not None and last.sequence_parallel == 1


def offer(site: str, gpu: str, count: int, usd: float | None = None) -> Offer:
    found = device(gpu)
    assert found.price is not None
    return Offer(site, found, count, usd or found.price.usd_per_hour)


def two_sites(**more: object) -> Problem:
    return problem(
        offer("a", "H100", 3), offer("b", "H20", 4), offer("a", "L40S", 2), routes=((frozenset("ab"), LINK),), **more
    )


def every_split(one: Problem, allocator: Allocator) -> list[Split]:
    """All of them."""
    found = []
    for trainer, times in allocator.trainers.items():
        for time in {time for time in times if time is not None}:
            pools = []
            for number, part in enumerate(one.offers):
                free = part.count - (time.gpus if number == trainer else 0)
                kinds = allocator.kinds[number]
                some = [Replicas(number, n, k) for k in kinds for n in range(1, free // k.tensor_parallel + 1)]
                pools.append([None, *some])
            for chosen in itertools.product(*pools):
                if any(pool is not None for pool in chosen):
                    found.append(Split(trainer, time, tuple(pool for pool in chosen if pool is not None)))
    return found


def seconds(split: Split, allocator: Allocator) -> float:
    generation = allocator.generation_s(split.generation)
    if allocator.schedule == "sync":
        return generation + split.time.seconds
    return max(generation, split.time.seconds)


def best(splits: list[Split], one: Problem, allocator: Allocator, objective: PlanObjective) -> float:
    affordable = [split for split in splits if split.rent(one.offers) <= one.budget]
    if objective == "throughput":
        return min(seconds(split, allocator) for split in affordable)
    return min(seconds(split, allocator) * split.rent(one.offers) for split in affordable)


FREE = replace(LINK, usd_per_gb=0.0)


@pytest.mark.parametrize("schedule", ["async", "stream", "sync"])
@pytest.mark.parametrize("budget", [math.inf, 9.0])
@pytest.mark.parametrize("usd", [1.0, 2.9])
def test_the_fastest_plan_is_the_fastest_of_all_splits(schedule: str, budget: float, usd: float) -> None:
    one = problem(
        offer("a", "H100", 3),
        offer("b", "H20", 3, usd),
        offer("a", "L40S", 2),
        routes=((frozenset("ab"), FREE),),
        budget=budget,
    )
    allocator = Allocator(one, schedule)
    brute = best(every_split(one, allocator), one, allocator, "throughput")
    assert best(list(allocator.candidates("throughput")), one, allocator, "throughput") == pytest.approx(
        brute, rel=1e-6
    )


@pytest.mark.parametrize(("ranks", "last"), [(1, 40 / 70), (2, 1.0), (8, 1.0)])
def test_stream_waits_for_the_last_answer_on_one_rank(ranks: int, last: float) -> None:
    batch = Batch((40.0, 10.0, 10.0, 10.0), 4)
    kind = replica_kind(MODEL, device("H100"), 1, batch)
    assert kind is not None
    alone = float(replica_ends([40.0, 10.0, 10.0, 10.0], kind.curve).max())
    time = TrainerTime(ranks, 1, 0.1 * alone, 0.0, 0.0)
    split = Split(0, time, (Replicas(0, 1, kind),))
    # the longest answer ends last; it is 40 of 70 tokens, which no more than 1.75 ranks share evenly
    assert following_seconds("stream", split, alone, batch) == pytest.approx(alone * (1 + 0.1 * last))
    assert following_seconds("sync", split, alone, batch) == pytest.approx(alone * 1.1)


def test_passes_after_the_first_follow_the_last_answer_of_a_plan_under_stream() -> None:
    batch = Batch((40.0, 10.0, 10.0, 10.0), 4)
    kind = replica_kind(MODEL, device("H100"), 1, batch)
    assert kind is not None
    alone = float(replica_ends([40.0, 10.0, 10.0, 10.0], kind.curve).max())
    for share in (0.0, 0.75, 1.0):
        split = Split(0, TrainerTime(1, 1, 0.1 * alone, 0.0, 0.0, after_batch=share), (Replicas(0, 1, kind),))
        expected = alone * (1 + 0.1 * (share + (1 - share) * 40 / 70))
        assert following_seconds("stream", split, alone, batch) == pytest.approx(expected)
        assert following_seconds("sync", split, alone, batch) == pytest.approx(alone * 1.1)


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_stream_is_planned_for_its_own_step(objective: PlanObjective) -> None:
    one = problem(offer("a", "H100", 8), offer("a", "H20", 3))
    allocator = Allocator(one, "stream")

    def merit(split: Split) -> float:
        step = evaluate(allocator, split).step("stream")
        return step.seconds if objective == "throughput" else step.usd_per_1k

    brute = min(map(merit, every_split(one, allocator)))
    found = plans(one, "stream", objective)[0].chosen
    if objective == "throughput":
        assert found.seconds == pytest.approx(brute, rel=5e-3), "requests are whole"
    else:
        assert found.usd_per_1k <= brute * 1.02


@pytest.mark.parametrize("schedule", ["async", "stream"])
@pytest.mark.parametrize("usd", [0.7, 1.0, 2.9])
def test_the_cheapest_plan_is_as_cheap_as_the_cheapest_of_all_splits(schedule: str, usd: float) -> None:
    one = problem(
        offer("a", "H100", 3), offer("b", "H20", 3, usd), offer("a", "L40S", 2), routes=((frozenset("ab"), FREE),)
    )
    allocator = Allocator(one, schedule)
    brute = best(every_split(one, allocator), one, allocator, "cost")
    assert best(list(allocator.candidates("cost")), one, allocator, "cost") <= brute * FINE * (1 + 1e-9)


def test_the_cheapest_synchronous_plan_is_near_the_cheapest_of_all_splits() -> None:
    one = problem(offer("a", "H100", 4), offer("a", "H20", 4))
    allocator = Allocator(one, "sync")
    brute = best(every_split(one, allocator), one, allocator, "cost")
    assert best(list(allocator.candidates("cost")), one, allocator, "cost") <= brute * 1.03


def test_one_site_splits_as_the_papers_enumeration_does() -> None:
    one = problem(offer("a", "H800", 12))
    allocator = Allocator(one, "stream")
    pairs = [
        max(allocator.generation_s([Replicas(0, x // k.tensor_parallel, k)]), time.seconds)
        for y, time in enumerate(allocator.trainers[0])
        if time is not None
        for x in range(1, 12 - y + 1)
        for k in allocator.kinds[0]
        if x >= k.tensor_parallel
    ]
    assert min(seconds(split, allocator) for split in allocator.candidates("throughput")) == pytest.approx(min(pairs))


def test_the_faster_of_two_sites_is_shrunk_to_match_and_the_rest_released() -> None:
    one = problem(
        replace(offer("train", "H800", 4), generates=False),
        replace(offer("generate", "H20", 64), trains=False),
        routes=((frozenset(("train", "generate")), FREE),),
    )
    one = replace(one, batch=Batch.of(LENGTHS, 4096, 200))
    allocator = Allocator(one, "one_step_off")
    split = plans(one, "one_step_off", "throughput")[0].split
    assert split.time.gpus == 4, "the slower stage keeps all it has"
    assert "H20 of generate in reserve" in plans(one, "one_step_off", "throughput")[0].limit
    (pool,) = split.generation
    assert pool.gpus < 64
    assert allocator.generation_s([pool]) <= split.time.seconds * (1 + 1e-6)
    assert allocator.generation_s([replace(pool, count=pool.count - 1)]) > split.time.seconds


def test_more_gpus_or_bandwidth_are_never_slower_and_higher_prices_never_cheaper() -> None:
    def step(one: Problem, objective: PlanObjective = "throughput") -> float:
        allocator = Allocator(one, "async")
        return best(list(allocator.candidates(objective)), one, allocator, objective)

    before = two_sites()
    for number, part in enumerate(before.offers):
        grown = list(before.offers)
        grown[number] = replace(part, count=part.count + 2)
        assert step(replace(before, offers=tuple(grown))) <= step(before) * (1 + 1e-9)
        grown[number] = replace(part, usd_per_hour=part.usd_per_hour * 2)
        assert step(replace(before, offers=tuple(grown)), "cost") >= step(before, "cost") / COARSE
    slower = replace(LINK, bytes_per_s=1e5)
    assert step(replace(before, routes=((frozenset("ab"), slower),))) >= step(before)
    assert step(replace(before, budget=8.0)) >= step(before)


def test_a_site_takes_part_only_if_weights_and_samples_get_there_in_time() -> None:
    crawling = Route(2e3)
    far = replace(offer("b", "H20", 64), trains=False)
    one = problem(offer("a", "H100", 4), far, routes=((frozenset("ab"), crawling),))
    assert {pool.offer for pool in plans(one, "async", "throughput")[0].split.generation} == {0}
    unlinked = replace(one, routes=())
    assert {pool.offer for pool in plans(unlinked, "async", "throughput")[0].split.generation} == {0}


def test_expensive_traffic_keeps_generation_at_the_trainers_site() -> None:
    def sites(usd_per_gb: float) -> set[int]:
        route = replace(LINK, usd_per_gb=usd_per_gb)
        one = problem(
            offer("a", "H100", 8, 3.0),
            replace(offer("b", "H100", 8, 2.0), trains=False),
            routes=((frozenset("ab"), route),),
        )
        return {pool.offer for pool in plans(one, "async", "cost")[0].split.generation}

    assert sites(0.0) == {1}
    assert sites(1e4) == {0}


@pytest.mark.parametrize("schedule", ["async", "one_step_off", "stream", "sync"])
def test_the_same_problem_gives_the_same_plans(schedule: str) -> None:
    few = replace(two_sites(), batch=Batch.of(LENGTHS, 48, 200))
    for objective in ("throughput", "cost"):
        first, second = (plans(few, schedule, objective) for _ in range(2))  # type: ignore[arg-type]
        assert [one.split.key for one in first] == [one.split.key for one in second]


def test_overlap_never_costs_time() -> None:
    for one in plans(two_sites(), "stream", "throughput"):
        times = {name: one.step(name).seconds for name in ("sync", "stream", "one_step_off", "async")}
        assert times["async"] <= times["one_step_off"] <= times["stream"] <= times["sync"]
        for name in times:
            assert 0 <= one.step(name).training_bubble < 1 and -1e-9 <= one.step(name).generation_bubble < 1


def test_colocated_takes_the_sum_of_both_stages_on_all_gpus() -> None:
    found = colocated(problem(offer("a", "H800", 8)), "throughput")
    assert found is not None and found.gpus == 8
    assert found.step.seconds == pytest.approx(found.generation_s + found.training_s + found.switch_s)


@pytest.mark.parametrize(("share", "most"), [(1.0, None), (0.25, None), (1.0, 8)])
def test_a_replica_generates_its_share_in_the_simulated_time(share: float, most: int | None) -> None:
    batch = Batch.of(LENGTHS, 64, 20)
    kind = replica_kind(MODEL, device("H800"), 1, batch, most)
    assert kind is not None and kind.slots == (most or 64)
    lengths = requests_of_share(batch, share)
    assert len(lengths) == 64 * share and lengths.max() == batch.usual_longest
    requests = [SimulatedRequest(f"{n:02}", length, prompt_tokens=20) for n, length in enumerate(lengths.tolist())]
    alone = simulate(RoundRobin(), requests, [SimulatedInstance("a", kind.curve, kind.slots)]).makespan
    assert kind.share(alone * (1 + 1e-9), False) == pytest.approx(share, rel=0.05), "interpolated"
    assert kind.share(alone * 0.8, False) < share


def test_drafts_beyond_what_memory_reads_for_free_are_paid_for() -> None:
    """An L40S reads the weights of 7B in the time of 314 rows; with as many requests drafts can only cost time."""
    batch = Batch.of(LENGTHS, 318, 20)
    plain = replica_kind(MODELS["7b"], device("L40S"), 1, batch)
    drafting = replica_kind(MODELS["7b"], device("L40S"), 1, replace(batch, speculation=Speculation(0.6, 8)))
    assert plain is not None and drafting is not None and plain.slots == drafting.slots == 318
    assert best_drafts(plain.curve, 318, Speculation(0.6, 8))[0] == 0
    assert float(drafting.curve.base(318)) == pytest.approx(float(plain.curve.base(318)))
    assert float(drafting.curve.base(16)) < 0.7 * float(plain.curve.base(16))


@pytest.mark.parametrize("most", [7, 300])
def test_a_large_batch_is_planned_by_a_part_of_its_requests(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = 200_000
    batch = Batch.of(LENGTHS, samples, 20)
    ends, computed = generation_cost.replica_ends, []

    def counted(lengths: np.ndarray, *arguments: object, **more: object) -> np.ndarray:
        computed.append(len(lengths))
        return ends(lengths, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(generation_cost, "replica_ends", counted)
    kind = replica_kind(MODEL, device("H800"), 1, batch, most)
    assert kind is not None and kind.slots == most
    times = {
        share: float(ends(requests_of_share(batch, share), kind.curve, 20, most, prefilled=True).max())
        for share in (0.01, 0.3, 1.0)
    }
    for share, alone in times.items():
        assert kind.share(alone, False) == pytest.approx(share, rel=0.01)
    assert max(computed) < 10_500
    split = Split(0, TrainerTime(1, 1, times[1.0], 0.0, 0.0), (Replicas(0, 1, kind),))
    planned = following_seconds("stream", split, times[1.0], batch)
    assert max(computed) < 105_000
    monkeypatch.setattr(allocation, "most_requests", lambda slots: samples)
    assert following_seconds("stream", split, times[1.0], batch) == pytest.approx(planned, rel=0.01)
    assert max(computed) > 0.99 * samples


def test_of_two_sites_with_the_same_gpus_the_one_that_trains_goes_on_training() -> None:
    """Nothing but its place sets them apart: the plan must not move the trainer for nothing."""
    route = ((frozenset("ab"), FREE),)
    for home in "ab":
        one = problem(offer("a", "H100", 4), offer("b", "H100", 4), routes=route, home=home)
        split = plans(one, "one_step_off", "throughput")[0].split
        assert one.offers[split.trainer].site == home


def test_of_plans_whose_steps_differ_by_rounding_the_cheapest_is_the_best() -> None:
    one = plans(two_sites(), "sync", "throughput")[0]
    assert one.chosen.seconds > 0
    later = replace(one, makespan_s=one.makespan_s * (1 + 1e-14))
    assert later.chosen.seconds > one.chosen.seconds and later.chosen.usd_per_1k != one.chosen.usd_per_1k
    assert later.worth[0] == one.worth[0] < replace(one, makespan_s=one.makespan_s * 1.001).worth[0]
    assert replace(one, objective="cost").worth[0] == float(f"{one.chosen.usd_per_1k:.9g}")


def test_slots_are_bounded_by_memory_by_the_batch_and_by_what_is_stated() -> None:
    gpu = device("H100")
    many = slots_of(MODELS["1.5b"], gpu, 1, Batch.of(LENGTHS, 10**6, 0))
    assert many > 1024, "memory, and no constant"
    assert slots_of(MODELS["1.5b"], gpu, 1, BATCH) == BATCH.samples
    assert slots_of(MODELS["1.5b"], gpu, 1, BATCH, 64) == 64


def test_slots_are_what_the_kv_cache_holds() -> None:
    gpu, long = device("L40S"), Batch.of(np.asarray([30_000.0]), 64, 0)
    few, many = slots_of(MODELS["7b"], gpu, 1, long), slots_of(MODELS["7b"], gpu, 1, BATCH)
    held = few * MODELS["7b"].shape.kv_bytes_per_token * 15_000
    assert 0 < few < many and held <= gpu.memory_gb * 1e9 * 0.9 - MODELS["7b"].weight_bytes
    assert slots_of(MODELS["32b"], gpu, 1, BATCH) == 0
    assert tensor_parallel_degrees(gpu, MODELS["7b"].heads) == [1, 2, 4], "28 heads cannot be split by 8"


def test_a_replica_has_only_as_many_gpus_as_share_the_key_value_heads() -> None:
    phi = Transformer("phi-4", 40, 5120, 40, 10, 128, 17920, 100_352, False, "its config.json")
    one = replace(problem(offer("a", "H100", 16)), model=phi)
    (kinds,) = Allocator(one).kinds.values()
    assert [kind.tensor_parallel for kind in kinds] == [1, 2], "vLLM neither divides 10 heads by 4 nor copies them"
    assert {pool.kind.tensor_parallel for pool in plans(one, "sync", "throughput")[0].split.generation} <= {1, 2}
    together = colocated(one, "throughput")
    assert together is not None and together.tensor_parallel <= 2


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Problem(MODELS["72b"], BATCH, PPO, (offer("a", "H800", 8),)), ("trained", "GB too much", "smallest change")),
        (Problem(MODELS["72b"], BATCH, PPO, (offer("a", "RTX4090", 64),)), ("trained", "GB too much")),
        (
            Problem(
                MODELS["32b"],
                BATCH,
                GRPO,
                (replace(offer("a", "H800", 16), generates=False), replace(offer("a", "RTX4090", 2), trains=False)),
            ),
            ("served", "lacks", "4 RTX4090 in a"),
        ),
        (Problem(MODELS["7b"], BATCH, GRPO, (offer("a", "H800", 2),)), ("both at once", "1 more H800")),
        (Problem(MODELS["1.5b"], BATCH, GRPO, (offer("a", "H800", 4),), budget=1.0), ("budget", "more")),
    ],
)
def test_what_does_not_fit_is_told_with_the_smallest_change_that_does(one: Problem, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as told:
        plans(one, "async", "throughput")
    assert all(word in str(told.value) for word in words), str(told.value)


@pytest.mark.parametrize(("model", "gpu"), [("7b", "H800"), ("32b", "H800"), ("32b", "L40S"), ("14b", "A100-80")])
def test_what_is_said_to_be_lacking_for_both_stages_is_enough(model: str, gpu: str) -> None:
    work, told = replace(GRPO, recompute=False), ""
    for count in range(1, 33):
        one = Problem(MODELS[model], BATCH, work, (offer("a", gpu, count),))
        try:
            plans(one, "sync", "throughput")
        except ValueError as error:
            told = str(error)
            if "both at once" in told:
                break
        else:
            pytest.fail(f"{count} {gpu} hold both stages at once, one less not even the trainer: {told}")
    words = re.search(rf"(\d+) more {gpu} in a would fit\nor .*optimizer.gradient_checkpointing: true", told)
    assert words is not None, told
    assert plans(replace(one, offers=(offer("a", gpu, count + int(words[1])),)), "sync", "throughput")


def test_a_step_that_takes_too_long_to_count_is_told_instead_of_a_lack_of_gpus() -> None:
    endless, few_slots = replace(BATCH, samples=10**9), replace(offer("a", "H800", 8), max_batch=16)
    with pytest.raises(ValueError, match=r"both fit, but a step takes over 1e\+07 s"):
        plans(Problem(MODELS["7b"], endless, GRPO, (few_slots,)), "sync", "throughput")


@pytest.mark.parametrize(
    ("model", "gpu", "work"), [("72b", "H800", PPO), ("32b", "RTX4090", GRPO), ("32b", "H20", PPO)]
)
def test_the_smallest_change_counts_a_replica_beside_the_trainer(model: str, gpu: str, work: TrainingWork) -> None:
    short = Problem(MODELS[model], BATCH, work, (offer("a", gpu, 2),))
    with pytest.raises(ValueError, match=r"smallest change") as told:
        plans(short, "sync", "throughput")
    words = re.search(
        rf"fits: (\d+) {gpu} in a \((\d+) more\); with a replica of (\d+) beside it: (\d+)", str(told.value)
    )
    assert words is not None, told.value
    trainer, more, replica, both = map(int, words.groups())
    assert trainer == more + 2 and both >= trainer + replica
    assert plans(replace(short, offers=(offer("a", gpu, both),)), "sync", "throughput")
    others = (offer("a", gpu, 2), replace(offer("a", "H200", 8), trains=False))
    with pytest.raises(ValueError, match=r"fits: \d+ \S+ in a \(\d+ more\)(\n|$)"):  # a replica has a place there
        plans(replace(short, offers=others), "sync", "throughput")


def at_prices(gpu: str, *tiers: tuple[int, float]) -> Problem:
    return replace(problem(Offer.at_prices("a", device(gpu), tiers, None)), model=MODELS["7b"])


@pytest.mark.parametrize("schedule", ["sync", "stream", "one_step_off"])
@pytest.mark.parametrize("cheap", [1.0, 2.9, 2.0])
def test_gpus_of_two_prices_are_planned_as_those_of_one_and_the_cheapest_are_rented(
    schedule: str, cheap: float
) -> None:
    whole = plans(at_prices("H100", (24, 3.0)), schedule, "throughput")[0]
    mixed = plans(at_prices("H100", (16, 3.0), (8, cheap)), schedule, "throughput")[0]
    gpus = sum(whole.split.used.values())
    assert gpus > 8 and mixed.split.key == whole.split.key
    assert mixed.chosen.seconds == whole.chosen.seconds
    assert mixed.chosen.usd_per_hour == pytest.approx(8 * cheap + (gpus - 8) * 3.0)
    shown = sum(used * mixed.split.price(mixed.problem.offers, number) for number, used in mixed.split.used.items())
    assert shown == pytest.approx(mixed.chosen.usd_per_hour)


@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_a_budget_counts_the_cheapest_gpus_of_two_prices(schedule: str) -> None:
    one = at_prices("H100", (8, 20.0), (4, 1.0))
    best = plans(replace(one, budget=4.0), schedule, "throughput")[0]
    assert sum(best.split.used.values()) == 4 and best.chosen.usd_per_hour == pytest.approx(4.0)
    dear = plans(replace(one, budget=45.0), schedule, "throughput")[0]
    assert sum(dear.split.used.values()) <= 6 and dear.chosen.usd_per_hour <= 45.0


def test_the_cheapest_plan_of_gpus_of_two_prices_leaves_the_dear_ones() -> None:
    best = plans(at_prices("H100", (12, 20.0), (6, 1.0)), "sync", "cost")[0]
    alone = plans(at_prices("H100", (6, 1.0)), "sync", "cost")[0]
    assert sum(best.split.used.values()) <= 6
    assert best.chosen.usd_per_1k <= alone.chosen.usd_per_1k * 1.001


def test_the_named_smallest_change_fits() -> None:
    short = Problem(MODELS["72b"], BATCH, PPO, (offer("a", "H800", 8),))
    with pytest.raises(ValueError, match=r"smallest change that fits: (\d+) H800") as told:
        plans(short, "async", "throughput")
    count = int(str(told.value).rpartition("fits: ")[2].split()[0])
    enough = Allocator(replace(short, offers=(offer("a", "H800", count),)))
    assert enough.trainers
    assert not Allocator(replace(short, offers=(offer("a", "H800", count - 1),))).trainers


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: offer("a", "H100", 0),
        lambda: Offer("a", device("H100"), 4, 0.0),
        lambda: Offer("a", device("H100"), 4, -2.0),
        lambda: Route(0.0),
        lambda: Route(1e9, usd_per_gb=-1.0),
        lambda: problem(),
        lambda: problem(offer("a", "H100", 4), budget=0.0),
        lambda: problem(offer("a", "H100", 4), delta_ratio=0.5),
        lambda: Batch((), 4),
        lambda: Batch.of(LENGTHS, 0, 0),
    ],
)
def test_counts_prices_and_bandwidths_must_be_positive(wrong: object) -> None:
    with pytest.raises(ValueError):
        wrong()  # type: ignore[operator]


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize("schedule", ["async", "sync"])
@pytest.mark.parametrize("generates", [True, False])
def test_a_budget_holds_at_the_plans_own_pace(schedule: str, generates: bool) -> None:
    """The GPUs are so fast that traffic costs more than at the pace that was asked for."""
    link = (frozenset({"a", "b"}), Route(1e9, usd_per_gb=0.05))
    near, far = replace(offer("a", "H100", 3, 2.5), generates=generates), replace(offer("b", "RTX4090", 4, 0.4))
    one = Problem(MODELS["1.5b"], BATCH, GRPO, (near, replace(far, trains=False)), (link,), delta_ratio=1.0)
    free = plans(one, schedule, "throughput")[0].chosen.usd_per_hour
    cheapest = min(plans(one, schedule, "cost"), key=lambda plan: plan.chosen.usd_per_hour).chosen.usd_per_hour
    for budget in (free * 0.99, cheapest * 1.01, 5.5):
        try:
            found = plans(replace(one, budget=budget), schedule, "throughput")
        except ValueError as error:
            words = re.search(r"costs ([\d.]+) USD/h, of which traffic ([\d.]+): ([\d.]+) USD/h more", str(error))
            assert words is not None and float(words[3]) > 0, error
            assert budget < cheapest or not generates
        else:
            assert all(plan.chosen.usd_per_hour <= budget * 1.001 for plan in found)


def test_weights_that_are_sent_less_often_cost_less_time_and_traffic() -> None:
    link = (frozenset({"a", "b"}), Route(1e8, usd_per_gb=0.05))
    near, far = replace(offer("a", "H100", 2), generates=False), replace(offer("b", "H100", 4), trains=False)
    batch = replace(BATCH, staleness=3)
    each = Problem(MODELS["1.5b"], batch, GRPO, (near, far), (link,), delta_ratio=1.0)
    every = replace(each, sync_every=4)
    for schedule in ("async", "sync", "stream"):
        allocator = Allocator(each, schedule)
        split = next(allocator.candidates("throughput"))
        often, seldom = evaluate(allocator, split), evaluate(Allocator(every, schedule), split)
        weights = each.sent_bytes / 1e9 * 0.05
        assert often.egress_usd - seldom.egress_usd == pytest.approx(weights * 3 / 4)
        assert seldom.chosen.seconds <= often.chosen.seconds
        if schedule != "async":
            saved = (often.transfer_s + often.load_s) * 3 / 4
            assert often.chosen.seconds - seldom.chosen.seconds == pytest.approx(saved)
    shown = evaluate(Allocator(every, "sync"), split)
    assert shown.step("one_step_off").seconds == often.step("one_step_off").seconds  # publishes after every step


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_a_budget_that_the_cheapest_plan_keeps_is_never_refused(schedule: str) -> None:
    """The GPUs that a shorter step asks for are so fast that their traffic costs more than is left."""
    link = (frozenset({"a", "b"}), Route(1e9, usd_per_gb=0.05))
    trainer = replace(offer("a", "H100", 1, 2.5), generates=False)
    fast, slow = (replace(offer("b", "H100", 1, 1.0), trains=False, max_batch=most) for most in (None, 8))
    one = Problem(MODELS["1.5b"], BATCH, GRPO, (trainer, fast, slow), (link,), delta_ratio=1.0)
    made = [plan for aim in ("cost", "throughput") for plan in plans(one, schedule, aim, simulated=False)]  # type: ignore[arg-type]
    prices = [plan.chosen.usd_per_hour for plan in made]
    for budget in np.linspace(min(prices) * 1.01, max(prices) * 1.1, 8):
        found = plans(replace(one, budget=float(budget)), schedule, "throughput")
        assert all(plan.chosen.usd_per_hour <= budget * 1.001 for plan in found)


def test_replicas_have_room_on_the_machines_beside_the_trainer() -> None:
    sixteen, odd = offer("a", "H100", 16), offer("a", "H100", 12)
    assert [allocation.most_replicas(sixteen, degree) for degree in (1, 2, 4, 8)] == [16, 8, 4, 2]
    spread = TrainerTime(10, 10, 1.0, 0.0, 0.0, nodes=2)  # three are left on each machine
    assert [allocation.most_replicas(sixteen, degree, spread) for degree in (1, 2, 4)] == [6, 2, 0]
    alone = TrainerTime(6, 6, 1.0, 0.0, 0.0)
    assert [allocation.most_replicas(sixteen, degree, alone) for degree in (1, 2, 4, 8)] == [10, 5, 2, 1]
    assert [allocation.most_replicas(odd, degree, alone) for degree in (1, 4)] == [6, 1]
    six = replace(sixteen, device=replace(device("H100"), per_machine=6), count=12)
    assert allocation.most_replicas(six, 4) == 2


@pytest.mark.parametrize("objective", ["throughput", "cost"])
@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_replicas_of_a_plan_fit_beside_its_trainer(schedule: str, objective: PlanObjective) -> None:
    one = replace(problem(offer("a", "H100", 24)), model=MODELS["32b"])
    for plan in plans(one, schedule, objective, simulated=False):
        each = plan.split.time.gpus // plan.split.time.nodes
        free = [8 - each] * plan.split.time.nodes + [8] * (3 - plan.split.time.nodes)
        for pool in plan.split.generation:
            assert pool.count <= sum(left // pool.kind.tensor_parallel for left in free)
