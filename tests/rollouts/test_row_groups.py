"""A large step is written, and read, a part at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ranker.data import read_rollouts
from streamrl.report.run_data import load_run, read_texts
from streamrl.rollouts import rollout_store
from streamrl.rollouts.rollout_store import SCHEMA, RolloutStore
from streamrl.rollouts.types import Group
from streamrl.run_dir import layout
from tests.rollouts.test_rollouts import make_group
from tests.rollouts.test_row_parts import FORK, OTHER, TWO_TURNS, agent_group

NAMES = ["sample_id", "group_id", "output_length"]


@pytest.mark.parametrize(
    "groups", [[make_group(f"g{n}", (1.0,) * 6) for n in range(5)], [agent_group([TWO_TURNS, FORK], [OTHER])]]
)
@pytest.mark.parametrize("most", [1, 400])
def test_a_step_in_several_row_groups_is_read_as_one(
    tmp_path: Path, groups: list[Group], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name / layout.ROLLOUTS for name in ("whole", "parts")]
    for folder in folders:
        folder.parent.mkdir()
    whole = RolloutStore(folders[0]).write(1, groups)
    monkeypatch.setattr(rollout_store, "ROW_GROUP_BYTES", most)
    parts = RolloutStore(folders[1]).write(1, groups)
    sizes = [pq.ParquetFile(path).metadata.num_row_groups for path in (whole, parts)]
    rows = pq.read_table(whole).num_rows
    assert sizes[0] == 1 and (sizes[1] == rows if most == 1 else 1 < sizes[1] < rows or rows < 5)
    assert pq.read_table(parts).to_pylist() == pq.read_table(whole).to_pylist()
    newest = [RolloutStore(folder).newest(NAMES, 99) for folder in folders]
    assert newest[0] == newest[1] and len(newest[0]) == sum(len(group.scored) for group in groups)
    lengths = [read_rollouts([folder]).output_length.tolist() for folder in folders]
    assert lengths[0] == lengths[1]
    for folder in folders:
        (folder.parent / layout.METRICS).touch()
    texts = [str(read_texts(load_run(folder.parent), [0, len(newest[0]) - 1])) for folder in folders]
    assert texts[0].replace("/whole/", "/parts/") == texts[1]


def test_a_row_group_has_no_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_store, "ROW_GROUP_BYTES", 1000)
    rows = [
        {"sample_id": "x" * n, "completion_tokens": np.zeros(100, np.int32)}
        for n in (0, 150, 250, 601, 0, 2000, 1, 10, 20)
    ]
    parts = list(rollout_store._row_groups(iter(rows)))
    assert [[len(str(row["sample_id"])) for row in part] for part in parts] == [
        [0, 150],
        [250],
        [601],
        [0],
        [2000],
        [1, 10],
        [20],
    ]


def test_a_step_without_a_sample_has_a_file_without_rows(tmp_path: Path) -> None:
    table = pq.read_table(RolloutStore(tmp_path).write(1, []))
    assert table.num_rows == 0 and table.schema == SCHEMA
