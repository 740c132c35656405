"""The run's template variables reach every place where conversations become tokens: tasks, evaluation and agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from streamrl.agents.rendering import ChatRenderer
from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_plan import choose_prompts
from streamrl.controller.group_source import GroupSource
from streamrl.errors import RunFailed, UserError
from streamrl.launcher.preflight import check_chat_template
from streamrl.tasks.source import PromptSource
from tests.tiny_model import CHAT_TEMPLATE, save_tiny_model

THINKING = CHAT_TEMPLATE + "{% if not (enable_thinking | default(true)) %}<think></think>{% endif %}"
"""As Qwen 3's template: without thinking, the answer begins behind an empty thought."""
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "7 + 5?"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": "And 8 + 5?"},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder)
    return folder


def run_of(model: Path, tasks: Path, **settings: Any) -> RunConfig:
    """A run whose task is a data set of two rows: a conversation, and a lone message of the user."""
    rows = [CONVERSATION, CONVERSATION[1:2]]
    datasets.Dataset.from_dict({"messages": rows, "answer": [13, 12]}).save_to_disk(tasks)
    task = {"kind": "hf_dataset", "name": "sums", "path": str(tasks), "prompt_column": "messages", "shuffle": False}
    values = {"path": str(model), "system_prompt": "Think.", **settings}
    return RunConfig.model_validate({"model": values, "tasks": [{**task, "suffix": "Number only."}]})


def source_of(run: RunConfig, tokenizer: Any) -> GroupSource:
    return GroupSource(run, PromptSource(run.tasks, run.seed), tokenizer)


@pytest.mark.parametrize("thinking", [True, False])
def test_prompts_are_what_transformers_makes_of_the_rows_and_the_variables(
    model: Path, tmp_path: Path, thinking: bool
) -> None:
    run = run_of(model, tmp_path / "tasks", chat_template_kwargs={"enable_thinking": thinking})
    tokenizer = AutoTokenizer.from_pretrained(model)
    source = source_of(run, tokenizer)
    whole = [*CONVERSATION[:3], {"role": "user", "content": "And 8 + 5?\nNumber only."}]
    lone = [{"role": "system", "content": "Think."}, {"role": "user", "content": "7 + 5?\nNumber only."}]
    expected = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False, enable_thinking=thinking)
        for m in (whole, lone)
    ]
    groups = [source.group(1) for _ in range(2)]
    assert [group.prompt_tokens.tolist() for group in groups] == expected
    assert tokenizer.decode(expected[0]).endswith("<|assistant|>" + ("" if thinking else "<think></think>"))
    evaluated = choose_prompts(2, source.source, source.tokens, 400)
    assert [group.prompt_tokens.tolist() for group in evaluated] == expected
    agents = ChatRenderer(tokenizer, "Think.", run.model.chat_template_kwargs).whole(lone, [])
    assert agents.tokens.tolist() == expected[1]


def test_rewards_get_the_last_message_and_readers_all_of_them(model: Path, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "tasks")
    group = source_of(run, AutoTokenizer.from_pretrained(model)).group(1)
    assert group.reward_input == {"prompt": "And 8 + 5?\nNumber only.", "answer": 13}
    assert group.prompt.startswith("system: Be brief.\n\nuser: 7 + 5?\n\nassistant: 12\n\nuser: And 8 + 5?")


def test_a_variable_that_the_template_does_not_use_is_refused_before_the_start(model: Path, tmp_path: Path) -> None:
    wrong = run_of(model, tmp_path / "tasks", chat_template_kwargs={"enable_thinkin": False})
    right = run_of(model, tmp_path / "tasks", chat_template_kwargs={"enable_thinking": False})
    (problem,) = check_chat_template(wrong)
    assert problem == (
        "model.chat_template_kwargs has 'enable_thinkin', which the model's chat template does not use: expected a "
        "variable of the template; did you mean enable_thinking?"
    )
    assert list(check_chat_template(right)) == []
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="but the model has no chat template: leave it out"):
        source_of(right, tokenizer)


def test_a_model_without_a_chat_template_takes_texts_but_no_conversations(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    source = source_of(run_of(model, tmp_path / "tasks"), tokenizer)
    with pytest.raises(RunFailed, match=r"prompt sums/0 is a conversation of 4 messages, but the model .* has no chat"):
        source.tokens(source.source.prompt(0))
    assert np.array_equal(source.tokens(source.source.prompt(1)), tokenizer.encode("7 + 5?\nNumber only."))
