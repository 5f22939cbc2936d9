"""Parts of engines on an NVIDIA GPU that a CPU can run; ``tests/gpu`` has the engines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from single_layers import asked_of_sglang, made, mixture
from torch import nn

from fl_dispatch import SelectionPolicy, get_default_manager, policy_context
from fl_dispatch.devices import CUDA
from fl_dispatch.settings import get_settings
from quantized_checkpoints import AWQ, GPTQ, SCHEMES
from single_quantized import load

pytestmark = pytest.mark.usefixtures("scheduler")


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("config", [AWQ, {**GPTQ, "bits": 4, "group_size": 128}], ids=["awq", "gptq"])
def test_sglang_takes_no_method_of_its_own_for_a_checkpoint_of_ours(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``ModelConfig`` asks each class of the list, and on an NVIDIA GPU one for Marlin's kernels says yes."""
    from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.gptq import gptq

    monkeypatch.setattr(awq, "_is_cuda", True)
    for module in (awq, gptq):
        monkeypatch.setattr(module, "check_marlin_supported", lambda **_: True)

    def taken(methods: Any) -> list[str]:
        found = (each.override_quantization_method(config, None) for each in methods.values())
        return [name for name in found if name]

    assert taken(BASE_QUANTIZATION_METHODS) == [f"{config['quant_method']}_marlin"]
    assert taken(QUANTIZATION_METHODS) == []


def test_quantized_experts_wait_for_nothing_where_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl.quantization import configs

    monkeypatch.setattr(configs, "detect_device", lambda: CUDA)
    refused = "quantized experts on cuda where their references, which wait for it, come first"
    with policy_context(SelectionPolicy.from_dict(prefer="reference")), pytest.raises(ValueError, match=refused):
        mixture(AWQ)
    monkeypatch.setattr(configs, "without_graphs", lambda operators: [])
    assert mixture(AWQ).quant_method.kind.fl_operator == "weight_only_moe"


def test_experts_that_nobody_computes_are_refused_when_they_are_loaded() -> None:
    layer = mixture(AWQ)
    load(layer, "awq")
    nobody = SelectionPolicy.from_dict(per_op_order={"weight_only_moe": ["flagos"]}, strict=True)
    with (
        policy_context(nobody),
        pytest.raises(ValueError, match=r"does not support these experts \(.*: .*experts\) yet"),
    ):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("device", [CUDA, replace(CUDA, float8=False)], ids=["with fp8", "without"])
def test_a_cache_in_fp8_is_served_where_the_device_has_fp8(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_fl.platform import refusals
    from sglang_fl.quantization import configs

    monkeypatch.setattr(configs, "detect_device", lambda: device)
    asking = made({**dict(SCHEMES["compressed-tensors W8A8 fp8"].config), "kv_cache_scheme": {"num_bits": 8}})
    monkeypatch.setattr(type(asking), "fl_quantizes_cache", lambda self: True)
    attention, asked = object.__new__(RadixAttention), asked_of_sglang({"kv_cache_dtype": "fp8_e4m3"})
    if device.float8:
        refusals.refuse_unsupported(asked, device)
        assert asking.get_quant_method(attention, "attn") is not None
        return
    with pytest.raises(ValueError, match="a KV cache of type fp8_e4m3 on cuda yet"):
        refusals.refuse_unsupported(asked, device)
    with pytest.raises(ValueError, match="the KV cache in fp8 that the checkpoint asks for on cuda"):
        asking.get_quant_method(attention, "attn")


@pytest.mark.parametrize(("ranks", "left"), [(1, ()), (2, ()), (2, ("RMSNorm",))])
def test_sums_and_norms_are_no_kernel_of_sglangs_where_norms_are_ours(
    ranks: int, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes that kernel by itself for some models on several GPUs."""
    from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

    from sglang_fl.platform import config

    settings = replace(get_settings(), oot_blacklist=frozenset(left))
    monkeypatch.setattr(config, "get_settings", lambda: settings)
    asked = asked_of_sglang({"tp_size": ranks, "cuda_graph_config": default_cuda_graph_config()})
    config.apply_defaults(asked, CUDA)
    assert asked.enforce_disable_flashinfer_allreduce_fusion == (ranks > 1 and not left)


def test_warming_up_multiplies_by_each_kind_of_weight_once_for_each_size() -> None:
    from sglang.srt.layers.linear import ReplicatedLinear

    from sglang_fl.graphs.product_warm_up import warm_up
    from sglang_fl.layers import classes

    experts = {name: mixture(SCHEMES[name].config) for name in ("awq", "compressed-tensors W8A8 int8")}
    for name, layer in experts.items():
        load(layer, name)
        layer.quant_method.process_weights_after_loading(layer)
    dense = [ReplicatedLinear(64, 32, params_dtype=torch.float32, quant_config=made(AWQ)) for _ in range(2)]
    for linear in dense:
        linear.scales.data.fill_(1.0)
        linear.quant_method.process_weights_after_loading(linear)
    blocks = [nn.ModuleDict({"experts": layer, "linear": linear}) for layer in experts.values() for linear in dense]
    plain = [ReplicatedLinear(64, 32, bias=biased, params_dtype=torch.float32) for biased in (True, True)]
    plain.append(ReplicatedLinear(64, 32, params_dtype=torch.bfloat16))  # as a router has another type than its model
    model = nn.ModuleList([*blocks, *plain])
    classes.prepare(model)
    manager = get_default_manager()
    manager.set_counting(True)
    manager.reset_counts()
    calls = warm_up(model, 20, torch.float32)
    counts = {op: count for (op, _), count in manager.call_counts().items() if count}
    manager.set_counting(False)
    sizes = [1, 2, 4, 8, 16, 20]
    assert calls == 7 * len(sizes)
    assert counts["linear"] == 4 * len(sizes)  # two kinds of layers; ranks but the first pass no bias
    assert counts["weight_only_moe"] == counts["scaled_moe"] == counts["weight_only_linear"] == len(sizes)


@pytest.mark.parametrize("left", [(), ("RMSNorm",)], ids=["ours", "SGLang's"])
def test_a_predictors_norms_are_operators_unless_norms_are_sglangs(
    left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_fl.compat import native_kernels

    settings = replace(get_settings(), oot_blacklist=frozenset(left))
    monkeypatch.setattr(native_kernels, "get_settings", lambda: settings)
    embeddings, hidden = torch.randn(2, 3, 8).unbind()
    weights = torch.randn(2, 8).unbind()
    called: list[Any] = []
    found = native_kernels.norm_drafters_inputs(lambda *given: called.append(given), embeddings, hidden, *weights, 1e-6)
    assert len(called) == len(left)
    if not left:
        pairs = zip((embeddings, hidden), weights, strict=True)
        expected = [nn.functional.rms_norm(x, (8,), weight, 1e-6) for x, weight in pairs]
        torch.testing.assert_close(found, torch.cat(expected, dim=-1))


@pytest.mark.parametrize(
    ("left", "called"),
    [((), "by layers"), (("GemmaRMSNorm",), "by layers"), (("GemmaRMSNorm", "RotaryEmbedding"), "fused")],
    ids=["ours", "SGLang's norm", "SGLang's"],
)
def test_layers_prepare_qwen3_5s_attention_unless_norm_and_rotation_are_sglangs(
    left: tuple[str, ...], called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_fl.compat import native_kernels

    settings = replace(get_settings(), oot_blacklist=frozenset(left))
    monkeypatch.setattr(native_kernels, "get_settings", lambda: settings)
    layer = SimpleNamespace(forward_prepare_native=lambda *given: ("by layers", *given))
    found = native_kernels.prepare_attention(lambda *given: ("fused", *given[1:]), layer, torch.ones(1), torch.ones(2))
    assert found[0] == called
    assert [len(one) for one in found[1:]] == [1, 2]


@pytest.mark.parametrize("left", [(), ("RadixLinearAttention",)], ids=["ours", "SGLang's"])
def test_projections_of_a_delta_net_are_split_before_our_layer(
    left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise Qwen3.5 gives both projections of a decoding step to a kernel that splits and convolves them."""
    from sglang.srt import environ

    from sglang_fl.compat import state_forms

    name = state_forms.SPLITS_AND_CONVOLVES
    kernel = getattr(environ.envs, name)
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(state_forms, "get_settings", lambda: replace(get_settings(), oot_blacklist=frozenset(left)))
    for _ in range(2):
        state_forms.prepare_models()
    assert kernel.get() == bool(left)
    assert caplog.text.count(f"{name} has no effect") == (not left)
    monkeypatch.setattr(environ, "envs", object())
    state_forms.prepare_models()  # a version without this kernel starts
