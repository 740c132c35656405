"""Output lengths in a run: predicted, trusted only when they were right, learned from, restored."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ranker.data import from_rows
from ranker.model import Judged, LengthModel
from ranker.train import refit
from scheduler.cost.decode import StepCurve
from scheduler.cost.recalibration import SCORES
from scheduler.dispatch.outcome_trust import OutcomeTrust
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.run import RunConfig
from streamrl.config.schedule import SCHEDULES
from streamrl.controller.group_source import sample_ids
from streamrl.controller.length_predictor import COLUMNS, LengthPredictor, StepLengths, load_ranker
from streamrl.controller.site_trust import empty_sample
from streamrl.errors import UserError
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.trajectory import NOT_SAMPLED, RowExtent, Trajectory
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.rollouts.void import Void, VoidCause
from tests.mere_user import without_right_to
from tests.rollouts.test_rollouts import make_sample
from tests.waiting import scaled

FLEET = [SimulatedInstance(name, StepCurve((1, 32), (0.01, 0.1)), 32) for name in ("a", "b")]
RUN = RunConfig.model_validate({"sampling": {"max_tokens": 400}, "batch": {"samples_per_prompt": 4}})


def step_of(number: int, right: bool = True) -> list[Group]:
    """24 groups whose length is told by the count of words; or by nothing."""
    rng = np.random.default_rng(number)
    groups = []
    for index in range(24):
        words = int(rng.integers(1, 12))
        group = Group(
            f"{number}-{index}", number, index, "p", "words", 0, "word " * words, np.arange(3, dtype=np.int32), 4
        )
        groups.append(group)
    told = rng.permutation([len(group.prompt) for group in groups]) if not right else None
    for index, group in enumerate(groups):
        length = 6 * (len(group.prompt) if told is None else int(told[index]))
        for sample in range(4):
            drawn = make_sample(f"{group.group_id}.{sample:03d}", length=length + sample)
            group.scored[drawn.sample_id] = _scored(drawn)
    return groups


def _scored(sample: Sample) -> Scored:
    return Scored(sample, 1.0, None, 5.0)


def play(lengths: LengthPredictor, number: int, right: bool = True) -> tuple[list[Group], object]:
    groups = step_of(number, right)
    lengths.predict(groups)
    return groups, asyncio.run(learn(lengths, groups))


async def learn(
    lengths: LengthPredictor, groups: list[Group], fleet: Sequence[SimulatedInstance] = FLEET
) -> StepLengths:
    """Learn from a step, and let its refit, for which no pause is made, end before the next."""
    lengths.refits.pause = 0
    told = await lengths.learn(groups, fleet)
    if lengths.refits.running:
        await asyncio.wait([lengths.refits.running])
    return told


def test_it_starts_from_nothing_learns_is_trusted_and_loses_trust() -> None:
    lengths = LengthPredictor(RUN)
    first, told = play(lengths, 1)
    assert told.measured is None and told.saving.saved == 0.0  # nothing known: dispatch by load
    assert all(group.predicted_length is None and group.forecast is None for group in first)
    assert not lengths.state()["trusted"] and lengths.note == ""
    second, told = play(lengths, 2)
    assert told.measured.recall_at_20 > 0.6
    assert all(group.predicted_length is not None and group.forecast is None for group in second)  # not trusted yet
    assert lengths.outcome.steps == 1 and told.saving.saved == 0.0, "replayed by the forecasts, dispatched by load"
    third, told = play(lengths, 3)
    assert lengths.state()["trusted"] and lengths.note.startswith("length predictions are trusted after step 2")
    assert "of least-loaded's time): dispatch goes by them" in lengths.note
    assert all(group.forecast is not None and len(group.forecast.lengths) == 16 for group in third)
    assert max(max(group.forecast.lengths) for group in third) <= 400
    longest = max(third, key=lambda group: len(group.prompt))
    assert sum(group.predicted_length > longest.predicted_length for group in third) < 5
    assert told.saving.oracle <= told.saving.least_loaded and told.saving.saved > 0.02 and told.dispatched_by
    right = lengths.recalibration.slope
    for number in (4, 5, 6):
        play(lengths, number, right=False)
    assert right > 0.8 and lengths.recalibration.slope < 0.8 * right
    lengths.predict(last := step_of(7))
    told_by_ranker = [lengths._uncorrected[group.group_id] for group in last]
    corrected = [lengths.recalibration.corrected(forecast, 400.0).mean for forecast in told_by_ranker]
    assert [group.predicted_length for group in last] == corrected != [forecast.mean for forecast in told_by_ranker]
    assert not lengths.state()["trusted"]
    assert lengths.note.startswith("length predictions are not trusted any more after step")
    assert lengths.doubts in lengths.note and lengths.state()["doubts"].startswith("recall@20 is 0.")


def test_groups_of_several_steps_are_predicted_from_all_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LengthPredictor(RUN)
    for number in (1, 2):
        play(lengths, number)
    known: list[float] = []
    predict = lengths.ranker.predict

    def spied(prompts: list[str], tasks: list[str | None], step: int, limit: np.ndarray) -> object:
        known.append(float(np.nansum(lengths.ranker._history.columns(prompts, tasks, step)[:, 3])))
        return predict(prompts, tasks, step, limit)

    monkeypatch.setattr(lengths.ranker, "predict", spied)
    for first in (3, 2):
        groups = step_of(3)
        groups[0].step = first
        lengths.predict(groups)
    assert known[0] == known[1] > 0, "earlier samples of the same prompts"


def test_no_step_waits_for_a_refit_which_pauses_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LengthPredictor(RUN)
    now, begun, may_end = [0.0], [0], threading.Event()
    lengths.refits.clock = lambda: now[0]
    fit = refit("mean_length", from_rows([{"prompt": "p", "output_length": 5}]))

    def job() -> LengthModel:
        begun[0] += 1
        if begun[0] > 1:
            assert may_end.wait(scaled(20))
            now[0] += 3.0
        return fit if begun[0] < 2 else replace(fit)

    monkeypatch.setattr(lengths.ranker, "refit_job", lambda: job)

    async def steps() -> None:
        assert (await lengths.learn(step_of(1), [])).refit_s == 0.0 and lengths.ranker.model is fit, "waited for"
        for number in (2, 3):
            assert (await lengths.learn(step_of(number), [])).refit_s is None and lengths.ranker.model is fit
        running = lengths.refits.running
        assert running is not None
        may_end.set()
        await asyncio.wait([running])
        lengths.predict(step_of(4))
        assert lengths.ranker.model is not fit and begun == [2]
        for now[0], refit_s, count in ((32.9, 3.0, 2), (33.0, None, 3)):
            assert (await lengths.learn(step_of(4), [])).refit_s == refit_s
            assert (lengths.refits.running is not None) is (count == 3)
        await asyncio.wait([lengths.refits.running])
        assert begun == [3]

    asyncio.run(steps())


def test_forecasts_that_would_have_cost_time_are_not_used_however_well_they_rank() -> None:
    lengths = LengthPredictor(RUN)
    lengths.ranker.trusted = True
    lengths.outcome.record([0.9])
    assert lengths.trusted and lengths.state()["trusted"] and lengths.state()["used"]
    for _ in range(3):
        lengths.outcome.record([1.1])
    assert lengths.ranker.trusted and not lengths.trusted and not lengths.state()["trusted"]
    assert lengths.state()["doubts"] == "replays by them take 1.05 of least-loaded's time"
    lengths.outcome = OutcomeTrust()
    assert lengths.doubts == "no step has been replayed by them"
    lengths.outcome.record([0.9, 0.7, 1.2])
    assert lengths.doubts == "replays by them take 0.93 of least-loaded's time, and too many of them clearly more"


def test_a_policy_that_ignores_forecasts_does_not_go_by_them() -> None:
    run = RUN.model_copy(update={"schedule": SCHEDULES["async"]()})
    lengths = LengthPredictor(run)
    assert [one.refits.pause for one in (LengthPredictor(RUN), LengthPredictor(run, sites=2), lengths)] == [10, 10, 100]
    for number in (1, 2, 3):
        groups, told = play(lengths, number)
    assert lengths.trusted and lengths.outcome.steps == 0
    assert groups[0].forecast is not None, "the choice of a site goes by it"
    assert not told.dispatched_by and told.saving.saved == 0.0
    assert lengths.note.endswith("dispatch is least-loaded, which ignores them")


def test_the_trainer_s_rate_is_that_of_the_last_step_prompts_included() -> None:
    lengths = LengthPredictor(RUN)
    groups = step_of(1)
    tokens = sum(3 * 4 + sum(m.sample.output_length for m in group.members()) for group in groups)
    assert lengths.step_trained(groups, 2.0) == tokens / 2
    assert lengths.step_trained([], 2.0) == tokens / 2, "a step without groups says nothing"


def test_a_resumed_run_knows_what_it_knew(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    for number in (1, 2, 3):
        store.write(number, step_of(number))
    lengths = LengthPredictor(RUN)
    seconds = itertools.count()
    lengths.refits.clock = lambda: float(next(seconds))
    lengths.restore(store.newest(COLUMNS, 10_000))
    asyncio.run(lengths.refits.begin())
    assert lengths.refits.running is None, "a pause follows that refit as well"
    groups = step_of(4)
    lengths.predict(groups)
    told = np.array([group.predicted_length for group in groups])
    truth = np.array([len(group.prompt) for group in groups])
    assert np.corrcoef(told, truth)[0, 1] > 0.8
    assert [row["step"] for row in store.newest(COLUMNS, 1)] == [3] * 96  # the newest step, whole


def test_episodes_that_broke_off_are_not_learned_from_live_or_on_resume(tmp_path: Path) -> None:
    """They would tell of each prompt that its answers are short."""
    step = step_of(1)
    for group in step:
        group.agent = True
        for number, (sample_id, one) in enumerate(group.scored.items()):
            void = Void(VoidCause.CRASH, "its worker died") if number % 2 else None
            length = 2 if void else one.sample.output_length
            told = Trajectory(
                rows=[RowExtent(tokens=length + 1, prompt=1)],
                reward=None if void else 1.0,
                void_cause=void and void.cause,
                messages=[],
                steps=[],
            )
            sample = make_sample(sample_id, length=length + 1)
            sample.token_versions[0] = NOT_SAMPLED
            group.scored[sample_id] = Scored(replace(sample, trajectory=told), told.reward, void, 5.0)
    store = RolloutStore(tmp_path / "rollouts")
    store.write(1, step)
    live, resumed = LengthPredictor(RUN), LengthPredictor(RUN)
    live.observe(step)
    live.ranker.refit()
    resumed.restore(store.newest(COLUMNS, 1000))
    for lengths in (live, resumed):
        assert lengths.ranker.model is not None and lengths.ranker.model.report.samples == 48
        lengths.predict(later := step_of(2))
        assert min(group.predicted_length or 0.0 for group in later) > 20


def test_a_sample_that_no_site_could_generate_corrects_no_forecast() -> None:
    lengths = LengthPredictor(RUN)
    play(lengths, 1)
    lengths.predict(step := step_of(2))
    for group in step:
        for sample_id in group.scored:
            sample = empty_sample(sample_id, group, "here", Void(VoidCause.GENERATION, "refused"), 1.0)
            group.scored[sample_id] = Scored(sample, None, Void(VoidCause.GENERATION, "refused"), 5.0)
    told = asyncio.run(learn(lengths, step))
    assert told.measured is None and lengths.recalibration.scores is SCORES


def test_a_fresh_start_without_rollouts_is_restored_as_nothing(tmp_path: Path) -> None:
    lengths = LengthPredictor(RUN)
    lengths.restore(RolloutStore(tmp_path / "rollouts").newest(COLUMNS, 100))
    groups = step_of(1)
    lengths.predict(groups)
    assert groups[0].predicted_length is None


def test_refits_can_be_switched_off() -> None:
    lengths = LengthPredictor(RUN.model_copy(update={"ranker": RUN.ranker.model_copy(update={"refit_every": 0})}))
    play(lengths, 1)
    groups, _ = play(lengths, 2)
    assert groups[0].predicted_length is None


def test_a_ranker_of_another_model_is_named_and_not_trusted_at_first(tmp_path: Path) -> None:
    rows = [
        {"prompt": group.prompt, "task": "words", "output_length": member.sample.output_length}
        for number in range(4)
        for group in step_of(number)
        for member in group.members()
    ]
    path = tmp_path / "ranker.lgb"
    right = np.arange(1.0, 101.0)
    model = replace(refit("log_length", from_rows(rows)), judged=Judged(right, right))
    for writer, trusted in ((RUN.model.path, True), ("other", False)):
        replace(model, written_by=(writer,)).save(path)
        ranker = RUN.ranker.model_copy(update={"path": str(path), "refit_every": 0})
        lengths = LengthPredictor(RUN.model_copy(update={"ranker": ranker}))
        assert lengths.ranker.trusted is trusted
        assert not lengths.state()["trusted"], "no replay has shown yet that it saves time"
        said = f"learned from answers of other, and this run's model is {RUN.model.path}"
        assert (said in lengths.note) is not trusted
        groups = step_of(9)
        lengths.predict(groups)
        # what is judged is what dispatch gets
        assert lengths.ranker._waiting[sample_ids(groups[0])[0]] == groups[0].predicted_length
    play(lengths, 10)
    assert lengths.ranker.trusted  # it has been right here


def test_a_file_that_is_no_ranker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ranker.lgb"
    path.write_text("no")
    with pytest.raises(UserError, match=r"ranker\.path: .*ranker\.lgb: broken ranker file"):
        LengthPredictor(RunConfig.model_validate({"ranker": {"path": str(path)}}))


def test_a_policy_that_ignores_forecasts_uses_none_that_are_trusted() -> None:
    lengths = LengthPredictor(RUN.model_copy(update={"dispatch": RUN.dispatch.model_copy(update={"policy": "random"})}))
    lengths.ranker.trusted = True
    state = lengths.state()
    assert state["trusted"] and not state["used"]


def test_an_episode_may_be_longer_than_one_answer_and_is_no_request_that_dispatch_is_judged_by() -> None:
    task = {"kind": "agent", "name": "words", "run": "m:f", "items": "m:g", "max_turns": 3}
    run = RunConfig.model_validate({**RUN.model_dump(), "sampling": {"max_tokens": 150}, "tasks": [task]})
    lengths = LengthPredictor(run)

    def play_episodes(number: int) -> tuple[list[Group], StepLengths]:
        groups = step_of(number)
        for group in groups:
            group.agent, group.task = True, run.agent_tasks[0].key
        lengths.predict(groups)
        return groups, asyncio.run(learn(lengths, groups))

    for number in (1, 2, 3):
        groups, told = play_episodes(number)
        assert told.saving is None and not told.dispatched_by
    predicted = [group.predicted_length or 0.0 for group in groups]
    assert 150 < max(predicted) <= 450  # up to three answers of 150 tokens
    assert told.measured is not None and told.measured.recall_at_20 > 0.6  # they are still judged by lengths


def test_a_step_that_ends_without_any_instance_is_learnt_from() -> None:
    lengths = LengthPredictor(RUN)
    for number in (1, 2):
        groups = step_of(number)
        lengths.predict(groups)
        told = asyncio.run(learn(lengths, groups, []))
        assert told.saving is None
    assert play(lengths, 3)[1].saving is not None  # type: ignore[attr-defined]


def test_a_ranker_in_a_folder_of_another_user_is_told(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"ranker": {"path": str(tmp_path / "ranker")}})
    told = rf"^ranker\.path: {tmp_path}/ranker: cannot be read: Permission denied$"
    with without_right_to(tmp_path), pytest.raises(UserError, match=told):
        load_ranker(run)
