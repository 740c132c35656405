"""What an architecture does with its logits is read from its configuration, and proven on the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.errors import RunFailed
from streamrl.training import policy_model, token_logprobs
from streamrl.training.output_head import logit_transform, prove_head
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy
from streamrl.training.token_logprobs import LogitTransform, TokenDistribution
from tests.training.conftest import random_groups, relative_error
from tests.training.test_packing import separate_logprobs

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25},
    "Phi": {},
}
"""Architectures with what their configuration says of logits; Phi's head has a bias."""
TRANSFORMS = {
    "Gemma2": LogitTransform(softcap=5.0),
    "Granite": LogitTransform(scale=0.125),
    "Cohere": LogitTransform(scale=0.25),
    "Cohere2": LogitTransform(scale=0.25),
}


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A random model whose logits are far from uniform; a bias of its head, too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "attn_implementation": "eager",
        }
        | FAMILIES.get(family, {})
        | changes
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        torch.nn.init.normal_(head.bias)
    return model.float()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_computes_what_the_model_does(family: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(token_logprobs, "KEPT_BYTES", 0)
    model = tiny(family)
    transform = logit_transform(model.config)
    assert transform == TRANSFORMS.get(family, LogitTransform())
    prove_head(model, transform)

    ids = torch.randint(3, 320, (1, 40))
    hidden, head = model.base_model(input_ids=ids).last_hidden_state[0, :-1], model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    assert (bias is not None) == (family == "Phi")
    targets, upstream = ids[0, 1:], torch.randn(39)
    ours = token_logprobs.token_logprobs(hidden, head.weight, bias, targets, TokenDistribution(transform, 0.8))
    (ours.logprobs * upstream).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    every = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.8, -1)
    theirs = every.gather(-1, targets[:, None])[:, 0]
    (theirs * upstream).sum().backward()
    torch.testing.assert_close(ours.logprobs, theirs, rtol=1e-5, atol=1e-5)
    entropy = -(every.exp() * every).sum(-1)[token_logprobs.measured_tokens(targets)]
    torch.testing.assert_close(ours.entropy, entropy, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 1e-5, name


@pytest.mark.parametrize("family", ["Granite", "Cohere", "Phi"])
def test_a_packed_policy_has_the_models_log_probabilities(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    groups = random_groups(2)
    with torch.no_grad():
        expected = separate_logprobs(model, groups, 1.0)
        found = load_policy(str(tmp_path))(pack(groups), 1.0).logprobs
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("Gemma2", LogitTransform()),
        ("Gemma2", LogitTransform(softcap=5.01)),
        ("Granite", LogitTransform()),
        ("Cohere", LogitTransform(scale=4.0)),
        ("Llama", LogitTransform(softcap=1000.0)),
        ("FalconH1", LogitTransform()),
    ],
)
def test_a_head_that_would_compute_another_model_is_refused_by_name(family: str, wrong: LogitTransform) -> None:
    changes = {"lm_head_multiplier": 0.5} if family == "FalconH1" else {}
    with pytest.raises(RunFailed, match=f"what {family}ForCausalLM does with its logits.* not known"):
        prove_head(tiny(family, **changes), wrong)


def test_a_forgotten_bias_is_found() -> None:
    model = tiny("Phi")
    head = model.get_output_embeddings()
    bias, head.bias = head.bias, None
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight, bias)
    with pytest.raises(RunFailed, match="PhiForCausalLM"):
        prove_head(model, LogitTransform())


def test_the_head_of_a_model_that_passes_its_trunk_by_is_proven_and_its_trunk_left_as_it_was() -> None:
    model = tiny("OPT", ffn_dim=96, word_embed_proj_dim=64)
    trunk, decoder = model.base_model, model.get_decoder()
    prove_head(model, LogitTransform())
    assert trunk is not decoder and "forward" not in vars(trunk) | vars(decoder)
    with pytest.raises(RunFailed, match="what OPTForCausalLM does"):
        prove_head(model, LogitTransform(scale=0.5))


def test_nan_in_the_weights_is_not_blamed_on_the_architecture() -> None:
    model = tiny("Llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 1] = float("nan")
    with pytest.raises(RunFailed, match="the weight of LlamaForCausalLM's output projection is not finite"):
        prove_head(model, LogitTransform())


def test_a_policy_is_not_loaded_unless_its_head_is_proven(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "logit_transform", lambda config: LogitTransform(scale=1.01))
    with pytest.raises(RunFailed, match=r"model\.path: what LlamaForCausalLM"):
        load_policy(str(tiny_model))
