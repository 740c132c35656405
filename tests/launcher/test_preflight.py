"""What is checked before anything starts: each problem is found, and a sound run has none."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig, Qwen3NextConfig

from streamrl.config.algorithm import GRPOConfig, PPOConfig
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.speculation import SpeculationConfig
from streamrl.config.weight_sync import MismatchConfig
from streamrl.errors import UserError
from streamrl.generation.instance import eight_bits
from streamrl.launcher import gpu_checks, preflight
from streamrl.launcher.generation_check import (
    check_architecture,
    check_comparison,
    check_eight_bits,
    check_generation,
    check_head_size,
    check_kv_cache,
    comparison_warnings,
)
from streamrl.launcher.router_check import check_router_replay
from streamrl.launcher.sequence_check import check_sequence_parallel
from streamrl.launcher.speculation_check import check_speculation
from streamrl.launcher.untried_paths import untried, untried_warning
from streamrl.machine import installed_packages
from streamrl.machine.cpu import Cpu
from streamrl.run_dir import layout
from streamrl.runtime.interfaces import free_ports
from streamrl.verify.findings import Finding
from streamrl.verify.kept_comparison import keep_comparison
from tests.ipv6 import with_ipv6

GIB = 2**30


def cluster(hardware: str = "cpu", **pool: object) -> ClusterConfig:
    site = {"trainer": {"ranks": 2, "threads": 3}, "generation": [{"replicas": 2, **pool}]}
    return ClusterConfig.model_validate({"hardware": hardware, "sites": {"here": site}})


def make_model(folder: Path, megabytes: int = 1, **config: object) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(megabytes * 2**20)
    return RunConfig.model_validate({"steps": 100, "model": {"path": str(folder)}})


def gpus(count: int) -> list[str]:
    return [f"GPU-{number}" for number in range(count)]


def test_more_gpus_than_there_are() -> None:
    asked = cluster("cuda", gpus_per_replica=4)
    assert list(gpu_checks.check_gpus(asked, RunConfig(), gpus(9))) == [
        "the cluster asks for 10 GPUs, this machine has 9 (see docs: E1003)"
    ]
    assert list(gpu_checks.check_gpus(asked, RunConfig(), gpus(10))) == []
    values = asked.model_dump()
    values["sites"]["here"]["generation"].append({"name": "tail", "replicas": 1})
    (problem,) = gpu_checks.check_gpus(ClusterConfig.model_validate(values), RunConfig(), gpus(10))
    assert "asks for 11 GPUs" in problem
    in_turns = RunConfig.model_validate({"schedule": {"name": "colocated"}})
    assert list(gpu_checks.check_gpus(asked, in_turns, gpus(8))) == []
    (problem,) = gpu_checks.check_gpus(asked, in_turns, gpus(7))
    assert problem.startswith("the cluster asks for 8 GPUs, this machine has 7 (")
    assert list(gpu_checks.check_gpus(cluster("cpu"), RunConfig(), gpus(0))) == []


def test_gpus_that_this_user_may_not_use_do_not_count() -> None:
    asked = cluster("cuda", gpus_per_replica=4)
    (problem,) = gpu_checks.check_gpus(asked, RunConfig(), gpus(16), visible="4,5,6,7,8,9,10,11,12")
    left = "CUDA_VISIBLE_DEVICES=4,5,6,7,8,9,10,11,12 leaves 9 of this machine"
    assert problem.startswith(f"the cluster asks for 10 GPUs, {left} (")
    assert list(gpu_checks.check_gpus(asked, RunConfig(), gpus(16), visible="4,5,6,7,8,9,10,11,12,15")) == []
    (problem,) = gpu_checks.check_gpus(asked, RunConfig(), gpus(2), visible="1,2")
    assert "got '2'; it has GPUs 0 to 1 (GPU-0, GPU-1)" in problem


def sharing_rows(ranks: int, hardware: str = "cpu") -> ClusterConfig:
    values = cluster(hardware).model_dump()
    values["sites"]["here"]["trainer"] = {"ranks": ranks, "sequence_parallel": ranks}
    return ClusterConfig.model_validate(values)


def test_ranks_that_cannot_share_rows_are_told(tmp_path: Path) -> None:
    llama = LlamaConfig(
        hidden_size=384, num_attention_heads=12, num_key_value_heads=4, architectures=["LlamaForCausalLM"]
    ).to_dict()
    run = make_model(tmp_path / "llama", **llama)
    for ranks in (1, 2, 4, 12):
        assert list(check_sequence_parallel(sharing_rows(ranks), run)) == []
    asked = "sites.here.trainer.sequence_parallel is"
    assert [*check_sequence_parallel(sharing_rows(8), run), *check_sequence_parallel(sharing_rows(6), run)] == [
        f"{asked} 8: expected a divisor of the 12 attention heads of {run.model.path}",
        f"{asked} 6: expected a divisor or a multiple of the 4 key-value heads of {run.model.path}",
    ]
    hybrid = Qwen3NextConfig(num_hidden_layers=4).to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    run = make_model(tmp_path / "hybrid", **hybrid)
    (problem,) = check_sequence_parallel(sharing_rows(2), run)
    outside = "tokens of qwen3_next meet outside of what attention decides: layer 0 (linear_attention"
    assert problem.startswith(f"{asked} 2, expected 1 for {run.model.path}: {outside}"), problem
    absent = RunConfig.model_validate({"model": {"path": "nobody/nothing"}})
    assert list(check_sequence_parallel(sharing_rows(2), absent)) == [], "reported by the model's own check"


def test_a_critic_that_ranks_cannot_share_is_told(tmp_path: Path) -> None:
    shape = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, architectures=["LlamaForCausalLM"]).to_dict()
    run = make_model(tmp_path / "policy", **shape)
    critic = make_model(
        tmp_path / "critic", **(shape | {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6})
    )
    ppo = PPOConfig.model_validate({"name": "ppo", "critic": {"path": critic.model.path}})
    (problem,) = check_sequence_parallel(sharing_rows(4), run.model_copy(update={"algorithm": ppo}))
    assert problem.endswith(f"is 4: expected a divisor of the 6 attention heads of {critic.model.path}")


def test_ranks_of_a_node_are_divided_evenly_and_in_one_way() -> None:
    for trainer, message in (
        ({"ranks": 3, "sequence_parallel": 2}, r"ranks of a node \(3\) must be a multiple of sequence_parallel \(2\)"),
        ({"ranks": 3, "tensor_parallel": 2}, r"ranks of a node \(3\) must be a multiple of tensor_parallel \(2\)"),
        (
            {"ranks": 4, "sequence_parallel": 2, "tensor_parallel": 2},
            "sequence_parallel is 2 and tensor_parallel 2: expected 1 for one of them",
        ),
    ):
        values = cluster().model_dump()
        values["sites"]["here"]["trainer"] = trainer
        with pytest.raises(ValidationError, match=message):
            ClusterConfig.model_validate(values)


def test_router_replay_is_refused_where_it_is_not_proven(tmp_path: Path) -> None:
    mixture = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    replays = {"algorithm": GRPOConfig(router_replay=True)}
    dense = make_model(tmp_path / "dense", model_type="llama")
    assert list(check_router_replay(cluster(), dense)) == []
    (problem,) = check_router_replay(cluster(), dense.model_copy(update=replays))
    assert "proven for models of type qwen3_moe and gpt_oss, this one is 'llama'" in problem
    run = make_model(tmp_path / "mixture", **mixture).model_copy(update=replays)
    assert list(check_router_replay(cluster(), run)) == []
    assert list(check_router_replay(cluster("cuda", gpus_per_replica=2), run)) == []
    assert any("second model runner" in path for path in untried(cluster("cuda"), run))
    (problem,) = check_router_replay(cluster(gpus_per_replica=2), run)
    assert "gpus_per_replica is 2, expected 1" in problem
    values = cluster("cuda").model_dump()
    values["sites"]["here"]["trainer"] = {"ranks": 2, "tensor_parallel": 2}
    (problem,) = check_router_replay(ClusterConfig.model_validate(values), run)
    assert "tensor_parallel is 2, expected 1" in problem
    (problem,) = check_router_replay(sharing_rows(2), run)
    assert "sequence_parallel is 2, expected 1: replay is not proven for rows that ranks share" in problem
    absent = RunConfig.model_validate({"model": {"path": "nobody/nothing"}}).model_copy(update=replays)
    assert list(check_router_replay(cluster(), absent)) == [], "reported by the model's own check"


def test_speculation_is_refused_where_nothing_says_that_it_is_exact(tmp_path: Path) -> None:
    run = make_model(tmp_path / "m")
    speculating = run.model_copy(update={"speculation": SpeculationConfig(method="auto")})
    assert list(check_speculation(cluster(), speculating)) == []
    assert list(check_speculation(cluster("cuda", gpus_per_replica=2), run)) == []
    on_gpus, several = check_speculation(cluster("cuda", gpus_per_replica=2), speculating)
    assert "speculation.method: auto has not been run on GPUs" in on_gpus
    assert "pool 'regular' of site 'here' has gpus_per_replica: 2" in several
    listed = {"layer_types": ["linear_attention", "full_attention"]}
    for config in (listed, {"model_type": "qwen3_next", "full_attention_interval": 4}):
        hybrid = make_model(tmp_path / "hybrid", **config)
        speculating = hybrid.model_copy(update={"speculation": SpeculationConfig(method="ngram")})
        (recurrent,) = check_speculation(cluster(), speculating)
        assert "cannot go back to before a rejected token" in recurrent


def test_8_bits_asked_for_by_name_are_refused_where_they_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrected = {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate"}}
    model = make_model(tmp_path / "m", architectures=["LlamaForCausalLM"]).model
    values = {"model": model.model_dump() | {"dtype": "float32"}, "algorithm": corrected}

    def asking(compute: str) -> RunConfig:
        return RunConfig.model_validate(values | {"generation": {"compute": compute}})

    old, able = (Cpu("a CPU", frozenset({"avx2", "avx512f"} | more)) for more in (set(), {"avx512_vnni"}))
    for cpu, reasons in ((old, ["int8 products need AVX-512 VNNI"]), (able, [])):
        monkeypatch.setattr(eight_bits, "this_cpu", lambda cpu=cpu: cpu)
        found = list(check_generation(cluster(), asking("int8"), None))
        assert len(found) == len(reasons) and all(why in one for why, one in zip(reasons, found, strict=True))
        assert list(check_generation(cluster(), asking("auto"), None)) == []
    (several,) = check_generation(cluster(gpus_per_replica=2), asking("int8"), None)
    assert "gpus_per_replica: 2" in several
    said = [any("products in fp8" in one for one in untried(cluster("cuda"), asking(kind))) for kind in ("same", "fp8")]
    assert said == [False, True]


def test_a_disk_without_room_for_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    run = make_model(tmp_path / "m", megabytes=1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(20 * GIB))
    assert "21.0 GiB needed" in "".join(preflight.check_disk(run, tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(21 * GIB))
    assert list(preflight.check_disk(run, tmp_path / "not" / "yet")) == []


def test_a_resumed_run_needs_no_room_for_the_checkpoints_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    run = make_model(tmp_path / "m", megabytes=1024)  # 7 GiB a checkpoint, of which two are kept
    checkpoints = tmp_path / "run" / layout.CHECKPOINTS
    for step, free, missing in ((1, 13, 14), (2, 6, 7), (3, 6, 7)):
        (checkpoints / f"step_{step}").mkdir(parents=True)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(free * GIB))
        there = f"{missing}.0 GiB needed for 2 checkpoints and one more, of which {min(step, 2)} are there"
        assert there in "".join(preflight.check_disk(run, tmp_path, tmp_path / "run"))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, missing=missing: usage(missing * GIB))
        assert list(preflight.check_disk(run, tmp_path, tmp_path / "run")) == []
    (checkpoints / ".partial_step_4").mkdir()
    (checkpoints / ".partial_step_4" / "part").write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(7 * GIB - 1000))
    assert list(preflight.check_disk(run, tmp_path, tmp_path / "run")) == []


def test_a_resumed_run_needs_its_room_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    run, resumed = make_model(tmp_path / "m", megabytes=1024), tmp_path / "run"
    resumed.mkdir()
    room = {tmp_path: 0, resumed: 21 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(room[path]))
    assert list(preflight.check_disk(run, tmp_path, resumed)) == []
    room[resumed] = 20 * GIB
    (problem,) = preflight.check_disk(run, tmp_path, resumed)
    assert problem.startswith(f"--resume {resumed}: 21.0 GiB needed")


def test_a_site_that_does_not_train_needs_no_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    run = make_model(tmp_path / "m", megabytes=1024)
    two = ClusterConfig.model_validate(
        {
            "hardware": "cpu",
            "security": {"encryption": "none"},
            "sites": {"home": {"trainer": {}, "address": "127.0.0.1"}, "away": {"generation": [{}]}},
            "links": [{"between": ["home", "away"], "bandwidth_gbit_s": 1, "rtt_ms": 10}],
        }
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(GIB))
    monkeypatch.setattr(preflight, "check_ports", lambda *given: ())
    for site, refused in (("home", True), ("away", False)):
        told = ""
        try:
            preflight.check(two, run, tmp_path, site)
        except UserError as error:
            told = str(error)
        assert ("GiB needed for 2 checkpoints" in told) == refused, told


def test_an_address_that_is_not_this_machines() -> None:
    site = {"address": "192.0.2.1", "trainer": {}, "generation": [{}]}
    elsewhere = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    assert "cannot listen on 192.0.2.1" in "".join(preflight.check_ports(elsewhere, "here"))


@with_ipv6
def test_a_port_of_an_ipv6_address_is_free_or_taken() -> None:
    [port] = free_ports(1, "::1")
    site = {"address": "::1", "port": port, "trainer": {}, "generation": [{}]}
    here = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    assert list(preflight.check_ports(here, "here")) == []
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        assert f"cannot listen on [::1]:{port}: " in "".join(preflight.check_ports(here, "here"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installed_packages.importlib.util, "find_spec", lambda name: None if name == "vllm" else object()
    )
    [problem] = preflight.check_packages(cluster("cuda"))
    assert problem == "not installed: vllm; install with: pip install 'streamrl[gpu,tasks]' (see docs: E1003)"


def test_a_tracker_whose_package_is_missing_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunConfig.model_validate({"trackers": [{"name": "tensorboard"}, {"name": "wandb"}]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else object())
    assert list(preflight.check_trackers(run)) == [
        "trackers: the tracker wandb needs the package wandb, which is not installed; "
        "install with: pip install 'streamrl[wandb]'"
    ]


SMALL = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
SMALL |= {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}


def test_heads_of_a_size_that_generation_on_cpus_lacks_are_refused_there(tmp_path: Path) -> None:
    def heads(size: int, **others: object) -> RunConfig:
        values = make_model(tmp_path / f"{size}", model_type="llama", head_dim=size, **SMALL, **others).model_dump()
        return RunConfig.model_validate(values)

    (problem,) = check_head_size(cluster(), heads(16))
    assert problem.startswith(
        "model.path: its heads have a size of 16, and vLLM generates on CPUs with sizes of 32, 64,"
    )
    assert list(check_head_size(cluster("cuda"), heads(16))) == list(check_head_size(cluster(), heads(64))) == []
    assert list(check_head_size(cluster(), heads(48, kv_lora_rank=512))) == []  # other attention, other sizes
    assert list(check_head_size(cluster(), RunConfig())) == []  # `check_model` reports that


def test_an_architecture_with_which_vllm_cannot_generate_is_refused(tmp_path: Path) -> None:
    def named(name: str, kind: str) -> RunConfig:
        return make_model(tmp_path / name, model_type=kind, architectures=[name])

    (problem,) = check_architecture(cluster("cuda"), named("FooForCausalLM", "llama"))
    assert problem.startswith("model.path: vLLM has no FooForCausalLM (") and "E1002" in problem
    mamba = named("MambaForCausalLM", "mamba")
    (problem,) = check_architecture(cluster(), mamba)
    assert problem.startswith("model.path: its recurrent layers (Mamba 1) need a kernel")
    assert list(check_architecture(cluster("cuda"), mamba)) == list(check_architecture(cluster(), RunConfig())) == []


def test_what_verify_has_found_against_an_architecture_is_used_by_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    run, folder = make_model(tmp_path / "mine", model_type="zamba2"), tmp_path / "mine"
    warns = run.model_copy(update={"mismatch": MismatchConfig(on_mismatch="warn")})
    assert list(check_comparison(cluster(), run, None)) == []
    (warning,) = comparison_warnings(cluster(), run, None)
    assert warning.startswith("model.path: whether vLLM computes zamba2 as the trainer does was not compared so far")
    assert f"`streamrl verify {folder}`" in warning

    keep_comparison(folder, [Finding("trainer against vLLM", "refused", "within 0.1 nats", measured=True)])
    (problem,) = check_comparison(cluster(), run, None)
    assert f"as `streamrl verify {folder}` found: within 0.1 nats. mismatch.on_mismatch: warn" in problem
    assert "E1016" in problem and not list(comparison_warnings(cluster(), run, None))
    assert list(check_comparison(cluster(), warns, None)) == []
    assert list(comparison_warnings(cluster(), warns, None)) == [problem.split(". mismatch.on_mismatch")[0]]
    assert list(check_comparison(cluster("cuda"), run, None)) == []  # it was found on a CPU

    keep_comparison(folder, [Finding("trainer against vLLM", "works", "within 1e-06 nats", measured=True)])
    assert not [*check_comparison(cluster(), run, None), *comparison_warnings(cluster(), run, None)]


def test_a_site_that_does_not_generate_here_has_nothing_compared(tmp_path: Path) -> None:
    home = {"trainer": {"ranks": 1}, "port": 5600}
    away = {"generation": [{"replicas": 1}], "launch": {"backend": "ray"}}
    links = [{"between": ["home", "away"], "bandwidth_gbit_s": 1, "rtt_ms": 1}]
    sites = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"home": home, "away": away}, "links": links})
    run = make_model(tmp_path / "mine", model_type="zamba2")
    assert list(comparison_warnings(sites, run, "home")) == list(comparison_warnings(sites, run, None)) == []


def test_code_of_a_model_s_own_is_refused_without_advice_that_nothing_takes(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_mine.Config", "AutoModelForCausalLM": "modeling_mine.Mine"}
    (problem,) = preflight.check_packing(make_model(tmp_path / "mine", model_type="mine", auto_map=code))
    assert "its architecture (mine) is code that comes with the model (auto_map), which is never run" in problem
    assert "trust_remote_code" not in problem and "http" not in problem


def test_a_kv_cache_that_holds_no_whole_request_is_refused_on_a_cpu(tmp_path: Path) -> None:
    values = make_model(tmp_path / "m", model_type="llama", **SMALL).model_dump()

    def asking(context: int, dtype: str = "float32") -> RunConfig:
        return RunConfig.model_validate(values | {"model": values["model"] | {"max_context": context, "dtype": dtype}})

    (problem,) = check_kv_cache(cluster(kv_cache_gb=0.35), asking(8192), None)
    # 2 x 30 layers x 3 heads x 64 x 4 bytes x 8192 tokens, and a block of 32 that stays free
    assert "kv_cache_gb is 0.35," in problem and "8192 needs 0.353; expected kv_cache_gb: 0.36 or more" in problem
    assert list(check_kv_cache(cluster(kv_cache_gb=0.36), asking(8192), None)) == []
    (problem,) = check_kv_cache(cluster(kv_cache_gb=0.0001), asking(160), None)
    assert "kv_cache_gb is 0.0001," in problem and "160 needs 0.0082; expected kv_cache_gb: 0.01 or more" in problem
    (problem,) = check_kv_cache(cluster(kv_cache_gb=0.35), asking(8192), None, emulated=True)
    assert "expected emulation.kv_cache_gb and the pool's 0.36 or more" in problem
    assert list(check_kv_cache(cluster(kv_cache_gb=0.18), asking(8192, "bfloat16"), None)) == []
    assert len(list(check_kv_cache(cluster(kv_cache_gb=0.17), asking(8192, "bfloat16"), None))) == 1
    assert list(check_kv_cache(cluster("cuda"), asking(10**6), None)) == []
    # all 8192 / 32 blocks at first, as prompts are not prefilled in chunks, and one that a window touches besides
    values = make_model(tmp_path / "w", model_type="mistral", sliding_window=64, **SMALL).model_dump()
    (problem,) = check_kv_cache(cluster(kv_cache_gb=0.35), asking(8192), None)
    assert "8192 needs 0.354; expected kv_cache_gb: 0.36 or more" in problem
    # a group of 5 layers that see all, five of others: a block more for each, and one that stays free, of 5 layers each
    values = make_model(tmp_path / "g", model_type="gemma3_text", sliding_window=64, **SMALL).model_dump()
    (problem,) = check_kv_cache(cluster(kv_cache_gb=0.0001), asking(160), None)
    blocks = 30 * 5 + 25 + 5
    assert f"160 needs {blocks * 32 * 2 * 3 * 64 * 4 / 2**30:.2g};" in problem
    assert list(check_kv_cache(cluster(kv_cache_gb=0.01), RunConfig(), None)) == []  # `check_model` reports that


def test_what_no_site_could_do_is_refused_in_the_plan_of_several(tmp_path: Path) -> None:
    two = cluster("cuda").model_dump()
    two["sites"]["here"] |= {"port": 5600}
    two["links"] = [{"between": ["here", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 1}]
    two["sites"]["far"] = {"generation": [{"name": "wide", "gpus_per_replica": 2}]}
    both, plain = ClusterConfig.model_validate(two), RunConfig(tasks=RunConfig().tasks)
    drafting = plain.model_copy(update={"speculation": SpeculationConfig(method="ngram")})
    with pytest.raises(UserError, match=r"speculation\.method: ngram has not been run on GPUs"):
        preflight.check_files(both, drafting)
    corrected = {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate"}}
    for compute, told in (("int8", "int8 is for CPUs"), ("fp8", "pool 'wide' of site 'far' has gpus_per_replica: 2")):
        asking = RunConfig.model_validate({"algorithm": corrected, "generation": {"compute": compute}})
        assert any(told in one for one in check_eight_bits(both, asking))
        with pytest.raises(UserError, match=r"generation\.compute"):
            preflight.check_files(both, asking)
    assert list(check_eight_bits(both, plain)) == []


def test_what_has_never_been_run_is_named_in_the_plan() -> None:
    assert untried(cluster(), RunConfig()) == [] == untried_warning(cluster(), RunConfig())
    plain = untried(cluster("cuda"), RunConfig())
    assert [path.split()[0] for path in plain] == ["trainer", "2"]
    values = {
        "weights": {"backend": "nccl"},
    }
    more = untried(cluster("cuda", gpus_per_replica=2), RunConfig.model_validate(values))
    assert [path.split(" (")[0] for path in more if path not in plain] == [
        "weights.backend: nccl",
        "instances of several GPUs",
    ]
    shared = RunConfig.model_validate({"weights": {"backend": "ipc"}})
    assert untried(cluster(), shared) == []  # between CPUs it has run
    (handles,) = (path for path in untried(cluster("cuda"), shared) if path not in plain)
    assert handles.startswith("weights.backend: ipc (memory of one GPU opened by a process on another one")
    assert [path for path in untried(sharing_rows(2, "cuda"), RunConfig()) if path not in plain] == [
        "trainer.sequence_parallel over NCCL (over gloo)"
    ]
    in_turns = RunConfig.model_validate({"schedule": {"name": "colocated"}})
    several = "trainer and several instances in turns on their GPUs (one instance on one GPU)"
    assert untried(cluster("cuda"), in_turns) == [several, plain[1]]
    assert untried(cluster("cuda", replicas=1), in_turns) == [plain[1]]
    assert untried(cluster("cuda", replicas=1, max_replicas=2), in_turns) == [several, plain[1]]
    (warning,) = untried_warning(cluster("cuda"), RunConfig())
    assert warning.startswith("never run so far: trainer and instances on GPUs of their own (on one GPU")


def test_a_packing_that_is_proven_wrong_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = Qwen3NextConfig(num_hidden_layers=4).to_dict()
    run = make_model(tmp_path / "hybrid", **(config | {"architectures": ["Qwen3NextForCausalLM"]}))
    assert list(preflight.check_packing(run)) == []  # auto: separate
    asked = run.model_copy(update={"batch": run.batch.model_copy(update={"packing": "shared"})})
    (problem,) = preflight.check_packing(asked)
    assert "batch.packing: shared is wrong for qwen3_next: layer 0 (linear_attention" in problem
    (problem,) = preflight.check_packing(make_model(tmp_path / "odd", model_type="no_such_family"))
    assert "transformers cannot read" in problem and "no_such_family" in problem


def test_a_model_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"model": {"path": str(tmp_path / "none")}})
    with pytest.raises(UserError) as error:
        preflight.check(cluster(), run, tmp_path, emulate=True)
    assert sum("none" in line for line in str(error.value).splitlines()) == 1


def test_a_configuration_that_no_process_could_read_back_is_told_before_a_run(tmp_path: Path) -> None:
    run = RunConfig.model_validate(
        {"model": {"path": str(tmp_path / "none"), "system_prompt": "😀" * 2**18}}
    )  # 4 bytes each
    checks: list[Callable[[], object]] = [
        lambda: preflight.check(cluster(), run, tmp_path, emulate=True),
        lambda: preflight.check_files(cluster(), run),
    ]
    for check in checks:
        with pytest.raises(UserError, match="bytes, and at most 1,048,576 can be read back from a run's config"):
            check()


def test_a_sandbox_that_does_not_hide_files_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"kind": "file", "name": "programs", "path": "x.jsonl", "reward": "python_tests"}
    run = RunConfig.model_validate({"tasks": [programs | {"sandbox": {}}]})
    monkeypatch.setenv("PATH", "/nowhere")
    (warning,) = preflight.sandbox_warnings(run)
    assert warning.startswith("task 'programs': there is no bubblewrap (bwrap) here: programs have no network")
    held_out = {"every": 1, "tasks": [programs | {"name": "held_out", "path": "y.jsonl", "sandbox": {}}]}
    run = RunConfig.model_validate({"tasks": [programs | {"sandbox": {"command": ["env"]}}], "evaluation": held_out})
    (warning,) = preflight.sandbox_warnings(run)
    assert warning.startswith("task 'held_out': there is no bubblewrap")
    run = RunConfig.model_validate({"tasks": [programs | {"sandbox": {"command": ["env"]}}]})
    assert list(preflight.sandbox_warnings(run)) == []


def test_a_ray_cluster_that_lets_everyone_in_is_told() -> None:
    site = {"launch": {"backend": "ray"}, "trainer": {}, "generation": [{"name": "regular"}]}
    on_ray = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    (warning,) = preflight.ray_warnings(on_ray, {}, None)
    assert warning.startswith("site here: whoever reaches its Ray can run commands there")
    assert list(preflight.ray_warnings(on_ray, {"RAY_AUTH_MODE": "token"}, "here")) == []
    assert list(preflight.ray_warnings(cluster("cpu"), {}, None)) == []
