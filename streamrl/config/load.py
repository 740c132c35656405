"""Reads cluster and run files. A mistake gives one message with file, line, key and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]

RESOLVED = "config.yaml"


class ConfigError(UserError):
    """A cluster or run file, or an override, that cannot be used."""


def load_cluster(path: Path) -> ClusterConfig:
    """Reads a cluster file.

    Raises:
        ConfigError: it cannot be read, or holds a mistake; all mistakes are listed.
    """
    values, lines = _read(path)
    if not values:
        raise ConfigError(f"{path}: is empty; a cluster file needs at least 'hardware' and 'sites'")
    return _validate(ClusterConfig, values, str(path), lines)


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file (None or an empty one: all defaults) and applies overrides `a.b=c`.

    An override's value is YAML; list entries are numbers: `tasks.0.weight=2`.

    Raises:
        ConfigError: as for `load_cluster`; an override's mistake names the override.
    """
    values, lines = _read(path) if path is not None else ({}, {})
    for override in overrides:
        location = _apply(values, override)
        lines = {key: line for key, line in lines.items() if key[: len(location)] != location}
        lines[location] = f"--set {override}"
    return _validate(RunConfig, values, str(path) if path is not None else "run (defaults)", lines)


def save_resolved(run_dir: Path, cluster: ClusterConfig, run: RunConfig) -> None:
    """Writes `config.yaml`: everything a run was started with, defaults included."""
    content = {"cluster": cluster.model_dump(mode="json"), "run": run.model_dump(mode="json")}
    (run_dir / RESOLVED).write_text(yaml.safe_dump(content, sort_keys=False))


def load_resolved(run_dir: Path) -> tuple[ClusterConfig, RunConfig]:
    """Reads `config.yaml` of a run.

    Raises:
        ConfigError: the folder is no run, or its file was changed badly.
    """
    path = run_dir / RESOLVED
    if not path.exists():
        raise ConfigError(f"{run_dir} is not a run folder: it has no {RESOLVED}")
    values, lines = _read(path)
    parts = []
    for key, model in (("cluster", ClusterConfig), ("run", RunConfig)):
        inner = {location[1:]: line for location, line in lines.items() if location[:1] == (key,)}
        parts.append(_validate(model, values.get(key) or {}, str(path), inner))
    return parts[0], parts[1]  # type: ignore[return-value]


# -- YAML with line numbers


def _read(path: Path) -> tuple[dict[str, Any], dict[Location, str]]:
    """(values, where each key stands) of a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f"; {path.parent} has {', '.join(near)}" if near else ""
        raise ConfigError(f"{path}: there is no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values (key: value), found a {type(values).__name__}")
    lines: dict[Location, str] = {}
    for location, key_node in _keys(root, ()):
        line = f"line {key_node.start_mark.line + 1}"
        if location in lines:
            name = ".".join(map(str, location))
            raise ConfigError(f"{path}: {line}: {name}: the key is there twice (first at {lines[location]})")
        lines[location] = line
    return values, lines


def _keys(node: yaml.Node, location: Location) -> Iterator[tuple[Location, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*location, key.value), key
            yield from _keys(value, (*location, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*location, index), value
            yield from _keys(value, (*location, index))


def _apply(values: dict[str, Any], override: str) -> Location:
    """Puts one override into the values; returns where."""
    key, separator, text = override.partition("=")
    parts: Location = tuple(int(part) if part.isdigit() else part for part in key.strip().split("."))
    if not separator or not all(part != "" for part in parts):
        raise ConfigError(f"--set {override}: expected key=value, e.g. --set optimizer.lr=1e-5")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: {text!r} is not valid YAML") from error
    if isinstance(value, str):
        try:
            value = float(value)  # YAML 1.1 takes 1e-5 for text
        except ValueError:
            pass
    inner: Any = values
    default: Any = RunConfig().model_dump(mode="json")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        default = default.get(part) if isinstance(default, dict) else None
        if isinstance(inner, list):
            if not isinstance(part, int) or part >= len(inner):
                raise ConfigError(f"--set {override}: {part!r} is not an entry of a list of {len(inner)}")
            if last:
                inner[part] = value
            else:
                inner = inner[part]
        elif isinstance(inner, dict):
            if last:
                inner[part] = value
            else:
                # an entry of a list that is not in the file is one of the default list
                inner = inner.setdefault(part, default if isinstance(default, list) else {})
        else:
            raise ConfigError(f"--set {override}: {'.'.join(map(str, parts[:depth]))} is a value, it has no keys")
    return parts


# -- pydantic's errors in words


def _validate(model: type[Model], values: Mapping[str, Any], source: str, lines: dict[Location, str]) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        said: dict[str, None] = {}
        for detail in error.errors():
            said[_explain(model, values, source, lines, detail)] = None
        raise ConfigError("\n".join(said)) from None


def _explain(
    model: type[BaseModel], values: Mapping[str, Any], source: str, lines: dict[Location, str], detail: ErrorDetails
) -> str:
    location = _in_file(values, detail["loc"])
    known = next((lines[location[:n]] for n in range(len(location), 0, -1) if location[:n] in lines), "")
    where = ": ".join(part for part in (source, known, ".".join(map(str, location))) if part)
    found = detail.get("input")
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            allowed = _fields_at(model, detail["loc"][:-1])
            near = difflib.get_close_matches(str(location[-1]), allowed, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(allowed)}"
            return f"{where}: unknown key; {hint}"
        case "missing":
            return f"{where}: this key is missing"
        case "union_tag_invalid":
            tag = context["discriminator"].strip("'")
            return f"{where}: '{tag}' must be one of {context['expected_tags']}, found {context['tag']!r}"
        case "union_tag_not_found":
            return f"{where}: the key {context['discriminator']} is missing; it says which kind this is"
        case "literal_error":
            return f"{where}: expected {context['expected']}, found {found!r}"
        case "value_error":
            return f"{where}: {context['error']}"
        case _:
            message = detail["msg"][:1].lower() + detail["msg"][1:]
            return f"{where}: {message}, found {found!r}"


def _in_file(values: Any, location: Location) -> Location:
    """A pydantic location without the tags of unions, which are not in the file."""
    kept: list[int | str] = []
    inner = values
    for position, part in enumerate(location):
        if isinstance(inner, dict) and part in inner:
            inner = inner[part]
        elif isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            inner = inner[part]
        elif position < len(location) - 1 or (isinstance(inner, dict) and part in inner.values()):
            continue  # a union's tag: it is the value of a key, not a key
        kept.append(part)
    return tuple(kept)


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """Names of the keys allowed at a location (pydantic's, union tags included)."""
    candidates: list[Any] = [model]
    for part in location:
        step: list[Any] = []
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                if (found := candidate.model_fields.get(str(part))) is not None:
                    step += _models_in(found.annotation)
                elif any(part in get_args(f.annotation) for f in candidate.model_fields.values()):
                    step.append(candidate)  # a union's tag
            if isinstance(part, int):
                step.append(candidate)
        candidates = step or candidates
    return sorted({name for c in candidates if isinstance(c, type) for name in c.model_fields})


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _models_in(get_args(annotation)[0])
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
