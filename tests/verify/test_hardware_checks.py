"""The check of a machine: each stage by the code that a run uses, and what fails ends one stage only."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from streamrl.cli.verify import command
from streamrl.config.load import load_cluster, load_run
from streamrl.runtime.module_process import run_module
from streamrl.training import fused_logprobs, merged_attention, token_logprobs
from streamrl.training.host_offload import HostOffload
from streamrl.verify import hardware_attention, hardware_checks, hardware_stages, tiny_run
from streamrl.verify.hardware_checks import StageResult, as_json, check_hardware, table_of
from streamrl.verify.hardware_measurement import Measurement

SMALL = replace(
    hardware_stages.CPU,
    **{"side": 32, "megabytes": 1, "attention": (8, (12, 4)), "layers": 1, "hidden": 32, "heads": 4, "inner": 32},
    **{"vocabulary": 64, "contexts": (20, 40)},
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_stages, "CPU", SMALL)
    for stage in (hardware_stages, hardware_attention):
        monkeypatch.setattr(stage, "SECONDS", 0.0)


def measured(stage: str) -> dict[str, Measurement]:
    return {one.what: one for one in hardware_stages.STAGES[stage]()}


def test_every_stage_of_the_kit_is_known_to_the_process_that_runs_it() -> None:
    assert tuple(hardware_stages.STAGES) == hardware_checks.STAGES


@pytest.mark.parametrize("stage", ["devices", "products", "memory"])
def test_figures_of_a_machine_are_positive(stage: str) -> None:
    found = measured(stage)
    assert found and all(one.value is not None and one.value > 0 for one in found.values() if one.what != "GPUs")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_what_a_machine_without_gpus_cannot_measure_is_said() -> None:
    assert "without CUDA" in measured("devices")["GPUs"].note or "no GPU" in measured("devices")["GPUs"].note
    assert measured("peers")["peers"].value is None and str(measured("peers")["peers"]) == "--"


def test_a_trainers_state_goes_to_the_host_and_back_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured("turns")
    assert list(found) == ["trainer's state, to host memory", "trainer's state, back"]
    assert all(one.value is not None and one.value > 0 for one in found.values())
    restore = HostOffload.restore

    def wrong(offload: HostOffload) -> None:
        restore(offload)
        states[0].add_(1)

    states: list[torch.Tensor] = []
    hold = HostOffload.hold
    monkeypatch.setattr(HostOffload, "hold", lambda self, state: (states.extend(state), hold(self, state))[1])
    monkeypatch.setattr(HostOffload, "restore", wrong)
    with pytest.raises(ValueError, match="other bits"):
        measured("turns")


class FakeGpus:
    """GPUs that copy in the background of a clock: a copy takes 10 ms, from GPU 1 to 2 20 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        self._open: list[tuple[tuple[str, str], float]] = []
        monkeypatch.setattr(hardware_stages, "time", SimpleNamespace(perf_counter=self._clock))
        cuda = {"is_available": lambda: True, "device_count": lambda: 3, "synchronize": self._synchronize}
        for name, function in (cuda | {"can_device_access_peer": lambda *_: True}).items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch, "ones", lambda count, device: self._tensor(device))
        monkeypatch.setattr(torch, "empty_like", lambda _, device: self._tensor(device))

    def _clock(self) -> float:
        self._now += 1e-4
        return self._now

    def _tensor(self, device: str) -> Any:
        def copy(source: Any) -> None:
            pair = (source.device, device)
            self._open.append((pair, 0.02 if pair == ("cuda:1", "cuda:2") else 0.01))

        return SimpleNamespace(device=device, numel=lambda: 2**20, copy_=copy)

    def _synchronize(self, device: str = "cuda:0") -> None:
        for one in [one for one in self._open if device in one[0]]:
            self._open.remove(one)
            self._now += one[1]


def test_the_slowest_pair_of_gpus_is_found_though_the_first_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch)
    found = measured("peers")["peers, slowest pair"]
    assert found.note == "1 -> 2; all have peer access"
    assert found.value == pytest.approx(2**22 / 0.02 / 1e9, rel=0.1)


def test_ranks_that_sum_a_tensor_are_timed(tmp_path: Path) -> None:
    hardware_stages._all_reduce(0, 1, 1, f"file://{tmp_path}/meet", str(tmp_path / "seconds"))
    assert float((tmp_path / "seconds").read_text()) > 0


def test_attention_is_compared_with_lone_sequences() -> None:
    found = measured("attention")
    assert found["attention, error"].value == pytest.approx(0, abs=1e-5)
    assert found["attention, error, window 100"].value == pytest.approx(0, abs=1e-5)
    assert found["attention, lone sequences"].value


def test_the_head_is_compared_with_exact_arithmetic() -> None:
    found = measured("head")
    assert found["head, error of log-probabilities"].value == pytest.approx(0, abs=1e-5)
    assert found["head, error of gradients"].value == pytest.approx(0, abs=1e-5)
    assert found["head, a call"].value and len(found) == 3


def test_a_head_that_is_wrong_fails_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> tuple[torch.Tensor, ...]:
        logprobs, *others = fused_logprobs.OF_CPUS.log_sums(*arguments)
        return 1.01 * logprobs, *others

    monkeypatch.setattr(token_logprobs, "kernels_for", lambda _: fused_logprobs.OF_CPUS._replace(log_sums=wrong))
    with pytest.raises(ValueError, match="the output head on cpu is wrong: a log-probability differs by"):
        measured("head")


def test_an_attention_that_is_wrong_fails_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_attention, "_share", lambda lse, total: torch.ones_like(lse).T[..., None])
    with pytest.raises(ValueError, match="attention on cpu is wrong: relative error"):
        measured("attention")


def _lose_a_gradient(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Let one of the gradients that are asked for be NaN."""
    grad = torch.autograd.grad

    def wrong(*arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(one * float("nan") if at == place else one for at, one in enumerate(grad(*arguments)))

    monkeypatch.setattr(torch.autograd, "grad", wrong)


def test_an_attention_whose_output_is_not_a_number_fails_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = merged_attention.MergedAttention.apply
    monkeypatch.setattr(merged_attention.MergedAttention, "apply", lambda *inputs: apply(*inputs) + float("nan"))
    with pytest.raises(ValueError, match="attention on cpu is wrong: relative error nan"):
        measured("attention")


@pytest.mark.parametrize(
    ("stage", "place"), [("attention", 0), ("attention", 1), ("attention", 2), ("head", 0), ("head", 1)]
)
def test_a_gradient_that_is_not_a_number_fails_its_stage(
    stage: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose_a_gradient(monkeypatch, place)
    with pytest.raises(ValueError, match="on cpu is wrong: relative error nan"):
        measured(stage)


def test_the_trainer_is_timed_at_each_context() -> None:
    found = measured("trainer")
    assert list(found) == [f"trainer, {n} tokens{what}" for n in (20, 40) for what in ("", ", memory")]
    assert "80 tokens of a prompt with 4 completions" in found["trainer, 40 tokens"].note  # 4 + 36 + 3 x 9, filled up


def test_weights_are_coded_and_must_come_back_bit_for_bit() -> None:
    found = measured("weights")
    delta, whole = found["weights, a delta, 1 % changed"], found["weights, a complete tensor"]
    assert all(one.value and "to the same bits" in one.note for one in (delta, whole))


def test_a_stage_that_fails_is_one_line_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_first(module: str, stage: str, **options: Any) -> Any:
        return run_module("no_such_module" if stage == "memory" else module, stage, **options)

    monkeypatch.setattr(hardware_checks, "run_module", fails_first)
    said: list[str] = []
    found = check_hardware(said.append, ("memory", "devices"))
    assert said == ["memory (1 of 2)", "devices (2 of 2)"]
    assert found[0].measurements == () and "No module named no_such_module" in found[0].error
    assert found[1].error == "" and found[1].measurements[0].what == "CPU"


def test_a_stage_without_an_end_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_checks, "STAGE_S", 0.01)
    (found,) = check_hardware(lambda _: None, ["devices"])
    assert found.error == "no end within 0 s"


RESULTS = [
    StageResult("products", 1.0, (Measurement("products in float32", 0.1234567, "TFLOP/s", "2 threads"),), ""),
    StageResult("peers", 1.0, (Measurement("peers", None, "", "0 GPU(s)"),), "[it] died"),
]


def test_the_table_has_figures_and_failures() -> None:
    console = Console(width=200, record=True)
    console.print(table_of(RESULTS))
    text = console.export_text()
    assert "0.1235 TFLOP/s" in text and "--" in text and "failed" in text and "[it] died" in text


def test_the_file_names_packages_and_no_host() -> None:
    written = as_json(RESULTS)
    assert written["packages"]["torch"] and written["stages"][1]["error"] == "[it] died"
    assert platform.node() not in json.dumps(written)


@pytest.mark.parametrize(("gpus", "schedule"), [(0, "stream"), (1, "colocated"), (4, "stream")])
def test_the_files_of_the_tiny_run_are_those_of_a_run(tmp_path: Path, gpus: int, schedule: str) -> None:
    tiny_run.tiny_files(tmp_path, gpus)
    cluster, run = load_cluster(tmp_path / "cluster.yaml"), load_run(tmp_path / "run.yaml")
    assert (cluster.hardware, run.schedule.name) == ("cuda" if gpus else "cpu", schedule)


@pytest.mark.parametrize("arguments", [[], ["--hardware", "smollm2-135m"], ["smollm2-135m", "--out", "x.json"]])
def test_a_model_or_the_hardware_is_checked_and_not_both(arguments: list[str]) -> None:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2 and "expected a MODEL, or --hardware" in done.output
