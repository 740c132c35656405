"""8-bit generation weights: how far they are from the weights, and what tells that they are codes."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from streamrl.weights.quantize import (
    CODE_TYPES,
    LIMITS,
    CodeKind,
    dequantize,
    full_precision,
    is_quantized,
    quantize,
    quantized,
    scales_of,
)
from streamrl.weights.version import CorruptWeights, Manifest, lay_out

KINDS: tuple[CodeKind, ...] = get_args(CodeKind)


def weights(rows: int = 64, columns: int = 96, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 3, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


def steps(tensor: torch.Tensor, scales: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Distance between the codes around each weight, in units of the weights (fp64)."""
    if kind == "int8":
        return scales.double()[:, None].expand(tensor.shape)
    # e4m3: 3 bits of mantissa, smallest normal exponent -6
    exponents = torch.floor(torch.log2((tensor.double() / scales.double()[:, None]).abs().clamp(min=2.0**-6)))
    return torch.exp2(exponents - 3) * scales.double()[:, None]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_at_most_half_a_step(kind: CodeKind) -> None:
    tensor = weights()
    codes, scales = quantize(tensor, kind)
    assert (codes.dtype, scales.dtype) == (CODE_TYPES[kind], torch.float32)
    error = (dequantize(codes, scales, torch.float64) - tensor.double()).abs()
    half = steps(tensor, scales, kind) / 2
    assert bool((error <= half * (1 + 1e-4)).all())  # scale and quotient are rounded to fp32
    assert float((error / half).max()) > 0.9
    # the largest of each row is kept to the rounding of the scale
    largest = tensor.abs().argmax(dim=1, keepdim=True)
    assert float((error / tensor.double().abs()).gather(1, largest).max()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_what_codes_can_stand_for_is_kept_exactly(kind: CodeKind) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(CODE_TYPES[kind])
    values = every.float()
    every = every[values.isfinite() & (values.abs() <= LIMITS[kind])]
    scales = torch.tensor([2.0**-10, 1.0, 2.0**7])  # whole powers of two: limit * scale / limit is exact
    tensor = every.float() * scales[:, None]
    codes, found = quantize(tensor, kind)
    assert torch.equal(found, scales)
    assert torch.equal(dequantize(codes, found, torch.float32), tensor)
    again, _ = quantize(dequantize(codes, found, torch.float32), kind)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


def test_ties_go_to_the_even_code() -> None:
    codes, scales = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8")
    assert float(scales[0]) == 1.0
    assert codes[0].tolist() == [127, 0, 2, 2, 0, -2]
    codes, scales = quantize(torch.tensor([[448.0, 17.0, 19.0, -17.0]]), "fp8")  # steps of 2 between 16 and 32
    assert float(scales[0]) == 1.0
    assert codes.float()[0].tolist() == [448.0, 16.0, 20.0, -16.0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_of_the_smallest_numbers_stay_so(kind: CodeKind) -> None:
    tensor = torch.zeros(3, 5)
    tensor[1] = 1e-44  # subnormal: its own absmax / limit would be 0
    tensor[2, 0] = -3.0
    codes, scales = quantize(tensor, kind)
    back = dequantize(codes, scales, torch.float32)
    assert bool((scales > 0).all()) and bool(back.isfinite().all())
    assert not back[0].any()
    assert float((back[1] - tensor[1]).abs().max()) < 1e-40
    assert back[2].tolist() == pytest.approx([-3.0, 0, 0, 0, 0])
    for empty in (torch.zeros(0, 4), torch.zeros(2, 0)):
        codes, scales = quantize(empty, kind)
        assert codes.shape == empty.shape and scales.shape == empty.shape[:1]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", KINDS)
def test_inf_and_nan_are_refused(kind: CodeKind, bad: float) -> None:
    tensor = weights()
    tensor[7, 3] = bad
    with pytest.raises(ValueError, match="inf or nan"):
        quantize(tensor, kind)
    with pytest.raises(ValueError, match="no rows"):
        quantize(tensor[0], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_rows_gives_that_part_of_the_codes(kind: CodeKind) -> None:
    tensor = weights()
    codes, scales = quantize(tensor, kind)
    for first, last in ((0, 1), (1, 38), (38, 64)):
        part, part_scales = quantize(tensor[first:last].clone(), kind)
        assert torch.equal(part.view(torch.uint8), codes[first:last].view(torch.uint8))
        assert torch.equal(part_scales, scales[first:last])


def test_linear_weights_are_quantized_and_nothing_else() -> None:
    layer = "model.layers.0."
    for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.gate_proj", "block_sparse_moe.experts.1.w2"):
        assert is_quantized(f"{layer}{name}.weight", (8, 4))
    assert is_quantized("lm_head.weight", (8, 4))  # untied: a tied one is the embedding, and has no name of its own
    assert not is_quantized(f"{layer}self_attn.q_proj.bias", (8,))
    assert not is_quantized(f"{layer}mlp.experts.gate_up_proj", (2, 8, 4))
    routers = (f"{layer}mlp.gate", f"{layer}mlp.gate.wg", f"{layer}ffn.router.layer")
    for name in ("model.embed_tokens", "transformer.wte", f"{layer}input_layernorm", *routers):
        assert not is_quantized(f"{name}.weight", (8, 4))


@pytest.mark.parametrize(
    ("kind", "router"),
    [
        ("qwen3", ""),
        ("olmoe", "mlp.gate"),
        ("granitemoe", "block_sparse_moe.router.layer"),
        ("longcat_flash", "mlp.router.classifier"),
    ],
)
def test_of_a_models_matrices_only_routers_and_embeddings_are_not_quantized(kind: str, router: str) -> None:
    layers = "num_layers" if kind == "longcat_flash" else "num_hidden_layers"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{layers: 1}))
    tensors = revert_weight_conversion(model, dict(model.named_parameters()))
    kept = {name for name, one in tensors.items() if one.ndim == 2 and not is_quantized(name, tuple(one.shape))}
    routers = {f"model.layers.0.{router}.weight"} if router else set()
    assert kept == {"model.embed_tokens.weight"} | routers


def version(kind: CodeKind) -> tuple[Manifest, np.ndarray]:
    codes, scales = quantize(weights(), kind)
    tensors = {"a.q_proj.weight": codes, "a.q_proj.weight.scale": scales, "norm.weight": torch.ones(5).bfloat16()}
    return lay_out(1, tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_tells_what_is_codes_and_gives_the_weights_back(kind: CodeKind) -> None:
    manifest, buffer = version(kind)
    assert scales_of(manifest) == {"a.q_proj.weight": "a.q_proj.weight.scale"}
    assert scales_of(Manifest.from_dict(manifest.to_dict())) == scales_of(manifest)
    back = dict(full_precision(manifest, buffer, torch.bfloat16))
    assert list(back) == ["a.q_proj.weight", "norm.weight"]
    assert torch.equal(back["a.q_proj.weight"], dequantize(*quantize(weights(), kind), torch.bfloat16))
    assert torch.equal(back["norm.weight"], torch.ones(5).bfloat16())


def test_a_version_that_is_not_quantized_comes_as_it_is() -> None:
    tensors = {"x.weight": weights(), "x.weight.scale": torch.ones(64)}  # a model may have such a name of its own
    back = dict(full_precision(*lay_out(1, tensors.items()), torch.float32))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("scales", [None, torch.ones(63), torch.ones(64).bfloat16()])
def test_codes_without_their_scales_are_refused(scales: torch.Tensor | None) -> None:
    tensors = {"a.weight": quantize(weights(), "fp8")[0]}
    if scales is not None:
        tensors["a.weight.scale"] = scales
    with pytest.raises(CorruptWeights, match=r"a\.weight"):
        scales_of(lay_out(1, tensors.items())[0])


def test_what_a_site_expects_follows_from_names_and_shapes() -> None:
    plain = {
        "model.embed_tokens.weight": ("bfloat16", (320, 64)),
        "model.layers.0.mlp.up_proj.weight": ("bfloat16", (128, 64)),
        "model.norm.weight": ("bfloat16", (64,)),
    }
    assert list(quantized(plain, "fp8").items()) == [
        ("model.embed_tokens.weight", ("bfloat16", (320, 64))),
        ("model.layers.0.mlp.up_proj.weight", ("float8_e4m3fn", (128, 64))),
        ("model.layers.0.mlp.up_proj.weight.scale", ("float32", (128,))),
        ("model.norm.weight", ("bfloat16", (64,))),
    ]
    assert quantized(plain, "int8")["model.layers.0.mlp.up_proj.weight"] == ("int8", (128, 64))
    with pytest.raises(ValueError, match=r"up_proj\.weight\.scale"):
        quantized(plain | {"model.layers.0.mlp.up_proj.weight.scale": ("bfloat16", (1,))}, "fp8")
