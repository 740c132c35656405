"""The run's template variables reach every place where conversations become tokens: tasks, evaluation and agents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from streamrl.agents.rendering import ChatRenderer
from streamrl.config.run import RunConfig
from streamrl.config.tasks import FileTask
from streamrl.controller.evaluation_plan import choose_prompts
from streamrl.controller.group_source import GroupSource
from streamrl.errors import RunFailed, UserError, is_final
from streamrl.launcher.preflight import check_tasks
from streamrl.machine import installed_packages
from streamrl.rollouts.types import IntArray
from streamrl.tasks.chat_template import load_tokenizer
from streamrl.tasks.files import TaskRow, load_rows
from streamrl.tasks.prompt_tokens import PromptTokens
from streamrl.tasks.source import Prompt, PromptSource
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


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
"""A template like Gemma 2's."""
IN_TURNS = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
IN_TURNS += "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"


def change_template(model: Path, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)


def run_of(model: Path, tasks: Path, shuffle: bool = False, **settings: Any) -> RunConfig:
    """A run whose task is a data set of two rows: a conversation, and a lone message of the user."""
    rows = [CONVERSATION, CONVERSATION[1:2]]
    datasets.Dataset.from_dict({"messages": rows, "answer": [13, 12]}).save_to_disk(tasks)
    task = {"kind": "hf_dataset", "name": "sums", "path": str(tasks), "prompt_column": "messages", "shuffle": shuffle}
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
    groups = [source.next_group(1) for _ in range(2)]
    assert [group.prompt_tokens.tolist() for group in groups] == expected
    assert tokenizer.decode(expected[0]).endswith("<|assistant|>" + ("" if thinking else "<think></think>"))
    evaluated = choose_prompts(2, source.source, source.tokens, 400)
    assert [group.prompt_tokens.tolist() for group in evaluated] == expected
    agents = ChatRenderer(tokenizer, "Think.", run.model.chat_template_kwargs).whole(lone, [])
    assert agents.tokens.tolist() == expected[1]


def test_rewards_get_the_last_message_and_readers_all_of_them(model: Path, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "tasks")
    group = source_of(run, AutoTokenizer.from_pretrained(model)).next_group(1)
    assert group.reward_input == {"prompt": "And 8 + 5?\nNumber only.", "answer": 13}
    assert group.prompt.startswith("system: Be brief.\n\nuser: 7 + 5?\n\nassistant: 12\n\nuser: And 8 + 5?")


def test_a_variable_that_the_template_does_not_use_is_refused_before_the_start(model: Path, tmp_path: Path) -> None:
    wrong = run_of(model, tmp_path / "tasks", chat_template_kwargs={"enable_thinkin": False})
    right = run_of(model, tmp_path / "tasks", chat_template_kwargs={"enable_thinking": False})
    (problem,) = check_tasks(wrong)
    assert problem == (
        "model.chat_template_kwargs has 'enable_thinkin', which the model's chat template does not use: expected a "
        "variable of the template; did you mean enable_thinking?"
    )
    assert list(check_tasks(right)) == []
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="but the model has no chat template: leave it out"):
        source_of(right, tokenizer)


def test_a_model_without_a_chat_template_takes_texts_but_no_conversations(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    source = source_of(run_of(model, tmp_path / "tasks", system_prompt=None), tokenizer)
    with pytest.raises(RunFailed, match=r"prompt sums/0 is a conversation of 4 messages, but the model .* has no chat"):
        source.tokens(source.source.prompt(0))
    assert np.array_equal(source.tokens(source.source.prompt(1)), tokenizer.encode("7 + 5?\nNumber only."))


@pytest.mark.parametrize(
    ("template", "lone_words"),
    [
        (NO_SYSTEM, "(system, user): System role not supported; the system message is model.system_prompt: if"),
        (IN_TURNS, "(system, user): roles must alternate; the system message is model.system_prompt: if"),
    ],
)
def test_a_conversation_that_the_template_refuses_ends_the_run_and_is_told_before_it(
    model: Path, tmp_path: Path, template: str, lone_words: str
) -> None:
    change_template(model, template + CHAT_TEMPLATE)
    run = run_of(model, tmp_path / "tasks")
    source = source_of(run, AutoTokenizer.from_pretrained(model))
    refused = f"the chat template of {model} does not accept its messages"
    with pytest.raises(RunFailed) as caught:
        source.tokens(source.source.prompt(1))
    assert is_final(caught.value)
    assert f"prompt sums/1: {refused} {lone_words}" in str(caught.value)
    (problem,) = check_tasks(run)  # of the first row, which has a system message of its own
    assert problem.startswith(f"tasks.0: prompt sums/0: {refused} (system, user, assistant, user): ")
    assert "model.system_prompt" not in problem
    evaluated = {"every": 1, "tasks": [run.tasks[0].model_dump()]}
    other = {"kind": "reasoning_gym", "name": "chain_sum"}
    held_out = RunConfig.model_validate({"model": run.model.model_dump(), "tasks": [other], "evaluation": evaluated})
    assert [problem.partition(": prompt ")[0] for problem in check_tasks(held_out)] == ["tasks.0", "evaluation.tasks.0"]
    change_template(model, CHAT_TEMPLATE)
    assert list(check_tasks(run)) == []


def test_a_prompt_without_a_token_ends_the_run_and_is_told_before_it(model: Path, tmp_path: Path) -> None:
    change_template(model, "{% if messages[0]['role'] == 'user' %}{{ messages[0]['content'] }}{% endif %}")
    run = run_of(model, tmp_path / "tasks", system_prompt=None)
    source = source_of(run, AutoTokenizer.from_pretrained(model))
    assert len(source.tokens(source.source.prompt(1)))
    nothing = f"prompt sums/0 has no token, as the chat template of {model} makes nothing of it: expected a chat"
    with pytest.raises(RunFailed, match=re.escape(nothing)) as caught:
        source.tokens(source.source.prompt(0))
    assert is_final(caught.value)
    (problem,) = check_tasks(run)
    assert problem.startswith(f"tasks.0: {nothing}")


def test_a_task_of_which_no_prompt_fits_is_refused_before_a_new_run(model: Path, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "tasks", shuffle=True)
    tokens = source_of(run, AutoTokenizer.from_pretrained(model)).tokens
    short, long = sorted(len(tokens(PromptSource(run.tasks, run.seed).prompt(index))) for index in range(2))
    assert short < long
    context = run.model.max_context

    def leaving(room: int) -> RunConfig:
        return run.model_copy(update={"sampling": run.sampling.model_copy(update={"max_tokens": context - room})})

    assert list(check_tasks(leaving(short))) == []  # the long one does not fit, and is left out
    assert list(check_tasks(leaving(short - 1))) == [
        f"tasks.0: none of the first 100 prompts fits: they have {short} tokens or more, and model.max_context "
        f"{context} - sampling.max_tokens {context - short + 1} leaves {short - 1} (see docs: E1005)"
    ]
    assert list(check_tasks(leaving(short - 1), resumed=True)) == []
    other = RunConfig.model_validate({"tasks": [{"kind": "reasoning_gym", "name": "chain_sum"}]}).tasks[0]
    assert len(list(check_tasks(leaving(short).model_copy(update={"tasks": [other]})))) == 1
    assert list(check_tasks(leaving(short).model_copy(update={"tasks": [other, *run.tasks]}))) == []  # one fits
    ordered = [run.tasks[0].model_copy(update={"shuffle": False})]
    assert list(check_tasks(leaving(short - 1).model_copy(update={"tasks": ordered}))) == []  # shorter ones may follow
    assert list(check_tasks(leaving(short - 1), rendered=False)) == []


def test_held_out_prompts_that_are_too_few_are_told_before_a_new_run(model: Path, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "tasks")
    tokens = source_of(run, AutoTokenizer.from_pretrained(model)).tokens
    long = max(len(tokens(PromptSource(run.tasks, run.seed).prompt(index))) for index in range(2))
    held_out = run_of(model, tmp_path / "held-out").tasks[0].model_dump()

    def evaluating(prompts: int, room: int) -> RunConfig:
        evaluation = {"tasks": [held_out], "prompts": prompts}
        sampling = {"max_tokens": run.model.max_context - room}
        return RunConfig.model_validate(run.model_dump() | {"evaluation": evaluation, "sampling": sampling})

    assert list(check_tasks(evaluating(2, long))) == []
    few = "evaluation.prompts is {}, but after 2 in all, task sums has no more that are different{}"
    assert list(check_tasks(evaluating(3, long))) == [
        few.format(3, ": ask for fewer, or give it less weight (see docs: E1001)")
    ]
    too_long = f"more than {long - 1} tokens, which is what model.max_context - sampling.max_tokens leaves"
    assert list(check_tasks(evaluating(1, long - 1))) == []
    assert list(check_tasks(evaluating(2, long - 1))) == [
        few.format(2, f", and 1 of the 2 have {too_long}: leave more, or ask for fewer (see docs: E1005)")
    ]
    for prompts in (2, 3):
        assert list(check_tasks(evaluating(prompts, long - 1), resumed=True)) == []
    assert list(check_tasks(evaluating(3, long), rendered=False)) == []


def test_the_date_in_a_template_is_the_same_on_every_day(model: Path, tmp_path: Path) -> None:
    change_template(model, "{{ strftime_now('%d %b %Y, %H:%M') }}; " + CHAT_TEMPLATE)
    for variables, day in (({}, "26 Jul 2024"), ({"strftime_now": "2026-01-02"}, "02 Jan 2026")):
        run = run_of(model, tmp_path / day, chat_template_kwargs=variables)
        tokenizer = load_tokenizer(str(model))
        assert list(check_tasks(run)) == []
        begins = f"{day}, 00:00; <|system|>"
        assert tokenizer.decode(source_of(run, tokenizer).next_group(1).prompt_tokens).startswith(begins)
        agents = ChatRenderer(tokenizer, "Think.", run.model.chat_template_kwargs)
        assert tokenizer.decode(agents.whole(CONVERSATION[1:2], []).tokens).startswith(begins)
    wrong = run_of(model, tmp_path / "wrong", chat_template_kwargs={"strftime_now": "today"})
    (problem,) = check_tasks(wrong)
    assert problem == "model.chat_template_kwargs.strftime_now: expected a day such as 2024-07-26, got 'today'"


def test_a_token_that_the_model_lacks_is_told_before_the_start_and_with_its_row(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<new {number}>" for number in range(320 - len(tokenizer) + 1)], special_tokens=True)
    tokenizer.save_pretrained(model)
    assert list(check_tasks(run_of(model, tmp_path / "tasks"))) == []  # no prompt has it
    change_template(model, CHAT_TEMPLATE + f"{{% if messages|length < 3 %}}{tokenizer.decode([320])}{{% endif %}}")
    run = run_of(model, tmp_path / "later")
    source = GroupSource(run, PromptSource(run.tasks, run.seed), AutoTokenizer.from_pretrained(model), 320)
    assert source.next_group(1).prompt_tokens.max() < 320
    says = f"prompt sums/1 has token 320 ({tokenizer.decode([320])}), but the model {model} knows 320 tokens, from 0: "
    with pytest.raises(RunFailed, match=re.escape(says)) as caught:
        source.next_group(1)
    assert is_final(caught.value)
    change_template(model, CHAT_TEMPLATE + tokenizer.decode([320]))
    (problem,) = check_tasks(run)
    assert problem.startswith(f"tasks.0: {says.replace('sums/1', 'sums/0')}")


def test_a_system_prompt_that_no_template_renders_is_refused(model: Path, tmp_path: Path) -> None:
    change_template(model, None)
    run = run_of(model, tmp_path / "tasks")
    says = f"model.system_prompt is set, but the model {model} has no chat template"
    with pytest.raises(UserError, match=says):
        source_of(run, AutoTokenizer.from_pretrained(model))
    (problem,) = check_tasks(run)
    assert problem.startswith(says) and "`suffix`" in problem


def test_a_model_without_a_tokenizer_is_told_before_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path / "tasks")
    (model / "tokenizer.json").write_text("{}")
    (problem,) = check_tasks(run)
    assert problem.startswith(f"model.path: no tokenizer in {model}: ")
    monkeypatch.setattr(installed_packages.importlib.util, "find_spec", lambda name: None)
    assert list(check_tasks(run)) == []  # where transformers is not installed, which the check of packages tells


def held_out_run(model: Path, folder: Path, rows: int, held_out: int, **of_file: Any) -> RunConfig:
    """A run on rows that fit, evaluated on a file of so many rows that do not, with one at its end that does."""
    for name, prompts in (("train", ["7 + 5?"] * rows), ("test", ["7 + 5? " * 300] * held_out + ["8 + 5?"])):
        lines = [json.dumps({"prompt": prompt, "answer": number}) for number, prompt in enumerate(prompts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    task = {"kind": "file", "reward": "exact_match", "path": str(folder / "train.jsonl"), "name": "sums"}
    test = {**task, "path": str(folder / "test.jsonl"), "name": "held", **of_file}
    settings = {"path": str(model), "max_context": 400}
    evaluation = {"every": 1, "prompts": 1, "tasks": [test]}
    values = {"model": settings, "sampling": {"max_tokens": 100}, "tasks": [task], "evaluation": evaluation}
    return RunConfig.model_validate(values)


def test_files_are_read_once_before_the_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(task: FileTask) -> list[TaskRow]:
        read.append(task.key)
        return load_rows(task)

    monkeypatch.setattr("streamrl.tasks.files.load_rows", counted)
    assert list(check_tasks(held_out_run(model, tmp_path, rows=3, held_out=1))) == []
    assert read == ["sums", "held"]


def test_the_check_ends_after_some_prompts_unless_those_that_fit_may_come_last(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand prompts of some thousand words each take a minute to be measured."""
    measured: list[str] = []
    tokens_of = PromptTokens.__call__

    def counted(self: PromptTokens, prompt: Prompt) -> IntArray:
        measured.append(prompt.prompt_id)
        return tokens_of(self, prompt)

    monkeypatch.setattr(PromptTokens, "__call__", counted)
    (problem,) = check_tasks(held_out_run(model, tmp_path, rows=3, held_out=2000, shuffle=True))
    assert len(measured) == 102
    told = (
        "evaluation.prompts: all of the first 100 held-out prompts, the most that are looked at, have more than 300 t"
    )
    assert told in problem
    assert list(check_tasks(held_out_run(model, tmp_path, rows=3, held_out=500, shuffle=False))) == []
