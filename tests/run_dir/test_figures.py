from __future__ import annotations

from streamrl.run_dir.figures import LABELS, NOT_FIGURES, step_figures
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
