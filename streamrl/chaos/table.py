"""Tables of a study's results by kind of fault. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from streamrl.chaos.audit import Audit, Curve
from streamrl.chaos.faults import OF_INSTANCES, FaultKind
from streamrl.chaos.study import Result
from streamrl.report.terminal import plain_table

COLUMNS = (
    "fault",
    "times",
    "noticed in",
    "others serving in",
    "recovered in",
    "tokens kept",
    "regenerated",
    "samples lost",
    "trained twice",
    "hangs",
)
NOT_SEEN = "-"
AFTER = {
    "the death of an instance": OF_INSTANCES - {FaultKind.INSTANCE_HANG, FaultKind.ENGINE_HANG},
    "an instance fell silent (recovery.suspect_s)": frozenset({FaultKind.INSTANCE_HANG}),
    "an engine hung (deadlines.heartbeat_s)": frozenset({FaultKind.ENGINE_HANG}),
}
"""Kinds of faults after which other instances take over, by description."""


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a row for each kind, in the order of `FaultKind`; times are the median and, of several, the longest."""
    found: list[tuple[str, ...]] = []
    for kind in FaultKind:
        of_kind = [one for one in results if one.kind is kind]
        if not of_kind:
            continue
        share = kept_share(of_kind)
        found.append(
            (
                str(kind),
                str(len(of_kind)),
                _times([one.noticed_s for one in of_kind]),
                _times([one.serving_s for one in of_kind]),
                _times([one.recovered_s for one in of_kind]),
                NOT_SEEN if share is None else f"{share:.1%}",
                str(sum(again)) if (again := _regenerated(of_kind)) else NOT_SEEN,
                str(sum(one.lost for one in of_kind)),
                str(sum(one.twice for one in of_kind)),
                str(sum(bool(one.hang) for one in of_kind)),
            )
        )
    return found


def _times(seconds: Sequence[float | None]) -> str:
    found = [one for one in seconds if one is not None]
    if not found:
        return NOT_SEEN
    missing = f" ({len(found)} of {len(seconds)})" if len(found) < len(seconds) else ""
    longest = f", at most {max(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.median(found):.1f} s{longest}{missing}"


def _regenerated(results: Sequence[Result]) -> list[int]:
    return [one.regenerated for one in results if one.regenerated is not None]


def kept_share(results: Sequence[Result]) -> float | None:
    """Return the share of tokens kept, of all lost instances; None: none was lost with requests."""
    kept, again = sum(one.kept or 0 for one in results), sum(_regenerated(results))
    return kept / (kept + again) if kept + again else None


def rich_table(results: Sequence[Result]) -> Table:
    """Return the results as a table for a terminal."""
    table = plain_table(*COLUMNS)
    for row in rows(results):
        table.add_row(*row)
    return table


def problems(results: Sequence[Result], found: Audit | None, ended: str) -> list[str]:
    """Return the reasons why a run has not passed; empty: it has.

    Args:
        found: findings of the last audit; None: the audit failed.
        ended: why the study ended before its time.
    """
    found_wrong = [] if results else ["no fault was injected"]
    for one in results:
        what = f"fault {one.number}, {one.kind} of {one.target}"
        if one.hang:
            found_wrong.append(f"{what}: {one.hang}")
        if one.ended and not one.harmless:
            found_wrong.append(f"{what}: the run ended: {one.ended}")
        if one.unnoticed:
            found_wrong.append(f"{what}: damaged weights were loaded unnoticed")
        if one.lost or one.twice:
            found_wrong.append(f"{what}: {one.lost} samples lost, {one.twice} trained twice")
    if ended:
        found_wrong.append(ended)
    return [*found_wrong, *(found.faults if found is not None else ["the run's files cannot be audited"])]


def summary(results: Sequence[Result], found: Audit | None, curve: Curve | None) -> list[str]:
    """Return the sentences below the table."""
    sentences = []
    if found is not None:
        sentences.append(
            f"{found.samples} samples trained in {found.steps} steps: {found.lost} lost, {found.twice} trained twice, "
            f"{found.malformed} malformed; {found.open} prompts open"
        )
        if found.voids:
            causes = ", ".join(f"{count} {cause}" for cause, count in found.voids.items())
            sentences.append(f"{sum(found.voids.values())} samples void, which no step trains, by cause: {causes}")
    for what, kinds in AFTER.items():
        if serving := [one.serving_s for one in results if one.kind in kinds and one.serving_s is not None]:
            sentences.append(f"after {what} others served in at most {max(serving):.1f} s")
    if (share := kept_share(results)) is not None:
        sentences.append(f"{share:.1%} of interrupted tokens kept (those not yet reported are estimated from the rate)")
    if curve is not None:
        sentences.append(
            f"reward: {curve.first:.3f} in the first {curve.steps} steps, {curve.last:.3f} in the last {curve.steps} "
            f"(one step's mean deviates by {curve.deviation:.3f})"
        )
    return sentences


def markdown(
    results: Sequence[Result],
    left_out: Mapping[FaultKind, str],
    sentences: Sequence[str],
    wrong: Sequence[str],
    about: str,
) -> str:
    """Return the text of `chaos.md`."""
    lines = ["# Faults in a run", "", about, "", f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows(results)]
    lines += ["", "Times are medians, seconds from the injection until it was seen; status.json is up to 2 s old.", ""]
    lines += [f"- {one}" for one in sentences]
    lines += ["", "Passed." if not wrong else "Not passed:", *(f"- {one}" for one in wrong), ""]
    done = {one.kind for one in results}
    lines += ["What was done:", "", *(f"- {kind}: {kind.what}" for kind in FaultKind if kind in done)]
    if left_out:
        lines += ["", "Left out:", "", *(f"- {kind}: {why}" for kind, why in left_out.items())]
    return "\n".join(lines) + "\n"


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return every outcome as a dictionary, with the figures derived from it."""
    return [asdict(one) | {"regenerated": one.regenerated, "harmless": one.harmless} for one in results]
