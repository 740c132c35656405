"""The models that a run's algorithm needs, loaded and sharded on one rank.

    policy      trained, with its optimizer
    critic      trained, with its optimizer (PPO)
    reference   the initial policy, frozen (KL term)
    proximal    a copy of the policy, renewed by steps that publish weights (decoupled PPO, several updates per version)

Every method is a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from streamrl.config.algorithm import PPOConfig
from streamrl.config.optimizer import Recomputation
from streamrl.config.run import CRITIC_KEY, MODEL_KEY, RunConfig
from streamrl.training.agreements import agreed_packing
from streamrl.training.compiled_formulas import Switch
from streamrl.training.compiled_parts import compile_parts, compiles
from streamrl.training.critic import Critic, load_critic
from streamrl.training.layer_kernels import take_kernels
from streamrl.training.learner import AnyLearner, Division, Learner, copy_weights, shard
from streamrl.training.packing_choice import Packing
from streamrl.training.policy_model import Policy, load_policy
from streamrl.training.sequence_parallel import SequenceRanks

CRITIC_PREFIX = "critic."
"""Beginning of the names of the critic's weights and modules where they are told."""


@dataclass(frozen=True)
class TrainerModels:
    """The models of one rank."""

    policy: Learner[Policy]
    critic: Learner[Critic] | None
    """None: the algorithm has no critic."""
    reference: Policy | None
    """None: the algorithm has no reference."""
    proximal: Policy | None
    """None: the policy in training is itself the proximal one, or the algorithm has none."""

    @classmethod
    def load(
        cls,
        run: RunConfig,
        model_path: str,
        device: torch.device,
        packing: Packing,
        critic_path: str | None = None,
        division: Division | None = None,
        resumed: bool = False,
    ) -> Self:
        """Load and shard all of them, and let them take compiled parts or kernels where there are some.

        The arguments are those of `Trainer`, with the packing decided.
        """
        division = division or Division()
        algorithm, checkpointing = run.algorithm, run.optimizer.gradient_checkpointing
        ranks = SequenceRanks.of(division.rows)
        shards = division.shards if dist.get_world_size() > 1 else None

        def loaded(recomputation: Recomputation, replays: bool) -> Policy:
            return load_policy(model_path, recomputation, packing.attention, replays, ranks, shards, resumed)

        def frozen(replays: bool) -> Policy:
            return shard(loaded(False, replays), run, device, False, division)

        policy = Learner(loaded(checkpointing, algorithm.router_replay), run.optimizer.lr, run, device, division)
        # the reference is a policy of its own, which no generator has routed for
        reference = frozen(False) if algorithm.needs_reference else None
        proximal = frozen(algorithm.router_replay) if algorithm.needs_proximal(run.updates_per_version) else None
        critic: Learner[Critic] | None = None
        if isinstance(algorithm, PPOConfig):
            path, key = (critic_path, CRITIC_KEY) if critic_path else (model_path, MODEL_KEY)
            own = agreed_packing(run, critic_path, division.rows, CRITIC_KEY) if critic_path else packing
            model = load_critic(path, checkpointing, own.attention, ranks, shards, key, resumed)
            critic = Learner(model, algorithm.critic.lr, run, device, division, CRITIC_PREFIX)
        models = cls(policy, critic, reference, proximal)
        models._speed_up(run, device, division.layers)
        return models

    def _speed_up(self, run: RunConfig, device: torch.device, layers: int) -> None:
        """Let the models take compiled parts on GPUs and kernels on CPUs; `layers`: ranks that share each layer."""
        Switch.is_on = compiles(run, device)
        trained: list[Policy | Critic] = [learner.model for learner in self.learners]
        for model in (*trained, *filter(None, (self.reference, self.proximal))):
            if Switch.is_on:
                compile_parts(model, run, layers)
            elif device.type == "cpu":
                take_kernels(model)

    @property
    def learners(self) -> list[AnyLearner]:
        """The policy, and the critic if there is one, with their optimizers."""
        return [self.policy, *([self.critic] if self.critic else [])]

    def renew_proximal(self) -> None:
        """Make the current weights the proximal policy, if the algorithm has one."""
        if self.proximal:
            copy_weights(self.policy.model, self.proximal)

    def state(self) -> dict[str, Any]:
        """Return weights and AdamW's state of policy and critic, for torch's checkpoints."""
        return self.policy.state("") | (self.critic.state("critic_") if self.critic else {})

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; the restored weights are the proximal policy."""
        self.policy.restore("", state)
        if self.critic:
            self.critic.restore("critic_", state)
        self.renew_proximal()
