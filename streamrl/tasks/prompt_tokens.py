"""The token ids of prompts: a prompt's messages, and the run's system message, in the model's chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config.model_and_batch import ModelConfig
from streamrl.errors import RunFailed, UserError
from streamrl.tasks.chat_template import ChatTemplate
from streamrl.tasks.source import Prompt


class PromptTokens:
    """Makes prompts into token ids, as one model takes them."""

    def __init__(self, model: ModelConfig, tokenizer: Any, rows: int | None = None) -> None:
        """
        Args:
            model: the run's model.
            tokenizer: its tokenizer, of `transformers`.
            rows: number of tokens that the model knows (`token_rows`); None: not known.

        Raises:
            UserError: the chat template does not use a variable of `model.chat_template_kwargs`, or there is a system
                prompt and no chat template.
        """
        self._model, self._tokenizer, self._rows = model, tokenizer, rows
        self._template = ChatTemplate(tokenizer, model.chat_template_kwargs)
        if model.system_prompt is not None and not self._template.exists:
            raise UserError(
                f"model.system_prompt is set, but the model {model.path} has no chat template to render it: leave it "
                "out, and put the instruction into the prompts or the tasks' `suffix`"
            )

    def __call__(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Return the token ids of a prompt's messages, int32 of shape [P].

        Raises:
            RunFailed: the chat template does not accept the messages, they are several and there is no template, there
                is no token, or the model has no row for one.
        """
        ids = self._ids(prompt)
        if not len(ids):  # an instance would refuse it, whichever tries
            maker = "chat template" if self._template.exists else "tokenizer"
            raise RunFailed(
                f"prompt {prompt.prompt_id} has no token, as the {maker} of {self._model.path} makes nothing of it: "
                f"expected a {maker} that writes the messages"
            )
        if self._rows is not None and (largest := int(ids.max(initial=0))) >= self._rows:
            token = self._tokenizer.convert_ids_to_tokens(largest)
            raise RunFailed(
                f"prompt {prompt.prompt_id} has token {largest} ({token}), but the model {self._model.path} knows "
                f"{self._rows} tokens, from 0: its tokenizer or its chat template is that of another model"
            )
        return ids

    def _ids(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        if not self._template.exists:
            if prompt.earlier:
                raise RunFailed(
                    f"prompt {prompt.prompt_id} is a conversation of {len(prompt.earlier) + 1} messages, but the model "
                    f"{self._model.path} has no chat template: expected prompts of one message"
                )
            return np.asarray(self._tokenizer.encode(prompt.text), dtype=np.int32)
        messages, hint = prompt.messages, ""
        if self._model.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._model.system_prompt})
            hint = "; the system message is model.system_prompt: if that is refused, put it into the task's `suffix`"
        try:
            return self._template.tokens(messages)
        except Exception as error:  # templates raise whatever their authors chose
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            roles = ", ".join(message["role"] for message in messages)
            raise RunFailed(
                f"prompt {prompt.prompt_id}: the chat template of {self._model.path} does not accept its messages "
                f"({roles}): {reason}{hint}"
            ) from error
