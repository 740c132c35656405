"""Every constant of the cost model has a source in the comparison with the paper's clusters."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scheduler.cost.hardware import device

sys.path.append(str(Path(__file__).parents[2] / "experiments"))

from plan_constants import DEVICE_SOURCES, OF_THE_SEARCH, SOURCES, constants


def numbers(module: ModuleType) -> set[str]:
    """Names in capitals that a module gives a number."""
    assert module.__file__ is not None
    named = set()
    for line in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(line, ast.Assign):
            targets = line.targets[0].elts if isinstance(line.targets[0], ast.Tuple) else line.targets
            named |= {one.id for one in targets if isinstance(one, ast.Name)}
    return {name for name in named if name.isupper() and isinstance(getattr(module, name), int | float)}


@pytest.mark.parametrize("module", SOURCES, ids=lambda module: module.__name__)
def test_a_constant_has_a_source_or_is_one_of_the_search(module: ModuleType) -> None:
    assert numbers(module) == {*SOURCES[module], *OF_THE_SEARCH.get(module, ())}


def test_the_table_has_every_constant_and_every_figure_of_both_gpus_once() -> None:
    rows = constants()
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names) == sum(map(len, SOURCES.values())) + 2 * (len(DEVICE_SOURCES) + 1)
    assert all(source for _, _, source in rows)
    assert ("H20.memory_bandwidth_gb_s", f"{device('H20').memory_bandwidth_gb_s:g}") in [row[:2] for row in rows]
