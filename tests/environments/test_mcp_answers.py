"""The answer of an item that is looked for in the model's last message: numbers by value, texts as words."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.environments.in_venv.mcp_connection import MOST_PAGES, NO_ANSWER, listed, of_the_call
from streamrl.environments.in_venv.mcp_tools_text import _has


def has(answer: Any, said: str | None) -> bool:
    return _has(answer, {"role": "assistant", "content": said}) == 1.0


@pytest.mark.parametrize("answer", [5, 5.0, "5", " 5 "])
def test_a_number_is_found_by_its_value(answer: Any) -> None:
    for said in ("5", "It is 5.", "5, I think", "$5", "(5)", "5.0", "5.000", "+5", "a=5", "x is 4.5, 5 or 6", "2,5,3"):
        assert has(answer, said), said
    for said in (
        "3.5",
        "-5",
        "\u22125",
        "5.2",
        "1.2.5",
        "5.1.2",
        "15",
        "5th",
        "x5",
        "1,500",
        "5,000",
        ".5",
        "5e3",
        "",
        None,
    ):
        assert not has(answer, said), said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (72.0, "72"),
        (1080, "1,080 euros"),
        ("1,080", "it is 1080."),
        (1234567.5, "1,234,567.5"),
        (1080, "1080"),
        (-5, "it is -5"),
        (-5, "it is \u22125"),
        ("-5", "x=-5"),
        (5, "10-5"),  # a difference or a range, nothing negative
        (10, "10-5"),
        (5, "- 5 apples"),
        (0.5, ".5"),
        (0.5, "0.50"),
        (0.1, "0.1"),
        (0, "-0"),
        (2e22, "2e22"),
        (2e-7, "0.0000002"),
        (12345678901234567890, "12345678901234567890"),
        (30, "5,200,30"),
        (5, "so it is ...5"),
    ],
)
def test_a_number_may_be_written_in_several_ways(answer: Any, said: str) -> None:
    assert has(answer, said)


def test_numbers_that_are_almost_equal_differ() -> None:
    assert not has(12345678901234567890, "12345678901234567891")
    assert not has(1080, "1,0800") and not has(1080, "10,80")
    assert not has(5, "-5") and not has(-5, "5") and not has(-5, "10-5")
    assert not has(2.5, "1.2.5") and not has(1.2, "1.2.5")  # a version
    assert not has(1, "1e99999999999999999999")
    assert not has(1, "9" * 10_000)


@pytest.mark.parametrize(
    ("answer", "said", "found"),
    [
        ("Paris", "It is paris!", True),
        ("Paris", "Parisian", False),
        ("007", "agent 007", True),
        ("007", "agent 7", False),
        ("1.2.3", "version 1.2.3", True),
        ("3:30", "at 3:30", True),
        ("C++", "C++, of course", True),
        (True, "true", True),
        (True, "1", False),
        ("", "anything", False),
        (float("nan"), "nan", True),
    ],
)
def test_anything_else_is_found_as_a_word(answer: Any, said: str, found: bool) -> None:
    assert has(answer, said) is found


class McpError(Exception):
    """The exception of mcp 1."""

    def __init__(self, code: int, message: str) -> None:
        self.error = SimpleNamespace(code=code, message=message)


@pytest.mark.parametrize("code", [-32602, -32603, -32601, 0, -1])
def test_what_a_server_says_of_a_call_is_for_the_model(code: int) -> None:
    assert of_the_call(McpError(code, "a: Required")) == "a: Required"
    assert of_the_call(McpError(code, "")) == "the server refuses the call"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-32000, "Connection closed"),
        (408, "Timed out"),
        (32600, ""),
        (-32603, NO_ANSWER),
        (-32603, f"{NO_ANSWER}: HTTP 500"),
    ],
)
def test_an_error_of_the_connection_is_none_of_the_call(code: int, message: str) -> None:
    with pytest.raises(McpError):
        of_the_call(McpError(code, message))


def asked_for(cursors: Any) -> list[str | None]:
    """Return the cursors that a server is asked for which tells these, in turn, of the next page."""
    asked = []

    async def page(cursor: str | None) -> Any:
        asked.append(cursor)
        return SimpleNamespace(tools=[SimpleNamespace(name="a", at=cursor)], nextCursor=next(cursors))

    (one,) = asyncio.run(listed(page))
    assert one.at == asked[-1]
    return asked


def test_pages_of_tools_are_asked_for_until_a_cursor_comes_again() -> None:
    assert asked_for(iter([None])) == [None] and asked_for(iter([""])) == [None]
    assert asked_for(iter(["b", "c", None])) == [None, "b", "c"]
    assert asked_for(iter(["b", "c", "b"])) == [None, "b", "c"]
    assert len(asked_for(map(str, itertools.count()))) == MOST_PAGES
