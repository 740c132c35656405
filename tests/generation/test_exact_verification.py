"""vLLM's copy of each request's settings to its drafted tokens, which its CPU kernel gets wrong."""

from __future__ import annotations

import pytest
import torch

from streamrl.generation.drafts.exact_verification import expand


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_token_gets_its_requests_value(dtype: torch.dtype) -> None:
    output = torch.full((6,), -1).to(dtype)
    expand(output, torch.tensor([4, 9, 0, 7]).to(dtype), torch.tensor([2, 2, 3, 6], dtype=torch.int32), 0, 1)
    assert output.tolist() == [4, 4, 1, 7, 7, 7]


def test_fractions_stay() -> None:
    output = torch.empty(3)
    expand(output, torch.tensor([0.7, 1.3]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    assert output.tolist() == pytest.approx([0.7, 1.3, 1.3])
