"""Generalised advantage estimation over a packed row. Pure; nothing here has a gradient."""

from __future__ import annotations

import torch

from streamrl.surrogates import sequence_lengths


@torch.no_grad()
def token_rewards(
    scores: torch.Tensor, sequence_ids: torch.Tensor, penalties: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the reward of each token, [N]: minus its penalty, plus the sequence's score at its last token.

    Args:
        scores: [N], each sequence's score repeated for its tokens.
        sequence_ids: [N].
        penalties: [N], e.g. a KL estimate times its weight; None: 0.
    """
    rewards = torch.zeros_like(scores) if penalties is None else -penalties.to(scores.dtype)
    return rewards + torch.where(_is_last(sequence_ids), scores, 0.0)


@torch.no_grad()
def gae(
    rewards: torch.Tensor, values: torch.Tensor, sequence_ids: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), both [N].

        delta_t = r_t + gamma V_{t+1} - V_t        V behind a sequence's last token is 0
        A_t     = delta_t + gamma lam A_{t+1}
        R_t     = A_t + V_t

    Source: arXiv 1506.02438, eq. 16. A completion cut by the token limit ends like any other: its reward is its whole
    worth, and nothing is expected beyond it. Whitening needs the advantages of the whole batch
    (`streamrl.rollouts.advantage.whitened`).

    Args:
        rewards: [N].
        values: [N]; V_t is the value before token t is chosen.
        sequence_ids: [N].
        gamma: discount.
        lam: lambda.
    """
    advantages = rewards + gamma * torch.where(_is_last(sequence_ids), 0.0, values.roll(-1)) - values
    # A_t is the sum of (gamma lam)^k delta_{t+k} over the rest of its sequence. Two sums make one of twice as many
    # terms, so log2(longest) operations on the whole row suffice instead of one per token.
    terms, decay = 1, gamma * lam
    longest = int(sequence_lengths(sequence_ids).max()) if len(rewards) else 0
    while terms < longest:
        same = sequence_ids[terms:] == sequence_ids[:-terms]
        later = torch.zeros_like(advantages)
        later[:-terms] = torch.where(same, advantages[terms:], 0.0)
        advantages = advantages + decay**terms * later
        terms *= 2
    return advantages, advantages + values


def _is_last(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return [N] bool: whether a token is the last of its sequence."""
    last = torch.ones_like(sequence_ids, dtype=torch.bool)
    last[:-1] = sequence_ids[1:] != sequence_ids[:-1]
    return last
