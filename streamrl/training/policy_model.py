"""The policy: a Hugging Face causal LM that returns log-probabilities of completion tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.hidden_states import predicting_states
from streamrl.training.packing import PackedBatch
from streamrl.training.tensor_parallel import whole

LOGITS_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}
"""Completion tokens whose fp32 logits are processed at once, by kind of device.

512 x 49,152 x 4 B = 100 MB; 64 fit a CPU's caches, which is a third faster.
"""

ENTROPY_STRIDE = 8
"""Distance of the completion tokens whose entropy is measured; this diagnostic costs as much as the log-softmax."""


class TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of target tokens, and entropies of some of them, from hidden states.

    For hidden states h [N, d], head weight W [V, d] and temperature T: z = h W^T / T,
    logp_n = z[n, target_n] - logsumexp(z_n), entropy_n = -sum_v p_nv log p_nv.
    The backward pass keeps softmax(z) in the compute type ([N, V], 2 bytes per entry in bf16). In fp32 all logits are
    one product, which becomes the softmax in place; else fp32 logits are made in chunks. No gradient flows through the
    entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute hidden [N, d], weight [V, d], targets [N] -> (logprobs [N] fp32, entropy [ceil(N / 8)] fp32)."""
        count, chunk = len(targets), LOGITS_CHUNK_TOKENS[hidden.device.type]
        hidden = hidden.to(weight.dtype)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropies: list[torch.Tensor] = []
        keeps = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        in_place = keeps and weight.dtype == torch.float32
        if in_place:  # one product for all rows, because each product first copies the head's weight
            probabilities = hidden @ weight.t()
        else:
            probabilities = hidden.new_empty((count, weight.shape[0]) if keeps else (0, 0))
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            logits = probabilities[rows] if in_place else (hidden[rows] @ weight.t()).float()
            if temperature != 1.0:
                logits.div_(temperature)
            logprobs[rows], entropy = _softmax_in_place(logits, targets[rows])
            entropies.append(entropy)
            if keeps and not in_place:
                probabilities[rows] = logits
        ctx.save_for_backward(hidden, weight, targets, probabilities)
        ctx.temperature = temperature
        entropy = torch.cat(entropies) if entropies else logprobs.new_zeros(0)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Return the gradients by d logp_n / d z_nv = 1[v = target_n] - softmax(z_n)_v."""
        hidden, weight, targets, probabilities = ctx.saved_tensors
        grad_logprobs = (grads[0] / ctx.temperature).to(weight.dtype)
        grad_logits = probabilities.mul_(-grad_logprobs[:, None])  # in place: the largest tensor of the step
        grad_logits[torch.arange(len(targets), device=targets.device), targets] += grad_logprobs
        return grad_logits @ weight, grad_logits.t() @ hidden, None, None


def _softmax_in_place(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn fp32 logits [n, V] into their softmax, in place.

    The results follow from the largest entry, whose probability is 1 / sum_v exp(z_v - max z), so one pass of
    exponentials suffices. torch's log-softmax is five times slower on CPUs, and the softmax would need another pass.

    Returns:
        (log-probabilities of the targets [n], entropy of every 8th row).
    """
    top = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, targets[:, None])
    some = logits[::ENTROPY_STRIDE] - top[::ENTROPY_STRIDE]
    torch.softmax(logits, dim=-1, out=logits)
    of_top = logits.amax(-1, keepdim=True).log_()
    entropy = -(logits[::ENTROPY_STRIDE] * some).sum(-1) - of_top[::ENTROPY_STRIDE, 0]
    return (chosen - top + of_top)[:, 0], entropy


class Policy(nn.Module):
    """A causal LM behind one forward: packed batch in, log-probabilities of its completion tokens out."""

    def __init__(self, model: PreTrainedModel, separate: bool = False) -> None:
        super().__init__()
        self.model = model
        self.separate = separate
        """Whether every completion runs in a row of its own (`hidden_states.py`)."""

    def forward(self, batch: PackedBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logprobs [N], entropy of every 8th token), both fp32, at the sampling temperature."""
        hidden = predicting_states(self.model.base_model, batch, self.separate)
        head = self.model.get_output_embeddings()
        out: tuple[torch.Tensor, torch.Tensor] = TokenLogprobs.apply(
            hidden, whole(head.weight), batch.targets, temperature
        )
        return out


def load_policy(path: str, gradient_checkpointing: bool = False, attention: str = SHARED_PREFIX) -> Policy:
    """Load a Hugging Face model in fp32 (the master weights).

    Args:
        path: folder or hub id.
        gradient_checkpointing: recompute activations in the backward pass.
        attention: see `load_model`.
    """
    model = load_model(AutoModelForCausalLM, path, gradient_checkpointing, attention)
    return Policy(model, attention != SHARED_PREFIX)


def load_model(kind: type[Any], path: str, gradient_checkpointing: bool, attention: str) -> PreTrainedModel:
    """Load a Hugging Face model in fp32, prepared for training (`in_training`).

    Args:
        kind: AutoModelForCausalLM, or AutoModel for the trunk alone.
        path: folder or hub id.
        gradient_checkpointing: recompute activations in the backward pass.
        attention: transformers' name of the attention: `SHARED_PREFIX` for packed rows, else one of the model's own,
            for separate ones (`packing_proof.Packing.attention`).
    """
    model: PreTrainedModel = kind.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    return in_training(model, gradient_checkpointing)


def in_training(model: PreTrainedModel, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Prepare a model for training: it computes as in evaluation, because the policy must be the one that generated.

    So there is neither dropout nor a router's noise, whatever the family names them. Layers that checkpoint are in
    training mode themselves, not the modules inside, as they ask for it.
    """
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True
    return model
