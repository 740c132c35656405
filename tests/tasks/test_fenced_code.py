"""The program in a completion: fences are paired whatever their tag, and the last block of Python counts."""

from __future__ import annotations

import time

import pytest

from streamrl.tasks.fenced_code import code_of
from tests.waiting import scaled

ONE = "```python\nx = 1\n```\n"


@pytest.mark.parametrize("tag", ["", " ", "py", "python", "python3", "Python", "PY", " python n='a'", "python\r"])
def test_a_block_of_python_is_the_program_whatever_is_around_it(tag: str) -> None:
    assert code_of(f"Like this:\n```{tag}\nx = 1\n```\nDone.") == "x = 1\n"


@pytest.mark.parametrize("tag", ["bash", "text", "json", "output", "pycon", "{.python}", "python2"])
def test_a_block_with_another_tag_is_passed_over_with_its_closing_fence(tag: str) -> None:
    other = f"```{tag}\npython x.py\n```\n"
    assert code_of(f"{ONE}Run it:\n{other}That prints nothing.") == "x = 1\n"
    assert code_of(f"First:\n{other}Then:\n{ONE}Done.") == "x = 1\n"
    assert code_of(f"{other}No program.") == f"{other}No program."


def test_the_last_block_is_the_program_and_without_one_the_whole_text() -> None:
    assert code_of("```\nx = 1\n```\nbetter:\n```py\nx = 2\n```") == "x = 2\n"
    assert code_of("```py\nx = 1\n```\nwhich gives\n```\nx = 2\n```") == "x = 2\n"
    assert code_of("x = 3") == "x = 3"
    assert code_of("```python\n```") == ""


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1", "x = 1\n"),  # cut by the token limit
        (f"{ONE}Better:\n```python\nx = 2", "x = 2\n"),
        (f"{ONE}```\nThat is all.", "x = 1\n"),  # a stray fence begins no program
        (f"{ONE}```", "x = 1\n"),
        ("```\nx = 1", "```\nx = 1"),
        (f"{ONE}```bash\npip install y", "x = 1\n"),
        (f"```text\nno end\n{ONE}", "x = 1\n"),
        ("```python\nx = 1\n```bash\npip install y\n```", "x = 1\n"),
        (f"```\nstray\n{ONE}", "x = 1\n"),
    ],
)
def test_fences_without_a_partner(text: str, program: str) -> None:
    assert code_of(text) == program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("````python\nx = '''\n```\ny\n```\n'''\n````\nDone.", "x = '''\n```\ny\n```\n'''\n"),
        (f"{ONE}````markdown\n```python\nx = 2\n```\n````\n", "x = 1\n"),
        ("```python\nx = 1\n````\nDone.", "x = 1\n"),  # a closing fence may be longer
        ("1. This:\n   ```python\n   if x:\n       y()\n\n   ```\n", "if x:\n    y()\n\n"),
        (
            '```python\ndef f():\n    """For example\n\n    ```python\n    f()\n    ```\n    """\n```',
            'def f():\n    """For example\n\n    ```python\n    f()\n    ```\n    """\n',
        ),
        ("Answer: ```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1```\nDone.", "x = 1\n"),
        (f"{ONE}Write ```x``` or ` ``` ` for code.", "x = 1\n"),
        (f"{ONE}Begin with ```python in a line of its own.", "x = 1\n"),
        ("```python\nx = '\x0c\u2028'\n```", "x = '\x0c\u2028'\n"),  # ends no line of Python's
        ("~~~python\nx = 1\n~~~", "~~~python\nx = 1\n~~~"),
        ("<answer>```\nx = 1\n```</answer>", "x = 1\n"),
        ("```\nx = 1\n``` Done.", "x = 1\n"),
        ("```python\nx = 1\n``` where `x` is one.", "x = 1\n"),
        ("```python\nprint('a')```.", "print('a')\n"),
        ("```python\nx = 1```</answer>", "x = 1\n"),
        ("```python\nx = '```'\ny = 1\n```", "x = '```'\ny = 1\n"),
        ("```python\ndef f():\n    return 1\n    ```\nThis is f.", "def f():\n    return 1\n"),
        (" - ```python\n     x = 1\n     ```\n   That is all.", "x = 1\n"),
        ("Use `solve`: ```python\nx = 1\n```", "x = 1\n"),
    ],
)
def test_longer_indented_and_joined_fences(text: str, program: str) -> None:
    assert code_of(text) == program


@pytest.mark.parametrize("part", ["`", "```", "```python", "```\n", "```python\n", " ", "\n", "``` a", "` ```\n", "a`"])
def test_a_long_hostile_text_is_read_in_linear_time(part: str) -> None:
    began = time.thread_time()  # of the CPU: others may have it
    for text in (part * (200_000 // len(part)), "```python\n" + part * (200_000 // len(part)) + "x"):
        code_of(text)
    assert time.thread_time() - began < scaled(5)
