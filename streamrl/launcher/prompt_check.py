"""The check of the model's chat template: it must take the first prompt of every task, and one must fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode, RunFailed, UserError
from streamrl.machine.installed_packages import package_problems
from streamrl.machine.model_files import resolve_model
from streamrl.tasks.chat_template import load_tokenizer
from streamrl.tasks.prompt_tokens import PromptTokens
from streamrl.tasks.source import PromptSource

MOST_MEASURED = 100
"""Prompts of a task that are measured to find one that fits, where the first does not."""


def check_prompts(run: RunConfig, sources: Mapping[str, PromptSource], fitting: Collection[str]) -> Iterable[str]:
    """Check that the chat template has what the `model` section sets, accepts prompts, and that some fit.

    It loads transformers without torch, so it comes after all code of users that may need both.

    Args:
        run: the run.
        sources: the prompts of each task, by the key of the task in the run file.
        fitting: keys of the tasks that must have a prompt that fits among their first `MOST_MEASURED`.
    """
    if list(package_problems(("transformers",), "tasks")):
        return  # reported by `check_packages`
    try:
        folder = resolve_model(run.model.path)
    except UserError:
        return  # reported by `check_model`
    try:
        tokens = PromptTokens(run.model, load_tokenizer(folder))
    except UserError as error:
        yield str(error)
        return
    room = run.model.max_context - run.sampling.max_tokens
    for key, source in sources.items():
        try:
            shortest = len(tokens(source.prompt(0)))
            number = 1
            while key in fitting and shortest > room and number < MOST_MEASURED:
                shortest = min(shortest, len(tokens(source.prompt(number))))
                number += 1
        except RunFailed as error:
            yield f"{key}: {error}"
            continue
        if key in fitting and shortest > room:
            yield ErrorCode.CONTEXT.refer(
                f"{key}: the first {MOST_MEASURED} prompts have {shortest} tokens or more, and model.max_context "
                f"{run.model.max_context} - sampling.max_tokens {run.sampling.max_tokens} leaves {room}"
            )
