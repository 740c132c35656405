"""Types, defaults and docstrings in words, and Markdown's tables, for the pages of tools/reference.py."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

BOUNDS = {
    "ge": ">= {}",
    "gt": "> {}",
    "le": "<= {}",
    "lt": "< {}",
    "min_length": "length >= {}",
    "max_length": "length <= {}",
}
PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any", type(None): "null"}


def text_of(documented: Any) -> str:
    """Return a docstring as paragraphs of one line each; '' without one, or with one that is only inherited."""
    own = vars(documented).get("__doc__") if isinstance(documented, type) else documented.__doc__
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(own or "")))


def cell(text: str) -> str:
    """Escape what would end a table's cell or be taken for HTML outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts]
    return "".join(plain).replace("|", r"\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table, or nothing without rows."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *lines, ""] if lines else []


def anchor(heading: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def bare(annotation: Any) -> tuple[Any, list[Any]]:
    """Return an annotation without `Annotated`, and what was annotated."""
    notes: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        notes += more
    return annotation, notes


def members(annotation: Any) -> list[Any]:
    """Return the members of a union without `None`; other types are their own only member."""
    annotation, _ = bare(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for one in get_args(annotation) if one is not type(None) for inner in members(one)]
    return [annotation]


def bounds(notes: Iterable[Any]) -> str:
    """Return the limits among a field's annotations, e.g. ' >= 1'."""
    found, patterns = [], []
    for note in notes:
        for one in [note, *getattr(note, "metadata", [])]:
            found += [words.format(getattr(one, name)) for name, words in BOUNDS.items() if _number(one, name)]
            if isinstance(pattern := getattr(one, "pattern", None), str):
                patterns.append(f"`{pattern}`")
    shown = ", ".join(dict.fromkeys(found)) + (f" matching {patterns[0]}" if patterns else "")
    return f", {shown.strip()}" if shown.startswith("length") else f" {shown.strip()}" if shown else ""


def _number(note: Any, name: str) -> bool:
    return isinstance(getattr(note, name, None), int | float)


def type_text(annotation: Any, name: Callable[[Any], str] = lambda one: f"`{one.__name__}`") -> str:
    """Return a type in words; `name` writes classes."""
    annotation, notes = bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        shown = " or ".join(dict.fromkeys(type_text(one, name) for one in arguments if one is not type(None)))
        return shown + bounds(notes) + (" or null" if type(None) in arguments else "")
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (list, set, frozenset) or (origin is tuple and arguments[1:] == (...,)):
        return f"list of {type_text(arguments[0], name)}" + bounds(notes)
    if origin is tuple:
        return f"[{', '.join(type_text(one, name) for one in arguments)}]"
    if origin is dict:
        return f"map of {type_text(arguments[0], name)} to {type_text(arguments[1], name)}" + bounds(notes)
    if annotation in PLAIN:
        return PLAIN[annotation] + bounds(notes)
    if isinstance(annotation, type) and not arguments:
        return name(annotation)
    return f"`{str(annotation).replace('typing.', '')}`"


def default_text(info: FieldInfo) -> str:
    """Return a field's default as YAML has it; a section's is that of each of its keys."""
    if info.default_factory is not None:
        made = info.default_factory()  # type: ignore[call-arg]
        if isinstance(made, BaseModel):
            tag, values = tag_of(type(made))
            return f"`{{{tag}: {values[0]}}}`" if tag else "of its keys"
        return ", ".join(f"`{getattr(one, 'key', one)}`" for one in made) if made else f"`{made}`"
    if info.default is PydanticUndefined:
        return "required"
    value = info.default
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`" if value != "" else "`''`"


def is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Whether an annotation is a pydantic model."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def models_below(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation names, also inside lists and maps."""
    for one in members(annotation):
        if is_model(one):
            yield one
        for argument in get_args(one):
            yield from models_below(argument)


def tag_of(model: type[BaseModel]) -> tuple[str, tuple[str, ...]]:
    """Return the key by which a union tells its members apart, and the values that stand for this one."""
    for key in ("kind", "name"):
        info = model.model_fields.get(key)
        if info is not None and get_origin(info.annotation) is Literal:
            return key, get_args(info.annotation)
    return "", ()


def filled(text: str) -> str:
    """Return a paragraph in lines of the pages' width."""
    return textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)
