"""Two tools for examples and small models: a calculator, and a search over a local corpus."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.agents.client import BadToolInput
from streamrl.agents.tools import Tool, function_tool

MOST_CHARACTERS = 1_000
MOST_BITS = 4_096
"""Most bits of a whole number, so that no power takes for ever."""
K1, B = 1.2, 0.75
"""Parameters of BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework")."""

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Raises:
        BadToolInput: it is something else, or has no finite value.

    >>> calculate("(12 + 8) * 3")
    '60'
    """
    if len(expression) > MOST_CHARACTERS:
        raise BadToolInput(f"an expression may have {MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise BadToolInput(f"{expression!r:.99} is no arithmetic expression") from error
    except ArithmeticError as error:
        raise BadToolInput(f"{expression!r:.99}: {error}") from error
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value: Any = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and isinstance(one, int) and abs(other) * one.bit_length() > MOST_BITS:
                raise BadToolInput("the power is too large")
            value = OPERATORS[type(op)](one, other)
        case _:
            raise BadToolInput(f"{ast.unparse(node)!r:.99}: only numbers, + - * / // % ** and parentheses")
    if isinstance(value, complex) or not math.isfinite(value):
        raise BadToolInput("it has no finite real value")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise BadToolInput("the value is too large")
    found: int | float = value
    return found


CALCULATOR: Tool = function_tool(calculate)


class Corpus:
    """Texts that can be searched, ranked by BM25."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self._counts = [Counter(_words(text)) for text in self.texts]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = max(1.0, sum(self._lengths) / max(1, len(self._lengths)))
        self._holding = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str, count: int = 3) -> list[str]:
        """Return the texts that fit best, at most `count`, the best first; [] if none has a word of the query."""
        words = set(_words(query))
        scores = [self._score(words, number) for number in range(len(self.texts))]
        best = sorted(range(len(scores)), key=lambda number: -scores[number])[: max(0, count)]
        return [self.texts[number] for number in best if scores[number] > 0]

    def tool(self, most: int = 3) -> Tool:
        """Make a tool that searches here.

        Args:
            most: texts of one answer.
        """

        def search(query: str) -> str:
            """Search the documents, and return those that fit the query best."""
            return "\n\n".join(self.search(query, most)) or "nothing was found"

        return function_tool(search)

    def _score(self, words: set[str], number: int) -> float:
        counts, total = self._counts[number], 0.0
        scale = K1 * (1 - B + B * self._lengths[number] / self._mean)
        for word in words:
            if found := counts[word]:
                holding = self._holding[word]
                rarity = math.log(1 + (len(self.texts) - holding + 0.5) / (holding + 0.5))
                total += rarity * found * (K1 + 1) / (found + scale)
        return total


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
