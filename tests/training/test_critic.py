"""The critic: what it reads, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, OPTConfig, OPTForCausalLM

from streamrl.rollouts.train_groups import TrainGroup
from streamrl.training.critic import load_critic
from streamrl.training.packing import pack
from streamrl.training.trainer import Trainer
from tests.training.conftest import random_groups, relative_error, run_config
from tests.training.trained import CPU, PPO


def test_a_critic_reads_the_states_of_an_opt_that_projects_them_to_the_size_of_its_embeddings(
    tmp_path: Path, one_rank: None
) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 96, "num_hidden_layers": 2}
    config = OPTConfig(**sizes, num_attention_heads=2, max_position_embeddings=128, do_layer_norm_before=False)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    trainer = Trainer(run_config(tmp_path, algorithm=PPO), str(tmp_path), CPU)
    assert trainer.critic is not None
    groups = random_groups(2)
    head = trainer.critic.model.head.weight
    assert head.shape == (1, 32)
    trainer.accumulate(groups, is_last=True)
    assert trainer.step(0, 10.0).refused is None and head.any()
    trunk, one = AutoModel.from_pretrained(tmp_path), replace(groups[0], sequences=groups[0].sequences[:1])
    trunk.load_state_dict(trainer.critic.model.model.state_dict())
    tokens = torch.tensor(np.concatenate([one.prompt_tokens, one.sequences[0].completion_tokens]))[None].long()
    with torch.no_grad():
        values = trunk(input_ids=tokens).last_hidden_state[0, len(one.prompt_tokens) - 1 : -1] @ head[0]
        assert relative_error(trainer.critic.model(pack([one])), values) < 1e-5


def test_the_critic_sees_what_separate_sequences_would_show_it(tiny_model: Path) -> None:
    groups = random_groups(2)
    critic = load_critic(str(tiny_model))
    assert not critic(pack(groups)).any()  # a fresh head says 0
    torch.nn.init.normal_(critic.head.weight)
    expected = []
    for group in groups:
        for sequence in group.sequences:
            alone = TrainGroup("alone", group.prompt_tokens, [sequence])
            expected.append(critic(pack([alone])))
    torch.testing.assert_close(critic(pack(groups)), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_the_critic_learns_the_rewards(tiny_model: Path, one_rank: None) -> None:
    config = run_config(tiny_model, algorithm={"name": "ppo", "critic": {"lr": 3e-3, "warmup_steps": 2}, "lam": 1.0})
    trainer = Trainer(config, str(tiny_model), CPU)
    groups, errors = random_groups(2), []
    for _ in range(8):
        stats = trainer.accumulate(groups, is_last=True)
        errors.append(stats.value_sq_error_sum)
        assert trainer.critic is not None
        trainer.critic.divide(stats.tokens)
        trainer.critic.update(3e-3)
        trainer.learner.clear()
    rewards = torch.tensor([s.advantage for g in groups for s in g.sequences for _ in s.completion_tokens])
    assert errors[0] == pytest.approx(float(rewards.square().sum()), rel=1e-5)  # value 0, return = the reward
    assert stats.return_sum == pytest.approx(float(rewards.sum()), rel=1e-4)
    assert errors[-1] < 0.5 * errors[0]
