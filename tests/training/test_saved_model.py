"""A checkpoint's model is read by transformers as the trainer has it."""

from __future__ import annotations

import functools
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, GenerationConfig, PreTrainedModel

from streamrl.training.packing import pack
from streamrl.training.packing_proof import small_model
from streamrl.training.trainer import Trainer
from streamrl.verify.families import FAMILIES
from tests.training.conftest import random_groups, run_config
from tests.training.trained import CPU


@functools.cache
def small_deepseek() -> PreTrainedModel:
    return small_model(FAMILIES["DeepSeek-V3"]())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_of_the_model_are_saved_as_they_are(tmp_path: Path, one_rank: None, dtype: str) -> None:
    """Biases of routers in fp32, whose sixth digit may choose an expert, and what is no number of a floating type."""
    start = small_deepseek()
    biases = {name: buffer for name, buffer in start.named_buffers() if name.endswith("e_score_correction_bias")}
    assert biases
    for bias in biases.values():
        bias.copy_(torch.linspace(-1 / 3, 1 / 3, len(bias)))
    start.save_pretrained(tmp_path / "start")
    run = run_config(tmp_path / "start", model={"path": str(tmp_path / "start"), "max_context": 256, "dtype": dtype})
    trainer = Trainer(run, str(tmp_path / "start"), CPU)
    trainer.policy.model.register_buffer("count", torch.tensor([3, 2**40]))
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    assert torch.equal(dict(trainer.weights())["count"], torch.tensor([3, 2**40]))
    options = {"attn_implementation": "eager", "output_loading_info": True}
    again, problems = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert not problems["missing_keys"] and problems["unexpected_keys"] == {"count"}
    buffers = dict(again.named_buffers())
    for name, bias in biases.items():
        assert buffers[name].dtype == torch.float32 and torch.equal(buffers[name], bias), name
    if dtype == "float32":
        ids = torch.arange(3, 40)[None]
        with torch.no_grad():
            assert torch.equal(again(ids).logits, start.eval()(ids).logits)


def test_parameters_that_transformers_keeps_in_fp32_are_saved_in_it(tmp_path: Path, one_rank: None) -> None:
    start = small_model(Ernie4_5_MoeConfig())
    for name, parameter in start.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.copy_(torch.linspace(-1 / 3, 1 / 3, parameter.numel()).view_as(parameter))
    start.save_pretrained(tmp_path / "start")
    model = {"path": str(tmp_path / "start"), "max_context": 256, "dtype": "bfloat16"}
    trainer = Trainer(run_config(tmp_path / "start", model=model), str(tmp_path / "start"), CPU)
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    again, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        for name in ("saved", "start")
    )
    assert {str(tensor.dtype) for tensor in expected.values()} == {"torch.bfloat16", "torch.float32"}
    for name, tensor in expected.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_has_just_computed_is_saved(tiny_model: Path, tmp_path: Path, one_rank: None, dtype: str) -> None:
    """Layers that have computed hold copies of their weights, in the compute type."""
    trainer = Trainer(run_config(tiny_model, model={"path": str(tiny_model), "dtype": dtype}), str(tiny_model), CPU)
    for number in range(2):
        with torch.no_grad():
            trainer.policy(pack(random_groups(1)), 1.0)
        saved = tmp_path / str(number)
        saved.mkdir()
        trainer.save(saved)
        again = AutoModelForCausalLM.from_pretrained(saved, dtype=getattr(torch, dtype))
        start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
        for name, weight in start.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight), name


TOKENS = {"bos_token_id": 256, "eos_token_id": [257, 258], "pad_token_id": 257}
"""Ids of tokens in the form that folders have."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"do_sample": True, "temperature": 0.6, "top_k": 20}),
        ({"max_length": 4096}, {"max_length": 4096}),
        ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {"do_sample": False}),
        ({"length_penalty": 0.5, "max_length": 4096}, {}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
    ],
    ids=["samples", "valid", "no word of do_sample", "greedy", "beams", "no token"],
)
def test_defaults_of_generation_are_saved_where_valid_and_the_ends_of_sequences_always(
    tiny_model: Path, tmp_path: Path, one_rank: None, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text(json.dumps(TOKENS | given))
    trainer = Trainer(run_config(model), str(model), CPU)
    for saved in (tmp_path / "first", tmp_path / "second"):
        saved.mkdir()
        trainer.save(saved)
        found = json.loads((saved / "generation_config.json").read_text())
        found.pop("transformers_version")
        assert found == {name: value for name, value in (TOKENS | expected).items() if value is not None}
    assert GenerationConfig.from_pretrained(tmp_path / "second").eos_token_id == [257, 258]


class OnDevice:
    """A tensor on a device that this machine need not have."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def cpu(self) -> torch.Tensor:
        return self.host


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_holds_the_model_on_its_device_while_it_saves(
    tiny_model: Path, tmp_path: Path, one_rank: None, rank: int
) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    weights = dict(trainer.weights())
    living: weakref.WeakSet[OnDevice] = weakref.WeakSet()
    most = 0

    def gathered() -> Iterator[tuple[str, OnDevice]]:
        nonlocal most
        for name, tensor in weights.items():
            one = OnDevice(tensor)
            living.add(one)
            most = max(most, len(living))
            yield name, one
            del one

    trainer.rank = rank
    with (
        patch.object(trainer, "weights", gathered),
        patch.object(trainer.policy.model, "save_pretrained", wraps=trainer.policy.model.save_pretrained) as saved,
    ):
        trainer.save(tmp_path)
    assert most == 1 and len(weights) > 1
    assert saved.call_count == (rank == 0)
    assert (tmp_path / "model.safetensors").exists() == (rank == 0)
    assert (tmp_path / "trainer_state").is_dir()
