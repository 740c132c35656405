"""The reward `math_verify`: whether the final expression of a completion equals a reference answer."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable
from decimal import Decimal
from itertools import product
from typing import Any

from streamrl.rollouts.void import VoidCause
from streamrl.tasks.answers import tagged
from streamrl.tasks.extras import import_extra
from streamrl.tasks.void_reward import VoidReward

COMPUTING_S = 10.0
"""Most seconds of a core for one comparison: a tower of powers would take for ever."""
SMALL, RELATIVE = 1e-3, 1e-4
"""Numbers below the first also differ if they do so by more than the second, as a part of the larger one: math-verify
compares six decimal places, so that all numbers below 5e-7 were equal."""

_AMOUNT = re.compile(r"\\\$(?=\.?\d)")
"""The dollar of an amount, as it is written in Markdown and LaTeX."""
_MARKS = re.compile(r"(?<![\w)\]}*])\*{2,3}(?=[^\s*])|(?<=[^\s*])\*{2,3}(?![\w(\\{*]|[-+.]\d)")
"""Beginning or end of bold text; the ** of a power stands between two operands."""
_EXPONENT = re.compile(r"(?<![\w.\\])(?<!\d,)(\d+(?:\.\d+)?|\.\d+)([eE])([+-]?)(\d{1,3})(?![\w^]|\.\d)")
"""A number such as 1.5e-3."""


def math_verify_score(completion: str, answer: Any) -> float:
    r"""Return 1.0 if the completion's final expression equals the reference, else 0.0.

    The final expression is that of the last complete <answer> tag, if there is one in it. Of several boxes all
    together may be the answer, a set, or the last one.

    The reference is a number, LaTeX with or without dollars ('\frac{1}{2}', '$x^2$'), or a solution that
    ends with '#### 72' as in GSM8K.

    Raises:
        ValueError: the reference cannot be read as mathematics.
        VoidReward: it takes more than `COMPUTING_S` of a core.
    """
    math_verify = import_extra("math_verify", "reward math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no limit but ours
    return float(_within(COMPUTING_S, lambda: _equals(math_verify, completion, as_text(answer))))


def as_text(answer: Any) -> str:
    """Write a value as text: a float without an exponent, and a whole one as an integer (Parquet's 72.0 means '72').

    Booleans are written as JSON does: 'true' and 'false'.
    """
    if isinstance(answer, bool):
        return json.dumps(answer)
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer)


def _equals(math_verify: Any, completion: str, answer: str) -> bool:
    def parse(text: str) -> list[Any]:
        return list(math_verify.parse(text, parsing_timeout=None))

    def equal(found: list[Any]) -> bool:
        return any(
            math_verify.verify(one, other, timeout_seconds=None) and not _apart(one, other)
            for one, other in product(gold, found)
        )

    reference = answer.rpartition("####")[2].strip()
    if reference and reference == (tagged(completion) or completion.strip()):
        return True  # a letter or a word is no expression
    reference = _AMOUNT.sub("", reference)
    delimited = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    gold: list[Any] = []
    for text in _readings(reference):
        gold += parse(text if delimited else f"${text}$") or parse(text)
    if not gold:
        raise ValueError(f"math-verify cannot read the reference answer {reference[:100]!r}")
    for text in _readings(_readable(completion)):
        if equal(parse(tagged(text) or "") or parse(text)):
            return True
        boxes = text.split("\\boxed")
        if len(boxes) > 2 and equal(parse(f"\\boxed{boxes[-1]}")):
            return True
    return False


def _readable(text: str) -> str:
    r"""Write numbers as math-verify looks for them: apart from what is around them, with an ordinary minus.

    A `\!` ends an expression in plain text, and math-verify drops it from LaTeX: full stops and lines are in the way
    otherwise, as '17.\n-1' is read as 16 and '7/12.' not at all.
    """
    text = re.sub(r"(</?answer>)", r" \1 ", text).replace("\u2212", "-")
    text = _MARKS.sub("", _AMOUNT.sub("", text)).replace("`", " ")
    text = re.sub(r"(?i)(\banswer:|####)(?=\S)", r"\1 ", text)
    text = re.sub(r"(?<=[\d)])\.(?=\s|$)", r" \\!", text)
    text = re.sub(r"(?<=[\d)])(?=[!;?](?:\s|$))", " ", text)
    return re.sub(r"\n(?=[ \t]*+[-+]?[ \t]*+[\d.(])", " \\\\!\n", text)


def _readings(text: str) -> list[str]:
    """Return the text with numbers such as 1.5e-3 written out, for which math-verify takes Euler's e.

    There is a second one if some may be meant so: '2e-3' is 0.002 or 2e - 3.
    """

    def written(found: re.Match[str]) -> str:
        return format(Decimal(found[0]), "f")

    def if_sure(found: re.Match[str]) -> str:
        number, e, sign, power = found.groups()
        euler = e == "e" and sign and power[0] != "0" and "." not in number and number != "1"
        return found[0] if euler else written(found)

    return list(dict.fromkeys((_EXPONENT.sub(written, text), _EXPONENT.sub(if_sure, text))))


def _apart(gold: Any, found: Any) -> bool:
    """Return whether two expressions are small numbers that differ, although six decimal places are the same."""
    sympy = import_extra("sympy", "reward math_verify")
    a, b = (one.rhs if isinstance(one, sympy.Eq) else one for one in (gold, found))
    if a == b or not all(isinstance(one, sympy.Expr) and one.is_number and not one.has(sympy.Add) for one in (a, b)):
        return False  # of a sum, rounding may leave a little more than the right result
    a, b = (sympy.N(one.doit()) for one in (a, b))
    larger = max(abs(a), abs(b))
    return bool(larger < SMALL and abs(a - b) > RELATIVE * larger)


class _OutOfTime(BaseException):
    """The limit was reached; libraries go on after an `Exception`."""


def _within(seconds: float, function: Callable[[], bool]) -> bool:
    """Call a function within a limit on seconds of a core: a machine that stalls makes no right answer wrong.

    Raises:
        VoidReward: it reached the limit.
        Exception: whatever the function raises.
    """

    def end(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again, as a bare `except` may swallow the first
        return function()
    except _OutOfTime:
        text = f"the comparison takes more than {seconds:g} s of a core"
        raise VoidReward(VoidCause.TIMEOUT, text, retry=False) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
