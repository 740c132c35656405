"""Extraction of the answer from a completion: pure functions, one per value of a task's `answer` key.

Each returns None if there is no answer, which scores 0: a verifier never sees an empty string.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# A sign counts only where a number can start: not in '3-4', 'COVID-19', '(2)-1' or '--5'.
# Thousands groups count only when complete and outside lists: '1,234' is one number, '1,2,3,141' are four.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}\-\u2212])(?P<sign>[-\u2212])\$?)?"
    r"(?P<value>"
    r"(?<![0-9],)(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+"
    r")(?P<exponent>[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)


def tagged(completion: str) -> str | None:
    """Return the text of the last complete <answer>...</answer>, stripped.

    >>> tagged("<answer>3</answer> no: <answer> 4 </answer>")
    '4'
    """
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end].strip() or None if start >= 0 else None


def last_number(completion: str) -> str | None:
    """Return the last integer or decimal as plain text: no thousands commas, no leading plus, no trailing period.

    >>> last_number("So 1,230 + 4 = 1,234.")
    '1234'
    """
    numbers = list(_NUMBER.finditer(completion))
    if not numbers:
        return None
    last = numbers[-1]
    value = last["value"].replace(",", "")
    sign = "-" if last["sign"] else ""
    return f"{sign}{'0' if value.startswith('.') else ''}{value}{last['exponent'] or ''}"


def last_line(completion: str) -> str | None:
    """Return the last line that is not blank, stripped."""
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else None


def full(completion: str) -> str | None:
    """Return the whole completion, stripped."""
    return completion.strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "tag": tagged,
    "last_number": last_number,
    "last_line": last_line,
    "full": full,
}
