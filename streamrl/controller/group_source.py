"""The source of groups: makes prompts into token ids, sample ids and seeds, deterministic in the run's seed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode, RunFailed
from streamrl.rollouts.seeds import derive_seed
from streamrl.rollouts.types import Group
from streamrl.tasks.prompt_tokens import PromptTokens
from streamrl.tasks.source import Prompt, PromptSource, TaskContent
from streamrl.tasks.task_items import digest_of

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW, MOST_SKIPPED_OF_A_CURRICULUM = 1000, 5000
"""Limit on consecutive prompts that do not fit the context; reaching it fails the run. Files in an order of their own,
such as a curriculum by length, may have more of them together: up to all their rows, or the second number. Meanwhile
the controller does nothing else, and 10,000 long prompts may take the minute after which it counts as hanging."""


class GroupSource:
    """Source of a run's groups, in order; prompts that do not fit the context are skipped and counted."""

    def __init__(self, run: RunConfig, source: PromptSource, tokenizer: Any, rows: int | None = None) -> None:
        """
        Args:
            run: the run.
            source: its prompts.
            tokenizer: tokenizer of its model.
            rows: number of tokens that the model knows (`token_rows`); None: not known.

        Raises:
            UserError: the model's chat template lacks what `model` sets (see `PromptTokens`).
        """
        self.run, self.source, self.tokenizer = run, source, tokenizer
        self.tokens = PromptTokens(run.model, tokenizer, rows)
        """Makes a prompt into token ids."""
        self.too_long = 0
        """Number of prompts skipped since the start."""
        self._next_index = 0
        self._to_reissue: deque[int] = deque()
        """Indices of prompts that were issued before a resume and that no step has trained."""
        self.longest_prompt = run.model.max_context - run.sampling.max_tokens
        """Limit on the tokens of a prompt."""
        self._contents = source.contents()
        self._drawn_with = run.drawn_with

    def state(self, open_groups: Iterable[Group]) -> dict[str, Any]:
        """Return the position in the prompts, for a checkpoint.

        Args:
            open_groups: groups issued and not trained by the checkpoint's step; a resume issues them again.
        """
        again = [group.prompt_index for group in open_groups] + list(self._to_reissue)
        position = {"next_index": self._next_index, "too_long": self.too_long, "again": again}
        return position | {"contents": self._contents, "mixed_by": _mixed_by(self.run), "written_by": self._written_by}

    @cached_property
    def _written_by(self) -> dict[str, str]:
        return written_by(self.tokenizer)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's position; what has changed the prompts or their order since is logged."""
        self._next_index, self.too_long = state["next_index"], state["too_long"]
        self._to_reissue = deque(state.get("again", ()))
        for line in changed_since(state, self.run, self._written_by, self._contents):
            log.warning("%s", line)

    def next_group(self, step: int) -> Group:
        """Make the next group, for optimizer step `step` (from 1).

        Raises:
            RunFailed: `MAX_SKIPPED_IN_A_ROW` consecutive prompts do not fit the context, or the model does not take one
                (see `PromptTokens`).
        """
        limit = f"model.max_context {self.run.model.max_context} - sampling.max_tokens {self.run.sampling.max_tokens}"
        most_skipped = max(MAX_SKIPPED_IN_A_ROW, min(self.source.ordered_rows, MOST_SKIPPED_OF_A_CURRICULUM))
        for _ in range(most_skipped):
            if again := bool(self._to_reissue):
                index = self._to_reissue.popleft()  # may not fit any more: files and limits may have changed
            else:
                index, self._next_index = self._next_index, self._next_index + 1
            prompt = self.source.prompt(index)
            tokens = self.tokens(prompt)
            if len(tokens) <= self.longest_prompt:
                group = prompt_group(prompt, index, tokens, f"{index:08d}", step, self.run.batch.samples_per_prompt)
                group.settings = self._drawn_with
                return group
            if again:
                log.warning(
                    "prompt %s was issued before the resume, but has %d tokens now, more than %d (%s): it is left out",
                    *(prompt.prompt_id, len(tokens), self.longest_prompt, limit),
                )
            self.too_long += 1
        raise RunFailed(
            ErrorCode.CONTEXT.refer(
                f"{most_skipped} prompts in a row have more than {self.longest_prompt} tokens ({limit})"
            )
        )


def changed_since(
    state: Mapping[str, Any], run: RunConfig, writing: Mapping[str, str], contents: Mapping[str, TaskContent]
) -> Iterable[str]:
    """Say what of a run's prompts, or of their order, is not as it was at a checkpoint.

    Args:
        state: the position in the prompts that the checkpoint holds (`GroupSource.state`).
        run: the run as it goes on.
        writing: what the prompts are written with from here on (`written_by`).
        contents: what each task holds now, by its key; one that is not there is not compared.

    Raises:
        LookupError, TypeError, AttributeError: `state` comes from a damaged file.
    """
    yield from _changed_order(state.get("mixed_by", {}), _mixed_by(run))
    yield from _changed_writing(state.get("written_by", {}), writing, run.model.path)
    yield from _changed_rows(state.get("contents", {}), contents)


def _mixed_by(run: RunConfig) -> dict[str, Any]:
    """What the order of a run's prompts depends on besides the tasks' rows: the seed, and the tasks with weights."""
    return {"seed": run.seed, "tasks": [[task.key, task.weight] for task in run.tasks]}


def written_by(tokenizer: Any) -> dict[str, str]:
    """What the tokens of a prompt depend on, by digests."""
    template, words = getattr(tokenizer, "chat_template", None), sorted(tokenizer.get_vocab().items())
    return {"chat template": digest_of([template]), "vocabulary": digest_of([words])}


def _changed_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    for what, then in before.items():
        if (today := now.get(what, then)) != then:
            yield (
                f"{what}: {today} now, and {then} at the checkpoint: prompts that are issued again may be others, and "
                "rows may come again or not at all in this epoch"
            )


def _changed_writing(before: Mapping[str, str], now: Mapping[str, str], model: str) -> Iterable[str]:
    for part, then in before.items():
        if now.get(part, then) != then:
            yield (
                f"model.path: the {part} of {model} is another one than at the checkpoint: from here on prompts are "
                "written with it, and the model was not trained with such prompts"
            )


def _changed_rows(then: Mapping[str, TaskContent], now: Mapping[str, TaskContent]) -> Iterable[str]:
    for task, before in then.items():
        content = now.get(task, before)
        if content["rows"] != before["rows"]:
            yield (
                f"task {task!r} has {content['rows']} rows now, and had {before['rows']} at the checkpoint: their "
                "order is another one from here on, and rows of this epoch may come again or not at all; with its old "
                "rows it goes on as before"
            )
        elif content["digest"] != before["digest"]:
            yield (
                f"task {task!r} has other rows, or the same in another order, than at the checkpoint: prompts that are "
                "issued again may be others, and rows may come again or not at all in this epoch"
            )


def prompt_group(
    prompt: Prompt, index: int, tokens: np.ndarray, group_id: str = "", step: int = 0, size: int = 0
) -> Group:
    """Make a group of prompt number `index`, whose token ids are `tokens`, int32 of shape [P]."""
    return Group(
        group_id=group_id,
        step=step,
        prompt_index=index,
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        epoch=prompt.epoch,
        prompt=prompt.shown,
        prompt_tokens=tokens,
        size=size,
        reward_input=prompt.reward_input,
        agent=prompt.agent,
    )


SampleDraw = tuple[str, int, float | None]
"""(sample id, seed, temperature) of one completion; temperature None is the run's, 0 is greedy."""


def group_of(sample_id: str) -> str:
    """Return the id of the group that a sample of `samples_of` belongs to."""
    return sample_id.rpartition(".")[0]


def sample_ids(group: Group) -> list[str]:
    """Return the ids of a group's completions."""
    return [f"{group.group_id}.{number:03d}" for number in range(group.size)]


def samples_of(group: Group, seed: int) -> list[SampleDraw]:
    """Return the completions to generate of a group; their ids and seeds follow from run seed and prompt index."""
    return [
        (sample_id, derive_seed(seed, f"{group.group_id}/{number}"), None)
        for number, sample_id in enumerate(sample_ids(group))
    ]
