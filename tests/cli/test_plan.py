"""`streamrl plan`: tables from the shipped cluster files, JSON, and one message on bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pytest
import yaml

from ranker.data import read_rollouts
from scheduler.capacity import placement_plan
from scheduler.capacity.placement_plan import PlacementPlan
from scheduler.capacity.problem import Offer
from scheduler.capacity.steady_step import steady_step
from scheduler.cost.hardware import known_devices
from scheduler.cost.model_shapes import MODELS
from streamrl.cli import main as cli
from streamrl.config.load import load_cluster, load_run
from streamrl.errors import UserError
from streamrl.planning.plan_keys import site_keys
from streamrl.planning.planning_inputs import Inputs, find_model, gather, offers_of
from streamrl.runtime.training_work import work_of
from tests.cli.calling import streamrl
from tests.simulated_once import splits_simulated_once

ROOT = Path(__file__).parents[2]
HETEROGENEOUS = ROOT / "cluster_configs" / "heterogeneous.yaml"
CROSS = ROOT / "cluster_configs" / "cross_datacenter.yaml"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(cli.COMMANDS, "plan", "Choose which GPUs train and which generate.")


@pytest.fixture(autouse=True, scope="module")
def simulated_once() -> Iterator[None]:
    """Simulate a split once for all tests: most of them plan for the same cluster files."""
    with splits_simulated_once():
        yield


def edited(tmp_path: Path, change: Any) -> Path:
    """The heterogeneous cluster file, changed."""
    values = yaml.safe_load(HETEROGENEOUS.read_text())
    change(values)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "cluster.yaml"


@pytest.mark.parametrize("cluster", [HETEROGENEOUS, CROSS])
@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_a_shipped_cluster_gets_a_plan_with_times_prices_and_alternatives(
    cluster: Path, objective: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert streamrl(monkeypatch, "plan", "--cluster", cluster, "--objective", objective, "--lengths", "5k") == 0
    shown = capsys.readouterr().out
    for part in ("trainer", "generation", "USD/1k", "limit:", "released:", "next-best plans", "colocated, all"):
        assert part in shown, part
    for schedule in ("async (default)", "one_step_off", "stream", "sync"):
        assert schedule in shown


def test_the_json_holds_the_plans_and_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    for name in ("first.json", "second.json"):
        options = ["--lengths", "5k", "--json", tmp_path / name]
        assert streamrl(monkeypatch, "plan", "--cluster", HETEROGENEOUS, *options) == 0
        written.append((tmp_path / name).read_text())
        monkeypatch.setattr(placement_plan, "steady_step", steady_step)  # simulated again, for the second
    assert written[0] == written[1]
    values = json.loads(written[0])
    best = values["plans"][0]
    assert best["trainer"]["gpu"] == "H800" and {pool["gpu"] for pool in best["generation"]} == {"H20"}
    used = best["trainer"]["gpus"] + sum(p["replicas"] * p["tensor_parallel"] for p in best["generation"])
    assert used + sum(rest["gpus"] for rest in best["released"]) == 48
    assert sum(pool["share"] for pool in best["generation"]) == pytest.approx(1)
    step = best["schedules"]["async"]
    assert step["usd_per_1k_samples"] == pytest.approx(step["usd_per_hour"] / 3.6 / step["samples_per_s"])
    assert len(values["plans"]) > 1


@pytest.mark.parametrize(("source", "model"), [(HETEROGENEOUS, "7b"), (HETEROGENEOUS, "32b"), (CROSS, "14b")])
def test_a_plan_is_printed_as_the_keys_of_a_cluster_file(
    source: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "90")  # what is to be copied is not wrapped
    call = ["plan", "--model", model, "--lengths", "5k", "--json", tmp_path / "plan.json", "--cluster"]
    assert streamrl(monkeypatch, *call, source) == 0
    shown = capsys.readouterr().out
    text = shown.split("in the cluster file this plan is:\n")[1].split("limit:")[0]
    given, values = yaml.safe_load(text), yaml.safe_load(source.read_text())
    every = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert given == {"sites": every[0]["sites"]}
    for plan in every:
        sites = {}
        for site, keys in plan["sites"].items():
            rest = values["sites"][site].items()
            sites[site] = {key: value for key, value in rest if key not in ("trainer", "generation")} | keys
        links = [link for link in values["links"] if set(link["between"]) <= set(sites)]
        copied = {**values, "sites": sites, "links": links}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(copied))
        cluster = load_cluster(tmp_path / "cluster.yaml")
        trainer = cluster.sites[cluster.trainer_site].trainer
        assert trainer is not None and plan["trainer"] == {
            "site": cluster.trainer_site,
            "gpu": trainer.gpu,
            "gpus": trainer.ranks,
            "shard": trainer.ranks // trainer.tensor_parallel // (trainer.nodes if trainer.sharding == "hybrid" else 1),
            "nodes": trainer.nodes,
            "sharding": trainer.sharding,
            "tensor_parallel": trainer.tensor_parallel,
            "sequence_parallel": trainer.sequence_parallel,
        }
        pools = [(name, pool) for name, site in cluster.sites.items() for pool in site.generation]
        keys = [(name, one.gpu, one.replicas, one.gpus_per_replica, one.max_batch) for name, one in pools]
        names = "site", "gpu", "replicas", "tensor_parallel", "slots"
        wanted = [tuple(one[name] for name in names) for one in plan["generation"]]
        assert sorted(keys) == sorted(wanted)


@pytest.mark.parametrize(
    ("used", "launch"),
    [
        ({"H800": 8}, None),
        ({"H800": 16}, {"backend": "ray"}),
        ({"H800": 2, "H20": 6}, None),  # one machine may have both
        ({"H800": 8, "H20": 1}, {"backend": "ray"}),
    ],
)
def test_keys_of_a_site_with_more_gpus_than_a_machine_has_say_ray(
    used: dict[str, int], launch: dict[str, str] | None
) -> None:
    devices = known_devices()
    offers = [Offer("here", devices[gpu], 64, 1.0, None) for gpu in used]
    pools = [
        SimpleNamespace(offer=number, gpus=gpus, count=gpus, kind=SimpleNamespace(tensor_parallel=1, slots=8))
        for number, gpus in enumerate(used.values())
        if number
    ]
    time = SimpleNamespace(gpus=next(iter(used.values())), nodes=1, keys={})
    split = SimpleNamespace(time=time, trainer=0, generation=pools)
    plan = SimpleNamespace(problem=SimpleNamespace(offers=offers), split=split)
    assert site_keys(cast(PlacementPlan, plan), ["", ""])["here"].get("launch") == launch


def test_turns_on_more_than_one_machine_are_shown_to_compare_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for file in (HETEROGENEOUS, CROSS):  # 16 H800, and 8 H100, are the best to take turns
        assert streamrl(monkeypatch, "plan", "--cluster", file, "--lengths", "5k", "--schedule", "sync") == 0
        told.append("colocated is shown to compare" in capsys.readouterr().out)
    assert told == [True, False]


def test_a_plan_counts_on_speculation_only_if_it_is_told_the_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makespans = []
    for more in ([], ["--acceptance", "0"], ["--acceptance", "0.6"]):
        options = ["--lengths", "5k", "--samples", "128", "--schedule", "sync", "--json", tmp_path / "plan.json", *more]
        assert streamrl(monkeypatch, "plan", "--cluster", HETEROGENEOUS, *options) == 0
        values = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
        makespans.append(values["schedules"]["sync"]["step_s"])
    assert makespans[0] == makespans[1]
    assert makespans[2] < 0.9 * makespans[0]


def test_environments_are_hidden_behind_generation_as_far_as_they_have_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for more in ([], ["--environment-s", "1", "--environment-processes", "512"], ["--environment-s", "30"]):
        options = ["--lengths", "5k", "--schedule", "sync", "--json", tmp_path / "plan.json", *more]
        assert streamrl(monkeypatch, "plan", "--cluster", HETEROGENEOUS, *options) == 0
        found.append(json.loads((tmp_path / "plan.json").read_text())["plans"][0])
    none, many, one = (plan["schedules"]["sync"]["step_s"] for plan in found)
    assert [plan["environments_s"] for plan in found] == [0.0, 2.0, 30 * 1024]
    assert many - none == pytest.approx(1.0, abs=0.2)  # that of the last sample
    assert one > 30 * 1024
    assert "limit: environments limit it: 30720.0 s a step on 1 processes" in capsys.readouterr().out
    run_file = tmp_path / "run.yaml"
    lake = {"kind": "agent", "name": "a", "environment": {"name": "lake", "processes": 3}}
    run_file.write_text(yaml.safe_dump({"tasks": [lake]}))
    options = ["--run", run_file, "--model", "7b", "--environment-s", "3", "--json", tmp_path / "plan.json"]
    assert streamrl(monkeypatch, "plan", "--cluster", HETEROGENEOUS, *options) == 0
    samples = json.loads((tmp_path / "plan.json").read_text())["samples"]
    plan = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    sites = {pool["site"] for pool in plan["generation"]}
    assert plan["environments_s"] == pytest.approx(samples * 3 / (3 * len(sites)))


def test_a_budget_is_kept_and_cost_is_not_dearer_than_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def best(*options: str) -> dict[str, float]:
        call = ["plan", "--cluster", CROSS, "--lengths", "5k", "--json", tmp_path / "p.json", *options]
        assert streamrl(monkeypatch, *call) == 0
        step: dict[str, float] = json.loads((tmp_path / "p.json").read_text())["plans"][0]["schedules"]["async"]
        return step

    free, bound, cheap = best(), best("--budget", "20"), best("--objective", "cost")
    assert bound["usd_per_hour"] <= 20 * 1.001 < free["usd_per_hour"]
    assert bound["step_s"] > free["step_s"]
    assert cheap["usd_per_1k_samples"] <= min(free["usd_per_1k_samples"], bound["usd_per_1k_samples"]) * 1.001


def test_a_run_file_gives_model_batch_and_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"batch": {"prompts_per_step": 16}, "schedule": {"name": "stream"}}))
    cluster = ROOT / "cluster_configs" / "local.yaml"
    core = tmp_path / "core.yaml"  # what this machine has must not decide
    core.write_text(yaml.safe_dump({"cpu": {"memory_gb": 8, "per_machine": 4}}))
    assert streamrl(monkeypatch, "plan", "--cluster", cluster, "--run", run, "--hardware", core) == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m" in shown and "grpo, 128 samples a step" in shown and "stream (asked for)" in shown
    assert "default of" in shown, "local.yaml has no prices"


@pytest.mark.parametrize("name", ["colocated", "auto"])
def test_a_schedule_that_no_split_has_is_replaced_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"schedule": {"name": name}}))
    call = ["plan", "--cluster", HETEROGENEOUS, "--run", run, "--model", "7b"]
    assert streamrl(monkeypatch, *call) == 0
    shown = capsys.readouterr().out
    assert f"the run file's schedule is {name}, and" in shown and "async (default)" in shown
    assert streamrl(monkeypatch, *call, "--schedule", "sync") == 0
    shown = capsys.readouterr().out
    assert "the run file's schedule" not in shown and "sync (asked for)" in shown


def test_a_run_in_float32_is_told_that_bfloat16_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    call = ["plan", "--cluster", HETEROGENEOUS, "--run", run, "--model", "7b", "--schedule", "sync"]
    for dtype in ("auto", "bfloat16", "float32"):
        run.write_text(yaml.safe_dump({"model": {"dtype": dtype}}))
        assert streamrl(monkeypatch, *call) == 0
        told = "the run file's model.dtype is float32, and a plan counts bfloat16" in capsys.readouterr().out
        assert told is (dtype == "float32")


def test_a_trainer_that_stays_for_less_than_a_move_is_worth_says_what_moving_would_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(CROSS.read_text())
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(values))
    call = ["plan", "--cluster", tmp_path / "cluster.yaml", "--lengths", "10k", "--schedule", "one_step_off"]
    call += ["--algorithm", "ppo", "--json", tmp_path / "plan.json"]
    assert streamrl(monkeypatch, *call) == 0
    kept, moved = json.loads((tmp_path / "plan.json").read_text())["plans"][:2]
    assert (kept["trainer"]["site"], moved["trainer"]["site"]) == ("frankfurt", "oslo")
    prices = [plan["schedules"]["one_step_off"]["usd_per_hour"] for plan in (moved, kept)]
    assert prices[0] < prices[1]
    told = "kept in frankfurt: training in oslo would take 87.4 s a step at {:.2f} USD/h, not 87.4 s at {:.2f} USD/h; "
    assert told.format(*prices) + "the trainer moves only for a step more than 1% shorter" in capsys.readouterr().out
    values["sites"]["oslo"]["generation"][0]["price_per_hour"] = 2.99  # nothing to gain
    values["links"][0]["price_per_gb"] = 0.0
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(values))
    assert streamrl(monkeypatch, *call) == 0
    assert "kept in" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stated", "slots"), [({}, {None}), ({"generate": 32}, {32}), ({"train": 8, "generate": 32}, {32})]
)
def test_what_a_gpu_decodes_at_once_does_not_depend_on_the_site_it_is_in(
    stated: dict[str, int], slots: set[int | None], tmp_path: Path
) -> None:
    def change(values: Any) -> None:
        values["sites"]["train"]["generation"] = [{"name": "beside", "gpu": "H20", "price_per_hour": 1.0}]
        for site, most in stated.items():
            values["sites"][site]["generation"][0]["max_batch"] = most
        for pool in values["sites"]["generate"]["generation"]:
            pool["gpu"] = "H20"
            if "generate" not in stated:
                pool.pop("max_batch", None)
            else:
                pool["max_batch"] = 32

    path = edited(tmp_path, change)
    offers, _ = offers_of(load_cluster(path), known_devices(), path)
    assert {offer.site for offer in offers if offer.device.name == "H20"} == {"train", "generate"}
    assert {offer.max_batch for offer in offers if offer.device.name == "H20"} == slots


def test_devices_of_instances_that_a_pool_may_get_are_counted(tmp_path: Path) -> None:
    def change(values: Any) -> None:
        values["sites"]["generate"]["generation"] = [
            {
                "name": "grows",
                "gpu": "H20",
                "replicas": 2,
                "max_replicas": 8,
                "gpus_per_replica": 2,
                "price_per_hour": 1.0,
            }
        ]

    path = edited(tmp_path, change)
    offers, _ = offers_of(load_cluster(path), known_devices(), path)
    assert [offer.count for offer in offers if offer.device.name == "H20"] == [16]


@pytest.mark.parametrize(
    ("train", "generate", "prices"),
    [
        (3.0, 9.0, {(20, 3.0)}),
        (0.1, 0.3, {(20, 0.1)}),  # 0.3 / 3 is not 0.1 exactly
        (3.0, None, {(20, 3.0)}),  # the catalogue has this price
        (3.0, 3.0, {(8, 3.0), (12, 1.0)}),
    ],
)
def test_gpus_of_a_type_at_a_site_are_one_offer_whatever_their_prices(
    train: float, generate: float | None, prices: set[tuple[int, float]], tmp_path: Path
) -> None:
    def change(values: Any) -> None:
        site = values["sites"]["train"]
        pool = {"name": "beside", "gpu": "H100", "replicas": 4, "gpus_per_replica": 3}
        site["generation"] = [pool if generate is None else {**pool, "price_per_hour": generate}]
        site["trainer"] = {"gpu": "H100", "ranks": 8, "price_per_hour": train}

    path = edited(tmp_path, change)
    offers, sources = offers_of(load_cluster(path), known_devices(), path)
    (place,) = [number for number, one in enumerate(offers) if one.device.name == "H100"]
    one = offers[place]
    assert one.count == 20 and set(one.tiers or ((one.count, one.usd_per_hour),)) == prices
    assert one.usd_per_hour == pytest.approx(sum(count * usd for count, usd in prices) / 20)
    assert ("the cluster file and default of" in sources[place]) == (generate is None)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"text_config": 5}, "text_config must be an object with keys, got 5"),
        ({"text_config": [1]}, "text_config must be an object with keys, got [1]"),
        ({"layer_types": 5}, "layer_types must be a list with a type for each layer, got 5"),
        ({"layer_types": "x"}, "layer_types must be a list with a type for each layer, got 'x'"),
        ({"layer_types": ["full_attention"]}, "layer_types must have a type for each of the 2 layers, got 1"),
        ({"sliding_window": "4096"}, "sliding_window must be a whole number or null, got '4096'"),
        ({"sliding_window": -1}, "sliding_window must be a whole number or null, got -1"),
        ({"sliding_window": 8, "max_window_layers": [1]}, "max_window_layers must be a whole number or null, got [1]"),
        (
            {"sliding_window": 8, "sliding_window_pattern": "LG"},
            "sliding_window_pattern must be a whole number or null, got 'LG'",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers must be a whole number below 2, the layers, got 2"),
        ({"num_key_value_heads": 64}, "num_key_value_heads must be a divisor of num_attention_heads, 32, got 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must be a divisor of num_attention_heads, 32, got 5"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads must be a divisor of num_attention_heads, 32, got '8'"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be a divisor of num_attention_heads, 32, got True"),
    ],
)
def test_a_models_config_with_a_wrong_value_is_refused_by_file_and_key(
    tmp_path: Path, wrong: dict[str, Any], what: str
) -> None:
    right = {"num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    right |= {"intermediate_size": 9000, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(right))
    assert find_model(str(tmp_path)).kv_heads == 8
    (tmp_path / "config.json").write_text(json.dumps(right | wrong))
    with pytest.raises(UserError) as told:
        find_model(str(tmp_path))
    assert str(told.value) == f"--model {tmp_path}: {tmp_path / 'config.json'}: {what}"


def test_a_plan_of_gpus_of_two_prices_has_keys_that_cost_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(values: Any) -> None:
        site = values["sites"]["train"]
        site["generation"] = [{"name": "beside", "gpu": "H100", "replicas": 12, "price_per_hour": 1.0}]
        site["trainer"] = {"gpu": "H100", "ranks": 8, "price_per_hour": 3.0}
        values["sites"] = {"train": site}
        values["links"] = []

    path = edited(tmp_path, change)
    options = ("--model", "7b", "--schedule", "sync", "--json", tmp_path / "plan.json")
    assert streamrl(monkeypatch, "plan", "--cluster", path, *options) == 0
    text = capsys.readouterr().out
    assert "1 USD/h for 12, 3 USD/h for 8; those that are released are the dearest" in text, text
    values = json.loads((tmp_path / "plan.json").read_text())
    (offer,) = values["offers"]
    assert offer["prices"] == [{"gpus": 12, "usd_per_hour": 1.0}, {"gpus": 8, "usd_per_hour": 3.0}]
    keys = values["plans"][0]["sites"]["train"]
    usd = keys["trainer"]["ranks"] * keys["trainer"]["price_per_hour"]
    usd += sum(pool["replicas"] * pool["price_per_hour"] for pool in keys["generation"])
    assert usd == pytest.approx(values["plans"][0]["schedules"]["sync"]["usd_per_hour"], rel=1e-5)


def test_a_model_is_found_as_launch_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    asked: list[tuple[str, bool]] = []

    def fetched(name: str, file: str, local_files_only: bool = False) -> str:
        asked.append((name, local_files_only))
        if local_files_only or name != "some/model":
            raise OSError("not here")
        return str(folder / file)

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 32}))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert find_model("~/mine").name == find_model(str(folder / "config.json")).name == "mine"
    assert find_model("HuggingFaceTB/SmolLM2-135M-Instruct") is find_model("smollm2-135m")
    assert find_model("Qwen/Qwen2.5-7B-Instruct") is find_model("7b") and not asked
    assert find_model("some/model").name == "some/model" and asked == [("some/model", True), ("some/model", False)]
    with pytest.raises(UserError, match=r"^model\.path some/other: no such model"):
        find_model("some/other", "model.path")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"mamba_d_ssm": 1024}, "recurrent layers or convolutions"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"hidden_size_per_layer_input": 256}, "embeddings of every layer"),
    ],
)
def test_a_model_that_the_cost_model_counts_wrong_is_refused(tmp_path: Path, values: dict[str, int], what: str) -> None:
    dense = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(dense | {"vocab_size": 32} | values))
    with pytest.raises(UserError, match=f"config.json: this model has {what}, which the cost model does not count"):
        find_model(str(tmp_path))


def test_a_run_files_model_is_named_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": {"path": "~/nowhere"}}))
    call = ["plan", "--cluster", HETEROGENEOUS, "--run", tmp_path / "run.yaml"]
    assert streamrl(monkeypatch, *call) == 2
    assert "model.path ~/nowhere: no such model" in capsys.readouterr().err


def test_a_cpu_pool_has_the_threads_of_all_its_processes(tmp_path: Path) -> None:
    def change(values: Any) -> None:
        pool = {
            "name": "cores",
            "gpu": "cpu",
            "replicas": 3,
            "gpus_per_replica": 2,
            "threads": 4,
            "price_per_hour": 1.6,
        }
        values["sites"]["generate"]["generation"] = [pool]
        values["hardware"] = "cpu"

    path = edited(tmp_path, change)
    offers, _ = offers_of(load_cluster(path), known_devices(), path)
    assert [(one.count, one.usd_per_hour) for one in offers if one.device.name == "cpu"] == [(24, 0.2)]


def test_a_plan_takes_the_lengths_of_past_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    past = tmp_path / "past.jsonl"
    past.write_text("".join(json.dumps({"prompt": f"p{n}", "output_length": 100 + n}) + "\n" for n in range(50)))
    assert len(read_rollouts([str(past)])) == 50
    call = ["plan", "--cluster", HETEROGENEOUS, "--schedule", "sync", "--lengths", past]
    assert streamrl(monkeypatch, *call) == 0
    shown = capsys.readouterr().out
    assert "mean 124 tokens (50 past rollouts" in shown or "mean 125 tokens (50 past rollouts" in shown


def test_past_lengths_that_the_run_cannot_generate_are_cut_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    past, run = tmp_path / "past.jsonl", tmp_path / "run.yaml"
    past.write_text("".join(json.dumps({"prompt": f"p{n}", "output_length": 100 + n}) + "\n" for n in range(50)))
    lake = {"kind": "agent", "name": "a", "environment": {"name": "lake"}}
    agents = {"tasks": [lake], "sampling": {"max_tokens": 110}}
    for values, said in (
        ({"sampling": {"max_tokens": 200}}, f"(50 past rollouts in {past})"),
        (
            {"sampling": {"max_tokens": 110}},
            f"(50 past rollouts in {past}, 39 of them cut at the run's max_tokens, 110)",
        ),
        (agents, f"(50 past rollouts in {past})"),  # an episode has several completions
    ):
        run.write_text(yaml.safe_dump(values))
        call = ["plan", "--cluster", HETEROGENEOUS, "--run", run, "--model", "7b", "--lengths", past]
        call += ["--schedule", "sync"]
        assert streamrl(monkeypatch, *call) == 0
        shown = capsys.readouterr().out
        assert said in shown and f"mean {109 if 'cut' in said else 124} tokens" in shown


def test_a_hardware_file_changes_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = tmp_path / "gpus.yaml"
    hardware.write_text(yaml.safe_dump({"H20": {"memory_gb": 3, "source": "too small for 7B"}}))
    used = []
    for more in ([], ["--hardware", hardware]):
        call = [
            "plan",
            "--cluster",
            HETEROGENEOUS,
            "--lengths",
            "5k",
            "--algorithm",
            "ppo",
            "--schedule",
            "stream",
            "--json",
            tmp_path / "p.json",
            *more,
        ]
        assert streamrl(monkeypatch, *call) == 0
        used.append({pool["gpu"] for pool in json.loads((tmp_path / "p.json").read_text())["plans"][0]["generation"]})
    assert used == [{"H20"}, {"H800"}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "8b"], ("no such model", "did you mean", "7b")),
        (["--budget", "2"], ("budget of 2 USD/h", "more")),
        (["--lengths", "long"], ("--lengths long", "20k")),
        (["--lengths", "0"], ("a token or more",)),
        (["--budget", "-3"], ("--budget", "-3.0 is not in the range x>0")),
        (["--delta-ratio", "0.1"], ("--delta-ratio", "0.1 is not in the range x>=1")),
        *(
            ([option, value], (f"'{option}'", f"{value} is not "))
            for option in ("--budget", "--delta-ratio", "--acceptance", "--environment-s")
            for value in ("nan", "inf")
        ),
        (["--hardware", "nowhere.yaml"], ("error: --hardware nowhere.yaml: no such file",)),
        (["--hardware", "."], ("--hardware .: this is a folder, expected a YAML file",)),
        (["--hardware", "empty"], ("--hardware empty: expected devices by name, like {H100: {usd_per_hour: 2.1}}",)),
        (["--hardware", "rubbish"], ("--hardware rubbish: not UTF-8 text (byte 128)",)),
        (["--hardware", "twice"], ("--hardware twice:2: key 'H100' again, first on line 1",)),
        (["--model", "./empty"], ("--model ./empty: empty: not valid JSON", "expected a model's config.json")),
        (["--model", "./rubbish"], ("--model ./rubbish: rubbish: not UTF-8 text (byte 128)",)),
        (["--samples", "0"], ("--samples",)),
    ],
)
def test_bad_options_are_one_message(
    options: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("rubbish").write_bytes(bytes(range(256)))
    Path("twice").write_text("H100: {usd_per_hour: 2}\nH100: {usd_per_hour: 3}\n")
    assert streamrl(monkeypatch, "plan", "--cluster", HETEROGENEOUS, *options) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
    assert "Traceback" not in told


def _set(site: str, key: str, value: Any) -> Any:
    def change(values: Any) -> None:
        values["sites"][site]["trainer"][key] = value

    return change


def _link(key: str, value: Any) -> Any:
    return lambda values: values["links"][0].update({key: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("train", "gpu", "H8000"), ("unknown device 'H8000'", "did you mean H800")),
        (
            lambda values: values["sites"]["train"]["trainer"].pop("gpu"),
            ("site train, trainer: gpu is 'cpu' with hardware: cuda; expected the GPU type, such as H100",),
        ),
        (_set("train", "price_per_hour", 0), ("price_per_hour is 0", "above 0")),
        (_set("train", "price_per_hour", -1), ("price_per_hour",)),
        (_set("train", "ranks", 0), ("ranks",)),
        (_link("bandwidth_gbit_s", 0), ("bandwidth_gbit_s",)),
        (_link("bandwidth_gbit_s", 1e300), ("cluster.yaml:", "links.0.bandwidth_gbit_s", "1000000000")),
        (_link("price_per_gb", -1), ("price_per_gb",)),
    ],
)
def test_a_cluster_that_cannot_be_priced_or_known_is_one_message(
    change: Any,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert streamrl(monkeypatch, "plan", "--cluster", edited(tmp_path, change)) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
    assert "Traceback" not in told


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(values: Any) -> None:
        values["sites"]["train"]["trainer"]["ranks"] = 8
        values["sites"]["generate"]["generation"] = [{"gpu": "H20", "replicas": 4, "price_per_hour": 1.0}]

    assert streamrl(monkeypatch, "plan", "--cluster", edited(tmp_path, small), "--model", "72b") == 2
    told = capsys.readouterr().err
    assert "GB too much" in told and "smallest change that fits" in told


def gathered(tmp_path: Path, run: dict[str, Any] | None, schedule: str = "async", **given: Any) -> Inputs:
    """The problem of the heterogeneous cluster file and a run file."""
    options = dict.fromkeys(("model", "lengths", "samples", "prompt_tokens", "algorithm", "hardware", "budget"))
    options |= {"delta_ratio": None, "acceptance": None, "environment_s": 0.0, "environment_processes": None}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    options |= {"model": "7b"} | given
    return gather(load_cluster(HETEROGENEOUS), HETEROGENEOUS, load_run(path) if run else None, schedule, **options)


def test_gpus_that_take_turns_are_planned_once(tmp_path: Path) -> None:
    def change(values: Any) -> None:
        pool = {"name": "turns", "gpu": "H800", "replicas": 3, "gpus_per_replica": 2, "price_per_hour": 2.0}
        values["sites"]["train"]["generation"] = [pool]

    path = edited(tmp_path, change)
    cluster = load_cluster(path)
    trainer = cluster.sites["train"].trainer
    assert trainer is not None and trainer.ranks > 6
    counts = []
    for in_turns in (False, True):
        offers, prices = offers_of(cluster, known_devices(), path, in_turns)
        assert len(offers) == len(prices)
        counts.append(sum(offer.count for offer in offers if offer.site == "train"))
    assert counts == [trainer.ranks + 6, trainer.ranks]
    alike = gathered(tmp_path, {"schedule": {"name": "colocated"}}).problem.offers
    assert alike == gathered(tmp_path, {}).problem.offers  # this site has no pools


def test_another_algorithm_keeps_the_rest_of_the_runs_training(tmp_path: Path) -> None:
    run = {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
        "schedule": {"name": "sync"},
        "batch": {"epochs": 4, "mini_batches": 2},
        "optimizer": {"gradient_checkpointing": False},
    }
    own, same, ppo = (gathered(tmp_path, run, algorithm=name).problem.work for name in (None, "grpo", "ppo"))
    assert own == same and (own.epochs, own.mini_batches, own.recompute, own.frozen) == (4, 2, False, 1)
    assert ppo == replace(own, trained=2, forward_only=2)


def test_weights_come_as_often_as_the_run_says_under_its_own_schedule(tmp_path: Path) -> None:
    run = {"schedule": {"name": "async", "max_staleness": 3, "sync_every": 4}}
    assert gathered(tmp_path, run).problem.sync_every == 4
    assert gathered(tmp_path, run, "one_step_off").problem.sync_every == 1
    assert gathered(tmp_path, None).problem.sync_every == 1


def test_environments_are_those_of_the_run_file_at_each_site_or_so_many_in_all(tmp_path: Path) -> None:
    run = {"tasks": [{"kind": "agent", "name": "e", "environment": {"name": "e", "processes": 16}}]}
    given = gathered(tmp_path, run, environment_s=2.0).problem
    assert [given.batch_at(sites).environment_processes for sites in (1, 2)] == [16, 32]
    assert given.batch_at(2).environment_s == 2.0
    asked = gathered(tmp_path, run, environment_s=2.0, environment_processes=24).problem
    without = gathered(tmp_path, None, environment_s=2.0).problem
    for fixed, processes in ((asked, 24), (without, 1)):
        assert [fixed.batch_at(sites).environment_processes for sites in (1, 2)] == [processes] * 2


def test_without_a_run_file_a_run_of_the_default_algorithm_is_planned(tmp_path: Path) -> None:
    inputs = gathered(tmp_path, None)
    assert inputs.algorithm == load_run(None).algorithm.name
    own = work_of(load_run(None))
    assert all(
        getattr(inputs.problem.work, name) == getattr(own, name) for name in ("trained", "forward_only", "frozen")
    )


@pytest.mark.parametrize("prompt_tokens", [None, 100, 3000])
def test_a_sample_of_a_runs_whole_context_fits_as_launch_demands(prompt_tokens: int | None, tmp_path: Path) -> None:
    run = {"model": {"max_context": 40_000}, "sampling": {"max_tokens": 2000}}
    batch = gathered(tmp_path, run, prompt_tokens=prompt_tokens).problem.batch
    assert batch.most_tokens == batch.step_tokens(MODELS["7b"]).must_fit == 40_000
    assert batch.usual_longest <= 2000, "no longer answers are generated"


def test_the_longest_answer_fits_also_where_few_are_planned(tmp_path: Path) -> None:
    for samples in (1, 8, 1024):
        assert gathered(tmp_path, None, lengths="20k", samples=samples).problem.batch.longest_answer == 20_000


def test_the_lengths_of_a_runs_folder_are_those_of_its_rollouts(tmp_path: Path) -> None:
    for name, lengths in (("a", (5, 50)), ("b", (7, 70))):
        (tmp_path / "runs" / name / "rollouts").mkdir(parents=True)
        rows = "".join(json.dumps({"prompt": f"p{n}", "output_length": n}) + "\n" for n in lengths)
        (tmp_path / "runs" / name / "rollouts" / "step_000001.jsonl").write_text(rows)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text('{"step": 1}\n')
    one = gathered(tmp_path, None, lengths=str(tmp_path / "runs" / "a"))
    assert one.problem.batch.longest_answer == 50 and "2 past rollouts" in one.lengths
    assert gathered(tmp_path, None, lengths=str(tmp_path / "runs")).lengths.startswith("4 past rollouts")
    bare = tmp_path / "runs" / "a" / "rollouts" / "step_000001.jsonl"
    assert gathered(tmp_path, None, lengths=str(bare)).lengths.startswith("2 past rollouts")
