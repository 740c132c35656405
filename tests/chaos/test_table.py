"""Results in a table, and what counts as not passed."""

from __future__ import annotations

from dataclasses import replace

from streamrl.chaos.audit import Audit
from streamrl.chaos.faults import FaultKind
from streamrl.chaos.study import Result, line
from streamrl.chaos.table import COLUMNS, kept_share, markdown, problems, rows, summary

KILL = Result(1, FaultKind.INSTANCE_KILL, "a-0", 0.0, 3, 0.8, 1.0, 20.0, 25.0, 4, 900, 880, 20)
CLEAN = Audit(9, 54, 162, 6, 0, 0, 0)


def test_a_row_has_the_median_and_the_longest_time_of_its_kind() -> None:
    more = [replace(KILL, number=2, noticed_s=1.2), replace(KILL, number=3, noticed_s=2.0, serving_s=None)]
    service = Result(4, FaultKind.SERVICE_KILL, "service-here", 0.0, 5, 1.0, 9.0, 9.0, 12.0)
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows([service, KILL, *more])]
    assert [row["fault"] for row in table] == ["instance-kill", "service-kill"]
    assert table[0]["noticed in"] == "1.2 s, at most 2.0"
    assert table[0]["others serving in"] == "1.0 s, at most 1.0 (2 of 3)"
    assert (table[0]["tokens kept"], table[0]["regenerated"]) == ("95.7%", "120")
    assert (table[1]["tokens kept"], table[1]["regenerated"]) == ("-", "-")


def test_tokens_that_no_one_received_count_as_generated_again() -> None:
    assert KILL.regenerated == 40
    assert kept_share([KILL]) == 880 / 920
    assert kept_share([replace(KILL, tokens=0, kept=0, unseen=None)]) is None
    assert "880 of 920 tokens kept" in line(KILL, 61.0)


def test_only_the_loss_of_the_disk_or_the_launcher_may_end_the_run() -> None:
    assert KILL.harmless and not replace(KILL, ended="cannot write").harmless
    assert replace(KILL, kind=FaultKind.DISK_FULL, ended="cannot write").harmless


def test_a_run_passes_only_if_nothing_was_lost_doubled_hung_or_left_unseen() -> None:
    assert problems([KILL], CLEAN, "") == []
    assert problems([], CLEAN, "") == ["no fault was injected"]
    assert "cannot be audited" in problems([KILL], None, "")[0]
    assert problems([KILL], replace(CLEAN, faults=("samples trained twice: x",)), "") == ["samples trained twice: x"]
    assert problems([KILL], CLEAN, "the run hangs") == ["the run hangs"]
    for bad in ({"hang": "stuck: x"}, {"lost": 1}, {"twice": 2}, {"unnoticed": True}, {"ended": "failed"}):
        assert len(problems([replace(KILL, **bad)], CLEAN, "")) == 1


def test_the_markdown_has_the_table_the_verdict_and_what_was_left_out() -> None:
    sentences = summary([KILL], CLEAN, None)
    text = markdown([KILL], {FaultKind.LINK_CUT: "no link"}, sentences, [], "About.")
    assert "| instance-kill | 1 | 0.8 s | 1.0 s | 20.0 s | 95.7% | 40 | 0 | 0 | 0 |" in text
    assert "Passed." in text and "- link-cut: no link" in text
    assert "162 samples trained in 9 steps: 0 lost, 0 trained twice, 0 malformed; 6 prompts open" in text
    voids = summary([KILL], replace(CLEAN, voids={"crash": 1, "environment": 4}), None)
    assert "5 samples void, which no step trains, by cause: 1 crash, 4 environment" in voids
    assert "Not passed:\n- it hangs" in markdown([KILL], {}, sentences, ["it hangs"], "About.")
