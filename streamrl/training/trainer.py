"""One trainer rank: policy, optional critic, reference and proximal copy; gradients accumulate over micro-batches.
No sockets.

Every method is a collective: all ranks must call the same ones in the same order. A step is

    accumulate(groups) ... accumulate(groups, is_last=True)  ->  step(step, normalizer)

with `precompute_reference(groups)` at any time in between. Losses are *sums* over tokens; `step` divides the
accumulated gradient by the whole batch's normalizer. So the gradient does not depend on how the batch was split, on the
order in which groups arrived, or on the number of ranks. The critic's values are computed in the same pass, as a
group's advantages need only the group; where they must be those from before the step's first update, or whitened over
the batch, `estimate(groups)` has computed them before, and they come with the groups (`RunConfig.needs_estimates`).

The reference's log-probabilities never change, so `precompute_reference` may compute them before the groups are
trained. They are returned to the caller and come back with the groups; nothing is kept here, so any rank may train on
what another has computed. The proximal copy changes after every step whose weights are to be published, whenever they
are: a version may leave late, between two micro-batches of the next step, which must have one proximal policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from streamrl.config.algorithm import PPOConfig
from streamrl.config.run import RunConfig
from streamrl.protocol.controller_trainer import Refusal
from streamrl.rollouts.canary import Canary
from streamrl.rollouts.micro_batch import split_into_rows
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import FloatArray
from streamrl.run_dir.checkpoint_sums import TRAINER_STATE
from streamrl.training.agreements import agreed_packing
from streamrl.training.checkpoint_check import check_trainer_state
from streamrl.training.checkpoint_writing import StateWriter, checkpoint_weights, load_state, write_model
from streamrl.training.compiled_parts import failures_told
from streamrl.training.critic import Critic
from streamrl.training.early_copy import EarlyCopy
from streamrl.training.hidden_states import has_own_rows
from streamrl.training.host_offload import HostOffload
from streamrl.training.learner import Division, compute_type, reshard
from streamrl.training.learning_rate import learning_rate, warm_up
from streamrl.training.objective import (
    MicroStats,
    Objective,
    merged,
    policy_objective,
    value_advantages,
    value_objective,
)
from streamrl.training.operations import TrainingOperations
from streamrl.training.packing import PackedBatch, PackedShare, pack, pack_share
from streamrl.training.packing_choice import Packing
from streamrl.training.policy_model import Policy
from streamrl.training.step_guard import refusal
from streamrl.training.token_logprobs import HeadOutput
from streamrl.training.trainer_models import TrainerModels
from streamrl.training.truncation import Truncation
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.version import Manifest

NOTHING = TrainGroup(
    "nothing",
    np.zeros(1, dtype=np.int32),
    [TrainSequence(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32), 0.0, np.zeros(1, dtype=np.float32))],
)
"""Placeholder for a rank that has no groups but must join a collective: two tokens, whose loss is multiplied by 0."""

LOSSES = ("loss_sum", "value_loss_sum")
"""Losses among the sums of a micro-batch."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """L2 norm of the policy's gradient of the batch's loss, before clipping."""
    learning_rate: float
    """Learning rate of the policy."""
    skipped: bool
    """Whether the gradient was discarded."""
    refused: Refusal | None = None
    """What was not finite, so that the gradient was discarded and nothing changed; None: everything was finite."""
    critic_grad_norm: float | None = None
    """L2 norm of the critic's gradient, before clipping; None: there is no critic."""


class Trainer:
    """One trainer rank; torch.distributed must be initialised."""

    def __init__(
        self,
        run: RunConfig,
        model_path: str,
        device: torch.device,
        critic_path: str | None = None,
        division: Division | None = None,
        published: torch.dtype | None = None,
        packing: Packing | None = None,
        resumed: bool = False,
    ) -> None:
        """Load and shard the models that the run's algorithm needs.

        Args:
            run: the run's configuration.
            model_path: HF folder or id of the initial weights (also the KL reference).
            device: this rank's device.
            critic_path: HF folder or id of the critic's initial weights; None: `model_path`.
            division: division of each model among the ranks, see `learner.shard`.
            published: type of the published weights; None: the compute type.
            packing: packing of the model (`agreed_packing`); None: decided here.
            resumed: whether `load` follows; see `policy_model.load_model`.
        """
        self.run, self.device, self.rank = run, device, dist.get_rank()
        self.truncation = Truncation(run.sampling.top_k, run.sampling.top_p, run.sampling.min_p)
        self.packing = packing or agreed_packing(run, model_path, division.rows if division else 1)
        self.models = TrainerModels.load(run, model_path, device, self.packing, critic_path, division, resumed)
        self.learner, self.critic, self.learners = self.models.policy, self.models.critic, self.models.learners
        self.policy: Policy = self.learner.model
        self.reference, self.proximal = self.models.reference, self.models.proximal
        self.ppo = run.algorithm if isinstance(run.algorithm, PPOConfig) else None
        self.layout = ShardedLayout(self.policy.model, published or compute_type(run), run.weights.generation_dtype)
        of_critic = None if self.critic is None else self.critic.model
        self.operations = TrainingOperations.of(
            self.policy, self.reference is not None, self.proximal is not None, of_critic
        )
        self._nothing = pack([NOTHING]).to(device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Stream of the copies to a GPU."""
        computing: list[Policy | Critic] = [learner.model for learner in self.learners]
        self._separate = any(one.separate for one in computing)
        self._padded = any(one.separate and not has_own_rows(one.model) for one in computing)
        self._offload = HostOffload(pinned=device.type == "cuda")
        self._micro_batches = 0
        """Micro-batches accumulated for the next step."""
        self._bad_losses: list[str] = []
        """Those of them whose loss on this rank is not finite."""
        if not resumed:
            self.models.renew_proximal()

    @failures_told()
    def precompute_reference(self, groups: list[TrainGroup]) -> FloatArray:
        """Return the frozen reference's log-probabilities of the completion tokens, [N], in the groups' order.

        They are of the distribution that is sampled from: after temperature and truncation.

        Args:
            groups: this rank's share; may be empty. Their advantages do not matter.

        Raises:
            ValueError: the algorithm has no reference.
        """
        if self.reference is None:
            raise ValueError(f"algorithm {self.run.algorithm.name} with kl.coef 0 has no reference to compute with")
        found: list[FloatArray] = []
        for batch in self._passes(self.pack(groups)):
            with torch.no_grad():
                logprobs = self._sampled_from(self.reference, batch or self._nothing).logprobs
            found.append(logprobs.cpu().numpy()[: None if batch else 0])
        return np.concatenate(found)

    @failures_told()
    @torch.no_grad()
    def estimate(self, groups: list[TrainGroup], reference_given: bool = False) -> FloatArray:
        """Return (advantage, return, value) of each token with a loss by the current weights, [N, 3], in order.

        Args:
            groups: this rank's share; may be empty. Their advantages are their sequences' rewards.
            reference_given: as for `accumulate`; it matters with `kl.placement: reward` only.

        Raises:
            ValueError: the algorithm has no critic.
        """
        if self.ppo is None or self.critic is None:
            raise ValueError(f"algorithm {self.run.algorithm.name} has no critic to estimate with")
        found: list[FloatArray] = []
        for work in self._passes(self.pack(groups)):
            batch = work or self._nothing
            logprobs = reference = None
            if self.ppo.kl.placement == "reward" and self.reference is not None:
                logprobs = self._sampled_from(self.policy, batch).logprobs
                reference = self._reference_logprobs(batch, reference_given)
            values = self.critic.model(batch)
            columns = torch.stack([*value_advantages(self.ppo, batch, values, logprobs, reference), values], dim=1)
            found.append(columns.cpu().numpy()[: None if work else 0])
        for learner in self.learners:
            reshard(learner.model)
        return np.concatenate(found)

    def pack(self, groups: list[TrainGroup]) -> PackedShare:
        """Pack a share and begin to move it to the device. No collective: any thread may do it ahead of its turn.

        Args:
            groups: this rank's share; may be empty. It fits into one packed row; separate rows repeat their prompts, so
                that more tokens and several passes may come of it.
        """
        rows = self.run.batch.micro_batch_tokens
        parts = split_into_rows(groups, rows, self._padded) if self._separate else [groups] if groups else []
        return pack_share(parts, self.device, self._copies)

    @failures_told()
    def accumulate(
        self, share: list[TrainGroup] | PackedShare, is_last: bool, reference_given: bool = False
    ) -> MicroStats:
        """Run one micro-batch forward and backward; add the gradients of the *summed* losses of policy and critic.

        Args:
            share: this rank's groups, or what `pack` made of them; may be empty.
            is_last: reduce gradients over ranks now; the step follows.
            reference_given: whether the groups bring the reference's log-probabilities (if one is needed); the same on
                every rank. If False, they are computed for the whole share, whatever the groups bring.

        Raises:
            ValueError: `reference_given` is True and a sequence lacks them.
        """
        self._micro_batches += 1
        passes = self._passes(share if isinstance(share, PackedShare) else self.pack(share))
        last = len(passes) - 1
        return merged(
            [self._accumulate(batch, is_last and at == last, reference_given) for at, batch in enumerate(passes)]
        )

    def _passes(self, share: PackedShare) -> list[PackedBatch | None]:
        """Return the batches of a share; every rank has as many, some of them None: without work."""
        batches = list(share.arrived())
        count = 1
        if self._separate:
            most = torch.tensor(max(1, len(batches)), device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            count = int(most)
        return batches + [None] * (count - len(batches))

    def _accumulate(self, work: PackedBatch | None, is_last: bool, reference_given: bool) -> MicroStats:
        """Run one pass; see `accumulate`.

        Without work a rank does nothing, unless others wait for it: each layer's weights are gathered from all shards,
        and the last pass sums the gradients over the ranks. It then runs two tokens.
        """
        if work is None and self.learner.may_idle(is_last):
            return MicroStats()
        batch = work or self._nothing
        with torch.no_grad():
            reference = self._reference_logprobs(batch, reference_given)
            proximal = self._sampled_from(self.proximal, batch).logprobs if self.proximal else None
        bonus = self.run.algorithm.entropy_coef > 0
        output = self._sampled_from(self.policy, batch, every_entropy=bonus)
        logprobs, entropy = output.logprobs, output.entropy
        advantages = batch.advantages
        sums: dict[str, torch.Tensor] = {}
        if self.critic:
            given = work is not None and self.run.needs_estimates
            advantages, value = self._critic_objective(batch, logprobs.detach(), reference, given)
            self.critic.backward(value.loss_sum if work else value.loss_sum * 0.0, is_last)
            sums |= value.sums
        objective = policy_objective(
            self.run.algorithm,
            logprobs,
            batch.generator_logprobs,
            advantages,
            batch.sequence_ids,
            proximal,
            reference,
            batch.sequence_tokens,
            entropy if bonus else None,
        )
        sums |= objective.sums | {"entropy_sum": entropy.detach().sum(), "outside": output.outside.sum()}
        copied = EarlyCopy(torch.stack([value.double() for value in sums.values()]))  # one transfer for all
        self.learner.backward(objective.loss_sum if work else objective.loss_sum * 0.0, is_last)
        if work is None:
            return MicroStats()
        values = copied.arrived()
        if not all(math.isfinite(value) for name, value in zip(sums, values, strict=True) if name in LOSSES):
            self._bad_losses.append(f"micro-batch {self._micro_batches}")
        return MicroStats(
            tokens=batch.loss_tokens,
            row_tokens=batch.row_tokens(self.policy.separate),
            flops=self.operations.count(batch, reference_given),
            sequences=batch.sequences,
            entropy_tokens=len(entropy),
            **dict(zip(sums, values, strict=True)),
        )

    def _sampled_from(self, model: Policy, batch: PackedBatch, every_entropy: bool = False) -> HeadOutput:
        """Run a model; all log-probabilities and entropies are of the distribution that it would sample from.

        Raises:
            ValueError: routers are to replay experts, and the batch has none.
        """
        if model.replay is not None and batch.experts is None and batch is not self._nothing:
            raise ValueError("a micro-batch was to bring the generator's experts, but some group has none")
        output: HeadOutput = model(batch, self.run.sampling.temperature, self.truncation, every_entropy)
        return output

    def _reference_logprobs(self, batch: PackedBatch, given: bool) -> torch.Tensor | None:
        """Return the reference's log-probabilities, [N]; None if the algorithm has no reference."""
        if self.reference is None:
            return None
        if not given:
            return self._sampled_from(self.reference, batch).logprobs
        if batch.reference_logprobs is None:
            raise ValueError("a micro-batch was to bring its reference log-probabilities, but some sequence has none")
        return batch.reference_logprobs

    def _critic_objective(
        self, batch: PackedBatch, logprobs: torch.Tensor, reference: torch.Tensor | None, given: bool
    ) -> tuple[torch.Tensor, Objective]:
        """Return (GAE advantages [N], the critic's objective); the batch's `advantages` are its sequences' rewards.

        Each row of an episode ends with the episode's reward, as if it were a sequence of its own.
        """
        assert self.critic is not None and self.ppo is not None
        values = self.critic.model(batch)
        old_values = None
        if given:
            if batch.estimates is None:
                raise ValueError("a micro-batch was to bring its advantages and values, but some sequence has none")
            advantages, returns, old_values = batch.estimates.unbind(dim=1)
        else:
            advantages, returns = value_advantages(self.ppo, batch, values, logprobs, reference)
        return advantages, value_objective(self.ppo, values, returns, batch.sequence_tokens, old_values)

    def step(self, step: int, normalizer: float, skip: bool = False, update: int = 0) -> StepResult:
        """Take one optimizer step of policy and critic with the accumulated gradients, and clear them.

        Args:
            step: optimizer step (0-based), for the learning rates.
            normalizer: divisor of the whole batch's summed loss, over all ranks and including samples that were not
                sent (`streamrl.rollouts.micro_batch.loss_normalizer`).
            skip: discard the gradients and change nothing.
            update: number of the update on the step's batch (0-based; `batch.epochs`, `batch.mini_batches`).

        Where a loss, a gradient, a weight or AdamW's state is not finite, or the update might leave it so, the step is
        refused: the gradients are discarded and nothing changes, on all ranks alike.
        """
        updates = self.run.batch.updates
        rates = [learning_rate(step, self.run.steps, self.run.optimizer, update, updates)]
        if self.critic and self.ppo:
            options = self.ppo.critic
            rates.append(options.lr * warm_up(step, options.warmup_steps, update, updates))
        norms = [learner.divide(normalizer) for learner in self.learners]
        refused = None
        if not skip:
            refused = refusal(self.learners, norms, rates, self._bad_losses, self.device)
        for learner, rate in zip(self.learners, rates, strict=True):
            if skip or refused:
                learner.clear()
            else:
                learner.update(rate)
        self._forget_micro_batches()
        step_ends = skip or (refused is None and update + 1 == updates)  # a skipped update is its step's last one
        if step_ends and (step + 1) % self.run.schedule.sync_every == 0:
            self.models.renew_proximal()
        return StepResult(norms[0], rates[0], skip or refused is not None, refused, *norms[1:])

    def _forget_micro_batches(self) -> None:
        self._bad_losses, self._micro_batches = [], 0

    def examine(self, groups: list[TrainGroup], reference_given: bool = False) -> dict[str, Refusal]:
        """Find the groups whose own loss or gradient is not finite, after a refused step.

        The micro-batch is computed once as a whole, and group by group only if the whole is not finite. No gradient may
        be accumulated, and none is left.

        Args:
            groups: this rank's share; may be empty.
            reference_given: as for `accumulate`.

        Returns:
            What is not finite in each of this rank's groups concerned, by group id.
        """
        if self._not_finite_in(groups, reference_given) is None:
            return {}
        counts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(counts, len(groups))
        sharing, rank = self.learner.division.sharing, dist.get_rank()
        found = {}
        for first in range(0, len(counts), sharing):  # ranks that share layers or rows compute the same groups together
            for index in range(counts[first]):
                mine = groups[index] if first <= rank < first + sharing else None
                bad = self._not_finite_in([mine] if mine else [], reference_given)
                if mine and bad:
                    found[mine.group_id] = Refusal("loss", "the group") if bad.what == "loss" else bad
        return found

    def _not_finite_in(self, groups: list[TrainGroup], reference_given: bool) -> Refusal | None:
        """Return what is not finite in a micro-batch of its own, all ranks' shares together; None: nothing."""
        self.accumulate(groups, True, reference_given)
        bad = refusal(self.learners, [one.divide(1.0) for one in self.learners], [], self._bad_losses, self.device)
        for learner in self.learners:
            learner.clear()
        self._forget_micro_batches()
        return bad

    @failures_told()
    def measure_canary(self, one: Canary) -> FloatArray:
        """Return the policy's log-probabilities of the canary's completion, [C], at temperature 1."""
        sequence = TrainSequence(one.completion_tokens, np.zeros(len(one.completion_tokens), np.float32), 0.0)
        batch = pack([TrainGroup("canary", one.prompt_tokens, [sequence])]).to(self.device)
        with torch.no_grad():
            logprobs = self.policy(batch, 1.0)[0]
        values: FloatArray = logprobs.float().cpu().numpy()
        reshard(self.policy)  # an optimizer step may come next
        return values

    def leave_device(self) -> int:
        """Move optimizers, then models, to host memory; until `return_to_device` nothing else may be called.

        Returns:
            The bytes that this rank has freed on its device.
        """
        freed = sum(self._offload.hold(learner.tensors()) for learner in self.learners)
        for model in filter(None, (self.reference, self.proximal)):
            reshard(model)
            freed += self._offload.hold(model.parameters())
        return freed

    def return_to_device(self) -> None:
        """Bring back what `leave_device` has moved, bit for bit; a no-op if nothing was."""
        self._offload.restore()

    def lay_out(self, number: int) -> tuple[Manifest, np.ndarray]:
        """Lay out the current weights as a version for the instances; each rank writes its own shards.

        Args:
            number: the version's number.

        Returns:
            On every rank, the manifest and the shared buffer (uint8 [nbytes]), see `streamrl.weights.sharded`.

        Raises:
            RunFailed: on every rank, if one cannot take part.
        """
        return self.layout.lay_out(number)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of all that the model's checkpoint has, gathered from all ranks; tied ones once.

        Parameters come in the compute type (some families' in fp32, see `checkpoint_weights`), then persistent buffers
        in their own.

        Raises:
            RunFailed: on every rank, at a weight that is not finite.
        """
        reshard(self.policy)  # a layer that has computed has copies, whose memory is freed before they are read
        yield from checkpoint_weights(self.policy.model, compute_type(self.run))

    def save(self, directory: Path) -> None:
        """Write a checkpoint that loads on any number of ranks.

        It has the policy in HF format (compute type) and, in `trainer_state/`, fp32 weights and AdamW's state of policy
        and critic in torch's distributed format.

        Args:
            directory: an existing folder.

        Raises:
            Exception, CheckpointException: it cannot be written; see `checkpoint_writing.told_in_words`.
        """
        write_model(self.policy.model, self.weights(), directory, self.run.model.dtype, self.rank == 0)
        dcp.save(self.models.state(), storage_writer=StateWriter(directory / TRAINER_STATE))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, also by another number of ranks.

        The restored weights are the proximal policy, because a resumed run generates with them. Raises as `load_state`
        and `check_trainer_state`.
        """
        check_trainer_state(directory)
        state = self.models.state()
        load_state(state, directory)
        self.models.restore(state)
