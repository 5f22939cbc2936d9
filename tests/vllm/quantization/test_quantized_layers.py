"""A quantized layer has the scales of its checkpoint, and one that the operators cannot compute is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, QuantKey
from vllm.platforms import PlatformEnum
from vllm.scalar_type import ScalarType, scalar_types

from fl_dispatch.hosting.loading.account import Account
from fl_dispatch.hosting.loading.allowed import UNTAKEN
from fl_dispatch.hosting.loading.refusals import refuse_left
from fl_dispatch.hosting.quantized import orders
from quantized_checkpoints import SCHEMES
from single_quantized import METHODS, PREFIX, QuantizedLayers
from vllm_fl import quantization
from vllm_fl.quantization import kernels
from vllm_fl.quantization.configs import CompressedTensorsConfigFL


class TestLayers(QuantizedLayers):
    METHODS = {**METHODS, "another": METHODS["torchao"].partition(", because")[0]}
    REFUSAL = (
        "vllm_fl does not support quantization '{method}' yet (only awq, gptq, compressed-tensors, fp8, mxfp4, "
        "auto-round, modelopt, quark); {works}"
    )

    def refusal(self, method: str) -> str:
        with pytest.raises(ValueError, match="does not support") as refused:
            quantization.verify(method)
        return str(refused.value)


def test_mxfp4_is_served_in_gpt_oss_only() -> None:
    with pytest.raises(ValueError, match="does not support") as refused:
        quantization.verify("mxfp4")
    assert str(refused.value) == (
        "vllm_fl does not support quantization 'mxfp4' of another model than gpt-oss yet; quantize with "
        "llm-compressor's scheme 'W4A16'"
    )


def test_scales_that_are_neither_are_not_taken_for_some() -> None:
    assert orders.scale_of_columns(torch.ones(1), [4, 4]).shape == (8, 1)
    assert orders.scale_of_columns(torch.tensor([1.0, 2.0]), [1, 2]).flatten().tolist() == [1, 2, 2]
    with pytest.raises(ValueError, match="6 scales for 8 columns of 2 merged layers"):
        orders.scale_of_columns(torch.ones(2, 3), [4, 4])


@pytest.mark.parametrize(("shape", "fits"), [((64, 48), True), ((60, 48), False), ((64, 44), False)])
def test_packed_weights_fill_whole_words(shape: tuple[int, int], fits: bool) -> None:
    assert kernels.PackedLayer.can_implement(_packed(shape=shape))[0] == fits


def _packed(
    weights: ScalarType = scalar_types.uint4b8,
    inputs: torch.dtype = torch.bfloat16,
    group: int = -1,
    zeros: bool = False,
    shape: tuple[int, int] = (64, 48),
) -> MPLinearLayerConfig:
    return MPLinearLayerConfig(shape, shape, weights, inputs, group, zeros)


def _float8(weights: QuantKey, inputs: QuantKey) -> FP8ScaledMMLinearLayerConfig:
    return FP8ScaledMMLinearLayerConfig(weights, inputs, (64, 64), torch.bfloat16, torch.bfloat16)


BLOCKS = GroupShape(128, 128), GroupShape(1, 128)
PRODUCTS: dict[str, tuple[Any, Any, str]] = {
    "int8, scale a row": (kernels.Int8Layer, Int8ScaledMMLinearLayerConfig(False, True, True), ""),
    "int8, scale of the checkpoint": (kernels.Int8Layer, Int8ScaledMMLinearLayerConfig(True, False, True), ""),
    "int8, inputs with zero points": (
        kernels.Int8Layer,
        Int8ScaledMMLinearLayerConfig(False, True, False),
        "weights of 8 bits (int, channel) for inputs of 8 bits (int, token, zero points)",
    ),
    "fp8": (kernels.Fp8Layer, _float8(keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym), ""),
    "fp8, scale of the checkpoint": (kernels.Fp8Layer, _float8(keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym), ""),
    "fp8 of another type": (
        kernels.Fp8Layer,
        _float8(*[QuantKey(torch.float8_e5m2, keys.kStaticTensorScale)] * 2),
        "weights of 8 bits (torch.float8_e5m2, tensor) for inputs of 8 bits (torch.float8_e5m2, tensor)",
    ),
    "fp8 in blocks": (kernels.Fp8BlockLayer, _float8(*map(keys.create_fp8_quant_key, (True, False), BLOCKS)), ""),
    "fp8 in blocks that are not square": (
        kernels.Fp8BlockLayer,
        _float8(*map(keys.create_fp8_quant_key, (True, False), (GroupShape(64, 128), BLOCKS[1]))),
        "weights of 8 bits (float, blocks of 64 x 128) for inputs of 8 bits (float, groups of 128)",
    ),
    "fp8 for inputs as they are": (
        kernels.Fp8WeightLayer,
        _float8(keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym),
        "",
    ),
    "4 bits, symmetric": (kernels.PackedLayer, _packed(group=32), ""),
    "4 bits, zero points": (kernels.PackedLayer, _packed(scalar_types.uint4, zeros=True), ""),
    "8 bits": (kernels.PackedLayer, _packed(scalar_types.uint8b128), ""),
    "2 bits": (kernels.PackedLayer, _packed(scalar_types.uint2b2), ""),
    "3 bits": (kernels.PackedLayer, _packed(scalar_types.uint3b4, shape=(64, 64)), ""),
    "4 bits of another type": (
        kernels.PackedLayer,
        _packed(scalar_types.float4_e2m1f),
        "weights of 4 bits (float4_e2m1f",
    ),
    "4 bits, inputs in fp8": (
        kernels.PackedLayer,
        _packed(inputs=torch.float8_e4m3fn),
        "weights of 4 bits (int, channel) for inputs of 8",
    ),
}
"""Kernel of ours, vLLM's configuration of a product, and the refused scheme; empty for one that is served."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_kernel_takes_the_schemes_that_are_served_and_refuses_others_in_the_one_sentence(name: str) -> None:
    kernel, asked, refused = PRODUCTS[name]
    takes, why = kernel.can_implement(asked)
    assert takes == (not refused), why
    if refused:
        assert why is not None
        assert why.startswith(f"vllm_fl does not support {refused}")


def test_a_kernel_refuses_the_kind_of_another() -> None:
    _, blocks, _ = PRODUCTS["fp8 in blocks"]
    assert kernels.Fp8Layer.can_implement(blocks) == (False, "multiplies fp8, not fp8 in blocks")


def test_packed_weights_have_a_kernel_of_ours_where_batches_are_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "pack-quantized"}
    given = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    scheme = CompressedTensorsConfigFL.from_config(given).get_scheme(layer, "model.layers.0.mlp.down_proj")
    assert type(scheme) is CompressedTensorsWNA16
    assert not scheme.use_batch_invariant


@pytest.mark.parametrize("given", [[0.25, 0.5, 0.125], [0.25]], ids=["apart", "merged by the checkpoint"])
@pytest.mark.parametrize("kind", ["qkv_proj", "gate_up_proj"])
def test_merged_layers_in_static_int8_have_each_the_scale_of_inputs_that_their_checkpoint_has(
    kind: str, given: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setitem(vllm_kernels._POSSIBLE_INT8_KERNELS, PlatformEnum.OOT, [kernels.Int8Layer])
    options: dict[str, Any] = {"bias": False, "disable_tp": True, "prefix": f"model.layers.0.mlp.{kind}"}
    options["quant_config"] = CompressedTensorsConfigFL.from_config(
        dict(SCHEMES["compressed-tensors W8A8 int8, static"].config)
    )
    with set_current_vllm_config(VllmConfig()):
        if kind == "qkv_proj":
            layer, parts = QKVParallelLinear(64, 16, 4, 2, **options), ["q", "k", "v"]
        else:
            layer, parts = MergedColumnParallelLinear(64, [48, 32], **options), [0, 1]
    whole = len(given) == 1
    for name in ("weight_scale", "input_scale"):
        held = getattr(layer, name)
        for part, scale in zip([None] if whole else parts, given, strict=False):
            layer.weight_loader_v2(held, torch.tensor([scale]), part)
    layer.weight.data.zero_()
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.input_scale.tolist() == given[: len(parts)]


def test_columns_of_gptq_out_of_order_are_refused_though_vllm_drops_what_says_so(tmp_path: Path) -> None:
    file, groups = tmp_path / "model.safetensors", (torch.arange(128) // 32).int()
    for order in (groups, groups.flip(0)):
        save_file({f"{PREFIX}.g_idx": order}, file)
        account = Account(nn.Module(), str(tmp_path))
        account.files.append(str(file))
        list(account.see([(f"{PREFIX}.g_idx", order)]))
        left = account.left(UNTAKEN)
        if order is groups:
            assert not left
    said = rf"'{PREFIX}.g_idx' of .* puts columns out of order, .* by GPTQModel with 'act_group_aware'"
    with pytest.raises(ValueError, match=said):
        refuse_left(account, left)
