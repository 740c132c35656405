"""The check of the model's chat template: it must take the first prompt of every task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.machine.installed_packages import package_problems
from streamrl.machine.model_files import resolve_model
from streamrl.tasks.chat_template import load_tokenizer
from streamrl.tasks.prompt_tokens import PromptTokens
from streamrl.tasks.source import Prompt


def check_prompts(run: RunConfig, prompts: Mapping[str, Prompt]) -> Iterable[str]:
    """Check that the chat template has what the `model` section sets, and accepts prompts.

    It loads transformers without torch, so it comes after all code of users that may need both.

    Args:
        run: the run.
        prompts: a prompt of each task, by the key of the task in the run file.
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
    for key, prompt in prompts.items():
        try:
            tokens(prompt)
        except RunFailed as error:
            yield f"{key}: {error}"
