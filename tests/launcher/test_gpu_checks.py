"""GPUs that cannot do what a run asks of them are named before anything starts, by what nvidia-smi says of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scheduler.capacity.gpu_memory import phases
from scheduler.cost.model_shapes import Transformer
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher import gpu_checks, preflight
from streamrl.launcher.gpu_checks import GpuUse
from streamrl.machine.gpus import Gpu, gpus_here, pairs_without_peer_access, parse_gpus

GIB = 2**30
REGULAR = ("here", "regular")
H100 = Gpu(0, "GPU-a", "NVIDIA H100", 80 * GIB, 0.0, "570.124.06")
L40S = Gpu(1, "GPU-b", "NVIDIA L40S", 45 * GIB, 0.0, "570.124.06")
QWEN = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "model_type": "qwen2",
}
SMI = """#!/bin/sh
case "$*" in
  *query-gpu=uuid*) printf 'GPU-a, NVIDIA H100, 81920, 30720, 570.9\\nGPU-b, NVIDIA H100, 81920, 4, 570.9\\n';;
  *query-gpu=compute_cap*) printf '9.0, GPU-a\\n9.0, GPU-b\\n';;
  *query-compute-apps*) printf 'GPU-a, 71, /usr/bin/python, train.py, 30000\\nGPU-a, 72, other, [N/A]\\n';;
  *--list-gpus*) printf 'GPU 0: NVIDIA H100 (UUID: GPU-a)\\nGPU 1: NVIDIA H100 (UUID: GPU-b)\\n';;
  *topo*) printf ' \\t\\033[4mGPU0\\tGPU1\\033[0m\\n GPU0\\tX\\tCNS\\n GPU1\\tCNS\\tX\\n\\nLegend:\\n  X = Self\\n';;
esac
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an nvidia-smi that lists two GPUs, of which another user has the first."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def configuration(tmp_path: Path, schedule: str = "stream", **run: object) -> tuple[ClusterConfig, RunConfig]:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    site = {"trainer": {"ranks": 1}, "generation": [{"replicas": 1}]}
    cluster = ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": site}})
    model = {"path": str(tmp_path / "model"), "max_context": 4096}
    return cluster, RunConfig.model_validate({"model": model, "schedule": {"name": schedule}, **run})


def test_nvidia_smi_names_who_uses_a_gpu_and_which_pairs_have_no_peer_access(two_gpus: None) -> None:
    first, second = gpus_here()
    assert first.users == ("/usr/bin/python,train.py (71) 30000 MiB", "other (72) of unknown size")
    assert (second.number, second.total_bytes, second.users, second.capability) == (1, 80 * GIB, (), (9, 0))
    assert pairs_without_peer_access() == {(0, 1)}
    assert parse_gpus(["No devices were found"], []) == []


@pytest.mark.parametrize(
    ("driver", "cuda", "problem"),
    [
        ("570.124.06", "13.0", "the NVIDIA driver is 570.124.06, and the installed torch (CUDA 13.0) needs 580.65.06"),
        ("525.60.9", "12.8", "needs 525.60.13 or newer"),
        ("525.60.13", "12.8", None),
        ("1000.1", "13.0", None),
        ("", "13.0", None),
        ("570.1", None, "torch was built without CUDA"),
    ],
)
def test_a_driver_too_old_for_the_wheel(driver: str, cuda: str | None, problem: str | None) -> None:
    found = list(gpu_checks.check_driver(driver, cuda, lambda: None))
    assert (problem is None and not found) or (problem is not None and problem in found[0])


def test_a_newer_library_than_the_driver_counts() -> None:
    """A newer library than the driver, as CUDA's forward compatibility has it in containers."""
    assert list(gpu_checks.check_driver("550.54.14", "13.0", lambda: 13000)) == []
    assert list(gpu_checks.check_driver("550.54.14", "13.2", lambda: 13000)) == []
    assert len(list(gpu_checks.check_driver("550.54.14", "13.0", lambda: 12040))) == 1


@pytest.mark.parametrize(
    ("capability", "compiled", "runs"),
    [
        ((7, 0), "sm_75 sm_80 sm_90 compute_90", False),
        ((8, 9), "sm_75 sm_80 sm_90", True),  # code of 8.0
        ((8, 0), "sm_75 sm_86 sm_90", False),
        ((12, 0), "sm_80 sm_90", False),
        ((12, 0), "sm_80 sm_90 compute_90", True),  # which the driver compiles
        ((12, 0), "sm_90 compute_90a sm_100f", False),
        ((9, 0), "sm_80 sm_90a", True),
        ((10, 3), "sm_100f", True),
        ((10, 3), "sm_100a", False),
        ((7, 0), "", True),  # unknown
        (None, "sm_90", True),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels(capability: tuple[int, int] | None, compiled: str, runs: bool) -> None:
    uses = [GpuUse("i-0", REGULAR, (replace(H100, capability=capability),))] * 2
    found = list(gpu_checks.check_kernels(uses, compiled.split(), "13.0"))
    assert len(found) == (0 if runs else 1)


def test_a_gpu_too_old_for_torch_is_named_with_what_it_has_kernels_for() -> None:
    uses = [GpuUse("i-0", REGULAR, (replace(H100, name="Tesla V100", capability=(7, 0)),))]
    (problem,) = gpu_checks.check_kernels(uses, ["sm_80", "sm_75", "sm_100", "compute_100"], "13.0")
    assert problem.startswith("GPU 0 (Tesla V100) has compute capability 7.0, and the installed torch (CUDA 13.0) has ")
    assert "kernels for 7.5, 8.0, 10.0, oldest first: " in problem


def test_bf16_on_a_gpu_without_it_is_refused_for_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, run = configuration(tmp_path)
    by_hand = run.model_copy(update={"model": run.model.model_copy(update={"dtype": "bfloat16"})})
    old = replace(L40S, name="Tesla T4", capability=(7, 5))
    uses = [GpuUse("trainer", None, (replace(H100, capability=(9, 0)),)), GpuUse("i-0", REGULAR, (old,))]
    (problem,) = gpu_checks.check_type(by_hand, uses)
    assert problem.startswith(
        "model.dtype: bfloat16: GPU 1 (Tesla T4): a GPU of compute capability 7.5 has no bf16 units"
    )
    assert list(gpu_checks.check_type(run, uses)) == []
    assert list(gpu_checks.check_type(by_hand, uses[:1])) == []
    monkeypatch.setattr(gpu_checks, "gpu_names", lambda: names(2))
    monkeypatch.setattr(gpu_checks, "read_uses", lambda *_: uses)
    monkeypatch.setattr(gpu_checks, "check_driver", lambda *_: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(gpu_checks.check_this_machine(cluster, by_hand)) == [problem]
    assert list(gpu_checks.check_this_machine(cluster, by_hand, resumed=True)) == []


def test_mixed_kinds_in_one_trainer() -> None:
    (problem,) = gpu_checks.check_kinds([GpuUse("trainer", None, (H100, L40S)), GpuUse("i-0", REGULAR, (L40S,))])
    assert problem.startswith(
        "trainer would compute on GPUs of several kinds (GPU 0 is a NVIDIA H100, GPU 1 is a NVIDIA L40S)"
    )


def two_trainer_ranks(*pools: dict[str, object]) -> ClusterConfig:
    site = {"trainer": {"ranks": 2}, "generation": list(pools)}
    return ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": site}})


def names(count: int) -> list[str]:
    return [f"GPU-{number}" for number in range(count)]


def test_instances_that_may_be_added_have_gpus_of_their_own() -> None:
    asked = two_trainer_ranks({"replicas": 2, "max_replicas": 6})
    (problem,) = gpu_checks.check_gpus(asked, RunConfig(), names(7))
    grown = "(max_replicas counts: every instance that may be added has its own)"
    assert problem.startswith(f"the cluster asks for 8 GPUs {grown}, this machine has 7 (")
    assert list(gpu_checks.check_gpus(asked, RunConfig(), names(8))) == []
    assert list(gpu_checks.check_gpus(asked, RunConfig(), names(4), most=False)) == []
    asked = two_trainer_ranks({"replicas": 2, "max_replicas": 6}, {"name": "tail"})  # whose device follows those of six
    (problem,) = gpu_checks.check_gpus(asked, RunConfig(), names(8), most=False)
    assert problem.startswith(f"the cluster asks for 9 GPUs {grown}, this machine has 8 (")
    (problem,) = gpu_checks.check_gpus(two_trainer_ranks({"replicas": 2}), RunConfig(), names(3))
    assert problem.startswith("the cluster asks for 4 GPUs, this machine has 3 (")


def test_a_run_that_is_continued_is_only_warned_of_missing_gpus_of_added_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = two_trainer_ranks({"replicas": 2, "max_replicas": 6})
    monkeypatch.setattr(gpu_checks, "gpu_names", lambda: names(4))
    monkeypatch.setattr(gpu_checks, "read_uses", lambda *_: [])
    monkeypatch.setattr(gpu_checks, "check_driver", lambda *_: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (problem,) = gpu_checks.check_this_machine(asked, RunConfig())
    assert list(gpu_checks.check_this_machine(asked, RunConfig(), resumed=True)) == []
    assert gpu_checks.warnings_here(asked, RunConfig()) == [problem]


def test_memory_that_others_hold_and_vllm_would_ask_for(tmp_path: Path) -> None:
    cluster, _ = configuration(tmp_path)
    taken = replace(H100, used_bytes=20 * GIB, users=("python (7) 20480 MiB",))
    (problem,) = gpu_checks.check_free(cluster, [GpuUse("i-0", REGULAR, (taken,)), GpuUse("trainer", None, (taken,))])
    assert "8.0 GiB are missing" in problem and "python (7) 20480 MiB" in problem
    assert "gpu_memory_fraction to 0.75" in problem
    fits = replace(H100, used_bytes=12 * GIB)
    assert list(gpu_checks.check_free(cluster, [GpuUse("i-0", REGULAR, (fits,))])) == []
    (warning,) = gpu_checks.gpu_warnings([GpuUse("i-0", REGULAR, (fits, L40S))], {(0, 2)})
    assert warning.startswith("GPU 0 is used by others: 12.0 GiB")


def test_a_site_is_checked_with_its_own_pool(tmp_path: Path) -> None:
    _, run = configuration(tmp_path)
    sites = {
        "train": {"port": 5600, "trainer": {}, "generation": [{"gpu_memory_fraction": 0.3}]},
        "far": {"generation": [{"gpus_per_replica": 2, "gpu_memory_fraction": 0.9}]},
    }
    links = [{"between": ["train", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 10}]
    cluster = ClusterConfig.model_validate({"hardware": "cuda", "sites": sites, "links": links})
    gpus = [replace(H100, number=number, used_bytes=40 * GIB) for number in range(2)]
    uses = gpu_checks.uses_here(cluster, run, gpus, "far")
    assert len(found := list(gpu_checks.check_free(cluster, uses))) == 2
    assert all("far-regular-0 asks for 90% of GPU" in problem for problem in found)
    ((_, shape),) = gpu_checks.memory_shapes(cluster, run, uses)
    assert (shape.gpus_per_replica, shape.fraction) == (2, 0.9)
    assert list(gpu_checks.check_free(cluster, gpu_checks.uses_here(cluster, run, gpus, "train"))) == []


@pytest.mark.parametrize(
    ("config", "cached"),
    [
        ({}, 4096),
        ({"kv_lora_rank": 256}, None),
        ({"hybrid_override_pattern": "M-M*"}, None),
        ({"moe_num_experts": 64}, None),
        ({"model_type": "starcoder2"}, None),
    ],
)
def test_memory_is_not_counted_for_what_a_model_does_not_keep(
    config: dict[str, object], cached: int | None, tmp_path: Path
) -> None:
    cluster, run = configuration(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN | config))
    uses = gpu_checks.uses_here(cluster, run, [H100, replace(H100, number=1)])
    shapes = [shape for _, shape in gpu_checks.memory_shapes(cluster, run, uses)]
    found = [part for shape in shapes for phase in phases(shape) for part in phase.parts]
    assert [what for what, _ in found if "KV cache" in what] == ([f"KV cache of {cached} tokens"] if cached else [])


def test_windows_are_kept_beside_what_vllm_has_in_flight(tmp_path: Path) -> None:
    cluster, run = configuration(tmp_path)
    run = run.model_copy(update={"model": run.model.model_copy(update={"max_context": 32_768})})

    def cached(**config: object) -> float:
        (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN | config))
        ((_, shape),) = gpu_checks.memory_shapes(cluster, run, uses)
        return next(size for phase in phases(shape) for what, size in phase.parts if what == "KV cache of 32768 tokens")

    uses = gpu_checks.uses_here(cluster, run, [H100, replace(H100, number=1)])
    each = 2 * 2 * 128 * 2  # keys and values of two heads in bf16
    assert cached() == 28 * 32_768 * each
    assert cached(sliding_window=1024, use_sliding_window=False) == 28 * 32_768 * each
    narrow = 1023 + 2 * 8192  # two steps of 8192 tokens on an H100
    assert cached(model_type="mistral", sliding_window=1024) == 28 * narrow * each
    mixed = {"model_type": "gemma3_text", "sliding_window": 1024}  # 4 layers see all; 24 in groups of four
    assert cached(**mixed) == pytest.approx((4 * 32_768 + 24 * narrow) * each)
    assert cached(**mixed, num_kv_shared_layers=10) == pytest.approx((3 * 32_768 + 15 * narrow) * each)
    assert cached(model_type="mistral", sliding_window=40_000) == 28 * 32_768 * each
    small = replace(H100, name="NVIDIA L40S")
    uses = gpu_checks.uses_here(cluster, run, [small, replace(small, number=1, total_bytes=48 * GIB)])
    assert cached(model_type="mistral", sliding_window=1024) == 28 * (1023 + 2 * 2048) * each


def test_missing_peer_access_inside_a_process_is_a_warning() -> None:
    uses = [GpuUse("trainer", None, (H100, L40S)), GpuUse("i-0", REGULAR, (replace(H100, number=2),))]
    (warning,) = gpu_checks.gpu_warnings(uses, {(0, 1), (0, 2), (1, 2)})
    assert warning.startswith("trainer: no peer access between GPUs 0 - 1: they")


def test_a_model_that_is_too_large_says_by_how_much_and_what_would_fit(tmp_path: Path) -> None:
    cluster, run = configuration(tmp_path, "colocated", optimizer={"gradient_checkpointing": False})
    uses = gpu_checks.uses_here(cluster, run, [replace(H100, total_bytes=34 * GIB)])
    assert [use.process for use in uses] == ["trainer", "here-regular-0"]  # both on the only GPU
    (problem,) = gpu_checks.check_memory(cluster, run, uses)
    assert problem.startswith("memory of a GPU (regular), while training: states and weights ")
    assert "GiB too much; the smallest change that fits: optimizer.gradient_checkpointing: true" in problem
    apart = run.model_copy(update={"schedule": configuration(tmp_path)[1].schedule})
    assert gpu_checks.uses_here(cluster, apart, [H100]) == [GpuUse("trainer", None, (H100,))]
    assert list(gpu_checks.check_memory(cluster, run, gpu_checks.uses_here(cluster, run, [H100]))) == []


def test_a_smaller_gpu_of_the_instances_is_not_taken_for_the_trainers(tmp_path: Path) -> None:
    cluster, run = configuration(tmp_path, optimizer={"gradient_checkpointing": False})
    small = replace(L40S, total_bytes=12 * GIB)
    assert list(gpu_checks.check_memory(cluster, run, gpu_checks.uses_here(cluster, run, [H100, small]))) == []
    (problem,) = gpu_checks.check_memory(cluster, run, gpu_checks.uses_here(cluster, run, [small, H100]))
    assert "while training" in problem


def test_the_trainer_of_a_site_without_a_pool_is_checked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = configuration(tmp_path, optimizer={"gradient_checkpointing": False})
    sites = {"home": {"port": 5600, "trainer": {}}, "far": {"generation": [{}]}}
    links = [{"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 10}]
    cluster = ClusterConfig.model_validate({"hardware": "cuda", "sites": sites, "links": links})
    small = [replace(H100, total_bytes=24 * GIB)]
    uses = gpu_checks.uses_here(cluster, run, small, "home")
    (problem,) = gpu_checks.check_memory(cluster, run, uses)
    assert problem.startswith("memory of a GPU (trainer), while training: states and weights ")
    assert "the smallest change that fits: trainer.ranks: 2" in problem
    assert list(gpu_checks.check_memory(cluster, run, gpu_checks.uses_here(cluster, run, [H100], "home"))) == []
    monkeypatch.setattr(gpu_checks, "gpu_names", lambda: names(1))
    monkeypatch.setattr(gpu_checks, "read_uses", lambda *_: uses)
    monkeypatch.setattr(gpu_checks, "check_driver", lambda *_: [])
    monkeypatch.setattr(gpu_checks, "pairs_without_peer_access", set)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(gpu_checks.check_this_machine(cluster, run, "home")) == [problem]
    assert list(gpu_checks.check_this_machine(cluster, run, "home", resumed=True)) == []  # earlier versions began it
    assert gpu_checks.warnings_here(cluster, run, "home") == [problem]


def test_whole_gradients_count_where_the_cluster_file_asks_for_them(tmp_path: Path) -> None:
    cluster, run = configuration(tmp_path)
    site = {"trainer": {"ranks": 2, "reduce_gradients": "step"}, "generation": [{"replicas": 1}]}
    cluster = ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": site}})
    gpus = [replace(H100, total_bytes=23 * GIB)] * 3
    (problem,) = gpu_checks.check_memory(cluster, run, gpu_checks.uses_here(cluster, run, gpus))
    assert "the smallest change that fits: trainer.reduce_gradients: micro_batch" in problem


def critic_at(folder: Path, **config: object) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return {"name": "ppo", "critic": {"path": str(folder)}}


def states_of(tmp_path: Path, **run: object) -> float:
    cluster, config = configuration(tmp_path, **run)  # type: ignore[arg-type]
    uses = gpu_checks.uses_here(cluster, config, [H100, replace(H100, number=1)])
    ((_, shape),) = gpu_checks.memory_shapes(cluster, config, uses)
    return dict(phases(shape)[0].parts)["states and weights"]


def test_a_critic_of_another_size_counts_with_its_own(tmp_path: Path) -> None:
    alone, double = states_of(tmp_path), states_of(tmp_path, algorithm={"name": "ppo", "critic": {}})
    weights = Transformer.from_config("policy", QWEN).parameters
    assert double - alone == pytest.approx(16 * weights)
    assert states_of(tmp_path, algorithm=critic_at(tmp_path / "same")) == pytest.approx(double)
    half = states_of(tmp_path, algorithm=critic_at(tmp_path / "half", num_hidden_layers=14))
    smaller = Transformer.from_config("critic", QWEN | {"num_hidden_layers": 14}).parameters
    assert half - alone == pytest.approx(16 * smaller)
    # it has no output head
    untied = states_of(tmp_path, algorithm=critic_at(tmp_path / "untied", tie_word_embeddings=False))
    assert untied == pytest.approx(double)
    large = states_of(tmp_path, algorithm=critic_at(tmp_path / "large", num_hidden_layers=56))
    larger = Transformer.from_config("critic", QWEN | {"num_hidden_layers": 56}).parameters
    assert large - alone == pytest.approx(16 * larger + 2 * (larger - weights))  # with its copies in bf16


def test_no_memory_is_counted_with_a_critic_of_an_unknown_kind(tmp_path: Path) -> None:
    for config in ({"num_experts": 8}, {"kv_lora_rank": 256}):
        cluster, run = configuration(tmp_path, algorithm=critic_at(tmp_path / "critic", **config))
        assert gpu_checks.memory_shapes(cluster, run, gpu_checks.uses_here(cluster, run, [H100])) == []


def test_the_proximal_copy_counts_where_the_trainer_holds_one(tmp_path: Path) -> None:
    decoupled = {"name": "grpo", "off_policy": {"ratio_to": "proximal"}}
    with_reference = states_of(tmp_path, algorithm={"name": "grpo", "kl": {"coef": 0.1}})
    assert states_of(tmp_path, algorithm=decoupled) == states_of(tmp_path) < with_reference
    assert states_of(tmp_path, algorithm=decoupled, batch={"epochs": 2}) == with_reference


def test_the_plan_of_this_machine_has_every_phase_of_a_shared_gpu(tmp_path: Path, two_gpus: None) -> None:
    cluster, run = configuration(tmp_path, "colocated")
    plan = gpu_checks.memory_plan(cluster, run)
    assert [phase.name for _, phase in plan] == ["while training", "while generating", "as vLLM starts"]
    found = list(gpu_checks.check_this_machine(cluster, run))
    assert any("30.0 GiB of it are in use (/usr/bin/python,train.py (71)" in problem for problem in found)
    assert (
        list(gpu_checks.check_this_machine(configuration(tmp_path)[0].model_copy(update={"hardware": "cpu"}), run))
        == []
    )


def test_a_machine_with_gpus_and_without_torch_is_told_what_to_install(
    tmp_path: Path, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, run = configuration(tmp_path, "colocated")
    for package in ("torch", "vllm", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails, and it is not found
    with pytest.raises(UserError) as refused:
        preflight.check(cluster, run, tmp_path, emulate=True)
    said = str(refused.value)
    assert "not installed: torch, vllm, transformers; install with: pip install 'streamrl[gpu,tasks]'" in said
    assert "30.0 GiB of it are in use" in said and "built without CUDA" not in said


def test_the_driver_is_checked_where_there_is_a_torch(
    tmp_path: Path, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(gpu_checks, "check_driver", lambda driver, cuda: asked.append((driver, cuda)) or [])
    assert list(gpu_checks.check_this_machine(*configuration(tmp_path, "colocated")))
    assert asked == [("570.9", torch.version.cuda)]
