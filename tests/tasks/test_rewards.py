"""Scoring one completion: right answers get 1, wrong ones less; a wrong reward function is refused early."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.tasks import FileTask, ReasoningGymTask, Task
from streamrl.errors import UserError
from streamrl.rollouts.void import LONGEST_TRACEBACK, VoidCause
from streamrl.tasks.procedural import ProceduralItems
from streamrl.tasks.rewards import Scorer, exact_match_score
from streamrl.tasks.source import PromptSource
from streamrl.tasks.void_reward import CUT, VoidReward, cause_of, may_retry, traceback_of, void_text

SEED = 9
GYM = """
    aiw base_conversion basic_arithmetic bitwise_arithmetic caesar_cipher calendar_arithmetic
    chain_sum coin_flip complex_arithmetic count_bits countdown decimal_chain_sum dice
    fraction_simplification gcd gsm_symbolic lcm leg_counting letter_counting maze mini_sudoku
    n_queens needle_haystack number_sorting polynomial_equations products ransom_note shortest_path
    simple_equations spell_backward syllogism time_intervals word_sorting
""".split()  # noqa: SIM905 (a list of 33 lines says no more)


def gym(name: str, **settings: Any) -> ReasoningGymTask:
    return ReasoningGymTask(name=name, **settings)


@pytest.fixture(scope="module")
def gym_scorer() -> tuple[PromptSource, Scorer]:
    tasks: list[Task] = [gym(name) for name in GYM]
    return PromptSource(tasks, SEED), Scorer(tasks, SEED)


@pytest.mark.parametrize("name", GYM)
def test_a_right_answer_in_the_tag_gets_one_and_none_gets_zero(
    name: str, gym_scorer: tuple[PromptSource, Scorer]
) -> None:
    source, scorer = gym_scorer
    items = ProceduralItems(gym(name), SEED)
    first = GYM.index(name)  # equal weights: task t has the indices t, t + n, ...
    for index in (first, first + len(GYM)):
        prompt = source.prompt(index)
        assert prompt.task == name
        right = items.entry(prompt.reward_input["index"])["answer"]
        assert scorer.score(name, f"I think <answer>{right}</answer>", prompt.reward_input) == 1.0
        assert scorer.score(name, f"I think {right}", prompt.reward_input) == 0.0
        assert scorer.score(name, "<answer>no idea</answer>", prompt.reward_input) < 0.5


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("last_number", "2 + 2 is {}.", "{} then 77777"),
        ("last_line", "Let me see\n{}\n", "{}\nor so"),
        ("full", " {} ", "It could be {} or another number"),
    ],
)
def test_each_answer_rule_reaches_the_verifier(answer: Any, right: str, wrong: str) -> None:
    task = gym("chain_sum", answer=answer)
    items = ProceduralItems(task, SEED)
    scorer = Scorer([task], SEED)
    for index in range(5):
        oracle, given = items.entry(index)["answer"], items.reward_input(index)
        assert scorer.score("chain_sum", right.format(oracle), given) == 1.0
        assert scorer.score("chain_sum", wrong.format(oracle), given) < 0.5


def test_a_label_gives_the_same_data_set_twice_with_different_items() -> None:
    tasks: list[Task] = [
        gym("gcd", label="easy"),
        gym("gcd", label="hard", config={"min_numbers": 3, "max_numbers": 3}),
    ]
    source, scorer = PromptSource(tasks, SEED), Scorer(tasks, SEED)
    easy, hard = source.prompt(0), source.prompt(1)
    assert (easy.task, hard.task) == ("easy", "hard")
    right = ProceduralItems(tasks[1], SEED).entry(0)["answer"]  # type: ignore[arg-type]
    assert scorer.score("hard", f"<answer>{right}</answer>", hard.reward_input) == 1.0


def test_a_worker_that_sees_another_question_says_so_instead_of_scoring() -> None:
    prompt = PromptSource([gym("chain_sum")], seed=1).prompt(0)
    with pytest.raises(RuntimeError, match="PYTHONHASHSEED=0"):
        Scorer([gym("chain_sum")], seed=2).score("chain_sum", "<answer>1</answer>", prompt.reward_input)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (" Paris\n", "Paris", 1.0),
        ("Paris, I think", "Paris", 0.0),
        ("I think <answer> Paris </answer>.", "Paris", 1.0),
        ("<answer>London</answer> Paris", "Paris", 0.0),
        ("72", 72.0, 1.0),
        ("0.00002", 2e-5, 1.0),
        ("", "Paris", 0.0),
        ("true", True, 1.0),
        ("<answer>false</answer>", False, 1.0),
        ("True", True, 0.0),  # as JSON writes it, and nothing else
        ("1", True, 0.0),
    ],
)
def test_exact_match(completion: str, answer: Any, reward: float) -> None:
    assert exact_match_score(completion, answer) == reward


def file_task(reward: str, **settings: Any) -> FileTask:
    return FileTask(kind="file", name="mine", path="unused.jsonl", reward=reward, **settings)


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "import asyncio\nimport decimal\nimport functools\nimport numpy as np\n"
        "def length(completion, *, prompt, answer): return len(completion) + len(prompt) + answer\n"
        "def half(completion, prompt, answer, scale=0.5): return np.float32(scale)\n"
        "def yes(completion, **_): return True\n"
        "def equal(completion, **_): return np.float64(1.0) == 1.0\n"
        "def exact(completion, **_): return decimal.Decimal('0.25')\n"
        "def scalar(completion, **_): return np.array(0.75)\n"
        "def words(completion, **_): return np.array('1.0')\n"
        "def text(completion, **_): return '1.0'\n"
        "def none(completion, **_): pass\n"
        "def nan(completion, **_): return float('nan')\n"
        "def many(completion, **_): return [1.0, 0.0]\n"
        "def infinite(completion, **_): return float('inf')\n"
        "def huge(completion, **_): return -1e13\n"
        "def many_digits(completion, **_): return 10**400\n"
        "def signaling(completion, **_): return decimal.Decimal('sNaN')\n"
        "def no_prompt(completion, answer): return 0.0\n"
        "async def later(completion, **_): return 0.0\n"
        "def one_by_one(completion, **_): yield 0.0\n"
        "async def each_later(completion, **_): yield 0.0\n"
        "class Judge:\n"
        "    async def __call__(self, completion, **_): return 0.5\n"
        "    def now(self, completion, **_): return asyncio.run(self(completion))\n"
        "judge = Judge()\n"
        "part = functools.partial(judge)\n"
        "now = judge.now\n"
        "@functools.wraps(later)\n"
        "def run(completion, **_): return asyncio.run(later(completion))\n"
        "number = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "leaving_rewards.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("length", 8.0),
        ("half", 0.5),
        ("yes", 1.0),
        ("equal", 1.0),
        ("exact", 0.25),
        ("scalar", 0.75),
        ("now", 0.5),
        ("run", 0.0),
    ],
)
def test_a_function_in_the_current_folder_is_called_with_completion_prompt_answer(function: str, reward: float) -> None:
    scorer = Scorer([file_task(f"my_rewards:{function}")], SEED)
    score = scorer.score("mine", "abc", {"prompt": "de", "answer": 3})
    assert score == reward and type(score) is float


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("text", "must be one number for one completion, got str '1.0'"),
        ("words", "must be one number for one completion, got str '1.0'"),
        ("many", r"must be one number for one completion, got list \[1.0, 0.0\]"),
        ("none", "returned None"),
        ("nan", "must be finite, got nan"),
        ("infinite", "must be finite, got inf"),
        ("many_digits", "must be finite, got inf"),
        ("signaling", "must be finite, got nan"),
        ("huge", r"the reward must be between -1e\+12 and 1e\+12, got -1e\+13"),
    ],
)
def test_what_is_not_one_finite_number_is_void_with_the_text_of_what_came(function: str, says: str) -> None:
    scorer = Scorer([file_task(f"my_rewards:{function}")], SEED)
    with pytest.raises(VoidReward, match=says) as raised:
        scorer.score("mine", "abc", {"prompt": "de", "answer": 3})
    assert raised.value.cause is VoidCause.VERIFIER and not raised.value.retry


def test_a_function_names_the_cause_of_its_void_reward() -> None:
    void = VoidReward("tool", "the compiler is missing")
    assert (void.cause, void.retry, str(void)) == (VoidCause.TOOL, True, "the compiler is missing")
    assert str(VoidReward("sandbox")) == "void: sandbox"
    with pytest.raises(ValueError, match="'weather' is not a valid VoidCause"):
        VoidReward("weather")


class JudgeFails(VoidReward):
    def __init__(self, status: int, **given: Any) -> None:
        self.status = status
        vars(self).update(given)


@pytest.mark.parametrize(
    ("void", "cause", "text"),
    [
        (JudgeFails(503), "verifier", "503"),
        (JudgeFails(status=503), "verifier", "JudgeFails"),
        (JudgeFails(503, cause="provider"), "provider", "503"),
        (JudgeFails(503, cause={"code": 503}), "verifier", "503"),
        (VoidReward("tool", "no compiler"), "tool", "no compiler"),
    ],
)
def test_a_subclass_of_void_reward_need_not_call_its_init(void: VoidReward, cause: str, text: str) -> None:
    assert (cause_of(void), void_text(void), void.retry) == (cause, text, True)


class OddlyFails(VoidReward):
    @property
    def cause(self) -> VoidCause:  # type: ignore[override]
        raise LookupError("no cause")

    @property
    def retry(self) -> bool:  # type: ignore[override]
        raise LookupError("no retry")


class NeverRetried(VoidReward):
    cause = property(lambda self: VoidCause.TOOL)  # type: ignore[assignment]
    retry = property(lambda self: False)  # type: ignore[assignment]


def test_properties_of_a_void_reward_stand_for_its_cause_and_may_fail() -> None:
    odd, never = OddlyFails(text="no judge"), NeverRetried("provider", "no judge")
    assert (cause_of(odd), void_text(odd), may_retry(odd)) == (VoidCause.VERIFIER, "no judge", True)
    assert (cause_of(never), void_text(never), may_retry(never)) == (VoidCause.TOOL, "no judge", False)
    assert may_retry(KeyError("answer"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (VoidReward("environment"), "environment"),
        (TimeoutError(), "timeout"),
        (subprocess.TimeoutExpired("x", 1), "timeout"),
        (ConnectionRefusedError(), "provider"),
        (urllib.error.HTTPError("http://judge", 503, "busy", Message(), None), "provider"),
        (type("ReadTimeout", (Exception,), {"__module__": "httpx._exceptions"})(), "provider"),
        (socket.gaierror(), "provider"),
        (MemoryError(), "environment"),
        (OSError(28, "No space left on device"), "environment"),
        (ModuleNotFoundError("no module"), "environment"),
        (ValueError(), "verifier"),
        (SystemExit(4), "verifier"),
    ],
)
def test_an_exception_stands_for_a_cause(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("math_verfy", "expected 'math_verify', 'exact_match', 'python_tests' or 'module:function'"),
        ("my_rewards:", "expected 'math_verify'"),
        ("my_rewards:lenght", "has no attribute 'lenght'"),
        ("no_such_rewards:f", "No module named 'no_such_rewards'"),
        ("broken_rewards:f", "No module named 'a_package_that_is_not_there'"),
        ("leaving_rewards:f", "SystemExit: 3"),
        ("my_rewards:number", "must be an ordinary function"),
        ("my_rewards:later", "must be an ordinary function"),
        ("my_rewards:one_by_one", "must be an ordinary function"),
        ("my_rewards:each_later", "must be an ordinary function"),
        ("my_rewards:judge", "must be an ordinary function"),
        ("my_rewards:part", "must be an ordinary function"),
        ("my_rewards:no_prompt", "unexpected keyword argument 'prompt'"),
    ],
)
def test_a_wrong_reward_is_refused_before_the_run(reward: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Scorer([file_task(reward)], SEED)


def test_comparing_rewards_need_an_answer_column() -> None:
    with pytest.raises(UserError, match="answer_column is null"):
        Scorer([file_task("math_verify", answer_column=None)], SEED)


def test_a_long_traceback_keeps_its_heading_and_its_end() -> None:
    def fall(levels: int) -> None:
        if not levels:
            raise ValueError("at the bottom")
        (fall if levels % 2 else lambda below: fall(below))(levels - 1)  # frames that differ are all shown

    with pytest.raises(ValueError, match="bottom") as caught:
        fall(60)
    text = traceback_of(caught.value, Path("/nowhere"))
    assert text.startswith(CUT + "  File ") or text.startswith(CUT + "    ")
    assert text.endswith("ValueError: at the bottom") and LONGEST_TRACEBACK - 200 < len(text) <= LONGEST_TRACEBACK
    with pytest.raises(ValueError, match="bottom") as caught:
        fall(1)
    assert traceback_of(caught.value, Path("/nowhere")).startswith("Traceback (most recent call last):\n  File ")
