"""Proof, as an engine starts, that vLLM verifies drafts by the settings of each request.

vLLM 0.32 copies temperature, top_k and top_p of a request to each of its drafted tokens by a kernel, `expand_kernel`,
whose version for CPUs writes to a copy of the result (vLLM issue 55005). What is sampled then depends on uninitialized
memory: tokens are noise and log-probabilities NaN, without an error. So the kernel is tried on values whose result is
known. Where it fails, ours takes its place, through the registry that vLLM has for this; where that does not help
either, the engine does not start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Write each request's value to all of its tokens.

    Args:
        output: [tokens], written.
        values: [requests].
        ends: [requests] index after each request's last token.
        replace_from: value that is replaced.
        replace_to: value that takes its place.
        MAX_NUM_TOKENS: not used; vLLM passes it by this name.
    """
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def ensure_exact_verification() -> None:
    """Replace vLLM's kernel if it is wrong.

    Raises:
        RuntimeError: drafts would be verified by other settings than the requests' all the same.
    """
    if _is_exact():
        return
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({KERNEL: expand})
    if not _is_exact():
        raise RuntimeError(
            f"this vLLM verifies drafts by other temperatures than the requests' ({KERNEL} is wrong, and could not be "
            "replaced); set speculation.method to none"
        )


def _is_exact() -> bool:
    """Return whether vLLM expands values of the types of temperature, top_p and top_k as it should."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    ends = torch.tensor([2, 2, 3, 6], dtype=torch.int32)
    for values, result in (
        (torch.tensor([0.7, 5.0, 0.0, 1.3]), torch.tensor([0.7, 0.7, 1.0, 1.3, 1.3, 1.3])),
        (torch.tensor([3, 5, 0, 9], dtype=torch.int32), torch.tensor([3, 3, 1, 9, 9, 9], dtype=torch.int32)),
    ):
        if not torch.equal(expand_batch_to_tokens(values, ends, 6, replace_from=0, replace_to=1), result):
            return False
    return True
