"""Prompts by number: the same after a resume, in the shares asked for, each once per epoch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config.tasks import AgentTask, FileTask, ReasoningGymTask, Task, default_tasks
from streamrl.errors import UserError
from streamrl.tasks import agent_items
from streamrl.tasks import source as source_module
from streamrl.tasks.source import PromptSource, mix
from tests.waiting import scaled


def questions(tmp_path: Path, count: int, **settings: object) -> FileTask:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": i}) + "\n" for i in range(count)))
    return FileTask(kind="file", name="gsm", path=str(path), **settings)  # type: ignore[arg-type]


def test_a_resumed_source_continues_with_the_same_prompts(tmp_path: Path) -> None:
    tasks: list[Task] = [*default_tasks(), questions(tmp_path, 7)]
    whole = [PromptSource(tasks, 5).prompt(i) for i in range(60)]
    resumed = PromptSource(tasks, 5)
    backwards = [resumed.prompt(i) for i in reversed(range(60))]
    assert backwards[::-1] == whole


def test_items_do_not_depend_on_the_global_random_state() -> None:
    tasks: list[Task] = [ReasoningGymTask(name="list_functions"), ReasoningGymTask(name="pool_matrix")]
    first = [PromptSource(tasks, 5).prompt(i).text for i in range(80)]
    random.seed(99)
    before = random.getstate()
    assert [PromptSource(tasks, 5).prompt(i).text for i in range(80)] == first
    assert random.getstate() == before


def test_another_seed_gives_other_prompts_with_other_ids() -> None:
    tasks: list[Task] = [ReasoningGymTask(name="basic_arithmetic")]
    one, other = ([PromptSource(tasks, seed).prompt(i) for i in range(20)] for seed in (1, 2))
    assert not {p.prompt_id for p in one} & {p.prompt_id for p in other}
    assert [p.text for p in one] != [p.text for p in other]


def test_far_indices_cost_no_more_and_do_not_repeat() -> None:
    tasks: list[Task] = [ReasoningGymTask(name=name) for name in ("gsm_symbolic", "acre", "word_ladder", "gcd")]
    source = PromptSource(tasks, 3)
    prompts = [source.prompt(i) for i in [*range(40), *range(10**9, 10**9 + 40)]]
    assert len({p.prompt_id for p in prompts}) == 80
    assert {p.epoch for p in prompts} == {0}


def test_default_tasks_and_every_reward_input_can_be_sent(tmp_path: Path) -> None:
    source = PromptSource([*default_tasks(), questions(tmp_path, 3, suffix="Think.")], 0)
    for index in range(24):
        prompt = source.prompt(index)
        assert msgpack.unpackb(msgpack.packb(prompt.reward_input)) == prompt.reward_input
        assert prompt.task == prompt.prompt_id.split("/")[0]


def test_suffix_goes_on_its_own_line_also_for_the_reward_function(tmp_path: Path) -> None:
    prompt = PromptSource([questions(tmp_path, 1, suffix="Think.")], 0).prompt(0)
    assert prompt.text == "q0\nThink."
    assert prompt.reward_input == {"prompt": "q0\nThink.", "answer": 0}
    gym = PromptSource([ReasoningGymTask(name="gcd", suffix="Only the number.")], 0).prompt(0)
    assert gym.text.endswith("\nOnly the number.")


@pytest.mark.parametrize("count", [1, 2, 13])
def test_each_epoch_is_a_new_order_of_all_rows(tmp_path: Path, count: int) -> None:
    source = PromptSource([questions(tmp_path, count)], 4)
    epochs = [[source.prompt(e * count + i) for i in range(count)] for e in range(5)]
    for number, epoch in enumerate(epochs):
        assert {p.epoch for p in epoch} == {number}
        assert sorted(p.prompt_id for p in epoch) == sorted(f"gsm/{i}" for i in range(count))
        assert all(p.text == "q" + p.prompt_id.removeprefix("gsm/") for p in epoch)
    if count > 2:
        assert len({tuple(p.text for p in epoch) for epoch in epochs}) == 5


def test_a_procedural_task_with_a_size_is_repeated_in_epochs() -> None:
    source = PromptSource([ReasoningGymTask(name="chain_sum", config={"size": 5})], 4)
    prompts = [source.prompt(i) for i in range(15)]
    assert Counter(p.prompt_id for p in prompts) == {p.prompt_id: 3 for p in prompts[:5]}
    assert [p.epoch for p in prompts] == [0] * 5 + [1] * 5 + [2] * 5


@pytest.mark.parametrize("count", [13, 16, 17, 100])
def test_an_order_that_is_not_made_as_a_whole_has_each_item_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(source_module, "MOST_PERMUTED", 4)
    orders = []
    for seed in (4, 5):
        source = PromptSource([questions(tmp_path, count)], seed)
        orders += [[source.prompt(e * count + i).prompt_id for i in range(count)] for e in range(3)]
    assert all(sorted(order) == sorted(f"gsm/{i}" for i in range(count)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    again = PromptSource([questions(tmp_path, count)], 4)
    assert [again.prompt(i).prompt_id for i in reversed(range(count))] == orders[0][::-1]


def test_the_order_of_a_task_of_usual_size_stays_that_of_earlier_versions() -> None:
    source = PromptSource([ReasoningGymTask(name="chain_sum", config={"size": 1000})], 4)
    base = int(PromptSource([ReasoningGymTask(name="chain_sum")], 4).prompt(0).prompt_id.split("/")[1])
    items = [int(source.prompt(i).prompt_id.split("/")[1]) - base for i in range(6)]
    assert items == [562, 507, 23, 332, 766, 549]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_memory_of_an_order_does_not_grow_with_the_size(monkeypatch: pytest.MonkeyPatch, shuffle: bool) -> None:
    monkeypatch.setattr(PromptSource, "_make_permutation", lambda *given: pytest.fail("the whole order was made"))
    task = AgentTask(name="a", kind="agent", run="m:f", items="random:Random", count=2**31, shuffle=shuffle)
    monkeypatch.setattr(agent_items, "_items_function", lambda task: lambda index, seed: {"prompt": f"{index}"})
    prompts = [PromptSource([task], 3).prompt(2**31 + i) for i in range(100)]
    assert len({prompt.text for prompt in prompts}) == 100 and {prompt.epoch for prompt in prompts} == {1}
    assert ([prompt.text for prompt in prompts] == [str(i) for i in range(100)]) is not shuffle


def test_tasks_interleave_by_their_weights() -> None:
    assert [mix([2, 1], i)[0] for i in range(6)] == [0, 1, 0, 0, 1, 0]
    assert [mix([1, 1, 1], i)[0] for i in range(6)] == [0, 1, 2, 0, 1, 2]


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 80))
def test_mix_counts_every_task_without_gaps_and_keeps_shares(weights: list[float], length: int) -> None:
    used = [0] * len(weights)
    for index in range(length):
        task, k = mix(weights, index)
        assert k == used[task]
        used[task] += 1
    for count, weight in zip(used, weights, strict=True):
        assert abs(count - length * weight / sum(weights)) <= 0.5 * len(weights) + 0.5


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 10**12))
def test_mix_is_consistent_far_out(weights: list[float], index: int) -> None:
    drawn = [mix(weights, index + i) for i in range(12)]
    for task in range(len(weights)):
        positions = [k for number, k in drawn if number == task]
        assert positions == list(range(positions[0], positions[0] + len(positions))) if positions else True
    assert abs(drawn[0][1] - index * weights[drawn[0][0]] / sum(weights)) <= 1e-3 + len(weights) + index * 1e-12


def test_another_process_makes_the_same_items_even_where_they_depend_on_string_hashing() -> None:
    names = ["ransom_note", "isomorphic_strings", "polynomial_multiplication", "codeio", "list_functions"]
    code = (
        "import os, random, sys\n"
        "import numpy, reasoning_gym\n"  # once, as it takes a second
        "from streamrl.config.tasks import ReasoningGymTask as T\n"
        "from streamrl.tasks.source import PromptSource\n"
        "if other := os.fork(): os.waitpid(other, 0)\n"
        "random.seed(), numpy.random.seed()\n"  # nothing of one process is of the other
        "s = PromptSource([T(name=n) for n in sys.argv[1:]], 11)\n"
        "print([s.prompt(i).reward_input for i in (range(15) if other else range(14, -1, -1))], flush=True)"
    )
    env = os.environ | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", code, *names]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=scaled(60)).stdout
    backwards, forwards = map(eval, out.splitlines())
    assert len(forwards) == 15 and forwards == backwards[::-1]


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (ReasoningGymTask(name="chain_sun"), "did you mean chain_sum"),
        (ReasoningGymTask(name="chain_sum", config={"min_term": 2}), "did you mean min_terms"),
        (
            ReasoningGymTask(name="chain_sum", config={"min_terms": 5, "max_terms": 2}),
            "max_terms must be >= min_terms",
        ),
        (ReasoningGymTask(name="chain_sum", config={"seed": 3}), "the run's seed"),
        (ReasoningGymTask(name="chain_sum", config={"size": 0}), "config.size must be a whole number from 1 to"),
        (ReasoningGymTask(name="chain_sum", config={"size": 10**12}), "from 1 to 2147483648, got 1000000000000"),
        (ReasoningGymTask(name="composite"), "tasks of their own"),
    ],
)
def test_wrong_procedural_settings_are_explained(task: ReasoningGymTask, says: str) -> None:
    with pytest.raises(UserError, match=says):
        PromptSource([task], 0)


def test_a_file_that_is_not_shuffled_is_read_in_its_order_in_every_epoch(tmp_path: Path) -> None:
    source = PromptSource([questions(tmp_path, 5, shuffle=False)], 3)
    assert [source.prompt(i).text for i in range(12)] == [f"q{i % 5}" for i in range(12)]
