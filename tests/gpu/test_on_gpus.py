"""What only a GPU can show; each test skips with its reason elsewhere. On a machine with GPUs: `make test-gpu`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from streamrl.config.run import RunConfig
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training import flash_kernels
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.merged_attention import MergedAttention, has_kernel, pieces_of
from streamrl.training.packing import GroupLayout, pack, pack_share
from streamrl.training.packing_choice import Packing
from streamrl.training.trainer import Trainer
from streamrl.verify import hardware_stages
from streamrl.verify.hardware_trainer import random_group
from streamrl.verify.tiny_run import tiny_run
from streamrl.weights.backends.communicator import join, lead, open_meeting
from streamrl.weights.backends.ipc import SLOT, IpcCommunicator
from streamrl.weights.finite import first_not_finite, largest, whole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none on this machine")

LAYOUT = (GroupLayout(0, 600, (700, 20, 1)), GroupLayout(1321, 5, ()), GroupLayout(1326, 64, (130, 64)))
HEADS, KV_HEADS, WIDTH = 8, 2, 128


@pytest.fixture
def tried_anew() -> Iterator[None]:
    flash_kernels.newer_agrees.cache_clear()
    yield
    flash_kernels.newer_agrees.cache_clear()


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("library", ["torch", "flash-attn-4"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 128])
def test_the_kernels_of_gpu_and_cpu_agree(
    window: int | None, sinks: bool, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "torch":
        monkeypatch.setattr(flash_kernels, "NEWER_CAPABILITIES", ())
    else:
        if torch.cuda.get_device_capability()[0] not in flash_kernels.NEWER_CAPABILITIES:
            pytest.skip("needs a GPU for which flash-attn-4 has kernels: Hopper or Blackwell")
        pytest.importorskip(flash_kernels.NEWER_MODULE, reason="flash-attn-4 is not installed")
        kind = torch.bfloat16, HEADS, KV_HEADS, WIDTH, window is not None
        assert flash_kernels.newer_agrees(torch.device("cuda", 0), *kind)
        monkeypatch.setattr(flash_kernels, "_torch_forward", None)  # all is left to the package
        monkeypatch.setattr(flash_kernels, "_torch_backward", None)
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


def receive_on_gpu(orders: Connection, number: int) -> None:
    """A member with a GPU: receives a tensor of as many bytes as it is told."""
    torch.cuda.set_device(number)
    torch.zeros(1, device="cuda")
    group, _ = join(IpcCommunicator, "127.0.0.1", orders.recv(), 1, 2, 60)
    while True:
        found = torch.zeros(orders.recv(), dtype=torch.uint8, device=group.device)
        group.begin(found)()
        orders.send(found.cpu().numpy().tobytes())


@contextmanager
def receiver_on_gpu(number: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_on_gpu, args=(theirs, number), daemon=True)
    process.start()
    yield ours
    process.kill()  # as if it had crashed: it has the slots open
    process.join()


@pytest.mark.parametrize("number", sorted({0, max(torch.cuda.device_count() - 1, 0)}))
def test_memory_of_a_gpu_is_shared_with_a_process_and_with_its_successor(number: int) -> None:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    held = []
    for _ in range(3):
        with receiver_on_gpu(number) as orders:
            store, port = open_meeting("127.0.0.1", 2, 60)
            orders.send(port)
            group = lead(IpcCommunicator, store, "127.0.0.1", 2, 60)
            for size in (1, SLOT, 5 * SLOT + 3, 100):
                tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
                orders.send(size)
                group.begin(tensor)()
                assert orders.recv() == tensor.cpu().numpy().tobytes()
            group.close()
        del tensor
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[2]  # a member that dies costs no memory


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_of_many_tensors_that_is_not_finite_is_found(bad: float) -> None:
    tensors = [torch.randn(size, device="cuda") for size in (3, 70_000, 1)] + [torch.zeros(0, device="cuda")]
    plain = largest(tensors).tolist()
    assert plain == [float(one.abs().max()) for one in tensors[:3]] + [0.0]
    tensors[1][65_000] = bad
    assert first_not_finite(dict(zip("abcd", tensors, strict=True))) == "b"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS = {
    "Qwen 2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "norms of queries": Qwen3Config(**SHAPE),
    "soft caps": Gemma2Config(**SHAPE, sliding_window=64),
    "windows": Gemma3TextConfig(**SHAPE, sliding_window=64),
    "experts": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("family", "recomputation"), [*((name, False) for name in MODELS), ("Qwen 2", True), ("Qwen 2", "selective")]
)
def test_a_compiled_trainer_rounds_no_more_than_one_that_is_not(
    tmp_path: Path, family: str, recomputation: bool | str
) -> None:
    torch.manual_seed(0)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(MODELS[family]).save_pretrained(model)
    torch._dynamo.reset()  # else what an earlier case has compiled would serve this one, uncounted
    torch._dynamo.utils.counters.clear()

    def gradients(dtype: str, compiled: bool) -> list[torch.Tensor]:
        options = {"gradient_checkpointing": recomputation, "compile": compiled}
        run = {"model": {"path": str(model), "dtype": dtype, "max_context": 256}, "optimizer": options}
        packing = Packing("shared", SHARED_PREFIX, "")
        device = torch.device("cuda", 0)
        trainer = Trainer(RunConfig.model_validate(run), str(model), device, packing=packing)
        trainer.accumulate([random_group(256, SHAPE["vocab_size"])], is_last=True)
        return [whole(one.grad).float() for one in trainer.policy.parameters() if one.grad is not None]

    exact, plain = gradients("float32", False), gradients("bfloat16", False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    compiled = gradients("bfloat16", True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    assert len(exact) == len(plain) == len(compiled) > 0
    for ours, theirs, right in zip(compiled, plain, exact, strict=True):  # both differ by some 3 %
        assert (ours - right).norm() < 1.5 * (theirs - right).norm()


@pytest.mark.parametrize("stage", [*hardware_stages.STAGES])
def test_every_stage_of_the_kit_runs(stage: str) -> None:
    assert list(hardware_stages.STAGES[stage]())


@pytest.mark.timeout(900)
def test_a_whole_run_of_a_tiny_model_ends() -> None:
    found, error = tiny_run()
    assert error == "" and found
