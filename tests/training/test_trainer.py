"""The gradient of a step does not depend on arrival order, on how the batch was cut, or on the number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from streamrl.rollouts.micro_batch import TrainGroup, balance, split_into_micro_batches
from streamrl.training.checkpoints import CheckpointFolder
from streamrl.training.policy import load_policy
from streamrl.training.trainer import Trainer, learning_rate
from tests.training.conftest import free_port, random_groups, relative_error, run_config

CPU = torch.device("cpu")


def accumulated_gradient(trainer: Trainer, micro_batches: list[list[TrainGroup]]) -> torch.Tensor:
    """The batch's summed gradient, flat."""
    for number, groups in enumerate(micro_batches):
        trainer.accumulate(groups, is_last=number == len(micro_batches) - 1)
    flat = torch.cat([_full(p.grad).flatten() for p in trainer.policy.parameters()])
    trainer.optimizer.zero_grad(set_to_none=True)
    return flat.clone()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_streaming_gives_the_gradient_of_the_whole_batch_for_any_arrival_order(
    tiny_model: Path, one_rank: None
) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    groups = random_groups(6)
    whole = accumulated_gradient(trainer, [groups])  # sync: the barrier's one batch
    assert float(whole.norm()) > 0
    for order in itertools.islice(itertools.permutations(groups), 0, 720, 97):
        streamed = accumulated_gradient(trainer, [[group] for group in order])
        assert relative_error(streamed, whole) < 1e-5
    cut = split_into_micro_batches(groups[::-1], max_tokens=30)
    assert len(cut) > 6
    assert relative_error(accumulated_gradient(trainer, cut), whole) < 1e-5


def test_closing_a_batch_with_an_empty_micro_batch_adds_nothing(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    groups = random_groups(2)
    assert torch.equal(accumulated_gradient(trainer, [groups, []]), accumulated_gradient(trainer, [groups]))


def test_a_step_uses_the_updated_weights_afterwards(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    groups = random_groups(2)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    first = trainer.accumulate(groups, is_last=True)
    result = trainer.step(0, loss_tokens=sum(g.completion_tokens for g in groups))
    assert result.grad_norm > 0
    after = dict(trainer.weights())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    second = trainer.accumulate(groups, is_last=True)
    assert second.loss_sum < first.loss_sum  # the same groups again: the surrogate has improved


def test_bf16_compute_keeps_fp32_master_weights(tiny_model: Path, one_rank: None) -> None:
    config = run_config(tiny_model, model={"path": str(tiny_model), "max_context": 256, "dtype": "bfloat16"})
    trainer = Trainer(config, str(tiny_model), CPU)
    trainer.accumulate(random_groups(2), is_last=True)
    trainer.step(0, 10)
    assert {p.dtype for p in trainer.policy.parameters()} == {torch.float32}
    assert {t.dtype for _, t in trainer.weights()} == {torch.bfloat16}


def test_kl_to_the_reference_is_zero_at_the_start_and_grows(tiny_model: Path, one_rank: None) -> None:
    config = run_config(tiny_model, algorithm={"kl_coef": 0.1})
    trainer = Trainer(config, str(tiny_model), CPU)
    groups = random_groups(2)
    assert trainer.accumulate(groups, is_last=True).kl_sum == pytest.approx(0.0, abs=1e-6)
    trainer.step(0, 10)
    assert trainer.accumulate(groups, is_last=True).kl_sum > 1e-6


def _rank(rank: int, ranks: int, port: int, model: str, out: str, resume: str | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    trainer = Trainer(run_config(Path(model)), model, CPU)
    if resume:
        trainer.load(Path(resume))
    for step in range(2):
        groups = random_groups(5, seed=step)
        shares = balance(groups, ranks)
        if ranks == 2 and step == 1:
            shares = [groups, []]  # one rank may have nothing to do
        trainer.accumulate(shares[rank], is_last=True)
        trainer.step(step, sum(g.completion_tokens for g in groups))
    weights = {name: tensor.clone() for name, tensor in trainer.weights()}
    directory = Path(out)
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    trainer.save(directory)
    if rank == 0:
        torch.save(weights, directory / "weights.pt")
    dist.destroy_process_group()


def _spawn(ranks: int, model: Path, out: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
    arguments = (ranks, free_port(), str(model), str(out), str(resume) if resume else None)
    mp.spawn(_rank, arguments, nprocs=ranks)
    return torch.load(out / "weights.pt")


def test_two_ranks_equal_one_and_checkpoints_load_on_either(tiny_model: Path, tmp_path: Path) -> None:
    start = {name: p.detach() for name, p in load_policy(str(tiny_model)).model.named_parameters()}

    def same_updates(
        ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], base: dict[str, torch.Tensor]
    ) -> None:
        for name, before in base.items():
            # AdamW divides by the gradient's size: rounding of the smallest gradients shows in the updates
            assert relative_error(ours[name] - before, theirs[name] - before) < 2e-3, name

    one = _spawn(1, tiny_model, tmp_path / "one")
    two = _spawn(2, tiny_model, tmp_path / "two")
    same_updates(two, one, start)
    # two more steps from the 2-rank checkpoint on one rank and on two: optimizer state has moved along
    again_one = _spawn(1, tiny_model, tmp_path / "again-one", tmp_path / "two")
    again_two = _spawn(2, tiny_model, tmp_path / "again-two", tmp_path / "two")
    same_updates(again_two, again_one, two)


def test_learning_rate_warms_up_and_decays() -> None:
    options = run_config(Path(".")).optimizer.model_copy(
        update={"lr": 1.0, "warmup_steps": 4, "decay": "cosine", "min_lr_fraction": 0.1}
    )
    rates = [learning_rate(step, 20, options) for step in range(20)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_checkpoint_folder_is_complete_or_absent_and_keeps_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.latest() is None
    for step in (5, 10, 15):
        (folder.begin(step) / "model").write_text("x")
        folder.commit(step, keep=2)
    folder.begin(20)  # died while writing
    assert folder.latest() == 15
    assert sorted(p.name for p in folder.directory.glob("step_*")) == ["step_10", "step_15"]
