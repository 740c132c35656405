"""What only a GPU can show; each test skips with its reason elsewhere. On a machine with GPUs: `make test-gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrl.rollouts.micro_batch import TrainGroup, TrainSequence
from streamrl.training.merged_attention import MergedAttention, has_kernel, pieces_of
from streamrl.training.packing import GroupLayout, pack, pack_share
from streamrl.verify import hardware_stages
from streamrl.verify.tiny_run import tiny_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none on this machine")

LAYOUT = (GroupLayout(0, 300, (700, 20, 1)), GroupLayout(1021, 5, ()), GroupLayout(1026, 64, (130, 64)))
HEADS, KV_HEADS, WIDTH = 8, 2, 128


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 128])
def test_the_kernels_of_gpu_and_cpu_agree(window: int | None, sinks: bool) -> None:
    torch.manual_seed(0)
    row = LAYOUT[-1].stop
    exact = [torch.randn(row, heads, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    column = torch.randn(HEADS, dtype=torch.float64) if sinks else None
    weights = torch.randn(row, HEADS, WIDTH, dtype=torch.float64)

    def outputs(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(device, dtype).requires_grad_() for x in exact]
        assert has_kernel(leaves[0], leaves[2])
        some = None if column is None else column.to(device, dtype).requires_grad_()
        out = MergedAttention.apply(*leaves, some, pieces_of(LAYOUT, window, device), WIDTH**-0.5)
        inputs = leaves if some is None else [*leaves, some]
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, inputs, weights.to(device, dtype)))]

    ours = outputs(torch.device("cuda"), torch.bfloat16)
    for one, other in zip(ours, outputs(torch.device("cpu"), torch.float64), strict=True):
        assert (one - other).norm() / other.norm() < 0.02


def test_a_share_that_was_copied_beside_other_work_is_complete() -> None:
    prompt, answer = np.arange(1, 400, dtype=np.int32), np.arange(5, 905, dtype=np.int32)
    group = TrainGroup("a", prompt, [TrainSequence(answer, -answer.astype(np.float32), 0.5)] * 3)
    expected = pack([group]).tensors
    device = torch.device("cuda")
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        share = pack_share([[group]], device, torch.cuda.Stream())
        busy = (busy @ busy).tanh()
        (batch,) = share.arrived()
        for name, value in batch.tensors.items():
            assert torch.equal(value.cpu(), expected[name]), name


@pytest.mark.parametrize("stage", [*hardware_stages.STAGES])
def test_every_stage_of_the_kit_runs(stage: str) -> None:
    assert list(hardware_stages.STAGES[stage]())


@pytest.mark.timeout(900)
def test_a_whole_run_of_a_tiny_model_ends() -> None:
    found, error = tiny_run()
    assert error == "" and found
