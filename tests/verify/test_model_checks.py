"""What the checks of a tokenizer and of a generator conclude from what they saw."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import (
    AutoTokenizer,
    CohereConfig,
    Ernie4_5_MoeConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from streamrl.errors import UserError
from streamrl.machine.model_files import end_tokens, read_tokenizer
from streamrl.tasks.chat_template import ChatTemplate
from streamrl.training.packing_choice import Packing, packing_proof
from streamrl.training.packing_ways import PackingProof, PackingWay
from streamrl.verify import generator_checks as generator
from streamrl.verify import training_checks
from streamrl.verify.findings import Finding, reasons_against, table_of
from streamrl.verify.generator_order import AGAINST, BETWEEN_TOKENS, VERSION, Order
from streamrl.verify.model_checks import check_heads, verify
from streamrl.verify.small_folder import save_small_models
from streamrl.verify.tokenizer_checks import check_stops, check_template, check_tokenizer, check_vocabulary
from streamrl.verify.training_checks import check_packing, check_settings
from tests.tiny_model import save_tiny_model

APPENDS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)
APPENDS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
FORGETS = APPENDS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
"""Drops the reasoning of earlier turns."""
OWN = Packing("shared", "streamrl_shared_prefix", "proven")
ORDER = Order(("first", "second"), OWN.attention, "folder")


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "model"))
    return made


def test_a_template_that_rewrites_history_is_refused_and_shows_where(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = APPENDS
    assert check_template(ChatTemplate(tokenizer)).verdict == "works"
    tokenizer.chat_template = FORGETS
    found = check_template(ChatTemplate(tokenizer))
    assert found.verdict == "refused"
    assert "the template rewrites history: '<think>" in found.reason and "in the next turn" in found.reason
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"
    assert "the chat template fails: only one turn" in check_template(ChatTemplate(tokenizer)).reason


def test_the_chat_template_is_checked_with_its_variables(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% if enable_thinking %}" + APPENDS + "{% else %}" + FORGETS + "{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(eos_token_id=257).save_pretrained(tmp_path)
    verdicts = {
        thinking: check_tokenizer(tmp_path, 320, {"enable_thinking": thinking})[0].verdict for thinking in (True, False)
    }
    assert verdicts == {True: "works", False: "refused"}
    found = check_tokenizer(tmp_path, 320, {"enable_thinkin": True})[0]
    assert found.verdict == "refused" and "did you mean enable_thinking?" in found.reason


def test_an_answer_has_to_end_with_a_token_at_which_the_generator_stops(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = APPENDS
    assert check_stops(tokenizer, [257]) == Finding("stop tokens", "works", "an answer ends with <|end|> (257)")
    assert check_stops(tokenizer, [256]).verdict == "refused"
    assert check_stops(tokenizer, []).verdict == "refused"


def test_the_end_tokens_may_be_in_the_config_alone(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = APPENDS.replace("<|end|>", "<|user|>")
    tokenizer.save_pretrained(tmp_path)
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert check_tokenizer(tmp_path, 320)[1].verdict == "refused"
    LlamaConfig(eos_token_id=[257, user]).save_pretrained(tmp_path)
    assert check_tokenizer(tmp_path, 320)[1].reason == f"an answer ends with <|end|> (257), <|user|> ({user})"
    GenerationConfig(eos_token_id=257).save_pretrained(tmp_path)
    assert check_tokenizer(tmp_path, 320)[1].verdict == "refused"


def test_end_tokens_that_only_the_model_s_own_code_can_read_are_not_checked(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = APPENDS
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "strange", "auto_map": {"AutoConfig": "configuration_strange.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(prompt))
    template, stops, vocabulary = check_tokenizer(tmp_path, 320)
    assert (template.verdict, stops.verdict, vocabulary.verdict) == ("works", "not checked", "works")
    assert stops.reason.startswith("transformers cannot read the model's end tokens: ")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"]}, r"\(4\) must be equal to the number of"),
        ({"hidden_size": 96.0}, "expected int, got float"),
        ({"num_hidden_layers": None}, "'num_hidden_layers': TypeError: Field 'num_hidden_layers' expected int"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' with value '</s>'"),
        ({"dtype": "float13"}, "no attribute 'float13'"),
    ],
)
def test_a_configuration_that_transformers_refuses_is_told_in_words(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, values: dict[str, object], said: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | values))
    for check in (lambda: verify(tmp_path, False, print), lambda: packing_proof(tmp_path)):
        with pytest.raises(UserError, match=rf"transformers cannot read .*config\.json: .*{said}"):
            check()
    assert check_tokenizer(tmp_path, 320)[1].verdict == "not checked"


@pytest.mark.parametrize(("message", "reason"), [("no answers here", "no answers here"), ("", "TemplateError")])
def test_a_template_that_fails_leaves_the_other_findings(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, message: str, reason: str
) -> None:
    tokenizer.chat_template = "{{ raise_exception('" + message + "') }}"
    tokenizer.save_pretrained(tmp_path)
    template, stops, vocabulary = check_tokenizer(tmp_path, 320)
    assert (template.verdict, stops.verdict, vocabulary.verdict) == ("refused", "not checked", "works")
    assert template.reason == stops.reason == f"the chat template fails: {reason}"


def test_a_vocabulary_may_be_padded_but_not_cut() -> None:
    assert check_vocabulary(261, 261).reason == "261 tokens in 261 rows"
    assert "59 of padding" in check_vocabulary(261, 320).reason
    assert check_vocabulary(321, 320).verdict == "refused"


@pytest.mark.parametrize("config", [MistralConfig, Qwen3MoeConfig])
def test_a_folder_without_a_tokenizer_is_no_reason_to_refuse(tmp_path: Path, config: type[PretrainedConfig]) -> None:
    config().save_pretrained(tmp_path)
    assert {one.verdict for one in check_tokenizer(tmp_path, 320)} == {"not checked"}


def test_only_what_a_run_cannot_do_without_refuses_a_model() -> None:
    works, cannot = Finding("a", "works", ""), Finding("b", "refused", "no plan", optional=True)
    assert not reasons_against([works, cannot])
    assert reasons_against([works, cannot, Finding("c", "refused", "wrong")]) == ["wrong"]


def test_separate_rows_work_slower_and_neither_is_refused() -> None:
    wrong = PackingWay("shared", "s", 1.0, 1.0, "layer 0 differs")
    right = PackingWay("separate", "sdpa", 1e-6, 1e-6)
    assert check_packing(PackingProof("odd", (wrong, right)))[0].verdict == "works slower"
    finding, packing = check_packing(PackingProof("odd", (wrong, replace(right, differs="all of it"))))
    assert finding.verdict == "refused" and packing is None


def test_heads_of_a_size_that_vllm_lacks_on_cpus_are_told_though_the_small_model_has_others(tmp_path: Path) -> None:
    def found(**heads: int) -> Finding:
        MistralConfig(hidden_size=96, num_attention_heads=2, num_key_value_heads=2, **heads).save_pretrained(tmp_path)
        return check_heads(tmp_path)

    assert found(head_dim=64).verdict == "works"
    lacking = found(head_dim=48)
    assert lacking.verdict == "refused" and lacking.optional and "a size of 48" in lacking.reason


def test_the_settings_of_a_run_are_tried_on_the_small_model() -> None:
    found = {one.check: one.verdict for one in check_settings(MistralConfig(), OWN)}
    ways = {"sharding (FSDP)", "tensor parallel", "sequence parallel"}
    assert set(found) >= {"precision bfloat16", "gradient checkpointing"} | ways
    assert set(found.values()) == {"works"}, found
    alone = check_settings(MistralConfig(), replace(OWN, undivided="tokens meet elsewhere"))[-1]
    assert (alone.verdict, alone.reason) == ("refused", "tokens meet elsewhere")


def test_what_a_run_in_bf16_rounds_and_transformers_does_not_is_named() -> None:
    found = {one.check: one.reason for one in check_settings(Ernie4_5_MoeConfig(), OWN)}["precision bfloat16"]
    bias, gate = "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias", "model.layers.*.mlp.gate.weight"
    assert found.endswith(f"; {bias}, {gate} rounded as well, which transformers keeps in float32")


def test_the_settings_of_a_small_vocabulary_are_tried_too() -> None:
    found = {one.check: one.verdict for one in check_settings(MistralConfig(vocab_size=64), OWN)}
    assert set(found.values()) == {"works"}, found


@pytest.mark.parametrize(
    ("config", "norm"),
    [(CohereConfig(use_qk_norm=True), "self_attn.k_norm"), (PhiConfig(qk_layernorm=True), "self_attn.k_layernorm")],
    ids=["cohere", "phi"],
)
def test_layers_with_norms_of_heads_that_the_plan_leaves_out_cannot_be_shared(
    config: PretrainedConfig, norm: str
) -> None:
    found = {one.check: one for one in check_settings(config, OWN)}["tensor parallel"]
    assert found.verdict == "refused" and f"not supported for {config.model_type} with layers.*.{norm}" in found.reason
    plain = {one.check: one.verdict for one in check_settings(type(config)(), OWN)}
    assert plain["tensor parallel"] == "works"


@pytest.mark.parametrize("kind", [GPT2Config, OPTConfig])
def test_layers_of_any_name_can_be_sharded(kind: type[PretrainedConfig]) -> None:
    found = {one.check: one for one in check_settings(kind(), OWN)}
    assert found["sharding (FSDP)"].verdict == "works"


def test_a_model_without_a_list_of_layers_cannot_be_sharded() -> None:
    class Unlisted(GPT2LMHeadModel):
        def get_decoder(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

    finding = training_checks._sharding(Unlisted(GPT2Config(n_layer=1, n_embd=32, n_head=1, vocab_size=8)))
    assert finding.verdict == "refused" and "Unlisted: it has no list of decoder layers" in finding.reason


def test_small_models_differ_as_after_a_few_steps(tmp_path: Path) -> None:
    first, second = save_small_models(MistralConfig(), tmp_path)
    ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (first, second))
    assert len(ours) == len(theirs)
    different = float((np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)).mean())
    assert 0.02 < different < 0.2


@pytest.mark.parametrize("vocabulary", [2, 20, 257, 258])
def test_the_tokenizer_of_a_small_vocabulary_has_no_token_beyond_it(tmp_path: Path, vocabulary: int) -> None:
    for folder in save_small_models(
        LlamaConfig(vocab_size=vocabulary, bos_token_id=0, eos_token_id=vocabulary - 1), tmp_path
    ):
        tokenizer = read_tokenizer(folder)
        assert len(tokenizer) == min(vocabulary, 256 + 2 * (vocabulary >= 258))
        assert set(end_tokens(str(folder), tokenizer)) == ({257} if vocabulary >= 258 else set())


def sample(tokens: list[int], logprob: float) -> dict[str, list[float]]:
    return {"tokens": [*tokens], "logprobs": [logprob] * len(tokens)}


def test_one_bit_of_a_log_probability_is_a_difference() -> None:
    ours = [sample([1, 2], -0.5)]
    assert generator.difference(ours, ours, "theirs") == ""
    assert "other tokens than theirs" in generator.difference(ours, [sample([1, 3], -0.5)], "theirs")
    nearly = [sample([1, 2], float(np.nextafter(-0.5, 0.0)))]
    assert "log-probabilities differ from theirs" in generator.difference(ours, nearly, "theirs")


OLD, NEW, ROUNDED = [sample([1, 2], -0.5)], [sample([1, 3], -0.4)], [sample([1, 4], -0.3)]
RIGHT: dict[str, dict[str, object]] = {
    AGAINST: {"error": 1e-5, "tokens": 9},
    "before": {"samples": OLD},
    "delivered": {"samples": NEW, "kind": "delta", "mb": 1.0},
    "fresh": {"samples": NEW},
    "weights in fp8": {"codes": ROUNDED, "plain": ROUNDED, "mb": 0.4},
    "weights in int8": {"codes": ROUNDED, "plain": ROUNDED, "mb": 0.4},
    BETWEEN_TOKENS: {"error": 1e-5, "tokens": 30, "crossed": 4},
    "layers in int8": {"before": OLD, "samples": NEW, "mismatch": 0.02},
    "a fresh engine in int8": {"samples": NEW},
}
FAILED = "(EngineCore pid=1) ERROR [x.py:1] ValueError: no CPU kernel\n"


def complete(stages: dict[str, dict[str, object]]) -> dict[str, object]:
    return {"stages": stages, "errors": FAILED, "in_time": True}


def verdicts(stages: dict[str, dict[str, object]]) -> dict[str, tuple[str, str]]:
    answer = complete(stages)
    return {one.check: (one.verdict, one.reason) for one in generator.findings_of(ORDER, answer)}


def test_all_that_vllm_has_shown_works() -> None:
    found = verdicts(RIGHT)
    assert len(found) == 6 and {verdict for verdict, _ in found.values()} == {"works"}
    assert "within 1e-05 nats" in found[AGAINST][1]


@pytest.mark.parametrize(
    ("check", "stage", "verdict", "reason"),
    [
        (AGAINST, {AGAINST: {"error": 0.4, "tokens": 9}}, "refused", "by up to 0.4 nats (fp32), more than 0.005"),
        (AGAINST, {AGAINST: {"error": float("nan"), "tokens": 9}}, "refused", "differ by up to nan nats"),
        (VERSION, {"fresh": {"samples": OLD}}, "refused", "other tokens than a fresh engine's"),
        (VERSION, {"before": {"samples": NEW}}, "refused", "the engine kept its old weights"),
        (BETWEEN_TOKENS, {BETWEEN_TOKENS: {"error": 0.4, "tokens": 9, "crossed": 1}}, "refused", "within 0.4 nats"),
        (BETWEEN_TOKENS, {BETWEEN_TOKENS: {"error": 0.0, "tokens": 0, "crossed": 0}}, "not checked", "ended before"),
        (
            "weights in fp8",
            {"weights in fp8": {"codes": ROUNDED, "plain": NEW, "mb": 1.0}},
            "refused",
            "other tokens than those of the weights that the codes stand for",
        ),
        (
            "weights in int8",
            {"weights in int8": {"codes": NEW, "plain": NEW, "mb": 1.0}},
            "not checked",
            "no weight of the small model is sent in 8 bits",
        ),
        ("layers in int8", {"a fresh engine in int8": {"samples": OLD}}, "refused", "a fresh engine's in int8"),
        (
            "layers in int8",
            {"layers in int8": {"before": NEW, "samples": NEW, "mismatch": 0.0}},
            "refused",
            "the engine kept its old weights",
        ),
        ("layers in int8", {"layers in int8": {"lacks": "no VNNI"}}, "not checked", "no VNNI"),
    ],
)
def test_what_differs_in_vllm_is_refused(
    check: str, stage: dict[str, dict[str, object]], verdict: str, reason: str
) -> None:
    found = verdicts(RIGHT | stage)
    assert found[check][0] == verdict and reason in found[check][1]
    assert {v for name, (v, _) in found.items() if name != check} == {"works"}


def test_what_vllm_cannot_do_is_the_reason() -> None:
    assert verdicts({})[AGAINST] == ("refused", "vLLM: ValueError: no CPU kernel")
    assert verdicts({})[VERSION] == ("not checked", "the model does not run in vLLM here")
    ended_early = verdicts({AGAINST: RIGHT[AGAINST], "before": RIGHT["before"]})
    assert {name for name, found in ended_early.items() if "no CPU kernel" in found[1]} == set(ended_early) - {AGAINST}


def test_a_vllm_that_does_not_compute_on_the_cpu_refuses_no_model() -> None:
    found = generator.findings_of(ORDER, {"stages": {}, "errors": "", "in_time": True, "lacks": "it is for GPUs"})
    assert {(one.verdict, one.reason) for one in found} == {("not checked", "it is for GPUs")}
    assert [one.check for one in found] == [one.check for one in generator.findings_of(ORDER, complete(RIGHT))]


def test_orders_that_vllm_has_not_answered_in_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"stages": RIGHT, "errors": "", "in_time": True}) + "\n"

    def too_slow(*_: object, limit_s: float, **__: object) -> tuple[str, None]:
        assert limit_s > 2 * generator.LIMIT_S
        return said, None

    monkeypatch.setattr(generator, "run_module", too_slow)
    answered, late = generator.check_generators([ORDER, ORDER])
    assert {one.verdict for one in answered} == {"works"}
    assert [one.check for one in answered][:2] == [AGAINST, VERSION] == [one.check for one in late][:2]
    assert (late[0].verdict, late[1].verdict) == ("refused", "not checked")
    assert all("vLLM gave no answer within" in one.reason for one in late)


def test_brackets_in_a_reason_are_printed() -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table_of("my[model]", [Finding("a", "works", "shape [/2, 3] of [layer]")]))
    printed = console.export_text()
    assert "my[model]" in printed and "shape [/2, 3] of [layer]" in printed
