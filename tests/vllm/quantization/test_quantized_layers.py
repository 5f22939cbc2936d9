"""A quantized layer has the scales of its checkpoint, and one that the operators cannot compute is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from fl_dispatch.hosting.quantized import orders
from quantized_checkpoints import SCHEMES
from vllm_fl.quantization import kernels
from vllm_fl.quantization.configs import CompressedTensorsConfigFL, GPTQConfigFL

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def test_scales_that_are_neither_are_not_taken_for_some() -> None:
    assert orders.scale_of_columns(torch.ones(1), [4, 4]).shape == (8, 1)
    assert orders.scale_of_columns(torch.tensor([1.0, 2.0]), [1, 2]).flatten().tolist() == [1, 2, 2]
    with pytest.raises(ValueError, match="6 scales for 8 columns of 2 merged layers"):
        orders.scale_of_columns(torch.ones(2, 3), [4, 4])


@pytest.mark.parametrize(("shape", "fits"), [((64, 48), True), ((60, 48), False), ((64, 44), False)])
def test_packed_weights_fill_whole_words(shape: tuple[int, int], fits: bool) -> None:
    asked = SimpleNamespace(
        weight_type=scalar_types.uint4b8, partition_weight_shape=shape, group_size=-1, zero_points=False
    )
    assert kernels.PackedLayer.can_implement(asked)[0] == fits


def test_a_quantized_head_is_refused_by_name() -> None:
    head = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    GPTQConfigFL.from_config({**GPTQ, "lm_head": False}).get_quant_method(head, "lm_head")
    with pytest.raises(ValueError, match=r"vllm_fl does not support a quantized head \(lm_head\) yet"):
        GPTQConfigFL.from_config({**GPTQ, "lm_head": True}).get_quant_method(head, "lm_head")


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
