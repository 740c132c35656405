"""What the checks of a tokenizer and of a generator conclude from what they saw."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from transformers import AutoTokenizer, MistralConfig, PreTrainedTokenizerFast

from streamrl.rollouts.types import Sample
from streamrl.training.packing_choice import Packing, PackingProof, PackingWay
from streamrl.verify import generator_checks as generator
from streamrl.verify.findings import Finding, is_refused
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


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "model"))
    return made


def test_a_template_that_rewrites_history_is_refused_and_shows_where(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = APPENDS
    assert check_template(tokenizer).verdict == "works"
    tokenizer.chat_template = FORGETS
    found = check_template(tokenizer)
    assert found.verdict == "refused"
    assert "the template rewrites history: '<think>" in found.reason and "in the next turn" in found.reason
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"
    assert "the chat template fails: only one turn" in check_template(tokenizer).reason


def test_an_answer_has_to_end_with_a_token_at_which_the_generator_stops(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = APPENDS
    assert check_stops(tokenizer, [257]) == Finding("stop tokens", "works", "an answer ends with <|end|> (257)")
    assert check_stops(tokenizer, [256]).verdict == "refused"
    assert check_stops(tokenizer, []).verdict == "refused"


def test_a_vocabulary_may_be_padded_but_not_cut() -> None:
    assert check_vocabulary(261, 261).reason == "261 tokens in 261 rows"
    assert "59 of padding" in check_vocabulary(261, 320).reason
    assert check_vocabulary(321, 320).verdict == "refused"


def test_a_folder_without_a_tokenizer_is_no_reason_to_refuse(tmp_path: Path) -> None:
    MistralConfig().save_pretrained(tmp_path)
    assert {one.verdict for one in check_tokenizer(tmp_path, 320)} == {"not checked"}


def test_only_what_a_run_cannot_do_without_refuses_a_model() -> None:
    works, cannot = Finding("a", "works", ""), Finding("b", "refused", "no plan", optional=True)
    assert not is_refused([works, cannot])
    assert is_refused([works, Finding("c", "refused", "wrong")])


def test_separate_rows_work_slower_and_neither_is_refused() -> None:
    wrong = PackingWay("shared", "s", 1.0, 1.0, "layer 0 differs")
    right = PackingWay("separate", "sdpa", 1e-6, 1e-6)
    assert check_packing(PackingProof("odd", (wrong, right)))[0].verdict == "works slower"
    finding, packing = check_packing(PackingProof("odd", (wrong, replace(right, differs="all of it"))))
    assert finding.verdict == "refused" and packing is None


def test_the_settings_of_a_run_are_tried_on_the_small_model() -> None:
    found = {one.check: one.verdict for one in check_settings(MistralConfig(), OWN)}
    assert set(found) >= {"precision bfloat16", "gradient checkpointing", "sharding (FSDP)", "tensor parallel"}
    assert set(found.values()) == {"works"}, found


def test_small_models_differ_as_after_a_few_steps(tmp_path: Path) -> None:
    first, second = save_small_models(MistralConfig(), tmp_path)
    ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (first, second))
    assert len(ours) == len(theirs)
    different = float((np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)).mean())
    assert 0.02 < different < 0.2


def sample(tokens: list[int], logprob: float) -> Sample:
    drawn = SimpleNamespace(sample_id="verify-0", completion_tokens=np.array(tokens), logprobs=np.full(2, logprob))
    return cast(Sample, drawn)


def test_one_bit_of_a_log_probability_is_a_difference() -> None:
    ours = [sample([1, 2], -0.5)]
    assert generator._difference(ours, ours) == ""
    assert "other tokens" in generator._difference(ours, [sample([1, 3], -0.5)])
    nearly = [sample([1, 2], float(np.nextafter(-0.5, 0.0)))]
    assert "log-probabilities differ" in generator._difference(ours, nearly)


def stage(name: str, **values: object) -> str:
    return json.dumps({"stage": name} | values)


@pytest.mark.parametrize(
    ("lines", "errors", "verdicts", "reason"),
    [
        (
            [],
            "(EngineCore pid=1) ERROR [x.py:1] ValueError: no CPU kernel\n",
            ("refused", "not checked"),
            "no CPU kernel",
        ),
        ([stage(generator.AGAINST, logprob_error=0.4, tokens=9)], "", ("refused", "refused"), "within 0.4 nats"),
        (
            [
                stage(generator.AGAINST, logprob_error=1e-5, tokens=9),
                stage(generator.VERSION, differs="", tokens=9, kind="delta", mb=1.0),
            ],
            "",
            ("works", "works"),
            "within 1e-05 nats",
        ),
    ],
)
def test_what_vllm_cannot_do_is_the_reason(
    lines: list[str],
    errors: str,
    verdicts: tuple[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    done = subprocess.CompletedProcess([], 0, "\n".join(["noise", *lines]), errors)
    monkeypatch.setattr(generator.subprocess, "run", lambda *_, **__: done)
    found = generator.check_generator((tmp_path, tmp_path), OWN, tmp_path)
    assert tuple(one.verdict for one in found) == verdicts
    assert reason in found[0].reason
