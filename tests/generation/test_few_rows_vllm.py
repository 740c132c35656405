"""What computes in vLLM on a CPU: products for a few rows, which new weights reach; norms; latent attention; and how
many tokens a step has.

What imports vLLM is imported in the tests: all of pytest's workers collect this file, and one of them runs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance import engine_config, few_rows, layer_ops
from streamrl.generation.instance.engine_config import CPU_HEAD_SIZES, _is_tried
from streamrl.generation.instance.engine_variables import EAGER, FEW_ROWS, NORMS
from streamrl.generation.instance.few_rows import Shelf, products
from streamrl.generation.instance.vllm_plugin import register
from streamrl.machine.cpu import this_cpu
from streamrl.machine.engine_settings import EngineSettings
from streamrl.training.small_config import small_config
from streamrl.verify.families import FAMILIES
from tests.tiny_model import save_tiny_model

TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["linear", "head"])
def test_a_layer_takes_few_row_kernels_for_a_few_rows_and_follows_new_weights(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from streamrl.generation.instance import few_rows_vllm

    current_platform.import_kernels()
    found = products(dtype)
    most = 0 if found is None else found.most_rows
    assert most or (dtype == torch.bfloat16 and "avx512_bf16" not in this_cpu().flags)
    rows: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(len(x))
        return few_rows.OPERATION(x, weight, bias)

    monkeypatch.setattr(few_rows_vllm, "OPERATION", counted)
    layer = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()):
        method = {"linear": few_rows_vllm._Linear, "head": few_rows_vllm._Head}[kind](Shelf())
    copies = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        weight, bias, x = (torch.randn(size).to(dtype) for size in ((64, 96), (64,), (most + 1, 96)))
        if seed == 0 or kind == "linear":
            layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        else:
            layer.weight.data.copy_(weight)  # the embedding's, which stays in its place
        layer.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
        method.process_weights_after_loading(layer)
        copies.append(layer.few_rows_weight.data_ptr() if most else 0)
        for count in sorted({1, most or 1, most + 1}):
            want = (x[:count].double() @ weight.double().T + bias.double()).to(dtype)
            torch.testing.assert_close(method.apply(layer, x[:count], layer.bias), want)
    assert set(rows) == ({1, most} if most else set())
    assert copies[0] == copies[1]  # no memory more with each version


@pytest.mark.parametrize("dtype", TYPES)
def test_what_does_not_fit_is_left_to_vllm(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from streamrl.generation.instance import few_rows_vllm

    current_platform.import_kernels()
    layer = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()):
        method = few_rows_vllm._Linear(Shelf(most=4))
    weight, x = torch.randn(64, 96).to(dtype), torch.randn(1, 96).to(dtype)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    method.process_weights_after_loading(layer)
    assert getattr(layer, "few_rows_weight", None) is None
    torch.testing.assert_close(method.apply(layer, x), (x.double() @ weight.double().T).to(dtype))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.generation.instance import layer_ops_vllm

    monkeypatch.setattr(layer_ops_vllm, "library", lambda: None)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 40), (64, 576)])
def test_norms_without_a_compiler_are_those_of_transformers_to_the_bit(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    from vllm.platforms import current_platform

    from streamrl.generation.instance.layer_ops_vllm import fused_add_rms_norm, rms_norm

    current_platform.import_kernels()
    torch.manual_seed(0)
    x, residual = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
    theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    torch.nn.init.uniform_(theirs.weight, 0.5, 1.5)
    weight = theirs.weight.detach()
    like = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}  # sums in another order
    torch.testing.assert_close(rms_norm.impl_fn(x, weight, 1e-5), theirs(x).detach(), **like)
    both = x + residual
    given = x.clone(), residual.clone()
    normed, carried = fused_add_rms_norm.impl_fn(*given, weight, 1e-5)
    assert torch.equal(carried, both)
    torch.testing.assert_close(normed, theirs(both).detach(), **like)
    one = theirs.weight.detach().fill_(1.0)
    assert torch.equal(rms_norm.impl_fn(x, None, 1e-5), rms_norm.impl_fn(x, one, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_gates_are_those_of_layer_ops(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    from streamrl.generation.instance import layer_ops_vllm

    monkeypatch.setattr(SiluAndMul, "forward_cpu", SiluAndMul.forward_cpu)  # so that it is put back
    layer_ops_vllm.install()
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        gate = SiluAndMul()
    x, residual, weight = (torch.randn(size).to(dtype) for size in ((3, 100), (3, 100), (100,)))
    assert torch.equal(gate(x), layer_ops.gate(x))
    torch.testing.assert_close(gate(x.T.contiguous().T), layer_ops.gate(x))  # vLLM's own
    assert torch.equal(layer_ops_vllm.rms_norm.impl_fn(x, weight, 1e-5), layer_ops.norm(x, weight, 1e-5))
    given, expected = (x.clone(), residual.clone()), (x.clone(), residual.clone())
    normed, carried = layer_ops_vllm.fused_add_rms_norm.impl_fn(*given, weight, 1e-5)
    layer_ops.add_and_norm_(*expected, weight, 1e-5)
    assert normed is given[0] and carried is given[1]
    assert torch.equal(normed, expected[0]) and torch.equal(carried, expected[1])


def test_norms_that_do_not_fit_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.generation.instance import layer_ops_vllm
    from streamrl.generation.instance.layer_ops_vllm import fused_add_rms_norm, rms_norm

    x, weight = torch.randn(3, 64), torch.randn(64)
    assert rms_norm.supports_args(x, weight, 1e-5) and fused_add_rms_norm.supports_args(x, x, weight, 1e-5)
    assert rms_norm.supports_args(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert not rms_norm.supports_args(x, weight, 1e-5, 8)
    assert not rms_norm.supports_args(x.bfloat16(), weight, 1e-5)
    assert not rms_norm.supports_args(x.half(), weight.half(), 1e-5)
    assert not rms_norm.supports_args(torch.randn(8, 16).T, weight[:8], 1e-5)
    assert rms_norm.supports_args(torch.randn(3, 100), torch.randn(100), 1e-5)
    monkeypatch.setattr(layer_ops_vllm, "library", lambda: None)
    assert not rms_norm.supports_args(torch.randn(3, 100), torch.randn(100), 1e-5)  # vLLM's functions refuse it
    assert not fused_add_rms_norm.supports_args(x.bfloat16(), x, weight.bfloat16(), 1e-5)
    assert not fused_add_rms_norm.supports_args(x, torch.randn(64, 3).T, weight, 1e-5)


def test_an_engine_of_another_type_may_have_come_before_in_a_process(tmp_path: Path) -> None:
    model, pool = save_tiny_model(tmp_path / "model", seed=0), GenerationPool(max_batch=2, kv_cache_gb=0.05)
    found = []
    for dtype in ("bfloat16", "float32", "bfloat16"):
        values = {"path": str(model), "max_context": 128, "dtype": dtype}
        run = RunConfig.model_validate({"model": values, "sampling": {"max_tokens": 24}})
        config = engine_config.engine_config(pool, run, cuda=False)
        norms = config.kernel_config.ir_op_priority.rms_norm
        found.append((config.model_config.quantization, norms))
    assert found == [(FEW_ROWS, [NORMS, "native"])] * 3


def test_a_step_takes_vllms_default_of_tokens_and_no_fewer_than_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    defaults = {UsageContext.OPENAI_API_SERVER: 8192}, {}  # those of an H100
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", lambda *_: defaults)
    values = {"path": str(save_tiny_model(tmp_path / "model", seed=0)), "max_context": 512, "dtype": "float32"}
    run = RunConfig.model_validate({"model": values, "sampling": {"max_tokens": 24}})

    def tokens(cuda: bool, batch: int) -> int:
        pool = GenerationPool(max_batch=batch, kv_cache_gb=0.05)
        made = engine_config.engine_config(pool, run, cuda, settings=None if cuda else EngineSettings())
        return made.scheduler_config.max_num_batched_tokens

    assert [tokens(True, batch) for batch in (64, 4096, 9000)] == [8192, 8192, 9000]
    assert [tokens(False, batch) for batch in (64, 9000)] == [4096, 9000]


def test_every_head_of_latent_attention_is_rotated(tmp_path: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    save_tiny_model(tmp_path)
    small_config(FAMILIES["DeepSeek-V3"]()).save_pretrained(tmp_path)
    values = {"path": str(tmp_path), "max_context": 64, "dtype": "float32"}
    run = RunConfig.model_validate({"model": values, "sampling": {"max_tokens": 24}})
    pool = GenerationPool(max_batch=2, kv_cache_gb=0.05)
    with set_current_vllm_config(engine_config.engine_config(pool, run, cuda=False, settings=EngineSettings())):
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        rope = get_rope(64, max_position=64, rope_parameters=parameters, is_neox_style=False, dtype=torch.float32)
    angles = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    query, key = torch.randn(6, 4, 96)[..., 32:], torch.randn(6, 1, 64)
    pairs = torch.view_as_complex(query.contiguous().unflatten(-1, (-1, 2)))
    want = torch.view_as_real(pairs * torch.exp(1j * angles)[:, None]).flatten(-2)
    torch.testing.assert_close(rope(torch.arange(6), query, key)[0], want, rtol=1e-5, atol=1e-5)


def test_what_is_compiled_is_compiled_again_for_an_engine_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    for eager in ("1", "0"):
        monkeypatch.setenv(EAGER, eager)
        register()
    monkeypatch.delenv(EAGER)
    register()
    assert stances == ["force_eager", "default"]


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_kernel_that_refuses_amx_leaves_vllm_without_it(is_granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: is_granted)
    monkeypatch.setenv(EAGER, "0")
    register()
    assert torch.cpu._is_amx_tile_supported() == is_granted


def test_an_engine_of_a_cpu_looks_at_a_models_class_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # so that it is put back
    monkeypatch.setenv(EAGER, "0")
    register()
    assert registry._run_in_subprocess(os.getpid) == os.getpid()


def test_kernels_that_a_cpu_has_not_are_replaced_wherever_vllm_holds_them_and_looked_for_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.triton_utils import dispatcher

    names = "vllm.defines", "vllm.v1.copies", "streamrl.copies", "vllm_or_another.copies", "torch_copies"
    kernel, (defines, *others) = object(), map(ModuleType, names)
    for module in (defines, *others):
        module.kernel = kernel
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatcher, "_registry", {})
    monkeypatch.setattr(dispatcher, "_kernel_arg_names", lambda kernel: ())
    monkeypatch.setattr(dispatcher, "sys", sys)  # so that it is put back
    monkeypatch.setenv(EAGER, "0")
    register()
    dispatcher.register_kernels({"vllm.defines.kernel": print})
    replaced = [isinstance(module.kernel, dispatcher.KernelOverride) for module in (defines, *others)]
    assert replaced == [True, True, True, False, False]


def test_few_row_kernels_serve_known_models_that_are_not_quantised(tmp_path: Path) -> None:
    assert not _is_tried(tmp_path)  # nothing is known of the model
    for architectures, is_known in (
        (["MixtralForCausalLM"], False),
        (["LlamaForCausalLM"], True),
        (["Qwen2ForCausalLM"], True),
        ([], False),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
        assert _is_tried(tmp_path) == is_known
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "quantization_config": {}}')
    assert not _is_tried(tmp_path)


def test_launches_know_the_heads_that_vllm_has_on_cpus() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES
