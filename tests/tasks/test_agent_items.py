"""Items of an agent task: the same by number in every process, with all that a file or a function gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.evaluation import EvaluationConfig
from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask
from streamrl.errors import RunFailed, UserError
from streamrl.launcher.preflight import check_tasks
from streamrl.tasks.rewards import Scorer
from streamrl.tasks.source import PromptSource

ITEMS = """
import decimal, random

def numbers(index, seed):
    return {"prompt": f"Guess the {index}th.", "number": random.Random(seed).randrange(10**9), "path": ("a", 1)}

def fails_late(index, seed):
    if index == 3: raise RuntimeError("no more")
    return {"prompt": "p"}

def a_list(index, seed): return ["p"]
def no_prompt(index, seed): return {"question": "p"}
def empty_prompt(index, seed): return {"prompt": " "}
def an_object(index, seed): return {"prompt": "p", "thing": object()}
def not_finite(index, seed): return {"prompt": "p", "bound": float("inf")}
def too_large(index, seed): return {"prompt": "p", "text": "x" * 2**23}
def number_key(index, seed): return {"prompt": "p", 3: 4}
def halves(index, seed): return {"prompt": "\\ud83d", "answer": "\\ud83d", "\\ud83d": {"\\ud83d": "\\ud83d"}}
def without_seed(index): return {"prompt": "p"}
first = []
def for_one_seed(index, seed):
    first.append(seed)
    if index == 0 and seed != first[0]: raise ValueError("no level for this seed")
    return {"prompt": "p"}
async def later(index, seed): return {"prompt": "p"}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "episode_items.py").write_text(ITEMS)
    monkeypatch.chdir(tmp_path)


def agent(**settings: Any) -> AgentTask:
    return AgentTask.model_validate({"kind": "agent", "name": "mine", "run": "unused:run", **settings})


def made(function: str = "numbers", **settings: Any) -> AgentTask:
    return agent(items=f"episode_items:{function}", **settings)


def from_file(lines: list[dict[str, Any]], **settings: Any) -> AgentTask:
    Path("items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return agent(path="items.jsonl", **settings)


def test_a_made_item_follows_from_its_number_and_the_runs_seed() -> None:
    prompts = [PromptSource([made()], 5).prompt(index) for index in range(20)]
    source = PromptSource([made()], 5)
    assert [source.prompt(index) for index in reversed(range(20))] == prompts[::-1]
    assert [prompt.text for prompt in prompts[:2]] == ["Guess the 0th.", "Guess the 1th."]
    assert len({prompt.reward_input["number"] for prompt in prompts}) == 20
    assert prompts[0].reward_input["path"] == ["a", 1]
    assert {prompt.epoch for prompt in prompts} == {0}
    others = [PromptSource([made()], 6).prompt(index) for index in range(20)]
    assert not {prompt.prompt_id for prompt in prompts} & {prompt.prompt_id for prompt in others}
    assert prompts[0].reward_input["number"] != others[0].reward_input["number"]


def test_an_id_names_the_same_item_in_runs_with_other_seeds() -> None:
    one = PromptSource([made()], 5).prompt(0)
    seed = int(one.prompt_id.partition("/")[2])
    import episode_items  # type: ignore[import-not-found]

    assert episode_items.numbers(0, seed)["number"] == one.reward_input["number"]


def test_made_items_with_a_count_are_repeated_in_epochs_in_a_new_order_unless_it_is_a_curriculum() -> None:
    source = PromptSource([made(count=7)], 5)
    epochs = [[source.prompt(7 * epoch + index).text for index in range(7)] for epoch in range(4)]
    assert {frozenset(epoch) for epoch in epochs} == {frozenset(epochs[0])}
    assert len({tuple(epoch) for epoch in epochs}) > 1
    fixed = PromptSource([made(count=7, shuffle=False)], 5)
    assert [fixed.prompt(index).text for index in (0, 7, 8)] == ["Guess the 0th.", "Guess the 0th.", "Guess the 1th."]


def test_a_files_columns_all_come_along(tmp_path: Path) -> None:
    lines = [{"question": "one?", "solution": 1, "hints": ["a", None], "note": None}]
    task = from_file(lines, prompt_column="question", answer_column="solution")
    item = {"prompt": "one?", "answer": 1, "hints": ["a", None], "note": None}
    prompt = PromptSource([task], 0).prompt(0)
    assert (prompt.text, prompt.prompt_id, prompt.reward_input) == ("one?", "mine/0", item)
    assert msgpack.unpackb(msgpack.packb(prompt.reward_input)) == item
    pq.write_table(pa.table({name: [value] for name, value in lines[0].items()}), tmp_path / "items.parquet")
    table = task.model_copy(update={"path": "items.parquet"})
    assert PromptSource([table], 0).prompt(0).reward_input == item


def test_half_of_a_surrogate_pair_can_be_sent_wherever_an_item_has_it() -> None:
    half, whole = "\ud83d", "\ufffd"
    read = from_file([{"prompt": half, "answer": half, half: {half: half}}], answer_column="answer")
    for task in (read, made("halves")):
        prompt = PromptSource([task], 0).prompt(0)
        assert (prompt.text, prompt.reward_input["answer"], prompt.reward_input[whole]) == (
            whole,
            whole,
            {whole: whole},
        )
        assert msgpack.unpackb(msgpack.packb(prompt.reward_input)) == prompt.reward_input


def test_an_answer_column_that_is_named_so_needs_no_key() -> None:
    task = from_file([{"prompt": "one?", "answer": None}])
    assert PromptSource([task], 0).prompt(0).reward_input == {"prompt": "one?", "answer": None}


@pytest.mark.parametrize(
    ("line", "settings", "says"),
    [
        ({"question": "p"}, {}, r"items.jsonl:1: no column 'prompt'"),
        ({"prompt": "p"}, {"answer_column": "solution"}, r"items.jsonl:1: no column 'solution' \(answer_column"),
        ({"prompt": 3}, {}, r"items.jsonl:1: column 'prompt' must be text, got int"),
        (
            {"question": "p", "prompt": "q"},
            {"prompt_column": "question"},
            r"items.jsonl:1: column 'prompt' is in the way",
        ),
    ],
)
def test_a_wrong_file_is_named_with_its_line(line: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        PromptSource([from_file([line], **settings)], 0)


def test_an_empty_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"items.jsonl holds no prompts"):
        PromptSource([from_file([])], 0)
    with pytest.raises(UserError, match=r"is a folder$"):
        PromptSource([agent(path=str(tmp_path))], 0)


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ("numbers", "task 'mine': items 'numbers': expected 'module:function'"),
        ("episode_items:nombers", "cannot be imported: AttributeError"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("episode_items:decimal", "must be an ordinary function"),
        ("episode_items:later", "must be an ordinary function"),
        ("episode_items:without_seed", r"must be callable as f\(index, seed\): too many positional"),
        ("episode_items:a_list", "item 0: expected a mapping with a text `prompt`, got list"),
        ("episode_items:no_prompt", "item 0: expected a text `prompt`, got none"),
        ("episode_items:empty_prompt", "item 0: expected a text `prompt`, got an empty one"),
        ("episode_items:an_object", "item 0: 'thing': expected text, a number, a list or a mapping, got object"),
        ("episode_items:not_finite", "item 0: 'bound': expected a finite number, got inf"),
        ("episode_items:too_large", "item 0: 8,388,.* bytes would be sent .* in 'text': expected at most 8,388,608"),
        ("episode_items:number_key", "item 0: expected texts as keys, got 3"),
    ],
)
def test_a_wrong_function_of_items_is_refused_at_the_start(items: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        PromptSource([agent(items=items)], 0)


def test_an_item_that_fails_later_ends_the_run_with_its_number() -> None:
    source = PromptSource([made("fails_late")], 0)
    assert source.prompt(2).text == "p"
    with pytest.raises(RunFailed, match="'episode_items:fails_late': item 3: RuntimeError: no more"):
        source.prompt(3)


def test_held_out_items_of_an_agent_are_others_than_those_trained_on() -> None:
    held_out = EvaluationConfig().held_out([made()])
    assert [task.key for task in held_out] == ["eval-0/mine"]
    sources = PromptSource([made()], 5), PromptSource(held_out, 5)
    ours, theirs = ({one.prompt(index).reward_input["number"] for index in range(50)} for one in sources)
    assert not ours & theirs


def test_a_held_out_item_that_cannot_be_made_is_one_problem_among_others() -> None:
    run = RunConfig.model_validate({"tasks": [made("for_one_seed").model_dump()], "evaluation": {}})
    agents, held_out = check_tasks(run)
    assert agents.startswith("tasks.0: ") and "unused" in agents
    assert held_out.startswith("evaluation: task 'mine': ") and "no level for this seed" in held_out


def test_items_that_may_be_a_fixed_list_and_files_are_held_out_only_when_named() -> None:
    for task in (made(count=5), agent(path="items.jsonl")):
        with pytest.raises(ValueError, match="no task of the run is procedural"):
            EvaluationConfig().held_out([task])
    assert EvaluationConfig(tasks=[made(count=5)]).held_out([made(count=5)])
    with pytest.raises(ValueError, match=r"reads /.*/items.jsonl, which is trained on"):
        EvaluationConfig(tasks=[agent(path="items.jsonl")]).held_out([agent(path="items.jsonl")])


def test_an_environment_that_may_ignore_the_seed_is_held_out_only_when_named() -> None:
    words = agent(run=None, environment={"name": "words"})
    with pytest.raises(ValueError, match=r"no task of the run is procedural: .* an environment.config of its own"):
        EvaluationConfig().held_out([words])
    assert EvaluationConfig().held_out([words, made(name="theirs")])[0].key == "eval-0/theirs"
    other_split = {"name": "words", "config": {"taskset": {"split": "test"}}}
    named = EvaluationConfig(tasks=[agent(run=None, environment=other_split)])
    assert [task.key for task in named.held_out([words])] == ["eval-0/mine"]
    items = agent(run=None, environment={"name": "words"}, items="episode_items:numbers")  # a function has the seed
    assert EvaluationConfig().held_out([items])


def test_an_agent_has_no_reward_function() -> None:
    Scorer([made()], 0)
    with pytest.raises(KeyError):
        Scorer([made()], 0).score("mine", "", {})
