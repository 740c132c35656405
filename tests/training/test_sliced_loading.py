"""What a model must be to be read in slices, and what happens if it is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from streamrl.config.run import CRITIC_KEY
from streamrl.errors import RunFailed
from streamrl.machine.model_files import NotInSlices, in_slices
from streamrl.training import sliced_loading
from streamrl.training.critic import load_critic
from streamrl.training.packing_proof import small_model
from streamrl.training.policy_model import load_policy
from streamrl.training.sliced_loading import empty_model, is_empty
from streamrl.verify.families import FAMILIES
from tests.tiny_model import save_tiny_model


def _with(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _untie(folder: Path) -> None:
    _with(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))


def _lose_one(folder: Path) -> None:
    _with(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))


def _rename(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    renamed = {key.replace("model.", "backbone."): value for key, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def _adapt(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def _quantize(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel])
def test_an_empty_model_has_no_weights_yet(kind: type, tiny_model: Path) -> None:
    model = empty_model(kind, str(tiny_model), "eager", 2)
    assert is_empty(model) and {one.device.type for one in (*model.parameters(), *model.buffers())} == {"meta"}
    assert not model.training
    assert not is_empty(load_policy(str(tiny_model)).model)
    assert is_empty(load_policy(str(tiny_model), shards=2).model)


@pytest.mark.parametrize(
    ("change", "by_its_files", "reason"),
    [
        (_adapt, False, "has an adapter"),
        (_quantize, False, "has quantization_config"),
        (_pickle, False, "neither model.safetensors nor an index"),
        (_untie, True, "have lm_head.weight, which is tied to model.embed_tokens.weight"),
        (_lose_one, True, "lack model.norm.weight"),
    ],
)
def test_models_that_are_not_read_in_slices(
    change: Callable[[Path], None], by_its_files: bool, reason: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path)
    assert in_slices(path)
    change(path)
    with pytest.raises(NotInSlices, match=reason):
        empty_model(AutoModelForCausalLM, str(path), "eager", 2)
    assert in_slices(path) == by_its_files


def test_a_model_that_is_not_read_in_slices_is_loaded_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tiny_model(tmp_path)
    whole = load_policy(str(path))
    _untie(path)
    with caplog.at_level(logging.WARNING, "streamrl"):
        policy = load_policy(str(path), shards=2)
    assert "every rank loads the whole of" in caplog.text and "as its files have lm_head.weight" in caplog.text
    for ours, theirs in zip(policy.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_experts_are_read_in_slices_where_every_rank_has_some(tmp_path: Path) -> None:
    model = small_model(FAMILIES["Qwen3-MoE"](), seed=0)
    model.save_pretrained(tmp_path)
    experts = model.config.num_experts
    assert experts == 8
    for shards in (1, 2, 3, 4, 8):
        assert is_empty(empty_model(AutoModelForCausalLM, str(tmp_path), "eager", shards))
    for shards in (5, 7, 9):
        with pytest.raises(NotInSlices, match=f"has 8 experts, too few for {shards} ranks"):
            empty_model(AutoModelForCausalLM, str(tmp_path), "eager", shards)


def test_weights_whose_parts_are_mixed_in_the_files_are_loaded_whole(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = WeightConverter(
        source_patterns=["self_attn.q_proj.weight"],
        target_patterns=["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        operations=[Chunk(dim=0)],
    )
    monkeypatch.setattr(sliced_loading, "get_model_conversion_mapping", lambda model: [split])
    with pytest.raises(NotInSlices, match="in another form"):
        empty_model(AutoModelForCausalLM, str(tiny_model), "eager", 2)


@pytest.mark.parametrize("shards", [None, 2])
def test_weights_that_the_files_lack_are_named(
    shards: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_model(tmp_path)
    _lose_one(path)
    lacks = f"model.path: the files of {path} lack 1 of its tensors, which get initial values: model.norm.weight"
    with pytest.raises(RunFailed, match=rf"^{lacks} \(see docs: E1002\)$"):
        load_policy(str(path), shards=shards)
    with caplog.at_level(logging.WARNING, "streamrl"):
        assert not is_empty(load_policy(str(path), shards=shards, resumed=True).model)
    assert lacks in caplog.text, "a run that an earlier version began has its weights in a checkpoint"


def test_a_critic_whose_weights_have_other_names_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    load_critic(str(path), key=CRITIC_KEY)
    _rename(path)
    with pytest.raises(
        RunFailed, match=r"^algorithm\.critic\.path: the files of .* lack \d+ of its tensors, .*, \.\.\. "
    ):
        load_critic(str(path), key=CRITIC_KEY)
    load_critic(str(path), key=CRITIC_KEY, resumed=True)


def test_an_untied_head_that_the_files_lack_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(RunFailed, match=r"lack 1 of its tensors, which get initial values: lm_head\.weight"):
        load_policy(str(path))
    load_critic(str(path))  # has no such head


def test_buffers_that_earlier_checkpoints_lack_get_initial_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_model(FAMILIES["DeepSeek-V3"](), seed=0).save_pretrained(tmp_path)
    biases = [key for key in load_file(tmp_path / "model.safetensors") if key.endswith("e_score_correction_bias")]
    _with(tmp_path, lambda tensors: [tensors.pop(key) for key in biases])
    with caplog.at_level(logging.WARNING, "streamrl"):
        load_policy(str(tmp_path))
    assert biases and biases[0] in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_lacks_nothing(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_model(FAMILIES[family](), seed=0).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "streamrl"):
        load_policy(str(tmp_path))
        load_critic(str(tmp_path))
    assert "of its tensors" not in caplog.text
