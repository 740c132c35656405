"""Algorithms' defaults are their papers'; a combination that makes no sense is refused with reason and remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config.algorithm import Algorithm
from streamrl.config.load import ConfigError, load_run
from streamrl.config.run import RunConfig


def read(tmp_path: Path, algorithm: dict[str, Any]) -> Algorithm:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"algorithm": algorithm}))
    return load_run(path).algorithm


@pytest.mark.parametrize(
    ("name", "advantage", "surrogate", "aggregation", "clip"),
    [
        ("grpo", "group_std", "clip", "sequence", (0.2, 0.2)),
        ("dr_grpo", "group_mean", "clip", "constant", (0.2, 0.2)),
        ("dapo", "group_std", "clip", "token", (0.2, 0.28)),
        ("gspo", "group_std", "sequence_clip", "sequence", (3e-4, 4e-4)),
        ("cispo", "group_std", "detached_clip", "token", (1.0, 4.0)),
        ("sapo", "group_std", "soft_gate", "sequence", (None, None)),
        ("rloo", "leave_one_out", "reinforce", "constant", (None, None)),
        ("reinforce_pp", "batch", "clip", "token", (0.2, 0.2)),
        ("ppo", "gae", "clip", "token", (0.2, 0.2)),
    ],
)
def test_defaults(tmp_path: Path, name: str, advantage: str, surrogate: str, aggregation: str, clip: Any) -> None:
    algorithm = read(tmp_path, {"name": name} | ({"critic": {}} if name == "ppo" else {}))
    found = (algorithm.advantage, algorithm.surrogate, algorithm.aggregation)
    assert found == (advantage, surrogate, aggregation)
    assert (algorithm.clip_low, algorithm.clip_high) == clip
    assert algorithm.skips_flat_groups == (advantage in ("group_std", "group_mean", "leave_one_out"))
    assert algorithm.dynamic_sampling == (algorithm.overlong is not None) == (name == "dapo")
    assert not algorithm.needs_reference and not algorithm.needs_proximal(4)
    # what a run writes into its folder reads back as the same
    assert RunConfig.model_validate({"algorithm": algorithm.model_dump(mode="json")}).algorithm == algorithm


def test_the_default_algorithm_is_grpo() -> None:
    assert RunConfig().algorithm.name == "grpo"


def test_what_must_be_kept_in_memory(tmp_path: Path) -> None:
    assert read(tmp_path, {"name": "grpo", "kl": {"coef": 0.1}}).needs_reference
    assert not read(tmp_path, {"name": "grpo", "kl": {"coef": 0.1}}).skips_flat_groups
    assert not read(tmp_path, {"name": "grpo", "entropy_coef": 0.1}).skips_flat_groups
    assert read(tmp_path, {"name": "reinforce_pp", "advantage": "batch_group_baseline"}).skips_flat_groups
    decoupled = read(tmp_path, {"name": "grpo", "off_policy": {"ratio_to": "proximal"}})
    assert decoupled.needs_proximal(2) and not decoupled.needs_proximal(1)


REFUSED = [
    ({"name": "ppo"}, "ppo needs a critic: add `critic: {}`, or choose rloo or grpo, which need none"),
    ({"name": "ppo", "critic": None}, "ppo needs a critic: add `critic: {}`, or choose rloo or grpo"),
    ({"name": "grpo", "critic": {}}, "grpo has no critic and no use for critic: leave it out, or choose `name: ppo`"),
    ({"name": "grpo", "whiten_advantages": True}, "grpo has no critic and no use for whiten_advantages: leave it out"),
    ({"name": "rloo", "gamma": 1.0, "lam": 0.9}, "rloo has no critic and no use for gamma, lam: leave it out"),
    ({"name": "grpo", "advantage": "gae"}, "needs a critic, which grpo has not: choose group_std, or `name: ppo`"),
    ({"name": "ppo", "critic": {}, "advantage": "group_std"}, "leave advantage out (gae), or choose `name: grpo`"),
    ({"name": "ppo", "critic": {}, "surrogate": "sequence_clip"}, "choose clip, or `name: gspo`"),
    ({"name": "reinforce_pp", "dynamic_sampling": True}, "leave it out, or choose advantage: group_std"),
    ({"name": "rloo", "clip_high": 0.2}, "reinforce has no use for clip_high: set it to null, or choose clip"),
    (
        {"name": "rloo", "clip_high": 0.2, "gate_positive": 1.0},
        "reinforce has no use for clip_high and gate_positive: set them to null, or choose clip",
    ),
    ({"name": "rloo", "surrogate": "clip"}, "surrogate: clip needs clip_low and clip_high (0.2 is usual)"),
    ({"name": "sapo", "clip_high": 0.2}, "soft_gate has no use for clip_high: set it to null, or choose clip"),
    ({"name": "grpo", "gate_positive": 2.0}, "clip has no use for gate_positive: set it to null, or choose soft_gate"),
    (
        {"name": "sapo", "gate_negative": None},
        "soft_gate needs gate_positive and gate_negative (1.0 and 1.05 are usual)",
    ),
    (
        {"name": "gspo", "clip_low": None},
        "surrogate: sequence_clip needs clip_low and clip_high (3e-4 and 4e-4 are usual), or choose reinforce",
    ),
    (
        {"name": "grpo", "kl": {"coef": 0.1, "placement": "reward"}},
        "grpo has one reward per sequence: choose placement: loss",
    ),
    ({"name": "grpo", "kl": {"coef": 0.1, "estimator": "k1"}}, "gradient is 0 in expectation: choose k3, or k2"),
    (
        {"name": "ppo", "critic": {}, "kl": {"coef": 0.1, "estimator": "k1"}},
        "choose k3, or k2, whose gradient is the KL's, or placement: reward",
    ),
    (
        {"name": "grpo", "off_policy": {"correction": "truncate"}},
        "contains the weight already: choose ratio_to: proximal, or correction: mask",
    ),
    ({"name": "rloo", "off_policy": {"ratio_to": "proximal"}}, "correction: truncate weighs by trainer / generator"),
    ({"name": "grpp"}, "did you mean grpo?"),
    ({"clip_high": 0.3}, "key 'algorithm.name' is missing"),
    ({"name": "grpo", "surrogate": "clipped"}, "'algorithm.surrogate' is 'clipped', expected"),
    ({"name": "grpo", "clip_low": 1.5}, "'algorithm.clip_low' is 1.5, expected at most 1"),
    ({"name": "grpo", "clip_low": 0}, "'algorithm.clip_low' is 0, expected more than 0"),
    ({"name": "grpo", "clip_high": 0}, "'algorithm.clip_high' is 0, expected more than 0"),
    ({"name": "sapo", "gate_positive": 0}, "'algorithm.gate_positive' is 0, expected more than 0"),
    ({"name": "sapo", "gate_negative": 0}, "'algorithm.gate_negative' is 0, expected more than 0"),
    ({"name": "grpo", "kl": {"coeff": 0.1}}, "did you mean 'coef'?"),
    ({"name": "grpo", "off_policy": {"high": 0.5}}, "'algorithm.off_policy.high' is 0.5, expected at least 1"),
]


@pytest.mark.parametrize(("keys", "reason"), REFUSED)
def test_refused_with_the_reason_and_the_nearest_choice(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, keys)
    message = str(error.value)
    assert reason in message
    assert message.startswith(f"{tmp_path / 'run.yaml'}:") and "\n" not in message


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "rloo", "surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2},
        {"name": "rloo", "off_policy": {"correction": "truncate", "high": 2.0}},
        {"name": "grpo", "off_policy": {"correction": "mask"}},
        {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate", "level": "geometric"}},
        {"name": "ppo", "critic": {"lr": 1e-4}, "kl": {"coef": 0.1, "estimator": "k1", "placement": "reward"}},
        {"name": "dapo", "overlong": None, "dynamic_sampling": False},
        {"name": "sapo", "gate_positive": 0.5, "gate_negative": 0.5},
        {"name": "gspo", "clip_low": 1, "clip_high": 2},
    ],
)
def test_accepted(tmp_path: Path, keys: dict[str, Any]) -> None:
    read(tmp_path, keys)


def test_the_examples_of_the_docs_are_those_of_new_run_files(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "algorithms.md").read_text()
    examples = re.findall(r"^algorithm: .*$", text, re.MULTILINE)
    assert len(examples) == 10
    for example in (*examples, "algorithm: " + re.findall(r"`(\{name: .*\})`", text)[0]):
        updates = {"epochs": 2 if "value_clip" in example else 1}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(example) | {"batch": updates}))
        load_run(path)


@pytest.mark.parametrize(
    ("algorithm", "batch", "share"),
    [
        ({"name": "grpo"}, {}, 0.0),
        ({"name": "grpo"}, {"epochs": 4}, 0.75),
        ({"name": "grpo"}, {"mini_batches": 2}, 1.0),
        ({"name": "reinforce_pp"}, {}, 1.0),
        ({"name": "reinforce_pp", "advantage": "batch_group_baseline"}, {}, 1.0),
        ({"name": "reinforce_pp", "advantage": "group_std"}, {}, 0.0),
        ({"name": "ppo", "critic": {}}, {}, 0.0),
        ({"name": "ppo", "critic": {}}, {"epochs": 2}, 1.0),
        ({"name": "ppo", "critic": {}, "whiten_advantages": True}, {}, 1.0),
    ],
)
def test_what_needs_the_whole_batch_is_trained_after_it(
    algorithm: dict[str, Any], batch: dict[str, Any], share: float
) -> None:
    schedule = {"name": "sync"}
    size = {"prompts_per_step": 4, "samples_per_prompt": 2}
    run = RunConfig.model_validate({"algorithm": algorithm, "batch": size | batch, "schedule": schedule})
    assert run.after_batch == share
