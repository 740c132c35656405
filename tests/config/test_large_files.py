"""A file that would keep the loader busy is refused, and one of many mistakes is told in some lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from streamrl.config import load
from streamrl.config.load import (
    LARGEST,
    MOST_BRACKETS,
    ConfigError,
    check_resolved,
    load_cluster,
    load_plain,
    load_resolved,
    load_run,
    save_resolved,
)
from streamrl.config.mistakes import MOST_TOLD

CLUSTER = "hardware: cpu\nsites: {here: {trainer: {}, generation: [{}]}}\n"
SMALLER, FEWER = LARGEST // 8, 2000
"""Limits of characters and values in the tests that parse texts of about that size."""


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loader refuse texts that are larger than what it reads in a moment."""
    monkeypatch.setattr(load, "LARGEST", SMALLER)
    monkeypatch.setattr(load, "MOST_VALUES", FEWER)


def refused(path: Path, text: str) -> str:
    """Return why all that read a user's file refuse one with this text."""
    path.write_text(text)
    told = set()
    for read in (load_run, load_cluster, load_plain):
        with pytest.raises(ConfigError) as caught:
            read(path)
        told.add(str(caught.value).replace(str(path), "F"))
    (one,) = told
    return one


def test_a_long_text_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "compose", None)
    long = refused(tmp_path / "f", "#" + "x" * LARGEST + "\nsteps: 3\n")
    assert long == "F: more than 1,048,576 characters, which no configuration has"
    brackets = refused(tmp_path / "f", "steps: " + "[" * (MOST_BRACKETS // 2 + 1) + "{" * (MOST_BRACKETS // 2))
    assert brackets == "F: more than 10,000 brackets, which no configuration has"


@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize("text", ["a:\n{}", "{}"])
@pytest.mark.parametrize("lines", ["- b\n" * FEWER, "".join(f"k{i}: 1\n" for i in range(FEWER))])
def test_a_text_of_many_values_is_not_read_to_its_end(tmp_path: Path, text: str, lines: str) -> None:
    indented = "".join(f" {line}\n" for line in lines.splitlines())
    last = "}\t: what a parser that got here would refuse\n"
    assert refused(tmp_path / "f", text.format(indented) + last) == (
        "F: more than 2,000 keys and values, which no configuration has"
    )


@pytest.mark.usefixtures("smaller")
def test_a_file_within_the_limits_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("#" + "x" * (SMALLER - 100) + "\nsteps: 3\n")
    assert load_run(path).steps == 3
    (tmp_path / "link").symlink_to(path)
    assert load_run(tmp_path / "link").steps == 3


def test_the_first_mistakes_are_told_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("stepps: 1\n" + "".join(f"k{i}: 1\n" for i in range(2000)) + "seed: -1\n")
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    lines = str(caught.value).replace(str(path), "F").splitlines()
    assert lines[0] == f"F: 2,002 keys with mistakes, of which {MOST_TOLD} are told"
    assert "unknown key 'stepps'; did you mean 'steps'?" in lines[1]
    assert len(lines) == MOST_TOLD + 1 and lines[-1].startswith("F:2002: 'seed' is -1, expected at least 0")
    path.write_text("tasks: [" + "1," * 500 + "]\n" + "seed: -1\n")
    with pytest.raises(ConfigError, match=f"501 keys with mistakes, of which {MOST_TOLD} are told"):
        load_run(path)


def test_as_many_mistakes_as_are_told_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER + "".join(f"k{i}: 1\n" for i in range(MOST_TOLD)))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert len(str(caught.value).splitlines()) == MOST_TOLD


@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("\u4e2d" * (SMALLER * 2 // 5), "bytes"),
        ("a\\n" * (SMALLER * 2 // 7), "bytes"),
        ("[" * (MOST_BRACKETS - 1), "brackets"),
        ("ab " * (SMALLER // 4), ""),
    ],
)
def test_files_whose_resolved_form_cannot_be_read_back_are_refused_before_it_is_written(
    tmp_path: Path, prompt: str, what: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f'model: {{system_prompt: "{prompt}"}}\n', encoding="utf-8")
    run = load_run(path)
    path.write_text(CLUSTER)
    cluster = load_cluster(path)
    found = list(check_resolved(cluster, run))
    if not what:
        save_resolved(tmp_path, cluster, run)
        assert found == [] and load_resolved(tmp_path) == (cluster, run)
        return
    (problem,) = found
    assert f" {what}, and at most " in problem
    with pytest.raises(ConfigError, match=re.escape(problem)):
        save_resolved(tmp_path / "run", cluster, run)
    assert not (tmp_path / "run").exists()
