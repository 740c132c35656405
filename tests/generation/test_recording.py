"""A recorded forward pass computes what the model does, with new weights too, and refuses what it could not repeat."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from streamrl.generation.instance.recording import CannotRecord, Recording, record

SIZE, VOCABULARY = 16, 32


class Packed(nn.Module):
    """A layer that multiplies by weights which only its function knows, as vLLM's do on a CPU."""

    cpu_linear: Callable[[torch.Tensor], torch.Tensor]

    def load(self, weight: torch.Tensor) -> None:
        packed = weight.t().contiguous()
        self.cpu_linear = lambda x: x @ packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cpu_linear(x)


class Model(nn.Module):
    """Layers with operations of each kind: views, new tensors, changes in place, packed weights and parameters."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.up, self.down = (nn.ModuleList(Packed() for _ in range(layers)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(SIZE))

    def load(self, seed: int) -> None:
        torch.manual_seed(seed)
        for up, down in zip(self.up, self.down, strict=True):
            up.load(torch.randn(2 * SIZE, SIZE))
            down.load(torch.randn(SIZE, SIZE))
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        hidden = self.embedding(ids.long()).mul_(self.scale) + positions[:, None]
        for up, down in zip(self.up, self.down, strict=True):
            gate, value = up(hidden).chunk(2, dim=-1)
            hidden += down(functional.silu(gate) * value)
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return hidden


def inputs(seed: int, tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randint(VOCABULARY, (tokens,), dtype=torch.int32), torch.randint(100, (tokens,))


def recorded(model: nn.Module, forward: Callable[[torch.Tensor, torch.Tensor], Any] | None = None) -> Recording:
    return record(model, forward or model, *(torch.zeros_like(one) for one in inputs(0)))


@torch.inference_mode()
def test_a_recording_computes_what_the_model_does() -> None:
    model = Model()
    model.load(0)
    recording = recorded(model)
    for seed in range(3):
        assert recording.follow_weights()
        assert torch.equal(recording(*inputs(seed)), model(*inputs(seed)))


@torch.inference_mode()
def test_a_recording_follows_new_weights_without_keeping_old_ones() -> None:
    model = Model()
    model.load(0)
    recording, unused = recorded(model), recorded(model)
    before = recording(*inputs(0)).clone()
    for seed in (1, 2):
        old = [weakref.ref(cell.cell_contents) for layer in model.up for cell in layer.cpu_linear.__closure__]
        model.load(seed)
        gc.collect()
        assert old and all(one() is None for one in old)
        assert all(one.function() is None for one in recording.packed + unused.packed)
        assert recording.follow_weights()
        assert torch.equal(recording(*inputs(0)), model(*inputs(0)))
        assert not torch.equal(recording.result, before)


@torch.inference_mode()
def test_a_recording_knows_that_weights_were_moved_or_have_another_form() -> None:
    for change in (
        lambda model: setattr(model, "scale", nn.Parameter(torch.ones(SIZE))),
        lambda model: setattr(model.scale, "data", torch.ones(SIZE)),
        lambda model: model.up[0].load(torch.randn(4 * SIZE, SIZE)),
        lambda model: delattr(model.up[0], "cpu_linear"),
    ):
        model = Model()
        model.load(0)
        recording = recorded(model)
        assert recording.follow_weights()
        change(model)
        assert not recording.follow_weights()


@torch.inference_mode()
def test_layers_share_memory() -> None:
    def places(layers: int) -> int:
        model = Model(layers)
        model.load(0)
        kept = {one.untyped_storage().data_ptr() for one in model.parameters()}
        steps = recorded(model).steps
        tensors = [one for _, args, named in steps for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        return len({one.untyped_storage().data_ptr() for one in tensors if one.shape[0] == 3} - kept)

    assert places(4) == places(8)


@torch.inference_mode()
def test_what_a_recording_could_not_repeat_is_refused() -> None:
    model = Model()
    model.load(0)
    constant = torch.ones(SIZE)

    def refused(forward: Callable[[torch.Tensor, torch.Tensor], Any], why: str) -> None:
        with pytest.raises(CannotRecord, match=why):
            recorded(model, forward)

    refused(lambda ids, positions: model(ids, positions) * constant, "unknown origin")
    refused(lambda ids, positions: model(ids, positions) * positions.max().item(), "gives Python a value")
    refused(lambda ids, positions: model(ids, positions).max(dim=-1)[0], "several tensors")
    refused(lambda ids, positions: (model(ids, positions), None), "more than hidden states")
    refused(lambda ids, positions: model(ids, positions) * len(positions.nonzero()), "a tensor's contents")
    refused(lambda ids, positions: torch.ops.streamrl_tests.listed(model(ids, positions))[0], "one in a list")
    model.down[0].cpu_linear = model.down[1].cpu_linear
    refused(model, "share packed weights")


@torch.library.custom_op("streamrl_tests::listed", mutates_args=())
def listed(x: torch.Tensor) -> list[torch.Tensor]:
    """An operation whose only new tensor comes in a list."""
    return [x * 1]
