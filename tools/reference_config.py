"""The sections of a page about a YAML file, from the pydantic models that it may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from reference_types import (
    anchor,
    bounds,
    cell,
    default_text,
    is_model,
    models_below,
    table,
    tag_of,
    text_of,
    type_text,
)


@dataclass
class ConfigPage:
    """A page about a YAML file: a section for each model that the file may hold."""

    top: type[BaseModel]
    headings: dict[type[BaseModel], str] = field(default_factory=dict)
    shared: dict[type[BaseModel], type[BaseModel]] = field(default_factory=dict)
    """Model -> the base whose keys its union shares."""

    def __post_init__(self) -> None:
        self.headings[self.top] = "Top level"
        self._name(self.top, "")

    def _name(self, model: type[BaseModel], above: str) -> None:
        for key, info in model.model_fields.items():
            found = [one for one in dict.fromkeys(models_below(info.annotation)) if one not in self.headings]
            many = bool(re.search(r"\b(list|dict)\[", str(info.annotation)))
            path = f"{above}{key}" + (".<name>" if "dict[" in str(info.annotation) else "[]" if many else "")
            base = _shared_base(found)
            if base is not None and base not in self.headings:
                self.headings[base] = f"{path}, whatever its {tag_of(found[0])[0]}"
            for one in found:
                tag, values = tag_of(one) if len(found) > 1 else ("", ())
                self.headings[one] = f"{path} ({tag}: {' or '.join(values)})" if tag else path
                if base is not None:
                    self.shared[one] = base
            for one in found:
                self._name(one, f"{path}.")

    def link(self, model: type[BaseModel]) -> str:
        """Return a link to a model's section."""
        heading = self.headings[model]
        return f"[{heading.partition(': ')[2].rstrip(')') or heading}](#{anchor(heading)})"

    def sections(self) -> Iterator[str]:
        """Yield the page's lines."""
        for model, heading in self.headings.items():
            yield from (f"{'#' * 2} {cell(heading)}", "")
            if text := text_of(model):
                yield from (text, "")
            base = self.shared.get(model)
            rows = [
                (f"`{key}`", self.type_of(info), default_text(info), info.description or "")
                for key, info in sorted(model.model_fields.items(), key=lambda one: one[0] != tag_of(model)[0])
                if base is None or _differs(base, key, info)
            ]
            if base is not None:
                yield from (f"Beside the [keys of all](#{anchor(self.headings[base])}):", "")
            yield from table(("key", "type", "default", "meaning"), rows)

    def type_of(self, info: FieldInfo) -> str:
        """Return a field's type with links to the sections of its models."""
        shown = type_text(info.annotation, self.link)
        limits = bounds(info.metadata)
        return shown.removesuffix(" or null") + limits + " or null" if shown.endswith(" or null") else shown + limits


def _shared_base(found: Sequence[type[BaseModel]]) -> type[BaseModel] | None:
    if len(found) < 2:
        return None
    common = [one for one in found[0].__mro__ if is_model(one) and all(issubclass(other, one) for other in found)]
    return next((one for one in common if one.model_fields), None)


def _differs(base: type[BaseModel], key: str, info: FieldInfo) -> bool:
    other = base.model_fields.get(key)
    return other is None or (default_text(other), str(other.annotation)) != (default_text(info), str(info.annotation))
