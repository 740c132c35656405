"""A resume is refused, or warned of, before anything starts where the run file does not fit the newest checkpoint."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher import preflight, resume_check
from streamrl.launcher.resume_check import check_newest, checkpoint_warnings, type_warnings
from streamrl.machine.compute_type import TypeChoice
from streamrl.machine.model_files import weights_digest
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.parquet_files import step_file
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoint_sums import file_sums, write_sums
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.status import write_status
from streamrl.tasks.source import PromptSource
from tests.controller.test_pool_and_batch import group_source
from tests.launcher.test_preflight import cluster, make_model
from tests.report.synthetic import START, make_row, make_status

NAMES = {"grpo": b"\x80\x04model.lm_head.weight", "ppo": b"\x80\x04model.lm_head.weight\x94critic_model.head.weight"}
"""What torch's list of tensors has, by the algorithm that has written it."""
ALGORITHMS: dict[str, dict[str, object]] = {
    "grpo": {"name": "grpo"},
    "ppo": {"name": "ppo", "critic": {}},
    "kl": {"name": "grpo", "kl": {"coef": 0.1}},
}


def checkpoint(run_dir: Path, step: int, algorithm: str) -> Path:
    folder = run_dir / layout.CHECKPOINTS / f"step_{step}"
    (folder / "trainer_state").mkdir(parents=True)
    (folder / "trainer_state" / ".metadata").write_bytes(NAMES[algorithm])
    (folder / "state.json").write_text("{}")
    return folder


def run_of(folder: Path, algorithm: str) -> RunConfig:
    return RunConfig.model_validate(make_model(folder).model_dump() | {"algorithm": ALGORITHMS[algorithm]})


def problems(run: RunConfig, tmp_path: Path, resumed: Path | None) -> str:
    with pytest.raises(UserError) as refused:  # there is no sound model either
        preflight.check(cluster(), run, tmp_path, resumed=resumed)
    return str(refused.value)


def test_a_critic_that_the_checkpoint_has_not_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "ppo"), tmp_path / "run"
    checkpoint(run_dir, 1, "ppo")
    says = "algorithm.name: ppo needs a critic, and checkpoint "
    assert says not in problems(run, tmp_path, run_dir)
    newest = checkpoint(run_dir, 12, "grpo")
    assert f"{says}{newest} has none; expected the algorithm that wrote it" in problems(run, tmp_path, run_dir)
    assert says not in problems(run_of(tmp_path / "m", "grpo"), tmp_path, run_dir)
    assert says not in problems(run, tmp_path, None)
    (newest / "trainer_state" / ".metadata").unlink()  # damaged, of which the trainer tells
    assert says not in problems(run, tmp_path, run_dir)


def test_a_missing_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "a run"  # no name for a URI
    newest = checkpoint(run_dir, 4, "grpo")
    says = f"checkpoint {newest} is missing: without it the run would continue from step_2; bring it back"
    ledger = Ledger(run_dir / layout.LEDGER)
    ledger.checkpointed(4)
    assert "is missing" not in problems(run, tmp_path, run_dir)
    newest.rename(newest.with_name("step_2"))
    assert says in problems(run, tmp_path, run_dir), "also while its last writes are in a file of their own"
    ledger.close()
    assert says in problems(run, tmp_path, run_dir) and "is missing" not in problems(run, tmp_path, None)
    assert {path.name for path in run_dir.iterdir()} == {layout.LEDGER, layout.CHECKPOINTS}
    with closing(sqlite3.connect(ledger.path)) as older:
        older.execute("DROP TABLE newest_checkpoint")
    assert not [*check_newest(run, run_dir)]
    ledger.path.write_bytes(b"no ledger")
    assert not [*check_newest(run, run_dir)], "it is damaged, of which the controller tells"
    ledger.path.unlink()
    assert not [*check_newest(run, run_dir)] and not ledger.path.exists()


def folder_of_a_run(run_dir: Path, every: int) -> Ledger:
    """Make the folder of a killed run of five steps with a checkpoint each `every` steps; return its open ledger."""
    rollouts = run_dir / layout.ROLLOUTS
    rollouts.mkdir(parents=True)
    ledger = Ledger(run_dir / layout.LEDGER)
    with RowWriter(run_dir / layout.METRICS, MetricsRow) as metrics:
        for step in range(1, 6):
            (rollouts / step_file(step)).touch()
            ledger.train(step, step, [], 0.0)
            metrics.append(make_row(step))
            if step % every == 0:
                ledger.checkpointed(step)
    (rollouts / step_file(6)).touch()
    return ledger


@pytest.mark.parametrize("lacks", ["-wal", "", "the newest steps"])
def test_a_folder_without_checkpoints_and_all_of_its_ledger_is_refused_before_anything_is_deleted(
    tmp_path: Path, lacks: str
) -> None:
    run, run_dir, copy = run_of(tmp_path / "m", "grpo"), tmp_path / "run", tmp_path / "a copy"
    with closing(folder_of_a_run(run_dir, every=2)) as ledger:
        shutil.copytree(run_dir, copy)
    (copy / f"{layout.LEDGER}-shm").unlink()
    (copy / f"{layout.LEDGER}-wal").unlink()
    if lacks != "-wal":
        (copy / layout.LEDGER).unlink()
    if lacks == "the newest steps":  # the others were in the file that has come along
        with closing(Ledger(copy / layout.LEDGER)) as older:
            older.train(1, 1, [], 0.0)
    says = f"{copy} has files of 6 steps, and neither a checkpoint nor a ledger that knows of them: "
    assert says in problems(run, tmp_path, copy)
    (given_up := copy / layout.CHECKPOINTS / "lost_step_6").mkdir(parents=True)
    assert not [*check_newest(run, copy)]
    given_up.rmdir()
    (copy / layout.METRICS).unlink()
    assert says in problems(run, tmp_path, copy)
    shutil.rmtree(copy / layout.ROLLOUTS)
    assert not [*check_newest(run, copy)], "nothing would be deleted"
    assert ledger.path.exists() and says not in problems(run, tmp_path, None)


def test_a_run_that_was_killed_before_its_first_checkpoint_may_begin_again(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "run"
    with closing(folder_of_a_run(run_dir, every=10)):
        assert not [*check_newest(run, run_dir)]
    assert not [*check_newest(run, run_dir)]
    with closing(sqlite3.connect(run_dir / layout.LEDGER)) as older:
        older.execute("DROP TABLE newest_checkpoint")
    assert not [*check_newest(run, run_dir)], "so may that of an earlier version"


@pytest.mark.parametrize("issued", [True, False])
def test_the_run_of_an_earlier_version_that_was_killed_in_its_first_step_may_begin_again(
    tmp_path: Path, issued: bool
) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "run"
    (rollouts := run_dir / layout.ROLLOUTS).mkdir(parents=True)
    with closing(Ledger(run_dir / layout.LEDGER)) as ledger:
        if issued:
            ledger.issue([("s", "g", b"")])
    with closing(sqlite3.connect(run_dir / layout.LEDGER)) as older:
        older.execute("DROP TABLE newest_checkpoint")
    (rollouts / step_file(1)).touch()
    told = [*check_newest(run, run_dir)]
    assert ["has files of 1 steps" in one for one in told] == ([] if issued else [True])
    (rollouts / step_file(2)).touch()
    assert len([*check_newest(run, run_dir)]) == 1, "the ledger knows nothing of a second step"


@pytest.mark.parametrize("name", ["state.json", "trainer_state/.metadata"])
def test_a_checkpoint_with_a_file_that_is_missing_or_cut_off_is_refused_before_anything_starts(
    tmp_path: Path, name: str
) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "run"
    checkpoint(run_dir, 2, "grpo")
    folder = checkpoint(run_dir, 4, "grpo")
    for other in ("state.json", "model.safetensors"):
        (folder / other).write_text("{}")
    write_sums(folder, 4, file_sums(folder, [path for path in folder.rglob("*") if path.is_file()]))
    with closing(Ledger(run_dir / layout.LEDGER)) as ledger:
        ledger.checkpointed(4)
    (folder / "model.safetensors").unlink()  # of no use for going on
    assert "cannot be read" not in problems(run, tmp_path, run_dir)
    size = (folder / name).stat().st_size
    (folder / name).write_bytes(b"")
    gives_up = "if it is damaged, rename it to lost_step_4: --resume then continues from step_2 (see docs: E1009)"
    cut_off = f"checkpoint {folder} cannot be read: {name} has 0 bytes, and had {size} when it was written; {gives_up}"
    assert cut_off in problems(run, tmp_path, run_dir).splitlines()
    (folder / name).unlink()
    missing = f"checkpoint {folder} cannot be read: {name} is missing; {gives_up}"
    assert missing in problems(run, tmp_path, run_dir).splitlines()
    (folder / "checksums.json").unlink()  # as of an earlier version, or not copied either
    assert [missing] == [*check_newest(run, run_dir)]
    (folder / name).touch()
    assert f"{name} is empty; {gives_up}" in next(iter(check_newest(run, run_dir)))
    (folder / name).write_text("{}")
    assert not [*check_newest(run, run_dir)], "an earlier version has written no checksums"
    shutil.rmtree(folder)
    folder.mkdir()
    assert "state.json is missing" in problems(run, tmp_path, run_dir)


def test_a_critic_that_is_given_up_is_warned_of(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "run"
    assert not [*checkpoint_warnings(run, run_dir)]
    newest = checkpoint(run_dir, 3, "ppo")
    (warning,) = checkpoint_warnings(run, run_dir)
    assert warning.startswith(f"algorithm.name: checkpoint {newest} has a critic, and grpo trains none")
    assert not [*checkpoint_warnings(run_of(tmp_path / "m", "ppo"), run_dir)]
    assert not [*checkpoint_warnings(run, None)]
    checkpoint(run_dir, 4, "grpo")
    assert not [*checkpoint_warnings(run, run_dir)]


def test_another_reference_of_the_kl_term_is_warned_of(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "kl"), tmp_path / "run"
    folder = checkpoint(run_dir, 3, "grpo")
    assert not [*checkpoint_warnings(run, run_dir)], "it is damaged, of which the controller tells"
    for state in ({}, {"reference": ""}, {"reference": weights_digest(tmp_path / "m")}):  # none: of earlier versions
        (folder / "state.json").write_text(json.dumps(state))
        assert not [*checkpoint_warnings(run, run_dir)]
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.seek(2**19)
        file.write(b"other" * 2**14)
    (warning,) = checkpoint_warnings(run, run_dir)
    assert f"model.path: the weights in {tmp_path / 'm'} are not those of the KL term's reference" in warning
    without = run.model_copy(update={"algorithm": run_of(tmp_path / "n", "grpo").algorithm})
    assert not [*checkpoint_warnings(without, run_dir)], "it has no reference"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["a", "b", "c"], ""),
        (["a", "b"], "task 't' has 2 rows now, and had 3 at the checkpoint"),
        (["a", "c", "b"], "task 't' has other rows, or the same in another order, than at the checkpoint"),
    ],
)
def test_rows_that_have_changed_since_the_checkpoint_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str], says: str
) -> None:
    def run_with(rows: Iterable[str]) -> RunConfig:
        for name, prompts in {"trained": rows, "held_out": ["z"]}.items():
            lines = (json.dumps({"prompt": prompt, "answer": prompt}) + "\n" for prompt in prompts)
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        task = {"kind": "file", "name": "t", "reward": "exact_match"}
        tasks = [task | {"path": str(tmp_path / "trained.jsonl")}, {"kind": "reasoning_gym", "name": "gcd"}]
        held_out = {"prompts": 1, "tasks": [task | {"path": str(tmp_path / "held_out.jsonl")}]}  # of the same name
        settings = make_model(tmp_path / "m").model_dump() | {"tasks": tasks, "evaluation": held_out}
        return RunConfig.model_validate(settings)

    def carry_out(checks: Iterable[Iterable[str]]) -> None:
        for check in checks:
            list(check)

    monkeypatch.setattr(preflight, "refuse", carry_out)  # there is no sound model
    before = PromptSource(run_with("abc").tasks, 0).contents()
    run, folder = run_with(rows), checkpoint(tmp_path / "run", 3, "grpo")

    def warnings(state: object) -> list[str]:
        (folder / "state.json").write_text(json.dumps(state))
        found = preflight.check(cluster(), run, tmp_path, resumed=tmp_path / "run")
        return [line.partition(":")[0] for line in found if "checkpoint" in line]

    assert warnings({"prompts": {"contents": before}}) == [says] * bool(says)
    for other in ({"prompts": {}}, {"prompts": {"contents": {"t": 3}}}, [3]):  # of an earlier version, or damaged
        assert not warnings(other)


@pytest.mark.parametrize("error", [UserError, ImportError, AttributeError])
def test_a_tokenizer_that_cannot_be_loaded_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(path: str) -> object:
        raise error(path)

    source, folder = group_source(tmp_path, 100, 400), checkpoint(tmp_path / "run", 3, "grpo")
    (folder / "state.json").write_text(json.dumps({"prompts": source.state([])}))
    monkeypatch.setattr(resume_check, "load_tokenizer", fails)
    (warning,) = checkpoint_warnings(source.run.model_copy(update={"seed": 5}), tmp_path / "run")
    assert warning.startswith("seed: 5 now"), "all else is compared"


def test_another_seed_or_tokenizer_than_at_the_checkpoint_is_warned_of_before_anything_starts(tmp_path: Path) -> None:
    source, folder = group_source(tmp_path, 100, 400), checkpoint(tmp_path / "run", 3, "grpo")
    (folder / "state.json").write_text(json.dumps({"prompts": source.state([])}))

    def warnings(run: RunConfig) -> list[str]:
        return [line.partition(" the checkpoint: ")[0] for line in checkpoint_warnings(run, tmp_path / "run")]

    assert not warnings(source.run)
    assert warnings(source.run.model_copy(update={"seed": 5})) == [f"seed: 5 now, and {source.run.seed} at"]
    source.tokenizer.chat_template += "{# another #}"
    source.tokenizer.save_pretrained(source.run.model.path)
    another = f"model.path: the chat template of {source.run.model.path} is another one than at"
    assert warnings(source.run) == [another]
    for file in Path(source.run.model.path).glob("token*"):
        file.write_text("{")
    assert not warnings(source.run), "the check of the prompts tells"


BF16, FP32 = TypeChoice("bfloat16", "AMX"), TypeChoice("float32", "AVX2 without AVX-512")


def types_of(run_dir: Path, **types: str) -> None:
    """Write a status in which these processes have reported their types, their `-` written as `_`."""
    status = make_status(3, 20, START)
    for name, dtype in types.items():
        status["roles"][name.replace("_", "-")] |= {"dtype": dtype, "dtype_why": "AMX"}
    write_status(run_dir, status)


def test_a_resume_that_computes_in_another_type_is_warned_of(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "run"
    newest = checkpoint(run_dir, 2, "grpo")

    def warnings(now: TypeChoice, resumed: Path | None = run_dir, hardware: str = "cpu") -> list[str]:
        return [*type_warnings(cluster(hardware), run, resumed, None, now)]

    assert not warnings(FP32), "no status"
    types_of(run_dir, trainer="bfloat16", here_regular_0="bfloat16")
    (warning,) = warnings(FP32)
    assert warning.startswith(
        f"model.dtype: instances and trainer computed in bfloat16 before, and from checkpoint {newest} on in float32 "
        "(AVX2 without AVX-512): numbers are rounded in another way; to go on as before, resume on a CPU like"
    )
    assert not warnings(BF16) and not warnings(FP32, None)
    assert not warnings(FP32, hardware="cuda"), "each process decides by its own GPU"
    types_of(run_dir, trainer="bfloat16", here_regular_0="float32")
    assert [line.partition(" before")[0] for line in (*warnings(FP32), *warnings(BF16))] == [
        "model.dtype: trainer computed in bfloat16",
        "model.dtype: instances computed in float32",
    ]
    for kind in ("int8", "fp8"):
        types_of(run_dir, trainer="bfloat16", here_regular_0=kind)
        assert not warnings(BF16), "an instance that multiplies in 8 bits"
        assert len(warnings(FP32)) == 1
    newest.rename(run_dir / "gone")
    assert not warnings(FP32), "it starts from its model"


def test_a_type_that_another_machine_decides_is_not_compared(tmp_path: Path) -> None:
    run, run_dir = run_of(tmp_path / "m", "grpo"), tmp_path / "run"
    checkpoint(run_dir, 2, "grpo")
    types_of(run_dir, trainer="bfloat16", here_regular_0="bfloat16")
    ray, two = cluster().model_dump(), cluster().model_dump()
    ray["sites"]["here"]["launch"] = {"backend": "ray"}
    assert not [*type_warnings(ClusterConfig.model_validate(ray), run, run_dir, None, FP32)]
    two["sites"]["there"] = {"generation": [{"replicas": 1}]}
    two["links"] = [{"between": ["here", "there"], "bandwidth_gbit_s": 1, "rtt_ms": 1}]
    two["sites"]["here"]["port"] = 5600
    sites = ClusterConfig.model_validate(two)
    assert not [*type_warnings(sites, run, run_dir, "there", FP32)]
    assert len([*type_warnings(sites, run, run_dir, "here", FP32)]) == 1
