"""Texts of the figures about learning, exactness, the speed of a step and schedules (`results.py`)."""

from __future__ import annotations

import re
from functools import partial
from statistics import median
from typing import Any

from results_data import Figure, mean, named, percent, read, steps

FIGURES: dict[str, Figure] = {}
"""Name of a place -> what makes its text."""

ENDS = 10
"""First and last steps whose mean reward is told."""
GAINED = 0.25


def _ends(run: str) -> tuple[float, float]:
    rewards = [row["reward_mean"] for row in steps(run)]
    return mean(rewards[:ENDS]), mean(rewards[-ENDS:])


def _elapsed(rows: list[dict[str, Any]]) -> float:
    """Return the seconds from the begin of the first step to the end of the last one."""
    return float(rows[-1]["time"] - rows[0]["time"] + rows[0]["step_time_s"])


@named(FIGURES, "small-reasoner-short")
def _small_reasoner_short() -> str:
    first, last = _ends("small_reasoner")
    return f"{first:.3f} to {last:.3f} in {_elapsed(steps('small_reasoner')):.0f} s"


@named(FIGURES, "small-reasoner")
def _small_reasoner() -> str:
    rows = steps("small_reasoner")
    first, last = _ends("small_reasoner")
    rewards = [row["reward_mean"] for row in rows]
    many = range(ENDS, len(rows) + 1)
    risen = next(n for n in many if mean(rewards[n - ENDS : n]) >= first + GAINED)
    return (
        f"{first:.3f} to {last:.3f} in {_elapsed(rows):.0f} s, start-up left out; first step {rewards[0]:.2f}; the "
        f"mean of {ENDS} steps is up by {GAINED} after {risen} steps, {_elapsed(rows[:risen]):.0f} s"
    )


@named(FIGURES, "smollm2-easy")
def _smollm2_easy() -> str:
    first, last = _ends("smollm2_easy")
    return f"{first:.3f} to {last:.3f}"


@named(FIGURES, "staleness")
def _staleness() -> str:
    arms = read("staleness")["summary"]

    def one(name: str) -> str:
        return f"{arms[name]['mean']:.3f} ({arms[name]['spread']:.3f})"

    return (
        f"`sync` {one('sync')}; `async` with staleness 1: {one('async-1')}, with 4: {one('async-4')}; corrected by "
        f"decoupled PPO and truncated weights: {one('async-1-corrected')} and {one('async-4-corrected')}"
    )


@named(FIGURES, "staleness-ess")
def _staleness_ess() -> str:
    return f"{read('staleness')['summary']['async-4']['ess_sequence']:.2f}"


LAST = 5
"""Last steps of the runs with killed rewards whose mean reward is told."""


@named(FIGURES, "void-rewards")
def _void_rewards() -> str:
    runs = [run for run in read("void_rewards")["runs"] if not run["error"]]
    killed = [run for run in runs if run["arm"] != "undisturbed"]
    told = []
    for run in sorted(killed, key=lambda run: sum(run["deaths"]["void"].values())):
        found = run["deaths"]
        void = sum(found["void"].values())
        told.append(
            f"{void} of {found['judged']} ({percent(void / found['judged'], 1)}, {len(found['void'])} causes): "
            f"{found['wounded']} of {found['groups']} groups have dead"
        )
    deaths = [run["deaths"] for run in killed]
    error, if_zero = (max(found[key] for found in deaths) for key in ("error", "error_if_zero"))
    lost, replaced, trained = (sum(found[key] for found in deaths) for key in ("lost", "replaced", "dead_trained"))
    return (
        f"{'; '.join(told)}. {lost} groups with two survivors lost, {replaced} replaced, {trained} dead trained; "
        f"advantages off by {error:.0e} at most (up to {if_zero:.2f} if the dead counted as 0)"
    )


@named(FIGURES, "void-rewards-curve")
def _void_rewards_curve() -> str:
    def figures(run: dict[str, Any]) -> tuple[float, float]:
        rewards = [row["reward_mean"] or 0.0 for row in run["rows"]]
        return mean(rewards[-LAST:]), mean(rewards)

    runs = [run for run in read("void_rewards")["runs"] if not run["error"]]
    undisturbed = [figures(run) for run in runs if run["arm"] == "undisturbed"]
    bands = [f"{min(values):.3f} to {max(values):.3f}" for values in zip(*undisturbed, strict=True)]
    told = [
        f"{run['arm'].removeprefix('killed_')} % killed {figures(run)[0]:.3f} and {figures(run)[1]:.3f}"
        for run in sorted(runs, key=lambda run: int(run["arm"].removeprefix("killed_").replace("undisturbed", "0")))
        if run["arm"] != "undisturbed"
    ]
    return f"{'; '.join(told)}; {len(undisturbed)} undisturbed seeds {bands[0]} and {bands[1]}"


@named(FIGURES, "agent-learning")
def _agent_learning() -> str:
    found = read("agent_learning")
    reward = {one["step"]: one["reward"] for one in found["held_out"]}
    seconds = sum(one["seconds"] for one in found["steps"])
    return f"{reward[0]:.3f}, {reward[10]:.3f}, {reward[30]:.3f}; {seconds / 60:.0f} minutes"


@named(FIGURES, "environment-learning")
def _environment_learning() -> str:
    runs = [[step["reward"] for step in run["steps"]] for run in read("environment_learning")["runs"]]
    first, last = ", ".join(f"{one[0]:.2f}" for one in runs), ", ".join(f"{mean(one[-5:]):.3f}" for one in runs)
    return f"first step {first}; last 5 steps {last}"


@named(FIGURES, "gradient-error")
def _gradient_error() -> str:
    rows = read("exact_logprobs")["gradients"]
    worst = {name: max(row[name] for row in rows) for name in ("ours", "autograd", "softmax_in_bf16")}
    return (
        f"off by {percent(worst['ours'], 2)} at most; torch's autograd {percent(worst['autograd'], 1)}, a softmax kept "
        f"in bf16 {percent(worst['softmax_in_bf16'])}"
    )


@named(FIGURES, "log-ratio")
def _log_ratio() -> str:
    rows = read("exact_logprobs")["ratios"]
    largest = sorted(row["largest"] for row in rows)
    cut = [row for row in rows if row["full_largest"] > 2 * row["largest"]]
    means = [row["full_mean"] for row in cut]
    return (
        f"{len(rows)} combinations, {sum(row['tokens'] for row in rows):,} tokens: largest {largest[-1]:.1e} nats, of "
        f"the other combinations {largest[-2]:.1e}; without truncation in the trainer up to "
        f"{max(row['full_largest'] for row in cut):.1f}, mean {min(means):.2f} to {max(means):.2f} by combination"
    )


@named(FIGURES, "agent-tokens")
def _agent_tokens() -> str:
    found = read("agent_tokens")["all"]
    return (
        f"{found['sessions_wrong']} of {found['sessions']:,} sessions wrong: {found['turns']:,} turns in "
        f"{found['rows']:,} rows, {found['trained_tokens']:,} trained tokens; "
        f"{found['answers_changed_by_encoding']:,} answers would change under decoding and encoding"
    )


def _beside_trl(name: str) -> tuple[dict[str, float], float, float]:
    """Return the median seconds of a step by system, and TRL's time over ours by medians and by means."""
    blocks = read(name)["blocks"]
    seconds = {
        system: [step["seconds"] for block in blocks for step in block[system]] for system in ("StreamRL", "TRL")
    }
    middle = {system: median(every) for system, every in seconds.items()}
    return middle, middle["TRL"] / middle["StreamRL"], mean(seconds["TRL"]) / mean(seconds["StreamRL"])


def _both(seconds: dict[str, float]) -> str:
    return f"{seconds['StreamRL']:.1f} s against {seconds['TRL']:.1f} s"


def _bound_s(step: dict[str, float], found: dict[str, Any]) -> float:
    """Return the seconds that a step's operations take at the measured peak."""
    return float((step["generating"] + step["learning"]) / found["peak_gflops"])


@named(FIGURES, "trl-short")
def _trl_short() -> str:
    _, medians, means = _beside_trl("peer_trl")
    return f"{medians:.1f} times (medians), {means:.1f} times (means)"


@named(FIGURES, "trl")
def _trl() -> str:
    middle, medians, means = _beside_trl("peer_trl")
    return f"{_both(middle)}: {medians:.1f} times TRL's samples/s by medians, {means:.1f} by means"


@named(FIGURES, "trl-amx")
def _trl_amx() -> str:
    middle, medians, means = _beside_trl("peer_trl_amx")
    return f"{_both(middle)}: {medians:.1f} times by medians, {means:.1f} by means"


@named(FIGURES, "trl-amx-short")
def _trl_amx_short() -> str:
    _, medians, _ = _beside_trl("peer_trl_amx")
    return f"{medians:.1f} times"


@named(FIGURES, "trl-bf16-bound")
def _trl_bf16_bound() -> str:
    return _bound_of(read("peer_trl"))


@named(FIGURES, "trl-amx-bound")
def _trl_amx_bound() -> str:
    return _bound_of(read("peer_trl_amx"))


def _bound_of(found: dict[str, Any]) -> str:
    steps = [step for block in found["blocks"] for step in block["StreamRL"]]
    bound = median(_bound_s(step, found) for step in steps)
    return f"{bound:.1f} s at {found['peak_gflops']:.0f} GFLOP/s"


@named(FIGURES, "trl-second-step")
def _trl_first() -> str:
    return f"{read('peer_trl')['blocks'][0]['StreamRL'][0]['seconds']:.1f} s"


@named(FIGURES, "trl-float32")
def _trl_float32() -> str:
    middle, medians, _ = _beside_trl("peer_trl_float32")
    return f"{_both(middle)}: {medians:.1f} times"


@named(FIGURES, "trl-bound")
def _trl_bound() -> str:
    found = read("peer_trl_float32")
    steps = [step for block in found["blocks"] for step in block["StreamRL"]]
    by_ratio = sorted(steps, key=lambda step: float(step["seconds"] / _bound_s(step, found)))
    step = by_ratio[len(steps) // 2]
    bound = _bound_s(step, found)
    ratio = step["seconds"] / bound
    return f"{ratio:.1f} times ({step['seconds']:.1f} s over {bound:.1f} s, at {found['peak_gflops']:.0f} GFLOP/s)"


@named(FIGURES, "training-share")
def _training_share() -> str:
    return _shares_of_peak(read("cpu_speed"))


@named(FIGURES, "training-share-bf16")
def _training_share_bf16() -> str:
    found = read("cpu_speed_bfloat16")
    return f"{_shares_of_peak(found)} of {found['peaks']['gemm']['bfloat16']['2']:.0f} GFLOP/s"


@named(FIGURES, "training-share-amx")
def _training_share_amx() -> str:
    found = read("cpu_speed_amx")
    training, peaks = found["training"], found["peaks"]
    products = training["profile_s"]["matrix products"] / training["profiled_s"]
    return (
        f"{_shares_of_peak(found)} of {peaks['gemm']['bfloat16']['2']:.0f} GFLOP/s; products take "
        f"{100 * products:.0f} % of the time, attention, elementwise operations and head "
        f"{100 * _shares_of(training):.0f} %; memory reads {peaks['read']['2']:.0f} GB/s"
    )


@named(FIGURES, "decoding-float32")
def _decoding_float32() -> str:
    return _decoding(read("cpu_speed_decode"))


@named(FIGURES, "decoding-bf16")
def _decoding_bf16() -> str:
    return _decoding(read("cpu_speed_decode_bfloat16"))


@named(FIGURES, "decoding-amx")
def _decoding_amx() -> str:
    return _decoding(read("cpu_speed_decode_amx"))


def _decoding(found: dict[str, Any]) -> str:
    one, many = found["decoding"]
    return (
        f"{one['step_ms']:.0f} ms at 1 request, {one['times_reading']:.1f} times the reading of the weights at "
        f"{found['peaks']['read_gb_s']:.0f} GB/s; {many['step_ms']:.0f} ms at {many['batch']}, "
        f"{100 * many['share_of_peak']:.0f} % of the {found['peaks']['gemm_gflops']:.0f} GFLOP/s of large products"
    )


def _shares_of(training: dict[str, Any]) -> float:
    kinds = ("attention", "elementwise", "head")
    return float(sum(training["profile_s"][kind] for kind in kinds) / training["profiled_s"])


def _shares_of_peak(found: dict[str, Any]) -> str:
    *others, last = (f"{100 * share:.0f}" for share in found["training"]["share_of_peak"])
    return f"{', '.join(others)} and {last} %"


@named(FIGURES, "agent-rows")
def _agent_rows() -> str:
    ways = list(read("agent_rows")["ways"].values())
    tokens = [str(way["tokens"]) for way in ways]
    cpu = [f"{mean(way['cpu_seconds']):.1f}" for way in ways]
    off = max(way["gradient_difference"] for way in ways)
    return (
        f"{tokens[0]}, {tokens[1]} and {tokens[2]} tokens; {cpu[0]}, {cpu[1]} and {cpu[2]} s of CPU time; gradients "
        f"differ by {off:.0e} of their norm at most"
    )


# Two runs were bound by training: the second one after a change of the trainer. Both are told.
SCHEDULE_RUNS = {
    "balanced": ("schedules", "balanced"),
    "generation": ("schedules", "generation"),
    "training": ("schedules", "training"),
    "training again": ("schedules_training", "training"),
}
SHORT = {"async-1": "async"}


def _workload(name: str) -> dict[str, Any]:
    file, workload = SCHEDULE_RUNS[name]
    found: dict[str, Any] = read(file)["summary"][workload]
    return found


def _over_sync(name: str) -> dict[str, float]:
    """Return the step time per token over that of `sync`, by schedule."""
    figures = _workload(name)["figures"]
    sync = figures["sync"]
    return {
        arm: one["step_s"] / one["tokens"] * sync["tokens"] / sync["step_s"]
        for arm, one in figures.items()
        if arm not in ("sync", "auto", "async-4")
    }


def _judged(name: str, pattern: str) -> str:
    """Return the number that a target's line states."""
    lines = "\n".join(_workload(name)["targets"])
    found = re.search(pattern, lines)
    assert found is not None, (name, pattern)
    return found[1]


def _fastest_first(name: str) -> str:
    every = sorted(_over_sync(name).items(), key=lambda one: one[1])
    return ", ".join(f"`{SHORT.get(arm, arm)}` {ratio:.2f}" for arm, ratio in every)


@named(FIGURES, "schedules-async-short")
def _async_short() -> str:
    return f"{_over_sync('balanced')['async-1']:.2f}"


for _name in ("balanced", "generation"):
    named(FIGURES, f"schedules-{_name}")(partial(_fastest_first, _name))


@named(FIGURES, "schedules-training")
def _schedules_training() -> str:
    first, again = _fastest_first("training"), _fastest_first("training again")
    return f"{first}; measured again after a change of the trainer: {again}"


def _four(pattern: str, form: str = ".2f", factor: float = 1.0) -> str:
    return ", ".join(format(factor * float(_judged(name, pattern)), form) for name in SCHEDULE_RUNS)


@named(FIGURES, "schedules-over-longer")
def _over_longer() -> str:
    return _four(r"async-1: step / longer stage alone, at most [\d.]+: ([\d.]+)")


@named(FIGURES, "schedules-exposed")
def _exposed() -> str:
    return _four(r"async-1: exposed weight sync, below 3% of a step: ([\d.]+)%", ".1f") + " %"


@named(FIGURES, "schedules-hidden")
def _hidden() -> str:
    return _four(r"stream: hides of the shorter stage.*: ([\d.]+)%", ".0f") + " %"


@named(FIGURES, "schedules-auto")
def _auto() -> str:
    told = []
    for name in SCHEDULE_RUNS:
        ratio = float(_judged(name, r"auto: picks the best \(it took .*?\), or its step.*: ([\d.]+)"))
        took = _judged(name, r"auto: picks the best \(it took (.*?)\)")
        best = _judged(name, r"best of .*: ([\w-]+), [\d.]+ s").split("-")[0]
        told.append(f"{ratio:.2f}" + (" (picked the best)" if took == best else f" (`{took}`; the best is `{best}`)"))
    return ", ".join(told)


@named(FIGURES, "training-graph")
def _training_graph() -> str:
    counts = read("training_graph")["counts"]
    worst = max((one["off"] for one in counts), key=abs)
    scores = sum(len(one["score_matrices"]) for one in counts)
    padded = sum(one["attention_rows"] != one["tokens"] for one in counts)
    told = [
        f"{context // 1024}k: "
        + " / ".join(f"{one['memory_bytes'] / 2**30:.1f}" for one in counts if one["context"] == context)
        for context in dict.fromkeys(one["context"] for one in counts)
    ]
    return (
        f"{scores} score matrices, {padded} padded rows; GiB by `gradient_checkpointing` false / selective / true at "
        f"{', '.join(told)} tokens; the formula is off by {100 * worst:+.1f} % at most"
    )


STATE = "trainer's state, "


@named(FIGURES, "gpu-step")
def _gpu_step() -> str:
    told = []
    for context in ("2048", "8192", "32768"):
        newer, torchs, *theirs = read("gpu_h200")["versus"][context]["found"]
        quickest = max(one["tokens_per_s"] for one in theirs if "tokens_per_s" in one)
        ratios = " and ".join(f"{ours['tokens_per_s'] / quickest:.2f}" for ours in (newer, torchs))
        told.append(
            f"{int(context) // 1024}k: {newer['tokens_per_s']:,.0f} and {torchs['tokens_per_s']:,.0f} tokens/s, MFU "
            f"{newer['mfu']:.0%} and {torchs['mfu']:.0%}, {newer['peak_gib']:.0f} GiB (formula "
            f"{newer['formula_gib']:.0f}), {ratios} times TRL's {quickest:,.0f}"
        )
    return "; ".join(told).replace("%", " %")


@named(FIGURES, "gpu-attention")
def _gpu_attention() -> str:
    kinds = "torch", "flash-attn-4"
    times = [
        (one["tokens"], *(one[kind]["forward and backward"] for kind in kinds))
        for one in read("gpu_h200")["attention_kernels_ms"]
    ]
    differences = read("gpu_h200")["flash_attn_4"]["largest difference from torch's kernels"].values()
    told = "; ".join(f"{tokens:,} tokens: {old:.1f} against {new:.1f} ms" for tokens, old, new in times)
    return f"{told}; they differ by {max(differences):.1e} at most"


@named(FIGURES, "gpu-runs")
def _gpu_runs() -> str:
    return "; ".join(
        f"{one['run']}: {one['steps']} steps, first sample after {one['start_to_first_sample_s']} s, "
        f"{one['versions_verified']} versions verified within {one['largest_difference_nats']} nats, "
        f"trainer-generator mismatch {one['logprob_gap']:.3f} nats"
        for one in read("gpu_h200")["runs"]
    )


@named(FIGURES, "gpu-before-layers")
def _gpu_before_layers() -> str:
    found = read("gpu_h200")["before_whole_layers"]
    return " and ".join(f"{sum(found[context]):.2f}" for context in ("2048", "8192")) + " s"


@named(FIGURES, "gpu-before")
def _gpu_before() -> str:
    found = read("gpu_h200")["before_compilation"]
    return " and ".join(f"{found[context][0]['mfu']:.0%} at {int(context) // 1024}k" for context in found).replace(
        "%", " %"
    )


@named(FIGURES, "gpu-parts")
def _gpu_parts() -> str:
    found = read("gpu_h200")
    value = {one["what"]: one["value"] for one in found["kit"]}
    fused = found["fused_head_against_unfused"]
    return (
        f"attention {value['attention, error']:.1e} (window {value['attention, error, window 100']:.1e}), head "
        f"{value['head, error of log-probabilities']:.1e} nats and {value['head, error of gradients']:.1e}; compiled "
        f"beside uncompiled head {fused['log-probabilities, nats']:.0e} nats; products in bf16 "
        f"{value['products in bfloat16']:.0f} TFLOP/s, memory {value['memory, reading'] / 1000:.1f} TB/s, trainer's "
        f"state to host memory and back {value[STATE + 'to host memory']:.0f} and {value[STATE + 'back']:.0f} GB/s to "
        "the same bits"
    )


@named(FIGURES, "gpu-grpo")
def _gpu_grpo() -> str:
    found = read("gpu_h200")["grpo"]
    last = found[-1]
    return (
        f"{len(found)} steps of {last['tokens']:,} tokens; the last: generating {last['generate_s']:.1f} s "
        f"(transformers), training {last['train_s']:.2f} s, new weights {last['publish_s']:.2f} s; log-probabilities "
        f"of generator and trainer differ by {last['mean_abs_logprob_gap']:.3f} nats on average, in bf16"
    )


@named(FIGURES, "int8-products")
def _int8_products() -> str:
    found = read("int8_products")["products"]
    few = [row["int8"] / row["bfloat16"] for row in found if row["rows"] <= 16]
    many = [row["int8"] / row["bfloat16"] for row in found if row["rows"] > 16]
    told = [f"{min(some):.2f} to {max(some):.2f}" for some in (few, many)]
    return f"{told[0]} of bf16's time at 1 to 16 rows, {told[1]} at 64 and 256"
