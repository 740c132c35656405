"""Every family's packing is proven or refused, and `batch.packing` is decided by that."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2AudioConfig,
    Qwen2Config,
    Qwen2VLConfig,
)

from streamrl.errors import UserError
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.training import merged_attention, packing_choice, packing_proof, policy_model
from streamrl.training.attention import OWN_ROWS
from streamrl.training.packing_choice import choose_packing
from streamrl.training.packing_choice import packing_proof as proof_of
from streamrl.training.packing_proof import (
    LOGPROB_BOUND,
    MOST_LAYERS,
    TEMPERATURE,
    proof_groups,
    prove,
    small_model,
)
from streamrl.training.packing_ways import PackingProof, PackingWay
from streamrl.training.policy_model import load_policy
from streamrl.training.small_config import kept_layers, small_config
from streamrl.training.token_logprobs import LogitTransform
from streamrl.verify.families import FAMILIES
from tests.tiny_model import save_tiny_model

SEPARATE = {"Qwen3-Next"}
"""Families with layers that packed rows cannot serve."""
OWN_ATTENTION = (
    "bloom",
    "codegen",
    "falcon",
    "gpt_neo",
    "gpt_neox_japanese",
    "gptj",
    "llama4_text",
    "mpt",
    "openai-gpt",
    "xglm",
)
"""Families (transformers' names) whose attention does not leave to transformers' interface what a token sees."""
WITH_SDPA = {"falcon", "llama4_text"}
"""Those of them that have it by torch's own attention."""
EAGER = {"Gemma 2", "gpt-oss"}
"""Families whose soft caps or sinks transformers' sdpa leaves out."""


@functools.cache
def proof_of_family(family: str) -> PackingProof:
    return prove(FAMILIES[family]())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_as_lone_sequences_are(family: str) -> None:
    proof = proof_of_family(family)
    assert not proof.unproven and not proof.refuted
    wrong = {(way.kind, way.attention): way.differs for way in proof.ways if way.differs}
    packed = {way for way in packing_proof.WAYS if way[1] not in ("sdpa", "eager")}
    expected = packed if family in SEPARATE else set()
    expected |= {("separate", "sdpa")} if family in EAGER else set()
    assert set(wrong) == expected, wrong
    choice = choose_packing("auto", proof, 512)
    assert choice.kind == ("separate" if family in SEPARATE else "shared")
    separate = choose_packing("separate", proof, 512)
    assert separate.attention == ("sdpa" if family in SEPARATE else OWN_ROWS) and "set by hand" in separate.why
    assert bool(choice.undivided) == (family in SEPARATE), choice.undivided
    assert bool(separate.undivided) == (family in SEPARATE), separate.undivided


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_a_family_with_its_own_attention_is_loaded_as_it_was_proven(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = packing_proof._reference
    proven: list[tuple[PreTrainedModel, packing_proof._Reference]] = []

    def kept(model: PreTrainedModel, groups: Sequence[TrainGroup]) -> packing_proof._Reference:
        proven.append((model, plain(model, groups)))
        return proven[0][1]

    monkeypatch.setattr(packing_proof, "_reference", kept)
    packing = choose_packing("auto", prove(AutoConfig.for_model(kind)), 64)
    assert packing.kind == "separate" and packing.attention == ("sdpa" if kind in WITH_SDPA else "eager"), packing
    assert f"tokens of {kind} meet outside of what attention decides" in packing.undivided
    [(model, alone)] = proven
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logprobs = load_policy(str(tmp_path), attention=packing.attention)(alone.batch, TEMPERATURE)[0]
    assert (logprobs - alone.logprobs).abs().max() <= LOGPROB_BOUND


def test_the_layer_type_that_a_packed_row_cannot_serve_is_named() -> None:
    proof = proof_of_family("Qwen3-Next")
    assert r"layer 0 (linear_attention, Qwen3NextDecoderLayer) differs" in choose_packing("auto", proof, 512).why
    with pytest.raises(UserError, match=r"batch.packing: shared is wrong for qwen3_next: layer 0 \(linear_attention"):
        choose_packing("shared", proof, 512)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    proof = prove(Gemma3TextConfig(use_bidirectional_attention=True))
    assert "no causal language model: later tokens change a log-probability by" in proof.refuted
    with pytest.raises(UserError, match="gemma3_text cannot be trained"):
        choose_packing("separate", proof, 512)


@pytest.mark.parametrize("vocabulary", [4, 8, 249])
def test_a_small_vocabulary_is_proven_too(vocabulary: int) -> None:
    sizes = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
    assert choose_packing("auto", prove(LlamaConfig(**sizes)), 512).kind == "shared"
    groups = proof_groups(vocabulary)
    tokens = np.concatenate([one.completion_tokens for group in groups for one in group.sequences])
    assert len(set(tokens)) > 2 and tokens.max() < vocabulary


@pytest.mark.parametrize("vocabulary", [8, 50])  # 100 tokens on is the same token in one of 50
def test_a_model_of_a_small_vocabulary_that_sees_later_tokens_is_refused(vocabulary: int) -> None:
    proof = prove(Gemma3TextConfig(vocab_size=vocabulary, use_bidirectional_attention=True))
    assert "no causal language model: later tokens change a log-probability by" in proof.refuted


def test_small_models_have_what_is_learned_besides_weights_and_the_same_for_all_seeds() -> None:
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    first, second = (small_model(AutoConfig.for_model("deepseek_v3"), seed).state_dict() for seed in (0, 1))
    assert len(first[bias].unique()) == len(first[bias]) > 1 and torch.equal(first[bias], second[bias])
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    apertus = small_model(AutoConfig.for_model("apertus")).state_dict()  # constants that are no start stay as they are
    assert float(apertus["model.layers.0.mlp.act_fn.beta"]) == 0.5


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_hidden_layers": 0}, "its configuration has 0 layers"),
        ({"num_hidden_layers": -1}, "its configuration has -1 layers"),
        ({"vocab_size": 1}, "no weight of its small model changes any log-probability"),
        ({"hidden_size": 0, "head_dim": 32}, "no weight of its small model changes any log-probability"),
    ],
)
def test_a_model_in_which_nothing_can_be_learned_is_refused(values: dict[str, int], reason: str) -> None:
    proof = prove(LlamaConfig(**values))
    assert proof.refuted == reason
    with pytest.raises(UserError, match=f"llama cannot be trained: {reason}"):
        choose_packing("separate", proof, 512)


def test_a_model_with_fewer_learned_positions_than_the_proof_has_tokens_is_proven() -> None:
    proof = prove(GPT2Config(n_positions=20))
    assert choose_packing("auto", proof, 20).kind == "shared"
    assert small_config(GPT2Config(n_positions=128)).n_positions == 128


@pytest.mark.parametrize("config", [Qwen2VLConfig, Qwen2AudioConfig])
def test_a_model_that_reads_more_than_text_is_refused(config: type[PretrainedConfig]) -> None:
    with pytest.raises(UserError, match=r"cannot be trained: it reads more than text \((vision|audio)_config\)"):
        choose_packing("auto", prove(config()), 512)


@pytest.mark.parametrize(("kind", "what"), [("fuyu", "images"), ("moshi", "sound"), ("gemma4", "images")])
def test_a_model_that_reads_more_than_text_by_its_type_is_refused(kind: str, what: str) -> None:
    proof = prove(AutoConfig.for_model(kind))  # its configuration has no part that says so
    assert proof.refuted == f"it reads more than text ({what}): expected a text model, such as its family's"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bart", "it is an encoder-decoder"),
        ("t5", "it is an encoder-decoder"),
        ("albert", "transformers has no causal language model of this kind"),
    ],
)
def test_what_has_no_decoder_alone_is_refused_without_advice(kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"{kind} cannot be trained: {reason}"):
        choose_packing("separate", prove(AutoConfig.for_model(kind)), 64)


def test_a_model_whose_forward_pass_changes_its_weights_is_refused() -> None:
    proof = prove(AutoConfig.for_model("rwkv"))  # halves those of layers after the sixth
    assert proof.refuted == "computing changes its weights themselves (rwkv.blocks.1.attention.output.weight)"
    assert not prove(AutoConfig.for_model("rwkv", rescale_every=0)).refuted


def test_what_nothing_proves_is_refused_with_what_differs() -> None:
    wrong = PackingWay("separate", "eager", 1.0, 1.0, "layer 0 (odd_attention, OddLayer) differs by 9%")
    proof = PackingProof("odd", (PackingWay("shared", "s", 2.0, 2.0, "layer 0 differs"), wrong))
    with pytest.raises(UserError, match=r"odd cannot be trained: with its own attention, layer 0 \(odd_attention"):
        choose_packing("auto", proof, 512)
    unproven = PackingProof("odd", (), unproven="cannot be built and run small: no head")
    with pytest.raises(UserError, match="nothing is proven for odd, because its architecture cannot be built"):
        choose_packing("auto", unproven, 512)
    by_hand = choose_packing("separate", unproven, 512)
    assert by_hand.attention == "eager" and by_hand.undivided == "nothing is proven for odd"


def test_rotations_that_depend_on_the_longest_row_bound_the_context() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    config = Phi3Config(original_max_position_embeddings=4096, max_position_embeddings=131072, rope_parameters=rope)
    proof = prove(config)
    assert proof.longest == 4096 and not proof.unproven
    assert choose_packing("auto", proof, 4096).kind == "shared"
    with pytest.raises(UserError, match=r"model.max_context: 8192 is more than the 4096 tokens"):
        choose_packing("auto", proof, 8192)


def test_a_small_model_has_every_kind_of_layer_and_windows_that_bite() -> None:
    config = Qwen2Config(num_hidden_layers=9, use_sliding_window=True, max_window_layers=3, sliding_window=4096)
    small = small_config(config)
    assert small.layer_types == ["full_attention"] * 3 + ["sliding_attention"]
    assert small.num_hidden_layers == 4 and small.sliding_window == 7
    assert small_config(AutoConfig.for_model("deepseek_v32")).index_topk == 7  # tokens that its attention sees
    assert small_config(AutoConfig.for_model("llama4_text")).floor_scale == 8  # positions from which it scales queries
    assert kept_layers({"num_hidden_layers": 61, "first_k_dense_replace": 3}) == 4
    assert kept_layers({"num_hidden_layers": 32, "attn_layer_period": 8}) == 8
    listed = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    assert kept_layers(listed | {"decoder_sparse_step": 3}) == 3  # a list of one thing says nothing of another
    assert kept_layers({"num_hidden_layers": 1}) == 1
    assert small_config(LlamaConfig(num_attention_heads=32, num_key_value_heads=32)).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("kind", "values", "own"), [("gemma3n_text", {}, 15), ("gemma4_text", {"num_kv_shared_layers": 18}, 6)]
)
def test_a_small_model_has_layers_that_take_the_keys_of_others(kind: str, values: dict[str, int], own: int) -> None:
    small = small_config(AutoConfig.for_model(kind, **values))
    shared = small.num_kv_shared_layers
    assert small.num_hidden_layers - shared == own and shared < 15
    assert set(small.layer_types[-shared:]) == set(small.layer_types[:own]) == {"full_attention", "sliding_attention"}


@pytest.mark.parametrize(
    ("kind", "values", "own"),
    [("gemma3n_text", {"activation_sparsity_pattern": [0.95] * 2 + [0.0] * 8}, 4), ("gemma4_text", {}, 2)],
)
def test_layers_that_take_the_keys_of_others_are_proven(kind: str, values: dict[str, list[float]], own: int) -> None:
    types = ["sliding_attention", "full_attention"] * 5
    config = AutoConfig.for_model(kind, num_hidden_layers=10, layer_types=types, num_kv_shared_layers=4, **values)
    small = small_config(config)
    assert (small.num_hidden_layers, small.num_kv_shared_layers) == (own + 2, 2)
    proof = prove(config)
    assert not proof.unproven and not proof.refuted
    assert not next(way.differs for way in proof.ways if way.attention == "eager")


@pytest.mark.parametrize(
    ("kind", "values", "layers"),
    [
        ("ernie4_5_moe", {"moe_layer_start_index": 3}, 4),
        ("afmoe", {"num_dense_layers": 6}, 8),  # the first two with experts have different attention
        ("qwen2_moe", {"decoder_sparse_step": 3}, 3),
        ("deepseek_v3", {"first_k_dense_replace": 3}, 4),
        ("llama4_text", {"interleave_moe_layer_step": 1}, 4),  # which layers have experts is a list of all numbers
        ("llama4_text", {"interleave_moe_layer_step": 2}, 4),
    ],
)
def test_a_small_model_has_the_experts_that_come_after_dense_layers(
    kind: str, values: dict[str, int], layers: int
) -> None:
    model = small_model(AutoConfig.for_model(kind, **values))
    assert model.config.num_hidden_layers == layers
    assert any(".experts." in name for name, _ in model.named_parameters())


def test_not_all_of_many_layers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_proof, "MOST_LAYERS", 8)
    plain, seen = packing_proof._layer_kinds, []

    def kinds(model: PreTrainedModel) -> list[str]:
        seen.append(model.config.num_hidden_layers)
        return plain(model)

    monkeypatch.setattr(packing_proof, "_layer_kinds", kinds)
    assert small_model(LlamaConfig(num_hidden_layers=1000)).config.num_hidden_layers == 2
    assert max(seen) == 8


def test_a_small_model_that_lacks_a_kind_of_layer_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = packing_proof.small_config
    monkeypatch.setattr(
        packing_proof, "small_config", lambda config, least=2: own(config, least if least == MOST_LAYERS else 2)
    )
    proof = prove(AutoConfig.for_model("ernie4_5_moe", moe_layer_start_index=3))
    assert proof.unproven.endswith("its small model has no layer of the kind of layer 3 of 28")


@pytest.mark.parametrize(("kind", "values"), [("bamba", {}), ("zamba2", {}), ("lfm2", {"full_attn_idxs": [2, 5, 8]})])
def test_recurrent_layers_and_convolutions_get_rows_of_their_own(kind: str, values: dict[str, object]) -> None:
    config = AutoConfig.for_model(kind, **values)
    proof = prove(config)
    choice = choose_packing("auto", proof, 512)
    assert choice.kind == "separate" and f"shared is wrong for {kind}: layer 0 (" in choice.why
    assert f"tokens of {kind} meet outside of what attention decides: layer 0 (" in choice.undivided


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        ("gpt2", "shared"),
        ("gpt_neox", "shared"),
        ("gemma4_text", "shared"),
        ("stablelm", "separate"),
    ],
)
def test_sizes_under_names_of_the_family_are_found(kind: str, packing: str) -> None:
    choice = choose_packing("auto", prove(AutoConfig.for_model(kind)), 512)
    assert choice.kind == packing, choice
    if kind == "stablelm":
        assert "StableLmAttention is not told of the packed row's layout" in choice.why


@pytest.mark.parametrize(
    ("values", "heads", "groups"),
    [
        ({"num_kv_heads": 71}, 4, 4),  # 7B
        ({"num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8, "new_decoder_architecture": True}, 4, 2),
        ({"num_attention_heads": 32, "hidden_size": 2048, "alibi": True, "multi_query": False}, 4, 4),  # RW
    ],
)
def test_every_falcon_is_proven_with_sizes_that_fit_each_other(
    values: dict[str, object], heads: int, groups: int
) -> None:
    config = AutoConfig.for_model("falcon", **values)
    small = small_config(config)
    assert (small.hidden_size, small.ffn_hidden_size) == (heads * 32, 4 * heads * 32)
    assert (small.num_attention_heads, small.num_kv_heads) == (heads, groups)
    assert not hasattr(small, "num_key_value_heads")
    assert choose_packing("auto", prove(config), 64).kind == "separate"


def test_sizes_that_follow_from_the_hidden_size_follow_that_of_the_small_model() -> None:
    widths = {"conv_dim": 2560, "conv_dim_out": 2560, "block_dim": 2560}
    lfm2 = small_config(AutoConfig.for_model("lfm2", full_attn_idxs=[2, 5, 8], **widths))
    assert {lfm2.conv_dim, lfm2.conv_dim_out, lfm2.block_dim, lfm2.hidden_size} == {128}
    zamba2 = small_config(AutoConfig.for_model("zamba2"))
    assert zamba2.attention_hidden_size == 256 == zamba2.attention_head_dim * zamba2.num_attention_heads


def test_a_proof_is_made_once_for_an_architecture_and_this_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing_choice, "library_name", lambda source: source.stem)  # no kernel is compiled for it
    model = save_tiny_model(tmp_path / "model")
    first = proof_of(model)
    assert first is not None and {way.kind for way in first.ways} == {"shared", "separate"}

    def never(folder: Path) -> str:
        raise AssertionError(f"{folder} is proven again")

    monkeypatch.setattr(packing_choice, "_prove_here", never)
    assert proof_of(model) == first
    monkeypatch.setattr(packing_choice, "code_hash", lambda package: f"another {package.name}")
    with pytest.raises(AssertionError, match="proven again"):
        proof_of(model)


def test_a_proof_is_made_again_for_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    model = save_tiny_model(tmp_path / "model")
    made: list[str] = []

    def prove_here(folder: Path) -> str:
        made.append(folder.name)
        return json.dumps(asdict(PackingProof("llama", (), unproven="is not run here")))

    monkeypatch.setattr(packing_choice, "_prove_here", prove_here)
    for library in ("group-attention-1.so", "group-attention-2.so", "none", "none"):
        monkeypatch.setattr(packing_choice, "library_name", lambda source, name=library: f"{source.stem} {name}")
        proof_of(model)
    assert len(made) == 3


def test_a_proof_in_which_a_way_could_not_run_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing_choice, "library_name", lambda source: source.stem)  # no kernel is compiled for it
    model = save_tiny_model(tmp_path / "model")
    proof = PackingProof("gpt_oss", (PackingWay("separate", "sdpa", differs="sdpa has no attention sinks"),))
    texts = [json.dumps(asdict(proof))]
    monkeypatch.setattr(packing_choice, "_prove_here", lambda folder: texts.pop())
    assert proof_of(model) == proof == proof_of(model)


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: v.sum() + 0 * q)
    monkeypatch.setattr(merged_attention, "_share", lambda lse, total: torch.ones_like(lse).T[..., None])
    proof = prove(FAMILIES["Llama"]())
    wrong = {way.attention for way in proof.ways if way.differs}
    assert wrong == {"streamrl_shared_prefix_long", "sdpa"}  # short rows of their own are computed by products
    assert "layer 0 (LlamaDecoderLayer) differs" in next(way.differs for way in proof.ways if way.differs)


def test_a_head_that_differs_after_layers_that_agree_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "logit_transform", lambda config: LogitTransform(scale=2.0))
    ways = prove(FAMILIES["Llama"]()).ways
    assert all(way.differs.startswith("all layers agree, the output head differs; log-prob") for way in ways)


def test_the_scale_of_latent_attention_shrinks_with_its_heads() -> None:
    small = small_config(FAMILIES["DeepSeek-V3"]()).to_dict()
    assert small["qk_head_dim"] == small["qk_nope_head_dim"] + small["qk_rope_head_dim"] == 96
