"""Scores of mutants (`mutants.py`), the explanations of those that survive, and the summary of both."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXPLAINED = Path(__file__).with_name("mutants_explained.toml")
LEAST = 0.9
"""Share of a module's mutants, without equivalent ones, that its tests kill."""
EQUIVALENT = "Equivalent"
"""Begins the explanation of a mutant that computes the same."""


@dataclass
class Score:
    """What the tests of one module noticed."""

    possible: int
    """Mutants that could be made."""
    mutants: int
    """Mutants that were run."""
    killed: int
    by: dict[str, int]
    """Those killed, by verdict: 'killed' by a test, 'broken' at import, 'time'."""
    seconds: float
    survivors: list[dict[str, Any]]
    """line, operator, was, becomes, and why it may survive (empty: nobody has said)."""

    @property
    def share(self) -> float:
        """Share of the mutants that were killed."""
        return self.killed / self.mutants if self.mutants else 1.0

    @property
    def equivalent(self) -> int:
        """Survivors that no input can tell from the original, as their explanation says."""
        return sum(one["why"].startswith(EQUIVALENT) for one in self.survivors)

    @property
    def share_of_different(self) -> float:
        """Share of the mutants that are not equivalent that were killed."""
        different = self.mutants - self.equivalent
        return self.killed / different if different else 1.0


def explanations() -> dict[str, dict[tuple[str, str], str]]:
    """Return why a mutant may survive, by module and (was, becomes)."""
    kept: dict[str, dict[tuple[str, str], str]] = {}
    for one in tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("survivor", []):
        kept.setdefault(one["module"], {})[one["was"], one["becomes"]] = one["why"]
    return kept


def problems(scores: dict[str, Score], kept: dict[str, dict[tuple[str, str], str]]) -> list[str]:
    """Return what is wrong: low scores, survivors without an explanation, explanations without a survivor."""
    found = []
    for path, result in scores.items():
        if result.share_of_different < LEAST:
            found.append(f"{path}: {result.share_of_different:.1%} of the mutants are killed, expected {LEAST:.0%}")
        if unexplained := sum(not one["why"] for one in result.survivors):
            found.append(f"{path}: {unexplained} survivors without an explanation")
        survived = {(one["was"], one["becomes"]) for one in result.survivors}
        if result.mutants == result.possible:
            stale = [becomes for was, becomes in kept.get(path, {}) if (was, becomes) not in survived]
            found += [f"{path}: no survivor becomes {becomes!r}" for becomes in stale]
    return found


def table(scores: dict[str, Score], settings: str) -> str:
    """Return the summary as Markdown."""
    made, killed = sum(one.mutants for one in scores.values()), sum(one.killed for one in scores.values())
    equal = sum(one.equivalent for one in scores.values())
    lines = [
        "# Mutants",
        "",
        f"{killed} of {made} mutants killed ({killed / made:.1%}); {killed / (made - equal):.1%} of those that are not",
        f"equivalent (no input can tell them from the original). {settings} Command: `make test-mutants`;",
        "[how to read this](../../CONTRIBUTING.md#mutants).",
        "",
        "| module | possible | run | killed | score | equivalent | score without them | survivors explained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path, one in sorted(scores.items()):
        explained = sum(bool(survivor["why"]) for survivor in one.survivors)
        row = (f"`{path}`", one.possible, one.mutants, one.killed, f"{one.share:.1%}", one.equivalent)
        shares = (f"{one.share_of_different:.1%}", f"{explained} of {len(one.survivors)}")
        lines.append(f"| {' | '.join(map(str, (*row, *shares)))} |")
    lines += ["", "## Survivors", ""]
    for path, one in sorted(scores.items()):
        for survivor in one.survivors:
            place = f"`{path}`:{survivor['line']} ({survivor['operator']})"
            lines.append(f"- {place}: `{survivor['was']}` -> `{survivor['becomes']}`. {survivor['why'] or 'Open.'}")
    return "\n".join(lines) + "\n"


def load(path: Path) -> dict[str, Score]:
    """Return the scores of an earlier run."""
    return (
        {name: Score(**one) for name, one in json.loads(path.read_text())["modules"].items()} if path.exists() else {}
    )


def write(folder: Path, scores: dict[str, Score], seed: int) -> None:
    """Write mutants.json and mutants.md."""
    modules = {path: asdict(scores[path]) for path in sorted(scores)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutants.json").write_text(json.dumps({"seed": seed, "modules": modules}, indent=1) + "\n")
    sampled = f"Where fewer were run than are possible, they are a sample, drawn with seed {seed}."
    (folder / "mutants.md").write_text(table(scores, sampled))
