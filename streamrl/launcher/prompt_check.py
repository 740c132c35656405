"""The check of the model's chat template: it must take the first prompt of every task, and enough must fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_plan import choose_prompts
from streamrl.controller.group_source import MAX_SKIPPED_IN_A_ROW
from streamrl.errors import ErrorCode, RunFailed, UserError
from streamrl.machine.installed_packages import package_problems
from streamrl.machine.model_files import resolve_model, token_rows
from streamrl.tasks.chat_template import load_tokenizer
from streamrl.tasks.prompt_tokens import PromptTokens
from streamrl.tasks.source import PromptSource

MOST_MEASURED = 100
"""Prompts of a task that are measured to find one that fits, where the first does not."""


def check_prompts(
    run: RunConfig,
    sources: Mapping[str, PromptSource],
    fitting: Collection[str],
    held_out: PromptSource | None = None,
) -> Iterable[str]:
    """Check that the chat template has what the `model` section sets, and accepts prompts that the model can read.

    It loads transformers without torch, so it comes after all code of users that may need both.

    Args:
        run: the run.
        sources: the prompts of each task, by the key of the task in the run file.
        fitting: keys of the tasks one of which must have a prompt that fits among its first `MOST_MEASURED`, unless
            one has an order of its own, by length perhaps.
        held_out: the prompts of the evaluations, which must be enough; None: they are not checked.
    """
    if list(package_problems(("transformers",), "tasks")):
        return  # reported by `check_packages`
    try:
        folder = resolve_model(run.model.path)
    except UserError:
        return  # reported by `check_model`
    try:
        tokens = PromptTokens(run.model, load_tokenizer(folder), token_rows(Path(folder)))
    except UserError as error:
        yield str(error)
        return
    first: dict[str, int] = {}
    for key, source in sources.items():
        try:
            first[key] = len(tokens(source.prompt(0)))
        except RunFailed as error:
            yield f"{key}: {error}"
    room = run.model.max_context - run.sampling.max_tokens
    if held_out is not None and run.evaluation is not None and len(first) == len(sources):
        try:
            most = MAX_SKIPPED_IN_A_ROW if held_out.ordered_rows else MOST_MEASURED  # those that fit may come last
            choose_prompts(run.evaluation.prompts, held_out, tokens, room, most)
        except UserError as error:
            yield str(error)
        except RunFailed as error:
            yield f"evaluation.tasks: {error}"
    if not fitting or not all(key in first and first[key] > room and not sources[key].ordered_rows for key in fitting):
        return
    try:
        others = (len(tokens(sources[key].prompt(number))) for key in fitting for number in range(1, MOST_MEASURED))
        shortest = min(first[key] for key in fitting)
        for length in others:
            if (shortest := min(shortest, length)) <= room:
                return
    except (RunFailed, UserError):
        return  # the run may never come to that prompt
    yield ErrorCode.CONTEXT.refer(
        f"{', '.join(fitting)}: none of the first {MOST_MEASURED} prompts fits: they have {shortest} tokens or more, "
        f"and model.max_context {run.model.max_context} - sampling.max_tokens {run.sampling.max_tokens} leaves {room}"
    )
