"""Rewards of the run files that correspond to examples of other libraries."""

from __future__ import annotations

import difflib
import re
from typing import Any


def gsm8k(completion: str, *, prompt: str, answer: Any) -> float:
    """Return 1 if the number behind the last `####` is the ground truth of a row that verl has prepared, else 0."""
    found = re.findall(r"####\s*(-?[\d.,]+)", completion)
    return float(bool(found) and found[-1].rstrip(".").replace(",", "") == str(answer["ground_truth"]).replace(",", ""))


def reversed_text(completion: str, *, prompt: str, answer: Any) -> float:
    """Return how similar the text in the last `<reversed_text>` tag is to the answer, from 0 to 1."""
    found = re.findall(r"<reversed_text>(.*?)</reversed_text>", completion, re.DOTALL)
    return difflib.SequenceMatcher(None, found[-1].strip(), str(answer)).ratio() if found else 0.0
