"""From prompt source to groups: chat template, tokens, ids and seeds; deterministic in the run's seed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed
from streamrl.rollouts.types import Group
from streamrl.tasks.source import PromptSource

MAX_SKIPPED_IN_A_ROW = 1000


class GroupSource:
    """Makes the groups of each step. Prompts that do not fit the context are skipped, and counted."""

    def __init__(self, run: RunConfig, source: PromptSource, tokenizer: Any) -> None:
        self.run, self.source, self.tokenizer = run, source, tokenizer
        self.too_long = 0
        """Prompts skipped since the start."""
        self._next_index = 0
        self._longest = run.model.max_context - run.sampling.max_tokens

    def state(self) -> dict[str, int]:
        """Position, for a checkpoint."""
        return {"next_index": self._next_index, "too_long": self.too_long}

    def restore(self, state: dict[str, int]) -> None:
        """Continues from a checkpoint's position."""
        self._next_index, self.too_long = state["next_index"], state["too_long"]

    def batch(self, step: int) -> list[Group]:
        """The groups of an optimizer step (0-based), in order.

        Raises:
            RunFailed: no prompt fits the context.
        """
        return [self._group(step) for _ in range(self.run.batch.prompts_per_step)]

    def _group(self, step: int) -> Group:
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            index, self._next_index = self._next_index, self._next_index + 1
            prompt = self.source.prompt(index)
            tokens = self._tokens(prompt.text)
            if len(tokens) > self._longest:
                self.too_long += 1
                continue
            return Group(
                group_id=f"{index:08d}",
                step=step,
                prompt_index=index,
                prompt_id=prompt.prompt_id,
                task=prompt.task,
                epoch=prompt.epoch,
                prompt=prompt.text,
                prompt_tokens=tokens,
                size=self.run.batch.samples_per_prompt,
                reward_input=prompt.reward_input,
            )
        raise RunFailed(
            f"{MAX_SKIPPED_IN_A_ROW} prompts in a row have more than {self._longest} tokens "
            f"(model.max_context {self.run.model.max_context} - sampling.max_tokens {self.run.sampling.max_tokens})"
        )

    def _tokens(self, text: str) -> np.ndarray:
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer.encode(text)
        else:
            messages = [{"role": "user", "content": text}]
            if self.run.model.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": self.run.model.system_prompt})
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return np.asarray(ids, dtype=np.int32)


def samples_of(group: Group, seed: int) -> list[tuple[str, int]]:
    """(sample id, seed) of each completion of a group; both depend only on the run's seed and the prompt's index."""
    samples = []
    for number in range(group.size):
        digest = hashlib.sha256(f"{seed}/{group.group_id}/{number}".encode()).digest()
        samples.append((f"{group.group_id}.{number:03d}", int.from_bytes(digest[:4], "little") >> 1))
    return samples
