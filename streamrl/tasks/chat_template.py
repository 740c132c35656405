"""A model's chat template with the run's variables: the one place where conversations become text."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.errors import UserError
from streamrl.imports import importing, without_torch
from streamrl.machine.model_files import read_tokenizer

CLOCK, DAY = "strftime_now", "2024-07-26"
"""Function by which templates write today's date (Llama 3, gpt-oss), and the day that they get, so that a prompt is the
same on every day and in every run: the one that Llama's take where there is no such function."""


class ChatTemplate:
    """The chat template of a tokenizer, rendered with fixed variables."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            tokenizer: tokenizer of `transformers`.
            variables: `model.chat_template_kwargs` of the run file.

        Raises:
            UserError: there are variables, but no template, or one that does not use them; or no day as `strftime_now`.
        """
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        template = getattr(tokenizer, "chat_template", None)
        self.exists = bool(template)
        """Whether the model has a chat template."""
        for name in self._variables:
            _check_used(name, "\n".join(template.values()) if isinstance(template, dict) else template or "")
        self._variables[CLOCK] = _clock(self._variables.get(CLOCK, DAY))

    def text(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, asks: bool = True) -> str:
        """Render a conversation; with `asks`, up to where the model's answer begins."""
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=tools or None, tokenize=False, add_generation_prompt=asks, **self._variables
            )
        )

    def tokens(self, messages: Sequence[Any]) -> npt.NDArray[np.int32]:
        """Return the token ids of a conversation up to where the model's answer begins, int32 [P]."""
        ids = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False, **self._variables
        )
        return np.asarray(ids, dtype=np.int32)


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a model, without torch (`without_torch`).

    Args:
        path: folder.

    Raises:
        UserError: there is no tokenizer that can be read.
    """
    with importing(), without_torch():
        from transformers import AutoTokenizer  # noqa: F401  # of `read_tokenizer`
    try:
        return read_tokenizer(path)
    except Exception as error:  # the libraries raise whatever their authors chose
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"model.path: no tokenizer in {path}: {reason}") from error


def _clock(day: Any) -> Callable[[str], str]:
    try:
        return datetime.datetime.fromisoformat(str(day)).strftime
    except ValueError:
        raise UserError(f"model.chat_template_kwargs.{CLOCK}: expected a day such as {DAY}, got {day!r}") from None


def _check_used(name: str, template: str) -> None:
    if not template:
        raise UserError(f"model.chat_template_kwargs has {name!r}, but the model has no chat template: leave it out")
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    if name not in words:
        near = difflib.get_close_matches(name, sorted(words), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"model.chat_template_kwargs has {name!r}, which the model's chat template does not use: expected a "
            f"variable of the template{hint}"
        )
