"""Explanations of pydantic's errors for the author of a file: which key, what it holds, what is expected."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue, ValidationError

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top level of a file down to a value."""


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration file."""

    path: KeyPath
    """The key in question, which the file need not have; () for the whole file."""
    text: str
    """The explanation, without file and line."""
    also: tuple[KeyPath, ...] = ()
    """Further keys that a rule over several keys involves."""


EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text (in quotes if it looks like something else)",
    "list": "a list ('- item' lines)",
    "tuple": "a list",
    "dict": "keys with values ('key: value' lines)",
    "model": "keys with values ('key: value' lines)",
    "invalid-json-value": "text (in quotes if it looks like something else), a number, a list, or keys with values",
}
"""Expected values in words, by the first word of pydantic's error type, e.g. 'int_parsing'."""
JSON_TAGS: dict[str | int, Any] = {"list": list[JsonValue], "dict": dict[str, JsonValue]}
"""Types of the values that hold others, by the tag that pydantic puts into the location of what they hold."""

MOST_TOLD = 20
"""Most mistakes of a file that are explained; the others are counted."""
BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def explain(model: type[BaseModel], error: ValidationError) -> list[ConfigProblem]:
    """Turn pydantic's errors into `ConfigProblem`s, in the same order; a value that is of none of several types is one.

    Those beyond `MOST_TOLD` are one `ConfigProblem` of the whole file, with their number.

    Args:
        model: the model that the data was validated against.
        error: pydantic's error.
    """
    items = iter(error.errors(include_url=False))
    problems: dict[ConfigProblem, None] = {}
    for item in items:
        problems[_problem(model, dict(item))] = None
        if len(problems) == MOST_TOLD:
            break
    told = {one.path for one in problems}
    if others := {locate(model, item["loc"])[0] for item in items} - told:
        what = f"{len(told) + len(others):,} keys with mistakes, of which {len(told)} are told"
        problems[ConfigProblem((), what)] = None
    return list(problems)


def _problem(model: type[BaseModel], item: dict[str, Any]) -> ConfigProblem:
    kind, context = str(item["type"]), item.get("ctx", {})
    path, holder = locate(model, item["loc"])
    if kind == "missing":
        field = holder.model_fields[str(path[-1])] if holder else None
        what = f": {field.description}" if field and field.description else ""
        if field and get_origin(bare := _bare(field.annotation)) is Literal:
            what += f"; expected {_choices([str(value) for value in get_args(bare)])}"
        return ConfigProblem(path, f"key '{dotted(path)}' is missing{what}")
    if kind == "invalid_key":  # YAML has keys such as true
        path = (*path[:-1], _of_yaml(item["input"]))
    if kind in ("extra_forbidden", "invalid_key"):
        return ConfigProblem(path, _unknown_key(model, holder, path))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, str(context["discriminator"]).strip("'"))
        allowed = [str(value) for value in _literals(model, path)]
        if kind == "union_tag_not_found":
            return ConfigProblem(path, f"key '{dotted(path)}' is missing, expected {_choices(allowed)}")
        return ConfigProblem(path, _mismatch(path, context["tag"], _choices(allowed), allowed))
    if kind == "value_error":
        text = str(item["msg"]).removeprefix("Value error, ")
        if path:
            return ConfigProblem(path, f"'{dotted(path)}': {text}")
        named = list(_named_keys(model, text))
        return ConfigProblem(named[0] if named else (), text, tuple(named))
    if several := _several(holder, path):
        return ConfigProblem(path, _mismatch(path, item["input"], several, []))
    if kind == "literal_error":
        allowed = [str(value) for value in _literals(model, path)]
        return ConfigProblem(path, _mismatch(path, item["input"], _choices(allowed), allowed))
    if item["loc"] and item["loc"][-1] == "[key]":
        if kind == "string_type":
            path = (*path[:-1], _of_yaml(item["input"]))
            return ConfigProblem(path, f"'{dotted(path)}': the name must be {EXPECTED['string']}")
        return ConfigProblem(path, f"'{dotted(path)}': the name must match {context.get('pattern', item['msg'])}")
    return ConfigProblem(path, _mismatch(path, item["input"], _expected(kind, context, item), []))


def _expected(kind: str, context: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    if kind == "too_short":
        return f"at least {context['min_length']} entries" if context["min_length"] != 1 else "at least one entry"
    if kind == "too_long":
        return f"at most {context['max_length']} entries"
    kinds = (kind, kind.rsplit("_", 1)[0], kind.split("_")[0])
    return next((EXPECTED[one] for one in kinds if one in EXPECTED), str(item["msg"]))


def _mismatch(path: KeyPath, found: Any, expected: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(str(found), allowed, n=1) if len(allowed) > 2 else []
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"'{dotted(path)}' is {_shown(found)}, expected {expected}{hint}"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_yaml(key: Any) -> str:
    """Return a key that is no text as YAML has it: true, null, 1."""
    return "null" if key is None else str(key).lower()


def _several(holder: type[BaseModel] | None, path: KeyPath) -> str:
    """Return what a key that takes values of several types expects; '': it takes one type, or there is no such key."""
    field = holder.model_fields.get(str(path[-1])) if holder else None
    bare = _bare(field.annotation) if field else None
    if not _is_union(bare) or _union_models(bare):
        return ""
    members = [member for member in get_args(bare) if member is not type(None)]
    return ", or ".join(
        _choices([str(value) for value in get_args(member)])
        if get_origin(member) is Literal
        else EXPECTED.get(member.__name__, member.__name__)
        for member in members
    )


def _choices(allowed: list[str]) -> str:
    return "one of: " + ", ".join(allowed) if len(allowed) > 1 else (allowed or ["?"])[0]


def _unknown_key(model: type[BaseModel], holder: type[BaseModel] | None, path: KeyPath) -> str:
    text = f"unknown key '{dotted(path)}'"
    if holder is None:
        return text
    name, allowed = str(path[-1]), list(holder.model_fields)
    reason = getattr(holder, "refused", {}).get(name)
    if reason:
        return f"'{dotted(path)}' is not supported: {reason}; allowed here: {', '.join(allowed)}"
    near = difflib.get_close_matches(name, allowed, n=1)
    near += [dotted(key) for key in sorted(_all_keys(model), key=len) if key[-1] == name and key != path]
    hint = f"did you mean '{near[0]}'? Allowed" if near else "allowed"
    return f"{text}; {hint} here: {', '.join(allowed)}"


def dotted(path: KeyPath) -> str:
    """Return ('tasks', 0, 'name') as 'tasks.0.name', the notation of --set."""
    return ".".join(map(str, path))


def locate(model: type[BaseModel], loc: KeyPath) -> tuple[KeyPath, type[BaseModel] | None]:
    """Return the path in the file of a pydantic location, and the model that holds its last key.

    Locations contain the member of a union as if it were a key ('tasks', 0, 'reasoning_gym', 'name'), and '[key]'
    behind a mapping's key; neither is in the file.
    """
    annotation: Any = model
    holder: type[BaseModel] | None = None
    path: list[str | int] = []
    for part in loc:
        annotation = _bare(annotation)
        if members := _union_models(annotation):
            annotation = next((member for member in members if part in _tags(member)), None)
            continue
        if annotation is JsonValue or _is_union(annotation):
            annotation = JSON_TAGS.get(part) if annotation is JsonValue else None
            continue
        if part == "[key]":
            continue
        path.append(part)
        holder = annotation if _is_model(annotation) else None
        annotation = _below(annotation, part)
    return tuple(path), holder


def _below(annotation: Any, part: str | int) -> Any:
    """Return the type of the value under a key or index."""
    if _is_model(annotation):
        field = annotation.model_fields.get(str(part))
        return field.annotation if field else None
    arguments = get_args(annotation)
    if get_origin(annotation) in (list, tuple):
        return arguments[0] if arguments else None
    return arguments[1] if get_origin(annotation) is dict and len(arguments) == 2 else None


def _bare(annotation: Any) -> Any:
    """Strip Annotated and '| None' from a type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif _is_union(annotation):
            members = [member for member in get_args(annotation) if member is not type(None)]
            if len(members) != 1:
                return annotation
            annotation = members[0]
        else:
            return annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _union_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the members of a union of models; nothing for any other type."""
    if not _is_union(annotation):
        return []
    members = [_bare(member) for member in get_args(annotation)]
    return members if all(map(_is_model, members)) else []


def _alternatives(annotation: Any) -> list[Any]:
    """Return the models of a union of models, else the bare type itself."""
    bare = _bare(annotation)
    return _union_models(bare) or [bare]


def _tags(model: type[BaseModel]) -> set[Any]:
    """Return the values of a model's literal fields, which include its discriminator."""
    types_here = [field.annotation for field in model.model_fields.values()]
    return {value for one in types_here if get_origin(one) is Literal for value in get_args(one)}


def _literals(model: type[BaseModel], path: KeyPath) -> list[Any]:
    """Return the allowed values of the literal at `path`, over all members of the unions on the way."""
    types_here: list[Any] = [model]
    for part in path:
        types_here = [_below(member, part) for annotation in types_here for member in _alternatives(annotation)]
    literals = [annotation for annotation in map(_bare, types_here) if get_origin(annotation) is Literal]
    return list(dict.fromkeys(value for literal in literals for value in get_args(literal)))


def _all_keys(annotation: Any, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every key that is reachable without a list index or a user-chosen name."""
    for member in _alternatives(annotation):
        if _is_model(member):
            for name, field in member.model_fields.items():
                yield (*above, name)
                yield from _all_keys(field.annotation, (*above, name))


def _named_keys(model: type[BaseModel], text: str) -> Iterator[KeyPath]:
    """Yield the keys that a whole-file rule names in its message ('site' stands for 'sites')."""
    keys = set(_all_keys(model))
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text):
        for candidate in (word, f"{word}s"):
            path = tuple(candidate.split("."))
            if path in keys and (len(path) > 1 or candidate != "name"):
                yield path
