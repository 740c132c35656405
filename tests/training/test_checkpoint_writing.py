"""A checkpoint that the system refuses to write ends the run with the system's error, in whichever file it came."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from streamrl.errors import RunFailed, is_final
from streamrl.launcher.resume_check import has_critic
from streamrl.machine.model_files import weights_digest
from streamrl.run_dir.checkpoint_sums import read_sums, write_sums
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.training.checkpoint_writing import read_in_words, system_error, told_in_words
from streamrl.training.trainer import Trainer
from streamrl.training.trainer_models import TrainerModels
from streamrl.training.trainer_process import TrainerProcess
from tests.run_dir.conftest import file_size_limit
from tests.training.conftest import run_config
from tests.training.trained import CPU, PPO


@pytest.fixture
def worker(tiny_model: Path, tmp_path: Path, one_rank: None) -> SimpleNamespace:
    """The part of the trainer's process that writes checkpoints."""
    run = run_config(tiny_model)
    trainer = Trainer(run, str(tiny_model), CPU)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    return SimpleNamespace(
        rank=0, run_config=run, trainer=trainer, checkpoints=checkpoints, reference_digest=weights_digest(tiny_model)
    )


def write(worker: SimpleNamespace, step: int = 5) -> None:
    TrainerProcess._checkpoint(worker, step, {"seed": 1}, [])  # type: ignore[arg-type]


def files(worker: SimpleNamespace, step: int) -> set[str]:
    return {str(path.relative_to(worker.checkpoints.path(step))) for path in worker.checkpoints.path(step).rglob("*")}


@pytest.mark.parametrize(
    ("size", "written", "missing"),
    [
        (300, "config.json", "model.safetensors"),
        (100_000, "generation_config.json", "model.safetensors"),
        (600_000, "model.safetensors", "trainer_state/.metadata"),  # state is the largest file
    ],
    ids=["text", "weights", "state"],
)
def test_what_the_system_refuses_to_write_is_said(
    worker: SimpleNamespace, size: int, written: str, missing: str
) -> None:
    with file_size_limit(size), pytest.raises(RunFailed) as found:
        write(worker)
    partial = worker.checkpoints.directory / ".partial_step_5"
    message = str(found.value)
    assert message.startswith(f"the trainer cannot write checkpoint {partial}: [Errno {errno.EFBIG}] File too large")
    assert message.endswith("; make room there, then --resume (see docs: E1007)")
    assert isinstance(found.value.__cause__, OSError) and found.value.__cause__.errno == errno.EFBIG
    assert (partial / written).exists() and not (partial / missing).exists()
    assert worker.checkpoints.latest() is None
    write(worker)  # there is room again
    assert worker.checkpoints.latest() == 5
    assert {"model.safetensors", "tokenizer.json", "state.json", "trainer_state/.metadata"} <= files(worker, 5)
    worker.trainer.load(worker.checkpoints.path(5))
    state = json.loads((worker.checkpoints.path(5) / "state.json").read_text())
    assert state == {"seed": 1, "step": 5, "reference": worker.reference_digest}


def test_a_folder_that_cannot_be_begun_is_said(worker: SimpleNamespace) -> None:
    worker.checkpoints.directory.write_text("a file")
    with pytest.raises(RunFailed, match=r"cannot write checkpoint .*_step_5: \[Errno 20\] Not a directory[^;]*$"):
        write(worker)  # where more room would not help


def test_a_checkpoint_that_cannot_be_completed_is_said(worker: SimpleNamespace) -> None:
    worker.checkpoints.directory.mkdir()
    worker.checkpoints.path(5).write_text("a file where its folder belongs")
    with pytest.raises(RunFailed, match=r"cannot write checkpoint .*partial_step_5: \[Errno 20\] Not a directory"):
        write(worker)


def test_a_model_folder_without_its_tokenizer_is_not_taken_for_a_full_disk(worker: SimpleNamespace) -> None:
    with (
        patch("transformers.AutoTokenizer.from_pretrained", side_effect=OSError("no tokenizer")),
        pytest.raises(RunFailed) as found,
    ):
        write(worker)
    assert str(found.value).endswith(".partial_step_5: no tokenizer")


def failed(*failures: BaseException) -> CheckpointException:
    """A failure that arrives at the other ranks, whose numbers need not be in order."""
    ranks = {rank: _wrap_exception(one) for rank, one in reversed(list(enumerate(failures)))}
    return CheckpointException("write", pickle.loads(pickle.dumps(ranks)))


def test_the_first_rank_with_an_error_of_the_system_is_named() -> None:
    full, denied = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EACCES))
    found = system_error(failed(RuntimeError("other"), full, denied))
    assert found is not None and found.errno == errno.ENOSPC


def test_a_full_disk_is_seen_by_each_library(tmp_path: Path) -> None:
    with file_size_limit(10), pytest.raises(SafetensorError) as weights:
        save_file({"weight": torch.zeros(9)}, tmp_path / "model.safetensors")
    with file_size_limit(10), pytest.raises(Exception, match="os error") as tokens:
        Tokenizer(BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    for error in (weights.value, tokens.value):
        found = system_error(error)
        assert found is not None and (found.errno, found.strerror) == (errno.EFBIG, os.strerror(errno.EFBIG))


@pytest.mark.parametrize("error", [failed(RuntimeError("a bug")), SafetensorError("a bug"), RunFailed("a bug")])
def test_other_errors_pass_unchanged(tmp_path: Path, error: BaseException) -> None:
    assert system_error(error) is None
    with pytest.raises(type(error)) as found, told_in_words(tmp_path):
        raise error
    assert found.value is error


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".metadata", None),
        (".metadata", b""),
        (".metadata", bytes(1000)),
        ("__0_0.distcp", None),
        ("__0_0.distcp", b""),
        ("__0_0.distcp", bytes(10**7)),
    ],
)
def test_a_damaged_checkpoint_is_named_and_no_restart_is_tried(
    worker: SimpleNamespace, name: str, content: bytes | None
) -> None:
    write(worker)
    folder = worker.checkpoints.path(5)
    (folder / "checksums.json").unlink()  # as of an earlier version
    damaged = folder / "trainer_state" / name
    assert damaged.is_file()
    damaged.unlink()
    if content is not None:
        damaged.write_bytes(content)
    with pytest.raises(RunFailed) as found:
        worker.trainer.load(folder)
    assert is_final(found.value)
    message = str(found.value)
    assert message.startswith(f"checkpoint {folder} cannot be read: ") and "\n" not in message
    assert message.endswith("rename it to lost_step_5: --resume then continues from the beginning (see docs: E1009)")


def test_a_checkpoint_of_which_any_part_has_changed_is_not_loaded(worker: SimpleNamespace) -> None:
    write(worker)
    folder = worker.checkpoints.path(5)
    state = folder / "trainer_state" / "__0_0.distcp"
    worker.trainer.load(folder)
    sound = state.read_bytes()
    assert files(worker, 5) - set(read_sums(folder)) == {"checksums.json", "trainer_state"}

    def refused(why: str) -> None:
        with pytest.raises(RunFailed, match=rf"checkpoint {folder} cannot be read: {why}; if .* \(see docs: E1009\)$"):
            worker.trainer.load(folder)

    flipped = bytearray(sound)
    flipped[len(sound) // 2] ^= 1
    state.write_bytes(flipped)
    refused("trainer_state/__0_0.distcp does not match its checksum")
    state.write_bytes(sound[:-1])
    refused(f"trainer_state/__0_0.distcp has {len(sound) - 1:,} bytes, and had {len(sound):,} when it was written")
    state.unlink()
    refused("trainer_state/__0_0.distcp is missing")
    state.write_bytes(sound)
    (folder / "model.safetensors").unlink()  # of no use for going on
    worker.trainer.load(folder)
    with patch.object(Path, "open", side_effect=OSError(errno.EIO, "Input/output error")), pytest.raises(OSError):
        worker.trainer.load(folder)
    (folder / "checksums.json").write_text("{")
    refused("checksums.json is damaged")
    folder.rename(worker.checkpoints.path(6))
    folder = worker.checkpoints.path(6)
    write_sums(folder, 5, {})
    refused("checksums.json is of step 5")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ("critic", "Missing key in checkpoint state_dict: critic_model.head"),
        ("model", "Size mismatch between saved "),
        ("smaller", "Weights in checkpoint that the model does not have: model."),
    ],
)
def test_a_checkpoint_of_another_model_or_algorithm_is_not_called_damaged(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, changed: str, why: str
) -> None:
    write(worker)
    folder, model = worker.checkpoints.path(5), worker.trainer.models.state()["model"]
    name = next(iter(model))
    states = {
        "critic": {"critic_model": {"head": torch.zeros(2)}},
        "model": {"model": {name: torch.zeros(2)}},
        "smaller": {"model": {name: model[name]}},
    }
    monkeypatch.setattr(TrainerModels, "state", lambda _: states[changed])
    with pytest.raises(RunFailed) as found:
        worker.trainer.load(folder)
    assert is_final(found.value)
    message = str(found.value)
    assert message.startswith(f"checkpoint {folder} does not fit the run file: ") and why in message
    assert message.endswith("; expected the model and the algorithm that it was written with (see docs: E1009)")


@pytest.mark.parametrize("kind", [PPO, {"name": "grpo"}], ids=["ppo", "grpo"])
def test_whether_a_checkpoint_has_a_critic_is_seen_without_loading_it(
    tiny_model: Path, tmp_path: Path, one_rank: None, kind: dict[str, Any]
) -> None:
    assert has_critic(tmp_path) is None
    Trainer(run_config(tiny_model, algorithm=kind), str(tiny_model), CPU).save(tmp_path)
    assert has_critic(tmp_path) is (kind is PPO)


def test_an_algorithm_without_a_critic_goes_on_from_a_checkpoint_with_one(
    tiny_model: Path, tmp_path: Path, one_rank: None
) -> None:
    Trainer(run_config(tiny_model, algorithm=PPO), str(tiny_model), CPU).save(tmp_path)
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    trainer.load(tmp_path)
    assert trainer.critic is None


@pytest.mark.parametrize(
    "error",
    [
        failed(OSError(errno.ESTALE, "Stale file handle")),
        failed(EOFError("half"), torch.OutOfMemoryError("none left")),
        RuntimeError("Connection closed by peer"),
    ],
    ids=repr,
)
def test_a_checkpoint_is_not_taken_for_damaged_where_reading_fails_for_another_cause(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)) as found, read_in_words(tmp_path):
        raise error
    assert found.value is error
