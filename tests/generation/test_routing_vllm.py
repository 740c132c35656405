"""Experts and activations that vLLM would compute otherwise on a CPU: as transformers does.

What imports vLLM is imported in the tests: all of pytest's workers collect this file, and one of them runs it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Ernie4_5_MoeConfig, MiniMaxM2Config
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

TOKENS, EXPERTS, SIZE, CHOSEN = 50, 16, 24, 3


def biased_router(family: str) -> tuple[Any, torch.Tensor]:
    """A family's router in transformers with a bias that changes the choice, and the bias."""
    torch.manual_seed(0)
    bias = 0.3 * torch.randn(EXPERTS)
    if family == "ERNIE 4.5":
        values = {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "hidden_size": SIZE}
        router: Any = Ernie4_5_MoeTopKRouter(Ernie4_5_MoeConfig(**values))
        router.moe_statics.e_score_correction_bias.data[0] = bias
        forward = router
    else:
        values = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "hidden_size": SIZE}
        router = MiniMaxM2TopKRouter(MiniMaxM2Config(**values))
        forward = lambda x: router(x, bias)  # noqa: E731
    torch.nn.init.normal_(router.weight)
    return forward, bias


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of all experts, [tokens, experts]: the order in which a token's experts come does not matter."""
    return torch.zeros(TOKENS, EXPERTS).scatter(1, ids.long(), weights)


@pytest.mark.parametrize(("family", "scores"), [("ERNIE 4.5", "softmax"), ("MiniMax M2", "sigmoid")])
def test_a_bias_chooses_experts_without_groups_as_in_transformers(family: str, scores: str) -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from streamrl.generation.instance.routing_vllm import compute_routing

    forward, bias = biased_router(family)
    hidden = torch.randn(TOKENS, SIZE)
    logits, weights, ids = forward(hidden)
    router = CPURouter(CHOSEN, EXPERTS, scoring_func=scores, e_score_correction_bias=bias)
    ours = compute_routing(router, hidden, logits, None)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == torch.int32
    torch.testing.assert_close(by_expert(*ours), by_expert(weights, ids))
    unbiased = CPURouter(CHOSEN, EXPERTS, scoring_func=scores, e_score_correction_bias=0 * bias)
    assert not torch.equal(by_expert(*ours), by_expert(*compute_routing(unbiased, hidden, logits, None)))


def test_weights_have_their_factor_and_need_not_add_up() -> None:
    from streamrl.generation.instance.routing_vllm import chosen_experts

    logits = torch.randn(TOKENS, EXPERTS)
    weights, ids = chosen_experts(logits, CHOSEN, "softmax", False, 2.5, None)
    torch.testing.assert_close(weights, 2.5 * logits.softmax(-1).gather(1, ids.long()))
    torch.testing.assert_close(
        chosen_experts(logits, CHOSEN, "sigmoid", True, 2.5, None)[0].sum(1), torch.tensor(2.5).expand(TOKENS)
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
        {
            "scoring_func": "sigmoid",
            "custom_routing_function": lambda **all: (torch.ones(TOKENS, 1), torch.ones(TOKENS, 1)),
        },
    ],
    ids=["softmax", "groups", "a model's own"],
)
def test_what_vllm_computes_right_is_left_to_it(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from streamrl.generation.instance import routing_vllm

    monkeypatch.setattr(routing_vllm, "chosen_experts", None)
    logits = torch.randn(TOKENS, EXPERTS)
    assert (
        routing_vllm.compute_routing(CPURouter(CHOSEN, EXPERTS, **values), logits, logits, None)[1].dtype == torch.int32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_xielu_have_the_models_type(dtype: torch.dtype) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import XIELU
    from vllm.utils.torch_utils import set_default_torch_dtype

    from streamrl.generation.instance import xielu_vllm

    plain, made = SimpleNamespace(), XIELU.__init__
    try:
        xielu_vllm.install()
        with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(dtype):
            plain = XIELU()
    finally:
        XIELU.__init__ = made  # type: ignore[method-assign]
    assert {value.dtype for value in plain.state_dict().values()} == {dtype}
