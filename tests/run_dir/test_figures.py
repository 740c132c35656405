from __future__ import annotations

from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.run_dir.figures import LABELS, NOT_FIGURES, evaluation_figures, step_figures
from streamrl.run_dir.metrics import MetricsRow


def test_every_key_of_a_step_is_a_figure_with_known_names_or_left_out_on_purpose() -> None:
    depth = {"dict[str, float]": 1, "dict[str, float | None]": 1}
    depth |= {"dict[str, dict[str, float]]": 2, "dict[str, dict[str, float | None]]": 2}
    for key, field in MetricsRow.model_fields.items():
        kind = str(field.annotation).removeprefix("<class '").removesuffix("'>")
        if kind in depth:
            assert len(LABELS[key]) == depth[kind]
        elif key in NOT_FIGURES:
            assert key in ("step", "time") or any(text in kind for text in ("str", "StepAudit"))
        else:
            assert set(kind.split(" | ")) <= {"float", "int", "bool", "None"}, key
    assert set(LABELS) <= set(MetricsRow.model_fields)


def test_figures_with_names_have_one_number_for_each_and_none_where_there_is_none() -> None:
    row = MetricsRow(
        step=1,
        time=5.0,
        step_skipped=True,
        agent_metrics_by_task={"search": {"f1": 0.5, "calls": None}},
        reward_by_task={"sum": None},
    )
    assert step_figures(row) == {"train/step_skipped": 1.0, "train/agent_metrics_by_task/search/f1": 0.5}


def test_no_two_figures_have_one_name_though_names_of_tasks_and_metrics_hold_the_separator() -> None:
    agents = {"math": {"hard/acc": 0.1, "a/b": 0.2}, "math/hard": {"acc": 0.3}, "50%/": {"x": 0.4}, "50%": {"/x": 0.5}}
    agents |= {"math%2Fhard": {"acc": 0.6}, "plain%25": {"x": 0.7}}
    found = step_figures(MetricsRow(step=1, time=5.0, agent_metrics_by_task=agents))
    prefix = "train/agent_metrics_by_task/"
    assert {name.removeprefix(prefix): number for name, number in found.items()} == {
        "math/hard%2Facc": 0.1,
        "math/a/b": 0.2,  # no other figure would be called so
        "math%2Fhard/acc": 0.3,
        "50%25%2F/x": 0.4,
        "50%25/%2Fx": 0.5,
        "math%252Fhard/acc": 0.6,  # another one got its name
        "plain%25/x": 0.7,
    }


def test_no_two_figures_of_an_evaluation_have_one_name() -> None:
    tasks = ("a", "a/reward", "a/pass_at_1", "overall", "")
    by_task = {
        task: Scores(
            prompts=1, samples=2, reward_greedy=place, reward_sampled=place, pass_at=[place], length_mean=place
        )
        for place, task in enumerate(tasks)
    }
    row = EvaluationRow(step=1, time=5.0, seconds=1.0, overall=by_task["a"], by_task=by_task, other_version_share=0.0)
    found = evaluation_figures(row)
    figures = len([name for name in found if name.startswith("evaluation/overall/")])
    assert figures > 5 and len(found) == 2 + 6 * figures
    for place, task in enumerate(tasks):
        assert all(found[f"evaluation/by_task/{task}/{key}"] == place for key in ("reward", "pass_at_1", "length_mean"))
