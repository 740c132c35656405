"""Log-probabilities of target tokens from hidden states, without ever holding more logits than a bound allows.

The distribution is the one that tokens are drawn from: hidden states h [N, d], head weight W [V, d] and bias b give

    z = transform(h W^T + b) / temperature,   logp_n = z[n, target_n] - logsumexp(z_n)

and the sum is over the tokens that a truncation keeps (`training/truncation.py`).

`fused_logprobs.py` does the same by kernels that read the logits in their own type, where there are such kernels.

Logits of at most `SLAB_BYTES` exist at a time, in fp32, and the backward pass computes them again: memory is
O(slab), whatever N. In fp32, and on CPUs in any type, that second product is saved where all logits fit into
`KEPT_BYTES`: they are then one product. In fp32 the forward pass turns it into exponentials, in place; in 16 bits it
stays as it is. The backward pass turns it into the gradient, in place.

The products have the type of the weight, as they do in the model's own head and in vLLM; all else is fp32. Near
certainty nothing cancels: with e_v = exp(z_v - max z) and the target's entry set to 0, `rest` = sum_v e_v is exactly
what the target's probability lacks to 1, so log p = -log1p(rest) for a target that is the likeliest token, and the
gradient's entry of the target is 1 - p = -expm1(log p).

With an entropy bonus the entropy H_n = -sum_v p_v log p_v of every token has a gradient, too:

    d H_n / d z_nv = -p_v (log p_v + H_n)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from streamrl.training.fused_logprobs import FusedTokenLogprobs, kernels_for, parts_of_rows, product
from streamrl.training.head_kernels import Changes
from streamrl.training.packing import filled_rows
from streamrl.training.truncation import ALL_TOKENS, Truncation, truncate_

SLAB_BYTES = {"cpu": 2**27, "cuda": 2**28}
"""Size of the fp32 logits that exist at once, by kind of device: 682 and 1365 tokens of a vocabulary of 49,152.

A product first copies the head's weight, so it should have hundreds of rows.
"""

KEPT_BYTES = 2**30
"""Size up to which all logits of a call stay in memory for its backward pass: in fp32 5461 tokens of 49,152."""

CACHED_TOKENS = 32
"""Tokens whose logits a CPU works on at once: those of 32 fit its caches."""

ENTROPY_BLOCK = 8
"""Completion tokens of which one has its entropy measured; this diagnostic costs as much as the log-softmax.

With an entropy bonus it is measured at every token.
"""

EVERY_TOKEN, NO_TOKEN = slice(None), slice(0)

SCRAMBLERS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Step and factors of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), as int64."""

LEAST_LOGPROB = -200.0
"""Bound of log p_v in the gradient of the entropy, where p_v is 0 in fp32 and so p_v log p_v."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model does with its logits after the output projection: cap tanh(scale z / cap)."""

    scale: float = 1.0
    """Factor, as of Cohere's `logit_scale` or one over Granite's `logits_scaling`."""
    softcap: float | None = None
    """Bound of the scaled logits, as of Gemma 2's `final_logit_softcapping`; None: no bound."""


@dataclass(frozen=True)
class TokenDistribution:
    """The distribution that tokens are drawn from, given the output projection."""

    transform: LogitTransform = LogitTransform()
    temperature: float = 1.0
    truncation: Truncation = ALL_TOKENS


class HeadOutput(NamedTuple):
    """The head's results for N target tokens."""

    logprobs: torch.Tensor
    """fp32 [N], with gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution, nats, fp32: of the measured tokens (`measured_tokens`), [ceil(N / 8)], without
    gradient; with `every_entropy` of all, [N], with gradient."""
    outside: torch.Tensor
    """Whether a target lies outside of what the truncation keeps, bool [N]; the distribution then has it as well."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    distribution: TokenDistribution,
    every_entropy: bool = False,
    measured: torch.Tensor | None = None,
    fused: bool = False,
) -> HeadOutput:
    """Return log-probabilities of the targets, entropies, and which targets a truncation would have dropped.

    Args:
        hidden: last hidden states [N, d].
        weight: the output projection's weight [V, d].
        bias: its bias [V]; None: it has none.
        targets: token ids [N].
        distribution: what the logits become before a token is drawn.
        every_entropy: whether the entropies of all tokens are returned, with gradient.
        measured: tokens whose entropy is returned otherwise, bool [N]; None: those of `measured_tokens`.
        fused: whether kernels do it, where there are some (`fused_logprobs.py`).
    """
    if measured is None and not every_entropy:
        measured = measured_tokens(targets)
    has_backward = torch.is_grad_enabled()  # never so in the functions below
    kernels = kernels_for(weight) if fused and not every_entropy and not distribution.truncation else None
    if kernels is not None:
        transform, temperature = distribution.transform, distribution.temperature
        changes = Changes(transform.scale, transform.softcap, temperature)
        keeps = has_backward and weight.device.type == "cpu" and _fits(len(targets), weight)
        tokens = _slab_tokens(weight) * torch.float32.itemsize // weight.element_size()
        logprobs, entropy = FusedTokenLogprobs.apply(hidden, weight, bias, targets, changes, kernels, tokens, keeps)
        return HeadOutput(logprobs, entropy[measured], torch.zeros_like(targets, dtype=torch.bool))
    rest = distribution, every_entropy, measured, has_backward
    return HeadOutput(*TokenLogprobs.apply(hidden, weight, bias, targets, *rest))


def measured_tokens(targets: torch.Tensor) -> torch.Tensor:
    """Return which of N tokens have their entropy measured: one of each of ceil(N / 8) blocks of about equal size.

    Completions of equal length put the same place of an answer at regular distances, and micro-batches of equal size at
    the same numbers. So the token is drawn from its block by a hash of the block's number and of all targets. Ranks
    that share the rows agree without a message, and no place in a completion is preferred.

    Args:
        targets: token ids of the whole batch, [N].

    Returns:
        Their numbers, ascending, int64 [ceil(N / 8)].
    """
    count = len(targets)
    blocks = -(-count // ENTROPY_BLOCK)
    step, *_ = SCRAMBLERS
    numbers = torch.arange(count + 1, device=targets.device)
    seed = _scrambled(targets.long() + numbers[:-1] * step).sum()
    firsts = numbers[: blocks + 1] * count // max(1, blocks)
    drawn = (_scrambled(seed + numbers[:blocks] * step) >> 32) & 0x7FFFFFFF  # of 2^31
    return firsts[:-1] + (drawn * firsts.diff() >> 31)


def marked(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return which of `count` tokens have one of these numbers, bool [count]."""
    return torch.zeros(count, dtype=torch.bool, device=numbers.device).index_fill_(0, numbers, True)


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each number, int64; products wrap."""
    _, first, second = SCRAMBLERS
    numbers = (numbers ^ (numbers >> 30)) * first
    numbers = (numbers ^ (numbers >> 27)) * second
    return numbers ^ (numbers >> 31)


class TokenLogprobs(torch.autograd.Function):
    """The autograd function behind `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        distribution: TokenDistribution,
        every_entropy: bool,
        measured: torch.Tensor | None,
        has_backward: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute (logprobs [N], entropy of the measured tokens or [N], outside [N]); see `token_logprobs`."""
        hidden = hidden.to(weight.dtype)
        count = len(targets)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        totals = torch.empty_like(logprobs)
        outside = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        entropies = torch.empty_like(logprobs)  # measured ones alone are ever read
        keeps = has_backward and any(ctx.needs_input_grad[:3]) and _may_keep(count, weight, distribution)
        products: torch.Tensor | None = None
        for slab in parts_of_rows(0, count, count if keeps else _slab_tokens(weight)):
            products = product(filled_rows(hidden[slab]), weight, bias)
            for part, here in _cached(slab, products):
                _transform_(here, distribution)
                if distribution.truncation:
                    outside[part] = truncate_(here, targets[part], distribution.truncation)
                rows = EVERY_TOKEN if every_entropy or measured is None else _rows_of(measured, part, count)
                logprobs[part], totals[part], entropies[part][rows] = _exponentials_(here, targets[part], rows)
                del here
            if not keeps:
                products = None  # before the next slab's exist
        entropy = entropies if every_entropy or measured is None else entropies[measured]
        of_all = entropy if every_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, totals, of_all, products if keeps else None)
        ctx.distribution, ctx.is_used = distribution, False
        ctx.mark_non_differentiable(*([outside] if every_entropy else [entropy, outside]))
        return logprobs, entropy, outside

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients by d logp_n / d z_nv = 1[v = target_n] - softmax(z_n)_v, and that of the entropy."""
        hidden, weight, bias, targets, logprobs, totals, entropy, kept = ctx.saved_tensors
        if ctx.is_used and kept is not None:
            raise RuntimeError("a second backward pass through the head, whose logits the first one has replaced")
        ctx.is_used = True
        distribution: TokenDistribution = ctx.distribution
        inner = distribution.transform.scale / distribution.temperature
        slopes = _Slopes(targets, logprobs, totals, grads[0] * inner, entropy, grads[1] * inner)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: torch.Tensor | None = None  # sums of several slabs are fp32
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        slabs = [*parts_of_rows(0, len(targets), _slab_tokens(weight) if kept is None else len(targets))]
        for slab in slabs:
            inputs = filled_rows(hidden[slab])
            products = product(inputs, weight, bias) if kept is None else kept
            for part, here in _cached(slab, products):
                slope = None
                if kept is None or kept.dtype != torch.float32:  # else these are the exponentials
                    slope = _transform_(here, distribution)
                    if distribution.truncation:
                        truncate_(here, targets[part], distribution.truncation)
                    _exponentials_(here, targets[part], NO_TOKEN)
                slopes.apply_(here, part)
                if slope is not None:
                    here.mul_(slope)
                if products.dtype != torch.float32:
                    products[part.start - slab.start : part.stop - slab.start] = here
                del here, slope
            products[slab.stop - slab.start :] = 0.0  # what fills the rows up has a product with the bias
            if grad_bias is not None:
                grad_bias += products.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                grad_hidden[slab] = (products @ weight)[: slab.stop - slab.start]
            if needs_weight and grad_weight is None:
                grad_weight = products.t() @ inputs
                if len(slabs) > 1:
                    grad_weight = grad_weight.float()
            elif grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(products.t(), inputs)
            elif grad_weight is not None:
                grad_weight += products.t() @ inputs
            del products, inputs  # before the next slab's exist
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None, None, None, None, None),
        )


class _Slopes:
    """The gradient of a loss in the logits of all tokens, given those in their log-probabilities and entropies."""

    def __init__(
        self,
        targets: torch.Tensor,
        logprobs: torch.Tensor,
        totals: torch.Tensor,
        of_logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        of_entropy: torch.Tensor,
    ) -> None:
        self._targets, self._totals = targets[:, None], totals[:, None]
        self._of_logprobs, self._others = of_logprobs[:, None], (-of_logprobs / totals)[:, None]
        self._target = (of_logprobs * -torch.expm1(logprobs))[:, None]
        self._entropy = entropy[:, None] if entropy is not None else None
        self._of_entropy = of_entropy[:, None]
        if entropy is not None:
            self._target = self._target - self._of_entropy * (logprobs.exp() * (logprobs + entropy))[:, None]

    def apply_(self, exponentials: torch.Tensor, part: slice) -> None:
        """Turn the exponentials [n, V] of some tokens, as `_exponentials_` leaves them, into the gradient, in place."""
        if self._entropy is None:
            exponentials.mul_(self._others[part])
        else:
            shares = exponentials.div_(self._totals[part])
            slope = shares.log().clamp_(min=LEAST_LOGPROB).add_(self._entropy[part])
            shares.mul_(slope.mul_(-self._of_entropy[part]).sub_(self._of_logprobs[part]))
        exponentials.scatter_(-1, self._targets[part], self._target[part])


def _rows_of(measured: torch.Tensor, part: slice, count: int) -> torch.Tensor:
    """Return the rows of a part to measure: of a mask, or of the numbers of `measured_tokens` of `count` tokens.

    Of numbers they are those of all blocks that have tokens in the part, so that no device waits for its host to learn
    how many; a block's token that lies in another part gives the nearest one of this.
    """
    if measured.dtype == torch.bool:
        return measured[part]
    blocks = len(measured)  # block k begins at k count / blocks, rounded down
    first, last = ((part.start + 1) * blocks - 1) // count, (part.stop * blocks - 1) // count
    return (measured[first : last + 1] - part.start).clamp(0, part.stop - part.start - 1)


def _slab_tokens(weight: torch.Tensor) -> int:
    """Return how many tokens' fp32 logits may exist at once."""
    blocks = SLAB_BYTES[weight.device.type] // (4 * len(weight) * CACHED_TOKENS)
    return max(1, blocks) * CACHED_TOKENS


def _may_keep(count: int, weight: torch.Tensor, distribution: TokenDistribution) -> bool:
    """Return whether the logits of `count` tokens stay for the backward pass.

    In fp32 they become exponentials in place, whose soft cap has no slope any more; a GPU's memory is planned without.
    """
    if weight.dtype == torch.float32:
        return _fits(count, weight) and distribution.transform.softcap is None
    return _fits(count, weight) and weight.device.type == "cpu"


def _fits(count: int, weight: torch.Tensor) -> bool:
    """Return whether the logits of `count` tokens, in the type of the weight, may stay in memory."""
    return weight.element_size() * count * len(weight) <= KEPT_BYTES


def _cached(slab: slice, products: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the parts of a slab that are worked on one after the other, each with its products in fp32, [n, V].

    In fp32 these are the slab's own. In 16 bits they are copies, for which a CPU uses the same memory again: getting it
    anew takes longer than copying.
    """
    is_cpu, count = products.device.type == "cpu", slab.stop - slab.start
    most = CACHED_TOKENS if is_cpu else count
    space = None
    if is_cpu and products.dtype != torch.float32:
        space = products.new_empty(min(most, count), products.shape[-1], dtype=torch.float32)
    for part in parts_of_rows(slab.start, slab.stop, most):
        here = products[part.start - slab.start : part.stop - slab.start]
        yield part, here.float() if space is None else space[: len(here)].copy_(here)


def _transform_(logits: torch.Tensor, distribution: TokenDistribution) -> torch.Tensor | None:
    """Turn projections [n, V] into the logits z of the distribution, in place.

    Returns:
        The slope of the soft cap, [n, V]; None: there is none.
    """
    scale, softcap = distribution.transform.scale, distribution.transform.softcap
    if scale != 1.0:
        logits.mul_(scale)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1.0 - logits.square()
        logits.mul_(softcap)
    if distribution.temperature != 1.0:
        logits.div_(distribution.temperature)
    return slope


def _exponentials_(
    logits: torch.Tensor, targets: torch.Tensor, measured: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn logits z [n, V], -inf for dropped tokens, into exp(z - max z), in place, with 0 in place of the targets.

    Returns:
        (log-probabilities of the targets [n], sums of the exponentials with the targets' [n], entropy of each
        measured row).
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    of_targets = logits.gather(-1, targets[:, None])
    some = logits[measured].clamp(min=-1e4)  # where the exponential is 0; its product with -inf is not
    logits.exp_()
    mean = (logits[measured] * some).sum(-1)
    logits.scatter_(-1, targets[:, None], 0.0)
    excess = logits.sum(-1, keepdim=True) + torch.expm1(of_targets)  # of the sum over 1, the likeliest token's
    log_total = torch.log1p(excess)
    totals = (1.0 + excess)[:, 0]
    entropy = log_total[measured, 0] - mean / totals[measured]
    return (of_targets - log_total)[:, 0], totals, entropy
