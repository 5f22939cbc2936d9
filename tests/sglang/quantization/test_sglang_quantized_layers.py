"""A quantized layer that the operators cannot compute is refused by what the checkpoint says; so is one not loaded."""

from __future__ import annotations

import pytest
import torch
from single_layers import PREFIX, layer_of, linear, made

from quantized_checkpoints import (
    AWQ,
    CACHE_SCHEME,
    FP8_CONFIG,
    GPTQ,
    SCHEMES,
    TOKEN8,
    TOKEN_FP8,
    W4,
    compressed,
    whole,
)

TOKEN4 = {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}
SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}
REFUSED = {
    "gptq of 3 bits": ({**GPTQ, "bits": 3, "group_size": 32}, "'gptq' with 3 bits"),
    "gptq with zero points": ({**GPTQ, "bits": 4, "group_size": 32, "sym": False}, "'gptq' with zero points"),
    "gptq out of order": ({**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}, "'gptq' with desc_act in groups"),
    "awq without zero points": ({**AWQ, "zero_point": False}, "'awq' without zero points"),
    "fp8 of another checkpoint": ({"quant_method": "other", "activation_scheme": "dynamic"}, "that is not quantized"),
    "mxfp8": ({**FP8_CONFIG, "quant_method": "mxfp8"}, "'mxfp8'"),
    "fp8 in oblong blocks": ({**FP8_CONFIG, "weight_block_size": [1, 128]}, "blocks of 1 x 128"),
    "int4 for inputs of int4": (compressed("int-quantized", W4, TOKEN4), "weights of 4 bits .* for inputs of 4 bits"),
    "int4 for inputs of int8": (compressed("pack-quantized", W4, TOKEN8), "weights of 4 bits .* for inputs of 8 bits"),
    "columns in groups of their own": (
        compressed("pack-quantized", {**W4, "actorder": "group"}, None),
        "compressed-tensors with actorder 'group'",
    ),
    "sparse weights": (
        {**compressed("float-quantized", whole("float", "channel"), TOKEN_FP8), "sparsity_config": SPARSE},
        "sparse weights",
    ),
    "rotated inputs": (
        {
            **compressed("pack-quantized", {**W4, "group_size": 32}, None),
            "transform_config": {"config_groups": {"R4": {}}},
        },
        "'transform_config'",
    ),
    "layers in fp8 besides": (
        {**compressed("pack-quantized", {**W4, "group_size": 32}, None), "linear_fp8_config": FP8_CONFIG},
        "'linear_fp8_config'",
    ),
    "int8 for inputs of fp8": (
        compressed("int-quantized", whole("int", "channel"), {**whole("float", "token"), "dynamic": True}),
        "weights of 8 bits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_in_the_checkpoints_words(scheduler: None, name: str) -> None:
    config, said = REFUSED[name]
    with pytest.raises(ValueError, match=f"^sglang_fl does not support .*{said}.* yet(;|$)"):
        made(config).get_quant_method(linear(), PREFIX)


@pytest.mark.parametrize("order", [None, "static", "weight"])
def test_an_order_of_columns_that_is_the_checkpoints_own_is_served(scheduler: None, order: str | None) -> None:
    config = compressed("pack-quantized", {**W4, "actorder": order}, None)
    assert made(config).get_quant_method(linear(), PREFIX).scheme.fl_bits == 4


def test_a_cache_in_fp8_that_a_checkpoint_asks_for_has_its_scales(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from fl_dispatch.devices import ASCEND
    from sglang_fl.quantization import configs
    from sglang_fl.quantization.cache import CacheScales

    plain, attention = dict(SCHEMES["compressed-tensors W8A8 fp8"].config), layer_of(RadixAttention)
    assert made(plain).get_quant_method(attention, "attn") is None
    asking = made({**plain, "kv_cache_scheme": CACHE_SCHEME})
    assert isinstance(asking.get_quant_method(attention, "attn"), CacheScales)
    assert made({**plain, "kv_cache_scheme": {**CACHE_SCHEME, "num_bits": 4}}).get_quant_method(attention, "") is None
    monkeypatch.setattr(configs, "detect_device", lambda: ASCEND)
    with pytest.raises(ValueError, match="the KV cache in fp8 that the checkpoint asks for on ascend"):
        asking.get_quant_method(attention, "attn")


@pytest.mark.parametrize("scheme", [name for name, kind in SCHEMES.items() if kind.layer.startswith("Fp8")])
def test_fp8_is_refused_on_a_chip_without_it(scheduler: None, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch.devices import ASCEND
    from fl_dispatch.hosting.quantized import layers

    monkeypatch.setattr(layers, "detect_device", lambda: ASCEND)
    with pytest.raises(ValueError, match=rf"the weights of {PREFIX} \(ascend has no float8_e4m3fn\) yet"):
        made(dict(SCHEMES[scheme].config)).get_quant_method(linear(), PREFIX)


def test_a_quantized_head_is_refused_and_another_one_is_sglangs(scheduler: None) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    head, gptq = layer_of(ParallelLMHead), {**GPTQ, "bits": 4, "group_size": 32}
    assert made(gptq).get_quant_method(head, "lm_head") is None
    named = compressed("pack-quantized", W4, None)
    assert made({**named, "ignore": []}).get_quant_method(head, "lm_head") is None
    named["config_groups"]["group_0"]["targets"] = ["Linear", "re:.*lm_head"]
    for config in ({**gptq, "lm_head": True}, {**named, "ignore": []}):
        with pytest.raises(ValueError, match=r"does not support a quantized head \(lm_head\) yet"):
            made(config).get_quant_method(head, "lm_head")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_without_its_scales_is_not_computed(scheduler: None, scheme: str) -> None:
    layer = linear()
    method = made(dict(SCHEMES[scheme].config)).get_quant_method(layer, PREFIX)
    method.create_weights(layer, 128, [128], 128, 128, torch.float32, weight_loader=print)
    with pytest.raises(ValueError, match=rf"the checkpoint has no '\w*scale\w*' .* \({PREFIX}\)"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("scheme", "sizes", "said"),
    [
        ("gptq", (40, [64]), "no whole words of 4 bits, or no whole groups of 32"),
        ("awq", (64, [60]), "no whole words of 4 bits"),
        ("fp8, blocks of 128", (192, [256]), "no whole blocks of 128"),
    ],
)
def test_ranks_that_divide_no_whole_groups_are_refused(
    scheduler: None, scheme: str, sizes: tuple[int, list[int]], said: str
) -> None:
    layer, (inner, parts) = linear(), sizes
    method = made(dict(SCHEMES[scheme].config)).get_quant_method(layer, PREFIX)
    with pytest.raises(ValueError, match=said):
        method.create_weights(layer, inner, parts, 2 * inner, sum(parts), torch.float32, weight_loader=print)
