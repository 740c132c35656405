"""The watch over void rewards: which runs it ends, when, and in which words."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec

from streamrl.config.run import RunConfig
from streamrl.controller.sample_intake import SampleIntake
from streamrl.controller.void_watch import FEWEST, FEWEST_PROMPTS, VoidWatch
from streamrl.generation.site.sample_batches import pack_samples
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.controller_site import SampleBatch
from streamrl.protocol.message import body_of
from streamrl.protocol.samples import sample_to_wire
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.void import Void, VoidCause
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery
from tests.rollouts.test_row_parts import TWO_TURNS, episode

LATE = Void(VoidCause.TIMEOUT, "timed out after 20 s")
RAISED = Void(VoidCause.VERIFIER, "KeyError: 'answer'")
GROUPS = map(str, itertools.count())
TRACE = 'Traceback (most recent call last):\n  File "mine.py", line 3, in reward'


def watch(**rewards: object) -> VoidWatch:
    """A run with 20 samples in a step, so that the window is two steps: 40 rewards."""
    batch = {"prompts_per_step": 5, "samples_per_prompt": 4}
    return VoidWatch(RunConfig.model_validate({"batch": batch, "rewards": rewards}))


def play(
    watched: VoidWatch, rewards: Sequence[Void | None], task: str = "mine", samples: int = 1
) -> tuple[int, str] | None:
    """The number of rewards after which the run ends, and why; None: it continues. Each group has some samples."""
    group = ""
    for number, void in enumerate(rewards, 1):
        group = next(GROUPS) if (number - 1) % samples == 0 else group
        if (problem := watched.record(task, group, void, TRACE if void == RAISED else "")) is not None:
            return number, problem
    return None


def test_a_reward_that_never_works_ends_the_run_early_with_its_own_traceback() -> None:
    ended = play(watch(), [RAISED] * 100)
    assert ended is not None
    assert ended[0] == FEWEST == 32
    assert ended[1] == (
        "the reward of task 'mine' does not work: all 32 are void (see docs: E1008). Most frequent cause: "
        f"verifier (32 of 32); see logs/*-workers.log. The last one: KeyError: 'answer'\n{TRACE}"
    )


def test_one_of_several_tasks_whose_reward_never_works_ends_the_run_early() -> None:
    watched = watch()
    for number in range(1, FEWEST):
        assert play(watched, [None] * 3, "good") is None
        assert play(watched, [RAISED], "bad") is None, number
    assert play(watched, [RAISED], "bad") is not None


def test_a_reward_that_has_worked_once_is_judged_by_the_rate_over_the_whole_window() -> None:
    half = [None, *[LATE] * 20, *[None] * 19]
    assert play(watch(), half * 3) is None  # 20 of any 40 are not more than half
    ended = play(watch(), [*[None] * 100, *[LATE] * 40])
    assert ended is not None and ended[0] == 121
    assert "21 of the newest 40 rewards are void, and rewards.max_void_rate allows 0.5 (see docs: E1008)." in ended[1]
    assert ended[1].endswith("The last one: timed out after 20 s")
    assert play(watch(), [None, *[LATE] * 38]) is None  # as long as there is no whole window
    assert play(watch(), [None, *[LATE] * 39]) is not None
    assert play(watch(void_window=4), [None, *[LATE] * 39]) is None


def test_samples_of_one_prompt_are_no_independent_failures() -> None:
    large = RunConfig.model_validate({"batch": {"prompts_per_step": 4, "samples_per_prompt": 32}})
    bad, good = [RAISED] * 32, [None] * 32
    assert play(VoidWatch(large), [*bad * 7, *good * 8], samples=32) is None
    ended = play(VoidWatch(large), bad * 100, samples=32)
    assert ended is not None and ended[0] == 7 * 32 + 1 and FEWEST_PROMPTS == 8
    assert "all 225 are void" in ended[1]


def test_the_rate_is_taken_over_enough_prompts() -> None:
    """A step of 8 groups of 4: two of them are 64 rewards, and only 16 prompts."""
    run = RunConfig.model_validate({"batch": {"prompts_per_step": 8, "samples_per_prompt": 4}})
    cluster = [*[None] * 4 * 22, *[LATE] * 4 * 10]  # 10 of 32 prompts, one after the other
    assert play(VoidWatch(run), cluster * 5, samples=4) is None
    ended = play(VoidWatch(run), [*[None] * 4 * 100, *[LATE] * 4 * 40], samples=4)
    assert ended is not None and 4 * 115 < ended[0] <= 4 * 116 + 1  # more than half of 32 prompts


def test_the_error_quotes_the_most_frequent_cause_not_the_latest() -> None:
    ended = play(watch(), [None, *[RAISED] * 30, *[LATE] * 20])
    assert ended is not None and "Most frequent cause: verifier (30 of 39)" in ended[1]
    assert "KeyError" in ended[1] and "timed out" not in ended[1]


def test_a_terminal_obeys_nothing_that_a_failure_says() -> None:
    watched = watch()
    for number in range(FEWEST):
        void = Void(VoidCause.VERIFIER, "\x1b[2Jgone")
        ended = watched.record("mine", str(number), void, "at\tline 3\n\x1b]0;title\x07")
    assert ended is not None and ended.endswith("The last one: ?[2Jgone\nat\tline 3\n?]0;title?")


def test_the_run_file_sets_the_bound_and_null_never_ends_a_run() -> None:
    assert play(watch(max_void_rate=None), [RAISED] * 1000) is None
    assert play(watch(max_void_rate=0), [None] * 39 + [LATE]) is not None
    assert play(watch(max_void_rate=0.9), [None, *[LATE] * 34, *[None] * 5, *[LATE] * 34]) is None


def test_a_small_batch_is_judged_over_as_many_rewards_as_tell_something() -> None:
    tiny = RunConfig.model_validate({"batch": {"prompts_per_step": 1, "samples_per_prompt": 2}})
    ended = play(VoidWatch(tiny), [None, *[LATE] * 100])
    assert ended is not None and ended[0] == FEWEST


def test_what_an_agent_raised_is_told_as_what_a_reward_function_raised() -> None:
    sample = episode("g.0", [TWO_TURNS])
    assert sample.trajectory is not None
    told = msgspec.structs.replace(
        sample.trajectory, reward=None, void_cause=VoidCause.VERIFIER, void_text=RAISED.text, void_traceback=TRACE
    )
    parts = {part.name: cast(Any, MagicMock()) for part in fields(SampleIntake)}
    parts["claims"].wrong_with_claim.return_value = parts["claims"].wrong_with_sample.return_value = None
    parts["void_watch"].record.return_value = None
    parts["ledger"].finish.return_value = {"g.0"}
    parts["evaluator"].generates.return_value = parts["evaluator"].awaits.return_value = False
    parts["pool"].received = {"g.0"}
    parts["pool"].score.return_value = MagicMock(), SimpleNamespace(task="mine", group_id="g", complete=False, kept=0)
    values, tokens = sample_to_wire(replace(sample, trajectory=told))
    body, arrays = pack_samples([(body_of(FinishedSample(**values)), tokens)])
    delivery = SimpleNamespace(peer="service-here", body=SampleBatch(**body), arrays=arrays, ack=lambda: None)
    asyncio.run(SampleIntake(**parts).commit_samples(cast(list[Delivery], [delivery]), newest=3))
    parts["pool"].score.assert_called_once_with("g.0", None, RAISED)
    parts["void_watch"].record.assert_called_once_with("mine", "g", RAISED, TRACE)


def test_void_rewards_of_an_evaluation_end_no_run() -> None:
    watched, scored, done = watch(), list[str](), list[int]()
    parts = {part.name: cast(Any, None) for part in fields(SampleIntake)}
    evaluator = SimpleNamespace(awaits=lambda _: True, scored=lambda sample_id, *_: scored.append(sample_id))
    parts |= {"rewarders": SimpleNamespace(answered=lambda *_: True), "evaluator": evaluator, "void_watch": watched}
    parts["waits"] = WaitRegistry("controller")
    answers = [ScoreAnswer(f"e-{n}", None, 0.1, VoidCause.TIMEOUT, "timed out") for n in range(200)]
    deliveries = [SimpleNamespace(peer="r", body=one, ack=lambda: done.append(1)) for one in answers]
    SampleIntake(**parts).commit_rewards(cast(list[Delivery], deliveries))
    assert len(scored) == len(done) == 200
    assert play(watched, [LATE] * (FEWEST - 1)) is None  # it has counted none so far
