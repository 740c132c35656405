"""The reward `math_verify`: right answers get 1 however they are written, near misses 0, and no stall decides."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import math_verify.grader
import pytest

from streamrl.rollouts.void import VoidCause
from streamrl.tasks import math_reward
from streamrl.tasks.math_reward import math_verify_score
from streamrl.tasks.void_reward import VoidReward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So the total is 72.", "72", 1.0),
        ("So the total is $\\boxed{72}$", 72, 1.0),
        ("So the total is 72.", 72.0, 1.0),
        ("So the total is 73.", "72", 0.0),
        ("72 is wrong, it is 27", "72", 0.0),
        ("$\\frac{2}{4}$", "\\frac{1}{2}", 1.0),
        ("0.5", "1/2", 1.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("The answer is 1,080", "1080", 1.0),
        ("it is 72", "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = 72.\n#### 72", 1.0),
        ("it is 24", "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = 72.\n#### 72", 0.0),
        ("", "72", 0.0),
        ("<think>2 is prime</think><answer>5</answer>", "5", 1.0),
        ("3 + 2 = 5. <answer>6</answer>", "5", 0.0),
        ("<answer>1/2</answer>", "\\frac{1}{2}", 1.0),
        ("I answer in <answer> tags </answer>: 5", "5", 1.0),
        ("It is cut off at <answer>5", "5", 1.0),
        ("The answer is \u22125.", "-5", 1.0),
        ("The answer is 5.", "-5", 0.0),
        ("It costs \\$70,000.", "70000", 1.0),
        ("$\\$70,000$", "70000", 1.0),
        ("Answer:5", "5", 1.0),
        ("and so\n####540", "540", 1.0),
        ("\\boxed{11}. Wait, that is wrong.\n\nSo \\boxed{12}", "12", 1.0),
        ("\\boxed{12}. Wait, that is wrong.\n\nSo \\boxed{11}", "12", 0.0),
        ("\\boxed{0.5}\n\n\\boxed{\\frac12}", "\\frac12", 1.0),
        ("$\\boxed{1}$ and $\\boxed{2}$", "\\{1, 2\\}", 1.0),
        ("The answer is \\boxed{0.00002}", 0.00002, 1.0),
        ("\\boxed{2\\times 10^{-5}}", 2e-5, 1.0),
        ("\\boxed{0.00003}", 2e-5, 0.0),
        ("The answer is 7/12.", "7/12", 1.0),
        ("The answer is **66/5**.", "66/5", 1.0),
        ("**66/5**", "66", 0.0),
        ("**Answer:**`66/5`", "66/5", 1.0),
        ("So it is 66/5!", "66/5", 1.0),
        ("2**3 = 8, so 2**3", "8", 1.0),
        ("(1 + 1)**3", "8", 1.0),
        ("There are 17.\n\n66/5", "66/5", 1.0),
        ("There are 17.\n-1", "-1", 1.0),
        ("There are 17.\n-1", "16", 0.0),
        ("Answer:\n5\n\nCheck: 2 + 3 = 6 - 1", "5", 1.0),
        ("$$\n3 +\n4\n$$", "7", 1.0),
        ("\\boxed{5! \\cdot 2}", "240", 1.0),
        ("$(1; 2)$", "(1; 2)", 1.0),
        ("18.9", "\\$18.90", 1.0),
        ("\\boxed{32348}", "\\$32,\\!348", 1.0),
        ("0.0015", "1.5e-3", 1.0),
        ("\\boxed{1.5e-3}", "0.0015", 1.0),
        ("It is 1E-4.", 1e-4, 1.0),
        ("\\boxed{3e}", "1e3", 0.0),
        ("\\boxed{2e-3}", "2e - 3", 1.0),  # Euler's e
        ("\\boxed{2e-3}", "0.002", 1.0),
        ("0x1e3", "1000", 0.0),
        ("0.333333", "1/3", 1.0),
        ("0.001667", "1/600", 1.0),
        ("0.00024414", "1/4096", 1.0),
        ("\\boxed{1.6\\times 10^{-19}}", "6.63 \\times 10^{-34}", 0.0),
        ("\\boxed{x = 1.6\\times 10^{-19}}", "x = 6.63 \\times 10^{-34}", 0.0),
        ("\\boxed{10^{-20}}", "2 \\times 10^{-20}", 0.0),
        ("\\boxed{-4\\times 10^{-7}}", 4e-7, 0.0),
        ("0", 4e-7, 0.0),
        ("\\boxed{0.00005\\%}", 5e-7, 1.0),
        ("A", "A", 1.0),
        (" B\n", "A", 0.0),
        ("It could be B. <answer> Paris </answer>", "Paris", 1.0),
        ("Paris <answer>London</answer>", "Paris", 0.0),
        ("\\boxed{C}", "C", 1.0),
    ],
)
def test_math_verify_compares_values(completion: str, answer: Any, reward: float) -> None:
    assert math_verify_score(completion, answer) == reward


@pytest.mark.parametrize("completion", ["72", ""])
def test_a_reference_that_is_no_mathematics_is_an_error_not_a_zero(completion: str) -> None:
    with pytest.raises(ValueError, match="cannot read the reference"):
        math_verify_score(completion, "")


IN_TEXT = (
    "The answer is {}.", "So it is {}!", "**{}**", "The answer is **{}**.", "Answer: {}", "#### {}",
    "There are 17.\n{}", "- I take 3 of 20.\n\n{}\n", "It is `{}`; done.", "<answer>**{}**.</answer>", "{}",
)  # fmt: skip
IN_LATEX = ("\\boxed{{{}}}", "So ${}$.", "\\[\n{}\n\\]", "Thus $x = {}$.", "7 of 9: \\({}\\)", "<answer>${}$</answer>")


def plain(value: Fraction) -> Iterator[str]:
    """Yield the ways of writing a number of ordinary size as text."""
    if value.denominator == 1:
        yield from (f"{value}", f"{value}.0", f"{int(value):,}", f"{value}".replace("-", "\u2212"), f"{value}e0")
        return
    yield str(value)
    if 10**4 % value.denominator == 0:
        number = Decimal(value.numerator) / value.denominator
        yield from (f"{number:f}", f"{number.scaleb(2):f}e-2", f"{number.scaleb(-3):f}E+3")


def latex(value: Fraction) -> Iterator[str]:
    """Yield the ways of writing a number of ordinary size that need LaTeX."""
    sign, (over, under) = "-" if value < 0 else "", abs(value).as_integer_ratio()
    yield from (f"{sign}\\frac{{{over}}}{{{under}}}", f"\\dfrac{{{sign}{3 * over}}}{{{3 * under}}}")
    yield from (f"{sign}{over} / {under}", f"{sign}{over} \\cdot {under}^{{-1}}")


def small(number: Decimal) -> tuple[list[str], list[str]]:
    """Return the ways of writing a number far below 1 as text, and those that need LaTeX."""
    mantissa, power = f"{number:e}".split("e")
    ways = [f"{number:f}", f"{mantissa}e{power}", f"{mantissa}E{power}"]
    return ways, [f"{mantissa} \\times 10^{{{power}}}", f"{mantissa}\\cdot10^{{{power}}}"]


def wrong(value: Fraction) -> list[Fraction]:
    """Return near misses: signs, digits, and what is read if only a part of the number is."""
    over, under = value.as_integer_ratio()
    near = [
        -value,
        value + 1,
        value - Fraction(1, 1000),
        value * 10,
        Fraction(over, under + 1),
        Fraction(over),
        17 + value,
    ]
    return [one for one in near if one != value]


def test_numbers_are_read_in_every_form() -> None:
    chance = random.Random(7)

    def scored(texts: list[str], formulas: list[str], reference: str) -> tuple[str, float]:
        wraps, ways = chance.choice(((IN_TEXT, texts), (IN_LATEX, texts + formulas)))
        wrap, way = chance.choice(wraps), chance.choice(ways)
        way = way.replace(",", "") if "x =" in wrap else way  # 'x = 1,064' may be two numbers
        completion = wrap.format(way)
        return completion, math_verify_score(completion, reference)

    for _ in range(150):
        most = chance.choice((12, 99, 30_000))
        value = Fraction(chance.randint(-most, most), chance.choice((1, 1, 2, 3, 7, 8, 12, 25)))
        reference = chance.choice([*plain(value), *latex(value)])
        miss = chance.choice(wrong(value))
        for one in (value, miss):
            completion, reward = scored(list(plain(one)), list(latex(one)), reference)
            assert reward == float(one == value), (completion, reference)
    for _ in range(75):
        number = Decimal(chance.randint(100, 998)).scaleb(-chance.randint(8, 36))
        texts, formulas = small(number)
        reference = chance.choice(texts + formulas)
        last = Decimal((0, (1,), int(number.as_tuple().exponent)))  # one of the last digit
        for other in (number, chance.choice((number + last, number.scaleb(1), number.scaleb(-1), -number))):
            completion, reward = scored(*small(other), reference)
            assert reward == float(other == number), (completion, reference)


def test_a_stall_of_the_machine_makes_no_right_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = math_verify.grader.sympy_expr_eq

    def stalled(*args: Any, **settings: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)  # math-verify's own limit, in seconds of the clock
        return compare(*args, **settings)

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", stalled)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        assert math_verify_score("\\boxed{\\frac{24}{2}}", "12") == 1.0
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("completion", ["\\boxed{9^{9^{9^9}}}", "\\boxed{1} and \\boxed{((9!)!)!}"])
def test_what_cannot_be_computed_is_void(monkeypatch: pytest.MonkeyPatch, completion: str) -> None:
    monkeypatch.setattr(math_reward, "COMPUTING_S", 0.5)
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(VoidReward, match=r"takes more than 0\.5 s of a core") as caught:
        math_verify_score(completion, "12")
    assert (caught.value.cause, caught.value.retry) == (VoidCause.TIMEOUT, False)
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
