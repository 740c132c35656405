"""The catalogue of devices and what a user's file may change."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scheduler.cost.hardware import CATALOGUE, CPU, Device, device, devices_from, known_devices, peak_tflops, this_cpu
from streamrl.machine.gpus import parse_gpus

EXPECTED = ("H20", "H800", "H100", "H200", "A100-80", "L40S", "RTX4090", "B200", "MI300X")
RATES = {"bf16_tflops": 100.0, "memory_gb": 48.0, "memory_bandwidth_gb_s": 900.0, "link_gb_s": 64.0}


def test_every_device_has_sources_and_a_dated_price() -> None:
    devices = known_devices()
    assert set(EXPECTED) | {CPU} <= set(devices)
    for one in devices.values():
        assert one.source and one.network_source
        assert one.price is not None and re.fullmatch(r"\d{4}-\d{2}", one.price.date) and one.price.source


@pytest.mark.parametrize("one", CATALOGUE.values(), ids=lambda one: one.name)
def test_every_figure_says_where_it_was_looked_up_or_that_it_was_not(one: Device) -> None:
    assert re.search(r"https://|arXiv \d{4}\.\d{5}", one.source)
    assert re.search(r"https://|arXiv \d{4}\.\d{5}|^assumption: |not looked up", one.network_source)


def test_the_papers_gpus_keep_its_figures() -> None:
    rows = {name: CATALOGUE[name] for name in ("H20", "H800")}
    assert {name: (one.bf16_tflops, one.memory_bandwidth_gb_s, one.link_gb_s) for name, one in rows.items()} == {
        "H20": (148.0, 4000.0, 900.0),
        "H800": (989.5, 3350.0, 400.0),
    }
    assert [one.price.usd_per_hour for one in rows.values() if one.price] == [1.0, 2.85]


@pytest.mark.parametrize(
    ("name", "mib", "gib"),
    [
        ("H20", 97_871, 96),
        ("H800", 81_559, 80),
        ("H100", 81_559, 80),
        ("H200", 143_771, 141),
        ("A100-80", 81_920, 80),
        ("L40S", 46_068, 48),
        ("RTX4090", 24_564, 24),
        ("B200", 183_359, 180),
        ("MI300X", 196_592, 192),
    ],
)
def test_memory_is_what_a_launch_reads_of_the_device(name: str, mib: int, gib: int) -> None:
    (gpu,) = parse_gpus([f"GPU-a, {name}, {mib}, 4, 570.124.06"], [])
    assert CATALOGUE[name].memory_gb == pytest.approx(gpu.total_bytes / 1e9)
    assert CATALOGUE[name].memory_gb == pytest.approx(gib * 2**30 / 1e9, rel=0.07), "the L40S keeps the most for ECC"


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("H100", 1979.0),
        ("H200", 1979.0),
        ("A100-80", 624.0),
        ("L40S", 733.0),
        ("RTX4090", 330.4),
        ("B200", 4500.0),
        ("MI300X", 2614.9),
    ],
)
def test_rates_are_half_of_what_vendors_print_with_sparsity(name: str, sparse: float) -> None:
    # the L40S's table itself is not exactly twofold: 362.05 and 733
    assert CATALOGUE[name].bf16_tflops == pytest.approx(sparse / 2, rel=0.015)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("h100", "H100"), ("RTX 4090", "RTX4090"), ("nvidia-h200", "H200"), ("a100 80", "A100-80"), ("cpu", CPU)],
)
def test_spelling_does_not_matter(written: str, meant: str) -> None:
    assert device(written).name == meant


@pytest.mark.parametrize(
    ("wrong", "near"), [("H10", "H100"), ("L40", "L40S"), ("A100", "A100-80"), ("MI300", "MI300X")]
)
def test_an_unknown_device_is_told_with_the_nearest_names(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean .*{near}"):
        device(wrong)


def test_a_users_file_changes_only_what_it_names_and_says_so() -> None:
    changed = devices_from({"h100": {"usd_per_hour": 2.1, "price_date": "2026-01", "memory_gb": 94}})["H100"]
    assert changed.memory_gb == 94 and changed.bf16_tflops == CATALOGUE["H100"].bf16_tflops
    assert changed.price is not None and (changed.price.usd_per_hour, changed.price.date) == (2.1, "2026-01")
    assert "user's file (memory_gb)" in changed.source and CATALOGUE["H100"].source in changed.source
    assert known_devices({"H100": changed})["H100"] is changed


def test_a_users_file_adds_a_device() -> None:
    made = devices_from({"Z1": {**RATES, "source": "vendor's page"}})
    assert made["Z1"].source == "vendor's page" and made["Z1"].price is None
    assert device("z1", known_devices(made)).memory_gb == 48.0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (None, "by name"),
        ({"H100": 3}, "figures by key"),
        ({"H100": {"usd_per_hour": 0}}, "positive"),
        ({"H100": {"usd_per_hour": -1}}, "positive"),
        ({"H100": {"usd_per_hour": "2"}}, "positive number"),
        ({"H100": {"memory_gb": 0}}, "memory_gb"),
        ({"H100": {"memory_gb": float("nan")}}, "memory_gb"),
        ({"H100": {"link_gb_s": True}}, "link_gb_s"),
        ({"H100": {"network_gbit_s": -5}}, "network_gbit_s"),
        ({"H100": {"memory": 80}}, "did you mean memory_gb"),
        ({"Z1": {"memory_gb": 80}}, "also needs bf16_tflops"),
        (
            {"H100": {"usd_per_hour": 1}, "L40S": {"usd_per_hour": 2}, "nvidia h-100": {"memory_gb": 60}},
            "device nvidia h-100 is H100 in another spelling: write all its figures below H100",
        ),
        ({"Z1": RATES, "z1": RATES}, "device z1 is Z1 in another spelling"),
    ],
)
def test_mistakes_in_a_users_file_are_refused(values: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        devices_from(values)


def test_this_cpu_is_one_core_with_its_share_of_the_memory() -> None:
    core = this_cpu()
    assert core.per_machine >= 1 and core.memory_gb > 0
    assert "estimate" in core.source


def test_the_peak_of_devices_is_that_of_the_catalogue() -> None:
    assert peak_tflops("NVIDIA H100", 8) == pytest.approx(8 * 989.5)
    assert peak_tflops("cpu", 2) is None and peak_tflops("H1000000", 2) is None
