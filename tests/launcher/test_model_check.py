"""Models that cannot be trained, and critics that do not fit the policy, are found before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import CRITIC_KEY, RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher import preflight
from streamrl.launcher.model_check import (
    POSITIONS_BY_FAMILY,
    check_critic,
    check_heads,
    check_model,
    critic_warnings,
)
from streamrl.training.critic import load_critic
from streamrl.training.policy_model import load_policy
from tests.tiny_model import save_tiny_model

LETTERS = {letter: number for number, letter in enumerate("abcdefgh")}
SHAPE = {"vocab_size": 12, "max_position_embeddings": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}


def cluster(hardware: str = "cpu", tensor_parallel: int = 1, **pool: Any) -> ClusterConfig:
    trainer = {"ranks": tensor_parallel, "tensor_parallel": tensor_parallel}
    site = {"trainer": trainer, "generation": [{"replicas": 2, **pool}]}
    return ClusterConfig.model_validate({"hardware": hardware, "sites": {"here": site}})


def model(folder: Path, vocabulary: Any = None, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    added = [{"id": len(LETTERS), "content": "<end>"}]
    tokenizer = {"model": {"vocab": LETTERS if vocabulary is None else vocabulary}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()
    return str(folder)


def of_model(path: str) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": path}})


def with_critic(folder: Path, vocabulary: Any = None, **config: Any) -> RunConfig:
    critic = {"path": model(folder / "critic", vocabulary, **(SHAPE | config))}
    policy = {"path": model(folder / "policy", **SHAPE)}
    return RunConfig.model_validate({"model": policy, "algorithm": {"name": "ppo", "critic": critic}})


def test_a_context_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    run = of_model(model(tmp_path / "m", max_position_embeddings=512))
    assert "has 512 positions, 1024 are asked for" in "".join(check_model(run))
    run = of_model(model(tmp_path / "m", text_config={"max_position_embeddings": 1023}))
    assert "has 1023 positions" in "".join(check_model(run))
    for config in ({"max_position_embeddings": 1024}, {"n_positions": 7}, {"quantization_config": None}):
        assert list(check_model(of_model(model(tmp_path / "m", **config)))) == []


@pytest.mark.parametrize(("family", "key"), POSITIONS_BY_FAMILY.items())
def test_positions_are_found_by_the_name_that_a_family_gives_them(tmp_path: Path, family: str, key: str) -> None:
    values = {"model_type": family, key: 20}
    assert "has 20 positions, 1024 are asked for" in "".join(check_model(of_model(model(tmp_path / "m", **values))))
    (problem,) = check_critic(cluster(), with_critic(tmp_path, **values, max_position_embeddings=None))
    assert problem.startswith("model.max_context: the critic ") and "has 20 positions" in problem


def test_the_names_of_positions_are_those_of_transformers() -> None:
    families = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}
    maps = {name: CONFIG_MAPPING[name].attribute_map or {} for name in families | set(POSITIONS_BY_FAMILY)}
    named = {name: one["max_position_embeddings"] for name, one in maps.items() if "max_position_embeddings" in one}
    assert named == POSITIONS_BY_FAMILY


def test_heads_that_cannot_be_shared_out_are_told(tmp_path: Path) -> None:
    run = of_model(model(tmp_path / "m", num_attention_heads=8, num_key_value_heads=2))
    assert list(check_heads(cluster(gpus_per_replica=8), run)) == []
    wide = of_model(model(tmp_path / "wide", num_attention_heads=40, num_key_value_heads=10))
    assert list(check_heads(cluster(gpus_per_replica=2), wide)) == []
    assert list(check_heads(cluster(gpus_per_replica=4), wide)) == [
        f"sites.here.generation (regular).gpus_per_replica is 4: expected a divisor or a multiple of the 10 key-value "
        f"heads of {wide.model.path}"
    ]
    by_layer = of_model(model(tmp_path / "layers", num_attention_heads=8, num_key_value_heads=[2, 4]))
    assert list(check_heads(cluster(gpus_per_replica=8), by_layer)) == []
    assert list(check_heads(cluster(tensor_parallel=4, gpus_per_replica=3), run)) == [
        f"sites.here.generation (regular).gpus_per_replica is 3: expected a divisor of the 8 attention heads of "
        f"{run.model.path}",
        f"sites.here.trainer.tensor_parallel is 4: expected a divisor of the 2 key-value heads of {run.model.path}",
    ]


def test_inner_units_that_the_trainer_cannot_split_are_told(tmp_path: Path) -> None:
    run = of_model(model(tmp_path / "m", **SHAPE, intermediate_size=97))
    assert list(check_heads(cluster(), run)) == []
    assert list(check_heads(cluster(tensor_parallel=2), run)) == [
        "sites.here.trainer.tensor_parallel is 2: expected a divisor of the 97 inner units (intermediate_size) of "
        f"{run.model.path}"
    ]
    (problem,) = check_critic(cluster(tensor_parallel=2), with_critic(tmp_path, intermediate_size=97))
    assert "expected a divisor of the 97 inner units" in problem
    for config in ({"intermediate_size": 96}, {"intermediate_size": 97, "num_experts": 8}):
        whole = of_model(model(tmp_path / "m", **SHAPE, **config))
        assert list(check_heads(cluster(tensor_parallel=2), whole)) == []


@pytest.mark.parametrize("kind", ["awq", "gptq", "bitsandbytes", "fp8", "mxfp4"])
def test_quantized_weights_are_refused(tmp_path: Path, kind: str) -> None:
    run = of_model(model(tmp_path / "m", quantization_config={"quant_method": kind}))
    (problem,) = check_model(run)
    needed = f"is quantized ({kind}): the trainer needs full weights; use the unquantized model"
    assert problem == f"model.path: {run.model.path} {needed}"
    run = with_critic(tmp_path, quantization_config={"quant_method": kind})
    found = [*check_critic(cluster("cuda"), run), *check_critic(cluster("cpu"), run)]
    assert len(found) == (1 if kind in ("fp8", "mxfp4") else 2), "on CPUs transformers loads these as full weights"
    assert set(found) == {f"algorithm.critic.path: {run.critic_path} {needed}"}


def test_a_critic_that_does_not_fit_the_policy_is_told(tmp_path: Path) -> None:
    run = with_critic(tmp_path)
    named = f"algorithm.critic.path: {run.critic_path}"
    assert [*check_critic(cluster(tensor_parallel=2), run), *critic_warnings(run)] == []

    (problem,) = check_critic(cluster(), with_critic(tmp_path, max_position_embeddings=512))
    assert problem.startswith(f"model.max_context: the critic {run.critic_path} has 512 positions, 1024 are asked for")
    (problem,) = check_critic(cluster(), with_critic(tmp_path, vocab_size=8))
    assert problem == f"{named} knows 8 tokens, and the tokenizer of {run.model.path} has 9"
    turned = {letter: 7 - number for letter, number in LETTERS.items()}
    for vocabulary in (turned, [[letter, -1.0] for letter in reversed(LETTERS)]):
        (problem,) = check_critic(cluster(), with_critic(tmp_path, vocabulary))
        assert problem == f"{named} has another tokenizer than {run.model.path}: 8 of 8 tokens have other numbers"
    (problem,) = check_critic(cluster(tensor_parallel=2), with_critic(tmp_path, num_key_value_heads=3))
    assert problem.startswith("sites.here.trainer.tensor_parallel is 2: expected a divisor of the 3 key-value heads of")

    longer = with_critic(tmp_path, LETTERS | {"i": 9}, vocab_size=9)
    assert list(check_critic(cluster(), longer)) == [], "a relative with more tokens, or fewer rows of padding"
    (warning,) = critic_warnings(longer)
    assert warning.startswith(f"{named} has 9 rows of tokens, and {run.model.path} 12: a token beyond")


def test_a_reward_model_as_critic_is_told_that_its_head_is_left_out(tmp_path: Path) -> None:
    run = with_critic(tmp_path, architectures=["LlamaForSequenceClassification"])
    (warning,) = critic_warnings(run)
    assert warning.startswith(f"algorithm.critic.path: {run.critic_path} is a reward model or classifier (Llama")
    for names in (["LlamaForCausalLM"], None):
        assert list(critic_warnings(with_critic(tmp_path, architectures=names))) == []


def test_a_critic_that_is_not_there_or_broken_is_named_by_its_key(tmp_path: Path) -> None:
    key = "algorithm.critic.path"
    values = with_critic(tmp_path, model_type="no_such_family").model_dump()
    values["model"]["max_context"], values["sampling"]["max_tokens"] = 256, 8
    odd = RunConfig.model_validate(values)
    policy, critic = odd.model.path, odd.critic_path
    assert critic is not None
    save_tiny_model(Path(policy))

    def problem() -> str:
        (told,) = preflight.check_packing(odd)
        return told

    assert problem().startswith(f"{key}: ") and f"transformers cannot read {critic}" in problem()
    config = Path(critic, "config.json")
    for content, wrong in ((b"[]", "config.json holds no object"), (bytes(range(256)), "config.json cannot be read")):
        config.write_bytes(content)
        assert problem().startswith(f"{key}: {critic} is no model folder in HF format: {wrong}")
        warnings = preflight.check_files(cluster(), odd)
        assert [one for one in warnings if one.startswith(f"on this machine: {key}: {critic} is no model folder")]
    shutil.rmtree(critic)
    assert problem().startswith(f"{key}: {critic} is neither a folder, nor a hub id (owner/name), nor one of: ")


def test_damaged_weights_are_named_by_their_key(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path))
    Path(folder, "model.safetensors").write_bytes(bytes(range(256)))
    with pytest.raises(RunFailed, match=rf"^model\.path: the weights of {folder} cannot be read: "):
        load_policy(folder)
    with pytest.raises(RunFailed, match=r"^algorithm\.critic\.path: the weights of .*\(see docs: E1002\)$"):
        load_critic(folder, key=CRITIC_KEY)


def test_special_tokens_of_other_names_are_no_other_tokenizer(tmp_path: Path) -> None:
    renamed = {("<pad>" if letter == "h" else letter): number for letter, number in LETTERS.items()}
    run = with_critic(tmp_path, renamed)
    assert len(list(check_critic(cluster(), run))) == 1
    for name in ("policy", "critic"):
        file = tmp_path / name / "tokenizer.json"
        values = json.loads(file.read_text())
        file.write_text(json.dumps(values | {"added_tokens": [*values["added_tokens"], {"id": 7, "content": "x"}]}))
    assert list(check_critic(cluster(), run)) == []


def test_a_critic_that_begins_as_the_policy_does_has_nothing_to_check(tmp_path: Path) -> None:
    path = model(tmp_path / "m", max_position_embeddings=8)
    for critic in ({}, {"path": path}):
        run = RunConfig.model_validate({"model": {"path": path}, "algorithm": {"name": "ppo", "critic": critic}})
        assert [*check_critic(cluster(), run), *critic_warnings(run)] == []


def test_a_run_that_began_with_such_a_critic_goes_on_with_a_warning(tmp_path: Path) -> None:
    policy, critic = (save_tiny_model(tmp_path / name) for name in ("policy", "critic"))
    config = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    values = {"model": {"path": str(policy), "max_context": 256}, "sampling": {"max_tokens": 8}}
    run = RunConfig.model_validate({**values, "algorithm": {"name": "ppo", "critic": {"path": str(critic)}}})
    with pytest.raises(UserError, match=r"the critic \S+ has 128 positions, 256 are asked for"):
        preflight.check(cluster(), run, tmp_path)
    warnings = preflight.check(cluster(), run, tmp_path, resumed=tmp_path)
    assert any("has 128 positions" in warning for warning in warnings)
