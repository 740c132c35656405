"""The plan of evaluations: which weight versions, on which prompts, with what scores. Pure: no I/O and no clock.

    due -> begin: groups and their samples -> finish, once per scored sample -> an `EvaluationRow` with the last one

Every evaluation uses the same prompts with the same random seeds, so that scores of two versions differ only by their
weights. Its samples run on the same instances as those of training, without a barrier. They are not part of a batch:
they count neither for admission nor for staleness, and are never trained on. New weights may arrive while they run; the
row has the share of tokens sampled under other versions. Several versions may be evaluated at once.

Resume: `restore` takes the existing rows. An evaluation that was in flight when the run died is repeated only if its
version is the one served after the resume, since the weights of older versions are gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from streamrl.config.evaluation import EvaluationConfig, plain_name
from streamrl.controller.group_source import MAX_SKIPPED_IN_A_ROW, SampleDraw, prompt_group
from streamrl.errors import ErrorCode, UserError
from streamrl.rollouts.seeds import derive_seed
from streamrl.rollouts.types import Group, IntArray
from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.tasks.source import Prompt, PromptSource

PREFIX = "eval-"
"""Prefix of every evaluation's group and sample ids; no id of training begins with it."""


@dataclass(frozen=True)
class _Outcome:
    reward: float | None
    length: int
    other_version_tokens: int


@dataclass
class _Open:
    """An evaluation in flight."""

    began: float
    groups: dict[str, Group]
    waiting: dict[str, str]
    """Group id of each unfinished sample, by sample id."""
    outcomes: dict[str, _Outcome] = field(default_factory=dict)


class Evaluations:
    """The evaluations of a run."""

    def __init__(self, config: EvaluationConfig, run_seed: int, prompts: Sequence[Group], last_step: int) -> None:
        """Evaluate on the prompts of `choose_prompts`, at the latest after `last_step`, the run's last step."""
        self.config = config
        self._seed, self._last_step, self._prompts = run_seed, last_step, prompts
        self._size = config.samples + config.greedy
        self._open: dict[int, _Open] = {}
        self._begun: set[int] = set()
        self._planned: set[int] = set()
        """Versions that will be evaluated if they are served."""

    def restore(self, rows: Iterable[EvaluationRow]) -> None:
        """Mark the versions of a resumed run's rows as evaluated."""
        self._begun |= {row.step for row in rows}

    @property
    def pending(self) -> list[int]:
        """Versions that are being evaluated or may still be, oldest first; their checkpoints must be kept."""
        return sorted(self._open.keys() | self._planned)

    @property
    def unfinished(self) -> int:
        """Number of awaited samples, over all versions."""
        return sum(len(one.waiting) for one in self._open.values())

    def due(self, step: int, coming: Collection[int] = ()) -> bool:
        """Return whether the version made by `step` optimizer steps should be evaluated, now that it is served.

        There is one evaluation for every multiple of `every`: of that version or, if it is never served because weights
        are published only every few steps, of the next one that is.

        Args:
            step: the version.
            coming: versions whose evaluations count as begun.
        """
        if step in self._begun:
            return False
        if step == 0:
            return self.config.at_start
        before = max((*self._begun, *coming), default=0)
        return step // self.config.every > before // self.config.every or step == self._last_step

    def plan(self, step: int, published: int) -> bool:
        """Return whether a version that was just made will be evaluated if it is served; until then it is planned.

        It may be that another one is served in its place, which is then planned as well.

        Args:
            step: the version: number of optimizer steps that made it.
            published: the version published last, which will be served; -1: none.
        """
        if not self.due(step, self._planned & {published}):
            return False
        self._planned.add(step)
        return True

    def begin(self, step: int, now: float) -> list[Group]:
        """Begin a version's evaluation; return its groups, for that version to generate.

        Args:
            step: the version: number of optimizer steps that made it.
            now: unix seconds.

        Raises:
            ValueError: this version's evaluation has already begun.
        """
        if step in self._begun:
            raise ValueError(f"the evaluation of version {step} has already begun")
        groups = [
            replace(
                group, group_id=f"{PREFIX}{step}-{index}", step=step, size=self._size, scored={}, issue_version=step
            )
            for index, group in enumerate(self._prompts)
        ]
        waiting = {sample_id: group.group_id for group in groups for sample_id, _, _ in self.samples(group)}
        self._open[step] = _Open(now, {group.group_id: group for group in groups}, waiting)
        self._begun.add(step)
        self._planned = {planned for planned in self._planned if planned > step and self.due(planned)}
        return groups

    def samples(self, group: Group) -> list[SampleDraw]:
        """Return the completions to generate of a group: `<group>.g` is greedy, `<group>.000` and on are sampled.

        Seeds do not depend on the version, so every version draws the same numbers.
        """
        index = group.group_id.rpartition("-")[2]
        greedy: list[SampleDraw] = [(f"{group.group_id}.g", 0, 0.0)] if self.config.greedy else []
        return greedy + [
            (
                f"{group.group_id}.{number:03d}",
                derive_seed(self._seed, f"evaluation/{index}/{number}"),
                self.config.temperature,
            )
            for number in range(self.config.samples)
        ]

    def open_groups(self) -> dict[str, Group]:
        """Return the groups of all evaluations in flight, by id."""
        return {group_id: group for one in self._open.values() for group_id, group in one.groups.items()}

    def awaits(self, sample_id: str) -> bool:
        """Return whether a sample belongs to an evaluation and is not finished yet."""
        return any(sample_id in one.waiting for one in self._open.values())

    def group_of(self, sample_id: str) -> Group:
        """Return the group of an awaited sample, which has the task and reward input for scoring.

        Raises:
            KeyError: the sample is not awaited.
        """
        for one in self._open.values():
            if sample_id in one.waiting:
                return one.groups[one.waiting[sample_id]]
        raise KeyError(sample_id)

    def finish(
        self,
        sample_id: str,
        reward: float | None,
        length: int,
        token_versions: npt.NDArray[np.integer],
        now: float,
    ) -> EvaluationRow | None:
        """Record a generated and scored sample; return the evaluation's row if it was the last one, else None.

        Args:
            sample_id: an awaited sample.
            reward: its reward; None: void.
            length: completion tokens.
            token_versions: weight version under which each token was sampled, shape [C].
            now: unix seconds.

        Raises:
            KeyError: the sample is not awaited; it may have finished before.
        """
        step = self.group_of(sample_id).step
        one = self._open[step]
        del one.waiting[sample_id]
        others = int(np.count_nonzero(np.asarray(token_versions) != step))
        one.outcomes[sample_id] = _Outcome(reward, length, others)
        if one.waiting:
            return None
        del self._open[step]
        return self._row(step, one, now)

    def _row(self, step: int, one: _Open, now: float) -> EvaluationRow:
        by_task: dict[str, list[Group]] = {}
        for group in one.groups.values():
            by_task.setdefault(plain_name(group.task), []).append(group)
        tokens = sum(outcome.length for outcome in one.outcomes.values())
        others = sum(outcome.other_version_tokens for outcome in one.outcomes.values())
        return EvaluationRow(
            step=step,
            time=now,
            seconds=max(0.0, now - one.began),
            overall=self._scores(list(one.groups.values()), one.outcomes),
            by_task={task: self._scores(groups, one.outcomes) for task, groups in sorted(by_task.items())},
            other_version_share=others / tokens if tokens else 0.0,
        )

    def _scores(self, groups: Sequence[Group], outcomes: dict[str, _Outcome]) -> Scores:
        """Return the scores of the completions that have a reward; void ones are only counted."""
        greedy: list[float] = []
        sampled: list[list[float]] = []
        everything: list[_Outcome] = []
        for group in groups:
            own = [outcomes[sample_id] for sample_id, _, _ in self.samples(group)]
            everything += own
            rewards = [outcome.reward for outcome in own]
            if self.config.greedy and (first := rewards.pop(0)) is not None:
                greedy.append(first)
            sampled.append([reward for reward in rewards if reward is not None])
        threshold = self.config.threshold
        rewarded = [rewards for rewards in sampled if rewards]
        return Scores(
            prompts=len(groups),
            samples=len(everything),
            reward_greedy=_mean(greedy),
            pass_greedy=_mean([float(reward >= threshold) for reward in greedy]),
            reward_sampled=_mean([math.fsum(rewards) / len(rewards) for rewards in rewarded]),
            pass_at=_pass_at_each_k(sampled, threshold),
            length_mean=math.fsum(outcome.length for outcome in everything) / len(everything),
            rewards_void=sum(outcome.reward is None for outcome in everything),
            prompts_scored=len(greedy if self.config.greedy else rewarded),
        )


def _pass_at_each_k(sampled: Sequence[Sequence[float]], threshold: float) -> list[float]:
    """Return pass@1, pass@2, ...: each the mean over the prompts with as many rewards; up to the largest such k."""
    found = []
    for k in range(1, max(map(len, sampled), default=0) + 1):
        enough = [rewards for rewards in sampled if len(rewards) >= k]
        passes = [pass_at(k, len(rewards), sum(reward >= threshold for reward in rewards)) for rewards in enough]
        found.append(math.fsum(passes) / len(passes))
    return found


def pass_at(k: int, n: int, c: int) -> float:
    """Estimate the chance that one of k completions passes, from n of which c passed: 1 - C(n - c, k) / C(n, k).

    Unbiased for k <= n (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def choose_prompts(
    count: int,
    source: PromptSource,
    tokenize: Callable[[Prompt], IntArray],
    longest_prompt: int,
    most_at_first: int = MAX_SKIPPED_IN_A_ROW,
) -> list[Group]:
    """Return the first `count` prompts that fit the context, as groups without an id.

    Args:
        count: number of prompts.
        source: prompts of the held-out tasks.
        tokenize: token ids of a prompt's messages in the model's chat template, shape [P].
        longest_prompt: most tokens of a prompt.
        most_at_first: prompts that are measured until one fits; after that, `MAX_SKIPPED_IN_A_ROW` until the next.

    Raises:
        UserError: there are fewer different prompts, or too many do not fit.
        RunFailed: a procedural task could not make an item.
    """
    chosen: list[Group] = []
    index = skipped = in_a_row = 0
    too_long = f"more than {longest_prompt} tokens, which is what model.max_context - sampling.max_tokens leaves"
    while len(chosen) < count:
        prompt = source.prompt(index)
        if prompt.epoch > 0:
            few = (
                f"evaluation.prompts is {count}, but after {index} in all, task {plain_name(prompt.task)} has no more "
                "that are different"
            )
            if skipped:
                reason = f"{few}, and {skipped} of the {index} have {too_long}: leave more, or ask for fewer"
                raise UserError(ErrorCode.CONTEXT.refer(reason))
            raise UserError(ErrorCode.CONFIGURATION.refer(f"{few}: ask for fewer, or give it less weight"))
        tokens = tokenize(prompt)
        if len(tokens) <= longest_prompt:
            in_a_row = 0
            chosen.append(prompt_group(prompt, index, tokens))
        else:
            skipped, in_a_row = skipped + 1, in_a_row + 1
            if in_a_row == (MAX_SKIPPED_IN_A_ROW if chosen else most_at_first):
                which = f"all of the first {in_a_row} held-out prompts, the most that are looked at,"
                if chosen:
                    which = f"{in_a_row} held-out prompts in a row, after the first {index + 1 - in_a_row},"
                reason = f"evaluation.prompts: {which} have {too_long}: leave more, or leave such prompts out"
                raise UserError(ErrorCode.CONTEXT.refer(reason))
        index += 1
    return chosen
