"""Numbers that YAML 1.1 reads as something else (010 as 8, 2:30 as 150) are refused wherever a user may write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from streamrl.config.load import ConfigError, load_cluster, load_plain, load_resolved, load_run, save_resolved
from streamrl.errors import UserError
from streamrl.planning.planning_inputs import load_devices

ROOT = Path(__file__).parents[2]
INSTEAD = "write a number in plain decimals, without ':' or a leading 0, a text in quotes"


def refused(load: Callable[[], object]) -> list[str]:
    with pytest.raises(UserError) as caught:
        load()
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("written", "read"),
    [("010", "8"), ("-010", "-8"), ("0_12", "10"), ("2:30", "150"), ("1:30.5", "90.5"), ("010.5", "10.5")],
)
def test_a_run_file_and_an_override_with_such_a_number(tmp_path: Path, written: str, read: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: a\noptimizer:\n  betas: [0.9, {written}]\n")
    what = f"'optimizer.betas.1' is {written}, which YAML reads as {read}: {INSTEAD}"
    assert refused(lambda: load_run(path)) == [f"{path}:3: {what}"]
    for override in (f"optimizer.betas.1={written}", f"optimizer={{betas: [0.9, {written}]}}"):
        assert refused(lambda override=override: load_run(None, [override])) == [f"--set {override}: {what}"]


def test_all_of_a_cluster_file_with_names_and_aliases_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "hardware: cpu\nsites:\n  010: {trainer: {ranks: &ranks 02}}\n"
        "  b:\n    generation:\n    - {replicas: *ranks}\n    - {price_per_hour: 2:30, price_per_hour: 1}\n"
    )
    assert refused(lambda: load_cluster(path)) == [
        f"{path}:3: 'sites.010.trainer.ranks' is 02, which YAML reads as 2: {INSTEAD}",
        f"{path}:3: the key 010, which YAML reads as 8: {INSTEAD}",
        f"{path}:7: 'sites.b.generation.1.price_per_hour' is 2:30, which YAML reads as 150: {INSTEAD}",
        f"{path}:7: key 'price_per_hour' again, first on line 7",
    ]


def test_a_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text("H100:\n  usd_per_hour: 2:30\n")
    expected = f"--hardware {path}:2: 'H100.usd_per_hour' is 2:30, which YAML reads as 150: {INSTEAD}"
    assert refused(lambda: load_devices(path)) == [expected]


def test_a_resolved_configuration(tmp_path: Path) -> None:
    save_resolved(tmp_path, load_cluster(ROOT / "cluster_configs/local.yaml"), load_run(None, ["steps=10"]))
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("  steps: 10\n", "  steps: 010\n"))
    with pytest.raises(ConfigError, match=r"'run\.steps' is 010, which YAML reads as 8: "):
        load_resolved(tmp_path)


@pytest.mark.parametrize("written", ['!!int "0:x"', "1" + ":00" * 200 + ".0"])
def test_what_is_no_number_at_all_is_a_mistake_as_well(tmp_path: Path, written: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"steps: {written}\n")
    (line,) = refused(lambda: load_run(path))
    assert line.startswith(f"{path}:1: 'steps' is ") and line.endswith(f", which is no plain number: {INSTEAD}")


def test_texts_and_plain_numbers_are_what_they_were(tmp_path: Path) -> None:
    kept = {"a": "010", "b": "2:30", "c": 0, "d": 0.5, "e": -0.25, "f": 10, "g": 1e-5, "h": "08", "i": "2026-01"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"chat_template_kwargs": kept}}) + "seed: 0x10\nsteps: 1_000\n")
    run = load_run(path, ["name='010'", "optimizer.lr=0.01"])
    assert run.model.chat_template_kwargs == kept
    assert (run.seed, run.steps, run.name, run.optimizer.lr) == (16, 1000, "010", 0.01)


def test_no_file_of_the_repository_has_such_a_number() -> None:
    files = [
        file
        for top in ("cluster_configs", "examples", "experiments", "streamrl")
        for file in (ROOT / top).rglob("*.yaml")
    ]
    assert len(files) > 30
    for file in files:
        assert load_plain(file)
