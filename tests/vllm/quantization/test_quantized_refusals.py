"""Every sentence with which vLLM's plugin refuses a quantized checkpoint for what its configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase

from fl_dispatch.hosting.loading.account import Account
from fl_dispatch.hosting.loading.allowed import UNTAKEN
from fl_dispatch.hosting.loading.refusals import refuse_left
from quantized_checkpoints import AWQ, CACHE_SCHEME, GPTQ, W4, compressed
from vllm_fl import quantization
from vllm_fl.quantization.configs import CONFIGS

METHODS = {
    "auto-round": "export with AutoRound's format 'auto_gptq' or 'auto_awq'",
    "inc": "export with AutoRound's format 'auto_gptq' or 'auto_awq'",
    "fbgemm_fp8": "quantize with llm-compressor's scheme 'FP8_DYNAMIC'",
    "modelopt": "quantize with llm-compressor's scheme 'FP8_DYNAMIC' or 'W8A8'",
    "bitsandbytes": "quantize with llm-compressor's scheme 'W4A16'",
    "another": "quantize with llm-compressor's scheme 'FP8_DYNAMIC' or 'W8A8', or 'W4A16'",
}
GPTQ4 = {**GPTQ, "bits": 4, "group_size": 32}
PACKED = compressed("pack-quantized", W4, None)
LAYER = "model.layers.0"
MLP, ATTENTION = f"{LAYER}.mlp.gate_up_proj", f"{LAYER}.self_attn.attn"
SENTENCES: list[tuple[str, dict[str, Any], str]] = [
    (
        "vllm_fl does not support 'gptq' with 3 bits yet; export with 4 or 8 bits",
        {**GPTQ4, "bits": 3},
        MLP,
    ),
    (
        "vllm_fl does not support 'gptq' with 2 bits yet; export with 4 or 8 bits",
        {**GPTQ4, "bits": 2},
        MLP,
    ),
    (
        (
            "vllm_fl does not support 'gptq' with zero points yet; export with 'sym': true, or as 'awq', which has "
            "zero points"
        ),
        {**GPTQ4, "sym": False},
        MLP,
    ),
    (
        (
            "vllm_fl does not support 'gptq' with desc_act in groups yet; export with 'desc_act': false, or by "
            "GPTQModel with 'act_group_aware', which keeps columns in place"
        ),
        {**GPTQ4, "desc_act": True},
        MLP,
    ),
    (
        "vllm_fl does not support 'awq' of version 'gemv' yet; export with version 'gemm'",
        {**AWQ, "version": "GEMV"},
        MLP,
    ),
    (
        (
            "vllm_fl does not support one layer with parts that the checkpoint quantizes in different ways (gate_proj "
            f"not quantized, up_proj quantized; {MLP}) yet"
        ),
        {**AWQ, "modules_to_not_convert": ["gate"]},
        MLP,
    ),
    (
        (
            "vllm_fl does not support compressed-tensors with actorder 'group' yet; export with actorder 'static', "
            "which keeps columns in place"
        ),
        compressed("pack-quantized", {**W4, "actorder": "group"}, None),
        MLP,
    ),
    (
        (
            "vllm_fl does not support a KV cache in fp8 with a scale for each head ('kv_cache_scheme' with strategy "
            f"'attn_head') ({ATTENTION}) yet; export with strategy 'tensor', or give --kv-cache-dtype bfloat16"
        ),
        {**PACKED, "kv_cache_scheme": {**CACHE_SCHEME, "strategy": "attn_head"}},
        ATTENTION,
    ),
]
VLLMS = {"gptq": "auto_gptq", "awq": "auto_awq"}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_not_served_is_refused_with_what_works(method: str) -> None:
    with pytest.raises(ValueError, match="does not support") as refused:
        quantization.verify(method)
    known = "awq, gptq, compressed-tensors, fp8"
    assert str(refused.value) == (
        f"vllm_fl does not support quantization '{method}' yet (only {known}); {METHODS[method]}"
    )


@pytest.mark.parametrize(
    ("sentence", "config", "prefix"), SENTENCES, ids=[sentence[23:60] for sentence, *_ in SENTENCES]
)
def test_each_sentence_says_what_is_refused_and_what_works(sentence: str, config: dict[str, Any], prefix: str) -> None:
    kind = Attention if prefix == ATTENTION else LinearBase
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.kv_cache_dtype = "fp8"
    with pytest.raises(ValueError, match="does not support") as refused:
        made: Any = CONFIGS[VLLMS.get(config["quant_method"], config["quant_method"])].from_config(dict(config))
        made.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
        made.get_quant_method(layer, prefix)
    assert str(refused.value) == sentence


def test_a_checkpoint_with_a_scale_a_head_is_served_with_a_cache_that_is_not_quantized() -> None:
    layer: Any = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    layer.kv_cache_dtype = "bfloat16"
    config = {**PACKED, "kv_cache_scheme": {**CACHE_SCHEME, "strategy": "attn_head"}}
    made: Any = CONFIGS["compressed-tensors"].from_config(config)
    assert made.get_quant_method(layer, ATTENTION) is not None


def test_columns_of_gptq_out_of_order_are_refused_though_vllm_drops_what_says_so(tmp_path: Path) -> None:
    file, groups = tmp_path / "model.safetensors", (torch.arange(128) // 32).int()
    for order in (groups, groups.flip(0)):
        save_file({f"{MLP}.g_idx": order}, file)
        account = Account(nn.Module(), str(tmp_path))
        account.files.append(str(file))
        list(account.see([(f"{MLP}.g_idx", order)]))
        left = account.left(UNTAKEN)
        if order is groups:
            assert not left
    said = rf"'{MLP}.g_idx' of .* puts columns out of order, .* by GPTQModel with 'act_group_aware'"
    with pytest.raises(ValueError, match=said):
        refuse_left(account, left)
