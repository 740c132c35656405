"""Which type a machine computes in: by its instructions and by what its products cost."""

from __future__ import annotations

import itertools
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamrl.config.model_and_batch import ModelConfig
from streamrl.config.run import RunConfig
from streamrl.launcher.entry_point import _role
from streamrl.machine.compute_type import choose_for_cpu, choose_for_cuda, choose_in_process, wire_type
from streamrl.machine.cpu import Cpu, parse_cpuinfo
from streamrl.machine.probe import (
    FEWEST,
    LARGEST,
    ROWS,
    SECONDS_PER_TYPE,
    SIDES,
    Probe,
    ProbeFailed,
    affordable,
    cpu_seconds,
    cut,
    measure,
    probe,
    product_shapes,
    rates,
)
from streamrl.run_dir.status import RunStatus
from streamrl.runtime.process_context import Addresses, RoleContext
from tests.runtime.test_process_plan import cluster
from tests.waiting import scaled

OLD = Cpu("old", frozenset({"avx2", "fma"}))
WIDE = Cpu("wide", frozenset({"avx2", "avx512f", "avx512_bf16"}))
QUICK, SLOW = Probe(200.0, 90.0), Probe(2.0, 60.0)


@pytest.mark.parametrize(
    ("cpu", "found", "dtype"),
    [
        (WIDE, QUICK, "bfloat16"),
        (WIDE, Probe(60.0, 60.0), "bfloat16"),  # as quick, and half the bytes
        (WIDE, Probe(50.0, 60.0), "float32"),  # it has the instructions, and is slower all the same
        (WIDE, SLOW, "float32"),
        (WIDE, None, "bfloat16"),
        (OLD, SLOW, "float32"),
        (OLD, QUICK, "float32"),  # no kernels: whatever a disturbed probe says
        (OLD, None, "float32"),
        (Cpu("unlisted", frozenset()), QUICK, "bfloat16"),
        (Cpu("unlisted", frozenset()), SLOW, "float32"),
    ],
)
def test_auto_takes_bf16_only_where_it_has_kernels_and_is_no_slower(cpu: Cpu, found: Probe | None, dtype: str) -> None:
    choice = choose_for_cpu("auto", cpu, found)
    assert (choice.dtype, choice.warning) == (dtype, "")


def test_the_choice_tells_the_measured_rates() -> None:
    assert str(choose_for_cpu("auto", OLD, SLOW)) == (
        "float32 (AVX2 without AVX-512; one thread multiplies at 2 GFLOP/s in bfloat16 and 60 in float32)"
    )


def test_bf16_set_by_hand_where_it_is_slow_is_kept_and_told_with_the_factor() -> None:
    choice = choose_for_cpu("bfloat16", OLD, SLOW)
    assert choice.dtype == "bfloat16"
    assert "30 x as long as in float32" in choice.warning and "model.dtype: auto" in choice.warning
    assert choose_for_cpu("bfloat16", WIDE, QUICK).warning == ""
    assert choose_for_cpu("float32", OLD, SLOW).warning == ""


@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "warned"),
    [
        ("auto", (7, 5), "float32", False),
        ("auto", (8, 0), "bfloat16", False),
        ("auto", None, "bfloat16", False),
        ("bfloat16", (7, 0), "bfloat16", True),
        ("bfloat16", (9, 0), "bfloat16", False),
        ("float32", (9, 0), "float32", False),
    ],
)
def test_gpus_compute_in_bf16_from_ampere_on(
    asked: str, capability: tuple[int, int] | None, dtype: str, warned: bool
) -> None:
    choice = choose_for_cuda(asked, capability)  # type: ignore[arg-type]
    assert (choice.dtype, bool(choice.warning)) == (dtype, warned)


def test_versions_have_the_trainers_type_in_a_site_and_one_that_all_know_over_links() -> None:
    assert wire_type("auto", "float32", several_sites=False) == "float32"
    assert wire_type("auto", "bfloat16", several_sites=False) == "bfloat16"
    assert wire_type("auto", "float32", several_sites=True) == wire_type("auto", None, several_sites=True) == "bfloat16"
    assert wire_type("float32", "bfloat16", several_sites=True) == "float32"
    with pytest.raises(ValueError, match="only the trainer knows"):
        wire_type("auto", None, several_sites=False)


CPUINFO_X86 = (
    "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nmodel name\t: A CPU\n"
)
CPUINFO_ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def test_a_cpus_name_and_instructions_are_read_from_the_systems_list() -> None:
    cpu = parse_cpuinfo(CPUINFO_X86, "x86_64", {})
    assert (cpu.name, cpu.instructions, cpu.has_bf16) == ("A CPU", "AVX-512", True)
    arm = parse_cpuinfo(CPUINFO_ARM, "aarch64", {})
    assert (arm.name, arm.instructions, arm.has_bf16) == ("aarch64", "NEON with bf16", True)
    assert parse_cpuinfo("", "arm64", {}) == Cpu("arm64", frozenset())


def test_a_limit_by_the_environment_counts_as_instructions_that_are_not_there() -> None:
    cpu = parse_cpuinfo(CPUINFO_X86, "x86_64", {"ATEN_CPU_CAPABILITY": "avx2", "OTHER": "1"})
    assert not cpu.has_bf16
    assert cpu.instructions == "AVX-512, limited by ATEN_CPU_CAPABILITY=avx2"


@pytest.mark.parametrize(
    ("limit", "limited"),
    [
        ("ONEDNN_MAX_CPU_ISA=SSE41", True),
        ("ONEDNN_MAX_CPU_ISA=AVX", True),
        ("DNNL_MAX_CPU_ISA=avx2", True),
        ("ONEDNN_MAX_CPU_ISA=AVX2_VNNI_2", True),
        ("ONEDNN_MAX_CPU_ISA=AVX512_CORE", False),
        ("ONEDNN_MAX_CPU_ISA=DEFAULT", False),  # what it does without the variable
        ("ATEN_CPU_CAPABILITY=default", True),
        ("ATEN_CPU_CAPABILITY=avx512", False),
    ],
)
def test_only_limits_below_avx_512_take_the_kernels_for_bf16_and_int8_away(limit: str, limited: bool) -> None:
    flags = CPUINFO_X86.replace("avx512f", "avx512f avx512_vnni")
    cpu = parse_cpuinfo(flags, "x86_64", dict([limit.split("=")]))
    assert (cpu.has_bf16, cpu.has_int8) == (not limited, not limited)


def test_the_probe_takes_the_models_own_shapes_and_cuts_large_ones() -> None:
    small = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "head_dim": 64}
    assert product_shapes(small) == [(576, 1536), (1536, 576), (576, 576)]
    assert product_shapes({"text_config": small}) == product_shapes(small)
    large = {"hidden_size": 8192, "intermediate_size": 29568}
    assert product_shapes(large) == [(LARGEST, LARGEST)]
    assert product_shapes({}) == [(1024, 1024)]


def test_a_real_probe_measures_both_types_and_is_kept_for_the_next_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("streamrl.machine.probe.SECONDS_PER_PRODUCT", 0.0)  # the fewest runs
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "intermediate_size": 128}))
    found = probe(tmp_path)
    assert found is not None and found.bf16_gflops > 0 and found.fp32_gflops > 0
    (kept,) = (tmp_path / "cache" / "machine").glob("products-*.json")
    values = json.loads(kept.read_text())
    kept.write_text(json.dumps(values | {"bf16_gflops": 7.0, "fp32_gflops": 21.0}))
    assert probe(tmp_path) == Probe(7.0, 21.0)
    assert Probe(7.0, 21.0).bf16_slowdown == 3.0
    kept.write_text("{")  # half a file: measured again
    again = probe(tmp_path)
    assert again is not None and again != Probe(7.0, 21.0)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 96, "intermediate_size": 128}))
    probe(tmp_path)
    assert len(list((tmp_path / "cache" / "machine").glob("products-*.json"))) == 2  # other shapes, another file
    monkeypatch.setattr("streamrl.machine.probe.METHOD", "another clock")
    probe(tmp_path)
    assert len(list((tmp_path / "cache" / "machine").glob("products-*.json"))) == 3


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "echo 'Traceback' >&2; echo 'ImportError: libgomp.so.1: no such file' >&2; exit 1",
            "ImportError: libgomp.so.1",
        ),
        ("kill -ILL $$", "it was ended by SIGILL"),
        ("echo 'torch 2.13' >&2; kill -ILL $$", "it was ended by SIGILL, after: torch 2.13"),
        ("exit 3", "it ended with exit code 3, without a word"),
        ("exec tail -f /dev/null", "importing torch and multiplying took more than 0.5 s"),
        ("echo hello", "the measuring process printed no rates, but 'hello"),
        ("true", "the measuring process printed no rates, but ''"),
        ("echo '{\"bf16_gflops\": 1}'", "the measuring process printed no rates, but "),
    ],
)
def test_a_probe_that_fails_hands_on_the_last_words_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("streamrl.machine.probe.LIMIT_S", 0.5 if "tail" in program else scaled(20))
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # so that it is measured in a process of its own
    with pytest.raises(ProbeFailed, match=re.escape(said)):
        rates(tmp_path)
    assert probe(tmp_path) is None
    assert not (tmp_path / "cache").exists()


def test_a_python_that_is_not_there_and_a_missing_torch_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(ProbeFailed, match=r"gone could not be started: No such file"):
        rates(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProbeFailed, match="torch is not installed"):
        rates(tmp_path)


class Clock:
    """The CPU time of a thread: it goes on only while a product is computed, in steps if the system counts in such."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def thread_time(self) -> float:
        return self.now // self.step * self.step if self.step else self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The only clock that the probe has."""
    fake = Clock()
    monkeypatch.setattr("streamrl.machine.probe.time", fake)
    return fake


@pytest.fixture
def products(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[torch.dtype, float]], list[Any]]:
    """Replace torch's products by some of these rates (GFLOP/s), whose first runs with a shape take 100 times as long;
    returns the list of what is multiplied."""

    def replaced(rates: dict[torch.dtype, float]) -> list[Any]:
        done: list[Any] = []

        def multiply(name: str, left: torch.Tensor, right: torch.Tensor) -> None:
            what = name, left.dtype, tuple(left.shape), tuple(right.shape)
            outputs = right.shape[0] if name == "linear" else right.shape[1]
            operations = 2.0 * left.numel() * outputs
            clock.now += operations / rates[left.dtype] / 1e9 * (1 if what in done else 100)
            done.append(what)

        monkeypatch.setattr("torch.nn.functional.linear", partial(multiply, "linear"))
        monkeypatch.setattr("torch.mm", partial(multiply, "mm"))
        return done

    return replaced


SHAPES = [(576, 1536), (1536, 576), (576, 576)]


def test_a_busy_moment_at_the_first_runs_of_each_product_leaves_the_rates_right(products: Any) -> None:
    done = products({torch.bfloat16: 600.0, torch.float32: 150.0})
    found = measure(SHAPES)
    assert (found.bf16_gflops, found.fp32_gflops) == (pytest.approx(600.0), pytest.approx(150.0))
    whole = [what for what in done if what[0] == "linear" and what[3] == (1536, 576)]
    assert len(whole) >= 2 * FEWEST  # quick types multiply the model's own shapes


@pytest.mark.parametrize(("bf16", "fp32"), [(2.0, 20.0), (20.0, 60.0), (5.0, 5.0), (0.7, 150.0)])
def test_a_slow_cpu_is_probed_within_a_second_by_smaller_matrices(
    products: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, bf16: float, fp32: float
) -> None:
    products({torch.bfloat16: bf16, torch.float32: fp32})
    measure(SHAPES)  # the first runs, which the fake makes 100 times too long
    clock.now = 0.0
    found = measure(SHAPES)
    assert (found.bf16_gflops, found.fp32_gflops) == (pytest.approx(bf16), pytest.approx(fp32))
    assert clock.now < 1.0


def test_shapes_are_cut_as_little_as_the_time_of_their_runs_needs() -> None:
    needed = 3 * 2 * ROWS * (2 * 576 * 1536 + 576 * 576) * FEWEST / SECONDS_PER_TYPE / 1e9
    assert affordable(SHAPES, 1.01 * needed) == SHAPES
    assert affordable(SHAPES, 0.99 * needed) == cut(SHAPES, 1024) == [(576, 1024), (1024, 576), (576, 576)]
    assert affordable(SHAPES, 0.001) == [(SIDES[-1], SIDES[-1])]


@pytest.mark.parametrize(
    ("taken", "fastest"),
    [
        ([100.0, 1.0, 1.0, 1.0, 1.0], 1.0),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 1.0),  # five runs, however long they take
        ([0.005] * 3 + [0.004] * 2, 0.004),
        ([0.003] * 6 + [0.001] * 2, 0.001),  # as many as fill the time
    ],
)
def test_a_product_takes_the_cpu_time_of_its_fastest_run(clock: Clock, taken: list[float], fastest: float) -> None:
    left = iter(taken)

    def product() -> None:
        clock.now += next(left)

    assert cpu_seconds(product) == pytest.approx(fastest)
    assert next(left, None) is None


def test_a_clock_that_goes_on_in_steps_gives_the_mean_of_runs_shorter_than_a_step(clock: Clock) -> None:
    clock.step = 0.01

    def product() -> None:
        clock.now += 0.0001

    assert cpu_seconds(product) == pytest.approx(0.0001, rel=0.02)


def test_rates_are_operations_by_seconds_over_the_three_products_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=0.5)  # every product takes half a second by this clock
    monkeypatch.setattr("streamrl.machine.probe.time.thread_time", lambda: next(ticks))
    found = measure([(64, 32), (32, 16)])
    operations = 3 * 2 * ROWS * (64 * 32 + 32 * 16)
    assert found.fp32_gflops == found.bf16_gflops == pytest.approx(operations / (6 * 0.5) / 1e9)


def context(run: RunConfig) -> RoleContext:
    return RoleContext("trainer", "here", Path("runs/x"), cluster("cpu"), run, Addresses("", "", {}), False)


def test_a_process_that_computes_knows_its_type_and_agrees_with_others_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    monkeypatch.setattr("streamrl.machine.compute_type.probe", lambda folder: SLOW)
    monkeypatch.setattr("streamrl.machine.compute_type.this_cpu", lambda: OLD)
    (tmp_path / "model").mkdir()
    for name, text in (("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "")):
        (tmp_path / "model" / name).write_text(text)
    run = RunConfig(model=ModelConfig(path=str(tmp_path / "model")))
    plain = context(run)
    computing = plain.computing()
    assert (plain.run.model.dtype, computing.run.model.dtype) == ("auto", "float32")
    assert computing.agreement == plain.agreement
    assert computing.agreement["run model.dtype"] == "auto"
    assert computing.wire_type == "float32"
    assert computing.compute_type_status["dtype"] == "float32" and "AVX2" in computing.compute_type_status["dtype_why"]
    assert plain.compute_type_status == {}
    by_hand = ModelConfig(path="anywhere", dtype="bfloat16")
    assert choose_in_process(by_hand, cuda=False).dtype == "bfloat16"


def test_each_rank_of_a_trainer_asks_about_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=0: {0: (8, 9), 1: (7, 5)}[device])
    monkeypatch.setattr(
        "streamrl.training.trainer_process.TrainerProcess", lambda context: SimpleNamespace(run=lambda: context)
    )
    on_gpus = cluster("cpu").model_copy(update={"hardware": "cuda"})
    monkeypatch.setattr(RoleContext, "load", lambda *_: replace(context(RunConfig()), cluster=on_gpus))
    args = Namespace(role="trainer", site="", run_dir=tmp_path, resume=False, name=None, node=1)

    def rank(number: int) -> str:
        monkeypatch.setenv("LOCAL_RANK", str(number))
        begun: Any = _role(args)
        return str(begun.run.model.dtype)

    assert [rank(0), rank(1)] == ["bfloat16", "float32"]


def test_the_status_names_types_once_or_by_role_where_they_differ() -> None:
    def status(**types: str) -> RunStatus:
        roles = {
            name: {"role": "trainer" if name == "trainer" else "instance", "state": "idle", "since": 0.0, "dtype": one}
            | ({"dtype_why": "measured"} if one else {})
            for name, one in types.items()
        }
        values = {"run": "r", "state": "running", "step": 0, "steps": 1, "started_at": 0.0, "updated_at": 0.0}
        return RunStatus.model_validate(values | {"roles": roles})

    assert status(trainer="", a="").types == ""
    assert status(trainer="float32", a="float32").types == "float32"
    assert status(trainer="bfloat16", a="float32", b="float32").types == "trainer bfloat16, instances float32"
    assert status(trainer="float32", a="float32").why_types == "trainer, a: float32 (measured)"
