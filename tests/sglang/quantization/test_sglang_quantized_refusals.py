"""Every sentence with which SGLang's plugin refuses a quantized checkpoint for what its configuration says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from single_layers import PREFIX, layer_of, linear, made

from quantized_checkpoints import AWQ, CACHE_SCHEME, GPTQ, SCHEMES, W4, compressed

GPTQ4 = {**GPTQ, "bits": 4, "group_size": 32}
SENTENCES: list[tuple[str, dict[str, Any]]] = [
    (
        "sglang_fl does not support 'gptq' with 3 bits yet; export with 4 or 8 bits",
        {**GPTQ4, "bits": 3},
    ),
    (
        "sglang_fl does not support 'gptq' with 2 bits yet; export with 4 or 8 bits",
        {**GPTQ4, "bits": 2},
    ),
    (
        (
            "sglang_fl does not support 'gptq' with zero points yet; export with 'sym': true, or as 'awq', "
            "which has zero points"
        ),
        {**GPTQ4, "sym": False},
    ),
    (
        (
            "sglang_fl does not support 'gptq' with desc_act in groups yet; export with 'desc_act': false, "
            "or by GPTQModel with 'act_group_aware', which keeps columns in place"
        ),
        {**GPTQ4, "desc_act": True},
    ),
    (
        "sglang_fl does not support 'awq' of version 'gemv' yet; export with version 'gemm'",
        {**AWQ, "version": "GEMV"},
    ),
    (
        (
            "sglang_fl does not support compressed-tensors with actorder 'group' yet; export with actorder "
            "'static', which keeps columns in place"
        ),
        compressed("pack-quantized", {**W4, "actorder": "group"}, None),
    ),
]


@pytest.mark.parametrize(("sentence", "config"), SENTENCES, ids=[sentence[25:60] for sentence, _ in SENTENCES])
def test_each_sentence_says_what_is_refused_and_what_works(
    scheduler: None, sentence: str, config: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="does not support") as refused:
        made(config).get_quant_method(linear(), PREFIX)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("method", "works"),
    [
        ("auto-round", "export with AutoRound's format 'auto_gptq' or 'auto_awq'"),
        ("fbgemm_fp8", "quantize with llm-compressor's scheme 'FP8_DYNAMIC'"),
        ("quark", "quantize with llm-compressor's scheme 'FP8_DYNAMIC' or 'W8A8'"),
        ("bitsandbytes", "quantize with llm-compressor's scheme 'W4A16'"),
    ],
)
def test_a_method_that_is_not_served_is_refused_with_what_works(scheduler: None, method: str, works: str) -> None:
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    from fl_dispatch.devices import CPU
    from sglang_fl import quantization
    from sglang_fl.platform import refusals

    quantization.announce()
    assert method in QUANTIZATION_METHODS  # else SGLang says that it does not know it
    of_model = SimpleNamespace(quantization_config={}, architectures=["LlamaForCausalLM"])
    model = SimpleNamespace(quantization=method, hf_config=of_model)
    found = refusals._quantized(SimpleNamespace(model_config=model, use_mla_backend=False), CPU)  # type: ignore[arg-type]
    assert next(sentence for refused, sentence in found if refused) == f"quantization '{method}' ({works})"


def test_a_scale_of_the_cache_for_each_head_is_refused(scheduler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_fl.quantization import configs

    plain = dict(SCHEMES["compressed-tensors W8A8 fp8"].config)
    config = made({**plain, "kv_cache_scheme": {**CACHE_SCHEME, "strategy": "attn_head"}})
    attention = layer_of(RadixAttention)
    assert config.get_quant_method(attention, "attn") is None  # a cache that is not quantized
    asked = type("Asked", (), {"kv_cache_dtype": "fp8_e4m3"})
    monkeypatch.setattr(configs, "get_server_args", lambda: asked)
    with pytest.raises(ValueError, match="does not support") as refused:
        config.get_quant_method(attention, "attn")
    assert str(refused.value) == (
        "sglang_fl does not support a KV cache in fp8 with a scale for each head ('kv_cache_scheme' with strategy "
        "'attn_head') (attn) yet; export with strategy 'tensor', or give --kv-cache-dtype bfloat16"
    )


@pytest.mark.parametrize("order", [torch.arange(128) // 32, (torch.arange(128) // 32).flip(0)], ids=["in", "out of"])
def test_columns_of_gptq_out_of_order_are_refused_when_they_are_loaded(scheduler: None, order: torch.Tensor) -> None:
    layer, taken = linear(), []
    method = made(GPTQ4).get_quant_method(layer, PREFIX)
    method.create_weights(layer, 128, [64], 128, 64, torch.float32, weight_loader=lambda *given: taken.append(given))
    load = layer.g_idx.weight_loader
    if order[0] == 0:
        load(layer.g_idx, order.int())
        assert len(taken) == 1
        return
    with pytest.raises(ValueError, match=rf"^'g_idx' of {PREFIX} puts columns out of order, .* 'desc_act' is false"):
        load(layer.g_idx, order.int())
