"""Finding the answer in a completion: each rule on the cases that a naive one gets wrong."""

from __future__ import annotations

import pytest

from streamrl.tasks.answers import EXTRACTORS, full, last_line, last_number, tagged


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer> 4 \n</answer> bye", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer>4", "3"),
        ("I write <answer> now: <answer>4</answer>", "4"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("</answer>4<answer>", None),
        ("<answer></answer>", None),
        ("<answer>  </answer>", None),
        ("4", None),
        ("", None),
    ],
)
def test_the_tag_rule_takes_the_last_complete_tag(text: str, expected: str | None) -> None:
    assert tagged(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 12.", "12"),
        ("12 + 7 = 19", "19"),
        ("= 1,234.", "1234"),
        ("12,345,678.90 in all", "12345678.90"),
        ("1,2,3,141", "141"),
        ("1,23", "23"),
        ("it is -5", "-5"),
        ("x=-5", "-5"),
        ("(-5)", "-5"),
        ("**-7**", "-7"),
        ("\u22125", "-5"),
        ("-$5.50", "-5.50"),
        ("$1,234", "1234"),
        ("3-4", "4"),
        ("3 - 4", "4"),
        ("(2)-5", "5"),
        ("COVID-19", "19"),
        ("2024-01-15", "15"),
        ("+7", "7"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("5.", "5"),
        ("50%", "50"),
        ("1e5", "1e5"),
        ("1e999999999", "999999999"),  # not a number that takes gigabytes to write out
        ("3rd", "3"),
        ("no number", None),
        ("\u0663", None),
        ("", None),
    ],
)
def test_last_number_reads_numbers_as_written(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize("text", ["1" * 200_000, "1," * 100_000, "-" * 200_000, "<answer>" * 30_000, " \n" * 100_000])
@pytest.mark.timeout(10)
def test_no_completion_takes_long(text: str) -> None:
    for extract in EXTRACTORS.values():
        extract(text)


def test_last_line_skips_blank_lines_and_full_keeps_all() -> None:
    assert last_line("first\n  second \n\n") == "second"
    assert full("  first\nsecond \n") == "first\nsecond"
    assert last_line(" \n ") is None
    assert full(" \n ") is None
