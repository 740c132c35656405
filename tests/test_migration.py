"""The run files that correspond to examples of TRL, verl and prime-rl pass a start's checks, on data like theirs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from streamrl.config.load import load_run
from streamrl.controller.group_source import GroupSource
from streamrl.launcher.model_check import check_model
from streamrl.launcher.preflight import check_tasks
from streamrl.tasks.rewards import Scorer
from streamrl.tasks.source import PromptSource
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[1]
OPTION = re.compile(r"^\| (`[^|]+) \| ([^|]*) \|", re.MULTILINE)


def trl_data(folder: Path) -> str:
    row = {"prompt": [{"role": "user", "content": "What is 7 + 5?"}], "solution": "$12$"}
    datasets.Dataset.from_list([row]).save_to_disk(folder / "deepmath")
    return str(folder / "deepmath")


def verl_data(folder: Path) -> str:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 7 + 5? Answer after ####."}],
        "reward_model": {"ground_truth": "1,200", "style": "rule"},
        "extra_info": {"index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row]), folder / "train.parquet")
    return str(folder / "train.parquet")


CASES: dict[str, tuple[Any, str, str]] = {
    "from_trl": (trl_data, "So it is \\boxed{12}", "So it is \\boxed{13}"),
    "from_verl": (verl_data, "It is #### 12 or #### 1200.", "1200"),
    "from_prime_rl": (None, "<reversed_text>{answer}</reversed_text>", "{answer}"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_migration_example_passes_the_checks_of_a_start_and_scores_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    data, right, wrong = CASES[name]
    changes = [f"model.path={save_tiny_model(tmp_path / 'model')}", "model.max_context=512", "sampling.max_tokens=128"]
    run = load_run(f"examples/migration/{name}.yaml", changes + ([f"tasks.0.path={data(tmp_path)}"] if data else []))
    assert [*check_model(run), *check_tasks(run)] == []
    tokenizer = AutoTokenizer.from_pretrained(run.model.path)
    group = GroupSource(run, PromptSource(run.tasks, run.seed), tokenizer).next_group(1)
    assert tokenizer.decode(group.prompt_tokens).endswith("<|assistant|>")
    scorer, key = Scorer(run.tasks, run.seed), run.tasks[0].key
    answer = group.reward_input["answer"]
    assert scorer.score(key, right.format(answer=answer) if data is None else right, group.reward_input) == 1.0
    assert scorer.score(key, wrong.format(answer=answer) if data is None else wrong, group.reward_input) == 0.0


def options(name: str) -> list[tuple[str, str]]:
    page = (ROOT / f"docs/how-to/{name}.md").read_text(encoding="utf-8")
    return [(theirs.strip(), ours.strip()) for theirs, ours in OPTION.findall(page)]


@pytest.mark.parametrize("name", CASES)
def test_every_key_of_a_migration_page_is_a_key_of_the_run_file(name: str) -> None:
    reference = (ROOT / "docs/reference/run_file.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\S+)(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    whole = {"algorithm", "schedule"}  # described in several sections
    found = options(name)
    assert len(found) > 10
    for _, ours in found:
        for key in re.findall(r"`([a-z_.]+)`", ours):
            head, _, last = key.partition(".")
            text = reference if not last or head in whole else sections[head]
            assert any(f"| `{part}` |" in text for part in (last or head, last.rpartition(".")[2])), key


def test_the_options_of_trl_are_those_that_it_has() -> None:
    """Read from its source, because an import takes seconds."""
    trl, transformers = importlib.util.find_spec("trl"), importlib.util.find_spec("transformers")
    if trl is None or trl.origin is None or transformers is None or transformers.origin is None:
        pytest.skip("optional: pip install trl==1.16.0")
    sources = [
        *Path(trl.origin).parent.glob("trainer/*config.py"),
        Path(transformers.origin).with_name("training_args.py"),
    ]
    fields = set(re.findall(r"^    (\w+):", "\n".join(path.read_text() for path in sources), re.MULTILINE))
    for theirs, _ in options("from_trl"):
        assert set(re.findall(r"`(\w+)`", theirs)) <= fields, theirs
