"""Combinations of keys that nobody has thought of are accepted, or refused in words; nothing else may happen."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from streamrl.config.cluster import GenerationPool, Site, TrainerPool
from streamrl.config.load import ConfigError, load_cluster, load_run
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher import preflight

PER_ALGORITHM = 30
"""Combinations of each algorithm's keys with those of a schedule, of other sections and of the cluster file."""
TASK = {"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2}}
Leaves = dict[tuple[str, ...], list[Any]]


def leaves(schema: dict[str, Any], definitions: dict[str, Any], above: tuple[str, ...] = ()) -> Leaves:
    """Values worth trying of every key whose values are known without its meaning; unions are left out."""
    found: Leaves = {}
    for key, part in schema.get("properties", {}).items():
        whole = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if "properties" in whole:
            found |= leaves(whole, definitions, (*above, key))
        elif values := list(values_of(part)):
            found[*above, key] = values
    return found


def values_of(part: dict[str, Any]) -> Iterator[Any]:
    """The values of a key that has few; of a number: its bounds, what is just inside of them, and twice its default."""
    for one in part.get("anyOf", []):
        yield from values_of(one)
    yield from part.get("enum", [])
    match part.get("type"):
        case "null":
            yield None
        case "boolean":
            yield from (True, False)
        case "integer" | "number" as kind:
            inside = 1 if kind == "integer" else 0.001
            for bound, toward in (("inimum", inside), ("aximum", -inside)):
                if (limit := part.get(f"m{bound}")) is not None:
                    yield from (limit, limit + toward)
                elif (limit := part.get(f"exclusiveM{bound}")) is not None:
                    yield limit + toward
            yield 2 * (part.get("default") or inside)


def leaves_of(model: type[BaseModel]) -> Leaves:
    schema = model.model_json_schema()
    return leaves(schema, schema.get("$defs", {}))


def members_of(section: str) -> dict[str, Leaves]:
    """The keys of each kind of a section of the run file, by its name."""
    schema = RunConfig.model_json_schema()
    mapping = schema["properties"][section]["discriminator"]["mapping"]
    definitions = schema["$defs"]
    return {name: leaves(definitions[ref.rpartition("/")[2]], definitions) for name, ref in mapping.items()}


ALGORITHMS, SCHEDULES = members_of("algorithm"), members_of("schedule")
RUN = leaves_of(RunConfig)
CLUSTER: dict[str, Leaves] = {one.__name__: leaves_of(one) for one in (Site, TrainerPool, GenerationPool)}


def some(draws: random.Random, space: Leaves, most: int, **begun: Any) -> dict[str, Any]:
    """A section with up to so many of the keys."""
    section: dict[str, Any] = dict(begun)
    for path in draws.sample(sorted(space), min(len(space), draws.randint(0, most))):
        *above, key = path
        below = section
        for part in above:
            below = below.setdefault(part, {})
        below[key] = draws.choice(space[path])
    return section


def a_run(draws: random.Random, algorithm: str) -> dict[str, Any]:
    schedule = draws.choice(sorted(SCHEDULES))
    needed = {"critic": {}} if algorithm == "ppo" else {}
    run: dict[str, Any] = {"tasks": [TASK], "model": {"path": "/no/model"}}  # it is not looked at
    run["algorithm"] = some(draws, ALGORITHMS[algorithm], 3, name=algorithm, **needed)
    run["schedule"] = some(draws, SCHEDULES[schedule], 2, name=schedule)
    if draws.random() < 0.3:
        run["evaluation"] = {}
    return some(draws, RUN, 3, **run)


def a_cluster(draws: random.Random) -> dict[str, Any]:
    parts = {name: some(draws, space, 1) for name, space in CLUSTER.items()}
    site = {"trainer": parts["TrainerPool"], "generation": [parts["GenerationPool"]]}
    return {"hardware": draws.choice(["cpu", "cuda"]), "sites": {"here": parts["Site"] | site}}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_combination_is_checked_or_refused_in_words(tmp_path: Path, algorithm: str) -> None:
    draws = random.Random(algorithm)
    run_file, cluster_file = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    accepted = 0
    for _ in range(PER_ALGORITHM):
        run_file.write_text(json.dumps(a_run(draws, algorithm)))
        cluster_file.write_text(json.dumps(a_cluster(draws)))
        try:
            run, cluster = load_run(run_file), load_cluster(cluster_file)
        except ConfigError as error:
            assert str(error).startswith((f"{run_file}:", f"{cluster_file}:"))
            continue
        run_file.write_text(run.model_dump_json())
        assert load_run(run_file) == run, "a file with every key"
        try:
            preflight.check_files(cluster, run)
        except UserError as error:
            assert str(error)
        else:
            accepted += 1
    assert accepted >= PER_ALGORITHM // 10, "they are not all refused"
